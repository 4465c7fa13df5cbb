"""starfish heals pruned neural networks: masks → prune or read them, heal_ → give back what pruning took."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starfish.core import Anatomy, Images, Job, Masks, Method, Pruner, Result
    from starfish.data import Preprocess, StoredImages
    from starfish.errors import UserError
    from starfish.heal import heal_
    from starfish.methods import METHODS
    from starfish.methods.align import Starfish
    from starfish.methods.batchnorm import BatchNorm
    from starfish.methods.corp import Corp
    from starfish.models import load_module as load
    from starfish.pruners import PRUNERS, prune
    from starfish.pruners.magnitude import Magnitude
    from starfish.pruners.structured import Structured
    from starfish.small import remaining, slim

# Where each public name lives: imported when first used, so that `starfish --help` need not wait for torch.
_HOMES = {
    "METHODS": "methods",
    "PRUNERS": "pruners",
    "Anatomy": "core",
    "BatchNorm": "methods.batchnorm",
    "Corp": "methods.corp",
    "Images": "core",
    "Job": "core",
    "Magnitude": "pruners.magnitude",
    "Masks": "core",
    "Method": "core",
    "Preprocess": "data",
    "Pruner": "core",
    "Result": "core",
    "Starfish": "methods.align",
    "StoredImages": "data",
    "Structured": "pruners.structured",
    "UserError": "errors",
    "heal_": "heal",
    "load": "models:load_module",
    "prune": "pruners",
    "remaining": "small",
    "slim": "small",
}

__all__ = [
    "METHODS",
    "PRUNERS",
    "Anatomy",
    "BatchNorm",
    "Corp",
    "Images",
    "Job",
    "Magnitude",
    "Masks",
    "Method",
    "Preprocess",
    "Pruner",
    "Result",
    "Starfish",
    "StoredImages",
    "Structured",
    "UserError",
    "heal_",
    "load",
    "prune",
    "remaining",
    "slim",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module `starfish` has no attribute `{name}`")
    home, _, own_name = _HOMES[name].partition(":")
    return getattr(import_module(f"starfish.{home}"), own_name or name)
