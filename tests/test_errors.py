"""Errors name the thing and the way out."""

from __future__ import annotations

import pytest

from starfish.errors import UserError, listed


def test_message_and_hint_are_apart() -> None:
    error = UserError("`x` is 3", "make it 4")
    assert (str(error), error.message, error.hint) == ("`x` is 3", "`x` is 3", "make it 4")
    assert UserError("alone").hint == ""


@pytest.mark.parametrize(
    ("names", "text"),
    [(["a"], "`a`"), (["a", "b"], "`a`, `b`"), (list("abcdefg"), "`a`, `b`, `c`, `d`, `e` and 2 more")],
)
def test_long_lists_are_cut(names: list[str], text: str) -> None:
    assert listed(names) == text
