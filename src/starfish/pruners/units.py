"""From scores to masks: the lowest units of each group go, with every row and column that is theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from starfish.core import Anatomy, Masks, Unit
from starfish.pruners.criteria import Scores


def masks_of(
    dense: nn.Module, anatomy: Anatomy, families: Sequence[Unit], scores: Scores, counts: Mapping[int, int]
) -> Masks:
    """Masks of every weight that the units run through: rows and columns of the lowest of each group are zero."""
    masks: Masks = {}
    for place, unit in enumerate(families):
        lowest = scores[place].view(unit.groups, -1).sort(dim=1, stable=True).indices[:, : counts[place]]
        dead = torch.zeros(unit.groups, unit.count // unit.groups, dtype=torch.bool).scatter_(1, lowest.cpu(), True)
        for cells in _cells(dense, anatomy, unit, masks):
            cells[dead.flatten()] = False
    return masks


def _cells(dense: nn.Module, anatomy: Anatomy, unit: Unit, masks: Masks) -> Iterator[Tensor]:
    """Views of the masks of a unit's weights with the units in front; biases and statistics have none."""
    for part in unit.parts:
        if part.parameter in anatomy.roles:
            weight = dense.get_parameter(part.parameter)
            mask = masks.setdefault(part.parameter, torch.ones(weight.shape, dtype=torch.bool))
            yield mask.narrow(part.dim, part.start, unit.count).movedim(part.dim, 0)
