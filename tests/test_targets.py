"""Targets kept in memory are those that are recomputed, and who decides between the two."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import MODELS, tiny_vit
from starfish import targets as targets_module
from starfish.anatomy import find
from starfish.augment import Views
from starfish.data import as_images
from starfish.methods.objectives import cosine, cosine_loss, kl_loss
from starfish.targets import DenseTargets

INDICES = [7, 0, 11, 3]


def targets(model: nn.Module, images: Tensor, where: str) -> DenseTargets:
    return DenseTargets(model, find(model, images[:2]), as_images(images), where)


def prepared(model: nn.Module, images: Tensor, where: str, **wanted: Any) -> DenseTargets:
    made = targets(model, images, where)
    list(made.prepare(**{"modules": made.anatomy.blocks, "logits": True, "precision": "fp32", **wanted}))
    return made


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets_module, "BATCH", 5)  # 12 images: the last batch is smaller


@pytest.mark.parametrize("kind", MODELS)
def test_memory_and_recompute_give_the_same_targets(kind: str, images: Tensor) -> None:
    """float16 in memory costs less than 1e-5 of a cosine; logits are exact but for the batch they were made in."""
    model = MODELS[kind]()
    kept = prepared(model, images, "memory").read(INDICES, None)
    anew = prepared(model, images, "recompute").read(INDICES, images[INDICES])
    assert kept[0].keys() == anew[0].keys()
    for name, block in kept[0].items():
        assert block.shape == anew[0][name].shape
        assert float((1 - cosine(block, anew[0][name])).abs().max()) < 1e-5
    assert kept[1] is not None
    assert anew[1] is not None
    torch.testing.assert_close(kept[1], anew[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_memory_and_recompute_give_the_same_losses(kind: str, images: Tensor) -> None:
    model = MODELS[kind]()
    losses = []
    for where in ("memory", "recompute"):
        blocks, answers = prepared(model, images, where).read(INDICES, images[INDICES])
        assert answers is not None
        noise = torch.Generator().manual_seed(4)
        moved = {
            name: x + 0.3 * x.float().std() * torch.randn(x.shape, generator=noise)
            for name, x in sorted(blocks.items())
        }
        aligned = sum(float(cosine_loss(moved[name], blocks[name], "token")) for name in moved)
        losses.append((aligned, float(kl_loss(answers + 0.1 * torch.randn(answers.shape, generator=noise), answers))))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][0] > 0.01


def test_the_targets_are_the_dense_models_blocks_and_logits(images: Tensor) -> None:
    model = tiny_vit()
    blocks, answers = prepared(model, images, "memory").read(INDICES, None)
    with torch.no_grad():
        x = model.patch_embed(images[INDICES])
        x = model.norm_pre(model.patch_drop(model._pos_embed(x)))
        for name, block in zip(("blocks.0", "blocks.1"), model.blocks, strict=True):
            x = block(x)
            torch.testing.assert_close(blocks[name].float(), x, rtol=1e-3, atol=1e-3)
        assert answers is not None
        torch.testing.assert_close(answers, model(images[INDICES]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", ["memory", "recompute"])
@pytest.mark.parametrize(
    ("modules", "logits"), [(["blocks.1", "blocks.0"], False), (["blocks.1"], False), ([], True), ([], False)]
)
def test_only_what_was_asked_for_is_given(where: str, modules: list[str], logits: bool, images: Tensor) -> None:
    made = prepared(tiny_vit(), images, where, modules=modules, logits=logits)
    found = made.read(INDICES, images[INDICES])
    assert list(found[0]) == modules
    assert (found[1] is not None) == logits


class Loud(nn.Module):
    """A block whose output outgrows float16 for the one image that is large."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_a_block_beyond_float16_is_kept_in_float32_and_loses_nothing() -> None:
    model = nn.Sequential(Loud(), Loud()).eval()
    images = torch.randn(12, 4)
    images[9] *= 1e7  # not in the first batch: what is stored by then must survive the change of type
    with torch.no_grad():
        expected = model[0](images)
    assert float(expected.abs().max()) > 65504
    made = prepared(model, images, "memory")
    found = made.read(list(range(12)), None)[0]["0"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.reshape(12, 4), expected, rtol=1e-3, atol=1e-3)
    assert found.isfinite().all()


def test_a_block_within_float16_takes_two_bytes_a_number(images: Tensor) -> None:
    assert prepared(tiny_vit(), images, "memory").read([0], None)[0]["blocks.0"].dtype == torch.float16


@pytest.mark.parametrize("where", ["memory", "recompute"])
def test_preparing_again_for_the_same_is_no_work(where: str, images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    made = prepared(tiny_vit(), images, where)
    monkeypatch.setattr(made, "_compute", None)  # calling it would fail
    assert list(made.prepare(modules=made.anatomy.blocks, logits=True, precision="fp32")) == []


def test_preparing_for_something_else_starts_anew(images: Tensor) -> None:
    made = prepared(tiny_vit(), images, "memory", logits=False)
    rows = list(made.prepare(modules=(), logits=True, precision="fp32"))
    assert [row["done"] for row in rows] == [5, 10, 12]
    assert all(row["stage"] == "targets" and row["total"] == 12 for row in rows)
    blocks, answers = made.read(INDICES, None)
    assert blocks == {}
    assert answers is not None


@pytest.mark.parametrize("earlier", [False, True])
def test_a_preparation_that_was_closed_is_done_again(earlier: bool, images: Tensor) -> None:
    """Otherwise the next method would read memory that was never filled."""
    model = tiny_vit()
    made = targets(model, images, "memory")
    if earlier:
        list(made.prepare(modules=(), logits=True, precision="fp32"))
    work = made.prepare(modules=made.anatomy.blocks, logits=True, precision="fp32")
    next(work)
    work.close()  # type: ignore[attr-defined]
    assert len(list(made.prepare(modules=made.anatomy.blocks, logits=True, precision="fp32"))) == 3
    expected = prepared(model, images, "memory").read([11], None)[0]
    assert all(torch.equal(block, expected[name]) for name, block in made.read([11], None)[0].items())


def test_auto_takes_memory_only_where_it_fits(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of 17 tokens and 24 channels, two bytes each, for 12 images, in 0.4 of what is free."""
    needed = 2 * 17 * 24 * 2 * 12
    for free, where in ((needed / 0.4 + 1, "memory"), (needed / 0.4 - 1, "recompute"), (0, "recompute")):
        monkeypatch.setattr(targets_module, "free_memory", lambda free=free: free)
        assert prepared(tiny_vit(), images, "auto").where == where


def test_bf16_targets_are_close_to_those_in_full_precision(images: Tensor) -> None:
    model = tiny_vit()
    rough = prepared(model, images, "memory", precision="bf16").read(INDICES, None)[0]
    fine = prepared(model, images, "memory").read(INDICES, None)[0]
    difference = max(float((1 - cosine(rough[name], fine[name])).max()) for name in fine)
    assert 1e-7 < difference < 1e-2


def passes(made: DenseTargets, **wanted: Any) -> int:
    """Over the images, to prepare this."""
    rows = list(made.prepare(**{"modules": (), "logits": False, "precision": "fp32", **wanted}))
    return sum(row["done"] == row["total"] for row in rows)


def test_only_what_is_missing_is_filled(images: Tensor) -> None:
    """What was held stays beside it, and each asks for its own."""
    made = targets(tiny_vit(), images, "memory")
    assert passes(made, modules=("blocks.1",)) == 1
    assert passes(made, logits=True) == 1
    assert passes(made, modules=("blocks.0", "blocks.1")) == 1
    assert passes(made, modules=("blocks.1", "blocks.0"), logits=True) == 0
    expected = prepared(tiny_vit(), images, "memory").read(INDICES, None)
    found = made.read(INDICES, None)
    assert list(found[0]) == ["blocks.1", "blocks.0"]
    assert all(torch.equal(found[0][name], block) for name, block in expected[0].items())
    assert found[1] is not None
    assert torch.equal(found[1], expected[1])  # type: ignore[arg-type]


def test_equal_views_and_equal_cuts_share(images: Tensor) -> None:
    """Views of the same images, made by the same rule, are one; by another, or cut otherwise, they are not."""
    made = targets(tiny_vit(), images, "memory")

    def views(seed: int) -> DenseTargets:
        return made.of(Views(made.images, "flip:1", 2, seed))

    stays = torch.arange(24) < 20
    assert passes(views(1), modules=("blocks.0",)) == 1
    assert passes(views(1), modules=("blocks.0",)) == 0
    assert passes(views(2), modules=("blocks.0",)) == 1
    assert passes(made.narrowed({"blocks.0": stays}), modules=("blocks.0",)) == 1
    assert passes(made.narrowed({"blocks.0": stays.clone()}), modules=("blocks.0",)) == 0
    assert passes(made.narrowed({"blocks.0": ~stays}), modules=("blocks.0",)) == 1
    assert passes(made.of(as_images(images.clone())), modules=("blocks.0",)) == 1


def test_another_precision_lets_go_of_all(images: Tensor) -> None:
    """Of other images too; coming back to the first fills it again."""
    made = targets(tiny_vit(), images, "memory")
    other = made.of(as_images(images[:6]))
    assert passes(other, modules=("blocks.0",)) == 1
    assert passes(made, modules=("blocks.0",)) == 1
    assert made.held_mb() == 0
    made.begin_run()
    assert made.held_mb() == pytest.approx((12 + 6) * 17 * 24 * 2 / 2**20)
    assert passes(made, logits=True, precision="bf16") == 1
    assert made.held_mb() == 0
    assert passes(made, modules=("blocks.0",)) == 1


def test_where_there_is_no_room_others_are_let_go(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room that lies under what others asked for is room; what is asked for now stays."""
    made = targets(tiny_vit(), images, "auto")
    block = 17 * 24 * 2 * 12
    monkeypatch.setattr(targets_module, "free_memory", lambda: block / 0.4)
    other = made.of(as_images(images.clone()))
    assert passes(other, modules=("blocks.0",)) == 1
    monkeypatch.setattr(targets_module, "free_memory", lambda: 1.6 * block)
    assert passes(made, modules=("blocks.1",)) == 1
    assert made.where == "memory"
    made.begin_run()
    assert made.held_mb() == pytest.approx(block / 2**20)
    monkeypatch.setattr(targets_module, "free_memory", lambda: 0)
    assert passes(made, modules=("blocks.0", "blocks.1")) == 0
    assert made.where == "recompute"
    assert passes(made, modules=("blocks.1",)) == 0
    assert made.where == "memory"


def test_seconds_of_others_are_told_once(images: Tensor) -> None:
    """A run that finds what another has filled knows its seconds, of one pass however often it asks."""
    made = targets(tiny_vit(), images, "memory")
    passes(made, modules=("blocks.0", "blocks.1"), logits=True)
    assert made.shared_seconds() == 0
    made.begin_run()
    for _ in range(2):
        passes(made, modules=("blocks.1",), logits=True)
    assert made.shared_seconds() == made._own.seconds["blocks.1"] > 0


def test_memory_goes_with_the_targets(images: Tensor) -> None:
    """At once, and not when Python next looks for circles."""
    gc.disable()
    try:
        made = prepared(tiny_vit(), images, "memory")
        held = weakref.ref(made.of(as_images(images.clone()))._own)
        assert held() is not None
        del made
        assert held() is None
    finally:
        gc.enable()
