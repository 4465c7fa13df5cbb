"""Prunable weights and the modules that they belong to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Layer:
    """A prunable weight and the module that it belongs to."""

    parameter: str
    module: nn.Module
    weight: Tensor

    @property
    def path(self) -> str:
        return self.parameter.rpartition(".")[0]

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def rows(self) -> int:
        return self.weight.shape[0]

    @property
    def columns(self) -> int:
        return self.weight.shape[1]

    @property
    def convolution(self) -> str:
        """Its role if it is a convolution, else the empty string."""
        if not isinstance(self.module, (nn.Conv1d, nn.Conv2d)):
            return ""
        return "depthwise" if is_depthwise(self.module) else "conv"

    @property
    def bias(self) -> str | None:
        return f"{self.path}.bias" if isinstance(self.module.bias, nn.Parameter) else None


def is_depthwise(convolution: nn.Conv1d | nn.Conv2d) -> bool:
    return convolution.groups == convolution.in_channels > 1


def layers_of(module: nn.Module) -> list[Layer]:
    """Every prunable weight once, in the order of registration."""
    found: dict[Tensor, Layer] = {}
    for path, child in module.named_modules():
        keys: tuple[str, ...] = ()
        if isinstance(child, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            keys = ("weight",)
        elif isinstance(child, nn.MultiheadAttention):
            keys = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
        for key in keys:
            weight = getattr(child, key)
            if isinstance(weight, nn.Parameter):
                found.setdefault(weight, Layer(f"{path}.{key}" if path else key, child, weight))
    return list(found.values())
