"""Exact counts under a limit for each layer; without one that binds, global magnitude."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import IMAGES, tiny_cnn, tiny_vit
from starfish.anatomy import find
from starfish.core import Anatomy
from starfish.errors import UserError
from starfish.pruners.capped import Capped, capped
from starfish.pruners.magnitude import Magnitude


@pytest.fixture(scope="module")
def cnn() -> tuple[nn.Module, Anatomy]:
    model = tiny_cnn()
    return model, find(model, IMAGES[:2])


def brute(scores: dict[str, Tensor], count: int, most: float) -> dict[str, Tensor]:
    """Go up through all weights, smallest first (of equals the last), and skip those of a layer that lost its most."""
    every = [(float(value), -place, -entry, name) for place, (name, score) in enumerate(scores.items())
             for entry, value in enumerate(score.flatten())]  # fmt: skip
    kept = {name: torch.ones(score.numel(), dtype=torch.bool) for name, score in scores.items()}
    for _, _, entry, name in sorted(every):
        lost = int((~kept[name]).sum())
        if count and lost + 1 <= most * kept[name].numel() + 1e-9:
            kept[name][-entry] = False
            count -= 1
    return {name: kept[name].view_as(score) for name, score in scores.items()}


@pytest.mark.parametrize("most", [0.5, 0.7, 1.0])
@pytest.mark.parametrize("ties", [False, True])
def test_it_is_the_walk_through_all_weights(most: float, ties: bool) -> None:
    """One sort gives what the slow walk gives: smallest first, layers that are full passed over."""
    generator = torch.Generator().manual_seed(0)
    scores = {"a": torch.rand(5, 7, generator=generator), "b": 3 * torch.rand(11, generator=generator)}
    if ties:
        scores = {name: (3 * score).round() for name, score in scores.items()}
    found = capped(scores, 20, most)
    wanted = brute(scores, 20, most)
    assert all(torch.equal(found[name], wanted[name]) for name in scores)
    assert sum(int((~mask).sum()) for mask in found.values()) == 20


@pytest.mark.parametrize("sparsity", [0.3, 0.7, 0.79])
def test_count_is_exact_and_no_layer_loses_more_than_its_most(sparsity: float, cnn: tuple[nn.Module, Anatomy]) -> None:
    """round(s·n) weights go in all; a layer that reaches 0.8 stays there; at 0.7 the limit binds somewhere."""
    masks = Capped(sparsity, most=0.8).choose(*cnn)
    gone = {name: int((~mask).sum()) for name, mask in masks.items()}
    assert sum(gone.values()) == round(sparsity * sum(mask.numel() for mask in masks.values()))
    assert all(gone[name] <= 0.8 * mask.numel() for name, mask in masks.items())
    full = [name for name, mask in masks.items() if gone[name] == int(0.8 * mask.numel())]
    assert bool(full) == (sparsity > 0.5)


def test_within_a_layer_the_smallest_go(cnn: tuple[nn.Module, Anatomy]) -> None:
    """Its fractions with per-layer magnitude give the same masks, as the authors make them."""
    for name, mask in Capped(0.7, most=0.8).choose(*cnn).items():
        weight = cnn[0].get_parameter(name).detach().abs()
        assert float(weight[~mask].max()) <= float(weight[mask].min())


def test_limit_that_does_not_bind_is_global_magnitude(cnn: tuple[nn.Module, Anatomy]) -> None:
    """With most 1 nothing is spared."""
    found, wanted = Capped(0.6, most=1.0).choose(*cnn), Magnitude(0.6, per="global").choose(*cnn)
    assert all(torch.equal(found[name], mask) for name, mask in wanted.items())
    assert found.keys() == wanted.keys()


def test_sparsity_of_all_parameters(cnn: tuple[nn.Module, Anatomy]) -> None:
    """The authors count biases and norms too, so more weights go."""
    masks = Capped(0.5, of="parameters").choose(*cnn)
    assert sum(int((~mask).sum()) for mask in masks.values()) == round(
        0.5 * sum(p.numel() for p in cnn[0].parameters())
    )


def test_only_rows_of_the_scope_go() -> None:
    """Of a fused qkv weight the rows of V stay, and the limit is a share of the others."""
    model = tiny_vit()
    masks = Capped(0.5, scope="qk", most=0.6).choose(model, find(model, IMAGES[:2]))
    for mask in masks.values():
        rows = len(mask) * 2 // 3
        assert bool(mask[rows:].all())
        assert int((~mask[:rows]).sum()) <= 0.6 * mask[:rows].numel()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [({"sparsity": 0.95}, "there are .* that may go"), ({"most": 0.0}, "`most` is 0.0"),
     ({"of": "all"}, "`of` is `all`"), ({"sparsity": 1.0}, "the sparsity is 1.0")],
)  # fmt: skip
def test_what_cannot_be_is_refused(settings: dict[str, Any], complaint: str, cnn: tuple[nn.Module, Anatomy]) -> None:
    """More than the layers may lose together, a share that is none, a word that is none."""
    with pytest.raises(UserError, match=complaint):
        Capped(**settings).choose(*cnn)
