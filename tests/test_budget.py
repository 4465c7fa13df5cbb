"""Budgets: what units cost, counted by hand and by what is left without them, and how a budget is spent."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from cases import IMAGES, tiny_cnn, tiny_vit
from starfish.anatomy import find
from starfish.core import Anatomy, Part, Unit, finish
from starfish.data import as_images
from starfish.errors import UserError
from starfish.pruners.budget import (
    Bill,
    Budget,
    Counts,
    flops_of,
    greedy,
    half_of,
    milliseconds_of,
    parameters_of,
    spend,
)
from starfish.pruners.units import masks_of
from starfish.small import slimmed
from starfish.speed import flops

PICTURES = as_images(IMAGES)
D, HEADS, NEURONS, TOKENS = 24, 3, 96, 17


@cache
def looked_at(kind: str) -> tuple[nn.Module, Anatomy]:
    model = {"vit": tiny_vit, "cnn": tiny_cnn}[kind]()
    return model, find(model, IMAGES[:2], channels=kind == "cnn")


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def without_one(kind: str, unit: Unit) -> nn.Module:
    """The model without one unit of each group of a family."""
    model, anatomy = looked_at(kind)
    return slimmed(model, masks_of(model, anatomy, [unit], {0: torch.arange(unit.count).double()}, {0: 1}), anatomy)


def units(kind: str) -> list[Any]:
    return [pytest.param(kind, unit, id=f"{kind}-{unit.kind}-{unit.block}") for unit in looked_at(kind)[1].units]


EVERY_FAMILY = [*units("vit"), *units("cnn")]


def test_parameters_of_a_vits_units() -> None:
    """Of a neuron a row, a bias entry and a column; of a query-key dimension of one head two rows and two entries."""
    model, anatomy = looked_at("vit")
    for place, unit in enumerate(anatomy.units):
        found = parameters_of(model, anatomy.units).saved({place: 1}) / unit.groups
        assert found == (2 * D + 1 if unit.kind == "neuron" else 2 * (D + 1))


@pytest.mark.parametrize(("kind", "unit"), EVERY_FAMILY)
def test_parameters_that_a_unit_takes_with_it(kind: str, unit: Unit) -> None:
    """As many as the model is smaller without one of each group; running statistics are none."""
    model, _ = looked_at(kind)
    assert parameters_of(model, [unit]).saved({0: 1}) == size(model) - size(without_one(kind, unit))


@pytest.mark.parametrize(
    ("kinds", "left"), [({"neuron"}, 58_237_672), ({"qk"}, 79_480_552), ({"neuron", "qk"}, 51_150_568)]
)
def test_parameters_of_half_a_deit(kinds: set[str], left: int) -> None:
    """The sizes of the papers, of DeiT-B with half of its neurons, query-key dimensions, or both."""
    with torch.device("meta"):
        model = timm.create_model("deit_base_patch16_224")
        anatomy = find(model, torch.zeros(2, 3, 224, 224))
    assert size(model) == 86_567_656
    units = [unit for unit in anatomy.units if unit.kind in kinds]
    half = {place: unit.count // unit.groups // 2 for place, unit in enumerate(units)}
    assert size(model) - parameters_of(model, units).saved(half) == left


def counted(kind: str, families: Sequence[Unit]) -> Bill:
    model, anatomy = looked_at(kind)
    return finish(flops_of(model, anatomy, families, PICTURES))


def test_flops_of_a_vits_units() -> None:
    """A neuron is d multiply-adds in and d out at each token; a dimension d for q, d for k and one for each pair."""
    units = looked_at("vit")[1].units
    bill = counted("vit", units)
    for place, unit in enumerate(units):
        one = 2 * D * TOKENS if unit.kind == "neuron" else 2 * D * TOKENS + TOKENS**2
        assert bill.saved({place: 3}) == 3 * unit.groups * one


def test_flops_of_a_cnns_units() -> None:
    """Each filter counts at the pixels that it puts out: 32² in the first stage, 16² and 8² behind the strides."""
    units = looked_at("cnn")[1].units
    bill = counted("cnn", units)
    made = 9 * (3 * 32**2 + 16 * 32**2 + 32 * 16**2 + 64 * 8**2)
    read = 9 * (16 * 32**2 + 32 * 16**2 + 64 * 8**2) + 5
    assert bill.saved({0: 1}) == made + read
    widths = [(16, 16, 32), (16, 32, 16), (32, 64, 8)]
    inner = [9 * (inputs + outputs) * side**2 for inputs, outputs, side in widths]
    assert [bill.saved({place: 1}) for place in (1, 2, 3)] == inner


def without(kind: str, counts: Counts) -> nn.Module:
    """The model without the first units of each group of each family."""
    model, anatomy = looked_at(kind)
    order = {place: torch.arange(unit.count).double() for place, unit in enumerate(anatomy.units)}
    return slimmed(model, masks_of(model, anatomy, anatomy.units, order, counts), anatomy)


@pytest.mark.parametrize(("kind", "unit"), EVERY_FAMILY)
def test_flops_that_a_unit_takes_with_it(kind: str, unit: Unit) -> None:
    """As many as the counter of the whole model finds fewer without one of each group, a multiply-add being two."""
    model, _ = looked_at(kind)
    saved = flops(model, IMAGES) - flops(without_one(kind, unit), IMAGES)
    assert 2 * counted(kind, [unit]).saved({0: 1}) == saved


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_what_is_between_two_families_is_saved_once(kind: str) -> None:
    """Filters that lose rows to one and columns to another: what is left of the model is what was counted."""
    model, anatomy = looked_at(kind)
    counts = {0: 3, 1: 5, 2: 7, 3: 2}
    small = without(kind, counts)
    assert parameters_of(model, anatomy.units).saved(counts) == size(model) - size(small)
    assert 2 * counted(kind, anatomy.units).saved(counts) == flops(model, IMAGES) - flops(small, IMAGES)


def family(count: int, groups: int = 1) -> Unit:
    return Unit("qk" if groups > 1 else "neuron", "", count, groups, (Part("w", 0),))


def by_hand(families: Sequence[Unit], scores: Sequence[Tensor], costs: Sequence[float], budget: Budget) -> Counts:
    """Step by step: of the next unit of each group of each family, those that lose least for what they cost."""
    counts = dict.fromkeys(range(len(families)), 0)
    spent = 0.0
    whole = sum(unit.count * cost for unit, cost in zip(families, costs, strict=True))
    while spent < budget.share * whole - 1e-6:
        worths = {}
        for place, unit in enumerate(families):
            size = unit.count // unit.groups
            if size - counts[place] - 1 < max(1, round(budget.least * size)):
                continue
            groups = [sorted(group.tolist()) for group in scores[place].view(unit.groups, size)]
            worths[place] = sum(group[counts[place]] for group in groups) / (costs[place] * unit.groups)
        place = min(worths, key=lambda each: worths[each])
        counts[place] += 1
        spent += costs[place] * families[place].groups
    return counts


FAMILIES = [family(40), family(24, 3), family(12, 2), family(7)]
COSTS = [49.0, 50.0, 3.0, 120.0]


def random_scores(seed: int) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {place: torch.rand(unit.count, generator=generator).double() for place, unit in enumerate(FAMILIES)}


def spent(counts: Counts) -> float:
    return sum(counts[place] * unit.groups * COSTS[place] for place, unit in enumerate(FAMILIES))


BILL = Bill(FAMILIES, apart=dict(enumerate(COSTS)))
WHOLE = sum(unit.count * cost for unit, cost in zip(FAMILIES, COSTS, strict=True))


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("seed", range(4))
def test_greedy_takes_the_least_loss_for_its_cost(share: float, seed: int) -> None:
    """One step of one family after the other, each head alike, until the share is spent and not one step longer."""
    scores, budget = random_scores(seed), Budget("parameters", share, 0.1)
    found = greedy(scores, BILL, budget)
    assert found == by_hand(FAMILIES, list(scores.values()), COSTS, budget)
    longest = max(unit.groups * cost for unit, cost in zip(FAMILIES, COSTS, strict=True))
    assert share * WHOLE - 1e-6 <= spent(found) < share * WHOLE + longest


def test_heads_do_not_make_a_step_dearer() -> None:
    """Three heads that lose three units for three times the cost are as good a bargain as one."""
    bill = Bill([family(10), family(30, 3)], apart={0: 5.0, 1: 5.0})
    scores = {0: torch.full((10,), 1.001).double(), 1: torch.ones(30).double()}
    assert greedy(scores, bill, Budget("parameters", 0.25, 0.1)) == {0: 0, 1: 4}
    scores[0] = torch.full((10,), 0.999).double()
    assert greedy(scores, bill, Budget("parameters", 0.25, 0.1)) == {0: 9, 1: 1}


def test_a_budget_spends_whole_shares_exactly() -> None:
    """Rounding of the sums does not cost a unit."""
    for tenth in range(1, 10):
        counts = greedy(
            {0: torch.arange(10).double()}, Bill([family(10)], apart={0: 0.1}), Budget("latency", tenth / 10, 0.0)
        )
        assert counts == {0: tenth}


def test_more_is_taken_from_the_same_as_shares_grow() -> None:
    """No family gets a unit back."""
    found = [greedy(random_scores(0), BILL, Budget("flops", share / 20, 0.1)) for share in range(17)]
    assert all(less[place] <= more[place] for less, more in pairwise(found) for place in less)
    assert spent(found[0]) == 0


@pytest.mark.parametrize("least", [0.1, 0.25, 0.5])
def test_the_least_share_of_each_family_stays(least: float) -> None:
    """However little its units are worth; one at least, and the others pay instead."""
    scores = random_scores(0)
    scores[0] *= 1e-6
    counts = greedy(scores, BILL, Budget("parameters", 0.45, least))
    left = [unit.count // unit.groups - counts[place] for place, unit in enumerate(FAMILIES)]
    assert left[0] == round(40 * least)
    assert all(kept >= max(1, round(least * unit.count / unit.groups))
               for kept, unit in zip(left, FAMILIES, strict=True))  # fmt: skip


def test_a_budget_that_cannot_be_met_is_refused() -> None:
    """With what can be met, which then is."""
    scores = random_scores(0)
    with pytest.raises(UserError, match=r"0.95 of the parameters of the units cannot go: 0.1 of each") as error:
        greedy(scores, BILL, Budget("parameters", 0.95, 0.1))
    most = float(error.value.hint.split()[4])
    assert most > 0.8
    assert spent(greedy(scores, BILL, Budget("parameters", most, 0.1))) >= most * WHOLE


def test_units_that_cost_nothing_are_refused() -> None:
    """No masks that keep all and save nothing."""
    with pytest.raises(UserError, match="no unit costs any latency"):
        greedy(random_scores(0), Bill(FAMILIES, apart=dict.fromkeys(range(4), 0.0)), Budget("latency", 0.5, 0.1))


def test_units_that_cost_nothing_go_last() -> None:
    """Beside others that cost something."""
    bill = Bill([family(10), family(10)], apart={0: 0.0, 1: 1.0})
    counts = greedy({0: torch.zeros(10) + 1e-9, 1: torch.ones(10)}, bill, Budget("latency", 0.5, 0.1))
    assert counts == {0: 0, 1: 5}


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_milliseconds_are_numbers_and_the_model_is_left_alone(kind: str) -> None:
    """Finite and not negative, one for each family; running statistics do not move while a model is timed."""
    model, anatomy = looked_at(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    work = milliseconds_of(model, anatomy, anatomy.units, PICTURES)
    assert next(work) == {"stage": "latency", "done": 1, "total": len(anatomy.units)}
    bill = finish(work)
    costs = [bill.saved({place: 1}) for place in range(len(anatomy.units))]
    assert bool(torch.isfinite(torch.tensor(costs)).all())
    assert min(costs) >= 0
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.eval()


def test_half_of_a_family() -> None:
    """The second half of each head, and nothing else."""
    model, anatomy = looked_at("vit")
    unit = next(unit for unit in anatomy.units if unit.kind == "qk")
    masks = half_of(model, anatomy, unit)
    expected = torch.tensor(([True] * 4 + [False] * 4) * 6 + [True] * 24)
    assert masks.keys() == {"blocks.0.attn.qkv.weight"}
    assert torch.equal(masks["blocks.0.attn.qkv.weight"], expected[:, None].expand(72, 24))


@pytest.mark.parametrize("cost", ["flops", "latency"])
def test_budgets_of_work_need_images(cost: str) -> None:
    """Parameters are counted without."""
    model, anatomy = looked_at("vit")
    scores = {place: torch.rand(unit.count).double() for place, unit in enumerate(anatomy.units)}
    with pytest.raises(UserError, match=f"`{cost}` looks at the model at work"):
        finish(spend(model, anatomy, anatomy.units, scores, None, Budget(cost, 0.5, 0.1)))
    assert any(finish(spend(model, anatomy, anatomy.units, scores, None, Budget("parameters", 0.5, 0.1))).values())


def test_a_budget_of_time_times_the_model() -> None:
    """With images, and before anything is chosen."""
    model, anatomy = looked_at("vit")
    scores = {place: torch.rand(unit.count).double() for place, unit in enumerate(anatomy.units)}
    work = spend(model, anatomy, anatomy.units, scores, PICTURES, Budget("latency", 0.5, 0.1))
    assert [(row["stage"], row["done"], row["total"]) for row in (next(work), next(work))] == [
        ("latency", 1, 4),
        ("latency", 2, 4),
    ]
