"""Masks: check, write, apply, prove, count. What other tools' files say is read in containers.py."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from starfish import files
from starfish.core import Masks
from starfish.errors import UserError, listed

METADATA = {"starfish-masks": "1"}  # the version; one entry, for safetensors writes several in any order


def check(masks: Masks, model: nn.Module) -> None:
    """Refuse masks which are not bool tensors of the shapes of the model's parameters."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if not masks:
        raise UserError("there are no masks: nothing is pruned", "give a file with zeros in it")
    unknown = [name for name in masks if name not in parameters]
    if unknown:
        raise UserError(f"the model has no parameter {listed(unknown)}", nearest_name(unknown[0], parameters))
    for name, mask in masks.items():
        shape = tuple(parameters[name].shape)
        if tuple(mask.shape) != shape:
            raise UserError(
                f"the mask of `{name}` has shape {tuple(mask.shape)}, the parameter {shape}",
                "masks belong to one architecture and size: is this the model they were made for?",
            )
        if mask.dtype != torch.bool:
            raise UserError(f"the mask of `{name}` is {mask.dtype}, not torch.bool", "pass `mask.bool()`")


def nearest_name(name: str, known: Iterable[str]) -> str:
    """A hint for a name the model does not know."""
    near = difflib.get_close_matches(name, list(known), n=1)
    if near:
        return f"the nearest name in the model is `{near[0]}`; is this the model the file was made for?"
    return "nothing in the model has a similar name; is this the model the file was made for?"


def write(path: Path, masks: Masks) -> None:
    """Save as our own container: bool tensors in a safetensors file."""
    files.write_tensors(path, {name: mask.bool() for name, mask in masks.items()}, METADATA)


def apply_(model: nn.Module, masks: Masks) -> None:
    """Set the pruned entries to zero, whatever they were, nan included."""
    with torch.no_grad():
        for name, mask in masks.items():
            parameter = model.get_parameter(name)
            parameter.masked_fill_(~mask.to(parameter.device), 0)


@torch.no_grad()
def restart_(model: nn.Module, dense: nn.Module, names: Iterable[str], masks: Masks) -> None:
    """Give these tensors the values of another model, with the zeros of their masks."""
    state, values, names = model.state_dict(), dense.state_dict(), set(names)
    for name in names:
        state[name].copy_(values[name])
    apply_(model, {name: masks[name] for name in names & masks.keys()})


def zeros_intact(model: nn.Module, masks: Masks) -> bool:
    """Is every pruned entry exactly zero?"""
    for name, mask in masks.items():
        parameter = model.get_parameter(name).detach()
        if ((parameter != 0) & ~mask.to(parameter.device)).any():
            return False
    return True


def sparsity(masks: Masks) -> float:
    """Pruned entries over all entries of the masked parameters: inside the scope only."""
    total = sum(mask.numel() for mask in masks.values())
    return sum(zeros(mask) for mask in masks.values()) / total if total else 0.0


def zeros(mask: Tensor) -> int:
    """Pruned entries."""
    return mask.numel() - int(mask.count_nonzero())


def digest(masks: Masks) -> str:
    """SHA-256 of names, shapes and bits; the order of the names does not matter."""
    result = hashlib.sha256()
    for name in sorted(masks):
        result.update(f"{name}\0{tuple(masks[name].shape)}\0".encode())
        result.update(np.packbits(masks[name].cpu().numpy()).tobytes())
    return result.hexdigest()
