"""Figures: files that are whole and always the same, labels that can be read."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.text import Annotation

import starfish
from starfish.plots import Point, _label_, _limit_, _line_, _page, scatter

CLOSE = [Point(f"method {place}", 20 + place, 88 + 0.1 * (place % 3), 0.2) for place in range(9)]
LINES = {"dense": 91.9, "mask": 12.3}


def test_a_png_and_an_svg(tmp_path: Path) -> None:
    """Named by what they show, words kept as words, and the same bytes again."""
    png, svg = scatter(tmp_path / "deep" / "figure", CLOSE, LINES, title="a title", x="seconds", y="top-1, %")
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = svg.read_text()
    for word in ("a title", "seconds", "top-1, %", "method 8", "dense 91.90", "mask 12.30"):
        assert f">{word}" in text
    again = scatter(tmp_path / "again", CLOSE, LINES, title="a title", x="seconds", y="top-1, %")
    assert [path.read_bytes() for path in again] == [png.read_bytes(), svg.read_bytes()]


@pytest.mark.parametrize("points", [CLOSE, CLOSE[:1], [Point("a", 0.5, 50), Point("b", 900, 50)]])
def test_labels_do_not_cover_each_other(points: list[Point]) -> None:
    """Nor leave the figure."""
    figure, axes = _page("title", "x", "y")
    axes.set_xscale("log")
    _limit_(axes, points, LINES)
    for name, height in LINES.items():
        _line_(axes, name, height)
    _label_(figure, axes, points)
    notes = [text for text in axes.texts if isinstance(text, Annotation) and text.get_text()]
    boxes = {note.get_text(): note.get_window_extent() for note in notes}
    assert boxes.keys() >= {point.label for point in points}
    covered = [(one, other) for one, other in combinations(boxes, 2) if boxes[one].overlaps(boxes[other])]
    assert covered == []
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes.values())


def test_a_line_far_below_leaves_the_points_room() -> None:
    """It is named at the bottom; one that is near is drawn."""
    for mask, drawn in ((12.3, False), (85.0, True)):
        _, axes = _page("title", "x", "y")
        axes.set_xscale("log")
        _limit_(axes, CLOSE, {"dense": 91.9, "mask": mask})
        assert (axes.get_ylim()[0] < mask) == drawn


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(starfish.UserError, match="matplotlib is missing") as refusal:
        scatter(tmp_path / "figure", CLOSE, LINES, title="", x="", y="")
    assert "starfish-heal[plot]" in refusal.value.hint
    assert not list(tmp_path.iterdir())
