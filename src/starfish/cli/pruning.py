"""`starfish prune`"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from starfish.cli.inputs import choose, find_anatomy, labelled, load_model, load_pictures
from starfish.cli.options import Blocks, Checkpoint, Device, Json, Model, Pickle, PseudoLabels, Seed, Set
from starfish.console import emit, say, watch
from starfish.errors import UserError, listed
from starfish.views import show_summary

if TYPE_CHECKING:
    from starfish.core import Pruner


def prune(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the masks go.")],
    sparsity: Annotated[float | None, typer.Option(help="Fraction of the weights in the scope to remove.")] = None,
    pattern: Annotated[
        str | None, typer.Option(help="unstructured, N:M such as 2:4, or structured: whole units, to be cut out.")
    ] = None,
    scope: Annotated[
        str | None,
        typer.Option(
            help="Which weights: qkv, out, mlp, qk, v, conv, depthwise, head, joined by +; conv_fc …; all. "
            "Which units, with --pattern structured: mlp, qk, channels."
        ),
    ] = None,
    pruner: Annotated[
        str | None, typer.Option(help="`starfish pruners` lists them. Default: structured or magnitude, by --pattern.")
    ] = None,
    images: Annotated[str | None, typer.Option(help="Images, for pruners that look at data.")] = None,
    limit: Annotated[int | None, typer.Option(help="Take so many images.")] = None,
    pseudo_labels: PseudoLabels = False,
    sets: Set = None,
    checkpoint: Checkpoint = None,
    allow_pickle: Pickle = False,
    blocks: Blocks = None,
    device: Device = "auto",
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Choose which weights go, and write the masks."""
    from starfish import masks as masks_module
    from starfish.patterns import summarise
    from starfish.pruners import PRUNERS, check_pruner

    _suffix(output, ".safetensors")
    if limit is not None and images is None:
        raise UserError(f"--limit is {limit} and there are no --images", "give --images, or leave out --limit")
    if pseudo_labels and images is None:
        raise UserError("--pseudo-labels is for images, and there are none", "give --images, or leave it out")
    pruner = pruner or ("structured" if pattern == "structured" else "magnitude")
    chosen = choose(PRUNERS, "pruner", pruner)
    named = {"sparsity": sparsity, "pattern": _pattern_of(pruner, pattern, PRUNERS), "scope": scope}
    given = [f"{pruner}.{name}={value}" for name, value in named.items() if value is not None]
    loaded, stages = load_model(model, checkpoint, allow_pickle, device, {pruner: chosen}, [*given, *(sets or [])])
    chosen = stages[pruner]
    pictures = load_pictures(images, stages["preprocess"], loaded, limit=limit, seed=seed) if images else None
    labels = None
    if pictures is not None:
        pictures, labels = labelled(pictures, loaded, pseudo_labels)
    check_pruner(chosen, pictures)
    anatomy = find_anatomy(loaded, pictures, blocks, channels=chosen.sees_channels())
    chosen = chosen.settle(anatomy, pictures)
    masks = watch(chosen.choosing(loaded.model, anatomy, pictures))
    masks_module.write(output, masks)
    summary = summarise(masks, anatomy)
    facts = {
        "masks": str(output),
        "pruner": pruner,
        "settings": asdict(chosen),
        "model": loaded.name,
        "labels": labels,
        **asdict(summary),
    }
    if json:
        emit(facts)
    else:
        show_summary(summary)
        say(f"wrote {output}")


def _pattern_of(pruner: str, pattern: str | None, known: dict[str, Pruner]) -> str | None:
    """The pattern as a setting of the pruner; None where it makes but one, which is then the one that was asked for."""
    from starfish.settings import names_of

    has_choice = "pattern" in names_of(known[pruner])
    if pattern is not None and not _makes(known[pruner], pattern, has_choice):
        able = [name for name, one in known.items() if _makes(one, pattern, "pattern" in names_of(one))]
        raise UserError(
            f"the pruner `{pruner}` does not make the pattern `{pattern}`",
            f"leave out --pruner or --pattern; this pattern is made by {listed(sorted(able), 20)}",
        )
    return pattern if has_choice else None


def _makes(pruner: Pruner, pattern: str, has_choice: bool) -> bool:
    if pattern == "structured" or pruner.structured():
        return pattern == "structured" and pruner.structured()
    return has_choice or pattern == "unstructured"


def _suffix(path: Path, suffix: str) -> None:
    if path.suffix != suffix:
        raise UserError(f"the output is `{path}`", f"give a file that ends in {suffix}")
