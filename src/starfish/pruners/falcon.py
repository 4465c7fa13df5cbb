"""FALCON's masks: a budget of weights and one of operations, kept at once (methods.md 8).

p weights, N gradients; I_i is what weight i is worth, f_i its multiply-adds for one image.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from starfish.activations import Recorder, call
from starfish.anatomy.look import evaluating
from starfish.core import Anatomy, Images, Long, Masks, Pruner
from starfish.devices import to_device
from starfish.errors import UserError
from starfish.gradients import settled
from starfish.methods.regression import Regression, largest
from starfish.methods.survivors import Solver, regression, schedule
from starfish.pruners.chita import gathered, solved_
from starfish.pruners.flat import Flat, flat, left
from starfish.pruners.select import check_sparsity, rows_of
from starfish.scopes import default_scope

HALVINGS = 60  # of the interval in which the price of a multiply-add lies


@dataclass(frozen=True)
class ByFalcon(Pruner):
    """Keep the largest weights that budgets of weights and of multiply-adds allow together (FALCON)."""

    sparsity: float = 0.5  # fraction removed of all weights in the scope; 0: only `flops` counts
    flops: float = 0.0  # fraction removed of the multiply-adds of these weights; 0: only `sparsity` counts
    scope: str = ""  # which weights; empty takes the architecture's own default
    algorithm: Literal["magnitude", "first_order"] = "magnitude"  # first_order: down the regression on gradients
    steps: int = 20  # of first_order
    gradients: int = 500  # at most; no image is in two of them
    batch: int = 1  # images of each gradient
    ridge: float = 1e-3  # ℓ, the damping of XᵀX/N
    block: int = 2000  # consecutive weights of a layer that know of each other when they are solved for
    first_order: float = 1e-3  # factor of Σ gradients/batch in the first-order term; 0: none
    stages: int = 1  # each takes gradients anew, at the weights solved for in the one before
    start: float = 0.3  # what the first of several stages removes, of weights and of multiply-adds
    seed: int = 0  # of the order of the images

    def needs(self) -> frozenset[str]:
        if self._regresses():
            return frozenset({"images", "labels"})
        return frozenset({"images"} if self.flops else ())

    def settle(self, anatomy: Anatomy, images: Images | None) -> ByFalcon:
        gradients, batch = settled(images, self.gradients, self.batch) if images else (self.gradients, self.batch)
        return replace(self, scope=self.scope or default_scope(anatomy), gradients=gradients, batch=batch)

    def choosing(self, dense: nn.Module, anatomy: Anatomy, images: Images | None) -> Long[Masks]:
        self._check()
        shape, net = flat(dense, rows_of(dense, anatomy, self.scope)), deepcopy(dense)
        weights_p = shape.weights(net)
        if images is not None and self.flops:
            f_p = multiply_adds(dense, shape, images)
        else:
            f_p = torch.zeros_like(weights_p)
        if not self._regresses():
            return shape.masks(support(weights_p.square(), f_p, *self._budgets(f_p, self.sparsity, self.flops)), dense)
        assert images is not None
        goals = [schedule(final, self.start, self.stages) for final in (self.sparsity, self.flops)]
        factor = self.first_order / settled(images, self.gradients, self.batch)[1]
        for stage, (sparsity, flops) in enumerate(zip(*goals, strict=True), 1):
            budgets = self._budgets(f_p, sparsity, flops)
            X = yield from gathered(net, shape, images, self.gradients, self.batch, self.seed)
            keep_p = support(weights_p.square(), f_p, *budgets)
            if self.algorithm == "first_order":
                problem = regression(X, weights_p, self.ridge, factor)
                keep_p = yield from projecting(problem, keep_p, f_p, budgets, self.steps)
            if stage < self.stages:
                solver = Solver("backsolve", self.ridge, self.block, factor)
                weights_p = solved_(net, shape, X, weights_p, keep_p, solver)
            del X  # before there are others
            yield {"stage": "stages", "done": stage, "total": self.stages}
        return shape.masks(keep_p, dense)

    def _regresses(self) -> bool:
        return self.stages > 1 or self.algorithm == "first_order"

    def _check(self) -> None:
        if self.sparsity or not self.flops:
            check_sparsity(self.sparsity)
        if not 0 <= self.flops < 1:
            raise UserError(
                f"`flops` is {self.flops}", "give the fraction of multiply-adds to remove, from 0 to below 1"
            )
        if self.steps < 1:
            raise UserError(f"`steps` is {self.steps}", "give 1 or more")

    def _budgets(self, f_p: Tensor, sparsity: float, flops: float) -> tuple[int, float]:
        """How many weights may stay, and how many multiply-adds."""
        return left(len(f_p), sparsity), (1 - flops) * float(f_p.sum())


def support(worth_p: Tensor, f_p: Tensor, count: int, budget: float) -> Tensor:
    """Which weights to keep: most of Σ I within both budgets, up to the last two of them.

    What weights are worth less what their multiply-adds cost, I − λf, orders them; the price λ at which the best
    `count` of them just keep the budget is the minimum of the convex dual, found by the sign of its slope.
    """
    keep_p = largest(worth_p, count)
    if float(f_p[keep_p].sum()) <= budget:
        return keep_p
    low, high = 0.0, float((worth_p / f_p)[f_p > 0].max())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _spent(worth_p - middle * f_p, f_p, count) <= budget:
            high = middle
        else:
            low = middle
    rounded = [_prefix(worth_p - price * f_p, f_p, count, budget) for price in (low, high)]
    return max(rounded, key=lambda keep_p: float(worth_p[keep_p].sum()))


def _spent(score_p: Tensor, f_p: Tensor, count: int) -> float:
    """Multiply-adds of the largest scores above zero: while they exceed F_b, the dual falls as the price rises."""
    return float(f_p[score_p > _first_left_out(score_p, count)].sum())


def _first_left_out(score_p: Tensor, count: int) -> float:
    """ω, the (S_b + 1)-th largest score, or zero"""
    return max(0.0, float(score_p.kthvalue(len(score_p) - count).values)) if count < len(score_p) else 0.0


def _prefix(score_p: Tensor, f_p: Tensor, count: int, budget: float) -> Tensor:
    """The longest beginning of the order by score, all above zero, that keeps both budgets."""
    order = score_p.sort(descending=True, stable=True).indices[:count]
    order = order[(score_p[order] > 0) & (f_p[order].cumsum(0) <= budget)]
    keep_p = torch.zeros(len(score_p), dtype=torch.bool)
    keep_p[order] = True
    return keep_p


def dual(price: float, worth_p: Tensor, f_p: Tensor, count: int, budget: float) -> float:
    """D(λ), which no choice within the budgets exceeds, whatever the price."""
    score_p = worth_p - price * f_p
    least = _first_left_out(score_p, count)
    return count * least + budget * price + float((score_p - least).clamp_min(0).sum())


def projecting(
    problem: Regression, keep_p: Tensor, f_p: Tensor, budgets: tuple[int, float], steps: int
) -> Long[Tensor]:
    """Down the gradient and back into the budgets, as long as Q falls (discrete first-order)."""
    size = problem.largest_curvature()
    w_p = problem.dense_p * keep_p
    r_N = problem.residual(w_p)
    value = problem.value(w_p, r_N)
    for step in range(steps):
        moved_p = w_p - problem.gradient(w_p, r_N) / size
        found_p = support(moved_p.square(), f_p, *budgets)
        w_p = moved_p * found_p
        r_N = problem.residual(w_p)
        before, value = value, problem.value(w_p, r_N)
        yield {"stage": "projections", "done": step + 1, "total": steps}
        if value >= before:
            break
        keep_p = found_p
    return keep_p


@torch.no_grad()
def multiply_adds(dense: nn.Module, shape: Flat, images: Images) -> Tensor:
    """f_p: how many positions of its output each weight's layer computes for one image; 0 where it does not run."""
    modules = {name: _runner(dense, name.rpartition(".")[0]) for name in shape.names}
    device = next(dense.parameters()).device
    with evaluating(dense), Recorder(dense, list(dict.fromkeys(modules.values()))) as recorder:
        call(dense, to_device(images.batch([0]), device))
        outputs = recorder.take(recorder.fired)
    parts = []
    for name, size in zip(shape.names, shape.sizes, strict=True):
        channel = 1 if dense.get_parameter(name).ndim > 2 else -1
        output = outputs.get(modules[name])
        parts.append(torch.full((size,), output.numel() // output.shape[channel] if output is not None else 0))
    return torch.cat(parts).double()


def _runner(dense: nn.Module, path: str) -> str:
    """The module that runs for this one: torch's attention reads the weights of its last layer past its forward."""
    holder = path.rpartition(".")[0]
    return holder if isinstance(dense.get_submodule(holder), nn.MultiheadAttention) else path
