"""Who makes masks. `PRUNERS` is the one list: name → the pruner with its default settings."""

from __future__ import annotations

from typing import Any

from torch import nn

from starfish.anatomy import find, unwrap
from starfish.core import Images, Masks, Pruner
from starfish.data import as_images
from starfish.devices import to_device
from starfish.errors import UserError
from starfish.pruners.capped import Capped
from starfish.pruners.cbs import ByCbs
from starfish.pruners.chita import ByChita
from starfish.pruners.falcon import ByFalcon
from starfish.pruners.kwon import ByKwon
from starfish.pruners.magnitude import Magnitude
from starfish.pruners.obs import ByObs, BySparseGPT
from starfish.pruners.structured import Structured
from starfish.pruners.wanda import Wanda
from starfish.pruners.woodfisher import ByWoodFisher
from starfish.settings import check

PRUNERS: dict[str, Pruner] = {
    "magnitude": Magnitude(),
    "structured": Structured(),
    "wanda": Wanda(),
    "sparsegpt": BySparseGPT(),
    "obs": ByObs(),
    "woodfisher": ByWoodFisher(),
    "cbs": ByCbs(),
    "chita": ByChita(),
    "falcon": ByFalcon(),
    "kwon": ByKwon(),
    "capped": Capped(),
}


def prune(dense: nn.Module, pruner: Pruner, images: Any, *, blocks: str | None = None) -> Masks:
    """Choose masks for `dense`, which stays as it is. `images` show the model's input, even to pruners without data."""
    dense, images = unwrap(dense), as_images(images)
    check_pruner(pruner, images)
    inputs = to_device(images.batch([0, len(images) - 1]), next(dense.parameters()).device)
    return pruner.choose(dense, find(dense, inputs, blocks=blocks, channels=pruner.sees_channels()), images)


def check_pruner(pruner: Pruner, images: Images | None) -> None:
    """Refuse what cannot be chosen with what is given, before anything is spent."""
    check(pruner)
    if pruner.needs() and images is None:
        raise UserError(f"the pruner `{name_of(pruner)}` looks at data", "give it some with --images")
    if "labels" in pruner.needs() and images is not None and images.labels is None:
        raise UserError(
            f"the pruner `{name_of(pruner)}` needs labels and the images have none",
            "give a folder with one sub-folder a class, or let the dense model label them: --pseudo-labels",
        )


def name_of(pruner: Pruner) -> str:
    """Its name in PRUNERS; a class of the user's own goes by its own name."""
    names = [name for name, known in PRUNERS.items() if type(known) is type(pruner)]
    return names[0] if names else type(pruner).__name__.lower()


def summary(pruner: Pruner) -> str:
    """One line on what a pruner does."""
    return (type(pruner).__doc__ or "").split("\n")[0]
