"""`starfish slim`, `export` and `evaluate` on runs that `heal` has left, in this process; loading in a fresh one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file

import starfish as library
from cases import IMAGES, tiny_cnn, tiny_vit
from starfish.small import disagreement
from test_cli import MODEL, QUICK, answer, picture, starfish

CNN = "cases:tiny_cnn"  # as a user names a function beside them


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures, checkpoints, and a healed run of each kind."""
    folder = tmp_path_factory.mktemp("shipping")
    noise = np.random.default_rng(0)
    for place in range(20):
        picture(noise, folder / "labelled" / f"class{place % 5}" / f"{place}.png")
    for name, build in (("vit", tiny_vit), ("cnn", tiny_cnn)):
        save_file(build().state_dict(), folder / f"{name}.safetensors")
    structured = ["--pattern", "structured", "--sparsity", "0.5"]
    heal(folder, "units", MODEL, "vit", [*structured, "--scope", "mlp+qk"], "corp,starfish")
    heal(folder, "scattered", MODEL, "vit", ["--sparsity", "0.5"], "starfish")
    heal(folder, "channels", CNN, "cnn", [*structured, "--scope", "channels"], "starfish")
    return folder


def heal(folder: Path, name: str, model: str, checkpoint: str, prune: list[str], method: str) -> None:
    """Prune and heal into the folder of that name."""
    images, masks = str(folder / "labelled"), str(folder / f"{name}-masks.safetensors")
    given = [model, "--checkpoint", str(folder / f"{checkpoint}.safetensors")]
    size = ["--set", "resize=32", "--set", "crop=32"]
    assert starfish("prune", *given, *prune, "-o", masks) == 0
    words = ["heal", *given, "--masks", masks, "--images", images, "--eval", images, "--method", method]
    assert starfish(*words, *QUICK, *size, "-o", str(folder / name)) == 0


@pytest.fixture(scope="module")
def slims(runs: Path) -> Path:
    """The folder in which each run lies as a small one."""
    for name in ("units", "channels"):
        assert starfish("slim", str(runs / name), "-o", str(runs / "slim" / name)) == 0
    return runs / "slim"


def answers(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IMAGES)
    return found


@pytest.mark.parametrize("name", ["units", "channels"])
def test_the_small_run_answers_as_the_masked_one(name: str, runs: Path, slims: Path) -> None:
    """starfish.load gives either; the small one has fewer weights, in memory and in its file."""
    masked, small = (library.load(str(folder / name)) for folder in (runs, slims))
    assert disagreement(answers(masked), answers(small)) < 1e-5
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (masked, small)]
    assert counts[1] < 0.8 * counts[0]
    sizes = [(folder / name / "model.safetensors").stat().st_size for folder in (runs, slims)]
    assert sizes[1] < sizes[0]
    assert not small.training


def test_a_fresh_process_loads_it(slims: Path, tmp_path: Path) -> None:
    """With nothing but the folder, and the same logits bit for bit."""
    code = """
import sys, torch, starfish
torch.set_num_threads(1)
from safetensors.torch import load_file, save_file
images = load_file(sys.argv[1])["images"]
with torch.no_grad():
    save_file({folder: starfish.load(folder)(images) for folder in sys.argv[3:]}, sys.argv[2])
"""
    save_file({"images": IMAGES}, tmp_path / "images.safetensors")
    folders = [str(slims / name) for name in ("units", "channels")]
    words = [str(tmp_path / "images.safetensors"), str(tmp_path / "logits.safetensors"), *folders]
    beside_the_cnn = Path(__file__).parent
    subprocess.run([sys.executable, "-c", code, *words], check=True, cwd=beside_the_cnn)
    found = load_file(tmp_path / "logits.safetensors")
    assert all(torch.equal(found[folder], answers(library.load(folder))) for folder in folders)


def test_the_small_run_tells_what_was_done(runs: Path, slims: Path) -> None:
    """The figures of the heal, what the three models cost, which units went; its card loads it as it must be loaded."""
    before, found = (json.loads((folder / "units" / "result.json").read_text()) for folder in (runs, slims))
    assert {name: found[name] for name in ("accuracy", "stages", "method", "cut")} == {
        name: before[name] for name in ("accuracy", "stages", "method", "cut")
    }
    units = {"neuron": {"units": 192, "gone": 96}, "qk": {"units": 48, "gone": 24}}
    assert found["slim"]["units"] == found["cut"] == units
    assert found["slim"]["disagreement"] < 1e-5
    speed = found["speed"]
    assert speed["small"]["parameters"] < speed["masked"]["parameters"] == speed["dense"]["parameters"]
    assert speed["small"]["flops"] < speed["masked"]["flops"] == speed["dense"]["flops"]
    assert speed["dense"]["nonzero"] == before["speed"]["dense"]["nonzero"]
    config = json.loads((slims / "units" / "config.json").read_text())
    assert config["small"]["attentions"] == ["blocks.0.attn", "blocks.1.attn"]
    assert config["small"]["widths"]["blocks.0.attn.qkv.weight"] == [48, 24]
    card = (slims / "units" / "README.md").read_text()
    assert 'starfish.load("RUN")' in card
    assert "96 of 192 MLP neurons" in card
    assert "24 of 48 query-key dimensions" in card
    assert "stored as zeros" not in card
    assert not (slims / "units" / "masks.safetensors").exists()


def test_the_card_of_the_masked_run_says_how_to_get_the_small_one(runs: Path) -> None:
    """With figures of all three models, and of both methods."""
    card = (runs / "units" / "README.md").read_text()
    assert "starfish slim RUN -o DIR" in card
    assert re.search(r"\| parameters \| [\d,]+ \| [\d,]+ \| [\d,]+ \|", card)
    assert re.search(r"\| corp \| \d+\.\d\d \| \d+ \|\n\| starfish \| ", card)
    assert "starfish slim" not in (runs / "scattered" / "README.md").read_text()


@pytest.mark.parametrize("name", ["units", "channels"])
def test_evaluate_takes_the_folder(name: str, runs: Path, slims: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The small run has the accuracy of the masked one, and its own size and operations, beside the dense one too."""
    checkpoint = str(runs / ("vit.safetensors" if name == "units" else "cnn.safetensors"))
    model = MODEL if name == "units" else CNN
    masked, small = (
        answer(capsys, "evaluate", str(folder / name), "--eval", str(runs / "labelled"), "--dense", model,
               "--dense-checkpoint", checkpoint)
        for folder in (runs, slims)
    )  # fmt: skip
    result = json.loads((runs / name / "result.json").read_text())
    assert small["accuracy"] == masked["accuracy"] == result["accuracy"]["healed"]
    assert small["fidelity"]["kl"] == pytest.approx(masked["fidelity"]["kl"], abs=1e-5)
    assert small["parameters"] == result["speed"]["small"]["parameters"] < masked["parameters"]
    assert small["flops"] == result["speed"]["small"]["flops"] < masked["flops"]
    assert list(small["latency_ms"]) == ["1", "32"]
    if name == "channels":  # blocks that put out fewer of them are not to be compared with what they were
        assert len(masked["fidelity"]["blocks"]) == 3
        assert (small["fidelity"]["blocks"], small["fidelity"]["cosine"]) == ({}, None)
    else:
        assert small["fidelity"]["blocks"] == pytest.approx(masked["fidelity"]["blocks"], abs=1e-5)


def test_tables_and_what_they_mean(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures on stdout, talk on stderr; --json gives all of it as one object."""
    assert starfish("slim", str(runs / "units"), "-o", str(tmp_path / "small")) == 0
    captured = capsys.readouterr()
    assert re.search(r"dense +masked +small", captured.out)
    assert re.search(r"parameters +[\d,]+ +[\d,]+ +[\d,]+", captured.out)
    assert "he small model is" in captured.err
    assert f'starfish.load("{tmp_path / "small"}") gives the model' in captured.err
    found = answer(capsys, "slim", str(runs / "units"), "-o", str(tmp_path / "again"))
    assert found == json.loads((tmp_path / "again" / "result.json").read_text())


def logits_of(path: Path) -> torch.Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"images": IMAGES.numpy()})[0])


def test_onnx_of_a_run_is_its_small_model(
    runs: Path, slims: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole units are cut out on the way; from the small run comes the same."""
    facts = [answer(capsys, "export", str(folder / "units"), "--to", "onnx", "-o", str(tmp_path / f"{place}.onnx"))
             for place, folder in enumerate((runs, slims))]  # fmt: skip
    expected = answers(library.load(str(runs / "units")))
    for place in (0, 1):
        assert disagreement(expected, logits_of(tmp_path / f"{place}.onnx")) < 1e-4
    assert facts[0]["bytes"] == pytest.approx(facts[1]["bytes"], rel=0.05)
    assert facts[0]["largest_difference"] < 1e-4


@pytest.mark.parametrize("name", ["units", "channels", "scattered"])
def test_safetensors_of_a_run(
    name: str, runs: Path, slims: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What goes on a device: without the units that are gone, else as it is."""
    path = tmp_path / "weights.safetensors"
    assert starfish("export", str(runs / name), "--to", "safetensors", "-o", str(path)) == 0
    assert f"wrote {path}, " in capsys.readouterr().err
    held = load_file(path)
    expected = load_file((runs if name == "scattered" else slims) / name / "model.safetensors")
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[key], tensor) for key, tensor in expected.items())


def test_masks_that_are_not_all_of_units_go_along(runs: Path, tmp_path: Path) -> None:
    """Of neurons and scattered weights the neurons are cut out; zeros that are left have their masks beside them."""
    masks = load_file(runs / "units-masks.safetensors")
    name = "blocks.1.mlp.fc1.weight"
    masks["blocks.0.attn.proj.weight"] = torch.rand(24, 24) > 0.5
    save_file(masks, tmp_path / "masks.safetensors")
    images = str(runs / "labelled")
    words = [
        "heal",
        MODEL,
        "--checkpoint",
        str(runs / "vit.safetensors"),
        "--masks",
        str(tmp_path / "masks.safetensors"),
    ]
    assert starfish(*words, "--images", images, "--method", "starfish", *QUICK, "-o", str(tmp_path / "run")) == 0
    assert starfish("slim", str(tmp_path / "run"), "-o", str(tmp_path / "small")) == 0
    small, left = (load_file(tmp_path / "small" / f"{part}.safetensors") for part in ("model", "masks"))
    assert small[name].shape == left[name].shape == (48, 24)
    assert torch.equal(left["blocks.0.attn.proj.weight"], masks["blocks.0.attn.proj.weight"])
    assert all(not small[name][~mask].any() for name, mask in left.items())
    assert (
        starfish("export", str(tmp_path / "small"), "--to", "safetensors", "-o", str(tmp_path / "w.safetensors")) == 0
    )
    again = load_file(tmp_path / "w.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in small.items())


REFUSALS: list[tuple[list[str], str]] = [
    (["slim", "{runs}/scattered", "-o", "{new}"], "nothing to cut out"),
    (["slim", "{runs}/slim/units", "-o", "{new}"], "has no masks: what was pruned has been cut out of it already"),
    (["slim", "{runs}/labelled", "-o", "{new}"], "holds no finished run"),
    (["slim", "{runs}/units", "-o", "{runs}/slim/units"], "already holds a run"),
    (["slim", "{runs}/units", "-o", "{runs}/labelled"], "is not empty and holds no run"),
    (["export", "{runs}/units", "--to", "tflite", "-o", "{new}"], "there is no format `tflite`"),
    (["export", "{runs}/labelled", "--to", "onnx", "-o", "{new}"], "there is no file .*config.json"),
]


@pytest.mark.parametrize(("words", "complaint"), REFUSALS, ids=[complaint for _, complaint in REFUSALS])
def test_refusals(
    words: list[str], complaint: str, runs: Path, slims: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One clear error and a way out, exit 2, nothing written."""
    held = snapshot(runs)
    assert starfish(*(word.format(runs=runs, new=tmp_path / "new") for word in words)) == 2
    error = capsys.readouterr().err
    assert re.search(complaint, error)
    assert "Traceback" not in error
    assert snapshot(runs) == held
    assert not (tmp_path / "new").exists()


def snapshot(folder: Path) -> dict[str, Any]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_answers_that_would_differ_are_not_written(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Should cutting change more than rounding does, the masked run is what there is."""
    monkeypatch.setattr("starfish.runs.AGREEMENT", -1.0)
    for words in (["slim"], ["export", "--to", "safetensors"]):
        assert starfish(*words, str(runs / "units"), "-o", str(tmp_path / "new")) == 2
        assert "nothing was written, the masked run is good" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
