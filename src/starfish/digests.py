"""Hashes that say whether a model, or images, are the same as before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from torch import nn

from starfish.core import Images
from starfish.data import StoredImages, digest_of

BATCH = 64


def digest(model: nn.Module) -> str:
    """One hash of all that a model holds."""
    facts = sorted(fingerprints(model, model.state_dict()).items())
    return hashlib.sha256(str(facts).encode()).hexdigest()


def fingerprints(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """A hash of the bytes of each tensor."""
    state = model.state_dict()
    return {name: digest_of(state[name]) for name in names}


def digest_of_stored(images: Images) -> str:
    """One hash of pixels and labels as they were read, which is quicker; how they are normalised is told beside it."""
    if not isinstance(images, StoredImages):
        return digest_of_images(images)
    labels = "" if images.labels is None else digest_of(images.labels)
    return hashlib.sha256(f"{digest_of(images.pixels)} {labels}".encode()).hexdigest()


def digest_of_images(images: Images) -> str:
    """One hash of all that a model is shown, preprocessing included."""
    found = hashlib.sha256()
    for start in range(0, len(images), BATCH):
        batch = images.batch(list(range(start, min(start + BATCH, len(images)))))
        tensors = batch if isinstance(batch, Mapping) else {"": batch}
        for name in sorted(tensors):
            found.update(f"{name} {tuple(tensors[name].shape)} {digest_of(tensors[name])}\n".encode())
    return found.hexdigest()
