"""Which norm reads a block's output: the LayerNorm or RMSNorm of the next block, or the one before the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from starfish import activations
from starfish.anatomy.look import _evaluating, _first

NORM_NAMES = ("LayerNorm", "RMSNorm", "RmsNorm")


def next_norms(net: nn.Module, inputs: Any, blocks: Sequence[str]) -> dict[str, str]:
    """Block → the first norm over channels outside it that reads its output as it is; without one, no entry."""
    norms = [name for name, module in net.named_modules() if _is_norm(module)]
    if not norms:
        return {}
    with _evaluating(net), torch.no_grad():
        readers = activations.readers(net, _first(inputs, 2), blocks, norms)
    outside = {block: [norm for norm in readers[block] if not norm.startswith(f"{block}.")] for block in blocks}
    return {block: found[0] for block, found in outside.items() if found}


def _is_norm(module: nn.Module) -> bool:
    """Told by name, a base class's too: everybody has an RMSNorm of their own. Those over dimension 1 are none."""
    names = [kind.__name__ for kind in type(module).__mro__]
    over_channels_first = any("2d" in name for name in names) or getattr(module, "data_format", "") == "channels_first"
    named = any(name.endswith(NORM_NAMES) for name in names)
    return named and not over_channels_first and not any(module.children())  # an encoder "with LayerNorm" has children
