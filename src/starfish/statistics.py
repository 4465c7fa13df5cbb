"""What images say of a model's units: sums streamed in float64, whatever the batch size, kept on disk (methods.md 2).

B images, N rows (a token or a pixel of an image each), C units times taps of the kernel, H heads, D width of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from starfish.activations import Taps, call, product_of
from starfish.anatomy.attention import narrowable
from starfish.anatomy.narrow import attentions_
from starfish.cache import Cache
from starfish.core import Anatomy, Images, Layout, Part, Row, Unit
from starfish.devices import to_device
from starfish.errors import UserError

BATCH = 16


@dataclass
class Statistic(ABC):
    """Sums over images of what one family of units does. Tensors throughout, so that they are kept without pickle."""

    unit: Unit
    sums: dict[str, Tensor] = field(default_factory=dict, repr=False)  # not in the key of the cache

    @abstractmethod
    def add_(self, batch: Heard) -> None: ...

    @abstractmethod
    def bytes(self) -> int:
        """The memory that its sums take."""

    def plus_(self, name: str, value: Tensor) -> None:
        if name in self.sums:
            self.sums[name] += value
        else:
            self.sums[name] = value


@dataclass
class Moments(Statistic):
    """Count, mean and covariance of what each layer that reads the units reads of them.

    Taken about the mean of the first image, so that little is lost where the mean is large (methods.md 2).
    """

    taps: int = 1  # of the widest kernel that reads them

    def bytes(self) -> int:
        return 8 * (self.unit.count * self.taps) ** 2 * len(self.unit.readers)

    def add_(self, batch: Heard) -> None:
        for place, part in enumerate(self.unit.readers):
            x_BNC = batch.patches(self.unit, part)
            about_C = self.sums.setdefault(f"about/{place}", x_BNC[0].mean(0))
            centred_NC = x_BNC.flatten(0, 1) - about_C
            self.plus_(f"count/{place}", about_C.new_tensor(len(centred_NC)))
            self.plus_(f"total/{place}", centred_NC.sum(0))
            self.plus_(f"gram/{place}", centred_NC.T @ centred_NC)

    def count(self, place: int) -> int:
        return int(self.sums[f"count/{place}"])

    def mean_C(self, place: int) -> Tensor:
        return self.sums[f"about/{place}"] + self._off(place)

    def covariance_CC(self, place: int) -> Tensor:
        off_C = self._off(place)
        covariance = self.sums[f"gram/{place}"] / self.count(place) - torch.outer(off_C, off_C)
        return (covariance + covariance.T) / 2

    def second_CC(self, place: int) -> Tensor:
        """Mean of x xᵀ, not centred."""
        mean_C = self.mean_C(place)
        return self.covariance_CC(place) + torch.outer(mean_C, mean_C)

    def _off(self, place: int) -> Tensor:
        return self.sums[f"total/{place}"] / self.count(place)


@dataclass
class QueryKeys(Statistic):
    """Σ qqᵀ and Σ kkᵀ of some heads, over all images and, for pairs that meet, the equations of 10.3 over vec(M).

    Pairs that meet are those of one image; with `center` keys are less their mean over the image: softmax ignores it.
    """

    first: int = 0  # head
    kept: tuple[tuple[int, ...], ...] = ()  # of this head and the next ones: which dimensions stay
    per_image: bool = True
    center: bool = True

    @property
    def width(self) -> int:
        return self.unit.count // self.unit.groups

    def bytes(self) -> int:
        equations = sum(len(kept) ** 4 for kept in self.kept) if self.per_image else 0
        return 8 * (equations + 2 * len(self.kept) * self.width**2)

    def add_(self, batch: Heard) -> None:
        heads = slice(self.first, self.first + len(self.kept))
        q, k = batch.queries(self.unit)[:, heads], batch.keys(self.unit)[:, heads]
        if self.center:
            k = k - k.mean(2, keepdim=True)
        G_Q, G_K = (x.transpose(-1, -2) @ x for x in (q, k))  # B H D D
        self.plus_("queries", G_Q.sum(0))
        self.plus_("keys", G_K.sum(0))
        if self.per_image:
            for head, kept in enumerate(self.kept):
                self._add_equations_(head, torch.tensor(kept, dtype=torch.long), G_Q[:, head], G_K[:, head])

    def _add_equations_(self, head: int, S: Tensor, G_Q: Tensor, G_K: Tensor) -> None:
        """Sums over images: G_K ⊗ G_Q as rows (j, j′) × columns (i, i′), right-hand sides and squared logits."""
        P = pruned_of(S, self.width)
        SS_Q, SS_K = (G[:, S][:, :, S].flatten(1) for G in (G_Q, G_K))
        self.plus_(f"normal/{head}", SS_K.T @ SS_Q)
        self.plus_(f"right/{head}", (G_Q[:, S][:, :, P] @ G_K[:, P][:, :, S]).sum(0))
        self.plus_(f"plain/{head}", (G_Q[:, P][:, :, P] * G_K[:, P][:, :, P]).sum())
        self.plus_(f"whole/{head}", (G_Q * G_K).sum())


def pruned_of(S: Tensor, size: int) -> Tensor:
    """All indices but these."""
    there = torch.ones(size, dtype=torch.bool)
    there[S] = False
    return there.nonzero()[:, 0]


def exact(x: Tensor) -> Tensor:
    """In float64, on the CPU where the device has none."""
    return x.cpu().double() if x.device.type == "mps" else x.double()


def gathering(
    model: nn.Module, anatomy: Anatomy, images: Images, statistics: Sequence[Statistic], cache: Cache | None,
    stage: str, *, batch: int = BATCH,
) -> Iterator[Row]:  # fmt: skip
    """Fill these statistics: from the cache those that it has, the others in one pass over the images."""
    keys = cache.keys(model, images, [repr(one) for one in statistics]) if cache else [""] * len(statistics)
    if cache:
        for one, key in zip(statistics, keys, strict=True):
            one.sums = cache.read(key) or {}
    missing = [(one, key) for one, key in zip(statistics, keys, strict=True) if not one.sums]
    if not missing:
        return
    units = list(dict.fromkeys(one.unit for one, _ in missing))
    for row, batch_heard in heard(listening(model, units), anatomy, images, units, stage, batch=batch):
        for one, _ in missing:
            one.add_(batch_heard)
        yield row
    if cache:
        for one, key in missing:
            cache.write(key, one.sums)


def listening(model: nn.Module, units: Sequence[Unit]) -> nn.Module:
    """A copy of the model in which the queries and keys of these units can be heard."""
    ears = deepcopy(model).eval()
    attentions_(ears, list(dict.fromkeys(unit.holder for unit in units if unit.kind == "qk")))
    return ears


def audible(model: nn.Module, unit: Unit) -> bool:
    """Can this unit be heard? Attentions that starfish has no class for keep theirs to themselves."""
    return unit.kind != "qk" or narrowable(model.get_submodule(unit.holder))


@dataclass(frozen=True)
class Heard:
    """One batch, heard at the layers that read the units and at queries and keys; valid until the next one."""

    ears: nn.Module
    taps: Taps
    layouts: Mapping[str, Layout]
    images: int

    def rows(self, unit: Unit, part: Part) -> Tensor:
        """x_BNC: what the layer of `part` reads of the unit, in float64."""
        return exact(self._rows(self._input(part), unit, part))

    def patches(self, unit: Unit, part: Part) -> Tensor:
        """x_BNC as rows, but all that one position of a convolution's output depends on: C runs over units and taps."""
        layer = self.ears.get_submodule(path_of(part))
        if not isinstance(layer, (nn.Conv1d, nn.Conv2d)):
            return self.rows(unit, part)
        one = product_of(layer, self._input(part))
        x = exact(one.padded().narrow(1, part.start, unit.count))
        kernel, dilation, stride = ((1,) * (2 - len(side)) + side for side in (one.kernel, one.dilation, one.stride))
        return F.unfold(x[:, :, None] if x.ndim == 3 else x, kernel, dilation, 0, stride).transpose(1, 2)

    def queries(self, unit: Unit) -> Tensor:
        """x_BHND, in float64"""
        return self._heads(self.taps.out_of[f"{unit.holder}.queries"], unit)

    def keys(self, unit: Unit) -> Tensor:
        """x_BHND, in float64"""
        return self._heads(self.taps.out_of[f"{unit.holder}.keys"], unit)

    def summed(self, tensors: Mapping[str, Tensor], unit: Unit) -> Tensor:
        """x_BC: the sum over rows, and over all layers that read the unit, of tensors shaped as those heard."""
        if unit.kind == "qk":
            return tensors[f"{unit.holder}.queries"].reshape(self.images, -1, unit.count).sum(1)
        parts = [self._rows(tensors[path_of(part)], unit, part).sum(1) for part in unit.readers]
        return torch.stack(parts).sum(0)

    def _input(self, part: Part) -> Tensor:
        path = path_of(part)
        if path not in self.taps.into:
            raise UserError(f"the model never ran `{path}` in its forward pass", "leave its units out with --scope")
        return self.taps.into[path]

    def _rows(self, x: Tensor, unit: Unit, part: Part) -> Tensor:
        weight = self.ears.get_parameter(part.parameter)
        x = x.movedim(1 - weight.ndim, -1)  # a convolution has its channels before the pixels
        layout = self.layouts.get(unit.block)
        if weight.ndim == 2 and x.ndim == 3 and layout is not None:  # a sequence may come first
            x = x.movedim(layout.batch, 0)
        return x.narrow(-1, part.start, unit.count).reshape(self.images, -1, unit.count)

    def _heads(self, x: Tensor, unit: Unit) -> Tensor:
        return exact(x).reshape(self.images, -1, unit.groups, unit.count // unit.groups).transpose(1, 2)


def taps_of(layer: nn.Module) -> int:
    """Positions of its input that one position of its output reads."""
    return layer.weight[0, 0].numel() if isinstance(layer, (nn.Conv1d, nn.Conv2d)) else 1


def path_of(part: Part) -> str:
    return part.parameter.rpartition(".")[0]


def ears_at(ears: nn.Module, units: Sequence[Unit]) -> Taps:
    """Where these units are heard."""
    readers = dict.fromkeys(path_of(part) for unit in units for part in unit.readers)
    sides = [f"{unit.holder}.{side}" for unit in units if unit.kind == "qk" for side in ("queries", "keys")]
    return Taps(ears, into=list(readers), out_of=sides)


def heard(
    ears: nn.Module, anatomy: Anatomy, images: Images, units: Sequence[Unit], stage: str, *, batch: int = BATCH
) -> Iterator[tuple[Row, Heard]]:
    """One pass over the images, batch by batch."""
    device = next(ears.parameters()).device
    with ears_at(ears, units) as taps:
        for start in range(0, len(images), batch):
            indices = list(range(start, min(start + batch, len(images))))
            with torch.no_grad():  # not around the yield: whoever reads the rows may need gradients
                call(ears, to_device(images.batch(indices), device))
            yield (
                {"stage": stage, "done": indices[-1] + 1, "total": len(images)},
                Heard(ears, taps, anatomy.layouts, len(indices)),
            )
