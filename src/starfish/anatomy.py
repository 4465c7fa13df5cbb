"""The only file that knows architectures: blocks, prunable weights by role, units that go together.

Nothing is looked up by model name. A *container* (Sequential, ModuleList, ModuleDict) holds others in a row, a
*composite* is any other module with children. Blocks are composites in a row; what is inside them is told by widths, by
layer kinds and, for attention, by what everybody calls these layers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from starfish import activations
from starfish.core import Anatomy, Layout, Part, Unit
from starfish.errors import UserError, listed

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

ROLES = ("qkv", "q", "k", "v", "kv", "out", "mlp_in", "mlp_out", "conv", "depthwise", "head", "other")
SCOPES = {role: {role} for role in ROLES} | {
    "qkv": {"qkv", "q", "k", "v", "kv"},
    "qk": {"q", "k"},
    "mlp": {"mlp_in", "mlp_out"},
    "all": set(ROLES),
}
ALIASES = {
    "dw": "depthwise",
    "fc": "head",
    "conv_fc": "conv+head",
    "conv_only": "conv",
    "fc_only": "head",
    "conv_dw": "conv+depthwise",
}
FUSED_ROWS = {  # of the rows of a fused tensor, which share is what
    "qkv": {"q": (0, 1 / 3), "k": (1 / 3, 2 / 3), "v": (2 / 3, 1), "qk": (0, 2 / 3)},
    "kv": {"k": (0, 1 / 2), "v": (1 / 2, 1), "qk": (0, 1 / 2)},
}


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


def find(model: nn.Module, inputs: Any, *, blocks: str | None = None) -> Anatomy:
    """What the model is made of. `inputs` is a batch of two or more; `blocks` is a regex for the modules to align.

    The roles and units do not depend on which blocks are aligned, unless there are no others to be found.
    """
    net = unwrap(model)
    inner = _find_blocks(net)
    aligned = inner if blocks is None else _matching(net, blocks)
    if not aligned:
        raise UserError(
            f"no blocks were found in `{type(net).__name__}`: it has no row of modules with several weights each",
            "name the modules whose outputs are to be aligned with --blocks REGEX, "
            + f"for instance of {listed([name for name, _ in net.named_modules() if name])}",
        )
    run = _look(net, inputs, aligned, inner)
    layers = _layers(net)
    found = _inside_blocks(net, layers, run.widths)
    roles = _roles(layers, found, run)
    rotary = any(ROTARY.search(f"{name} {type(module).__name__}") for name, module in net.named_modules())
    return Anatomy(
        blocks=tuple(run.layouts),
        layouts=run.layouts,
        roles=roles,
        units=tuple(unit for block in found for unit in _units(block, rotary)),
        untrained=tuple(name for name in roles if name not in run.aligned_reach),
    )


def scope(anatomy: Anatomy, model: nn.Module, name: str) -> dict[str, slice]:
    """Parameter → the rows that may be pruned, for a scope such as `qkv+out+mlp`, `qk`, `conv_fc` or `all`."""
    parameters = dict(unwrap(model).named_parameters())
    chosen: dict[str, slice] = {}
    for part in _parts_of(name):
        rows = _rows(anatomy, parameters, part)
        if not rows:
            has = listed(scope_names(anatomy, unwrap(model)), 20)
            raise UserError(f"scope `{name}`: this model has no weight in `{part}`", f"its scopes are {has}")
        for parameter, add in rows.items():
            chosen[parameter] = _union(parameter, chosen.get(parameter, add), add)
    return {parameter: chosen[parameter] for parameter in anatomy.roles if parameter in chosen}


def scope_names(anatomy: Anatomy, model: nn.Module) -> list[str]:
    """The parts a scope of this model can be joined from."""
    parameters = dict(model.named_parameters())
    return [part for part in SCOPES if _rows(anatomy, parameters, part)]


def default_scope(anatomy: Anatomy) -> str:
    """What is pruned when the user does not say: the weights that a network of this kind consists of."""
    roles = set(anatomy.roles.values())
    if roles & {"qkv", "q"}:
        return "+".join(part for part in ("qkv", "out", "mlp") if roles & SCOPES[part])
    if "mlp_in" in roles:
        return "mlp"
    return "conv_fc" if {"conv", "head"} <= roles else "conv" if "conv" in roles else "all"


# --- scopes


def _parts_of(name: str) -> list[str]:
    written = "+".join(ALIASES.get(part.strip().lower(), part.strip().lower()) for part in re.split("[+,]", name))
    parts = written.split("+")
    unknown = [part for part in parts if part not in SCOPES]
    if unknown:
        raise UserError(
            f"scope `{name}`: there is no part `{unknown[0]}`",
            f"join any of {listed([*SCOPES, *ALIASES], 30)} with `+`",
        )
    return parts


def _rows(anatomy: Anatomy, parameters: Mapping[str, Tensor], part: str) -> dict[str, slice]:
    rows: dict[str, slice] = {}
    for name, role in anatomy.roles.items():
        count = parameters[name].shape[0]
        if role in SCOPES[part]:
            rows[name] = slice(0, count)
        elif part in FUSED_ROWS.get(role, {}):
            first, last = FUSED_ROWS[role][part]
            rows[name] = slice(round(first * count), round(last * count))
    return rows


def _union(parameter: str, one: slice, two: slice) -> slice:
    if max(one.start, two.start) > min(one.stop, two.stop):
        raise UserError(f"the rows of `q` and `v` do not touch in the fused `{parameter}`", "use `qk`, `v` or `qkv`")
    return slice(min(one.start, two.start), max(one.stop, two.stop))


# --- blocks: composites in a row


def _find_blocks(net: nn.Module) -> list[str]:
    """Blocks held in containers; else same-class siblings (block1, block2, …); else even those with one weight."""
    for least, siblings in ((2, False), (2, True), (1, False)):
        found = list(_walk("", net, least, siblings))
        if found:
            return found
    return []


def _walk(name: str, module: nn.Module, least: int, siblings: bool) -> Iterator[str]:
    members = list(_members(name, module))
    row = _is_row(members, least) if _is_container(module) else siblings and _has_siblings(members, least)
    for member, child in members:
        if _is_leaf(child):
            continue
        inner = [] if not _size(child) else list(_walk(member, child, least, siblings))
        covered = sum(_size(child.get_submodule(found[len(member) + 1 :])) for found in inner)
        if row and _may_be_block(child, least, siblings) and 2 * covered <= _size(child):
            yield member
        else:
            yield from inner


def _members(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children, those in containers within a container included."""
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if _is_container(module) and _is_container(child):
            yield from _members(path, child)
        else:
            yield path, child


def _is_row(members: list[tuple[str, nn.Module]], least: int) -> bool:
    """Most of the members that hold weights are composites of several, or two of these hold most of the weights.

    A container of one squeeze-excitation between three convolutions is neither, however heavy.
    """
    weighted = [child for _, child in members if _size(child)]
    composites = [child for child in weighted if not _is_leaf(child) and _count(child) >= least]
    if not composites:
        return False
    heavy = 2 * sum(map(_size, composites)) > sum(map(_size, weighted))
    return 2 * len(composites) > len(weighted) or (len(composites) >= 2 and heavy)


def _has_siblings(members: list[tuple[str, nn.Module]], least: int) -> bool:
    kinds = Counter(type(child) for _, child in members if not _is_container(child) and _count(child) >= least)
    return any(count >= 2 for count in kinds.values())


def _may_be_block(module: nn.Module, least: int, siblings: bool) -> bool:
    """In a row of blocks a single convolution may be one too; among siblings it may be anything."""
    layers = _layers(module)
    one_convolution = not siblings and len(layers) == 1 and bool(layers[0].convolution)
    return not _is_container(module) and (len(layers) >= least or one_convolution)


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))


def _is_leaf(module: nn.Module) -> bool:
    return not _is_container(module) and (isinstance(module, nn.MultiheadAttention) or not any(module.children()))


def _count(module: nn.Module) -> int:
    return len(_layers(module))


def _size(module: nn.Module) -> int:
    return sum(layer.weight.numel() for layer in _layers(module))


def _matching(net: nn.Module, pattern: str) -> list[str]:
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise UserError(f"--blocks `{pattern}` is not a regular expression: {error}") from None
    names = [name for name, _ in net.named_modules() if name]
    found = [name for name in names if regex.fullmatch(name)]
    if not found:
        raise UserError(f"--blocks `{pattern}` matches no module", f"the modules are {listed(names, 12)}")
    return found


# --- one look at the model while it runs


@dataclass(frozen=True)
class _Run:
    layouts: dict[str, Layout]  # of the aligned blocks, in the order in which they run
    widths: dict[str, int]  # channels put out by the blocks that were found, or else by the aligned ones
    classes: int | None
    aligned_reach: set[str]  # parameters on which the aligned outputs depend
    found_reach: set[str]  # … and the outputs of the blocks that were found


def _look(net: nn.Module, inputs: Any, aligned: list[str], found: list[str]) -> _Run:
    try:
        return _run(net, inputs, aligned, found or aligned)
    except UserError:
        if aligned == found:
            raise
        return _run(net, inputs, aligned, aligned)  # the blocks found are useless, perhaps the user's are not


def _run(net: nn.Module, inputs: Any, aligned: list[str], found: list[str]) -> _Run:
    with _evaluating(net), activations.Recorder(net, list(dict.fromkeys([*aligned, *found]))) as recorder:
        with torch.no_grad():
            classes = _classes(net, _first(inputs, 2))
        order = recorder.fired
        two = recorder.take([*aligned, *(name for name in order if name not in aligned)])
        with torch.enable_grad(), _differentiable([layer.weight for layer in _layers(net)]):
            activations.call(net, _first(inputs, 1))
            one = recorder.take(order)
            reach = [_reach(net, [one[name] for name in order if name in group]) for group in (aligned, found)]
    layouts = {name: _layout(name, net.get_submodule(name), one[name].shape, two[name].shape) for name in order}
    widths = {name: one[name].shape[layout.channel] for name, layout in layouts.items() if name in found}
    return _Run({name: layouts[name] for name in order if name in aligned}, widths, classes, *reach)


@contextmanager
def _evaluating(net: nn.Module) -> Iterator[None]:
    training = {module: module.training for module in net.modules()}
    net.eval()
    try:
        yield
    finally:
        for module, flag in training.items():
            module.training = flag


@contextmanager
def _differentiable(weights: list[Tensor]) -> Iterator[None]:
    frozen = [weight for weight in weights if not weight.requires_grad]
    for weight in frozen:
        weight.requires_grad_(True)
    try:
        yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)


def _first(inputs: Any, count: int) -> Any:
    if isinstance(inputs, Mapping):
        return {key: _first(value, count) for key, value in inputs.items()}
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


# --- prunable weights and what they are for


@dataclass(frozen=True)
class _Layer:
    """A prunable weight and the module that it belongs to."""

    parameter: str
    module: nn.Module
    weight: Tensor

    @property
    def path(self) -> str:
        return self.parameter.rpartition(".")[0]

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def rows(self) -> int:
        return self.weight.shape[0]

    @property
    def columns(self) -> int:
        return self.weight.shape[1]

    @property
    def convolution(self) -> str:
        """Its role if it is a convolution, else the empty string."""
        if not isinstance(self.module, (nn.Conv1d, nn.Conv2d)):
            return ""
        return "depthwise" if self.module.groups == self.module.in_channels > 1 else "conv"

    @property
    def bias(self) -> str | None:
        return f"{self.path}.bias" if isinstance(self.module.bias, nn.Parameter) else None


@dataclass(frozen=True)
class _Block:
    """What lies inside one block."""

    name: str
    module: nn.Module
    attentions: dict[str, dict[str, _Layer]]  # path of the module that holds them → q k v qkv → layer
    pairs: list[tuple[_Layer, _Layer]]  # MLP layers: one reads the residual stream, the other writes what it put out
    roles: dict[str, str]


def _layers(module: nn.Module) -> list[_Layer]:
    """Every prunable weight once, in the order of registration."""
    found: dict[Tensor, _Layer] = {}
    for path, child in module.named_modules():
        keys: tuple[str, ...] = ()
        if isinstance(child, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            keys = ("weight",)
        elif isinstance(child, nn.MultiheadAttention):
            keys = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
        for key in keys:
            weight = getattr(child, key)
            if isinstance(weight, nn.Parameter):
                found.setdefault(weight, _Layer(f"{path}.{key}" if path else key, child, weight))
    return list(found.values())


def _inside_blocks(net: nn.Module, layers: list[_Layer], widths: dict[str, int]) -> list[_Block]:
    held: dict[str, list[_Layer]] = {name: [] for name in widths}
    for layer in layers:
        owners = [name for name in widths if layer.parameter.startswith(f"{name}.")]
        if owners:
            held[max(owners, key=len)].append(layer)  # of blocks within blocks, the inner one
    return [_inside(name, net.get_submodule(name), width, held[name]) for name, width in widths.items()]


def _inside(name: str, module: nn.Module, width: int, layers: list[_Layer]) -> _Block:
    attentions = _attentions(layers)
    roles = {layer.parameter: role for parts in attentions.values() for role, layer in parts.items()}
    convolutions = {layer.parameter: layer.convolution for layer in layers if layer.convolution}
    rest = [layer for layer in layers if not layer.convolution and layer.parameter not in roles]
    outs = {layer.parameter: "out" for layer in rest if _is_out(layer, name, attentions)}
    pairs: list[tuple[_Layer, _Layer]] = []
    if attentions or "conv" not in convolutions.values():  # else these are squeeze-excitation
        pairs = _pairs([layer for layer in rest if layer.parameter not in outs], {width, *_inputs(attentions)})
    readers = {reader.parameter: "mlp_in" for reader, _ in pairs}
    writers = {writer.parameter: "mlp_out" for _, writer in pairs}
    other = {layer.parameter: "other" for layer in rest}
    return _Block(name, module, attentions, pairs, other | convolutions | roles | outs | readers | writers)


def _attentions(layers: list[_Layer]) -> dict[str, dict[str, _Layer]]:
    holders: dict[str, dict[str, _Layer]] = {}
    for layer in layers:
        role = _attention_role(layer)
        if role:
            multihead = isinstance(layer.module, nn.MultiheadAttention)
            holders.setdefault(layer.path if multihead else layer.parent, {})[role] = layer
    return {
        path: parts for path, parts in holders.items() if "qkv" in parts or ("q" in parts and {"k", "kv"} & set(parts))
    }


def _attention_role(layer: _Layer) -> str | None:
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


def _is_out(layer: _Layer, block: str, attentions: dict[str, dict[str, _Layer]]) -> bool:
    """It leads from an attention's values back to its input width, and has the usual name or lies in the same part."""
    for path, parts in attentions.items():
        inner = parts["qkv"].rows // 3 if "qkv" in parts else parts.get("v", parts["q"]).rows
        part = path[len(block) + 1 :].partition(".")[0]
        near = bool(part) and layer.path.startswith(f"{block}.{part}.")
        fits = layer.columns == inner and layer.rows in _inputs({path: parts})
        if fits and (near or OUT & set(layer.path.split(".")[-2:])):
            return True
    return False


def _inputs(attentions: dict[str, dict[str, _Layer]]) -> set[int]:
    return {parts[role].columns for parts in attentions.values() for role in ("qkv", "q") if role in parts}


def _pairs(linears: list[_Layer], widths: set[int]) -> list[tuple[_Layer, _Layer]]:
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


def _roles(layers: list[_Layer], blocks: list[_Block], run: _Run) -> dict[str, str]:
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


def _heads(after: list[_Layer], classes: int | None) -> set[str]:
    """Of the layers that no block depends on, those that put out the classes: Linear, or else a 1×1 convolution."""
    writers = [layer for layer in after if layer.rows == classes and layer.weight[0, 0].numel() == 1]
    linears = [layer for layer in writers if isinstance(layer.module, nn.Linear)]
    return {layer.parameter for layer in linears or writers}


# --- units


def _units(block: _Block, rotary: bool) -> Iterator[Unit]:
    for path, parts in block.attentions.items():
        if not rotary and "kv" not in parts:
            yield from _query_key_units(block, path, parts)
    for reader, writer in block.pairs:
        readers = [one for one, two in block.pairs if two is writer]
        if len(readers) == 1 and reader.rows == writer.columns and not _is_coupled(block, reader, writer):
            yield Unit("neuron", block.name, reader.rows, 1, tuple(_neuron_parts(reader, writer)))


def _neuron_parts(reader: _Layer, writer: _Layer) -> Iterator[Part]:
    yield Part(reader.parameter, 0)
    if reader.bias:
        yield Part(reader.bias, 0)
    yield Part(writer.parameter, 1)


def _is_coupled(block: _Block, reader: _Layer, writer: _Layer) -> bool:
    """A norm or a convolution over the neurons lies between: one cannot go without changing the others."""
    home = block.module
    if reader.parent == writer.parent and reader.parent.startswith(f"{block.name}."):
        home = block.module.get_submodule(reader.parent[len(block.name) + 1 :])
    between = [module for module in home.modules() if not isinstance(module, (nn.Linear, nn.MultiheadAttention))]
    return any(reader.rows in own.shape for module in between for own in module.parameters(recurse=False))


def _query_key_units(block: _Block, path: str, parts: dict[str, _Layer]) -> Iterator[Unit]:
    holder = block.module.get_submodule(path[len(block.name) + 1 :]) if path != block.name else block.module
    heads = _head_count(holder)
    rows = parts["qkv"].rows // 3 if "qkv" in parts else parts["q"].rows
    same_width = "qkv" in parts or parts["k"].rows == rows
    if heads and rows % heads == 0 and same_width and _is_plain_product(holder):
        yield Unit("qk", block.name, rows, heads, tuple(_query_key_parts(path, holder, parts, rows)))


def _query_key_parts(path: str, holder: nn.Module, parts: dict[str, _Layer], rows: int) -> Iterator[Part]:
    if "qkv" in parts:
        yield from (Part(parts["qkv"].parameter, 0, start) for start in (0, rows))
    else:
        yield from (Part(parts[role].parameter, 0) for role in "qk")
    if isinstance(holder, nn.MultiheadAttention):
        if holder.in_proj_bias is not None:
            yield from (Part(f"{path}.in_proj_bias", 0, start) for start in (0, rows))
        return
    if "qkv" in parts and parts["qkv"].bias:
        yield from (Part(parts["qkv"].bias, 0, start) for start in (0, rows))
    yield from (Part(parts[role].bias or "", 0) for role in "qk" if role in parts and parts[role].bias)
    own = dict(holder.named_parameters(recurse=False))
    yield from (Part(f"{path}.{name}", 0) for name in ("q_bias", "k_bias") if name in own)


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
