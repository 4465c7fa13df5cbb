"""What is noted of a healing as it goes on: rows, seconds, and what is needed to go on after a kill."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starfish.core import Job, Row
from starfish.errors import UserError
from starfish.runs import Run
from starfish.targets import DenseTargets

SPENT = "spent"  # the note of a run that says how many seconds went into it


@dataclass
class Log:
    """Rows seen, seconds spent, and when to save."""

    job: Job
    free: frozenset[str]  # tensors outside the masks that belong to the state
    run: Run | None
    chain: bool  # several methods: rows say whose they are
    rows: list[Row] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"targets": 0.0, "fit": 0.0})
    earlier: float = 0.0  # seconds of the sessions before this one
    found: float = 0.0  # of these, what others had spent on what was found ready
    place: int = 0  # of the method at work
    name: str = ""  # of the method at work
    give_back_: Callable[[], None] = lambda: None  # brings `job.model` up to date with what the method works on
    _ends: list[float] = field(default_factory=list)  # seconds spent by the end of each method that is done
    _tick: float = field(default_factory=time.monotonic)
    _start: float = field(default_factory=time.monotonic)

    def restore_(self) -> None:
        kept = self.run.restore() if self.run else None
        spent = self.run.noted(SPENT) if self.run else None
        if spent is not None:
            self.earlier = spent["earlier"]
            self.seconds.update(spent["seconds"])
        if kept is not None:
            tensors, state, facts, self.rows = kept
            self.job.model.load_state_dict(tensors, strict=False)
            self.job.state.update(state)
            self.place, self._ends = facts["place"], facts["ends"]
            if spent is None:
                self.earlier = facts["earlier"]
                self.seconds.update(facts["seconds"])
            self.found = facts.get("shared", 0.0)

    def begin_stage(self, name: str, give_back_: Callable[[], None]) -> None:
        self.name, self.give_back_ = name, give_back_
        self._tick = time.monotonic()

    def see(self, row: Row) -> None:
        self._count(row.get("stage") == "targets")
        if self.chain:
            row["method"] = self.name
        if "stage" in row:
            return
        _check_finite(row)
        self.rows.append(row)
        if self.run is not None:
            self.run.add(row)
            if self.run.save_is_due():
                self.save()

    def save(self) -> None:
        """Between two rows. A method that keeps nothing to go on with begins again, from where it began."""
        self.give_back_()
        if self.job.state:
            self._write()
        if self.run is not None:  # what it has spent till then is spent all the same
            self.run.note(SPENT, self._spent())

    def end_stage(self) -> None:
        """What a method does after its last row counts as fitting. Saved, lest a kill while measuring costs it all."""
        self._count(targets=False)
        self.give_back_()
        self.job.state.clear()
        self.place += 1
        self._ends.append(sum(self.seconds.values()))
        self._write()

    def _count(self, targets: bool) -> None:
        now = time.monotonic()
        self.seconds["targets" if targets else "fit"] += now - self._tick
        self._tick = now

    def _write(self) -> None:
        if self.run is None:
            return
        state = self.job.model.state_dict()
        tensors = {name: state[name] for name in (*self.job.masks, *sorted(self.free))}
        facts = {**self._spent(), "place": self.place, "ends": self._ends, "shared": self.shared()}
        self.run.save(tensors, self.job.state, facts)

    def _spent(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "earlier": time.monotonic() - self._start + self.earlier}

    def shared(self) -> float:
        """Seconds that other runs had spent on what this one found ready. A resumed run finds some of it once more."""
        statistics = self.job.cache.shared if self.job.cache else 0.0
        targets = self.job.targets.shared_seconds() if isinstance(self.job.targets, DenseTargets) else 0.0
        return max(self.found, statistics + targets)

    def spent(self, place: int) -> float:
        """Seconds of one method, its targets included."""
        return self._ends[place] - (self._ends[place - 1] if place else 0.0)

    def losses(self, name: str) -> dict[str, float | None]:
        """Mean loss of one method's first and last epoch."""
        own = [row for row in self.rows if row.get("method", name) == name and {"loss", "epoch"} <= row.keys()]
        return {
            "first": _mean([float(row["loss"]) for row in own if row["epoch"] == own[0]["epoch"]]),
            "last": _mean([float(row["loss"]) for row in own if row["epoch"] == own[-1]["epoch"]]),
        }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _check_finite(row: Row) -> None:
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(
                f"`{name}` became {value} at step {row.get('step', '?')}",
                "lower the learning rate (--set lr=1e-4), or calculate in full precision (--set precision=fp32)",
            )
