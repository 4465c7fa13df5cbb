"""CORP: what the removed units did is folded into those that stay, in closed form (methods.md 10).

N rows, S surviving and P pruned units (times the taps of a kernel), O outputs of the layer that reads them, D width of
a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from starfish.core import Job, Method, Part, Row, Unit
from starfish.masks import apply_
from starfish.patterns import gone
from starfish.statistics import Moments, QueryKeys, Statistic, audible, gathering, path_of, pruned_of, taps_of

FLOOR = 1e-3  # least ridge of the shrinkage formula, as released
SCALED = 1e-4  # ridge as a share of the mean diagonal
SINGULAR_FLOOR = 1e-6  # of the symmetrised query-key map, as released
TINY = 1e-300


@dataclass(frozen=True)
class Corp(Method):
    """Fold what the removed units did into those that stay, in closed form; no training."""

    fold: Literal["affine", "bias", "none"] = "affine"  # bias: only their mean; none: the control
    ridge: Literal["scaled", "shrinkage"] = "scaled"  # of neurons and channels; shrinkage: as released, with its floor
    pairs: Literal["per_image", "pooled"] = "per_image"  # which query meets which key; pooled as released
    center_keys: bool = True  # fit logits up to what softmax ignores; false as released
    symmetrize: bool = False  # true as released, and worse than no compensation on some data
    scale: Literal["dense", "reduced"] = "dense"  # of the softmax; reduced: as if divided by the root of the new width
    schedule: Literal["global", "layerwise"] = "global"  # layerwise: blocks in order, statistics behind those cut
    memory_gb: float = 2.0  # of statistics at a time; what needs more takes another pass over the images

    def needs(self) -> frozenset[str]:
        return frozenset({"units"})

    def masked(self) -> bool:
        return True

    def also_changes(self, job: Job) -> frozenset[str]:
        units = [unit for unit, _ in _pruned(job) if audible(job.dense, unit)]
        biases = {part.parameter for unit in units if unit.kind == "qk" for part in unit.parts}
        shifts = {job.anatomy.shifts[part.parameter][0] for unit in units for part in unit.readers
                  if part.parameter in job.anatomy.shifts}  # fmt: skip
        return frozenset((biases | shifts) - job.masks.keys())

    def fit(self, job: Job) -> Iterator[Row]:
        """All that is folded starts from the dense weights, so that a resumed run does the same over again.

        It finds its statistics in the cache, and does not yield a second time the rows that were seen before.
        """
        seen = int(job.state.get("step", 0))
        folds = [fold for unit, dead in _pruned(job) if audible(job.dense, unit) for fold in _folds(self, job, unit, dead)]
        _start_over_(job, folds, self.also_changes(job))
        silent = [unit for unit, _ in _pruned(job) if not audible(job.dense, unit)]
        behind = deepcopy(job.dense) if self.schedule == "layerwise" else job.dense
        steps, step = len(silent) + len(folds), 0
        for unit in silent:
            step += 1
            if step > seen:
                job.state["step"] = step
                yield {"step": step, "steps": steps, "block": unit.block, "kind": unit.kind, "left_out": UNHEARD}
        for chunk in self._chunks(folds):
            statistics = [fold.statistic for fold in chunk]
            yield from gathering(behind, job.anatomy, job.images, statistics, job.cache, "statistics")
            for fold in chunk:
                row = fold.solve()
                fold.write_(job.model)
                apply_(job.model, {name: job.masks[name] for name in fold.tensors() if name in job.masks})
                if self.schedule == "layerwise":
                    fold.write_(behind)
                fold.forget()
                step += 1
                if step > seen:
                    job.state["step"] = step
                    yield {"step": step, "steps": len(folds), "block": fold.unit.block, "kind": fold.unit.kind, **row}

    def _chunks(self, folds: Sequence[_Fold]) -> Iterator[list[_Fold]]:
        """As many at a time as memory holds; block by block where the statistics follow what was cut."""
        chunk: list[_Fold] = []
        for fold in folds:
            held = sum(other.statistic.bytes() for other in (*chunk, fold))
            new_block = self.schedule == "layerwise" and chunk and chunk[-1].unit.block != fold.unit.block
            if chunk and (held > self.memory_gb * 2**30 or new_block):
                yield chunk
                chunk = []
            chunk.append(fold)
        if chunk:
            yield chunk


def foldable(job: Job) -> bool:
    """Has the mask units gone whole that this method can do something for?"""
    return any(audible(job.dense, unit) for unit, _ in _pruned(job))


def _pruned(job: Job) -> list[tuple[Unit, Tensor]]:
    """Families that lost units, and which, in the order of the network."""
    found = [(unit, gone(unit, job.masks, job.anatomy)) for unit in job.anatomy.units]
    return [(unit, dead) for unit, dead in found if dead.any() and not dead.all()]
