"""Wanda: size times what is read, compared within rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import starfish
from cases import IMAGES, tiny_cnn, tiny_vit
from starfish.data import as_images
from starfish.errors import UserError
from starfish.pruners import check_pruner
from starfish.pruners.magnitude import Magnitude
from starfish.pruners.wanda import Wanda


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)))  # type: ignore[no-any-return]


def two() -> nn.Module:
    """Two blocks of two layers, in float64."""
    return nn.Sequential(Block(), Block()).double()


FIRST = "0.one.weight"


def chosen(model: nn.Module, x: Tensor, **settings: Any) -> dict[str, Tensor]:
    return starfish.prune(model, Wanda(scope="all", **settings), x)


def test_with_orthonormal_inputs_it_is_magnitude_by_rows() -> None:
    """Every column then has the same norm."""
    model = two()
    x = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0]
    expected = starfish.prune(model, Magnitude(0.4, scope="all", per="row"), x)
    assert torch.equal(chosen(model, x, sparsity=0.4)[FIRST], expected[FIRST])


def test_scores_are_size_times_norm() -> None:
    """The brute-force reference, by rows and by the whole layer."""
    model, x = two(), torch.randn(40, 8, dtype=torch.float64) * torch.arange(1, 9)
    score = model.get_parameter(FIRST).abs() * x.square().sum(0).sqrt()
    by_row, by_layer = (chosen(model, x, sparsity=0.5, per=per)[FIRST] for per in ("row", "layer"))
    assert all(
        set(score[row].topk(4).indices.tolist()) == set(by_row[row].nonzero()[:, 0].tolist()) for row in range(8)
    )
    assert torch.equal(by_layer.flatten().nonzero()[:, 0], score.flatten().topk(32).indices.sort().values)


def test_scaling_a_row_changes_nothing_and_permuting_inputs_permutes() -> None:
    """Only comparisons within a row count."""
    model, x = two(), torch.randn(40, 8, dtype=torch.float64)
    before = chosen(model, x, sparsity=0.4)[FIRST]
    order = torch.randperm(8)
    with torch.no_grad():
        model.get_parameter(FIRST)[2] *= 7
        assert torch.equal(chosen(model, x, sparsity=0.4)[FIRST], before)
        model.get_parameter(FIRST).copy_(model.get_parameter(FIRST)[:, order].clone())
    assert torch.equal(chosen(model, x[:, order], sparsity=0.4)[FIRST], before[:, order])


def test_inputs_come_from_behind_what_was_pruned_or_from_the_dense_model() -> None:
    """The second layer sees the first one's zeros only layer by layer; the first block does not see itself."""
    model, x = two(), torch.randn(40, 8, dtype=torch.float64)
    masks = {inputs: chosen(model, x, sparsity=0.8, inputs=inputs) for inputs in ("dense", "block", "layer")}
    assert torch.equal(masks["dense"]["0.two.weight"], masks["block"]["0.two.weight"])
    assert not torch.equal(masks["dense"]["0.two.weight"], masks["layer"]["0.two.weight"])
    assert not torch.equal(masks["dense"]["1.one.weight"], masks["block"]["1.one.weight"])


@pytest.mark.parametrize("model", [tiny_vit, tiny_cnn])
def test_counts_are_exact(model: Any) -> None:
    """The share of each row, and N of every M inputs; the model stays as it is."""
    net = model()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for name, mask in starfish.prune(net, Wanda(0.6), IMAGES).items():
        columns = mask[0].numel()
        assert (mask.flatten(1).sum(1) == columns - round(0.6 * columns)).all(), name
    for name, mask in starfish.prune(net, Wanda(pattern="2:4"), IMAGES).items():
        if mask.shape[1] % 4 == 0:
            assert (mask.movedim(1, -1).reshape(-1, 4).sum(1) == 2).all(), name
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_the_rows_of_a_scope_alone() -> None:
    """Of a fused qkv weight the values stay whole in the scope `qk`."""
    masks = starfish.prune(tiny_vit(), Wanda(0.5, scope="qk"), IMAGES)
    assert all(mask[48:].all() for mask in masks.values())
    assert all((mask[:48].sum(1) == 12).all() for mask in masks.values())


def test_it_asks_for_images() -> None:
    with pytest.raises(UserError, match="`wanda` looks at data"):
        check_pruner(Wanda(), None)
    check_pruner(Wanda(), as_images(IMAGES))
