"""What the dense model answers for each image: kept in memory when there is room, else recomputed each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from starfish.activations import Recorder, logits, positions
from starfish.core import Anatomy, Images, Row
from starfish.data import free_memory
from starfish.devices import autocast, to_device

MEMORY_SHARE = 0.4  # of the free memory that targets may take
HALF_LIMIT = 60_000.0  # float16 ends at 65,504; a block that comes near is kept in float32
BATCH = 64


@dataclass
class DenseTargets:
    """Targets of one dense model on one set of images; prepared once, shared by every method that asks for the same."""

    dense: nn.Module
    anatomy: Anatomy
    images: Images
    where: str = "auto"  # memory, recompute, or auto: memory if it fits
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kept: dict[str, Tensor] = field(default_factory=dict)  # module → the channels a smaller model still has
    _wanted: tuple[tuple[str, ...], bool, str] = ((), False, "fp32")
    _keeps: bool = True
    _ready: bool = False  # not so while `prepare` is under way, or when it was closed before its end
    _outputs: dict[str, Tensor] = field(default_factory=dict)
    _logits: Tensor | None = None

    def prepare(self, *, modules: Sequence[str], logits: bool, precision: str, keep: bool = True) -> Iterator[Row]:
        if self._ready and self._wanted == (tuple(modules), logits, precision) and self._keeps == keep:
            return
        self._wanted, self._outputs, self._logits = (tuple(modules), logits, precision), {}, None
        self._ready, self._keeps = False, keep
        if keep and (modules or logits):
            yield from self._fill()
        self._ready = True

    def of(self, images: Images) -> DenseTargets:
        """The same for other images."""
        if images is self.images:
            return self
        return DenseTargets(self.dense, self.anatomy, images, self.where, self.device, self.kept)

    def narrowed(self, kept: dict[str, Tensor]) -> DenseTargets:
        """The same for a model that has lost channels of some modules' outputs: module → which it still has."""
        return DenseTargets(self.dense, self.anatomy, self.images, self.where, self.device, kept) if kept else self

    def _fill(self) -> Iterator[Row]:
        size = len(self.images)
        first = list(range(min(2, size)))
        if self.where == "auto":
            answer = self._compute(self._input(first))
            self.where = "memory" if self._bytes(answer, len(first)) <= MEMORY_SHARE * free_memory() else "recompute"
        if self.where == "recompute":
            return
        for start in range(0, size, BATCH):
            indices = list(range(start, min(start + BATCH, size)))
            self._keep(indices, *self._compute(self._input(indices)))
            yield {"stage": "targets", "done": indices[-1] + 1, "total": size}

    def read(self, indices: Sequence[int], inputs: Any) -> tuple[dict[str, Tensor], Tensor | None]:
        if self.where == "recompute" or not self._keeps:
            return self._compute(inputs)
        rows = torch.as_tensor(indices, dtype=torch.long)
        outputs = {name: to_device(stored[rows], self.device) for name, stored in self._outputs.items()}
        return outputs, None if self._logits is None else to_device(self._logits[rows], self.device)

    def _input(self, indices: Sequence[int]) -> Any:
        return to_device(self.images.batch(indices), self.device)

    @torch.no_grad()
    def _compute(self, inputs: Any) -> tuple[dict[str, Tensor], Tensor | None]:
        names, with_logits, precision = self._wanted
        with Recorder(self.dense, names) as recorder, autocast(self.device, precision):
            answer = logits(self.dense, inputs)
            outputs = recorder.take()
        flat = {name: positions(outputs[name], self.anatomy.layouts[name], len(answer)) for name in names}
        return {name: self._narrow(name, x) for name, x in flat.items()}, answer if with_logits else None

    def _narrow(self, name: str, x_BPC: Tensor) -> Tensor:
        if name not in self.kept:
            return x_BPC
        stays = torch.ones(x_BPC.shape[-1], dtype=torch.bool, device=x_BPC.device)
        stays[: len(self.kept[name])] = self.kept[name].to(x_BPC.device)
        return x_BPC[..., stays]

    def _bytes(self, answer: tuple[dict[str, Tensor], Tensor | None], images: int) -> int:
        numbers = sum(output.numel() for output in answer[0].values())
        return numbers * 2 * len(self.images) // images

    def _keep(self, indices: Sequence[int], outputs: dict[str, Tensor], answer: Tensor | None) -> None:
        size = len(self.images)
        for name, x_BPC in outputs.items():
            if name not in self._outputs:
                self._outputs[name] = torch.empty(size, *x_BPC.shape[1:], dtype=torch.float16)
            if self._outputs[name].dtype == torch.float16 and float(x_BPC.abs().max()) > HALF_LIMIT:
                self._outputs[name] = self._outputs[name].float()
            self._outputs[name][indices[0] : indices[-1] + 1] = x_BPC.to("cpu")
        if answer is not None:
            if self._logits is None:
                self._logits = torch.empty(size, answer.shape[-1])
            self._logits[indices[0] : indices[-1] + 1] = answer.float().to("cpu")
