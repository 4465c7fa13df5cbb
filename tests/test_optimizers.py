"""The optimisers of the loop: against torch's own, and their state by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from starfish.methods.optimizers import OPTIMIZERS, Optimizer


def weights() -> dict[str, nn.Parameter]:
    """A matrix, a convolution, a depthwise one, a bias."""
    shapes = {"matrix": (6, 4), "conv": (5, 3, 3, 3), "depthwise": (4, 1, 3, 3), "bias": (4,)}
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(weight.shape, generator=generator) for name, weight in weights().items()}


def walked(name: str, steps: range, start: dict[str, nn.Parameter], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """State after some steps from a state; `start` moves."""
    optimizer = Optimizer(name, start, 0.01)
    optimizer.restore_(state)  # type: ignore[arg-type]
    for step in steps:
        for key, gradient in gradients(step).items():
            start[key].grad = gradient
        optimizer.step(1e-2)
    return {key: torch.as_tensor(value).clone() for key, value in optimizer.state().items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stopping_in_between_changes_no_bit(name: str) -> None:
    """Three steps, a state kept by name, three more: as six at once."""
    whole, parted = weights(), weights()
    walked(name, range(6), whole, {})
    kept = walked(name, range(3), parted, {})
    walked(name, range(3, 6), parted, kept)
    assert all(torch.equal(whole[key], parted[key]) for key in whole)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_muon_takes_matrices_and_adamw_the_rest(layout: torch.memory_format) -> None:
    """A convolution moves as the matrix of its filters, in whatever order it lies in memory."""
    ours = weights()
    ours["conv"].data = ours["conv"].data.contiguous(memory_format=layout)
    walked("muon", range(3), ours, {})
    theirs = weights()
    flat = {name: nn.Parameter(theirs[name].detach().flatten(1)) for name in ("matrix", "conv")}
    muon = torch.optim.Muon([*flat.values()], lr=1e-2, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([theirs["depthwise"], theirs["bias"]], lr=1e-2, weight_decay=0.01, fused=True)
    for step in range(3):
        given = gradients(step)
        for name, weight in flat.items():
            weight.grad = given[name].flatten(1)
        for name in ("depthwise", "bias"):
            theirs[name].grad = given[name]
        muon.step()
        adamw.step()
    for name, weight in flat.items():
        assert torch.equal(ours[name].flatten(1), weight), name
    for name in ("depthwise", "bias"):
        assert torch.equal(ours[name], theirs[name]), name
    assert not torch.equal(ours["matrix"], weights()["matrix"])
