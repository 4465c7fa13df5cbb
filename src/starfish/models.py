"""Names → models, each with its own preprocessing; `KINDS` says what a name can be."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import torch
from torch import Tensor, nn
from torchvision.transforms.v2.functional import to_pil_image

from starfish.activations import logits
from starfish.anatomy.attention import is_narrow
from starfish.containers import check_weights, weights_of
from starfish.data import Interpolation, Mode, Preprocess
from starfish.errors import UserError, listed
from starfish.files import read_json, read_object, read_safetensors
from starfish.small import rebuild_, widths

KINDS = {
    "timm/NAME": "any timm model; a bare NAME works too",
    "hf-hub:OWNER/NAME": "a timm model on the Hugging Face hub",
    "local-dir:FOLDER": "a timm model saved in a folder",
    "torchvision/NAME[@WEIGHTS]": "any torchvision classification model",
    "hf/NAME": "a transformers image classifier, on the hub or in a folder",
    "package.module:factory": "a function of yours that returns a module",
    "RUN": "a folder that `starfish heal` or `starfish slim` has written",
}

NO_PREPROCESSING = (
    "load it by a function of yours, as package.module:factory, and choose with --set resize=… crop=… mean=…"
)


@dataclass(frozen=True)
class Loaded:
    """A model, how pictures become its input, and what to write beside its weights so that it can be built again."""

    name: str
    model: nn.Module
    preprocess: Preprocess
    config: dict[str, Any]
    shape: tuple[int, ...] = ()  # of one input, where a run tells


def load(name: str, *, checkpoint: Path | None = None, allow_pickle: bool = False, pretrained: bool = True) -> Loaded:
    """Build `name` in evaluation mode, with the weights of `checkpoint` where given, else with its own published ones
    (or, not `pretrained`, with those its architecture starts from).

    Arguments of the architecture follow a question mark: `timm/mobilenetv1_100?pad_type=same`.
    """
    folder = Path(name.removeprefix("local-dir:"))
    if (folder / "result.json").is_file():
        return load_run(folder, checkpoint=checkpoint, allow_pickle=allow_pickle)
    at_hand = pretrained or name.startswith("local-dir:")  # what lies in a folder need not be fetched
    loaded = _build(name, pretrained=at_hand and checkpoint is None)
    if checkpoint is not None:
        load_weights_(loaded.model, read_object(checkpoint, allow_pickle=allow_pickle), checkpoint)
    loaded.model.eval()
    return loaded


def load_module(name: str, *, checkpoint: Path | None = None, allow_pickle: bool = False) -> nn.Module:
    """The model of a run folder, or of any other name, ready to be called: `starfish.load`."""
    return load(name, checkpoint=checkpoint, allow_pickle=allow_pickle).model


def load_run(folder: Path, *, checkpoint: Path | None = None, allow_pickle: bool = False) -> Loaded:
    """The model of a run folder: in its dense shape, or smaller where "small" in its config.json tells the widths."""
    loaded = architecture(folder)
    if "small" in loaded.config:
        rebuild_(loaded.model, loaded.config["small"]["widths"], loaded.config["small"]["attentions"])
    if checkpoint is None:
        load_weights_(loaded.model, read_safetensors(folder / "model.safetensors")[0], folder)
    else:
        load_weights_(loaded.model, read_object(checkpoint, allow_pickle=allow_pickle), checkpoint)
    loaded.model.eval()
    return loaded


def architecture(folder: Path) -> Loaded:
    """What the model of a run folder was built from: its dense shape, without the weights. Fetches nothing."""
    config = read_json(folder / "config.json")
    facts = config.get("starfish", {})
    if not {"model", "preprocess"} <= facts.keys():
        raise UserError(f"`{folder}` is not a run of the command line: its config.json does not name the model")
    here = {"architecture": f"local-dir:{folder}", "model_type": f"hf/{folder}"}  # timm's or transformers' own config
    name = next((place for key, place in here.items() if key in config), facts["model"])
    model = _build(name, pretrained=False).model
    shape = read_json(folder / "result.json").get("speed", {}).get("input") or ()
    kept = {key: value for key, value in config.items() if key != "starfish"}
    return Loaded(facts["model"], model, preprocess_from(facts["preprocess"]), kept, tuple(shape))


def small_config(dense: nn.Module, small: nn.Module) -> dict[str, Any]:
    """What config.json holds under "small", so that `load_run` can make the module again out of the dense shape."""
    narrow = [path for path, module in small.named_modules() if is_narrow(module)]
    return {"widths": widths(dense.state_dict(), small.state_dict()), "attentions": narrow}


def load_weights_(model: nn.Module, held: Any, where: Path) -> None:
    """Load a state dict, unwrapped from whatever holds it; every name must fit."""
    weights = weights_of(held, model)
    check_weights(where, weights, model)
    model.load_state_dict(weights)


def example(loaded: Loaded, size: int = 2) -> Tensor:
    """Noise of the model's input shape, to look at a model without images."""
    side = loaded.preprocess.crop or 224
    shape = loaded.shape or (len(loaded.preprocess.mean), side, side)
    noise = torch.rand(size, *shape, generator=torch.Generator().manual_seed(0))
    return (noise - 0.5) * 2


@torch.no_grad()
def classes(loaded: Loaded) -> int:
    """How many classes the model tells apart."""
    return int(logits(loaded.model, example(loaded, 1).to(device_of(loaded.model))).shape[-1])


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def known(search: str) -> list[str]:
    """timm and torchvision models whose name contains `search`."""
    import timm
    from torchvision import models

    names = [f"timm/{name}" for name in timm.list_models()]
    names += [f"torchvision/{name}" for name in models.list_models(module=models)]
    return [name for name in names if search in name]


def preprocess_from(fields: dict[str, Any]) -> Preprocess:
    """From JSON, where tuples have become lists."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return Preprocess(**values)


def _build(name: str, *, pretrained: bool) -> Loaded:
    name, _, query = name.partition("?")
    arguments = {key: _value(text) for key, text in parse_qsl(query)}
    full = f"{name}?{query}" if query else name
    if name.startswith("torchvision/"):
        return _torchvision(full, name.removeprefix("torchvision/"), arguments, pretrained)
    if name.startswith("hf/"):
        return _transformers(full, name.removeprefix("hf/"), arguments, pretrained)
    if name.startswith(("hf-hub:", "hf_hub:", "local-dir:", "timm/")):
        return _timm(full, name.removeprefix("timm/"), arguments, pretrained)
    if ":" in name:
        return _factory(full, name, arguments)
    return _timm(full, name, arguments, pretrained)


def _value(text: str) -> Any:
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ValueError:
        return text


@contextlib.contextmanager
def _building(name: str, pretrained: bool) -> Iterator[None]:
    """Libraries raise whatever their network layer does when weights cannot be had: one sentence instead."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        way_out = "give the weights with --checkpoint FILE, or check the name and the network"
        raise UserError(
            f"the model `{name}` could not be built{' with its published weights' if pretrained else ''}: "
            f"{type(error).__name__}: {reason}",
            way_out if pretrained else "check the name and the arguments after its question mark",
        ) from error


def _timm(full: str, name: str, arguments: dict[str, Any], pretrained: bool) -> Loaded:
    import timm

    local = name.startswith("local-dir:")
    if local and not Path(name.removeprefix("local-dir:"), "config.json").is_file():
        raise UserError(f"`{name}` has no config.json", "give a folder that timm or starfish has written")
    if not local and not name.startswith(("hf-hub:", "hf_hub:")) and not timm.is_model(name.split(".")[0]):
        near = get_close_matches(name.split(".")[0], timm.list_models(), n=3)
        hint = f"did you mean {listed(near)}?" if near else "`starfish models` says what a name can be"
        raise UserError(f"timm has no model `{name}`", hint)
    stored = read_json(Path(name.removeprefix("local-dir:"), "config.json")) if local else {}
    if pretrained and "small" in stored:
        raise UserError(f"`{full}` holds a smaller model than its architecture", "give the folder without local-dir:")
    with _building(full, pretrained):
        model = timm.create_model(name, pretrained=pretrained, **arguments)
    arguments = {**stored.get("model_args", {}), **arguments}
    resized = {"img_size": arguments["img_size"]} if "img_size" in arguments else {}  # which timm's config overlooks
    facts = timm.data.resolve_model_data_config(model, args=resized)
    kept = {k: v for k, v in dict(model.pretrained_cfg).items() if _is_plain(v) and k not in {"file", "source"}}
    pretrained_cfg = {**kept, "input_size": list(facts["input_size"])}
    config = {
        "architecture": stored.get("architecture", pretrained_cfg.get("architecture") or name.split(".")[0]),
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "model_args": arguments,
        "pretrained_cfg": pretrained_cfg,
    }
    return Loaded(full, model, _timm_preprocess(facts), config)


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return value is not None


def _timm_preprocess(facts: dict[str, Any]) -> Preprocess:
    height, side = facts["input_size"][-2:]
    mode: Any = facts.get("crop_mode") or "center"
    if mode == "border" or height != side:
        wants = "`border` cropping" if mode == "border" else f"images of {height}×{side}"
        raise UserError(f"the model wants {wants}, which starfish does not do", NO_PREPROCESSING)
    return Preprocess(
        resize=int(side / facts["crop_pct"]),
        crop=side,
        interpolation=facts["interpolation"],
        mode=mode,
        mean=tuple(facts["mean"]),
        std=tuple(facts["std"]),
    )


def _torchvision(full: str, name: str, arguments: dict[str, Any], pretrained: bool) -> Loaded:
    from torchvision import models

    name, _, weights_name = name.partition("@")
    known = models.list_models(module=models)
    if name not in known:
        near = get_close_matches(name, known, n=3)
        raise UserError(f"torchvision has no classifier `{name}`", f"did you mean {listed(near)}?" if near else "")
    choices = models.get_model_weights(name)
    if weights_name and weights_name not in choices.__members__:
        raise UserError(f"`{name}` has no weights `{weights_name}`", f"it has {listed(list(choices.__members__))}")
    weights = choices[weights_name] if weights_name else choices.DEFAULT
    with _building(full, pretrained):
        model = models.get_model(name, weights=weights if pretrained else None, **arguments)
    facts = weights.transforms()
    preprocess = Preprocess(
        resize=facts.resize_size[0],
        crop=facts.crop_size[0],
        interpolation=facts.interpolation.value,
        mean=tuple(facts.mean),
        std=tuple(facts.std),
    )
    return Loaded(full, model, preprocess, {})


def _transformers(full: str, name: str, arguments: dict[str, Any], pretrained: bool) -> Loaded:
    try:
        from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification
    except ImportError:
        raise UserError("`hf/` models need transformers", "pip install 'starfish-heal[hf]'") from None
    with _building(full, pretrained):
        config = AutoConfig.from_pretrained(name, **arguments)
        if pretrained:
            model = AutoModelForImageClassification.from_pretrained(name, config=config)
        else:
            model = AutoModelForImageClassification.from_config(config)
        try:
            processor = AutoImageProcessor.from_pretrained(name)
        except (OSError, ValueError):
            processor = None
    if processor is None:
        side = getattr(config, "image_size", 224)
        preprocess = Preprocess(side, side, "bilinear", "squash")
    else:
        preprocess = _transformers_preprocess(processor, full)
    model.float()  # published in half precision or not: healing takes small steps
    return Loaded(full, model, preprocess, {**config.to_dict(), "dtype": "float32"})


def _transformers_preprocess(processor: Any, name: str) -> Preprocess:
    facts = processor.to_dict()
    size, crop_size = facts.get("size") or {}, facts.get("crop_size") or {}
    side = size.get("shortest_edge") or size.get("height") or 224
    crop, resize = side, side
    mode: Mode = "center" if "shortest_edge" in size else "squash"
    if "crop_pct" in facts and side < 384:  # ConvNeXt's and PoolFormer's own ways
        resize = int(side / facts["crop_pct"])
    elif "crop_pct" in facts:
        mode = "squash"
    if facts.get("do_center_crop"):
        crop = crop_size.get("height", side)
    normalised = facts.get("do_normalize", True)
    preprocess = Preprocess(
        resize=resize,
        crop=crop,
        interpolation=PILLOW[facts.get("resample", 2)],
        mode=mode,
        mean=tuple(facts["image_mean"]) if normalised else (0.0, 0.0, 0.0),
        std=tuple(facts["image_std"]) if normalised else (1.0, 1.0, 1.0),
    )
    _check_same(preprocess, processor, name)
    return preprocess


PILLOW: tuple[Interpolation, ...] = (
    "nearest",
    "lanczos",
    "bilinear",
    "bicubic",
    "box",
    "hamming",
)  # as Pillow numbers them


def _check_same(preprocess: Preprocess, processor: Any, name: str) -> None:
    """Processors have ways of their own: compare on a picture, where roundings are far below a wrong way."""
    levels = torch.rand(3, 9, 12, generator=torch.Generator().manual_seed(0))
    picture = to_pil_image(nn.functional.interpolate(levels[None], (450, 600), mode="bilinear")[0])
    wanted = torch.as_tensor(processor(picture, return_tensors="pt")["pixel_values"][0])
    ours = preprocess.normalise(preprocess.pixels(picture)[None])[0]
    if wanted.shape != ours.shape or float((wanted - ours).abs().mean()) > 0.02 * float(wanted.std()):
        raise UserError(
            f"`{name}` prepares its images with {type(processor).__name__} in a way that starfish does not know",
            NO_PREPROCESSING,
        )


def _factory(full: str, name: str, arguments: dict[str, Any]) -> Loaded:
    module_name, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: the user's own file is beside them
    try:
        factory = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"`{name}` cannot be imported: {error}", "write it as package.module:factory, seen from this folder"
        ) from error
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise UserError(
            f"`{full}` cannot be called: {error}", "arguments follow a question mark: ?depth=2&width=64"
        ) from None
    model = factory(**arguments)
    if not isinstance(model, nn.Module):
        raise UserError(f"`{name}` returned a {type(model).__name__}, not a torch module")
    facts = getattr(model, "pretrained_cfg", None)
    if not isinstance(facts, dict):
        return Loaded(full, model, Preprocess(), {})
    from timm.data import resolve_data_config

    return Loaded(full, model, _timm_preprocess(resolve_data_config({}, pretrained_cfg=facts)), {})
