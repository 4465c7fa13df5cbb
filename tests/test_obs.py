"""SparseGPT's and ExactOBS's own choices in whole networks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import starfish
from cases import IMAGES, tiny_cnn, tiny_vit
from networks import seeded
from starfish.anatomy import find
from starfish.core import Pruner, finish
from starfish.data import as_images
from starfish.grams import Sweep, as_matrix
from starfish.methods.solves import damped, errors, restricted
from starfish.pruners.magnitude import Magnitude
from starfish.pruners.obs import ByObs, BySparseGPT, _cheapest_first, group_starts
from test_least_squares import Separable

PRUNERS = [BySparseGPT, ByObs]


@pytest.mark.parametrize("pruner", PRUNERS)
@pytest.mark.parametrize("model", [tiny_vit, tiny_cnn])
def test_counts_are_exact_and_the_model_stays(pruner: Any, model: Any) -> None:
    """The share of every layer, whatever its blocks; and N of every M inputs, fewer where a group is short."""
    net = model()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    for settings in ({"sparsity": 0.37}, {"sparsity": 0.6, "inputs": "block"}):
        for name, mask in starfish.prune(net, pruner(**settings), IMAGES).items():
            assert int((~mask).sum()) == round(settings["sparsity"] * mask.numel()), name
    for name, mask in starfish.prune(net, pruner(pattern="2:4"), IMAGES).items():
        groups = torch.split(mask.movedim(1, -1), 4, dim=-1)
        assert all((group.sum(-1) == min(2, group.shape[-1])).all() for group in groups), name
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_refitted_exact_obs_loses_least() -> None:
    """The error of each layer after restricted least squares, summed: less than with the masks of others."""
    model = tiny_vit().double()
    images = IMAGES.double()
    lost = {}
    for pruner in (Magnitude(0.6), BySparseGPT(0.6, inputs="dense"), ByObs(0.6)):
        masks = starfish.prune(model, pruner, images)
        sweep = Sweep(model, find(model, images[:2]), as_images(images), list(masks))
        stages, total = sweep.stages(), 0.0
        for place in range(len(stages)):
            for name, gram in finish(sweep.grams(stages[place:])).items():
                H = damped(gram.take("own")[0], 0.01)
                W, mask = as_matrix(model.get_parameter(name).detach(), 1)[0], as_matrix(masks[name], 1)[0]
                fit = restricted(H, W @ H, mask, W)
                constant = ((W @ H) * W).sum(1)
                total += float(errors(fit, H, W @ H, constant).sum() / constant.sum())
        lost[type(pruner).__name__] = total
    assert lost["ByObs"] < min(lost["BySparseGPT"], lost["Magnitude"])


def test_rows_share_a_layers_budget_by_what_they_lose() -> None:
    """ExactOBS takes more from a row of small weights than from one of large ones."""
    model = tiny_vit().double()
    with torch.no_grad():
        model.get_parameter("blocks.0.mlp.fc1.weight")[:10] *= 0.01
    mask = starfish.prune(model, ByObs(0.5, scope="mlp"), IMAGES.double())["blocks.0.mlp.fc1.weight"]
    assert mask[:10].sum() < 0.2 * mask[10:20].sum()


@pytest.mark.parametrize("pruner", PRUNERS)
def test_later_layers_see_what_earlier_ones_became(pruner: Any) -> None:
    """Block by block the first block is chosen as from the dense model, the second is not."""
    model = tiny_vit()
    dense, block = (starfish.prune(model, pruner(0.7, inputs=inputs), IMAGES) for inputs in ("dense", "block"))
    assert torch.equal(dense["blocks.0.mlp.fc2.weight"], block["blocks.0.mlp.fc2.weight"])
    assert not torch.equal(dense["blocks.1.mlp.fc2.weight"], block["blocks.1.mlp.fc2.weight"])


def test_the_rows_of_a_scope_alone() -> None:
    """Of a fused qkv weight the values stay whole in the scope `qk`."""
    pruners: list[Pruner] = [BySparseGPT(0.5, scope="qk"), ByObs(0.5, scope="qk")]
    for pruner in pruners:
        masks = starfish.prune(tiny_vit(), pruner, IMAGES)
        assert all(mask[48:].all() and int((~mask).sum()) == 24 * 24 for mask in masks.values())


def test_groups_begin_anew_at_each_tap() -> None:
    """Three taps of six inputs in groups of four: four and two, three times."""
    assert list(group_starts(18, 6, 4)) == [0, 4, 6, 10, 12, 16]


@pytest.mark.parametrize("pruner", PRUNERS)
@pytest.mark.parametrize("sparsity", [0.05, 0.5, 0.95])
def test_the_channels_of_a_depthwise_layer_share_its_budget(pruner: Any, sparsity: float) -> None:
    """Nine weights each, they lose so many together and to the weight; not each the same, rounded."""
    model = seeded(lambda: nn.Sequential(Separable(), Separable())).double()
    masks = starfish.prune(model, pruner(sparsity, scope="all", inputs="dense"), IMAGES.double())
    for name, mask in masks.items():
        assert int((~mask).sum()) == round(sparsity * mask.numel()), name


def test_a_row_loses_a_first_part_of_its_order() -> None:
    """A step that is cheaper than one before it waits for that one."""
    loss = torch.tensor([[1.0, 5.0, 2.0, 6.0], [3.0, 3.0, 3.0, 9.0]])
    for count in range(9):
        taken = _cheapest_first(loss, count)
        assert int(taken.sum()) == count
        assert (taken.int().cummin(1).values == taken.int()).all()
    assert _cheapest_first(loss, 4).tolist() == [[True, False, False, False], [True, True, True, False]]
