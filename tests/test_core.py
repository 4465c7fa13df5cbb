"""The nouns."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator

import starfish
from starfish.core import Job, Long, Method, Row, finish


def count(total: int, closed: list[bool]) -> Long[str]:
    try:
        for done in range(total):
            yield {"stage": "count", "done": done + 1, "total": total}
        return "all"
    finally:
        closed.append(True)


def test_finish_drives_to_the_end_and_returns_the_value() -> None:
    closed: list[bool] = []
    assert finish(count(3, closed)) == "all"
    assert closed == [True]
    assert finish(count(0, closed)) == "all"


def test_methods_and_pruners_are_frozen_dataclasses_with_a_line_of_doc() -> None:
    """Their fields are their settings, and `starfish methods` prints the line."""
    for stage in (*starfish.METHODS.values(), *starfish.PRUNERS.values()):
        assert dataclasses.is_dataclass(stage)
        assert type(stage).__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert inspect.getdoc(type(stage))


def test_a_method_is_one_function() -> None:
    """The rest has defaults that ask for nothing and allow nothing."""

    @dataclasses.dataclass(frozen=True)
    class Least(Method):
        def fit(self, job: Job) -> Iterator[Row]:
            yield {"step": 1, "steps": 1}

    import torch

    assert Least().needs() == frozenset()
    assert Least().also_changes(torch.nn.Linear(1, 1)) == frozenset()


def test_rows_are_no_part_of_the_result_file() -> None:
    fields = {field.name for field in dataclasses.fields(starfish.Result)}
    assert "rows" in fields
    blank = starfish.Result(**dict.fromkeys(fields - {"rows"}, 0))  # type: ignore[arg-type]
    assert blank.facts().keys() == fields - {"rows"}
