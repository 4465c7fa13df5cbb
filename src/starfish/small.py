"""Whole units gone ⇄ a physically smaller model. What is cut is decided by the masks, how by anatomy/narrow.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from starfish.anatomy import find, unwrap
from starfish.anatomy.attention import narrow_attention, narrowable
from starfish.anatomy.layers import layers_of
from starfish.anatomy.narrow import attentions_, narrow_
from starfish.core import Anatomy, Masks, Unit
from starfish.data import as_images
from starfish.devices import to_device
from starfish.errors import UserError, listed
from starfish.patterns import gone, loses_channels, summarise

AGREEMENT = 1e-4  # of the largest logit: how far a small model may be from the masked one, in float32
Widths = dict[str, list[int]]
"""Tensor → its shape, for those that are smaller than in the dense model."""


@dataclass(frozen=True)
class Cut:
    """What goes, seen from every tensor that it goes through."""

    kept: dict[tuple[str, int], Tensor]  # (tensor, dimension) → bool, true where it stays
    outputs: dict[str, Tensor]  # block → which channels of its output stay
    attentions: tuple[str, ...]  # whose queries become narrower
    families: tuple[tuple[Unit, Tensor], ...]  # a unit and which of its members go

    def __bool__(self) -> bool:
        return bool(self.families)

    def counts(self) -> dict[str, dict[str, int]]:
        """How many units of each kind there were, and how many go."""
        found: dict[str, dict[str, int]] = {}
        for unit, dead in self.families:
            kind = found.setdefault(unit.kind, {"units": 0, "gone": 0})
            kind["units"] += unit.count
            kind["gone"] += int(dead.sum())
        return found

    def of(self, name: str) -> list[tuple[int, Tensor]]:
        """(dimension, indices that stay) of one tensor."""
        return [(dim, kept.nonzero()[:, 0]) for (tensor, dim), kept in self.kept.items() if tensor == name]


def cut_of(masks: Masks, anatomy: Anatomy, model: nn.Module) -> Cut:
    """Everything that can be cut: units gone whole, as many in each head, from layers that can be made smaller."""
    families = tuple((unit, dead) for unit, dead in _families(masks, anatomy, model) if bool(dead.any()))
    kept: dict[tuple[str, int], Tensor] = {}
    outputs: dict[str, Tensor] = {}
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for unit, dead in families:
        for part in unit.parts:
            size = tensors[part.parameter].shape[part.dim]
            stays = kept.setdefault((part.parameter, part.dim), torch.ones(size, dtype=torch.bool))
            stays[part.start : part.start + unit.count][dead] = False
        for block, start in unit.outputs:
            size = max(s + u.count for u in anatomy.units for b, s in u.outputs if b == block)
            stays = outputs.setdefault(block, torch.ones(size, dtype=torch.bool))
            stays[start : start + unit.count][dead] = False
    return Cut(kept, outputs, tuple(unit.holder for unit, _ in families if unit.holder), families)


def _families(masks: Masks, anatomy: Anatomy, model: nn.Module) -> Iterator[tuple[Unit, Tensor]]:
    others = _other_names(model)
    for unit in anatomy.units:
        dead = gone(unit, masks, anatomy)
        if any(part.parameter in others for part in unit.parts):
            continue  # where else they are used they may be needed whole
        if unit.kind == "qk":
            by_head = dead.view(unit.groups, -1).sum(1)
            if len(set(by_head.tolist())) > 1 or not narrowable(model.get_submodule(unit.holder)):
                continue
        if dead.all():
            dead = dead.view(unit.groups, -1).clone()
            dead[:, 0] = False  # a layer of no width is no layer; its one unit is zero
            dead = dead.flatten()
        yield unit, dead


def _other_names(model: nn.Module) -> dict[str, list[str]]:
    """Of tensors that go by several names: each name → the others."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names: dict[int, list[str]] = {}
    for name, tensor in tensors:
        names.setdefault(id(tensor), []).append(name)
    return {name: [other for other in same if other != name] for same in names.values() for name in same if same[1:]}


def slim(model: nn.Module, masks: Masks, images: Any, *, blocks: str | None = None) -> nn.Module:
    """A new, smaller model that computes what the masked one computes; refused by name where it cannot be formed.

    `images` show the model's input, as in `prune`.
    """
    model, images = unwrap(model), as_images(images)
    inputs = to_device(images.batch([0, len(images) - 1]), next(model.parameters()).device)
    return slimmed(model, masks, find(model, inputs, blocks=blocks, channels=loses_channels(masks)))


def slimmed(model: nn.Module, masks: Masks, anatomy: Anatomy) -> nn.Module:
    """`slim` where the architecture has been looked at already."""
    summary = summarise(masks, anatomy)
    if summary.inconsistencies:
        raise UserError(
            f"this mask cannot be cut out: {'; '.join(summary.inconsistencies[:3])}",
            "masks whose units are whole can: `starfish prune --pattern structured` makes such",
        )
    others = _other_names(model)
    for unit in (unit for unit in anatomy.units if bool(gone(unit, masks, anatomy).any())):
        if unit.kind == "qk":
            narrow_attention(unit.holder, model.get_submodule(unit.holder))  # refused by name where there is none
        for part in unit.parts:
            if part.parameter in others:
                raise UserError(
                    f"`{part.parameter}` is shared with {listed(others[part.parameter])}, so it cannot be made smaller"
                )
    cut = cut_of(masks, anatomy, model)
    if not cut:
        raise UserError(
            "no unit of this mask is gone whole: there is nothing to cut out",
            "an unstructured or N:M mask leaves every layer its size; `starfish inspect FILE --model MODEL` shows it",
        )
    return smaller(model, cut)


def smaller(model: nn.Module, cut: Cut) -> nn.Module:
    """A copy of the model with these units cut out."""
    small = deepcopy(model)
    attentions_(small, cut.attentions)
    narrow_(small, {name: cut.of(name) for name, _ in cut.kept})
    return small


def smaller_masks(masks: Masks, cut: Cut) -> Masks:
    """What is left of the masks."""
    return {name: _select(mask, cut.of(name)) for name, mask in masks.items()}


def smaller_anatomy(anatomy: Anatomy, cut: Cut) -> Anatomy:
    """The same blocks and roles; units count what is left of them."""
    going = {id(unit): dead for unit, dead in cut.families}
    return replace(anatomy, units=tuple(_smaller_unit(unit, going.get(id(unit)), cut) for unit in anatomy.units))


def _smaller_unit(unit: Unit, dead: Tensor | None, cut: Cut) -> Unit:
    count = unit.count if dead is None else int((~dead).sum())
    parts = tuple(
        replace(part, start=_before(cut.kept.get((part.parameter, part.dim)), part.start)) for part in unit.parts
    )
    outputs = tuple((block, _before(cut.outputs.get(block), start)) for block, start in unit.outputs)
    return replace(unit, count=count, parts=parts, outputs=outputs)


def _before(kept: Tensor | None, start: int) -> int:
    return start if kept is None else int(kept[:start].sum())


@torch.no_grad()
def grow_(model: nn.Module, small: nn.Module, cut: Cut) -> None:
    """Write the small model's tensors back where they were cut from; what was cut stays as it is."""
    whole = model.state_dict()
    for name, tensor in small.state_dict().items():
        cuts = cut.of(name)
        if cuts:
            _scatter_(whole[name], tensor, cuts)
        else:
            whole[name].copy_(tensor)


def _scatter_(whole: Tensor, small: Tensor, cuts: list[tuple[int, Tensor]]) -> None:
    index: list[Tensor] = [torch.arange(size, device=whole.device) for size in whole.shape]
    for dim, indices in cuts:
        index[dim] = indices.to(whole.device)
    whole[torch.meshgrid(*index, indexing="ij")] = small


def _select(tensor: Tensor, cuts: list[tuple[int, Tensor]]) -> Tensor:
    for dim, indices in cuts:
        tensor = tensor.index_select(dim, indices.to(tensor.device))
    return tensor


def widths(dense: Mapping[str, Tensor], small: Mapping[str, Tensor]) -> Widths:
    """What to write down so that `rebuild_` can make the small model's modules again."""
    return {name: list(tensor.shape) for name, tensor in small.items() if tensor.shape != dense[name].shape}


def rebuild_(model: nn.Module, found: Widths, attentions: list[str]) -> None:
    """Give a freshly built dense model the sizes of a small one; its weights are to be loaded next."""
    attentions_(model, attentions)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    unknown = [name for name in found if name not in tensors or len(found[name]) != tensors[name].ndim]
    if unknown:
        raise UserError(f"the small model has {listed(unknown)}, which this architecture does not have in that form")
    narrow_(model, {name: _first(shape, tensors[name].shape) for name, shape in found.items()})


def _first(shape: list[int], whole: torch.Size) -> list[tuple[int, Tensor]]:
    """(dimension, as many indices as are left) wherever it is smaller: which they were does not matter any more."""
    return [(dim, torch.arange(size)) for dim, size in enumerate(shape) if size != whole[dim]]


def is_smaller(model: nn.Module, dense: nn.Module) -> bool:
    """Is any of its tensors smaller than the dense model's?"""
    return bool(widths(dense.state_dict(), model.state_dict()))


def remaining(model: nn.Module, dense: nn.Module) -> Masks:
    """Masks for a model that another tool has cut: they keep all of every weight that became smaller."""
    found = widths(dense.state_dict(), model.state_dict())
    weights = {layer.parameter: layer.weight for layer in layers_of(model)}
    return {name: torch.ones(weight.shape, dtype=torch.bool) for name, weight in weights.items() if name in found}


def shrink_(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a dense model the sizes that another tool has cut these weights to; they are to be loaded next.

    Attentions whose queries became narrower keep their number of heads and the scale of their softmax.
    """
    found = widths(model.state_dict(), weights)
    held = {name.rpartition(".")[0] for name in found}
    makers = ("", ".qkv", ".q_proj", ".k_proj")  # of queries and keys; nn.MultiheadAttention itself holds the weight
    narrow = [path for path, module in model.named_modules()
              if narrowable(module) and any(f"{path}{maker}" in held for maker in makers)]  # fmt: skip
    rebuild_(model, found, narrow)


@torch.no_grad()
def disagreement(one: Tensor, two: Tensor) -> float:
    """Largest difference of two models' logits, as a share of the largest logit."""
    return float((one - two).abs().max() / one.abs().max().clamp_min(1e-12))
