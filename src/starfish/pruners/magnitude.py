"""Magnitude pruning: the smallest weights go. No data, no update (methods.md 3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from starfish.core import Anatomy, Images, Long, Masks, Pruner
from starfish.pruners.select import check_pattern, check_sparsity, rows_of, select, whole
from starfish.scopes import default_scope


@dataclass(frozen=True)
class Magnitude(Pruner):
    """Remove the weights of least absolute value, with exact counts."""

    sparsity: float = 0.5  # fraction removed of the weights in the scope
    scope: str = ""  # which weights; empty takes the architecture's own default
    pattern: str = "unstructured"  # or N:M, N kept of every M consecutive inputs of a row
    per: Literal["layer", "global", "row"] = "layer"  # what is compared with what (unstructured only)

    def settle(self, anatomy: Anatomy, images: Images | None) -> Magnitude:
        return replace(self, scope=self.scope or default_scope(anatomy))

    def choosing(self, dense: nn.Module, anatomy: Anatomy, images: Images | None) -> Long[Masks]:
        yield from ()  # a second at most
        check_sparsity(self.sparsity)
        check_pattern(self.pattern, self.sparsity, Magnitude.sparsity)
        rows = rows_of(dense, anatomy, self.scope)
        scores = {name: dense.get_parameter(name).detach()[rows[name]].abs() for name in rows}
        return whole(select(scores, self.sparsity, self.pattern, self.per, anatomy), rows, dense)
