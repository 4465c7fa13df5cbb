"""Factors of the heads, neurons and channels that stay, against what each adds, written out (methods.md 11.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import starfish
from cases import CLASSES, IMAGES, LABELS, all_ones, tiny_cnn, tiny_vit
from starfish.core import Job, Masks, Row
from starfish.data import Preprocess, StoredImages
from starfish.errors import UserError
from starfish.heal import job_of
from starfish.methods.kwon import Kwon, _Equations, damped
from starfish.pruners.kwon import ByKwon
from starfish.pruners.magnitude import Magnitude

PIXELS = IMAGES[:6].double()
PICTURES = StoredImages(PIXELS, Preprocess(), LABELS[:6])
HEADS, WIDTH, D = 3, 8, 24


class Block(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.deep = nn.Conv2d(8, 8, 3, 1, 1, groups=groups)
        self.point = nn.Conv2d(8, 8, 1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.norm(self.point(F.relu(self.deep(x))))
        return answer


class Separable(nn.Module):
    """Depthwise and grouped filters, and a convolution over all positions in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.blocks = nn.Sequential(Block(8), Block(4))
        self.last = nn.Conv1d(8, 6, 3, 1, 1)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.stem(x)))
        answer: Tensor = self.head(F.relu(self.last(x.flatten(2))).mean(2))
        return answer


def with_biases(model: nn.Module) -> nn.Module:
    random = torch.Generator().manual_seed(3)
    for name, parameter in model.double().eval().named_parameters():
        if name.endswith("bias"):
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=random)
    return model


@cache
def dense_of(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return with_biases({"vit": tiny_vit, "cnn": tiny_cnn, "separable": Separable}[kind]())


def job_for(dense: nn.Module, masks: Masks, model: nn.Module | None = None) -> Job:
    return job_of(deepcopy(model or dense), dense, masks, PICTURES)


def masks_for(kind: str, pruner: starfish.Pruner) -> Masks:
    return starfish.prune(dense_of(kind), pruner, PICTURES)


def rows_of(job: Job, method: Kwon | None = None) -> list[Row]:
    return [row for row in (method or Kwon()).fit(job) if "stage" not in row]


def recorded(net: nn.Module, reads: list[str], puts_out: list[str]) -> dict[str, Tensor]:
    """What goes into some modules and comes out of others, on all images."""
    seen: dict[str, Tensor] = {}

    def into(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            seen[f"into {name}"] = inputs[0].detach().clone()

        return hook

    def out(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            seen[f"out {name}"] = output.detach().clone()

        return hook

    with ExitStack() as hooks:
        for name in reads:
            hooks.enter_context(net.get_submodule(name).register_forward_pre_hook(into(name)))
        for name in puts_out:
            hooks.enter_context(net.get_submodule(name).register_forward_hook(out(name)))
        with torch.no_grad():
            net(PIXELS)
    return seen


COMPARED = {  # the stream behind each layer of the small ViT
    "blocks.0.mlp.fc2": "out blocks.0",
    "blocks.1.attn.proj": "into blocks.1.norm2",
    "blocks.1.mlp.fc2": "out blocks.1",
}


def compared(net: nn.Module, layer: str) -> Tensor:
    """What the least squares of a layer are about: of the last MLP only the class token."""
    place = COMPARED.get(layer, f"out {layer}")
    side, _, name = place.partition(" ")
    x = recorded(net, [name] if side == "into" else [], [name] if side == "out" else [])[place]
    return x[:, :1] if layer == "blocks.1.mlp.fc2" else x


def contributions(net: nn.Module, layer: str) -> list[Tensor]:
    """What each unit of a layer adds to its output, one after the other."""
    module = net.get_submodule(layer)
    x = recorded(net, [layer], [])[f"into {layer}"]
    dim = 1 if isinstance(module, (nn.Conv1d, nn.Conv2d)) else -1
    width = WIDTH if layer.endswith("attn.proj") else 1
    added = []
    for start in range(0, x.shape[dim], width):
        index = torch.zeros(x.shape[dim], dtype=x.dtype)
        index[start : start + width] = 1
        alone = x * index.view([-1 if d == dim % x.ndim else 1 for d in range(x.ndim)])
        with torch.no_grad():
            weights = {"bias": torch.zeros_like(module.bias)} if module.bias is not None else {}
            y = functional_call(module, weights, (alone,))
        added.append(y[:, :1] if layer == "blocks.1.mlp.fc2" else y)
    return added


def by_numpy(student: nn.Module, dense: nn.Module, layer: str) -> tuple[np.ndarray, float, float]:
    """1 + z of the normal equations damped by 1, and the mean squared residual with ones and with these factors."""
    r = (compared(dense, layer) - compared(student, layer)).flatten().numpy()
    C = np.stack([c.flatten().numpy() for c in contributions(student, layer)], 1)
    wide = np.concatenate([C, np.ones((len(C), 1))], 1) if layer.endswith("attn.proj") else C
    A = np.concatenate([wide.T @ wide, np.eye(wide.shape[1])])
    z = np.linalg.lstsq(A, np.concatenate([wide.T @ r, np.zeros(wide.shape[1])]), rcond=None)[0][: C.shape[1]]
    before, after = float(r @ r) / len(r), float(np.square(r - C @ z).sum()) / len(r)
    return (1 + z, before, after) if after <= before else (np.ones_like(z), before, before)


CASES = [("vit", Magnitude(0.6)), ("vit", ByKwon(0.5, batch=2)), ("cnn", Magnitude(0.5, scope="conv_fc")),
         ("cnn", ByKwon(0.4, batch=2)), ("separable", Magnitude(0.5, scope="all"))]  # fmt: skip


def stepwise(job: Job) -> Iterator[tuple[nn.Module, Row]]:
    """The model as it was before each row, and the row."""
    before = deepcopy(job.model)
    for row in Kwon().fit(job):
        if "stage" not in row:
            yield before, row
            before = deepcopy(job.model)


@pytest.mark.parametrize(
    ("kind", "pruner"), CASES, ids=lambda value: value if isinstance(value, str) else type(value).__name__
)
def test_factors_are_least_squares_on_what_each_unit_adds(kind: str, pruner: starfish.Pruner) -> None:
    """Layer by layer from the model as it then is: numpy's factors in the columns, numpy's residuals in the row."""
    job = job_for(dense_of(kind), masks_for(kind, pruner))
    layers = []
    for student, row in stepwise(job):
        layer = str(row["layer"])
        layers.append(layer)
        factors, before, after = by_numpy(student, job.dense, layer)
        assert row["before"] == pytest.approx(before, rel=1e-8, abs=1e-15)
        assert row["after"] == pytest.approx(after, rel=1e-6, abs=1e-12)
        assert row["after"] <= row["before"]
        old, new = (net.get_parameter(f"{layer}.weight") for net in (student, job.model))
        torch.testing.assert_close(new, scaled(student, layer, factors), rtol=1e-6, atol=1e-9)
        others = {name for name, x in job.model.state_dict().items() if not torch.equal(x, student.state_dict()[name])}
        assert others <= {f"{layer}.weight"}
        assert not new[old == 0].any()
    if kind == "vit":
        assert layers == list(COMPARED), "the first attention is left as it is"
    else:
        assert len(layers) == len(job.masks)


def scaled(net: nn.Module, layer: str, factors: np.ndarray) -> Tensor:
    """The layer's weight with a factor on each unit's columns; a group of a convolution reads its own."""
    module = net.get_submodule(layer)
    groups = module.groups if isinstance(module, (nn.Conv1d, nn.Conv2d)) else 1
    weight = net.get_parameter(f"{layer}.weight").detach().clone()
    inputs, rows = weight.shape[1], len(weight) // groups
    for column in range(inputs * groups):
        group, place = divmod(column, inputs)
        weight[group * rows : (group + 1) * rows, place] *= factors[column * len(factors) // (inputs * groups)]
    return weight


@pytest.mark.parametrize(("kind", "pruner"), CASES[:2] + CASES[-1:], ids=["weights", "units", "separable"])
def test_residual_in_the_row_is_that_of_the_model(kind: str, pruner: starfish.Pruner) -> None:
    """`after` is the distance of the new model from the dense one where they are compared, measured."""
    job = job_for(dense_of(kind), masks_for(kind, pruner))
    for row in Kwon().fit(job):
        if "stage" not in row:
            layer = str(row["layer"])
            off = compared(job.dense, layer) - compared(job.model, layer)
            assert row["after"] == pytest.approx(float(off.square().mean()), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("kind", ["vit", "cnn", "separable"])
def test_columns_that_were_scaled_come_back(kind: str) -> None:
    """A student that differs by a factor on the units of one layer becomes the dense model again."""
    dense = dense_of(kind)
    scope = {"vit": "out+mlp_out", "cnn": "conv_fc", "separable": "all"}[kind]
    masks = all_ones(masks_for(kind, Magnitude(0.5, scope=scope)))
    last = {"vit": "blocks.1.attn.proj", "cnn": "layer3.0.conv2", "separable": "blocks.1.deep"}[kind]
    student = deepcopy(dense)
    factors = np.random.default_rng(1).uniform(0.5, 1.5, {"vit": HEADS, "cnn": 64, "separable": 8}[kind])
    student.get_parameter(f"{last}.weight").data.copy_(scaled(dense, last, factors))
    job = job_for(dense, masks, student)
    rows = {str(row["layer"]): row for row in rows_of(job)}
    assert rows[last]["after"] <= 1e-3 * float(rows[last]["before"])  # but for the damping
    assert rows[last]["largest"] > 1.1
    before, after = ((net(PIXELS) - dense(PIXELS)).abs().max() for net in (student, job.model))
    assert after < 1e-2 * before


@pytest.mark.parametrize("kind", ["vit", "cnn", "separable"])
def test_nothing_pruned_changes_nothing(kind: str) -> None:
    """Masks of ones: every factor is exactly 1 and every bit as it was, in single precision too."""
    scope = {"vit": "out+mlp_out", "cnn": "conv_fc", "separable": "all"}[kind]
    masks = all_ones(masks_for(kind, Magnitude(0.5, scope=scope)))
    for dense, pixels in ((dense_of(kind), PIXELS), (deepcopy(dense_of(kind)).float(), IMAGES[:6])):
        job = job_of(deepcopy(dense), dense, masks, pixels)
        rows = rows_of(job)
        assert {(row["before"], row["after"], row["least"], row["largest"]) for row in rows} == {(0.0, 0.0, 1.0, 1.0)}
        assert all(torch.equal(x, dense.state_dict()[name]) for name, x in job.model.state_dict().items())


def test_a_wild_factor_ends_it() -> None:
    """Beyond ±10 the layer and all after it keep their weights, after a resume too."""
    dense = deepcopy(dense_of("vit"))
    masks = all_ones(masks_for("vit", Magnitude(0.5, scope="out+mlp_out")))
    dense.get_parameter("blocks.1.attn.proj.weight").data.mul_(20)
    student = deepcopy(dense_of("vit"))
    job = job_for(dense, masks, student)
    rows = rows_of(job)
    assert [row["layer"] for row in rows] == list(COMPARED)[:2]
    assert rows[-1]["stopped"] == "a factor is beyond 10"
    assert rows[-1]["after"] == rows[-1]["before"]
    assert max(float(rows[-1]["largest"]), -float(rows[-1]["least"])) > 10
    assert all(torch.equal(x, student.state_dict()[name]) for name, x in job.model.state_dict().items())
    assert rows_of(job) == []


def test_numbers_that_are_none_end_it() -> None:
    """A layer that puts out NaN has no factors: it and what follows keep their weights."""
    dense = dense_of("vit")
    masks = masks_for("vit", Magnitude(0.5, scope="out+mlp_out"))
    job = job_for(dense, masks)
    job.model.get_parameter("blocks.1.mlp.fc1.weight").data.fill_(float("nan"))
    rows = [row for row in Kwon().fit(job) if "stage" not in row]
    assert [str(row.get("stopped", "")) for row in rows] == ["", "", "the equations have no solution"]
    assert (rows[-1]["least"], rows[-1]["largest"]) == (1.0, 1.0)


def test_damped_is_least_squares_on_the_normal_equations() -> None:
    """min ‖A z − b‖² + ‖z‖², singular A and large ones included."""
    random = np.random.default_rng(0)
    for rows, scale in ((3, 1e-3), (3, 1.0), (20, 1e3)):
        X = scale * random.normal(size=(rows, 8))
        A, b = X.T @ X, X.T @ random.normal(size=rows)
        expected = np.linalg.lstsq(np.concatenate([A, np.eye(8)]), np.concatenate([b, np.zeros(8)]), rcond=None)[0]
        found = damped(torch.from_numpy(A)[None], torch.from_numpy(b)[None])[0].numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-10 * np.abs(expected).max())


def test_heads_that_do_better_without_factors_have_none() -> None:
    """The column of ones is dropped: where it bore the fit, −1 for the head alone would be worse than nothing."""
    equations = _Equations(torch.eye(2).double()[None], torch.zeros(1, 2, dtype=torch.long), torch.tensor([0]), 1, True)
    x_BNI = 3 + 3 * torch.rand(4, 500, 2, generator=torch.Generator().manual_seed(0)).double()
    equations.add_(x_BNI, 10 - x_BNI)
    factors = equations.solve()
    assert factors.of_unit.tolist() == [1.0]
    assert factors.after == factors.before == pytest.approx(float((10 - x_BNI).square().mean()))
    equations.constant = False
    assert equations.solve().after < factors.before


def test_killed_between_rows_it_goes_on_to_the_same_bits() -> None:
    """With what heal_ keeps, the masked tensors and the state, no row comes twice and the weights are the same."""
    masks = masks_for("vit", Magnitude(0.6))
    whole = job_for(dense_of("vit"), masks)
    expected = rows_of(whole)
    first = job_for(dense_of("vit"), masks)
    rows = []
    work = Kwon().fit(first)
    while len(rows) < 2:
        rows += [row for row in [next(work)] if "stage" not in row]
    work.close()
    again = job_for(dense_of("vit"), masks)
    again.model.load_state_dict({name: first.model.state_dict()[name] for name in masks}, strict=False)
    again.state.update(first.state)
    assert rows + rows_of(again) == expected
    assert all(torch.equal(x, whole.model.state_dict()[name]) for name, x in again.model.state_dict().items())


def test_fewer_images_are_spread_over_all() -> None:
    """With `images` the factors are those of a job that has only these."""
    masks = masks_for("vit", Magnitude(0.6))
    some = job_for(dense_of("vit"), masks)
    few = job_of(deepcopy(dense_of("vit")), dense_of("vit"), masks, StoredImages(PIXELS[::3], Preprocess()))
    rows = rows_of(some, Kwon(images=2))
    assert rows == rows_of(few, Kwon(images=0))
    assert rows != rows_of(job_for(dense_of("vit"), masks))


def places_of(model: nn.Module, scope: str = "out+mlp_out") -> dict[str, str]:
    dense = with_biases(model)
    masks = starfish.prune(dense, Magnitude(0.3, scope=scope), PIXELS)
    return {str(row["layer"]): str(row["compared_at"]) for row in rows_of(job_for(dense, masks))}


def test_where_layers_are_compared() -> None:
    """The first tensor that holds the stream with the layer's output: found in other libraries and with LayerScale."""
    from torchvision.models.vision_transformer import VisionTransformer

    block = "encoder.layers.encoder_layer_"
    assert places_of(VisionTransformer(32, 8, 2, HEADS, D, 48, num_classes=CLASSES)) == {
        f"{block}0.mlp.3": f"output of {block}0",
        f"{block}1.self_attention.out_proj": f"input of {block}1.ln_2",
        f"{block}1.mlp.3": f"output of {block}1",
    }
    scaled_layers = timm.create_model("deit3_small_patch16_224", img_size=32, patch_size=8, embed_dim=D, depth=2,
                                      num_heads=HEADS, num_classes=CLASSES, init_values=0.3)  # fmt: skip
    assert places_of(scaled_layers) == {
        "blocks.0.mlp.fc2": "output of blocks.0",
        "blocks.1.attn.proj": "input of blocks.1.norm2",
        "blocks.1.mlp.fc2": "output of blocks.1",
    }


def test_layer_scale_is_part_of_the_equations() -> None:
    """With each channel of the output scaled on its way into the stream, the residual is still that of the stream."""
    model = timm.create_model("deit3_small_patch16_224", img_size=32, patch_size=8, embed_dim=D, depth=2,
                              num_heads=HEADS, num_classes=CLASSES, init_values=0.3)  # fmt: skip
    dense = with_biases(model)
    for name, parameter in dense.named_parameters():
        if name.endswith("gamma"):
            parameter.data += torch.rand(D, generator=torch.Generator().manual_seed(1))
        elif parameter.ndim == 2:
            parameter.data *= 8
    job = job_for(dense, starfish.prune(dense, Magnitude(0.6), PIXELS))
    for row in Kwon().fit(job):
        if "stage" not in row:
            off = compared(dense, str(row["layer"])) - compared(job.model, str(row["layer"]))
            assert row["after"] == pytest.approx(float(off.square().mean()), rel=1e-6)
            assert row["after"] < row["before"]


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_from_end_to_end(kind: str) -> None:
    """Pruned by labels and rescaled without them, in single precision: layers nearer to the dense ones, zeros whole."""
    dense = {"vit": tiny_vit, "cnn": tiny_cnn}[kind]()
    pictures = StoredImages(IMAGES, Preprocess(), LABELS)
    masks = starfish.prune(dense, ByKwon(0.5, batch=4), pictures)
    model = deepcopy(dense)
    result = starfish.heal_(model, dense, masks, IMAGES, Kwon())
    before, after = (sum(float(row[key]) for row in result.rows) for key in ("before", "after"))
    assert after < 0.95 * before
    assert result.mask_intact
    assert result.frozen_intact
    assert result.also_changed == []


def test_what_is_refused() -> None:
    """Masks of weights that read no units, a smaller model, and a number of images below 0."""
    dense = dense_of("vit")
    with pytest.raises(UserError, match="nothing to rescale"):
        starfish.heal_(deepcopy(dense), dense, masks_for("vit", Magnitude(0.5, scope="qk")), PIXELS, Kwon())
    masks = masks_for("vit", Magnitude(0.5))
    with pytest.raises(UserError, match="`images` is -1"):
        starfish.heal_(deepcopy(dense), dense, masks, PIXELS, Kwon(images=-1))
