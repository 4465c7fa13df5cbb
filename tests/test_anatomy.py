"""What is found in an architecture: one table, and every property is asked of every row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models.convnext import CNBlockConfig

import starfish
from cases import tiny_vit
from starfish import activations
from starfish.anatomy import find, unwrap
from starfish.core import Anatomy, Layout, Unit
from starfish.errors import UserError
from starfish.scopes import default_scope, scope

CLASSES = 7
TOKENS, SEQUENCE_FIRST = Layout(0, 2), Layout(1, 2)
NCHW, NHWC = Layout(0, 1), Layout(0, 3)


class BasicBlock(nn.Module):
    """A user's CIFAR block, with the parameter-free shortcut of option A."""

    def __init__(self, columns: int, rows: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(columns, rows, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(rows)
        self.conv2 = nn.Conv2d(rows, rows, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(rows)
        self.shortcut = Lambda(lambda x: x) if stride == 1 else Lambda(lambda x: _option_a(x, rows))

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _option_a(x: Tensor, rows: int) -> Tensor:
    pad = (rows - x.shape[1]) // 2
    return functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, pad, pad))


class ResNet20(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(BasicBlock(16, 16, 1) for _ in range(3)))
        self.layer2 = nn.Sequential(BasicBlock(16, 32, 2), BasicBlock(32, 32, 1), BasicBlock(32, 32, 1))
        self.layer3 = nn.Sequential(BasicBlock(32, 64, 2), BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.linear = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer3(self.layer2(self.layer1(functional.relu(self.bn1(self.conv1(x))))))
        return self.linear(out.mean((2, 3)))


class SequenceFirst(nn.Module):
    """Rows of pixels as tokens, through PyTorch's own encoder with the batch in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3 * 32, 16)
        layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=24, batch_first=False)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.linear = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.permute(2, 0, 1, 3).flatten(2)
        return self.linear(self.encoder(self.embed(tokens)).mean(0))


class OldAttention(nn.Module):
    """Attention under the names of transformers 4: `attention.attention.query`, `attention.output.dense`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads = 2
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        q, k, v = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.query, self.key, self.value))
        return (functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2),)


class OldLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dense = nn.ModuleDict({"dense": nn.Linear(16, 16)})
        self.attention = nn.ModuleDict({"attention": OldAttention(), "output": dense})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(16, 24)})
        self.output = nn.ModuleDict({"dense": nn.Linear(24, 16)})

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = x + self.attention["output"]["dense"](self.attention["attention"](x)[0])
        return (x + self.output["dense"](functional.gelu(self.intermediate["dense"](x))),)


class OldNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 8, stride=8)
        self.layer = nn.ModuleList([OldLayer(), OldLayer()])
        self.classifier = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        for layer in self.layer:
            x = layer(x)[0]
        return self.classifier(x.mean(1))


class SiblingNet(nn.Module):
    """Blocks as attributes, not in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.block1, self.block2 = BasicBlock(16, 16, 1), BasicBlock(16, 16, 1)
        self.linear = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.block2(self.block1(self.stem(x))).mean((2, 3)))


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    blocks: list[str]
    layout: Layout
    roles: dict[str, str]  # some
    scope: str
    kinds: dict[str, int] = field(default_factory=dict)  # kind of unit → how many families
    head: tuple[str, ...] = ()
    also_untrained: tuple[str, ...] = ()
    keyword: str = ""
    device: str = "cpu"  # full-size convolutional networks are on "meta": shapes without arithmetic


def in_timm(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, pretrained=False, num_classes=CLASSES, **settings)


def in_torchvision(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(torchvision.models, name)(weights=None, num_classes=CLASSES, **settings)


def in_transformers(name: str, **settings: Any) -> Callable[[], nn.Module]:
    config = getattr(transformers, f"{name}Config")
    return lambda: getattr(transformers, f"{name}ForImageClassification")(config(**settings, num_labels=CLASSES))


def numbered(prefix: str, *counts: int, then: str = "{}", first: int = 0) -> list[str]:
    """`prefix{stage}` + `then{index}` for counts of blocks per stage."""
    return [f"{prefix}{stage}.{then.format(i)}" for stage, count in enumerate(counts, first) for i in range(count)]


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
SWIN = {"img_size": 32, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4}
HF = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
HF_MLP = HF | {"intermediate_size": 32}
BOTH = {"qk": 2, "neuron": 2}
TRANSFORMER = "qkv+out+mlp"
TIMM_ROLES = {
    "blocks.0.attn.qkv.weight": "qkv",
    "blocks.0.attn.proj.weight": "out",
    "blocks.1.mlp.fc1.weight": "mlp_in",
    "blocks.1.mlp.fc2.weight": "mlp_out",
}
HF_ROLES = {  # under `layers.0` or `layer.0`
    "attention.q_proj.weight": "q",
    "attention.k_proj.weight": "k",
    "attention.v_proj.weight": "v",
    "attention.o_proj.weight": "out",
    "mlp.fc1.weight": "mlp_in",
    "mlp.fc2.weight": "mlp_out",
}
RESNET_BLOCKS = numbered("layer", 2, 2, 2, 2, first=1)


def hf_roles(prefix: str) -> dict[str, str]:
    return {f"{prefix}.{name}": role for name, role in HF_ROLES.items()}


CASES = {
    "timm vit": Case(
        in_timm("vit_tiny_patch16_224", **VIT), ["blocks.0", "blocks.1"], TOKENS, TIMM_ROLES, TRANSFORMER, BOTH,
        ("head.weight",),
    ),
    "timm deit distilled": Case(
        in_timm("deit_tiny_distilled_patch16_224", **VIT), ["blocks.0", "blocks.1"], TOKENS, TIMM_ROLES, TRANSFORMER,
        BOTH, ("head.weight", "head_dist.weight"),
    ),
    "timm deit3": Case(
        in_timm("deit3_small_patch16_224", **VIT), ["blocks.0", "blocks.1"], TOKENS, TIMM_ROLES, TRANSFORMER, BOTH,
        ("head.weight",),
    ),
    "timm vit with q and k norms": Case(
        in_timm("vit_tiny_patch16_224", qk_norm=True, **VIT), ["blocks.0", "blocks.1"], TOKENS, TIMM_ROLES,
        TRANSFORMER, {"neuron": 2}, ("head.weight",),
    ),
    "timm swin": Case(
        in_timm("swin_tiny_patch4_window7_224", **SWIN), numbered("layers.", 2, 2, then="blocks.{}"), NHWC,
        {"layers.1.blocks.0.attn.proj.weight": "out", "layers.1.downsample.reduction.weight": "other"}, TRANSFORMER,
        {"qk": 4, "neuron": 4}, ("head.fc.weight",),
    ),
    "timm swinv2": Case(
        in_timm("swinv2_tiny_window8_256", **SWIN), numbered("layers.", 2, 2, then="blocks.{}"), NHWC,
        {"layers.0.blocks.0.attn.qkv.weight": "qkv", "layers.0.blocks.0.attn.cpb_mlp.0.weight": "other"}, TRANSFORMER,
        {"neuron": 4}, ("head.fc.weight",),
    ),
    "timm beit": Case(
        in_timm("beit_base_patch16_224", **VIT), ["blocks.0", "blocks.1"], TOKENS, TIMM_ROLES, TRANSFORMER, BOTH,
        ("head.weight",),
    ),
    "timm eva02, rotary and gated": Case(
        in_timm("eva02_tiny_patch14_224", **VIT), ["blocks.0", "blocks.1"], TOKENS,
        TIMM_ROLES, TRANSFORMER, {}, ("head.weight",),
    ),
    "timm pvt v2, fused kv": Case(
        in_timm("pvt_v2_b0", depths=(1, 1, 1, 1)), numbered("stages.", 1, 1, 1, 1, then="blocks.{}"), TOKENS,
        {"stages.0.blocks.0.attn.q.weight": "q", "stages.0.blocks.0.attn.kv.weight": "kv",
         "stages.0.blocks.0.attn.proj.weight": "out", "stages.0.blocks.0.mlp.dwconv.weight": "depthwise"},
        TRANSFORMER, {}, ("head.weight",), device="meta",
    ),
    "timm convnext": Case(
        in_timm("convnext_tiny", depths=(1, 2, 1, 1), dims=(8, 16, 16, 16)),
        numbered("stages.", 1, 2, 1, 1, then="blocks.{}"), NCHW,
        {"stem.0.weight": "conv", "stages.1.downsample.1.weight": "conv", "stages.0.blocks.0.conv_dw.weight":
         "depthwise", "stages.0.blocks.0.mlp.fc1.weight": "mlp_in", "stages.0.blocks.0.mlp.fc2.weight": "mlp_out"},
        "mlp", {"neuron": 5}, ("head.fc.weight",),
    ),
    "timm mobilenetv1": Case(
        in_timm("mobilenetv1_100"), numbered("blocks.", 1, 2, 2, 6, 2), NCHW,
        {"conv_stem.weight": "conv", "blocks.0.0.conv_dw.weight": "depthwise", "blocks.0.0.conv_pw.weight": "conv"},
        "conv_fc", {}, ("classifier.weight",), device="meta",
    ),
    "timm mobilenetv2": Case(
        in_timm("mobilenetv2_050"), numbered("blocks.", 1, 2, 3, 4, 3, 3, 1), NCHW,
        {"blocks.1.0.conv_pwl.weight": "conv"}, "conv_fc", {}, ("classifier.weight",), ("conv_head.weight",),
        device="meta",
    ),
    "timm mobilenetv3": Case(
        in_timm("mobilenetv3_small_050"), numbered("blocks.", 1, 2, 3, 2, 3, 1), NCHW,
        {"blocks.0.0.se.conv_reduce.weight": "conv", "blocks.5.0.conv.weight": "conv"}, "conv_fc", {},
        ("classifier.weight",), ("conv_head.weight",), device="meta",
    ),
    "timm efficientnet lite": Case(
        in_timm("efficientnet_lite0"), numbered("blocks.", 1, 2, 2, 3, 3, 4, 1), NCHW, {"conv_stem.weight": "conv"},
        "conv_fc", {}, ("classifier.weight",), ("conv_head.weight",), device="meta",
    ),
    "timm tf_efficientnet lite": Case(
        in_timm("tf_efficientnet_lite0"), numbered("blocks.", 1, 2, 2, 3, 3, 4, 1), NCHW, {"conv_stem.weight": "conv"},
        "conv_fc", {}, ("classifier.weight",), ("conv_head.weight",), device="meta",
    ),
    "timm resnet18": Case(
        in_timm("resnet18"), RESNET_BLOCKS, NCHW, {"conv1.weight": "conv", "layer2.0.downsample.0.weight": "conv"},
        "conv_fc", {}, ("fc.weight",), device="meta",
    ),
    "timm resnet50": Case(
        in_timm("resnet50"), numbered("layer", 3, 4, 6, 3, first=1), NCHW, {"layer1.0.conv3.weight": "conv"},
        "conv_fc", {}, ("fc.weight",), device="meta",
    ),
    "torchvision vit": Case(
        lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=CLASSES),
        ["encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1"], TOKENS,
        {"encoder.layers.encoder_layer_0.self_attention.in_proj_weight": "qkv",
         "encoder.layers.encoder_layer_0.self_attention.out_proj.weight": "out",
         "encoder.layers.encoder_layer_0.mlp.0.weight": "mlp_in",
         "encoder.layers.encoder_layer_0.mlp.3.weight": "mlp_out"},
        TRANSFORMER, BOTH, ("heads.head.weight",),
    ),
    "torchvision resnet18": Case(
        in_torchvision("resnet18"), RESNET_BLOCKS, NCHW, {"layer2.0.downsample.0.weight": "conv"}, "conv_fc", {},
        ("fc.weight",), device="meta",
    ),
    "torchvision mobilenet_v2": Case(
        in_torchvision("mobilenet_v2"), [f"features.{i}" for i in range(1, 18)], NCHW,
        {"features.0.0.weight": "conv", "features.1.conv.0.0.weight": "depthwise"}, "conv_fc", {},
        ("classifier.1.weight",), ("features.18.0.weight",), device="meta",
    ),
    "torchvision mobilenet_v3_small": Case(
        in_torchvision("mobilenet_v3_small"), [f"features.{i}" for i in range(1, 12)], NCHW,
        {"features.11.block.2.fc1.weight": "conv", "classifier.0.weight": "other"}, "conv_fc", {},
        ("classifier.3.weight",), ("features.12.0.weight", "classifier.0.weight"), device="meta",
    ),
    "torchvision efficientnet_b0": Case(
        in_torchvision("efficientnet_b0"), numbered("features.", 1, 2, 2, 3, 3, 4, 1, first=1), NCHW,
        {"features.1.0.block.0.0.weight": "depthwise"}, "conv_fc", {}, ("classifier.1.weight",),
        ("features.8.0.weight",), device="meta",
    ),
    "torchvision swin": Case(
        lambda: torchvision.models.SwinTransformer([4, 4], 8, [2, 2], [2, 2], [4, 4], num_classes=CLASSES),
        ["features.1.0", "features.1.1", "features.3.0", "features.3.1"], NHWC,
        {"features.1.0.mlp.0.weight": "mlp_in", "features.2.reduction.weight": "other"}, TRANSFORMER,
        {"qk": 4, "neuron": 4}, ("head.weight",),
    ),
    "torchvision convnext": Case(
        lambda: torchvision.models.ConvNeXt(
            [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 2)], num_classes=CLASSES
        ),
        ["features.1.0", "features.3.0", "features.3.1"], NCHW,
        {"features.0.0.weight": "conv", "features.1.0.block.0.weight": "depthwise",
         "features.1.0.block.3.weight": "mlp_in", "features.1.0.block.5.weight": "mlp_out"},
        "mlp", {"neuron": 3}, ("classifier.2.weight",),
    ),
    "transformers vit": Case(
        in_transformers("ViT", **HF_MLP), ["vit.layers.0", "vit.layers.1"], TOKENS, hf_roles("vit.layers.0"),
        TRANSFORMER, BOTH, ("classifier.weight",), keyword="pixel_values",
    ),
    "transformers deit": Case(
        in_transformers("DeiT", **HF_MLP), ["deit.layers.0", "deit.layers.1"], TOKENS, hf_roles("deit.layers.0"),
        TRANSFORMER, BOTH, ("classifier.weight",), keyword="pixel_values",
    ),
    "transformers beit": Case(
        in_transformers("Beit", **HF_MLP), ["beit.layers.0", "beit.layers.1"], TOKENS, hf_roles("beit.layers.0"),
        TRANSFORMER, BOTH, ("classifier.weight",), keyword="pixel_values",
    ),
    "transformers dinov2": Case(
        in_transformers("Dinov2", **HF, mlp_ratio=2), ["dinov2.encoder.layer.0", "dinov2.encoder.layer.1"], TOKENS,
        hf_roles("dinov2.encoder.layer.0"), TRANSFORMER, BOTH, ("classifier.weight",), keyword="pixel_values",
    ),
    "transformers swin": Case(
        in_transformers("Swin", image_size=32, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4),
        numbered("swin.encoder.layers.", 2, 2, then="blocks.{}"), TOKENS,
        hf_roles("swin.encoder.layers.1.blocks.1") | {"swin.encoder.layers.0.downsample.reduction.weight": "other"},
        TRANSFORMER, {"qk": 4, "neuron": 4}, ("classifier.weight",), keyword="pixel_values",
    ),
    "transformers convnext": Case(
        in_transformers("ConvNext", hidden_sizes=[8, 16], depths=[1, 2], num_stages=2),
        numbered("convnext.encoder.stages.", 1, 2, then="layers.{}"), NCHW,
        {"convnext.encoder.stages.0.layers.0.pwconv1.weight": "mlp_in",
         "convnext.embeddings.patch_embeddings.weight": "conv"},
        "mlp", {"neuron": 3}, ("classifier.weight",), keyword="pixel_values",
    ),
    "transformers convnext v2": Case(
        in_transformers("ConvNextV2", hidden_sizes=[8, 16], depths=[1, 2], num_stages=2),
        numbered("convnextv2.encoder.stages.", 1, 2, then="layers.{}"), NCHW,
        {"convnextv2.encoder.stages.0.layers.0.pwconv1.weight": "mlp_in"},
        "mlp", {}, ("classifier.weight",), keyword="pixel_values",
    ),
    "transformers resnet": Case(
        in_transformers("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic"),
        numbered("resnet.encoder.stages.", 1, 2, then="layers.{}"), NCHW,
        {"resnet.embedder.embedder.convolution.weight": "conv"},
        "conv_fc", {}, ("classifier.1.weight",), keyword="pixel_values",
    ),
    "transformers 4 names": Case(
        OldNet, ["layer.0", "layer.1"], TOKENS,
        {"layer.0.attention.attention.query.weight": "q", "layer.0.attention.attention.key.weight": "k",
         "layer.0.attention.attention.value.weight": "v", "layer.0.attention.output.dense.weight": "out",
         "layer.0.intermediate.dense.weight": "mlp_in", "layer.0.output.dense.weight": "mlp_out"},
        TRANSFORMER, BOTH, ("classifier.weight",),
    ),
    "a user's resnet20": Case(
        ResNet20, numbered("layer", 3, 3, 3, first=1), NCHW, {"conv1.weight": "conv", "layer1.0.conv1.weight": "conv"},
        "conv_fc", {}, ("linear.weight",),
    ),
    "a user's blocks as attributes": Case(
        SiblingNet, ["block1", "block2"], NCHW, {"stem.weight": "conv"}, "conv_fc", {}, ("linear.weight",)
    ),
    "a preprocessing layer before a model": Case(
        lambda: nn.Sequential(nn.BatchNorm2d(3), in_timm("vit_tiny_patch16_224", **VIT)()),
        ["1.blocks.0", "1.blocks.1"], TOKENS, {"1.blocks.0.attn.qkv.weight": "qkv"}, TRANSFORMER, BOTH,
        ("1.head.weight",),
    ),
    "PyTorch's encoder, sequence first": Case(
        SequenceFirst, ["encoder.layers.0", "encoder.layers.1"], SEQUENCE_FIRST,
        {"encoder.layers.0.self_attn.in_proj_weight": "qkv", "encoder.layers.0.self_attn.out_proj.weight": "out",
         "encoder.layers.0.linear1.weight": "mlp_in", "encoder.layers.0.linear2.weight": "mlp_out",
         "embed.weight": "other"},
        TRANSFORMER, BOTH, ("linear.weight",),
    ),
}  # fmt: skip
every_case = pytest.mark.parametrize("name", CASES)
PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@cache
def built(name: str) -> tuple[nn.Module, Any, Anatomy]:
    """Model in training mode with strong random weights, its inputs and anatomy. Tests leave all three as they are."""
    torch.manual_seed(0)
    case = CASES[name]
    with torch.device(case.device):
        model = case.build().train()
    for parameter in model.parameters():
        parameter.data.normal_(std=1.0 if parameter.ndim < 2 else 1.5 / parameter[0].numel() ** 0.5)
    pixels = PIXELS.to(case.device)
    inputs = {case.keyword: pixels} if case.keyword else pixels
    return model, inputs, find(model, inputs)


@every_case
def test_blocks_are_found_in_the_order_in_which_they_run(name: str) -> None:
    """By structure alone, with the layout of each one's output."""
    _, _, anatomy = built(name)
    assert list(anatomy.blocks) == CASES[name].blocks
    assert {anatomy.layouts[block] for block in anatomy.blocks} == {CASES[name].layout}
    assert set(anatomy.layouts) == {*anatomy.blocks, *anatomy.tail.values()}
    assert set(anatomy.tail) <= set(anatomy.untrained)


@every_case
def test_roles(name: str) -> None:
    """Every role belongs to a weight matrix or kernel; heads, and what no block depends on, are known."""
    model, _, anatomy = built(name)
    case = CASES[name]
    parameters = dict(model.named_parameters())
    assert case.roles.items() <= anatomy.roles.items()
    assert tuple(key for key, role in anatomy.roles.items() if role == "head") == case.head
    assert set(anatomy.untrained) == {*case.head, *case.also_untrained}
    assert all(parameters[key].ndim in (2, 4) for key in anatomy.roles)
    if case.scope == TRANSFORMER:
        assert not any(role == "conv" for key, role in anatomy.roles.items() if "embed" in key or "proj" in key)


@every_case
def test_default_scope_exists(name: str) -> None:
    """What is pruned by default is there, and `all` is every role."""
    model, _, anatomy = built(name)
    assert default_scope(anatomy) == CASES[name].scope
    assert scope(anatomy, model, default_scope(anatomy))
    assert set(scope(anatomy, model, "all")) == set(anatomy.roles)


@every_case
def test_finding_leaves_the_model_as_it_was(name: str) -> None:
    """Training flags, requires_grad, gradients, buffers and weights."""
    model, inputs, anatomy = built(name)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    before = copy.deepcopy(model.state_dict())
    frozen = next(model.parameters()).requires_grad_(False)
    try:
        assert find(model, inputs) == anatomy
        assert [parameter.requires_grad for parameter in model.parameters()].count(False) == 1
    finally:
        frozen.requires_grad_(True)
    if CASES[name].device == "cpu":
        assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


@every_case
def test_units_fit_their_parameters(name: str) -> None:
    """Of the expected kinds, within bounds, whole heads, of prunable weights or of biases."""
    model, _, anatomy = built(name)
    parameters = dict(model.named_parameters())
    kinds = [unit.kind for unit in anatomy.units]
    assert {kind: kinds.count(kind) for kind in kinds} == CASES[name].kinds
    for unit in anatomy.units:
        assert unit.count % unit.groups == 0
        assert (unit.groups > 1) == (unit.kind == "qk")
        for part in unit.parts:
            assert part.parameter in anatomy.roles or parameters[part.parameter].ndim == 1
            assert 0 <= part.start <= parameters[part.parameter].shape[part.dim] - unit.count


@every_case
def test_a_unit_without_weights_is_gone(name: str) -> None:
    """With a unit's weights at zero nothing of it is left: what its biases are no longer matters."""
    model, inputs, anatomy = built(name)
    for unit in one_of_each_kind(anatomy):
        masked = exact(model)
        zero_(masked, unit, weights=True)
        expected = output(masked, inputs)
        zero_(masked, unit, weights=False)
        torch.testing.assert_close(output(masked, inputs), expected, rtol=0, atol=1e-11)
        assert (output(exact(model), inputs) - expected).abs().max() > 1e-8


@every_case
def test_a_neuron_can_be_cut_out(name: str) -> None:
    """Cutting the parts out of a neuron's parameters gives the masked model's output, and a smaller model."""
    model, inputs, anatomy = built(name)
    for unit in (unit for unit in one_of_each_kind(anatomy) if unit.kind == "neuron"):
        masked, small = exact(model), exact(model)
        zero_(masked, unit, weights=True)
        for part in unit.parts:
            path, _, key = part.parameter.rpartition(".")
            old = small.get_parameter(part.parameter)
            keep = [i for i in range(old.shape[part.dim]) if i != part.start + 1]
            small.get_submodule(path).register_parameter(
                key, nn.Parameter(old.index_select(part.dim, torch.tensor(keep)))
            )
        torch.testing.assert_close(output(small, inputs), output(masked, inputs), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["timm vit", "torchvision vit", "transformers vit"])
def test_half_a_query_key_dimension_is_not_gone(name: str) -> None:
    """With only the query's rows at zero the query's bias still meets the keys."""
    model, inputs, anatomy = built(name)
    unit = next(unit for unit in anatomy.units if unit.kind == "qk")
    query = Unit("qk", unit.block, unit.count, unit.groups, unit.parts[:1] + unit.parts[2:])
    masked = exact(model)
    zero_(masked, query, weights=True)
    expected = output(masked, inputs)
    zero_(masked, query, weights=False)
    assert (output(masked, inputs) - expected).abs().max() > 1e-8


def one_of_each_kind(anatomy: Anatomy) -> Iterator[Unit]:
    for kind in ("qk", "neuron"):
        yield from [unit for unit in anatomy.units if unit.kind == kind][:1]


def zero_(model: nn.Module, unit: Unit, *, weights: bool) -> None:
    """Set unit 1 to zero: its weights, or else its biases."""
    for part in unit.parts:
        tensor = model.get_parameter(part.parameter).data
        if (tensor.ndim > 1) == weights:
            tensor.select(part.dim, part.start + 1).zero_()


def exact(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double().eval()


def output(model: nn.Module, inputs: Any) -> Tensor:
    doubled = {key: value.double() for key, value in inputs.items()} if isinstance(inputs, dict) else inputs.double()
    with torch.no_grad():
        return activations.logits(model, doubled)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8), nn.ReLU(), nn.Linear(8, CLASSES)),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.LazyLinear(CLASSES)),
    ],
)
def test_a_plain_stack_of_layers_has_no_blocks(model: nn.Module) -> None:
    """It is told how to name them, and then it has; its last layer is its head, before or after which it is cut."""
    model(PIXELS)
    with pytest.raises(UserError, match="no blocks") as error:
        find(model, PIXELS)
    assert "--blocks REGEX" in error.value.hint
    anatomy = find(model, PIXELS, blocks="[12]")
    assert anatomy.blocks == ("1", "2")
    last = f"{len(model) - 1}.weight"
    assert anatomy.roles[last] == "head"
    assert last in anatomy.untrained


def test_chosen_blocks_change_what_is_aligned_and_not_what_is_prunable() -> None:
    """With only the first block aligned, the second is out of reach of the alignment."""
    model, inputs, whole = built("timm vit")
    anatomy = find(model, inputs, blocks=r"blocks\.0")
    assert anatomy.blocks == ("blocks.0",)
    assert (anatomy.roles, anatomy.units) == (whole.roles, whole.units)
    assert set(anatomy.untrained) == {key for key in whole.roles if not key.startswith("blocks.0.")}


def test_chosen_blocks_must_exist_and_run() -> None:
    """Errors name the expression, or the module that never ran."""
    model, inputs, _ = built("timm vit")
    with pytest.raises(UserError, match="nothing_of_the_kind") as error:
        find(model, inputs, blocks="nothing_of_the_kind")
    assert "`blocks" in error.value.hint
    with pytest.raises(UserError, match="not a regular expression"):
        find(model, inputs, blocks="(")
    idle = ResNet20()
    idle.layer4 = nn.Sequential(BasicBlock(64, 64, 1))
    with pytest.raises(UserError, match=r"`layer4\.0`"):
        find(idle, PIXELS)
    assert find(idle, PIXELS, blocks=r"layer[123]\.\d").blocks == built("a user's resnet20")[2].blocks


def test_one_image_is_not_enough() -> None:
    """The batch dimension shows only when the batch grows."""
    with pytest.raises(UserError, match="batch of 1"):
        find(ResNet20(), PIXELS[:1])


def test_wrappers_are_taken_off() -> None:
    """DataParallel and torch.compile, also of each other."""
    model = ResNet20()
    assert unwrap(nn.DataParallel(model)) is model
    assert unwrap(torch.compile(nn.DataParallel(torch.compile(model)))) is model
    assert find(nn.DataParallel(model), PIXELS) == find(model, PIXELS)


def test_attention_cut_narrower_is_still_one(images: Tensor) -> None:
    """Looked at again, a small model has its query-key dimensions counted as they are, and its output layer known."""
    dense = tiny_vit()
    masks = starfish.prune(dense, starfish.Structured(0.5, scope="mlp+qk"), images)
    small = starfish.slim(dense, masks, images)
    anatomy = find(small, images[:2])
    unit = next(unit for unit in anatomy.units if unit.kind == "qk")
    assert (unit.count, unit.groups) == (12, 3)
    assert [part.start for part in unit.parts] == [0, 12, 0, 12]
    assert anatomy.roles["blocks.0.attn.proj.weight"] == "out"
    assert anatomy.roles["blocks.0.attn.qkv.weight"] == "qkv"
