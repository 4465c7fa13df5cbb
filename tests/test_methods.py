"""Every property of every row of cases.py."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import starfish
from cases import CASES, IMAGES, LABELS, STRUCTURED, UNPROVEN, Case, all_ones, objective
from starfish.core import Job, Masks, Method, Result, finish
from starfish.data import StoredImages
from starfish.heal import healing_, job_of
from starfish.methods import name_of, summary
from starfish.runs import Run

every_case = pytest.mark.parametrize("case", CASES, ids=str)
PICTURES = StoredImages(IMAGES, starfish.Preprocess(), LABELS)


@dataclass
class Healed:
    """A case after its heal, and what it was given as it was before."""

    model: nn.Module
    dense: nn.Module
    dense_before: dict[str, Tensor]
    masks: Masks
    masks_before: Masks
    method: Method
    result: Result


@cache
def healed(case: Case) -> Healed:
    """Healed once, for all that only look at it."""
    model, dense, masks, method = case.build(IMAGES)
    before = deepcopy((dense.state_dict(), masks))
    result = starfish.heal_(model, dense, masks, PICTURES, method, seed=3)
    return Healed(model, dense, before[0], masks, before[1], method, result)


@every_case
def test_zeros_stay_and_frozen_tensors_are_bit_identical(case: Case) -> None:
    """After a heal every pruned weight is exactly zero and nothing outside the masks has moved, bit for bit."""
    found = healed(case)
    free = set(found.result.also_changed)
    for name, tensor in found.model.state_dict().items():
        if name in found.masks:
            assert not tensor[~found.masks[name]].any(), name
        elif name not in free:
            assert torch.equal(tensor, found.dense_before[name]), name
    assert all(found.dense_before[name].ndim < 2 for name in free), "a weight outside the masks"
    for name, tensor in found.dense.state_dict().items():
        assert torch.equal(tensor, found.dense_before[name]), f"dense {name} moved"


@every_case
def test_outputs_are_finite_and_flags_restored(case: Case) -> None:
    """The healed model answers with numbers, is in evaluation mode and its parameters can be trained as before."""
    model = healed(case).model
    assert torch.isfinite(model(IMAGES)).all()
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


@every_case
def test_mask_is_not_touched(case: Case) -> None:
    """The masks handed in come back as they were."""
    found = healed(case)
    assert all(torch.equal(found.masks[name], mask) for name, mask in found.masks_before.items())


@every_case
def test_stopped_and_resumed_it_ends_in_the_same_bits(case: Case, tmp_path: Path) -> None:
    """A heal that was stopped half way and resumed in a new process's place is one that never stopped."""
    whole = healed(case)
    half = (len(whole.result.rows) + 1) // 2
    torch.manual_seed(9)  # nothing may hang on a state that is not saved

    def run() -> tuple[Job, Run]:
        model, dense, masks, _ = case.build(IMAGES)
        return job_of(model, dense, masks, PICTURES, seed=3), Run.open(tmp_path / "run", {"starfish": {}}, resume=True)

    job, folder = run()
    work = healing_(job, whole.method, PICTURES, folder)
    while half:
        half -= "stage" not in next(work)
    work.close()
    job, folder = run()
    result = finish(healing_(job, whole.method, PICTURES, folder))
    assert result.rows == whole.result.rows
    states = job.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("case", [case for case in CASES if case.method not in {"batchnorm", *UNPROVEN}], ids=str)
def test_objective_falls(case: Case) -> None:
    """What the method makes small is smaller afterwards on the images it had; a closed form never makes it larger."""
    method = starfish.METHODS[case.method]
    if not isinstance(method, starfish.Starfish):
        before, after = objective(healed(case).result)
        assert after <= before
        return
    model, dense, masks, _ = case.build(IMAGES)  # BatchNorm frozen: batches of four make it noisy
    method = replace(method, bn="freeze", epochs=8, lr=1e-3, batch_size=4, precision="fp32")
    before, after = objective(starfish.heal_(model, dense, masks, PICTURES, method))
    assert after < before


@pytest.mark.parametrize("case", [case for case in CASES if case.method not in {"ce", "batchnorm"}], ids=str)
def test_nothing_pruned_changes_nothing(case: Case) -> None:
    """With masks of ones the student is the dense model: no loss (BatchNorm frozen), nothing to do in closed form."""
    model, dense, masks, method = case.build(IMAGES)
    if "units" in method.needs():
        with pytest.raises(starfish.UserError, match="these have none"):
            starfish.heal_(model, dense, all_ones(masks), PICTURES, method)
    elif isinstance(method, starfish.Starfish):
        method = replace(method, epochs=1, bn="freeze")
        result = starfish.heal_(model, dense, all_ones(masks), PICTURES, method)
        assert abs(float(result.rows[0]["loss"])) <= 1e-6
    else:
        starfish.heal_(model, dense, all_ones(masks), PICTURES, method)
    if not isinstance(method, starfish.Starfish):
        assert all(torch.equal(tensor, dense.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("case", [case for case in CASES if case.masks in STRUCTURED], ids=str)
def test_cut_out_it_computes_the_same(case: Case) -> None:
    """Half of the units are gone, and the healed model without them gives the answers of the one with zeros."""
    found = healed(case)
    assert found.result.cut
    assert all(2 * kind["gone"] == kind["units"] for kind in found.result.cut.values())
    small = starfish.slim(found.model, found.masks, IMAGES)
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (small, found.model)]
    assert sizes[0] < 0.8 * sizes[1]
    assert found.result.speed["small"]["parameters"] == sizes[0]
    torch.testing.assert_close(small(IMAGES), found.model(IMAGES), rtol=1e-4, atol=1e-4)


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
