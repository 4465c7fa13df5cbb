"""Every kind of name gives its model, its own preprocessing and a config to build it again, or an error that helps."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import starfish
from starfish import files, models
from starfish.anatomy import find
from starfish.data import Preprocess
from starfish.errors import UserError
from starfish.masks import apply_
from starfish.models import Loaded, classes, load
from starfish.pruners.structured import Structured
from starfish.small import slimmed

QUERY = "img_size=32&patch_size=16&embed_dim=24&depth=2&num_heads=3&num_classes=5"
TINY = f"timm/vit_tiny_patch16_224?{QUERY}"
ARGUMENTS = {"img_size": 32, "patch_size": 16, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}


def tiny(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", **ARGUMENTS)
    return model.eval()


def saved(path: Path, model: nn.Module, prefix: str = "") -> Path:
    save_file({prefix + name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return saved(tmp_path / "tiny.safetensors", tiny())


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test goes to the net, and none waits for it."""

    def no_network(*_: object, **__: object) -> Any:
        raise ConnectionError("no network\nwith details")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", no_network)
    monkeypatch.setattr("torch.hub.download_url_to_file", no_network)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def same(a: nn.Module, b: nn.Module, side: int = 32) -> bool:
    x = torch.randn(2, 3, side, side)
    with torch.no_grad():
        return torch.equal(models.logits(a, x), models.logits(b, x))


# --- timm


@pytest.mark.parametrize("name", [TINY, TINY.removeprefix("timm/")])
def test_a_timm_model_with_arguments_and_a_checkpoint(name: str, checkpoint: Path) -> None:
    loaded = load(name, checkpoint=checkpoint)
    assert loaded.name == name
    assert not loaded.model.training
    assert same(loaded.model, tiny())
    assert classes(loaded) == 5
    assert loaded.preprocess == Preprocess(35, 32, "bicubic", "center", (0.5,) * 3, (0.5,) * 3)


def test_a_bare_name_is_timms(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its published weights, unless others are given."""
    asked = []
    create = timm.create_model

    def create_model(name: str, *, pretrained: bool, **arguments: Any) -> nn.Module:
        asked.append((name, pretrained))
        return create(name, pretrained=False, **arguments)

    monkeypatch.setattr(timm, "create_model", create_model)
    loaded = load("tinynet_e.in1k")
    assert load("timm/tinynet_e.in1k").preprocess == loaded.preprocess
    assert asked == [("tinynet_e.in1k", True)] * 2
    assert (loaded.preprocess.crop, loaded.preprocess.resize) == (106, int(106 / 0.875))
    assert classes(loaded) == 1000


@pytest.mark.parametrize(
    ("text", "value"),
    [("same", "same"), ("3", 3), ("0.5", 0.5), ("True", True), ("false", False), ("None", None), ("[1,2]", [1, 2])],
)
def test_arguments_are_values_where_they_read_as_one(text: str, value: Any) -> None:
    assert models._value(text) == value
    assert type(models._value(text)) is type(value)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("deit_tiny_patch16_244", "deit_tiny_patch16_224"),
        ("timm/resnet_50", "resnet50"),
        ("timm/vit_tiny_patch16_22.augreg_in1k", "vit_tiny_patch16_224"),
        ("torchvision/vit_b16", "vit_b_16"),
        ("torchvision/resnet19", "resnet1"),
    ],
)
def test_an_unknown_name_gives_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UserError) as error:
        load(name)
    assert name.rpartition("/")[2] in error.value.message
    assert near in error.value.hint


def test_a_name_like_no_other_gives_the_kinds_of_names() -> None:
    with pytest.raises(UserError) as error:
        load("qqqqq")
    assert "starfish models" in error.value.hint


@pytest.mark.parametrize(
    "name", ["tinynet_e", "hf-hub:timm/tinynet_e.in1k", "torchvision/shufflenet_v2_x0_5", "hf/nobody/nothing"]
)
def test_published_weights_without_a_network(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="could not be built with its published weights") as error:
        load(name)
    assert name in error.value.message
    assert "\n" not in error.value.message
    assert "--checkpoint FILE" in error.value.hint


@pytest.mark.parametrize("name", ["timm/tinynet_e?depth=3", "torchvision/shufflenet_v2_x0_5?depth=3"])
def test_arguments_the_architecture_does_not_take(name: str, checkpoint: Path) -> None:
    """Nothing is said of published weights where a checkpoint was given."""
    with pytest.raises(UserError, match="could not be built: TypeError") as error:
        load(name, checkpoint=checkpoint)
    assert "arguments" in error.value.hint


def written(folder: Path, loaded: Loaded, **more: Any) -> Path:
    """As a run folder is written."""
    folder.mkdir()
    files.write_json(folder / "config.json", {**loaded.config, **more})
    files.write_tensors(folder / "model.safetensors", loaded.model.state_dict())
    return folder


@pytest.mark.parametrize(
    ("name", "side"),
    [
        (TINY, 32),
        ("timm/mobilenetv3_small_050?num_classes=7", 64),
        ("timm/mobilenetv1_100?pad_type=same&num_classes=3", 64),
        ("timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k?depth=1&global_pool=avg&class_token=False", 224),
    ],
)
def test_the_config_builds_the_model_again_in_timm(name: str, side: int, tmp_path: Path) -> None:
    """Identical outputs and preprocessing from `local-dir:`, arguments included, and again from there."""
    loaded = Loaded(name, *fresh(name))
    folder = written(tmp_path / "run", loaded)
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert same(again, loaded.model, side)
    local = load(f"local-dir:{folder}")
    assert same(local.model, loaded.model, side)
    assert local.preprocess == loaded.preprocess
    assert local.config["model_args"] == loaded.config["model_args"]
    twice = written(tmp_path / "twice", local)
    assert same(timm.create_model(f"local-dir:{twice}", pretrained=True).eval(), loaded.model, side)
    assert load(f"local-dir:{twice}").preprocess == loaded.preprocess


def fresh(name: str) -> tuple[nn.Module, Preprocess, dict[str, Any]]:
    """With random weights and random BatchNorm statistics."""
    built = models._build(name, pretrained=False)
    with torch.no_grad():
        for tensor in built.model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.rand_like(tensor))
    return built.model.eval(), built.preprocess, built.config


@pytest.mark.parametrize("content", [None, "{", '{"no": "architecture"}'])
def test_a_folder_that_timm_cannot_read_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError) as error:
        load(f"local-dir:{tmp_path}")
    assert str(tmp_path) in error.value.message


def test_preprocessing_starfish_does_not_do_is_refused() -> None:
    facts = timm.data.resolve_data_config({}, pretrained_cfg={"input_size": (3, 64, 48)})
    with pytest.raises(UserError, match="64×48") as error:
        models._timm_preprocess(facts)
    assert "package.module:factory" in error.value.hint
    with pytest.raises(UserError, match="border"):
        models._timm_preprocess({**facts, "input_size": (3, 64, 64), "crop_mode": "border"})


# --- run folders


FACTS = {"resize": 40, "crop": 32, "interpolation": "bilinear", "mode": "squash", "mean": [0.1] * 3, "std": [0.2] * 3}


def test_a_run_loads_with_its_own_preprocessing(tmp_path: Path) -> None:
    """That of the run, which `--set` may have changed."""
    loaded = Loaded(TINY, *fresh(TINY))
    folder = written(tmp_path / "run", loaded, starfish={"model": TINY, "preprocess": FACTS})
    (folder / "result.json").write_text("{}")
    again = load(str(folder))
    assert again.name == TINY
    assert same(again.model, loaded.model)
    assert not again.model.training
    assert again.preprocess == Preprocess(40, 32, "bilinear", "squash", (0.1,) * 3, (0.2,) * 3)


@pytest.mark.parametrize("source", ["local-dir:{}", "hf-hub:nobody/nothing"])
def test_a_run_does_not_need_the_place_its_model_came_from(source: str, tmp_path: Path) -> None:
    loaded = Loaded(TINY, *fresh(TINY))
    name = source.format(tmp_path / "gone")
    folder = written(tmp_path / "run", loaded, starfish={"model": name, "preprocess": FACTS})
    (folder / "result.json").write_text("{}")
    assert same(load(str(folder)).model, loaded.model)
    assert load(str(folder)).name == name


@pytest.mark.parametrize("config", [{}, {"starfish": {"seed": 1}}])
def test_a_folder_with_a_result_and_no_model_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    files.write_json(tmp_path / "config.json", config)
    with pytest.raises(UserError, match="does not name the model"):
        load(str(tmp_path))


def test_a_run_of_a_torchvision_model(tmp_path: Path) -> None:
    name = "torchvision/shufflenet_v2_x0_5?num_classes=4"
    loaded = Loaded(name, *fresh(name))
    folder = written(tmp_path / "run", loaded, starfish={"model": name, "preprocess": FACTS})
    (folder / "result.json").write_text("{}")
    assert same(load(str(folder)).model, loaded.model, 64)


def small_of(model: nn.Module) -> nn.Module:
    """Half of its neurons and query-key dimensions cut out."""
    images = torch.randn(2, 3, 32, 32)
    masks = starfish.prune(model, Structured(0.5, scope="mlp+qk", criterion="weight"), images)
    apply_(model, masks)
    return slimmed(model, masks, find(model, images))


def test_a_run_of_a_smaller_model_tells_its_widths(tmp_path: Path) -> None:
    """In config.json: its weights fit, and its answers are the same bit for bit. Further weights can be given to it."""
    loaded = Loaded(TINY, *fresh(TINY))
    dense = copy.deepcopy(loaded.model)
    small = small_of(loaded.model)
    config = {**loaded.config, "small": models.small_config(dense, small)}
    folder = written(tmp_path / "run", replace(loaded, model=small, config=config),
                     starfish={"model": TINY, "preprocess": FACTS})  # fmt: skip
    (folder / "result.json").write_text("{}")
    again = load(str(folder))
    assert same(again.model, small)
    assert again.config["small"] == config["small"]
    assert same(load(f"local-dir:{folder}").model, small)
    with torch.no_grad():
        small.head.bias.add_(1)  # type: ignore[union-attr,operator]
    assert same(load(str(folder), checkpoint=saved(tmp_path / "other.safetensors", small)).model, small)
    with pytest.raises(UserError, match="shape"):
        load(str(folder), checkpoint=saved(tmp_path / "dense.safetensors", dense))


def test_timm_alone_cannot_build_a_smaller_model(tmp_path: Path) -> None:
    """A folder that lost its result is not taken for one of timm's own."""
    loaded = Loaded(TINY, *fresh(TINY))
    config = {**loaded.config, "small": {"widths": {}, "attentions": []}}
    folder = written(tmp_path / "run", replace(loaded, config=config))
    with pytest.raises(UserError, match="holds a smaller model than its architecture"):
        load(f"local-dir:{folder}")


def test_the_small_config_of_a_model_that_is_not_smaller_is_empty() -> None:
    assert models.small_config(tiny(), tiny()) == {"widths": {}, "attentions": []}


# --- torchvision


def test_a_torchvision_model_with_its_weights_preprocessing(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = torchvision.models.shufflenet_v2_x0_5().eval()
    path = saved(tmp_path / "w.safetensors", model)
    loaded = load("torchvision/shufflenet_v2_x0_5@IMAGENET1K_V1", checkpoint=path)
    assert same(loaded.model, model, 64)
    assert loaded.preprocess == Preprocess(256, 224, "bilinear")
    assert loaded.config == {}


def test_torchvision_weights_are_the_ones_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        torchvision.models, "get_model", lambda name, weights: asked.append(weights.name) or nn.Linear(1, 1)
    )
    assert load("torchvision/resnet50@IMAGENET1K_V1").preprocess.resize == 256
    assert load("torchvision/resnet50").preprocess.resize == 232
    assert asked == ["IMAGENET1K_V1", "IMAGENET1K_V2"]


def test_wrong_torchvision_weights_are_refused_with_those_there_are() -> None:
    with pytest.raises(UserError, match="`resnet50` has no weights `IMAGENET22K`") as error:
        load("torchvision/resnet50@IMAGENET22K")
    assert "`IMAGENET1K_V1`, `IMAGENET1K_V2`" in error.value.hint


# --- transformers


PROCESSORS: dict[str, tuple[str, dict[str, Any], Preprocess]] = {
    "squash": (
        "ViTImageProcessor",
        {"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.4] * 3, "resample": 2},
        Preprocess(32, 32, "bilinear", "squash", (0.5,) * 3, (0.4,) * 3),
    ),
    "center": (
        "BitImageProcessor",
        {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}, "resample": 3,
         "image_mean": [0.5] * 3, "image_std": [0.4] * 3},
        Preprocess(36, 32, "bicubic", "center", (0.5,) * 3, (0.4,) * 3),
    ),
    "squash then crop": (
        "DeiTImageProcessor",
        {"size": {"height": 36, "width": 36}, "crop_size": {"height": 32, "width": 32}, "resample": 3,
         "image_mean": [0.5] * 3, "image_std": [0.4] * 3},
        Preprocess(36, 32, "bicubic", "squash", (0.5,) * 3, (0.4,) * 3),
    ),
    "nearest": (
        "ViTImageProcessor",
        {"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.4] * 3, "resample": 0},
        Preprocess(32, 32, "nearest", "squash", (0.5,) * 3, (0.4,) * 3),
    ),
    "not normalised": (
        "ViTImageProcessor",
        {"size": {"height": 32, "width": 32}, "do_normalize": False, "resample": 3},
        Preprocess(32, 32, "bicubic", "squash", (0.0,) * 3, (1.0,) * 3),
    ),
    "ConvNeXt": (
        "ConvNextImageProcessor",
        {"size": {"shortest_edge": 32}, "crop_pct": 0.875, "resample": 3, "image_mean": [0.5] * 3,
         "image_std": [0.4] * 3},
        Preprocess(36, 32, "bicubic", "center", (0.5,) * 3, (0.4,) * 3),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny transformers classifier, as `save_pretrained` leaves it."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(2)
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48, image_size=32, patch_size=16,
        num_labels=5,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("hf")
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    yield folder
    transformers.utils.logging.enable_progress_bar()


@pytest.fixture
def hf(hf_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may add to."""
    folder = tmp_path / "hf"
    folder.mkdir()
    for path in hf_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def with_processor(folder: Path, kind: str, facts: dict[str, Any]) -> Path:
    import transformers

    getattr(transformers, kind)(**facts).save_pretrained(folder)
    return folder


def processed(folder: Path, image: Image.Image) -> Tensor:
    from transformers import AutoImageProcessor

    return torch.as_tensor(AutoImageProcessor.from_pretrained(folder)(image, return_tensors="pt")["pixel_values"][0])


@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_transformers_model_is_shown_what_its_processor_makes(kind: str, hf: Path) -> None:
    name, facts, expected = PROCESSORS[kind]
    loaded = load(f"hf/{with_processor(hf, name, facts)}")
    assert loaded.preprocess == expected
    ramp = np.linspace(0, 255, 90 * 70 * 3).reshape(70, 90, 3).astype(np.uint8)
    found = loaded.preprocess.normalise(loaded.preprocess.pixels(Image.fromarray(ramp))[None])[0]
    assert float((found - processed(hf, Image.fromarray(ramp))).abs().mean()) < 0.03
    assert classes(loaded) == 5


def test_convnext_warps_from_384_on() -> None:
    from transformers import ConvNextImageProcessor

    processor = ConvNextImageProcessor(size={"shortest_edge": 384}, crop_pct=1.0, resample=3)
    found = models._transformers_preprocess(processor, "x")
    assert (found.resize, found.crop, found.mode) == (384, 384, "squash")


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("MobileViTImageProcessor", {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}),  # BGR
        ("ViTImageProcessor", {"size": {"height": 32, "width": 48}}),
        ("ViTImageProcessor", {"size": {"height": 32, "width": 32}, "rescale_factor": 1 / 127.5}),
        ("LevitImageProcessor", {"size": {"shortest_edge": 200}, "crop_size": {"height": 200, "width": 200}}),
    ],
)
def test_a_processor_with_ways_of_its_own_is_refused(kind: str, facts: dict[str, Any], hf: Path) -> None:
    """Rather than show the model something it was not trained on."""
    with pytest.raises(UserError, match="in a way that starfish does not know") as error:
        load(f"hf/{with_processor(hf, kind, facts)}")
    assert kind in error.value.message
    assert "package.module:factory" in error.value.hint


def test_a_transformers_model_without_a_processor_takes_its_images_as_they_fit(hf: Path) -> None:
    assert load(f"hf/{hf}").preprocess == Preprocess(32, 32, "bilinear", "squash")


def test_the_config_builds_the_transformers_model_again(hf: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageClassification

    loaded = load(f"hf/{hf}")
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.1)
    folder = written(tmp_path / "run", loaded, starfish={"model": f"hf/{hf}", "preprocess": FACTS})
    again = AutoModelForImageClassification.from_pretrained(folder).eval()
    assert same(again, loaded.model)
    (folder / "result.json").write_text("{}")
    assert same(load(str(folder)).model, loaded.model)


def test_half_precision_weights_become_whole_ones(hf: Path, tmp_path: Path) -> None:
    """bfloat16 has steps of one part in 256: healing would be rounded away, then and when the run is loaded."""
    from transformers import AutoModelForImageClassification

    AutoModelForImageClassification.from_pretrained(hf).bfloat16().save_pretrained(hf)
    loaded = load(f"hf/{hf}")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    again = AutoModelForImageClassification.from_pretrained(written(tmp_path / "run", loaded))
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}


def test_a_transformers_model_takes_a_checkpoint(hf: Path, tmp_path: Path) -> None:
    loaded = load(f"hf/{hf}")
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.1)
    path = saved(tmp_path / "w.safetensors", loaded.model)
    assert same(load(f"hf/{hf}", checkpoint=path).model, loaded.model)


def test_without_transformers_it_says_what_to_install(hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="need transformers") as error:
        load(f"hf/{hf}")
    assert "starfish-heal[hf]" in error.value.hint


# --- checkpoints


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_checkpoints_of_either_format_with_the_prefixes_of_wrappers(suffix: str, prefix: str, tmp_path: Path) -> None:
    path = tmp_path / f"w{suffix}"
    state = {prefix + name: tensor for name, tensor in tiny().state_dict().items()}
    if suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    assert same(load(TINY, checkpoint=path).model, tiny())


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict", "state_dict_ema"])
def test_a_state_dict_inside_a_checkpoint(key: str, tmp_path: Path) -> None:
    torch.save({key: tiny().state_dict(), "epoch": 3, "args": {"lr": 0.1}}, tmp_path / "w.pt")
    assert same(load(TINY, checkpoint=tmp_path / "w.pt").model, tiny())


def test_a_pickled_module_only_when_allowed(tmp_path: Path) -> None:
    torch.save(tiny(), tmp_path / "w.pt")
    with pytest.raises(UserError, match="pickled Python objects"):
        load(TINY, checkpoint=tmp_path / "w.pt")
    assert same(load(TINY, checkpoint=tmp_path / "w.pt", allow_pickle=True).model, tiny())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("blocks.1.mlp.fc2.bias"), r"lacks `blocks\.1\.mlp\.fc2\.bias`"),
        (lambda state: state.update(more=torch.ones(1)), r"holds `more`, unknown to the model"),
        (lambda state: state.update({"head.weight": torch.ones(7, 24)}),
         r"`head\.weight` in .* has shape \(7, 24\), in the model \(5, 24\)"),
        (lambda state: state.clear(), "lacks"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused_by_name(change: Any, message: str, tmp_path: Path) -> None:
    state = dict(tiny().state_dict())
    change(state)
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=message) as error:
        load(TINY, checkpoint=tmp_path / "w.safetensors")
    assert "w.safetensors" in error.value.message


def test_old_files_without_a_count_of_batches_are_read(tmp_path: Path) -> None:
    name = "torchvision/shufflenet_v2_x0_5?num_classes=4"
    model = fresh(name)[0]
    state = {key: value for key, value in model.state_dict().items() if not key.endswith("num_batches_tracked")}
    save_file(state, tmp_path / "w.safetensors")
    assert same(load(name, checkpoint=tmp_path / "w.safetensors").model, model, 64)


# --- factories


FACTORY = """
import timm, torch
from torch import nn

def plain(width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 224 * 224, width))

def known():
    model = plain()
    model.pretrained_cfg = {"input_size": (3, 48, 48), "crop_pct": 0.8, "interpolation": "bilinear",
                            "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "crop_mode": "squash"}
    return model

def of_timm():
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)

def needs(width):
    return plain(width)

def number():
    return 5

number_itself = 5
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """A module in the folder where the user stands."""
    name = f"mine_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(FACTORY)
    (tmp_path / f"{name}_broken.py").write_text("import surely_not_installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    yield name
    sys.modules.pop(name, None)


def test_a_factory_gives_its_model_and_arguments_reach_it(factory: str) -> None:
    loaded = load(f"{factory}:plain")
    assert loaded.name == f"{factory}:plain"
    assert loaded.preprocess == Preprocess()
    assert (loaded.config, loaded.model.training) == ({}, False)
    assert classes(loaded) == 4
    assert classes(load(f"{factory}:plain?width=6")) == 6


def test_a_factory_with_a_pretrained_cfg_says_how_images_go_in(factory: str) -> None:
    assert load(f"{factory}:known").preprocess == Preprocess(
        60, 48, "bilinear", "squash", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    )
    assert load(f"{factory}:of_timm").preprocess.mean == (0.5, 0.5, 0.5)


def test_a_factory_takes_a_checkpoint(factory: str, tmp_path: Path) -> None:
    model = load(f"{factory}:plain").model
    path = saved(tmp_path / "w.safetensors", model)
    assert same(load(f"{factory}:plain", checkpoint=path).model, model, 224)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{}:number", "returned a int, not a torch module"),
        ("{}:nothing", "cannot be imported: .* has no attribute 'nothing'"),
        ("{}_broken:plain", "cannot be imported: No module named 'surely_not_installed'"),
        ("{}_not_there:plain", "cannot be imported: No module named"),
        (":plain", "cannot be imported"),
        ("{}:", "cannot be imported"),
        ("{}:plain?depth=3", "cannot be called: .*'depth'"),
        ("{}:needs", "cannot be called: .*'width'"),
        ("{}:number_itself", "cannot be called: .*not a callable"),
    ],
)
def test_a_factory_that_does_not_work_is_refused(name: str, message: str, factory: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load(name.format(factory))
    assert name.format(factory).partition("?")[0] in error.value.message


# --- the rest


def test_known_models_are_found_by_part_of_their_name() -> None:
    found = models.known("vit_b_16")
    assert "torchvision/vit_b_16" in found
    assert all("vit_b_16" in name for name in found)
    assert "timm/deit_tiny_patch16_224" in models.known("deit_tiny_patch16_224")
    assert not [name for name in models.known("") if not name.startswith(("timm/", "torchvision/"))]
    assert not [name for name in models.known("torchvision/") if "fasterrcnn" in name or "deeplab" in name]


def test_the_example_is_the_models_input() -> None:
    loaded = Loaded("x", nn.Linear(1, 1), Preprocess(20, 16, mean=(0.5,), std=(0.5,)), {})
    assert models.example(loaded, 3).shape == (3, 1, 16, 16)
    assert torch.equal(models.example(loaded), models.example(loaded))
    assert models.example(Loaded("x", nn.Linear(1, 1), Preprocess(), {})).shape == (2, 3, 224, 224)


def test_preprocessing_survives_json() -> None:
    from dataclasses import asdict

    given = Preprocess(40, 32, "lanczos", "squash", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert models.preprocess_from(json.loads(json.dumps(asdict(given)))) == given


def test_real_weights_classify_real_photographs(real_data: Path) -> None:
    """DeiT-T knows most of a few validation images; with wrong preprocessing it would not."""
    from starfish import data
    from starfish.core import finish

    loaded = load("timm/deit_tiny_patch16_224", checkpoint=real_data / "deit_tiny_patch16_224.safetensors")
    assert loaded.preprocess == Preprocess(248, 224, "bicubic")
    found = finish(
        data.load(str(real_data / "imagenet" / "eval"), loaded.preprocess, role="eval", classes=1000, limit=24)
    )
    with torch.no_grad():
        answers = loaded.model(found.batch(range(24))).argmax(-1)
    assert found.labels is not None
    assert int((answers == found.labels).sum()) >= 12
