"""Solvers over whole models: a block, a layer or all layers at once, and the schedule of stages."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from starfish.errors import UserError
from starfish.methods.quadratic import Block
from starfish.methods.survivors import Rule, Solver, schedule, weights_of, write_

SIZES = {"one.weight": 12, "two.weight": 7}


def given() -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    random = torch.Generator().manual_seed(1)
    gradients = {name: torch.randn(5, size, generator=random, dtype=torch.float64) for name, size in SIZES.items()}
    weights = {name: torch.randn(size, generator=random, dtype=torch.float64) for name, size in SIZES.items()}
    return gradients, weights, {name: w.abs() > 0.5 for name, w in weights.items()}


def test_blocks_know_nothing_of_each_other() -> None:
    """With one block a layer the update is that of the layer's own quadratic; with smaller blocks it is theirs."""
    gradients, weights, masks = given()
    name = "one.weight"
    for size in (12, 5):
        found, before, after = Solver("backsolve", 0.01, size).layer(gradients[name], weights[name], masks[name])
        parts = [
            Block(g, w, 0.01) for g, w in zip(gradients[name].split(size, 1), weights[name].split(size), strict=True)
        ]
        expected = [one.back_solve(keep) for one, keep in zip(parts, masks[name].split(size), strict=True)]
        assert torch.equal(found, torch.cat(expected))
        assert after == pytest.approx(sum(one.value(w) for one, w in zip(parts, expected, strict=True)))
        assert after < before


@pytest.mark.parametrize("rule", ["backsolve", "woodfisher", "cd", "first_order", "none"])
def test_all_rules_keep_the_zeros(rule: Rule) -> None:
    """Whatever the rule, weights come back by name, zero under the mask; only woodfisher may raise the value."""
    gradients, weights, masks = given()
    found, before, after = Solver(rule, 0.01, 6).all_layers(gradients, weights, masks)
    assert {name: len(w) for name, w in found.items()} == SIZES
    assert all(not found[name][~masks[name]].any() for name in SIZES)
    assert after < before if rule not in {"woodfisher", "none"} else True
    assert rule != "none" or after == before


def test_coupled_rules_fall_step_by_step_to_the_joint_minimum() -> None:
    """Descent and coordinate descent see all layers: both end where one block of the whole model has its minimum."""
    gradients, weights, masks = given()
    whole = Block(torch.cat(list(gradients.values()), 1), torch.cat(list(weights.values())), 0.5)
    keep = torch.cat(list(masks.values()))
    expected = whole.back_solve(keep)
    for rule in ("cd", "first_order"):
        steps = list(Solver(rule, 0.5, steps=300).descending(gradients, weights, masks))  # type: ignore[arg-type]
        values = [value for _, value in steps]
        assert all(after <= before + 1e-12 for before, after in pairwise(values))
        assert values[0] == pytest.approx(whole.value(whole.masked(keep)))
        assert values[-1] == pytest.approx(whole.value(expected), rel=1e-6)


def test_schedule_is_the_polynomial() -> None:
    """s + (s₀ − s)(1 − t/(T − 1))³: from the start to the end, never back, and never above the end."""
    shares = schedule(0.9, 0.2, 5)
    assert shares == pytest.approx([0.9 - 0.7 * (1 - t / 4) ** 3 for t in range(5)])
    assert shares == sorted(shares)
    assert schedule(0.9, 0.2, 1) == [0.9]
    assert schedule(0.1, 0.2, 3) == pytest.approx([0.1, 0.1, 0.1])
    with pytest.raises(UserError, match="`stages` is 0"):
        schedule(0.9, 0.2, 0)
    with pytest.raises(UserError, match="`start` is 1"):
        schedule(0.9, 1.0, 2)


def test_weights_go_out_and_come_back_in_the_same_bits() -> None:
    """float32 through float64 and back."""
    model = nn.Sequential(nn.Linear(4, 3))
    before = model[0].weight.detach().clone()
    write_(model, weights_of(model, ["0.weight"]))
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize(("settings", "words"), [({"damp": 0.0}, "damping is 0"), ({"block": 0}, "`block` is 0"),
                                                 ({"steps": 0}, "steps is 0")])  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float], words: str) -> None:
    """By name and value."""
    with pytest.raises(UserError, match=words):
        Solver(**({"rule": "backsolve", "damp": 0.1, "block": 5} | settings))  # type: ignore[arg-type]
