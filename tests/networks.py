"""Networks of other shapes than those of cases.py, for what must not hang on one library's way of writing them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn

import starfish
from cases import IMAGES, tiny_cnn, tiny_vit
from starfish.core import Job, Method, Row
from starfish.heal import job_of
from starfish.pruners.magnitude import Magnitude


class Attending(nn.Module):
    """A block around `nn.MultiheadAttention`, with an activation that writes into what it reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.linear = nn.Linear(width, width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, scale: float, *, bias: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + scale * self.dropout(self.attention(y, y, y, need_weights=False)[0])
        return self.relu(self.linear(x) + bias)


class Reader(nn.Module):
    """Blocks that are called with more than the tensor they pass on."""

    def __init__(self, width: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 8, 8)
        self.bias = nn.Parameter(torch.randn(width))
        self.blocks = nn.ModuleList([Attending(width) for _ in range(3)])
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, 0.9, bias=self.bias)
        return self.head(x.mean(1))


class Filters(nn.Module):
    """Convolutions of all kinds, depthwise and grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Conv2d(8, 8, 3, 1, 1, groups=8)
        self.grouped = nn.Conv2d(8, 8, 3, 1, 1, groups=2)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.grouped(self.act(self.deep(x)))


class Separable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.Sequential(Filters(), Filters())
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return build().eval()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Magnitude]] = {
    "cnn": (tiny_cnn, Magnitude(0.6, scope="conv_fc", per="global")),
    "vit": (tiny_vit, Magnitude(0.6)),
    "attention module": (lambda: seeded(Reader), Magnitude(0.6, scope="all")),
    "depthwise": (lambda: seeded(Separable), Magnitude(0.6, scope="all")),
}


def jobs(network: str, dtype: torch.dtype = torch.float32) -> Job:
    build, pruner = NETWORKS[network]
    dense = build().to(dtype)
    images = IMAGES.to(dtype)
    return job_of(deepcopy(dense), dense, starfish.prune(dense, pruner, images), images)


def rows_of(job: Job, method: Method) -> list[Row]:
    return [row for row in method.fit(job) if "stage" not in row]


# The mathematics.
