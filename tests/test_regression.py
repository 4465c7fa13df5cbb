"""CHITA's regression against numpy: coordinate descent, thresholding and line search, with all layers coupled."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from starfish.core import finish
from starfish.methods import regression
from starfish.methods.quadratic import Block
from starfish.methods.regression import (
    Regression,
    best_step,
    descend,
    first_change,
    iht,
    largest,
    line_search,
    sweep_,
    threshold,
)  # fmt: skip

RIDGE = 0.05


def problem(n: int = 8, sizes: tuple[int, ...] = (7, 5), *, alpha: bool = False, seed: int = 0) -> Regression:
    random = torch.Generator().manual_seed(seed)
    X = tuple(torch.randn(n, size, generator=random, dtype=torch.float64) for size in sizes)
    w, a = (torch.randn(sum(sizes), generator=random, dtype=torch.float64) for _ in range(2))
    return Regression(X, w, RIDGE, a if alpha else None)


def whole(one: Regression) -> Tensor:
    return torch.cat(one.X, 1)


def value(one: Regression, w: Tensor) -> float:
    """7.1, less αᵀw̄, without a residual that is carried along."""
    X, change = whole(one), w - one.dense_p
    first = 0.0 if one.alpha_p is None else float(one.alpha_p @ change)
    return float((X @ one.dense_p - X @ w).square().sum()) / 2 + first + RIDGE / 2 * float(change.square().sum())


def least(one: Regression, keep: Tensor) -> Tensor:
    """The exact minimum on a support, layers coupled: the back-solve of one block."""
    alpha = one.alpha_p
    return Block(whole(one), one.dense_p, RIDGE / len(one.X[0]), alpha).back_solve(keep)


@pytest.mark.parametrize("alpha", [False, True])
def test_value_and_gradient(alpha: bool) -> None:
    """Q is that of the formula, its gradient autograd's, the largest curvature an upper bound close to the true one."""
    one = problem(alpha=alpha)
    w = torch.randn(12, dtype=torch.float64, requires_grad=True)
    X, change = whole(one), w - one.dense_p
    q = (X @ change).square().sum() / 2 + RIDGE / 2 * change.square().sum()
    q = q + one.alpha_p @ change if one.alpha_p is not None else q
    (expected,) = torch.autograd.grad(q, w)
    r = one.residual(w.detach())
    assert one.value(w.detach(), r) == pytest.approx(value(one, w.detach()), rel=1e-12)
    torch.testing.assert_close(one.gradient(w.detach(), r), expected)
    true = float(np.linalg.norm(X.numpy(), 2)) ** 2 + RIDGE
    assert true <= one.largest_curvature() <= 1.06 * true


@pytest.mark.parametrize("alpha", [False, True])
def test_active_set_is_the_same_problem(alpha: bool) -> None:
    """With what is left out zero, Q, r and ∇Q of the smaller problem are those of the whole one."""
    one = problem(alpha=alpha)
    active = torch.tensor([0, 3, 6, 7, 11])
    w = torch.zeros(12, dtype=torch.float64)
    w[active] = torch.randn(5, dtype=torch.float64)
    part = one.on(active)
    r = part.residual(w[active])
    torch.testing.assert_close(r, one.residual(w))
    assert part.value(w[active], r) == pytest.approx(value(one, w), rel=1e-12)
    torch.testing.assert_close(part.gradient(w[active], r), one.gradient(w, r)[active])


@pytest.mark.parametrize("tile", [1, 3, 128])
@pytest.mark.parametrize("alpha", [False, True])
def test_sweep_is_coordinate_descent(tile: int, alpha: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep by triangular systems is the loop over coordinates of 7.3, whatever the tile."""
    monkeypatch.setattr(regression, "TILE", tile)
    one, keep = problem(alpha=alpha), largest(torch.randn(12), 7)
    X, dense = whole(one).numpy(), one.dense_p.numpy()
    a = one.alpha_p.numpy() if one.alpha_p is not None else np.zeros(12)
    w = dense * keep.numpy()
    for j in np.flatnonzero(keep.numpy()):
        r = X @ dense - X @ w
        square = X[:, j] @ X[:, j]
        w[j] = (RIDGE * dense[j] + X[:, j] @ r + square * w[j] - a[j]) / (square + RIDGE)
    change = torch.where(keep, 0.0, -one.dense_p)
    r_N = one.times(-change)
    sweep_(one, change, r_N, keep)
    np.testing.assert_allclose((one.dense_p + change).numpy() * keep.numpy(), w, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(r_N.numpy(), X @ (dense - w), rtol=1e-10, atol=1e-10)


def test_sweeps_never_raise_q_and_end_at_the_back_solve() -> None:
    """Coordinate descent on a support falls to its exact minimum; where nothing is pruned it moves nothing."""
    one, keep = problem(alpha=True), largest(torch.randn(12), 7)
    change = torch.where(keep, 0.0, -one.dense_p)
    r_N, values = one.times(-change), []
    for _ in range(2000):
        values.append(value(one, one.dense_p + change))
        sweep_(one, change, r_N, keep)
    assert all(after <= before + 1e-12 for before, after in pairwise(values))
    torch.testing.assert_close((one.dense_p + change) * keep, least(one, keep), rtol=1e-5, atol=1e-6)
    still, everything = torch.zeros(12, dtype=torch.float64), torch.ones(12, dtype=torch.bool)
    sweep_(problem(), still, torch.zeros(8, dtype=torch.float64), everything)
    assert not still.any()


def test_best_step_is_the_least_along_the_gradient() -> None:
    """No other step along the gradient on the survivors gives a smaller Q, and the support stays."""
    one, keep = problem(alpha=True), largest(torch.randn(12), 7)
    w = one.dense_p * keep
    r = one.residual(w)
    moved, moved_r = descend(one, w, r, keep)
    down = one.gradient(w, r) * keep
    step, _ = best_step(one, down)
    torch.testing.assert_close(moved_r, one.residual(moved))
    assert not moved[~keep].any()
    assert value(one, moved) < value(one, w)
    for other in (0.5, 0.9, 1.1, 2.0):
        assert value(one, w - other * step * down) > value(one, moved)
    assert best_step(one, torch.zeros(12, dtype=torch.float64))[0] == 0


def test_first_change_is_where_the_support_changes() -> None:
    """Just before t_c the k largest of w − t∇Q are the support, just after it they are not."""
    for seed in range(20):
        one = problem(seed=seed)
        w = threshold(one.dense_p, 5)
        gradient = one.gradient(w, one.residual(w))
        change = first_change(w, gradient, w != 0)
        assert torch.equal(largest(w - 0.999 * change * gradient, 5), w != 0)
        assert not torch.equal(largest(w - 1.001 * change * gradient, 5), w != 0)


@pytest.mark.parametrize("alpha", [False, True])
def test_thresholding_with_line_search_never_raises_q(alpha: bool) -> None:
    """Every step keeps at most k weights and Q falls or stays, whatever the problem."""
    for seed in range(10):
        one = problem(6, (9, 8), alpha=alpha, seed=seed)
        size, w = one.largest_curvature(), threshold(one.dense_p, 6)
        r = one.residual(w)
        for _ in range(15):
            next_w, next_r = line_search(one, w, r, 6, 1 / size)
            assert value(one, next_w) <= value(one, w) + 1e-10
            assert int((next_w != 0).sum()) <= 6
            torch.testing.assert_close(next_r, one.residual(next_w))
            w, r = next_w, next_r


def test_iht_is_never_worse_than_magnitude_and_better_at_times() -> None:
    """At most k weights, Q at most that of the k largest; solved for on their support often lower, never below the
    least of all supports."""
    k, better = 4, 0
    for seed in range(10):
        one = problem(6, (5, 4), seed=seed)
        w = finish(iht(one, k, steps=200))
        assert int((w != 0).sum()) <= k
        assert value(one, w) <= value(one, threshold(one.dense_p, k)) + 1e-10
        found = value(one, least(one, w != 0))
        supports = [torch.zeros(9, dtype=torch.bool).index_fill_(0, torch.tensor(S), True)
                    for S in combinations(range(9), k)]  # fmt: skip
        assert found >= min(value(one, least(one, support)) for support in supports) - 1e-10
        better += found < 0.9 * value(one, least(one, largest(one.dense_p, k)))
    assert better >= 3


def test_iht_can_leave_its_active_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is not active at first, but can do what a lost one did, is found by the steps over all."""
    monkeypatch.setattr(regression, "ACTIVE", 0.5)
    dense = torch.tensor([1.0, 0.75, 0.7, 0.1], dtype=torch.float64)
    X = torch.tensor([[1.0, 0, 0, 0], [0, 0, 1, 1], [0, 1e-3, 0, 0]], dtype=torch.float64)
    w = finish(iht(Regression((X,), dense, 1e-6), 2, steps=100))
    assert w.tolist() == pytest.approx([1, 0, 0.8, 0], rel=1e-4)


def test_nothing_to_remove_leaves_the_dense_weights() -> None:
    """k = p and no first-order term: w = w̄ exactly."""
    one = problem()
    assert torch.equal(finish(iht(one, 12)), one.dense_p)


def test_of_equals_the_first_are_kept() -> None:
    """Ties never change the count."""
    assert largest(torch.tensor([1.0, -2.0, 2.0, 1.0, 1.0]), 3).tolist() == [True, True, True, False, False]
