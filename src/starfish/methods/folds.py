"""The closed forms of CORP: one fold is one family of units, solved in float64 (methods.md 10.2 and 10.3).

S surviving and P pruned units (times the taps of a kernel), O outputs of the layer that reads them, D width of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from starfish.core import Part, Row, Unit
from starfish.statistics import Moments, QueryKeys, Statistic, exact, pruned_of

FLOOR = 1e-3  # least ridge of the shrinkage formula, as released
SCALED = 1e-6  # ridge as a share of the mean diagonal
SINGULAR_FLOOR = 1e-6  # of the symmetrised query-key map, as released
TINY = 1e-300


@dataclass
class Fold(ABC):
    """What one family of units that lost some becomes: `solve`, then `write_` into as many models as need it."""

    dense: nn.Module
    unit: Unit
    dead: Tensor  # (count,)
    statistic: Statistic

    @abstractmethod
    def solve(self) -> Row:
        """Find the new weights from the statistic, which must have been filled; how well they do, in one row.

        `plain` is the error of what the dense layer puts out when the units are only zeroed, `folded` what is left of
        it; both are shares of the whole squared output.
        """

    @abstractmethod
    def tensors(self) -> set[str]:
        """What `write_` changes."""

    @abstractmethod
    def write_(self, model: nn.Module) -> None:
        """Write what was found, and zeros where units went."""

    def forget(self) -> None:
        """Let go of the statistic, which is large."""
        self.statistic.sums = {}

    def _dense_weight(self, part: Part) -> Tensor:
        return exact(self.dense.get_parameter(part.parameter).detach())


@dataclass
class ColumnFold(Fold):
    """Neurons and channels: x_P ≈ B x_S + c, so that W_S takes up W_P B and the layer's bias W_P c."""

    statistic: Moments
    fold: str  # affine, bias or none
    shrinkage: bool
    shifts: Mapping[str, tuple[str, int]]  # weight → what takes up a constant added to its output, and its sign
    _found: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # weight → columns O×S, constant O

    def tensors(self) -> set[str]:
        readers = [part.parameter for part in self.unit.readers]
        return {*readers, *(self.shifts[name][0] for name in readers if name in self.shifts)}

    def solve(self) -> Row:
        self._found = {}
        errors = torch.stack([self._solve(place, part) for place, part in enumerate(self.unit.readers)]).sum(0)
        plain, folded = (errors[:2] / errors[2].clamp_min(TINY)).tolist()
        return {"plain": plain, "folded": folded}

    def _solve(self, place: int, part: Part) -> Tensor:
        """Squared error without and with the fold, and the squared output, of one layer that reads the units."""
        taken = part.parameter in self.shifts and self.fold != "none"
        mean_C, second_CC = self.statistic.mean_C(place), self.statistic.second_CC(place)
        C_CC = self.statistic.covariance_CC(place) if taken else second_CC
        W_OC = self._columns(part).to(C_CC.device).flatten(1)
        dead_C = self.dead.cpu().repeat_interleave(W_OC.shape[1] // self.unit.count).to(C_CC.device)
        S, P = (~dead_C).nonzero()[:, 0], dead_C.nonzero()[:, 0]
        B_SP = torch.zeros(len(S), len(P), dtype=C_CC.dtype, device=C_CC.device)
        if self.fold == "affine":
            ridge = self._ridge(C_CC[S][:, S], self.statistic.count(place))
            B_SP = solved(C_CC[S][:, S], C_CC[S][:, P], ridge)
        W_OP = W_OC[:, P]
        c_P = mean_C[P] - mean_C[S] @ B_SP if taken else torch.zeros_like(mean_C[P])
        self._found[part.parameter] = (W_OC[:, S] + W_OP @ B_SP.T, W_OP @ c_P)
        rest_PP = C_CC[P][:, P] - B_SP.T @ C_CC[S][:, P] - C_CC[P][:, S] @ B_SP + B_SP.T @ C_CC[S][:, S] @ B_SP
        return torch.stack([energy(W_OP, second_CC[P][:, P]), energy(W_OP, rest_PP), energy(W_OC, second_CC)])

    def _ridge(self, C_SS: Tensor, count: int) -> float:
        diagonal = C_SS.diagonal()
        if not self.shrinkage:
            return SCALED * float(diagonal.mean())
        # oracle-approximating shrinkage
        p, trace, square = len(C_SS), float(diagonal.sum()), float(C_SS.square().sum())
        below = (count + 1 - 2 / p) * (square - trace**2 / p)
        share = min(1.0, ((1 - 2 / p) * square + trace**2) / below) if below > 0 else 1.0
        return max(FLOOR, share * trace / p)

    @torch.no_grad()
    def write_(self, model: nn.Module) -> None:
        state = model.state_dict()
        for part in self.unit.readers:
            columns_OS, constant_O = self._found[part.parameter]
            columns = state[part.parameter].narrow(1, part.start, self.unit.count)
            new = torch.zeros(columns.shape, dtype=columns_OS.dtype, device=columns_OS.device)
            alive = (~self.dead).nonzero()[:, 0].to(new.device)
            new[:, alive] = columns_OS.view(len(new), len(alive), *new.shape[2:])
            columns.copy_(new)
            if part.parameter in self.shifts:
                name, sign = self.shifts[part.parameter]
                state[name].add_(sign * constant_O.to(state[name]))

    def forget(self) -> None:
        super().forget()
        self._found = {}

    def _columns(self, part: Part) -> Tensor:
        return self._dense_weight(part).narrow(1, part.start, self.unit.count)


@dataclass
class QueryKeyFold(Fold):
    """Query-key dimensions of some heads: M with Q_S (I+M) K_Sᵀ ≈ Q Kᵀ, split over what makes queries and keys."""

    statistic: QueryKeys
    fitted: bool
    symmetrize: bool
    reduced: bool  # scale the logits as if the softmax divided by the root of the new width
    _found: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # of each head: U and V, S×S

    def tensors(self) -> set[str]:
        return {part.parameter for part in self.unit.parts}

    def solve(self) -> Row:
        self._found = []
        errors = torch.stack([self._solve(head) for head in range(len(self.statistic.kept))]).sum(0)
        whole, pooled_whole = errors[4].clamp_min(TINY), errors[5].clamp_min(TINY)
        return {"first_head": self.statistic.first, "heads": len(self.statistic.kept),
                "plain": float(errors[0] / whole), "folded": float(errors[1] / whole),
                "pooled": float(errors[2] / pooled_whole), "bound": float(errors[3] / pooled_whole)}  # fmt: skip

    def _solve(self, head: int) -> Tensor:
        """Of one head: squared error of the logits that are fitted, plain and folded; of all pairs of tokens pooled,
        with the fold and with the best map of this rank; and the squared logits of both."""
        sums, S = self.statistic.sums, torch.tensor(self.statistic.kept[head], dtype=torch.long)
        P = pruned_of(S, self.statistic.width)
        G_Q, G_K = sums["queries"][head], sums["keys"][head]
        pooled = Pooled(G_Q[S][:, S], G_K[S][:, S], G_Q[S][:, P] @ G_K[P][:, S], (G_Q[P][:, P] * G_K[P][:, P]).sum())
        fitted: Pooled | PerImage = pooled
        if self.statistic.per_image:
            fitted = PerImage(sums[f"normal/{head}"], sums[f"right/{head}"], sums[f"plain/{head}"])
        M = torch.zeros_like(G_Q[S][:, S])
        if self.fitted:
            M = symmetrized(fitted.solve()) if self.symmetrize else fitted.solve()
        self._found.append(self._split(M))
        whole = (G_Q * G_K).sum()
        seen = sums[f"whole/{head}"] if self.statistic.per_image else whole
        return torch.stack([fitted.plain, fitted.error(M), pooled.error(M), rank_bound(G_Q, G_K, len(S)), seen, whole])

    def _split(self, M: Tensor) -> tuple[Tensor, Tensor]:
        """U Vᵀ = I + M, with the singular values shared out evenly."""
        one = torch.eye(len(M), dtype=M.dtype, device=M.device)
        longer = (self.statistic.width / len(M)) ** 0.25 if self.reduced and len(M) else 1.0
        if not M.any():  # and not some other pair of rotations that cancel
            return longer * one, longer * one
        R, values, Vh = torch.linalg.svd(one + M)
        return longer * R * values.sqrt(), longer * Vh.T * values.sqrt()

    @torch.no_grad()
    def write_(self, model: nn.Module) -> None:
        state, width = model.state_dict(), self.statistic.width
        for part in self.unit.parts:
            dense = exact(self.dense.state_dict()[part.parameter])
            for place, maps in enumerate(self._found):
                start = part.start + (self.statistic.first + place) * width
                rows, old = state[part.parameter][start : start + width], dense[start : start + width]
                kept = torch.tensor(self.statistic.kept[place], dtype=torch.long)
                new = torch.zeros_like(old)
                new[kept] = maps[part.side == "k"].T.to(old.device) @ old[kept]
                rows.copy_(new)

    def forget(self) -> None:
        super().forget()
        self._found = []


@dataclass
class Pooled:
    """min ‖Q_P K_Pᵀ − Q_S M K_Sᵀ‖² + λ‖M‖² over all pairs of tokens, those of different images included."""

    G_Q: Tensor
    G_K: Tensor
    right: Tensor  # Q_Sᵀ Q_P K_Pᵀ K_S
    plain: Tensor

    def solve(self) -> Tensor:
        """G_Q M G_K + λM = right, by two eigendecompositions."""
        a, U_Q = torch.linalg.eigh(self.G_Q)
        c, U_K = torch.linalg.eigh(self.G_K)
        ridge = SCALED * a.mean() * c.mean()
        below = (torch.outer(a, c).clamp_min(0) + ridge).clamp_min(TINY)
        M: Tensor = U_Q @ ((U_Q.T @ self.right @ U_K) / below) @ U_K.T
        return M

    def error(self, M: Tensor) -> Tensor:
        return self.plain - 2 * (M * self.right).sum() + (M * (self.G_Q @ M @ self.G_K)).sum()


@dataclass
class PerImage:
    """The same over the pairs that meet in attention: those of one image."""

    normal: Tensor  # Σ over images of K_SᵀK_S ⊗ Q_SᵀQ_S, as rows (j, j′) × columns (i, i′)
    right: Tensor
    plain: Tensor

    def solve(self) -> Tensor:
        size = len(self.right)
        A = self.normal.view(size, size, size, size).permute(0, 2, 1, 3).reshape(size**2, size**2)  # (j, i) × (j′, i′)
        vec = solved(A, self.right.T.reshape(-1, 1), SCALED * float(A.diagonal().mean()))
        return vec.view(size, size).T.contiguous()

    def error(self, M: Tensor) -> Tensor:
        size = len(M)
        normal = self.normal.view(size, size, size, size)
        square = torch.einsum("jlik,ij,kl->", normal, M, M)
        return self.plain - 2 * (M * self.right).sum() + square


def symmetrized(M: Tensor) -> Tensor:
    """I + M replaced by its symmetric part, with no singular value below the floor: as released."""
    one = torch.eye(len(M), dtype=M.dtype, device=M.device)
    U, values, Vh = torch.linalg.svd(one + (M + M.T) / 2)
    symmetric: Tensor = U * values.clamp_min(SINGULAR_FLOOR) @ Vh - one
    return symmetric


def rank_bound(G_Q: Tensor, G_K: Tensor, rank: int) -> Tensor:
    """The least error of the pooled logits that any queries and keys of this width can have."""
    error: Tensor = torch.linalg.svdvals(root(G_Q) @ root(G_K))[rank:].square().sum()
    return error


def root(G: Tensor) -> Tensor:
    values, U = torch.linalg.eigh(G)
    square_root: Tensor = U * values.clamp_min(0).sqrt() @ U.T
    return square_root


def solved(A: Tensor, right: Tensor, ridge: float) -> Tensor:
    """(A + ridge) X = right for a symmetric A ⪰ 0: by Cholesky, or where that fails by least squares."""
    A = A + ridge * torch.eye(len(A), dtype=A.dtype, device=A.device)
    L, failed = torch.linalg.cholesky_ex(A)
    X: Tensor = torch.linalg.pinv(A, hermitian=True) @ right if bool(failed) else torch.cholesky_solve(right, L)
    return X


def energy(W_OC: Tensor, C_CC: Tensor) -> Tensor:
    """E‖W x‖² where C is the second moment of x."""
    return ((W_OC @ C_CC) * W_OC).sum()
