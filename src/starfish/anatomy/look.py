"""One look at the model while it runs: layouts, widths, the number of classes, what the outputs depend on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from starfish import activations
from starfish.anatomy.layers import layers_of
from starfish.core import Layout
from starfish.errors import UserError


@dataclass(frozen=True)
class Run:
    layouts: dict[str, Layout]  # of the aligned blocks, in the order in which they run
    widths: dict[str, int]  # channels put out by the blocks that were found, or else by the aligned ones
    classes: int | None
    aligned_reach: set[str]  # parameters on which the aligned outputs depend
    found_reach: set[str]  # … and the outputs of the blocks that were found


def look(net: nn.Module, inputs: Any, aligned: list[str], found: list[str]) -> Run:
    try:
        return _run(net, inputs, aligned, found or aligned)
    except UserError:
        if aligned == found:
            raise
        return _run(net, inputs, aligned, aligned)  # the blocks found are useless, perhaps the user's are not


def _run(net: nn.Module, inputs: Any, aligned: list[str], found: list[str]) -> Run:
    with evaluating(net), activations.Recorder(net, list(dict.fromkeys([*aligned, *found]))) as recorder:
        with torch.no_grad():
            classes = _classes(net, first_of(inputs, 2))
        order = recorder.fired
        two = recorder.take([*aligned, *(name for name in order if name not in aligned)])
        with torch.enable_grad(), differentiable([layer.weight for layer in layers_of(net)]):
            activations.call(net, first_of(inputs, 1))
            one = recorder.take(order)
            reach = [_reach(net, [one[name] for name in order if name in group]) for group in (aligned, found)]
    layouts = {name: _layout(name, net.get_submodule(name), one[name].shape, two[name].shape) for name in order}
    widths = {name: one[name].shape[layout.channel] for name, layout in layouts.items() if name in found}
    return Run({name: layouts[name] for name in order if name in aligned}, widths, classes, *reach)


def outer_layouts(net: nn.Module, inputs: Any, names: list[str]) -> dict[str, Layout]:
    """Layouts of single layers outside the blocks: of those that run, and whose output starts with a tensor."""
    if not names:
        return {}
    shapes = []
    with evaluating(net), torch.no_grad(), activations.Recorder(net, names) as recorder:
        for count in (1, 2):
            activations.call(net, first_of(inputs, count))
            shapes.append({name: output.shape for name, output in recorder.take(recorder.fired).items()})
    return {name: _layout(name, net.get_submodule(name), shape, shapes[1][name]) for name, shape in shapes[0].items()}


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """In evaluation mode, each module in its own mode again afterwards."""
    training = {module: module.training for module in net.modules()}
    net.eval()
    try:
        yield
    finally:
        for module, flag in training.items():
            module.training = flag


@contextmanager
def differentiable(weights: list[Tensor]) -> Iterator[None]:
    frozen = [weight for weight in weights if not weight.requires_grad]
    for weight in frozen:
        weight.requires_grad_(True)
    try:
        yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)


def first_of(inputs: Any, count: int) -> Any:
    if isinstance(inputs, Mapping):
        return {key: first_of(value, count) for key, value in inputs.items()}
    if len(inputs) < 2:
        raise UserError(f"a batch of {len(inputs)} cannot tell the batch dimension", "give two images or more")
    return inputs[:count]


def _classes(net: nn.Module, inputs: Any) -> int | None:
    """The number of classes, or None for a model that puts out no logits: such a model has no head."""
    try:
        scores = activations.logits(net, inputs)
    except UserError:
        return None
    return int(scores.shape[1] if scores.ndim == 4 else scores.shape[-1])


def _reach(net: nn.Module, outputs: list[Tensor]) -> set[str]:
    """The parameters on which the outputs depend: the leaves of their autograd graph."""
    names = {parameter: name for name, parameter in net.named_parameters()}
    found: set[str] = set()
    waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf in names:
            found.add(names[leaf])
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        waiting.extend(new)
    return found


def _layout(name: str, block: nn.Module, one: torch.Size, two: torch.Size) -> Layout:
    """The batch is the dimension that grows; the channels are the last, or the second in a convolutional block."""
    grown = [dim for dim, (less, more) in enumerate(zip(one, two, strict=False)) if less != more]
    if len(one) != len(two) or len(grown) != 1 or len(one) < 2:
        raise UserError(
            f"block `{name}` puts out {tuple(one)} for one sample and {tuple(two)} for two: no single batch dimension",
            "choose other modules with --blocks REGEX",
        )
    last = len(one) - 1
    kinds = {3: nn.Conv1d, 4: nn.Conv2d}.get(len(one))
    convolves = kinds is not None and any(isinstance(module, kinds) for module in block.modules())
    likely, other = (1, last) if convolves else (last, 1)
    if len(one) == 4 and one[likely] not in _widths(block) and one[other] in _widths(block):
        likely = other
    return Layout(grown[0], last if likely == grown[0] else likely)


def _widths(block: nn.Module) -> set[int]:
    """The numbers of channels that some layer or norm of the block puts out."""
    return {size for tensor in block.parameters() for size in tensor.shape[:1] if tensor.ndim in (1, 2, 4)}
