"""`starfish evaluate` and `starfish inspect`: they measure and look, and change nothing."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from starfish.cli.inputs import find_anatomy, load_model, load_pictures
from starfish.cli.options import Blocks, Checkpoint, Device, Json, Pickle, Seed, Set
from starfish.console import emit, say, table, watch
from starfish.errors import listed
from starfish.views import show_anatomy, show_summary

if TYPE_CHECKING:
    from starfish.data import StoredImages
    from starfish.models import Loaded


def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|RUN", help="A model as in `starfish models`, or a run folder.")
    ],
    evaluation: Annotated[
        str, typer.Option("--eval", help="Images; folders by class, or labels in a tensor file, give accuracy.")
    ],
    dense: Annotated[str | None, typer.Option(help="A model to compare with: agreement, KL and block cosines.")] = None,
    dense_checkpoint: Annotated[Path | None, typer.Option(help="Its weights.")] = None,
    limit: Annotated[int | None, typer.Option(help="Take so many of the images, a seeded sample.")] = None,
    sets: Set = None,
    checkpoint: Checkpoint = None,
    allow_pickle: Pickle = False,
    blocks: Blocks = None,
    device: Device = "auto",
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Measure a model: top-1 and top-5 with labels, size, operations, time; beside another, how closely it follows."""
    from starfish import evaluate as measures
    from starfish import speed
    from starfish.tables import evaluation_rows

    loaded, stages = load_model(model, checkpoint, allow_pickle, device, {}, sets)
    pictures = load_pictures(evaluation, stages["preprocess"], loaded, role="eval", limit=limit, seed=seed)
    answers = watch(measures.predict(loaded.model, pictures, "evaluate"))
    inputs = speed.first(pictures)
    top1 = measures.accuracy(answers, pictures.labels)
    facts: dict[str, Any] = {
        "model": model,
        "images": len(pictures),
        "accuracy": top1,
        "accuracy_top5": measures.accuracy(answers, pictures.labels, top=5),
        "accuracy_standard_error": measures.standard_error(top1, len(pictures)),
        **speed.cost(loaded.model, inputs),
        "latency_ms": watch(speed.latencies({"model": loaded.model}, inputs))["model"],
        "skipped": pictures.skipped,
    }
    if dense is not None:
        other, _ = load_model(dense, dense_checkpoint, allow_pickle, device, {}, None)
        facts |= _beside(dense, loaded, other, pictures, blocks)
    if json:
        emit(facts)
    else:
        table(("", model), evaluation_rows(facts))


def _beside(dense: str, loaded: Loaded, other: Loaded, pictures: StoredImages, blocks: str | None) -> dict[str, Any]:
    """How closely a model follows the dense one; blocks that have become narrower have no cosine to what they were."""
    from starfish import evaluate as measures

    anatomy = find_anatomy(other, pictures, blocks)
    two = pictures.batch([0, len(pictures) - 1])
    wide, own = (measures.output_sizes(one.model, anatomy, two) for one in (other, loaded))
    narrower = [name for name in anatomy.blocks if own[name] != wide[name]]
    if narrower:
        say(f"note: no cosine for {listed(narrower)}, which puts out fewer channels than in {dense}")
        anatomy = replace(anatomy, blocks=tuple(name for name in anatomy.blocks if name not in narrower))
    dense_BK = watch(measures.predict(other.model, pictures, "dense"))
    found = watch(measures.measure(loaded.model, other.model, dense_BK, pictures, anatomy, "evaluate"))
    return {
        "dense": {"model": dense, "accuracy": measures.accuracy(dense_BK, pictures.labels)},
        "fidelity": {
            "agreement": found.agreement,
            "kl": found.kl,
            "cosine": measures.mean(found.cosines) if found.cosines else None,
            "blocks": dict(zip(anatomy.blocks, found.cosines, strict=True)),
        },
    }


def inspect(
    what: Annotated[str, typer.Argument(metavar="FILE|MODEL", help="A file with masks or pruned weights, or a model.")],
    model: Annotated[str | None, typer.Option(help="The dense model the file belongs to.")] = None,
    checkpoint: Checkpoint = None,
    allow_pickle: Pickle = False,
    blocks: Blocks = None,
    json: Json = False,
) -> None:
    """Look before anything runs: what a mask file holds, or what was found in a model. Fetches nothing."""
    from starfish.containers import read
    from starfish.models import load
    from starfish.patterns import loses_channels, summarise

    if not Path(what).is_file():
        loaded = load(what, checkpoint=checkpoint, allow_pickle=allow_pickle, pretrained=False)
        show_anatomy(loaded, find_anatomy(loaded, None, blocks), json)
        return
    dense = None
    if model is not None:
        loaded = load(model, checkpoint=checkpoint, allow_pickle=allow_pickle, pretrained=False)
        dense = loaded.model
    found = read(Path(what), dense, allow_pickle=allow_pickle, dense_weights=checkpoint is not None)
    if found.weights is not None and model is not None and checkpoint is None:
        say("note: nothing is fetched to inspect; to compare with the dense weights, give them with --checkpoint")
    anatomy = find_anatomy(loaded, None, blocks, channels=loses_channels(found.masks)) if dense is not None else None
    summary = summarise(found.masks, anatomy)
    if json:
        emit({"file": what, "container": found.container, **asdict(summary), "notes": found.notes})
        return
    show_summary(summary, f"{what}: {found.container}")
    for note in found.notes:
        say(f"note: {note}")
