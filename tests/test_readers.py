"""Which norm reads a block's output, and which positions of the last one the head reads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from timm.layers import LayerNorm2d, RmsNorm
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig

from cases import tiny_cnn, tiny_vit
from starfish import activations
from starfish.anatomy import find
from starfish.anatomy.readers import head_positions, next_norms

PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
SWIN = {"img_size": 32, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4}


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32)


def transformers_vit(kind: str = "ViT") -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = getattr(transformers, f"{kind}Config")(**sizes, image_size=32, patch_size=8)
    return getattr(transformers, f"{kind}ForImageClassification")(config)


def timm_model(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, pretrained=False, **settings)


def torchvision_convnext() -> nn.Module:
    return torchvision.models.ConvNeXt([CNBlockConfig(8, 16, 2), CNBlockConfig(16, None, 1)])


EXPECTED: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "timm vit": (tiny_vit, {"blocks.0": "blocks.1.norm1", "blocks.1": "norm"}),
    "timm vit, pooled before its norm": (
        timm_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3,
                   global_pool="avg", class_token=False),
        {"blocks.0": "blocks.1.norm1"},
    ),
    "timm vit with RMS norms": (
        timm_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3,
                   norm_layer=RmsNorm),
        {"blocks.0": "blocks.1.norm1", "blocks.1": "norm"},
    ),
    "timm swin: the last block of a stage is reshaped before it is normed": (
        timm_model("swin_tiny_patch4_window7_224", **SWIN),
        {"layers.0.blocks.0": "layers.0.blocks.1.norm1", "layers.1.blocks.0": "layers.1.blocks.1.norm1",
         "layers.1.blocks.1": "norm"},
    ),
    "timm swinv2: norms after the layers, and one before the head": (
        timm_model("swinv2_tiny_window8_256", **SWIN), {"layers.1.blocks.1": "norm"}
    ),
    "torchvision vit": (
        torchvision_vit,
        {"encoder.layers.encoder_layer_0": "encoder.layers.encoder_layer_1.ln_1",
         "encoder.layers.encoder_layer_1": "encoder.ln"},
    ),
    "transformers vit": (
        transformers_vit, {"vit.layers.0": "vit.layers.1.layernorm_before", "vit.layers.1": "vit.layernorm"}
    ),
    "a CNN": (tiny_cnn, {}),
    "channels first: torchvision convnext": (torchvision_convnext, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_norms_of_known_architectures(name: str) -> None:
    """The next block's first norm, or the head's; found on tensors and on mappings, and shapes are enough."""
    build, expected = EXPECTED[name]
    model = build()
    blocks = find(model, PIXELS).blocks
    assert next_norms(model, PIXELS, blocks) == expected
    if name.startswith("transformers"):
        assert next_norms(model, {"pixel_values": PIXELS}, blocks) == expected
    assert next_norms(model.to("meta"), PIXELS.to("meta"), blocks) == expected


def test_the_norm_gets_what_the_block_put_out() -> None:
    """Applied to the recorded output of the block it gives its own recorded output."""
    model = tiny_vit()
    found = next_norms(model, PIXELS, ["blocks.0", "blocks.1"])
    with torch.no_grad(), activations.Recorder(model, [*found, *found.values()]) as recorder:
        model(PIXELS)
        outputs = recorder.take()
    for block, norm in found.items():
        assert torch.equal(model.get_submodule(norm)(outputs[block]), outputs[norm])


def test_the_net_is_left_as_it_was() -> None:
    """Training flags, also mixed ones, running statistics, gradients and hooks."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LayerNorm(30), nn.Dropout()).train()
    model[3].eval()
    before = copy.deepcopy(model.state_dict())
    assert next_norms(model, PIXELS, ["1"]) == {"1": "2"}
    assert [module.training for module in model] == [True, True, True, False]
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_net_is_left_as_it_was_after_an_error() -> None:
    """The hooks go and the training flags come back when the forward pass fails."""
    model = tiny_vit().train()
    with pytest.raises(AssertionError):
        next_norms(model, torch.zeros(2, 3, 16, 16), ["blocks.0"])
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("norm_first", "final", "expected"),
    [
        (False, False, {}),
        (False, True, {"layers.1": "norm"}),
        (True, False, {"layers.0": "layers.1.norm1"}),
        (True, True, {"layers.0": "layers.1.norm1", "layers.1": "norm"}),
    ],
)
def test_post_norm_blocks(norm_first: bool, final: bool, expected: dict[str, str]) -> None:
    """A norm that writes a block's output does not read it. PyTorch's fused encoder layers are seen through."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16) if final else None, enable_nested_tensor=False)
    assert next_norms(model, torch.randn(2, 5, 16), ["layers.0", "layers.1"]) == expected


class Net(nn.Module):
    """One block, and whatever comes between it and some norms."""

    def __init__(self, between: Callable[[nn.Module, Any], Any], block: nn.Module | None = None) -> None:
        super().__init__()
        self.late, self.early = nn.LayerNorm(4), nn.LayerNorm(4)  # registered in another order than they run
        self.block = nn.Linear(4, 4) if block is None else block
        self.between = between

    def forward(self, x: Tensor) -> Any:
        return self.between(self, self.block(x))


class InTuple(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x + 1, 3


class WithNorm(nn.Module):
    """Runs twice in a model that shares it: its norm reads its own first output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x)


def twice(net: nn.Module, y: Tensor) -> Tensor:
    return net.late(net.block(net.early(net.block(y)) + 1))


CHAINS: dict[str, tuple[nn.Module, str | None]] = {
    "two norms read it: the first to run": (Net(lambda net, y: net.early(y) + net.late(y)), "early"),
    "by keyword": (Net(lambda net, y: net.late(input=y)), "late"),
    "a tuple": (Net(lambda net, y: net.late(y[0]), InTuple()), "late"),
    "the same place, another object": (Net(lambda net, y: net.late(y.view_as(y))), "late"),
    "through dropout and identity": (Net(lambda net, y: net.late(nn.Identity()(nn.Dropout().eval()(y)))), "late"),
    "another shape": (Net(lambda net, y: net.late(y.unsqueeze(1))), None),
    "a part": (Net(lambda net, y: net.late(y[:1])), None),
    "equal values elsewhere": (Net(lambda net, y: net.late(y.clone())), None),
    "overwritten in between": (Net(lambda net, y: net.late(y.relu_())), None),
    "overwritten afterwards": (Net(lambda net, y: net.late(y) + y.relu_()), "late"),
    "freed, and another in its place": (Net(lambda net, y: net.late((y + 1) * 2)), None),
    "a shared block: its last run counts": (Net(twice, WithNorm()), "late"),
    "a block read only by itself": (Net(lambda net, y: net.block(y), WithNorm()), None),
}


@pytest.mark.parametrize("name", CHAINS)
def test_what_counts_as_reading(name: str) -> None:
    """The very tensor, unchanged, outside the block."""
    model, expected = CHAINS[name]
    found = next_norms(model, torch.randn(3, 4), ["block"])
    assert found == ({} if expected is None else {"block": expected})


def test_nothing_is_put_in_the_place_of_a_freed_output() -> None:
    """Memory is handed out again at once: many outputs that nobody keeps, each followed by a norm of another tensor."""

    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(20))
            self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(20))

        def forward(self, x: Tensor) -> Tensor:
            for block, norm in zip(self.blocks, self.norms, strict=True):
                size = float(block(x).sum())
                x = norm(x + size)
            return x

    assert next_norms(Loose(), torch.randn(64, 64), [f"blocks.{i}" for i in range(20)]) == {}


class MyRMSNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt()


class EncoderLayerStableLayerNorm(nn.Module):
    """transformers has such blocks: named after their norm, and none themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_norm(x + 1)


class ChannelsFirstLayerNorm(nn.LayerNorm):
    """As in every ConvNeXt."""

    data_format = "channels_first"


class Inherited(MyRMSNorm):
    pass


@pytest.mark.parametrize(
    ("norm", "is_one"),
    [
        (nn.LayerNorm(4), True),
        (nn.RMSNorm(4), True),
        (RmsNorm(4), True),
        (timm.layers.LayerNorm(4), True),
        (MyRMSNorm(), True),
        (Inherited(), True),
        (EncoderLayerStableLayerNorm(), False),
        (ChannelsFirstLayerNorm(4), False),
        (LayerNorm2d(4), False),
        (nn.BatchNorm2d(4), False),
        (nn.GroupNorm(2, 4), False),
    ],
)
def test_kinds_of_norms(norm: nn.Module, is_one: bool) -> None:
    """LayerNorm and everybody's RMSNorm over the last dimension."""
    model = nn.Sequential(nn.Conv2d(3, 4, 29), norm)
    assert next_norms(model, PIXELS, ["0"]) == ({"0": "1"} if is_one else {})


def test_blocks_that_never_run_or_have_no_reader_are_absent() -> None:
    """No error: only blocks with a norm after them have an entry."""
    model = tiny_vit()
    model.idle = nn.Linear(2, 2)
    assert next_norms(model, PIXELS, ["idle", "blocks.1", "head"]) == {"blocks.1": "norm"}
    assert next_norms(model, PIXELS, []) == {}


def positions_of(model: nn.Module) -> tuple[int, ...]:
    model.eval()
    anatomy = find(model, PIXELS)
    last = anatomy.blocks[-1]
    assert anatomy.head_positions == head_positions(model, PIXELS, last, anatomy.layouts[last])
    return anatomy.head_positions


def test_head_reads_class_tokens() -> None:
    """One in a ViT, two in a distilled DeiT, whatever the library."""
    assert positions_of(tiny_vit()) == (0,)
    new = torchvision_vit()
    assert positions_of(new) == ()  # its head is zero at first
    nn.init.normal_(new.get_parameter("heads.head.weight"))
    assert positions_of(new) == (0,)
    assert positions_of(transformers_vit()) == (0,)
    two = timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2)
    assert positions_of(two) == (0, 1)


def test_head_that_reads_most_positions_singles_out_none() -> None:
    """A mean over tokens or pixels reads every one, or all but the class token."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    assert positions_of(timm.create_model("vit_tiny_patch16_224", global_pool="avg", **sizes)) == ()
    assert positions_of(tiny_cnn()) == ()
    assert positions_of(timm.create_model("swin_tiny_patch4_window7_224", **SWIN)) == ()


def test_frozen_models_have_positions_too() -> None:
    """Gradients are asked of the output, not of parameters; and none are left behind."""
    model = tiny_vit().requires_grad_(False)
    assert positions_of(model) == (0,)
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())
