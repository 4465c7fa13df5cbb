"""Products with Hessians that are never formed, conjugate gradients and Armijo's rule, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from starfish.methods.newton import (
    Product,
    armijo_,
    block_diagonal,
    conjugate_gradients,
    gauss_newton,
    hessian,
    mismatch,
)


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
