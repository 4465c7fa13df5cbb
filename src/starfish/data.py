"""Images: a folder, folders by class or a tensor file → decoded once, batched with random access."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from starfish.core import Images, Long
from starfish.errors import UserError, listed
from starfish.files import read_safetensors

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".gif"}
Interpolation = Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"]
Mode = Literal["center", "squash"]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MOST_UNREADABLE = 0.05  # of the images; more stops the run
MEMORY_SHARE = 0.25  # of the free memory that one thing may take before it goes to a scratch file
RESERVE = 2**29  # bytes that stay free for all else, however many such things there are


@dataclass(frozen=True)
class Preprocess:
    """From a picture to the model's input. Every field can be overridden with `--set`, and the run records them all."""

    resize: int | None = None  # short side in pixels (mode "center"); None leaves tensor files as they are
    crop: int | None = None  # side of the square the model sees
    interpolation: Interpolation = "bicubic"
    mode: Mode = "center"  # squash: both sides to `resize`, whatever the shape
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise UserError(
                f"mean has {len(self.mean)} values and std has {len(self.std)}", "give both, one value a channel"
            )
        for name, side in (("resize", self.resize), ("crop", self.crop)):
            if side is not None and side < 1:
                raise UserError(f"`{name}` is {side}", "give a side in pixels")

    def pixels(self, picture: Image.Image) -> Tensor:
        """Resized and cropped, as uint8 x_CHW."""
        picture = ImageOps.exif_transpose(picture)
        if picture.mode.startswith("I"):  # 16 bits a pixel, which `convert` would clip to white
            picture = Image.fromarray((np.asarray(picture) // 256).clip(0, 255).astype(np.uint8))
        picture = picture.convert("L" if len(self.mean) == 1 else "RGB")
        resize, crop = self.resize or 256, self.crop or 224
        size = [resize, resize] if self.mode == "squash" else [resize]
        picture = F.resize(picture, size, interpolation=InterpolationMode(self.interpolation))
        pixels: Tensor = F.pil_to_tensor(F.center_crop(picture, [crop, crop]))
        return pixels

    def normalise(self, pixels_NCHW: Tensor) -> Tensor:
        mean, std = torch.tensor(self.mean).view(-1, 1, 1), torch.tensor(self.std).view(-1, 1, 1)
        return (pixels_NCHW.float() / 255 - mean) / std


@dataclass
class StoredImages:
    """Decoded images: uint8 pixels normalised as they are read, or floats that are the model's input already."""

    pixels: Tensor
    preprocess: Preprocess
    labels: Tensor | None = None
    skipped: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.pixels)

    def batch(self, indices: Sequence[int]) -> Tensor:
        chosen = self.pixels[torch.as_tensor(indices, dtype=torch.long)]
        return self.preprocess.normalise(chosen) if chosen.dtype == torch.uint8 else chosen

    def split(self, size: int) -> tuple[StoredImages, StoredImages]:
        """The first `size` images and the rest."""
        labels = (None, None) if self.labels is None else (self.labels[:size], self.labels[size:])
        parts = (self.pixels[:size], self.pixels[size:])
        return (
            StoredImages(parts[0], self.preprocess, labels[0], self.skipped),
            StoredImages(parts[1], self.preprocess, labels[1]),
        )


@dataclass(frozen=True)
class Keyed:
    """Inputs that are dicts of tensors, as transformers models take them: row i of every tensor is input i."""

    tensors: dict[str, Tensor]
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        rows = torch.as_tensor(indices, dtype=torch.long)
        return {name: tensor[rows] for name, tensor in self.tensors.items()}


def digest_of(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().data if flat.numel() else b"").hexdigest()


@dataclass(frozen=True)
class Some:
    """Some of the images, without their labels."""

    images: Images
    indices: Sequence[int]

    @property
    def labels(self) -> None:
        return None

    def __len__(self) -> int:
        return len(self.indices)

    def batch(self, indices: Sequence[int]) -> Any:
        return self.images.batch([self.indices[index] for index in indices])


def spread(images: Images, most: int) -> Images:
    """At most so many of the images, evenly over all of them; 0 takes all."""
    size = len(images)
    return Some(images, [place * size // most for place in range(most)]) if 0 < most < size else images


def as_images(given: Any) -> Any:
    """What a Python user hands us as images: a tensor of inputs, a dict of tensors, or an iterable of either in
    batches (with or without labels, as data loaders give them)."""
    if isinstance(given, Tensor):
        return _inputs(given, None)
    if isinstance(given, Mapping):
        return _keyed([given])
    if isinstance(given, StoredImages | Keyed):
        return given
    if isinstance(given, Dataset) and not isinstance(given, Iterable):
        return _gathered(given[place] for place in range(len(given)))  # type: ignore[arg-type]  # map-style: has a length
    return _gathered(given) if isinstance(given, Iterable) else given


def _keyed(batches: Sequence[Mapping[str, Any]]) -> Keyed:
    """`labels` among the tensors are labels, not an input: a model given both would work out a loss of its own."""
    names = set(batches[0])
    odd = sorted(name for name in names if not all(isinstance(batch.get(name), Tensor) for batch in batches))
    if odd or not names - {"labels"}:
        raise UserError(f"images are dicts and hold no tensor under {listed(odd)}", "give a dict of tensors")
    tensors = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    sizes = {name: len(tensor) for name, tensor in tensors.items()}
    if len(set(sizes.values())) > 1 or 0 in sizes.values():
        raise UserError(f"images are a dict of tensors of lengths {sizes}", "row i of every tensor must be input i")
    labels = tensors.pop("labels", None)
    return Keyed(tensors, labels)


def _inputs(inputs: Tensor, labels: Tensor | None) -> StoredImages:
    if not len(inputs):
        raise UserError("there are no images", "give a tensor, or batches of tensors that can be read more than once")
    if not inputs.is_floating_point():
        raise UserError(
            f"images are {inputs.dtype}; a model needs floats",
            "normalise them, or use starfish.data.StoredImages(pixels, Preprocess(mean=…, std=…))",
        )
    return StoredImages(inputs, Preprocess(), labels)


def _gathered(batches: Iterable[Any]) -> StoredImages | Keyed:
    inputs: list[Tensor] = []
    labels: list[Tensor] = []
    batches = list(batches)
    if batches and isinstance(batches[0], Mapping):
        return _keyed(batches)
    for batch in batches:
        first, rest = (batch[0], batch[1:]) if isinstance(batch, tuple | list) else (batch, ())
        if not isinstance(first, Tensor):
            raise UserError(
                f"images hold a {type(first).__name__}",
                "give a tensor, or batches of tensors; starfish.data.load reads folders and files",
            )
        inputs.append(first.unsqueeze(0) if first.ndim == 3 and len(first) in (1, 3) else first)  # a lone picture
        if rest:
            labels.append(torch.as_tensor(rest[0]).reshape(-1))
    return _inputs(torch.cat(inputs) if inputs else torch.empty(0), torch.cat(labels) if labels else None)


def load(
    source: str,
    preprocess: Preprocess,
    *,
    role: Literal["calib", "eval"] = "calib",
    limit: int | None = None,
    seed: int = 0,
    classes: int | None = None,
) -> Long[StoredImages]:
    """Read `source` in a seeded random order, at most `limit` images; `classes` is how many the model knows."""
    path, _, key = source.partition("::")
    if Path(path).is_dir():
        return (yield from _folder(Path(path), role, preprocess, limit, seed, classes))
    if Path(path).suffix in {".npz", ".safetensors"}:
        return (yield from _tensor_file(Path(path), key, role, preprocess, limit, seed))
    what = "is no folder and no tensor file" if Path(path).exists() else "does not exist"
    raise UserError(f"the image source `{source}` {what}", "give a folder of images, or a .npz / .safetensors file")


def _order(size: int, limit: int | None, seed: int) -> list[int]:
    if limit is not None and limit < 1:
        raise UserError(f"--limit is {limit}", "take at least 1 image")
    order: list[int] = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
    return order[:limit]


def _folder(
    folder: Path, role: str, preprocess: Preprocess, limit: int | None, seed: int, classes: int | None
) -> Long[StoredImages]:
    files, names = _pictures(folder)
    label_of = _labelled(names, role, classes, folder)
    order = _order(len(files), limit, seed)
    pixels, unreadable = yield from _decoded([files[i] for i in order], preprocess)
    kept = [i for place, i in enumerate(order) if place not in unreadable]
    labels = None
    if label_of is not None:
        assert names is not None
        labels = torch.tensor([label_of[names[i]] for i in kept])
    return StoredImages(pixels, preprocess, labels, [str(files[order[place]]) for place in sorted(unreadable)])


def _pictures(folder: Path) -> tuple[list[Path], list[str] | None]:
    """Image files, sorted, and for folders by class the class folder of each."""
    flat = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if flat:
        return flat, None
    subfolders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    found = [(p, s.name) for s in subfolders for p in sorted(s.rglob("*")) if p.suffix.lower() in SUFFIXES]
    if not found:
        raise UserError(f"no images in `{folder}`", f"starfish reads {', '.join(sorted(SUFFIXES))}")
    return [path for path, _ in found], [name for _, name in found]


def _labelled(names: list[str] | None, role: str, classes: int | None, folder: Path) -> dict[str, int] | None:
    """Class folder → label. Healing needs no labels, so only there may the folders be named as they like."""
    if names is None:
        return None
    try:
        return class_indices(sorted(set(names)), classes, str(folder))
    except UserError:
        if role == "eval":
            raise
        return None


def class_indices(names: list[str], classes: int | None, where: str) -> dict[str, int]:
    """Class folder → label. All classes there: the rank of the name. Fewer: the name must say the index itself."""
    if classes is None or len(names) == classes:
        return {name: rank for rank, name in enumerate(names)}
    if all(name.isdigit() and int(name) < classes for name in names):
        return {name: int(name) for name in names}
    if classes == 1000:
        from timm.data import ImageNetInfo

        synsets = {name: index for index, name in enumerate(ImageNetInfo().label_names())}
        if all(name in synsets for name in names):
            return {name: synsets[name] for name in names}
    raise UserError(
        f"`{where}` has {len(names)} class folders and the model {classes} classes: names do not tell labels",
        "name each folder by its class index (0, 1, …), or give a flat folder to measure without labels",
    )


def _decoded(files: list[Path], preprocess: Preprocess) -> Long[tuple[Tensor, set[int]]]:
    """Pixels of all readable files, and the places of the others. In threads: Pillow decodes without the GIL."""
    crop = preprocess.crop or 224
    pixels = room((len(files), len(preprocess.mean), crop, crop))
    unreadable: set[int] = set()

    def decode(path: Path) -> Tensor | None:
        try:
            with Image.open(path) as picture:
                return preprocess.pixels(picture)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for place, image in enumerate(_ahead(pool, decode, files)):
            if image is None:
                unreadable.add(place)
                _check_unreadable(files, unreadable)
            else:
                pixels[place - len(unreadable)] = image
            yield {"stage": "decode", "done": place + 1, "total": len(files)}
    if len(unreadable) == len(files):
        raise UserError(f"none of the {len(files)} images can be read", f"the first is `{files[0]}`")
    return pixels[: len(files) - len(unreadable)], unreadable


def _ahead(pool: ThreadPoolExecutor, work: Any, items: list[Path], window: int = 256) -> Iterator[Tensor | None]:
    """`pool.map`, but with at most `window` finished results waiting."""
    for start in range(0, len(items), window):
        yield from pool.map(work, items[start : start + window])


def _check_unreadable(files: list[Path], unreadable: set[int]) -> None:
    if len(unreadable) > max(10, MOST_UNREADABLE * len(files)):
        names = [files[place].name for place in sorted(unreadable)]
        raise UserError(
            f"more than {len(unreadable) - 1} of {len(files)} images cannot be read: {listed(names)}",
            "remove or replace the broken files",
        )


def room(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor:
    """Room for much: memory, or a scratch file that vanishes with the process where memory is short."""
    size, free = int(np.prod(shape)), free_memory()
    if size * dtype.itemsize <= min(MEMORY_SHARE * free, free - RESERVE):
        return torch.empty(shape, dtype=dtype)
    with tempfile.NamedTemporaryFile(prefix="starfish-") as scratch:
        return torch.from_file(scratch.name, shared=True, size=size, dtype=dtype).view(shape)


def free_memory() -> int:
    """Bytes of memory that can be taken without swapping."""
    try:
        with open("/proc/meminfo") as lines:
            facts = dict(line.split(":") for line in lines)
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


ROLE_KEYS = {"calib": ("calib", "train", "images", "x"), "eval": ("eval", "test", "val", "images", "x")}


def _tensor_file(
    path: Path, key: str, role: str, preprocess: Preprocess, limit: int | None, seed: int
) -> Long[StoredImages]:
    arrays = _arrays(path)
    key = key or _image_key(arrays, role, path)
    if key not in arrays:
        raise UserError(f"`{path}` has no array `{key}`", f"it has {listed(sorted(arrays))}")
    images = _channels_first(arrays[key], path, key)
    order = torch.tensor(_order(len(images), limit, seed), dtype=torch.long)
    label_key = next((k for k in (f"{key}_labels", "labels", "targets", "y") if k in arrays), None)
    labels = arrays[label_key].long().reshape(-1) if label_key else None
    if labels is not None and len(labels) != len(images):
        raise UserError(f"`{path}` has {len(images)} images in `{key}` and {len(labels)} labels in `{label_key}`")
    pixels = yield from _fitted(images[order], preprocess)
    return StoredImages(pixels, preprocess, None if labels is None else labels[order])


def _arrays(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return read_safetensors(path)[0]
    if not path.is_file():
        raise UserError(f"there is no file `{path}`")
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
            return {name: torch.from_numpy(array) for name, array in arrays.items() if array.dtype.kind in "biuf"}
    except (OSError, ValueError, EOFError, KeyError, TypeError) as error:
        raise UserError(f"`{path}` cannot be read as a .npz of plain arrays ({error})") from None
    except Exception as error:
        if type(error).__module__ in {"zipfile", "zlib"}:
            raise UserError(f"`{path}` is not a whole .npz file ({error})", "it may be truncated") from None
        raise


def _image_key(arrays: dict[str, Tensor], role: str, path: Path) -> str:
    pictures = [name for name, array in arrays.items() if array.ndim >= 3]
    if len(pictures) == 1:
        return pictures[0]
    for name in ROLE_KEYS[role]:
        if name in pictures:
            return name
    raise UserError(
        f"`{path}` has several arrays that may be the images: {listed(pictures)}" if pictures else
        f"`{path}` holds no images: {listed(sorted(arrays))}",
        f"name one as `{path}::KEY`",
    )  # fmt: skip


def _channels_first(images: Tensor, path: Path, key: str) -> Tensor:
    if images.ndim == 3:
        images = images.unsqueeze(1)
    if images.ndim != 4 or len(images) == 0:
        raise UserError(f"`{key}` in `{path}` has shape {tuple(images.shape)}", "images are N×H×W×C or N×C×H×W")
    if images.shape[-1] in (1, 3) and images.shape[1] not in (1, 3):
        images = images.permute(0, 3, 1, 2)
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise UserError(f"`{key}` in `{path}` is {images.dtype}", "images are uint8, or floats the model can take")
    return images


def _fitted(images: Tensor, preprocess: Preprocess) -> Long[Tensor]:
    """uint8 images of another size than the model's are resized as a picture would be; all others stay as they are."""
    if images.is_floating_point():
        return images.float().contiguous()
    if images.shape[1] != len(preprocess.mean):
        raise UserError(
            f"the images have {images.shape[1]} channels and the model's mean {len(preprocess.mean)}",
            "set mean and std, one value a channel: --set mean=0.5 --set std=0.5",
        )
    if preprocess.crop is None or images.shape[2:] == (preprocess.crop, preprocess.crop):
        return images.contiguous()
    if images.shape[1] not in (1, 3):
        raise UserError(
            f"the images are {tuple(images.shape[1:])} and the model's crop is {preprocess.crop}",
            "only pictures of 1 or 3 channels are resized: store them in the model's size",
        )
    out = room((len(images), images.shape[1], preprocess.crop, preprocess.crop))
    for place, image in enumerate(images):
        out[place] = preprocess.pixels(F.to_pil_image(image))
        yield {"stage": "resize", "done": place + 1, "total": len(images)}
    return out
