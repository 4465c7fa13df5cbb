"""Everybody's masks: the one way to make them, and what the list of pruners says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

import starfish
from cases import LABELS, tiny_cnn, tiny_vit
from starfish.core import Anatomy, Images, Long, Masks, Pruner
from starfish.data import Preprocess, StoredImages
from starfish.errors import UserError
from starfish.pruners import PRUNERS, check_pruner, name_of, prune, summary
from starfish.pruners.structured import Structured


def labelled(images: Tensor) -> StoredImages:
    """For those pruners that need labels."""
    return StoredImages(images, Preprocess(), LABELS[: len(images)])


def quick(name: str) -> Pruner:
    """Of few trials and stages, where a pruner has them."""
    pruner = PRUNERS[name]
    return replace(pruner, **{key: value for key, value in QUICK.get(name, {}).items()})


QUICK = {"cbs": {"trials": 3, "iterations": 4}, "chita": {"stages": 2}, "falcon": {"flops": 0.5}}


@pytest.mark.parametrize("name", PRUNERS)
def test_every_pruner_says_what_it_does_and_chooses(name: str, images: Tensor) -> None:
    pruner = PRUNERS[name]
    assert isinstance(pruner, Pruner)
    assert len(summary(pruner)) > 10
    model = tiny_vit()
    masks = prune(model, quick(name), labelled(images))
    assert any(0 < int(mask.sum()) < mask.numel() for mask in masks.values())
    for parameter, mask in masks.items():
        assert mask.dtype == torch.bool
        assert mask.shape == model.get_parameter(parameter).shape
        assert mask.any()


@pytest.mark.parametrize("name", PRUNERS)
@pytest.mark.parametrize("build", [tiny_vit, tiny_cnn])
def test_the_same_masks_come_twice_and_the_model_is_left_alone(
    name: str, build: Callable[[], nn.Module], images: Tensor
) -> None:
    """A model in training too: running statistics, flags and gradients are as before, and so are the images."""
    model, given = build().train(), images.clone()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    first, second = (prune(model, quick(name), labelled(images)) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert torch.equal(images, given)
    assert not images.requires_grad


@pytest.mark.parametrize("name", PRUNERS)
def test_a_wrapped_model_gives_the_names_of_the_model_inside(name: str, images: Tensor) -> None:
    plain = prune(tiny_vit(), quick(name), labelled(images))
    wrapped = prune(nn.DataParallel(tiny_vit()), quick(name), labelled(images))
    assert plain.keys() == wrapped.keys()
    assert all(torch.equal(plain[name], wrapped[name]) for name in plain)


@pytest.mark.parametrize("name", PRUNERS)
def test_one_image_is_enough(name: str, images: Tensor) -> None:
    assert prune(tiny_vit(), quick(name), labelled(images[:1]))


def test_no_image_is_not(images: Tensor) -> None:
    with pytest.raises(UserError, match="there are no images"):
        prune(tiny_vit(), starfish.Magnitude(0.5), images[:0])


@dataclass(frozen=True)
class Picky(Pruner):
    """Of a user: looks at labels."""

    def needs(self) -> frozenset[str]:
        return frozenset({"images", "labels"})

    def choosing(self, dense: nn.Module, anatomy: Anatomy, images: Images | None) -> Long[Masks]:
        yield from ()
        return {"labels": images.labels}  # type: ignore[union-attr, dict-item]


def test_what_a_pruner_needs_is_asked_for_first(images: Tensor, labels: Tensor) -> None:
    """Images and labels, by the pruner's name and with a way out; with all it needs it is let through."""
    bare, told = (StoredImages(images, Preprocess(), given) for given in (None, labels))
    for pruner, given, complaint in (
        (Structured(criterion="energy"), None, "`structured` looks at data"),
        (Picky(), None, "`picky` looks at data"),
        (Picky(), bare, "`picky` needs labels"),
    ):
        with pytest.raises(UserError, match=complaint) as error:
            check_pruner(pruner, given)
        assert error.value.hint
    with pytest.raises(UserError, match="`picky` needs labels"):
        prune(tiny_vit(), Picky(), images)
    assert torch.equal(prune(tiny_vit(), Picky(), told)["labels"], labels)
    for pruner in (starfish.Magnitude(), Structured(), Structured(criterion="weight")):
        check_pruner(pruner, None)


def test_names() -> None:
    """Whatever the settings; a class of the user's own goes by its own name, and its first line says what it does."""
    assert {name: name_of(pruner) for name, pruner in PRUNERS.items()} == {name: name for name in PRUNERS}
    assert name_of(Structured(0.9, scope="mlp")) == "structured"
    assert (name_of(Picky()), summary(Picky())) == ("picky", "Of a user: looks at labels.")
