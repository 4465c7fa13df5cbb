"""`starfish prune`"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from starfish.cli.inputs import choose, find_anatomy, load_model, load_pictures
from starfish.cli.options import Blocks, Checkpoint, Device, Json, Model, Pickle, Seed, Set
from starfish.console import emit, say, watch
from starfish.errors import UserError
from starfish.views import show_summary


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
    pruner = pruner or ("structured" if pattern == "structured" else "magnitude")
    named = {"sparsity": sparsity, "pattern": None if pattern == pruner else pattern, "scope": scope}
    given = [f"{pruner}.{name}={value}" for name, value in named.items() if value is not None]
    chosen = choose(PRUNERS, "pruner", pruner)
    loaded, stages = load_model(model, checkpoint, allow_pickle, device, {pruner: chosen}, [*given, *(sets or [])])
    chosen = stages[pruner]
    if "images" in chosen.needs() and images is None:
        raise UserError(f"the pruner `{pruner}` looks at data", "give it some with --images")
    pictures = load_pictures(images, stages["preprocess"], loaded, limit=limit, seed=seed) if images else None
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
        **asdict(summary),
    }
    if json:
        emit(facts)
    else:
        show_summary(summary)
        say(f"wrote {output}")


def _suffix(path: Path, suffix: str) -> None:
    if path.suffix != suffix:
        raise UserError(f"the output is `{path}`", f"give a file that ends in {suffix}")
