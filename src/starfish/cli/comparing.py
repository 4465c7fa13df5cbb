"""`starfish compare`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from starfish.cli.inputs import Start, choose, labelled, load_pictures, load_start
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
    Set,
)  # fmt: skip
from starfish.console import emit, say, watch
from starfish.errors import UserError
from starfish.views import show_comparison

if TYPE_CHECKING:
    from starfish.compare import Chain
    from starfish.core import Job


def compare(
    model: Model,
    images: Images,
    evaluation: Annotated[str, typer.Option("--eval", help="Images to measure on; folders by class give accuracy.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder of the comparison.")],
    masks: Masks = None,
    pruned: Pruned = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="As `starfish methods` lists them: a,b,c; corp/starfish is one after the other. Default: all."
        ),
    ] = None,
    seeds: Annotated[
        str, typer.Option("--seeds", "--seed", help="Of image sample and batches; of 0,1,2 means and deviations.")
    ] = "0",
    sets: Set = None,
    limit: Limit = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what the folder holds, or add to it.")] = False,
    keep_models: Annotated[bool, typer.Option("--keep-models", help="Keep the healed weights of every run.")] = False,
    cache: CacheFolder = None,
    pseudo_labels: PseudoLabels = False,
    checkpoint: Checkpoint = None,
    allow_pickle: Pickle = False,
    blocks: Blocks = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Heal the same pruned model with many methods, and table what each gives back and costs."""
    from starfish.cache import Cache
    from starfish.compare import Comparison, comparing
    from starfish.methods import METHODS

    numbers = _seeds(seeds)
    named = methods.split(",") if methods is not None else list(METHODS)
    parts = {name: {part: choose(METHODS, "method", part) for part in name.split("/")} for name in named}
    possible = {part: one for chain in parts.values() for part, one in chain.items()}
    start = load_start(model, checkpoint, allow_pickle, device, blocks, possible, sets or [], masks, pruned)
    held_out = load_pictures(evaluation, start.stages["preprocess"], start.loaded, role="eval")
    comparison = None
    found: dict[str, Any] = {}
    for number in numbers:
        pictures = load_pictures(images, start.stages["preprocess"], start.loaded, limit=limit, seed=number)
        pictures, labels = labelled(pictures, start.loaded, pseudo_labels)
        job = start.job(pictures, number, Cache(cache or output / "cache"))
        if comparison is None:
            chains, left_out = _chains(named, start, job, all_there_are=methods is None)
            asked = start.asked(images=images, limit=limit, eval=evaluation, labels=labels, left_out=left_out)
            comparison = Comparison.open(output, job, held_out, chains, numbers, asked=asked, config=start.config(),
                                         resume=resume, keeps_models=keep_models)  # fmt: skip
        for place, (name, chain) in enumerate(chains.items()):
            say(f"{place + 1} of {len(chains)}: {name}, seed {number}")
            found = watch(comparing(comparison, name, chain, job, held_out))
    _draw(output, found)
    if json:
        emit(found)
        return
    show_comparison(found)
    say(f"compared {len(found['methods'])} methods: {output}")


def _seeds(several: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(word) for word in several.split(",")))
    except ValueError:
        raise UserError(f"the seeds are `{several}`", "give whole numbers, as in --seeds 0,1,2") from None


def _chains(
    names: list[str], start: Start, job: Job, *, all_there_are: bool
) -> tuple[dict[str, Chain], dict[str, str]]:  # fmt: skip
    """The methods of each chain, ready to run, and why others do not. What the user has named must run."""
    from starfish.compare import able, refusal
    from starfish.methods import METHODS

    chains, refused = able({name: [start.stages[part] for part in name.split("/")] for name in names}, job)
    if refused and not (all_there_are and chains):
        raise refusal(refused)
    # a method of which the user has set something, and which only that keeps from running, is no method to leave out
    could = able({name: [METHODS[name]] for name in refused}, job)[0]
    wrong = {name: error for name, error in refused.items() if name in could}
    if wrong:
        raise refusal(wrong)
    for name, error in refused.items():
        say(f"left out: {name}: {error.message}")
    return chains, {name: error.message for name, error in refused.items()}


def _draw(folder: Path, found: dict[str, Any]) -> None:
    from starfish.compare import draw

    try:
        draw(folder, found)
    except UserError as error:  # without matplotlib
        say(f"note: {error.message}; {error.hint}")
