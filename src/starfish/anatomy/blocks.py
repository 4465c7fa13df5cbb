"""Blocks: composites in a row, of several prunable weights each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from torch import nn

from starfish.anatomy.layers import layers_of
from starfish.errors import UserError, listed


def find_blocks(net: nn.Module) -> list[str]:
    """Blocks held in containers; else same-class siblings (block1, block2, …); else even those with one weight."""
    for least, siblings in ((2, False), (2, True), (1, False)):
        found = list(_walk("", net, least, siblings))
        if found:
            return found
    return []


def _walk(name: str, module: nn.Module, least: int, siblings: bool) -> Iterator[str]:
    members = list(_members(name, module))
    row = _is_row(members, least) if _is_container(module) else siblings and _has_siblings(members, least)
    for member, child in members:
        if _is_leaf(child):
            continue
        inner = [] if not _size(child) else list(_walk(member, child, least, siblings))
        covered = sum(_size(child.get_submodule(found[len(member) + 1 :])) for found in inner)
        if row and _may_be_block(child, least, siblings) and 2 * covered <= _size(child):
            yield member
        else:
            yield from inner


def _members(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children, those in containers within a container included."""
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if _is_container(module) and _is_container(child):
            yield from _members(path, child)
        else:
            yield path, child


def _is_row(members: list[tuple[str, nn.Module]], least: int) -> bool:
    """Most of the members that hold weights are composites of several, or two of these hold most of the weights.

    A container of one squeeze-excitation between three convolutions is neither, however heavy.
    """
    weighted = [child for _, child in members if _size(child)]
    composites = [child for child in weighted if not _is_leaf(child) and _count(child) >= least]
    if not composites:
        return False
    heavy = 2 * sum(map(_size, composites)) > sum(map(_size, weighted))
    return 2 * len(composites) > len(weighted) or (len(composites) >= 2 and heavy)


def _has_siblings(members: list[tuple[str, nn.Module]], least: int) -> bool:
    kinds = Counter(type(child) for _, child in members if not _is_container(child) and _count(child) >= least)
    return any(count >= 2 for count in kinds.values())


def _may_be_block(module: nn.Module, least: int, siblings: bool) -> bool:
    """In a row of blocks a single convolution may be one too; among siblings it may be anything."""
    layers = layers_of(module)
    one_convolution = not siblings and len(layers) == 1 and bool(layers[0].convolution)
    return not _is_container(module) and (len(layers) >= least or one_convolution)


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))


def _is_leaf(module: nn.Module) -> bool:
    return not _is_container(module) and (isinstance(module, nn.MultiheadAttention) or not any(module.children()))


def _count(module: nn.Module) -> int:
    return len(layers_of(module))


def _size(module: nn.Module) -> int:
    return sum(layer.weight.numel() for layer in layers_of(module))


def matching(net: nn.Module, pattern: str) -> list[str]:
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise UserError(f"--blocks `{pattern}` is not a regular expression: {error}") from None
    names = [name for name, _ in net.named_modules() if name]
    found = [name for name in names if regex.fullmatch(name)]
    if not found:
        raise UserError(f"--blocks `{pattern}` matches no module", f"the modules are {listed(names, 12)}")
    return found
