"""The quadratic model of the loss about the dense weights, one block of them at a time (methods.md 5, 6, 7).

N gradients, C weights of a block, S of them survive, P are pruned; w̄ the dense weights, δ = w − w̄.
Q(w)/N = ½ δᵀFδ + αᵀδ/N with F = GᵀG/N + λI: CHITA's regression, where y = Gw̄ and 2λ₂ = Nλ, is this very model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from starfish.errors import UserError

LEAST_DIAGONAL = 1e-12  # of λF⁻¹, where 1 − … has lost all its digits


@dataclass(frozen=True)
class Block:
    """Some consecutive weights of one parameter, in float64. Nothing here is larger than N×C or N×N."""

    G_NC: Tensor
    dense_C: Tensor
    damp: float  # λ, CHITA's ℓ
    alpha_C: Tensor | None = None  # the first-order term; None: zero

    @property
    def ridge(self) -> float:
        """Nλ, CHITA's 2λ₂."""
        return len(self.G_NC) * self.damp

    def value(self, w_C: Tensor) -> float:
        """Q/N, less its value at the dense weights."""
        change_C = w_C - self.dense_C
        value = (self.G_NC @ change_C).square().sum() + self.ridge * change_C.square().sum()
        first = 0.0 if self.alpha_C is None else float(self.alpha_C @ change_C)
        return (float(value) / 2 + first) / len(self.G_NC)

    def masked(self, keep_C: Tensor) -> Tensor:
        return torch.where(keep_C, self.dense_C, 0.0)

    @cached_property
    def factor_NN(self) -> Tensor:
        """Cholesky of NλI + GGᵀ."""
        return cholesky(self.G_NC @ self.G_NC.T, self.ridge)

    def inverse_times(self, z_C: Tensor) -> Tensor:
        """F⁻¹z = (z − Gᵀ(NλI + GGᵀ)⁻¹Gz)/λ"""
        return (z_C - self.G_NC.T @ solve(self.factor_NN, self.G_NC @ z_C)) / self.damp

    def inverse_diagonal(self) -> Tensor:
        """diag F⁻¹"""
        half_NC = torch.linalg.solve_triangular(self.factor_NN, self.G_NC, upper=False)
        diagonal_C: Tensor = (1 - half_NC.square().sum(0)).clamp_min(LEAST_DIAGONAL) / self.damp
        return diagonal_C

    def woodfisher(self, keep_C: Tensor, scale: float = 1.0) -> Tensor:
        """The sum of the OBS moves of every pruned weight alone: δ = −F⁻¹(w̄_P/diag F⁻¹), masked (section 5)."""
        if bool(keep_C.all()):
            return self.dense_C.clone()
        pushed_C = torch.where(keep_C, 0.0, self.dense_C / self.inverse_diagonal())
        return torch.where(keep_C, self.dense_C - scale * self.inverse_times(pushed_C), 0.0)

    def back_solve(self, keep_C: Tensor, scale: float = 1.0) -> Tensor:
        """The minimum of Q on the survivors: the joint OBS update of all the pruned (sections 6 and 7.2).

        Solved for δ_S, of which (G_SᵀG_S + NλI)δ_S = G_Sᵀ(G_P w̄_P) − α_S. It is exactly zero where nothing is pruned.
        """
        S = keep_C.nonzero()[:, 0]
        G_NS = self.G_NC[:, S]
        residual_N = self.G_NC @ torch.where(keep_C, 0.0, self.dense_C)
        if len(self.G_NC) < len(S):
            factor_NN = cholesky(G_NS @ G_NS.T, self.ridge)
            change_S = G_NS.T @ solve(factor_NN, residual_N)
            if self.alpha_C is not None:
                alpha_S = self.alpha_C[S]
                change_S -= (alpha_S - G_NS.T @ solve(factor_NN, G_NS @ alpha_S)) / self.ridge
        else:
            right_S = G_NS.T @ residual_N
            right_S = right_S if self.alpha_C is None else right_S - self.alpha_C[S]
            change_S = solve(cholesky(G_NS.T @ G_NS, self.ridge), right_S)
        w_C = self.masked(keep_C)
        w_C[S] += scale * change_S
        return w_C


def blocks(G_NC: Tensor, dense_C: Tensor, size: int, damp: float, first_order: float) -> Iterator[tuple[slice, Block]]:
    """A parameter in blocks of consecutive weights; `first_order` is the factor of Σ gradients in α (7.1)."""
    for start in range(0, len(dense_C), size):
        place = slice(start, min(start + size, len(dense_C)))
        G = G_NC[:, place].double()
        yield place, Block(G, dense_C[place].double(), damp, first_order * G.sum(0) if first_order else None)


def cholesky(gram: Tensor, ridge: float) -> Tensor:
    """Lower factor of gram + ridge·I, which is formed in place."""
    gram.diagonal().add_(ridge)
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(gram)
    if int(failed):
        raise UserError(
            f"the damping adds {ridge:.3g} to gradients whose largest square is {float(gram.diagonal().max()):.3g}:"
            " that is lost in rounding",
            "raise it (damp of woodfisher and cbs, ridge of chita and falcon)",
        )
    return factor


def solve(factor: Tensor, right: Tensor) -> Tensor:
    return torch.cholesky_solve(right[:, None], factor).squeeze(1)
