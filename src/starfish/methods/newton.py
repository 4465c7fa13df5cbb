"""Newton steps without a Hessian: products with it, conjugate gradients, Armijo's rule (methods.md 9).

W is a weight, u and v are directions of its shape, y_k the outputs that depend on it, N_k their sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]

ARMIJO, SHRINK, TRIALS = 1e-5, 0.9, 50  # sufficient decrease, factor of a step that fails, steps tried
FLAT = 1e-12  # least curvature over squared length


def mismatch(outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """J = Σ_k mean((y_k − Y_k)²)."""
    return torch.stack([(y - wanted).square().mean() for y, wanted in zip(outputs, targets, strict=True)]).sum()


def gauss_newton(outputs: Sequence[Tensor], weight: Tensor) -> Product:
    """v ↦ Σ_k 2/N_k J_kᵀ J_k v, along which no curvature is negative.

    J v is the derivative of Jᵀu by u, so that every operation that can be differentiated twice will do, and no product
    needs the outputs calculated again.
    """
    heard = [y for y in outputs if y.requires_grad]
    duals = [torch.zeros_like(y, requires_grad=True) for y in heard]
    (pulled,) = torch.autograd.grad(heard, weight, duals, create_graph=True)

    def product(v: Tensor) -> Tensor:
        pushed = torch.autograd.grad(pulled, duals, v, retain_graph=True, allow_unused=True, materialize_grads=True)
        scaled = [2 / y.numel() * x for x, y in zip(pushed, heard, strict=True)]
        (back,) = torch.autograd.grad(heard, weight, scaled, retain_graph=True)
        return back

    return product


def hessian(loss: Tensor, weight: Tensor) -> Product:
    """v ↦ ∇²J v, which may be negative in places."""
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)

    def product(v: Tensor) -> Tensor:
        if not gradient.requires_grad:  # J is linear in the weight
            return torch.zeros_like(v)
        found = torch.autograd.grad(gradient, weight, v, retain_graph=True, allow_unused=True, materialize_grads=True)
        return found[0]

    return product


def block_diagonal(product: Product, kept: Tensor, size: int) -> Product:
    """The product with what the matrix holds between coordinates of the same chunk of `size` kept ones, as released."""
    chunks = torch.split(kept.flatten().nonzero()[:, 0], size)

    def within(v: Tensor) -> Tensor:
        result = torch.zeros_like(v)
        for chunk in chunks:
            part = torch.zeros_like(v)
            part.view(-1)[chunk] = v.reshape(-1)[chunk]
            result.view(-1)[chunk] = product(part).reshape(-1)[chunk]
        return result

    return within


def conjugate_gradients(
    product: Product, gradient: Tensor, damp: float, steps: int, tolerance: float
) -> tuple[Tensor, int]:
    """Solve (H + damp·I) x = −gradient, and in how many products. Ends where the curvature is not positive.

    It ends when the residual has fallen to `tolerance` times the gradient, too.
    """
    x, residual = torch.zeros_like(gradient), -gradient
    direction, squared = residual, _dot(residual, residual)
    least = tolerance**2 * squared
    for step in range(steps):
        if squared <= least:
            return x, step
        curved = product(direction) + damp * direction
        curvature = _dot(direction, curved)
        if not curvature > FLAT * _dot(direction, direction):
            return (x if step else -gradient), step + 1
        x = x + squared / curvature * direction
        residual = residual - squared / curvature * curved
        squared, last = _dot(residual, residual), squared
        direction = residual + squared / last * direction
    return x, steps


@torch.no_grad()
def armijo_(
    weight: Tensor, step: Tensor, loss: Callable[[], float], before: float, slope: float
) -> tuple[float, float]:
    """Take the longest of 1, 0.9, 0.81 … of the step that lowers the loss enough; how long, and the loss there.

    `slope` is the loss's own along the step. Where no step will do the weight is as it was, and the length is 0.
    """
    start, length = weight.clone(), 1.0
    for _ in range(TRIALS if slope < 0 else 0):
        weight.copy_(start + length * step)
        after = loss()
        if after <= before + ARMIJO * length * slope:  # false for nan
            return length, after
        length *= SHRINK
    weight.copy_(start)
    return 0.0, before


def _dot(u: Tensor, v: Tensor) -> float:
    return float(torch.dot(u.reshape(-1).double(), v.reshape(-1).double()))
