"""WoodFisher, CBS, CHITA and FALCON on given masks: one empirical Fisher matrix, four ways to use it (methods.md 5–8).

Each starts from the dense weights and their gradients; what differs is in survivors.py, the algebra in quadratic.py
(one block at a time) and regression.py (all layers at once).
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from starfish.core import FromDense, Job, Masks, Method, Row
from starfish.gradients import collecting, settled
from starfish.masks import apply_, restart_, zeros
from starfish.methods.survivors import COUPLED, Rule, Solver, Weights, schedule, weights_of, write_

KEPT = "weights/"  # in a job's state: those between two stages, of which some are zero only later


class _OnGradients(FromDense):
    """All of them."""

    gradients: int
    batch: int

    def needs(self) -> frozenset[str]:
        return frozenset({"labels"})

    def settle(self, job: Job) -> Method:
        gradients, batch = settled(job.images, self.gradients, self.batch)
        return replace(self, gradients=gradients, batch=batch)  # type: ignore[type-var]  # every method is a dataclass


@dataclass(frozen=True)
class WoodFisher(_OnGradients):
    """Move the survivors by the sum of the OBS updates of each pruned weight alone (WoodFisher).

    The sum is not the joint optimum: nothing says that the loss it models ends below that of the mask alone. `cbs` has
    the joint one.
    """

    gradients: int = 400  # at most; no image is in two of them
    batch: int = 1  # images of each gradient; the authors take hundreds to thousands
    damp: float = 1e-5  # λ in F = λI + GᵀG/N
    block: int = 10_000  # consecutive weights of a layer that know of each other
    scale: float = 1.0  # of the update; 0 is the mask alone

    def fit(self, job: Job) -> Iterator[Row]:
        solver = Solver("woodfisher", self.damp, self.block, scale=self.scale)
        yield from _fitting(job, solver, self.gradients, self.batch)


@dataclass(frozen=True)
class Cbs(_OnGradients):
    """Move the survivors by the joint OBS update of all the pruned weights (Combinatorial Brain Surgeon, CBS-U)."""

    gradients: int = 400  # at most; no image is in two of them
    batch: int = 1  # images of each gradient
    damp: float = 1e-5  # λ in F = λI + GᵀG/N
    block: int = 10_000  # consecutive weights of a layer that know of each other
    scale: float = 1.0  # of the update, up to 1; 0 is the mask alone

    def fit(self, job: Job) -> Iterator[Row]:
        solver = Solver("backsolve", self.damp, self.block, scale=self.scale)
        yield from _fitting(job, solver, self.gradients, self.batch)


@dataclass(frozen=True)
class Chita(_OnGradients):
    """Solve for the survivors in the regression on gradients, in one stage or in several (CHITA, CHITA++)."""

    algorithm: Literal["block", "cd"] = "block"  # block: exact, a block at a time; cd: coordinate descent, all coupled
    gradients: int = 500  # at most; no image is in two of them
    batch: int = 1  # images of each gradient
    ridge: float = 1e-3  # ℓ, the damping of XᵀX/N
    block: int = 2000  # consecutive weights of a layer that know of each other (block)
    first_order: float = 0.0  # factor of Σ gradients/batch in the first-order term; 0: none
    sweeps: int = 10  # through all survivors (cd)
    stages: int = 1  # the smallest of those to go go first, and each stage takes gradients anew
    start: float = 0.2  # what the first of several stages removes

    def fit(self, job: Job) -> Iterator[Row]:
        rule: Rule = "cd" if self.algorithm == "cd" else "backsolve"
        solver = Solver(rule, self.ridge, self.block, self.first_order / self.batch, steps=self.sweeps)
        yield from _fitting(job, solver, self.gradients, self.batch, self.stages, self.start)


@dataclass(frozen=True)
class Falcon(_OnGradients):
    """Solve for the survivors of a mask made under budgets of weights and of operations (FALCON)."""

    weights: Literal["backsolve", "woodfisher", "first_order", "none"] = "backsolve"  # none: the mask alone
    gradients: int = 500  # at most; no image is in two of them
    batch: int = 1  # images of each gradient
    ridge: float = 1e-3  # ℓ, the damping of XᵀX/N
    block: int = 2000  # consecutive weights of a layer that know of each other; first_order sees all of them
    first_order: float = 1e-3  # factor of Σ gradients/batch in the first-order term; 0: none
    steps: int = 20  # down the gradient, of weights=first_order
    stages: int = 1  # the smallest of those to go go first, and each stage takes gradients anew
    start: float = 0.3  # what the first of several stages removes

    def fit(self, job: Job) -> Iterator[Row]:
        solver = Solver(self.weights, self.ridge, self.block, self.first_order / self.batch, steps=self.steps)
        yield from _fitting(job, solver, self.gradients, self.batch, self.stages, self.start)


def _fitting(
    job: Job, solver: Solver, gradients: int, batch: int, stages: int = 1, start: float = 0.0
) -> Iterator[Row]:
    """One stage a layer or a step at a time, or several stages."""
    shares = schedule(_share(job.masks), start, stages)
    if not _share(job.masks):
        solver = replace(solver, first_order=0.0)  # a step down the loss would heal nothing
    if stages > 1:
        yield from _staged(job, solver, gradients, batch, shares)
        return
    names = list(job.masks)
    gradients_of = yield from collecting(
        job.dense, names, job.images, gradients=gradients, batch=batch, seed=job.seed, cache=job.cache
    )
    yield from (_descending if solver.rule in COUPLED else _layer_by_layer)(job, solver, gradients_of)


def _layer_by_layer(job: Job, solver: Solver, gradients: dict[str, Tensor]) -> Iterator[Row]:
    """No layer knows of another, so a resumed run goes on with the next one."""
    names, seen = list(job.masks), int(job.state.get("step", 0))
    restart_(job.model, job.dense, names[seen:], job.masks)
    for step, name in enumerate(names[seen:], seen + 1):
        dense = weights_of(job.dense, [name])
        w_C, before, after = solver.layer(gradients[name], dense[name], job.masks[name].flatten().cpu())
        write_(job.model, {name: w_C})
        job.state["step"] = step
        yield {"step": step, "steps": len(names), "layer": name, "before": before, "after": after}


def _descending(job: Job, solver: Solver, gradients: dict[str, Tensor]) -> Iterator[Row]:
    """A step costs little beside the gradients, which the cache keeps: a resumed run takes all of them again."""
    seen, last = int(job.state.get("step", 0)), 0.0
    steps = solver.descending(gradients, weights_of(job.dense, list(job.masks)), job.masks)
    for step, (weights, value) in enumerate(steps):
        write_(job.model, weights)
        if step > seen:
            job.state["step"] = step
            yield {"step": step, "steps": solver.steps, "before": last, "after": value}
        last = value


def _staged(job: Job, solver: Solver, gradients: int, batch: int, shares: list[float]) -> Iterator[Row]:
    """Each stage from the weights that the one before it left, rounded to their own precision, as they are saved."""
    names, seen = list(job.masks), int(job.state.get("step", 0))
    net = deepcopy(job.dense)
    if seen:
        write_(net, {name: tensor for name in names if isinstance(tensor := job.state[f"{KEPT}{name}"], Tensor)})
    for step, share in enumerate(shares[seen:], seen + 1):
        weights = weights_of(net, names)
        support = _support(weights, job.masks, share)
        found = yield from collecting(
            net, names, job.images, gradients=gradients, batch=batch, seed=job.seed,
            cache=None if step > 1 else job.cache,
        )  # fmt: skip
        weights, before, after = solver.all_layers(found, weights, support)
        del found  # before there are others
        write_(net, weights)
        write_(job.model, weights)
        apply_(job.model, job.masks)
        job.state["step"] = step
        job.state.update({f"{KEPT}{name}": net.get_parameter(name).detach().cpu().clone() for name in names})
        yield {"step": step, "steps": len(shares), "removed": share, "before": before, "after": after}


def _support(weights: Weights, masks: Masks, share: float) -> Masks:
    """What is left of the weights when this share of all is gone: of those to go the smallest; the gone stay gone."""
    keep_p = torch.cat([masks[name].flatten().cpu() for name in weights])
    P = (~keep_p).nonzero()[:, 0]
    order = torch.cat(list(weights.values()))[P].abs().sort(stable=True).indices
    support_p = torch.ones_like(keep_p)
    support_p[P[order[: round(share * len(keep_p))]]] = False
    parts = torch.split(support_p, [len(w_C) for w_C in weights.values()])
    return {name: part.view(masks[name].shape) for name, part in zip(weights, parts, strict=True)}


def _share(masks: Masks) -> float:
    """Of all weights under the masks, how much goes in the end."""
    return sum(map(zeros, masks.values())) / sum(mask.numel() for mask in masks.values())
