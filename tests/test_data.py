"""From pictures and arrays to exactly the model's own input, with every file accounted for."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchvision import models as torchvision_models

from starfish import data, models
from starfish.core import finish
from starfish.data import Keyed, Preprocess, StoredImages, as_images, class_indices, digest_of
from starfish.errors import UserError

SMALL = Preprocess(resize=20, crop=16, interpolation="bilinear")


def picture(width: int = 90, height: int = 60, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Smooth shapes with some grain, so that a wrong filter, size or offset shows."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (5, 7, 3), dtype=np.uint8)).resize((width, height), Image.BICUBIC)
    grain = random.normal(0, 12, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(coarse) + grain, 0, 255).astype(np.uint8)).convert(mode)


def load(source: Path | str, preprocess: Preprocess = SMALL, **settings: Any) -> StoredImages:
    return finish(data.load(str(source), preprocess, **settings))


# --- preprocessing


@pytest.mark.parametrize("size", [(90, 60), (61, 133), (300, 301), (40, 40)])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize(("crop_mode", "crop_pct", "side"), [("center", 0.9, 48), ("center", 0.875, 33),
                                                             ("squash", 1.0, 48), ("squash", 0.95, 40)])  # fmt: skip
def test_preprocessing_is_timms(
    size: tuple[int, int], interpolation: str, crop_mode: str, crop_pct: float, side: int
) -> None:
    """To float rounding, for every way a timm model can ask for its images."""
    facts = {"input_size": (3, side, side), "interpolation": interpolation, "crop_mode": crop_mode,
             "crop_pct": crop_pct, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.25, 0.3)}  # fmt: skip
    check_timm(facts, picture(*size))


def check_timm(facts: dict[str, Any], image: Image.Image) -> None:
    preprocess = models._timm_preprocess(facts)
    expected = create_transform(**facts)(image)
    found = preprocess.normalise(preprocess.pixels(image)[None])[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["deit_tiny_patch16_224.fb_in1k", "resnet18.a1_in1k", "mobilenetv1_100.ra4_e3600_r224_in1k",
     "tf_efficientnet_lite0.in1k", "convnext_atto.d2_in1k",
     "vit_base_patch16_siglip_224.webli", "beit_base_patch16_224", "tinynet_e.in1k"],
)  # fmt: skip
def test_preprocessing_of_real_models_is_timms(name: str) -> None:
    facts = timm.data.resolve_data_config({}, pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    check_timm(facts, picture(310, 270))


def test_preprocessing_of_a_built_model_is_timms() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    check_timm(resolve_model_data_config(model), picture())


@pytest.mark.parametrize(("name", "weights"), [("resnet18", "IMAGENET1K_V1"), ("vit_b_16", "IMAGENET1K_V1"),
                                               ("vit_b_16", "IMAGENET1K_SWAG_LINEAR_V1"),
                                               ("convnext_tiny", "DEFAULT"),
                                               ("efficientnet_b1", "DEFAULT")])  # fmt: skip
def test_preprocessing_is_torchvisions(name: str, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision_models, "get_model", lambda *_, **__: torch.nn.Linear(1, 1))
    preprocess = models.load(f"torchvision/{name}@{weights}").preprocess
    transforms = torchvision_models.get_model_weights(name)[weights].transforms()
    image = picture(310, 270)
    found = preprocess.normalise(preprocess.pixels(image)[None])[0]
    torch.testing.assert_close(found, transforms(image), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_rotated_photograph_is_turned_upright(orientation: int, tmp_path: Path) -> None:
    """As the camera's EXIF tag says: all eight files show the same picture."""
    turns = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the Transpose operation that undoes what EXIF will do
    image = picture()
    stored = image.transpose(Image.Transpose(turns[orientation])) if orientation in turns else image
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "a.png", exif=exif)
    assert torch.equal(load(tmp_path).pixels[0], SMALL.pixels(image))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1", "LA", "I;16"])
@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_of_every_mode_become_what_the_model_takes(mode: str, channels: int, tmp_path: Path) -> None:
    preprocess = Preprocess(20, 16, mean=(0.5,) * channels, std=(0.5,) * channels)
    image = picture(mode="L" if mode == "I;16" else "RGB").convert("RGBA" if mode == "LA" else "RGB")
    image = (
        Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
        if mode == "I;16"
        else image.convert(mode)
    )
    image.save(tmp_path / ("a.tif" if mode in {"CMYK", "LA"} else "a.png"))
    found = load(tmp_path, preprocess)
    assert found.pixels.shape == (1, channels, 16, 16)
    expected = preprocess.pixels(picture(mode="L" if mode in {"L", "LA", "1", "I;16"} else "RGB"))
    difference = (found.pixels[0].float() - expected.float()).abs().mean()
    assert difference < (40 if mode in {"1", "P"} else 3), "it shows something else"
    assert found.pixels.float().std() > 10


def test_transparency_is_dropped_not_blended() -> None:
    """As timm's and torchvision's loaders do it: `convert("RGB")`."""
    image = picture(mode="RGBA")
    image.putalpha(0)
    assert torch.equal(SMALL.pixels(image), SMALL.pixels(picture()))


@pytest.mark.parametrize("changes", [{"mean": (0.5,)}, {"std": (1.0, 1.0)}, {"crop": 0}, {"resize": -5}])
def test_preprocessing_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        Preprocess(**changes)


# --- folders


def fill(folder: Path, count: int, *, start: int = 0, suffix: str = ".png") -> None:
    """Pictures that can be told apart: each is one grey."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(start, start + count):
        Image.new("RGB", (24, 20), (number * 5,) * 3).save(folder / f"{number:03}{suffix}")


def numbers(found: StoredImages) -> list[int]:
    """Which pictures these are."""
    return [int(pixels[0, 0, 0]) // 5 for pixels in found.pixels]


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    fill(tmp_path, 7)
    fill(tmp_path, 2, start=7, suffix=".BMP")
    (tmp_path / "notes.txt").write_text("not a picture")
    found = load(tmp_path)
    assert found.labels is None
    assert sorted(numbers(found)) == list(range(9))
    assert found.skipped == []
    assert found.pixels.dtype == torch.uint8
    assert found.batch([3, 1]).dtype == torch.float32


@pytest.mark.parametrize("role", ["calib", "eval"])
def test_class_folders_are_labels_by_sorted_name(role: Literal["calib", "eval"], tmp_path: Path) -> None:
    for rank, name in enumerate(["zebra", "ant", "Cat"]):
        fill(tmp_path / name, 4, start=10 * rank)
    fill(tmp_path / "ant" / "more", 1, start=18)
    fill(tmp_path / ".cache", 1, start=40)
    found = load(tmp_path, role=role, classes=3)
    assert found.labels is not None
    label_of = {0: 2, 1: 1, 2: 0}  # Cat, ant, zebra
    assert [label_of[number // 10] for number in numbers(found)] == found.labels.tolist()
    assert len(found) == 13


def test_class_folders_that_are_digits_are_the_labels_themselves(tmp_path: Path) -> None:
    """A subset of the classes, in whatever order the names sort."""
    for name in ("2", "10", "007"):
        fill(tmp_path / name, 2, start=int(name))
    found = load(tmp_path, role="eval", classes=1000)
    assert found.labels is not None
    assert {(number // 1, label) for number, label in zip(numbers(found), found.labels.tolist(), strict=True)} == {
        (2, 2), (3, 2), (10, 10), (11, 10), (7, 7), (8, 7)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("names", "classes", "expected"),
    [
        (["a", "b", "c"], 3, [0, 1, 2]),
        (["a", "b", "c"], None, [0, 1, 2]),
        (["10", "2", "5"], 3, [0, 1, 2]),
        (["10", "2"], 11, [10, 2]),
        (["n01440764", "n01443537", "n15075141"], 1000, [0, 1, 999]),
    ],
)
def test_class_indices(names: list[str], classes: int | None, expected: list[int]) -> None:
    assert class_indices(names, classes, "here") == dict(zip(names, expected, strict=True))


UNTOLD = [(["a", "b"], 3), (["a", "b", "c"], 2), (["10", "2"], 10), (["n01440764", "cat"], 1000), (["n01440764"], 10)]


@pytest.mark.parametrize(("names", "classes"), UNTOLD)
def test_names_that_do_not_tell_the_class_are_refused(names: list[str], classes: int) -> None:
    with pytest.raises(UserError, match=f"has {len(names)} class folders and the model {classes}"):
        class_indices(names, classes, "here")


@pytest.mark.parametrize(("names", "classes"), UNTOLD)
def test_healing_images_may_be_sorted_in_any_way(names: list[str], classes: int, tmp_path: Path) -> None:
    """Healing needs no labels, so folders that are no classes only cost the labels; measuring needs them."""
    for name in names:
        fill(tmp_path / name, 2)
    found = load(tmp_path, role="calib", classes=classes)
    assert len(found) == 2 * len(names)
    assert found.labels is None
    with pytest.raises(UserError, match="class folders"):
        load(tmp_path, role="eval", classes=classes)


@pytest.mark.parametrize("kind", ["text", "truncated", "empty"])
@pytest.mark.parametrize("scratch", [False, True])
def test_a_corrupt_image_is_named_and_skipped_and_labels_stay_with_their_images(
    kind: str, scratch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(3):
        fill(tmp_path / str(rank), 6, start=10 * rank)
    for path in (tmp_path / "0" / "003.png", tmp_path / "2" / "020.png"):
        content = path.read_bytes()
        path.write_bytes({"text": b"not an image", "truncated": content[: len(content) // 2], "empty": b""}[kind])
    if scratch:
        monkeypatch.setattr(data, "free_memory", lambda: 0)
    found = load(tmp_path, role="eval", classes=3)
    assert sorted(found.skipped) == [str(tmp_path / "0" / "003.png"), str(tmp_path / "2" / "020.png")]
    assert len(found) == 16
    assert found.labels is not None
    assert [number // 10 for number in numbers(found)] == found.labels.tolist()
    assert sorted(numbers(found)) == sorted({*range(6), *range(10, 16), *range(20, 26)} - {3, 20})


def test_a_picture_that_is_a_bomb_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 3)
    picture(200, 200).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert load(tmp_path).skipped == [str(tmp_path / "bomb.png")]


def test_too_many_corrupt_images_stop_the_run(tmp_path: Path) -> None:
    fill(tmp_path, 40)
    for number in range(11):
        (tmp_path / f"{number:03}.png").write_text("broken")
    with pytest.raises(UserError, match="more than 10 of 40 images cannot be read"):
        load(tmp_path)


def test_a_folder_of_corrupt_images_is_refused(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_text("broken")
    with pytest.raises(UserError, match="none of the 3 images can be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "no images in"),
        ("texts", "no images in"),
        ("nothing/here", "does not exist"),
        ("texts/a.txt", "is no folder and no tensor file"),
        ("nothing.npz", "there is no file"),
        ("nothing.safetensors", "there is no file"),
        ("hf://cifar10/test", "does not exist"),
    ],
)
def test_a_source_that_is_none_is_refused_by_name(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    source = name if "://" in name else str(tmp_path / name)
    with pytest.raises(UserError, match=message) as error:
        load(source)
    assert source in error.value.message


def test_a_limit_is_a_seeded_sample_of_exactly_so_many(tmp_path: Path) -> None:
    fill(tmp_path, 30)
    chosen = numbers(load(tmp_path, limit=12, seed=3))
    assert len(set(chosen)) == 12
    assert numbers(load(tmp_path, limit=12, seed=3)) == chosen
    assert set(numbers(load(tmp_path, limit=12, seed=4))) != set(chosen)
    assert numbers(load(tmp_path, limit=5, seed=3)) == chosen[:5], "fewer images are a part of more"
    assert sorted(numbers(load(tmp_path, limit=99))) == list(range(30))


@pytest.mark.parametrize("limit", [0, -3])
def test_a_limit_below_one_is_refused(limit: int, tmp_path: Path) -> None:
    fill(tmp_path, 3)
    with pytest.raises(UserError, match=f"--limit is {limit}"):
        load(tmp_path, limit=limit)


def test_decoding_tells_how_far_it_is(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    rows = list(data.load(str(tmp_path), SMALL))
    assert rows == [{"stage": "decode", "done": done, "total": 3} for done in (1, 2, 3)]


def test_pixels_in_a_scratch_file_are_those_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "pictures", 9)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    in_memory = load(tmp_path / "pictures")
    monkeypatch.setattr(data.tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(data, "free_memory", lambda: 0)
    used = []
    from_file = torch.from_file
    monkeypatch.setattr(torch, "from_file", lambda *a, **k: used.append(a) or from_file(*a, **k))
    on_disk = load(tmp_path / "pictures")
    assert len(used) == 1
    assert used[0][0].startswith(str(scratch))
    assert torch.equal(in_memory.pixels, on_disk.pixels)
    assert torch.equal(in_memory.batch([4, 2]), on_disk.batch([4, 2]))
    assert list(scratch.iterdir()) == []


def test_a_split_keeps_pixels_labels_and_preprocessing(tmp_path: Path) -> None:
    for rank in range(2):
        fill(tmp_path / str(rank), 5, start=10 * rank)
    whole = load(tmp_path, classes=2)
    first, rest = whole.split(7)
    assert (len(first), len(rest)) == (7, 3)
    assert torch.equal(torch.cat([first.pixels, rest.pixels]), whole.pixels)
    assert first.labels is not None
    assert rest.labels is not None
    assert whole.labels is not None
    assert torch.equal(torch.cat([first.labels, rest.labels]), whole.labels)
    assert torch.equal(rest.batch([1]), whole.batch([8]))
    unlabelled = StoredImages(whole.pixels, SMALL).split(3)
    assert [part.labels for part in unlabelled] == [None, None]


# --- tensor files


def write(path: Path, arrays: dict[str, Any]) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **{name: np.asarray(array) for name, array in arrays.items()})
    else:
        save_file({name: torch.as_tensor(array).contiguous() for name, array in arrays.items()}, path)
    return path


@pytest.fixture(params=[".npz", ".safetensors"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    return lambda arrays: write(tmp_path / f"images{request.param}", arrays)


def pictures(count: int = 6, channels: int = 3, side: int = 16) -> Tensor:
    return torch.randint(0, 256, (count, channels, side, side), generator=torch.Generator().manual_seed(5)).byte()


def in_order(found: StoredImages) -> Tensor:
    """Undo the seeded order, which is that of `--limit` for folders too."""
    return found.pixels[torch.tensor(data._order(len(found), None, 0)).argsort()]


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_uint8_images_of_either_layout(layout: str, file: Callable[[dict[str, Any]], Path]) -> None:
    given = pictures()
    found = load(file({"images": given if layout == "NCHW" else given.permute(0, 2, 3, 1)}))
    assert torch.equal(in_order(found), given)
    assert torch.equal(found.batch([2]), SMALL.normalise(found.pixels[[2]]))


def test_grey_images_without_a_channel_dimension(file: Callable[[dict[str, Any]], Path]) -> None:
    grey = Preprocess(16, 16, mean=(0.5,), std=(0.25,))
    given = pictures(channels=1)
    found = load(file({"images": given[:, 0]}), grey)
    assert torch.equal(in_order(found), given)
    torch.testing.assert_close(found.batch([0]), (found.pixels[[0]] / 255 - 0.5) / 0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_floats_are_the_models_input_already(dtype: torch.dtype, file: Callable[[dict[str, Any]], Path]) -> None:
    """No resize, no normalisation, whatever the size."""
    given = torch.randn(4, 3, 10, 12, dtype=dtype)
    found = load(file({"images": given}))
    assert found.batch([0]).dtype == torch.float32
    assert torch.equal(in_order(found), given.float())
    assert torch.equal(found.batch([1, 0]), found.pixels[[1, 0]])


def test_the_role_chooses_the_array_and_its_labels(file: Callable[[dict[str, Any]], Path]) -> None:
    calib, test = pictures(5), pictures(7) // 2
    path = file({"calib": calib, "eval": test, "eval_labels": torch.arange(7)})
    assert torch.equal(in_order(load(path, role="calib")), calib)
    assert load(path, role="calib").labels is None
    found = load(path, role="eval")
    assert torch.equal(in_order(found), test)
    assert found.labels is not None
    assert all(torch.equal(found.pixels[place], test[label]) for place, label in enumerate(found.labels))


@pytest.mark.parametrize(
    ("keys", "role", "chosen"),
    [
        (("train", "test"), "calib", "train"),
        (("train", "test"), "eval", "test"),
        (("x", "val"), "eval", "val"),
        (("images", "other"), "calib", "images"),
        (("images", "other"), "eval", "images"),
        (("odd",), "eval", "odd"),
    ],
)
def test_names_by_role(keys: tuple[str, ...], role: Literal["calib", "eval"], chosen: str, tmp_path: Path) -> None:
    arrays = {key: pictures() // (place + 1) for place, key in enumerate(keys)}
    found = load(write(tmp_path / "a.npz", arrays), role=role)
    assert torch.equal(in_order(found), arrays[chosen])


def test_an_array_can_be_named(file: Callable[[dict[str, Any]], Path]) -> None:
    path = file({"left": pictures(), "right": pictures() // 2, "right_labels": torch.arange(6)})
    found = load(f"{path}::right")
    assert torch.equal(in_order(found), pictures() // 2)
    assert found.labels is not None
    assert load(f"{path}::left").labels is None
    with pytest.raises(UserError, match="no array `middle`") as error:
        load(f"{path}::middle")
    assert "`left`, `right`, `right_labels`" in error.value.hint


def test_arrays_that_may_all_be_the_images_are_listed(file: Callable[[dict[str, Any]], Path]) -> None:
    path = file({"left": pictures(), "right": pictures(), "labels": torch.arange(6)})
    with pytest.raises(UserError, match="several arrays that may be the images: `left`, `right`") as error:
        load(path)
    assert "::KEY" in error.value.hint


def test_a_file_without_images_lists_what_it_has(file: Callable[[dict[str, Any]], Path]) -> None:
    with pytest.raises(UserError, match="holds no images: `labels`, `x`"):
        load(file({"labels": torch.arange(6), "x": torch.randn(6, 4)}))


@pytest.mark.parametrize("name", ["labels", "targets", "y", "images_labels"])
def test_labels_are_found_and_follow_a_limit(name: str, file: Callable[[dict[str, Any]], Path]) -> None:
    given = pictures(20)
    found = load(file({"images": given, name: torch.arange(20)[:, None]}), limit=8, seed=2)
    assert found.labels is not None
    assert len(found) == len(found.labels) == 8
    assert torch.equal(found.pixels, given[found.labels])


def test_labels_of_another_count_are_refused(file: Callable[[dict[str, Any]], Path]) -> None:
    with pytest.raises(UserError, match="has 6 images in `images` and 5 labels in `labels`"):
        load(file({"images": pictures(), "labels": torch.arange(5)}))


def test_channels_that_do_not_fit_the_model_are_refused(file: Callable[[dict[str, Any]], Path]) -> None:
    with pytest.raises(UserError, match="have 1 channels and the model's mean 3"):
        load(file({"images": pictures(channels=1)}))


@pytest.mark.parametrize("array", [torch.zeros(2, 3, 4, 5, 6), torch.zeros(0, 3, 4, 4), torch.zeros(2, 3, 4, 4).int()])
def test_arrays_that_are_no_images_are_refused(array: Tensor, file: Callable[[dict[str, Any]], Path]) -> None:
    with pytest.raises(UserError, match="`images` in"):
        load(file({"images": array}))


@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_uint8_images_of_another_size_are_resized_as_pictures_are(
    channels: int, scratch: bool, file: Callable[[dict[str, Any]], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if scratch:
        monkeypatch.setattr(data, "free_memory", lambda: 0)
    image = picture(mode="RGB" if channels == 3 else "L")
    preprocess = Preprocess(20, 16, mean=(0.5,) * channels, std=(0.5,) * channels)
    found = load(file({"images": np.asarray(image).copy()[None]}), preprocess)
    assert torch.equal(found.pixels[0], preprocess.pixels(image))


def test_only_pictures_are_resized(file: Callable[[dict[str, Any]], Path]) -> None:
    four = Preprocess(20, 16, mean=(0.5,) * 4, std=(0.5,) * 4)
    assert load(file({"images": pictures(channels=4)}), four).pixels.shape == (6, 4, 16, 16)
    with pytest.raises(UserError, match="model's crop is 16"):
        load(file({"images": pictures(channels=4, side=18)}), four)


def test_without_a_crop_tensor_files_stay_as_they_are(file: Callable[[dict[str, Any]], Path]) -> None:
    assert torch.equal(in_order(load(file({"images": pictures(side=9)}), Preprocess())), pictures(side=9))


def test_names_beside_the_images_do_no_harm(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz", {"images": pictures(), "class_names": np.array(["cat", "dog"])})
    assert len(load(path)) == 6


def test_pickled_arrays_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="plain arrays"):
        load(write(tmp_path / "a.npz", {"images": np.array([{"a": 1}, None], dtype=object)}))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_truncated_files_are_refused_by_name(share: float, suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"a{suffix}", {"images": pictures()})
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(UserError) as error:
        load(path)
    assert str(path) in error.value.message


def test_a_damaged_npz_is_refused_by_name(tmp_path: Path) -> None:
    """The list of contents is whole, a content is not."""
    path = tmp_path / "a.npz"
    np.savez_compressed(path, images=pictures().numpy())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))
    assert zipfile.is_zipfile(path)
    with pytest.raises(UserError, match=r"a\.npz"):
        load(path)


def test_a_single_array_named_npz_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", pictures().numpy())
    (tmp_path / "a.npy").rename(tmp_path / "a.npz")
    with pytest.raises(UserError, match=r"a\.npz"):
        load(tmp_path / "a.npz")


# --- what Python users hand us


def lone(images: Tensor) -> list[Tensor]:
    return list(images)


def in_batches(images: Tensor) -> list[Tensor]:
    return list(images.split(5))


def with_labels(images: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(part, torch.arange(len(part))) for part in images.split(5)]


def loader(images: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(images, torch.arange(12)), batch_size=5)


def dataset(images: Tensor) -> TensorDataset:
    return TensorDataset(images, torch.arange(12))


def generator(images: Tensor) -> Any:
    return (part for part in images.split(5))


@pytest.mark.parametrize("shape", [torch.Tensor, lone, in_batches, with_labels, loader, dataset, generator])
def test_images_come_in_any_of_these_shapes(shape: Callable[[Tensor], Any], images: Tensor) -> None:
    found = as_images(images if shape is torch.Tensor else shape(images))
    assert len(found) == 12
    assert torch.equal(found.batch([0, 11, 5]), images[[0, 11, 5]])
    assert torch.equal(found.batch(range(12)), images)
    if shape in {loader, dataset}:
        assert found.labels.tolist() == list(range(12))
    elif shape is with_labels:
        assert found.labels.tolist() == [0, 1, 2, 3, 4] * 2 + [0, 1]
    else:
        assert found.labels is None


@pytest.mark.parametrize("batches", [1, 3])
def test_inputs_by_keyword(batches: int, images: Tensor) -> None:
    """As transformers models take them; their labels are no input."""
    size = 12 // batches
    given = [
        {"pixel_values": part, "bool_masked_pos": part[:, 0, 0] > 0, "labels": torch.arange(size)}
        for part in images.split(size)
    ]
    found = as_images(given if batches > 1 else given[0])
    assert isinstance(found, Keyed)
    assert len(found) == 12
    batch = found.batch([10, 0])
    assert batch.keys() == {"pixel_values", "bool_masked_pos"}
    assert torch.equal(batch["pixel_values"], images[[10, 0]])
    assert found.labels is not None
    assert found.labels.tolist() == list(range(size)) * batches


def test_what_is_ready_is_left_alone(images: Tensor) -> None:
    for ready in (StoredImages(images, Preprocess()), Keyed({"x": images})):
        assert as_images(ready) is ready

    class Own:
        labels = None

        def __len__(self) -> int:
            return 1

        def batch(self, indices: Any) -> Tensor:
            return images

    own = Own()
    assert as_images(own) is own


@pytest.mark.parametrize("shape", [torch.Tensor, lone, in_batches])
def test_pixels_that_are_not_normalised_are_refused_with_the_way_out(shape: Any) -> None:
    given = pictures()
    with pytest.raises(UserError, match=r"torch\.uint8; a model needs floats") as error:
        as_images(given if shape is torch.Tensor else shape(given))
    assert "StoredImages" in error.value.hint


@pytest.mark.parametrize("given", [[], torch.zeros(0, 3, 4, 4), {}, {"x": torch.zeros(0)}, {"labels": torch.ones(2)},
                                   {"x": [1, 2]}, {"x": torch.ones(2), "y": torch.ones(3)}, "folder/of/images",
                                   [np.zeros((3, 4, 4))], [{"x": torch.ones(2)}, {"y": torch.ones(2)}]])  # fmt: skip
def test_what_cannot_be_images_is_refused(given: Any) -> None:
    with pytest.raises(UserError, match="images"):
        as_images(given)


def test_stored_pixels_are_normalised_as_they_are_read() -> None:
    stored = StoredImages(pictures(), Preprocess(mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7)))
    expected = (pictures()[[3]].double() / 255 - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor(
        [0.5, 0.6, 0.7]
    ).view(3, 1, 1)
    torch.testing.assert_close(stored.batch([3]).double(), expected.double(), rtol=1e-5, atol=1e-6)


def test_the_digest_is_of_the_bytes() -> None:
    x = torch.arange(12.0).view(3, 4)
    assert digest_of(x) == digest_of(x.clone())
    assert digest_of(x.T) == digest_of(x.T.contiguous())
    assert digest_of(x) != digest_of(x + 1e-6)
    assert digest_of(torch.zeros(0)) == digest_of(torch.zeros(0))
    assert digest_of(x.bfloat16()) != digest_of(x)


# --- real images


def test_real_photographs_go_in_as_timm_takes_them(real_data: Path) -> None:
    facts = timm.data.resolve_data_config(
        {}, pretrained_cfg=timm.get_pretrained_cfg("deit_tiny_patch16_224.fb_in1k").to_dict()
    )
    preprocess = models._timm_preprocess(facts)
    found = load(real_data / "imagenet" / "calib", preprocess, limit=4)
    paths = sorted((real_data / "imagenet" / "calib").glob("*.jpg"))
    transform = create_transform(**facts)
    for place, index in enumerate(data._order(len(paths), 4, 0)):
        with Image.open(paths[index]) as image:
            expected = transform(image.convert("RGB"))
        torch.testing.assert_close(found.batch([place])[0], expected, rtol=1e-5, atol=1e-5)


def test_real_class_folders_are_class_indices(real_data: Path) -> None:
    found = load(real_data / "imagenet" / "eval", Preprocess(256, 224), role="eval", classes=1000, limit=4)
    assert found.labels is not None
    assert found.pixels.shape == (4, 3, 224, 224)
    folder = real_data / "imagenet" / "eval"
    names = [path.parent.name for path in data._pictures(folder)[0]]
    assert [int(names[index]) for index in data._order(1000, 4, 0)] == found.labels.tolist()


def test_some_images_are_spread_over_all() -> None:
    """At most so many, evenly spaced; with none too many, or for 0, the images themselves."""
    images = as_images(torch.arange(10.0).view(10, 1, 1, 1))
    assert data.spread(images, 4).batch([0, 1, 2, 3]).flatten().tolist() == [0, 2, 5, 7]
    assert data.spread(images, 10) is images
    assert data.spread(images, 0) is images
    assert len(data.spread(images, 3)) == 3
