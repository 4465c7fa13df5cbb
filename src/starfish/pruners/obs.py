"""Choices that take the weights which stay along: SparseGPT, block by block, and ExactOBS, one by one (methods.md 4).

O rows and I columns of a layer's weight as a matrix, G groups; see grams.py.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from starfish.core import Anatomy, Images, Long, Masks, Pruner
from starfish.data import spread
from starfish.grams import Inputs, Sweep, as_matrix, as_weight, groups_of
from starfish.methods.solves import damped, greedy, restricted_in_groups, sparsegpt, upper
from starfish.pruners.select import (
    UNSTRUCTURED,
    check_pattern,
    check_sparsity,
    given,
    groupable,
    n_of_m,
    rows_of,
)
from starfish.scopes import default_scope

ROWS = 32  # of ExactOBS at a time, each with an inverse of its own


@dataclass(frozen=True)
class BySparseGPT(Pruner):
    """Remove what costs least as the pass over the columns comes to it, after the corrections so far (SparseGPT)."""

    sparsity: float = 0.5  # fraction removed of each block of columns of each weight in the scope
    scope: str = ""  # which weights; empty takes the architecture's own default
    pattern: str = "unstructured"  # or N:M, N kept of every M consecutive inputs of a row
    inputs: Inputs = "block"  # what layers read: as in the dense model, or behind the blocks, or layers, pruned before
    block: int = 128  # columns among which an unstructured mask chooses
    damp: float = 0.01  # of the mean diagonal of the Gram matrix
    images: int = 512  # of which statistics are taken, spread over all there are; 0: all
    memory_gb: float = 1.0  # of Gram matrices at a time

    def needs(self) -> frozenset[str]:
        return frozenset({"images"})

    def settle(self, anatomy: Anatomy, images: Images | None) -> BySparseGPT:
        return replace(self, scope=self.scope or default_scope(anatomy))

    def choosing(self, dense: nn.Module, anatomy: Anatomy, images: Images | None) -> Long[Masks]:
        def choose(W_GOI: Tensor, H_GII: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
            if self.pattern == UNSTRUCTURED:
                new_GOI, kept_GOI, _ = sparsegpt(W_GOI, upper(H_GII), self._smallest, block=self.block)
            else:
                starts = group_starts(W_GOI.shape[-1], inputs, n_of_m(self.pattern)[1])
                new_GOI, kept_GOI, _ = sparsegpt(W_GOI, upper(H_GII), self._in_groups, block=self.block, starts=starts)
            return new_GOI, kept_GOI

        return (yield from _layer_by_layer(dense, anatomy, images, self, choose))

    def _smallest(self, part: slice, W_GOI: Tensor, diagonal_GI: Tensor) -> Tensor:
        """Of the whole block; rounded so that the blocks add up to the share of the layer."""
        gone = [round(self.sparsity * W_GOI[..., 0].numel() * column) for column in (part.start, part.stop)]
        score = (W_GOI / diagonal_GI[..., None, :]).square().flatten()
        order = score.sort(descending=True, stable=True).indices
        kept = torch.zeros_like(score, dtype=torch.bool)
        kept[order[: len(order) - (gone[1] - gone[0])]] = True
        return kept.view_as(W_GOI)

    def _in_groups(self, part: slice, W_GOI: Tensor, diagonal_GI: Tensor) -> Tensor:
        score = (W_GOI / diagonal_GI[..., None, :]).square()
        order = score.sort(dim=-1, descending=True, stable=True).indices
        return torch.zeros_like(W_GOI, dtype=torch.bool).scatter_(-1, order[..., : n_of_m(self.pattern)[0]], True)


@dataclass(frozen=True)
class ByObs(Pruner):
    """Remove weights one by one, each row the one that it misses least after all corrections so far (ExactOBS).

    Single weights; of the blocks of the paper there are none here.
    """

    sparsity: float = 0.5  # fraction removed of each weight in the scope; rows share it by what they lose
    scope: str = ""  # which weights; empty takes the architecture's own default
    pattern: str = "unstructured"  # or N:M, N kept of every M consecutive inputs of a row
    inputs: Inputs = "dense"  # what layers read: as in the dense model, or behind the blocks, or layers, pruned before
    damp: float = 0.01  # of the mean diagonal of the Gram matrix
    images: int = 512  # of which statistics are taken, spread over all there are; 0: all
    memory_gb: float = 1.0  # of Gram matrices at a time

    def needs(self) -> frozenset[str]:
        return frozenset({"images"})

    def settle(self, anatomy: Anatomy, images: Images | None) -> ByObs:
        return replace(self, scope=self.scope or default_scope(anatomy))

    def choosing(self, dense: nn.Module, anatomy: Anatomy, images: Images | None) -> Long[Masks]:
        def choose(W_GOI: Tensor, H_GII: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
            kept_GOI = self._kept(W_GOI, H_GII, inputs)
            return restricted_in_groups(H_GII, W_GOI @ H_GII, kept_GOI, W_GOI), kept_GOI

        return (yield from _layer_by_layer(dense, anatomy, images, self, choose))

    def _kept(self, W_GOI: Tensor, H_GII: Tensor, inputs: int) -> Tensor:
        columns = W_GOI.shape[-1]
        rows = max(1, min(ROWS, int(self.memory_gb * 2**30 / (8 * columns**2))))
        n, starts = 0, list[int]()
        if self.pattern != UNSTRUCTURED:
            n, m = n_of_m(self.pattern)
            starts = group_starts(columns, inputs, m)
        groups = zip(W_GOI, H_GII, strict=True)
        traces = [
            greedy(part_OI, H_II, n=n, starts=starts) for W_OI, H_II in groups for part_OI in torch.split(W_OI, rows)
        ]
        order_OT, loss_OT = (torch.cat(each).view(*W_GOI.shape[:2], -1) for each in zip(*traces, strict=True))
        goes = torch.ones_like(loss_OT, dtype=torch.bool)
        if self.pattern == UNSTRUCTURED:
            goes = _cheapest_first(loss_OT, round(self.sparsity * loss_OT.numel()))
        return torch.ones_like(W_GOI, dtype=torch.bool).scatter_(-1, order_OT, ~goes)


def _cheapest_first(loss_OT: Tensor, count: int) -> Tensor:
    """Which steps are taken: so many of the cheapest, and of each row a first part.

    A step that is cheaper than one before it counts as dear as that: it can only come after it.
    """
    order = loss_OT.cummax(-1).values.flatten().sort(stable=True).indices  # of equals the earlier step
    taken = torch.zeros(loss_OT.numel(), dtype=torch.bool, device=loss_OT.device)
    taken[order[:count]] = True
    return taken.view_as(loss_OT)


Choice = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(W_GOI, H_GII, inputs of a tap) → the new weights and which of them stay."""


def _layer_by_layer(
    dense: nn.Module, anatomy: Anatomy, images: Images | None, pruner: BySparseGPT | ByObs, choose: Choice
) -> Long[Masks]:
    check_sparsity(pruner.sparsity)
    check_pattern(pruner.pattern, pruner.sparsity, type(pruner).sparsity)
    rows = rows_of(dense, anatomy, pruner.scope)
    student = None if pruner.inputs == "dense" else deepcopy(dense)
    names = groupable(rows, pruner.pattern, anatomy)
    sweep = Sweep(dense, anatomy, spread(given(images), pruner.images), names, student,
                  by_block=pruner.inputs == "block", memory_gb=pruner.memory_gb)  # fmt: skip
    masks: Masks = {}
    stages = sweep.stages()
    for place, stage in enumerate(stages):
        grams = yield from sweep.grams(stages[place:])
        for name in stage:
            weight, groups = dense.get_parameter(name).detach(), groups_of(dense, name)
            W_GOI, own_GII = as_matrix(weight[rows[name]], groups), grams[name].take("own")
            heard_GI = own_GII.diagonal(dim1=1, dim2=2)[:, None] > 0
            new_GOI, kept_GOI = choose(W_GOI.to(own_GII) * heard_GI, damped(own_GII, pruner.damp), weight.shape[1])
            masks[name] = torch.ones_like(weight, dtype=torch.bool)
            masks[name][rows[name]] = as_weight(kept_GOI.to(weight.device), weight[rows[name]])
            if student is not None:
                with torch.no_grad():
                    student.get_parameter(name)[rows[name]] = as_weight(new_GOI.to(weight), weight[rows[name]])
            yield {"stage": "choose", "done": len(masks), "total": sum(map(len, stages))}
    return {name: masks[name] for name in rows if name in masks}


def group_starts(columns: int, inputs: int, m: int) -> list[int]:
    """Where groups of `m` inputs begin: anew at each tap of a kernel, whose last group may be shorter."""
    return [tap + first for tap in range(0, columns, inputs) for first in range(0, inputs, m)]
