"""What adding a method costs: one class, one entry in METHODS, and every property of test_methods.py is asked of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import starfish
import test_methods
from cases import PRUNED, STRUCTURED, Case
from starfish.core import Job, Method, Row


@dataclass(frozen=True)
class Shrink(Method):
    """Multiply the surviving weights by a factor."""

    factor: float = 0.9

    def fit(self, job: Job) -> Iterator[Row]:
        names = list(job.masks)
        for step in range(int(job.state.get("step", 0)), len(names)):
            weight = job.model.get_parameter(names[step])
            pruned = not bool(job.masks[names[step]].all())
            with torch.no_grad():
                weight.mul_(self.factor if pruned else 1.0)
            job.state["step"] = step + 1
            yield {"step": step + 1, "steps": len(names), "layer": names[step], "before": 1.0, "after": self.factor}


PROPERTIES = [test for name, test in vars(test_methods).items()
              if name.startswith("test_") and "case" in inspect.signature(test).parameters]  # fmt: skip


def test_there_are_properties() -> None:
    """Found by their signature, so none is forgotten."""
    assert len(PROPERTIES) >= 7


ASKED = [pytest.param(test, masks, id=f"{test.__name__}-{masks}") for test in PROPERTIES for masks in PRUNED
         if masks in STRUCTURED or test is not test_methods.test_cut_out_it_computes_the_same]  # fmt: skip


@pytest.mark.parametrize(("holds", "masks"), ASKED)
def test_a_toy_method_is_held_to_every_property(
    holds: Callable[..., None], masks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(starfish.METHODS, "shrink", Shrink())
    case = Case("shrink", masks)
    wanted = inspect.signature(holds).parameters
    holds(case, tmp_path) if "tmp_path" in wanted else holds(case)


def test_one_that_breaks_a_property_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The properties can fail: a method that grows its objective is found out."""

    @dataclass(frozen=True)
    class Worse(Method):
        def fit(self, job: Job) -> Iterator[Row]:
            yield {"step": 1, "steps": 1, "before": 1.0, "after": 2.0}

    monkeypatch.setitem(starfish.METHODS, "worse", Worse())
    with pytest.raises(AssertionError):
        test_methods.test_objective_falls(Case("worse", "vit-2:4"))
