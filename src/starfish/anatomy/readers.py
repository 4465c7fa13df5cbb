"""Who reads block outputs: the norm of the next block or before the head; and which positions the head reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from starfish import activations
from starfish.anatomy.layers import layers_of
from starfish.anatomy.look import differentiable, evaluating, first_of
from starfish.core import Layout
from starfish.errors import UserError

NORM_NAMES = ("LayerNorm", "RMSNorm", "RmsNorm")


def next_norms(net: nn.Module, inputs: Any, blocks: Sequence[str]) -> dict[str, str]:
    """Block → the first norm over channels outside it that reads its output as it is; without one, no entry."""
    norms = [name for name, module in net.named_modules() if _is_norm(module)]
    if not norms:
        return {}
    with evaluating(net), torch.no_grad():
        readers = activations.readers(net, first_of(inputs, 2), blocks, norms)
    outside = {block: [norm for norm in readers[block] if not norm.startswith(f"{block}.")] for block in blocks}
    return {block: found[0] for block, found in outside.items() if found}


def head_positions(net: nn.Module, inputs: Any, last: str, layout: Layout) -> tuple[int, ...]:
    """Positions of the last block's output on which the logits depend, where these are the fewer: class tokens.

    What the others put out ends there. A head that takes a mean over most positions singles out none.
    """
    weights = [layer.weight for layer in layers_of(net)]
    with evaluating(net), differentiable(weights), torch.enable_grad(), activations.Taps(net, out_of=[last]) as taps:
        try:
            logits = activations.logits(net, first_of(inputs, 1))
        except UserError:  # it puts out none
            return ()
        output = taps.out_of[last]
        found: Sequence[Tensor | None] = torch.autograd.grad(logits.float().square().sum(), [output], allow_unused=True)
    gradient = found[0]
    if gradient is None or gradient.is_meta:  # the latter holds no numbers
        return ()
    read_P = activations.positions(gradient, layout, 1)[0].abs().sum(-1) > 0
    return tuple(read_P.nonzero()[:, 0].tolist()) if 2 * int(read_P.sum()) < len(read_P) else ()


def _is_norm(module: nn.Module) -> bool:
    """Told by name, a base class's too: everybody has an RMSNorm of their own. Those over dimension 1 are none."""
    names = [kind.__name__ for kind in type(module).__mro__]
    over_channels_first = any("2d" in name for name in names) or getattr(module, "data_format", "") == "channels_first"
    named = any(name.endswith(NORM_NAMES) for name in names)
    return named and not over_channels_first and not any(module.children())  # an encoder "with LayerNorm" has children
