"""Nothing moves but what may, and whoever moves more is caught by name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import starfish
from cases import Case
from starfish.core import finish
from starfish.data import as_images
from starfish.heal import healing_, job_of


@pytest.mark.parametrize("masks", ["vit-unstructured", "vit-neurons+qk"])
def test_method_that_cheats_is_caught(masks: str, images: Tensor) -> None:
    """A method that moves a frozen tensor, or revives a pruned weight, does not get away with it."""

    @dataclass(frozen=True)
    class Cheat(starfish.Method):
        name: str

        def masked(self) -> bool:
            return True

        def fit(self, job):  # type: ignore[no-untyped-def]
            with torch.no_grad():
                job.model.get_parameter(self.name).add_(1.0)
            yield {"step": 1, "steps": 1}

    for name, complaint in (("blocks.0.norm1.weight", "none of its masks"), ("blocks.0.mlp.fc1.weight", "revived")):
        model, dense, chosen, _ = Case("starfish", masks).build(images)
        job = job_of(model, dense, chosen, images)
        with pytest.raises(AssertionError, match=complaint):
            finish(healing_(job, Cheat(name), as_images(images)))
