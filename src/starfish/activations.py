"""The only hooks: what named modules put out while a model runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from starfish.core import Layout
from starfish.errors import UserError, listed


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's raw output for a tensor, or for a mapping of tensors passed as keywords."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def logits(model: nn.Module, inputs: Any) -> Tensor:
    """The class scores, however the model wraps them."""
    output = call(model, inputs)
    found = output
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif isinstance(output, (tuple, list)):
        found = output[0] if output else None
    if isinstance(found, Tensor):
        return found
    raise UserError(
        f"`{type(model).__name__}` returns a `{type(output).__name__}` without logits",
        "return the logits as a tensor, as the first element of a tuple, or under the key `logits`",
    )


class Recorder:
    """Records the outputs of named modules while one model runs.

    Each output is copied as it leaves its module, so that an in-place operation further on (a ReLU on a block's output)
    cannot change what was recorded; the copy belongs to the autograd graph. A module that runs more than once in a
    forward pass (a block whose weights are shared) keeps its last output: the only one that all its runs lead to.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        unknown = [name for name in names if name not in modules]
        if unknown:
            near = get_close_matches(unknown[0], list(modules), n=1, cutoff=0.0)
            raise UserError(f"the model has no module {listed(unknown)}", f"the nearest name is `{near[0]}`")
        self._modules = {name: modules[name] for name in names}
        self._outputs: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Recorder:
        self._handles = [self._listen(name, module) for name, module in self._modules.items()]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._outputs.clear()

    @property
    def fired(self) -> tuple[str, ...]:
        """The modules that ran since the last `take`, in the order in which they ended."""
        return tuple(self._outputs)

    def take(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """The outputs since the last `take`, of all modules or of those asked for, in the order of the names."""
        wanted = list(self._modules) if names is None else list(names)
        silent = [name for name in wanted if name not in self._outputs]
        if silent:
            raise UserError(
                f"the model never ran {listed(silent)} in its forward pass",
                "choose modules whose forward is called, for instance with --blocks REGEX",
            )
        outputs = {name: self._outputs[name] for name in wanted}
        self._outputs.clear()
        return outputs

    def _listen(self, name: str, module: nn.Module) -> RemovableHandle:
        def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._outputs.pop(name, None)  # the order is that of the last run
            self._outputs[name] = _tensor(name, output).clone()

        return module.register_forward_hook(record)


class Taps:
    """What goes into some modules and comes out of others in a forward pass, for gradients too."""

    def __init__(self, model: nn.Module, *, into: Sequence[str] = (), out_of: Sequence[str] = ()) -> None:
        self.into: dict[str, Tensor] = {}
        self.out_of: dict[str, Tensor] = {}
        self._readers = {name: model.get_submodule(name) for name in into}
        self._writers = {name: model.get_submodule(name) for name in out_of}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Taps:
        self._handles = [self._before(name, module) for name, module in self._readers.items()]
        self._handles += [self._after(name, module) for name, module in self._writers.items()]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, name: str, module: nn.Module) -> RemovableHandle:
        def keep(_module: nn.Module, inputs: Any) -> tuple[Any, ...]:
            self.into[name] = inputs[0].clone()  # its gradient is this reader's alone, whoever else reads the tensor
            return self.into[name], *inputs[1:]

        return module.register_forward_pre_hook(keep)

    def _after(self, name: str, module: nn.Module) -> RemovableHandle:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self.out_of[name] = _tensor(name, output)

        return module.register_forward_hook(keep)


@dataclass(frozen=True)
class Product:
    """One multiplication by a weight: what it was multiplied with and, of a convolution, how its kernel moved."""

    name: str
    x: Tensor
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] | str = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1

    def padded(self) -> Tensor:
        """What the kernel moved over."""
        if self.padding == "valid":
            return self.x
        sides: list[int] = []
        for place in reversed(range(len(self.kernel))):  # F.pad begins with the last dimension
            if isinstance(self.padding, str):  # same: what is odd goes behind, as in torch
                total = self.dilation[place] * (self.kernel[place] - 1)
                sides += [total // 2, total - total // 2]
            else:
                sides += [self.padding[place]] * 2
        return F.pad(self.x, sides) if any(sides) else self.x


class Products(TorchFunctionMode):
    """Tells of every multiplication by one of these weights, whichever module does it and however it pads before."""

    def __init__(self, weights: Mapping[str, Tensor], see: Callable[[Product], object]) -> None:
        super().__init__()
        self._names = {id(weight): name for name, weight in weights.items()}
        self._see = see

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _MULTIPLY:
            given = dict(zip(_MULTIPLY[function], args, strict=False)) | (kwargs or {})
            name = self._names.get(id(given["weight"]))
            if name is not None:
                self._see(_product(name, given))
        return function(*args, **(kwargs or {}))


def product_of(layer: nn.Module, x: Tensor) -> Product:
    """How this layer multiplies x by its weight, whatever its class does before that."""
    found: list[Product] = []
    weight: Any = layer.weight
    with torch.no_grad(), Products({"": weight}, found.append):
        layer.forward(x)  # past its hooks
    return found[0]


_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_MULTIPLY: dict[Any, tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    F.conv1d: _CONVOLUTION,
    F.conv2d: _CONVOLUTION,
}  # and what their arguments are called


def _product(name: str, given: Mapping[str, Any]) -> Product:
    kernel = tuple(given["weight"].shape[2:])
    if not kernel:
        return Product(name, given["input"])
    stride, dilation = (_each(given.get(key, 1), len(kernel)) for key in ("stride", "dilation"))
    padding = given.get("padding", 0)
    if not isinstance(padding, str):
        padding = _each(padding, len(kernel))
    return Product(name, given["input"], kernel, stride, padding, dilation, given.get("groups", 1))


def _each(side: int | Sequence[int], sides: int) -> tuple[int, ...]:
    return (side,) * sides if isinstance(side, int) else tuple(side)


def _tensor(name: str, output: Any) -> Tensor:
    found = output
    if isinstance(output, Mapping):
        found = next((value for value in output.values() if isinstance(value, Tensor)), None)
    elif isinstance(output, (tuple, list)):
        found = output[0] if output else None
    if isinstance(found, Tensor):
        return found
    raise UserError(
        f"module `{name}` puts out a `{type(output).__name__}` that does not start with a tensor",
        "choose other modules with --blocks REGEX",
    )


def positions(output: Tensor, layout: Layout, images: int) -> Tensor:
    """A block's output as x_BPC: image, position, channel. Windows folded into the batch become positions again."""
    x = output.movedim((layout.batch, layout.channel), (0, -1))
    return x.reshape(images, -1, x.shape[-1])


def readers(model: nn.Module, inputs: Any, outputs: Sequence[str], modules: Sequence[str]) -> dict[str, list[str]]:
    """Module of `outputs` → those of `modules` that read the very tensor it put out, in the order in which they run.

    A tensor that was overwritten in between is another. Of a module that runs more than once, the last output counts.
    """
    held: dict[str, tuple[Tensor, int]] = {}  # alive, so that no other tensor can come to lie where it lies
    found: dict[str, list[str]] = {name: [] for name in outputs}

    def put_out(name: str) -> Callable[..., None]:
        def hold(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensor = _tensor(name, output)
            held[name], found[name] = (tensor, tensor._version), []

        return hold

    def read(name: str) -> Callable[..., None]:
        def compare(_module: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            given = next((value for value in (*positional, *keywords.values()) if isinstance(value, Tensor)), None)
            for source, (tensor, version) in held.items():
                if given is not None and is_same(given, tensor) and tensor._version == version:
                    found[source].append(name)

        return compare

    with ExitStack() as hooks:
        for name in outputs:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(put_out(name)))
        for name in modules:
            hooks.enter_context(model.get_submodule(name).register_forward_pre_hook(read(name), with_kwargs=True))
        call(model, inputs)
    return found


def is_same(one: Tensor, other: Tensor) -> bool:
    """The same object, or two that lie in the same memory in the same way; meta tensors lie nowhere."""
    return one is other or (one.data_ptr() != 0 and _place(one) == _place(other))


def _place(x: Tensor) -> tuple[object, ...]:
    return x.device, x.dtype, x.data_ptr(), x.shape, x.stride()


@dataclass(frozen=True)
class Trace:
    """Where NaN arrived: by module, for each channel of what it read and of what it put out, whether it holds any."""

    read: dict[str, Tensor] = field(default_factory=dict)
    put_out: dict[str, Tensor] = field(default_factory=dict)
    result: list[Tensor] = field(default_factory=list)  # all that the model puts out


def follow(
    model: nn.Module,
    inputs: Any,
    marked: Mapping[str, Tensor],
    dims: Mapping[str, int],
    blocks: Mapping[str, int],
    stops: Collection[str],
) -> Trace:
    """Run the model with the `marked` channels of some modules' outputs NaN, to see what depends on them, and how.

    The modules of `dims` are watched where they read, those of `blocks` where they put out; both say which dimension
    holds a module's channels. The modules of `stops` read zeros for NaN, so that it ends there.
    """
    modules, trace = dict(model.named_modules()), Trace()
    with ExitStack() as hooks:
        for name, channels in marked.items():  # before the watchers: a module may be marked and watched
            hooks.enter_context(_mark(modules[name], channels, dims[name]))
        for name, dim in dims.items():
            hooks.enter_context(_watch_input(modules[name], name, dim, trace, name in stops))
        for name, dim in blocks.items():
            hooks.enter_context(_watch_output(modules[name], name, dim, trace))
        trace.result.extend(tensors(call(model, inputs)))
    return trace


def tensors(output: Any) -> Iterator[Tensor]:
    """All tensors of an output, however they are wrapped."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (Mapping, list, tuple)):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from tensors(value)


def _mark(module: nn.Module, channels: Tensor, dim: int) -> RemovableHandle:
    def mark(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        shape = [1] * output.ndim
        shape[dim] = -1
        return output.masked_fill(channels.to(output.device).reshape(shape), math.nan)

    return module.register_forward_hook(mark)


def _watch_input(module: nn.Module, name: str, dim: int, trace: Trace, stop: bool) -> RemovableHandle:
    def watch(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not inputs:
            return None
        found = _holding_nan(inputs[0], dim)
        trace.read[name] = trace.read[name] | found if name in trace.read else found
        if not stop or not found.any():
            return None
        return inputs[0].masked_fill(inputs[0].isnan(), 0), *inputs[1:]

    return module.register_forward_pre_hook(watch)


def _watch_output(module: nn.Module, name: str, dim: int, trace: Trace) -> RemovableHandle:
    def watch(_module: nn.Module, _inputs: Any, output: Any) -> None:
        found = _holding_nan(_tensor(name, output), dim)
        trace.put_out[name] = trace.put_out[name] | found if name in trace.put_out else found

    return module.register_forward_hook(watch)


def _holding_nan(x: Tensor, dim: int) -> Tensor:
    others = [other for other in range(x.ndim) if other != dim % x.ndim]
    return (x.isnan().any(others) if others else x.isnan()).cpu()
