"""Closed-form folds of whole models: what they promise, from end to end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

import starfish
from cases import CLASSES, IMAGES, tiny_cnn, tiny_vit
from starfish.anatomy import find
from starfish.cache import Cache
from starfish.core import Job, Masks, Row, Unit
from starfish.heal import job_of
from starfish.masks import apply_
from starfish.methods import folds
from starfish.methods.corp import UNHEARD, Corp, foldable
from starfish.pruners.units import masks_of

PIXELS = IMAGES.double()


@cache
def dense_of(kind: str) -> nn.Module:
    """In double precision, with biases, which new models have not."""
    model = (tiny_vit if kind == "vit" else tiny_cnn)().double()
    random = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data += 0.5 * torch.randn(parameter.shape, generator=random)
    return model


def masked(dense: nn.Module, wanted: Callable[[Unit], bool] = lambda unit: True) -> Masks:
    """Half of the units of each family go, at random."""
    anatomy = find(dense, PIXELS.to(next(dense.parameters()).dtype), channels=isinstance(dense, type(tiny_cnn())))
    families = [unit for unit in anatomy.units if wanted(unit)]
    random = torch.Generator().manual_seed(4)
    scores = {place: torch.rand(unit.count, generator=random) for place, unit in enumerate(families)}
    counts = {place: unit.count // unit.groups // 2 for place, unit in enumerate(families)}
    return masks_of(dense, anatomy, families, scores, counts)


def job_for(dense: nn.Module, masks: Masks, images: Tensor = PIXELS, cache: Cache | None = None) -> Job:
    return job_of(deepcopy(dense), dense, masks, images, cache=cache)


def fitted(method: Corp, job: Job) -> tuple[Mapping[str, Tensor], list[Row], int]:
    """The state of the folded model, the rows, and how many batches were gathered."""
    rows = list(method.fit(job))
    kept = [row for row in rows if "stage" not in row]
    return job.model.state_dict(), kept, len(rows) - len(kept)


@cache
def corp(kind: str, method: Corp = Corp()) -> tuple[Mapping[str, Tensor], list[Row], int]:  # noqa: B008  # frozen
    return fitted(method, job_for(dense_of(kind), masked(dense_of(kind))))


def changed(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> set[str]:
    return {name for name in one if not torch.equal(one[name], other[name])}


def read_by(model: nn.Module, path: str) -> Tensor:
    """What a layer reads in a forward pass."""
    seen: list[Tensor] = []
    with (
        model.get_submodule(path).register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0])),
        torch.no_grad(),
    ):
        model(PIXELS)
    return seen[0]


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_rows_say_what_became_of_each_family(kind: str) -> None:
    """One row a family, in order, with the step, the steps there are, and errors that fell."""
    _, rows, _ = corp(kind)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert {row["steps"] for row in rows} == {4}
    kinds = ["qk", "neuron", "qk", "neuron"] if kind == "vit" else ["channel"] * 4
    blocks = (
        ["blocks.0", "blocks.0", "blocks.1", "blocks.1"] if kind == "vit" else ["", *(f"layer{i}.0" for i in (1, 2, 3))]
    )
    assert [row["kind"] for row in rows] == kinds
    assert [row["block"] for row in rows] == blocks
    assert all(0 < row["folded"] < row["plain"] for row in rows)  # type: ignore[operator]
    assert all(row["bound"] < row["pooled"] for row in rows if row["kind"] == "qk")  # type: ignore[operator]


@pytest.mark.parametrize("fold", ["affine", "bias", "none"])
def test_rows_of_neurons_are_the_errors_of_the_layer(fold: str) -> None:
    """Shares of the squared output of the dense fc2, worked out from what it reads in the dense model."""
    state, rows, _ = corp("vit", Corp(fold=fold))  # type: ignore[arg-type]
    masks, dense = masked(dense_of("vit")), dense_of("vit")
    for block, row in enumerate([row for row in rows if row["kind"] == "neuron"]):
        name = f"blocks.{block}.mlp.fc2"
        x_NC = read_by(dense, name).flatten(0, 1)
        weight, bias = (dense.state_dict()[f"{name}.{key}"] for key in ("weight", "bias"))
        whole = (x_NC @ weight.T).square().sum()
        plain = (x_NC @ (weight * ~masks[f"{name}.weight"]).T).square().sum() / whole
        off = x_NC @ (state[f"{name}.weight"] - weight).T + state[f"{name}.bias"] - bias
        assert row["plain"] == pytest.approx(float(plain), rel=1e-8)
        assert row["folded"] == pytest.approx(float(off.square().sum() / whole), rel=1e-8)


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_outputs_come_closer(kind: str) -> None:
    """On the images it had: fold ≤ bias alone ≤ nothing, in the output of the whole model."""
    dense, errors = dense_of(kind), []
    with torch.no_grad():
        for fold in ("affine", "bias", "none"):
            model = deepcopy(dense)
            model.load_state_dict(corp(kind, Corp(fold=fold))[0])  # type: ignore[arg-type]
            errors.append(float((model(PIXELS) - dense(PIXELS)).square().mean()))
    assert errors[0] < errors[2]
    assert errors[1] < errors[2]


def test_only_what_reads_the_units_changes() -> None:
    """Survivors of fc1, values, norms and embeddings are bit for bit those of the masked dense model."""
    state, *_ = corp("vit")
    plain = deepcopy(dense_of("vit"))
    apply_(plain, masked(plain))
    free = {f"blocks.{block}.{name}" for block in (0, 1)
            for name in ("attn.qkv.weight", "attn.qkv.bias", "mlp.fc2.weight", "mlp.fc2.bias")}  # fmt: skip
    assert changed(state, plain.state_dict()) == free
    for block in (0, 1):
        for name in ("weight", "bias"):
            key = f"blocks.{block}.attn.qkv.{name}"
            assert torch.equal(state[key][48:], dense_of("vit").state_dict()[key][48:])
    job = job_for(dense_of("vit"), masked(dense_of("vit")))
    assert Corp().also_changes(job) == {name for name in free if name.endswith("bias")}


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_controls_leave_survivors_alone(kind: str) -> None:
    """fold=none is the masked dense model but for biases of dead queries; fold=bias moves what takes up constants."""
    plain = deepcopy(dense_of(kind))
    masks = masked(plain)
    apply_(plain, masks)
    none, *_ = corp(kind, Corp(fold="none"))
    bias, *_ = corp(kind, Corp(fold="bias"))
    moved = changed(none, plain.state_dict())
    assert moved == ({f"blocks.{block}.attn.qkv.bias" for block in (0, 1)} if kind == "vit" else set())
    for name in moved:
        alive = masks[name.replace("bias", "weight")].any(1)
        assert torch.equal(none[name][alive], plain.state_dict()[name][alive])
        assert not none[name][~alive].any()
    expected = {f"blocks.{block}.mlp.fc2.bias" for block in (0, 1)}
    if kind == "cnn":
        expected = {f"layer{i}.0.bn{j}.running_mean" for i in (1, 2, 3) for j in (1, 2)} | {"linear.bias"}
    assert changed(bias, none) == expected


def test_duplicates_and_constants_are_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neurons that only repeat others, or never change, go without a trace, in every block and from end to end."""
    monkeypatch.setattr(folds, "SCALED", 1e-9)
    dense = deepcopy(dense_of("vit"))
    with torch.no_grad():
        for block in dense.blocks:
            for tensor in (block.mlp.fc1.weight, block.mlp.fc1.bias):
                tensor[48:] = tensor[:48].flip(0)
            block.mlp.fc1.weight[60:64] = 0
    anatomy = find(dense, PIXELS)
    neurons = [unit for unit in anatomy.units if unit.kind == "neuron"]
    last = {place: (torch.arange(96) < 48).double() for place in range(2)}
    job = job_for(dense, masks_of(dense, anatomy, neurons, last, {0: 48, 1: 48}))
    unseen = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        assert (job.model(unseen) - dense(unseen)).abs().max() > 0.1
        _, rows, _ = fitted(Corp(), job)
        assert all(float(row["folded"]) < 1e-12 < float(row["plain"]) for row in rows)
        assert (job.model(unseen) - dense(unseen)).abs().max() < 1e-5


def test_constants_of_channels_go_into_running_means() -> None:
    """Of the BatchNorm after the layer that reads them, with a minus: its mean output is that of the dense one."""
    dense = dense_of("cnn")
    masks = masked(dense, lambda unit: unit.block == "layer2.0")
    x = read_by(dense, "layer2.0.conv2")
    for fold in ("affine", "bias"):
        job = job_for(dense, masks)
        state, (row,), _ = fitted(Corp(fold=fold), job)  # type: ignore[arg-type]
        new, old = (dict(model.layer2[0].named_children()) for model in (job.model, dense))
        with torch.no_grad():
            outputs = [layers["bn2"](layers["conv2"](x)) for layers in (new, old)]
            assert torch.allclose(*(output.mean((0, 2, 3)) for output in outputs), atol=1e-9)
            off = new["conv2"](x) - state["layer2.0.bn2.running_mean"].view(-1, 1, 1)
            off -= old["conv2"](x) - old["bn2"].running_mean.view(-1, 1, 1)
            error = off.square().sum() / old["conv2"](x).square().sum()
        assert row["folded"] == pytest.approx(float(error), rel=1e-8)
    dead = ~masks["layer2.0.conv2.weight"][0, :, 0, 0]
    assert int(dead.sum()) == 16
    with torch.no_grad():
        constant = old["conv2"](x * dead.view(-1, 1, 1)).mean((0, 2, 3))
    assert torch.allclose(old["bn2"].running_mean - state["layer2.0.bn2.running_mean"], constant, atol=1e-9)
    assert constant.abs().max() > 0.01


def test_every_layer_that_reads_a_channel_is_fitted_by_itself() -> None:
    """Channels of the residual stream are read by several layers; the row is the error of all of them together."""
    dense = dense_of("cnn")
    masks = masked(dense, lambda unit: not unit.block)
    job = job_for(dense, masks)
    state, (row,), _ = fitted(Corp(), job)
    left = whole = torch.zeros((), dtype=torch.float64)
    for name, shift in (("layer1.0.conv1", "layer1.0.bn1"), ("layer2.0.conv1", "layer2.0.bn1"),
                        ("layer3.0.conv1", "layer3.0.bn1"), ("linear", None)):  # fmt: skip
        new, old = (model.get_submodule(name) for model in (job.model, dense))
        x = torch.zeros_like(read_by(dense, name))
        part = next(part for part in job.anatomy.units[0].readers if part.parameter == f"{name}.weight")
        x.narrow(1, part.start, 16).copy_(read_by(dense, name).narrow(1, part.start, 16))
        with torch.no_grad():
            off = new(x) - old(x)
            shape = (-1, *[1] * (off.ndim - 2))
            means = [
                model.state_dict()[f"{shift}.running_mean"].view(shape) if shift else 0 for model in (job.model, dense)
            ]
            off = off - means[0] + means[1]
            rows = off.numel() / off.shape[1]
            left = left + off.square().sum() / rows
            bias = old.bias if shift is None else 0
            whole = whole + (old(x) - bias).square().sum() / rows
    assert row["folded"] == pytest.approx(float(left / whole), rel=1e-8)
    assert not state["linear.weight"][~masks["linear.weight"]].any()


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_little_memory_takes_more_passes_and_gives_the_same(kind: str) -> None:
    """Family by family, and for attention head by head: only the number of passes over the images differs."""
    state, rows, passes = corp(kind)
    little, many, more = corp(kind, Corp(memory_gb=1e-9))
    assert passes == 1
    assert more == len(many) == (8 if kind == "vit" else 4)
    assert all(torch.allclose(little[name], state[name], atol=1e-12) for name in state)
    for block in {row["block"] for row in rows if row["kind"] == "neuron"}:
        one, other = ([row["folded"] for row in some if row["block"] == block and row["kind"] == "neuron"]
                      for some in (rows, many))  # fmt: skip
        assert one == pytest.approx(other, rel=1e-10)


def test_heads_in_several_folds_are_those_of_one() -> None:
    """Two heads at a time and then the third: each starts where the one before ended."""
    one_head = 8 * (4**4 + 2 * 8**2)  # bytes: of eight dimensions four stay
    state, rows, _ = corp("vit", Corp(memory_gb=2.5 * one_head / 2**30))
    heads = [(row["first_head"], row["heads"]) for row in rows if row["kind"] == "qk"]
    assert heads == [(0, 2), (2, 1)] * 2
    whole, *_ = corp("vit")
    assert all(torch.allclose(state[name], whole[name], atol=1e-12) for name in whole)


def test_layerwise_statistics_see_what_was_cut_before() -> None:
    """The first block is as in one shot; the second is fitted to what it reads behind the first one's fold."""
    dense, masks = dense_of("vit"), masked(dense_of("vit"))
    state, _, passes = corp("vit", Corp(schedule="layerwise"))
    whole, *_ = corp("vit")
    assert passes == 2
    assert changed(state, whole) == {f"blocks.1.{name}" for name in (
        "attn.qkv.weight", "attn.qkv.bias", "mlp.fc2.weight", "mlp.fc2.bias")}  # fmt: skip
    behind = deepcopy(dense)
    with torch.no_grad():
        for name in ("attn.qkv.weight", "attn.qkv.bias", "mlp.fc2.weight", "mlp.fc2.bias"):
            behind.state_dict()[f"blocks.0.{name}"].copy_(state[f"blocks.0.{name}"])
        x_NC = read_by(behind, "blocks.1.mlp.fc2").flatten(0, 1)
        alive = masks["blocks.1.mlp.fc2.weight"][0]
        x_NS, x_NP = (x_NC[:, some] - x_NC[:, some].mean(0) for some in (alive, ~alive))
        C_SS = x_NS.T @ x_NS / len(x_NC)
        B_SP = torch.linalg.solve(C_SS + 1e-6 * C_SS.diagonal().mean() * torch.eye(48), x_NS.T @ x_NP / len(x_NC))
        weight, bias = dense.blocks[1].mlp.fc2.weight, dense.blocks[1].mlp.fc2.bias
        constant = x_NC[:, ~alive].mean(0) - x_NC[:, alive].mean(0) @ B_SP
    expected = weight[:, alive] + weight[:, ~alive] @ B_SP.T
    assert torch.allclose(state["blocks.1.mlp.fc2.weight"][:, alive], expected, atol=1e-9)
    assert torch.allclose(state["blocks.1.mlp.fc2.bias"], bias + weight[:, ~alive] @ constant, atol=1e-9)


@pytest.mark.parametrize(
    "other",
    [
        Corp(ridge="shrinkage"),
        Corp(pairs="pooled"),
        Corp(center_keys=False),
        Corp(symmetrize=True),
        Corp(scale="reduced"),
    ],
    ids=lambda method: next(name for name in vars(method) if getattr(method, name) != getattr(Corp(), name)),
)
def test_every_setting_reaches_its_layers(other: Corp) -> None:
    """The ridge moves what reads neurons; the others move queries and keys, and nothing else."""
    moved = changed(corp("vit", other)[0], corp("vit")[0])
    part = "mlp.fc2" if other.ridge == "shrinkage" else "attn.qkv"
    assert moved == {f"blocks.{block}.{part}.{name}" for block in (0, 1) for name in ("weight", "bias")}


def test_it_starts_from_the_dense_weights() -> None:
    """Whatever state the weights are in that it writes: a resumed run, or one after another method, ends the same."""
    job = job_for(dense_of("vit"), masked(dense_of("vit")))
    with torch.no_grad():
        for name in ("attn.qkv.weight", "mlp.fc2.weight", "mlp.fc2.bias"):
            job.model.get_parameter(f"blocks.0.{name}").normal_()
    state, *_ = fitted(Corp(), job)
    assert not changed(state, corp("vit")[0])
    assert job.state == {"step": 4}
    assert [row for row in Corp().fit(job) if "stage" not in row] == []
    assert not changed(job.model.state_dict(), corp("vit")[0])


def test_a_second_run_finds_its_statistics(tmp_path: Path) -> None:
    """Another fold of the same units runs no forward pass; another mask needs new sums of queries and keys only."""
    dense, masks, kept = dense_of("vit"), masked(dense_of("vit")), Cache(tmp_path)
    state, _, passes = fitted(Corp(), job_for(dense, masks, cache=kept))
    assert passes == 1
    assert not changed(state, corp("vit")[0])
    again, _, passes = fitted(Corp(ridge="shrinkage", symmetrize=True), job_for(dense, masks, cache=Cache(tmp_path)))
    assert passes == 0
    assert not changed(again, corp("vit", Corp(ridge="shrinkage", symmetrize=True))[0])
    assert len(list(tmp_path.iterdir())) == 4
    flips = {"fc1.weight": 0, "fc2.weight": 1, "qkv.weight": 0}
    other = {name: mask.flip(flips[name.split(".", 3)[3]]) for name, mask in masks.items()}
    neurons = {name: (other if "mlp" in name else masks)[name] for name in masks}
    assert fitted(Corp(), job_for(dense, neurons, cache=Cache(tmp_path)))[2] == 0
    for block in (0, 1):
        name = f"blocks.{block}.attn.qkv.weight"
        other[name] = torch.cat([masks[name][:48].view(2, 24, 24).flip(1).flatten(0, 1), masks[name][48:]])
    assert fitted(Corp(), job_for(dense, other, cache=Cache(tmp_path)))[2] == 1
    assert len(list(tmp_path.iterdir())) == 4 + 2


def swin() -> nn.Module:
    """Starfish has no class for its attention, which adds a bias of its own."""
    sizes = {"img_size": 32, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4}
    model: nn.Module = timm.create_model("swin_tiny_patch4_window7_224", pretrained=False, num_classes=CLASSES, **sizes)
    return model.eval()


def test_attention_that_cannot_be_heard_is_left_out_by_name() -> None:
    """Its dimensions stay as the mask left them, a row says so, and neurons are folded all the same."""
    dense = swin()
    masks = masked(dense)
    job = job_for(dense, masks, IMAGES)
    before = deepcopy(job.model.state_dict())
    assert foldable(job)
    state, rows, _ = fitted(Corp(), job)
    left_out = [row for row in rows if "left_out" in row]
    assert [row["left_out"] for row in left_out] == [UNHEARD] * 4
    assert {(row["kind"], row["steps"]) for row in left_out} == {("qk", 8)}
    assert [row["block"] for row in left_out] == list(job.anatomy.blocks)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert all(float(row["folded"]) < float(row["plain"]) for row in rows if row["kind"] == "neuron")
    assert len(rows) == 8
    free = {name for name in state if "mlp.fc2." in name}
    assert changed(state, before) == free
    assert Corp().also_changes(job) == {name for name in free if name.endswith("bias")}
    assert not foldable(job_for(dense, masked(dense, lambda unit: unit.kind == "qk"), IMAGES))


def test_a_family_that_is_gone_altogether_is_no_fold() -> None:
    """Nothing survives to take it up; the other families are folded."""
    dense = dense_of("vit")
    masks = masked(dense, lambda unit: unit.kind == "neuron")
    masks["blocks.0.mlp.fc1.weight"][:] = False
    masks["blocks.0.mlp.fc2.weight"][:] = False
    _, rows, _ = fitted(Corp(), job_for(dense, masks))
    assert [(row["block"], row["steps"]) for row in rows] == [("blocks.1", 1)]


def test_in_single_precision_it_is_the_same_fold() -> None:
    """A float32 model is solved in float64 and ends within rounding of the float64 one."""
    dense = deepcopy(dense_of("vit")).float()
    state, *_ = fitted(Corp(), job_for(dense, masked(dense), IMAGES))
    double, *_ = corp("vit")
    neurons = [name for name in state if "fc2" in name]
    assert len(neurons) == 4
    assert all(torch.allclose(state[name].double(), double[name], atol=2e-3) for name in neurons)
    assert state["blocks.0.mlp.fc2.weight"].dtype == torch.float32


def test_healing_with_it_proves_the_zeros() -> None:
    """Through `heal_`: units stay cut, what may move is declared, and its settings are in the result."""
    dense = dense_of("cnn")
    masks, model = masked(dense), deepcopy(dense)
    result = starfish.heal_(model, dense, masks, PIXELS, replace(Corp(), ridge="shrinkage"))
    assert result.mask_intact
    assert result.frozen_intact
    assert result.settings["ridge"] == "shrinkage"
    assert "layer1.0.bn2.running_mean" in result.also_changed
    assert result.fidelity["cosine"]["healed"] > result.fidelity["cosine"]["pruned"]
