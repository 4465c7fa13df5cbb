"""Gradients of mini-batches: what autograd says of each, in a seeded order, and nothing else disturbed."""

from __future__ import annotations

import time
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import IMAGES, LABELS, MODELS, tiny_vit
from starfish import gradients as module
from starfish.cache import Cache
from starfish.core import Row, finish
from starfish.data import Preprocess, StoredImages
from starfish.errors import UserError
from starfish.gradients import collecting, settled

PICTURES = StoredImages(IMAGES, Preprocess(), LABELS)
NAMES = {"vit": ["blocks.0.attn.qkv.weight", "blocks.1.mlp.fc2.weight"], "cnn": ["conv1.weight", "linear.weight"]}


def collected(
    model: nn.Module, names: list[str], images: StoredImages = PICTURES, *, gradients: int = 4, batch: int = 3,
    seed: int = 0, cache: Cache | None = None,
) -> tuple[dict[str, Tensor], list[Row]]:  # fmt: skip
    work, rows = collecting(model, names, images, gradients=gradients, batch=batch, seed=seed, cache=cache), []
    while True:
        try:
            rows.append(next(work))
        except StopIteration as end:
            return end.value, rows


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("chunk", [64, 2])
def test_each_row_is_the_gradient_of_one_mini_batch(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row n is autograd's gradient of the mean loss over the n-th images of the order, however they are chunked."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    model = MODELS[kind]()
    found, rows = collected(model, NAMES[kind], seed=5)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(5)).view(4, 3)
    for place, indices in enumerate(order):
        loss = F.cross_entropy(model(IMAGES[indices]), LABELS[indices])
        for name in NAMES[kind]:
            (expected,) = torch.autograd.grad(loss, model.get_parameter(name), retain_graph=True)
            torch.testing.assert_close(found[name][place], expected.flatten(), rtol=1e-3, atol=1e-5)
    assert [(row["stage"], row["done"], row["total"]) for row in rows] == [("gradients", n, 4) for n in (1, 2, 3, 4)]


def test_model_is_left_as_it_was() -> None:
    """Flags, mode, gradients and tensors of the model are those of before, though its copy was trained on."""
    model = MODELS["cnn"]().train()
    model.conv1.weight.requires_grad_(False)
    before = deepcopy(model.state_dict())
    collected(model, NAMES["cnn"])
    assert model.training
    assert not model.conv1.weight.requires_grad
    assert model.linear.weight.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_batch_norm_is_frozen() -> None:
    """A gradient of a single image uses the running statistics: it is the same alone and in the middle of others."""
    model = MODELS["cnn"]().train()
    found, _ = collected(model, ["conv1.weight"], gradients=12, batch=1)
    mean, _ = collected(model, ["conv1.weight"], gradients=1, batch=12)
    torch.testing.assert_close(found["conv1.weight"].mean(0), mean["conv1.weight"][0], rtol=1e-3, atol=1e-6)


def test_as_many_as_the_images_give() -> None:
    """No image is in two gradients: there are fewer of them, and at least one, of fewer images if need be."""
    assert settled(PICTURES, 400, 1) == (12, 1)
    assert settled(PICTURES, 400, 5) == (2, 5)
    assert settled(PICTURES, 1, 5) == (1, 5)
    assert settled(PICTURES, 400, 100) == (1, 12)
    with pytest.raises(UserError, match="`gradients` is 0"):
        settled(PICTURES, 0, 1)
    with pytest.raises(UserError, match="`batch` is 0"):
        settled(PICTURES, 4, 0)


def test_cache_gives_the_same_and_only_for_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found again is bit-identical and runs nothing; other labels, another seed or model are found out anew."""
    cache, model = Cache(tmp_path), MODELS["cnn"]()
    first, rows = collected(model, NAMES["cnn"], cache=cache)
    again, silent = collected(model, NAMES["cnn"], cache=cache)
    assert len(rows) == 4
    assert not silent
    assert all(torch.equal(first[name], again[name]) for name in NAMES["cnn"])
    relabeled = StoredImages(PICTURES.pixels, PICTURES.preprocess, (LABELS + 1) % 5)
    assert collected(model, NAMES["cnn"], relabeled, cache=cache)[1]
    assert collected(model, NAMES["cnn"], cache=cache, seed=1)[1]
    assert collected(model, NAMES["cnn"], cache=cache, batch=2)[1]
    assert collected(model, NAMES["cnn"], cache=cache, gradients=3)[1]
    with torch.no_grad():
        model.linear.bias.add_(1)
    assert collected(model, NAMES["cnn"], cache=cache)[1]
    monkeypatch.setattr(module, "MOST_KEPT", 10)  # bytes
    for _ in range(2):
        assert collected(model, NAMES["cnn"], cache=cache, seed=2)[1]


def test_refusals_name_the_way_out() -> None:
    """Without labels, or with labels that the model has no classes for, it is refused in words."""
    model = MODELS["cnn"]()
    with pytest.raises(UserError, match="need labels"):
        collected(model, ["conv1.weight"], StoredImages(IMAGES, Preprocess()))
    with pytest.raises(UserError, match="label 7 and the model has 5 classes"):
        collected(model, ["conv1.weight"], StoredImages(IMAGES, Preprocess(), torch.full((12,), 7)))


def test_weight_that_the_logits_do_not_depend_on_has_none() -> None:
    """It is zero, and no error."""

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(3, 5), nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x.mean((2, 3)))

    found, _ = collected(Idle(), ["used.weight", "idle.weight"])
    assert not found["idle.weight"].any()
    assert found["used.weight"].any()


def test_kept_gradients_count_with_the_seconds_they_took_once(tmp_path: Path) -> None:
    """Shared out among the files, however many parameters there are, so that the next method is charged just those."""
    model, names = tiny_vit(), ["blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight", "head.weight"]
    pictures = StoredImages(IMAGES, Preprocess(), LABELS)
    start = time.monotonic()
    finish(collecting(model, names, pictures, gradients=12, batch=1, cache=Cache(tmp_path, owner="first")))
    spent = time.monotonic() - start
    second = Cache(tmp_path, owner="second")
    finish(collecting(model, names, pictures, gradients=12, batch=1, cache=second))
    assert 0 < second.shared <= spent
