"""Structured pruning: whole units go, so that the model can be made smaller (methods.md 1, 10.1, 15.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from starfish.core import Anatomy, Images, Long, Masks, Pruner, Unit
from starfish.errors import UserError, listed
from starfish.pruners.budget import COSTS, IMAGE_BUDGETS, Budget, Counts, spend
from starfish.pruners.criteria import CRITERIA, NEEDS_IMAGES, QK_CRITERIA, Scores, scores_of
from starfish.pruners.units import masks_of

KINDS = {"mlp": "neuron", "qk": "qk", "channels": "channel"}
LEAST_SHARE = 0.1  # of a family stays under a budget of the whole model


@dataclass(frozen=True)
class Structured(Pruner):
    """Remove whole MLP neurons, query-key dimensions or channels, so that the model can be cut smaller."""

    sparsity: float = 0.5  # fraction of the units of each family; with a budget, of the cost of all of them
    scope: str = ""  # mlp, qk, channels, joined by +; empty: all that there are
    criterion: str = "auto"  # what a unit is worth; auto: mismatch with images, weight without
    qk_criterion: str = "auto"  # of query-key dimensions: pairs, token, weight, mismatch; auto: as criterion goes
    mlp: float | None = None  # the sparsity of neurons alone
    qk: float | None = None  # of query-key dimensions alone
    channels: float | None = None  # of channels alone
    budget: Literal["uniform", "parameters", "flops", "latency"] = (
        "uniform"  # uniform: each family loses the same share
    )
    draws: int = 2  # random probes of the mismatch criterion
    seed: int = 0  # of the probes

    def needs(self) -> frozenset[str]:
        wanted = {self.criterion, self.qk_criterion}
        return frozenset({"images"} if wanted & NEEDS_IMAGES or self.budget in IMAGE_BUDGETS else ())

    def structured(self) -> bool:
        return True

    def sees_channels(self) -> bool:
        return not self.scope or "channels" in self.scope

    def settle(self, anatomy: Anatomy, images: Images | None) -> Structured:
        criteria = self._criteria(images is not None)
        kinds = {unit.kind for unit in self._families(anatomy)}
        scope = "+".join(name for name, kind in KINDS.items() if kind in kinds)
        return replace(self, scope=scope, criterion=criteria["neuron"], qk_criterion=criteria["qk"])

    def choosing(self, dense: nn.Module, anatomy: Anatomy, images: Images | None) -> Long[Masks]:
        families = self._families(anatomy)
        criteria = self._criteria(images is not None)
        scores: Scores = yield from scores_of(dense, anatomy, families, images, criteria, self.draws, self.seed)
        if self.budget == "uniform":
            counts: Counts = {place: _count(unit, self._share(unit.kind)) for place, unit in enumerate(families)}
        else:
            budget = Budget(self.budget, self.sparsity, LEAST_SHARE)
            counts = yield from spend(dense, anatomy, families, scores, images, budget)
        return masks_of(dense, anatomy, families, scores, counts)

    def _families(self, anatomy: Anatomy) -> list[Unit]:
        there = [kind for kind in KINDS.values() if any(unit.kind == kind for unit in anatomy.units)]
        names = [name for name, kind in KINDS.items() if kind in there]
        wanted = self.scope.replace(",", "+").split("+") if self.scope else names
        unknown = [name for name in wanted if name not in names]
        if unknown or not there:
            has = f"it has {listed(names)}" if names else "it has none"
            raise UserError(f"the model has no units `{'+'.join(unknown) or self.scope}` that can go whole", has)
        self._check()
        idle = [name for name in KINDS if getattr(self, name) is not None and name not in wanted]
        if idle:
            raise UserError(f"`{idle[0]}` is {getattr(self, idle[0])} and none of these units are pruned",
                            f"what is pruned is {listed(wanted)}; --scope says it")  # fmt: skip
        return [unit for unit in anatomy.units if unit.kind in {KINDS[name] for name in wanted}]

    def _check(self) -> None:
        for name in ("sparsity", *KINDS):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise UserError(f"`{name}` is {value}", "give the fraction to remove, from 0 to below 1")
        for name, value, known in (
            ("criterion", self.criterion, CRITERIA),
            ("qk_criterion", self.qk_criterion, QK_CRITERIA),
        ):
            if value != "auto" and value not in known:
                raise UserError(f"`{name}` is `{value}`", f"it can be auto, {listed(list(known), 12)}")
        if self.budget != "uniform" and any(getattr(self, name) is not None for name in KINDS):
            raise UserError(
                f"the budget `{self.budget}` is shared by all units", "give --sparsity alone, or budget=uniform"
            )
        if self.draws < 1:
            raise UserError(f"`draws` is {self.draws}", "give 1 or more")
        if self.budget not in ("uniform", *COSTS):
            raise UserError(f"`budget` is `{self.budget}`", f"it can be uniform, {listed(list(COSTS))}")

    def _share(self, kind: str) -> float:
        own = {"neuron": self.mlp, "qk": self.qk, "channel": self.channels}[kind]
        return self.sparsity if own is None else own

    def _criteria(self, with_images: bool) -> dict[str, str]:
        best = "mismatch" if with_images else "weight"
        general = best if self.criterion == "auto" else self.criterion
        twin = {"mismatch": "mismatch", "weight": "weight"}.get(general, "pairs")
        return {"neuron": general, "channel": general, "qk": twin if self.qk_criterion == "auto" else self.qk_criterion}


def _count(unit: Unit, share: float) -> int:
    """How many go from each group: rounded down, as CORP does, and one at least stays."""
    size = unit.count // unit.groups
    return min(int(size * share + 1e-9), size - 1)
