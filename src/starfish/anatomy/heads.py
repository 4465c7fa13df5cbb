"""The heads of attentions: which rows make their values and which columns read these."""

from __future__ import annotations

from functools import partial
from itertools import takewhile

from torch import nn

from starfish.core import Anatomy, Part, Unit


def heads_of(anatomy: Anatomy, dense: nn.Module) -> list[Unit]:
    """The heads of every attention whose queries and keys are known: the rows that make their values and the columns
    that read these, as many to each of the unit's groups."""
    found = []
    for unit in anatomy.units:
        outs = [name for name, role in anatomy.roles.items() if role == "out" and name.startswith(f"{unit.block}.")]
        if unit.kind == "qk" and outs:
            out = max(outs, key=partial(_shared, unit.holder))
            width = dense.get_parameter(out).shape[1]
            values = _values(unit, anatomy, dense)
            if values is not None and width % unit.groups == 0:
                found.append(Unit("head", unit.block, width, unit.groups, (values, Part(out, 1)), holder=unit.holder))
    return found


def _shared(one: str, two: str) -> int:
    """How many parts of their paths are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.split("."), two.split("."), strict=False)))


def _values(unit: Unit, anatomy: Anatomy, dense: nn.Module) -> Part | None:
    """The rows that make the values of an attention, given its query-key dimensions."""
    first = unit.parts[0].parameter
    if anatomy.roles.get(first) == "qkv":
        return Part(first, 0, 2 * unit.count)
    names = [name for name, role in anatomy.roles.items() if role == "v" and name.startswith(f"{unit.holder}.")]
    return Part(names[0], 0) if len(names) == 1 else None
