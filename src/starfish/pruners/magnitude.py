"""Magnitude pruning: the smallest weights go. No data, no update (methods.md 3)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from starfish.core import Anatomy, Images, Long, Masks, Pruner
from starfish.errors import UserError
from starfish.scopes import default_scope, scope


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
        return self._masks(dense, anatomy)

    def _masks(self, dense: nn.Module, anatomy: Anatomy) -> Masks:
        if not 0 < self.sparsity < 1:
            raise UserError(f"the sparsity is {self.sparsity}", "give the fraction to remove, between 0 and 1")
        rows = scope(anatomy, dense, self.scope or default_scope(anatomy))
        weights = {name: dense.get_parameter(name).detach() for name in rows}
        scores = {name: weights[name][rows[name]].abs() for name in rows}
        if self.pattern == "unstructured":
            kept = self._unstructured(scores)
        else:
            kept = _grouped(scores, *self._n_of_m(), anatomy)
        masks = {}
        for name in kept:
            masks[name] = torch.ones_like(weights[name], dtype=torch.bool)
            masks[name][rows[name]] = kept[name]
        return masks

    def _n_of_m(self) -> tuple[int, int]:
        """The pattern fixes the sparsity; another one, given, would go unheard."""
        n, m = n_of_m(self.pattern)
        if self.sparsity != Magnitude.sparsity and abs(self.sparsity - (1 - n / m)) > 1e-6:
            raise UserError(
                f"the sparsity is {self.sparsity} and {self.pattern} removes {1 - n / m:.4g}", "give one of the two"
            )
        return n, m

    def _unstructured(self, scores: dict[str, Tensor]) -> Masks:
        if self.per == "global":
            flat = keep_largest(torch.cat([score.flatten() for score in scores.values()]), self.sparsity)
            parts = torch.split(flat, [score.numel() for score in scores.values()])
            return {name: part.view_as(scores[name]) for name, part in zip(scores, parts, strict=True)}
        if self.per == "layer":
            return {name: keep_largest(score.flatten(), self.sparsity).view_as(score) for name, score in scores.items()}
        return {name: keep_largest(score.flatten(1), self.sparsity).view_as(score) for name, score in scores.items()}


def keep_largest(scores: Tensor, sparsity: float) -> Tensor:
    """True for all but the `round(sparsity·n)` smallest along the last dimension; of equals the first are kept."""
    count = scores.shape[-1] - round(sparsity * scores.shape[-1])
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :count], True)


def n_of_m(pattern: str) -> tuple[int, int]:
    """ "2:4" → (2, 4)."""
    found = re.fullmatch(r"(\d+):(\d+)", pattern)
    if not found or not 0 < int(found[1]) < int(found[2]):
        raise UserError(f"the pattern is `{pattern}`", "give unstructured, or N:M with 0 < N < M, such as 2:4")
    return int(found[1]), int(found[2])


def _grouped(scores: dict[str, Tensor], n: int, m: int, anatomy: Anatomy) -> Masks:
    """Depthwise filters have one input each, so no groups: they stay whole and out of the masks."""
    wide = {name: score for name, score in scores.items() if anatomy.roles[name] != "depthwise"}
    if not wide:
        raise UserError(f"no weight of the scope can take {n}:{m}", "depthwise filters have one input channel")
    return {name: n_of_m_mask(score, n, m) for name, score in wide.items()}


def n_of_m_mask(scores: Tensor, n: int, m: int) -> Tensor:
    """Keep the `n` largest of every `m` consecutive inputs; for convolutions groups run along input channels.

    A trailing remainder of r < m keeps min(n, r).
    """
    rows = scores.movedim(1, -1)  # (o, k, k, i): inputs last
    inputs = rows.shape[-1]
    padded = torch.nn.functional.pad(rows, (0, -inputs % m), value=-1.0)
    groups = padded.reshape(*padded.shape[:-1], -1, m)
    order = groups.sort(dim=-1, descending=True, stable=True).indices
    kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order[..., :n], True)
    return kept.flatten(-2)[..., :inputs].movedim(-1, 1).contiguous()
