"""Files appear whole or not at all, and what a user hands us is read without running it."""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from starfish import files
from starfish.errors import UserError


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def write_text(path: Path) -> None:
    files.write_text(path, "new")


def write_tensors(path: Path) -> None:
    files.write_tensors(path, {"x": torch.arange(3)})


def test_a_failed_write_leaves_the_old_content_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    files.write_text(path, "old")

    def fail(beside: Path) -> None:
        beside.write_text("half of it")
        raise RuntimeError("the power goes")

    with pytest.raises(RuntimeError, match="the power goes"):
        files.write_whole(path, fail)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_the_file_is_not_there_before_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "a.txt"
    seen = []

    def write(beside: Path) -> None:
        seen.append((path.exists(), beside.parent == path.parent))
        beside.write_text("x")

    files.write_whole(path, write)
    assert seen == [(False, True)]
    assert path.read_text() == "x"


@pytest.mark.parametrize("write", [write_text, write_tensors])
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_permissions_follow_the_umask(write: Callable[[Path], None], umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write(tmp_path / "file")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "file") == 0o666 & ~umask


@pytest.mark.parametrize("write", [write_text, write_tensors])
def test_a_place_that_cannot_be_written_is_named(write: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"file/inner` cannot be written"):
        write(tmp_path / "file" / "inner")


def test_tied_tensors_are_written_under_every_name(tmp_path: Path) -> None:
    tied = torch.randn(4, 4)
    files.write_tensors(tmp_path / "t.safetensors", {"a": tied, "b": tied, "part": tied[:2], "turned": tied.T})
    held = load_file(tmp_path / "t.safetensors")
    expected = {"a": tied, "b": tied, "part": tied[:2], "turned": tied.T}
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], expected[name]) for name in expected)


def test_metadata_comes_back(tmp_path: Path) -> None:
    files.write_tensors(tmp_path / "t.safetensors", {"a": torch.ones(1)}, {"by": "me"})
    assert files.read_safetensors(tmp_path / "t.safetensors")[1] == {"by": "me"}


def test_json_round_trip(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"x": [1, 2.5, None, "ü"]})
    assert files.read_json(tmp_path / "a.json") == {"x": [1, 2.5, None, "ü"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "there is no file"), (b"{", "not readable JSON"), (b"\xff\xfe{}", "not readable JSON")],
)
def test_bad_json_is_refused_by_name(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        files.read_json(path)
    assert str(path) in error.value.message


class Trap:
    """Pickled, it makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("container", ["torch", "pickle"])
def test_pickled_objects_are_refused_and_not_run(container: str, tmp_path: Path) -> None:
    path, trap = tmp_path / "a.pt", Trap(tmp_path / "sprung")
    if container == "torch":
        torch.save({"x": trap}, path)
    else:
        path.write_bytes(pickle.dumps(trap))
    with pytest.raises(UserError, match="pickled Python objects") as error:
        files.read_object(path)
    assert "--allow-pickle" in error.value.hint
    assert not trap.path.exists()


def test_a_pickled_module_is_read_when_allowed(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 3), tmp_path / "a.pt")
    with pytest.raises(UserError, match="pickled"):
        files.read_object(tmp_path / "a.pt")
    assert isinstance(files.read_object(tmp_path / "a.pt", allow_pickle=True), nn.Linear)


@pytest.mark.parametrize("legacy", [False, True])
def test_tensors_are_read_from_both_formats_of_torch(legacy: bool, tmp_path: Path) -> None:
    given = {"epoch": 3, "state_dict": {"x": torch.randn(3)}}
    torch.save(given, tmp_path / "a.pth", _use_new_zipfile_serialization=not legacy)
    found = files.read_object(tmp_path / "a.pth")
    assert found["epoch"] == 3
    assert torch.equal(found["state_dict"]["x"], given["state_dict"]["x"])


def bytes_of(kind: str, tmp_path: Path) -> bytes:
    whole = tmp_path / "whole"
    if kind == "safetensors":
        files.write_tensors(whole, {"x": torch.randn(100)})
    elif kind in {"zip", "legacy"}:
        torch.save({"x": torch.randn(100)}, whole, _use_new_zipfile_serialization=kind == "zip")
    return whole.read_bytes()


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.5, 0.95, 0.999])
def test_truncated_files_are_refused_by_name(kind: str, share: float, tmp_path: Path) -> None:
    content = bytes_of(kind, tmp_path)
    path = tmp_path / ("a.safetensors" if kind == "safetensors" else "a.pt")
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError) as error:
        files.read_object(path)
    assert str(path) in error.value.message
    assert error.value.hint


KINDS = {
    "text": b"hello, these are no weights\n" * 20,
    "json": b'{"a": 1}',
    "zeros": bytes(1000),
    "png": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "noise": torch.randint(0, 256, (500,), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    .numpy()
    .tobytes(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors", ".bin"])
def test_files_of_other_kinds_are_refused_by_name(kind: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(KINDS[kind])
    with pytest.raises(UserError) as error:
        files.read_object(path)
    assert str(path) in error.value.message


@pytest.mark.parametrize("start", range(20))
def test_no_leading_byte_makes_reading_fail_otherwise(start: int, tmp_path: Path) -> None:
    """torch's unpickler raises whatever the opcodes lead it to."""
    generator = torch.Generator().manual_seed(start)
    for first in range(start, 256, 20):
        noise = torch.randint(0, 256, (40,), generator=generator, dtype=torch.uint8).numpy().tobytes()
        path = tmp_path / f"{first}.pt"
        path.write_bytes(b"\x80\x02" * (first % 2) + bytes([first]) + noise)
        with pytest.raises(UserError):
            files.read_object(path)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_a_file_that_is_not_there(suffix: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    if kind == "folder":
        path.mkdir()
    with pytest.raises(UserError, match="there is no file"):
        files.read_object(path)
