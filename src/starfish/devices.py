"""Where the arithmetic runs and how precisely."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from starfish.errors import UserError


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


def choose_precision(wanted: str, device: torch.device, weights: Iterable[Tensor]) -> str:
    """`auto` takes bf16 where the device multiplies in it and, on a CPU, most of the weights are matrices.

    A rule and not a timing, so that the same seed gives the same numbers again. On a CPU a step of DeiT-T is 1.7 times
    as fast in bf16, of ResNet-18 1.8 times, of EfficientNet-Lite0, with its depthwise filters, not at all
    (benchmarks/precision.py); convolutional networks stay in fp32 unless asked.
    """
    if wanted in {"fp32", "bf16"}:
        return wanted
    if wanted != "auto":
        raise UserError(f"the precision is `{wanted}`", "give auto, fp32 or bf16")
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    sizes = [(weight.numel(), weight.ndim == 2) for weight in weights]
    matrices = 2 * sum(size for size, matrix in sizes if matrix) > sum(size for size, _ in sizes)
    return "bf16" if device.type == "cpu" and matrices and cpu_multiplies_in_bf16() else "fp32"


def cpu_multiplies_in_bf16() -> bool:
    """Has this processor instructions for it?"""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[None]:
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def keep_freed_memory() -> bool:
    """Let malloc keep what is freed; true where the C library obeys.

    Activations larger than 32 MB otherwise go back to the system after every use, and each of their pages faults anew:
    a step of EfficientNet-Lite0 at batch 64 took twice as long (benchmarks/malloc.py).
    """
    trim_threshold, mmap_max = -1, -4  # as in glibc's malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library
        return False
    return bool(mallopt(mmap_max, 0) and mallopt(trim_threshold, 2**31 - 1))


def peak_rss_mb() -> float:
    """The most memory this process has held so far, or since `forget_peak`."""
    found = _status("VmHWM")
    if found is not None:
        return found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def forget_peak() -> bool:
    """Give freed memory back and begin to count anew what is held at most; false where the system cannot (not Linux).

    What malloc keeps of earlier work would count as memory of what comes next.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets the high-water mark: proc(5)
    except (OSError, AttributeError, TypeError):
        return False
    return _status("VmHWM") is not None


def _status(key: str) -> float | None:
    """Megabytes, from what Linux says of this process."""
    try:
        with open("/proc/self/status") as lines:
            facts = dict(line.split(":", 1) for line in lines)
        return int(facts[key].split()[0]) / 2**10
    except (OSError, KeyError):
        return None
