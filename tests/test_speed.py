"""Sizes and operations against counts by hand; what is measured has its shape, and its sentence says what it means."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torchvision
import transformers
from torch import Tensor, nn

import starfish
from cases import IMAGES, tiny_vit
from starfish import speed
from starfish.anatomy import find
from starfish.core import finish
from starfish.data import as_images
from starfish.masks import apply_
from starfish.pruners.structured import Structured
from starfish.small import slimmed
from starfish.speed import batch_of, cost, first, flops, latencies, measuring, shape_of, verdict


def halved(model: nn.Module, scope: str = "mlp+qk") -> tuple[nn.Module, nn.Module]:
    """The model with half of its units zero, and without them."""
    masked = deepcopy(model).eval()
    masks = starfish.prune(masked, Structured(0.5, scope=scope, criterion="weight"), IMAGES[:2])
    apply_(masked, masks)
    return masked, slimmed(masked, masks, find(masked, IMAGES[:2]))


def test_operations_of_a_linear_layer_are_two_a_weight() -> None:
    """For each row that it reads; the bias is not counted."""
    assert flops(nn.Linear(8, 5), torch.randn(4, 8)) == 2 * 8 * 5
    assert flops(nn.Linear(8, 5), torch.randn(4, 7, 8)) == 7 * 2 * 8 * 5


@pytest.mark.parametrize(
    ("layer", "by_hand"),
    [
        (nn.Conv2d(3, 10, 3, padding=1), 16 * 16 * 10 * 3 * 9),
        (nn.Conv2d(3, 10, 3, stride=2, padding=1), 8 * 8 * 10 * 3 * 9),
        (nn.Conv2d(3, 12, 1, groups=3), 16 * 16 * 12),
    ],
)
def test_operations_of_a_convolution(layer: nn.Module, by_hand: int) -> None:
    """Output positions × output channels × the inputs of each, twice."""
    assert flops(layer, torch.randn(2, 3, 16, 16)) == 2 * by_hand


TOKENS, WIDTH, HEADS, DEPTH, HIDDEN = 17, 24, 3, 2, 96


def vit_by_hand(width: int, hidden: int, patches: int = 16, tokens: int = TOKENS) -> int:
    """Multiplications and additions of tiny_vit with heads whose queries have this width."""
    qkv = tokens * WIDTH * (2 * HEADS * width + WIDTH)
    attention = tokens * tokens * HEADS * (width + WIDTH // HEADS)
    block = qkv + attention + tokens * WIDTH * WIDTH + 2 * tokens * WIDTH * hidden
    return 2 * (patches * 3 * 64 * WIDTH + DEPTH * block + WIDTH * 5)


def test_operations_of_a_vit_wide_and_narrow() -> None:
    """Attention counts at the width of its own queries and keys: the zeros that pad them are no work of the model's."""
    dense = tiny_vit()
    masked, small = halved(dense)
    assert flops(dense, IMAGES) == flops(masked, IMAGES) == vit_by_hand(8, HIDDEN)
    assert flops(small, IMAGES) == vit_by_hand(4, HIDDEN // 2)


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, DEPTH, HEADS, WIDTH, HIDDEN, num_classes=5)


def transformers_vit() -> nn.Module:
    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": HEADS,
        "intermediate_size": HIDDEN,
    }
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=5)
    return transformers.ViTForImageClassification(config)


@pytest.mark.parametrize("build", [torchvision_vit, transformers_vit])
def test_operations_of_other_libraries_vits(build: Any) -> None:
    """The same count, whatever kernel or fast path each of them takes."""
    dense = build().eval()
    _, small = halved(dense)
    assert flops(dense, IMAGES) == vit_by_hand(8, HIDDEN)
    assert flops(small, IMAGES) == vit_by_hand(4, HIDDEN // 2)


def test_counting_leaves_the_model_alone() -> None:
    """Also where it is training; the number of images given does not matter."""
    model = tiny_vit().train()
    before = deepcopy(model.state_dict())
    assert flops(model, IMAGES) == flops(model, IMAGES[:1])
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Padded(nn.Module):
    """Pads by itself, for reasons of its own, and not with zeros."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        q = nn.functional.pad(x, (0, 4), value=self.value)
        return nn.functional.scaled_dot_product_attention(q, q, x)


def test_only_zeros_are_left_out() -> None:
    """What is padded with something else is multiplied for a reason."""
    x = torch.randn(2, 1, 5, 4)
    assert flops(Padded(0.0), x) == 2 * 5 * 5 * (4 + 4)
    assert flops(Padded(1.0), x) == 2 * 5 * 5 * (8 + 4)


def test_cost_counts_parameters_zeros_and_bytes() -> None:
    """Buffers are in the file, and no parameters; a zero is in the file too."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        model[0].weight.fill_(1)
        model[0].bias.fill_(1)
        model[0].weight[0] = 0
        model[1].bias.fill_(1)
    found = cost(model.eval(), torch.randn(2, 3))
    assert found == {"parameters": 24, "nonzero": 21, "file_mb": (24 * 4 + 8 * 4 + 8) / 1e6, "flops": 2 * 3 * 4}


def test_inputs_are_repeated_where_there_are_too_few() -> None:
    """Also of a dict."""
    x = torch.arange(3.0)[:, None]
    assert batch_of(x, 5)[:, 0].tolist() == [0, 1, 2, 0, 1]
    assert batch_of({"x": x}, 2)["x"][:, 0].tolist() == [0, 1]
    assert shape_of(IMAGES) == [3, 32, 32]
    assert shape_of({"x": x}) is None
    assert len(first(as_images(IMAGES))) == 12
    assert len(first(as_images(IMAGES.repeat(3, 1, 1, 1)))) == 32


def test_latencies_take_turns_and_have_a_median_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name → batch size → milliseconds: the middle one of what the clock says, warm-up left out."""
    order: list[str] = []

    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.weight = name, nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            order.append(f"{self.name}{len(x)}")
            return x * self.weight

    models = {name: Named(name).train() for name in "ab"}
    ticks = iter([*[0.0, 100.0] * 2, *(t for took in (1, 10, 2, 50, 9, 30) for t in (0.0, took))] * 2)
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(ticks))
    work = latencies(models, torch.ones(2, 1), batches=(1, 4), repeats=3)
    rows = []
    while True:
        try:
            rows.append(next(work))
        except StopIteration as end:
            found = end.value
            break
    assert found == {"a": {"1": 2000.0, "4": 2000.0}, "b": {"1": 30000.0, "4": 30000.0}}
    assert order == ["a1", "b1"] * 4 + ["a4", "b4"] * 4
    assert [row["done"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert {row["total"] for row in rows} == {6}
    assert not any(model.training for model in models.values())


def test_slow_models_run_fewer_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not below the fewest, and the last row says that it is done."""
    monkeypatch.setattr(speed, "LONGEST", -1.0)
    runs: list[int] = []
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda *_: runs.append(1))
    *_, last = latencies({"model": model}, torch.ones(2, 2), batches=(1,), repeats=100)
    assert (last["done"], last["total"]) == (100, 100)
    assert len(runs) == speed.WARM_UP + speed.FEWEST


def times(one: float, many: float) -> dict[str, float]:
    return {"1": one, "32": many}


def test_the_verdict_on_zeros() -> None:
    """They are multiplied like any number, and what would help is said."""
    text = verdict({"dense": times(10, 100), "masked": times(9.8, 101)})
    assert text.startswith("The masked model is no faster than the dense one (9.8 ms against 10 at batch 1, 101 ms")
    assert "its zeros are multiplied like any number" in text
    assert "a runtime that skips zeros, or masks of whole units" in text
    assert text.endswith(".")


def test_the_verdict_on_a_small_model() -> None:
    """How many times as fast at each batch size, and why the masked one is not."""
    text = verdict({"dense": times(10, 100), "masked": times(10, 100), "small": times(5, 40)})
    assert text.startswith(
        "The small model is faster than the dense one, 2.00 times at batch 1 and 2.50 times at batch 32"
    )
    assert "; the masked model is no faster" in text
    assert "masks of whole units" not in text


def test_the_verdict_does_not_promise_what_was_not_measured() -> None:
    """A small model that is no faster is said to be none; a masked one that is faster has no excuse to make."""
    assert verdict({"dense": times(10, 100), "small": times(9.5, 98)}).startswith("The small model is no faster")
    text = verdict({"dense": times(10, 100), "masked": times(5, 50)})
    assert "masked model is faster" in text
    assert "zeros" not in text


def test_all_that_is_measured_of_a_pruned_model() -> None:
    """Dense, masked and small side by side; without units gone there is no small one."""
    dense = tiny_vit()
    masked, small = halved(dense)
    found = finish(measuring(dense, masked, small, as_images(IMAGES)))
    assert list(found) == ["dense", "masked", "small", "input", "verdict"]
    assert found["input"] == [3, 32, 32]
    assert found["small"]["parameters"] < found["masked"]["parameters"] == found["dense"]["parameters"]
    assert found["masked"]["nonzero"] < found["dense"]["nonzero"]
    assert found["small"]["file_mb"] < found["masked"]["file_mb"] == found["dense"]["file_mb"]
    assert all(list(found[name]["latency_ms"]) == ["1", "32"] for name in ("dense", "masked", "small"))
    assert all(ms > 0 for name in ("dense", "masked", "small") for ms in found[name]["latency_ms"].values())
    assert "small" not in finish(measuring(dense, masked, None, as_images(IMAGES)))


def test_a_pruned_model_that_came_in_small_is_the_small_one() -> None:
    """There is no masked one then."""
    dense = tiny_vit()
    _, small = halved(dense)
    assert list(finish(measuring(dense, small, None, as_images(IMAGES))))[:2] == ["dense", "small"]
