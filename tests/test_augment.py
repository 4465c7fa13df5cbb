"""Augmentations: what each one may do to an image, and that the generator alone decides it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cases import IMAGES, LABELS
from starfish.augment import AUGMENTATIONS, Views, augmented, check
from starfish.data import Preprocess, StoredImages, as_images
from starfish.errors import UserError


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ramps(count: int, height: int = 32, width: int = 32) -> Tensor:
    """Images whose first channel is the row and whose second is the column of the pixel."""
    rows, columns = torch.meshgrid(torch.arange(height).float(), torch.arange(width).float(), indexing="ij")
    return torch.stack([rows, columns, rows - columns]).repeat(count, 1, 1, 1)


def test_flip_mirrors_about_half_of_the_images(images: Tensor) -> None:
    """Each image is as it was or its mirror image; with probability 1 two flips give it back."""
    x = images.repeat(50, 1, 1, 1)
    y = augmented(x, "flip", seeded())
    same, mirrored = ((y == other).flatten(1).all(1) for other in (x, x.flip(-1)))
    assert bool((same ^ mirrored).all())
    assert 0.4 < same.float().mean() < 0.6
    assert torch.equal(augmented(images, "flip:1", seeded()), images.flip(-1))
    assert torch.equal(augmented(images, "flip:1,flip:1", seeded()), images)
    assert torch.equal(augmented(images, "flip:0", seeded()), images)


@pytest.mark.parametrize("shape", [(32, 32), (20, 48)])
def test_a_crop_of_the_whole_area_gives_the_image_back(shape: tuple[int, int]) -> None:
    """No ratio but the image's own fits into it then."""
    x = torch.randn(4, 3, *shape)
    torch.testing.assert_close(augmented(x, "crop:1", seeded()), x, rtol=0, atol=1e-4)


@pytest.mark.parametrize("least", [0.2, 0.5, 0.9])
def test_crops_have_the_area_and_the_ratio_that_were_asked_for(least: float) -> None:
    """Where the pixels come from, read off ramps: inside the image, upright, areas uniform up to 1."""
    side = 64
    y = augmented(ramps(2000, side, side), f"crop:{least}", seeded())
    assert float(y[:, :2].min()) >= 0
    assert float(y[:, :2].max()) <= side - 1
    torch.testing.assert_close(y[:, 0], y[:, 0, :, :1].expand(-1, -1, side))
    torch.testing.assert_close(y[:, 1], y[:, 1, :1, :].expand(-1, side, -1))
    middle = slice(side // 2 - 8, side // 2 + 9)  # away from the border, where steps between pixels are all the same
    height, width = y[:, 0, middle, 0].diff().mean(1), y[:, 1, 0, middle].diff().mean(1)
    area, ratio = height * width, width / height
    assert least - 1e-3 <= float(area.min()) < least + 0.02
    assert 0.98 < float(area.max()) <= 1.001
    assert float(area.mean()) == pytest.approx((1 + least) / 2, abs=0.02)
    widest = min(4 / 3, 1 / least)
    assert 0.97 * widest < float(ratio.max()) <= widest + 1e-3
    assert float(ratio.log().abs().max()) <= math.log(widest) + 1e-3
    assert float(ratio.log().mean()) == pytest.approx(0, abs=0.02)


def test_a_crop_is_what_cutting_out_and_stretching_gives() -> None:
    """Where its edges lie on pixels, and away from them, it is torch's own bilinear stretch."""
    x = torch.randn(64, 1, 8, 8).cumsum(2).cumsum(3)
    y = augmented(torch.cat([x, ramps(64, 8, 8)[:, :2]], 1), "crop:0.3", seeded())
    rows, columns = y[:, 1, 2:-2, 0], y[:, 2, 0, 2:-2]
    for image, row, column, got in zip(x[:, 0], rows, columns, y[:, 0, 2:-2, 2:-2], strict=True):
        torch.testing.assert_close(got, bilinear(image, row, column), rtol=1e-4, atol=1e-4)


def bilinear(image: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The image at fractional rows and columns, by hat functions."""
    places = torch.arange(len(image)).float()
    down, along = ((1 - (at[:, None] - places).abs()).clamp(min=0) for at in (rows, columns))
    return down @ image @ along.T


def test_shift_moves_whole_pixels_and_reflects() -> None:
    """Every distance up to the number occurs; a pixel from outside is one from inside."""
    reach, side = 3, 16
    y = augmented(ramps(500, side, side), f"shift:{reach}", seeded())
    moved = y[:, :2] - ramps(500, side, side)[:, :2]
    inner = moved[..., reach:-reach, reach:-reach]
    distances = inner[..., 0, 0]
    assert bool((inner == distances[..., None, None]).all())
    assert {tuple(pair) for pair in distances.int().tolist()} == {(a, b) for a in range(-3, 4) for b in range(-3, 4)}
    down = int((distances[:, 0] == -2).nonzero()[0])
    assert y[down, 0, :4, 0].tolist() == [2, 1, 0, 1]
    assert torch.equal(augmented(y, "shift:0", seeded()), y)


def test_a_shift_beyond_the_image_is_refused(images: Tensor) -> None:
    """With both sizes in the error."""
    with pytest.raises(UserError, match="`shift:32` is too far for images of 32×32"):
        augmented(images, "shift:32", seeded())


@pytest.mark.parametrize("augment", ["mixup", "mixup:1.0", "mixup:0.01", "mixup:100"])
def test_mixup_blends_with_one_other_image(augment: str) -> None:
    """Image i is a share of itself and the rest of another: a convex combination of rows of the unit matrix."""
    x = torch.eye(40).view(40, 40, 1, 1).expand(-1, -1, 2, 2).contiguous()
    shares = augmented(x, augment, seeded())
    assert bool((shares == shares[..., :1, :1]).all())
    shares = shares[..., 0, 0]
    assert float(shares.min()) >= 0
    torch.testing.assert_close(shares.sum(1), torch.ones(40))
    assert bool(((shares > 0).sum(1) <= 2).all())
    others = shares - shares.diag().diag()
    assert bool(((others > 0).sum(0) <= 1).all())
    torch.testing.assert_close(others.sum(1) + shares.diag(), torch.ones(40))


def test_shares_follow_the_beta_distribution() -> None:
    """Of variance 1 / (8a + 4) around one half, with a value of its own for each image."""
    x = torch.zeros(4000, 1, 1, 1)
    x[::2] = 1
    for a in (0.2, 1.0, 4.0):
        y = augmented(x, f"mixup:{a}", seeded()).flatten()
        mixed = y[(y > 0) & (y < 1)] if a > 0.5 else y[(y != x.flatten())]
        assert len(mixed) > 1800
        if a > 0.5:
            assert float(mixed.var()) == pytest.approx(1 / (8 * a + 4), rel=0.1)
            assert float(mixed.mean()) == pytest.approx(0.5, abs=0.02)


def test_cutmix_pastes_a_box() -> None:
    """Every pixel with all its channels is of the image or of one other; those of the other are a rectangle."""
    count = 200
    x = torch.arange(count).float().view(-1, 1, 1, 1).expand(-1, 3, 16, 16).contiguous()
    y = augmented(x, "cutmix", seeded())
    assert bool((y == y[:, :1]).all())
    pasted = y[:, 0] != x[:, 0]
    for image, where in zip(y[:, 0], pasted, strict=True):
        assert len(image[where].unique()) <= 1
        rows, columns = where.any(1), where.any(0)
        assert torch.equal(where, rows[:, None] & columns[None, :])
        assert all(int(side.int().diff().abs().sum()) <= 2 for side in (rows, columns))
    shares = pasted.float().mean((1, 2))
    assert float(shares.max()) > 0.7
    assert 0.2 < float(shares.mean()) < 0.5  # one half, less what lies outside the images


def test_cutmix_takes_each_pixel_from_the_same_place(images: Tensor) -> None:
    """Nothing is moved or blended."""
    y = augmented(images, "cutmix", seeded())
    found = (y[:, None] == images[None]).all(2)  # images × images × rows × columns
    assert bool(found.any(1).all())


def test_jitter_is_a_factor_and_a_term_for_each_image(images: Tensor) -> None:
    """Both within the number, and other ones for every image."""
    y = augmented(images, "jitter:0.3", seeded())
    x, y = images.flatten(1).double(), y.flatten(1).double()
    factor = ((x - x.mean(1, True)) * (y - y.mean(1, True))).sum(1) / (x - x.mean(1, True)).square().sum(1)
    term = y.mean(1) - factor * x.mean(1)
    torch.testing.assert_close(x * factor[:, None] + term[:, None], y, rtol=0, atol=1e-5)
    assert float((factor - 1).abs().max()) <= 0.3
    assert float(term.abs().max()) <= 0.3
    assert len(factor.unique()) == len(term.unique()) == len(images)
    assert torch.equal(augmented(images, "jitter:0", seeded()), images)


every_name = pytest.mark.parametrize("name", AUGMENTATIONS)


@every_name
def test_the_generator_alone_decides(name: str, images: Tensor) -> None:
    """The same state gives the same bits, another seed others; torch's and NumPy's own generators are left alone."""
    before = torch.get_rng_state()
    first = augmented(images, name, seeded())
    torch.manual_seed(5)
    generator = seeded()
    assert torch.equal(augmented(images, name, generator), first)
    assert not torch.equal(augmented(images, name, generator), first)
    assert not torch.equal(augmented(images, name, seeded(1)), first)
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), before)


@every_name
def test_the_inputs_stay_and_only_values_change(name: str, images: Tensor) -> None:
    """Shape, dtype and device are those of the input, which is not written to; a lone image is a batch too."""
    for x in (
        images,
        images[:1],
        images[:, :1],
        images[:3, :, :20],
        images.contiguous(memory_format=torch.channels_last),
    ):
        before = x.clone()
        y = augmented(x, name, seeded())
        assert y.shape == x.shape
        assert bool(y.isfinite().all())
        assert torch.equal(x, before)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        y = augmented(images.to(dtype), name, seeded())
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), augmented(images, name, seeded()), rtol=0.02, atol=0.08)
    assert augmented(images.to("meta"), name, seeded()).device.type == "meta"


def test_augmentations_are_applied_in_their_order(images: Tensor) -> None:
    """One generator for all, so a list is the same as one call after the other."""
    generator = seeded()
    expected = augmented(augmented(images, "shift:2", generator), "cutmix:0.5", generator)
    assert torch.equal(augmented(images, "shift:2,cutmix:0.5", seeded()), expected)
    assert torch.equal(augmented(images, " shift:2 + cutmix:0.5 ", seeded()), expected)
    assert not torch.equal(augmented(images, "cutmix:0.5,shift:2", seeded()), expected)


@pytest.mark.parametrize("augment", ["", "none", " none "])
def test_none_is_nothing(augment: str, images: Tensor) -> None:
    """Whatever the inputs are, and without a draw."""
    generator = seeded()
    check(augment)
    assert augmented(images, augment, generator) is images
    tokens = {"input_ids": torch.ones(2, 4)}
    assert augmented(tokens, augment, generator) is tokens
    assert torch.equal(generator.get_state(), seeded().get_state())


@pytest.mark.parametrize("augment", ["flip", "flip,crop", "flip+crop:0.3, mixup", "cutmix:1.0+jitter:0.2,shift:4"])
def test_lists_are_read(augment: str) -> None:
    """With commas or plus signs, with numbers and without."""
    check(augment)


@pytest.mark.parametrize(
    ("augment", "message", "hint"),
    [
        ("flip,rotate:3", "`rotate:3` is unknown", "`flip`, `crop`, `shift`, `mixup`, `cutmix`, `jitter`"),
        ("flip,,crop", "`` is unknown", "`flip`"),
        ("flip,none", "`none` is unknown", "`flip`"),
        ("crop:", "the number of `crop:` is ``", "0.01 to 1"),
        ("crop:half", "the number of `crop:half` is `half`", "share of an image's area"),
        ("crop:0", "the number of `crop:0` is `0`", "0.01 to 1"),
        ("shift:-1", "`-1`", "pixels"),
        ("mixup:nan", "`nan`", "Beta"),
        ("cutmix:inf", "`inf`", "Beta"),
        ("jitter:1:2", "`1:2`", "0 to 1"),
    ],
)
def test_what_cannot_be_read_is_named(augment: str, message: str, hint: str, images: Tensor) -> None:
    """With the names that are known, or what the number means and where it may lie."""
    with pytest.raises(UserError, match=message) as error:
        check(augment)
    assert hint in error.value.hint
    with pytest.raises(UserError, match=message):
        augmented(images, augment, seeded())


@pytest.mark.parametrize(
    ("inputs", "what"),
    [
        ({"pixel_values": torch.zeros(2, 3, 8, 8)}, "dict"),
        (torch.zeros(2, 3), r"torch.float32 of shape \(2, 3\)"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "torch.uint8"),
    ],
)
def test_only_images_can_be_augmented(inputs: object, what: str) -> None:
    """Dicts, other shapes and pixels that are not normalised are refused."""
    with pytest.raises(UserError, match=f"cannot be augmented.*{what}"):
        augmented(inputs, "flip", seeded())


def test_views_are_the_same_whatever_batch_they_come_in(images: Tensor) -> None:
    """Image i as it is at i, augmented at i + v·N by seed and index alone."""
    views = Views(as_images(images), "flip:1,shift:2", 3, seed=5)
    assert len(views) == 36
    assert torch.equal(views.batch([0, 11]), images[[0, 11]])
    together, alone = views.batch([12, 3, 25]), [views.batch([index]) for index in (12, 3, 25)]
    assert torch.equal(together, torch.cat(alone))
    assert not torch.equal(views.batch([12]), views.batch([24]))
    assert not torch.equal(views.batch([12]), Views(as_images(images), "flip:1,shift:2", 3, seed=6).batch([12]))


def test_views_keep_labels() -> None:
    """A view of an image is of its class."""
    views = Views(StoredImages(IMAGES, Preprocess(), LABELS), "flip", 2, seed=0)
    assert views.labels is not None
    assert torch.equal(views.labels, torch.cat([LABELS, LABELS]))


def test_what_mixes_a_batch_has_no_views_to_keep() -> None:
    """Mixup depends on who else is in the batch."""
    check("flip,mixup")
    with pytest.raises(UserError, match="`mixup` mixes the images of a batch"):
        check("flip,mixup", alone=True)
