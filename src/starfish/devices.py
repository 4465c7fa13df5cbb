"""Where the arithmetic runs and how precisely."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from starfish.errors import UserError

WORTH = 1.3  # how many times faster bf16 must be than fp32 to be chosen


def choose_device(name: str = "auto") -> torch.device:
    """`auto` takes the accelerator if there is one."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator if accelerator is not None else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"the device `{name}` cannot be used: {str(error).splitlines()[0]}", "try cpu") from None
    return device


def to_device(value: Any, device: torch.device) -> Any:
    """A tensor, or a dict of tensors, on `device`."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {name: to_device(tensor, device) for name, tensor in value.items()}
    return value


def choose_precision(wanted: str, device: torch.device) -> str:
    """`auto` is decided by a probe of some milliseconds: bf16 where matrix products are clearly faster in it."""
    if wanted in {"fp32", "bf16"}:
        return wanted
    if wanted != "auto":
        raise UserError(f"the precision is `{wanted}`", "give auto, fp32 or bf16")
    try:
        return "bf16" if _seconds(torch.float32, device) > WORTH * _seconds(torch.bfloat16, device) else "fp32"
    except RuntimeError:  # a device without bf16
        return "fp32"


def _seconds(dtype: torch.dtype, device: torch.device, size: int = 512, repeats: int = 5) -> float:
    """The best of a few products, so that a busy machine does not decide."""
    x = torch.ones(size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        float((x @ x)[0, 0])
        best = min(best, time.perf_counter() - start)
    return best


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[None]:
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
