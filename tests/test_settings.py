"""`--set k=v` reaches the right field with the right type, or is refused with the fields there are."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import pytest

from starfish.data import Preprocess
from starfish.errors import UserError
from starfish.methods import METHODS
from starfish.pruners import PRUNERS
from starfish.settings import check, settle


@dataclass(frozen=True)
class First:
    lr: float = 1e-4
    epochs: int = 3
    name: str = "a"
    shuffle: bool = True
    order: Literal["up", "down"] = "up"
    limit: int | None = 5
    kind: Literal["x", "y"] | None = None
    mean: tuple[float, ...] = (0.5,)
    sides: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Second:
    lr: float = 1.0
    size: int = 7


STAGES = {"first": First(), "second": Second()}


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("lr=6e-4", 6e-4),
        ("lr=1", 1.0),
        ("epochs=10", 10),
        ("name=b=c", "b=c"),
        ("name=", ""),
        ("shuffle=false", False),
        ("shuffle=No", False),
        ("shuffle=1", True),
        ("order=down", "down"),
        ("limit=8", 8),
        ("limit=none", None),
        ("limit=None", None),
        ("kind=y", "y"),
        ("kind=none", None),
        ("mean=0.5", (0.5,)),
        ("mean=0.1,0.2,0.3", (0.1, 0.2, 0.3)),
        ("sides=3,4", (3, 4)),
    ],
)
def test_every_type(assignment: str, value: Any) -> None:
    found = getattr(settle(STAGES, [assignment])["first"], assignment.partition("=")[0])
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("epochs=2.5", "int"),
        ("epochs=many", "int"),
        ("lr=fast", "float"),
        ("shuffle=maybe", "true or false"),
        ("order=sideways", "`up`, `down`"),
        ("limit=x", "int"),
        ("kind=z", "`x`, `y`"),
        ("mean=0.5,b", "float"),
        ("sides=1.5", "int"),
        ("epochs=none", "int"),
    ],
)
def test_a_wrong_value_is_refused_with_what_it_can_be(assignment: str, says: str) -> None:
    name = assignment.partition("=")[0]
    with pytest.raises(UserError, match=f"`{name}` is") as error:
        settle(STAGES, [assignment])
    assert says in error.value.hint


def test_a_setting_goes_to_every_stage_that_has_it() -> None:
    found = settle(STAGES, ["lr=2", "size=9"])
    assert (found["first"].lr, found["second"].lr, found["second"].size) == (2.0, 2.0, 9)


def test_a_stage_can_be_named_and_the_last_word_counts() -> None:
    found = settle(STAGES, ["lr=2", "second.lr=3", "first.epochs=1", "first.epochs=4"])
    assert (found["first"].lr, found["second"].lr, found["first"].epochs) == (2.0, 3.0, 4)
    assert {"first": First(), "second": Second()} == STAGES


@pytest.mark.parametrize("assignment", ["speed=3", "second.epochs=1", "third.lr=1", "=3", "first.=2"])
def test_an_unknown_setting_is_refused_with_those_there_are(assignment: str) -> None:
    with pytest.raises(UserError) as error:
        settle(STAGES, [assignment])
    assert assignment in error.value.message
    for stage, value in STAGES.items():
        assert f"{stage}: {', '.join(field.name for field in fields(value))}" in error.value.hint


def test_an_assignment_has_an_equals_sign() -> None:
    with pytest.raises(UserError, match="k=v"):
        settle(STAGES, ["lr"])


@pytest.mark.parametrize("stage", [*METHODS.values(), *PRUNERS.values(), Preprocess()], ids=lambda s: type(s).__name__)
def test_every_setting_there_is_can_be_set_to_its_default(stage: Any) -> None:
    """What `starfish methods` prints can be typed."""

    def typed(value: Any) -> str:
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    assignments = [f"{field.name}={typed(getattr(stage, field.name))}" for field in fields(stage)]
    assert settle({"stage": stage}, assignments) == {"stage": stage}


@pytest.mark.parametrize("assignment", ["mode=corner", "interpolation=cubic", "mean=0.5", "crop=0", "resize=-1"])
def test_preprocessing_that_makes_no_sense_is_refused(assignment: str) -> None:
    with pytest.raises(UserError):
        settle({"preprocess": Preprocess()}, [assignment])


@pytest.mark.parametrize(
    ("stage", "complaint"),
    [
        (replace(METHODS["chita"], algorithm="iht"), "`algorithm` is `iht`"),
        (replace(METHODS["least_squares"], inputs="blok"), "`inputs` is `blok`"),
        (replace(METHODS["sparsegpt"], block=0), "`block` is 0"),
        (replace(PRUNERS["magnitude"], per="globl"), "`per` is `globl`"),
        (replace(PRUNERS["wanda"], images=-1), "`images` is -1"),
    ],
)
def test_values_that_a_setting_cannot_have_are_refused(stage: Any, complaint: str) -> None:
    """From Python too, where nothing was parsed; what is right passes."""
    with pytest.raises(UserError, match=complaint) as error:
        check(stage)
    assert error.value.hint
    for known in (*METHODS.values(), *PRUNERS.values()):
        check(known)
