"""The algebra of a block against dense matrices: WoodFisher, OBS of one and of many weights, CHITA's back-solve."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from starfish.errors import UserError
from starfish.methods.quadratic import Block, blocks

SIZES = [(6, 15), (20, 9)]  # fewer gradients than weights, and more
DAMP = 1e-3


def block(n: int, c: int, *, alpha: bool = False, damp: float = DAMP) -> Block:
    random = torch.Generator().manual_seed(n)
    G, w, a = (torch.randn(shape, generator=random, dtype=torch.float64) for shape in ((n, c), (c,), (c,)))
    return Block(G, w, damp, a if alpha else None)


def some(c: int, gone: int) -> Tensor:
    keep = torch.ones(c, dtype=torch.bool)
    keep[torch.randperm(c, generator=torch.Generator().manual_seed(2))[:gone]] = False
    return keep


def fisher(one: Block) -> Tensor:
    G = one.G_NC
    return G.T @ G / len(G) + one.damp * torch.eye(G.shape[1], dtype=torch.float64)


def recursion(one: Block, order: Tensor) -> Tensor:
    """WoodFisher's own, one gradient after the other."""
    G = one.G_NC
    inverse = torch.eye(G.shape[1], dtype=torch.float64) / one.damp
    for g in G[order]:
        v = inverse @ g
        inverse = inverse - torch.outer(v, v) / (len(G) + g @ v)
    return inverse


@pytest.mark.parametrize("size", SIZES)
def test_recursion_is_the_inverse_is_the_low_rank_form(size: tuple[int, int]) -> None:
    """All three agree to 1e-10, and the recursion whatever the order of the gradients."""
    one = block(*size)
    inverse = torch.linalg.inv(fisher(one))
    identity = torch.eye(size[1], dtype=torch.float64)
    low_rank = torch.stack([one.inverse_times(column) for column in identity], 1)
    scale = float(inverse.abs().max())
    for order in (torch.arange(size[0]), torch.randperm(size[0])):
        assert float((recursion(one, order) - inverse).abs().max()) < 1e-10 * scale
    assert float((low_rank - inverse).abs().max()) < 1e-10 * scale
    torch.testing.assert_close(one.inverse_diagonal(), inverse.diagonal(), rtol=1e-9, atol=1e-10 * scale)


def test_order_of_the_gradients_is_irrelevant() -> None:
    """Rows of G in another order give the same updates."""
    one, keep = block(*SIZES[0]), some(15, 6)
    other = Block(one.G_NC[torch.randperm(6)], one.dense_C, one.damp)
    torch.testing.assert_close(one.woodfisher(keep), other.woodfisher(keep), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(one.back_solve(keep), other.back_solve(keep), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", SIZES)
def test_nothing_pruned_changes_no_bit(size: tuple[int, int]) -> None:
    """S = all gives w̄ exactly, whatever the gradients, without a first-order term."""
    one = block(*size)
    keep = torch.ones(size[1], dtype=torch.bool)
    assert torch.equal(one.woodfisher(keep), one.dense_C)
    assert torch.equal(one.back_solve(keep), one.dense_C)
    assert one.value(one.dense_C) == 0


@pytest.mark.parametrize("size", SIZES)
def test_single_weight_is_obs(size: tuple[int, int]) -> None:
    """One pruned weight: WoodFisher = CBS-U = −w_q F⁻¹e_q/[F⁻¹]_qq, and the loss is w_q²/(2[F⁻¹]_qq)."""
    one, keep = block(*size), some(size[1], 1)
    q = int((~keep).nonzero())
    inverse = torch.linalg.inv(fisher(one))
    expected = one.dense_C - one.dense_C[q] * inverse[:, q] / inverse[q, q]
    torch.testing.assert_close(one.woodfisher(keep), expected * keep, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(one.back_solve(keep), expected * keep, rtol=1e-9, atol=1e-9)
    assert one.value(one.back_solve(keep)) == pytest.approx(float(one.dense_C[q] ** 2 / inverse[q, q] / 2), rel=1e-9)


@pytest.mark.parametrize("size", SIZES)
def test_summed_update_is_that_of_the_dense_inverse(size: tuple[int, int]) -> None:
    """δ = −F⁻¹(w_P/diag F⁻¹) on the survivors, and `scale` scales it down to the mask alone."""
    one, keep = block(*size), some(size[1], 5)
    inverse = torch.linalg.inv(fisher(one)).numpy()
    pushed = np.where(keep.numpy(), 0, one.dense_C.numpy() / np.diag(inverse))
    expected = (one.dense_C.numpy() - inverse @ pushed) * keep.numpy()
    np.testing.assert_allclose(one.woodfisher(keep).numpy(), expected, rtol=1e-8, atol=1e-8)
    assert torch.equal(one.woodfisher(keep, 0.0), one.masked(keep))
    assert torch.equal(one.back_solve(keep, 0.0), one.masked(keep))


@pytest.mark.parametrize("size", SIZES)
def test_diagonal_fisher_moves_only_the_pruned(size: tuple[int, int]) -> None:
    """Gradients that each touch one weight say nothing of the others."""
    G = torch.zeros(size, dtype=torch.float64)
    for place in range(min(size)):
        G[place, place] = place + 1.0
    one, keep = Block(G, block(*size).dense_C, DAMP), some(size[1], 5)
    torch.testing.assert_close(one.woodfisher(keep), one.masked(keep), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(one.back_solve(keep), one.masked(keep), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("gone", [3, 7])
def test_back_solve_is_joint_obs(size: tuple[int, int], gone: int) -> None:
    """δ = −F⁻¹[:,P](F⁻¹[P,P])⁻¹w_P on F = XᵀX/n + ℓI: what CBS-U states and CHITA's back-solve arrives at."""
    one, keep = block(*size), some(size[1], gone)
    inverse, P = torch.linalg.inv(fisher(one)), (~keep).nonzero()[:, 0]
    change = -inverse[:, P] @ torch.linalg.solve(inverse[P][:, P], one.dense_C[P])
    torch.testing.assert_close(one.back_solve(keep), (one.dense_C + change) * keep, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("alpha", [False, True])
def test_both_branches_are_those_of_the_reference(size: tuple[int, int], alpha: bool) -> None:
    """Both formulas of 7.2, with y = Xw̄ and rhs = X_Sᵀy + 2λ₂w̄_S − α_S, and numpy's least squares, agree."""
    one, keep = block(*size, alpha=alpha), some(size[1], 5)
    X, w, S = one.G_NC.numpy(), one.dense_C.numpy(), keep.nonzero()[:, 0].numpy()
    a = one.alpha_C.numpy() if one.alpha_C is not None else np.zeros(size[1])
    twice = one.ridge  # 2λ₂
    rhs = X[:, S].T @ (X @ w) + twice * w[S] - a[S]
    inner = np.linalg.solve(np.eye(len(X)) + X[:, S] @ X[:, S].T / twice, X[:, S] @ rhs)
    wide = rhs / twice - X[:, S].T @ inner / twice**2
    tall = np.linalg.solve(X[:, S].T @ X[:, S] + twice * np.eye(len(S)), rhs)
    tower = np.concatenate([X[:, S], np.sqrt(twice) * np.eye(len(S))])
    target = np.concatenate([X @ w, np.sqrt(twice) * (w[S] - a[S] / twice)])
    squares = np.linalg.lstsq(tower, target, rcond=None)[0]
    found = one.back_solve(keep)[S].numpy()
    for expected in (wide, tall, squares):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("alpha", [False, True])
def test_back_solve_is_the_least_of_all(size: tuple[int, int], alpha: bool) -> None:
    """Q there is at most Q of the masked weights, of the summed update and of any neighbour on the support."""
    one, keep = block(*size, alpha=alpha), some(size[1], 5)
    w = one.back_solve(keep)
    least = one.value(w)
    assert least <= one.value(one.masked(keep))
    assert least <= one.value(one.woodfisher(keep)) + 1e-12
    for _ in range(20):
        assert one.value(w + 0.1 * torch.randn(size[1], dtype=torch.float64) * keep) > least
    assert least <= one.value(one.back_solve(keep, 0.5)) <= one.value(one.masked(keep))


def test_value_is_the_damped_quadratic_form() -> None:
    """½δᵀFδ + αᵀδ/N with F formed."""
    one = block(*SIZES[0], alpha=True)
    w = torch.randn(15, dtype=torch.float64)
    change = w - one.dense_C
    assert one.alpha_C is not None
    expected = change @ fisher(one) @ change / 2 + one.alpha_C @ change / 6
    assert one.value(w) == pytest.approx(float(expected), rel=1e-12)


def test_large_ridge_keeps_the_survivors() -> None:
    """λ₂ → ∞: w_S = w̄_S."""
    one, keep = block(*SIZES[0], damp=1e12), some(15, 5)
    torch.testing.assert_close(one.back_solve(keep), one.masked(keep), rtol=1e-9, atol=1e-9)


def test_tiny_damping_keeps_the_diagonal_positive_or_is_refused() -> None:
    """Where 1 − … has no digits left the diagonal is still positive; where Cholesky fails, it says what to do."""
    one = Block(1e3 * block(*SIZES[0]).G_NC, block(*SIZES[0]).dense_C, 1e-9)
    assert (one.inverse_diagonal() > 0).all()
    with pytest.raises(UserError, match="lost in rounding") as error:
        Block(1e9 * torch.ones(4, 9, dtype=torch.float64), torch.ones(9, dtype=torch.float64), 1e-12).inverse_diagonal()
    assert "raise it" in error.value.hint


def test_blocks_cover_the_parameter_once() -> None:
    """Consecutive, the last one shorter, each with its own gradients, weights and first-order term."""
    G, w = torch.randn(3, 10), torch.randn(10)
    found = list(blocks(G, w, 4, DAMP, 0.5))
    assert [place for place, _ in found] == [slice(0, 4), slice(4, 8), slice(8, 10)]
    for place, one in found:
        assert torch.equal(one.G_NC, G[:, place].double())
        assert torch.equal(one.dense_C, w[place].double())
        assert one.alpha_C is not None
        torch.testing.assert_close(one.alpha_C, 0.5 * G[:, place].double().sum(0))
    assert all(one.alpha_C is None for _, one in blocks(G, w, 4, DAMP, 0.0))
