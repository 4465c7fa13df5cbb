"""What a mask looks like: unstructured, N:M, whole rows, columns and units; and what keeps it from being cut out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from starfish.core import Anatomy, Masks, Part, Unit
from starfish.masks import sparsity, zeros


@dataclass(frozen=True)
class LayerSummary:
    name: str
    role: str  # "" where no anatomy was given
    shape: tuple[int, ...]
    sparsity: float
    zeros: int
    pattern: str


@dataclass(frozen=True)
class UnitSummary:
    block: str
    kind: str
    count: int
    gone: tuple[int, ...]  # head by head
    text: str  # "neurons 384/768" of which 384 are gone


@dataclass(frozen=True)
class Summary:
    sparsity: float
    pattern: str  # of all tensors that are not dense, or "mixed: …"
    layers: tuple[LayerSummary, ...]
    units: tuple[UnitSummary, ...]  # those families that lost a unit
    inconsistencies: tuple[str, ...]


def summarise(masks: Masks, anatomy: Anatomy | None = None) -> Summary:
    """What is pruned where and in which pattern, and what keeps it from being cut out."""
    families = [_Family(unit, masks, anatomy) for unit in anatomy.units] if anatomy else []
    layers = tuple(
        LayerSummary(
            name=name,
            role=anatomy.roles.get(name, "") if anatomy else "",
            shape=tuple(mask.shape),
            sparsity=sparsity({name: mask}),
            zeros=zeros(mask),
            pattern=_pattern(name, mask, families),
        )
        for name, mask in masks.items()
    )
    patterns = list(dict.fromkeys(layer.pattern for layer in layers if layer.pattern != "dense")) or ["dense"]
    return Summary(
        sparsity=sparsity(masks),
        pattern=patterns[0] if len(patterns) == 1 else f"mixed: {', '.join(patterns)}",
        layers=layers,
        units=tuple(family.summary() for family in families if bool(family.gone.any())),
        inconsistencies=tuple(text for family in families if family.meant(layers) for text in family.inconsistencies()),
    )


def gone(unit: Unit, masks: Masks, anatomy: Anatomy) -> Tensor:
    """(count,): true for the members of a family whose weights are all zero, in every tensor that they run through."""
    return _Family(unit, masks, anatomy).gone.cpu()


def loses_channels(masks: Masks) -> bool:
    """Has a convolution lost whole output channels? Looking for which go together takes a while."""
    return any(mask.ndim > 2 and not bool(mask.flatten(1).any(1).all()) for mask in masks.values())


STRUCTURED = ("rows", "columns", "rows+columns")
NAMES = {"neuron": "neurons", "qk": "qk dims", "channel": "channels"}


class _Family:
    """A unit of the anatomy seen through the masks: which of its `count` members are gone."""

    def __init__(self, unit: Unit, masks: Masks, anatomy: Anatomy) -> None:
        self.unit = unit
        self.name = NAMES.get(unit.kind, unit.kind)
        self.dead = {part: _dead(unit, part, masks) for part in unit.parts if _is_weight(part, masks, anatomy)}
        dead = torch.stack([*self.dead.values()]) if self.dead else torch.zeros(1, unit.count, dtype=torch.bool)
        self.gone = dead.all(0)
        self.partly = dead.any(0) & ~self.gone
        self.by_head = tuple(int(lost) for lost in self.gone.view(unit.groups, -1).sum(1))
        self.silent = _silent_heads(unit, masks, anatomy) if unit.kind == "qk" else set()  # they stay, as zeros

    def summary(self) -> UnitSummary:
        unit, low, high = self.unit, min(self.by_head), max(self.by_head)
        if unit.kind == "qk":
            lost = str(low) if low == high else f"{low} to {high}"
            text = f"{self.name} {lost}/{unit.count // unit.groups} per head"
        else:
            text = f"{self.name} {sum(self.by_head)}/{unit.count}"
        return UnitSummary(unit.block, unit.kind, unit.count, self.by_head, text)

    def meant(self, layers: tuple[LayerSummary, ...]) -> bool:
        """Were units pruned on purpose? In an unstructured or N:M mask a row may die by chance."""
        parameters = {part.parameter for part in self.dead}
        return any(layer.name in parameters and layer.pattern in {*STRUCTURED, self.name} for layer in layers)

    def inconsistencies(self) -> list[str]:
        found = []
        if count := int(self.partly.sum()):
            per_part = {_place(part): int((dead & self.partly).sum()) for part, dead in self.dead.items()}
            where = ", ".join(f"{dead} in {place}" for place, dead in per_part.items())
            found.append(
                f"`{self.unit.block}`: {count} of {self.unit.count} {self.name} are zero in some of their weights only"
                f" ({where}), so they cannot be cut out"
            )
        heard = {lost for head, lost in enumerate(self.by_head) if head not in self.silent}
        if self.unit.kind == "qk" and len(heard) > 1:
            lost = ", ".join(str(count) for count in self.by_head)
            found.append(f"`{self.unit.block}`: the heads lose unequal numbers of {self.name} ({lost})")
        return found


def _silent_heads(unit: Unit, masks: Masks, anatomy: Anatomy) -> set[int]:
    """Heads whose values nothing reads: their columns of the attention's output layer are all zero."""
    outs = [name for name, mask in masks.items() if anatomy.roles.get(name) == "out"
            and name.startswith(f"{unit.holder}.") and mask.shape[1] % unit.groups == 0]  # fmt: skip
    silent: set[int] = set()
    for name in outs:
        heads = masks[name].any(0).view(unit.groups, -1).any(1)
        silent |= set((~heads).nonzero()[:, 0].tolist())
    return silent


def _is_weight(part: Part, masks: Masks, anatomy: Anatomy) -> bool:
    """Biases do not count: those of a unit whose weights are zero change nothing, and masks leave them alone."""
    if part.parameter in masks:
        return masks[part.parameter].ndim > 1
    return part.parameter in anatomy.roles


def _dead(unit: Unit, part: Part, masks: Masks) -> Tensor:
    """(count,): true where all of this part of a unit is zero."""
    if part.parameter not in masks:
        return torch.zeros(unit.count, dtype=torch.bool)
    return ~_members(masks[part.parameter], part, unit.count).reshape(unit.count, -1).any(1)


def _members(mask: Tensor, part: Part, count: int) -> Tensor:
    """A view of the mask with the units in front."""
    return mask.narrow(part.dim, part.start, count).movedim(part.dim, 0)


def _place(part: Part) -> str:
    start = f" from {part.start}" if part.start else ""
    return f"`{part.parameter}` {'rows' if part.dim == 0 else 'columns'}{start}"


def _pattern(name: str, mask: Tensor, families: list[_Family]) -> str:
    if bool(mask.all()):
        return "dense"
    return _unit_pattern(name, mask, families) or _line_pattern(mask) or _n_m_pattern(mask) or "unstructured"


def _unit_pattern(name: str, mask: Tensor, families: list[_Family]) -> str:
    """The kind of unit whose members that are gone explain every zero, if there is one."""
    expected = torch.ones_like(mask)
    kinds = set()
    for family in families:
        for part in family.unit.parts:
            if part.parameter == name and bool(family.gone.any()):
                _members(expected, part, family.unit.count)[family.gone] = False
                kinds.add(family.name)
    return "+".join(sorted(kinds)) if torch.equal(expected, mask) else ""


def _line_pattern(mask: Tensor) -> str:
    """Whole rows (of an output) or columns (of an input) zero, and no other entry."""
    if mask.ndim < 2:
        return "rows"
    entries = mask.reshape(*mask.shape[:2], -1)  # (o, i, k·k)
    rows, columns = entries.any(2).any(1)[:, None, None], entries.any(2).any(0)[None, :, None]
    if torch.equal(rows.expand_as(entries), entries):
        return "rows"
    if len(mask) == 1:  # a lone row is made of columns whatever its pattern
        return ""
    if torch.equal(columns.expand_as(entries), entries):
        return "columns"
    return "rows+columns" if torch.equal((rows & columns).expand_as(entries), entries) else ""


def _n_m_pattern(mask: Tensor) -> str:
    """N kept of every M along the inputs, the last and shorter group of a row keeping min(N, its length)."""
    rows = mask.movedim(1, -1).flatten(1)  # conv: (o, i, k, k) → (o, k·k·i)
    for m in (2, 4, 8, 16, 32):
        whole = rows.shape[1] // m * m
        if not whole:
            break
        kept = rows[:, :whole].reshape(-1, m).sum(1)
        rest = rows[:, whole:]
        n = int(kept[0])
        if 0 < n < m and bool((kept == n).all()) and bool((rest.sum(1) == min(n, rest.shape[1])).all()):
            return f"{n}:{m}"
    return ""
