"""Masks and pruned weights from whatever tool made them. `MaskFile.container` is one of:

starfish              our own safetensors, known by its metadata
mask dict             `{parameter: 0/1}` of any dtype; the names may end as masks' do (SparseML: `.sparsity_mask`)
torch.nn.utils.prune  `X_orig` with `X_mask`
mask buffers          weights and masks: `X` with `X_mask` or `_X_mask` (ModelOpt), `weight` with `_mask` (fasterai)
nested masks          `{module: {"weight": mask, "bias": mask}}` (NNI)
torch.ao.pruning      parametrizations saved with their masks, or the state dict of the sparsifier
plain zeros           a state dict; pruned is what is zero there and not in the dense model
smaller model         a state dict of which some tensors are smaller than the dense model's: what went is gone already
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from starfish import files
from starfish.core import Masks
from starfish.errors import UserError, listed
from starfish.masks import METADATA, check, nearest_name, zeros

WEIGHTS_UNDER = ("state_dict", "model_state_dict", "model", "params", "state_dict_ema", "model_ema")
MASKS_UNDER = ("masks", "mask")
PREFIXES = ("module.", "_orig_mod.", "model.")


@dataclass(frozen=True)
class MaskFile:
    """What a file said. `weights` is the state dict to start from, zeros in place, where the container holds one."""

    container: str
    masks: Masks
    weights: dict[str, Tensor] | None
    notes: list[str]


def read(path: Path, dense: nn.Module | None, *, allow_pickle: bool = False, dense_weights: bool = True) -> MaskFile:
    """Read masks from any container, in the order of `dense`'s parameters, or refuse by name what does not fit it.

    Without `dense_weights` only the architecture of `dense` is to be compared with.
    """
    file = _renamed(_recognise(path, dense, allow_pickle), dense)
    if dense is not None and file.weights is not None:
        smaller = smaller_tensors(file.weights, dense)
        if smaller and not file.masks:
            return _smaller(path, file, smaller, dense)
        check_weights(path, file.weights, dense)
    if file.container == "plain zeros":
        if dense is None:
            raise UserError(
                f"`{path}` is a plain state dict, and only beside the dense model can its pruned weights be told",
                "name the dense model with --model",
            )
        assert file.weights is not None
        file = replace(file, masks=_masks_of_zeros(file.weights, dense))
    masks = _without_idle_biases({name: _as_bool(name, mask) for name, mask in file.masks.items()}, file.notes)
    if all(bool(mask.all()) for mask in masks.values()):
        raise UserError(
            f"nothing is pruned in `{path}`: no mask in it has a zero ({file.container})",
            "is it the file of before pruning, or does the dense model given have the same zeros?",
        )
    if dense is not None:
        check(masks, dense)
        masks = {name: masks[name] for name, _ in dense.named_parameters(remove_duplicate=False) if name in masks}
    weights = None if file.weights is None else _masked(masks, file.weights)
    notes = file.notes + _notes(replace(file, masks=masks), dense if dense_weights else None)
    return MaskFile(file.container, masks, weights, notes)


def _recognise(path: Path, dense: nn.Module | None, allow_pickle: bool) -> MaskFile:
    """Sort the file's entries into masks and weights, neither yet checked nor renamed."""
    metadata: dict[str, str] = {}
    if path.suffix == ".safetensors":
        found, metadata = files.read_safetensors(path)
    else:
        found = files.read_object(path, allow_pickle=allow_pickle)
    notes: list[str] = []
    entries, weights_beside = _unwrapped(found, notes)
    tensors = _tensors(entries)
    nested = {name: inner for name, inner in entries.items() if isinstance(inner, Mapping) and _tensors(inner)}
    if not tensors and not nested:
        kind = type(found).__name__
        raise UserError(f"`{path}` holds no masks: it is a {kind} without a tensor in it", "is it the right file?")
    if "starfish-masks" in metadata:
        file = _own(path, tensors, metadata)
    elif tensors:
        file = _recognise_flat(path, tensors, dense, masks_only=weights_beside is not None)
    else:
        file = _recognise_nested(path, nested)
    return replace(file, weights=_tensors(weights_beside) if weights_beside else file.weights, notes=notes)


def _own(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> MaskFile:
    version = metadata["starfish-masks"]
    if version != METADATA["starfish-masks"]:
        reads = f"this starfish reads version {METADATA['starfish-masks']}"
        raise UserError(f"`{path}` is a starfish mask file of version {version}; {reads}", "update starfish")
    return MaskFile("starfish", tensors, None, [])


def _unwrapped(found: Any, notes: list[str]) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """The innermost entries; and apart the weights of a checkpoint which has masks and weights under two keys."""
    if isinstance(found, nn.Module):
        return dict(found.state_dict()), None
    if not isinstance(found, Mapping):
        return {}, None
    if {"state", "groups"} <= found.keys() and isinstance(found["state"], Mapping):  # a torch.ao.pruning sparsifier
        return dict(found["state"]), None
    masks = [key for key in MASKS_UNDER if isinstance(found.get(key), Mapping)]
    weights = [key for key in WEIGHTS_UNDER if isinstance(found.get(key), Mapping | nn.Module)]
    if len(weights) > 1:
        others = listed(weights[1:])
        notes.append(f"the file holds weights under several keys: `{weights[0]}` was read, {others} was not")
    if masks and weights:
        return _unwrapped(found[masks[0]], notes)[0], _unwrapped(found[weights[0]], notes)[0]
    if masks or weights:
        return _unwrapped(found[(masks + weights)[0]], notes)
    return dict(found), None


def _tensors(entries: Mapping[str, Any]) -> dict[str, Tensor]:
    found = {name: value.detach().cpu() for name, value in entries.items() if isinstance(value, Tensor)}
    return {name: value if value.layout == torch.strided else value.to_dense() for name, value in found.items()}


def _recognise_nested(path: Path, nested: dict[str, Mapping[str, Any]]) -> MaskFile:
    inner_names = {inner for module in nested.values() for inner in _tensors(module)}
    if any("." in inner for inner in inner_names):
        raise UserError(
            f"`{path}` holds tensors under {listed(list(nested))}, where starfish does not look",
            f"save that entry alone, or under one of {listed([*WEIGHTS_UNDER, *MASKS_UNDER], 9)}",
        )
    if inner_names == {"mask"}:
        return MaskFile("torch.ao.pruning", {name: inner["mask"] for name, inner in nested.items()}, None, [])
    masks = {f"{name}.{leaf}": mask for name, module in nested.items() for leaf, mask in _tensors(module).items()}
    return MaskFile("nested masks", masks, None, [])


def _recognise_flat(path: Path, tensors: dict[str, Tensor], dense: nn.Module | None, *, masks_only: bool) -> MaskFile:
    if any(PARAMETRIZED.fullmatch(name) for name in tensors):
        return _recognise_parametrized(path, tensors)
    originals = {name: name[:-5] for name in tensors if name.endswith("_orig") and f"{name[:-5]}_mask" in tensors}
    if originals:
        masks = {name: tensors[f"{name}_mask"] for name in originals.values()}
        taken = {f"{name}_mask" for name in masks}
        weights = {originals.get(name, name): value for name, value in tensors.items() if name not in taken}
        return MaskFile("torch.nn.utils.prune", masks, weights, [])
    own = frozenset[str]() if dense is None else frozenset(dense.state_dict())
    owners = {name: owner for name in tensors if (owner := _owner(name)) and _match(name, own) not in own}
    beside = {name: owner for name, owner in owners.items() if owner in tensors}
    if beside:
        masks = {owner: _spread(tensors[name], tensors[owner]) for name, owner in beside.items()}
        taken = {*beside, *(name for name in tensors if name.rpartition(".")[2] in FASTERAI_COPIES)}
        weights = {name: value for name, value in tensors.items() if name not in taken}
        return MaskFile("mask buffers", masks, weights, [])
    if len(owners) == len(tensors):
        return MaskFile("mask dict", {owners[name]: mask for name, mask in tensors.items()}, None, [])
    if not masks_only and _is_state_dict(path, tensors, dense):
        return MaskFile("plain zeros", {}, tensors, [])
    return MaskFile("mask dict", tensors, None, [])


PARAMETRIZED = re.compile(r"(.*?)parametrizations\.(\w+)\.(original|\d+\.mask)")
FASTERAI_COPIES = ("_init_weights", "_init_biases")  # its Sparsifier keeps the weights of the start as buffers


def _recognise_parametrized(path: Path, tensors: dict[str, Tensor]) -> MaskFile:
    masks: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if match := PARAMETRIZED.fullmatch(name):
            (weights if match[3] == "original" else masks)[match[1] + match[2]] = value
        else:
            weights[name] = value
    if not masks:
        name = next(name for name in tensors if PARAMETRIZED.fullmatch(name))
        raise UserError(
            f"`{path}` holds `{name}`, unmasked: torch.ao.pruning keeps the masks in the sparsifier, not in the model",
            "call `sparsifier.squash_mask()` and save the model again",
        )
    return MaskFile("torch.ao.pruning", masks, weights, [])


def _owner(name: str) -> str | None:
    """The parameter that a mask of this name belongs to, None where the name is not that of a mask."""
    module, _, leaf = f".{name}".rpartition(".")
    if leaf == "sparsity_mask":
        return module[1:]
    if leaf in ("mask", "_mask"):
        return f"{module}.weight"[1:]
    if leaf.endswith("_mask"):
        return f"{module}.{leaf.removesuffix('_mask').removeprefix('_')}"[1:]
    return None


def _spread(mask: Tensor, weight: Tensor) -> Tensor:
    """A mask of whole filters (o, 1, 1, 1), as fasterai keeps it, at the size of its weight."""
    fits = mask.ndim == weight.ndim and all(m in (1, w) for m, w in zip(mask.shape, weight.shape, strict=True))
    return mask.expand(weight.shape) if fits else mask


def _is_state_dict(path: Path, tensors: dict[str, Tensor], dense: nn.Module | None) -> bool:
    """Weights or masks? Where this cannot be told, refuse; a mask with a few bad values is still a mask."""
    loose = {name: value for name, value in tensors.items() if value.is_floating_point() and bool(_bad(value).any())}
    filled = [value for value in tensors.values() if bool(value.any())]
    judged = [value for value in filled if value.ndim > 1] or filled
    mask_like = sum(int((value == 1).count_nonzero()) * 2 > int(value.count_nonzero()) for value in judged)
    if not loose or mask_like * 2 > len(judged):
        return False
    if any(value.ndim == 1 for value in loose.values()) or _covers(tensors, dense):
        return True
    name, value = next(iter(loose.items()))
    raise UserError(
        f"`{path}` is neither a mask file nor a whole state dict: {len(loose)} of {len(tensors)} tensors hold values"
        f" other than 0 and 1, as {_some_bad(value)} in `{name}`, and most parameters of a model are not there",
        "save masks as 0 and 1, or the whole state dict; name the dense model with --model",
    )


def _covers(tensors: Mapping[str, Tensor], dense: nn.Module | None) -> bool:
    names = frozenset() if dense is None else frozenset(name for name, _ in dense.named_parameters())
    return sum(_match(name, names) in names for name in tensors) * 2 > len(names) > 0


def _bad(value: Tensor) -> Tensor:
    return (value != 0) & (value != 1)


def _some_bad(value: Tensor) -> str:
    return f"{value[_bad(value)][0].item():.6g}"


def _renamed(file: MaskFile, dense: nn.Module | None) -> MaskFile:
    """Without the prefixes of wrappers: as the dense model needs it, or else as far as all names share them."""
    names = [*file.masks, *(file.weights or {})]
    if dense is None:
        shared = _shared_prefix(names)
        new = {name: name.removeprefix(shared) for name in names}
    else:
        known = frozenset(dense.state_dict()) | {name for name, _ in dense.named_parameters(remove_duplicate=False)}
        new = {name: _match(name, known) for name in names}
    return replace(
        file,
        masks=_rename(file.masks, new),
        weights=None if file.weights is None else _rename(file.weights, new),
    )


def _shared_prefix(names: list[str]) -> str:
    for prefix in PREFIXES:
        if names and all(name.startswith(prefix) for name in names):
            return prefix + _shared_prefix([name.removeprefix(prefix) for name in names])
    return ""


def _match(name: str, known: frozenset[str]) -> str:
    """The name with as few prefixes taken off as make it known; unchanged where none do."""
    short = name
    while short not in known:
        prefix = next((prefix for prefix in PREFIXES if short.startswith(prefix)), None)
        if prefix is None:
            return name
        short = short.removeprefix(prefix)
    return short


def _rename(tensors: dict[str, Tensor], new: dict[str, str]) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if new[name] in renamed:
            message = f"the file holds `{new[name]}` twice, once as `{name}`"
            raise UserError(message, "save it with one prefix or none, not both")
        renamed[new[name]] = value
    return renamed


def check_weights(path: Path, weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Refuse, by name, a state dict that is not wholly the model's."""
    expected = model.state_dict()
    unexpected = [name for name in weights if name not in expected]
    if unexpected:
        raise UserError(
            f"`{path}` holds {listed(unexpected)}, unknown to the model", nearest_name(unexpected[0], expected)
        )
    optional = "num_batches_tracked"  # which old files lack and torch fills in
    missing = [name for name in expected if name not in weights and not name.endswith(optional)]
    if missing:
        raise UserError(f"`{path}` lacks {listed(missing)} of the model", "save the whole state dict")
    for name, value in weights.items():
        if value.shape != expected[name].shape:
            raise _wrong_size(path, name, value, expected[name])


def _wrong_size(path: Path, name: str, value: Tensor, expected: Tensor) -> UserError:
    found = f"`{name}` in `{path}` has shape {tuple(value.shape)}, in the model {tuple(expected.shape)}"
    return UserError(found, "is this the architecture the file was saved from?")


def smaller_tensors(weights: Mapping[str, Tensor], dense: nn.Module) -> list[str]:
    """Those that are smaller than the dense model's in some dimension; none where one does not fit into it."""
    expected = dense.state_dict()
    pairs = {name: (value.shape, expected[name].shape) for name, value in weights.items() if name in expected}
    fit = all(len(one) == len(two) and all(map(int.__le__, one, two)) for one, two in pairs.values())
    return [name for name, (one, two) in pairs.items() if one != two] if fit else []


def _smaller(path: Path, file: MaskFile, smaller: list[str], dense: nn.Module) -> MaskFile:
    """What went is gone already, so the masks keep all that is left of the weights that became smaller."""
    assert file.weights is not None
    same = {name: value for name, value in dense.state_dict().items() if name in smaller}
    check_weights(path, file.weights | same, dense)  # names; these sizes may differ
    masks = {
        name: torch.ones(file.weights[name].shape, dtype=torch.bool) for name in _prunable(dense) if name in smaller
    }
    notes = [
        *file.notes,
        f"{len(smaller)} tensors are smaller than the dense model's: it is healed in the shape it has",
    ]
    return MaskFile("smaller model", masks, _masked({}, file.weights), notes)


def _masks_of_zeros(weights: Mapping[str, Tensor], dense: nn.Module) -> Masks:
    masks = {}
    for name in _prunable(dense):
        mask = (weights[name] != 0) | (dense.get_parameter(name).detach().cpu() == 0)
        if not mask.all():
            masks[name] = mask
    return masks


def _prunable(model: nn.Module) -> list[str]:
    """Weights of linear, convolution and attention modules: zeros anywhere else are no pruning."""
    owners = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention)
    return [
        f"{module_name}.{name}".removeprefix(".")
        for module_name, module in model.named_modules()
        if isinstance(module, owners)
        for name, _ in module.named_parameters(recurse=False)
        if name.endswith("weight")
    ]


def _as_bool(name: str, mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool and bool(_bad(mask).any()):
        raise UserError(
            f"the mask of `{name}` holds {_some_bad(mask)}; a mask is 0 where it prunes and 1 where it keeps",
            "save it as `mask.bool()`, or `scores > threshold` if these are scores",
        )
    return (mask != 0).contiguous()


def _without_idle_biases(masks: Masks, notes: list[str]) -> Masks:
    idle = [name for name, mask in masks.items() if mask.ndim < 2 and bool(mask.all())]
    if idle:
        notes.append(f"masks of biases that prune nothing were left out: {listed(idle)}")
    return {name: mask for name, mask in masks.items() if name not in idle}


def _masked(masks: Masks, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict with zeros where the masks say; not a number is refused where it would stay."""
    result = dict(weights)
    for name, mask in masks.items():
        if name in weights:
            if weights[name].shape != mask.shape:
                sizes = f"{tuple(mask.shape)}, its weight {tuple(weights[name].shape)}"
                raise UserError(f"the mask of `{name}` has shape {sizes}", "a mask has the shape of its weight")
            result[name] = weights[name].masked_fill(~mask, 0)
    broken = [name for name, value in result.items() if value.is_floating_point() and bool(value.isnan().any())]
    if broken:
        raise UserError(f"weights are nan in {listed(broken)}", "the training diverged; use an earlier checkpoint")
    return result


def _notes(file: MaskFile, dense: nn.Module | None) -> list[str]:
    """What a careful reader would want to be told of the file."""
    notes = []
    if whole := [name for name, mask in file.masks.items() if not mask.any()]:
        notes.append(f"every weight is pruned in {listed(whole)}")
    few = [name for name, mask in file.masks.items() if zeros(mask) < 0.01 * mask.numel()]
    if few and file.container == "plain zeros":
        notes.append(f"under 1 % of the weights are zero in {listed(few)}; by accident, not by pruning?")
    if file.weights is None:
        return notes
    pairs = [(mask, file.weights[name]) for name, mask in file.masks.items() if name in file.weights]
    if stored := sum(int((weight.bool() & ~mask).count_nonzero()) for mask, weight in pairs):
        notes.append(f"the file stores {stored} values where its masks prune; they were set to zero")
    if idle := sum(int(((weight == 0) & mask).count_nonzero()) for mask, weight in pairs):
        notes.append(f"{idle} weights are zero where the masks keep them")
    reference = {} if dense is None else dense.state_dict()
    shared = [name for name in reference if name in file.weights and name not in file.masks]
    changed = [name for name in shared if _differ(file.weights[name], reference[name])]
    if changed:
        notes.append(f"{len(changed)} tensors without a mask differ from the dense model's: {listed(changed)}")
    return notes


def _differ(value: Tensor, reference: Tensor) -> bool:
    return not torch.equal(value, reference.cpu().to(value.dtype))  # a file in half precision is no change


def weights_of(held: Any, model: nn.Module) -> dict[str, Tensor]:
    """The state dict in a checkpoint, unwrapped and without the prefixes the model does not need; not checked."""
    entries, weights_beside = _unwrapped(held, [])
    tensors = _tensors(weights_beside or entries)
    known = frozenset(model.state_dict())
    return _rename(tensors, {name: _match(name, known) for name in tensors})
