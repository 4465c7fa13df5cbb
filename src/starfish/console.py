"""What people see: talk on stderr, data on stdout, a live view on a terminal and plain lines elsewhere."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starfish.core import Long, Row, T

QUIET_SECONDS = 10.0  # between two plain lines


class Interrupted(Exception):
    """The user or the system asked us to stop; what could be saved is saved."""


def say(text: str) -> None:
    """Talk, to stderr."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201  # the one place that talks


def emit(value: Any) -> None:
    """One JSON object, to stdout."""
    print(json.dumps(value, indent=2), flush=True)  # noqa: T201  # the one place that answers


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """To stdout; the first column is text, numbers are set flush right."""
    from rich.console import Console
    from rich.table import Table

    view = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        view.add_column(column, justify="left" if place == 0 or not _numeric(rows, place) else "right", overflow="fold")
    for row in rows:
        view.add_row(*row)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=160)
    console.print(view)


def _numeric(rows: Sequence[Sequence[str]], place: int) -> bool:
    return all(row[place][:1].isdigit() or row[place][:1] in "-–" for row in rows if row[place])


def watch(work: Long[T]) -> T:
    """Drive a long thing to its end, showing how far it is. SIGINT and SIGTERM stop it between two rows."""
    view = _Live() if sys.stderr.isatty() else _Plain()
    with _stoppable() as stop, view:
        while True:
            try:
                row = next(work)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]  # StopIteration is not generic
            view.see(row)
            if stop:
                work.close()
                raise Interrupted(signal.Signals(stop[0]).name)


@contextmanager
def _stoppable() -> Iterator[list[int]]:
    """A list that fills when a signal comes; a second signal acts at once."""
    caught: list[int] = []

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if len(caught) == 1:
            say("stopping after this step; once more to stop at once")
        else:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def place(row: Row) -> tuple[str, int, int]:
    """(what is going on, how far, of how much)."""
    if "stage" in row:
        return str(row["stage"]), int(row["done"]), int(row["total"])
    return str(row.get("method", "heal")), int(row.get("step", 0)), int(row.get("steps", 0))


class _Plain:
    """A line when a stage ends for the first time, and every ten seconds."""

    def __init__(self) -> None:
        self.pace = _Pace()
        self.last = time.monotonic()
        self.ended: set[str] = set()  # layer by layer the same stages come again and again

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def see(self, row: Row) -> None:
        stage, done, total = place(row)
        self.pace.see(row)
        first_end = done == total and stage not in self.ended
        if first_end or time.monotonic() - self.last > QUIET_SECONDS:
            self.last = time.monotonic()
            self.ended |= {stage} if done == total else set()
            epoch = f"epoch {row['epoch']} " if "epoch" in row else ""
            say(f"{stage} {done}/{total} {epoch}{self.pace.text(row)}".rstrip())


class _Live:
    """A progress bar a stage, the last one with loss, cosine, speed and time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        whole = Column(no_wrap=True)  # in eighty columns the bar gives way, not the figures
        self.progress = Progress(
            TextColumn("{task.description}", table_column=whole), BarColumn(bar_width=8),
            TextColumn("{task.completed:.0f}/{task.total:.0f}", table_column=whole), TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[text]}", table_column=whole), console=Console(stderr=True),
        )  # fmt: skip
        self.pace = _Pace()
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> _Live:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def see(self, row: Row) -> None:
        stage, done, total = place(row)
        self.pace.see(row)
        if stage not in self.tasks:
            self.tasks[stage] = self.progress.add_task(stage, total=total, text="")
        self.progress.update(self.tasks[stage], completed=done, total=total, text=self.pace.text(row))


class _Pace:
    """Images a second over the last steps, and a loss that does not jump."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def see(self, row: Row) -> None:
        if "stage" not in row:
            self.seen = [*self.seen[-20:], (time.monotonic(), int(row.get("images", 0)))]

    def text(self, row: Row) -> str:
        if "stage" in row:
            return ""
        parts = [f"{name} {row[name]:.4f}" for name in ("loss", "cosine") if isinstance(row.get(name), float)]
        if len(self.seen) > 1 and row.get("images"):
            elapsed = self.seen[-1][0] - self.seen[0][0]
            parts.append(f"{sum(images for _, images in self.seen[1:]) / max(elapsed, 1e-9):.0f} images/s")
        return " ".join(parts)
