"""Whole units go: exact counts, the same in every head, and what is left can be cut out."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import IMAGES, tiny_cnn, tiny_vit
from starfish.anatomy import find
from starfish.core import Anatomy, Images, Masks, finish
from starfish.data import as_images
from starfish.errors import UserError
from starfish.masks import apply_
from starfish.patterns import gone, summarise
from starfish.pruners.structured import Structured
from starfish.small import slimmed
from starfish.speed import flops

PICTURES = as_images(IMAGES)
HEADS, WIDTH, D, NEURONS = 3, 8, 24, 96
SHARES = ["0", "0.1", "0.25", "0.29", "0.5", "0.63", "0.85", "0.99"]


@cache
def looked_at(kind: str) -> tuple[nn.Module, Anatomy]:
    model = {"vit": tiny_vit, "cnn": tiny_cnn}[kind]()
    return model, find(model, IMAGES[:2], channels=kind == "cnn")


def choose(kind: str, pruner: Structured, images: Images | None = PICTURES) -> Masks:
    return pruner.choose(*looked_at(kind), images)


def whole_rows(mask: Tensor) -> Tensor:
    """(rows,): which are kept; none may be kept in part."""
    rows = mask.flatten(1)
    assert torch.equal(rows.all(1), rows.any(1))
    return rows.all(1)


def rows_and_columns(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Which are kept; every entry of both is."""
    entries = mask.reshape(*mask.shape[:2], -1)
    rows, columns = entries.any(2).any(1), entries.any(2).any(0)
    assert torch.equal(entries, (rows[:, None] & columns)[..., None].expand_as(entries))
    return rows, columns


def kept(masks: Masks, block: int) -> tuple[Tensor, Tensor]:
    """Neurons, and dimensions as (head, dimension), that are kept; made and read, queries and keys alike."""
    made = whole_rows(masks[f"blocks.{block}.mlp.fc1.weight"])
    assert torch.equal(made, whole_rows(masks[f"blocks.{block}.mlp.fc2.weight"].T))
    q, k, v = whole_rows(masks[f"blocks.{block}.attn.qkv.weight"]).view(3, HEADS, WIDTH)
    assert torch.equal(q, k)
    assert bool(v.all()), "values are no units of queries and keys"
    return made, q


def floor(share: str, count: int) -> int:
    """int(s·n), as written: 0.29 of 100 is 29."""
    return min(int(Fraction(share) * count), count - 1)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("criterion", ["weight", "ensemble", "mismatch"])
def test_exact_counts(share: str, criterion: str) -> None:
    """Rounded down, in each block and each head alike, and one at least stays."""
    masks = choose("vit", Structured(float(share), criterion=criterion))
    assert masks.keys() == {f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("attn.qkv", "mlp.fc1", "mlp.fc2")}
    for block in (0, 1):
        neurons, dimensions = kept(masks, block)
        assert int((~neurons).sum()) == floor(share, NEURONS)
        assert (~dimensions).sum(1).tolist() == [floor(share, WIDTH)] * HEADS
    assert not summarise(masks, looked_at("vit")[1]).inconsistencies


def test_by_their_weights() -> None:
    """The lowest products of the norms of row and column go, or of the rows of query and key within a head."""
    masks = choose("vit", Structured(0.25, criterion="weight"), None)
    for block in (0, 1):
        part: Any = looked_at("vit")[0].get_submodule(f"blocks.{block}")
        qkv, fc1, fc2 = (layer.weight.detach() for layer in (part.attn.qkv, part.mlp.fc1, part.mlp.fc2))
        neurons, dimensions = kept(masks, block)
        worth = sorted(range(NEURONS), key=lambda j: float(fc1[j].norm() * fc2[:, j].norm()))
        assert (~neurons).nonzero()[:, 0].tolist() == sorted(worth[:24])
        for head in range(HEADS):
            rows = range(head * WIDTH, (head + 1) * WIDTH)
            worth = sorted(rows, key=lambda j: float(qkv[j].norm() * qkv[D + j].norm()))
            assert ((~dimensions[head]).nonzero()[:, 0] + head * WIDTH).tolist() == sorted(worth[:2])


@pytest.mark.parametrize(("kind", "criterion"), [
    ("vit", "weight"), ("vit", "energy"), ("vit", "mismatch"), ("cnn", "weight"), ("cnn", "mismatch"),
])  # fmt: skip
def test_masks_nest_as_the_sparsity_grows(kind: str, criterion: str) -> None:
    """What is gone at a lower sparsity is gone at every higher one."""
    found = [choose(kind, Structured(share, criterion=criterion)) for share in (0.1, 0.3, 0.5, 0.8)]
    for more, less in pairwise(found):
        assert all(not bool((less[name] & ~more[name]).any()) for name in more)
        assert sum(int(mask.sum()) for mask in less.values()) < sum(int(mask.sum()) for mask in more.values())


def test_a_seed_decides_the_masks() -> None:
    """The same seed gives the same masks again; random draws of another one can tell close calls otherwise."""
    pruner = Structured(0.5, draws=1)
    one, same, other = (choose("vit", replace(pruner, seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_a_sparsity_for_each_kind() -> None:
    """It takes the place of the general one for that kind alone."""
    neurons, dimensions = kept(choose("vit", Structured(0.5, mlp=0.25)), 0)
    assert (int((~neurons).sum()), (~dimensions).sum(1).tolist()) == (24, [4] * HEADS)
    neurons, dimensions = kept(choose("vit", Structured(0.5, qk=0.75)), 1)
    assert (int((~neurons).sum()), (~dimensions).sum(1).tolist()) == (48, [6] * HEADS)
    masks = choose("cnn", Structured(0.5, channels=0.25))
    assert int((~rows_and_columns(masks["layer3.0.conv1.weight"])[0]).sum()) == 16


@pytest.mark.parametrize(("scope", "names"), [
    ("mlp", {"mlp.fc1", "mlp.fc2"}), ("qk", {"attn.qkv"}), ("mlp+qk", {"mlp.fc1", "mlp.fc2", "attn.qkv"}),
    ("qk,mlp", {"mlp.fc1", "mlp.fc2", "attn.qkv"}), ("", {"mlp.fc1", "mlp.fc2", "attn.qkv"}),
])  # fmt: skip
def test_scopes(scope: str, names: set[str]) -> None:
    """Masks of the tensors that their units run through, and no others; empty takes all."""
    masks = choose("vit", Structured(0.5, scope))
    assert masks.keys() == {f"blocks.{block}.{name}.weight" for block in (0, 1) for name in names}


def test_density_of_fused_queries_keys_and_values() -> None:
    """1 − 2s/3: the values stay whole."""
    masks = choose("vit", Structured(0.5, "qk"))
    for mask in masks.values():
        assert float(mask.double().mean()) == pytest.approx(1 - 2 * 0.5 / 3)


@pytest.mark.parametrize("criterion", ["weight", "active_energy", "mismatch"])
def test_channels_that_go_together(criterion: str) -> None:
    """Those added along the shortcut go at all places at once, and the model without them answers the same."""
    model, anatomy = looked_at("cnn")
    masks = choose("cnn", Structured(0.5, "channels", criterion))
    assert not any("bn" in name for name in masks)
    lines = {name.removesuffix(".weight"): rows_and_columns(mask) for name, mask in masks.items()}
    stem, colours = lines["conv1"]
    assert (int((~stem).sum()), bool(colours.all())) == (8, True)
    for name, start in (("layer1.0.conv2", 0), ("layer2.0.conv2", 8), ("layer3.0.conv2", 24)):
        made, read = lines[name]
        assert torch.equal(made[start : start + 16], stem)
        assert bool(made[:start].all() and made[start + 16 :].all()), "what only zeros are added to stays"
        inner = lines[name.replace("conv2", "conv1")][0]
        assert torch.equal(inner, read)
        assert 2 * int(inner.sum()) == len(inner)
    for name, start in (("layer1.0.conv1", 0), ("layer2.0.conv1", 0), ("layer3.0.conv1", 8), ("linear", 24)):
        assert torch.equal(lines[name][1][start : start + 16], stem)
    cut_out(model, anatomy, masks, [8, 16, 32])


def cut_out(model: nn.Module, anatomy: Anatomy, masks: Masks, inner: list[int]) -> None:
    """The model without what is gone: smaller, and the same to rounding as the one with zeros."""
    zeroed = tiny_cnn()
    apply_(zeroed, masks)
    small = slimmed(zeroed, masks, anatomy)
    assert [small.get_parameter(f"layer{stage}.0.conv1.weight").shape[0] for stage in (1, 2, 3)] == inner
    assert parameters(small) < 0.5 * parameters(model)
    torch.testing.assert_close(small(IMAGES), zeroed(IMAGES), rtol=1e-4, atol=1e-4)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_settings_are_made_concrete() -> None:
    """What was left open is settled by what is there: images, and kinds of units."""
    anatomy = looked_at("vit")[1]
    with_images, without = Structured().settle(anatomy, PICTURES), Structured().settle(anatomy, None)
    assert (with_images.scope, with_images.criterion, with_images.qk_criterion) == ("mlp+qk", "mismatch", "mismatch")
    assert (without.scope, without.criterion, without.qk_criterion) == ("mlp+qk", "weight", "weight")
    assert Structured(criterion="ensemble").settle(anatomy, PICTURES).qk_criterion == "pairs"
    assert Structured(qk_criterion="token").settle(anatomy, PICTURES).criterion == "mismatch"
    assert Structured(scope="qk").settle(anatomy, None).scope == "qk"
    assert Structured().settle(looked_at("cnn")[1], None).scope == "channels"


def test_settled_it_chooses_the_same() -> None:
    """Settings of a result make the result."""
    open_, settled = Structured(0.3), Structured(0.3).settle(looked_at("vit")[1], PICTURES)
    one, two = choose("vit", open_), choose("vit", settled)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(("pruner", "needs"), [
    (Structured(), set()), (Structured(criterion="weight"), set()), (Structured(budget="parameters"), set()),
    (Structured(criterion="energy"), {"images"}), (Structured(qk_criterion="token"), {"images"}),
    (Structured(criterion="mismatch"), {"images"}), (Structured(budget="flops"), {"images"}),
    (Structured(budget="latency"), {"images"}),
])  # fmt: skip
def test_what_it_needs(pruner: Structured, needs: set[str]) -> None:
    """Asked before anything is spent."""
    assert pruner.needs() == needs


@pytest.mark.parametrize(("scope", "sees"), [("", True), ("mlp+qk", False), ("mlp+channels", True)])
def test_channels_are_looked_for_where_they_may_go(scope: str, sees: bool) -> None:
    """It takes a while."""
    assert Structured(scope=scope).sees_channels() is sees


def budget_of(kind: str) -> dict[str, float]:
    model, _ = looked_at(kind)
    return {"parameters": parameters(model), "flops": flops(model, IMAGES) / 2}


@pytest.mark.parametrize("cost", ["parameters", "flops"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("criterion", ["mismatch", "weight"])
def test_budgets_are_met_by_the_smaller_model(cost: Any, share: float, criterion: str) -> None:
    """What the cut model lacks is the share of what all units cost, to within one step; each family keeps a tenth."""
    model, anatomy = looked_at("vit")
    masks = choose("vit", Structured(share, criterion=criterion, budget=cost))
    small = slimmed(model, masks, anatomy)
    if cost == "parameters":
        saved, whole = parameters(model) - parameters(small), 2 * (NEURONS * 49 + D * 50)
        step = HEADS * 50
    else:
        saved, whole = (flops(model, IMAGES) - flops(small, IMAGES)) // 2, 2 * (NEURONS * 48 * 17 + D * (48 * 17 + 289))
        step = HEADS * (48 * 17 + 289)
    assert share * whole <= saved < share * whole + step
    left = [unit.count - int(gone(unit, masks, anatomy).sum()) for unit in anatomy.units]
    assert all(rest >= (10 if unit.kind == "neuron" else HEADS)
               for rest, unit in zip(left, anatomy.units, strict=True))  # fmt: skip
    assert len(set(left[1::2])) > 1, "blocks that are worth more keep more"
    assert not summarise(masks, anatomy).inconsistencies


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("criterion", ["mismatch", "weight"])
def test_a_budget_of_parameters_is_met_where_families_share_filters(share: float, criterion: str) -> None:
    """Rows of one family and columns of another are one filter, that goes once."""
    model, anatomy = looked_at("cnn")
    small = slimmed(model, choose("cnn", Structured(share, criterion=criterion, budget="parameters")), anatomy)
    norms = 2 * (16 + 16 + 16 + 32 + 16 + 64 + 16)
    whole = 9 * (3 * 16 + 2 * 16 * 16 + 16 * 32 + 32 * 32 + 32 * 64 + 64 * 64) + norms + 16 * 5
    step = 9 * (3 + 16 + 16 + 32 + 32 + 64 + 64) + 2 * 4 + 5
    assert share * whole <= parameters(model) - parameters(small) < share * whole + step


@pytest.mark.parametrize(
    ("settings", "complaint", "hint"),
    [
        ({"scope": "heads"}, "no units `heads` that can go whole", "`mlp`, `qk`"),
        ({"scope": "mlp+channels"}, "no units `channels`", "`mlp`, `qk`"),
        ({"sparsity": 1.0}, r"`sparsity` is 1.0", "from 0 to below 1"),
        ({"sparsity": -0.1}, r"`sparsity` is -0.1", "from 0 to below 1"),
        ({"sparsity": float("nan")}, r"`sparsity` is nan", "from 0 to below 1"),
        ({"mlp": 1.5}, r"`mlp` is 1.5", "from 0 to below 1"),
        ({"qk": -1.0}, r"`qk` is -1.0", "from 0 to below 1"),
        ({"criterion": "size"}, "`criterion` is `size`", "`mismatch`"),
        ({"qk_criterion": "energy"}, "`qk_criterion` is `energy`", "`token`, `pairs`"),
        ({"budget": "money"}, "`budget` is `money`", "`flops`"),
        ({"budget": "flops", "mlp": 0.3}, "`flops` is shared by all units", "budget=uniform"),
        ({"budget": "parameters", "sparsity": 0.95}, "of the parameters of the units cannot go", "sparsity of 0.8"),
        ({"draws": 0}, "`draws` is 0", "1 or more"),
        ({"scope": "mlp", "qk": 0.3}, "`qk` is 0.3 and none of these units are pruned", "`mlp`; --scope"),
        ({"channels": 0.3}, "`channels` is 0.3 and none", "`mlp`, `qk`"),
    ],
)
def test_refusals(settings: dict[str, Any], complaint: str, hint: str) -> None:
    """By name and value, with a way out, also before it starts."""
    with pytest.raises(UserError, match=complaint) as error:
        choose("vit", Structured(**settings))
    assert hint in error.value.hint
    if "parameters" not in complaint:
        with pytest.raises(UserError, match=complaint):
            Structured(**settings).settle(looked_at("vit")[1], PICTURES)


def test_a_model_without_units_is_refused() -> None:
    """By saying that it has none."""
    model, anatomy = looked_at("vit")
    with pytest.raises(UserError, match="no units") as error:
        finish(Structured().choosing(model, replace(anatomy, units=()), PICTURES))
    assert error.value.hint == "it has none"


def test_no_images_for_a_criterion_that_looks() -> None:
    with pytest.raises(UserError, match="looks at what the model does"):
        choose("vit", Structured(criterion="energy"), None)
