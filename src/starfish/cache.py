"""What is costly to find out, kept on disk: a run that was killed, and the next run or method, find it again."""

from __future__ import annotations

import hashlib
import json
import time
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
    owner: str = ""  # who writes, so that what others have spent is known: a run's name
    shared: float = 0.0  # seconds that others have spent on what was found here
    _missed: int = 0  # asked for in vain since `_clock`
    _clock: float | None = None  # when the gathering of what was missed began
    _each: float = 0.0  # its seconds, shared out evenly
    _seen: tuple[Images, str] | None = field(default=None, repr=False)  # hashing images takes a second or two

    def keys(self, model: nn.Module, images: Images, facts: Sequence[str]) -> list[str]:
        """For things found out about this model on these images; `facts` says what each is, settings included."""
        if self._seen is None or self._seen[0] is not images:
            self._seen = (images, digest_of_images(images))
        device = next(model.parameters()).device.type
        common = f"{VERSION} {type(model).__name__} {digest(model)} {self._seen[1]} {device}"
        return [hashlib.sha256(f"{common} {fact}".encode()).hexdigest()[:40] for fact in facts]

    def has(self, keys: Sequence[str]) -> bool:
        """Is something kept under all of these? Where not, the clock starts: all are about to be found out."""
        if all(self._path(key).is_file() for key in keys):
            return True
        self._clock, self._missed = time.monotonic(), len(keys)
        return False

    def read(self, key: str) -> dict[str, Tensor] | None:
        """What was kept under this key; None where there is nothing, or nothing that can be read."""
        try:
            tensors, metadata = read_safetensors(self._path(key))
        except UserError:
            self._missed = 1 if self._clock is None else self._missed + 1
            self._clock = time.monotonic()
            return None
        made = json.loads(metadata.get("starfish", "{}"))
        if made.get("owner") != self.owner:
            self.shared += made.get("seconds", 0.0)
        return tensors

    def write(self, key: str, tensors: dict[str, Tensor]) -> None:
        """Keep this, and what it took: the time since it was asked for in vain, as a share of all that was."""
        if self._clock is not None:
            self._each, self._clock = (time.monotonic() - self._clock) / self._missed, None
        made = json.dumps({"owner": self.owner, "seconds": self._each})
        write_tensors(self._path(key), tensors, {"starfish": made})

    def _path(self, key: str) -> Path:
        return self.folder / f"statistics-{key}.safetensors"
