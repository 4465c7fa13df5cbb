"""SNOWS end to end, on every kind of network."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import starfish
from cases import IMAGES, all_ones, tiny_vit
from networks import NETWORKS, jobs, rows_of
from starfish.core import Row, finish
from starfish.data import as_images
from starfish.errors import UserError
from starfish.heal import healing_, job_of
from starfish.methods.snows import Snows
from starfish.pruners.structured import Structured

QUICK = Snows(batch_size=6, cg_steps=4, look_ahead=5)


def test_one_exact_step_is_restricted_least_squares() -> None:
    """The classifier alone, all images at once: numpy's solution on each row's survivors, from where it stood."""
    job = jobs("cnn", torch.float64)
    masks = {"linear.weight": job.masks["linear.weight"]}
    job = job_of(deepcopy(job.dense), job.dense, masks, IMAGES.double())
    seen: list[Tensor] = []
    job.dense.linear.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    before = job.model.linear.weight.detach().clone().numpy()
    (row,) = rows_of(job, Snows(look_ahead=1, batch_size=99, cg_steps=500, cg_tolerance=1e-13, damp=1e-3))
    X = seen[0].detach().numpy()
    dense, keep = job.dense.linear.weight.detach().numpy(), masks["linear.weight"].numpy()
    H = 2 * X.T @ X / (len(X) * len(dense))  # the mean is over images and outputs
    for o in range(len(dense)):
        S = keep[o]
        g = H[S] @ (before[o] - dense[o])
        wanted = before[o, S] - np.linalg.solve(H[np.ix_(S, S)] + 1e-3 * np.eye(S.sum()), g)
        np.testing.assert_allclose(job.model.linear.weight.detach().numpy()[o, S], wanted, rtol=1e-7, atol=1e-10)
    assert row["newton"] == 1
    assert float(row["after"]) < float(row["before"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("network", "warm"), [*((network, False) for network in NETWORKS), ("vit", True), ("depthwise", True)]
)
def test_every_layer_comes_closer_and_only_survivors_move(network: str, warm: bool) -> None:
    """A row a layer, no objective larger; zeros stay, other tensors keep their bits, the answers come nearer."""
    job = jobs(network)
    before = deepcopy(job.model.state_dict())
    apart = (job.model(IMAGES) - job.dense(IMAGES)).norm()
    result = starfish.heal_(job.model, job.dense, job.masks, IMAGES, replace(QUICK, warm_start=warm))
    assert {row["layer"] for row in result.rows} == set(job.masks)
    assert all(float(row["after"]) <= float(row["before"]) for row in result.rows)
    assert sum(int(row["newton"]) for row in result.rows) >= len(job.masks)
    assert result.mask_intact
    assert result.frozen_intact
    assert not result.unchanged
    for name, tensor in job.model.state_dict().items():
        assert name in job.masks or torch.equal(tensor, before[name])
    assert (job.model(IMAGES) - job.dense(IMAGES)).norm() < 0.8 * apart


@pytest.mark.parametrize("settings", [{"product": "hessian"}, {"product": "blockdiag"}, {"targets": "same"},
                                      {"look_ahead": 1}, {"passes": 3}])  # fmt: skip
def test_every_setting_lowers_its_objective(settings: dict[str, Any]) -> None:
    """The exact Hessian, its blocks, the released targets, a layer alone, and more passes."""
    rows = rows_of(job := jobs("vit"), replace(QUICK, **settings))
    assert all(float(row["after"]) <= float(row["before"]) for row in rows)
    assert sum(float(row["after"]) for row in rows) < 0.9 * sum(float(row["before"]) for row in rows)
    assert starfish.masks.zeros_intact(job.model, job.masks)


@pytest.mark.parametrize("network", NETWORKS)
def test_nothing_pruned_changes_nothing(network: str) -> None:
    """The objective is exactly zero, and every tensor keeps its bits."""
    job = jobs(network)
    job = job_of(deepcopy(job.dense), job.dense, all_ones(job.masks), IMAGES)
    rows = rows_of(job, QUICK)
    assert all(row["before"] == row["after"] == 0 and row["cg"] == 0 for row in rows)
    assert all(torch.equal(tensor, job.dense.state_dict()[name]) for name, tensor in job.model.state_dict().items())


@pytest.mark.parametrize("network", ["cnn", "attention module"])
def test_stopped_anywhere_it_goes_on_to_the_same_bits(network: str) -> None:
    """Closed in the middle of a layer, a new start from model and state repeats no row and ends in the same weights."""
    whole, method = jobs(network), replace(QUICK, cg_steps=2, look_ahead=2)
    rows = rows_of(whole, method)
    job, seen = jobs(network), list[Row]()
    for row in method.fit(job):
        if "stage" not in row:
            seen.append(row)
        elif len(seen) == 3:  # a step of the fourth layer is done
            break
    other = jobs(network)
    other.model.load_state_dict(job.model.state_dict())
    other.state.update(job.state)
    assert seen + rows_of(other, method) == rows
    states = other.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_it_goes_on_from_what_another_method_left() -> None:
    """In a chain the survivors are those of the method before, and statistics it changed stay."""
    job = jobs("cnn")
    result = finish(healing_(job, [starfish.METHODS["batchnorm"], QUICK], as_images(IMAGES)))
    assert [stage["method"] for stage in result.stages] == ["batchnorm", "snows"]
    assert not torch.equal(job.model.bn1.running_mean, job.dense.bn1.running_mean)
    assert not QUICK.starts_over()


def test_open_settings_follow_the_architecture() -> None:
    """With attention a few operations ahead, else many; what is given stays."""
    found = {network: Snows().settle(jobs(network)) for network in ("cnn", "vit")}
    assert found["vit"].look_ahead < found["cnn"].look_ahead
    assert Snows(look_ahead=2, batch_size=3).settle(jobs("vit")) == Snows(look_ahead=2, batch_size=3)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [({"product": "fisher"}, "`product` is `fisher`"), ({"targets": "own"}, "`targets` is `own`"),
     ({"passes": 0}, "`passes` is 0"), ({"cg_steps": 0}, "`cg_steps` is 0"), ({"damp": -1.0}, "`damp` is -1")],
)  # fmt: skip
def test_wrong_settings_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        starfish.heal_(tiny_vit(), tiny_vit(), jobs("vit").masks, IMAGES, Snows(**settings))


def test_a_smaller_model_is_refused() -> None:
    """Its operations put out less than the dense model's, so there is nothing to match."""
    dense = tiny_vit()
    masks = starfish.prune(dense, Structured(0.5, scope="mlp"), IMAGES)
    starfish.heal_(deepcopy(dense), dense, masks, IMAGES, QUICK)  # in its masked form there is
    small = starfish.slim(deepcopy(dense), masks, IMAGES)
    kept = {name: torch.ones_like(parameter, dtype=torch.bool) for name, parameter in small.named_parameters()
            if name in masks}  # fmt: skip
    with pytest.raises(UserError, match="looks at the weights that went"):
        starfish.heal_(small, dense, kept, IMAGES, QUICK)
