"""`starfish heal`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from starfish.cli.inputs import choose, healing_images, labelled, load_start
from starfish.cli.options import (
    Blocks,
    CacheFolder,
    Checkpoint,
    Device,
    Images,
    Json,
    Limit,
    Masks,
    Model,
    Pickle,
    Pruned,
    PseudoLabels,
    Seed,
    Set,
)  # fmt: skip
from starfish.console import emit, say, watch
from starfish.errors import UserError, listed
from starfish.settings import names_of
from starfish.views import show_scores

if TYPE_CHECKING:
    from starfish.core import Job
    from starfish.data import StoredImages


def heal(
    model: Model,
    images: Images,
    output: Annotated[Path, typer.Option("-o", "--output", help="The run folder.")],
    masks: Masks = None,
    pruned: Pruned = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="One of `starfish methods`, or several in a row as corp,starfish. Default: what suits the masks."
        ),
    ] = None,
    recipe: Annotated[str, typer.Option(help="default, or paper for the paper's settings to the letter.")] = "default",
    sets: Set = None,
    limit: Limit = None,
    evaluation: Annotated[
        str | None, typer.Option("--eval", help="Images to measure on; folders by class give accuracy.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")] = False,
    seed: Seed = 0,
    cache: CacheFolder = None,
    pseudo_labels: PseudoLabels = False,
    checkpoint: Checkpoint = None,
    allow_pickle: Pickle = False,
    blocks: Blocks = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Heal a pruned model so that it follows the dense one; the mask stays as it is."""
    from starfish.cache import Cache
    from starfish.heal import chain_of, healing_, settings_of
    from starfish.methods import METHODS, default_methods
    from starfish.runs import Run

    method, paper = _recipe(recipe, method)
    possible = {name: choose(METHODS, "method", name) for name in (method or "corp,starfish").split(",")}
    settings = [f"{key}={value}" for key, value in paper.items()
                if any(key in names_of(one) for one in possible.values())]  # fmt: skip
    if paper and not settings:
        raise UserError(f"the recipe `{recipe}` has no setting of `{method}`", "leave out --recipe or --method")
    start = load_start(
        model, checkpoint, allow_pickle, device, blocks, possible, [*settings, *(sets or [])], masks, pruned
    )
    pictures, held_out = healing_images(images, evaluation, limit, start.stages["preprocess"], start.loaded, seed)
    pictures, labels = labelled(pictures, start.loaded, pseudo_labels)
    job = start.job(pictures, seed, Cache(cache or output / "state", owner=str(output.resolve())))
    names = method.split(",") if method else default_methods(job)
    chain = chain_of(job, [start.stages[name] for name in names])
    facts = start.asked(images=images, limit=limit, eval=evaluation, labels=labels, method=",".join(names),
                        settings=settings_of(chain), seed=seed, digests=_digests(job, pictures, held_out))  # fmt: skip
    run = Run.open(output, {**start.config(), "starfish": facts}, resume=resume)
    if run.result is None:
        _tell(job, names, given=method is not None, labels=held_out.labels is not None)
        watch(healing_(job, [*chain.values()], held_out, run))
    result = run.result
    assert result is not None
    if json:
        emit(result)
        return
    show_scores(result)
    say(f"healed {start.loaded.name}: {output}")


def _recipe(recipe: str, method: str | None) -> tuple[str | None, dict[str, object]]:
    """The method, None for what suits the masks, and the recipe's settings."""
    from starfish.methods import RECIPES

    if recipe not in RECIPES:
        raise UserError(f"the recipe is `{recipe}`", f"it can be {listed(list(RECIPES))}")
    return method or RECIPES[recipe].method, RECIPES[recipe].settings


def _digests(job: Job, pictures: StoredImages, held_out: StoredImages) -> dict[str, str]:
    from starfish.digests import digest, digest_of_stored
    from starfish.masks import digest as digest_of_masks

    return {"dense": digest(job.dense), "masks": digest_of_masks(job.masks), "start": digest(job.model),
            "images": digest_of_stored(pictures), "evaluation": digest_of_stored(held_out)}  # fmt: skip


def _tell(job: Job, names: list[str], *, given: bool, labels: bool) -> None:
    """What the user should know before the time is spent."""
    if not given and len(names) > 1:
        say(f"whole units are gone: healing with {' then '.join(names)}, which measured best (docs/choosing.md)")
    if not labels:
        say("note: no labels to measure with; the table says how closely the model follows the dense one")
