"""Where and how precisely: what is asked for is obeyed or refused, what is left open is measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from starfish import devices
from starfish.devices import autocast, choose_device, choose_precision, to_device
from starfish.errors import UserError

CPU = torch.device("cpu")


def test_auto_precision_is_one_of_two() -> None:
    assert choose_precision("auto", CPU) in {"fp32", "bf16"}


@pytest.mark.parametrize(("fp32", "bf16", "chosen"), [(1.0, 0.5, "bf16"), (1.0, 0.9, "fp32"), (1.0, 2.0, "fp32")])
def test_the_probe_decides(fp32: float, bf16: float, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_seconds", lambda dtype, device: fp32 if dtype == torch.float32 else bf16)
    assert choose_precision("auto", CPU) == chosen


def test_a_device_without_bf16_gets_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(dtype: torch.dtype, device: torch.device) -> float:
        if dtype == torch.bfloat16:
            raise RuntimeError("not implemented for BFloat16")
        return 1.0

    monkeypatch.setattr(devices, "_seconds", seconds)
    assert choose_precision("auto", CPU) == "fp32"


@pytest.mark.parametrize("wanted", ["fp32", "bf16"])
def test_a_given_precision_is_obeyed_without_a_probe(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_seconds", None)
    assert choose_precision(wanted, CPU) == wanted


@pytest.mark.parametrize("wanted", ["fp16", "", "BF16", "float32"])
def test_another_precision_is_refused(wanted: str) -> None:
    with pytest.raises(UserError, match="the precision is") as error:
        choose_precision(wanted, CPU)
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
