"""Narrowed layers compute what the wide ones compute on the channels that stay, and know their sizes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from starfish.anatomy.narrow import narrow_
from starfish.errors import UserError

KEEP = torch.tensor([0, 2, 5])


class Net(nn.Module):
    """Every kind of layer that can be narrowed, one after the other, and some that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.act = nn.PReLU(6)
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6)
        self.line = nn.Conv1d(6, 8, 1)
        self.linear = nn.Linear(8, 6)
        self.last = nn.Linear(6, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(self.act(self.norm(self.conv(x))))
        return self.last(self.linear(self.line(x.flatten(2)).mean(2)))


CHANNELS = {
    **{f"{name}.{key}": 0 for name in ("conv", "norm", "depthwise") for key in ("weight", "bias")},
    **{f"norm.running_{key}": 0 for key in ("mean", "var")},
    "act.weight": 0,
    "line.weight": 1,
}
FEATURES = {"linear.weight": 0, "linear.bias": 0, "last.weight": 1}


def net_and_input() -> tuple[nn.Module, Tensor]:
    model = Net().double().eval()
    for tensor in (*model.parameters(), model.norm.running_mean):
        tensor.data.normal_()
    model.norm.running_var.uniform_(0.5, 2)
    return model, torch.randn(2, 3, 8, 8).double()


def test_the_small_model_is_the_wide_one_without_some_channels() -> None:
    """What the next layer no longer reads may be cut out of all layers before it; the wide model is left alone."""
    model, x = net_and_input()
    gone = [1, 3, 4]
    model.line.weight.data[:, gone] = 0
    model.last.weight.data[:, gone] = 0
    small = copy.deepcopy(model)
    narrow_(small, {name: [(dim, KEEP)] for name, dim in (CHANNELS | FEATURES).items()})
    torch.testing.assert_close(small(x), model(x), rtol=0, atol=1e-12)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())


def test_modules_know_their_new_sizes() -> None:
    """As printed, and as a layer of this size would be built; gradients are wanted where they were."""
    model, _ = net_and_input()
    model.norm.weight.requires_grad_(False)
    narrow_(model, {name: [(dim, KEEP)] for name, dim in (CHANNELS | FEATURES).items()})
    assert str(model.conv) == str(nn.Conv2d(3, 3, 3))
    assert str(model.depthwise) == str(nn.Conv2d(3, 3, 3, groups=3))
    assert str(model.line) == str(nn.Conv1d(3, 8, 1))
    assert (str(model.norm), str(model.act)) == (str(nn.BatchNorm2d(3)), str(nn.PReLU(3)))
    assert (str(model.linear), str(model.last)) == (str(nn.Linear(8, 3)), str(nn.Linear(3, 2, bias=False)))
    assert not model.norm.weight.requires_grad
    assert model.norm.bias.requires_grad
    assert set(dict(model.named_buffers())) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_rows_and_columns_of_one_tensor_may_go_together() -> None:
    """In the order in which they are given."""
    model, _ = net_and_input()
    weight = model.line.weight.detach()
    narrow_(model, {"line.weight": [(0, torch.tensor([7, 1])), (1, KEEP)], "line.bias": [(0, torch.tensor([7, 1]))]})
    assert torch.equal(model.line.weight, weight[[7, 1]][:, KEEP])
    assert (model.line.in_channels, model.line.out_channels) == (3, 2)


def test_a_depthwise_layer_keeps_its_multiplier() -> None:
    """Two output channels for each input channel before and after."""
    model = nn.Sequential(nn.Conv1d(3, 6, 1, groups=3))
    rows = torch.tensor([0, 1, 4, 5])
    narrow_(model, {"0.weight": [(0, rows)], "0.bias": [(0, rows)]})
    assert str(model[0]) == str(nn.Conv1d(2, 4, 1, groups=2))
    assert model(torch.randn(1, 2, 4)).shape == (1, 4, 4)


def test_a_batchnorm_without_weights_is_narrowed_too() -> None:
    """Its buffers are all it has."""
    model = nn.Sequential(nn.BatchNorm1d(6, affine=False))
    narrow_(model, {f"0.running_{key}": [(0, KEEP)] for key in ("mean", "var")})
    assert model[0].num_features == 3
    assert model.eval()(torch.randn(2, 3)).shape == (2, 3)


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        (nn.Sequential(nn.LayerNorm(6)), "0.weight", "`0.weight` belongs to a `LayerNorm`"),
        (nn.Sequential(nn.Conv2d(4, 6, 1, groups=2)), "0.weight", "`0.weight` belongs to a convolution of 2 groups"),
        (nn.Sequential(nn.Linear(4, 6)), "1.weight", "no parameter or buffer `1.weight`"),
    ],
)
def test_what_cannot_be_narrowed_is_refused_by_name(model: nn.Module, name: str, message: str) -> None:
    """Modules whose sizes do not follow from their tensors."""
    with pytest.raises(UserError, match=message):
        narrow_(model, {name: [(0, KEEP)]})


def test_shared_weights_are_refused_and_nothing_is_changed() -> None:
    """Another module would still have its old sizes."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError, match=r"`1\.weight` is shared with `0\.weight`"):
        narrow_(model, {"0.bias": [(0, KEEP)], "1.weight": [(0, KEEP)]})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
