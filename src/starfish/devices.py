"""Where the arithmetic runs and how precisely."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from starfish.activations import logits
from starfish.errors import UserError

WORTH = 1.3  # how many times faster bf16 must be than fp32 to be chosen


def choose_device(name: str = "auto") -> torch.device:
    """`auto` takes the accelerator if there is one."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        device = torch.device(name)
        float(torch.zeros(1, device=device))
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UserError(f"the device `{name}` cannot be used: {str(error).splitlines()[0]}", "try cpu") from None
    return device


def to_device(value: Any, device: torch.device) -> Any:
    """A tensor, or a dict of tensors, on `device`."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {name: to_device(tensor, device) for name, tensor in value.items()}
    return value


def choose_precision(wanted: str, model: nn.Module, inputs: Any, weights: Sequence[Tensor]) -> str:
    """`auto` is decided by a probe: bf16 where a step of this very model on these inputs is clearly faster in it."""
    if wanted in {"fp32", "bf16"}:
        return wanted
    if wanted != "auto":
        raise UserError(f"the precision is `{wanted}`", "give auto, fp32 or bf16")
    try:
        seconds = {precision: _step_seconds(precision, model, inputs, weights) for precision in ("fp32", "bf16")}
    except RuntimeError:  # a device or an operator without bf16
        return "fp32"
    return "bf16" if seconds["fp32"] > WORTH * seconds["bf16"] else "fp32"


def _step_seconds(precision: str, model: nn.Module, inputs: Any, weights: Sequence[Tensor], repeats: int = 3) -> float:
    """Forward and backward, the best of a few, so that a busy machine does not decide."""
    device = weights[0].device
    flags = [weight.requires_grad for weight in weights]
    best = float("inf")
    try:
        for weight in weights:
            weight.requires_grad_(True)
        for _ in range(repeats):
            start = time.perf_counter()
            with autocast(device, precision):
                answer = logits(model, inputs).float().square().mean()
            gradients = torch.autograd.grad(answer, weights, allow_unused=True)
            float(next((g.sum() for g in gradients if g is not None), answer).detach())  # wait for the device
            best = min(best, time.perf_counter() - start)
    finally:
        for weight, flag in zip(weights, flags, strict=True):
            weight.requires_grad_(flag)
    return best


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[None]:
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
