"""Global magnitude with a limit for each layer, as SNOWS prunes CNNs (methods.md 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from starfish.core import Anatomy, Images, Long, Masks, Pruner
from starfish.errors import UserError
from starfish.pruners.select import check_sparsity, rows_of, whole
from starfish.scopes import default_scope


@dataclass(frozen=True)
class Capped(Pruner):
    """Remove the smallest weights of all layers together; a layer that has lost its most loses no more (SNOWS)."""

    sparsity: float = 0.5  # fraction removed
    most: float = 0.9  # that a layer may lose of its weights; what it is spared the others lose
    of: Literal["scope", "parameters"] = "scope"  # what the sparsity is a fraction of; the authors count all parameters
    scope: str = ""  # which weights; empty takes the architecture's own default

    def settle(self, anatomy: Anatomy, images: Images | None) -> Capped:
        return replace(self, scope=self.scope or default_scope(anatomy))

    def choosing(self, dense: nn.Module, anatomy: Anatomy, images: Images | None) -> Long[Masks]:
        yield from ()  # a second at most
        self._check()
        rows = rows_of(dense, anatomy, self.scope)
        scores = {name: dense.get_parameter(name).detach()[rows[name]].abs() for name in rows}
        return whole(capped(scores, self._count(dense, scores), self.most), rows, dense)

    def _check(self) -> None:
        check_sparsity(self.sparsity)
        if not 0 < self.most <= 1:
            raise UserError(f"`most` is {self.most}", "give the fraction that a layer may lose, above 0 and at most 1")
        if self.of not in ("scope", "parameters"):
            raise UserError(f"`of` is `{self.of}`", "it can be scope, parameters")

    def _count(self, dense: nn.Module, scores: Mapping[str, Tensor]) -> int:
        """How many weights go."""
        counted = scores.values() if self.of == "scope" else list(dense.parameters())
        count = round(self.sparsity * sum(weight.numel() for weight in counted))
        room = sum(_limit(score, self.most) for score in scores.values())
        if count > room:
            raise UserError(
                f"the sparsity {self.sparsity} removes {count} weights, and with `most` {self.most} there are {room}"
                " that may go",
                "give less sparsity, a larger `most` (--set most=0.95) or a larger --scope",
            )
        return count


def capped(scores: Mapping[str, Tensor], count: int, most: float) -> Masks:
    """What stays when the `count` smallest go, but of no layer more than its share; of equals the first are kept."""
    flat = torch.cat([_spared(score.flatten(), _limit(score, most)) for score in scores.values()])
    kept = torch.zeros_like(flat, dtype=torch.bool)
    kept[_descending(flat)[: len(flat) - count]] = True
    parts = torch.split(kept, [score.numel() for score in scores.values()])
    return {name: part.view_as(scores[name]) for name, part in zip(scores, parts, strict=True)}


def _spared(scores: Tensor, limit: int) -> Tensor:
    """Infinite for all but the `limit` smallest: a layer loses its weights in order, so no others can be reached."""
    largest = _descending(scores)[: len(scores) - limit]
    return scores.index_fill(0, largest, math.inf)


def _descending(scores: Tensor) -> Tensor:
    return scores.sort(descending=True, stable=True).indices


def _limit(scores: Tensor, most: float) -> int:
    return int(scores.numel() * most + 1e-9)
