"""A budget over the whole model: how many units each family loses when what they cost is to fall by a share.

Families lose their units in the order of their scores; a step takes one unit of each group (each head loses alike), and
the steps of all families go by score over cost until the budget is spent.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from starfish.activations import call
from starfish.core import Anatomy, Images, Long, Unit
from starfish.devices import to_device
from starfish.errors import UserError
from starfish.pruners.criteria import Scores
from starfish.pruners.units import masks_of
from starfish.slim import cut_of, smaller
from starfish.statistics import heard, listening

COSTS = ("parameters", "flops", "latency")
ROUNDS = 9  # timings of a model with and without half of a family
Counts = dict[int, int]
"""Place of a family → how many units each of its groups loses."""


@dataclass(frozen=True)
class Budget:
    cost: str  # one of COSTS
    share: float  # of the cost of all units that is to go
    least: float  # share of a family that stays


def spend(
    dense: nn.Module, anatomy: Anatomy, families: Sequence[Unit], scores: Scores, images: Images | None, budget: Budget
) -> Long[Counts]:
    """How many units each group of each family loses."""
    if budget.cost == "parameters":
        costs = [parameters_of(dense, unit) for unit in families]
    elif images is None:
        raise UserError(f"the budget `{budget.cost}` looks at the model at work", "give images with --images")
    elif budget.cost == "flops":
        costs = yield from flops_of(dense, anatomy, families, images)
    else:
        costs = yield from milliseconds_of(dense, anatomy, families, images)
    return greedy(families, scores, costs, budget)


def greedy(families: Sequence[Unit], scores: Scores, costs: Sequence[float], budget: Budget) -> Counts:
    """Cheapest loss first, until the share of the whole cost is gone; `costs` are of one unit of each family."""
    steps = []
    for place, unit in enumerate(families):
        size = unit.count // unit.groups
        losses = scores[place].view(unit.groups, -1).sort(dim=1).values.sum(0)
        most = size - max(1, round(budget.least * size))
        steps += [
            (float(loss) / max(costs[place], 1e-30), place, step) for step, loss in enumerate(losses[:most].tolist())
        ]
    goal = budget.share * sum(cost * unit.count for cost, unit in zip(costs, families, strict=True))
    counts: Counts = dict.fromkeys(range(len(families)), 0)
    for _, place, _ in sorted(steps):
        if goal <= 0:
            break
        counts[place] += 1
        goal -= costs[place] * families[place].groups
    return counts


def parameters_of(dense: nn.Module, unit: Unit) -> float:
    """Parameters that go with one unit."""
    held = dict(dense.named_parameters())
    tensors = [held[part.parameter].select(part.dim, 0) for part in unit.parts if part.parameter in held]
    return float(sum(tensor.numel() for tensor in tensors))


def flops_of(dense: nn.Module, anatomy: Anatomy, families: Sequence[Unit], images: Images) -> Long[list[float]]:
    """Multiply-adds that go with one unit, on one image: its weights at every position, and products of tokens."""
    one = _First(images)
    costs = [0.0] * len(families)
    for row, batch in heard(listening(dense, families), anatomy, one, families, "flops"):
        for place, unit in enumerate(families):
            if unit.kind == "qk":
                tokens = batch.queries(unit).shape[2]
                costs[place] = parameters_of(dense, unit) * tokens + tokens**2
            else:
                rows = batch.rows(unit, unit.readers[0]).shape[1]
                costs[place] = parameters_of(dense, unit) * rows
        yield row
    return costs


@dataclass(frozen=True)
class _First:
    """The first image alone."""

    images: Images
    labels: Tensor | None = None

    def __len__(self) -> int:
        return 1

    def batch(self, indices: Sequence[int]) -> Any:
        return self.images.batch(indices)


def milliseconds_of(dense: nn.Module, anatomy: Anatomy, families: Sequence[Unit], images: Images) -> Long[list[float]]:
    """Time that goes with one unit: the model with and without half of its family, in turns; medians."""
    device = next(dense.parameters()).device
    inputs = to_device(images.batch(list(range(min(8, len(images))))), device)
    costs = []
    for place, unit in enumerate(families):
        masks = half_of(dense, anatomy, unit)
        small = smaller(dense, cut_of(masks, anatomy, dense))
        pairs = [(_timed(dense, inputs), _timed(small, inputs)) for _ in range(ROUNDS)][1:]
        gain = float(torch.tensor([whole - less for whole, less in pairs]).median())
        costs.append(max(gain, 0.0) / max(unit.count // 2, 1))
        yield {"stage": "latency", "done": place + 1, "total": len(families)}
    return costs


def half_of(dense: nn.Module, anatomy: Anatomy, unit: Unit) -> dict[str, Tensor]:
    """Masks of a family that lost the second half of each group."""
    order = torch.arange(unit.count).view(unit.groups, -1).flip(1).flatten().double()
    return masks_of(dense, anatomy, [unit], {0: order}, {0: unit.count // unit.groups // 2})


@torch.inference_mode()
def _timed(model: nn.Module, inputs: Any) -> float:
    start = time.perf_counter()
    call(model, inputs)
    return 1000 * (time.perf_counter() - start)
