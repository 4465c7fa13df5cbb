"""Rows, seconds and losses of a healing as they are noted."""

from __future__ import annotations

import pytest
from torch import Tensor

import starfish
from cases import Case
from starfish.heal import job_of
from starfish.log import Log


def log(images: Tensor, *, chain: bool = False) -> Log:
    model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
    return Log(job_of(model, dense, masks, images), frozenset(), None, chain)


def test_rows_are_kept_and_stages_are_not(images: Tensor) -> None:
    """What only tells how far something has come is no result; in a chain a row says whose it is."""
    found = log(images, chain=True)
    found.begin_stage("kl", lambda: None)
    found.see({"stage": "targets", "done": 1, "total": 2})
    found.see({"step": 1, "loss": 0.5})
    assert found.rows == [{"step": 1, "loss": 0.5, "method": "kl"}]


def test_losses_are_means_over_the_first_and_the_last_epoch(images: Tensor) -> None:
    found = log(images)
    for epoch, loss in ((1, 4.0), (1, 2.0), (2, 9.0), (3, 1.0), (3, 2.0)):
        found.see({"step": 1, "epoch": epoch, "loss": loss})
    assert found.losses("starfish") == {"first": 3.0, "last": 1.5}
    assert log(images).losses("starfish") == {"first": None, "last": None}


def test_a_figure_that_is_no_number_stops_the_heal(images: Tensor) -> None:
    with pytest.raises(starfish.UserError, match="`loss` became nan at step 3"):
        log(images).see({"step": 3, "loss": float("nan")})


def test_seconds_are_counted_by_what_they_went_into(images: Tensor) -> None:
    """Those of a method are the targets' and its own."""
    found = log(images)
    found.begin_stage("starfish", lambda: None)
    found.see({"stage": "targets", "done": 1, "total": 1})
    found.see({"step": 1})
    found.end_stage()
    assert found.spent(0) == pytest.approx(found.seconds["targets"] + found.seconds["fit"])
    assert found.seconds["targets"] > 0
