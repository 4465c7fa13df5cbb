"""Restricted least squares, SparseGPT's pass and ExactOBS, against numpy and brute force, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from starfish.methods import solves
from starfish.methods.solves import conjugate_gradients, damped, errors, greedy, restricted, sparsegpt, upper

ROWS, COLUMNS = 12, 20


def problem(correlation: float = 0.9, seed: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """X (N × I) of correlated inputs, its damped Gram matrix, and a weight."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(200, COLUMNS, generator=generator, dtype=torch.float64)
    X = correlation * X[:, :1] + (1 - correlation) * X
    return X, damped(X.T @ X / len(X), 0.01), torch.randn(rows, COLUMNS, generator=generator, dtype=torch.float64)


def random_mask(seed: int = 1, rows: int = ROWS, keep: float = 0.4) -> Tensor:
    return torch.rand(rows, COLUMNS, generator=torch.Generator().manual_seed(seed)) < keep


def numpy_rows(H: Tensor, B: Tensor, mask: Tensor) -> Tensor:
    """Each row by numpy's least squares on the Cholesky factor: w H wᵀ − 2 w·b = ‖Lᵀw − L⁻¹b‖² − const."""
    L, found = np.linalg.cholesky(H.numpy()), np.zeros(B.shape)
    for row, support in enumerate(mask.numpy()):
        right = np.linalg.solve(L, B[row].numpy())
        found[row, support] = np.linalg.lstsq(L.T[:, support], right, rcond=None)[0]
    return torch.from_numpy(found)


def shared_mask() -> Tensor:
    mask = torch.ones(ROWS, COLUMNS, dtype=torch.bool)
    mask[:, ::2] = False
    mask[3] = False  # a row that is gone whole
    return mask[torch.tensor([0] * 11 + [3])].repeat(3, 1)


@pytest.mark.parametrize("route", ["direct", "chunks", "conjugate gradients", "shared"])
def test_restricted_is_numpys_least_squares_on_the_support(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever way it is solved, and with rows that keep nothing."""
    mask = shared_mask() if route == "shared" else random_mask()
    mask[2] = False
    _, H, W = problem(rows=len(mask))
    if route == "conjugate gradients":
        monkeypatch.setattr(solves, "DIRECT", 0)
    if route == "chunks":
        monkeypatch.setattr(solves, "MEMORY", 1)
    if route == "shared":
        monkeypatch.setattr(solves, "_on_supports", None)
    found = restricted(H, W @ H, mask, W)
    close = 1e-5 if route == "conjugate gradients" else 1e-8  # they stop at a residual
    torch.testing.assert_close(found, numpy_rows(H, W @ H, mask), rtol=close, atol=close)
    assert not found[~mask].any()


def test_it_is_the_surgeons_update_and_its_loss() -> None:
    """δ = −H⁻¹[:,P] (H⁻¹[P,P])⁻¹ w_P and its error w_Pᵀ (H⁻¹[P,P])⁻¹ w_P, from the inverse itself."""
    _, H, W = problem()
    mask, inverse = random_mask(), torch.linalg.inv(H)
    found = restricted(H, W @ H, mask, W)
    loss = errors(found, H, W @ H, ((W @ H) * W).sum(1))
    for row, support in enumerate(mask):
        P = (~support).nonzero()[:, 0]
        moved = torch.linalg.solve(inverse[P][:, P], W[row, P])
        torch.testing.assert_close(found[row], W[row] - inverse[:, P] @ moved, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(loss[row], W[row, P] @ moved, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.99])
def test_no_row_is_worse_than_plain_or_sparsegpt(correlation: float) -> None:
    """The guaranteed inequality: restricted least squares ≤ min(SparseGPT, plain), row by row, one mask."""
    for seed in range(5):
        _, H, W = problem(correlation, seed)
        mask, B = random_mask(seed), W @ H
        swept = sparsegpt(W, upper(H), lambda part, _, __, m=mask: m[:, part], block=8)[0]
        best, plain, other = (errors(x, H, B, (B * W).sum(1)) for x in (restricted(H, B, mask, W), W * mask, swept))
        assert (best <= torch.minimum(plain, other) + 1e-12).all()


def test_conjugate_gradients_begin_where_they_are_told() -> None:
    """From the solution itself not a step is taken."""
    _, H, W = problem()
    mask = random_mask()
    exact = restricted(H, W @ H, mask, W)
    torch.testing.assert_close(conjugate_gradients(H, W @ H, mask, exact), exact, rtol=1e-12, atol=1e-12)


def test_damping_grows_where_the_matrix_is_singular_and_dead_inputs_get_a_one() -> None:
    """Fewer rows than columns, undamped, still factorises; an input that is always zero does not spoil the others."""
    X = torch.randn(3, 8, dtype=torch.float64)
    X[:, 2] = 0
    H = X.T @ X
    found = damped(H, 0.0)
    torch.linalg.cholesky(found)
    assert found[2, 2] >= 1
    assert (found[2, [0, 1, 3]] == 0).all()
    ridge = damped(H, 0.01) - H
    expected = torch.full((8,), 0.01 * float(H.diagonal().mean()), dtype=torch.float64)
    expected[2] += 1
    torch.testing.assert_close(ridge, torch.diag(expected))


def test_sparsegpts_errors_tell_its_loss() -> None:
    """W − W′ = E U, so that the whole loss is ‖E‖²."""
    _, H, W = problem()
    mask, U = random_mask(), upper(H)
    torch.testing.assert_close(U.T @ U, torch.linalg.inv(H), rtol=1e-8, atol=1e-8)
    new, kept, E = sparsegpt(W, U, lambda part, _, __: mask[:, part], block=8)
    assert torch.equal(kept, mask)
    delta = W - new
    torch.testing.assert_close(delta, E @ U, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close((delta @ H * delta).sum(), E.square().sum(), rtol=1e-8, atol=1e-8)


def test_the_block_changes_nothing_where_the_mask_is_given() -> None:
    """Lazy corrections are the same corrections, for a fixed mask and for groups of M."""
    _, H, W = problem()
    mask = random_mask()

    def two_of_four(part: slice, weights: Tensor, diagonal: Tensor) -> Tensor:
        best = (weights / diagonal).square().topk(2, 1).indices
        return torch.zeros_like(weights, dtype=torch.bool).scatter_(1, best, True)

    for starts, choose in (((), lambda part, _, __: mask[:, part]), (range(0, COLUMNS, 4), two_of_four)):
        found = [sparsegpt(W, upper(H), choose, block=block, starts=starts)[0] for block in (1, 6, 8, 100)]
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-8)


def test_nothing_pruned_is_nothing_changed_and_a_diagonal_corrects_nothing() -> None:
    """With H diagonal nothing can make up for what goes: the plain mask."""
    _, H, W = problem()
    everything = torch.ones_like(W, dtype=torch.bool)
    assert torch.equal(sparsegpt(W, upper(H), lambda part, _, __: everything[:, part], block=8)[0], W)
    torch.testing.assert_close(restricted(H, W @ H, everything, W), W, rtol=1e-9, atol=1e-9)
    mask, diagonal = random_mask(), torch.diag(H.diagonal())
    swept = sparsegpt(W, upper(diagonal), lambda part, _, __: mask[:, part], block=8)[0]
    torch.testing.assert_close(swept, W * mask)
    torch.testing.assert_close(restricted(diagonal, W @ diagonal, mask, W), W * mask)


def test_sparsegpt_beats_its_own_mask_in_aggregate() -> None:
    """Summed over rows and seeds, with the mask that it chose itself; not a theorem for single rows."""

    def smallest(part: slice, weights: Tensor, diagonal: Tensor) -> Tensor:
        scores = (weights / diagonal).square()
        return scores > scores.flatten().median()

    for correlation in (0.0, 0.5, 0.9):
        total = torch.zeros(2, dtype=torch.float64)
        for seed in range(10):
            _, H, W = problem(correlation, seed, rows=32)
            new, kept, _ = sparsegpt(W, upper(H), smallest, block=8)
            B = W @ H
            total += torch.stack([errors(x, H, B, (B * W).sum(1)).sum() for x in (new, W * kept)])
        assert total[0] <= total[1]


def test_greedy_takes_what_brute_force_would() -> None:
    """Each step removes the weight after whose removal, everything else refitted, the error is least."""
    _, H, W = problem(rows=4)
    order, losses = greedy(W, H)
    assert order.shape == (4, COLUMNS)
    for row in range(4):
        mask, w, total = torch.ones(1, COLUMNS, dtype=torch.bool), W[row : row + 1], 0.0
        for step in range(COLUMNS - 1):
            best = (torch.inf, -1)
            for q in mask[0].nonzero()[:, 0].tolist():
                tried = mask.clone()
                tried[0, q] = False
                fit = numpy_rows(H, w @ H, tried)
                best = min(best, (float(((w - fit) @ H * (w - fit)).sum()), q))
            assert int(order[row, step]) == best[1]
            total += float(losses[row, step])
            assert total == pytest.approx(best[0], rel=1e-6)
            mask[0, best[1]] = False


def test_greedy_in_groups_leaves_n_of_each() -> None:
    """Groups need not be of one size; those shorter than N lose nothing."""
    _, H, W = problem()
    starts = [0, 4, 8, 12, 16, 19]  # of four, one of three and one of one
    order, _ = greedy(W, H, n=2, starts=starts)
    kept = torch.ones_like(W, dtype=torch.bool).scatter_(1, order, False)
    sizes = [
        int(kept[:, first:last].sum(1).unique()) for first, last in zip(starts, [*starts[1:], COLUMNS], strict=True)
    ]
    assert sizes == [2, 2, 2, 2, 2, 1]
