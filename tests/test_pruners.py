"""Everybody's masks: the one way to make them, and what the list of pruners says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import starfish
from cases import tiny_vit
from starfish.core import Pruner
from starfish.errors import UserError
from starfish.pruners import PRUNERS, prune, summary


@pytest.mark.parametrize("name", PRUNERS)
def test_every_pruner_says_what_it_does_and_chooses(name: str, images: Tensor) -> None:
    pruner = PRUNERS[name]
    assert isinstance(pruner, Pruner)
    assert len(summary(pruner)) > 10
    model = tiny_vit()
    masks = prune(model, pruner, images)
    assert masks
    for parameter, mask in masks.items():
        assert mask.dtype == torch.bool
        assert mask.shape == model.get_parameter(parameter).shape
        assert 0 < int(mask.sum()) < mask.numel()


@pytest.mark.parametrize("name", PRUNERS)
def test_the_same_masks_come_twice_and_the_model_is_left_alone(name: str, images: Tensor) -> None:
    model = tiny_vit()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    first, second = prune(model, PRUNERS[name], images), prune(model, PRUNERS[name], images)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_a_wrapped_model_gives_the_names_of_the_model_inside(images: Tensor) -> None:
    plain = prune(tiny_vit(), starfish.Magnitude(0.5), images)
    wrapped = prune(nn.DataParallel(tiny_vit()), starfish.Magnitude(0.5), images)
    assert plain.keys() == wrapped.keys()
    assert all(torch.equal(plain[name], wrapped[name]) for name in plain)


def test_one_image_is_enough(images: Tensor) -> None:
    assert prune(tiny_vit(), starfish.Magnitude(0.5), images[:1])


def test_no_image_is_not(images: Tensor) -> None:
    with pytest.raises(UserError, match="there are no images"):
        prune(tiny_vit(), starfish.Magnitude(0.5), images[:0])
