"""Methods and pruners that look inside layers, on every library's way of writing them: fused queries, `in_proj_weight`,
separate layers, LayerScale, depthwise filters that pad by rules of their own."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

import starfish
from cases import IMAGES, LABELS, UNPROVEN, objective, quick
from starfish.data import Preprocess, StoredImages
from starfish.methods import METHODS
from test_pruners import quick as quick_pruner
from test_small import KINDS, lively_

INSIDE = ("least_squares", "sparsegpt", "snows", "kwon", "woodfisher", "cbs")
PICTURES = StoredImages(IMAGES, Preprocess(), LABELS)


@pytest.mark.parametrize("method", INSIDE)
@pytest.mark.parametrize("kind", KINDS)
def test_methods(kind: str, method: str) -> None:
    """Every masked weight is heard, what the method makes small does not grow, and something changes."""
    dense = lively_(KINDS[kind][0]()).eval()
    scope = "dw" if kind == "timm mobilenet" else "all"  # its other filters are many and nothing new
    masks = starfish.prune(dense, starfish.Magnitude(0.5, scope=scope), IMAGES)
    model = deepcopy(dense)
    result = starfish.heal_(model, dense, masks, PICTURES, quick(METHODS[method]))
    assert result.mask_intact
    assert torch.isfinite(model(IMAGES) if "transformers" not in kind else model(IMAGES).logits).all()
    assert len(result.unchanged) < len(masks)
    before, after = objective(result)
    assert after < before or method in UNPROVEN


@pytest.mark.parametrize("pruner", ["wanda", "sparsegpt", "woodfisher"])
@pytest.mark.parametrize("kind", ["timm deit3", "torchvision vit", "transformers vit", "timm mobilenet"])
def test_pruners(kind: str, pruner: str) -> None:
    """Half of what is in the scope goes, to the weight but for rounding row by row."""
    dense = lively_(KINDS[kind][0]()).eval()
    masks = starfish.prune(dense, quick_pruner(pruner), PICTURES)
    gone = sum(int((~mask).sum()) for mask in masks.values()) / sum(mask.numel() for mask in masks.values())
    assert gone == pytest.approx(0.5, abs=0.02)
