"""Newton steps against dense algebra and finite differences; the method end to end on every kind of network."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import starfish
from cases import IMAGES, all_ones, tiny_cnn, tiny_vit
from starfish.activations import call
from starfish.core import Job, Row, finish
from starfish.data import as_images
from starfish.errors import UserError
from starfish.heal import healing_, job_of
from starfish.methods.newton import (
    Product,
    armijo_,
    block_diagonal,
    conjugate_gradients,
    gauss_newton,
    hessian,
    mismatch,
)
from starfish.methods.snows import Snows
from starfish.pruners.magnitude import Magnitude
from starfish.pruners.structured import Structured
from starfish.replay import entering, order_of, outputs, plain, start_of

QUICK = Snows(batch_size=6, cg_steps=4, look_ahead=5)


class Attending(nn.Module):
    """A block around `nn.MultiheadAttention`, with an activation that writes into what it reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.linear = nn.Linear(width, width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, scale: float, *, bias: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + scale * self.dropout(self.attention(y, y, y, need_weights=False)[0])
        return self.relu(self.linear(x) + bias)


class Reader(nn.Module):
    """Blocks that are called with more than the tensor they pass on."""

    def __init__(self, width: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 8, 8)
        self.bias = nn.Parameter(torch.randn(width))
        self.blocks = nn.ModuleList([Attending(width) for _ in range(3)])
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, 0.9, bias=self.bias)
        return self.head(x.mean(1))


class Filters(nn.Module):
    """Convolutions of all kinds, depthwise and grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Conv2d(8, 8, 3, 1, 1, groups=8)
        self.grouped = nn.Conv2d(8, 8, 3, 1, 1, groups=2)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.grouped(self.act(self.deep(x)))


class Separable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.Sequential(Filters(), Filters())
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return build().eval()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Magnitude]] = {
    "cnn": (tiny_cnn, Magnitude(0.6, scope="conv_fc", per="global")),
    "vit": (tiny_vit, Magnitude(0.6)),
    "attention module": (lambda: seeded(Reader), Magnitude(0.6, scope="all")),
    "depthwise": (lambda: seeded(Separable), Magnitude(0.6, scope="all")),
}


def jobs(network: str, dtype: torch.dtype = torch.float32) -> Job:
    build, pruner = NETWORKS[network]
    dense = build().to(dtype)
    images = IMAGES.to(dtype)
    return job_of(deepcopy(dense), dense, starfish.prune(dense, pruner, images), images)


def rows_of(job: Job, method: Snows) -> list[Row]:
    return [row for row in method.fit(job) if "stage" not in row]


# The mathematics.


def smooth(W: Tensor) -> list[Tensor]:
    """Two outputs that curve; the second through an operation on the first."""
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    first = torch.tanh(x @ W.T)
    return [first, nn.functional.layer_norm(nn.functional.gelu(first @ W), (4,))]


def problem() -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    W = torch.randn(3, 4, generator=generator, dtype=torch.float64).requires_grad_(True)
    wanted = [y.detach() + 0.3 * torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in smooth(W)]
    return W, wanted


def as_matrix(product: Product, shape: torch.Size) -> Tensor:
    size = shape.numel()
    return torch.stack([product(unit.view(shape)).flatten() for unit in torch.eye(size, dtype=torch.float64)], 1)


def test_hessian_products_are_those_of_the_dense_hessian() -> None:
    """Symmetric, equal to autograd's own Hessian, and to finite differences of the gradient."""
    W, wanted = problem()

    def loss(w: Tensor) -> Tensor:
        return mismatch(smooth(w), wanted)

    found = as_matrix(hessian(loss(W), W), W.shape)
    torch.testing.assert_close(found, found.T)
    reference = torch.autograd.functional.hessian(loss, W.detach())  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, reference.reshape(found.shape))
    step = 1e-5
    v = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ends = []
    for sign in (1, -1):
        there = (W.detach() + sign * step * v).requires_grad_(True)
        ends.append(torch.autograd.grad(loss(there), there)[0])
    torch.testing.assert_close(hessian(loss(W), W)(v), (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-7)


def test_gauss_newton_products_are_those_of_the_dense_jacobian() -> None:
    """Σ 2/N JᵀJ from autograd's Jacobians; symmetric, no negative eigenvalue, and not the Hessian."""
    W, wanted = problem()
    put_out = smooth(W)
    found = as_matrix(gauss_newton(put_out, W), W.shape)
    reference = torch.zeros_like(found)
    for place, y in enumerate(put_out):
        J = torch.autograd.functional.jacobian(lambda w, k=place: smooth(w)[k], W.detach())  # type: ignore[no-untyped-call]
        J = J.reshape(y.numel(), -1)
        reference += 2 / y.numel() * J.T @ J
    torch.testing.assert_close(found, reference)
    torch.testing.assert_close(found, found.T)
    assert float(torch.linalg.eigvalsh(found).min()) > -1e-10
    assert not torch.allclose(found, as_matrix(hessian(mismatch(put_out, wanted), W), W.shape), rtol=1e-2)


def test_jacobian_products_agree_with_finite_differences() -> None:
    """vᵀ(Gauss–Newton)v is Σ 2/N ‖dy/dt‖² along v."""
    W, _ = problem()
    v = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    step = 1e-6
    with torch.no_grad():
        ends = [smooth(W + sign * step * v) for sign in (1, -1)]
    slopes = [(plus - minus) / (2 * step) for plus, minus in zip(*ends, strict=True)]
    wanted = sum(2 / slope.numel() * slope.square().sum() for slope in slopes)
    torch.testing.assert_close((v * gauss_newton(smooth(W), W)(v)).sum(), wanted, rtol=1e-6, atol=0)


def test_outputs_that_do_not_hear_the_weight_add_nothing() -> None:
    """A branch beside the layer counts in the objective and not in the products."""
    W, _ = problem()
    put_out = smooth(W)
    v = torch.ones_like(W)
    assert torch.equal(gauss_newton([torch.ones(5), *put_out], W)(v), gauss_newton(put_out, W)(v))


def test_block_diagonal_keeps_only_what_chunks_hold() -> None:
    """Kept coordinates in chunks of 4: the dense Hessian with the rest struck out."""
    W, wanted = problem()
    kept = torch.rand(3, 4, generator=torch.Generator().manual_seed(4)) < 0.8
    exact = hessian(mismatch(smooth(W), wanted), W)
    full, found = as_matrix(exact, W.shape), as_matrix(block_diagonal(exact, kept, 4), W.shape)
    chunk = torch.full((12,), -1)
    places = kept.flatten().nonzero()[:, 0]
    chunk[places] = torch.arange(len(places)) // 4
    together = (chunk[:, None] == chunk[None]) & (chunk[:, None] >= 0)
    torch.testing.assert_close(found, full * together)
    assert len(places) > 4, "one chunk would strike nothing out"


def test_conjugate_gradients_solve_a_random_system() -> None:
    """As many steps as there are unknowns, and numpy's solution of the damped system; fewer where it is near enough."""
    generator = torch.Generator().manual_seed(6)
    root = torch.randn(9, 9, generator=generator, dtype=torch.float64)
    H, g = root @ root.T, torch.randn(9, generator=generator, dtype=torch.float64)
    found, steps = conjugate_gradients(lambda v: H @ v, g, 0.5, 50, 1e-12)
    wanted = np.linalg.solve(H.numpy() + 0.5 * np.eye(9), -g.numpy())
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-9)
    assert steps <= 14
    near, fewer = conjugate_gradients(lambda v: H @ v, g, 0.5, 50, 0.1)
    assert fewer < steps
    assert float((H @ near + 0.5 * near + g).norm()) <= 0.1 * float(g.norm())


@pytest.mark.parametrize("damp", [0.0, 1e-4])
def test_conjugate_gradients_stop_where_the_curvature_is_not_positive(damp: float) -> None:
    """At the first step that leaves the gradient; later what has been found until then, a way down all the same."""
    g = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    found, steps = conjugate_gradients(lambda v: -v, g, damp, 9, 0.0)
    assert torch.equal(found, -g)
    assert steps == 1
    H = torch.diag(torch.tensor([3.0, 2.0, -0.1], dtype=torch.float64))
    found, steps = conjugate_gradients(lambda v: H @ v, g, damp, 9, 0.0)
    assert 1 < steps < 9
    assert float(found @ g) < 0
    assert torch.equal(conjugate_gradients(lambda v: H @ v, 0 * g, damp, 9, 0.0)[0], 0 * g)


def test_armijo_takes_the_longest_step_that_helps_or_none() -> None:
    """Of a parabola's step that is four times too long 0.9^7 is the first to help; uphill nothing moves."""
    w = torch.tensor([1.0], dtype=torch.float64)
    step = torch.tensor([-4.0], dtype=torch.float64)
    length, after = armijo_(w, step, lambda: float(w @ w), 1.0, -8.0)
    assert length == pytest.approx(0.9**7)
    assert after == pytest.approx((1 - 4 * 0.9**7) ** 2)
    assert float(w) == pytest.approx(1 - 4 * 0.9**7)
    for wrong, slope in ((-step, 8.0), (step * float("nan"), -8.0), (-step, -8.0)):
        w = torch.tensor([1.0], dtype=torch.float64)
        assert armijo_(w, wrong, lambda w=w: float(w @ w), 1.0, slope) == (0.0, 1.0)  # type: ignore[misc]
        assert float(w) == 1


# Looking ahead.


def test_operations_are_leaves_in_order_and_hand_overs_are_none() -> None:
    """Attention that keeps its projection to itself is one operation; dropout, which does nothing here, is none."""
    model = seeded(Reader)
    with plain():
        order = order_of(model, IMAGES[:2], [f"blocks.{place}" for place in range(3)])
    of_block = ("norm", "attention", "linear", "relu")
    assert order.operations == ("stem", *(f"blocks.{place}.{name}" for place in range(3) for name in of_block), "head")
    assert order.follower == {"blocks.0": "blocks.1", "blocks.1": "blocks.2"}


@pytest.mark.parametrize(
    ("weight", "count", "first", "chain"),
    [
        ("stem.weight", 4, "stem", ("",)),
        ("blocks.0.attention.in_proj_weight", 3, "blocks.0.attention", ("blocks.0",)),
        ("blocks.0.attention.out_proj.weight", 4, "blocks.0.attention", ("blocks.0", "blocks.1")),
        ("blocks.0.linear.weight", 7, "blocks.0.linear", ("blocks.0", "blocks.1", "blocks.2")),
        ("blocks.2.linear.weight", 7, "blocks.2.linear", ("blocks.2",)),
        ("head.weight", 4, "head", ("head",)),
    ],
)
def test_replayed_outputs_are_those_of_the_whole_model(
    weight: str, count: int, first: str, chain: tuple[str, ...]
) -> None:
    """From the block's kept input, with its other arguments, come the very numbers of a run of the whole model."""
    model = seeded(Reader)
    seen: list[Tensor] = []
    with plain(), torch.no_grad():
        order = order_of(model, IMAGES[:2], [f"blocks.{place}" for place in range(3)])
        start = start_of(weight, order, count)
        assert (start.first, start.chain) == (first, chain)
        kept = entering(model, start.chain, IMAGES)
        found = outputs(model, start, kept, order.operations, count)
        names = order.operations[order.operations.index(first) :][:count]
        if chain == ("blocks.2",):
            names = names[:2]  # the head reads a mean of it
        handles = [model.get_submodule(name).register_forward_hook(lambda _m, _i, y: seen.append(first_of(y).clone()))
                   for name in names]  # fmt: skip
        call(model, IMAGES)
        again = outputs(model, start, kept, order.operations, count)
    for handle in handles:
        handle.remove()
    assert len(found) == len(names)
    assert all(torch.equal(one, other) for one, other in zip(found, seen[: len(found)], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True)), "it wrote into what was kept"


def first_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]  # type: ignore[no-any-return]


# The method.


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
    with pytest.raises(UserError, match="compares weights with the dense model's"):
        starfish.heal_(small, dense, kept, IMAGES, QUICK)
