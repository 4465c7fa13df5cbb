"""New views of unlabeled images, for a loop whose teacher answers any input: no label has to stay true.

B images, C channels, H rows, W columns, all of the model's normalised input.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from starfish.core import Images
from starfish.errors import UserError, listed


class Augmentation(NamedTuple):
    apply: Callable[[Tensor, float, torch.Generator], Tensor]
    number: float  # where none is given
    least: float
    most: float
    meaning: str  # of the number


def augmented(inputs: Any, augment: str, generator: torch.Generator) -> Any:
    """The inputs after every augmentation of a list like `flip,crop:0.5+mixup`, in its order; "" and "none" do nothing.

    All that is random comes from `generator`, which is on the CPU: its state decides every bit. The inputs stay as
    they are.
    """
    steps = _steps(augment)
    if not steps:
        return inputs
    x_BCHW = _images(inputs)
    for name, number in steps:
        x_BCHW = AUGMENTATIONS[name].apply(x_BCHW, number, generator)
    return x_BCHW


@dataclass(frozen=True)
class Views:
    """Images of which each is there several times: image i as it is at i, and v times augmented at i + v·N.

    A view is a function of seed and index, whatever batch it comes in, so that what a teacher answers can be kept.
    """

    images: Images
    augment: str
    count: int  # of each image, the one as it is included
    seed: int

    @property
    def labels(self) -> Tensor | None:
        return None if self.images.labels is None else self.images.labels.repeat(self.count)

    def __len__(self) -> int:
        return self.count * len(self.images)

    def batch(self, indices: Sequence[int]) -> Any:
        size = len(self.images)
        x_BCHW = self.images.batch([index % size for index in indices])
        views = [self._view(x_BCHW[place : place + 1], index) for place, index in enumerate(indices)]
        return torch.cat(views)

    def _view(self, x_1CHW: Tensor, index: int) -> Tensor:
        if index < len(self.images):
            return x_1CHW
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        view: Tensor = augmented(x_1CHW, self.augment, generator)
        return view


def check(augment: str, *, alone: bool = False) -> None:
    """Refuse a list with anything in it that `augmented` does not know or, `alone`, that takes several images."""
    mixing = [name for name, _ in _steps(augment) if name in MIXING]
    if alone and mixing:
        raise UserError(
            f"`{mixing[0]}` mixes the images of a batch, so its views cannot be kept",
            "with it, set views=0: new ones each step",
        )


def is_none(augment: str) -> bool:
    """Does it leave the images as they are?"""
    return augment.strip() in ("", "none")


def _steps(augment: str) -> list[tuple[str, float]]:
    if is_none(augment):
        return []
    return [_step(part.strip()) for part in re.split("[,+]", augment)]


def _step(part: str) -> tuple[str, float]:
    name, colon, written = part.partition(":")
    if name not in AUGMENTATIONS:
        raise UserError(
            f"the augmentation `{part}` is unknown",
            f"join some of {listed(list(AUGMENTATIONS), 9)} with commas, with a number or without: `flip,crop:0.5`",
        )
    _, default, least, most, meaning = AUGMENTATIONS[name]
    try:
        number = float(written) if colon else default
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise UserError(f"the number of `{part}` is `{written}`", f"{meaning}: {least:g} to {most:g}")
    return name, number


def are_images(inputs: Any) -> bool:
    """Have they the form of images?"""
    return isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.is_floating_point()


def _images(inputs: Any) -> Tensor:
    if are_images(inputs):
        found: Tensor = inputs
        return found
    what = f"{inputs.dtype} of shape {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
    raise UserError(
        f"this model's inputs cannot be augmented: they are `{what}`, not images", "leave out `augment`, or say `none`"
    )


def _flip(x_BCHW: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    flipped_B = _uniform(x_BCHW, generator) < probability
    return torch.where(_spread(flipped_B, x_BCHW), x_BCHW.flip(-1), x_BCHW)


def _crop(x_BCHW: Tensor, least_area: float, generator: torch.Generator) -> Tensor:
    """A part of the image, stretched to its size. It is never larger than the image, so there is no aliasing.

    The grid is clamped to the centres of the outer pixels: not every device can continue an image at its border.
    """
    area_B = least_area + (1 - least_area) * _uniform(x_BCHW, generator)
    reach_B = area_B.log().neg().clamp(0, math.log(4 / 3))  # a large part is nearly of the image's own shape
    ratio_B = (reach_B * _around_zero(x_BCHW, generator)).exp()
    sides_B2 = torch.stack([(area_B * ratio_B).sqrt(), (area_B / ratio_B).sqrt()], 1).clamp(max=1)
    centres_B2 = torch.stack([_around_zero(x_BCHW, generator) for _ in range(2)], 1) * (1 - sides_B2)
    parts_B23 = torch.cat([torch.diag_embed(sides_B2), centres_B2.unsqueeze(2)], 2).to(x_BCHW.device)
    grid_BHW2 = F.affine_grid(parts_B23, list(x_BCHW.shape), align_corners=False)
    last_2 = 1 - 1 / torch.tensor([x_BCHW.shape[3], x_BCHW.shape[2]], device=x_BCHW.device)
    wide = torch.promote_types(x_BCHW.dtype, torch.float32)  # half a precision is too little to tell places
    grid_BHW2 = torch.clamp(grid_BHW2, -last_2, last_2).to(wide)
    return F.grid_sample(x_BCHW.to(wide), grid_BHW2, align_corners=False).to(x_BCHW.dtype)


def _shift(x_BCHW: Tensor, most: float, generator: torch.Generator) -> Tensor:
    reach, (height, width) = int(most), x_BCHW.shape[2:]
    if reach >= min(height, width):
        raise UserError(f"`shift:{reach}` is too far for images of {height}×{width}", "shift by less than their side")
    padded = F.pad(x_BCHW, [reach] * 4, mode="reflect")
    starts: list[list[int]] = torch.randint(2 * reach + 1, (len(x_BCHW), 2), generator=generator).tolist()
    places = zip(padded, starts, strict=True)
    return torch.stack([image[:, top : top + height, left : left + width] for image, (top, left) in places])


def _mixup(x_BCHW: Tensor, concentration: float, generator: torch.Generator) -> Tensor:
    share_B = _beta(x_BCHW, concentration, generator)
    return _others(x_BCHW, generator).lerp(x_BCHW, _spread(share_B.to(x_BCHW.dtype), x_BCHW))


def _cutmix(x_BCHW: Tensor, concentration: float, generator: torch.Generator) -> Tensor:
    """A box of the area 1 − λ around any point; what of it lies outside the image is lost."""
    side_B = (1 - _beta(x_BCHW, concentration, generator)).sqrt()
    inside = []
    for size in x_BCHW.shape[2:]:
        centres = (torch.arange(size) + 0.5) / size
        inside.append((centres - _uniform(x_BCHW, generator)[:, None]).abs() < side_B[:, None] / 2)
    box_B1HW = (inside[0][:, :, None] & inside[1][:, None, :]).unsqueeze(1)
    return torch.where(box_B1HW.to(x_BCHW.device), _others(x_BCHW, generator), x_BCHW)


def _jitter(x_BCHW: Tensor, most: float, generator: torch.Generator) -> Tensor:
    """Contrast and brightness: of normalised values, a factor and a term."""
    factor_B, term_B = 1 + most * _around_zero(x_BCHW, generator), most * _around_zero(x_BCHW, generator)
    return x_BCHW * _spread(factor_B.to(x_BCHW.dtype), x_BCHW) + _spread(term_B.to(x_BCHW.dtype), x_BCHW)


def _uniform(x_BCHW: Tensor, generator: torch.Generator) -> Tensor:
    """One number from 0 to 1 for each image, on the CPU as all that is drawn."""
    return torch.rand(len(x_BCHW), generator=generator, dtype=torch.float32)


def _around_zero(x_BCHW: Tensor, generator: torch.Generator) -> Tensor:
    return 2 * _uniform(x_BCHW, generator) - 1


def _beta(x_BCHW: Tensor, concentration: float, generator: torch.Generator) -> Tensor:
    """One Beta-distributed number for each image. torch draws these from no generator but its own."""
    seed = int(torch.randint(2**62, (), generator=generator))
    drawn = np.random.default_rng(seed).beta(concentration, concentration, len(x_BCHW))
    return torch.from_numpy(drawn).float()


def _others(x_BCHW: Tensor, generator: torch.Generator) -> Tensor:
    """The images in another order."""
    return x_BCHW[torch.randperm(len(x_BCHW), generator=generator).to(x_BCHW.device)]


def _spread(values_B: Tensor, x_BCHW: Tensor) -> Tensor:
    """Where the images are, one value for all pixels of an image."""
    return values_B.to(x_BCHW.device).view(-1, 1, 1, 1)


MIXING = ("mixup", "cutmix")
AUGMENTATIONS = {
    "flip": Augmentation(_flip, 0.5, 0, 1, "how often an image is mirrored left to right"),
    "crop": Augmentation(_crop, 0.5, 0.01, 1, "the least share of an image's area that is kept and stretched"),
    "shift": Augmentation(_shift, 8, 0, 10_000, "by how many pixels at most an image is moved"),
    "mixup": Augmentation(_mixup, 0.2, 0.01, 100, "a of the Beta(a, a) by which two images are blended"),
    "cutmix": Augmentation(_cutmix, 1, 0.01, 100, "a of the Beta(a, a) that is left by a box of another image"),
    "jitter": Augmentation(_jitter, 0.2, 0, 1, "by how much contrast and brightness change at most"),
}
