"""What each prunable weight is for, and which rows and columns go together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from starfish.anatomy.attention import is_narrow, value_width
from starfish.anatomy.layers import Layer
from starfish.anatomy.look import Run
from starfish.core import Part, Unit

FUSED = {"qkv", "to_qkv", "Wqkv", "in_proj", "qkv_proj", "c_attn"}
QUERY = {"q", "query", "q_proj", "to_q", "q_lin", "wq", "query_proj"}
KEY = {"k", "key", "k_proj", "to_k", "k_lin", "wk", "key_proj"}
KEY_VALUE = {"kv", "kv_proj", "to_kv"}
VALUE = {"v", "value", "v_proj", "to_v", "v_lin", "wv", "value_proj"}
OUT = {"proj", "out_proj", "o_proj", "to_out", "out", "c_proj", "out_lin", "wo", "proj_out", "merge", "projection"}
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
NORM_OF_QK = re.compile(r"(q|k|qk|query|key)_(norm|ln|layernorm)|(norm|ln|layernorm)_?(q|k|qk|query|key)")
NOT_A_PLAIN_PRODUCT = re.compile(r"logit_scale|temperature|rel_pos_.*|rel_height|rel_width|bias_k")
OVER_CHANNELS = re.compile(r"channel|xca|crosscovariance", re.IGNORECASE)
ROTARY = re.compile(r"rope|rotary", re.IGNORECASE)


@dataclass(frozen=True)
class Inside:
    """What lies inside one block."""

    name: str
    module: nn.Module
    attentions: dict[str, dict[str, Layer]]  # path of the module that holds them → q k v qkv → layer
    pairs: list[tuple[Layer, Layer]]  # MLP layers: one reads the residual stream, the other writes what it put out
    roles: dict[str, str]


def inside_blocks(net: nn.Module, layers: list[Layer], widths: dict[str, int]) -> list[Inside]:
    held: dict[str, list[Layer]] = {name: [] for name in widths}
    for layer in layers:
        owners = [name for name in widths if layer.parameter.startswith(f"{name}.")]
        if owners:
            held[max(owners, key=len)].append(layer)  # of blocks within blocks, the inner one
    return [_inside(name, net.get_submodule(name), width, held[name]) for name, width in widths.items()]


def _inside(name: str, module: nn.Module, width: int, layers: list[Layer]) -> Inside:
    attentions = _attentions(layers)
    roles = {layer.parameter: role for parts in attentions.values() for role, layer in parts.items()}
    convolutions = {layer.parameter: layer.convolution for layer in layers if layer.convolution}
    rest = [layer for layer in layers if not layer.convolution and layer.parameter not in roles]
    values = {path: _values(module.get_submodule(path[len(name) + 1 :]), parts) for path, parts in attentions.items()}
    outs = {layer.parameter: "out" for layer in rest if _is_out(layer, name, attentions, values)}
    pairs: list[tuple[Layer, Layer]] = []
    if attentions or "conv" not in convolutions.values():  # else these are squeeze-excitation
        pairs = _pairs([layer for layer in rest if layer.parameter not in outs], {width, *_inputs(attentions)})
    readers = {reader.parameter: "mlp_in" for reader, _ in pairs}
    writers = {writer.parameter: "mlp_out" for _, writer in pairs}
    other = {layer.parameter: "other" for layer in rest}
    return Inside(name, module, attentions, pairs, other | convolutions | roles | outs | readers | writers)


def _attentions(layers: list[Layer]) -> dict[str, dict[str, Layer]]:
    holders: dict[str, dict[str, Layer]] = {}
    for layer in layers:
        role = _attention_role(layer)
        if role:
            multihead = isinstance(layer.module, nn.MultiheadAttention)
            holders.setdefault(layer.path if multihead else layer.parent, {})[role] = layer
    return {
        path: parts for path, parts in holders.items() if "qkv" in parts or ("q" in parts and {"k", "kv"} & set(parts))
    }


def _attention_role(layer: Layer) -> str | None:
    key = layer.parameter.rpartition(".")[2]
    if isinstance(layer.module, nn.MultiheadAttention):
        return "qkv" if key == "in_proj_weight" else key[0]
    name = layer.path.rpartition(".")[2]
    if not isinstance(layer.module, nn.Linear):
        return None
    if name in FUSED and layer.rows % 3 == 0 and (layer.rows == 3 * layer.columns or "qkv" in name):
        return "qkv"
    return next(
        (role for role, names in (("q", QUERY), ("k", KEY), ("v", VALUE), ("kv", KEY_VALUE)) if name in names), None
    )


def _values(holder: nn.Module, parts: dict[str, Layer]) -> int:
    """The width of an attention's values, which queries and keys share unless they were cut."""
    if "qkv" not in parts:
        return parts.get("v", parts["q"]).rows
    return value_width(holder) if is_narrow(holder) else parts["qkv"].rows // 3


def _is_out(layer: Layer, block: str, attentions: dict[str, dict[str, Layer]], values: dict[str, int]) -> bool:
    """It leads from an attention's values back to its input width, and has the usual name or lies in the same part."""
    for path, parts in attentions.items():
        inner = values[path]
        part = path[len(block) + 1 :].partition(".")[0]
        near = bool(part) and layer.path.startswith(f"{block}.{part}.")
        fits = layer.columns == inner and layer.rows in _inputs({path: parts})
        if fits and (near or OUT & set(layer.path.split(".")[-2:])):
            return True
    return False


def _inputs(attentions: dict[str, dict[str, Layer]]) -> set[int]:
    return {parts[role].columns for parts in attentions.values() for role in ("qkv", "q") if role in parts}


def _pairs(linears: list[Layer], widths: set[int]) -> list[tuple[Layer, Layer]]:
    """(reads the residual width, writes it) of the same MLP; a gated one has two readers, or one of double height."""
    pairs = [
        (reader, writer)
        for index, reader in enumerate(linears)
        for writer in linears[index + 1 :]
        if reader.columns == writer.rows
        and writer.rows in widths
        and reader.rows in (writer.columns, 2 * writer.columns)
    ]
    housed = {writer.parameter for reader, writer in pairs if reader.parent == writer.parent}
    return [pair for pair in pairs if pair[0].parent == pair[1].parent or pair[1].parameter not in housed]


def roles_of(layers: list[Layer], blocks: list[Inside], run: Run) -> dict[str, str]:
    inside = {name: role for block in blocks for name, role in block.roles.items()}
    has_attention = any(block.attentions for block in blocks)
    after = [layer for layer in layers if layer.parameter not in inside and layer.parameter not in run.found_reach]
    heads = _heads(after, run.classes)
    roles: dict[str, str] = {}
    for layer in layers:
        name = layer.parameter
        if name in inside:
            roles[name] = inside[name]
        elif name in heads:
            roles[name] = "head"
        elif not (layer.convolution and has_attention):  # else it is a patch embedding
            roles[name] = layer.convolution or "other"
    return roles


def _heads(after: list[Layer], classes: int | None) -> set[str]:
    """Of the layers that no block depends on, those that put out the classes: Linear, or else a 1×1 convolution."""
    writers = [layer for layer in after if layer.rows == classes and layer.weight[0, 0].numel() == 1]
    linears = [layer for layer in writers if isinstance(layer.module, nn.Linear)]
    return {layer.parameter for layer in linears or writers}


def units_of(block: Inside, rotary: bool) -> Iterator[Unit]:
    for path, parts in block.attentions.items():
        if not rotary and "kv" not in parts:
            yield from _query_key_units(block, path, parts)
    for reader, writer in block.pairs:
        readers = [one for one, two in block.pairs if two is writer]
        if len(readers) == 1 and reader.rows == writer.columns and not _is_coupled(block, reader, writer):
            yield Unit("neuron", block.name, reader.rows, 1, tuple(_neuron_parts(reader, writer)))


def _neuron_parts(reader: Layer, writer: Layer) -> Iterator[Part]:
    yield Part(reader.parameter, 0)
    if reader.bias:
        yield Part(reader.bias, 0)
    yield Part(writer.parameter, 1)


def _is_coupled(block: Inside, reader: Layer, writer: Layer) -> bool:
    """A norm or a convolution over the neurons lies between: one cannot go without changing the others."""
    home = block.module
    if reader.parent == writer.parent and reader.parent.startswith(f"{block.name}."):
        home = block.module.get_submodule(reader.parent[len(block.name) + 1 :])
    between = [module for module in home.modules() if not isinstance(module, (nn.Linear, nn.MultiheadAttention))]
    return any(reader.rows in own.shape for module in between for own in module.parameters(recurse=False))


def _query_key_units(block: Inside, path: str, parts: dict[str, Layer]) -> Iterator[Unit]:
    holder = block.module.get_submodule(path[len(block.name) + 1 :]) if path != block.name else block.module
    heads = _head_count(holder)
    rows = (parts["qkv"].rows - _values(holder, parts)) // 2 if "qkv" in parts else parts["q"].rows
    same_width = "qkv" in parts or parts["k"].rows == rows
    if heads and rows % heads == 0 and same_width and _is_plain_product(holder):
        yield Unit("qk", block.name, rows, heads, tuple(_query_key_parts(path, holder, parts, rows)), holder=path)


def _query_key_parts(path: str, holder: nn.Module, parts: dict[str, Layer], rows: int) -> Iterator[Part]:
    if "qkv" in parts:
        names = [parts["qkv"].parameter, _fused_bias(path, holder, parts["qkv"])]
        yield from (Part(name, 0, start, side) for name in names if name for start, side in ((0, "q"), (rows, "k")))
    else:
        yield from (Part(parts[side].parameter, 0, side=side) for side in "qk")
        yield from (Part(parts[side].bias or "", 0, side=side) for side in "qk" if parts[side].bias)
    own = dict(holder.named_parameters(recurse=False))
    yield from (Part(f"{path}.{side}_bias", 0, side=side) for side in "qk" if f"{side}_bias" in own)


def _fused_bias(path: str, holder: nn.Module, layer: Layer) -> str | None:
    if isinstance(holder, nn.MultiheadAttention):
        return f"{path}.in_proj_bias" if holder.in_proj_bias is not None else None
    return layer.bias


def _head_count(holder: nn.Module) -> int | None:
    """The number of heads, under the names in use, from the module or from its transformers config."""
    for source in (holder, getattr(holder, "config", None)):
        for name in HEADS:
            count = getattr(source, name, None)
            if isinstance(count, int):
                return count
    return None


def _is_plain_product(holder: nn.Module) -> bool:
    """Whether a logit is the bare product q·k of two tokens, plus what depends on neither: so dimensions go singly."""
    children = {name: child for name, child in holder.named_children() if not isinstance(child, nn.Identity)}
    own = [name.rpartition(".")[2] for name, _ in holder.named_parameters()]
    zero_key = isinstance(holder, nn.MultiheadAttention) and holder.add_zero_attn
    return not (
        zero_key
        or OVER_CHANNELS.search(type(holder).__name__)
        or any(NORM_OF_QK.fullmatch(name) for name in children)
        or any(NOT_A_PLAIN_PRODUCT.fullmatch(name) for name in own)
    )
