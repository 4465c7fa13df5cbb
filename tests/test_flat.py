"""Weights of a scope as one vector and back."""

from __future__ import annotations

import torch

from cases import IMAGES, tiny_vit
from starfish.anatomy import find
from starfish.pruners.flat import flat, left
from starfish.pruners.select import rows_of


def test_rows_of_the_scope_go_out_and_come_back() -> None:
    """Query and key rows of fused weights: the vector holds these alone, masks are true elsewhere, columns match."""
    dense = tiny_vit()
    rows = rows_of(dense, find(dense, IMAGES), "qk")
    shape = flat(dense, rows)
    weights = shape.weights(dense)
    assert len(weights) == sum(shape.sizes) == 2 * 48 * 24
    gradients = {name: dense.get_parameter(name).detach().flatten()[None] for name in shape.names}
    assert torch.equal(torch.cat(shape.columns(gradients), 1)[0].double(), weights)
    masks = shape.masks(weights > 0, dense)
    for name in shape.names:
        assert masks[name][48:].all()
        assert torch.equal(masks[name][:48], dense.get_parameter(name)[:48] > 0)
    before = dense.get_parameter(shape.names[1])[48:].clone()
    shape.write_(dense, -weights)
    assert torch.equal(shape.weights(dense), -weights)
    assert torch.equal(dense.get_parameter(shape.names[1])[48:], before)


def test_exact_counts() -> None:
    """round(s·p) go."""
    assert [left(7, sparsity) for sparsity in (0.0, 0.5, 0.9)] == [7, 3, 1]
