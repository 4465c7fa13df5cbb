"""Layer by layer through a network: which inputs each layer's least squares is of, and what it leaves alone."""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import starfish
from cases import IMAGES, tiny_cnn, tiny_vit
from starfish.anatomy import find
from starfish.core import Masks
from starfish.data import as_images
from starfish.heal import job_of
from starfish.methods import least_squares
from starfish.methods.least_squares import LeastSquares, SparseGPT


class Block(nn.Module):
    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(inputs, hidden), nn.Linear(hidden, inputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.relu(self.one(x)))  # type: ignore[no-any-return]


class Separable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deep, self.point = nn.Conv2d(3, 3, 3, padding=1, groups=3), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.point(torch.relu(self.deep(x)))  # type: ignore[no-any-return]


def chain() -> nn.Module:
    """Two residual blocks, in float64."""
    return nn.Sequential(Block(6, 10), Block(6, 10)).double()


def thinned(model: nn.Module, share: float = 0.5) -> Masks:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.rand(parameter.shape, generator=generator) > share
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2
    }


def healed(
    model: nn.Module, masks: Masks, x: Tensor, method: starfish.Method
) -> tuple[nn.Module, list[dict[str, Any]]]:
    pruned = deepcopy(model)
    job = job_of(pruned, model, masks, as_images(x))
    rows = [row for row in method.fit(job) if "stage" not in row]
    return pruned, rows


def fitted(X: Tensor, Y: Tensor, mask: Tensor) -> Tensor:
    """Each row of W with X Wᵀ nearest to Y on its support, by numpy."""
    found = np.zeros(mask.shape)
    for row, support in enumerate(mask.numpy()):
        found[row, support] = np.linalg.lstsq(X.numpy()[:, support], Y.numpy()[:, row], rcond=None)[0]
    return torch.from_numpy(found)


def reads(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What the four layers read."""
    found = []
    with torch.no_grad():
        for block in model:
            hidden = torch.relu(block.one(x))
            found += [x, hidden]
            x = x + block.two(hidden)
    return found


@pytest.mark.parametrize("inputs", ["dense", "block", "layer"])
def test_layers_are_fitted_to_the_dense_ones_on_what_they_read(inputs: str) -> None:
    """Undamped, row by row, as numpy fits: on the dense model's inputs, or on those behind what was healed before."""
    model, x = chain(), torch.randn(300, 6, dtype=torch.float64)
    masks = thinned(model)
    found, rows = healed(model, masks, x, LeastSquares(inputs=inputs, damp=0.0, images=0))
    names, dense_reads = list(masks), reads(model, x)
    at_work = deepcopy(model)
    with torch.no_grad():
        for place, name in enumerate(names):
            if inputs != "block" or place % 2 == 0:  # both layers of a block read what they do before either is fitted
                own = dense_reads if inputs == "dense" else reads(at_work, x)
            expected = fitted(own[place], dense_reads[place] @ model.get_parameter(name).T, masks[name])
            torch.testing.assert_close(found.get_parameter(name), expected, rtol=1e-6, atol=1e-8)
            at_work.get_parameter(name).copy_(expected)
    assert len(rows) == (2 if inputs == "block" else 4)
    assert all(row["after"] <= row["before"] for row in rows)


def test_damping_draws_to_the_dense_weights() -> None:
    """With the ridge λ the row minimises ‖X_s w − X_d w̄‖²/N + λ‖w − w̄‖²: numpy's least squares with more rows."""
    model, x = chain(), torch.randn(300, 6, dtype=torch.float64)
    masks = thinned(model)
    found, _ = healed(model, masks, x, LeastSquares(inputs="layer", damp=0.1, images=0))
    with torch.no_grad():
        X_s, X_d = reads(found, x)[1], reads(model, x)[1]  # the first layer does not read the second
        W = model.get_parameter("0.two.weight")
        ridge = (0.1 * X_s.square().sum(0).mean() / 300).sqrt() * 300**0.5 * torch.eye(10, dtype=torch.float64)
        expected = fitted(torch.cat([X_s, ridge]), torch.cat([X_d @ W.T, ridge @ W.T]), masks["0.two.weight"])
    torch.testing.assert_close(found.get_parameter("0.two.weight"), expected, rtol=1e-6, atol=1e-8)


def test_a_layer_without_zeros_makes_up_for_those_before_it() -> None:
    """Its mask of ones lets it be fitted behind pruned layers; where none is pruned nothing moves."""
    model, x = chain(), torch.randn(300, 6, dtype=torch.float64)
    masks = thinned(model)
    masks["1.two.weight"] = torch.ones_like(masks["1.two.weight"])
    found, rows = healed(model, masks, x, LeastSquares())
    assert not torch.equal(found.get_parameter("1.two.weight"), model.get_parameter("1.two.weight"))
    assert rows[-1]["after"] < rows[-1]["before"]
    for method in (LeastSquares(inputs="dense"), SparseGPT()):  # which look at one layer alone
        found, _ = healed(model, masks, x, method)
        assert torch.equal(found.get_parameter("1.two.weight"), model.get_parameter("1.two.weight"))


def test_sequential_inputs_follow_the_dense_model_better_than_its_own() -> None:
    """Errors add up through a network unless later layers see them."""
    model, x = chain(), torch.randn(300, 6, dtype=torch.float64)
    masks = thinned(model)
    far = {}
    for inputs in ("dense", "layer"):
        found, _ = healed(model, masks, x, LeastSquares(inputs=inputs))
        far[inputs] = float((found(x) - model(x)).square().mean().detach())
    assert far["layer"] < far["dense"]


def test_sparsegpt_is_between_the_plain_mask_and_least_squares() -> None:
    """In a real layer's own error, summed over its rows."""
    model = tiny_vit().double()
    images = IMAGES.double()
    masks = starfish.prune(model, starfish.Magnitude(0.6), images)
    rows = {
        method: healed(model, masks, images, method)[1] for method in (LeastSquares(inputs="dense"), SparseGPT("dense"))
    }
    best, swept = rows.values()
    for one, two in zip(best, swept, strict=True):
        assert one["before"] == pytest.approx(two["before"])
        assert one["after"] <= min(two["after"], two["before"])
    assert sum(row["after"] for row in swept) < sum(row["before"] for row in swept)


def test_depthwise_filters_are_fitted_channel_by_channel() -> None:
    """Each channel has its own Gram matrix of nine taps."""
    model = nn.Sequential(Separable(), Separable()).double()
    x = torch.randn(8, 3, 6, 6, dtype=torch.float64)
    mask = torch.rand(3, 1, 3, 3, generator=torch.Generator().manual_seed(1)) > 0.5
    found, _ = healed(model, {"0.deep.weight": mask}, x, LeastSquares(damp=0.0))
    patches = nn.functional.unfold(x, 3, padding=1).view(8, 3, 9, 36).permute(1, 0, 3, 2).flatten(1, 2)
    for channel in range(3):
        W = model.get_parameter("0.deep.weight")[channel].reshape(1, 9).detach()
        expected = fitted(patches[channel], patches[channel] @ W.T, mask[channel].reshape(1, 9))
        torch.testing.assert_close(
            found.get_parameter("0.deep.weight")[channel].reshape(1, 9), expected, rtol=1e-6, atol=1e-8
        )


def test_whole_units_gone_are_made_up_for() -> None:
    """Rows that are gone stay gone and the columns that read them are folded into the others."""
    model = tiny_vit()
    masks = starfish.prune(model, starfish.Structured(0.5, scope="mlp"), IMAGES)
    found, rows = healed(model, masks, IMAGES, LeastSquares())
    assert all(row["after"] < row["before"] for row in rows if "fc2" in row["layer"])
    assert starfish.slim(found, masks, IMAGES)(IMAGES).shape == (12, 5)


def test_rows_are_solved_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many rows at a time, for the sake of memory, and the same weights."""
    model = tiny_cnn().double()
    masks = starfish.prune(model, starfish.Magnitude(0.6, per="global"), IMAGES.double())
    whole, _ = healed(model, masks, IMAGES.double(), LeastSquares())
    monkeypatch.setattr(least_squares, "ROWS", 5)
    parts, _ = healed(model, masks, IMAGES.double(), LeastSquares())
    for name in masks:
        torch.testing.assert_close(parts.get_parameter(name), whole.get_parameter(name), rtol=1e-7, atol=1e-9)


def test_a_negative_damping_is_refused() -> None:
    model, x = chain(), torch.randn(30, 6, dtype=torch.float64)
    with pytest.raises(starfish.UserError, match="`damp` is -1"):
        starfish.heal_(deepcopy(model), model, thinned(model), x, LeastSquares(damp=-1))


def test_a_smaller_model_has_no_dense_weights_to_be_fitted_to() -> None:
    """Refused before anything is spent."""
    model = tiny_vit()
    masks = starfish.prune(model, starfish.Structured(0.5, scope="mlp"), IMAGES)
    small = starfish.slim(model, masks, IMAGES)
    with pytest.raises(starfish.UserError, match="this model has been made smaller"):
        starfish.heal_(small, model, starfish.remaining(small, model), IMAGES, LeastSquares())


def test_sparsegpt_makes_of_its_own_mask_what_its_pruner_had_made() -> None:
    """The pruner updates as it chooses; given its mask, the method comes to the very weights."""
    model, images = tiny_vit().double(), IMAGES.double()
    made: dict[str, Tensor] = {}
    pruner = starfish.BySparseGPT(0.6, inputs="block")
    masks = starfish.prune(model, pruner, images)
    found, _ = healed(model, masks, images, SparseGPT(inputs="block"))
    anatomy = find(model, images[:2])
    work = pruner.choosing(model, anatomy, as_images(images))
    for _ in work:  # the student of the pruner is its own: seen between two rows
        frame = inspect.getgeneratorlocals(work.gi_yieldfrom)  # type: ignore[attr-defined]
        made = {name: frame["student"].get_parameter(name).detach().clone() for name in masks}
    for name in masks:
        torch.testing.assert_close(found.get_parameter(name), made[name], rtol=1e-6, atol=1e-9)
