"""What single layers read: Gram matrices streamed in float64, stage by stage through the network (methods.md 2, 4).

A weight multiplies as a matrix: G groups, O rows (outputs) and I columns a group, columns running over the taps of the
kernel and, within a tap, over the inputs; N rows of X are tokens or positions of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from starfish.activations import Product, Products, call
from starfish.anatomy.attention import narrowable
from starfish.anatomy.look import evaluating
from starfish.anatomy.narrow import attentions_
from starfish.cache import Cache
from starfish.core import Anatomy, Images, Long, Row
from starfish.devices import to_device
from starfish.errors import UserError, listed
from starfish.replay import Arguments, entering, run, runs_once
from starfish.statistics import exact

BATCH = 16
Inputs = Literal["dense", "block", "layer"]
"""What layers read: as in the dense model, or behind the blocks, or behind the layers, that have changed before."""
PATCHES = 2**24  # numbers of unfolded input at a time


def groups_of(model: nn.Module, name: str) -> int:
    """Of the convolution that holds this weight; 1 of any other layer."""
    layer = model.get_submodule(name.rpartition(".")[0])
    return layer.groups if isinstance(layer, (nn.Conv1d, nn.Conv2d)) else 1


def as_matrix(weight: Tensor, groups: int) -> Tensor:
    """W_GOI of a weight (O, I, taps …)."""
    return weight.movedim(1, -1).reshape(groups, len(weight) // groups, -1)


def as_weight(W_GOI: Tensor, like: Tensor) -> Tensor:
    """Back in the shape of the weight."""
    return W_GOI.reshape(like.movedim(1, -1).shape).movedim(-1, 1)


@dataclass
class Gram:
    """Sums over N of what one layer reads."""

    name: str
    sums: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def take(self, which: str) -> Tensor:
        """The mean over N, which is large and then held here no more.

        As G I I `own`, of Xᵀ X of the model at work, and `cross`, of its Xᵀ with the dense model's X; as G O `energy`,
        the squares of what the dense layer puts out, its bias apart; as G I `square`, the diagonal of `own` alone.
        """
        return self.sums.pop(which).div_(self.sums["count"])

    def add_(self, x_GNI: Tensor) -> None:
        self._plus_("count", x_GNI.new_tensor(x_GNI.shape[1]))
        self._plus_("own", x_GNI.mT @ x_GNI)

    def add_square_(self, x_GNI: Tensor) -> None:
        self._plus_("count", x_GNI.new_tensor(x_GNI.shape[1]))
        self._plus_("square", x_GNI.square().sum(1))

    def add_cross_(self, x_GNI: Tensor, dense_GNI: Tensor, W_GOI: Tensor) -> None:
        self._plus_("cross", x_GNI.mT @ dense_GNI)
        self._plus_("energy", (dense_GNI @ W_GOI.mT).square().sum(1))

    def _plus_(self, which: str, value: Tensor) -> None:
        if which in self.sums:
            self.sums[which] += value
        else:
            self.sums[which] = value


@dataclass
class Sweep:
    """Layers in the order in which they run, in stages; the Gram matrices of one stage after the other.

    Of the dense model, as many stages at a time as memory holds are heard in one pass; of a `student`, whose earlier
    stages have changed in the meantime, one stage a pass. That pass runs the block that holds the layers alone, on what
    entered it, which is kept from one stage of a block to the next.
    """

    dense: nn.Module
    anatomy: Anatomy
    images: Images
    names: Sequence[str]
    student: nn.Module | None = None
    cross: bool = False  # of a student also with what the dense model reads
    by_block: bool = False  # the layers of a block make one stage
    diagonal: bool = False  # mean squares alone
    memory_gb: float = 2.0
    cache: Cache | None = None
    _held: dict[str, Gram] = field(default_factory=dict)
    _entry: str | None = None  # the block whose inputs are kept
    _entered: list[list[Arguments]] = field(default_factory=list)  # batch by batch, of the student and the dense model

    def stages(self) -> list[list[str]]:
        order = _order(self.dense, self.names, self.images)
        homes = [_home(name, self.anatomy) if self.by_block else name for name in order]
        found: list[list[str]] = []
        for name, home, before in zip(order, homes, ["", *homes], strict=False):
            if home and home == before:
                found[-1].append(name)
            else:
                found.append([name])
        return found

    def grams(self, stages: Sequence[Sequence[str]]) -> Long[dict[str, Gram]]:
        """Those of the first of these stages, which are the ones still to come."""
        wanted = stages[0]
        if not set(wanted) <= self._held.keys():
            self._held = {}  # let go of the former ones before there are others
            self._held = yield from self._gathered([name for stage in self._at_a_time(stages) for name in stage])
        return {name: self._held.pop(name) for name in wanted}

    def _at_a_time(self, stages: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
        if self.student is not None:
            return stages[:1]
        room, count = self.memory_gb * 2**30, 0
        while count < len(stages) and (not count or room >= self._bytes(stages[count])):
            room -= self._bytes(stages[count])
            count += 1
        return stages[:count]

    def _bytes(self, names: Sequence[str]) -> int:
        total = 0
        for name in names:
            groups, weight = groups_of(self.dense, name), self.dense.get_parameter(name)
            columns = weight[0].numel()
            total += 8 * groups * columns * (1 if self.diagonal else columns)
        return total

    def _gathered(self, names: Sequence[str]) -> Long[dict[str, Gram]]:
        cache = self.cache if self.student is None else None  # a student is as it is but once
        facts = [f"gram of {name}{', diagonal' if self.diagonal else ''}" for name in names]
        keys = cache.keys(self.dense, self.images, facts) if cache else [""] * len(names)
        grams = {
            name: Gram(name, (cache.read(key) if cache else None) or {}) for name, key in zip(names, keys, strict=True)
        }
        missing = {name: gram for name, gram in grams.items() if not gram.sums}
        if missing:
            yield from self._hear(missing)
        for name, key in zip(names, keys, strict=True):
            if cache and name in missing:
                cache.write(key, missing[name].sums)
        return grams

    def _hear(self, grams: Mapping[str, Gram]) -> Iterator[Row]:
        models = [self.dense] if self.student is None else [self.student, self.dense][: 1 + self.cross]
        if self.student is not None:
            yield from self._enter(self._entry_of(list(grams)), models)
        ears = [_ears(model, grams) for model in models]
        for place, start in enumerate(range(0, len(self.images), BATCH)):
            indices = list(range(start, min(start + BATCH, len(self.images))))
            given = self._entered[place] if self._entry else self._whole(indices, len(models))
            if len(models) == 1:
                _listen(
                    ears[0], self._entry or "", grams, given[0], lambda one: _add_(grams[one.name], one, self.diagonal)
                )
            else:
                _add_both_(grams, ears, self._entry or "", given)
            yield {"stage": "statistics", "done": indices[-1] + 1, "total": len(self.images)}

    def _entry_of(self, names: Sequence[str]) -> str:
        """The block in which all these are, if there is one and it runs once."""
        homes = {_home(name, self.anatomy) for name in names}
        home = homes.pop()
        if homes or not home:
            return ""
        if home == self._entry:
            return home
        two = to_device(self.images.batch([0, len(self.images) - 1]), next(self.dense.parameters()).device)
        with evaluating(self.dense):
            return home if runs_once(self.dense, two, home) else ""

    def _enter(self, entry: str, models: Sequence[nn.Module]) -> Iterator[Row]:
        """Keep what enters this block; what entered the one before is let go."""
        if entry == self._entry:
            return
        self._entry, self._entered = entry, []
        for start in range(0, len(self.images) if entry else 0, BATCH):
            indices = list(range(start, min(start + BATCH, len(self.images))))
            whole = self._whole(indices, 1)[0].positional[0]
            with ExitStack() as modes:
                for model in models:
                    modes.enter_context(evaluating(model))
                self._entered.append([entering(model, [entry], whole)[0] for model in models])
            yield {"stage": "inputs", "done": indices[-1] + 1, "total": len(self.images)}

    def _whole(self, indices: list[int], models: int) -> list[Arguments]:
        inputs = to_device(self.images.batch(indices), next(self.dense.parameters()).device)
        return [Arguments((inputs,))] * models


def _order(model: nn.Module, names: Sequence[str], images: Images) -> list[str]:
    """The names in the order in which their weights multiply."""
    seen: dict[str, None] = {}
    inputs = to_device(images.batch([0, len(images) - 1]), next(model.parameters()).device)
    _listen(_ears(model, names), "", names, Arguments((inputs,)), lambda one: seen.setdefault(one.name))
    silent = [name for name in names if name not in seen]
    if silent:
        raise UserError(
            f"the model never multiplies by {listed(silent)} as a plain layer does: what it reads cannot be heard",
            "leave it out of the masks with --scope, or heal with starfish",
        )
    return list(seen)


def _home(name: str, anatomy: Anatomy) -> str:
    """The innermost block that holds this parameter, if any."""
    return max((block for block in anatomy.blocks if name.startswith(f"{block}.")), key=len, default="")


def _ears(model: nn.Module, names: Mapping[str, Any] | Sequence[str]) -> nn.Module:
    """The model, or a copy in which torch's attentions, which multiply out of sight, can be heard."""
    paths = [name.rpartition(".")[0] for name in names]
    holders = [path for path in [*paths, *(path.rpartition(".")[0] for path in paths)]
               if isinstance(model.get_submodule(path), nn.MultiheadAttention)]  # fmt: skip
    known = [path for path in dict.fromkeys(holders) if narrowable(model.get_submodule(path))]
    if not known:
        return model
    ears = deepcopy(model)
    attentions_(ears, known)
    return ears


@torch.no_grad()
def _listen(
    model: nn.Module, entry: str, names: Mapping[str, Any] | Sequence[str], given: Arguments,
    see: Callable[[Product], object],
) -> None:  # fmt: skip
    """Run the model, or the module `entry` in it, and tell of its products with these weights."""
    with evaluating(model), Products({name: model.get_parameter(name) for name in names}, see):
        if entry:
            run(model, entry, given)
        else:
            call(model, given.positional[0])


def _add_both_(grams: Mapping[str, Gram], ears: Sequence[nn.Module], entry: str, given: Sequence[Arguments]) -> None:
    """The student's products beside the dense model's; a weight that multiplies more than once does so in turn."""
    heard: dict[str, list[Product]] = {name: [] for name in grams}
    weights = {name: ears[1].get_parameter(name).detach() for name in grams}
    # clones: nothing further on in the dense model may overwrite them
    _listen(ears[1], entry, grams, given[1], lambda one: heard[one.name].append(replace(one, x=one.x.clone())))

    def add_(one: Product) -> None:
        dense = heard[one.name].pop(0)
        W_GOI = exact(as_matrix(weights[one.name], one.groups))
        for part in _parts(one):
            x_GNI = patches(one, part)
            grams[one.name].add_(x_GNI)
            grams[one.name].add_cross_(x_GNI, patches(dense, part), W_GOI)

    _listen(ears[0], entry, grams, given[0], add_)


def _add_(gram: Gram, one: Product, diagonal: bool) -> None:
    for part in _parts(one):
        (gram.add_square_ if diagonal else gram.add_)(patches(one, part))


def _parts(one: Product) -> list[slice]:
    """A few images at a time: the patches of a kernel are many times its input."""
    images = max(1, PATCHES // max(1, one.x[0].numel() * math.prod(one.kernel)))
    return [slice(start, start + images) for start in range(0, len(one.x), images)]


def patches(one: Product, images: slice) -> Tensor:
    """x_GNI in float64: what each output of these images is a product of."""
    one = replace(one, x=exact(one.x[images]))
    if not one.kernel:
        return one.x.reshape(1, -1, one.x.shape[-1])
    x = one.padded()
    kernel, stride, dilation = ((1,) * (2 - len(side)) + side for side in (one.kernel, one.stride, one.dilation))
    x = x if x.ndim == 4 else x[:, :, None]
    if kernel == (1, 1):
        columns = x[:, :, :: stride[0], :: stride[1]].flatten(2)
    else:
        columns = F.unfold(x, kernel, dilation, 0, stride)
    B, _, N = columns.shape
    taps = math.prod(kernel)
    return columns.view(B, one.groups, -1, taps, N).permute(1, 0, 4, 3, 2).reshape(one.groups, B * N, -1)
