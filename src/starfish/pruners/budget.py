"""A budget over the whole model: how many units each family loses when what they cost is to fall by a share.

Families lose their units in the order of their scores; a step takes one unit of each group (each head loses alike), and
the steps of all families go by score over cost until the budget is spent.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from starfish.activations import Recorder
from starfish.core import Anatomy, Images, Long, Unit, finish
from starfish.data import Some
from starfish.devices import to_device
from starfish.errors import UserError
from starfish.pruners.criteria import Scores
from starfish.pruners.units import masks_of
from starfish.small import cut_of, smaller
from starfish.speed import latencies
from starfish.statistics import heard, listening, path_of

COSTS = ("parameters", "flops", "latency")
IMAGE_BUDGETS = {"flops", "latency"}  # of the model at work
BATCH, ROUNDS = 8, 9  # images, timings of a model with and without half of a family
ROUNDING = 1e-9  # of the whole cost
Counts = Mapping[int, int]
"""Place of a family → how many units each of its groups loses."""


@dataclass(frozen=True)
class Budget:
    cost: str  # one of COSTS
    share: float  # of the cost of all units that is to go
    least: float  # share of a family that stays


@dataclass(frozen=True)
class Bill:
    """What families of units cost: so much for each entry of the tensors that they run through, and for each unit.

    A filter between two families pays for what is left of both, so their savings do not simply add up.
    """

    families: Sequence[Unit]
    prices: Mapping[str, float] = field(default_factory=dict)  # of an entry, by tensor
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    apart: Mapping[int, float] = field(default_factory=dict)  # of a unit beside its tensors, by place of the family

    def saved(self, counts: Counts) -> float:
        return self._left({}) - self._left(counts)

    def _left(self, counts: Counts) -> float:
        sizes = {name: list(self.shapes[name]) for name in self.prices}
        for place, unit in enumerate(self.families):
            for part in unit.parts:
                if part.parameter in sizes:
                    sizes[part.parameter][part.dim] -= counts.get(place, 0) * unit.groups
        tensors = sum(self.prices[name] * math.prod(size) for name, size in sizes.items())
        gone = {place: counts.get(place, 0) * self.families[place].groups for place in self.apart}
        return tensors + sum(cost * (self.families[place].count - gone[place]) for place, cost in self.apart.items())


def spend(
    dense: nn.Module, anatomy: Anatomy, families: Sequence[Unit], scores: Scores, images: Images | None, budget: Budget
) -> Long[Counts]:
    """How many units each group of each family loses."""
    if budget.cost == "parameters":
        bill = parameters_of(dense, families)
    elif images is None:
        raise UserError(f"the budget `{budget.cost}` looks at the model at work", "give images with --images")
    elif budget.cost == "flops":
        bill = yield from flops_of(dense, anatomy, families, images)
    else:
        bill = yield from milliseconds_of(dense, anatomy, families, images)
    return greedy(scores, bill, budget)


def greedy(scores: Scores, bill: Bill, budget: Budget) -> Counts:
    """Cheapest loss first, until the share of the whole cost is gone, and not a step longer."""
    steps = []
    for place, unit in enumerate(bill.families):
        size = unit.count // unit.groups
        losses = scores[place].view(unit.groups, -1).sort(dim=1).values.sum(0)
        most = size - max(1, round(budget.least * size))
        cost = max(bill.saved({place: 1}), 1e-30)
        steps += [(loss / cost, place, step) for step, loss in enumerate(losses[:most].tolist())]
    order = [place for _, place, _ in sorted(steps)]
    whole = bill.saved({place: unit.count // unit.groups for place, unit in enumerate(bill.families)})
    goal = (budget.share - ROUNDING) * whole
    counts = Counter(order[: bisect_left(range(len(order) + 1), goal, key=lambda n: bill.saved(Counter(order[:n])))])
    _check_spent(budget, whole, bill.saved(counts), goal)
    return {place: counts[place] for place in range(len(bill.families))}


def _check_spent(budget: Budget, whole: float, saved: float, goal: float) -> None:
    if budget.share and not whole:
        raise UserError(f"no unit costs any {budget.cost}, so none can be saved", "take another budget")
    if saved < goal:
        raise UserError(
            f"{budget.share:.4g} of the {budget.cost} of the units cannot go: {budget.least:.4g} of each family stays",
            f"give a sparsity of {int(1000 * saved / whole) / 1000} or less, or another --scope",
        )


def parameters_of(dense: nn.Module, families: Sequence[Unit]) -> Bill:
    """Every parameter that units run through costs 1."""
    held = dict(dense.named_parameters())
    names = {part.parameter for unit in families for part in unit.parts} & held.keys()
    return Bill(families, dict.fromkeys(sorted(names), 1.0), {name: held[name].shape for name in names})


def flops_of(dense: nn.Module, anatomy: Anatomy, families: Sequence[Unit], images: Images) -> Long[Bill]:
    """Multiply-adds of one image: each weight wherever its layer puts out, and q·k of all tokens in each dimension.

    As `speed.flops` counts them, without biases and norms.
    """
    held = {name: tensor for name, tensor in dense.named_parameters() if tensor.ndim > 1}
    prices: dict[str, float] = {}
    apart: dict[int, float] = {}
    ears = listening(dense, families)
    layers = dict.fromkeys(path_of(part) for unit in families if unit.kind != "qk" for part in unit.parts)
    with Recorder(ears, list(layers)) as recorder:
        for row, batch in heard(ears, anatomy, Some(images, [0]), families, "flops"):
            outputs = recorder.take()
            for place, unit in enumerate(families):
                tokens = batch.queries(unit).shape[2] if unit.kind == "qk" else 0
                apart[place] = float(tokens**2)  # of neurons and channels nothing
                for part in unit.parts:
                    if part.parameter in held:
                        rows = len(held[part.parameter])
                        prices[part.parameter] = float(tokens or outputs[path_of(part)].numel() // rows)
            yield row
    return Bill(families, prices, {name: held[name].shape for name in prices}, apart)


def milliseconds_of(dense: nn.Module, anatomy: Anatomy, families: Sequence[Unit], images: Images) -> Long[Bill]:
    """Time that goes with one unit: the model with and without half of its family, in turns; medians."""
    whole = listening(dense, ())
    count = min(BATCH, len(images))
    inputs = to_device(images.batch(list(range(count))), next(dense.parameters()).device)
    costs = []
    for place, unit in enumerate(families):
        less = smaller(whole, cut_of(half_of(dense, anatomy, unit), anatomy, dense))
        times = finish(latencies({"whole": whole, "less": less}, inputs, batches=[count], repeats=ROUNDS))
        gain = times["whole"][str(count)] - times["less"][str(count)]
        gone = unit.groups * (unit.count // unit.groups // 2)
        costs.append(max(gain, 0.0) / max(gone, 1))
        yield {"stage": "latency", "done": place + 1, "total": len(families)}
    return Bill(families, apart=dict(enumerate(costs)))


def half_of(dense: nn.Module, anatomy: Anatomy, unit: Unit) -> dict[str, Tensor]:
    """Masks of a family that lost the second half of each group."""
    order = torch.arange(unit.count).view(unit.groups, -1).flip(1).flatten().double()
    return masks_of(dense, anatomy, [unit], {0: order}, {0: unit.count // unit.groups // 2})
