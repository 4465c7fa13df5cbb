"""Recording what modules put out, and calling models of every form."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from starfish.activations import Recorder, call, logits, positions
from starfish.core import Layout
from starfish.errors import UserError


class Wrap(nn.Module):
    """Puts a Linear's output into whatever form `form` gives it."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.inner(x))


class Overwrites(nn.Module):
    """What follows the block changes the block's output in place."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.block(x))


FORMS = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, y + 1),
    "list": lambda y: [y, y + 1],
    "dict": lambda y: OrderedDict(logits=y, hidden=y + 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_found_in_every_form_of_output(form: str) -> None:
    """A tensor, the first of a tuple or list, or the entry `logits` of a mapping."""
    model, x = Wrap(FORMS[form]), torch.randn(2, 4)
    assert torch.equal(logits(model, x), model.inner(x))


@pytest.mark.parametrize("form", [lambda y: {"hidden": y}, lambda y: (), lambda y: ("a", y), lambda y: None])
def test_an_output_without_logits_is_refused_by_type(form: Any) -> None:
    """The error names the type that the model returned, and says what would do."""
    with pytest.raises(UserError, match=type(form(0)).__name__) as error:
        logits(Wrap(form), torch.randn(2, 4))
    assert "logits" in error.value.hint


def test_a_mapping_of_inputs_is_passed_as_keywords() -> None:
    """Transformers models take `pixel_values=…`."""
    model, x = Wrap(FORMS["tensor"]), torch.randn(2, 4)
    assert torch.equal(call(model, {"x": x}), call(model, x))


@pytest.mark.parametrize("form", FORMS)
def test_the_recorder_takes_the_first_tensor_in_the_order_of_the_names(form: str) -> None:
    """Whatever the form of a module's output, and in whichever order the modules ran."""
    model, x = Wrap(FORMS[form]), torch.randn(2, 4)
    with Recorder(model, ["", "inner"]) as recorder:
        model(x)
        assert recorder.fired == ("inner", "")
        outputs = recorder.take()
    assert list(outputs) == ["", "inner"]
    assert torch.equal(outputs[""], outputs["inner"])


def test_a_module_without_a_tensor_output_is_named() -> None:
    """Aligning it is impossible, and the way out is another choice of blocks."""
    model = nn.Sequential(OrderedDict(odd=Wrap(lambda y: "text")))
    with Recorder(model, ["odd"]), pytest.raises(UserError, match=r"`odd`.*`str`"):
        model(torch.randn(2, 4))


def test_a_later_operation_in_place_does_not_change_the_record() -> None:
    """The record is the module's own output, negative entries included, and its gradient is right."""
    torch.manual_seed(0)
    model, x = Overwrites(), torch.randn(8, 4)
    with Recorder(model, ["block"]) as recorder:
        model(x)
        recorded = recorder.take()["block"]
    assert recorded.min() < 0
    torch.testing.assert_close(recorded, model.block(x))
    recorded.sum().backward()
    torch.testing.assert_close(model.block.weight.grad, x.sum(0).expand(4, 4))


def test_a_module_that_never_ran_is_named() -> None:
    """Also when it ran before the last take: nothing stale is handed out."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with Recorder(model, ["0", "1"]) as recorder:
        model(torch.randn(2, 4))
        recorder.take()
        model[0](torch.randn(2, 4))
        with pytest.raises(UserError, match="`1`"):
            recorder.take()
        assert list(recorder.take(["0"])) == ["0"]


def test_a_shared_module_keeps_its_last_output() -> None:
    """A block that runs twice is recorded after its second run."""
    block = nn.Linear(4, 4)
    model, x = nn.Sequential(block, block), torch.randn(2, 4)
    with Recorder(model, ["0"]) as recorder:
        out = model(x)
        assert torch.equal(recorder.take()["0"], out)


def test_hooks_are_gone_after_the_block_even_after_an_error() -> None:
    """A model that was recorded is the model it was."""
    model = nn.Linear(4, 4)
    with pytest.raises(RuntimeError), Recorder(model, [""]):
        model(torch.randn(2, 5))
    assert not model._forward_hooks


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    """A typing error costs one look at the message."""
    with pytest.raises(UserError, match="`inmer`") as error:
        Recorder(Wrap(FORMS["tensor"]), ["inmer"])
    assert "`inner`" in error.value.hint


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((2, 5, 3), Layout(0, 2)),  # tokens
        ((5, 2, 3), Layout(1, 2)),  # sequence first
        ((2, 3, 1, 5), Layout(0, 1)),  # NCHW
        ((2, 1, 5, 3), Layout(0, 3)),  # NHWC
    ],
)
def test_positions_bring_every_layout_to_images_positions_channels(shape: tuple[int, ...], layout: Layout) -> None:
    """Image b, position p, channel c of any layout lands at [b, p, c]; a 2-D output has one position."""
    wanted = torch.randn(2, 5, 3)
    output = torch.empty(shape)
    for b, p, c in torch.cartesian_prod(torch.arange(2), torch.arange(5), torch.arange(3)).tolist():
        place = [0 if size == 1 else p for size in shape]
        place[layout.batch], place[layout.channel] = b, c
        output[tuple(place)] = wanted[b, p, c]
    assert torch.equal(positions(output, layout, 2), wanted)
    windows = wanted.reshape(10, 1, 3)  # five windows of one position to an image
    assert torch.equal(positions(windows, Layout(0, 2), 2), wanted)
    assert positions(wanted[:, 0], Layout(0, 1), 2).shape == (2, 1, 3)
