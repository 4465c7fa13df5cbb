"""From scores to masks: the lowest of each group, and every row and column that is theirs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from starfish.core import Anatomy, Masks, Part, Unit
from starfish.pruners.units import masks_of


class Net(nn.Module):
    """Three layers in a row; what the anatomy says of them is up to the test."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 8)
        self.two = nn.Linear(10, 6)
        self.three = nn.Conv2d(6, 4, 2)


ROLES = {"one.weight": "mlp_in", "two.weight": "mlp_out", "three.weight": "conv"}
ANATOMY = Anatomy(blocks=(), layouts={}, roles=ROLES, units=(), untrained=(), tail={})


def family(count: int, groups: int, *parts: Part) -> Unit:
    return Unit("neuron", "", count, groups, parts)


def masks(families: list[Unit], scores: list[list[float]], counts: list[int]) -> Masks:
    given = {place: torch.tensor(score, dtype=torch.float64) for place, score in enumerate(scores)}
    return masks_of(Net(), ANATOMY, families, given, dict(enumerate(counts)))


def kept_rows(mask: Tensor) -> list[int]:
    """Rows that are kept whole; every other one must be gone whole."""
    rows = mask.flatten(1)
    assert bool((rows.all(1) == rows.any(1)).all())
    return rows.all(1).nonzero()[:, 0].tolist()


def test_the_lowest_go_with_their_rows_and_columns() -> None:
    """At the places that the parts name; what is in no role, such as a bias, has no mask."""
    unit = family(8, 1, Part("one.weight", 0), Part("one.bias", 0), Part("two.weight", 1, 2))
    found = masks([unit], [[5, 1, 7, 0, 6, 2, 8, 9]], [3])
    assert found.keys() == {"one.weight", "two.weight"}
    assert kept_rows(found["one.weight"]) == [0, 2, 4, 6, 7]
    assert kept_rows(found["two.weight"].T) == [0, 1, 2, 4, 6, 8, 9]
    assert all(mask.dtype == torch.bool and not mask.requires_grad for mask in found.values())
    assert {name: tuple(mask.shape) for name, mask in found.items()} == {"one.weight": (8, 3), "two.weight": (6, 10)}


def test_each_group_loses_its_own_lowest() -> None:
    """As many, whatever the others score."""
    unit = family(8, 2, Part("one.weight", 0))
    assert kept_rows(masks([unit], [[3, 2, 1, 0, 90, 80, 99, 95]], [2])["one.weight"]) == [0, 1, 6, 7]


@pytest.mark.parametrize(("groups", "kept"), [(1, [3, 4, 5, 6, 7]), (2, [3, 7])])
def test_of_equals_the_first_go(groups: int, kept: list[int]) -> None:
    """Counts stay exact where scores tie."""
    assert kept_rows(masks([family(8, groups, Part("one.weight", 0))], [[1.0] * 8], [3])["one.weight"]) == kept


def test_families_share_a_tensor() -> None:
    """One has its rows, another its columns, a third other rows: what any of them loses is gone."""
    parts = Part("three.weight", 0), Part("three.weight", 1), Part("three.weight", 0, 2)
    units = [family(2, 1, parts[0]), family(6, 1, parts[1]), family(2, 1, parts[2])]
    found = masks(units, [[1, 0], [0, 1, 5, 5, 5, 5], [0, 1]], [1, 2, 1])["three.weight"]
    expected = torch.zeros(4, 6, 2, 2, dtype=torch.bool)
    expected[[0, 3], 2:] = True
    assert torch.equal(found, expected)


def test_a_family_that_loses_nothing_is_in_the_masks() -> None:
    """So that a method knows that its weights were chosen from, and none taken."""
    found = masks([family(8, 2, Part("one.weight", 0))], [list(range(8))], [0])
    assert found.keys() == {"one.weight"}
    assert bool(found["one.weight"].all())


def test_masks_nest_as_counts_grow() -> None:
    """With the same scores what is gone stays gone."""
    unit = family(8, 2, Part("one.weight", 0))
    scores = torch.randperm(8, generator=torch.Generator().manual_seed(0)).double().tolist()
    found = [masks([unit], [scores], [count])["one.weight"] for count in range(4)]
    for count, (more, less) in enumerate(pairwise(found)):
        assert not bool((less & ~more).any())
        assert int(more.sum() - less.sum()) == 2 * 3, count
