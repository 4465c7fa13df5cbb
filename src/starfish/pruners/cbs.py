"""CBS's masks: random magnitude pruning, then a local search for weights whose losses cancel (methods.md 6).

p weights, N gradients.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from starfish.activations import logits
from starfish.core import Anatomy, Images, Long, Masks, Pruner
from starfish.data import room
from starfish.devices import to_device
from starfish.errors import UserError
from starfish.gradients import collecting, labels_of, loss_sum, settled
from starfish.methods.regression import largest
from starfish.pruners.flat import Flat, flat, left
from starfish.pruners.select import check_sparsity, rows_of
from starfish.pruners.swaps import Influence, improve_, influence, random_magnitude
from starfish.scopes import default_scope

BATCH = 64
COLUMNS = 16384  # weights at a time


@dataclass(frozen=True)
class ByCbs(Pruner):
    """Remove the weights whose loss is least together, by random trials and swaps (Combinatorial Brain Surgeon)."""

    sparsity: float = 0.5  # fraction removed of all weights in the scope
    scope: str = ""  # which weights; empty takes the architecture's own default
    gradients: int = 400  # at most; no image is in two of them
    batch: int = 1  # images of each gradient
    trials: int = 50  # of random magnitude pruning, the first one plain global magnitude
    images: int = 256  # on whose loss trials and iterations of the search are compared
    tolerance: float = 1e-4  # ε, the least that a swap must gain
    reach: int = 10  # ρ, ranks before and after its own that a weight is offered
    failures: int = 20  # τ, weights without a partner after which an iteration ends
    iterations: int = 100  # of the search, at most; 0: none
    patience: int = 5  # iterations without a lower loss after which the search ends
    seed: int = 0  # of the order of the images and of the trials

    def needs(self) -> frozenset[str]:
        return frozenset({"images", "labels"})

    def settle(self, anatomy: Anatomy, images: Images | None) -> ByCbs:
        gradients, batch = settled(images, self.gradients, self.batch) if images else (self.gradients, self.batch)
        return replace(self, scope=self.scope or default_scope(anatomy), gradients=gradients, batch=batch)

    def choosing(self, dense: nn.Module, anatomy: Anatomy, images: Images | None) -> Long[Masks]:
        assert images is not None
        self._check()
        shape = flat(dense, rows_of(dense, anatomy, self.scope))
        judge = Judge.of(dense, shape, images, self.images)
        keep_p = yield from self._trying(judge)
        if self.iterations:
            gradients = yield from collecting(
                dense, shape.names, images, gradients=self.gradients, batch=self.batch, seed=self.seed
            )
            found = influences(shape.columns(gradients), judge.weights_p, shape.sizes)
            del gradients  # as large again
            keep_p = yield from self._searching(judge, found, keep_p)
        return shape.masks(keep_p, dense)

    def _check(self) -> None:
        check_sparsity(self.sparsity)
        for name, value, least in (("trials", self.trials, 1), ("images", self.images, 1), ("reach", self.reach, 0),
                                   ("failures", self.failures, 0), ("iterations", self.iterations, 0),
                                   ("patience", self.patience, 1), ("tolerance", self.tolerance, 0)):  # fmt: skip
            if value < least:
                raise UserError(f"`{name}` is {value}", f"it must be at least {least}")

    def _trying(self, judge: Judge) -> Long[Tensor]:
        """The best of some random masks, the first of which is that of plain magnitude."""
        random = torch.Generator().manual_seed(self.seed)
        k = left(len(judge.weights_p), self.sparsity)
        best, least = largest(judge.weights_p, k), float("inf")
        for trial in range(self.trials):
            keep_p = random_magnitude(judge.weights_p, k, random) if trial else best
            loss = judge.loss(keep_p) if self.trials > 1 else 0.0
            if loss < least:
                best, least = keep_p, loss
            yield {"stage": "trials", "done": trial + 1, "total": self.trials}
        return best

    def _searching(self, judge: Judge, found: Influence, keep_p: Tensor) -> Long[Tensor]:
        """Swaps always lower what the gradients say of the loss; the mask kept is that of the lowest loss itself."""
        pruned_p = (~keep_p).numpy()
        best, least, idle = keep_p, judge.loss(keep_p), 0
        for iteration in range(self.iterations):
            change = improve_(found, pruned_p, tolerance=self.tolerance, reach=self.reach, failures=self.failures)
            if change == 0:
                break
            keep_p = ~torch.from_numpy(pruned_p)
            loss = judge.loss(keep_p)
            best, least, idle = (keep_p, loss, 0) if loss < least else (best, least, idle + 1)
            yield {"stage": "search", "done": iteration + 1, "total": self.iterations}
            if idle == self.patience:
                break
        return best


def influences(X: list[Tensor], weights_p: Tensor, sizes: list[int]) -> Influence:
    """V = w g/√N, a row for each weight: swaps look at few weights and all gradients."""
    count = len(X[0])
    V_pN, start = room((len(weights_p), count), X[0].dtype), 0
    for x in X:
        for columns in torch.split(x, COLUMNS, dim=1):
            scale = weights_p[start : start + columns.shape[1], None] / count**0.5
            V_pN[start : start + columns.shape[1]] = (columns.T * scale).to(x.dtype)
            start += columns.shape[1]
    return influence(V_pN, sizes)


@dataclass(frozen=True)
class Judge:
    """The loss of a masked network on some images."""

    net: nn.Module
    shape: Flat
    weights_p: Tensor
    batches: list[tuple[Any, Tensor]]

    @classmethod
    def of(cls, dense: nn.Module, shape: Flat, images: Images, most: int) -> Judge:
        labels, size = labels_of(images), min(most, len(images))
        chosen = [place * len(images) // size for place in range(size)]
        parts = [chosen[start : start + BATCH] for start in range(0, size, BATCH)]
        batches = [(images.batch(part), labels[part]) for part in parts]
        return cls(deepcopy(dense).eval(), shape, shape.weights(dense), batches)

    @torch.no_grad()
    def loss(self, keep_p: Tensor) -> float:
        self.shape.write_(self.net, self.weights_p * keep_p)
        device = next(self.net.parameters()).device
        losses = [loss_sum(logits(self.net, to_device(inputs, device)).float(), labels).double()
                  for inputs, labels in self.batches]  # fmt: skip
        return float(torch.stack(losses).sum()) / sum(len(labels) for _, labels in self.batches)
