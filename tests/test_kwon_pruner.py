"""Heads, neurons and channels under a budget: gradients, search, rearrangement, masks (methods.md 11)."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import starfish
from cases import CLASSES, IMAGES, LABELS, tiny_cnn, tiny_vit
from starfish.anatomy import find
from starfish.anatomy.heads import heads_of
from starfish.core import Anatomy, Masks, Unit, finish
from starfish.data import Preprocess, StoredImages
from starfish.errors import UserError
from starfish.masks import apply_
from starfish.pruners import kwon
from starfish.pruners.kwon import ByKwon, costs_of, mask_gradients, rearranged, search, spent
from starfish.small import cut_of, smaller
from starfish.speed import flops

PICTURES = StoredImages(IMAGES.double(), Preprocess(), LABELS)
D, NEURONS, HEADS, WIDTH, TOKENS = 24, 96, 3, 8, 17
HEAD = 4 * TOKENS * D * WIDTH + 2 * TOKENS**2 * WIDTH
NEURON = 2 * TOKENS * D
QUICK = ByKwon(batch=4)


@cache
def looked_at(kind: str) -> tuple[nn.Module, Anatomy]:
    """In double precision and with biases, which new models have not."""
    model = {"vit": tiny_vit, "cnn": tiny_cnn}[kind]().double()
    random = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=random)
    return model, find(model, IMAGES[:2].double(), channels=kind == "cnn")


def choose(kind: str, pruner: ByKwon) -> Masks:
    return pruner.choose(*looked_at(kind), PICTURES)


def heads_left(masks: Masks, block: int) -> Tensor:
    """(head,): queries, keys, values and the columns that read them stay or go together."""
    q, k, v = masks[f"blocks.{block}.attn.qkv.weight"].view(3, HEADS, WIDTH * D)
    out = masks[f"blocks.{block}.attn.proj.weight"].T.reshape(HEADS, WIDTH * D)
    assert all(torch.equal(part.all(1), q.any(1)) and torch.equal(part.any(1), q.any(1)) for part in (q, k, v, out))
    return q.all(1)


def neurons_left(masks: Masks, block: int) -> Tensor:
    made, read = masks[f"blocks.{block}.mlp.fc1.weight"], masks[f"blocks.{block}.mlp.fc2.weight"].T
    assert torch.equal(made.all(1), read.any(1))
    assert torch.equal(made.any(1), read.all(1))
    return made.all(1)


@pytest.mark.parametrize("share", [0.1, 0.35, 0.5, 0.8])
@pytest.mark.parametrize("scope", ["", "heads", "mlp"])
def test_budget_is_met(share: float, scope: str) -> None:
    """What goes is at least the share, less than a unit more, and no layer loses its last head or neuron."""
    masks = choose("vit", replace(QUICK, sparsity=min(share, 0.6) if scope == "heads" else share, scope=scope))
    heads = torch.stack([heads_left(masks, i) for i in (0, 1)]) if scope != "mlp" else None
    neurons = torch.stack([neurons_left(masks, i) for i in (0, 1)]) if scope != "heads" else None
    gone, whole = 0.0, 0.0
    for left, cost in ((heads, HEAD), (neurons, NEURON)):
        if left is not None:
            assert bool(left.any(1).all())
            gone, whole = gone + int((~left).sum()) * cost, whole + left.numel() * cost
    goal = (min(share, 0.6) if scope == "heads" else share) * whole
    assert goal * (1 - 1e-8) <= gone < goal + (HEAD if scope == "heads" else NEURON)


def test_multiply_adds_of_heads_and_neurons() -> None:
    """4·T·d·d_h + 2·T²·d_h and 2·T·d; query-key dimensions of all heads at once a share of the former."""
    model, anatomy = looked_at("vit")
    families = [*heads_of(anatomy, model), *anatomy.units]
    costs = finish(costs_of(model, anatomy, families, PICTURES))
    of_kind = {unit.kind: cost for unit, cost in zip(families, costs.step, strict=True)}
    assert of_kind == {"head": HEAD, "neuron": NEURON, "qk": HEADS * (2 * TOKENS * D + TOKENS**2)}


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_channels_meet_the_budget_of_the_model_that_is_left(share: float) -> None:
    """Cut out, the network has at most the rest of the multiply-adds, and not much less."""
    model = tiny_cnn()
    pictures = StoredImages(IMAGES, Preprocess(), LABELS)
    masks = starfish.prune(model, replace(QUICK, sparsity=share), pictures)
    work = [flops(net, IMAGES[:1]) for net in (starfish.slim(model, masks, IMAGES), model)]
    assert 1 - share - 0.03 < work[0] / work[1] <= 1 - share + 1e-9


def test_search_is_brute_force() -> None:
    """Of all pairs of counts that save enough, the one that loses the least."""
    random = torch.Generator().manual_seed(0)
    for _ in range(200):
        sizes = torch.randint(0, 7, (2,), generator=random).tolist()
        lost, saved = ([torch.cat([torch.zeros(1), torch.randint(1, 50, (n,), generator=random)]).double().cumsum(0)
                        for n in sizes] for _ in range(2))  # fmt: skip
        goal = float(torch.randint(0, 300, (1,), generator=random))
        pairs = [(float(lost[0][i] + lost[1][j]), i, j) for i, j in product(*(range(n + 1) for n in sizes))
                 if saved[0][i] + saved[1][j] >= goal]  # fmt: skip
        found = search(lost[0], saved[0], lost[1], saved[1], goal)
        assert (found is None) == (not pairs)
        if found is not None:
            assert saved[0][found[0]] + saved[1][found[1]] >= goal
            assert float(lost[0][found[0]] + lost[1][found[1]]) == min(pairs)[0]


def test_spent_loses_the_least_of_all_counts() -> None:
    """Over two attentions and two MLPs, no other number of heads and neurons, each in their order, loses less."""
    model, anatomy = looked_at("vit")
    families = [*heads_of(anatomy, model), *(unit for unit in anatomy.units if unit.kind == "neuron")]
    random = torch.Generator().manual_seed(2)
    importance = [torch.rand(n, generator=random).double() for n in (HEADS, HEADS, NEURONS, NEURONS)]
    importance[0] *= 30
    importance[1] *= 30
    counts = spent(families, importance, finish(costs_of(model, anatomy, families, PICTURES)), 0.5)
    going = [torch.cat([I_U.sort().values[:-1] for I_U in importance[i : i + 2]]).sort().values for i in (0, 2)]
    goal = 0.5 * (2 * HEADS * HEAD + 2 * NEURONS * NEURON)
    losses = [float(going[0][:h].sum() + going[1][:n].sum()) for h in range(5) for n in range(191)
              if h * HEAD + n * NEURON >= goal]  # fmt: skip
    lost = sum(float(I_U.sort().values[:n].sum()) for I_U, n in zip(importance, counts, strict=True))
    assert lost == pytest.approx(min(losses), rel=1e-12)


def gated(model: nn.Module, unit: Unit, gates: Tensor, inputs: Tensor) -> Tensor:
    """The logits with a factor on each unit, put into the weights that read it, or that make its queries."""
    size = unit.count // len(gates)
    weights: dict[str, Tensor] = {}
    for part in unit.readers or [part for part in unit.parts if part.side == "q"]:
        tensor = weights.get(part.parameter, model.get_parameter(part.parameter))
        factors = torch.ones(tensor.shape[part.dim], dtype=torch.float64)
        factors = torch.cat([factors[: part.start], gates.repeat_interleave(size), factors[part.start + unit.count :]])
        weights[part.parameter] = tensor * factors.view([-1 if dim == part.dim else 1 for dim in range(tensor.ndim)])
    answer: Tensor = functional_call(model, weights, (inputs,))
    return answer


@pytest.mark.parametrize("kind", ["vit", "cnn"])
def test_gradients_of_masks(kind: str) -> None:
    """Those of factors put into the weights, for heads, neurons, query-key dimensions and channels."""
    model, anatomy = looked_at(kind)
    families = [*heads_of(anatomy, model), *anatomy.units]
    batches = [[0, 5, 7], [2, 1, 11, 3]]
    found = finish(mask_gradients(model, anatomy, families, PICTURES, batches))
    for unit, g_SU in zip(families, found, strict=True):
        for batch, g_U in zip(batches, g_SU, strict=True):
            gates = torch.ones(len(g_U), dtype=torch.float64, requires_grad=True)
            loss = F.cross_entropy(gated(model, unit, gates, PICTURES.batch(batch)), LABELS[batch])
            torch.testing.assert_close(g_U, torch.autograd.grad(loss, gates)[0], rtol=1e-8, atol=1e-10)


def test_gradients_do_not_depend_on_the_pieces_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is taken in pieces, to save memory, has the gradient of the whole."""
    model, anatomy = looked_at("vit")
    one = finish(mask_gradients(model, anatomy, anatomy.units, PICTURES, [list(range(12))]))
    monkeypatch.setattr(kwon, "BATCH", 5)
    pieces = finish(mask_gradients(model, anatomy, anatomy.units, PICTURES, [list(range(12))]))
    for g_SU, other_SU in zip(one, pieces, strict=True):
        torch.testing.assert_close(g_SU, other_SU, rtol=1e-10, atol=1e-12)


def as_released(g_US: Tensor, count: int) -> list[int]:
    """The greedy search, step by step as in the authors' text."""
    order = g_US.square().sum(1).sort(stable=True).indices.tolist()
    chosen = order[:count]
    for unit in order[count:]:
        chosen.append(unit)
        lengths = [float(g_US[[u for u in chosen if u != out]].sum(0).square().sum()) for out in chosen]
        del chosen[lengths.index(min(lengths))]
    return chosen


@pytest.mark.parametrize("count", [1, 4, 9])
def test_rearrangement(count: int) -> None:
    """As the text has it; as many units, and ‖Σ g‖² never larger than of the least important ones."""
    for seed in range(20):
        g_SU = torch.randn(6, 12, generator=torch.Generator().manual_seed(seed)).double() + 0.3
        ascending = g_SU.square().sum(0).sort(stable=True).indices
        found = rearranged(g_SU, ascending, count)
        assert sorted(found.tolist()) == sorted(as_released(g_SU.T, count))
        assert len(set(found.tolist())) == count
        lengths = [float(g_SU[:, units].sum(1).square().sum()) for units in (found, ascending[:count])]
        assert lengths[0] <= lengths[1]


def test_rearrangement_leaves_the_counts() -> None:
    """Each layer loses as many units with it as without, and some others; without, the least important ones."""
    pruner = replace(QUICK, scope="mlp", seed=1)
    masks, plain = choose("vit", pruner), choose("vit", replace(pruner, rearrange=False))
    left = [[neurons_left(one, block) for block in (0, 1)] for one in (masks, plain)]
    assert [int(one.sum()) for one in left[0]] == [int(one.sum()) for one in left[1]]
    assert any(not torch.equal(one, other) for one, other in zip(*left, strict=True))
    model, anatomy = looked_at("vit")
    families = [unit for unit in anatomy.units if unit.kind == "neuron"]
    batches = pruner._batches(12)
    for g_SU, stays in zip(finish(mask_gradients(model, anatomy, families, PICTURES, batches)), left[1], strict=True):
        importance = g_SU.square().sum(0)
        assert importance[~stays].max() <= importance[stays].min()


def attention_of(heads: Tensor, model: nn.Module, x_BNC: Tensor) -> Tensor:
    """The first attention of the small ViT, written out for some of its heads."""
    weights = {name: p.detach() for name, p in model.get_submodule("blocks.0.attn").named_parameters()}
    qkv = (x_BNC @ weights["qkv.weight"].T + weights["qkv.bias"]).view(*x_BNC.shape[:2], 3, HEADS, WIDTH)
    answer = weights["proj.bias"].expand(x_BNC.shape).clone()
    for head in heads.nonzero()[:, 0].tolist():
        q, k, v = qkv[:, :, :, head].unbind(2)
        out = (q @ k.mT / WIDTH**0.5).softmax(-1) @ v
        answer += out @ weights["proj.weight"][:, head * WIDTH : (head + 1) * WIDTH].T
    return answer


def test_masked_head_is_no_head() -> None:
    """With the masks' zeros an attention computes what its other heads do; biases of the head that is gone are mute."""
    model, _ = looked_at("vit")
    masks = choose("vit", replace(QUICK, scope="heads", sparsity=0.4))
    left = heads_left(masks, 0)
    assert 0 < int(left.sum()) < HEADS
    pruned = deepcopy(model)
    apply_(pruned, masks)
    x_BNC = torch.randn(2, TOKENS, D, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        found = pruned.get_submodule("blocks.0.attn")(x_BNC)
        torch.testing.assert_close(found, attention_of(left, model, x_BNC), rtol=1e-10, atol=1e-10)
        bias = pruned.get_parameter("blocks.0.attn.qkv.bias").view(3, HEADS, WIDTH)
        bias[:, ~left] += 100
        torch.testing.assert_close(pruned.get_submodule("blocks.0.attn")(x_BNC), found, rtol=0, atol=0)


def test_query_key_dimensions_go_alike_in_every_head() -> None:
    """With `qk` for heads every head loses as many, queries and keys alike, so that they can be cut out."""
    model, _ = looked_at("vit")
    masks = choose("vit", replace(QUICK, scope="mlp+qk"))
    for block in (0, 1):
        q, k, v = masks[f"blocks.{block}.attn.qkv.weight"].all(1).view(3, HEADS, WIDTH)
        assert torch.equal(q, k)
        assert bool(v.all())
        assert len(set(q.sum(1).tolist())) == 1
    small = starfish.slim(model, masks, PICTURES)
    pruned = deepcopy(model)
    apply_(pruned, masks)
    torch.testing.assert_close(small(PICTURES.pixels), pruned(PICTURES.pixels), rtol=1e-9, atol=1e-9)


def test_neurons_can_be_cut_out_beside_heads() -> None:
    """Heads have no units yet, so they stay as zeros; the neurons go, and the answers are the same."""
    model, anatomy = looked_at("vit")
    masks = choose("vit", QUICK)
    pruned = deepcopy(model)
    apply_(pruned, masks)
    small = smaller(pruned, cut_of(masks, anatomy, pruned))
    assert small.get_parameter("blocks.1.mlp.fc1.weight").shape[0] == int(neurons_left(masks, 1).sum()) < NEURONS
    torch.testing.assert_close(small(PICTURES.pixels), pruned(PICTURES.pixels), rtol=1e-9, atol=1e-9)


def torchvision_vit() -> nn.Module:
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(32, 8, 1, HEADS, D, 48, num_classes=CLASSES)


def transformers_vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(image_size=32, patch_size=8, hidden_size=D, num_hidden_layers=1,
                                    num_attention_heads=HEADS, intermediate_size=48, num_labels=CLASSES)  # fmt: skip
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


@pytest.mark.parametrize("build", [torchvision_vit, transformers_vit])
def test_heads_of_other_libraries(build: Any) -> None:
    """One fused parameter or a layer each for queries, keys and values: a head takes 8 rows of each and 8 columns."""
    model = build().eval()
    pictures = StoredImages(IMAGES, Preprocess(), LABELS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    masks = starfish.prune(model, replace(QUICK, scope="heads", sparsity=0.3), pictures)
    assert sum(int((~mask).sum()) for mask in masks.values()) == 4 * WIDTH * D
    assert all(mask.any() for mask in masks.values())


def test_drawing_is_a_function_of_the_seed() -> None:
    """The same seed gives the same masks, another one or fewer images others; all images are drawn with 0."""
    assert sorted(index for batch in replace(QUICK, images=0)._batches(12) for index in batch) == list(range(12))
    assert [len(batch) for batch in replace(QUICK, images=10)._batches(12)] == [4, 4, 2]
    one, two = (choose("vit", replace(QUICK, seed=5)) for _ in range(2))
    other = choose("vit", replace(QUICK, seed=6))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_what_is_refused() -> None:
    """Images without labels, labels of other classes, a budget that leaves nothing, scopes that are not there."""
    model, anatomy = looked_at("vit")
    unlabelled = StoredImages(IMAGES.double(), Preprocess())
    with pytest.raises(UserError, match="needs labels"):
        starfish.prune(model, QUICK, unlabelled)
    with pytest.raises(UserError, match="no labels"):
        QUICK.choose(model, anatomy, unlabelled)
    with pytest.raises(UserError, match=r"a label \d and the model has 5 classes"):
        QUICK.choose(model, anatomy, StoredImages(IMAGES.double(), Preprocess(), LABELS + 5))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"sparsity": 0.99}, "cannot go"), ({"sparsity": 1.0}, "sparsity"), ({"scope": "heads+qk"}, "takes its"),
        ({"scope": "channels"}, "no `channels`"), ({"batch": 0}, "`batch` is 0"), ({"images": -1}, "`images` is -1"),
    ]  # fmt: skip
    for settings, reason in refused:
        with pytest.raises(UserError, match=reason):
            choose("vit", replace(QUICK, **settings))


def test_scope_is_settled() -> None:
    """Without one, heads and neurons, or channels; what a run writes down says which."""
    assert QUICK.settle(looked_at("vit")[1], PICTURES).scope == "heads+mlp"
    assert QUICK.settle(looked_at("cnn")[1], PICTURES).scope == "channels"
    assert replace(QUICK, scope="mlp,heads").settle(looked_at("vit")[1], PICTURES).scope == "heads+mlp"
