"""WoodFisher's masks: scores of the dense inverse, exact counts, patterns and scopes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import starfish
from cases import IMAGES, LABELS, MODELS
from starfish.data import Preprocess, StoredImages
from starfish.masks import sparsity
from starfish.pruners.magnitude import Magnitude
from starfish.pruners.woodfisher import ByWoodFisher, scores_of

PICTURES = StoredImages(IMAGES, Preprocess(), LABELS)


def test_scores_are_those_of_the_dense_inverse() -> None:
    """w²/[F⁻¹]_qq of every block by numpy's inverse."""
    random = torch.Generator().manual_seed(0)
    G = torch.randn(6, 11, generator=random, dtype=torch.float64)
    w = torch.randn(11, generator=random, dtype=torch.float64)
    expected = []
    for g, part in zip(G.split(4, 1), w.split(4), strict=True):
        fisher = g.T @ g / 6 + 1e-2 * torch.eye(g.shape[1], dtype=torch.float64)
        expected.append(part.square() / torch.linalg.inv(fisher).diagonal())
    torch.testing.assert_close(scores_of(G, w, 4, 1e-2), torch.cat(expected).float(), rtol=1e-5, atol=1e-7)


def test_without_gradients_it_is_magnitude() -> None:
    """F = λI orders the weights by size."""
    w = torch.randn(50)
    scores = scores_of(torch.zeros(4, 50), w, 20, 1e-3)
    assert torch.equal(scores.argsort(), w.abs().argsort())


@pytest.mark.parametrize("kind", MODELS)
def test_prunes_exactly_and_leaves_the_model(kind: str) -> None:
    """Globally round(s·p) weights go, the same ones every time, others than by magnitude."""
    dense = MODELS[kind]()
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    masks = starfish.prune(dense, ByWoodFisher(0.6, batch=2), PICTURES)
    again = starfish.prune(dense, ByWoodFisher(0.6, batch=2), PICTURES)
    total = sum(mask.numel() for mask in masks.values())
    assert sum(int((~mask).sum()) for mask in masks.values()) == round(0.6 * total)
    assert all(torch.equal(masks[name], again[name]) for name in masks)
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())
    magnitude = starfish.prune(dense, Magnitude(0.6, per="global"), PICTURES)
    assert any(not torch.equal(masks[name], magnitude[name]) for name in masks)


def test_patterns_layers_and_scopes() -> None:
    """N of every M, a share of every layer, or only the rows of a scope."""
    dense = MODELS["vit"]()
    grouped = starfish.prune(dense, ByWoodFisher(pattern="2:4"), PICTURES)
    assert all((mask.view(len(mask), -1, 4).sum(-1) == 2).all() for mask in grouped.values())
    layers = starfish.prune(dense, ByWoodFisher(0.5, per="layer"), PICTURES)
    assert all(sparsity({name: mask}) == 0.5 for name, mask in layers.items())
    rows = starfish.prune(dense, ByWoodFisher(0.5, scope="qk"), PICTURES)
    assert all(mask[48:].all() for mask in rows.values())


def test_refusals() -> None:
    """Without labels, with a damping or a sparsity of nothing."""
    dense = MODELS["cnn"]()
    with pytest.raises(starfish.UserError, match="needs labels"):
        starfish.prune(dense, ByWoodFisher(), IMAGES)
    for wrong in ({"damp": 0.0}, {"sparsity": 0.0}, {"gradients": 0}, {"block": 0}):
        with pytest.raises(starfish.UserError, match="is 0"):
            starfish.prune(dense, replace(ByWoodFisher(), **wrong), PICTURES)  # type: ignore[arg-type]
