"""WoodFisher's masks: what the loss loses by each weight alone, others adapting to it (methods.md 5)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from starfish.core import Anatomy, Images, Long, Masks, Pruner
from starfish.errors import UserError
from starfish.gradients import collecting, settled
from starfish.methods.quadratic import blocks
from starfish.pruners.flat import flat
from starfish.pruners.select import check_pattern, check_sparsity, rows_of, select, whole
from starfish.scopes import default_scope


@dataclass(frozen=True)
class ByWoodFisher(Pruner):
    """Remove the weights of least w²/[F⁻¹], the loss by the empirical Fisher matrix of gradients (WoodFisher)."""

    sparsity: float = 0.5  # fraction removed of the weights in the scope
    scope: str = ""  # which weights; empty takes the architecture's own default
    pattern: str = "unstructured"  # or N:M, N kept of every M consecutive inputs of a row
    per: Literal["global", "layer", "row"] = "global"  # what is compared with what (unstructured only)
    gradients: int = 400  # at most; no image is in two of them
    batch: int = 1  # images of each gradient
    damp: float = 1e-5  # λ in F = λI + GᵀG/N
    block: int = 10_000  # consecutive weights of a layer that know of each other
    seed: int = 0  # of the order of the images

    def needs(self) -> frozenset[str]:
        return frozenset({"images", "labels"})

    def settle(self, anatomy: Anatomy, images: Images | None) -> ByWoodFisher:
        gradients, batch = settled(images, self.gradients, self.batch) if images else (self.gradients, self.batch)
        return replace(self, scope=self.scope or default_scope(anatomy), gradients=gradients, batch=batch)

    def choosing(self, dense: nn.Module, anatomy: Anatomy, images: Images | None) -> Long[Masks]:
        assert images is not None
        check_sparsity(self.sparsity)
        check_pattern(self.pattern, self.sparsity, ByWoodFisher.sparsity)
        for name, value in (("damp", self.damp), ("block", self.block)):
            if value <= 0:
                raise UserError(f"`{name}` is {value}", "give more than 0")
        rows = rows_of(dense, anatomy, self.scope)
        gradients = yield from collecting(
            dense, list(rows), images, gradients=self.gradients, batch=self.batch, seed=self.seed
        )
        shape = flat(dense, rows)
        scores = {}
        for name, G_NC in zip(rows, shape.columns(gradients), strict=True):
            weight = dense.get_parameter(name).detach()[rows[name]]
            score_C = scores_of(G_NC, weight.flatten().cpu(), self.block, self.damp)
            scores[name] = score_C.view(weight.shape).to(weight.device)
            yield {"stage": "scores", "done": len(scores), "total": len(rows)}
        return whole(select(scores, self.sparsity, self.pattern, self.per, anatomy), rows, dense)


def scores_of(G_NC: Tensor, dense_C: Tensor, size: int, damp: float) -> Tensor:
    """ρ = w²/[F⁻¹]_qq, in float32 for the devices that have no float64."""
    parts = [block.dense_C.square() / block.inverse_diagonal() for _, block in blocks(G_NC, dense_C, size, damp, 0.0)]
    return torch.cat(parts).float()
