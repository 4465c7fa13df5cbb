"""Figures, as .png and .svg beside each other. matplotlib is imported when one is drawn (extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from starfish.errors import UserError
from starfish.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

INK, GREY, LIGHT, BLUE, RED = "#1f2430", "#7a8190", "#e4e7ec", "#2f6fb7", "#b5473c"
FAR_BELOW = 2.0  # times the height that all points take: a line farther down would leave them no room
BEHIND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8}  # a label's background
STEPS = (0, 1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6)  # places above and below its own that a label may take
STEP = 11.0  # points


class Point(NamedTuple):
    label: str
    x: float
    y: float
    error: float = 0.0  # of y


def scatter(
    path: Path, points: Sequence[Point], lines: Mapping[str, float], *, title: str, x: str, y: str
) -> list[Path]:
    """Labelled points, x on a log scale, and horizontal lines with their names; the files that were written."""
    figure, axes = _page(title, x, y)
    axes.set_xscale("log")
    for point in points:
        axes.errorbar(point.x, point.y, point.error or None, fmt="o", color=BLUE, ecolor=GREY, elinewidth=1,
                      capsize=2.5, markersize=6, zorder=3)  # fmt: skip
    _limit_(axes, points, lines)
    for name, height in lines.items():
        _line_(axes, name, height)
    _label_(figure, axes, points)
    return _saved(figure, path)


def _page(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("no figure was drawn: matplotlib is missing", "pip install 'starfish-heal[plot]'") from None
    figure = Figure(figsize=(7.2, 4.6), dpi=150, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, colors=GREY, which="both", length=2.5)
    axes.grid(True, color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(LIGHT)
    return figure, axes


def _limit_(axes: Axes, points: Sequence[Point], lines: Mapping[str, float]) -> None:
    """Room on the right for labels; lines far below the points are not drawn to scale."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    least, most = min(point.x for point in points), max(point.x for point in points)
    axes.set_xlim(least / 1.6, most * max(2.2, (most / least) ** 0.3))
    if most / least < 300:  # whole powers of ten would be too few
        axes.set_xticks([tick for tick in _round_numbers() if least / 1.6 <= tick <= most * 2.2])
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bottom = min(point.y - point.error for point in points)
    top = max(point.y + point.error for point in points)
    top = max(top, *lines.values()) if lines else top
    near = [height for height in lines.values() if height >= bottom - FAR_BELOW * max(top - bottom, 1e-9)]
    bottom = min(bottom, *near) if near else bottom
    margin = 0.08 * (top - bottom) or 1.0
    axes.set_ylim(bottom - margin, top + margin)


def _round_numbers() -> list[float]:
    return [digit * 10.0**power for power in range(-4, 8) for digit in (1, 2, 5)]


def _line_(axes: Axes, name: str, height: float) -> None:
    bottom = axes.get_ylim()[0]
    shown = f"{name} {height:.2f}"
    if height < bottom:
        axes.annotate(f"{shown} ↓", (1, 0), (-2, 3), xycoords="axes fraction", textcoords="offset points", ha="right",
                      va="bottom", fontsize=8, color=RED)  # fmt: skip
        return
    axes.axhline(height, color=RED, linewidth=1, linestyle=(0, (4, 3)), zorder=2)
    axes.annotate(shown, (1, height), (-2, 2), xycoords=("axes fraction", "data"), textcoords="offset points",
                  ha="right", va="bottom", fontsize=8, color=RED)  # fmt: skip


def _label_(figure: Figure, axes: Axes, points: Sequence[Point]) -> None:
    """Beside each point, moved up or down to the nearest place where it covers nothing."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    FigureCanvasAgg(figure)
    figure.draw_without_rendering()  # lays out: until then nobody knows where anything is
    pixels = figure.dpi / 72
    ends = [axes.transData.transform([(point.x, point.y - point.error), (point.x, point.y + point.error)])
            for point in points]  # fmt: skip
    taken: list[Bbox] = [Bbox(pair).padded(4 * pixels) for pair in ends]
    taken += [text.get_window_extent() for text in axes.texts]
    for point in sorted(points, key=lambda point: -point.y):
        note = axes.annotate(point.label, (point.x, point.y), (9, 0), textcoords="offset points", va="center",
                             fontsize=8.5, color=INK, zorder=4, bbox=BEHIND)  # fmt: skip
        box = note.get_window_extent()
        step = next((step for step in STEPS if _is_free(box, step * STEP * pixels, taken, axes.bbox)), 0)
        note.set_position((9, step * STEP))
        taken.append(box.translated(0, step * STEP * pixels))
        if step:
            axes.annotate("", (point.x, point.y), (8, step * STEP), textcoords="offset points",
                          arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkB": 3})  # fmt: skip


def _is_free(box: Bbox, up: float, taken: Sequence[Bbox], inside: Bbox) -> bool:
    moved = box.translated(0, up)
    return inside.y0 <= moved.y0 and moved.y1 <= inside.y1 and not any(moved.overlaps(other) for other in taken)


def _saved(figure: Figure, path: Path) -> list[Path]:
    """The same figure gives the same bytes."""
    import matplotlib

    paths = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    with matplotlib.rc_context({"svg.hashsalt": "starfish", "svg.fonttype": "none"}):
        for place in paths:
            kind = place.suffix[1:]
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            write_whole(place, partial(figure.savefig, format=kind, metadata=metadata))
    return paths
