"""CHITA's masks from end to end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import starfish
from cases import IMAGES, LABELS, MODELS
from starfish.core import Masks
from starfish.data import Preprocess, StoredImages
from starfish.pruners.chita import ByChita
from starfish.pruners.magnitude import Magnitude

PICTURES = StoredImages(IMAGES, Preprocess(), LABELS)


def same(one: Masks, other: Masks) -> bool:
    return all(torch.equal(one[name], mask) for name, mask in other.items())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "pruner",
    [ByChita(0.8, stages=3, batch=3), ByChita(0.8, algorithm="cd", stages=2, batch=3),
     ByChita(0.8, algorithm="iht", steps=3, stages=2, batch=3), ByChita(0.8, stages=1, first_order=1e4, batch=3)],
    ids=["stages", "cd-stages", "iht-stages", "first-order"],
)  # fmt: skip
def test_exact_counts_determinism_and_a_dense_model_untouched(kind: str, pruner: ByChita) -> None:
    """Exactly round(s·p) go, the same every time, and not those of magnitude: gradients have a say."""
    dense = MODELS[kind]()
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    masks = starfish.prune(dense, pruner, PICTURES)
    assert same(masks, starfish.prune(dense, pruner, PICTURES))
    total = sum(mask.numel() for mask in masks.values())
    assert sum(int((~mask).sum()) for mask in masks.values()) == round(0.8 * total)
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())
    assert not same(masks, starfish.prune(dense, Magnitude(0.8, per="global"), PICTURES))


def test_one_stage_in_blocks_is_global_magnitude_and_needs_nothing() -> None:
    """Without a first-order term the regression has no say in the support."""
    dense = MODELS["cnn"]()
    pruner = ByChita(0.7, stages=1)
    assert not pruner.needs()
    assert same(starfish.prune(dense, pruner, IMAGES), starfish.prune(dense, Magnitude(0.7, per="global"), IMAGES))
    for other in (replace(pruner, stages=2), replace(pruner, first_order=0.1), replace(pruner, algorithm="iht")):
        assert other.needs() == {"images", "labels"}
        with pytest.raises(starfish.UserError, match="needs labels"):
            starfish.prune(dense, other, IMAGES)


def test_rows_of_a_scope_alone_are_pruned() -> None:
    """Values of a fused attention weight stay out of it, in every stage."""
    masks = starfish.prune(MODELS["vit"](), ByChita(0.5, scope="qk", stages=2), PICTURES)
    assert all(mask[48:].all() and not mask[:48].all() for mask in masks.values())


def test_refusals() -> None:
    """Settings out of range, by name and value."""
    for name in ("sparsity", "steps", "stages", "ridge", "block", "batch"):
        with pytest.raises(starfish.UserError, match="is 0"):
            starfish.prune(MODELS["cnn"](), replace(ByChita(stages=2), **{name: 0}), PICTURES)  # type: ignore[arg-type]
