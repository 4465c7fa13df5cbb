"""Make layers narrower in place: fewer rows, columns and entries, and modules that know their new sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from starfish.anatomy.attention import is_narrow, narrow_attention
from starfish.anatomy.layers import is_depthwise
from starfish.errors import UserError, listed

Kept = Mapping[str, Sequence[tuple[int, Tensor]]]
"""Parameter or buffer name → (dimension, the indices to keep there), one or more."""


def narrow_(net: nn.Module, kept: Kept) -> None:
    """Keep only these rows, columns and entries. Nothing is changed where one of the tensors cannot be cut."""
    _check(net, kept)
    multipliers = {path: _multiplier(net.get_submodule(path)) for path in map(_path, kept)}
    for name, cuts in kept.items():
        _cut_(net, name, cuts)
    for path, multiplier in multipliers.items():
        _resize_(net.get_submodule(path), multiplier)


def attentions_(net: nn.Module, paths: Sequence[str]) -> None:
    """Put attentions that read the width of their queries off their weight in the place of the library's."""
    for path in paths:
        net.set_submodule(path, narrow_attention(path, net.get_submodule(path)))


def _check(net: nn.Module, kept: Kept) -> None:
    """Every tensor belongs to one module only, and that module's sizes follow from its tensors."""
    tensors = dict(net.named_parameters(remove_duplicate=False)) | dict(net.named_buffers(remove_duplicate=False))
    for name in kept:
        if name not in tensors:
            raise UserError(f"the model has no parameter or buffer `{name}`")
        shared = [other for other, tensor in tensors.items() if tensor is tensors[name] and other != name]
        if shared:
            raise UserError(f"`{name}` is shared with {listed(shared)}, so it cannot be made smaller")
        module = net.get_submodule(_path(name))
        grouped = isinstance(module, (nn.Conv1d, nn.Conv2d)) and module.groups > 1 and not is_depthwise(module)
        sized = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, _BatchNorm, nn.PReLU)) or is_narrow(module)
        if grouped or not sized:
            kind = f"a convolution of {module.groups} groups" if grouped else f"a `{type(module).__name__}`"
            raise UserError(
                f"`{name}` belongs to {kind}, which cannot be made smaller",
                "Linear, Conv1d, Conv2d of one group or depthwise, BatchNorm and PReLU can",
            )


def _path(name: str) -> str:
    return name.rpartition(".")[0]


def _multiplier(module: nn.Module) -> int:
    """Of a depthwise convolution: output channels for each input channel; else 0."""
    if isinstance(module, (nn.Conv1d, nn.Conv2d)) and is_depthwise(module):
        return module.out_channels // module.in_channels
    return 0


def _cut_(net: nn.Module, name: str, cuts: Sequence[tuple[int, Tensor]]) -> None:
    path, _, key = name.rpartition(".")
    module = net.get_submodule(path)
    old: Tensor = getattr(module, key)
    new = old.detach()
    for dim, indices in cuts:
        new = new.index_select(dim, indices.to(new.device))
    setattr(module, key, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)


def _resize_(module: nn.Module, multiplier: int) -> None:
    """The sizes that a module keeps beside its tensors."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, (nn.Conv1d, nn.Conv2d)):
        module.out_channels = len(module.weight)
        module.groups = module.out_channels // multiplier if multiplier else 1
        module.in_channels = module.groups if multiplier else module.weight.shape[1]
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(module.weight)
    elif isinstance(module, _BatchNorm):
        held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        module.num_features = next(len(tensor) for tensor in held if tensor.ndim)
