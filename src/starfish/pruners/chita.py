"""CHITA's masks: at most k weights left in the regression on gradients, in one stage or several (methods.md 7).

p weights, N gradients.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

from starfish.core import Anatomy, Images, Long, Masks, Pruner
from starfish.errors import UserError
from starfish.gradients import collecting, settled
from starfish.methods.regression import Regression, iht, largest, line_search, threshold
from starfish.methods.survivors import Solver, Weights, regression, schedule
from starfish.pruners.flat import Flat, flat, left
from starfish.pruners.select import check_sparsity, rows_of
from starfish.scopes import default_scope


@dataclass(frozen=True)
class ByChita(Pruner):
    """Keep the weights with which the regression on gradients does best, or the largest (CHITA, CHITA++)."""

    sparsity: float = 0.5  # fraction removed of all weights in the scope
    scope: str = ""  # which weights; empty takes the architecture's own default
    algorithm: Literal["block", "cd", "iht"] = "block"  # block and cd: the largest, solved for so between stages; iht:
    # those that thresholding comes to rest at
    gradients: int = 500  # at most; no image is in two of them
    batch: int = 1  # images of each gradient
    ridge: float = 1e-3  # ℓ, the damping of XᵀX/N
    block: int = 2000  # consecutive weights of a layer that know of each other when they are solved for
    first_order: float = 0.0  # factor of Σ gradients/batch in the first-order term; 0: none
    steps: int = 100  # of thresholding (iht)
    stages: int = 8  # each takes gradients anew, at the weights solved for in the one before; 1: magnitude
    start: float = 0.2  # what the first of several stages removes
    seed: int = 0  # of the order of the images

    def needs(self) -> frozenset[str]:
        return frozenset({"images", "labels"} if self._regresses() else ())

    def settle(self, anatomy: Anatomy, images: Images | None) -> ByChita:
        gradients, batch = settled(images, self.gradients, self.batch) if images else (self.gradients, self.batch)
        return replace(self, scope=self.scope or default_scope(anatomy), gradients=gradients, batch=batch)

    def choosing(self, dense: nn.Module, anatomy: Anatomy, images: Images | None) -> Long[Masks]:
        check_sparsity(self.sparsity)
        if self.steps < 1:
            raise UserError(f"`steps` is {self.steps}", "give 1 or more")
        shape, net = flat(dense, rows_of(dense, anatomy, self.scope)), deepcopy(dense)
        weights_p = shape.weights(net)
        keep_p = largest(weights_p, left(len(weights_p), self.sparsity))
        shares = schedule(self.sparsity, self.start, self.stages)
        if not self._regresses():
            return shape.masks(keep_p, dense)
        assert images is not None
        factor = self.first_order / settled(images, self.gradients, self.batch)[1]
        for stage, share in enumerate(shares, 1):
            X = yield from gathered(net, shape, images, self.gradients, self.batch, self.seed)
            problem = regression(X, weights_p, self.ridge, factor)
            keep_p = yield from self._support(problem, left(len(weights_p), share))
            if stage < len(shares):
                solver = Solver("cd" if self.algorithm == "cd" else "backsolve", self.ridge, self.block, factor)
                weights_p = solved_(net, shape, X, weights_p, keep_p, solver)
            del X, problem  # before there are others
            yield {"stage": "stages", "done": stage, "total": len(shares)}
        return shape.masks(keep_p, dense)

    def _regresses(self) -> bool:
        """Or is it the magnitude alone that decides?"""
        return self.algorithm == "iht" or self.stages > 1 or self.first_order != 0

    def _support(self, problem: Regression, k: int) -> Long[Tensor]:
        if self.algorithm == "iht":
            found_p = yield from iht(problem, k, steps=self.steps)
            return largest(found_p, k)
        if problem.alpha_p is None:
            return largest(problem.dense_p, k)
        w_p = threshold(problem.dense_p, k)
        moved_p, _ = line_search(problem, w_p, problem.residual(w_p), k, 1 / problem.largest_curvature())
        return largest(moved_p, k)


def gathered(
    net: nn.Module, shape: Flat, images: Images, gradients: int, batch: int, seed: int
) -> Long[list[Tensor]]:  # fmt: skip
    """X at the weights of `net`, a piece for each parameter."""
    found = yield from collecting(net, shape.names, images, gradients=gradients, batch=batch, seed=seed)
    return shape.columns(found)


def solved_(
    net: nn.Module, shape: Flat, X: list[Tensor], weights_p: Tensor, keep_p: Tensor, solver: Solver
) -> Tensor:  # fmt: skip
    """The survivors between two stages, written to `net` and read again in its own precision."""
    weights: Weights = {name: part.flatten() for name, part in shape.split(weights_p).items()}
    found, _, _ = solver.all_layers(dict(zip(shape.names, X, strict=True)), weights, shape.split(keep_p))
    for name, w_C in found.items():
        weights[name].copy_(w_C)  # views of one vector
    shape.write_(net, weights_p)
    return shape.weights(net)
