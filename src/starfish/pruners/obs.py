"""Choices that take the weights which stay along: SparseGPT, block by block, and ExactOBS, one by one (methods.md 4).

O rows and I columns of a layer's weight as a matrix, G groups; see grams.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from starfish.core import Anatomy, Images, Long, Masks, Pruner
from starfish.data import spread
from starfish.grams import Inputs, Sweep, as_matrix, as_weight, groups_of
from starfish.methods.solves import damped, greedy, restricted, sparsegpt, upper
from starfish.pruners.select import (
    UNSTRUCTURED,
    check_pattern,
    check_sparsity,
    given,
    groupable,
    keep_largest,
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
        def choose(W_OI: Tensor, H_II: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
            if self.pattern == UNSTRUCTURED:
                new_OI, kept_OI, _ = sparsegpt(W_OI, upper(H_II), self._smallest, block=self.block)
            else:
                starts = group_starts(W_OI.shape[1], inputs, n_of_m(self.pattern)[1])
                new_OI, kept_OI, _ = sparsegpt(W_OI, upper(H_II), self._in_groups, block=self.block, starts=starts)
            return new_OI, kept_OI

        return (yield from _layer_by_layer(dense, anatomy, images, self, choose))

    def _smallest(self, part: slice, W_OI: Tensor, diagonal_I: Tensor) -> Tensor:
        """Of the whole block; rounded so that the blocks add up to the share of the layer."""
        gone = [round(self.sparsity * len(W_OI) * column) for column in (part.start, part.stop)]
        score = (W_OI / diagonal_I).square().flatten()
        order = score.sort(descending=True, stable=True).indices
        kept = torch.zeros_like(score, dtype=torch.bool)
        kept[order[: len(order) - (gone[1] - gone[0])]] = True
        return kept.view_as(W_OI)

    def _in_groups(self, part: slice, W_OI: Tensor, diagonal_I: Tensor) -> Tensor:
        n, order = (
            n_of_m(self.pattern)[0],
            (W_OI / diagonal_I).square().sort(dim=1, descending=True, stable=True).indices,
        )
        return torch.zeros_like(W_OI, dtype=torch.bool).scatter_(1, order[:, :n], True)


@dataclass(frozen=True)
class ByObs(Pruner):
    """Remove weights one by one, each row the one that it misses least after all corrections so far (ExactOBS)."""

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
        def choose(W_OI: Tensor, H_II: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
            kept_OI = self._kept(W_OI, H_II, inputs)
            return restricted(H_II, W_OI @ H_II, kept_OI, W_OI), kept_OI

        return (yield from _layer_by_layer(dense, anatomy, images, self, choose))

    def _kept(self, W_OI: Tensor, H_II: Tensor, inputs: int) -> Tensor:
        if self.pattern != UNSTRUCTURED:
            n, m = n_of_m(self.pattern)
            starts = group_starts(W_OI.shape[1], inputs, m)
            parts = [greedy(rows_OI, H_II, n=n, starts=starts)[0] for rows_OI in torch.split(W_OI, ROWS)]
            return torch.ones_like(W_OI, dtype=torch.bool).scatter_(1, torch.cat(parts), False)
        traces = [greedy(rows_OI, H_II) for rows_OI in torch.split(W_OI, ROWS)]
        order_OI, loss_OI = (torch.cat(parts) for parts in zip(*traces, strict=True))
        rising_OI = loss_OI.cummax(
            1
        ).values  # a row can only lose a first part of its order: what follows a dear step is as dear
        stays_OI = keep_largest(rising_OI.flatten(), self.sparsity).view_as(rising_OI)
        return torch.ones_like(W_OI, dtype=torch.bool).scatter_(1, order_OI, stays_OI)


Choice = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(W_OI, H_II, inputs of a tap) → the new weights and which of them stay."""


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
            W_GOI = as_matrix(weight[rows[name]], groups)
            kept_GOI, new_GOI = torch.ones_like(W_GOI, dtype=torch.bool), W_GOI.clone()
            for g, H_II in enumerate(grams[name].take("own")):
                heard_II = damped(H_II, pruner.damp)
                new, kept = choose(W_GOI[g].to(H_II) * (H_II.diagonal() > 0), heard_II, weight.shape[1])
                kept_GOI[g], new_GOI[g] = kept.to(weight.device), new.to(weight)
            masks[name] = torch.ones_like(weight, dtype=torch.bool)
            masks[name][rows[name]] = as_weight(kept_GOI, weight[rows[name]])
            if student is not None:
                with torch.no_grad():
                    student.get_parameter(name)[rows[name]] = as_weight(new_GOI, weight[rows[name]])
            yield {"stage": "choose", "done": len(masks), "total": sum(map(len, stages))}
    return {name: masks[name] for name in rows if name in masks}


def group_starts(columns: int, inputs: int, m: int) -> Sequence[int]:
    """Where groups of `m` inputs begin: anew at each tap of a kernel, whose last group may be shorter."""
    return [tap + first for tap in range(0, columns, inputs) for first in range(0, inputs, m)]
