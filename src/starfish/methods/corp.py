"""CORP: what the removed units did is folded into those that stay, in closed form (methods.md 10).

The method: which units, in which order, with how much memory. The algebra is in folds.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from starfish.core import FromDense, Job, Row, Unit
from starfish.data import spread
from starfish.masks import apply_, restart_
from starfish.methods.folds import ColumnFold, Fold, QueryKeyFold
from starfish.patterns import gone
from starfish.statistics import Moments, QueryKeys, audible, gathering, path_of, taps_of

UNHEARD = "starfish has no class for this attention, so its query-key dimensions stay as the mask left them"


@dataclass(frozen=True)
class Corp(FromDense):
    """Fold what the removed units did into those that stay, in closed form; no training."""

    fold: Literal["affine", "bias", "none"] = "affine"  # bias: only their mean; none: the control
    ridge: Literal["scaled", "shrinkage"] = "scaled"  # of neurons and channels; shrinkage: as released, with its floor
    pairs: Literal["per_image", "pooled"] = "per_image"  # which query meets which key; pooled as released
    center_keys: bool = True  # fit logits up to what softmax ignores; false as released
    symmetrize: bool = False  # true as released, and worse than no compensation on some data
    scale: Literal["dense", "reduced"] = "dense"  # of the softmax; reduced: as if divided by the root of the new width
    schedule: Literal["global", "layerwise"] = "global"  # layerwise: blocks in order, statistics behind those cut
    images: int = 512  # of which statistics are taken, spread over all there are; 0: all
    memory_gb: float = 2.0  # of statistics at a time; what needs more takes another pass over the images

    def needs(self) -> frozenset[str]:
        return frozenset({"units"})

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
        seen, step = int(job.state.get("step", 0)), 0
        for row in self._folding(job):
            if "stage" not in row:
                step += 1
                if step <= seen:
                    continue
                job.state["step"] = step
                row["step"] = step
            yield row

    def _folding(self, job: Job) -> Iterator[Row]:
        pruned = _pruned(job)
        silent = [unit for unit, _ in pruned if not audible(job.dense, unit)]
        folds = [fold for unit, dead in pruned if unit not in silent for fold in self._folds(job, unit, dead)]
        steps = len(silent) + len(folds)
        for unit in silent:
            yield {"steps": steps, "block": unit.block, "kind": unit.kind, "left_out": UNHEARD}
        _start_over_(job, folds)
        behind = deepcopy(job.dense) if self.schedule == "layerwise" else job.dense
        images = spread(job.images, self.images)
        for chunk in self._chunks(folds):
            statistics = [fold.statistic for fold in chunk]
            yield from gathering(behind, job.anatomy, images, statistics, job.cache, "statistics")
            for fold in chunk:
                found = fold.solve()
                fold.write_(job.model)
                apply_(job.model, {name: job.masks[name] for name in fold.tensors() if name in job.masks})
                if behind is not job.dense:
                    fold.write_(behind)
                fold.forget()
                yield {"steps": steps, "block": fold.unit.block, "kind": fold.unit.kind, **found}

    def _folds(self, job: Job, unit: Unit, dead: Tensor) -> Iterator[Fold]:
        if unit.kind == "qk":
            yield from self._query_key_folds(job, unit, dead)
            return
        taps = max(taps_of(job.dense.get_submodule(path_of(part))) for part in unit.readers)
        yield ColumnFold(job.dense, unit, dead, Moments(unit, taps=taps), self.fold, self.ridge == "shrinkage",
                         job.anatomy.shifts)  # fmt: skip

    def _query_key_folds(self, job: Job, unit: Unit, dead: Tensor) -> Iterator[Fold]:
        """As many heads of an attention at a time as memory holds."""
        kept = tuple(tuple((~head).nonzero()[:, 0].tolist()) for head in dead.view(unit.groups, -1))

        def statistic(first: int, last: int) -> QueryKeys:
            return QueryKeys(unit, first=first, kept=kept[first:last], per_image=self.pairs == "per_image",
                             center=self.center_keys)  # fmt: skip

        heads = max(
            1, int(self.memory_gb * 2**30 // max(statistic(head, head + 1).bytes() for head in range(unit.groups)))
        )
        for first in range(0, unit.groups, heads):
            fitted = self.fold == "affine"
            yield QueryKeyFold(job.dense, unit, dead, statistic(first, first + heads), fitted, self.symmetrize,
                               self.scale == "reduced")  # fmt: skip

    def _chunks(self, folds: Sequence[Fold]) -> Iterator[list[Fold]]:
        """As many at a time as memory holds; block by block where the statistics follow what was cut."""
        chunk: list[Fold] = []
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


def share_gone(job: Job) -> float:
    """Of the units of all families that lost some."""
    dead = torch.cat([dead for _, dead in _pruned(job)])
    return float(dead.double().mean())


def _pruned(job: Job) -> list[tuple[Unit, Tensor]]:
    """Families that lost units, and which, in the order of the network."""
    found = [(unit, gone(unit, job.masks, job.anatomy)) for unit in job.anatomy.units]
    return [(unit, dead) for unit, dead in found if dead.any() and not dead.all()]


def _start_over_(job: Job, folds: Sequence[Fold]) -> None:
    restart_(job.model, job.dense, {name for fold in folds for name in fold.tensors()}, job.masks)
