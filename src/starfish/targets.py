"""What the dense model answers for each image: kept in memory when there is room, else recomputed each step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from starfish.activations import Recorder, logits, positions
from starfish.core import Anatomy, Images, Long, Row
from starfish.data import free_memory
from starfish.devices import autocast, to_device

MEMORY_SHARE = 0.4  # of the free memory that targets may take
HALF_LIMIT = 60_000.0  # float16 ends at 65,504; a block that comes near is kept in float32
BATCH = 64
LOGITS = ""  # among the names of modules


@dataclass
class Held:
    """Targets of one set of images in memory."""

    images: Images
    kept: dict[str, Tensor]
    precision: str = ""
    tensors: dict[str, Tensor] = field(default_factory=dict, repr=False)
    seconds: dict[str, float] = field(default_factory=dict)  # of the pass over the images that filled each
    used: set[str] = field(default_factory=set)  # by the run that goes on
    shared: float = 0.0  # seconds that others have spent on what it found here

    def let_go(self, names: Iterable[str]) -> int:
        """The bytes that were held under these names."""
        gone = set(names)
        self.used -= gone
        return sum(self.tensors.pop(name).nbytes for name in gone)

    def note_use(self, names: Sequence[str], own: float) -> None:
        """Alone, the run would have made one pass for all that it found here; it did make one of `own` seconds."""
        found = [self.seconds[name] for name in names if name not in self.used]
        self.shared += max(0.0, max(found, default=0.0) - own)
        self.used.update(names)


@dataclass
class DenseTargets:
    """Targets of one dense model on one set of images. What is held in memory is shared by all that are made of it."""

    dense: nn.Module
    anatomy: Anatomy
    images: Images
    where: str = "auto"  # memory, recompute, or auto: memory if what is asked for fits
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kept: dict[str, Tensor] = field(default_factory=dict)  # module → the channels a smaller model still has
    _memory: list[Held] = field(default_factory=list, repr=False)  # also for other images, and for smaller models
    _auto: bool = False
    _wanted: tuple[tuple[str, ...], bool, str] = ((), False, "fp32")
    _keeps: bool = True

    def __post_init__(self) -> None:
        self._auto = self.where == "auto"
        alike = [one for one in self._memory if _same(one.images, self.images) and _same_channels(one.kept, self.kept)]
        self._own = alike[0] if alike else Held(self.images, self.kept)
        if not alike:
            self._memory.append(self._own)

    def prepare(self, *, modules: Sequence[str], logits: bool, precision: str, keep: bool = True) -> Iterator[Row]:
        self._wanted, self._keeps = (tuple(modules), logits, precision), keep
        if not keep or (self.where == "recompute" and not self._auto):
            return
        for one in self._memory:
            if one.precision != precision:
                one.let_go(one.tensors)
        self._own.precision = precision
        names = (*modules, LOGITS) if logits else tuple(modules)
        missing = [name for name in names if name not in self._own.tensors]
        if self._auto:
            self.where = "memory" if self._fits(missing, names) else "recompute"
        if self.where == "memory":
            own = yield from self._fill(missing)
            self._own.note_use(names, own)

    def of(self, images: Images) -> DenseTargets:
        """The same for other images."""
        return self._relative(images, self.kept)

    def narrowed(self, kept: dict[str, Tensor]) -> DenseTargets:
        """The same for a model that has lost channels of some modules' outputs: module → which it still has."""
        return self._relative(self.images, kept) if kept else self

    def _relative(self, images: Images, kept: dict[str, Tensor]) -> DenseTargets:
        if images is self.images and kept is self.kept:
            return self
        where = "auto" if self._auto else self.where
        return DenseTargets(self.dense, self.anatomy, images, where, self.device, kept, self._memory)

    def begin_run(self) -> None:
        """From here on, count what a run finds ready: `shared_seconds`; what it does not, for others: `held_mb`."""
        for one in self._memory:
            one.used.clear()
            one.shared = 0.0

    def shared_seconds(self) -> float:
        """That earlier runs have spent on what this one found ready."""
        return sum(one.shared for one in self._memory)

    def held_mb(self) -> float:
        """Memory of all that is held and that this run has had no use for."""
        unused = [x for one in self._memory for name, x in one.tensors.items() if name not in one.used]
        return sum(x.nbytes for x in unused) / 2**20

    def _fits(self, missing: Sequence[str], asked: Sequence[str]) -> bool:
        """Is there room for what is missing? Where not, all that is not asked for now is let go."""
        if not missing:
            return True
        first = list(range(min(2, len(self.images))))
        answer = self._compute(self._input(first), [name for name in missing if name != LOGITS], False)[0]
        needed = sum(x.numel() for x in answer.values()) * 2 * len(self.images) // len(first)
        free = free_memory()
        if needed <= MEMORY_SHARE * free:
            return True
        freed = sum(one.let_go(one.tensors.keys() - (asked if one is self._own else ())) for one in self._memory)
        return needed <= MEMORY_SHARE * (free + freed)

    def _fill(self, missing: Sequence[str]) -> Long[float]:
        """All of it or, when closed before the end, nothing. The seconds it took."""
        if not missing:
            return 0.0
        begun, size = time.monotonic(), len(self.images)
        modules, with_logits = [name for name in missing if name != LOGITS], LOGITS in missing
        filled: dict[str, Tensor] = {}
        for start in range(0, size, BATCH):
            indices = list(range(start, min(start + BATCH, size)))
            _keep(filled, indices, size, *self._compute(self._input(indices), modules, with_logits))
            yield {"stage": "targets", "done": indices[-1] + 1, "total": size}
        self._own.tensors |= filled
        self._own.seconds |= dict.fromkeys(missing, time.monotonic() - begun)
        return time.monotonic() - begun

    def read(self, indices: Sequence[int], inputs: Any) -> tuple[dict[str, Tensor], Tensor | None]:
        names, with_logits, _ = self._wanted
        if self.where == "recompute" or not self._keeps:
            return self._compute(inputs, names, with_logits)
        rows = torch.as_tensor(indices, dtype=torch.long)
        outputs = {name: to_device(self._own.tensors[name][rows], self.device) for name in names}
        return outputs, to_device(self._own.tensors[LOGITS][rows], self.device) if with_logits else None

    def _input(self, indices: Sequence[int]) -> Any:
        return to_device(self.images.batch(indices), self.device)

    @torch.no_grad()
    def _compute(
        self, inputs: Any, names: Sequence[str], with_logits: bool
    ) -> tuple[dict[str, Tensor], Tensor | None]:  # fmt: skip
        with Recorder(self.dense, names) as recorder, autocast(self.device, self._wanted[2]):
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


def _keep(
    filled: dict[str, Tensor], indices: Sequence[int], size: int, outputs: dict[str, Tensor], answer: Tensor | None
) -> None:
    """Put the rows of one batch where they belong among all `size` images."""
    rows = slice(indices[0], indices[-1] + 1)
    for name, x_BPC in outputs.items():
        if name not in filled:
            filled[name] = torch.empty(size, *x_BPC.shape[1:], dtype=torch.float16)
        if filled[name].dtype == torch.float16 and float(x_BPC.abs().max()) > HALF_LIMIT:
            filled[name] = filled[name].float()
        filled[name][rows] = x_BPC.to("cpu")
    if answer is not None:
        if LOGITS not in filled:
            filled[LOGITS] = torch.empty(size, answer.shape[-1])
        filled[LOGITS][rows] = answer.float().to("cpu")


def _same(one: Any, other: Any) -> bool:
    """The same images, or the same view of the same: what is compared is plain, or the very same object."""
    if one is other:
        return True
    if type(one) is not type(other) or not is_dataclass(one):
        return False
    pairs = [(getattr(one, item.name), getattr(other, item.name)) for item in fields(one)]
    return all(a is b or (isinstance(a, str | int | float | list | tuple) and a == b) for a, b in pairs)


def _same_channels(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(stays, other[name]) for name, stays in one.items())
