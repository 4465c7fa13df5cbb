"""The Fisher family on given masks, from end to end."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import starfish
from cases import IMAGES, LABELS, MODELS, all_ones
from starfish.cache import Cache
from starfish.core import Job, Masks, Method, Row
from starfish.data import Preprocess, StoredImages
from starfish.gradients import collecting
from starfish.heal import job_of
from starfish.methods.fisher import Cbs, Chita, Falcon, WoodFisher, _support
from starfish.pruners.magnitude import Magnitude

PICTURES = StoredImages(IMAGES, Preprocess(), LABELS)
MADE: dict[str, Method] = {
    "woodfisher": WoodFisher(batch=2, block=500),
    "cbs": Cbs(block=500),
    "chita": Chita(block=300),
    "chita-first-order": Chita(block=300, first_order=0.1, batch=2),
    "chita-cd": Chita(algorithm="cd", sweeps=3),
    "chita-stages": Chita(stages=3),
    "chita-cd-stages": Chita(algorithm="cd", sweeps=2, stages=2),
    "falcon": Falcon(),
    "falcon-first-order": Falcon(weights="first_order", steps=3),
    "falcon-none": Falcon(weights="none"),
    "falcon-stages": Falcon(stages=2),
}
every_method = pytest.mark.parametrize("method", MADE.values(), ids=MADE)
every_model = pytest.mark.parametrize("kind", MODELS)


@cache
def pruned(kind: str) -> tuple[nn.Module, Masks]:
    dense = MODELS[kind]()
    return dense, starfish.prune(dense, Magnitude(0.6, per="global"), IMAGES)


def job_for(kind: str, *, ones: bool = False, cache: Cache | None = None) -> Job:
    dense, masks = deepcopy(pruned(kind))
    return job_of(deepcopy(dense), dense, all_ones(masks) if ones else masks, PICTURES, seed=3, cache=cache)


def rows_of(method: Method, job: Job) -> list[Row]:
    return [row for row in method.settle(job).fit(job) if "stage" not in row]


@every_model
@every_method
def test_healed_with_zeros_intact_and_objective_lower(kind: str, method: Method) -> None:
    """Through heal_: zeros stay, all else but the masked weights is bit-identical, and the modelled loss falls."""
    dense, masks = deepcopy(pruned(kind))
    model = deepcopy(dense)
    result = starfish.heal_(model, dense, masks, PICTURES, method, seed=3)
    assert result.mask_intact
    assert result.frozen_intact
    assert torch.isfinite(model(IMAGES)).all()
    assert [row["step"] for row in result.rows] == list(range(1, int(result.rows[0]["steps"]) + 1))
    before, after = (sum(float(row[key]) for row in result.rows) for key in ("before", "after"))
    if "none" in str(method):
        assert before == after
        assert sorted(result.unchanged) == sorted(masks)
    elif "woodfisher" not in str(method).lower():
        assert after < before


@every_method
def test_nothing_pruned_changes_no_bit(method: Method) -> None:
    """With masks of ones the model stays the dense one, first-order term or not."""
    job = job_for("cnn", ones=True)
    rows = rows_of(method, job)
    assert all(torch.equal(tensor, job.dense.state_dict()[name]) for name, tensor in job.model.state_dict().items())
    assert all(row["before"] == row["after"] == 0 for row in rows)


@every_method
def test_stopped_half_way_it_ends_in_the_same_bits(method: Method) -> None:
    """From the model and the state that were saved after a row, a new start yields the other rows and no more."""
    whole = job_for("cnn")
    rows = rows_of(method, whole)
    first = job_for("cnn")
    work = (row for row in method.settle(first).fit(first) if "stage" not in row)
    seen = [next(work) for _ in range((len(rows) + 1) // 2)]
    work.close()
    assert all(not first.model.get_parameter(name)[~mask].any() for name, mask in first.masks.items())
    saved, state = deepcopy((first.model.state_dict(), first.state))
    second = job_for("cnn")
    second.model.load_state_dict(saved)
    second.state.update(state)
    assert seen + rows_of(method, second) == rows
    tensors = second.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])


@every_method
def test_what_it_says_of_itself(method: Method) -> None:
    """It needs labels and the dense model's shapes, sees the mask, and begins from the dense weights."""
    assert method.needs() == {"labels"}
    assert method.masked()
    assert method.starts_over()
    dense, masks = deepcopy(pruned("cnn"))
    with pytest.raises(starfish.UserError, match="needs labels"):
        starfish.heal_(deepcopy(dense), dense, masks, IMAGES, method)


@every_model
def test_block_of_a_whole_layer_is_its_joint_obs_update(kind: str) -> None:
    """CBS and CHITA with the same damping are one update; it is that of the layer's dense inverse Fisher matrix."""
    jobs = [job_for(kind) for _ in range(2)]
    rows_of(Cbs(damp=1e-2, block=10**6), jobs[0])
    rows_of(Chita(ridge=1e-2, block=10**6), jobs[1])
    name = min(jobs[0].masks, key=lambda name: jobs[0].masks[name].numel())
    assert torch.equal(jobs[0].model.get_parameter(name), jobs[1].model.get_parameter(name))
    work, G = collecting(jobs[0].dense, [name], PICTURES, gradients=12, batch=1, seed=3), None
    while G is None:
        try:
            next(work)
        except StopIteration as end:
            G = end.value[name].double()
    w, keep = jobs[0].dense.get_parameter(name).detach().double().flatten(), jobs[0].masks[name].flatten()
    inverse = torch.linalg.inv(G.T @ G / 12 + 1e-2 * torch.eye(len(w), dtype=torch.float64))
    P = (~keep).nonzero()[:, 0]
    expected = (w - inverse[:, P] @ torch.linalg.solve(inverse[P][:, P], w[P])) * keep
    found = jobs[0].model.get_parameter(name).detach().double().flatten()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_scale_of_zero_is_the_mask_alone() -> None:
    """For WoodFisher and CBS."""
    for method in (WoodFisher(scale=0.0), Cbs(scale=0.0)):
        job = job_for("cnn")
        rows_of(method, job)
        for name, mask in job.masks.items():
            assert torch.equal(job.model.get_parameter(name), job.dense.get_parameter(name) * mask)


def test_it_begins_from_the_dense_weights() -> None:
    """What the survivors were before has no part in it."""
    jobs = [job_for("cnn") for _ in range(2)]
    with torch.no_grad():
        for name, mask in jobs[1].masks.items():
            jobs[1].model.get_parameter(name).add_(mask)
    for job in jobs:
        rows_of(Chita(), job)
    states = [job.model.state_dict() for job in jobs]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_settings_settle_on_the_images() -> None:
    """Twelve images give twelve gradients of one, or four of three."""
    job = job_for("cnn")
    assert WoodFisher(batch=3).settle(job) == WoodFisher(gradients=4, batch=3)
    assert Cbs().settle(job).gradients == Chita().settle(job).gradients == Falcon().settle(job).gradients == 12


def test_gradients_are_found_again_in_the_cache(tmp_path: Path) -> None:
    """The second method of the family takes those of the first, if it wants as many."""
    stages = []
    for method in (Cbs(), Chita()):
        job = job_for("cnn", cache=Cache(tmp_path))
        stages.append([row for row in method.settle(job).fit(job) if "stage" in row])
    assert len(stages[0]) == 12
    assert not stages[1]


def test_stages_are_nested_and_end_at_the_mask() -> None:
    """Each stage removes, of the weights that go in the end, the smallest; none comes back."""
    random = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(size, generator=random, dtype=torch.float64) for name, size in (("a", 30), ("b", 20))}
    masks = {name: torch.rand(len(w), generator=random) > 0.6 for name, w in weights.items()}
    total = sum(int((~mask).sum()) for mask in masks.values())
    before = {name: torch.ones_like(mask) for name, mask in masks.items()}
    for share in (0.1, 0.2, total / 50):
        support = _support(weights, masks, share)
        assert sum(int((~one).sum()) for one in support.values()) == round(50 * share)
        assert all((support[name] <= before[name]).all() and (masks[name] <= support[name]).all() for name in masks)
        gone = torch.cat([w[~support[name]].abs() for name, w in weights.items()])
        waiting = torch.cat([w[support[name] & ~masks[name]].abs() for name, w in weights.items()])
        assert not len(waiting) or gone.max() <= waiting.min()
        before, weights = support, {name: 3 * w * support[name] for name, w in weights.items()}
    assert all(torch.equal(support[name], masks[name]) for name in masks)


def test_first_order_term_moves_the_survivors() -> None:
    """With it the weights are others, and lower in the modelled loss that has it."""
    jobs = [job_for("cnn") for _ in range(2)]
    for job, factor in zip(jobs, (0.0, 0.1), strict=True):
        rows_of(Chita(first_order=factor), job)
    assert not torch.equal(jobs[0].model.conv1.weight, jobs[1].model.conv1.weight)
