"""CBS-S: which weights to remove together (methods.md 6), as pure functions on one flat vector of weights.

p weights, N gradients, L layers. Row i of V is w_i g_i/√N over all gradients, so that with u_l = Σ V_i over the pruned
weights of layer l the loss modelled is φ = Σ_l ‖u_l‖² = w_Pᵀ F_PP w_P, F block-diagonal by layer and never formed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.floating]
Bits = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]
MOST_CHUNKS = 1000
ROWS = 4096  # weights at a time, in float64


@dataclass(frozen=True)
class Influence:
    """What each weight adds to every gradient's first-order change of its loss."""

    V_pN: Array
    square_p: Array  # ‖V_i‖² = w_i² F_ii
    starts: tuple[int, ...]  # of the layers, and p
    layer_p: Indices

    def sums(self, pruned_p: Bits) -> Array:
        """u_LN in float64"""
        places = zip(self.starts[:-1], self.starts[1:], strict=True)
        return np.stack([self.V_pN[a:b].T @ pruned_p[a:b].astype(self.V_pN.dtype) for a, b in places]).astype(float)

    def along(self, u_LN: Array) -> Array:
        """V_i·u of each weight's own layer"""
        places = enumerate(zip(self.starts[:-1], self.starts[1:], strict=True))
        parts = [self.V_pN[a:b] @ u_LN[layer].astype(self.V_pN.dtype) for layer, (a, b) in places]
        return np.concatenate(parts).astype(float)

    def phi(self, pruned_p: Bits) -> float:
        return float(np.square(self.sums(pruned_p)).sum())


def influence(V_pN: Tensor, sizes: list[int]) -> Influence:
    """Of weights that lie layer after layer."""
    V = V_pN.numpy()
    square_p = np.concatenate([np.square(part.astype(float)).sum(1) for part in np.array_split(V, len(V) // ROWS + 1)])
    starts = (0, *np.cumsum(sizes).tolist())
    return Influence(V, square_p, starts, np.repeat(np.arange(len(sizes)), sizes))


def improve_(found: Influence, pruned_p: Bits, *, tolerance: float, reach: int, failures: int) -> float:
    """One iteration of local search: swaps that each lower φ by `tolerance` or more; returns what all of them add.

    The weights that cost most are taken back in turn; each is offered the `reach` ranks before and after its own among
    those that cost least, and takes the first that pays. It ends when more than `failures` found none.
    """
    along_p = found.along(found.sums(pruned_p))
    gain_p, cost_p = 2 * along_p - found.square_p, 2 * along_p + found.square_p  # α of the pruned, β of the others
    P, Q = np.flatnonzero(pruned_p), np.flatnonzero(~pruned_p)
    if not len(P) or not len(Q):
        return 0.0
    P = P[np.argsort(-gain_p[P], kind="stable")]
    key_Q = cost_p[Q] - 2 * _crossed(found, P[0], Q)
    order = np.argsort(key_Q, kind="stable")
    if key_Q[order[0]] - gain_p[P[0]] > -tolerance:
        return 0.0
    return _swap_(found, pruned_p, P, Q[order], (gain_p, cost_p), (tolerance, reach, failures))


def _crossed(found: Influence, i: int, Q: Indices) -> Array:
    """w_j F_ij w_i for these j; zero where the layers differ."""
    first, last = found.starts[found.layer_p[i]], found.starts[found.layer_p[i] + 1]
    crossed = np.zeros(len(Q))
    own = slice(*np.searchsorted(Q, (first, last)))
    crossed[own] = (found.V_pN[first:last] @ found.V_pN[i])[Q[own] - first]
    return crossed


def _swap_(
    found: Influence, pruned_p: Bits, P: Indices, Q: Indices, worth: tuple[Array, Array], rule: tuple[float, int, int]
) -> float:
    """`worth` was found before the first swap; `drift` is what the swaps since then have added to u."""
    (gain_p, cost_p), (tolerance, reach, failures) = worth, rule
    V, layers = found.V_pN, found.layer_p
    drift_LN, taken, failed, total = np.zeros((len(found.starts) - 1, V.shape[1])), np.zeros(len(Q), bool), 0, 0.0
    for rank, i in enumerate(P[: len(Q) + reach]):
        window = np.arange(max(0, rank - reach), min(len(Q), rank + reach + 1))
        window = window[~taken[window]]
        j, own = Q[window], layers[i]
        V_i, V_j = V[i], V[j]
        gain = gain_p[i] + 2 * V_i @ drift_LN[own]
        costs = cost_p[j] + 2 * np.einsum("jn,jn->j", V_j, drift_LN[layers[j]])
        changes = costs - gain - 2 * np.where(layers[j] == own, V_j @ V_i, 0)
        hits = np.flatnonzero(changes <= -tolerance)
        if len(hits):
            hit = hits[0]
            taken[window[hit]] = True
            pruned_p[i], pruned_p[j[hit]] = False, True
            drift_LN[own] -= V_i
            drift_LN[layers[j[hit]]] += V_j[hit]
            total += float(changes[hit])
        else:
            failed += 1
            if failed > failures:
                break
    return total


def random_magnitude(weights_p: Tensor, k: int, random: torch.Generator) -> Tensor:
    """Keep the k largest, but each only among the weights of one of many random chunks (RMP).

    Every chunk keeps its share, rounded up, while k lasts: the last ones take up what rounding came to.
    """
    p = len(weights_p)
    chunks = max(1, min(math.isqrt(p), MOST_CHUNKS))
    order = torch.randperm(p, generator=random)
    chunk_p = torch.arange(p) * chunks // p
    by_size = weights_p.abs()[order].sort(descending=True, stable=True).indices
    by_chunk = by_size[chunk_p[by_size].sort(stable=True).indices]
    sizes = torch.bincount(chunk_p, minlength=chunks)
    quotas = (sizes * k + p - 1) // p
    quotas = (k - (quotas.cumsum(0) - quotas)).clamp_min(0).minimum(quotas)
    rank_p = torch.arange(p) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    keep_p = torch.zeros(p, dtype=torch.bool)
    keep_p[order[by_chunk[rank_p < quotas.repeat_interleave(sizes)]]] = True
    return keep_p
