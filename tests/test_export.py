"""Files for other programs give the answers that torch gives, for any number of images."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
import torchvision
from safetensors.torch import load_file
from torch import Tensor, nn

import starfish
from cases import IMAGES, tiny_cnn, tiny_vit
from starfish import export
from starfish.anatomy import find
from starfish.export import FORMATS, to_onnx, to_safetensors
from starfish.masks import apply_
from starfish.pruners.structured import Structured
from starfish.small import disagreement, slimmed


def torchvision_vit() -> nn.Module:
    model = torchvision.models.VisionTransformer(32, 8, 2, 3, 24, 48, num_classes=5)
    nn.init.normal_(model.heads.head.weight)
    return model.eval()


KINDS = {"timm": (tiny_vit, "mlp+qk"), "torchvision": (torchvision_vit, "mlp+qk"), "cnn": (tiny_cnn, "channels")}


@cache
def _three(kind: str) -> dict[str, nn.Module]:
    build, scope = KINDS[kind]
    dense = build()
    masks = starfish.prune(dense, Structured(0.5, scope=scope, criterion="weight"), IMAGES[:2])
    masked = deepcopy(dense)
    apply_(masked, masks)
    return {"dense": dense, "masked": masked, "small": slimmed(masked, masks, find(masked, IMAGES[:2], channels=True))}


def run(path: Path, inputs: dict[str, Tensor]) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    return torch.from_numpy(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the files of this module's models are written, each once."""
    return tmp_path_factory.mktemp("onnx")


@cache
def written(folder: Path, kind: str, shape: str) -> dict[str, Any]:
    return to_onnx(_three(kind)[shape], IMAGES[:4], folder / kind / f"{shape}.onnx")


@pytest.mark.parametrize(
    ("kind", "shape"), [("timm", "masked"), *((kind, shape) for kind in KINDS for shape in ("dense", "small"))]
)
def test_onnx_answers_as_torch(kind: str, shape: str, folder: Path) -> None:
    """For one image, some, and more than it was translated with; the facts say what it was checked with."""
    model, facts = _three(kind)[shape], written(folder, kind, shape)
    path = folder / kind / f"{shape}.onnx"
    for count in (1, 3, 7):
        with torch.no_grad():
            expected = model(IMAGES[:count])
        assert disagreement(expected, run(path, {"images": IMAGES[:count]})) < 1e-4
    assert not [path for path in (folder / kind).iterdir() if path.suffix != ".onnx"]
    assert facts["bytes"] == path.stat().st_size
    assert (facts["path"], facts["format"], facts["opset"]) == (str(path), "onnx", 18)
    assert facts["largest_difference"] < 1e-4
    assert facts["checked_with"].startswith("onnxruntime ")
    graph = onnx.load(path).graph
    assert [node.name for node in (*graph.input, *graph.output)] == ["images", "logits"]


def test_a_small_model_makes_a_smaller_file(folder: Path) -> None:
    """By the weights that it has no more."""
    bytes_ = [written(folder, "timm", shape)["bytes"] for shape in ("masked", "small")]
    counts = [sum(p.numel() for p in _three("timm")[shape].parameters()) for shape in ("masked", "small")]
    assert bytes_[0] - bytes_[1] == pytest.approx(4 * (counts[0] - counts[1]), rel=0.2)


class Named(nn.Module):
    """Takes its input by name and puts it out among other things, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, pixels: Tensor, scale: Tensor) -> dict[str, Tensor]:
        hidden = pixels.flatten(1) * scale[:, None]
        return {"hidden": hidden, "logits": self.head(hidden)}


def test_inputs_by_name_keep_their_names(tmp_path: Path) -> None:
    """And of all that comes out only the logits stay."""
    model, given = Named().eval(), {"pixels": torch.randn(4, 2, 3), "scale": torch.rand(4)}
    to_onnx(model, given, tmp_path / "model.onnx")
    some = {name: tensor[:3] for name, tensor in given.items()}
    with torch.no_grad():
        expected = model(**some)["logits"]
    assert disagreement(expected, run(tmp_path / "model.onnx", some)) < 1e-5


class Counting(nn.Module):
    """Does as many steps as there are images in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.sum())):
            x = x + 1
        return self.head(x)


def test_what_cannot_be_translated_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one sentence and with a way out, nothing written and nothing printed."""
    with pytest.raises(starfish.UserError, match="`Counting` cannot be translated to ONNX: ") as error:
        to_onnx(Counting(), torch.randn(2, 4), tmp_path / "model.onnx")
    assert "--to safetensors" in error.value.hint
    assert list(tmp_path.iterdir()) == []
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize("drift", [1e-2, float("nan")])
def test_a_file_that_answers_otherwise_is_not_kept(
    drift: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there before stays; nan is no agreement."""
    (tmp_path / "model.onnx").write_text("of before")
    monkeypatch.setattr(export, "disagreement", lambda one, two: drift)
    with pytest.raises(starfish.UserError, match="in onnxruntime the model differs by"):
        to_onnx(nn.Linear(4, 2), torch.randn(2, 4), tmp_path / "model.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    assert (tmp_path / "model.onnx").read_text() == "of before"


def test_more_than_one_file_holds_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "LARGEST", 39)
    with pytest.raises(starfish.UserError, match="GB of weights, and one ONNX file holds less"):
        to_onnx(nn.Linear(4, 2), torch.randn(2, 4), tmp_path / "model.onnx")


@pytest.mark.parametrize(("absent", "message"), [({"onnx"}, "needs `onnx`"), ({"onnx", "onnxscript"}, "`onnxscript`")])
def test_without_the_exporter_it_says_what_to_install(
    absent: set[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None if name in absent else object())
    with pytest.raises(starfish.UserError, match=message) as error:
        to_onnx(nn.Linear(4, 2), torch.randn(2, 4), tmp_path / "model.onnx")
    assert "starfish-heal[onnx]" in error.value.hint


def test_without_onnxruntime_it_is_not_said_to_be_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec: Any = export.importlib.util.find_spec
    monkeypatch.setattr(
        export.importlib.util,
        "find_spec",
        lambda name, *more: None if name == "onnxruntime" else find_spec(name, *more),
    )
    facts = to_onnx(nn.Linear(4, 2), torch.randn(2, 4), tmp_path / "model.onnx")
    assert (facts["largest_difference"], facts["checked_with"]) == (None, None)
    assert (tmp_path / "model.onnx").stat().st_size == facts["bytes"]


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    """Its mode, its tensors, its place."""
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.9)).train()
    before = deepcopy(model.state_dict())
    to_onnx(model, torch.randn(2, 4), tmp_path / "model.onnx")
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_safetensors_is_the_state_dict(tmp_path: Path) -> None:
    """Of the small model here: shapes, names and bits."""
    model = _three("timm")["small"]
    facts = to_safetensors(model, IMAGES, tmp_path / "model.safetensors")
    held = load_file(tmp_path / "model.safetensors")
    assert held.keys() == model.state_dict().keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in model.state_dict().items())
    assert facts == {"path": str(tmp_path / "model.safetensors"), "format": "safetensors",
                     "bytes": (tmp_path / "model.safetensors").stat().st_size}  # fmt: skip


def test_the_formats_go_by_their_names() -> None:
    assert list(FORMATS) == ["onnx", "safetensors"]
    assert [*FORMATS.values()] == [to_onnx, to_safetensors]
