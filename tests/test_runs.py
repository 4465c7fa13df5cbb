"""The run folder: whole or not there, and a killed run goes on to the same bytes."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor

import starfish
from cases import Case
from starfish.data import as_images
from starfish.heal import healing_, job_of
from starfish.runs import Run

SCRIPT = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, {tests!r})
from cases import Case
import starfish
from starfish import runs
from starfish.core import finish
from starfish.data import as_images
from starfish.heal import healing_, job_of
from starfish.runs import Run

runs.SAVE_EVERY, runs.SAVE_SHARE = 0.0, 1e9  # save after every step: a kill may come while saving
folder, masks, precision = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(2 if precision == "bf16" else 1)
images = torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(1))
model, dense, chosen, _ = Case("starfish", masks).build(images)
method = starfish.Starfish(epochs=20, batch_size=5, precision=precision, lr=2e-3)
run = Run.open(folder, {{"starfish": {{"seed": 4}}}}, resume=True)
if run.result is None:
    finish(healing_(job_of(model, dense, chosen, images, seed=4), method, as_images(images), run))
print("done", flush=True)
"""


def heal_in_a_process(folder: Path, masks: str, precision: str, kill_after: int | None = None) -> bool:
    """Run the script, and kill it a moment after it has written so many rows. Did it come to its end?"""
    code = SCRIPT.format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", code, str(folder), masks, precision]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if kill_after is not None:
            while not (folder / "rows.jsonl").is_file() or rows_in(folder) < kill_after:
                assert process.poll() is None
                time.sleep(0.001)
            time.sleep(random.Random(kill_after).uniform(0, 0.03))  # in the middle of a step, or of saving
            process.send_signal(signal.SIGKILL)
        return process.stdout.read() == "done\n"


def rows_in(folder: Path) -> int:
    return (folder / "rows.jsonl").read_bytes().count(b"\n")


@pytest.mark.parametrize(("masks", "precision"), [("vit-unstructured", "bf16"), ("cnn-unstructured", "fp32")])
def test_killed_three_times_gives_the_same_bytes(masks: str, precision: str, tmp_path: Path) -> None:
    """SIGKILL at three moments, then resumed: model.safetensors, masks and rows are those of an undisturbed run."""
    assert heal_in_a_process(tmp_path / "whole", masks, precision)
    for rows in (3, 20, 41):
        assert not heal_in_a_process(tmp_path / "killed", masks, precision, kill_after=rows)
    assert heal_in_a_process(tmp_path / "killed", masks, precision)
    assert rows_in(tmp_path / "whole") == 60
    for name in ("model.safetensors", "masks.safetensors", "rows.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert not list((tmp_path / "killed").rglob("*.part"))


def heal_into(folder: Path, images: Tensor, *, stop_after: int | None = None, resume: bool = False) -> Run:
    """Three epochs of four steps, stopped between two rows if asked."""
    model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
    method = starfish.Starfish(epochs=3, batch_size=3, precision="fp32")
    run = Run.open(folder, {"starfish": {"seed": 0}}, resume=resume)
    work = healing_(job_of(model, dense, masks, images), method, as_images(images), run)
    steps = 0
    for row in work:
        steps += "stage" not in row
        if stop_after is not None and steps == stop_after:
            work.close()
            return run
    return run


@pytest.mark.parametrize("stop_after", [1, 5, 11])
def test_stopped_between_rows_gives_the_same_bytes(stop_after: int, images: Tensor, tmp_path: Path) -> None:
    """What SIGINT and SIGTERM do through the command line: close the generator, which saves."""
    heal_into(tmp_path / "whole", images)
    heal_into(tmp_path / "stopped", images, stop_after=stop_after)
    assert (tmp_path / "stopped" / "state" / "state.safetensors").is_file()
    assert not (tmp_path / "stopped" / "result.json").exists()
    heal_into(tmp_path / "stopped", images, resume=True)
    for name in ("model.safetensors", "rows.jsonl"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "stopped" / "rows.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))


def test_a_finished_folder_holds_what_the_contract_names(images: Tensor, tmp_path: Path) -> None:
    """Every file is there, the state is emptied, result.json is plain JSON and the weights are the healed ones."""
    heal_into(tmp_path / "run", images)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"model.safetensors", "masks.safetensors", "result.json", "rows.jsonl", "config.json", "README.md",
                     "state"}  # fmt: skip
    assert not list((tmp_path / "run" / "state").iterdir())
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["mask_intact"] is True
    assert result["frozen_intact"] is True
    weights, masks = (
        load_file(tmp_path / "run" / "model.safetensors"),
        load_file(tmp_path / "run" / "masks.safetensors"),
    )
    assert all(not weights[name][~mask].any() for name, mask in masks.items())


def test_a_run_is_not_overwritten(images: Tensor, tmp_path: Path) -> None:
    """Without --resume a folder in use is refused; so are a file and a folder of something else."""
    heal_into(tmp_path / "run", images)
    with pytest.raises(starfish.UserError, match="already holds a run"):
        Run.open(tmp_path / "run", {"starfish": {}}, resume=False)
    (tmp_path / "file").touch()
    with pytest.raises(starfish.UserError, match="is a file"):
        Run.open(tmp_path / "file", {"starfish": {}}, resume=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").touch()
    with pytest.raises(starfish.UserError, match="not empty"):
        Run.open(tmp_path / "other", {"starfish": {}}, resume=True)


def test_another_run_is_not_resumed(images: Tensor, tmp_path: Path) -> None:
    """Resuming with other arguments is refused, naming the first that differs."""
    Run.open(tmp_path / "run", {"starfish": {"seed": 1, "method": "starfish"}}, resume=False)
    with pytest.raises(starfish.UserError, match="`seed` was 1 and is now 2"):
        Run.open(tmp_path / "run", {"starfish": {"seed": 2, "method": "starfish"}}, resume=True)


def test_a_half_written_row_is_cut_off(images: Tensor, tmp_path: Path) -> None:
    """A kill in the middle of a line leaves a line that resuming takes away."""
    run = heal_into(tmp_path / "run", images, stop_after=2)
    with open(run.folder / "rows.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    heal_into(tmp_path / "run", images, resume=True)
    assert all(json.loads(line) for line in (run.folder / "rows.jsonl").read_text().splitlines())


def test_a_finished_run_answers_at_once(images: Tensor, tmp_path: Path) -> None:
    run = heal_into(tmp_path / "run", images)
    assert Run.open(tmp_path / "run", {"starfish": {"seed": 0}}, resume=True).result == run.result


def test_timm_loads_the_folder_of_a_masked_vit(images: Tensor, tmp_path: Path) -> None:
    """With nothing but timm, and the same answers."""
    from starfish.core import finish
    from starfish.models import load

    name = "timm/vit_tiny_patch16_224?img_size=32&patch_size=8&embed_dim=24&depth=2&num_heads=3&num_classes=5"
    torch.manual_seed(0)
    dense = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5
    )
    torch.save(dense.state_dict(), tmp_path / "dense.pt")
    loaded, student = (load(name, checkpoint=tmp_path / "dense.pt") for _ in range(2))
    masks = starfish.prune(loaded.model, starfish.Magnitude(0.6), images)
    facts = {"model": name, "preprocess": loaded.preprocess.__dict__}
    run = Run.open(tmp_path / "run", {**loaded.config, "starfish": facts}, resume=False)
    job = job_of(student.model, loaded.model, masks, images)
    finish(healing_(job, starfish.Starfish(epochs=1, precision="fp32"), as_images(images), run))
    again = timm.create_model(f"local-dir:{tmp_path / 'run'}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(again(images), student.model(images))
        assert torch.equal(starfish.load(str(tmp_path / "run"))(images), student.model(images))
