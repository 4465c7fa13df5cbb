"""What the surviving weights become. `METHODS` is the one list: name → the method with its default settings."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from starfish.core import Job, Method
from starfish.masks import sparsity
from starfish.methods.align import OBJECTIVES, Starfish
from starfish.methods.batchnorm import BatchNorm
from starfish.methods.corp import Corp, foldable, share_gone
from starfish.methods.fisher import Cbs, Chita, Falcon, WoodFisher
from starfish.methods.kwon import Kwon
from starfish.methods.least_squares import LeastSquares, SparseGPT
from starfish.methods.snows import Snows

PAPER = Starfish(lr=6e-4, optimizer="adamw", view="raw", head=0.0, augment="none", epochs=10)
"""The loop of the paper, in which it compares objectives."""

METHODS: dict[str, Method] = {
    "starfish": Starfish(),
    "mse": replace(PAPER, objective="mse"),
    "kl": replace(PAPER, objective="kl"),
    "ce": replace(PAPER, objective="ce"),
    "starfish+kl": replace(PAPER, objective="cosine+kl"),
    "corp": Corp(),
    "least_squares": LeastSquares(),
    "sparsegpt": SparseGPT(),
    "woodfisher": WoodFisher(),
    "cbs": Cbs(),
    "chita": Chita(),
    "falcon": Falcon(),
    "snows": Snows(),
    "kwon": Kwon(),
    "batchnorm": BatchNorm(),
}


class Recipe(NamedTuple):
    method: str | None  # None: what suits the masks
    settings: dict[str, object]


RECIPES = {
    "default": Recipe(None, {}),
    # The paper's text and, where it is silent, its authors' code: fp32, batch statistics in BatchNorm.
    "paper": Recipe(
        "starfish",
        {
            "lr": 6e-4,
            "min_lr": 1e-6,
            "warmup_steps": 0,
            "epochs": 10,
            "optimizer": "adamw",
            "view": "raw",
            "head": 0.0,
            "augment": "none",
            "precision": "fp32",
            "bn": "train",
            "tail": False,
        },
    ),
}


def default_methods(job: Job) -> list[str]:
    """What heals these masks best by our measurements: the closed form first where they were made of whole units.

    It starts from the dense weights, so what another tool has already made of the survivors comes before it.
    """
    return ["corp", "starfish"] if _survivors_are_dense(job) and _made_of_units(job) else ["starfish"]


def _made_of_units(job: Job) -> bool:
    """Are units gone whole, and not just some that an unstructured mask took by chance?"""
    return foldable(job) and share_gone(job) > sparsity(job.masks) / 2


def _survivors_are_dense(job: Job) -> bool:
    state, dense = job.model.state_dict(), job.dense.state_dict()
    pairs = [(state[name], dense[name], mask) for name, mask in job.masks.items() if mask.shape == dense[name].shape]
    return all(torch.equal(weight, whole.masked_fill(~mask, 0)) for weight, whole, mask in pairs)


def summary(method: Method) -> str:
    """One line on what a method does."""
    text = (type(method).__doc__ or "").split("\n")[0]
    return OBJECTIVES[method.objective] if isinstance(method, Starfish) else text


def name_of(method: Method) -> str:
    """Its name in METHODS; a class of the user's own goes by its own name."""
    for name, known in METHODS.items():
        if type(known) is type(method) and getattr(known, "objective", None) == getattr(method, "objective", None):
            return name
    return type(method).__name__.lower()
