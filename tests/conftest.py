"""Small models and images that every test file may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cases import IMAGES, LABELS
from starfish import speed

DATA = Path(os.environ.get("STARFISH_DATA", Path(__file__).parents[2] / "shared" / "data"))


torch.set_num_threads(1)  # the models are so small that a second thread only waits
speed.REPEATS = speed.WARM_UP = 1  # every heal times its models, and here nobody reads the times


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def images() -> Tensor:
    """Twelve inputs of the small models of cases.py."""
    return IMAGES.clone()


@pytest.fixture
def labels() -> Tensor:
    return LABELS.clone()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Real weights and images, where they are at hand."""
    if not DATA.is_dir():
        pytest.skip(f"no real weights and images at {DATA}; set STARFISH_DATA")
    return DATA
