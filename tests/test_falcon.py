"""FALCON's masks: two budgets at once, against every choice on small problems, and multiply-adds counted by running."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import starfish
from cases import CLASSES, IMAGES, LABELS, MODELS
from starfish.anatomy import find
from starfish.core import finish
from starfish.data import Preprocess, StoredImages
from starfish.methods.regression import Regression, largest
from starfish.pruners.falcon import ByFalcon, dual, multiply_adds, projecting, support
from starfish.pruners.flat import flat
from starfish.pruners.magnitude import Magnitude
from starfish.pruners.select import rows_of

PICTURES = StoredImages(IMAGES, Preprocess(), LABELS)


def problem(p: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Worth and multiply-adds of weights that lie in four layers."""
    random = torch.Generator().manual_seed(seed)
    worth = torch.randn(p, generator=random, dtype=torch.float64).square()
    f = torch.tensor([1.0, 4.0, 16.0, 49.0], dtype=torch.float64)[torch.randint(4, (p,), generator=random)]
    return worth, f


def bound(worth: Tensor, f: Tensor, count: int, budget: float) -> float:
    """The least of the dual over a fine grid of prices: an upper bound of every choice."""
    prices = torch.linspace(0, float((worth / f).max()), 1000)
    return min(dual(float(price), worth, f, count, budget) for price in prices)


@pytest.mark.parametrize("seed", range(6))
def test_against_every_choice(seed: int) -> None:
    """On ten weights: within both budgets, and within two items of the best of all choices, itself below the dual."""
    worth, f = problem(10, seed)
    for count, share in ((4, 0.3), (7, 0.5), (10, 0.4), (3, 0.9)):
        budget = share * float(f.sum())
        keep = support(worth, f, count, budget)
        assert int(keep.sum()) <= count
        assert float(f[keep].sum()) <= budget
        choices = torch.tensor(list(product((0.0, 1.0), repeat=10)), dtype=torch.float64)
        allowed = choices[(choices.sum(1) <= count) & (choices @ f <= budget)]
        best = float((allowed @ worth).max())
        assert best <= bound(worth, f, count, budget) + 1e-9
        assert best - float(worth[keep].sum()) <= 2 * float(worth.max())
        assert float(worth[keep].sum()) <= best + 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_gap_to_the_dual_is_at_most_two_items(seed: int) -> None:
    """On 400 weights."""
    worth, f = problem(400, seed)
    for count, share in ((200, 0.3), (100, 0.1), (400, 0.2), (40, 0.02)):
        budget = share * float(f.sum())
        keep = support(worth, f, count, budget)
        assert int(keep.sum()) <= count
        assert float(f[keep].sum()) <= budget
        gap = bound(worth, f, count, budget) - float(worth[keep].sum())
        assert -1e-9 <= gap <= 2 * float(worth.max())


def test_without_a_budget_of_operations_the_largest_stay() -> None:
    """F_b = ∞, and F_b = Σf."""
    worth, f = problem(400)
    for budget in (float("inf"), float(f.sum())):
        assert torch.equal(support(worth, f, 150, budget), largest(worth, 150))


def test_without_a_budget_of_weights_only_operations_decide() -> None:
    """S_b = p: all stay, or the best by worth a multiply-add."""
    worth, f = problem(400)
    assert support(worth, f, 400, float(f.sum())).all()
    keep = support(worth, f, 400, 0.3 * float(f.sum()))
    ratio = worth / f
    assert float(ratio[keep].min()) >= 0.99 * float(ratio[~keep].max())
    assert not support(worth, f, 400, 0.0).any()


def test_larger_budgets_are_worth_more() -> None:
    """Monotone in both, up to the two items of rounding; the dual is so exactly."""
    worth, f = problem(400)
    for budgets in ([(count, 0.3) for count in range(20, 400, 80)], [(200, share / 20) for share in range(1, 20, 4)]):
        made = [(count, share * float(f.sum())) for count, share in budgets]
        values = [float(worth[support(worth, f, *one)].sum()) for one in made]
        bounds = [bound(worth, f, *one) for one in made]
        assert all(values[place + 1] >= values[place] - 2 * float(worth.max()) for place in range(len(values) - 1))
        assert bounds == sorted(bounds)
        assert values[-1] > values[0]


class Attending(nn.Module):
    """torch's attention, a strided and a depthwise convolution, and a layer that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 8, 8)
        self.deep = nn.Conv2d(8, 8, 3, 1, 1, groups=8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head, self.idle = nn.Linear(8, CLASSES), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.deep(self.patch(x)).flatten(2).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x.mean(1))


def test_multiply_adds_are_counted_by_running() -> None:
    """Output positions of convolutions, tokens of attention and linear layers, 1 of a classifier, 0 of what idles."""
    model = Attending().eval()
    names = ["patch.weight", "deep.weight", "attention.in_proj_weight", "attention.out_proj.weight", "head.weight",
             "idle.weight"]  # fmt: skip
    shape = flat(model, {name: slice(0, len(model.get_parameter(name))) for name in names})
    parts = torch.split(multiply_adds(model, shape, PICTURES), shape.sizes)
    assert [set(part.tolist()) for part in parts] == [{16}, {16}, {16}, {16}, {1}, {0}]


def test_multiply_adds_of_a_vit_are_its_tokens() -> None:
    """16 patches and a class token, in every layer of a block; for every weight of the scope."""
    dense = MODELS["vit"]()
    shape = flat(dense, rows_of(dense, find(dense, IMAGES), "qkv+out+mlp"))
    assert set(multiply_adds(dense, shape, PICTURES).tolist()) == {17}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "pruner",
    [ByFalcon(0.5, flops=0.7), ByFalcon(0.0, flops=0.4), ByFalcon(0.6, flops=0.5, stages=2, batch=3),
     ByFalcon(0.6, flops=0.65, algorithm="first_order", steps=2, batch=3)],
    ids=["both", "flops", "stages", "first-order"],
)  # fmt: skip
def test_both_budgets_hold_on_models(kind: str, pruner: ByFalcon) -> None:
    """The same masks every time, the dense model untouched, neither budget exceeded, one nearly used up."""
    dense = MODELS[kind]()
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    masks, again = (starfish.prune(dense, pruner, PICTURES) for _ in range(2))
    assert all(torch.equal(masks[name], again[name]) for name in masks)
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())
    shape = flat(dense, {name: slice(0, len(mask)) for name, mask in masks.items()})
    f, keep = multiply_adds(dense, shape, PICTURES), torch.cat([mask.flatten() for mask in masks.values()])
    shares = float(keep.double().mean()), float(f[keep].sum() / f.sum())
    assert shares[0] <= 1 - pruner.sparsity + 1e-4
    assert shares[1] <= 1 - pruner.flops + 1e-9
    assert shares[0] > 0.99 * (1 - pruner.sparsity) or shares[1] > 0.99 * (1 - pruner.flops)


def test_first_order_finds_a_support_of_lower_loss() -> None:
    """Of the two largest weights one hardly matters; steps down the gradient take the one that makes up for a third."""
    dense = torch.tensor([1.0, 0.75, 0.74, 0.7], dtype=torch.float64)
    X = torch.tensor([[1.0, 0, 0, 0], [0, 0, 1, 0.5], [0, 1e-3, 0, 0]], dtype=torch.float64)
    one, f = Regression((X,), dense, 1e-6), torch.tensor([1.0, 1.0, 1.0, 9.0], dtype=torch.float64)
    keep = finish(projecting(one, largest(dense, 2), f, (2, 4.0), 50))
    assert keep.tolist() == [True, False, True, False]


def test_needs_and_refusals() -> None:
    """By weights alone it needs nothing, by operations images, by gradients labels; what is out of range is refused."""
    dense = MODELS["cnn"]()
    assert not ByFalcon().needs()
    assert ByFalcon(flops=0.5).needs() == {"images"}
    assert ByFalcon(stages=2).needs() == ByFalcon(algorithm="first_order").needs() == {"images", "labels"}
    masks = starfish.prune(dense, ByFalcon(0.6), IMAGES)
    magnitude = starfish.prune(dense, Magnitude(0.6, per="global"), IMAGES)
    assert all(torch.equal(masks[name], magnitude[name]) for name in masks)
    with pytest.raises(starfish.UserError, match="needs labels"):
        starfish.prune(dense, ByFalcon(stages=2), IMAGES)
    for settings, words in (({"sparsity": 0.0}, "sparsity is 0"), ({"flops": 1.0}, "`flops` is 1"),
                            ({"steps": 0}, "`steps` is 0"), ({"stages": 0}, "`stages` is 0")):  # fmt: skip
        with pytest.raises(starfish.UserError, match=words):
            starfish.prune(dense, replace(ByFalcon(algorithm="first_order"), **settings), PICTURES)  # type: ignore[arg-type]
