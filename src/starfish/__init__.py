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
    from starfish.methods.fisher import Cbs, Chita, Falcon, WoodFisher
    from starfish.methods.kwon import Kwon
    from starfish.methods.least_squares import LeastSquares, SparseGPT
    from starfish.methods.snows import Snows
    from starfish.models import load_module as load
    from starfish.pruners import PRUNERS, prune
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
    from starfish.small import remaining, slim

# Where each public name lives: imported when first used, so that `starfish --help` need not wait for torch.
_HOMES = {
    "Anatomy": "core",
    "BatchNorm": "methods.batchnorm",
    "ByCbs": "pruners.cbs",
    "ByChita": "pruners.chita",
    "ByFalcon": "pruners.falcon",
    "ByKwon": "pruners.kwon",
    "ByObs": "pruners.obs",
    "BySparseGPT": "pruners.obs",
    "ByWoodFisher": "pruners.woodfisher",
    "Capped": "pruners.capped",
    "Cbs": "methods.fisher",
    "Chita": "methods.fisher",
    "Corp": "methods.corp",
    "Falcon": "methods.fisher",
    "Images": "core",
    "Job": "core",
    "Kwon": "methods.kwon",
    "LeastSquares": "methods.least_squares",
    "METHODS": "methods",
    "Magnitude": "pruners.magnitude",
    "Masks": "core",
    "Method": "core",
    "PRUNERS": "pruners",
    "Preprocess": "data",
    "Pruner": "core",
    "Result": "core",
    "Snows": "methods.snows",
    "SparseGPT": "methods.least_squares",
    "Starfish": "methods.align",
    "StoredImages": "data",
    "Structured": "pruners.structured",
    "UserError": "errors",
    "Wanda": "pruners.wanda",
    "WoodFisher": "methods.fisher",
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
    "ByCbs",
    "ByChita",
    "ByFalcon",
    "ByKwon",
    "ByObs",
    "BySparseGPT",
    "ByWoodFisher",
    "Capped",
    "Cbs",
    "Chita",
    "Corp",
    "Falcon",
    "Images",
    "Job",
    "Kwon",
    "LeastSquares",
    "Magnitude",
    "Masks",
    "Method",
    "Preprocess",
    "Pruner",
    "Result",
    "Snows",
    "SparseGPT",
    "Starfish",
    "StoredImages",
    "Structured",
    "UserError",
    "Wanda",
    "WoodFisher",
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
