"""`starfish heal`"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from starfish.cli.inputs import choose, healing_images, load_model, start_
from starfish.cli.options import Blocks, Checkpoint, Device, Json, Model, Pickle, Seed, Set
from starfish.console import emit, say, watch
from starfish.errors import UserError, listed
from starfish.views import show_scores

if TYPE_CHECKING:
    from starfish.core import Job


def heal(
    model: Model,
    images: Annotated[
        str, typer.Option(help="Unlabeled images: a folder, folders by class, a .npz or .safetensors file.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The run folder.")],
    masks: Annotated[Path | None, typer.Option(help="Masks, in any container `starfish inspect` reads.")] = None,
    pruned: Annotated[
        Path | None, typer.Option(help="A pruned checkpoint: its zeros are the mask, its weights the start.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="One of `starfish methods`, or several in a row as corp,starfish. Default: what suits the masks."
        ),
    ] = None,
    recipe: Annotated[str, typer.Option(help="default, or paper for the paper's settings to the letter.")] = "default",
    sets: Set = None,
    limit: Annotated[int | None, typer.Option(help="Take so many of the images, a seeded sample.")] = None,
    evaluation: Annotated[
        str | None, typer.Option("--eval", help="Images to measure on; folders by class give accuracy.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")] = False,
    seed: Seed = 0,
    cache: Annotated[
        Path | None, typer.Option(help="Keep statistics of the images in this folder, for further heals of this model.")
    ] = None,
    checkpoint: Checkpoint = None,
    allow_pickle: Pickle = False,
    blocks: Blocks = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Heal a pruned model so that it follows the dense one; the mask stays as it is."""
    from copy import deepcopy

    from starfish.cache import Cache
    from starfish.data import digest_of
    from starfish.digests import digest
    from starfish.heal import check_method, healing_, job_of, settings_of
    from starfish.masks import digest as digest_of_masks
    from starfish.methods import METHODS, RECIPES, default_methods
    from starfish.models import small_config
    from starfish.runs import Run
    from starfish.settings import names_of

    if recipe not in RECIPES:
        raise UserError(f"the recipe is `{recipe}`", f"it can be {listed(list(RECIPES))}")
    method = method or RECIPES[recipe].method
    possible = {name: choose(METHODS, "method", name) for name in (method or "corp,starfish").split(",")}
    settings = [f"{key}={value}" for key, value in RECIPES[recipe].settings.items()
                if any(key in names_of(one) for one in possible.values())]  # fmt: skip
    loaded, stages = load_model(model, checkpoint, allow_pickle, device, possible, [*settings, *(sets or [])])
    student = deepcopy(loaded.model)
    chosen_masks = start_(student, loaded.model, masks, pruned, allow_pickle)
    pictures, held_out = healing_images(images, evaluation, limit, stages["preprocess"], loaded, seed)
    kept = Cache(cache or output / "state")
    job = job_of(student, loaded.model, chosen_masks, pictures, blocks=blocks, seed=seed, cache=kept)
    names = method.split(",") if method else default_methods(job)
    chain = {name: check_method(stages[name], job) for name in names}
    facts = {
        "model": loaded.name,
        "checkpoint": str(checkpoint) if checkpoint else None,
        "method": ",".join(names),
        "settings": settings_of(chain),
        "preprocess": asdict(stages["preprocess"]),
        "blocks": blocks,
        "seed": seed,
        "images": images,
        "limit": limit,
        "eval": evaluation,
        "digests": {
            "dense": digest(job.dense),
            "start": digest(job.model),
            "masks": digest_of_masks(job.masks),
            "images": digest_of(pictures.pixels),
        },
        "command": _command_line(),
    }
    small = small_config(loaded.model, student)
    shape = {"small": small} if small["widths"] else {}
    run = Run.open(output, {**loaded.config, **shape, "starfish": facts}, resume=resume)
    result = run.result
    if result is None:
        _tell(job, names, given=method is not None, labels=held_out.labels is not None)
        result = watch(healing_(job, [*chain.values()], held_out, run)).facts()
    if json:
        emit(result)
        return
    show_scores(result)
    say(f"healed {loaded.name}: {output}")


def _tell(job: Job, names: list[str], *, given: bool, labels: bool) -> None:
    """What the user should know before the time is spent."""
    if not given and len(names) > 1:
        say(f"whole units are gone: healing with {' then '.join(names)}, which measured best (docs/choosing.md)")
    if not labels:
        say("note: no labels to measure with; the table says how closely the model follows the dense one")


def _command_line() -> list[str]:
    return [word for word in sys.argv[1:] if word not in {"--resume", "--json"}]
