"""What the commands show of summaries, anatomies and settings."""

from __future__ import annotations

import json

import pytest
import torch

import starfish
from starfish.patterns import summarise
from starfish.views import show_stages, show_summary


def test_a_summary_has_a_line_a_layer(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures on stdout, the sum of it on stderr."""
    mask = torch.ones(4, 8, dtype=torch.bool)
    mask[:2] = False
    show_summary(summarise({"layer.weight": mask}), "a title")
    captured = capsys.readouterr()
    assert captured.out.startswith("a title")
    assert "4×8" in captured.out
    assert "rows, 50.00 %" in captured.err


def test_stages_as_json_and_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """Every setting with its default, in both."""
    stages = {"mine": (starfish.Starfish(lr=3e-3), "what it does")}
    show_stages(stages, True)
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["summary"], found["settings"]["lr"]) == ("mine", "what it does", 3e-3)
    show_stages(stages, False)
    assert "mine: what it does" in capsys.readouterr().out
