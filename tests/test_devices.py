"""Where and how precisely: what is asked for is obeyed or refused, what is left open is measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import tiny_vit
from starfish import devices
from starfish.devices import autocast, choose_device, choose_precision, to_device
from starfish.errors import UserError

CPU = torch.device("cpu")
Step = tuple[nn.Module, Tensor, list[Tensor]]


@pytest.fixture
def step(images: Tensor) -> Step:
    """What the probe takes: a model, inputs, and the weights that will be trained."""
    model = tiny_vit()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model, images[:2], [model.get_parameter("blocks.0.mlp.fc1.weight"), model.get_parameter("head.weight")]


def test_auto_precision_is_one_of_two(step: Step) -> None:
    assert choose_precision("auto", *step) in {"fp32", "bf16"}


@pytest.mark.parametrize(("fp32", "bf16", "chosen"), [(1.0, 0.5, "bf16"), (1.0, 0.9, "fp32"), (1.0, 2.0, "fp32")])
def test_the_probe_decides(fp32: float, bf16: float, chosen: str, step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_step_seconds", lambda precision, *_: {"fp32": fp32, "bf16": bf16}[precision])
    assert choose_precision("auto", *step) == chosen


@pytest.mark.parametrize("wanted", ["fp32", "bf16"])
def test_a_given_precision_is_obeyed_without_a_probe(wanted: str, step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_step_seconds", None)
    assert choose_precision(wanted, *step) == wanted


@pytest.mark.parametrize("wanted", ["fp16", "", "BF16", "float32"])
def test_another_precision_is_refused(wanted: str, step: Step) -> None:
    with pytest.raises(UserError, match="the precision is") as error:
        choose_precision(wanted, *step)
    assert "auto, fp32 or bf16" in error.value.hint


class NoBf16(nn.Module):
    """As on a device or with an operator that knows no bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.layer(x)
        if answer.dtype == torch.bfloat16:
            raise RuntimeError("not implemented for BFloat16")
        return answer


def test_where_bf16_does_not_work_it_is_fp32() -> None:
    model = NoBf16()
    model.layer.weight.requires_grad_(False)
    assert choose_precision("auto", model, torch.ones(2, 4), [model.layer.weight]) == "fp32"
    assert not model.layer.weight.requires_grad


def test_the_probe_leaves_the_model_as_it_was(step: Step) -> None:
    """Weights, what is to be trained, gradients and the random state."""
    model, _, weights = step
    weights[1].requires_grad_(True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    choose_precision("auto", *step)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == ["head.weight"]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_weights_the_answer_does_not_depend_on_are_no_trouble() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 2), "idle": nn.Linear(4, 2)})
    model.forward = model["used"].forward
    assert choose_precision("auto", model, torch.ones(2, 4), [model["idle"].weight]) in {"fp32", "bf16"}


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
