"""Where and how precisely: what is asked for is obeyed or refused, what is left open follows a rule."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from starfish import devices
from starfish.devices import (
    autocast,
    choose_device,
    choose_precision,
    forget_peak,
    keep_freed_memory,
    peak_rss_mb,
    to_device,
)
from starfish.errors import UserError

CPU = torch.device("cpu")
MATRIX, KERNEL = torch.ones(8, 8), torch.ones(2, 2, 3, 3)


@pytest.mark.parametrize(
    ("able", "weights", "chosen"),
    [
        (True, [MATRIX, KERNEL], "bf16"),
        (True, [MATRIX, KERNEL, KERNEL], "fp32"),
        (True, [KERNEL], "fp32"),
        (False, [MATRIX], "fp32"),
    ],
)
def test_auto_takes_bf16_for_matrices_on_a_processor_that_can(
    able: bool, weights: list[Tensor], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the share of the weights, and the same each time."""
    monkeypatch.setattr(devices, "cpu_multiplies_in_bf16", lambda: able)
    assert choose_precision("auto", CPU, weights) == chosen


def test_the_processor_is_asked() -> None:
    assert devices.cpu_multiplies_in_bf16() in {True, False}


@pytest.mark.parametrize("wanted", ["fp32", "bf16"])
def test_a_given_precision_is_obeyed(wanted: str) -> None:
    assert choose_precision(wanted, CPU, [KERNEL]) == wanted


@pytest.mark.parametrize("wanted", ["fp16", "", "BF16", "float32"])
def test_another_precision_is_refused(wanted: str) -> None:
    with pytest.raises(UserError, match="the precision is") as error:
        choose_precision(wanted, CPU, [MATRIX])
    assert "auto, fp32 or bf16" in error.value.hint


def test_a_given_device_is_obeyed_and_auto_is_usable() -> None:
    assert choose_device("cpu") == CPU
    assert float(torch.ones(2, device=choose_device()).sum()) == 2


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "", "cpu:x", "xla", "hpu", "meta"])
def test_another_device_is_refused_by_name(name: str) -> None:
    with pytest.raises(UserError, match=f"the device `{name}` cannot be used"):
        choose_device(name)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast_is_what_it_is_called(precision: str, dtype: torch.dtype) -> None:
    with autocast(CPU, precision):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_whatever_holds_tensors_is_moved() -> None:
    meta: Any = to_device({"a": torch.ones(2), "b": {"c": torch.ones(3)}}, torch.device("meta"))
    assert meta["a"].is_meta
    assert meta["b"]["c"].is_meta
    assert to_device("text", CPU) == "text"


def test_freed_memory_is_kept_where_the_library_can() -> None:
    """Asked of glibc, which obeys, or of another library, which is left alone; in a process of its own."""
    import subprocess
    import sys

    code = "from starfish.devices import keep_freed_memory; import platform; "
    code += "assert keep_freed_memory() == (platform.libc_ver()[0] == 'glibc')"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot forget")
def test_the_peak_of_memory_is_forgotten() -> None:
    """Afterwards it is that of what came since, and what malloc had kept has gone back."""
    keep_freed_memory()
    held = torch.ones(300 * 2**18)
    before = peak_rss_mb()
    del held
    assert peak_rss_mb() == pytest.approx(before, abs=20)
    assert forget_peak()
    after = peak_rss_mb()
    assert after < before - 250
    held = torch.ones(100 * 2**18)
    assert 80 < peak_rss_mb() - after < 130
    assert float(held[0]) == 1


def test_without_proc_the_peak_is_the_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On systems that are no Linux: a figure all the same, and the truth about what it is."""
    known = peak_rss_mb()

    def absent(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", absent)
    assert not forget_peak()
    assert peak_rss_mb() > 0.5 * known
