"""The doctor finds this machine fit, names what is not, and never falls ill itself."""

from __future__ import annotations

import builtins
import shutil
from importlib import metadata
from typing import Any

import pytest
import torch
import torchvision

from starfish import doctor
from starfish.doctor import Finding, examine

NAMES = ["python", "torch", "torchvision", "timm", "transformers", "device", "precision", "memory", "disk"]


def found(name: str) -> Finding:
    return next(finding for finding in examine() if finding.name == name)


def test_this_machine_is_fit() -> None:
    findings = examine()
    assert [finding.name for finding in findings] == NAMES
    assert [finding for finding in findings if not finding.ok] == []
    assert all(finding.found for finding in findings)
    assert findings[1].found == torch.__version__


@pytest.mark.parametrize("form", ["torch=={}", "torch (=={})", "torch == {} ; python_version > '3'"])
def test_torchvision_for_another_torch_is_found_with_what_to_install(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "requires", lambda package: ["numpy", "torchaudio==1.0", form.format("1.2.3")])
    finding = found("torchvision")
    assert not finding.ok
    assert "pip install 'torch==1.2.3'" in finding.hint
    assert f"'torchvision=={metadata.version('torchvision')}'" in finding.hint


def test_the_local_part_of_a_version_is_no_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6.0+cpu is the torch 2.6.0 that torchvision asks for."""
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "2.6.0+cpu" if name == "torch" else version(name))
    monkeypatch.setattr(metadata, "requires", lambda package: ["torch==2.6.0"])
    assert found("torchvision").ok


@pytest.mark.parametrize("requirements", [None, [], ["numpy"], ["torch>=2"]])
def test_torchvision_that_pins_nothing_is_asked_to_run(requirements: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda package: requirements)
    assert found("torchvision").ok

    def fail(*_: object) -> None:
        raise RuntimeError("operator torchvision::nms does not exist\nmore")

    monkeypatch.setattr(torchvision.ops, "nms", fail)
    finding = found("torchvision")
    assert not finding.ok
    assert finding.found.endswith("operator torchvision::nms does not exist")
    assert "install both together" in finding.hint


@pytest.mark.parametrize("missing", ["torch", "torchvision", "timm"])
def test_a_package_that_does_not_import_is_a_finding(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.import_module

    def import_module(name: str) -> Any:
        if name == missing:
            raise ImportError(f"lib{missing}.so: cannot open shared object file")
        return real(name)

    monkeypatch.setattr(doctor, "import_module", import_module)
    finding = found(missing)
    assert not finding.ok
    assert f"lib{missing}.so" in finding.found


def test_transformers_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version

    def without(name: str) -> str:
        if name == "transformers":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without)
    assert found("transformers").ok
    assert "starfish-heal[hf]" in found("transformers").found


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyError(), OSError("disk\ngone"), ZeroDivisionError()])
def test_no_check_raises(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise error

    monkeypatch.setattr(doctor, "import_module", fail)
    monkeypatch.setattr(metadata, "version", fail)
    monkeypatch.setattr(shutil, "disk_usage", fail)
    monkeypatch.setattr("starfish.data.free_memory", fail)
    monkeypatch.setattr("starfish.devices.choose_device", fail)
    findings = {finding.name: finding for finding in examine()}
    assert list(findings) == NAMES
    assert all(not finding.ok and type(error).__name__ in finding.found
               for name, finding in findings.items() if name != "python")  # fmt: skip


@pytest.mark.parametrize(("free", "ok"), [(2**29, False), (2**32, True)])
def test_too_little_memory_is_found(free: int, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starfish.data.free_memory", lambda: free)
    assert found("memory").ok == ok


def test_a_folder_without_room_or_right_to_write_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert "not writable" in found("disk").found
    assert not found("disk").ok


def test_free_memory_is_known_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    from starfish.data import free_memory

    real = builtins.open

    def no_proc(path: Any, *more: Any, **named: Any) -> Any:
        if path == "/proc/meminfo":
            raise FileNotFoundError(path)
        return real(path, *more, **named)

    monkeypatch.setattr(builtins, "open", no_proc)
    assert free_memory() > 2**20
