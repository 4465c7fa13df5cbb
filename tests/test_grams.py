"""Gram matrices of layers, against what the layers really put out."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import Conv2dSame
from torch import Tensor, nn

from cases import IMAGES, tiny_vit
from starfish import grams
from starfish.activations import Product, Products
from starfish.anatomy import find
from starfish.cache import Cache
from starfish.core import Anatomy, finish
from starfish.data import as_images
from starfish.errors import UserError
from starfish.grams import Gram, Sweep, as_matrix, as_weight, groups_of, patches


class Alone(nn.Module):
    """One layer, and a block for the anatomy to stand on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


BARE = Anatomy(blocks=(), layouts={}, roles={}, units=(), untrained=(), tail={})
CONVOLUTIONS = {
    "3×3": lambda: nn.Conv2d(4, 6, 3, padding=1),
    "stride and dilation": lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(2, 0), dilation=(2, 1)),
    "pointwise": lambda: nn.Conv2d(4, 6, 1, stride=2, bias=False),
    "groups": lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=4),
    "two filters a channel": lambda: nn.Conv2d(4, 8, 3, groups=4),
    "same, of torch": lambda: nn.Conv2d(4, 6, (4, 3), padding="same"),
    "valid, of torch": lambda: nn.Conv2d(4, 6, 3, padding="valid"),
    "same, of timm": lambda: Conv2dSame(4, 6, 3, stride=2),
    "reflected": lambda: nn.Conv2d(4, 6, 3, padding=2, padding_mode="reflect"),
}


def gathered(model: nn.Module, inputs: Tensor, names: list[str], **settings: Any) -> dict[str, Gram]:
    sweep = Sweep(model, BARE, as_images(inputs), names, **settings)
    stages, found = sweep.stages(), {}
    for place in range(len(stages)):
        found |= finish(sweep.grams(stages[place:]))
    return found


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch says that it copies where a kernel is even
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_of_a_convolution_as_its_outputs_say(kind: str) -> None:
    """W H Wᵀ is the mean of y yᵀ over all positions, for any kernel, stride, padding and number of groups."""
    model = Alone(CONVOLUTIONS[kind]()).double()
    x = torch.randn(5, 4, 9, 8, dtype=torch.float64)
    weight, groups = model.layer.weight.detach(), groups_of(model, "layer.weight")
    W_GOI = as_matrix(weight, groups)
    y = model(x).detach()
    if model.layer.bias is not None:
        y = y - model.layer.bias[:, None, None]
    y_GNO = y.unflatten(1, (groups, -1)).permute(1, 0, 3, 4, 2).flatten(1, 3)
    H_GII = gathered(model, x, ["layer.weight"])["layer.weight"].take("own")
    torch.testing.assert_close(W_GOI @ H_GII @ W_GOI.mT, y_GNO.mT @ y_GNO / y_GNO.shape[1], rtol=1e-10, atol=1e-12)
    assert torch.equal(as_weight(W_GOI, weight), weight)


def test_columns_run_over_taps_then_inputs() -> None:
    """So that groups of M consecutive columns are M inputs of one tap."""
    weight = torch.arange(2 * 3 * 4.0).reshape(2, 3, 2, 2)
    assert as_matrix(weight, 1)[0, 0, :3].tolist() == [weight[0, i, 0, 0] for i in range(3)]
    x = torch.randn(1, 3, 2, 2)
    row = patches(Product("", x, (2, 2), (1, 1), (0, 0), (1, 1)), slice(0, 1))[0, 0]
    assert row.tolist() == x[0].double().permute(1, 2, 0).flatten().tolist()


def test_one_dimensional_convolution_and_linear() -> None:
    """Sequences have positions as pictures do; a linear layer's rows are all dimensions but the last."""
    for layer, x in (
        (nn.Conv1d(3, 5, 4, stride=2, padding=1), torch.randn(4, 3, 11)),
        (nn.Linear(6, 5), torch.randn(4, 2, 6)),
    ):
        model = Alone(layer.double())
        y = model(x.double()).detach()
        y = y - layer.bias.view(-1, *(1,) * (y.ndim - 2)) if isinstance(layer, nn.Conv1d) else y - layer.bias
        y_NO = (y.movedim(1, -1) if isinstance(layer, nn.Conv1d) else y).reshape(-1, 5)
        W_OI = as_matrix(layer.weight.detach(), 1)[0]
        H_II = gathered(model, x.double(), ["layer.weight"])["layer.weight"].take("own")[0]
        torch.testing.assert_close(W_OI @ H_II @ W_OI.T, y_NO.T @ y_NO / len(y_NO), rtol=1e-10, atol=1e-12)


def test_batch_size_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over batches of 16, of 5 and over patches of one image at a time are the same to 1e-10."""
    model, x = Alone(nn.Conv2d(4, 6, 3)).double(), torch.randn(16, 4, 9, 8, dtype=torch.float64)
    whole = gathered(model, x, ["layer.weight"])["layer.weight"].take("own")
    for name, value in (("BATCH", 5), ("PATCHES", 1)):
        monkeypatch.setattr(grams, name, value)
        torch.testing.assert_close(
            gathered(model, x, ["layer.weight"])["layer.weight"].take("own"), whole, rtol=1e-10, atol=0
        )


def test_the_diagonal_alone() -> None:
    """Mean squares are the diagonal of the Gram matrix."""
    model, x = Alone(nn.Conv2d(4, 6, 3)).double(), torch.randn(7, 4, 9, 8, dtype=torch.float64)
    full = gathered(model, x, ["layer.weight"])["layer.weight"].take("own")
    square = gathered(model, x, ["layer.weight"], diagonal=True)["layer.weight"].take("square")
    torch.testing.assert_close(square, full.diagonal(dim1=1, dim2=2))


class TwoLayers(nn.Module):
    """The second layer runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(5, 5), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.second(torch.tanh(self.first(x))).relu_())  # type: ignore[no-any-return]


def test_stages_are_in_the_order_of_running_and_shared_layers_add_up() -> None:
    """Registration says nothing; a layer that runs twice reads twice as much."""
    model, x = TwoLayers().double(), torch.randn(6, 4, dtype=torch.float64)
    sweep = Sweep(model, BARE, as_images(x), ["second.weight", "first.weight"])
    assert sweep.stages() == [["first.weight"], ["second.weight"]]
    H_II = gathered(model, x, ["second.weight"])["second.weight"].take("own")[0]
    with torch.no_grad():
        one = torch.tanh(model.first(x))
        rows = torch.cat([one, model.second(one).relu()])
    torch.testing.assert_close(H_II, rows.T @ rows / 12)


def test_of_a_student_beside_the_dense_model() -> None:
    """`own` is of what the student reads, `cross` of that and what the dense model reads, `energy` what it puts out."""
    dense, x = TwoLayers().double(), torch.randn(6, 4, dtype=torch.float64)
    student = deepcopy(dense)
    nn.init.normal_(student.first.weight)
    found = gathered(dense, x, ["second.weight"], student=student, cross=True)["second.weight"]
    with torch.no_grad():
        firsts = [torch.tanh(model.first(x)) for model in (student, dense)]
        s, d = (torch.cat([one, model.second(one).relu()]) for one, model in zip(firsts, (student, dense), strict=True))
    for which, pair in (("own", (s, s)), ("cross", (s, d))):
        torch.testing.assert_close(found.take(which)[0], pair[0].T @ pair[1] / 12)
    put_out = d @ dense.second.weight.detach().T
    torch.testing.assert_close(found.take("energy")[0], put_out.square().mean(0))


def test_a_block_alone_is_heard_as_in_the_whole_model() -> None:
    """A stage runs its block on what entered it, kept from one layer to the next, and finds what the model would."""
    dense = tiny_vit().double()
    anatomy, x = find(dense, IMAGES[:2].double()), as_images(IMAGES.double())
    student = deepcopy(dense)
    nn.init.normal_(student.get_parameter("blocks.0.attn.qkv.weight"))
    names = [name for name in anatomy.roles if name.startswith("blocks.1")]
    found = []
    for seen in (anatomy, replace(anatomy, blocks=())):  # without blocks the whole model runs
        sweep = Sweep(dense, seen, x, names, student, cross=True)
        stages = sweep.stages()
        found.append([finish(sweep.grams(stages[place:])) for place in range(len(stages))])
    assert len(stages) == 4
    for alone, whole in zip(*found, strict=True):
        for name, gram in alone.items():
            for which in ("own", "cross", "energy"):
                torch.testing.assert_close(gram.take(which), whole[name].take(which), rtol=1e-10, atol=1e-12)


def test_layers_of_a_block_make_one_stage() -> None:
    """By block, everything in it is heard at once; what lies outside stands alone."""
    model = tiny_vit()
    anatomy = find(model, IMAGES[:2])
    names = [name for name, role in anatomy.roles.items() if role != "other"]
    sweep = Sweep(model, anatomy, as_images(IMAGES), names, by_block=True)
    assert [len(stage) for stage in sweep.stages()] == [4, 4, 1]
    assert sweep.stages()[0][0] == "blocks.0.attn.qkv.weight"


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y


def test_torchs_attention_is_heard_inside() -> None:
    """`in_proj_weight` reads the tokens, `out_proj` the heads' values, though torch multiplies out of sight."""
    model, x = Attends().double().eval(), torch.randn(3, 5, 8, dtype=torch.float64)
    names = ["attention.in_proj_weight", "attention.out_proj.weight"]
    found = gathered(model, x, names)
    rows = x.flatten(0, 1)
    torch.testing.assert_close(found[names[0]].take("own")[0], rows.T @ rows / 15)
    W_OI = model.attention.out_proj.weight.detach()
    y = (model(x).detach() - model.attention.out_proj.bias).flatten(0, 1)
    H_II = found[names[1]].take("own")[0]
    torch.testing.assert_close(W_OI @ H_II @ W_OI.T, y.T @ y / 15, rtol=1e-6, atol=1e-9)


class Hidden(nn.Module):
    """Multiplies by its weight in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layer.weight.T


def test_what_cannot_be_heard_is_named() -> None:
    """A weight that no layer multiplies by is refused, not taken as reading nothing."""
    with pytest.raises(UserError, match=r"`layer\.weight`"):
        Sweep(Hidden(), BARE, as_images(torch.randn(3, 4)), ["layer.weight"]).stages()


def test_memory_sets_how_many_stages_are_heard_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With little memory each layer takes a pass over the images, and finds the same."""
    model, x = TwoLayers().double(), torch.randn(6, 4, dtype=torch.float64)
    names, calls = ["first.weight", "second.weight"], []
    hear = Sweep._hear
    monkeypatch.setattr(Sweep, "_hear", lambda self, found: calls.append(list(found)) or hear(self, found))
    few, many = (gathered(model, x, names, memory_gb=size) for size in (1e-9, 1.0))
    assert calls == [["first.weight"], ["second.weight"], names]
    for name in names:
        assert torch.equal(few[name].take("own"), many[name].take("own"))


def test_found_again_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense model's Gram matrices are kept; a student's, which is as it is but once, are not."""
    model, x = TwoLayers().double(), torch.randn(6, 4, dtype=torch.float64)
    cache = Cache(tmp_path)
    first = gathered(model, x, ["first.weight"], cache=cache)["first.weight"].take("own")
    monkeypatch.setattr(Sweep, "_hear", lambda self, found: pytest.fail("it listened again"))
    assert torch.equal(gathered(model, x, ["first.weight"], cache=cache)["first.weight"].take("own"), first)
    monkeypatch.undo()
    files = set(tmp_path.iterdir())
    gathered(model, x, ["first.weight"], cache=cache, student=deepcopy(model))
    assert set(tmp_path.iterdir()) == files


def test_products_are_told_whichever_module_multiplies() -> None:
    """A hook on modules would miss a weight that is used by hand."""
    weight, heard = nn.Parameter(torch.randn(3, 4)), []
    with Products({"w": weight}, heard.append):
        nn.functional.linear(torch.ones(2, 4), weight)
        nn.functional.linear(input=torch.zeros(1, 4), weight=weight)
        nn.functional.linear(torch.ones(2, 4), weight.detach().clone())
    assert [len(one.x) for one in heard] == [2, 1]
