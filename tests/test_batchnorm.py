"""Re-estimation of BatchNorm statistics, against what they are defined to be."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import starfish
from cases import Case, tiny_cnn, tiny_vit
from starfish.methods import batchnorm
from starfish.methods.batchnorm import are_folded, batchnorms, reestimate_, statistics_names


def test_statistics_are_those_of_the_images(images: Tensor) -> None:
    """Mean over all positions of all images, and unbiased variance; momentum and mode come back."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.3)).eval()
    list(reestimate_(model, starfish.StoredImages(images, starfish.Preprocess())))
    inputs_PC = model[0](images).detach().movedim(1, -1).reshape(-1, 4)
    assert torch.allclose(model[1].running_mean, inputs_PC.mean(0), atol=1e-5)
    assert torch.allclose(model[1].running_var, inputs_PC.var(0), atol=1e-5)
    assert model[1].momentum == 0.3
    assert not any(module.training for module in model.modules())


def test_batches_are_averaged(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """More images than one batch: every batch weighs the same, whatever the momentum."""
    monkeypatch.setattr(batchnorm, "BATCH", 4)
    model = nn.Sequential(nn.BatchNorm2d(3)).eval()
    rows = list(reestimate_(model, starfish.StoredImages(images, starfish.Preprocess())))
    means = torch.stack([part.mean((0, 2, 3)) for part in images.split(4)])
    assert torch.allclose(model[0].running_mean, means.mean(0), atol=1e-6)
    assert [row["done"] for row in rows] == [4, 8, 12]


def test_it_gives_back_part_of_what_pruning_took(images: Tensor) -> None:
    """The control of every CNN result: weights stay, and the outputs come closer to the dense model's."""
    model, dense, masks, method = Case("batchnorm", "cnn-unstructured").build(images)
    result = starfish.heal_(model, dense, masks, images, method)
    assert result.unchanged == list(masks)
    assert result.fidelity["cosine"]["healed"] > result.fidelity["cosine"]["pruned"]


def test_names_are_those_of_buffers() -> None:
    names = statistics_names(tiny_cnn())
    assert "bn1.running_mean" in names
    assert len(names) == 3 * len(batchnorms(tiny_cnn()))
    assert statistics_names(tiny_vit()) == frozenset()


def test_folded_statistics_are_known_and_left_alone(images: Tensor) -> None:
    """Mean 0 and variance 1 throughout: re-estimating would change the model's function, so it is refused."""
    model, dense, masks, _ = Case("batchnorm", "cnn-unstructured").build(images)
    for net in (model, dense):
        for norm in batchnorms(net):
            norm.reset_running_stats()
    assert are_folded(batchnorms(dense))
    with pytest.raises(starfish.UserError, match="folded into the weights"):
        starfish.heal_(deepcopy(model), dense, masks, images, starfish.BatchNorm())
    assert starfish.heal_(model, dense, masks, images, starfish.Starfish(epochs=1)).settings["bn"] == "freeze"


def test_a_model_without_batchnorm_is_refused(images: Tensor) -> None:
    model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
    with pytest.raises(starfish.UserError, match="needs BatchNorm layers"):
        starfish.heal_(model, dense, masks, images, starfish.BatchNorm())
