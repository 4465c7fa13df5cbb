"""CHITA's regression over all weights at once, layers coupled: min Q(w) with at most k weights left (methods.md 7).

N gradients, p weights, A of them active, S survive; w̄ the dense weights, r = X(w̄ − w) the residual.
Q(w) = ½‖r‖² + αᵀ(w − w̄) + ½·ridge·‖w − w̄‖², ridge = 2λ₂ = Nℓ; it differs from 7.1 by the constant αᵀw̄.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from starfish.core import Long

TILE = 128  # coordinates of a sweep that are solved together
ROOM = 1.05  # by which L is larger than the largest curvature found
POWER_STEPS = 30
DOUBLINGS = 5  # of a step that changes the support
HALVINGS = 10  # of L, where all coordinates are tried
ACTIVE = 1.5  # times k coordinates are worked on


@dataclass(frozen=True)
class Regression:
    """X in pieces side by side, in the precision in which its products are to be; all else in float64."""

    X: tuple[Tensor, ...]
    dense_p: Tensor
    ridge: float
    alpha_p: Tensor | None = None  # None: zero
    offset_N: Tensor | None = None  # what weights that are left out, all zero, add to r
    constant: float = 0.0  # and to Q

    def times(self, d_p: Tensor) -> Tensor:
        """Xd"""
        parts = zip(self.X, torch.split(d_p, [x.shape[1] for x in self.X]), strict=True)
        return torch.stack([(x @ d.to(x.dtype)).double() for x, d in parts]).sum(0)

    def transposed(self, r_N: Tensor) -> Tensor:
        """Xᵀr"""
        return torch.cat([(x.T @ r_N.to(x.dtype)).double() for x in self.X])

    def residual(self, w_p: Tensor) -> Tensor:
        r_N = self.times(self.dense_p - w_p)
        return r_N if self.offset_N is None else r_N + self.offset_N

    def value(self, w_p: Tensor, r_N: Tensor) -> float:
        change_p = w_p - self.dense_p
        first = 0.0 if self.alpha_p is None else float(self.alpha_p @ change_p)
        return float(r_N.square().sum() + self.ridge * change_p.square().sum()) / 2 + first + self.constant

    def gradient(self, w_p: Tensor, r_N: Tensor) -> Tensor:
        """∇Q = −Xᵀr + α + 2λ₂(w − w̄)"""
        gradient_p = self.ridge * (w_p - self.dense_p) - self.transposed(r_N)
        return gradient_p if self.alpha_p is None else gradient_p + self.alpha_p

    def largest_curvature(self) -> float:
        """L, a little more than σ_max(X)² + 2λ₂, by power iteration on XXᵀ from a fixed start."""
        v_N = torch.randn(len(self.X[0]), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        size = 0.0
        for _ in range(POWER_STEPS):
            v_N = self.times(self.transposed(v_N / v_N.norm().clamp_min(1e-300)))
            size = float(v_N.norm())
        return ROOM * (size + self.ridge)

    def on(self, active_A: Tensor) -> Regression:
        """The same with all other weights zero for good."""
        if len(active_A) == len(self.dense_p):
            return self
        rest_p = self.dense_p.clone()
        rest_p[active_A] = 0  # −δ of what is left out
        sizes = [x.shape[1] for x in self.X]
        ends = torch.tensor(sizes).cumsum(0).tolist()
        pieces = [active_A[(active_A >= end - size) & (active_A < end)] - (end - size)
                  for end, size in zip(ends, sizes, strict=True)]  # fmt: skip
        first = 0.0 if self.alpha_p is None else -float(self.alpha_p @ rest_p)
        return Regression(
            (torch.cat([x[:, piece] for x, piece in zip(self.X, pieces, strict=True)], dim=1),),
            self.dense_p[active_A],
            self.ridge,
            None if self.alpha_p is None else self.alpha_p[active_A],
            self.times(rest_p),
            self.ridge * float(rest_p.square().sum()) / 2 + first,
        )


def largest(w_p: Tensor, k: int) -> Tensor:
    """True for the k weights of largest absolute value; of equals the first."""
    keep_p = torch.zeros(len(w_p), dtype=torch.bool)
    keep_p[w_p.abs().sort(descending=True, stable=True).indices[:k]] = True
    return keep_p


def threshold(w_p: Tensor, k: int) -> Tensor:
    """T_k: only the k largest stay."""
    return w_p * largest(w_p, k)


def sweep_(problem: Regression, change_p: Tensor, r_N: Tensor, keep_p: Tensor) -> None:
    """Once through the survivors, each put where Q is least while all others stay (CHITA-CD); δ and r follow.

    A tile of coordinates visited one after the other is one triangular system: Gauss and Seidel's, whose diagonal
    is ‖X_j‖² + 2λ₂.
    """
    start = 0
    for x in problem.X:
        survivors = keep_p[start : start + x.shape[1]].nonzero()[:, 0]
        for columns in torch.split(survivors, TILE):
            x_NT, place = x[:, columns].double(), start + columns
            gram_TT = x_NT.T @ x_NT
            gram_TT.diagonal().add_(problem.ridge)
            steep_T = x_NT.T @ r_N - problem.ridge * change_p[place]
            if problem.alpha_p is not None:
                steep_T -= problem.alpha_p[place]
            step_T = torch.linalg.solve_triangular(gram_TT.tril(), steep_T[:, None], upper=False)[:, 0]
            change_p[place] += step_T
            r_N -= x_NT @ step_T
        start += x.shape[1]


def descend(problem: Regression, w_p: Tensor, r_N: Tensor, keep_p: Tensor) -> tuple[Tensor, Tensor]:
    """One step down the gradient on the survivors, to the least Q along it."""
    down_p = problem.gradient(w_p, r_N) * keep_p
    step, moved_N = best_step(problem, down_p)
    return w_p - step * down_p, r_N + step * moved_N


def best_step(problem: Regression, down_p: Tensor) -> tuple[float, Tensor]:
    """t* = ‖∇‖²/(‖X∇‖² + 2λ₂‖∇‖²), and X∇"""
    moved_N, square = problem.times(down_p), float(down_p.square().sum())
    return (square / (float(moved_N.square().sum()) + problem.ridge * square) if square else 0.0), moved_N


def line_search(problem: Regression, w_p: Tensor, r_N: Tensor, k: int, least: float) -> tuple[Tensor, Tensor]:
    """T_k(w − t∇Q) with a step t that does not raise Q.

    While the support stays, Q along t is a parabola, and its minimum is taken; a step that changes the support is
    doubled while Q falls. It is at least 1/L (`least`), which never raises Q: the first change can come at once. A
    longer one may, so that the step up to the change, with the support as it is, is the one to beat.
    """
    keep_p = w_p != 0
    gradient_p = problem.gradient(w_p, r_N)
    step, moved_N = best_step(problem, gradient_p * keep_p)
    change = first_change(w_p, gradient_p, keep_p) if int(keep_p.sum()) == k else 0.0
    step = min(step, change)
    stayed = w_p - step * gradient_p * keep_p, r_N + step * moved_N
    if step < change:
        return stayed
    return _doubled(problem, stayed, w_p, gradient_p, k, max(change, least))


def first_change(w_p: Tensor, gradient_p: Tensor, keep_p: Tensor) -> float:
    """t_c, the first step at which some weight that is zero becomes larger than the least that is not."""
    if bool(keep_p.all()):
        return float("inf")
    outside = float(gradient_p[~keep_p].abs().max())
    closing = outside + w_p[keep_p].sign() * gradient_p[keep_p]
    steps = w_p[keep_p].abs()[closing > 0] / closing[closing > 0]
    return float(steps.min()) if len(steps) else float("inf")


def _doubled(
    problem: Regression, best: tuple[Tensor, Tensor], w_p: Tensor, gradient_p: Tensor, k: int, step: float
) -> tuple[Tensor, Tensor]:
    least = problem.value(*best)
    for _ in range(DOUBLINGS + 1):
        candidate_p = threshold(w_p - step * gradient_p, k)
        r_N = problem.residual(candidate_p)
        value = problem.value(candidate_p, r_N)
        if value >= least:
            break
        best, least = (candidate_p, r_N), value
        step *= 2
    return best


def iht(problem: Regression, k: int, *, steps: int = 100, tolerance: float = 1e-7) -> Long[Tensor]:
    """Iterative hard thresholding with line search on an active set (section 7.3): at most k weights that are not zero.

    When it has come to rest among the active weights, all others are tried; those that lower Q become active.
    """
    w_p = threshold(problem.dense_p, k)
    active_A = largest(problem.dense_p, min(len(w_p), int(ACTIVE * k) + 1)).nonzero()[:, 0]
    done = 0
    while done < steps:
        part = problem.on(active_A)
        curvature = part.largest_curvature()
        w_A, r_N = w_p[active_A], part.residual(w_p[active_A])
        while done < steps:
            before = part.value(w_A, r_N)
            next_A, next_N = line_search(part, w_A, r_N, k, 1 / curvature)
            done += 1
            yield {"stage": "thresholding", "done": done, "total": steps}
            fall = before - part.value(next_A, next_N)
            if fall > 0:
                w_A, r_N = next_A, next_N
            if fall <= tolerance * abs(before):
                break
        w_p = torch.zeros_like(w_p).index_copy_(0, active_A, w_A)
        found = _among_all(problem, w_p, k, 2 * curvature, tolerance)
        if found is None:
            break
        w_p, more_p = found, torch.zeros(len(w_p), dtype=torch.bool)
        more_p[active_A] = True
        active_A = (more_p | (w_p != 0)).nonzero()[:, 0]
    return w_p


def _among_all(problem: Regression, w_p: Tensor, k: int, curvature: float, tolerance: float) -> Tensor | None:
    """A step over all coordinates that lowers Q; None where there is none."""
    r_N = problem.residual(w_p)
    gradient_p, before = problem.gradient(w_p, r_N), problem.value(w_p, r_N)
    for _ in range(HALVINGS):
        candidate_p = threshold(w_p - gradient_p / curvature, k)
        if problem.value(candidate_p, problem.residual(candidate_p)) < before - tolerance * abs(before):
            return candidate_p
        curvature /= 2
    return None


def sweeping(problem: Regression, keep_p: Tensor, sweeps: int) -> Iterator[tuple[Tensor, float]]:
    """The weights after each sweep of coordinate descent on these survivors, from the dense ones, and Q there."""
    change_p = torch.where(keep_p, 0.0, -problem.dense_p)
    r_N = problem.times(-change_p)
    for _ in range(sweeps):
        sweep_(problem, change_p, r_N, keep_p)
        w_p = torch.where(keep_p, problem.dense_p + change_p, 0.0)
        yield w_p, problem.value(w_p, r_N)
