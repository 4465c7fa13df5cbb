"""What there is: `starfish methods`, `pruners` and `models`, and of the machine `starfish doctor`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from starfish.cli.options import Json
from starfish.console import emit, say, table
from starfish.errors import UserError
from starfish.views import show_stages


def methods(json: Json = False) -> None:
    """List what can heal, with every setting."""
    from starfish.methods import METHODS, summary

    show_stages({name: (method, summary(method)) for name, method in METHODS.items()}, json)


def pruners(json: Json = False) -> None:
    """List what can choose masks, with every setting."""
    from starfish.pruners import PRUNERS, summary

    show_stages({name: (pruner, summary(pruner)) for name, pruner in PRUNERS.items()}, json)


def models(
    search: Annotated[str, typer.Argument(help="Part of a name.")] = "",
    json: Json = False,
) -> None:
    """Say what a MODEL can be, or list the timm and torchvision models whose name contains SEARCH."""
    from starfish.models import KINDS, known

    if not search:
        emit({"kinds": KINDS}) if json else table(("MODEL", ""), list(KINDS.items()))
        return
    names = known(search)
    if not names:
        raise UserError(f"no timm or torchvision model has `{search}` in its name")
    emit({"models": names}) if json else table(("MODEL",), [(name,) for name in names])


def doctor(json: Json = False) -> None:
    """Check that this machine can heal, and say what to install where it cannot."""
    from starfish.doctor import examine

    findings = examine()
    if json:
        emit({"ok": all(finding.ok for finding in findings), "checks": [asdict(finding) for finding in findings]})
    else:
        table(("check", "", "found"), [(f.name, "ok" if f.ok else "BAD", f.found) for f in findings])
        for finding in findings:
            if not finding.ok and finding.hint:
                say(f"hint: {finding.name}: {finding.hint}")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(2)
