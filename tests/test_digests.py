"""Hashes of models and images."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from cases import tiny_cnn, tiny_vit
from starfish.data import Keyed, Preprocess, StoredImages
from starfish.digests import BATCH, digest, digest_of_images, fingerprints


def stored(pixels: Tensor) -> StoredImages:
    return StoredImages(pixels, Preprocess())


@pytest.mark.parametrize("name", tiny_cnn().state_dict())
def test_every_tensor_of_a_model_counts(name: str) -> None:
    """One entry of any parameter or buffer, also a count of batches, gives another hash; a copy gives the same."""
    model = tiny_cnn()
    before = digest(model)
    assert digest(deepcopy(model)) == before
    model.state_dict()[name].view(-1)[-1:].add_(1)
    assert digest(model) != before


def test_names_count() -> None:
    """Two tensors that change places are another model."""
    model = tiny_vit()
    before = digest(model)
    first, second = model.blocks[0], model.blocks[1]
    model.blocks[0], model.blocks[1] = second, first
    assert digest(model) != before


def test_fingerprints_are_of_the_bytes() -> None:
    """The same bytes have the same hash, whatever the layout in memory; a bit more, another."""
    model = torch.nn.Linear(3, 2)
    before = fingerprints(model, ["weight"])
    model.weight.data = model.weight.data.T.contiguous().T  # the same values, column by column
    assert fingerprints(model, ["weight"]) == before
    model.weight.data[0, 0] = torch.nextafter(model.weight.data[0, 0], torch.tensor(9.0))
    assert fingerprints(model, ["weight"]).keys() == before.keys()
    assert fingerprints(model, ["weight"]) != before


@pytest.mark.parametrize("place", [0, BATCH - 1, BATCH, BATCH + 2])
def test_every_image_counts(place: int) -> None:
    """A pixel of any image, also of the last and shorter batch, gives another hash; equal images give the same."""
    pixels = torch.rand(BATCH + 3, 1, 2, 2)
    before = digest_of_images(stored(pixels))
    assert digest_of_images(stored(pixels.clone())) == before
    pixels[place, 0, 1, 1] += 1
    assert digest_of_images(stored(pixels)) != before


def test_order_number_and_shape_of_images_count() -> None:
    pixels = torch.rand(6, 1, 2, 3)
    views = [pixels, pixels.flip(0), pixels[:5], pixels.view(6, 1, 3, 2)]
    assert len({digest_of_images(stored(view)) for view in views}) == len(views)


def test_preprocessing_counts() -> None:
    """The same picture shown in another way is another input."""
    pixels = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    other = Preprocess(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    assert digest_of_images(stored(pixels)) != digest_of_images(StoredImages(pixels, other))


def test_inputs_under_names() -> None:
    """Of a mapping names and values count, and their order does not."""
    a, b = torch.rand(3, 2), torch.rand(3, 2)
    assert digest_of_images(Keyed({"a": a, "b": b})) == digest_of_images(Keyed({"b": b, "a": a}))
    assert digest_of_images(Keyed({"a": a, "b": b})) != digest_of_images(Keyed({"a": b, "b": a}))
