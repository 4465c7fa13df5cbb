"""All weights of a scope as one flat vector: what pruners that weigh every layer against every other work on.

N gradients, p weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from starfish.core import Masks
from starfish.pruners.select import whole


@dataclass(frozen=True)
class Flat:
    """Which rows of which parameters, in the order in which they lie in the vector."""

    rows: dict[str, slice]
    shapes: dict[str, torch.Size]  # of these rows

    @property
    def names(self) -> list[str]:
        return list(self.rows)

    @property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes.values()]

    def weights(self, model: nn.Module) -> Tensor:
        """x_p in float64 on the CPU"""
        parts = [model.get_parameter(name).detach()[rows] for name, rows in self.rows.items()]
        return torch.cat([part.flatten().cpu().double() for part in parts])

    def columns(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Of the gradients of whole parameters, those of these rows, as views."""
        found = []
        for name, rows in self.rows.items():
            width = self.shapes[name][1:].numel()
            found.append(gradients[name][:, rows.start * width : rows.stop * width])
        return found

    def split(self, x_p: Tensor) -> dict[str, Tensor]:
        """By parameter, in the shape of its rows."""
        parts = torch.split(x_p, self.sizes)
        return {name: part.view(self.shapes[name]) for name, part in zip(self.rows, parts, strict=True)}

    @torch.no_grad()
    def write_(self, model: nn.Module, x_p: Tensor) -> None:
        for name, part in self.split(x_p).items():
            model.get_parameter(name)[self.rows[name]].copy_(part)

    def masks(self, keep_p: Tensor, dense: nn.Module) -> Masks:
        kept = {name: part.to(dense.get_parameter(name).device) for name, part in self.split(keep_p).items()}
        return whole(kept, self.rows, dense)


def flat(dense: nn.Module, rows: Mapping[str, slice]) -> Flat:
    return Flat(dict(rows), {name: dense.get_parameter(name)[part].shape for name, part in rows.items()})


def left(size: int, sparsity: float) -> int:
    """How many of so many weights stay."""
    return size - round(sparsity * size)
