"""What is costly to find out, kept on disk: a run that was killed, and the next run or method, find it again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from starfish.core import Images
from starfish.digests import digest, digest_of_images
from starfish.errors import UserError
from starfish.files import read_safetensors, write_tensors

VERSION = 1  # of what statistics mean; another one makes the files of before go unheard


@dataclass
class Cache:
    """A folder of tensors, each file named by a hash of all that its content depends on."""

    folder: Path
    _seen: tuple[Images, str] | None = field(default=None, repr=False)  # hashing images takes a second or two

    def keys(self, model: nn.Module, images: Images, facts: Sequence[str]) -> list[str]:
        """For things found out about this model on these images; `facts` says what each is, settings included."""
        if self._seen is None or self._seen[0] is not images:
            self._seen = (images, digest_of_images(images))
        device = next(model.parameters()).device.type
        common = f"{VERSION} {type(model).__name__} {digest(model)} {self._seen[1]} {device}"
        return [hashlib.sha256(f"{common} {fact}".encode()).hexdigest()[:40] for fact in facts]

    def read(self, key: str) -> dict[str, Tensor] | None:
        """What was kept under this key; None where there is nothing, or nothing that can be read."""
        try:
            return read_safetensors(self._path(key))[0]
        except UserError:
            return None

    def write(self, key: str, tensors: dict[str, Tensor]) -> None:
        write_tensors(self._path(key), tensors)

    def _path(self, key: str) -> Path:
        return self.folder / f"statistics-{key}.safetensors"
