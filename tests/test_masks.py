"""Masks: checked by name, applied exactly, counted inside their scope, told apart by one bit."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import nn

from starfish import masks as M
from starfish.core import Masks
from starfish.errors import UserError


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8, 4)
    )


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ({}, ["no masks"]),
        ({"4.weigth": torch.ones(4, 8).bool()}, ["`4.weigth`", "`4.weight`"]),
        ({"1.running_var": torch.ones(8).bool()}, ["`1.running_var`"]),
        ({"4.weight": torch.ones(8, 4).bool()}, ["(8, 4)", "(4, 8)"]),
        ({"4.weight": torch.ones(4, 8)}, ["`4.weight`", "torch.float32", "mask.bool()"]),
    ],
)
def test_check_refuses_what_does_not_fit(masks: Masks, words: list[str]) -> None:
    """Names, shapes and dtype."""
    with pytest.raises(UserError) as caught:
        M.check(masks, conv())
    assert all(word in f"{caught.value.message} {caught.value.hint}" for word in words)


def test_apply_zeroes_exactly_the_pruned_entries() -> None:
    """Not a number and infinity become zero too; nothing else changes, and a single value back is noticed."""
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight[0, 0], model.weight[0, 1] = float("nan"), float("inf")
    before = model.weight.detach().clone()
    masks = {"weight": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]]).bool()}
    assert not M.zeros_intact(model, masks)
    M.apply_(model, masks)
    assert model.weight[~masks["weight"]].tolist() == [0, 0, 0]
    assert torch.equal(model.weight[masks["weight"]], before[masks["weight"]])
    assert M.zeros_intact(model, masks)
    with torch.no_grad():
        model.weight[1, 0] = 1e-30
    assert not M.zeros_intact(model, masks)


def test_sparsity_is_measured_inside_the_scope() -> None:
    """Zeros over all entries of all masked tensors, those without zeros included."""
    assert M.sparsity({"a": torch.zeros(3).bool(), "b": torch.ones(5).bool()}) == 3 / 8
    assert M.sparsity({}) == 0


def test_digest_sees_names_shapes_and_bits_only() -> None:
    """Order and memory layout do not count; one bit, one name or one shape does."""
    a, b = torch.eye(3).bool(), torch.ones(2, 5).bool()
    first = M.digest({"a": a, "b": b})
    assert first == M.digest({"b": b, "a": a.t().contiguous().t()})
    flipped = a.clone()
    flipped[2, 2] = False
    others = [{"a": flipped, "b": b}, {"c": a, "b": b}, {"a": a, "b": b.t()}, {"a": a}, {"a": b, "b": a}]
    assert len({first, *(M.digest(other) for other in others)}) == 6
    assert first == hashlib.sha256(b"a\0(3, 3)\0\x88\x80" + b"b\0(2, 5)\0\xff\xc0").hexdigest()
