"""THE table: every method on every kind of mask it can take. test_methods.py asks every property of every row."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache

import timm
import torch
from torch import Tensor, nn

import starfish
from starfish.core import Masks, Method, Pruner, Result
from starfish.data import Preprocess, StoredImages
from starfish.methods.batchnorm import reestimate_
from starfish.methods.kwon import Kwon
from starfish.methods.snows import Snows
from starfish.pruners.magnitude import Magnitude
from starfish.pruners.structured import Structured

CLASSES = 5
IMAGES = torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(12) % CLASSES


def tiny_vit() -> nn.Module:
    """Two blocks of width 24, with weights large enough for attention to attend to something."""

    def build() -> nn.Module:
        model: nn.Module = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=CLASSES
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(8 if parameter.ndim == 2 else 1)
        return model

    return _seeded(build)


class BasicBlock(nn.Module):
    """Of the CIFAR ResNets, with the shortcut of option A."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride, self.more = stride, width - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        shortcut = nn.functional.pad(
            x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more // 2, self.more // 2)
        )
        return torch.relu(y + shortcut)


class CifarResNet(nn.Module):
    """The original paper's shape: 6n+2 layers, 16-32-64 channels."""

    def __init__(self, n: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*[BasicBlock(16, 16, 1) for _ in range(n)])
        self.layer2 = nn.Sequential(*[BasicBlock(32 if i else 16, 32, 1 if i else 2) for i in range(n)])
        self.layer3 = nn.Sequential(*[BasicBlock(64 if i else 32, 64, 1 if i else 2) for i in range(n)])
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(torch.relu(self.bn1(self.conv1(x))))))
        return self.linear(x.mean((2, 3)))


def cifar_resnet20() -> nn.Module:
    return CifarResNet()


def tiny_cnn() -> nn.Module:
    """A CIFAR ResNet of eight layers whose BatchNorm has seen some images."""

    def build() -> nn.Module:
        model = CifarResNet(1, CLASSES)
        model.linear.weight.data.mul_(8)  # classes that differ
        list(reestimate_(model, StoredImages(torch.randn(64, 3, 32, 32), Preprocess())))
        return model

    return _seeded(build)


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return build().eval()


MODELS = {"vit": tiny_vit, "cnn": tiny_cnn}
PRUNED: dict[str, tuple[str, Pruner]] = {
    "vit-unstructured": ("vit", Magnitude(0.6)),
    "vit-2:4": ("vit", Magnitude(pattern="2:4")),
    "vit-qk": ("vit", Magnitude(0.5, scope="qk")),
    "vit-neurons": ("vit", Structured(0.5, scope="mlp")),
    "vit-neurons+qk": ("vit", Structured(0.5, scope="mlp+qk")),
    "cnn-unstructured": ("cnn", Magnitude(0.6, scope="conv_fc", per="global")),
    "cnn-channels": ("cnn", Structured(0.5, scope="channels")),
}
STRUCTURED = [masks for masks, (_, pruner) in PRUNED.items() if isinstance(pruner, Structured)]


@dataclass(frozen=True)
class Case:
    method: str
    masks: str

    def __str__(self) -> str:
        return f"{self.method}-{self.masks}"

    def build(self, images: Tensor) -> tuple[nn.Module, nn.Module, Masks, Method]:
        """A copy to heal, the dense model, masks, and the method with settings that suit a test."""
        dense, masks = deepcopy(_pruned(self.masks))
        return deepcopy(dense), dense, masks, quick(starfish.METHODS[self.method])


@cache
def _pruned(masks: str) -> tuple[nn.Module, Masks]:
    kind, pruner = PRUNED[masks]
    dense = MODELS[kind]()
    return dense, starfish.prune(dense, pruner, IMAGES)


def quick(method: Method) -> Method:
    """A few steps in full precision, where the method has steps."""
    if isinstance(method, starfish.Starfish):
        return replace(method, epochs=3, batch_size=4, precision="fp32", lr=2e-3)
    if isinstance(method, Snows):
        return replace(method, batch_size=6, cg_steps=3, look_ahead=3)
    return method


UNPROVEN = {"sparsegpt", "woodfisher"}  # closed forms of which no theorem says that they do not make it worse


def all_ones(masks: Masks) -> Masks:
    return {name: torch.ones_like(mask) for name, mask in masks.items()}


def objective(result: Result) -> tuple[float, float]:
    """What the method makes small, on the images it had: at its start and at its end."""
    if result.loss["first"] is not None and result.loss["last"] is not None:
        return result.loss["first"], result.loss["last"]
    before, after = next(pair for pair in ERRORS if pair[0] in result.rows[0])
    return (sum(float(row[key]) for row in result.rows) for key in (before, after))  # type: ignore[return-value]


ERRORS = (("plain", "folded"), ("before", "after"))  # of a layer, in the rows of closed forms


def fits(method: Method, masks: str) -> bool:
    """Have the model and the masks what the method needs?"""
    if isinstance(method, Kwon) and masks == "vit-qk":
        return False  # which masks nothing that reads units
    lacks = ({"batchnorm"} if PRUNED[masks][0] == "vit" else set()) | ({"units"} if masks not in STRUCTURED else set())
    return not method.needs() & lacks


CASES = [Case(name, masks) for name, method in starfish.METHODS.items() for masks in PRUNED if fits(method, masks)]
