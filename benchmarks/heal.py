"""How much does a heal give back? Real models and images, through the command line, as a user would.

    python benchmarks/heal.py [NAME …]        all questions, or some of those below; folder of weights: STARFISH_DATA

Writes benchmarks/results/heal/NAME.json: every result.json, with the machine. Finished runs are kept and skipped.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
DATA = Path(os.environ.get("STARFISH_DATA", HERE.parents[1] / "shared" / "data"))
RESULTS = HERE / "results" / "heal"

DEIT = ["timm/deit_tiny_patch16_224", "--checkpoint", str(DATA / "deit_tiny_patch16_224.safetensors")]
EFFICIENTNET = ["timm/tf_efficientnet_lite0", "--checkpoint", str(DATA / "tf_efficientnet_lite0.safetensors")]
RESNET = ["cases:cifar_resnet20", "--checkpoint", str(DATA / "resnet20_cifar10.safetensors")]
IMAGENET = ["--images", str(DATA / "imagenet" / "calib"), "--eval", str(DATA / "imagenet" / "eval")]
CIFAR = ["--images", str(DATA / "cifar10.npz"), "--eval", str(DATA / "cifar10.npz")]


def sets(*assignments: str) -> list[str]:
    return [word for assignment in assignments for word in ("--set", assignment)]


# The default of the first results, before Muon, views and a share for class tokens.
FIRST = sets("optimizer=adamw", "view=raw", "head=0", "augment=none", "epochs=10")

# name: (model, what is pruned, images, {run: options of heal})
QUESTIONS: dict[str, tuple[list[str], list[str], list[str], dict[str, list[str]]]] = {
    "deit-unstructured": (DEIT, ["--scope", "qkv+out+mlp", "--sparsity", "0.6"], IMAGENET,
        {"default": [], "first": FIRST, "paper": ["--recipe", "paper"]}),
    "deit-per": (DEIT, ["--scope", "qkv+out+mlp", "--sparsity", "0.6", *sets("per=global")], IMAGENET, {"default": []}),
    "deit-2of4": (DEIT, ["--scope", "qkv+out+mlp", "--pattern", "2:4"], IMAGENET, {"default": []}),
    "efficientnet": (EFFICIENTNET, ["--sparsity", "0.6"], [*IMAGENET, "--limit", "500"], {
        "first": [*FIRST, *sets("epochs=5")], "batchnorm": ["--method", "batchnorm"],
        "train, tail false": [*FIRST, *sets("epochs=5", "bn=train", "tail=false")],
        "freeze": [*FIRST, *sets("epochs=5", "bn=freeze")]}),
    "efficientnet-1000": (EFFICIENTNET, ["--sparsity", "0.6"], IMAGENET, {"default": []}),
    "resnet20": (RESNET, ["--sparsity", "0.8", *sets("per=global")], CIFAR, {
        "default": [], "first": FIRST, "batchnorm": ["--method", "batchnorm"],
        **{f"{policy}, tail {tail}": [*FIRST, *sets(f"bn={policy}", f"tail={tail}", "precision=fp32")]
           for policy, tail in [("freeze", "true"), ("adapt", "true"), ("train", "true"), ("train", "false")]}}),
}  # fmt: skip


def main(names: list[str]) -> None:
    for name in names or QUESTIONS:
        model, pruning, images, runs = QUESTIONS[name]
        path = RESULTS / f"{name}.json"
        kept = json.loads(path.read_text())["runs"] if path.is_file() else {}
        for run, options in runs.items():
            if run not in kept:
                kept[run] = healed(model, pruning, images, options)
                write(path, name, kept)
            accuracy = kept[run]["accuracy"]
            print(f"{name}: {run}: " + ", ".join(f"{key} {value:.2f}" for key, value in accuracy.items()), flush=True)


def healed(model: list[str], pruning: list[str], images: list[str], options: list[str]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as scratch:
        masks = str(Path(scratch) / "masks.safetensors")
        starfish("prune", *model, *pruning, "-o", masks)
        out = starfish("heal", *model, "--masks", masks, *images, *options, "-o", str(Path(scratch) / "run"), "--json")
    result: dict[str, object] = json.loads(out)
    return result


def starfish(*words: str) -> str:
    paths = {
        "PYTHONPATH": os.pathsep.join(str(HERE.parent / folder) for folder in ("src", "tests"))
    }  # of this checkout
    command = [sys.executable, "-m", "starfish", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **paths}).stdout


def write(path: Path, name: str, runs: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps({"question": name, "machine": machine, "runs": runs}, indent=1) + "\n")
    beside.replace(path)


if __name__ == "__main__":
    main(sys.argv[1:])
