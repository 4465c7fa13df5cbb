"""Exact counts, ties by lower index, groups along inputs, and only the rows of the scope."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cases import tiny_cnn, tiny_vit
from starfish.anatomy import find
from starfish.core import Anatomy, Masks
from starfish.errors import UserError
from starfish.pruners.magnitude import Magnitude
from starfish.pruners.select import keep_largest, n_of_m, n_of_m_mask

SPARSITIES = [0.01, 0.123, 0.5, 0.7, 0.999]


class Pair(nn.Module):
    """A depthwise and a pointwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Conv2d(7, 7, 3, 1, 1, groups=7)
        self.point = nn.Conv2d(7, 7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.point(self.deep(x).relu())


class Separable(nn.Module):
    """Depthwise and pointwise convolutions of awkward widths."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 7, 3)
        self.rows = nn.Sequential(Pair(), Pair())
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(self.stem(x)).mean((2, 3)))


def looked_at(model: nn.Module) -> tuple[nn.Module, Anatomy]:
    return model, find(model, torch.randn(2, 3, 32, 32))


@pytest.fixture(scope="module")
def vit() -> tuple[nn.Module, Anatomy]:
    return looked_at(tiny_vit())


@pytest.fixture(scope="module")
def separable() -> tuple[nn.Module, Anatomy]:
    with torch.random.fork_rng():
        return looked_at(Separable().eval())


def brute(scores: Tensor, sparsity: float) -> Tensor:
    """Sort (value, then later index first), remove round(s·n) of them."""
    flat = scores.flatten().numpy()
    order = sorted(range(len(flat)), key=lambda place: (flat[place], -place))
    keep = np.ones(len(flat), dtype=bool)
    keep[order[: round(sparsity * len(flat))]] = False
    return torch.from_numpy(keep).view_as(scores)


def brute_groups(scores: Tensor, n: int, m: int) -> Tensor:
    values = np.moveaxis(scores.numpy(), 1, -1)
    rows = values.reshape(-1, values.shape[-1])
    keep = np.zeros_like(rows, dtype=bool)
    for row in range(len(rows)):
        for start in range(0, rows.shape[1], m):
            group = rows[row, start : start + m]
            best = sorted(range(len(group)), key=lambda place: (-group[place], place))[:n]
            keep[row, [start + place for place in best]] = True
    return torch.from_numpy(np.moveaxis(keep.reshape(values.shape), -1, 1).copy())


@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("shape", [(1,), (7,), (13, 11), (3, 5, 3, 3)])
@pytest.mark.parametrize("ties", [False, True])
def test_keep_largest_is_the_brute_force_reference(sparsity: float, shape: tuple[int, ...], ties: bool) -> None:
    scores = torch.randint(0, 4, shape).float() if ties else torch.rand(shape)
    found = keep_largest(scores.flatten(), sparsity).view(shape)
    assert torch.equal(found, brute(scores, sparsity))
    assert int((~found).sum()) == round(sparsity * scores.numel())


def test_of_equals_the_first_are_kept() -> None:
    assert keep_largest(torch.ones(7), 0.6).tolist() == [True] * 3 + [False] * 4
    assert n_of_m_mask(torch.ones(2, 6), 1, 4).tolist() == [[True, False, False, False, True, False]] * 2


@pytest.mark.parametrize("per", ["layer", "global", "row"])
def test_masks_for_growing_sparsity_are_nested(
    per: Literal["layer", "global", "row"], vit: tuple[nn.Module, Anatomy]
) -> None:
    chosen = [Magnitude(sparsity, per=per).choose(*vit) for sparsity in (0.2, 0.5, 0.51, 0.9)]
    for fewer, more in pairwise(chosen):
        assert all(bool((fewer[name] | ~more[name]).all()) for name in fewer)
        assert any(not torch.equal(fewer[name], more[name]) for name in fewer)


def weights_of(model: nn.Module, masks: Masks) -> dict[str, Tensor]:
    return {name: model.get_parameter(name).detach().abs() for name in masks}


@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("case", ["vit", "separable"])
def test_counts_and_choice_equal_the_reference(sparsity: float, case: str, request: pytest.FixtureRequest) -> None:
    model, anatomy = request.getfixturevalue(case)
    layer = Magnitude(sparsity).choose(model, anatomy)
    scores = weights_of(model, layer)
    assert layer
    assert all(torch.equal(layer[name], brute(scores[name], sparsity)) for name in layer)
    row = Magnitude(sparsity, per="row").choose(model, anatomy)
    for name, mask in row.items():
        expected = torch.stack([brute(values, sparsity) for values in scores[name]])
        assert torch.equal(mask, expected), name
    everywhere = Magnitude(sparsity, per="global").choose(model, anatomy)
    flat = brute(torch.cat([score.flatten() for score in scores.values()]), sparsity)
    assert torch.equal(torch.cat([mask.flatten() for mask in everywhere.values()]), flat)


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8", "3:5", "1:2"])
@pytest.mark.parametrize("shape", [(3, 8), (5, 13), (4, 6, 3, 3), (2, 3, 3, 3), (4, 1), (3, 9, 3)])
@pytest.mark.parametrize("ties", [False, True])
def test_n_of_m_is_the_brute_force_reference(pattern: str, shape: tuple[int, ...], ties: bool) -> None:
    n, m = n_of_m(pattern)
    scores = torch.randint(0, 3, shape).float() if ties else torch.rand(shape)
    found = n_of_m_mask(scores, n, m)
    assert found.shape == scores.shape
    assert found.is_contiguous()
    assert torch.equal(found, brute_groups(scores, n, m))


def test_groups_of_a_convolution_run_along_input_channels() -> None:
    """Every kernel position of every filter keeps N of M channels, and the remainder min(N, r)."""
    mask = n_of_m_mask(torch.rand(4, 7, 3, 3), 2, 4)
    assert (mask[:, :4].sum(1) == 2).all()
    assert (mask[:, 4:].sum(1) == 2).all()
    assert (n_of_m_mask(torch.rand(4, 5, 3, 3), 2, 4)[:, 4:].sum(1) == 1).all()


def test_depthwise_filters_stay_out_of_n_of_m(separable: tuple[nn.Module, Anatomy]) -> None:
    masks = Magnitude(pattern="2:4", scope="all").choose(*separable)
    assert not [name for name in masks if separable[1].roles[name] == "depthwise"]
    assert {"stem.weight", "rows.0.point.weight", "head.weight"} <= masks.keys()
    with pytest.raises(UserError, match="no weight of the scope can take 2:4"):
        Magnitude(pattern="2:4", scope="depthwise").choose(*separable)


@pytest.mark.parametrize("settings", [{}, {"per": "row"}, {"per": "global"}, {"pattern": "2:4"}])
def test_a_scope_restricts_the_rows(settings: dict[str, Any], vit: tuple[nn.Module, Anatomy]) -> None:
    """qk of a fused qkv: the V rows are all kept, and the counts hold within the others."""
    masks = Magnitude(0.5, scope="qk", **settings).choose(*vit)
    assert set(masks) == {f"blocks.{block}.attn.qkv.weight" for block in (0, 1)}
    assert all(bool(mask[48:].all()) for mask in masks.values())
    removed = [int((~mask[:48]).sum()) for mask in masks.values()]
    assert sum(removed) == 48 * 24
    if settings.get("per") != "global":
        assert removed == [24 * 24] * 2


def test_a_scope_that_does_not_start_at_the_first_row(vit: tuple[nn.Module, Anatomy]) -> None:
    for name, mask in Magnitude(0.5, scope="v").choose(*vit).items():
        assert mask[:48].all()
        assert torch.equal(mask[48:], brute(vit[0].get_parameter(name).detach()[48:].abs(), 0.5))


def test_all_equal_weights_keep_exact_counts() -> None:
    model = tiny_cnn()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    masks = Magnitude(0.37).choose(*looked_at(model))
    for mask in masks.values():
        kept = mask.numel() - round(0.37 * mask.numel())
        assert mask.flatten()[:kept].all()
        assert not mask.flatten()[kept:].any()


def test_the_model_stays_as_it_is(vit: tuple[nn.Module, Anatomy]) -> None:
    before = {name: tensor.clone() for name, tensor in vit[0].state_dict().items()}
    Magnitude(0.9).choose(*vit)
    assert all(torch.equal(before[name], tensor) for name, tensor in vit[0].state_dict().items())


@pytest.mark.parametrize("sparsity", [0.0, 1.0, -0.1, 50, float("nan")])
def test_a_sparsity_that_is_no_fraction_is_refused(sparsity: float, vit: tuple[nn.Module, Anatomy]) -> None:
    with pytest.raises(UserError, match="the sparsity is"):
        Magnitude(sparsity).choose(*vit)


@pytest.mark.parametrize("pattern", ["4:2", "0:4", "4:4", "2:", "half", "2:4:8", "-2:4", ""])
def test_a_pattern_that_is_none_is_refused(pattern: str, vit: tuple[nn.Module, Anatomy]) -> None:
    with pytest.raises(UserError, match="the pattern is"):
        Magnitude(pattern=pattern).choose(*vit)


def test_a_sparsity_beside_a_pattern_is_not_dropped_in_silence(vit: tuple[nn.Module, Anatomy]) -> None:
    with pytest.raises(UserError, match=r"2:4 removes 0\.5"):
        Magnitude(0.9, pattern="2:4").choose(*vit)
    assert Magnitude(0.75, pattern="1:4").choose(*vit)
    assert Magnitude(0.333333, pattern="2:3").choose(*vit)
