"""Closed forms for a fixed mask, layer by layer: restricted least squares and SparseGPT's update (methods.md 4).

G groups, O rows and I columns of a weight as a matrix; see grams.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from starfish.core import FromDense, Job, Row
from starfish.data import spread
from starfish.grams import Gram, Inputs, Sweep, as_matrix, as_weight, groups_of
from starfish.masks import restart_
from starfish.methods.solves import damped, errors, restricted_in_groups, sparsegpt, upper

ROWS = 1024  # of a layer at a time
TINY = 1e-300


@dataclass(frozen=True)
class LeastSquares(FromDense):
    """Give each layer's surviving weights the least squared error of what it puts out (OBS, all weights at once)."""

    inputs: Literal["auto", "dense", "block", "layer"] = (
        "auto"  # what layers read: as in the dense model, or behind the
    )
    # blocks, or layers, healed before; auto: dense with attention, else layer
    damp: float = 0.01  # of the mean diagonal of the Gram matrix
    images: int = 512  # of which statistics are taken, spread over all there are; 0: all
    memory_gb: float = 1.0  # of Gram matrices at a time, with inputs=dense; what needs more takes another pass

    def settle(self, job: Job) -> LeastSquares:
        """Behind others a layer is fitted to what it did before them. In a convolutional network that is much the best,
        in a vision transformer it ended below the mask alone (benchmarks/rivals.py, deit-0.7-layer)."""
        best: Inputs = "dense" if job.anatomy.attends else "layer"
        return replace(self, inputs=best if self.inputs == "auto" else self.inputs)

    def fit(self, job: Job) -> Iterator[Row]:
        yield from _layer_by_layer(job, self.settle(job), _restricted, cross=True)


@dataclass(frozen=True)
class SparseGPT(FromDense):
    """Pass over the columns of every layer, the weights to the right making up for those that go (SparseGPT)."""

    inputs: Inputs = "block"  # what layers read: as in the dense model, or behind the blocks, or layers, healed before
    damp: float = 0.01  # of the mean diagonal of the Gram matrix
    block: int = 128  # columns whose corrections are applied at a time
    images: int = 512  # of which statistics are taken, spread over all there are; 0: all
    memory_gb: float = 1.0  # of Gram matrices at a time, with inputs=dense; what needs more takes another pass

    def fit(self, job: Job) -> Iterator[Row]:
        yield from _layer_by_layer(job, self, lambda H_GII: partial(_swept, upper(H_GII), self.block), cross=False)


Solver = Callable[[Tensor], Callable[[Tensor, Tensor, Tensor], Tensor]]
"""H_GII, damped → a function of (W_GOI dense, B_GOI, mask_GOI) that gives new rows, of small w H wᵀ − 2 w·b."""


def _restricted(H_GII: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda W_GOI, B_GOI, mask_GOI: restricted_in_groups(H_GII, B_GOI, mask_GOI, W_GOI)


def _swept(U_GII: Tensor, block: int, W_GOI: Tensor, B_GOI: Tensor, mask_GOI: Tensor) -> Tensor:
    """Towards what the dense weights would make of the same inputs, so that B is not looked at."""
    return sparsegpt(W_GOI, U_GII, lambda part, _, __: mask_GOI[..., part], block=block)[0]


def _layer_by_layer(job: Job, method: LeastSquares | SparseGPT, solver: Solver, *, cross: bool) -> Iterator[Row]:
    """One row a stage: `before` and `after` are the error as a share of what the layer puts out, as damped.

    With `cross` it is the error to what the dense layer puts out in the dense model, which layers without zeros, too,
    can make smaller; else to what it would put out where it stands.
    """
    sequential = method.inputs != "dense"
    weights = {name: mask for name, mask in job.masks.items() if mask.ndim > 1}
    pruned = [name for name, mask in weights.items() if not bool(mask.all())]
    names = [*weights] if pruned and sequential and cross else pruned
    student = deepcopy(job.model) if sequential else None
    sweep = Sweep(
        job.dense, job.anatomy, spread(job.images, method.images), names,
        student=student, cross=cross, by_block=method.inputs == "block",
        memory_gb=method.memory_gb, cache=job.cache,
    )  # fmt: skip
    stages, done = sweep.stages(), int(job.state.get("step", 0))
    if not done:
        restart_(job.model, job.dense, job.masks, job.masks)
    if student is not None:  # what is still to come has its dense weights: a block is heard before any of it changes
        restart_(student, job.dense, [name for stage in stages[done:] for name in stage], {})
    for step in range(done, len(stages)):
        grams = yield from sweep.grams(stages[step:])
        found = torch.stack([_solve_(job, gram, solver, method.damp) for gram in grams.values()]).mean(0)
        if student is not None:
            restart_(student, job.model, stages[step], {})
        job.state["step"] = step + 1
        yield {"step": step + 1, "steps": len(stages), "layer": ", ".join(stages[step]),
               "before": float(found[0]), "after": float(found[1])}  # fmt: skip


@torch.no_grad()
def _solve_(job: Job, gram: Gram, solver: Solver, damp: float) -> Tensor:
    """Write one layer's new weights; its error before and after."""
    weight, groups = job.model.get_parameter(gram.name), groups_of(job.dense, gram.name)
    dense_GOI = as_matrix(job.dense.get_parameter(gram.name), groups)
    kept_GOI = as_matrix(job.masks[gram.name], groups)
    own_GII = gram.take("own")
    read_GI = own_GII.diagonal(dim1=1, dim2=2).clone()
    cross_GII, energy_GO = (gram.take(which) if which in gram.sums else None for which in ("cross", "energy"))
    H_GII = damped(own_GII, damp)
    del own_GII  # as large as H
    ridge_GI = H_GII.diagonal(dim1=1, dim2=2) - read_GI
    solve = solver(H_GII)
    new_GOI, total = torch.zeros_like(dense_GOI), H_GII.new_zeros(3)
    for rows in (slice(start, start + ROWS) for start in range(0, dense_GOI.shape[1], ROWS)):
        mask_GOI = kept_GOI[:, rows].to(H_GII.device)
        W_GOI = dense_GOI[:, rows].to(H_GII) * (read_GI[:, None] > 0)  # what was never read counts for nothing
        B_GOI = W_GOI @ H_GII
        constant_GO = (B_GOI * W_GOI).sum(-1)
        if cross_GII is not None and energy_GO is not None:  # the damping draws towards the dense weights
            ridge_GOI = W_GOI * ridge_GI[:, None]
            constant_GO = energy_GO[:, rows] + (ridge_GOI * W_GOI).sum(-1)
            W_GOI = dense_GOI[:, rows].to(H_GII)
            B_GOI = W_GOI @ cross_GII.mT + ridge_GOI
        found_GOI = solve(W_GOI, B_GOI, mask_GOI) * mask_GOI
        new_GOI[:, rows] = found_GOI.to(new_GOI)
        pair = [errors(each, H_GII, B_GOI, constant_GO).sum() for each in (W_GOI * mask_GOI, found_GOI)]
        total += torch.stack([*pair, constant_GO.sum()])
    weight.copy_(as_weight(new_GOI, weight))
    return (total[:2] / total[2].clamp_min(TINY)).cpu()
