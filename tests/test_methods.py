"""Every property of every row of cases.py."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import starfish
from cases import CASES, Case, all_ones
from starfish.core import finish
from starfish.data import StoredImages, as_images
from starfish.heal import healing_, job_of
from starfish.methods import name_of, summary

every_case = pytest.mark.parametrize("case", CASES, ids=str)


def given(images: Tensor, labels: Tensor) -> StoredImages:
    return StoredImages(images, starfish.Preprocess(), labels)


@every_case
def test_zeros_stay_and_frozen_tensors_are_bit_identical(case: Case, images: Tensor, labels: Tensor) -> None:
    """After a heal every pruned weight is exactly zero and nothing outside the masks has moved, bit for bit."""
    model, dense, masks, method = case.build(images)
    before = deepcopy(dense.state_dict())
    result = starfish.heal_(model, dense, masks, given(images, labels), method)
    free = set(result.also_changed)
    for name, tensor in model.state_dict().items():
        if name in masks:
            assert not tensor[~masks[name]].any(), name
        elif name not in free:
            assert torch.equal(tensor, before[name]), name
    assert free <= {name for name in before if "running_" in name or "num_batches" in name}
    for name, tensor in dense.state_dict().items():
        assert torch.equal(tensor, before[name]), f"dense {name} moved"


@every_case
def test_outputs_are_finite_and_flags_restored(case: Case, images: Tensor, labels: Tensor) -> None:
    """The healed model answers with numbers, is in evaluation mode and its parameters can be trained as before."""
    model, dense, masks, method = case.build(images)
    starfish.heal_(model, dense, masks, given(images, labels), method)
    assert torch.isfinite(model(images)).all()
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


@every_case
def test_same_seed_gives_the_same_bits(case: Case, images: Tensor, labels: Tensor) -> None:
    """Two heals of the same job end in the same weights."""
    states = []
    for _ in range(2):
        model, dense, masks, method = case.build(images)
        starfish.heal_(model, dense, masks, given(images, labels), method, seed=3)
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@every_case
def test_mask_is_not_touched(case: Case, images: Tensor, labels: Tensor) -> None:
    """The masks handed in come back as they were."""
    model, dense, masks, method = case.build(images)
    before = deepcopy(masks)
    starfish.heal_(model, dense, masks, given(images, labels), method)
    assert all(torch.equal(masks[name], before[name]) for name in before)


@pytest.mark.parametrize("case", [c for c in CASES if c.method not in {"ce", "batchnorm"}], ids=str)
def test_objective_falls(case: Case, images: Tensor, labels: Tensor) -> None:
    """Training on the healing images lowers the loss there (BatchNorm frozen: batches of four make it noisy)."""
    model, dense, masks, method = case.build(images)
    assert isinstance(method, starfish.Starfish)
    method = replace(method, bn="freeze", epochs=8, lr=1e-3)
    result = starfish.heal_(model, dense, masks, images, method)
    assert result.loss["last"] is not None
    assert result.loss["first"] is not None
    assert result.loss["last"] < result.loss["first"]


@pytest.mark.parametrize("case", [c for c in CASES if c.method not in {"ce", "batchnorm"}], ids=str)
def test_nothing_pruned_gives_no_loss(case: Case, images: Tensor) -> None:
    """With masks of ones the student is the dense model: the first loss is at most 1e-6 (BatchNorm frozen)."""
    model, dense, masks, method = case.build(images)
    assert isinstance(method, starfish.Starfish)
    method = replace(method, epochs=1, bn="freeze")
    result = starfish.heal_(model, dense, all_ones(masks), images, method)
    assert abs(float(result.rows[0]["loss"])) <= 1e-6


@pytest.mark.parametrize("method", starfish.METHODS)
def test_every_method_is_described_and_finds_its_name(method: str) -> None:
    """`starfish methods` has a line for each, and a result can name its method."""
    assert summary(starfish.METHODS[method])
    assert name_of(starfish.METHODS[method]) == method


def test_labels_are_asked_for_before_anything_is_spent(images: Tensor) -> None:
    """CE without labels is refused by name; with a data loader of pairs it runs."""
    model, dense, masks, method = Case("ce", "vit-unstructured").build(images)
    with pytest.raises(starfish.UserError, match="`ce` needs labels"):
        starfish.heal_(model, dense, masks, images, method)
    pairs = DataLoader(TensorDataset(images, torch.arange(12) % 5), batch_size=5)
    assert starfish.heal_(model, dense, masks, pairs, method).loss["first"] > 0  # type: ignore[operator]


def test_method_that_cheats_is_caught(images: Tensor) -> None:
    """A method that moves a frozen tensor, or revives a pruned weight, does not get away with it."""
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Cheat(starfish.Method):
        name: str

        def fit(self, job):  # type: ignore[no-untyped-def]
            with torch.no_grad():
                job.model.get_parameter(self.name).add_(1.0)
            yield {"step": 1, "steps": 1}

    for name, complaint in (("blocks.0.norm1.weight", "none of its masks"), ("blocks.0.mlp.fc1.weight", "revived")):
        model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
        job = job_of(model, dense, masks, images)
        with pytest.raises(AssertionError, match=complaint):
            finish(healing_(job, Cheat(name), as_images(images)))
