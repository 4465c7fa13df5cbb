"""From scores of single weights to masks: exact counts, N of every M, the rows of a scope (methods.md 0.4)."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from starfish.core import Anatomy, Images, Masks
from starfish.errors import UserError
from starfish.scopes import default_scope, scope

UNSTRUCTURED = "unstructured"


def check_sparsity(sparsity: float) -> None:
    if not 0 < sparsity < 1:
        raise UserError(f"the sparsity is {sparsity}", "give the fraction to remove, between 0 and 1")


def given(images: Images | None) -> Images:
    """Pruners that look at data are never asked without."""
    assert images is not None
    return images


def rows_of(dense: nn.Module, anatomy: Anatomy, name: str) -> dict[str, slice]:
    """Parameter → the rows that may be pruned; an empty name is the architecture's own default."""
    return scope(anatomy, dense, name or default_scope(anatomy))


def select(scores: Mapping[str, Tensor], sparsity: float, pattern: str, per: str, anatomy: Anatomy) -> Masks:
    """What stays of these weights: the largest scores of a layer, of a row or of all of them, or N of every M."""
    if pattern != UNSTRUCTURED:
        return _grouped(scores, *n_of_m(pattern), anatomy)
    if per == "global":
        flat = keep_largest(torch.cat([score.flatten() for score in scores.values()]), sparsity)
        parts = torch.split(flat, [score.numel() for score in scores.values()])
        return {name: part.view_as(scores[name]) for name, part in zip(scores, parts, strict=True)}
    if per == "layer":
        return {name: keep_largest(score.flatten(), sparsity).view_as(score) for name, score in scores.items()}
    return {name: keep_largest(score.flatten(1), sparsity).view_as(score) for name, score in scores.items()}


def whole(kept: Masks, rows: Mapping[str, slice], dense: nn.Module) -> Masks:
    """Masks of whole parameters, true outside the rows of the scope."""
    masks = {}
    for name in kept:
        masks[name] = torch.ones(dense.get_parameter(name).shape, dtype=torch.bool, device=kept[name].device)
        masks[name][rows[name]] = kept[name]
    return masks


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


def check_pattern(pattern: str, sparsity: float, default: float) -> None:
    """A pattern N:M fixes the sparsity; another one, given, would go unheard."""
    if pattern == UNSTRUCTURED:
        return
    n, m = n_of_m(pattern)
    if sparsity != default and abs(sparsity - (1 - n / m)) > 1e-6:
        raise UserError(f"the sparsity is {sparsity} and {pattern} removes {1 - n / m:.4g}", "give one of the two")


def groupable(names: Mapping[str, object], pattern: str, anatomy: Anatomy) -> list[str]:
    """Depthwise filters have one input each, so no groups: they stay whole and out of the masks."""
    if pattern == UNSTRUCTURED:
        return list(names)
    wide = [name for name in names if anatomy.roles[name] != "depthwise"]
    if not wide:
        raise UserError(f"no weight of the scope can take {pattern}", "depthwise filters have one input channel")
    return wide


def _grouped(scores: Mapping[str, Tensor], n: int, m: int, anatomy: Anatomy) -> Masks:
    return {name: n_of_m_mask(scores[name], n, m) for name in groupable(scores, f"{n}:{m}", anatomy)}


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
