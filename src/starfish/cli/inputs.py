"""What commands are given: the model, images, masks, and the stages they name."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from starfish.console import say, watch
from starfish.errors import UserError, listed

if TYPE_CHECKING:
    from torch import nn

    from starfish.cache import Cache
    from starfish.core import Anatomy, Job, Masks
    from starfish.data import Preprocess, StoredImages
    from starfish.models import Loaded

MOST_HELD_OUT = 256


def choose(known: dict[str, Any], kind: str, name: str) -> Any:
    """The method or pruner of that name."""
    if name not in known:
        raise UserError(f"there is no {kind} `{name}`", f"there are {listed(list(known), 20)}")
    return known[name]


def load_model(
    model: str, checkpoint: Path | None, allow_pickle: bool, device: str, stages: dict[str, Any], sets: list[str] | None
) -> tuple[Loaded, dict[str, Any]]:
    """The model on its device, and the stages of the command (its preprocessing one of them) with their settings."""
    from starfish.data import Preprocess
    from starfish.devices import choose_device, keep_freed_memory
    from starfish.models import load
    from starfish.settings import settle

    keep_freed_memory()
    settle({**stages, "preprocess": Preprocess()}, sets or [])  # refuse before the costly part
    loaded = load(model, checkpoint=checkpoint, allow_pickle=allow_pickle)
    loaded.model.to(choose_device(device))
    return loaded, settle({**stages, "preprocess": loaded.preprocess}, sets or [])


def load_pictures(
    source: str,
    preprocess: Preprocess,
    loaded: Loaded,
    *,
    role: Literal["calib", "eval"] = "calib",
    limit: int | None = None,
    seed: int = 0,
) -> StoredImages:
    """Images as the model wants them; what cannot be read is named."""
    from starfish.data import load
    from starfish.models import classes

    pictures = watch(load(source, preprocess, role=role, limit=limit, seed=seed, classes=classes(loaded)))
    for name in pictures.skipped:
        say(f"warning: skipped `{name}`, which cannot be read")
    return pictures


def find_anatomy(
    loaded: Loaded, pictures: StoredImages | None, blocks: str | None, *, channels: bool = False
) -> Anatomy:
    """What is found in the model, from two of the images or else from noise; channels take a while."""
    from starfish.anatomy import find
    from starfish.devices import to_device
    from starfish.models import device_of, example

    inputs = pictures.batch([0, len(pictures) - 1]) if pictures else example(loaded)
    return find(loaded.model, to_device(inputs, device_of(loaded.model)), blocks=blocks, channels=channels)


@dataclass(frozen=True)
class Start:
    """What heal and compare begin with, whatever the seed."""

    loaded: Loaded
    student: nn.Module  # with the weights to start from
    masks: Masks
    stages: dict[str, Any]  # the methods, and how images are prepared
    checkpoint: Path | None
    blocks: str | None

    def job(self, pictures: StoredImages, seed: int, cache: Cache) -> Job:
        from starfish.heal import job_of

        dense = self.loaded.model
        return job_of(self.student, dense, self.masks, pictures, blocks=self.blocks, seed=seed, cache=cache)

    def config(self) -> dict[str, Any]:
        """How the model is built, for config.json."""
        from starfish.models import small_config

        small = small_config(self.loaded.model, self.student)
        return {**self.loaded.config, **({"small": small} if small["widths"] else {})}

    def asked(self, **more: Any) -> dict[str, Any]:
        """How the command was given, for config.json and compare.json."""
        return {
            "model": self.loaded.name,
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "preprocess": asdict(self.stages["preprocess"]),
            "blocks": self.blocks,
            **more,
            "command": [word for word in sys.argv[1:] if word not in {"--resume", "--json"}],
        }


def load_start(
    model: str, checkpoint: Path | None, allow_pickle: bool, device: str, blocks: str | None,
    methods: dict[str, Any], sets: list[str], masks: Path | None, pruned: Path | None,
) -> Start:  # fmt: skip
    from copy import deepcopy

    loaded, stages = load_model(model, checkpoint, allow_pickle, device, methods, sets)
    student = deepcopy(loaded.model)
    return Start(
        loaded, student, start_(student, loaded.model, masks, pruned, allow_pickle), stages, checkpoint, blocks
    )


def start_(student: nn.Module, dense: nn.Module, masks: Path | None, pruned: Path | None, allow_pickle: bool) -> Masks:
    """The masks; `student` gets the weights to start from."""
    from starfish.containers import read
    from starfish.masks import sparsity
    from starfish.small import shrink_

    if (masks is None) == (pruned is None):
        raise UserError("give either --masks or --pruned", "--masks FILE with masks, --pruned FILE with pruned weights")
    path = masks or pruned
    assert path is not None
    found = read(path, dense, allow_pickle=allow_pickle)
    say(f"{path}: {found.container}, {sparsity(found.masks):.1%} of {len(found.masks)} tensors pruned")
    for note in found.notes:
        say(f"note: {note}")
    if pruned is not None:
        if found.weights is None:
            raise UserError(f"`{pruned}` holds masks and no weights", "give it with --masks")
        if found.container == "smaller model":
            shrink_(student, found.weights)
        student.load_state_dict(found.weights)
    return found.masks


def healing_images(
    images: str, evaluation: str | None, limit: int | None, preprocess: Preprocess, loaded: Loaded, seed: int
) -> tuple[StoredImages, StoredImages]:
    """Images to heal on and others to measure on: those of --eval, else some of the same source held out."""
    if evaluation is not None:
        pictures = load_pictures(images, preprocess, loaded, limit=limit, seed=seed)
        return pictures, load_pictures(evaluation, preprocess, loaded, role="eval", seed=seed)
    wanted = limit + MOST_HELD_OUT if limit and limit > 0 else limit
    pictures = load_pictures(images, preprocess, loaded, limit=wanted, seed=seed)
    spare = 0 if limit is None else len(pictures) - limit
    size = spare if spare > 0 else min(MOST_HELD_OUT, len(pictures) // 10)
    if size < 1:
        raise UserError(
            f"`{images}` has {len(pictures)} images", "give 10 or more, or others to measure on with --eval"
        )
    healing, held_out = pictures.split(len(pictures) - size)
    say(f"no --eval: {size} of the images are held out to measure on, {len(healing)} heal")
    return healing, held_out


def labelled(pictures: StoredImages, loaded: Loaded, pseudo: bool) -> tuple[StoredImages, str | None]:
    """The images with their labels and whose these are: given, or with `pseudo` the dense model's first answers."""
    from starfish.evaluate import predict

    if not pseudo:
        return pictures, None if pictures.labels is None else "given"
    if pictures.labels is not None:
        raise UserError(
            "--pseudo-labels: the images have labels of their own",
            "leave it out, or give the images without labels: in a flat folder, or in a tensor file of their own",
        )
    return replace(pictures, labels=watch(predict(loaded.model, pictures, "labels")).argmax(1)), "model"
