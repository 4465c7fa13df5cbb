"""Whole units gone: masked, physically small, and back again, on every kind of model that can be cut."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import timm
import torch
import torch_pruning as tp
import torchvision
import transformers
from torch import Tensor, nn

import starfish
from cases import IMAGES, LABELS, Case, tiny_cnn, tiny_vit
from starfish.activations import logits
from starfish.anatomy import find
from starfish.anatomy.attention import is_narrow, narrowable
from starfish.core import Anatomy, Masks
from starfish.data import Preprocess, StoredImages
from starfish.masks import apply_
from starfish.models import small_config
from starfish.pruners.kwon import ByKwon
from starfish.pruners.structured import Structured
from starfish.small import (
    cut_of,
    disagreement,
    grow_,
    rebuild_,
    remaining,
    slimmed,
    smaller,
    smaller_anatomy,
    smaller_masks,
    widths,
)
from test_align import FIXED, textbook

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}


def timm_deit() -> nn.Module:
    """With a distillation token and a head for it."""
    model: nn.Module = timm.create_model("deit_tiny_distilled_patch16_224", **TINY)
    return model


def timm_deit3() -> nn.Module:
    """With LayerScale."""
    model: nn.Module = timm.create_model("deit3_small_patch16_224", **TINY)
    return model


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 2, 3, 24, 48, num_classes=5)


def transformers_vit() -> nn.Module:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=5)
    return transformers.ViTForImageClassification(config)


def mobilenet() -> nn.Module:
    model: nn.Module = timm.create_model("mobilenetv1_100", pad_type="same", num_classes=5)
    return model


KINDS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "timm vit": (tiny_vit, "mlp+qk"),
    "timm deit": (timm_deit, "mlp+qk"),
    "timm deit3": (timm_deit3, "mlp+qk"),
    "torchvision vit": (torchvision_vit, "mlp+qk"),
    "transformers vit": (transformers_vit, "mlp+qk"),
    "timm mobilenet": (mobilenet, "channels"),
    "cnn": (tiny_cnn, "channels"),
}
VITS = [kind for kind, (_, scope) in KINDS.items() if scope == "mlp+qk"]
QUERIES = {"timm vit": "scale", "torchvision vit": "scale", "transformers vit": "scaling"}  # one of each attention
SMALL_PIXELS = IMAGES[:3]


@cache
def _pruned(kind: str, scope: str) -> tuple[nn.Module, Masks, Anatomy]:
    build, _ = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = lively_(build().eval())
    masks = starfish.prune(model, Structured(0.5, scope=scope, criterion="weight"), IMAGES[:2])
    anatomy = find(model, IMAGES[:2], channels=scope == "channels")
    apply_(model, masks)
    return model, masks, anatomy


def pruned(kind: str, scope: str = "") -> tuple[nn.Module, Masks, Anatomy]:
    """A masked model of random weights, its masks of whole units, its anatomy."""
    return deepcopy(_pruned(kind, scope or KINDS[kind][1]))


@torch.no_grad()
def lively_(model: nn.Module) -> nn.Module:
    """Weights under which every layer matters, and biases and statistics that are not zero."""
    for tensor in model.parameters():
        if tensor.ndim > 1:
            tensor.normal_(0, 1.5 / math.sqrt(tensor[0].numel()))
        else:
            tensor.add_(torch.randn(tensor.shape), alpha=0.3)
    for name, tensor in model.named_buffers():
        if name.endswith("running_mean"):
            tensor.normal_(0, 0.3)
    return model


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kind", KINDS)
def test_small_is_masked(kind: str, dtype: torch.dtype, close: float) -> None:
    """The same answers with zeros and without the units, both with gradients and without: they take other kernels."""
    model, masks, anatomy = pruned(kind)
    small = slimmed(model, masks, anatomy).to(dtype)
    images = SMALL_PIXELS.to(dtype)
    model.to(dtype)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            masked, found = logits(model, images).detach(), logits(small, images).detach()
        assert float(masked.std()) > 1e-2
        assert disagreement(masked, found) < close
    sizes = [sum(parameter.numel() for parameter in net.parameters()) for net in (model, small)]
    assert sizes[1] < 0.8 * sizes[0]


@pytest.mark.parametrize("kind", ["timm vit", "cnn"])
def test_the_masked_model_is_left_alone(kind: str) -> None:
    """A new model comes out; the tensors of the old one are its own and as they were."""
    model, masks, anatomy = pruned(kind)
    before = deepcopy(model.state_dict())
    small = slimmed(model, masks, anatomy)
    for parameter in small.parameters():
        parameter.data.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(is_narrow(module) for module in model.modules())


@pytest.mark.parametrize("kind", QUERIES)
def test_the_scale_of_the_softmax_is_that_of_the_dense_model(kind: str) -> None:
    """With 1/√(the width that is left) the answers are other ones."""
    model, masks, anatomy = pruned(kind)
    small = slimmed(model, masks, anatomy)
    narrow = [module for module in small.modules() if is_narrow(module)]
    assert len(narrow) == 2
    with torch.no_grad():
        masked = logits(model, SMALL_PIXELS)
        assert disagreement(masked, logits(small, SMALL_PIXELS)) < 1e-5
        for module in narrow:
            assert getattr(module, QUERIES[kind]) == pytest.approx(8**-0.5)
            setattr(module, QUERIES[kind], 4**-0.5)
        assert disagreement(masked, logits(small, SMALL_PIXELS)) > 1e-3


def one_sided(kind: str) -> tuple[nn.Module, Masks, Anatomy, Masks]:
    """As `pruned`, but the rows of keys are all there; and the whole masks."""
    _, masks, anatomy = pruned(kind, "qk")
    model, half = lively_(KINDS[kind][0]().eval()), deepcopy(masks)
    for unit in anatomy.units:
        for part in unit.parts:
            if part.side == "k" and part.parameter in half:
                half[part.parameter].narrow(part.dim, part.start, unit.count).fill_(True)
    apply_(model, half)
    return model, half, anatomy, masks


@pytest.mark.parametrize("kind", VITS)
def test_a_dimension_goes_from_queries_and_keys_or_not_at_all(kind: str) -> None:
    """Zero in the queries alone it is refused by name and left in place; cut all the same it would change answers."""
    model, half, anatomy, masks = one_sided(kind)
    with pytest.raises(starfish.UserError, match=r"12 of 24 qk dims are zero in some of their weights only"):
        slimmed(model, half, anatomy)
    assert not cut_of(half, anatomy, model)
    forced = smaller(model, cut_of(masks, anatomy, model))
    with torch.no_grad():
        assert disagreement(logits(model, SMALL_PIXELS), logits(forced, SMALL_PIXELS)) > 1e-3


def test_heads_that_lose_unequally_are_refused_and_stay() -> None:
    """All heads have one width, so that their queries stay as they are; the neurons of the same mask can be cut."""
    model, masks, anatomy = pruned("timm vit")
    name = "blocks.0.attn.qkv.weight"
    masks[name][[0, 24]] = False
    masks[name][[1, 25]] = False
    for side in (0, 24):  # the first head loses all
        masks[name][side : side + 8] = False
    apply_(model, masks)
    with pytest.raises(starfish.UserError, match=r"`blocks\.0`: the heads lose unequal numbers of qk dims \(8, 4, 4\)"):
        slimmed(model, masks, anatomy)
    cut = cut_of(masks, anatomy, model)
    assert cut.attentions == ("blocks.1.attn",)
    assert cut.counts() == {"neuron": {"units": 192, "gone": 96}, "qk": {"units": 24, "gone": 12}}
    with torch.no_grad():
        assert disagreement(model(SMALL_PIXELS), smaller(model, cut)(SMALL_PIXELS)) < 1e-5


def test_masks_without_units_have_nothing_to_cut() -> None:
    model, masks, anatomy = pruned("timm vit")
    scattered = {name: torch.rand(mask.shape) > 0.5 for name, mask in masks.items()}
    with pytest.raises(starfish.UserError, match="nothing to cut out"):
        slimmed(model, scattered, anatomy)
    assert cut_of(scattered, anatomy, model).counts() == {}


def test_norms_of_queries_keep_their_dimensions() -> None:
    """Mean and variance are over all of them: no unit, and no attention that would forget the norm."""
    model = timm.create_model("vit_tiny_patch16_224", qk_norm=True, **TINY).eval()
    anatomy = find(model, IMAGES[:2])
    assert {unit.kind for unit in anatomy.units} == {"neuron"}
    assert not narrowable(model.blocks[0].attn)
    masks = {f"blocks.{block}.attn.qkv.weight": torch.ones(72, 24, dtype=torch.bool) for block in (0, 1)}
    for mask in masks.values():
        mask.view(9, 8, 24)[:6, ::2] = False
    with pytest.raises(starfish.UserError, match="nothing to cut out"):
        slimmed(model, masks, anatomy)


class Attention(nn.Module):
    """One that is not known, of the usual parts."""

    def __init__(self, known: nn.Module) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.proj = 3, known.qkv, known.proj

    def forward(self, x: Tensor, **_: object) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 8)).movedim(-3, 0).transpose(2, 3)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_an_attention_that_is_not_known_is_refused_by_name_and_stays() -> None:
    """Its queries cannot be made narrower; without being asked to, the neurons go."""
    model = tiny_vit()
    for block in model.blocks:
        block.attn = Attention(block.attn)
    anatomy = find(model, IMAGES[:2])
    masks = starfish.prune(model, Structured(0.5, scope="mlp+qk", criterion="weight"), IMAGES[:2])
    apply_(model, masks)
    with pytest.raises(starfish.UserError, match=r"`blocks\.0\.attn` is a `Attention`, whose queries") as error:
        slimmed(model, masks, anatomy)
    assert "--scope mlp" in error.value.hint
    cut = cut_of(masks, anatomy, model)
    assert list(cut.counts()) == ["neuron"]
    with torch.no_grad():
        assert disagreement(model(SMALL_PIXELS), smaller(model, cut)(SMALL_PIXELS)) < 1e-5


def test_shared_weights_are_refused_by_name_and_heal_in_their_place(images: Tensor) -> None:
    """Two blocks with one and the same layer: it cannot be smaller in one of them, and is healed as it is."""
    model = tiny_vit()
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    masks = starfish.prune(model, Structured(0.5, scope="mlp+qk", criterion="weight"), images[:2])
    dense = deepcopy(model)
    apply_(model, masks)
    with pytest.raises(starfish.UserError, match=r"`blocks\.0\.mlp\.fc1\.weight` is shared with `blocks\.1"):
        slimmed(model, masks, find(model, images[:2]))
    result = starfish.heal_(model, dense, masks, images, starfish.Starfish(epochs=1, precision="fp32"))
    assert list(result.cut) == ["qk"]
    assert result.mask_intact


def test_a_layer_that_lost_everything_keeps_one_unit_of_zeros() -> None:
    """A layer of no width is no layer; its attention then looks everywhere alike."""
    model, masks, anatomy = pruned("timm vit")
    for name in masks:
        if "fc" in name:
            masks[name].fill_(False)
        else:
            masks[name][:48] = False
    apply_(model, masks)
    small = slimmed(model, masks, anatomy)
    assert small.blocks[0].mlp.fc1.weight.shape == (1, 24)  # type: ignore[union-attr,index]
    assert small.blocks[0].attn.qkv.weight.shape == (3 + 3 + 24, 24)  # type: ignore[union-attr,index]
    with torch.no_grad():
        assert disagreement(model(SMALL_PIXELS), small(SMALL_PIXELS)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_grown_back_it_is_the_masked_model_to_the_bit(kind: str) -> None:
    """Every tensor of the small model lands where it came from; what was cut, biases too, stays as it is."""
    model, masks, anatomy = pruned(kind)
    cut = cut_of(masks, anatomy, model)
    small = smaller(model, cut)
    empty = deepcopy(model)
    for name, tensor in empty.state_dict().items():
        for dim, indices in cut.of(name):
            tensor.index_fill_(dim, indices, 7.0)
        if name in masks:
            tensor.masked_fill_(~masks[name], 0.0)
    grow_(empty, small, cut)
    for name, tensor in model.state_dict().items():
        assert torch.equal(empty.state_dict()[name], tensor), name
    for name, mask in smaller_masks(masks, cut).items():
        assert mask.all(), name
        assert mask.shape == small.get_parameter(name).shape


@pytest.mark.parametrize("kind", KINDS)
def test_widths_are_enough_to_build_it_again(kind: str) -> None:
    """Small weights and what JSON keeps of the shapes, in a freshly built dense model: the same answers bit for bit."""
    model, masks, anatomy = pruned(kind)
    small = slimmed(model, masks, anatomy)
    config = json.loads(json.dumps(small_config(model, small)))
    assert config["widths"] == widths(model.state_dict(), small.state_dict())
    again = KINDS[kind][0]().eval()
    rebuild_(again, config["widths"], config["attentions"])
    again.load_state_dict(small.state_dict())
    with torch.no_grad():
        assert torch.equal(logits(again, SMALL_PIXELS), logits(small, SMALL_PIXELS))


def test_widths_of_another_architecture_are_refused() -> None:
    with pytest.raises(starfish.UserError, match=r"has `blocks\.7\.mlp\.fc1\.weight`, which this architecture"):
        rebuild_(tiny_vit(), {"blocks.7.mlp.fc1.weight": [48, 24]}, [])


@pytest.mark.parametrize("kind", QUERIES)
def test_a_small_model_can_be_cut_again(kind: str) -> None:
    """Half of the units first, then half of what is left: as all of it at once."""
    model, first, anatomy = pruned(kind)
    masks = starfish.prune(model, Structured(0.75, scope="mlp+qk", criterion="weight"), IMAGES[:2])
    apply_(model, masks)
    cut = cut_of(first, anatomy, model)
    twice = slimmed(smaller(model, cut), smaller_masks(masks, cut), smaller_anatomy(anatomy, cut))
    once = slimmed(model, masks, anatomy)
    assert {name: tensor.shape for name, tensor in twice.state_dict().items()} == {
        name: tensor.shape for name, tensor in once.state_dict().items()
    }
    with torch.no_grad():
        assert disagreement(logits(model, SMALL_PIXELS), logits(twice, SMALL_PIXELS)) < 1e-5


# --- healing in the small shape


@dataclass(frozen=True)
class InMaskedShape(starfish.Starfish):
    """The same loop on the model with its zeros."""

    def masked(self) -> bool:
        return True


def masks_of(model: nn.Module, kinds: set[str], inputs: Tensor) -> Masks:
    """Every other unit gone, of those that are no channels of a block's output: these the loss would see go."""
    anatomy, masks = find(model, inputs, channels="channel" in kinds), Masks()
    for unit in (unit for unit in anatomy.units if unit.kind in kinds and not unit.outputs):
        for part in (part for part in unit.parts if part.parameter in anatomy.roles):
            shape = model.get_parameter(part.parameter).shape
            mask = masks.setdefault(part.parameter, torch.ones(shape, dtype=torch.bool))
            mask.narrow(part.dim, part.start, unit.count).movedim(part.dim, 0)[::2] = False
    return masks


@pytest.mark.parametrize(
    ("build", "kinds"), [(tiny_vit, {"neuron"}), (tiny_vit, {"neuron", "qk"}), (tiny_cnn, {"channel"})]
)
def test_healed_small_or_masked_it_is_the_same_model(
    build: Callable[[], nn.Module], kinds: set[str], images: Tensor
) -> None:
    """A few steps with whole units gone end at the same weights in either shape, but for rounding."""
    dense = build()
    masks = masks_of(dense, kinds, images[:2])
    results = []
    for kind in (starfish.Starfish, InMaskedShape):
        model = deepcopy(dense)
        method = kind(epochs=2, batch_size=4, precision="fp32", lr=2e-3, bn="freeze", optimizer="adamw")
        result = starfish.heal_(model, dense, masks, images, method)
        assert set(result.cut) == kinds
        results.append((model.state_dict(), [row["loss"] for row in result.rows]))
    (small, losses), (masked, expected) = results
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0]
    for name, tensor in masked.items():
        torch.testing.assert_close(small[name], tensor, rtol=1e-4, atol=1e-4, msg=name)


def test_healed_small_its_losses_are_those_of_the_textbook_loop(images: Tensor) -> None:
    """Which is written by hand and knows nothing but masks."""
    model, dense, masks, _ = Case("starfish", "vit-neurons+qk").build(images)
    result = starfish.heal_(model, dense, masks, images, FIXED)
    assert result.cut["qk"] == {"units": 48, "gone": 24}
    expected = textbook(dense, masks, images, epochs=3, batch_size=5)
    assert [row["loss"] for row in result.rows] == pytest.approx(expected, abs=1e-4)


# --- models that another tool has cut


def without_neurons(model: nn.Module) -> nn.Module:
    """Every other neuron cut out of every MLP."""
    return cut_by_torch_pruning(model, [(block.mlp.fc1, tp.prune_linear_out_channels) for block in model.blocks])


def without_channels(model: nn.Module) -> nn.Module:
    """Every other channel cut out between the two convolutions of every block."""
    layers = (model.layer1, model.layer2, model.layer3)
    return cut_by_torch_pruning(model, [(layer[0].conv1, tp.prune_conv_out_channels) for layer in layers])


def cut_by_torch_pruning(model: nn.Module, layers: list[tuple[nn.Module, Any]]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Unwrapped parameters detected")
        graph = tp.DependencyGraph().build_dependency(model, example_inputs=IMAGES[:1])
    for layer, cutting in layers:
        graph.get_pruning_group(layer, cutting, idxs=list(range(0, len(layer.weight), 2))).prune()
    return model


@pytest.mark.parametrize(("build", "cut"), [(tiny_vit, without_neurons), (tiny_cnn, without_channels)])
def test_a_model_that_torch_pruning_has_cut_is_healed_as_it_is(
    build: Callable[[], nn.Module], cut: Callable[[nn.Module], nn.Module], images: Tensor
) -> None:
    """Its blocks still put out what the dense model's do; it stays small, and is measured as the small one."""
    dense, model = build(), cut(build())
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    masks = remaining(model, dense)
    assert all(mask.all() for mask in masks.values())
    assert set(masks) <= set(dict(model.named_parameters()))
    before = deepcopy(model.state_dict())
    method = starfish.Starfish(epochs=4, batch_size=4, precision="fp32", lr=2e-3)
    result = starfish.heal_(model, dense, masks, images, method)
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes
    assert result.fidelity["cosine"]["healed"] > result.fidelity["cosine"]["pruned"]
    assert result.cut == {}
    assert result.speed["small"]["parameters"] < result.speed["dense"]["parameters"]
    assert "masked" not in result.speed
    free = {*masks, *result.also_changed}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items() if name not in free)


def test_blocks_that_put_out_less_cannot_be_compared(images: Tensor) -> None:
    """torch-pruning has cut the residual stream too: refused by name, with the widths."""
    model = cut_by_torch_pruning(model := tiny_cnn(), [(model.conv1, tp.prune_conv_out_channels)])
    dense = tiny_cnn()
    with pytest.raises(starfish.UserError, match=r"`layer1\.0`.* puts out 8 channels, in the dense one 16"):
        starfish.heal_(model, dense, remaining(model, dense), images, starfish.Starfish(epochs=1))


# --- how much goes (methods.md 1.4)


SCOPES = {"mlp": {"neuron"}, "qk": {"qk"}, "both": {"neuron", "qk"}}


def parameters_left(name: str, kinds: set[str], inputs: Tensor) -> int:
    """Of a published architecture without half of these units, on the device of the inputs."""
    with inputs.device:
        model = timm.create_model(name).eval()
    small = slimmed(model, masks_of(model, kinds, inputs), find(model, inputs))
    return sum(parameter.numel() for parameter in small.parameters())


IN_MILLIONS = {
    "deit_tiny_patch16_224": (3.9, 5.3, 3.5),
    "deit_small_patch16_224": (15.0, 20.3, 13.2),
    "deit_base_patch16_224": (58.2, 79.5, 51.2),
}
EXACTLY = {"mlp": 58_237_672, "qk": 79_480_552, "both": 51_150_568}


@pytest.mark.parametrize("scope", EXACTLY)
@pytest.mark.parametrize("name", IN_MILLIONS)
def test_parameters_of_published_models_at_half(name: str, scope: str) -> None:
    """Those of methods.md 1.4, to the parameter for DeiT-B; shapes are enough, nothing is filled."""
    found = parameters_left(name, SCOPES[scope], torch.zeros(2, 3, 224, 224, device="meta"))
    assert round(found / 1e6, 1) == IN_MILLIONS[name][list(EXACTLY).index(scope)]
    if "base" in name:
        assert found == EXACTLY[scope]


def test_heads_that_nothing_hears_stay_as_zeros_while_neurons_are_cut() -> None:
    """Kwon's masks take whole heads: queries, keys and values, and what reads these. There is no narrower attention for
    them, but neither do they keep the rest from being cut."""
    model = tiny_vit()
    labelled = StoredImages(IMAGES, Preprocess(), LABELS)
    masks = starfish.prune(model, ByKwon(0.5, scope="heads+mlp", batch=4), labelled)
    assert any(not mask.any(0).all() for name, mask in masks.items() if name.endswith("attn.proj.weight"))
    apply_(model, masks)
    small = starfish.slim(model, masks, IMAGES)
    sizes = [sum(parameter.numel() for parameter in net.parameters()) for net in (small, model)]
    assert sizes[0] < sizes[1]
    torch.testing.assert_close(small(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-4)
