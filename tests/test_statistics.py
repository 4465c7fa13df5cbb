"""What images say of a model's units, against brute force."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

from cases import IMAGES, MODELS, tiny_cnn, tiny_vit
from starfish.anatomy import find
from starfish.cache import Cache
from starfish.core import Anatomy, Layout, Part, Unit
from starfish.data import Preprocess, StoredImages
from starfish.errors import UserError
from starfish.statistics import Moments, QueryKeys, Statistic, gathering, heard, listening, path_of, taps_of

NOTHING = Anatomy((), {}, {}, (), (), {})
PIXELS = IMAGES.double()


def pictures(images: Tensor) -> StoredImages:
    return StoredImages(images, Preprocess())


def gather(
    model: nn.Module, anatomy: Anatomy, images: Tensor, statistics: Sequence[Statistic], *, batch: int = 5,
    cache: Cache | None = None,
) -> int:  # fmt: skip
    """Fill the statistics; the number of forward passes that it took."""
    return len(list(gathering(model, anatomy, pictures(images), statistics, cache, "statistics", batch=batch)))


def statistics_of(model: nn.Module, anatomy: Anatomy) -> list[Statistic]:
    """Of every unit there is; of query-key dimensions about half of each head are kept."""
    found: list[Statistic] = []
    for unit in anatomy.units:
        if unit.kind == "qk":
            found.append(QueryKeys(unit, kept=tuple((0, 2, 3 + head) for head in range(unit.groups))))
        else:
            found.append(Moments(unit, taps=max(taps_of(model.get_submodule(path_of(part))) for part in unit.readers)))
    return found


def read_by(model: nn.Module, path: str, images: Tensor) -> Tensor:
    """What a layer reads in a forward pass."""
    seen = []
    handle = model.get_submodule(path).register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model(images)
    handle.remove()
    return seen[0]


def unit_of(count: int, *readers: Part) -> Unit:
    return Unit("channel", "", count, 1, readers)


@pytest.mark.parametrize("kind", MODELS)
def test_batches_of_any_size_give_the_same(kind: str) -> None:
    """One image at a time, a few, or all at once: every sum, mean and covariance agrees to 1e-10."""
    model = MODELS[kind]().double()
    anatomy = find(model, PIXELS, channels=True)
    found = []
    for batch in (1, 5, 12):
        found.append(statistics_of(model, anatomy))
        assert gather(model, anatomy, PIXELS, found[-1], batch=batch) == -(-12 // batch)
    assert {type(one) for one in found[0]} == ({Moments, QueryKeys} if kind == "vit" else {Moments})
    for group in zip(*found, strict=True):
        for name in group[0].sums:
            values = [one.sums[name] for one in group]
            size = values[0].abs().max()
            assert all((value - values[0]).abs().max() <= 1e-10 * size for value in values), name
        if isinstance(group[0], Moments):
            covariances = [one.covariance_CC(0) for one in group]  # type: ignore[attr-defined]
            assert all((one - covariances[0]).abs().max() <= 1e-10 * covariances[0].max() for one in covariances)


def test_neurons_equal_brute_force() -> None:
    """Count, mean, covariance and second moment of what fc2 reads, all tokens of all images stacked."""
    model = tiny_vit().double()
    anatomy = find(model, PIXELS)
    moments = [one for one in statistics_of(model, anatomy) if isinstance(one, Moments)]
    gather(model, anatomy, PIXELS, moments)
    for block, one in enumerate(moments):
        x_NC = read_by(model, f"blocks.{block}.mlp.fc2", PIXELS).flatten(0, 1).numpy()
        assert one.count(0) == len(x_NC) == 12 * 17
        assert np.allclose(one.mean_C(0), x_NC.mean(0), atol=1e-12)
        assert np.allclose(one.covariance_CC(0), np.cov(x_NC.T, bias=True), atol=1e-12)
        assert np.allclose(one.second_CC(0), x_NC.T @ x_NC / len(x_NC), atol=1e-12)
        assert torch.equal(one.covariance_CC(0), one.covariance_CC(0).T)


def test_single_precision_models_are_summed_in_double() -> None:
    """The sums of float32 activations are exact sums of float32 values."""
    model = tiny_vit()
    anatomy = find(model, IMAGES)
    (one, *_) = [one for one in statistics_of(model, anatomy) if isinstance(one, Moments)]
    gather(model, anatomy, IMAGES, [one], batch=12)
    x_NC = read_by(model, "blocks.0.mlp.fc2", IMAGES).flatten(0, 1).double()
    assert one.sums["gram/0"].dtype == torch.float64
    assert torch.allclose(one.covariance_CC(0), x_NC.T.cov(correction=0), rtol=1e-10, atol=1e-13)


def test_large_means_cost_no_precision() -> None:
    """With a mean of a million times the deviation the covariance keeps eight digits: it is taken about a mean."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    model[0].bias.data.fill_(1e6)
    images = torch.randn(30, 7, 4, dtype=torch.float64)
    one = Moments(unit_of(4, Part("1.weight", 1)))
    gather(model, NOTHING, images, [one])
    x_NC = (images.flatten(0, 1) @ model[0].weight.T).detach()
    expected = x_NC.T.cov(correction=0)
    assert (one.covariance_CC(0) - expected).abs().max() <= 1e-8 * expected.max()


CONVOLUTIONS = {
    "stride and padding": nn.Conv2d(3, 1, 3, stride=2, padding=1),
    "another each way": nn.Conv2d(3, 1, (1, 3), stride=(1, 2), padding=(2, 0), dilation=(1, 2)),
    "a single tap": nn.Conv2d(3, 1, 1),
    "a single tap, strided": nn.Conv2d(3, 1, 1, stride=2),
    "a single tap, padded": nn.Conv2d(3, 1, 1, padding=1),
    "padding by name": nn.Conv2d(3, 1, (3, 5), padding="same"),
    "no padding by name": nn.Conv2d(3, 1, 3, padding="valid"),
    "mirrored": nn.Conv2d(3, 1, 3, padding=2, padding_mode="reflect"),
    "around": nn.Conv2d(3, 1, 3, padding=1, padding_mode="circular"),
    "of one dimension": nn.Conv1d(3, 1, 3, stride=2, padding=1, dilation=2),
    "of one dimension, a single tap": nn.Conv1d(3, 1, 1),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_patches_of_a_convolution(name: str) -> None:
    """They are what the convolution itself puts out when each filter picks one tap of one channel."""
    layer = deepcopy(CONVOLUTIONS[name]).double()
    taps = taps_of(layer)
    picks = torch.eye(3 * taps, dtype=torch.float64).view(3 * taps, 3, *layer.kernel_size)
    layer.weight, layer.bias, layer.out_channels = nn.Parameter(picks), None, 3 * taps
    images = torch.randn(6, 3, *(9, 8)[: picks.ndim - 2], dtype=torch.float64)
    one = Moments(unit_of(3, Part("0.weight", 1)), taps=taps)
    gather(nn.Sequential(layer), NOTHING, images, [one], batch=4)
    x_NC = layer(images).detach().flatten(2).transpose(1, 2).flatten(0, 1).numpy()
    assert one.count(0) == len(x_NC)
    assert np.allclose(one.mean_C(0), x_NC.mean(0), atol=1e-12)
    assert np.allclose(one.covariance_CC(0), np.cov(x_NC.T, bias=True), atol=1e-12)
    assert one.bytes() == 8 * x_NC.shape[1] ** 2


class Reading(nn.Module):
    """Two layers read parts of the same channels, and one never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.idle = nn.Conv2d(5, 2, 3, padding=1), nn.Conv2d(3, 2, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x) + self.narrow(x[:, 2:])


def test_parts_of_layers_are_heard_where_they_lie() -> None:
    """A family of three channels starts at another index of each layer that reads it."""
    model = Reading().double()
    images = torch.randn(6, 5, 4, 4, dtype=torch.float64)
    one = Moments(unit_of(3, Part("wide.weight", 1, 2), Part("narrow.weight", 1, 0)), taps=9)
    gather(model, NOTHING, images, [one])
    alone = images[:, 2:].movedim(1, -1).reshape(-1, 3).numpy()
    assert np.allclose(one.covariance_CC(1), np.cov(alone.T, bias=True), atol=1e-12)
    centre = one.mean_C(0).view(3, 9)[:, 4]
    assert np.allclose(centre, alone.mean(0), atol=1e-12)
    assert one.bytes() == 2 * 8 * 27**2


def test_sequences_may_come_first() -> None:
    """The layout of the block says which dimension counts images."""

    class TokensFirst(nn.Sequential):
        def forward(self, x_BNC: Tensor) -> Tensor:
            return super().forward(x_BNC.transpose(0, 1))

    model, anatomy = TokensFirst(nn.Linear(4, 2)), replace(NOTHING, layouts={"block": Layout(1, 2)})
    images, unit = torch.randn(2, 7, 4), replace(unit_of(4, Part("0.weight", 1)), block="block")
    ((_, batch),) = heard(model, anatomy, pictures(images), [unit], "statistics")
    assert torch.equal(batch.rows(unit, unit.readers[0]), images.double())


def test_a_layer_that_never_runs_is_named() -> None:
    with pytest.raises(UserError, match="never ran `idle`"):
        gather(Reading(), NOTHING, torch.randn(2, 5, 4, 4), [Moments(unit_of(4, Part("idle.weight", 1)))])


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 2, 3, 24, 32).eval()


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize(("build", "holder"), [(tiny_vit, "attn"), (torchvision_vit, "self_attention")])
def test_queries_and_keys_equal_brute_force(build, holder: str, center: bool) -> None:  # type: ignore[no-untyped-def]
    """Sums over images of qqᵀ and kkᵀ, heads apart, from what the attention reads and its weights."""
    model = build().double()
    anatomy = find(model, PIXELS)
    unit = [unit for unit in anatomy.units if unit.kind == "qk"][1]
    one = QueryKeys(unit, first=1, kept=((0, 3), (1,)), center=center)
    gather(model, anatomy, PIXELS, [one])
    attention = model.get_submodule(unit.holder)
    seen: list[Tensor] = []
    with attention.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0])), torch.no_grad():
        model(PIXELS)
    weight, bias = list(attention.state_dict().values())[:2]
    assert weight.shape == (72, 24)
    q, k = (seen[0] @ weight.T + bias)[..., :48].view(12, 17, 2, 3, 8).permute(2, 0, 3, 1, 4)
    assert unit.holder.endswith(holder)
    for head in (1, 2):
        keys = k[:, head] - (k[:, head].mean(1, keepdim=True) if center else 0)
        assert torch.allclose(one.sums["queries"][head - 1], torch.einsum("bnd,bne->de", q[:, head], q[:, head]))
        assert torch.allclose(one.sums["keys"][head - 1], torch.einsum("bnd,bne->de", keys, keys))
        logits = q[:, head] @ keys.transpose(1, 2)
        assert torch.allclose(one.sums[f"whole/{head - 1}"], logits.square().sum())


def test_a_second_gathering_runs_no_forward(tmp_path: Path) -> None:
    """What was kept is found again bit for bit, by others too; only what is new is gathered."""
    model, cache = tiny_vit(), Cache(tmp_path)
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))  # copies of the model have it too
    anatomy = find(model, IMAGES)
    first = statistics_of(model, anatomy)
    passes.clear()
    assert gather(model, anatomy, IMAGES, first[:3], cache=cache) == len(passes) == 3
    again = statistics_of(model, anatomy)
    assert gather(model, anatomy, IMAGES, again[:3], batch=4, cache=Cache(tmp_path)) == 0
    assert len(passes) == 3
    for one, other in zip(first[:3], again[:3], strict=True):
        assert one.sums.keys() == other.sums.keys()
        assert all(torch.equal(one.sums[name], other.sums[name]) for name in one.sums)
    assert gather(model, anatomy, IMAGES, statistics_of(model, anatomy), cache=cache) == 3
    assert len(list(tmp_path.iterdir())) == len(first)


@pytest.mark.parametrize("change", ["weight", "buffer", "image", "setting"])
def test_anything_that_matters_is_gathered_anew(tmp_path: Path, change: str) -> None:
    """Another model, other images or another question are not answered from what was kept."""
    model, images, cache = tiny_cnn(), IMAGES.clone(), Cache(tmp_path)
    unit = unit_of(16, Part("layer1.0.conv2.weight", 1))
    one = Moments(unit, taps=9)
    assert gather(model, NOTHING, images, [one], cache=cache) == 3
    if change == "weight":
        model.layer1[0].conv1.weight.data[0] += 1
    elif change == "buffer":
        model.layer1[0].bn1.running_mean += 1
    elif change == "image":
        images = images.flip(2)
    other = Moments(unit_of(15, Part("layer1.0.conv2.weight", 1, 1)) if change == "setting" else unit, taps=9)
    assert gather(model, NOTHING, images, [other], cache=cache) == 3
    assert not torch.equal(other.mean_C(0)[:15], one.mean_C(0)[:15])


def test_an_unreadable_file_is_made_again(tmp_path: Path) -> None:
    """A file that was cut off is recomputed and replaced, without a word: it holds nothing that is lost."""
    model, cache = tiny_vit(), Cache(tmp_path)
    anatomy = find(model, IMAGES)
    one, other, third = (statistics_of(model, anatomy)[:1] for _ in range(3))
    gather(model, anatomy, IMAGES, one, cache=cache)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    assert gather(model, anatomy, IMAGES, other, cache=cache) == 3
    assert torch.equal(other[0].sums["queries"], one[0].sums["queries"])
    assert gather(model, anatomy, IMAGES, third, cache=cache) == 0


def test_heads_apart_from_one_attention_are_kept_apart(tmp_path: Path) -> None:
    """Two statistics of the same unit in one pass: both are kept, each with its own heads."""
    model, cache = tiny_vit(), Cache(tmp_path)
    anatomy = find(model, IMAGES)
    unit = next(unit for unit in anatomy.units if unit.kind == "qk")

    def split() -> list[Statistic]:
        return [QueryKeys(unit, first=first, kept=((0, 1),), per_image=False) for first in range(3)]

    first, again = split(), split()
    gather(model, anatomy, IMAGES, first, cache=cache)
    assert gather(model, anatomy, IMAGES, again, cache=cache) == 0
    grams = [one.sums["queries"] for one in again]
    assert all(torch.equal(one.sums["queries"], gram) for one, gram in zip(first, grams, strict=True))
    assert not torch.allclose(grams[0], grams[1])


def test_between_two_rows_everything_is_in_order() -> None:
    """Gradients flow for whoever reads the rows, and the model has neither hooks nor another mode or attention."""
    model = tiny_vit().train()
    anatomy = find(model, IMAGES)
    kinds = [type(module) for module in model.modules()]
    work = gathering(model, anatomy, pictures(IMAGES), statistics_of(model, anatomy), None, "statistics", batch=5)
    assert next(work) == {"stage": "statistics", "done": 5, "total": 12}
    assert torch.is_grad_enabled()
    work.close()  # type: ignore[attr-defined]
    assert torch.is_grad_enabled()
    assert all(module.training for module in model.modules())
    assert [type(module) for module in model.modules()] == kinds
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_listening_changes_no_answer() -> None:
    """The copy that can be listened to answers as the model does."""
    model = tiny_vit().double()
    ears = listening(model, find(model, PIXELS).units)
    assert torch.allclose(ears(PIXELS), model(PIXELS), atol=1e-10)
