"""The command line end to end, in this process: what is printed, what is written, how it refuses."""

from __future__ import annotations

import json
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from cases import tiny_vit
from starfish import cli, methods
from starfish.cli import demo

MODEL = "timm/vit_tiny_patch16_224?img_size=32&patch_size=8&embed_dim=24&depth=2&num_heads=3&num_classes=5"
QUICK = ["--set", "epochs=2", "--set", "batch_size=8", "--set", "precision=fp32"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a checkpoint, 30 images and 10 labelled ones by class."""
    monkeypatch.chdir(tmp_path)
    save_file(tiny_vit().state_dict(), tmp_path / "dense.safetensors")
    noise = np.random.default_rng(0)
    for place in range(30):
        picture(noise, tmp_path / "photos" / f"{place}.png")
    for place in range(10):
        picture(noise, tmp_path / "labelled" / f"class{place % 5}" / f"{place}.png")
    return tmp_path


def picture(noise: np.random.Generator, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise.integers(0, 255, (40, 36, 3), dtype=np.uint8)).save(path)


def starfish(*words: str) -> int:
    """Run a command as a shell would; its exit code."""
    before = sys.argv
    sys.argv = ["starfish", *words]
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """The one JSON object of a command that must succeed."""
    capsys.readouterr()
    assert starfish(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def pruned(capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    return answer(capsys, "prune", MODEL, "--checkpoint", "dense.safetensors", "-o", "masks.safetensors", *more)


HEAL = ["heal", MODEL, "--checkpoint", "dense.safetensors", "--images", "photos", *QUICK]


def test_prune_heal_evaluate(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The README's way, with numbers that agree from one command to the next."""
    facts = pruned(capsys, "--sparsity", "0.6", "--scope", "qkv+out+mlp")
    assert facts["sparsity"] == pytest.approx(0.6, abs=1e-3)
    result = answer(capsys, *HEAL, "--masks", "masks.safetensors", "--eval", "labelled", "-o", "run", "--limit", "20")
    assert result["images"] == 20
    assert result["mask_intact"] is True
    assert result["accuracy"]["healed"] is not None
    assert json.loads((here / "run" / "result.json").read_text()) == result
    again = answer(capsys, "evaluate", "run", "--eval", "labelled", "--dense", MODEL, "--dense-checkpoint",
                   "dense.safetensors")  # fmt: skip
    assert again["accuracy"] == result["accuracy"]["healed"]
    assert again["fidelity"]["kl"] == pytest.approx(result["fidelity"]["kl"]["healed"], abs=1e-6)
    assert again["nonzero"] < again["parameters"]
    dense = answer(capsys, "evaluate", MODEL, "--checkpoint", "dense.safetensors", "--eval", "labelled")
    assert dense["accuracy"] == result["accuracy"]["dense"]


def test_tables_without_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures on stdout, talk on stderr; images are held out where there is no --eval."""
    pruned(capsys)
    assert starfish(*HEAL, "--masks", "masks.safetensors", "-o", "run") == 0
    captured = capsys.readouterr()
    assert re.search(r"KL from dense +0\.0000 +\d", captured.out)
    assert "3 of the images are held out" in captured.err
    assert "heal 8/8" in captured.err
    result = json.loads((here / "run" / "result.json").read_text())
    assert (result["images"], result["evaluation"]["images"]) == (27, 3)
    assert result["accuracy"] == {"dense": None, "pruned": None, "healed": None}


def test_a_pruned_checkpoint_is_healed_from_its_own_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--pruned: zeros are the mask, other weights the start; biases that the pruner changed stay changed."""
    weights = load_file("dense.safetensors")
    weights["blocks.0.mlp.fc1.weight"][::2] = 0
    weights["blocks.0.mlp.fc1.bias"] += 1
    save_file(weights, "pruned.safetensors")
    answer(capsys, *HEAL, "--pruned", "pruned.safetensors", "-o", "run")
    healed, masks = load_file("run/model.safetensors"), load_file("run/masks.safetensors")
    assert list(masks) == ["blocks.0.mlp.fc1.weight"]
    assert not healed["blocks.0.mlp.fc1.weight"][::2].any()
    assert torch.equal(healed["blocks.0.mlp.fc1.bias"], weights["blocks.0.mlp.fc1.bias"])
    pruned(capsys)
    assert starfish(*HEAL, "--pruned", "masks.safetensors", "-o", "other") == 2


def test_resume_and_refusal_to_overwrite(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command again is refused; with --resume a finished run answers at once, another one is refused."""
    pruned(capsys)
    words = [*HEAL, "--masks", "masks.safetensors", "-o", "run"]
    result = answer(capsys, *words)
    assert starfish(*words) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert answer(capsys, *words, "--resume") == result
    assert starfish(*words, "--resume", "--set", "lr=1e-5") == 2
    assert "`settings` was" in capsys.readouterr().err


def test_inspect_a_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks, layouts, roles, scopes."""
    facts = answer(capsys, "inspect", MODEL, "--checkpoint", "dense.safetensors")
    assert facts["blocks"] == ["blocks.0", "blocks.1"]
    assert facts["roles"]["blocks.0.attn.qkv.weight"] == "qkv"
    assert facts["default_scope"] == "qkv+out+mlp"
    assert "qk" in facts["scopes"]
    assert starfish("inspect", MODEL, "--checkpoint", "dense.safetensors") == 0
    assert "2 blocks are aligned" in capsys.readouterr().out


def test_inspect_a_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Container, pattern, sparsity of each layer, with the model or without."""
    pruned(capsys, "--pattern", "2:4")
    for model in ([], ["--model", MODEL, "--checkpoint", "dense.safetensors"]):
        facts = answer(capsys, "inspect", "masks.safetensors", *model)
        assert (facts["container"], facts["pattern"], facts["sparsity"]) == ("starfish", "2:4", 0.5)
        assert len(facts["layers"]) == 8
    assert starfish("inspect", "masks.safetensors") == 0
    assert "2:4" in capsys.readouterr().out


def test_inspect_needs_no_weights(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without network or checkpoint the architecture alone says what a file holds; pruned zeros are still seen."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert answer(capsys, "inspect", MODEL)["blocks"] == ["blocks.0", "blocks.1"]
    weights = load_file("dense.safetensors")
    weights["blocks.0.mlp.fc1.weight"][::2] = 0
    save_file(weights, "pruned.safetensors")
    facts = answer(capsys, "inspect", "pruned.safetensors", "--model", MODEL)
    assert [(layer["name"], layer["pattern"]) for layer in facts["layers"]] == [("blocks.0.mlp.fc1.weight", "rows")]
    assert not any("differ from the dense" in note for note in facts["notes"])


def test_a_model_of_the_users_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """package.module:factory, with images in a tensor file."""
    tests = Path(__file__).parent
    (here / "mine.py").write_text(f"import sys\nsys.path.insert(0, {str(tests)!r})\nfrom cases import cifar_resnet20\n")
    noise = np.random.default_rng(0)
    np.savez(here / "images.npz", calib=noise.integers(0, 255, (24, 32, 32, 3), dtype=np.uint8),
             eval=noise.integers(0, 255, (10, 32, 32, 3), dtype=np.uint8), eval_labels=np.arange(10))  # fmt: skip
    facts = answer(capsys, "prune", "mine:cifar_resnet20", "--sparsity", "0.7", "-o", "m.safetensors")
    assert {layer["role"] for layer in facts["layers"]} == {"conv", "head"}
    # the factory draws new weights each time: heal the very ones that were pruned
    from cases import cifar_resnet20

    save_file(cifar_resnet20().state_dict(), "net.safetensors")
    result = answer(capsys, "heal", "mine:cifar_resnet20", "--checkpoint", "net.safetensors", "--masks",
                    "m.safetensors", "--images", "images.npz", "--eval", "images.npz", "-o", "run", *QUICK)  # fmt: skip
    assert (result["images"], result["evaluation"]["images"]) == (24, 10)
    assert result["accuracy"]["healed"] is not None


@pytest.mark.parametrize("command", ["methods", "pruners"])
def test_lists_have_settings_and_needs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With names, defaults and what each needs."""
    found = {entry["name"]: entry for entry in answer(capsys, command)}
    name = "starfish" if command == "methods" else "magnitude"
    assert found[name]["settings"]
    assert found[name]["summary"]
    if command == "methods":
        assert {"starfish", "mse", "kl", "ce", "starfish+kl", "batchnorm"} <= found.keys()
        assert found["ce"]["needs"] == ["labels"]
    assert starfish(command) == 0


def test_models_are_listed_by_part_of_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert "timm/deit_tiny_patch16_224" in answer(capsys, "models", "deit_tiny")["models"]
    assert "RUN" in answer(capsys, "models")["kinds"]
    assert starfish("models", "no-such-model") == 2


def test_doctor_says_that_this_machine_is_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "doctor")["ok"] is True


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["heal", MODEL, "--images", "photos", "-o", "x"], "either --masks or --pruned"),
        ([*HEAL, "--masks", "absent.safetensors", "-o", "x"], "no file `absent.safetensors`"),
        ([*HEAL, "--masks", "masks.safetensors", "-o", "x", "--method", "magic"], "no method `magic`"),
        ([*HEAL, "--masks", "masks.safetensors", "-o", "x", "--recipe", "mine"], "the recipe is `mine`"),
        ([*HEAL, "--masks", "masks.safetensors", "-o", "x", "--set", "learning=1"], "no.* setting `learning`"),
        ([*HEAL, "--masks", "masks.safetensors", "-o", "x", "--set", "lr=fast"], "`lr` is `fast`"),
        ([*HEAL, "--masks", "masks.safetensors", "-o", "x", "--limit", "0"], "--limit is 0"),
        ([*HEAL, "--masks", "masks.safetensors", "-o", "x", "--method", "ce"], "`ce` needs labels"),
        ([*HEAL[:6], "--masks", "masks.safetensors", "-o", "x", "--method", "batchnorm"], "the model has none"),
        ([*HEAL, "--masks", "masks.safetensors", "-o", "x", "--set", "bn=on"], "`bn` is `on`"),
        ([*HEAL, "--masks", "masks.safetensors", "-o", "x", "--blocks", "layers.*"], "matches no module"),
        ([*HEAL, "--masks", "masks.safetensors", "-o", "photos"], "not empty"),
        ([*HEAL, "--masks", "cut.safetensors", "-o", "x"], "not a whole safetensors file"),
        (["prune", MODEL, "-o", "m.pt"], "ends in .safetensors"),
        (["prune", MODEL, "-o", "m.safetensors", "--sparsity", "1.5"], "the sparsity is 1.5"),
        (["prune", MODEL, "-o", "m.safetensors", "--pattern", "4:2"], "the pattern is `4:2`"),
        (["prune", MODEL, "-o", "m.safetensors", "--scope", "conv"], "no weight in `conv`"),
        (["prune", "timm/deit_tinny", "-o", "m.safetensors"], "timm has no model `deit_tinny`"),
        (["inspect", "timm/deit_tiny_patch16_224", "--checkpoint", "absent.pt"], "no file `absent.pt`"),
    ],
)
def test_refusals(words: list[str], complaint: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One clear error and a way out, exit 2, nothing written."""
    if words[0] != "inspect" and "--checkpoint" not in words:
        words = [*words, "--checkpoint", "dense.safetensors"]
    if "masks.safetensors" in words or "cut.safetensors" in words:
        pruned(capsys)
        (here / "cut.safetensors").write_bytes((here / "masks.safetensors").read_bytes()[:-100])
    before = sorted(here.rglob("*"))
    assert starfish(*words) == 2
    error = capsys.readouterr().err
    assert re.search(complaint, error)
    assert "Traceback" not in error
    assert sorted(path for path in here.rglob("*") if "__pycache__" not in str(path)) == before


def test_unknown_options_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert starfish("heal", "--no-such-option") == 2
    assert "no-such-option" in capsys.readouterr().err


def test_sigterm_stops_resumably(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heal that is told to stop exits 130; with --resume it ends in the bytes of one that was not."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pruned(capsys)
    words = [sys.executable, "-m", "starfish", *HEAL, "--masks", "masks.safetensors", "--set", "epochs=25"]
    subprocess.run([*words, "-o", "whole"], check=True, capture_output=True)
    with subprocess.Popen([*words, "-o", "stopped"], stderr=subprocess.PIPE, text=True) as process:
        while not (here / "stopped" / "rows.jsonl").exists() or not (here / "stopped" / "rows.jsonl").read_text():
            time.sleep(0.01)
        process.terminate()
        assert process.stderr is not None
        talk = process.stderr.read()
        assert process.wait() == 130, talk
    assert "--resume" in talk
    subprocess.run([*words, "-o", "stopped", "--resume"], check=True, capture_output=True)
    assert (here / "stopped/model.safetensors").read_bytes() == (here / "whole/model.safetensors").read_bytes()


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model is there, loses most of its accuracy and gets most of it back, here in four epochs of ten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "DEMO_SETTINGS", ["epochs=4", "lr=2e-3", "precision=fp32"])
    (tmp_path / "starfish-demo" / "run").mkdir(parents=True)
    (tmp_path / "starfish-demo" / "run" / "config.json").write_text("{}")  # of an earlier demo: replaced
    accuracy = answer(capsys, "demo")["accuracy"]
    assert accuracy["pruned"] < accuracy["dense"] - 25
    assert accuracy["healed"] > accuracy["dense"] - 15


def test_help_does_not_wait_for_torch() -> None:
    """The command line imports neither torch nor rich's tables to say what it can do, and is quick about it."""
    code = "import sys; sys.argv = ['starfish', '--help']\ntry:\n from starfish.cli import main; main()\nfinally: "
    code += "assert 'torch' not in sys.modules"
    times = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    bare = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    bare = time.perf_counter() - bare
    assert min(times) < max(0.3, 20 * bare), statistics.median(times)


STRUCTURED = ["--pattern", "structured", "--scope", "mlp+qk", "--sparsity", "0.5"]


def kept_units(path: str) -> dict[str, list[int]]:
    """Of each block: neurons and, head by head, query-key dimensions of which every weight is kept."""
    masks = load_file(path)
    found = {}
    for block in (0, 1):
        fc1, fc2, qkv = (masks[f"blocks.{block}.{name}.weight"].bool() for name in ("mlp.fc1", "mlp.fc2", "attn.qkv"))
        assert torch.equal(fc1.all(1), fc2.all(0))
        q, k, v = qkv.all(1).view(3, 3, 8)
        assert torch.equal(q, k)
        assert bool(v.all())
        found[f"blocks.{block}"] = [int(fc1.all(1).sum()), *q.sum(1).tolist()]
    return found


@pytest.mark.parametrize(
    ("more", "criterion", "qk_criterion"),
    [
        ([], "weight", "weight"),
        (["--images", "photos"], "mismatch", "mismatch"),
        (["--images", "photos", "--set", "criterion=ensemble"], "ensemble", "pairs"),
    ],
)
def test_prune_whole_units(
    more: list[str], criterion: str, qk_criterion: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the neurons and half of each head's dimensions, by weights or by what images show; nothing left open."""
    facts = pruned(capsys, *STRUCTURED, *more)
    assert facts["pruner"] == "structured"
    settings = facts["settings"]
    assert (settings["criterion"], settings["qk_criterion"], settings["scope"]) == (criterion, qk_criterion, "mlp+qk")
    assert "auto" not in settings.values()
    assert facts["inconsistencies"] == []
    assert {(unit["block"], unit["kind"]): unit["gone"] for unit in facts["units"]} == {
        (f"blocks.{block}", kind): gone for block in (0, 1) for kind, gone in (("neuron", [48]), ("qk", [4, 4, 4]))
    }
    assert kept_units("masks.safetensors") == {"blocks.0": [48, 4, 4, 4], "blocks.1": [48, 4, 4, 4]}
    again = answer(capsys, "inspect", "masks.safetensors", "--model", MODEL, "--checkpoint", "dense.safetensors")
    assert again["sparsity"] == facts["sparsity"]


def test_prune_whole_units_in_words(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--pruner alone is enough; a budget over the whole model says how far it is, and blocks lose unlike shares."""
    words = ["prune", MODEL, "--checkpoint", "dense.safetensors", "-o", "masks.safetensors", "--pruner", "structured"]
    capsys.readouterr()
    assert starfish(*words, "--images", "photos", "--set", "budget=flops") == 0
    captured = capsys.readouterr()
    assert "mismatch 30/30" in captured.err
    assert "wrote masks.safetensors" in captured.err
    assert re.search(r"mlp.fc1.weight +mlp_in +96×24 +[0-9.]+ +neurons", captured.out)
    blocks = kept_units("masks.safetensors")
    assert all(len(set(heads)) == 1 for _, *heads in blocks.values())
    assert blocks["blocks.0"] != blocks["blocks.1"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--pruner", "magnitude", "--pattern", "structured"], "`magnitude` does not make the pattern `structured`"),
        (["--pruner", "structured", "--pattern", "2:4"], "`structured` does not make the pattern `2:4`"),
        (["--pruner", "structured", "--pattern", "unstructured"], "does not make the pattern `unstructured`"),
        (["--pruner", "magnitude", "--pattern", "magnitude"], "the pattern is `magnitude`"),
        (["--pruner", "nobody", "--pattern", "structured"], "there is no pruner `nobody`"),
        (["--pattern", "structured", "--scope", "heads"], "no units `heads`"),
        (["--pattern", "structured", "--sparsity", "1"], "`sparsity` is 1.0"),
        (["--pattern", "structured", "--set", "criterion=size"], "`criterion` is `size`"),
        (["--pattern", "structured", "--set", "criterion=energy"], "`structured` looks at data"),
        (["--pattern", "structured", "--set", "budget=flops"], "`structured` looks at data"),
        (["--pattern", "structured", "--set", "budget=money"], "`budget` is `money`"),
        (["--pattern", "structured", "--set", "budget=parameters", "--set", "qk=0.3"], "`parameters` is shared"),
        (["--pattern", "structured", "--limit", "5"], "--limit is 5 and there are no --images"),
        (["--pattern", "structured", "--set", "per=row"], "nothing here has a setting `per`"),
    ],
)
def test_refusals_of_prune(words: list[str], complaint: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One error with a way out, exit 2, and no masks."""
    assert starfish("prune", MODEL, "--checkpoint", "dense.safetensors", "-o", "masks.safetensors", *words) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("error") == 1
    assert "hint: " in error
    assert "Traceback" not in error
    assert not (here / "masks.safetensors").exists()


COMPARE = ["compare", MODEL, "--checkpoint", "dense.safetensors", "--masks", "masks.safetensors", "--images", "photos",
           "--eval", "labelled", *QUICK]  # fmt: skip


def test_compare(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table of three methods, one a chain, as JSON and as text; a method more with --resume; pictures beside it."""
    pruned(capsys, *STRUCTURED)
    words = [*COMPARE, "-o", "c", "--limit", "20"]
    found = answer(capsys, *words, "--methods", "starfish,corp/starfish,kl")
    rows = {row["method"]: row for row in found["rows"]}
    assert list(rows) == ["dense", "mask", "starfish", "corp/starfish", "kl"]
    healed = answer(capsys, *HEAL, "--masks", "masks.safetensors", "--eval", "labelled", "-o", "run", "--limit", "20",
                    "--method", "corp,starfish")  # fmt: skip
    assert rows["corp/starfish"]["accuracy"] == healed["accuracy"]
    assert rows["corp/starfish"]["fidelity"]["kl"] == pytest.approx(healed["fidelity"]["kl"], rel=1e-5)
    assert starfish(*words, "--methods", "mse") == 2
    assert "already holds a comparison" in capsys.readouterr().err
    assert starfish(*words, "--methods", "kl,mse", "--resume") == 0
    captured = capsys.readouterr()
    assert "1 of 2: kl, seed 0\n2 of 2: mse, seed 0\n" in captured.err
    assert re.search(r"corp/starfish +\d+\.\d\d +\d+\.\d\d +\d\.\d{4} +\d\.\d{4} +\d+\.\d( \*)? +\d+\n", captured.out)
    assert {path.name for path in (here / "c").iterdir()} == {
        "compare.json", "compare.md", "compare.csv", "compare.png", "compare.svg", "runs", "cache"}  # fmt: skip
    assert not list((here / "c").rglob("model.safetensors"))
    command = json.loads((here / "c" / "compare.json").read_text())["command"]
    assert command[0] == "compare"
    assert "--resume" not in command


def test_compare_by_default_takes_all_that_can_run(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lacks something is named with its reason; a method whose setting is wrong is not quietly left out."""
    pruned(capsys, "--scope", "qk")
    words = [*COMPARE, "-o", "c", "--set", "epochs=1"]
    assert starfish(*words, "--set", "granularity=pixel") == 2
    assert "`granularity` is `pixel`" in capsys.readouterr().err
    assert starfish(*words, "--limit", "4", "--seeds", "0,two") == 2
    assert "the seeds are `0,two`" in capsys.readouterr().err
    assert not (here / "c").exists()
    few = {name: methods.METHODS[name] for name in ("ce", "kl", "batchnorm")}
    monkeypatch.setattr(methods, "METHODS", few)
    found = answer(capsys, *words)
    assert [row["method"] for row in found["rows"]] == ["dense", "mask", "kl"]
    assert found["left_out"].keys() == {"ce", "batchnorm"}
    assert "needs labels" in found["left_out"]["ce"]


def test_compare_refuses_all_that_cannot_run_at_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is written: each by name, with --pseudo-labels as a way out."""
    pruned(capsys)
    assert starfish(*COMPARE, "-o", "c", "--methods", "ce,batchnorm,kl") == 2
    error = capsys.readouterr().err
    for text in ("2 of the methods", "`ce` needs labels", "`batchnorm` needs BatchNorm", "--pseudo-labels"):
        assert text in error
    assert not (here / "c").exists()


def test_pseudo_labels(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Methods that need labels run on the dense model's answers, and every file says so; given labels are kept."""
    pruned(capsys)
    words = [*HEAL, "--masks", "masks.safetensors", "-o", "run", "--method", "ce"]
    result = answer(capsys, *words, "--pseudo-labels")
    assert result["labels"] == "model"
    assert result["loss"]["last"] < result["loss"]["first"]
    assert json.loads((here / "run" / "config.json").read_text())["starfish"]["labels"] == "model"
    assert starfish(*words[:-2], "--resume") == 2  # without them it is another run
    given = [*words[: words.index("photos")], "labelled", *words[words.index("photos") + 1 :]]
    given[given.index("run")] = "given"
    assert answer(capsys, *given)["labels"] == "given"
    assert starfish(*given, "--resume", "--pseudo-labels") == 2
    assert "labels of their own" in capsys.readouterr().err
    found = answer(capsys, *COMPARE, "-o", "c", "--methods", "ce", "--pseudo-labels", "--set", "epochs=1")
    assert found["labels"] == "model"
    assert found["rows"][-1]["accuracy"]["healed"] is not None
    facts = answer(capsys, "prune", MODEL, "--checkpoint", "dense.safetensors", "-o", "m.safetensors", "--images",
                   "photos", "--pseudo-labels")  # fmt: skip
    assert facts["labels"] == "model"
    assert starfish("prune", MODEL, "--checkpoint", "dense.safetensors", "-o", "m.safetensors", "--pseudo-labels") == 2
    assert "--pseudo-labels is for images" in capsys.readouterr().err


def test_a_comparison_that_is_told_to_stop(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in its second method: exit 130, and with --resume the figures of one that went through."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    pruned(capsys)
    words = [sys.executable, "-m", "starfish", *COMPARE, "--methods", "mse,kl", "--set", "epochs=8"]
    rows = here / "c" / "runs" / "kl" / "seed-0" / "rows.jsonl"
    with subprocess.Popen([*words, "-o", "c"], stderr=subprocess.PIPE, text=True) as process:
        while not rows.exists() or not rows.read_text():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        talk = process.stderr.read()
        assert process.wait() == 130, talk
    found = [answer(capsys, *words[3:], "-o", folder, *more) for folder, more in (("c", ["--resume"]), ("whole", []))]
    figures = [[(row["accuracy"], row["fidelity"]) for row in each["rows"]] for each in found]
    assert figures[0] == figures[1]


def test_a_heal_that_is_refused_leaves_no_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So that the command, corrected, can have the folder: a wrong order, one method twice, a recipe in vain."""
    pruned(capsys)
    words = [*HEAL, "--masks", "masks.safetensors", "-o", "run"]
    for more, complaint in (
        (["--method", "starfish,least_squares"], "put it first"),
        (["--method", "kl,kl"], "has the method `kl` twice"),
        (["--method", "snows", "--recipe", "paper"], "the recipe `paper` has no setting of `snows`"),
    ):
        assert starfish(*words, *more) == 2
        assert complaint in capsys.readouterr().err
        assert not (here / "run").exists()


def test_what_is_measured_on_its_own_images_says_so(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same pictures for both are not held out, whoever loads them; and a run goes on with its own ones only."""
    pruned(capsys)
    words = [*HEAL, "--masks", "masks.safetensors", *QUICK]
    assert not answer(capsys, *words, "-o", "run", "--eval", "photos")["evaluation"]["held_out"]
    assert answer(capsys, *words, "-o", "other", "--eval", "labelled")["evaluation"]["held_out"]
    assert starfish(*words, "-o", "other", "--eval", "photos", "--resume") == 2
    assert "`digests.evaluation` was" in capsys.readouterr().err
