"""What units are worth: the rankers against plain sums, the mismatch against exact derivatives and ablations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.func import functional_call

from cases import IMAGES, tiny_cnn, tiny_vit
from starfish.anatomy import find
from starfish.core import Anatomy, Images, Unit, finish
from starfish.data import as_images
from starfish.errors import UserError
from starfish.pruners.criteria import CRITERIA, QK_CRITERIA, Energy, mismatch, scores_of, weight_score
from starfish.statistics import heard, listening

HEADS, WIDTH = 3, 24
PIXELS = IMAGES.double()
PICTURES = as_images(PIXELS)
RANKERS = [name for name in CRITERIA if name != "mismatch"]
QK_RANKERS = [name for name in QK_CRITERIA if name != "mismatch"]


@cache
def looked_at(kind: str) -> tuple[nn.Module, Anatomy]:
    """In double precision, so that only formulas can differ."""
    model = {"vit": tiny_vit, "cnn": tiny_cnn}[kind]().double()
    return model, find(model, PIXELS[:2], channels=kind == "cnn")


def transformers_vit() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model: nn.Module = transformers.ViTForImageClassification(config).eval()
    return model


def families(anatomy: Anatomy, kind: str) -> list[Unit]:
    return [unit for unit in anatomy.units if unit.kind == kind]


def scored(kind: str, unit_kind: str, name: str, images: Images | None = PICTURES) -> list[Tensor]:
    """Of every family of the kind, by the criterion of that name."""
    model, anatomy = looked_at(kind)
    chosen = families(anatomy, unit_kind)
    found = finish(scores_of(model, anatomy, chosen, images, {unit_kind: name}, 2, 0))
    assert list(found) == list(range(len(chosen)))
    return list(found.values())


def read_by(model: nn.Module, path: str) -> Tensor:
    """x_BNC that a layer reads, of all images at once."""
    seen: list[Tensor] = []
    handle = model.get_submodule(path).register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model(PIXELS)
    handle.remove()
    return seen[0].flatten(2).transpose(1, 2) if seen[0].ndim == 4 else seen[0].view(len(PIXELS), -1, seen[0].shape[-1])


def energy(x_BNC: Tensor) -> Tensor:
    total = torch.zeros(x_BNC.shape[-1], dtype=torch.float64)
    for row in x_BNC.flatten(0, 1):
        total += row**2
    return total / (x_BNC.shape[0] * x_BNC.shape[1])


def active(x_BNC: Tensor) -> Tensor:
    """How often more than a hundredth of the root mean square of all units over the image."""
    total = torch.zeros(x_BNC.shape[-1], dtype=torch.float64)
    for x_NC in x_BNC:
        rms = (x_NC.pow(2).sum() / x_NC.numel()) ** 0.5
        total += (x_NC.abs() > 0.01 * rms).sum(0)
    return total / (x_BNC.shape[0] * x_BNC.shape[1])


FORMULAS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "energy": lambda e, a, w: e,
    "active": lambda e, a, w: a,
    "active_energy": lambda e, a, w: e * a,
    "weight": lambda e, a, w: w,
    "energy_weight": lambda e, a, w: e * w,
    "active_weight": lambda e, a, w: a * w,
    "ensemble": lambda e, a, w: a * e * w,
}


@pytest.mark.parametrize("name", RANKERS)
def test_rankers_of_neurons(name: str) -> None:
    """CORP's formulas over all tokens of the hidden vector behind the activation."""
    model, _ = looked_at("vit")
    for block, found in enumerate(scored("vit", "neuron", name)):
        mlp: Any = model.get_submodule(f"blocks.{block}.mlp")
        x_BNC = read_by(model, f"blocks.{block}.mlp.fc2")
        weights = [float((mlp.fc1.weight[j].norm() * mlp.fc2.weight[:, j].norm()).detach()) for j in range(96)]
        share = active(x_BNC)
        assert 0.5 < share.min() < share.max(), "neither all nor none are active, or the test says little"
        expected = FORMULAS[name](energy(x_BNC), share, torch.tensor(weights, dtype=torch.float64))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", QK_RANKERS)
def test_rankers_of_query_key_dimensions(name: str) -> None:
    """Head by head, biases included: E[q²k²] of the same token, E[q²]·E[k²] of any two, ‖W_q[j]‖·‖W_k[j]‖."""
    model, _ = looked_at("vit")
    for block, found in enumerate(scored("vit", "qk", name)):
        qkv: Any = model.get_submodule(f"blocks.{block}.attn.qkv")
        out = read_by(model, f"blocks.{block}.attn.qkv") @ qkv.weight.T + qkv.bias
        q, k = out[..., :WIDTH].flatten(0, 1), out[..., WIDTH : 2 * WIDTH].flatten(0, 1)
        expected = []
        for j in range(WIDTH):
            if name == "token":
                expected.append(sum((a * b) ** 2 for a, b in zip(q[:, j], k[:, j], strict=True)) / len(q))
            elif name == "pairs":
                expected.append((q[:, j] ** 2).mean() * (k[:, j] ** 2).mean())
            else:
                expected.append(qkv.weight[j].norm() * qkv.weight[WIDTH + j].norm())
        torch.testing.assert_close(found, torch.stack(expected).detach(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", RANKERS)
def test_rankers_of_channels(name: str) -> None:
    """Pixels of all layers that read a channel count alike; weights are those of all that make it and all that read."""
    model, _ = looked_at("cnn")
    through, inner = scored("cnn", "channel", name)[:2]
    readers = [("layer1.0.conv1", 0), ("layer2.0.conv1", 0), ("layer3.0.conv1", 8), ("linear", 24)]
    makers = [("conv1", 0), ("layer1.0.conv2", 0), ("layer2.0.conv2", 8), ("layer3.0.conv2", 24)]
    for found, reading, making in (
        (through, readers, makers),
        (inner, [("layer1.0.conv2", 0)], [("layer1.0.conv1", 0)]),
    ):
        read = [read_by(model, path)[..., at : at + 16] for path, at in reading]
        rows = torch.tensor([x.shape[0] * x.shape[1] for x in read], dtype=torch.float64)
        e, a = (sum(count * of(x) for count, x in zip(rows, read, strict=True)) / rows.sum() for of in (energy, active))
        made = sum(model.get_parameter(f"{path}.weight")[at : at + 16].flatten(1).pow(2).sum(1) for path, at in making)
        used = sum(
            model.get_parameter(f"{path}.weight")[:, at : at + 16].transpose(0, 1).flatten(1).pow(2).sum(1)
            for path, at in reading
        )
        expected = FORMULAS[name](e, a, (made * used).sqrt().detach())
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


def test_weights_of_separate_queries_and_keys() -> None:
    """Of a model that has a layer for each, and a norm for each row; biases weigh nothing."""
    model = transformers_vit()
    unit = families(find(model, IMAGES[:2]), "qk")[0]
    attention: Any = model.get_submodule(unit.holder)
    expected = attention.q_proj.weight.norm(dim=1) * attention.k_proj.weight.norm(dim=1)
    torch.testing.assert_close(weight_score(model, unit), expected.detach().double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("kind", "unit_kind", "names"), [
    ("vit", "neuron", RANKERS), ("vit", "qk", QK_RANKERS), ("cnn", "channel", RANKERS),
])  # fmt: skip
def test_rankers_do_not_depend_on_the_batch_size(kind: str, unit_kind: str, names: Sequence[str]) -> None:
    """Sums over images, whichever came together."""
    model, anatomy = looked_at(kind)
    chosen = families(anatomy, unit_kind)
    found: list[list[Energy]] = []
    for batch in (1, 5, 12):
        found.append([Energy() for _ in chosen])
        for _, one in heard(listening(model, chosen), anatomy, PICTURES, chosen, "energies", batch=batch):
            for energy_of, unit in zip(found[-1], chosen, strict=True):
                energy_of.add_(unit, one)
    for name in names:
        ranker = (QK_CRITERIA if unit_kind == "qk" else CRITERIA)[name]
        assert ranker is not None
        for place, unit in enumerate(chosen):
            first, *others = (ranker(energies[place], weight_score(model, unit)) for energies in found)
            for other in others:
                torch.testing.assert_close(other, first, rtol=1e-10, atol=0)


def test_every_image_twice_is_worth_the_same() -> None:
    """Over more than one batch, with rows that say how far it is."""
    model, anatomy = looked_at("vit")
    criteria = {"neuron": "ensemble", "qk": "pairs"}
    work = scores_of(model, anatomy, anatomy.units, as_images(PIXELS.repeat(2, 1, 1, 1)), criteria, 2, 0)
    assert [(row["stage"], row["done"], row["total"]) for row in (next(work), next(work))] == [
        ("energies", 16, 24),
        ("energies", 24, 24),
    ]
    twice, once = finish(work), finish(scores_of(model, anatomy, anatomy.units, PICTURES, criteria, 2, 0))
    for place in once:
        torch.testing.assert_close(twice[place], once[place], rtol=1e-10, atol=0)


def test_each_kind_by_its_own_criterion() -> None:
    """A mix of weights, sums and gradients gives each family what it would get alone."""
    model, anatomy = looked_at("vit")
    mixed = finish(scores_of(model, anatomy, anatomy.units, PICTURES, {"neuron": "mismatch", "qk": "token"}, 2, 0))
    queries = [place for place, unit in enumerate(anatomy.units) if unit.kind == "qk"]
    for place, expected in zip(queries, scored("vit", "qk", "token"), strict=True):
        assert torch.equal(mixed[place], expected)
    neurons = [mixed[place] for place in mixed if place not in queries]
    for found, expected in zip(neurons, scored("vit", "neuron", "mismatch"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["energy", "mismatch"])
def test_criteria_that_look_need_images(name: str) -> None:
    """The weights alone do not; all others are refused with a way out."""
    with pytest.raises(UserError, match="looks at what the model does") as error:
        scored("vit", "neuron", name, None)
    assert "--images" in error.value.hint
    assert all(bool((score > 0).all()) for score in scored("vit", "neuron", "weight", None))


def gated(model: nn.Module, unit: Unit, m: Tensor) -> dict[str, Tensor]:
    """Weights of a model in which every unit is multiplied by its gate: where it is read, and in queries."""
    weights: dict[str, Tensor] = {}
    for part in unit.parts:
        old = model.get_parameter(part.parameter) if part.parameter in dict(model.named_parameters()) else None
        reads = part.side == "q" if unit.kind == "qk" else part.dim == 1
        if old is not None and reads:
            gate = torch.cat([m.new_ones(part.start), m, m.new_ones(old.shape[part.dim] - part.start - len(m))])
            weights[part.parameter] = old.detach() * gate.view(
                [-1 if dim == part.dim else 1 for dim in range(old.ndim)]
            )
    return weights


def outputs(model: nn.Module, weights: dict[str, Tensor], blocks: Sequence[str]) -> list[Tensor]:
    """x_BPC of every block, of the model with these weights."""
    seen: list[Tensor] = []
    handles = [
        model.get_submodule(name).register_forward_hook(lambda _module, _inputs, output: seen.append(output))
        for name in blocks
    ]
    functional_call(model, weights, (PIXELS,))
    for handle in handles:
        handle.remove()
    return [x.flatten(2).transpose(1, 2) if x.ndim == 4 else x for x in seen]


@cache
def exact(kind: str, unit: Unit) -> Tensor:
    """½‖∂r̂/∂m‖² by central differences: one direction a position, mean over images, blocks and positions."""
    model, anatomy = looked_at(kind)

    def directions(j: int, gate: float) -> list[Tensor]:
        m = torch.ones(unit.count, dtype=torch.float64)
        m[j] = gate
        with torch.no_grad():
            return [F.normalize(x_BPC, dim=-1) for x_BPC in outputs(model, gated(model, unit, m), anatomy.blocks)]

    found = []
    for j in range(unit.count):
        pairs = zip(directions(j, 1 + 1e-5), directions(j, 1 - 1e-5), strict=True)
        found.append(torch.stack([0.5 * ((more - less) / 2e-5).pow(2).sum(-1).mean() for more, less in pairs]).mean())
    return torch.stack(found)


def estimated(kind: str, unit: Unit, *, draws: int, seed: int = 0) -> Tensor:
    model, anatomy = looked_at(kind)
    return finish(mismatch(model, anatomy, [unit], PICTURES, draws=draws, seed=seed))[0]


@pytest.mark.parametrize(
    ("kind", "unit_kind", "place"),
    [
        ("vit", "neuron", 0), ("vit", "neuron", 1), ("vit", "qk", 0), ("vit", "qk", 1), ("cnn", "channel", 0),
        ("cnn", "channel", 1),
    ],
)  # fmt: skip
def test_mismatch_is_the_exact_derivative_as_draws_grow(kind: str, unit_kind: str, place: int) -> None:
    """Unbiased: the error of all units together falls with the root of the draws."""
    unit = families(looked_at(kind)[1], unit_kind)[place]
    expected = exact(kind, unit)
    few, many = (float((estimated(kind, unit, draws=draws) - expected).norm() / expected.norm()) for draws in (2, 100))
    assert many < 0.08
    assert many < few / 3


def ablated(model: nn.Module, unit: Unit, j: int) -> float:
    """Mean 1 − cos of all blocks' outputs when the weights of unit j are zero."""
    _, anatomy = looked_at("vit")
    weights = {part.parameter: model.get_parameter(part.parameter).detach().clone() for part in unit.parts}
    for part in unit.parts:
        if weights[part.parameter].ndim > 1:
            weights[part.parameter].select(part.dim, part.start + j).zero_()
    with torch.no_grad():
        pairs = zip(outputs(model, {}, anatomy.blocks), outputs(model, weights, anatomy.blocks), strict=True)
    return float(torch.stack([1 - F.cosine_similarity(one, two, dim=-1).mean() for one, two in pairs]).mean())


def spearman(one: Tensor, two: Tensor) -> float:
    ranks = torch.stack([x.argsort().argsort().double() for x in (one, two)])
    return float(torch.corrcoef(ranks)[0, 1])


@pytest.mark.parametrize("unit_kind", ["neuron", "qk"])
@pytest.mark.parametrize("block", [0, 1])
def test_mismatch_foretells_what_a_unit_is_worth(unit_kind: str, block: int) -> None:
    """Against the loss of the alignment with each unit gone, biases left: the order is right, and so is the size."""
    model, anatomy = looked_at("vit")
    unit = families(anatomy, unit_kind)[block]
    exact_losses = torch.tensor([ablated(model, unit, j) for j in range(unit.count)], dtype=torch.float64)
    found = estimated("vit", unit, draws=20)
    assert spearman(found, exact_losses) > 0.8
    small = exact_losses < exact_losses.median()
    assert 0.9 < float((found / exact_losses)[small].median()) < 1.1


def changed(**edits: Callable[[Tensor], object]) -> tuple[nn.Module, Anatomy]:
    """The small ViT with some weights of its first block, qkv, fc1 or fc2, changed in place."""
    model = tiny_vit().double()
    for name, edit in edits.items():
        module = model.get_submodule(f"blocks.0.{'attn' if name == 'qkv' else 'mlp'}.{name}")
        edit(module.get_parameter("weight").data)
    return model, find(model, PIXELS[:2])


def neurons_and_queries(
    model: nn.Module, anatomy: Anatomy, images: Any = PICTURES, seed: int = 0
) -> tuple[Tensor, ...]:
    """Mismatch of the units of the first block."""
    chosen = [families(anatomy, kind)[0] for kind in ("neuron", "qk")]
    return tuple(finish(mismatch(model, anatomy, chosen, images, draws=2, seed=seed)).values())


def test_dead_units_are_worth_nothing() -> None:
    """A neuron that nobody reads: exactly 0. A dimension whose key is the same for all tokens: softmax ignores it."""
    model, anatomy = changed(fc2=lambda w: w[:, 7].zero_(), qkv=lambda w: w[WIDTH + 5].zero_())
    neurons, queries = neurons_and_queries(model, anatomy)
    assert neurons[7] == 0
    assert bool((neurons[torch.arange(96) != 7] > 0).all())
    assert queries[5] < 1e-20 * queries.median()
    assert bool((queries[torch.arange(WIDTH) != 5] > 1e-6 * queries.median()).all())


def test_channels_that_nobody_reads_are_worth_nothing() -> None:
    """Whatever goes on in the convolution that makes them."""
    _, anatomy = looked_at("cnn")
    dead = tiny_cnn().double()
    dead.get_parameter("layer1.0.conv2.weight").data[:, 3] = 0
    unit = families(anatomy, "channel")[1]
    scores = finish(mismatch(dead, anatomy, [unit], PICTURES, draws=2, seed=0))[0]
    assert scores[3] == 0
    assert bool((scores[torch.arange(16) != 3] > 0).all())
    assert float(estimated("cnn", unit, draws=2)[3]) > 0


def test_twins_are_worth_the_same() -> None:
    """Two neurons with the same weights cannot be told apart."""
    model, anatomy = changed(fc1=lambda w: w[9].copy_(w[4]), fc2=lambda w: w[:, 9].copy_(w[:, 4]))
    model.get_parameter("blocks.0.mlp.fc1.bias").data[9] = model.get_parameter("blocks.0.mlp.fc1.bias").data[4]
    neurons, _ = neurons_and_queries(model, anatomy)
    torch.testing.assert_close(neurons[9], neurons[4], rtol=1e-9, atol=0)
    assert not torch.isclose(neurons[9], neurons[5], rtol=1e-3, atol=0)


def test_the_seed_decides_the_draws() -> None:
    """The same seed gives the same bits, another one other draws; all scores are finite and not negative."""
    model, anatomy = looked_at("vit")
    one, same, other = (neurons_and_queries(model, anatomy, seed=seed) for seed in (3, 3, 4))
    for first, second, third in zip(one, same, other, strict=True):
        assert torch.equal(first, second)
        assert not torch.equal(first, third)
        assert bool((first >= 0).all() and torch.isfinite(first).all())


def test_mismatch_of_a_model_that_takes_dicts() -> None:
    """The same as of the same model given tensors."""
    model = transformers_vit().double()
    anatomy = find(model, PIXELS[:2])
    tensors, dicts = (
        neurons_and_queries(model, anatomy, as_images(images)) for images in (PIXELS, {"pixel_values": PIXELS})
    )
    assert all(torch.equal(one, two) and bool((one > 0).all()) for one, two in zip(tensors, dicts, strict=True))


def test_mismatch_leaves_everything_as_it_was() -> None:
    """The model, its gradients and hooks, the images that it was handed, and whether gradients are on between rows."""

    class Same:
        labels = None

        def __len__(self) -> int:
            return len(PIXELS)

        def batch(self, indices: Sequence[int]) -> Tensor:
            return PIXELS

    model, anatomy = looked_at("vit")
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        work = mismatch(model, anatomy, anatomy.units, Same(), draws=1, seed=0)
        assert next(work) == {"stage": "mismatch", "done": 12, "total": 12}
        assert not torch.is_grad_enabled()
        scores = finish(work)
    assert all(bool(score.any()) for score in scores.values())
    assert not PIXELS.requires_grad
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.eval()
