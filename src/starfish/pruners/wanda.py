"""Wanda: a weight counts as much as what it puts out, its size times that of what it reads (methods.md 3)."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from starfish.core import Anatomy, Images, Long, Masks, Pruner
from starfish.data import spread
from starfish.grams import Inputs, Sweep, as_matrix, as_weight, groups_of
from starfish.masks import apply_
from starfish.pruners.select import check_pattern, check_sparsity, given, groupable, rows_of, select, whole
from starfish.scopes import default_scope


@dataclass(frozen=True)
class Wanda(Pruner):
    """Remove the weights of least size times what they read, compared within each row (Wanda)."""

    sparsity: float = 0.5  # fraction removed of the weights in the scope
    scope: str = ""  # which weights; empty takes the architecture's own default
    pattern: str = "unstructured"  # or N:M, N kept of every M consecutive inputs of a row
    per: Literal["row", "layer"] = "row"  # what is compared with what (unstructured only)
    inputs: Inputs = "block"  # what layers read: as in the dense model, or behind the blocks, or layers, pruned before
    images: int = 512  # of which statistics are taken, spread over all there are; 0: all

    def needs(self) -> frozenset[str]:
        return frozenset({"images"})

    def settle(self, anatomy: Anatomy, images: Images | None) -> Wanda:
        return replace(self, scope=self.scope or default_scope(anatomy))

    def choosing(self, dense: nn.Module, anatomy: Anatomy, images: Images | None) -> Long[Masks]:
        check_sparsity(self.sparsity)
        check_pattern(self.pattern, self.sparsity, Wanda.sparsity)
        rows = rows_of(dense, anatomy, self.scope)
        student = None if self.inputs == "dense" else deepcopy(dense)
        names = groupable(rows, self.pattern, anatomy)
        sweep = Sweep(dense, anatomy, spread(given(images), self.images), names, student,
                      by_block=self.inputs == "block", diagonal=True)  # fmt: skip
        masks: Masks = {}
        stages = sweep.stages()
        for place in range(len(stages)):
            grams = yield from sweep.grams(stages[place:])
            scores = {}
            for name, gram in grams.items():
                weight = dense.get_parameter(name).detach()
                norm_GI = gram.take("square").sqrt()
                score_GOI = as_matrix(weight, groups_of(dense, name)).abs() * norm_GI[:, None].to(weight)
                scores[name] = as_weight(score_GOI, weight)[rows[name]]
            chosen = whole(select(scores, self.sparsity, self.pattern, self.per, anatomy), rows, dense)
            if student is not None:
                apply_(student, chosen)
            masks |= chosen
        return {name: masks[name] for name in rows if name in masks}
