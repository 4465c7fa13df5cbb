"""Channels of convolutions that go together, found by experiment: a channel goes where its NaN goes.

NaN put into some channels of a layer's output passes through everything that treats each channel by itself, and is
seen and stopped where channels mix. So one learns which columns read a channel, which norms and depthwise convolutions
it passes and, where the outputs of two layers are added, that both arrive at the same column. What was found is then
tried: cutting channels out must be the same as not reading them.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from starfish import activations
from starfish.anatomy.layers import is_depthwise, layers_of
from starfish.anatomy.look import evaluating, first_of
from starfish.anatomy.narrow import narrow_
from starfish.core import Layout, Part, Unit

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Linear)
ROLES = {"conv", "depthwise", "head", "other"}  # attentions and MLPs have units of their own
KINDS = ("row", "entry", "column", "output")
TOLERANCE = 1e-4  # of the largest output, in single precision
CORNER = 64  # pixels a side of the images that are looked at, where the network takes any size


class Place(NamedTuple):
    """What has one index for each of its channels."""

    kind: str  # row or column of a layer that mixes channels, entry of one that does not, output of a block
    name: str  # of the module


Indices = list[tuple[Place, int]]
"""Of one channel: the places where it is, rows first, and its index in each."""


def channel_units(
    net: nn.Module, inputs: Any, blocks: Mapping[str, Layout], roles: Mapping[str, str]
) -> tuple[Unit, ...]:
    """Families of channels that convolutions make. `inputs` is a batch of two or more."""
    with evaluating(net), torch.no_grad():
        corner = _corner(net, inputs)
        flow = _Flow(net, first_of(corner, 1), blocks)
        runs = _runs(_channels(flow, _fixed(net, roles)))
        units = _those_that_hold(net, first_of(corner, 2), [_unit(flow, count, first) for count, first in runs])
        failing = _failing(net, first_of(inputs, 2), units)  # the whole images have the last word
        return tuple(unit for unit in units if unit not in failing)


def _corner(net: nn.Module, inputs: Any) -> Any:
    """A corner of the images: channels go the same way whatever the size, and a hundred runs take seconds."""
    try:
        corner = _cropped(inputs)
        activations.call(net, first_of(corner, 1))
    except Exception:  # whatever a network does that counts on one size
        return inputs
    return corner


def _cropped(inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return {key: _cropped(value) for key, value in inputs.items()}
    return inputs[..., :CORNER, :CORNER] if inputs.ndim == 4 else inputs


def _fixed(net: nn.Module, roles: Mapping[str, str]) -> set[str]:
    """Modules that keep their sizes: their parameters are tied, or are no plain layer's."""
    layers = [name for name, module in net.named_modules() if isinstance(module, LAYERS)]
    tied = {name.rpartition(".")[0] for name in _tied(net)}
    return tied | {name for name in layers if roles.get(f"{name}.weight") not in ROLES}


def _tied(net: nn.Module) -> set[str]:
    """Parameters that have more than one name."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {name for several in names.values() if len(several) > 1 for name in several}


class _Flow:
    """Which way channels take through a network, seen while it runs."""

    def __init__(self, net: nn.Module, inputs: Any, blocks: Mapping[str, Layout]) -> None:
        named = list(net.named_modules())
        self.mixers = {name: module for name, module in named if isinstance(module, LAYERS) and _mixes(module)}
        self.modules = self.mixers | {name: module for name, module in named if _keeps_apart(module)}
        self.blocks = blocks
        self._net, self._inputs = net, inputs

    def seen(self, marked: Mapping[str, Tensor]) -> dict[Place, Tensor] | None:
        """Which channels hold NaN, in every place but rows; None if the network's own output holds some."""
        dims = {name: _dim(module) for name, module in self.modules.items()}
        outputs = {name: layout.channel for name, layout in self.blocks.items()}
        trace = activations.follow(self._net, self._inputs, marked, dims, outputs, self.mixers)
        if not trace.result or any(tensor.isnan().any() for tensor in trace.result):
            return None
        read = {Place("column" if name in self.mixers else "entry", name): nan for name, nan in trace.read.items()}
        return read | {Place("output", name): nan for name, nan in trace.put_out.items()}

    def starts(self, mixer: str) -> dict[Place, int] | None:
        """Where the channels that a layer makes arrive, by the index of the first; None if not in a row and alone.

        So it is found by marking a random half of them, and checked by marking the other half.
        """
        rows = len(self.mixers[mixer].weight)
        half = torch.rand(rows, generator=torch.Generator().manual_seed(rows)) < 0.5
        half[-1], half[0] = False, True
        try:
            one, two = self.seen({mixer: half}), self.seen({mixer: ~half})
        except Exception:  # whatever a network does when it meets NaN
            return None
        if one is None or two is None:
            return None
        starts = {place: int(nan.int().argmax()) for place, nan in one.items() if (nan | two[place]).any()}
        in_a_row = (_lies_at(at, half, one[place]) and _lies_at(at, ~half, two[place]) for place, at in starts.items())
        return starts if all(in_a_row) else None


def _mixes(layer: nn.Conv1d | nn.Conv2d | nn.Linear) -> bool:
    """Whether it makes new channels, each from all that it reads."""
    return isinstance(layer, nn.Linear) or layer.groups == 1


def _keeps_apart(module: nn.Module) -> bool:
    """Whether it does something of its own to each channel."""
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return is_depthwise(module) and module.out_channels == module.in_channels
    return isinstance(module, _BatchNorm) or (isinstance(module, nn.PReLU) and module.num_parameters > 1)


def _dim(module: nn.Module) -> int:
    """Of the channels, in what a module reads and puts out."""
    return 1 - module.weight.ndim if isinstance(module, LAYERS) else 1


def _lies_at(start: int, marked: Tensor, nan: Tensor) -> bool:
    expected = torch.zeros_like(nan)
    expected[start : start + len(marked)] = marked[: len(nan) - start]
    return start + len(marked) <= len(nan) and torch.equal(nan, expected)


def _channels(flow: _Flow, fixed: Collection[str]) -> list[Indices]:
    """Every channel that a convolution makes and a layer reads, and that can be cut out as far as one sees."""
    convolutions = {name for name, mixer in flow.mixers.items() if not isinstance(mixer, nn.Linear)}
    clean = flow.seen({}) if convolutions.difference(fixed) else None
    if clean is None:
        return []
    order = [place.name for place in clean if place.kind == "column"]  # in which they run
    widths = {Place("row", name): len(flow.mixers[name].weight) for name in order}
    widths |= {place: len(nan) for place, nan in clean.items()}
    starts: dict[str, dict[Place, int] | None] = {}
    found: list[Indices] = []
    for group in (convolutions, set(order) - convolutions):
        starts |= {name: flow.starts(name) for name in order if name in group}
        stuck = {place for place in widths if place.kind != "output" and place.name in fixed}
        stuck |= {Place("row", name) for name, places in starts.items() if places is None}
        found = [channel for channel in _joined(widths, starts) if _is_unit(channel, convolutions, stuck)]
        if not found:  # then it does not matter what the other layers add
            break
    return found


def _is_unit(channel: Indices, convolutions: Collection[str], stuck: Collection[Place]) -> bool:
    places = [place for place, _ in channel]
    made = any(place.kind == "row" and place.name in convolutions for place in places)
    return made and any(place.kind == "column" for place in places) and not any(place in stuck for place in places)


def _joined(widths: Mapping[Place, int], starts: Mapping[str, Mapping[Place, int] | None]) -> list[Indices]:
    """All channels: what arrives at the same index is one. In the order of their first indices."""
    members = [(place, index) for place, width in widths.items() for index in range(width)]
    first = dict(zip(widths, accumulate(widths.values(), initial=0), strict=False))
    pairs = [
        torch.stack([torch.arange(widths[row]) + first[row], torch.arange(widths[row]) + first[place] + start])
        for name, places in starts.items()
        for row in [Place("row", name)]
        for place, start in (places or {}).items()
    ]
    channels: dict[int, Indices] = {}
    for member, label in zip(members, _labels(len(members), pairs), strict=True):
        channels.setdefault(label, []).append(member)
    return list(channels.values())


def _labels(count: int, pairs: Sequence[Tensor]) -> list[int]:
    """For each of `count` things the first that it is tied to, over any number of pairs."""
    labels, ties = torch.arange(count), torch.cat([torch.zeros(2, 0, dtype=torch.long), *pairs], 1)
    while True:
        lowest = labels[ties].amin(0).expand(2, -1)
        lower = labels.scatter_reduce(0, ties.flatten(), lowest.flatten(), "amin")
        if torch.equal(lower, labels):
            return labels.tolist()
        labels = lower


def _runs(channels: Sequence[Indices]) -> Iterator[tuple[int, Indices]]:
    """(count, the first one) of the longest rows of channels that lie side by side in all their places."""
    count, following = 0, Indices()
    for channel in channels:
        if count and channel != following:
            yield count, _moved(following, -count)
            count = 0
        count += 1
        following = _moved(channel, 1)
    if count:
        yield count, _moved(following, -count)


def _moved(channel: Indices, by: int) -> Indices:
    return [(place, index + by) for place, index in channel]


def _unit(flow: _Flow, count: int, first: Indices) -> Unit:
    of = {kind: [(place.name, start) for place, start in first if place.kind == kind] for kind in KINDS}
    holders = [block for block in flow.blocks if f"{of['row'][0][0]}.".startswith(f"{block}.")]
    parts = [Part(f"{name}.{key}", 0, at) for name, at in of["row"] for key in _held(flow.modules[name])]
    parts += [Part(f"{name}.{key}", 0, at) for name, at in of["entry"] for key in _held(flow.modules[name])]
    parts += [Part(f"{name}.weight", 1, at) for name, at in of["column"]]
    return Unit("channel", max(holders, key=len, default=""), count, 1, tuple(parts), tuple(of["output"]))


def _held(module: nn.Module) -> list[str]:
    """The tensors that have an entry, or a row, for each channel that is put out."""
    keys = ("weight", "bias", "running_mean", "running_var")
    return [key for key in keys if isinstance(getattr(module, key, None), Tensor)]


def _those_that_hold(net: nn.Module, inputs: Any, units: Sequence[Unit]) -> list[Unit]:
    """The units whose channels can be cut out: of each bit of their numbers, those that have it and those that do not.

    So any two are tried one without the other, and fail if they must be cut alike (as the halves of a `chunk`).
    """
    left = list(units)
    for bit in range(len(units).bit_length()):
        for half in (0, 1):
            tried = [unit for number, unit in enumerate(units) if number >> bit & 1 == half and unit in left]
            failing = _failing(net, inputs, tried)
            left = [unit for unit in left if unit not in failing]
    return left


def _failing(net: nn.Module, inputs: Any, units: Sequence[Unit]) -> list[Unit]:
    if not units or _hold(net, inputs, units):
        return []
    middle = len(units) // 2
    return [*_failing(net, inputs, units[:middle]), *_failing(net, inputs, units[middle:])] if middle else [*units]


def _hold(net: nn.Module, inputs: Any, units: Sequence[Unit]) -> bool:
    """Whether without some channels of each unit the network is what it is when nothing reads them."""
    gone: dict[tuple[str, int], set[int]] = {}
    for unit in units:
        channels = {0, unit.count // 2, unit.count - 1} if unit.count > 3 else {0}
        for part in unit.parts:
            gone.setdefault((part.parameter, part.dim), set()).update(part.start + channel for channel in channels)
    narrow = _twin(net)
    try:
        _cut_(narrow, gone)
        return _agree(_unread(net, inputs, gone), activations.call(narrow, inputs))
    except Exception:  # whatever a network does when a layer has not the size that it counts on
        return False


def _twin(net: nn.Module) -> nn.Module:
    """A copy that has the same tensors, so that only the tensors of the original must not be changed in place."""
    return copy.deepcopy(net, {id(tensor): tensor for tensor in (*net.parameters(), *net.buffers())})


def _unread(net: nn.Module, inputs: Any, gone: Mapping[tuple[str, int], set[int]]) -> Any:
    """What the network puts out with zeros in these columns."""
    zeros = {}
    for (name, dim), channels in gone.items():
        if dim == 1:
            weight = net.get_parameter(name).detach()
            zeros[name] = weight.index_fill(1, torch.tensor(sorted(channels), device=weight.device), 0)
    if isinstance(inputs, Mapping):
        return functional_call(net, zeros, (), dict(inputs))
    return functional_call(net, zeros, (inputs,))


def _cut_(net: nn.Module, gone: Mapping[tuple[str, int], set[int]]) -> None:
    tensors = dict(net.named_parameters()) | dict(net.named_buffers())
    kept: dict[str, list[tuple[int, Tensor]]] = {}
    for (name, dim), channels in gone.items():
        rest = torch.tensor(sorted(set(range(tensors[name].shape[dim])) - channels))
        kept.setdefault(name, []).append((dim, rest))
    narrow_(net, kept)


def _agree(one: Any, other: Any) -> bool:
    """Whether two outputs are the same, but for rounding. One with NaN is like no other."""
    pairs = list(zip(activations.tensors(one), activations.tensors(other), strict=True))
    return bool(pairs) and all(_is_close(a, b) for a, b in pairs)


def _is_close(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and bool((one - two).abs().max() <= TOLERANCE * one.abs().max())


def shifts(net: nn.Module, inputs: Any) -> dict[str, tuple[str, int]]:
    """Weight of a layer → what can take up a constant added to its output, and its sign.

    That is its bias, +1, or the running mean of the BatchNorm that alone reads the output, −1: it is subtracted.
    """
    tied = _tied(net)
    layers = [layer for layer in layers_of(net) if isinstance(layer.module, LAYERS) and layer.parameter not in tied]
    with evaluating(net), torch.no_grad():
        norms = _own_norms(net, first_of(inputs, 2), [layer.path for layer in layers])
    means = {layer: (f"{norm}.running_mean", -1) for layer, norm in norms.items()}
    found = {layer.parameter: (layer.bias, 1) if layer.bias else means.get(layer.path) for layer in layers}
    return {weight: where for weight, where in found.items() if where}


def _own_norms(net: nn.Module, inputs: Any, layers: Sequence[str]) -> dict[str, str]:
    """Layer → the BatchNorm that reads its output as it is, while nothing else does."""
    named = net.named_modules()
    norms = [name for name, module in named if isinstance(module, _BatchNorm) and module.running_mean is not None]
    if not norms or next(net.parameters()).is_meta:  # without numbers nothing can be tried
        return {}
    readers = activations.readers(net, inputs, layers, norms)
    times = Counter(norm for found in readers.values() for norm in found)
    pairs = [(layer, found[0]) for layer, found in readers.items() if len(found) == 1 == times[found[0]]]
    plain = [(layer, norm) for layer, norm in pairs if net.get_submodule(layer).bias is None]
    if not plain or _take_up(net, inputs, plain):
        return dict(plain)
    return {layer: norm for layer, norm in plain if _take_up(net, inputs, [(layer, norm)])}


def _take_up(net: nn.Module, inputs: Any, pairs: Sequence[tuple[str, str]]) -> bool:
    """Whether running means can take up a bias for each of these layers: then the network is what it was."""
    twin, random = _twin(net), torch.Generator().manual_seed(0)
    try:
        for layer, norm in pairs:
            mean, variance = (twin.get_buffer(f"{norm}.running_{key}") for key in ("mean", "var"))
            bias = torch.randn(len(mean), generator=random).to(mean) * variance.sqrt()
            twin.get_submodule(layer).bias = nn.Parameter(bias, False)
            twin.get_submodule(norm).running_mean = mean + bias
        return _agree(activations.call(net, inputs), activations.call(twin, inputs))
    except Exception:  # whatever a network does when a layer has a bias that it does not count on
        return False
