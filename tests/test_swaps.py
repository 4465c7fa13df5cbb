"""CBS's local search on small problems, against the Fisher matrix formed in full."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from starfish.pruners.cbs import influences
from starfish.pruners.swaps import Influence, improve_, random_magnitude

SIZES = [9, 6, 5]


def problem(n: int = 7, seed: int = 0) -> tuple[Influence, Tensor]:
    """And F times w wᵀ, so that φ is the sum of its entries among the pruned."""
    random = torch.Generator().manual_seed(seed)
    X = [torch.randn(n, size, generator=random, dtype=torch.float64) for size in SIZES]
    w = torch.randn(sum(SIZES), generator=random, dtype=torch.float64)
    fisher = torch.block_diag(*[x.T @ x / n for x in X])
    return influences(X, w, SIZES), fisher * torch.outer(w, w)


def some(p: int, gone: int, seed: int = 0) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(seed).permutation(p) < gone


def phi(weighted: Tensor, pruned: np.ndarray) -> float:  # type: ignore[type-arg]
    P = torch.from_numpy(np.flatnonzero(pruned))
    return float(weighted[P][:, P].sum())


def test_phi_is_the_quadratic_form_block_diagonal_by_layer() -> None:
    """w_Pᵀ F_PP w_P with F formed, undamped; gains and costs are those of taking one weight back or out."""
    found, weighted = problem()
    pruned = some(20, 9)
    assert found.phi(pruned) == pytest.approx(phi(weighted, pruned), rel=1e-10)
    along = found.along(found.sums(pruned))
    for q in range(20):
        other = pruned.copy()
        other[q] = not other[q]
        change = 2 * along[q] + found.square_p[q] if other[q] else -(2 * along[q] - found.square_p[q])
        assert phi(weighted, other) - phi(weighted, pruned) == pytest.approx(change, rel=1e-8, abs=1e-10)


@pytest.mark.parametrize("seed", range(8))
def test_swaps_add_up_to_the_change_of_phi(seed: int) -> None:
    """After every iteration the summed changes are φ recomputed (1e-6), φ has fallen, and |P| is what it was."""
    found, weighted = problem(seed=seed)
    pruned = some(20, 9, seed)
    for _ in range(50):
        before = phi(weighted, pruned)
        change = improve_(found, pruned, tolerance=1e-6, reach=3, failures=5)
        assert phi(weighted, pruned) - before == pytest.approx(change, rel=1e-6, abs=1e-9)
        assert int(pruned.sum()) == 9
        if change == 0:
            break
        assert change <= -1e-6
    assert change == 0


def test_single_precision_is_enough() -> None:
    """From float32 gradients the summed changes are still φ's to 1e-5."""
    random = torch.Generator().manual_seed(0)
    X = [torch.randn(7, size, generator=random) for size in (300, 200)]
    found = influences(X, torch.randn(500, generator=random, dtype=torch.float64), [300, 200])
    pruned = some(500, 250)
    before = found.phi(pruned)
    change = improve_(found, pruned, tolerance=1e-4, reach=10, failures=20)
    assert change < 0
    assert found.phi(pruned) - before == pytest.approx(change, rel=1e-5)


def test_infinite_tolerance_changes_nothing() -> None:
    """ε = ∞: P stays."""
    found, _ = problem()
    pruned = some(20, 9)
    assert improve_(found, pruned, tolerance=float("inf"), reach=3, failures=5) == 0
    assert (pruned == some(20, 9)).all()


@pytest.mark.parametrize("layers", [1, 12])
def test_gradients_that_share_no_weight_order_by_w_g(layers: int) -> None:
    """Where no two weights meet, in one layer or each in its own with one gradient, the smallest |w g| go."""
    random = torch.Generator().manual_seed(0)
    w, g = (torch.randn(12, generator=random, dtype=torch.float64) for _ in range(2))
    X = [g.diag()] if layers == 1 else [one.view(1, 1) for one in g]
    found = influences(X, w, [12] if layers == 1 else [1] * 12)
    pruned = some(12, 5)
    while improve_(found, pruned, tolerance=0.0 + 1e-12, reach=12, failures=12):
        pass
    expected = (w * g).abs().argsort()[:5]
    assert sorted(np.flatnonzero(pruned)) == sorted(expected.tolist())


def test_search_ends_below_where_it_began_and_above_the_best() -> None:
    """Against every choice of five of nine weights: the end is a local minimum, at times the best one."""
    best_found = 0
    for seed in range(6):
        random = torch.Generator().manual_seed(seed)
        X = [torch.randn(4, 9, generator=random, dtype=torch.float64)]
        found = influences(X, torch.randn(9, generator=random, dtype=torch.float64), [9])
        every = []
        for P in combinations(range(9), 5):
            pruned = np.zeros(9, bool)
            pruned[list(P)] = True
            every.append(found.phi(pruned))
        pruned = some(9, 5, seed)
        while improve_(found, pruned, tolerance=1e-9, reach=9, failures=9):
            pass
        assert found.phi(pruned) >= min(every) - 1e-12
        assert found.phi(pruned) <= sorted(every)[len(every) // 4]
        best_found += found.phi(pruned) == pytest.approx(min(every))
    assert best_found


def test_nothing_or_everything_pruned_has_no_swaps() -> None:
    """Both sides of a swap are needed."""
    found, _ = problem()
    for pruned in (np.zeros(20, bool), np.ones(20, bool)):
        assert improve_(found, pruned, tolerance=0.1, reach=3, failures=5) == 0


@pytest.mark.parametrize("k", [0, 1, 37, 500, 999, 1000])
def test_random_magnitude_keeps_exactly_k(k: int) -> None:
    """Whatever rounding does in the chunks; another draw keeps others, and all but a few chunks keep their largest."""
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(1)
    masks = [random_magnitude(weights, k, random) for _ in range(2)]
    assert [int(mask.sum()) for mask in masks] == [k, k]
    assert torch.equal(masks[0], masks[1]) == (k in {0, 1000})
    if k == 500:
        assert weights[masks[0]].abs().mean() > 2 * weights[~masks[0]].abs().mean()


def test_random_magnitude_in_one_chunk_is_magnitude() -> None:
    """⌊√p⌋ = 1 chunk of three weights."""
    kept = random_magnitude(torch.tensor([1.0, -3.0, 2.0]), 2, torch.Generator().manual_seed(0))
    assert kept.tolist() == [False, True, True]
