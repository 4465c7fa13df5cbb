"""Running a part of a model again: from what once entered a module, until some operations have put out theirs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from starfish.activations import call, is_same, readers, tensors
from starfish.data import room
from starfish.devices import to_device

Hook = Callable[..., None]


@dataclass(frozen=True)
class Order:
    """What runs when."""

    operations: tuple[str, ...]  # modules with none inside that runs, in the order in which they end, each time they do
    once: frozenset[str]  # of the blocks those that run once
    follower: dict[str, str]  # block → the block that reads the very tensor it puts out


@dataclass(frozen=True)
class Start:
    """From where the operations after a weight can be looked at."""

    first: str  # the operation that reads the weight
    chain: tuple[str, ...]  # modules to run, each on what the one before put out; "" is the whole model

    @property
    def entry(self) -> str:
        return self.chain[0]


@dataclass(frozen=True)
class Arguments:
    """What a module is called with."""

    positional: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    hole: int | str | None = None  # which of them is what the module before puts out


@contextmanager
def plain() -> Iterator[None]:
    """Attention from products that can be differentiated twice, and every layer run as its class says."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@torch.no_grad()
def order_of(model: nn.Module, inputs: Any, blocks: Sequence[str]) -> Order:
    """Run the model once to see."""
    ended: list[str] = []
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            before, after = _watch(name, ended)
            hooks.enter_context(module.register_forward_pre_hook(before))
            hooks.enter_context(module.register_forward_hook(after))
        call(model, inputs)
    holding = {name.rpartition(".")[0] for name in ended if name}
    while parents := {name.rpartition(".")[0] for name in holding} - holding:
        holding |= parents
    once = frozenset(block for block in blocks if ended.count(block) == 1)
    following = readers(model, inputs, sorted(once), sorted(once))
    return Order(
        operations=tuple(name for name in ended if name not in holding),
        once=once,
        follower={block: found[0] for block, found in following.items() if found},
    )


def runs_once(model: nn.Module, inputs: Any, name: str) -> bool:
    """And not several times, each on something else, or never."""
    return name in order_of(model, inputs, [name]).once


def _watch(name: str, ended: list[str]) -> tuple[Hook, Hook]:
    """Hooks that note when a module ends that put out numbers, and not its very input, as dropout does."""
    entered: list[tuple[Tensor, int]] = []

    def before(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        entered[:] = [(x, x._version) for x in inputs if isinstance(x, Tensor)]

    def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
        found = _first(output)
        changed = found is not None and not any(is_same(x, found) and x._version == was for x, was in entered)
        if found is not None and changed and found.is_floating_point():
            ended.append(name)
        entered.clear()

    return before, after


def _first(output: Any) -> Tensor | None:
    return next(tensors(output), None)


def start_of(weight: str, order: Order, count: int) -> Start:
    """Where to begin so as to see up to `count` operations from the first that reads the weight on.

    That is the block that holds it and the blocks behind it, as far as each reads what the one before put out. What
    runs before all blocks is seen in the whole model, and what is in none of them alone.
    """
    path = weight.rpartition(".")[0]
    while path and not _inside(order.operations, path):
        path = path.rpartition(".")[0]  # such as the output projection of an attention that never calls it
    place = _inside(order.operations, path)[0]
    first = order.operations[place]
    holders = [block for block in order.once if f"{first}.".startswith(f"{block}.")]
    if not holders:
        in_blocks = [min(_inside(order.operations, block), default=len(order.operations)) for block in order.once]
        alone = place > min(in_blocks, default=len(order.operations)) and order.operations.count(first) == 1
        return Start(first, (first if alone else "",))
    chain = [max(holders, key=len)]
    seen = sum(other >= place for other in _inside(order.operations, chain[0]))
    while seen < count and chain[-1] in order.follower:
        chain.append(order.follower[chain[-1]])
        seen += len(_inside(order.operations, chain[-1]))
    return Start(first, tuple(chain))


def _inside(operations: Sequence[str], path: str) -> list[int]:
    return [place for place, name in enumerate(operations) if not path or f"{name}.".startswith(f"{path}.")]


class _Enough(Exception):
    """The last of what was to be seen has been: the rest of the model need not run."""


@torch.no_grad()
def entering(model: nn.Module, chain: Sequence[str], inputs: Any) -> list[Arguments]:
    """What each module of a chain is called with when the model runs; kept where there is room."""
    if chain[0] == "":
        kept = _mapped(inputs, _stored)
        return [Arguments(keywords=dict(kept)) if isinstance(kept, Mapping) else Arguments((kept,))]
    found: list[Arguments] = []

    def keep(_module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given: list[tuple[int | str, Any]] = [*enumerate(positional), *keywords.items()]
        filled = [key for key, value in given if isinstance(value, Tensor)]
        hole = filled[0] if found and filled else None
        kept = {key: None if key == hole else _mapped(value, _stored) for key, value in given}
        in_order = tuple(kept[place] for place in range(len(positional)))
        found.append(Arguments(in_order, {key: kept[key] for key in keywords}, hole))
        if len(found) == len(chain):
            raise _Enough

    with ExitStack() as hooks:
        for name in chain:
            hooks.enter_context(model.get_submodule(name).register_forward_pre_hook(keep, with_kwargs=True))
        with suppress(_Enough):
            call(model, inputs)
    return found


def outputs(
    model: nn.Module, start: Start, arguments: Sequence[Arguments], operations: Collection[str], count: int
) -> list[Tensor]:
    """What up to `count` operations put out, from the first on, in the order in which they run.

    Each is copied as it leaves its module, before an in-place operation further on can change it.
    """
    found: list[Tensor] = []
    device = next(model.parameters()).device

    def listen(name: str) -> Hook:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if found or name == start.first:
                found.append(next(tensors(output)).clone())
            if len(found) == count:
                raise _Enough

        return keep

    within = sorted(name for name in operations if any(_inside([name], module) for module in start.chain))
    with ExitStack() as hooks:
        for name in within:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(listen(name)))
        with suppress(_Enough):
            output: Any = None
            for name, given in zip(start.chain, arguments, strict=False):  # kept for the longest chain from this block
                output = _called(model.get_submodule(name), given, output, device)
    return found


@torch.no_grad()
def run(model: nn.Module, entry: str, given: Arguments) -> None:
    """One module again, "" being the whole model, on what once entered it."""
    _called(model.get_submodule(entry), given, None, next(model.parameters()).device)


def _called(module: nn.Module, given: Arguments, before: Any, device: torch.device) -> Any:
    """In copies, for a module may write into what it reads."""
    positional, keywords = [list(given.positional), dict(given.keywords)]
    positional, keywords = _mapped((positional, keywords), lambda x: to_device(x, device).clone())
    if isinstance(given.hole, int):
        positional[given.hole] = _first(before)
    elif given.hole is not None:
        keywords[given.hole] = _first(before)
    return module(*positional, **keywords)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with every tensor changed, however they are held."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(inner, change) for inner in value)
    return value


def _stored(x: Tensor) -> Tensor:
    return room(tuple(x.shape), x.dtype).copy_(x)
