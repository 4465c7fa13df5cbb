"""Least squares on a support, the update of SparseGPT and the greedy choice of ExactOBS (methods.md 4).

O rows of a layer, each with its own support, share one Gram matrix H (I × I); a convolution may have G groups of both.
The error of a row w is w H wᵀ − 2 w·b plus a constant, with b = w_dense H where the layer reads what the dense one
does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

RETRIES = 6  # each with ten times the damping
EIGENVALUE_FLOOR = 1e-8  # of the largest
MEMORY = 2**28  # bytes of the systems that are solved at a time
SHARED = 8  # rows to a support from which one factorisation serves them all
NARROW = 64  # columns of a group up to which all groups are solved at once
DIRECT = 2048  # survivors of a row up to which its system is factorised; above it conjugate gradients are used
LAZY = 32  # steps of ExactOBS between two updates of its inverses
TOLERANCE, STEPS = 1e-9, 5000  # of conjugate gradients: least relative residual, most steps


def damped(H_GII: Tensor, damp: float) -> Tensor:
    """H + damp · mean(diag H), more where that is not positive definite; inputs that are always zero get a 1."""
    H_GII = (H_GII + H_GII.mT).div_(2)
    diagonal_GI = H_GII.diagonal(dim1=-2, dim2=-1)
    mean_G = diagonal_GI.mean(-1)
    diagonal_GI += (diagonal_GI == 0).to(H_GII)
    ridge_G = damp * mean_G
    diagonal_GI += ridge_G[..., None]
    for _ in range(RETRIES):
        failed_G = torch.linalg.cholesky_ex(H_GII).info > 0
        if not bool(failed_G.any()):
            return H_GII
        more_G = torch.where(failed_G, torch.maximum(9 * ridge_G, 1e-12 * mean_G), 0.0)
        ridge_G = ridge_G + more_G
        diagonal_GI += more_G[..., None]  # a view: no second matrix, for they are large
    values, vectors = torch.linalg.eigh(H_GII)
    nearest: Tensor = (vectors * torch.maximum(values, EIGENVALUE_FLOOR * values[..., -1:])[..., None, :]) @ vectors.mT
    return nearest


def errors(W_GOI: Tensor, H_GII: Tensor, B_GOI: Tensor, constant_GO: Tensor) -> Tensor:
    """Of each row."""
    return ((W_GOI @ H_GII - 2 * B_GOI) * W_GOI).sum(-1) + constant_GO


def restricted_in_groups(H_GII: Tensor, B_GOI: Tensor, mask_GOI: Tensor, start_GOI: Tensor) -> Tensor:
    """`restricted` for each group; those of few columns, such as depthwise filters, all at once."""
    groups, rows, columns = B_GOI.shape
    if groups == 1 or columns > NARROW:
        each = zip(H_GII, B_GOI, mask_GOI, start_GOI, strict=True)
        return torch.stack([restricted(*group) for group in each])
    whole_GOII = H_GII[:, None].expand(-1, rows, -1, -1)
    return _solved(whole_GOII, B_GOI, mask_GOI)


def restricted(H_II: Tensor, B_OI: Tensor, mask_OI: Tensor, start_OI: Tensor) -> Tensor:
    """The rows of least error on their supports; H must be positive definite. Long searches begin at `start_OI`."""
    found_OI, sizes_O = torch.zeros_like(B_OI), mask_OI.sum(1)
    supports, which_O = torch.unique(mask_OI, dim=0, return_inverse=True)
    if SHARED * len(supports) <= len(mask_OI):  # whole rows and columns are gone
        for place, mask_I in enumerate(supports):
            S, rows = mask_I.nonzero()[:, 0], (which_O == place).nonzero()
            factor = torch.linalg.cholesky(H_II[S][:, S])
            found_OI[rows, S] = torch.cholesky_solve(B_OI[rows, S].mT, factor).mT
    elif int(sizes_O.max()) > DIRECT:
        for rows in _slices(len(B_OI), 48 * len(H_II)):
            found_OI[rows] = conjugate_gradients(H_II, B_OI[rows], mask_OI[rows], start_OI[rows])
    else:
        order = sizes_O.argsort()  # rows of like size together, so that little is padded
        for part in _slices(len(order), 24 * int(sizes_O.max()) ** 2):
            some = order[part]
            found_OI[some] = _on_supports(H_II, B_OI[some], mask_OI[some])
    return found_OI


def _slices(count: int, bytes_each: int) -> list[slice]:
    step = max(1, MEMORY // max(1, bytes_each))
    return [slice(start, start + step) for start in range(0, count, step)]


def _on_supports(H_II: Tensor, B_OI: Tensor, mask_OI: Tensor) -> Tensor:
    """One system a row, of the size of the largest."""
    most = int(mask_OI.sum(1).max())
    index_OS = mask_OI.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
    H_OSS = H_II[index_OS[:, :, None], index_OS[:, None, :]]
    w_OS = _solved(H_OSS, B_OI.gather(1, index_OS), mask_OI.gather(1, index_OS))
    return torch.zeros_like(B_OI).scatter_(1, index_OS, w_OS)


def _solved(H_OSS: Tensor, b_OS: Tensor, there_OS: Tensor) -> Tensor:
    """Systems of which some rows and columns are not there: the identity stands for them."""
    both_OSS = there_OS[..., :, None] & there_OS[..., None, :]
    H_OSS = torch.where(both_OSS, H_OSS, 0.0) + torch.diag_embed((~there_OS).to(H_OSS))
    right_OS = torch.where(there_OS, b_OS, 0.0)
    return torch.cholesky_solve(right_OS[..., None], torch.linalg.cholesky(H_OSS))[..., 0]


def conjugate_gradients(H_II: Tensor, B_OI: Tensor, mask_OI: Tensor, start_OI: Tensor) -> Tensor:
    """All rows at once, preconditioned by the diagonal: memory of a few times the rows, whatever their support."""
    inverse_I = 1 / H_II.diagonal()
    w = start_OI * mask_OI
    rest = (B_OI - w @ H_II) * mask_OI
    z = rest * inverse_I
    p, rz = z.clone(), (rest * z).sum(1)
    goal = TOLERANCE**2 * ((B_OI * mask_OI).square() * inverse_I).sum(1)
    for _ in range(STEPS):
        if bool((rz <= goal).all()):
            break
        Hp = (p @ H_II) * mask_OI
        step = torch.where(rz > goal, rz / (p * Hp).sum(1).clamp_min(1e-300), 0.0)[:, None]
        w += step * p
        rest -= step * Hp
        z = rest * inverse_I
        rz, before = (rest * z).sum(1), rz
        p = z + (rz / before.clamp_min(1e-300))[:, None] * p
    return w


Choose = Callable[[slice, Tensor, Tensor], Tensor]
"""(columns, their weights as they are now, their diagonal of U) → what stays of them."""


def sparsegpt(
    W_GOI: Tensor, U_GII: Tensor, choose: Choose, *, block: int, starts: Sequence[int] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """SparseGPT's pass from left to right (4.3): new weights, what stays, and the errors E, with W − W′ = E U.

    What stays is chosen at each of `starts` for the columns up to the next; without them, at each block. There may be
    groups in front or none.
    """
    W_GOI, columns, diagonal_GI = W_GOI.clone(), U_GII.shape[-1], U_GII.diagonal(dim1=-2, dim2=-1)
    kept_GOI, E_GOI = torch.ones_like(W_GOI, dtype=torch.bool), torch.zeros_like(W_GOI)
    bounds = [*(starts or range(0, columns, block)), columns]
    first = 0
    while first < columns:
        last = next(bound for bound in bounds if bound >= min(first + block, columns))  # whole groups
        for j in range(first, last):
            if j in bounds:
                part = slice(j, bounds[bounds.index(j) + 1])
                kept_GOI[..., part] = choose(part, W_GOI[..., part], diagonal_GI[..., part])
            E_GOI[..., j] = W_GOI[..., j] * ~kept_GOI[..., j] / diagonal_GI[..., j, None]
            W_GOI[..., j:last] -= E_GOI[..., j, None] * U_GII[..., j, None, j:last]
        W_GOI[..., last:] -= E_GOI[..., first:last] @ U_GII[..., first:last, last:]
        first = last
    return W_GOI * kept_GOI, kept_GOI, E_GOI


def upper(H_GII: Tensor) -> Tensor:
    """U with H⁻¹ = Uᵀ U."""
    U_GII: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(H_GII)), upper=True)
    return U_GII


def greedy(W_OI: Tensor, H_II: Tensor, *, n: int = 0, starts: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """ExactOBS (4.2), all rows at once: each step takes from every row the weight that it misses least.

    The order in which weights go and what each of them costs, as O × steps. With `n`, each of the groups of columns
    that begin at `starts` keeps so many.
    """
    rows, columns = torch.arange(len(W_OI), device=W_OI.device), W_OI.shape[1]
    W_OI, gone = W_OI.clone(), torch.zeros_like(W_OI, dtype=torch.bool)
    inverse_OII = torch.linalg.inv(H_II).expand(len(W_OI), -1, -1).clone()  # as it was before the last few steps
    diagonal_OI, taken_OTI = inverse_OII.diagonal(dim1=1, dim2=2).clone(), W_OI.new_zeros(len(W_OI), LAZY, columns)
    sizes = torch.tensor([*starts[1:], columns]) - torch.tensor(starts) if starts else torch.tensor([columns])
    group_I = torch.arange(len(sizes)).repeat_interleave(sizes).to(W_OI.device)
    left = (sizes - n).clamp_min(0).to(W_OI.device).expand(len(W_OI), -1).clone()  # what each group may still lose
    order, losses = [], []
    for step in range(int(left[0].sum())):
        T = step % LAZY
        if step and not T:  # what the last steps took, in one product: step by step memory would be the limit
            inverse_OII.baddbmm_(taken_OTI.mT, taken_OTI, alpha=-1)
        barred = gone | (left == 0)[:, group_I]
        loss_O, q_O = torch.where(barred, torch.inf, W_OI.square() / diagonal_OI).min(1)
        recent_OT = taken_OTI[rows, :T, q_O]
        column_OI = inverse_OII[rows, q_O] - (recent_OT[:, None] @ taken_OTI[:, :T])[:, 0]
        taken_OTI[:, T] = column_OI / column_OI[rows, q_O].sqrt()[:, None]
        W_OI -= (W_OI[rows, q_O] / taken_OTI[rows, T, q_O])[:, None] * taken_OTI[:, T]
        diagonal_OI -= taken_OTI[:, T].square()
        gone[rows, q_O] = True
        left[rows, group_I[q_O]] -= 1
        diagonal_OI[gone] = 1  # of what is gone, and not asked again
        order.append(q_O)
        losses.append(loss_O)
    return torch.stack(order, 1), torch.stack(losses, 1)
