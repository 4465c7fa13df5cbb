"""`--set k=v` onto the fields of the stages of a command; a new field never grows the parser."""

from __future__ import annotations

import types
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from starfish.errors import UserError, listed

Stage = TypeVar("Stage")


def settle(stages: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """Each stage with its settings; `k=v` goes to every stage with a field k, `stage.k=v` to that one."""
    chosen: dict[str, dict[str, Any]] = {name: {} for name in stages}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise UserError(f"`--set {assignment}` is not of the form k=v", "for example --set lr=3e-4")
        stage, _, field = key.rpartition(".")
        takers = [name for name in stages if (not stage or name == stage) and field in names_of(stages[name])]
        if not takers:
            known = "; ".join(f"{name}: {', '.join(names_of(stages[name]))}" for name in stages)
            raise UserError(f"`--set {assignment}`: nothing here has a setting `{key}`", f"there are {known}")
        for name in takers:
            chosen[name][field] = parse(field, text, get_type_hints(type(stages[name]))[field])
    return {name: replace(stage, **chosen[name]) for name, stage in stages.items()}


LEAST = {"images": 0, "block": 1, "damp": 0, "gradients": 1, "batch": 1, "stages": 1}
"""What these settings must be at least, in every stage that has them."""


def check(stage: Any) -> None:
    """Refuse values that are none of those that a setting can have."""
    kinds = get_type_hints(type(stage))
    for field in fields(stage):
        value, kind = getattr(stage, field.name), kinds[field.name]
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise UserError(f"`{field.name}` is `{value}`", f"it can be {listed(list(get_args(kind)), 9)}")
        if field.name in LEAST and value < LEAST[field.name]:
            raise UserError(f"`{field.name}` is {value}", f"give {LEAST[field.name]} or more")


def names_of(stage: Any) -> list[str]:
    return [field.name for field in fields(stage)]


def parse(name: str, text: str, kind: Any) -> Any:
    """`text` as a value of the type `kind`."""
    origin = get_origin(kind)
    if origin in {Union, types.UnionType}:
        if text.lower() == "none":
            return None
        kind = next(argument for argument in get_args(kind) if argument is not type(None))
        origin = get_origin(kind)
    if origin is Literal:
        if text not in get_args(kind):
            raise UserError(f"`{name}` is `{text}`", f"it can be {listed(list(get_args(kind)), 9)}")
        return text
    if origin is tuple:
        return tuple(parse(name, part, get_args(kind)[0]) for part in text.split(","))
    if kind is bool:
        return _truth(name, text)
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"`{name}` is `{text}`", f"it must be of the type {kind.__name__}") from None


def _truth(name: str, text: str) -> bool:
    truth = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in truth:
        raise UserError(f"`{name}` is `{text}`", "it must be true or false")
    return truth[text.lower()]
