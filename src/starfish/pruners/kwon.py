"""Kwon et al. 2022: whole heads and neurons go under a budget of multiply-adds, by Fisher information (methods.md 11).

S mini-batches, U units of a family (heads, neurons …), C entries of a family: the dimensions of all heads, or as U.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from starfish.activations import logits
from starfish.anatomy.heads import heads_of
from starfish.core import Anatomy, Images, Long, Masks, Pruner, Unit
from starfish.data import Some
from starfish.devices import to_device
from starfish.errors import UserError, listed
from starfish.gradients import loss_sum
from starfish.pruners.budget import ROUNDING, Bill, flops_of
from starfish.pruners.select import check_sparsity
from starfish.pruners.units import masks_of
from starfish.statistics import BATCH, Heard, audible, ears_at, exact, heard, listening

KINDS = {"heads": "head", "mlp": "neuron", "qk": "qk", "channels": "channel"}


@dataclass(frozen=True)
class ByKwon(Pruner):
    """Remove whole heads, neurons or channels under a budget of multiply-adds, by Fisher information (Kwon et al.).

    One unit at least of each layer stays.
    """

    sparsity: float = 0.5  # share of the multiply-adds of all units of the scope that is to go
    scope: str = ""  # heads, mlp, channels, qk, joined by +; empty: all that there are but qk
    images: int = 2048  # drawn at random; 0: all
    batch: int = 32  # images of one gradient: the Fisher information is a sum over batches
    rearrange: bool = True  # which units of a family go, given how many, with regard to each other
    seed: int = 0  # of the drawing

    def needs(self) -> frozenset[str]:
        return frozenset({"images", "labels"})

    def structured(self) -> bool:
        return True

    def sees_channels(self) -> bool:
        return not self.scope or "channels" in self.scope

    def settle(self, anatomy: Anatomy, images: Images | None) -> ByKwon:
        return replace(self, scope="+".join(self._names(anatomy)))

    def choosing(self, dense: nn.Module, anatomy: Anatomy, images: Images | None) -> Long[Masks]:
        self._check()
        families = self._families(dense, anatomy)
        if images is None or images.labels is None:
            raise UserError(
                "this pruner takes gradients of the loss, and the images have no labels",
                "give a folder with one sub-folder a class, or use another pruner",
            )
        costs = yield from costs_of(dense, anatomy, families, images)
        gradients = yield from mask_gradients(dense, anatomy, families, images, self._batches(len(images)))
        counts = spent(families, [g_SU.square().sum(0) for g_SU in gradients], costs, self.sparsity)
        dead = [_least(unit, g_SU, counts[place], self.rearrange)
                for place, (unit, g_SU) in enumerate(zip(families, gradients, strict=True))]  # fmt: skip
        return _masks(dense, anatomy, families, dead)

    def _check(self) -> None:
        check_sparsity(self.sparsity)
        if self.batch < 1 or self.images < 0:
            name, least = ("batch", 1) if self.batch < 1 else ("images", 0)
            raise UserError(f"`{name}` is {getattr(self, name)}", f"give {least} or more")

    def _names(self, anatomy: Anatomy) -> list[str]:
        """The parts of the scope, each once, in the order of KINDS."""
        kinds = {unit.kind for unit in anatomy.units}
        kinds |= {"head"} if "qk" in kinds else set()
        there = [name for name, kind in KINDS.items() if kind in kinds]
        wanted = self.scope.replace(",", "+").split("+") if self.scope else [name for name in there if name != "qk"]
        unknown = [name for name in wanted if name not in there]
        if unknown or not wanted:
            has = f"it has {listed(there)}" if there else "it has none"
            name = f"no `{unknown[0]}` that" if unknown else "no heads, neurons or channels that"
            raise UserError(f"the model has {name} can go whole", has)
        if {"heads", "qk"} <= {*wanted}:
            raise UserError("a head takes its query-key dimensions with it", "give a scope with heads or with qk")
        return [name for name in there if name in wanted]

    def _families(self, dense: nn.Module, anatomy: Anatomy) -> list[Unit]:
        kinds = {KINDS[name] for name in self._names(anatomy)}
        heads = heads_of(anatomy, dense) if "head" in kinds else []
        if "head" in kinds and not heads:
            raise UserError("no layer was found that reads the heads of an attention", "give another --scope: mlp, qk")
        others = [unit for unit in anatomy.units if unit.kind in kinds and audible(dense, unit)]
        return [*heads, *sorted(others, key=lambda unit: unit.kind == "channel")]

    def _batches(self, size: int) -> list[list[int]]:
        order = torch.randperm(size, generator=torch.Generator().manual_seed(self.seed)).tolist()
        drawn = order[: self.images or size]
        return [drawn[start : start + self.batch] for start in range(0, len(drawn), self.batch)]


def mask_gradients(
    dense: nn.Module, anatomy: Anatomy, families: Sequence[Unit], images: Images, batches: Sequence[Sequence[int]]
) -> Long[list[Tensor]]:
    """g_SU of each family: derivatives of each batch's mean loss by factors of 1 on what the units put out (11.1)."""
    ears = listening(dense, _attentions(dense, anatomy))
    ears.requires_grad_(True)  # a graph to go back through; of the weights none is asked for
    found = [torch.zeros(len(batches), _gates(unit), dtype=torch.float64) for unit in families]
    total, done = sum(map(len, batches)), 0
    with ears_at(ears, families) as taps:
        for step, batch in enumerate(batches):
            for start in range(0, len(batch), BATCH):
                indices = list(batch[start : start + BATCH])
                with torch.enable_grad():  # not around the yield
                    loss = _loss(ears, images, indices) / len(batch)
                heard_batch = Heard(ears, taps, anatomy.layouts, len(indices))
                effect = _effects(heard_batch, loss)
                for g_SU, unit in zip(found, families, strict=True):
                    g_C = exact(heard_batch.summed(effect, unit)).sum(0).cpu()
                    g_SU[step] += g_C.view(g_SU.shape[1], -1).sum(1)
                done += len(indices)
                yield {"stage": "mask gradients", "done": done, "total": total}
    return found


def _gates(unit: Unit) -> int:
    return unit.groups if unit.kind == "head" else unit.count


def _loss(ears: nn.Module, images: Images, indices: Sequence[int]) -> Tensor:
    """The cross-entropies, summed."""
    assert images.labels is not None
    answer_BK = exact(logits(ears, to_device(images.batch(indices), next(ears.parameters()).device)))
    return loss_sum(answer_BK, images.labels[list(indices)])


def _effects(batch: Heard, loss: Tensor) -> dict[str, Tensor]:
    """Activation times gradient, where units are heard."""
    queries = {name: x for name, x in batch.taps.out_of.items() if name.endswith(".queries")}
    tensors = {**batch.taps.into, **queries}
    gradients = torch.autograd.grad(loss, [*tensors.values()], allow_unused=True)
    return {name: torch.zeros_like(x) if g is None else x.detach() * g
            for (name, x), g in zip(tensors.items(), gradients, strict=True)}  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """Multiply-adds of one image that go with the units of some families; a step takes one unit of each group."""

    steps: Sequence[int]  # of each family
    step: Sequence[float]  # of each family that is not one of channels, which come last
    channels: Bill  # a filter between two families is paid for by both

    def saved(self, counts: Mapping[int, int]) -> float:
        """When each family loses so many steps."""
        apart = sum(cost * counts.get(place, 0) for place, cost in enumerate(self.step))
        later = {place - len(self.step): count for place, count in counts.items() if place >= len(self.step)}
        return apart + (self.channels.saved(later) if later else 0.0)


def costs_of(dense: nn.Module, anatomy: Anatomy, families: Sequence[Unit], images: Images) -> Long[Costs]:
    """For a head 4·T·d·d_h + 2·T²·d_h, for a neuron 2·T·d (11.2); channels by their weights, as a budget of flops."""
    channels = [unit for unit in families if unit.kind == "channel"]
    others = [unit for unit in families if unit.kind != "channel"]
    assert [*others, *channels] == list(families)
    bill = (yield from flops_of(dense, anatomy, channels, images)) if channels else Bill(())
    queries = {unit.holder: unit for unit in _attentions(dense, anatomy)}
    step: list[float] = []
    watched = [*families, *(unit for unit in queries.values() if unit not in families)]
    for row, batch in heard(
        listening(dense, [*queries.values()]), anatomy, Some(images, [0]), watched, "multiply-adds"
    ):
        step = [_cost(dense, unit, queries.get(unit.holder), batch) for unit in others]
        yield row
    return Costs([_steps(unit) for unit in families], step, bill)


def _attentions(dense: nn.Module, anatomy: Anatomy) -> list[Unit]:
    return [unit for unit in anatomy.units if unit.kind == "qk" and audible(dense, unit)]


def _cost(dense: nn.Module, unit: Unit, queries: Unit | None, batch: Heard) -> float:
    """Of one step of heads, neurons or query-key dimensions."""
    if queries is None:
        tokens = batch.rows(unit, unit.readers[0]).shape[1]
        attended = tokens if unit.kind == "head" else 0
    else:
        q = batch.taps.out_of[f"{queries.holder}.queries"]
        tokens, attended = q[..., 0].numel(), q.shape[1]  # of its window
    made = [unit, queries] if unit.kind == "head" and queries else [unit]
    entries = [one.count / one.groups if unit.kind == "head" else one.groups for one in made]
    return tokens * sum(n * (_weights(dense, one) + attended) for n, one in zip(entries, made, strict=True))


def _weights(dense: nn.Module, unit: Unit) -> float:
    """Of one entry, whatever makes or reads it."""
    held = [(dense.get_parameter(part.parameter), part.dim) for part in unit.parts]
    return sum(weight.numel() / weight.shape[dim] for weight, dim in held if weight.ndim > 1)


def _steps(unit: Unit) -> int:
    return _gates(unit) // _groups(unit)


def _groups(unit: Unit) -> int:
    """Groups that must lose as many units each: heads of their query-key dimensions."""
    return unit.groups if unit.kind == "qk" else 1


def spent(families: Sequence[Unit], importance: Sequence[Tensor], costs: Costs, share: float) -> list[int]:
    """How many steps each family loses, so that the share of all their multiply-adds goes; the last one stays."""
    losses = [I_U.view(_groups(unit), -1).sort(dim=1).values.sum(0).tolist()
              for unit, I_U in zip(families, importance, strict=True)]  # fmt: skip
    heads = [place for place, unit in enumerate(families) if unit.kind == "head"]
    others = [place for place in range(len(families)) if place not in heads]
    pools = [_Pool.of(losses, places, costs) for places in (heads, others)]
    whole = costs.saved(dict(enumerate(costs.steps)))
    found = search(pools[0].lost, pools[0].saved, pools[1].lost, pools[1].saved, (share - ROUNDING) * whole)
    if found is None:
        most = sum(float(pool.saved[-1]) for pool in pools) / whole
        raise UserError(
            f"{share:.4g} of the multiply-adds of the units cannot go: one of each family stays",
            f"give a sparsity of {int(1000 * most) / 1000} or less, or another --scope",
        )
    counts = Counter([*pools[0].order[: found[0]], *pools[1].order[: found[1]]])
    return [counts[place] for place in range(len(families))]


@dataclass(frozen=True)
class _Pool:
    """Families that lose their steps in one order: the least important for what it costs goes first."""

    order: list[int]  # places of families
    lost: Tensor  # of importance, by the first steps of the order
    saved: Tensor

    @classmethod
    def of(cls, losses: Sequence[Sequence[float]], places: Sequence[int], costs: Costs) -> _Pool:
        steps = sorted((loss / max(costs.saved({place: 1}), 1e-30), place, step)
                       for place in places for step, loss in enumerate(losses[place][:-1]))  # fmt: skip
        order = [place for _, place, _ in steps]
        lost = torch.tensor([0.0, *(losses[place][step] for _, place, step in steps)], dtype=torch.float64)
        return cls(order, lost.cumsum(0), torch.tensor([*_prefixes(order, costs)], dtype=torch.float64))


def _prefixes(order: Sequence[int], costs: Costs) -> Iterator[float]:
    """What is saved by none, by the first, by the first two … of these steps."""
    counts: Counter[int] = Counter()
    yield 0.0
    for place in order:
        counts[place] += 1
        yield costs.saved(counts)


def search(lost_heads: Tensor, saved_heads: Tensor, lost: Tensor, saved: Tensor, goal: float) -> tuple[int, int] | None:
    """For every number of heads that go, the fewest others that then must; of these pairs the one that loses least.

    All given for none, one, two …; None where all is not enough (11.2).
    """
    needed = torch.searchsorted(saved, goal - saved_heads)
    losses = lost_heads + torch.cat([lost, lost.new_full((1,), torch.inf)])[needed]
    best = int(losses.argmin())
    return None if needed[best] == len(saved) else (best, int(needed[best]))


def _least(unit: Unit, g_SU: Tensor, count: int, rearrange: bool) -> Tensor:
    """(U,): which units go, so many of each group."""
    dead = torch.zeros(_groups(unit), g_SU.shape[1] // _groups(unit), dtype=torch.bool)
    for group, g_SW in enumerate(g_SU.view(len(g_SU), *dead.shape).unbind(1)):
        least = g_SW.square().sum(0).sort(stable=True).indices
        dead[group, rearranged(g_SW, least, count) if rearrange else least[:count]] = True
    return dead.flatten()


def rearranged(g_SU: Tensor, ascending: Tensor, count: int) -> Tensor:
    """As many units, with a small ‖Σ g_u‖²: the loss by the Fisher information when they go together (11.3).

    Every other unit comes in once, in ascending importance, and the one goes out without which the rest is smallest.
    """
    if not 0 < count < len(ascending):
        return ascending[:count]
    chosen = ascending[: count + 1].clone()
    members_US = g_SU.T[chosen].contiguous()
    for unit in [*ascending[count:].tolist()]:
        chosen[-1], members_US[-1] = unit, g_SU[:, unit]
        leaving = int((members_US.sum(0) - members_US).square().sum(1).argmin())
        chosen[leaving], members_US[leaving] = chosen[-1], members_US[-1].clone()
    return chosen[:-1]


def _masks(dense: nn.Module, anatomy: Anatomy, families: Sequence[Unit], dead: Sequence[Tensor]) -> Masks:
    """A head goes with its queries and keys, its values and the columns that read them; biases stay."""
    queries = {unit.holder: unit for unit in anatomy.units if unit.kind == "qk"}
    units = [(unit, dead_U) for unit, dead_U in zip(families, dead, strict=True)]
    units += [(queries[unit.holder], dead_U) for unit, dead_U in units if unit.kind == "head"]
    alive = {place: ~dead_U.repeat_interleave(unit.count // len(dead_U)) for place, (unit, dead_U) in enumerate(units)}
    counts = {place: int((~alive_C).sum()) for place, alive_C in alive.items()}
    scores = {place: alive_C.double() for place, alive_C in alive.items()}
    return masks_of(dense, anatomy, [replace(unit, groups=1) for unit, _ in units], scores, counts)
