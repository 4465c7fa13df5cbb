"""What the commands show of summaries, anatomies and settings."""

from __future__ import annotations

import json
import re

import pytest
import torch

import starfish
from starfish.patterns import summarise
from starfish.views import show_scores, show_stages, show_summary
from test_tables import COST, STAGES, result


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


SCORES = {
    **result(labels=True),
    "evaluation": {"images": 500},
    "accuracy_standard_error": {"healed": 2.1},
    "also_changed": ["head.bias"],
    "seconds": {"total": 123.4},
    "stages": STAGES,
    "speed": {"dense": COST, "masked": COST, "verdict": "No faster."},
}


def test_scores_with_every_method_of_a_chain(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of the whole, then of each method, then what the models cost; what they mean on stderr."""
    show_scores(SCORES)
    captured = capsys.readouterr()
    order = ["top-1, %", "method by method", "corp", "starfish", "parameters"]
    assert sorted(order, key=captured.out.index) == order
    assert re.search(r"corp +41\.25 +12", captured.out)
    assert "on 500 images; one standard error is about 2.1 points; 123 s. Every pruned weight is zero" in captured.err
    assert "but for 1 tensors" in captured.err
    assert "No faster." in captured.err


def test_scores_of_one_method_and_of_old(capsys: pytest.CaptureFixture[str]) -> None:
    """One method needs no table of its own; results of old have neither stages nor costs."""
    show_scores({**SCORES, "stages": STAGES[1:]})
    assert "method by method" not in capsys.readouterr().out
    show_scores({name: value for name, value in SCORES.items() if name not in {"stages", "speed"}})
    captured = capsys.readouterr()
    assert "66.67" in captured.out
    assert "parameters" not in captured.out
