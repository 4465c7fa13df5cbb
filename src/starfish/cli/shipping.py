"""`starfish slim` and `starfish export`: from a finished run to what is put on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from starfish.cli.options import Json
from starfish.console import emit, say, watch
from starfish.errors import UserError, listed
from starfish.views import show_speed

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A folder that `starfish heal` or `slim` has written.")]


def slim(
    run: RunFolder,
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder of the smaller model.")],
    json: Json = False,
) -> None:
    """Cut out the units that are gone whole: a smaller and faster model that gives the same answers."""
    from starfish.runs import slimming

    result = watch(slimming(run, output))
    if json:
        emit(result)
        return
    show_speed(result["speed"])
    far = result["slim"]["disagreement"]
    say(f'same answers up to {far:.0e} of the largest logit; starfish.load("{output}") gives the model')


def export(
    run: RunFolder,
    to: Annotated[str, typer.Option(help="onnx, safetensors")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file.")],
    json: Json = False,
) -> None:
    """Write a run's model as one file that other programs run; whole units that are gone are cut out first."""
    from starfish.export import FORMATS
    from starfish.runs import shipped

    if to not in FORMATS:
        raise UserError(f"there is no format `{to}`", f"there are {listed(list(FORMATS))}")
    model, inputs = shipped(run)
    found = FORMATS[to](model, inputs, output)
    if json:
        emit(found)
        return
    checked = f", checked with {found['checked_with']}" if found.get("checked_with") else ""
    say(f"wrote {output}, {found['bytes'] / 1e6:.1f} MB{checked}")
