"""What the commands show: tables on stdout, remarks on stderr, or one JSON object."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from starfish.console import emit, say, table
from starfish.errors import listed
from starfish.tables import comparison_notes, comparison_rows, proof, score_rows, speed_rows, stage_rows

if TYPE_CHECKING:
    from starfish.core import Anatomy
    from starfish.models import Loaded
    from starfish.patterns import Summary


def show_scores(result: dict[str, Any]) -> None:
    table(("", "dense", "pruned", "healed"), score_rows(result))
    stages = stage_rows(result.get("stages", []))  # runs of old have none, and no speed
    if stages:
        table(stages[0], stages[1:], "\nmethod by method")
    images, error = result["evaluation"]["images"], result["accuracy_standard_error"]["healed"]
    tail = "" if error is None else f"; one standard error is about {error:.1f} points"
    say(f"on {images} images{tail}; {result['seconds']['total']:.0f} s. {proof(result).capitalize()}")
    if "speed" in result:
        show_speed(result["speed"])


def show_comparison(comparison: dict[str, Any]) -> None:
    head, *rows = comparison_rows(comparison)
    table(head, rows)
    for note in comparison_notes(comparison):
        say(note)


def show_speed(speed: dict[str, Any]) -> None:
    head, *rows = speed_rows(speed)
    table(head, rows)
    say(speed["verdict"])


def show_summary(summary: Summary, title: str = "") -> None:
    rows = [(layer.name, layer.role, "×".join(map(str, layer.shape)), f"{100 * layer.sparsity:.2f}", layer.pattern)
            for layer in summary.layers]  # fmt: skip
    table(("parameter", "role", "shape", "zeros, %", "pattern"), rows, title)
    say(f"{summary.pattern}, {100 * summary.sparsity:.2f} % of the weights in the masks are zero")
    for text in summary.inconsistencies:
        say(f"inconsistent: {text}")


def show_anatomy(loaded: Loaded, anatomy: Anatomy, as_json: bool) -> None:
    from starfish.scopes import default_scope, scope_names

    shapes = {name: list(loaded.model.get_parameter(name).shape) for name in anatomy.roles}
    layouts = {name: anatomy.layouts[name]._asdict() for name in anatomy.blocks}
    facts = {
        "model": loaded.name,
        "blocks": list(anatomy.blocks),
        "layouts": layouts,
        "roles": anatomy.roles,
        "shapes": shapes,
        "scopes": scope_names(anatomy, loaded.model),
        "default_scope": default_scope(anatomy),
        "untrained": list(anatomy.untrained),
        "preprocess": asdict(loaded.preprocess),
    }
    if as_json:
        emit(facts)
        return
    blocks = [(name, f"image {layouts[name]['batch']}, channel {layouts[name]['channel']}") for name in anatomy.blocks]
    table(("block", "dimensions"), blocks, f"{len(anatomy.blocks)} blocks are aligned")
    rows = [(name, role, "×".join(map(str, shapes[name]))) for name, role in anatomy.roles.items()]
    table(("parameter", "role", "shape"), rows, f"\n{len(anatomy.roles)} weights can be pruned")
    say(f"scopes: {', '.join(facts['scopes'])}; default {facts['default_scope']}")
    if anatomy.untrained:
        say(f"after the last block, out of its reach: {listed(list(anatomy.untrained))}")


def show_stages(stages: dict[str, tuple[Any, str]], as_json: bool) -> None:
    """Every method or pruner with its needs, fields, types and defaults."""
    facts = [
        {
            "name": name,
            "summary": text,
            "needs": sorted(stage.needs()),
            "settings": {field.name: getattr(stage, field.name) for field in fields(stage)},
            "types": {field.name: str(field.type) for field in fields(stage)},
        }
        for name, (stage, text) in stages.items()
    ]
    if as_json:
        emit(facts)
        return
    for name, (stage, text) in stages.items():
        needs = f"  (needs {', '.join(sorted(stage.needs()))})" if stage.needs() else ""
        settings = [(f"  {field.name}", str(getattr(stage, field.name)), str(field.type)) for field in fields(stage)]
        table(("  setting", "default", "type"), settings, f"{name}: {text}{needs}")
