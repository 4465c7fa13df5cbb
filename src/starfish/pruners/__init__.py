"""Who makes masks. `PRUNERS` is the one list: name → the pruner with its default settings."""

from __future__ import annotations

from typing import Any

from torch import nn

from starfish.anatomy import find, unwrap
from starfish.core import Masks, Pruner
from starfish.data import as_images
from starfish.devices import to_device
from starfish.pruners.magnitude import Magnitude

PRUNERS: dict[str, Pruner] = {
    "magnitude": Magnitude(),
}


def prune(dense: nn.Module, pruner: Pruner, images: Any, *, blocks: str | None = None) -> Masks:
    """Choose masks for `dense`, which stays as it is. `images` show the model's input, even to pruners without data."""
    dense, images = unwrap(dense), as_images(images)
    device = next(dense.parameters()).device
    anatomy = find(dense, to_device(images.batch([0, len(images) - 1]), device), blocks=blocks)
    return pruner.choose(dense, anatomy, images)


def summary(pruner: Pruner) -> str:
    """One line on what a pruner does."""
    return (type(pruner).__doc__ or "").split("\n")[0]
