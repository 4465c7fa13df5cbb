"""The only hooks: what named modules put out while a model runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import TracebackType
from typing import Any

from torch import Tensor, nn
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
