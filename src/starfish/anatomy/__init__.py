"""The only folder that knows architectures: blocks, prunable weights by role, units that go together.

Nothing is looked up by model name. A *container* (Sequential, ModuleList, ModuleDict) holds others in a row, a
*composite* is any other module with children. Blocks are composites in a row; what is inside them is told by widths, by
layer kinds and, for attention, by what everybody calls these layers.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from starfish.anatomy.blocks import find_blocks, matching
from starfish.anatomy.channels import channel_units, shifts
from starfish.anatomy.layers import layers_of
from starfish.anatomy.look import look, outer_layouts
from starfish.anatomy.readers import head_positions, next_norms
from starfish.anatomy.roles import ROTARY, inside_blocks, roles_of, units_of
from starfish.core import Anatomy
from starfish.errors import UserError, listed


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DataParallel, DistributedDataParallel and torch.compile."""
    inner: Any = model
    while True:
        if isinstance(inner, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = inner.module
        elif "_orig_mod" in inner._modules:
            inner = inner._modules["_orig_mod"]
        else:
            found: nn.Module = inner
            return found


def find(model: nn.Module, inputs: Any, *, blocks: str | None = None, channels: bool = False) -> Anatomy:
    """What the model is made of. `inputs` is a batch of two or more; `blocks` is a regex for the modules to align.

    The roles and units do not depend on which blocks are aligned, unless there are no others to be found. With
    `channels` the units of convolutions are looked for too, which takes a run of the model for each of them.
    """
    net = unwrap(model)
    inner = find_blocks(net)
    aligned = inner if blocks is None else matching(net, blocks)
    if not aligned:
        raise UserError(
            f"no blocks were found in `{type(net).__name__}`: it has no row of modules with several weights each",
            "name the modules whose outputs are to be aligned with --blocks REGEX, "
            + f"for instance of {listed([name for name, _ in net.named_modules() if name])}",
        )
    run = look(net, inputs, aligned, inner)
    layers = layers_of(net)
    found = inside_blocks(net, layers, run.widths)
    roles = roles_of(layers, found, run)
    rotary = any(ROTARY.search(f"{name} {type(module).__name__}") for name, module in net.named_modules())
    untrained = [name for name in roles if name not in run.aligned_reach]
    outer = outer_layouts(net, inputs, [layer.path for layer in layers if layer.parameter in untrained])
    units = [unit for block in found for unit in units_of(block, rotary)]
    if channels:
        units += channel_units(net, inputs, run.layouts, roles)
    last = list(run.layouts)[-1]
    return Anatomy(
        blocks=tuple(run.layouts),
        layouts=run.layouts | outer,
        roles=roles,
        units=tuple(units),
        untrained=tuple(untrained),
        tail={layer.parameter: layer.path for layer in layers if layer.parameter in untrained and layer.path in outer},
        next_norms=next_norms(net, inputs, list(run.layouts)),
        head_positions=head_positions(net, inputs, last, run.layouts[last]),
        shifts=shifts(net, inputs),
    )
