"""Talk goes to stderr, data to stdout; a signal stops a long thing between two rows and leaves everything in order."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from starfish import console
from starfish.console import Interrupted, emit, say, table, watch
from starfish.core import Long, Row

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture
def handlers() -> Iterator[list[Any]]:
    """What handles the signals around `watch`, which must be there again afterwards."""

    def ours(number: int, frame: Any) -> None:
        raise AssertionError(f"signal {number} reached the handler from before")

    before = {number: signal.signal(number, ours) for number in SIGNALS}
    yield [ours]
    now = [signal.getsignal(number) for number in SIGNALS]
    for number, handler in before.items():
        signal.signal(number, handler)
    assert now == [ours, ours]


class Work:
    """Three steps; records which were begun and whether it was closed."""

    def __init__(self, kill: int | None = None, at: int = 1, times: int = 1) -> None:
        self.kill, self.at, self.times = kill, at, times
        self.begun: list[int] = []
        self.closed = False

    def run(self) -> Long[str]:
        try:
            for step in range(3):
                self.begun.append(step)
                if self.kill is not None and step == self.at:
                    for _ in range(self.times):
                        os.kill(os.getpid(), self.kill)
                yield {"step": step + 1, "steps": 3, "loss": 0.5 - step / 10, "cosine": 0.9, "epoch": 1, "images": 4}
        except GeneratorExit:
            self.closed = True
            raise
        return "made"


@pytest.mark.usefixtures("handlers")
def test_watch_returns_what_was_made_and_talks_on_stderr_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert watch(Work().run()) == "made"
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1  # the end of a stage; no line a step
    assert lines[0].startswith("heal 3/3 epoch 1 loss 0.3000 cosine 0.9000")
    assert "images/s" in lines[0]
    assert "\x1b" not in err


@pytest.mark.usefixtures("handlers")
def test_every_stage_that_ends_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> Long[None]:
        for stage in ("decode", "targets"):
            for done in (10, 20):
                yield {"stage": stage, "done": done, "total": 20}

    watch(work())
    assert capsys.readouterr().err == "decode 20/20\ntargets 20/20\n"


@pytest.mark.usefixtures("handlers")
def test_a_long_stage_says_something_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(clock)))

    def work() -> Long[None]:
        for done in range(1, 10):
            yield {"stage": "decode", "done": done, "total": 100}

    watch(work())
    assert 2 <= len(capsys.readouterr().err.splitlines()) <= 5


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_stops_after_the_row_and_closes_the_work(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    work = Work(number)
    running = work.run()  # held here, so that only `watch` can close it
    with pytest.raises(Interrupted, match=signal.Signals(number).name):
        watch(running)
    assert work.begun == [0, 1]
    assert work.closed
    assert "stopping after this step" in capsys.readouterr().err


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_acts_at_once(number: int) -> None:
    work = Work(number, times=2)
    with pytest.raises(KeyboardInterrupt):
        watch(work.run())
    assert work.begun == [0, 1]


@pytest.mark.usefixtures("handlers")
def test_an_error_in_the_work_comes_through(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> Long[None]:
        yield {"stage": "decode", "done": 1, "total": 2}
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        watch(work())


@pytest.mark.usefixtures("handlers")
def test_work_without_a_row_is_work() -> None:
    def work() -> Long[int]:
        yield from ()
        return 5

    assert watch(work()) == 5


@pytest.mark.usefixtures("handlers")
def test_a_terminal_gets_a_live_view(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("TERM", "xterm")

    def work() -> Long[str]:
        yield {"stage": "decode", "done": 1, "total": 1}
        return (yield from Work().run())

    assert watch(work()) == "made"
    out, err = capsys.readouterr()
    assert out == ""
    assert "decode" in err
    assert "heal" in err
    assert "3/3" in err


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"stage": "decode", "done": 3, "total": 9}, ("decode", 3, 9)),
        ({"step": 4, "steps": 8, "loss": 1.0}, ("heal", 4, 8)),
        ({"layer": "a"}, ("heal", 0, 0)),
    ],
)
def test_place_of_a_row(row: Row, expected: tuple[str, int, int]) -> None:
    assert console.place(row) == expected


def test_emit_is_one_json_object_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"a": [1, 2.5, None], "b": {"c": "ü"}}
    emit(value)
    out, err = capsys.readouterr()
    assert json.loads(out) == value
    assert err == ""


def test_say_is_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say("hello")
    assert capsys.readouterr() == ("", "hello\n")


def test_a_table_is_plain_text_on_stdout_with_numbers_flush_right(capsys: pytest.CaptureFixture[str]) -> None:
    table(("name", "figure", "what"), [("a[b]", "1.5", "x"), ("c", "22.25", "yy"), ("d", "", "")], "title")
    out, err = capsys.readouterr()
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[0] == "title"
    assert lines[1].split() == ["name", "figure", "what"]
    assert lines[2].split() == ["a[b]", "1.5", "x"]  # no markup
    assert lines[2].index("1.5") + 3 == lines[3].index("22.25") + 5
    assert lines[2].index("x") == lines[3].index("yy")
    assert err == ""


def test_long_cells_are_whole_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name = "vit.encoder.layer.11.attention.attention.query.weight" * 2
    table(("parameter", "zeros"), [(name, "50.0")])
    assert name in capsys.readouterr().out


def test_a_stage_that_comes_again_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Layer by layer the statistics are gathered anew: a line each would drown the rest."""

    def work() -> Iterator[Row]:
        for _ in range(5):
            yield {"stage": "statistics", "done": 2, "total": 2}
        yield {"stage": "healed", "done": 1, "total": 1}

    watch(work())  # type: ignore[arg-type]
    assert capsys.readouterr().err.splitlines() == ["statistics 2/2", "healed 1/1"]
