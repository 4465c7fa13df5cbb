"""Is this machine fit to heal? Each check says what it found and, where something is wrong, what to do."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path


@dataclass(frozen=True)
class Finding:
    """`ok` False: starfish will not work until `hint` is done."""

    name: str
    ok: bool
    found: str
    hint: str = ""


def examine() -> list[Finding]:
    """All checks, none of which raises."""
    checks: list[Callable[[], Finding]] = [_python, _torch, _torchvision, _timm, _transformers, _device, _precision,
                                           _memory, _disk]  # fmt: skip
    return [_guarded(check) for check in checks]


def _guarded(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        return Finding(check.__name__.strip("_"), False, f"{type(error).__name__}: {reason}", "see the checks above")


def _python() -> Finding:
    return Finding("python", sys.version_info >= (3, 11), platform.python_version(), "starfish needs Python 3.11")


def _torch() -> Finding:
    torch = import_module("torch")
    return Finding("torch", True, torch.__version__)


def _torchvision() -> Finding:
    """torchvision is compiled against exactly one torch; another one fails at import or at its first operator."""
    wanted = torch_wanted_by_torchvision()
    version = metadata.version("torchvision")
    torch_version = metadata.version("torch").split("+")[0]
    hint = (
        f"torchvision {version} was built for torch {wanted}: pip install 'torch=={wanted}' 'torchvision=={version}'"
        if wanted and wanted != torch_version
        else "install both together from one index: pip install --force-reinstall torch torchvision"
    )
    try:
        torch, torchvision = import_module("torch"), import_module("torchvision")
        torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except Exception as error:
        return Finding("torchvision", False, f"{version}: {(str(error).splitlines() or ['does not load'])[0]}", hint)
    return Finding("torchvision", not wanted or wanted == torch_version, f"{version}, with torch {torch_version}", hint)


def torch_wanted_by_torchvision() -> str:
    """The version pinned in torchvision's metadata, or an empty string."""
    for requirement in metadata.requires("torchvision") or []:
        found = re.match(r"torch\s*\(?==\s*([\d.]+)", requirement)
        if found:
            return found[1]
    return ""


def _timm() -> Finding:
    return Finding("timm", True, str(import_module("timm").__version__))


def _transformers() -> Finding:
    try:
        return Finding("transformers", True, metadata.version("transformers"))
    except metadata.PackageNotFoundError:
        return Finding(
            "transformers", True, "not installed; only `hf/` models need it: pip install 'starfish-heal[hf]'"
        )


def _device() -> Finding:
    from starfish.devices import choose_device

    torch = import_module("torch")
    return Finding("device", True, f"{choose_device()}, {torch.get_num_threads()} threads")


def _precision() -> Finding:
    from starfish.devices import choose_device, choose_precision

    torch = import_module("torch")
    return Finding(
        "precision", True, f"{choose_precision('auto', choose_device(), [torch.ones(1, 1)])} for transformers"
    )


def _memory() -> Finding:
    from starfish.data import free_memory

    gigabytes = free_memory() / 2**30
    return Finding("memory", gigabytes > 1, f"{gigabytes:.1f} GiB free", "close other programs: 1 GiB is too little")


def _disk() -> Finding:
    gigabytes = shutil.disk_usage(Path.cwd()).free / 2**30
    writable = os.access(Path.cwd(), os.W_OK)
    found = f"{gigabytes:.1f} GiB free here" + ("" if writable else ", not writable")
    return Finding("disk", writable and gigabytes > 0.5, found, "work in a folder with room that you may write to")
