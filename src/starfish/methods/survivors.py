"""What the quadratic model of the loss makes of the survivors of given masks, layer by layer or all at once.

N gradients, C weights of a parameter, p of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from starfish.core import Masks
from starfish.errors import UserError
from starfish.methods.quadratic import Block, blocks
from starfish.methods.regression import Regression, descend, sweep_

Rule = Literal["backsolve", "woodfisher", "cd", "first_order", "none"]
COUPLED = {"cd", "first_order"}  # these see all layers at once, the others a block at a time
Weights = dict[str, Tensor]
"""Parameter name → its weights, flat, in float64 on the CPU."""


@dataclass(frozen=True)
class Solver:
    """A rule and its settings; what it starts from are the weights at which the gradients were taken."""

    rule: Rule
    damp: float  # λ, CHITA's ℓ
    block: int = 0  # consecutive weights of a layer; of rules that see them one block at a time
    first_order: float = 0.0  # factor of Σ gradients in α
    scale: float = 1.0  # of the whole update
    steps: int = 10  # of a rule that has steps

    def __post_init__(self) -> None:
        if self.damp <= 0:
            raise UserError(f"the damping is {self.damp}", "give more than 0 (damp, or ridge)")
        if self.block < 1 and self.rule not in COUPLED:
            raise UserError(f"`block` is {self.block}", "give 1 or more weights")
        if self.steps < 1:
            raise UserError(f"the number of steps is {self.steps}", "give 1 or more")

    def layer(self, G_NC: Tensor, dense_C: Tensor, keep_C: Tensor) -> tuple[Tensor, float, float]:
        """New weights of a parameter, and the model's value where only the mask is applied and at them."""
        w_C, before, after = torch.empty_like(dense_C), 0.0, 0.0
        for place, block in blocks(G_NC, dense_C, self.block, self.damp, self.first_order):
            w_C[place] = self._update(block, keep_C[place])
            before += block.value(block.masked(keep_C[place]))
            after += block.value(w_C[place])
        return w_C, before, after

    def descending(
        self, gradients: Mapping[str, Tensor], dense: Weights, masks: Masks
    ) -> Iterator[tuple[Weights, float]]:
        """Masked weights and the value of the model, layers coupled, at the start and after each step."""
        problem = regression(list(gradients.values()), torch.cat(list(dense.values())), self.damp, self.first_order)
        keep_p, count = torch.cat([masks[name].flatten().cpu() for name in dense]), len(problem.X[0])
        change_p = torch.where(keep_p, 0.0, -problem.dense_p)
        r_N = problem.times(-change_p)
        for step in range(self.steps + 1):
            if step and self.rule == "cd":
                sweep_(problem, change_p, r_N, keep_p)
            elif step:
                w_p, r_N = descend(problem, problem.dense_p + change_p, r_N, keep_p)
                change_p = w_p - problem.dense_p
            w_p = torch.where(keep_p, problem.dense_p + change_p, 0.0)
            yield self._split(w_p, dense), problem.value(w_p, r_N) / count

    def all_layers(self, gradients: Mapping[str, Tensor], dense: Weights, masks: Masks) -> tuple[Weights, float, float]:
        """New weights of all parameters; the model's value summed over them."""
        if self.rule in COUPLED:
            steps = self.descending(gradients, dense, masks)
            weights, start = next(steps)
            end = start
            for weights, end in steps:  # noqa: B007  # the last ones count; all of them at once would be many
                pass
            return weights, start, end
        weights, values = Weights(), []
        for name, w_C in dense.items():
            weights[name], *value = self.layer(gradients[name], w_C, masks[name].flatten().cpu())
            values.append(value)
        return weights, sum(value[0] for value in values), sum(value[1] for value in values)

    def _update(self, block: Block, keep_C: Tensor) -> Tensor:
        if self.rule == "woodfisher":
            return block.woodfisher(keep_C, self.scale)
        if self.rule == "backsolve":
            return block.back_solve(keep_C, self.scale)
        return block.masked(keep_C)

    def _split(self, w_p: Tensor, like: Weights) -> Weights:
        parts = torch.split(w_p, [len(w_C) for w_C in like.values()])
        return dict(zip(like, parts, strict=True))


def regression(X: list[Tensor], dense_p: Tensor, damp: float, first_order: float) -> Regression:
    """Of all parameters, given their gradients."""
    alpha_p = first_order * torch.cat([x.double().sum(0) for x in X]) if first_order else None
    return Regression(tuple(X), dense_p, len(X[0]) * damp, alpha_p)


def weights_of(model: nn.Module, names: list[str]) -> Weights:
    return {name: model.get_parameter(name).detach().flatten().cpu().double() for name in names}


@torch.no_grad()
def write_(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """In each parameter's own precision; weights that did not change stay as they are, bit for bit."""
    for name, w_C in weights.items():
        parameter = model.get_parameter(name)
        parameter.copy_(w_C.view(parameter.shape))


def schedule(final: float, start: float, stages: int) -> list[float]:
    """What is gone after each stage: fast at first, then slower, s + (s₀ − s)(1 − t/(T − 1))³ (7.3)."""
    if stages < 1:
        raise UserError(f"`stages` is {stages}", "give 1 or more")
    if not 0 <= start < 1:
        raise UserError(f"`start` is {start}", "give the fraction that the first stage removes, from 0 to below 1")
    first = min(start, final)
    return [final + (first - final) * (1 - stage / (stages - 1)) ** 3 for stage in range(stages - 1)] + [final]
