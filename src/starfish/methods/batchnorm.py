"""BatchNorm statistics: re-estimation as a method of its own, the control every CNN result needs (methods.md 0.5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from starfish.activations import call
from starfish.core import Images, Job, Method, Row
from starfish.devices import to_device
from starfish.errors import UserError

BATCH = 64


@dataclass(frozen=True)
class BatchNorm(Method):
    """Re-estimate the running statistics of every BatchNorm on the images; no weight changes."""

    def needs(self) -> frozenset[str]:
        return frozenset({"batchnorm"})

    def also_changes(self, job: Job) -> frozenset[str]:
        return statistics_names(job.model)

    def fit(self, job: Job) -> Iterator[Row]:
        if are_folded(batchnorms(job.model)):
            raise UserError(
                "every BatchNorm of the model has mean 0 and variance 1: its statistics were folded into the weights",
                "re-estimating them would change the function of the model; use another method",
            )
        yield from reestimate_(job.model, job.images)
        yield {"step": 1, "steps": 1, "images": len(job.images)}


def batchnorms(model: nn.Module) -> list[_BatchNorm]:
    """Those that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


def statistics_names(model: nn.Module) -> frozenset[str]:
    norms = {id(norm) for norm in batchnorms(model)}
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if id(module) in norms
        for name, _ in module.named_buffers(recurse=False)
    )


def are_folded(norms: list[_BatchNorm]) -> bool:
    """Identity statistics throughout: somebody folded them into the convolutions."""
    return bool(norms) and all(
        not norm.running_mean.any() and torch.equal(norm.running_var, torch.ones_like(norm.running_var))
        for norm in norms
        if norm.running_mean is not None and norm.running_var is not None
    )


@torch.no_grad()
def reestimate_(model: nn.Module, images: Images) -> Iterator[Row]:
    """Cumulative averages over all images, in batch-statistics mode, without gradient."""
    norms = batchnorms(model)
    device = next(model.parameters()).device
    model.eval()
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # cumulative
        norm.train()
    for start in range(0, len(images), BATCH):
        indices = list(range(start, min(start + BATCH, len(images))))
        call(model, to_device(images.batch(indices), device))
        yield {"stage": "batchnorm", "done": indices[-1] + 1, "total": len(images)}
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
