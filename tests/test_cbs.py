"""CBS's masks from end to end: exact counts, never a higher loss than plain magnitude, early stopping."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import starfish
from cases import IMAGES, LABELS, MODELS
from starfish.anatomy import find
from starfish.core import Masks
from starfish.data import Preprocess, StoredImages
from starfish.masks import apply_
from starfish.pruners.cbs import ByCbs, Judge
from starfish.pruners.flat import flat
from starfish.pruners.magnitude import Magnitude
from starfish.pruners.select import rows_of

PICTURES = StoredImages(IMAGES, Preprocess(), LABELS)
QUICK = ByCbs(0.6, trials=3, iterations=4, tolerance=1e-7)


def loss(kind: str, masks: Masks) -> float:
    model = MODELS[kind]()
    apply_(model, masks)
    with torch.no_grad():
        return float(F.cross_entropy(model(IMAGES), LABELS))


@pytest.mark.parametrize("kind", MODELS)
def test_loss_is_never_above_that_of_magnitude(kind: str) -> None:
    """Exactly as many go as asked; the mask of least loss is kept, and magnitude is among those tried."""
    dense = MODELS[kind]()
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    masks, again = (starfish.prune(dense, QUICK, PICTURES) for _ in range(2))
    magnitude = starfish.prune(dense, Magnitude(0.6, per="global"), PICTURES)
    total = sum(mask.numel() for mask in masks.values())
    assert sum(int((~mask).sum()) for mask in masks.values()) == round(0.6 * total)
    assert all(torch.equal(masks[name], again[name]) for name in masks)
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())
    assert loss(kind, masks) <= loss(kind, magnitude) + 1e-6


def test_search_alone_can_lower_the_loss() -> None:
    """By swaps, from the mask of magnitude on."""
    masks = starfish.prune(MODELS["vit"](), replace(QUICK, trials=1), PICTURES)
    magnitude = starfish.prune(MODELS["vit"](), Magnitude(0.6, per="global"), PICTURES)
    assert loss("vit", masks) < loss("vit", magnitude)


def test_one_trial_without_search_is_magnitude() -> None:
    """Nothing else is left to try."""
    dense = MODELS["cnn"]()
    masks = starfish.prune(dense, replace(QUICK, trials=1, iterations=0), PICTURES)
    magnitude = starfish.prune(dense, Magnitude(0.6, per="global"), PICTURES)
    assert all(torch.equal(masks[name], magnitude[name]) for name in masks)


def test_search_ends_when_the_loss_does_not_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a judge whom nothing pleases it ends after `patience` iterations and keeps what it began with."""
    losses: list[float] = []

    def displeased(self: Judge, keep_p: torch.Tensor) -> float:
        losses.append(float(len(losses)))
        return losses[-1]

    monkeypatch.setattr(Judge, "loss", displeased)
    dense = MODELS["cnn"]()
    masks = starfish.prune(dense, replace(QUICK, trials=1, iterations=50, patience=2), PICTURES)
    magnitude = starfish.prune(dense, Magnitude(0.6, per="global"), PICTURES)
    assert len(losses) == 3  # the first mask and two others
    assert all(torch.equal(masks[name], magnitude[name]) for name in masks)


def test_judge_is_the_loss_of_the_masked_network() -> None:
    """On images spread over all there are; with more asked for than there are, on all."""
    dense = MODELS["cnn"]()
    shape = flat(dense, rows_of(dense, find(dense, IMAGES), "conv_fc"))
    keep = shape.weights(dense).abs() > 0.05
    expected = loss("cnn", shape.masks(keep, dense))
    assert Judge.of(dense, shape, PICTURES, 100).loss(keep) == pytest.approx(expected, rel=1e-5)
    inputs, labels = Judge.of(dense, shape, PICTURES, 3).batches[0]
    assert torch.equal(inputs, IMAGES[[0, 4, 8]])
    assert torch.equal(labels, LABELS[[0, 4, 8]])


def test_refusals() -> None:
    """Without labels, or with settings out of range."""
    dense = MODELS["cnn"]()
    with pytest.raises(starfish.UserError, match="needs labels"):
        starfish.prune(dense, ByCbs(), IMAGES)
    for name in ("trials", "images", "patience", "sparsity", "gradients"):
        with pytest.raises(starfish.UserError, match="is 0"):
            starfish.prune(dense, replace(QUICK, **{name: 0}), PICTURES)  # type: ignore[arg-type]
