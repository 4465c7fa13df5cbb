"""What is kept on disk between runs."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cases import tiny_cnn, tiny_vit
from starfish.cache import Cache
from starfish.data import Preprocess, StoredImages


def pictures(images: Tensor) -> StoredImages:
    return StoredImages(images, Preprocess())


def test_the_same_question_has_the_same_key(tmp_path: Path, images: Tensor) -> None:
    """Equal models and images have one key, in any folder and in the next run; each fact has its own."""
    keys = Cache(tmp_path / "a").keys(tiny_vit(), pictures(images), ["one", "two"])
    cache = Cache(tmp_path / "b")
    assert cache.keys(tiny_vit(), pictures(images.clone()), ["one", "two"]) == keys
    assert cache.keys(tiny_vit(), pictures(images), ["two"]) == keys[1:]
    assert len(set(keys)) == 2


def test_anything_else_has_another_key(tmp_path: Path, images: Tensor) -> None:
    """Another weight, another buffer, another precision, another class of model, another image."""

    class Other(type(tiny_cnn())):  # type: ignore[misc]
        """The same tensors, and perhaps another forward."""

    cache, model = Cache(tmp_path), tiny_cnn()
    weight, buffer, kind = deepcopy(model), deepcopy(model), deepcopy(model)
    weight.linear.bias.data[0] += 1e-3
    buffer.bn1.running_mean[0] += 1e-3
    kind.__class__ = Other
    other = images.clone()
    other[-1, 0, 0, 0] += 1e-3
    asked: list[tuple[nn.Module, Tensor]] = [
        (model, images), (weight, images), (buffer, images), (deepcopy(model).double(), images), (kind, images),
        (model, other), (model, images[:-1]),
    ]  # fmt: skip
    keys = [cache.keys(net, pictures(shown), ["fact"])[0] for net, shown in asked]
    assert len(set(keys)) == len(asked)


def test_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    """Of any shape and type, also in a folder that is not there yet; nothing is found under other keys."""
    cache = Cache(tmp_path / "new" / "folder")
    tensors = {"gram/0": torch.randn(3, 3, dtype=torch.float64), "count/0": torch.tensor(7.0), "none": torch.zeros(0)}
    assert cache.read("key") is None
    cache.write("key", tensors)
    found = cache.read("key")
    assert found is not None
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
               for name, tensor in tensors.items())  # fmt: skip
    assert cache.read("other") is None


@pytest.mark.parametrize("damage", ["empty", "truncated", "another kind", "a folder"])
def test_what_cannot_be_read_is_not_there(tmp_path: Path, damage: str) -> None:
    """A file that is no whole safetensors file is like none, and a new one takes its place."""
    cache = Cache(tmp_path)
    cache.write("key", {"x": torch.arange(100.0)})
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "truncated": whole[: len(whole) // 2]}.get(damage, b"not a tensor" * 9))
    if damage == "a folder":
        path.unlink()
        path.mkdir()
        assert cache.read("key") is None
        return
    assert cache.read("key") is None
    cache.write("key", {"x": torch.ones(1)})
    assert torch.equal(cache.read("key")["x"], torch.ones(1))  # type: ignore[index]


def test_seconds_that_others_have_spent_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first question in vain to the first answer, shared out over all that was missed; one's own are not."""
    clock = iter([10.0, 10.0, 16.0, 30.0, 31.0])
    monkeypatch.setattr("starfish.cache.time.monotonic", lambda: next(clock))
    first = Cache(tmp_path, owner="first")
    for key in ("a", "b"):
        assert first.read(key) is None
    for key in ("a", "b"):
        first.write(key, {"x": torch.ones(1)})
    assert first.read("c") is None
    first.write("c", {"x": torch.ones(1)})
    again, other = Cache(tmp_path, owner="first"), Cache(tmp_path, owner="other")
    assert [cache.read("a") is not None for cache in (again, other)] == [True, True]
    assert (again.shared, other.shared) == (0.0, 3.0)
    other.read("b")
    other.read("c")
    assert other.shared == 7.0
