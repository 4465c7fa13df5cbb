"""Bytes on disk: files appear whole or not at all, and nothing a user hands us is executed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from starfish.errors import UserError


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, flush it to the disk, then rename it into place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.touch()
        mode = beside.stat().st_mode  # as the user's umask has it; safetensors would make it private
        write(beside)
        beside.chmod(mode)
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"`{path}` cannot be written: {error}", "is there room, and may you write there?") from error
    finally:
        with contextlib.suppress(OSError):  # there is no such folder
            beside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no file `{path}`") from None
    except (OSError, ValueError) as error:
        raise UserError(f"`{path}` is not readable JSON: {error}") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Save as safetensors; tensors that share memory are written once each under every name."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_whole(path, lambda beside: save_file(plain, beside, metadata=dict(metadata or {"format": "pt"})))


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file."""
    if not path.is_file():
        raise UserError(f"there is no file `{path}`")
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"`{path}` is not a whole safetensors file ({error})", "copy or download it again; it may be truncated"
        ) from None


def read_object(path: Path, *, allow_pickle: bool = False) -> Any:
    """What a .safetensors, .pt or .pth file holds; without `allow_pickle` only tensors and plain containers."""
    if path.suffix == ".safetensors":
        return read_safetensors(path)[0]
    if not path.is_file():
        raise UserError(f"there is no file `{path}`")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # we say what is wrong with the file
            return torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        if not (zipfile.is_zipfile(path) or _starts_like_pickle(path)):
            raise _unreadable(path, error) from None
        raise UserError(
            f"`{path}` holds pickled Python objects, which run code when they are read",
            "if you trust where it comes from, pass --allow-pickle; better, save its state dict as safetensors",
        ) from None
    except Exception as error:  # a file of another kind makes an unpickler stumble in any way
        raise _unreadable(path, error) from error


def _starts_like_pickle(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(1) == b"\x80"


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return UserError(
        f"`{path}` cannot be read as tensors ({reason})",
        "starfish reads .safetensors and .pt / .pth files; this one may be truncated or of another kind",
    )
