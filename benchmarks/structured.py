"""Whole units gone from DeiT-T: what each recipe gives back, with how many images, in how much time.

    python benchmarks/structured.py [NAME …]    all questions, or some of those below; folder of weights: STARFISH_DATA

Everything goes through the command line, as a user would. benchmarks/results/structured/NAME.json gets every result;
mean and standard deviation over seeds are printed. Finished runs are kept and skipped.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from heal import DATA, DEIT, HERE, IMAGENET, sets, starfish, write

RESULTS = HERE / "results" / "structured"
SEEDS = (0, 1, 2)
ONE_SEED = {"closed-form", "levers"}
RECIPES = {"paper": ["--recipe", "paper"], "default": []}

# name: (sparsity, numbers of images, recipes)
QUESTIONS: dict[str, tuple[str, tuple[int, ...], dict[str, list[str]]]] = {
    "half": ("0.5", (1000,), RECIPES),
    "three-quarters": ("0.75", (1000,), RECIPES),
    "few-images": ("0.5", (250, 500), {"default": []}),
    "closed-form": ("0.5", (1000,), {
        "corp": ["--method", "corp"],
        "corp, as released": ["--method", "corp", *sets("ridge=shrinkage", "pairs=pooled", "center_keys=false")],
        "corp, bias only": ["--method", "corp", *sets("fold=bias")],
        "corp, layerwise": ["--method", "corp", *sets("schedule=layerwise")]}),
    "levers": ("0.5", (1000,), {
        "default": [],
        "head=0": sets("head=0"),
        "head=0.3": sets("head=0.3"),
        "view=raw": sets("view=raw"),
        "augment=none": sets("augment=none"),
        "a new crop each step": sets("views=0", "augment=flip,crop:0.8"),
        "AdamW": sets("optimizer=adamw", "lr=1.5e-3", "warmup_steps=20"),
        "Muon at 4e-3": sets("lr=4e-3"),
        "batches of 16": sets("batch_size=16"),
        "biases and norms too": sets("train=weights+biases+norms"),
        "from the mask": ["--method", "starfish"]}),
}  # fmt: skip


def main(names: list[str]) -> None:
    for name in names or QUESTIONS:
        sparsity, counts, recipes = QUESTIONS[name]
        path = RESULTS / f"{name}.json"
        kept = json.loads(path.read_text())["runs"] if path.is_file() else {}
        with tempfile.TemporaryDirectory() as scratch:
            masks = Path(scratch) / "masks.safetensors"
            for seed in SEEDS[:1] if name in ONE_SEED else SEEDS:
                for images in counts:
                    for recipe, options in recipes.items():
                        key = f"{recipe}, {images} images, seed {seed}"
                        if key not in kept:
                            kept[key] = healed(masks, sparsity, images, seed, options)
                            write(path, name, kept)
                        print(f"{name}: {key}: {line(kept[key])}", flush=True)
        print(table(kept))


def healed(masks: Path, sparsity: str, images: int, seed: int, options: list[str]) -> dict[str, object]:
    """One heal; the masks are chosen once for all of a question, with all the images."""
    if not masks.is_file():
        chosen = ["--pattern", "structured", "--scope", "mlp+qk", "--sparsity", sparsity]
        starfish("prune", *DEIT, *chosen, "--images", str(DATA / "imagenet" / "calib"), "-o", str(masks))
    with tempfile.TemporaryDirectory() as run:
        out = starfish("heal", *DEIT, "--masks", str(masks), *IMAGENET, "--limit", str(images), "--seed", str(seed),
                       *options, "-o", str(Path(run) / "run"), "--json")  # fmt: skip
    result: dict[str, object] = json.loads(out)
    return result


def line(run: dict[str, object]) -> str:
    stages = ", ".join(f"{stage['method']} {stage['accuracy']:.1f}" for stage in run["stages"])
    accuracy, seconds = run["accuracy"], run["seconds"]
    return f"pruned {accuracy['pruned']:.1f}, {stages}, {seconds['targets'] + seconds['fit']:.0f} s"


def table(runs: dict[str, dict[str, object]]) -> str:
    """Mean and standard deviation over seeds of what each stage of each recipe reached."""
    found: dict[str, list[tuple[float, float]]] = {}
    for key, run in runs.items():
        recipe = key.rpartition(", seed")[0]
        spent = 0.0
        for stage in run["stages"]:
            spent += stage["seconds"]
            found.setdefault(f"{recipe}: {stage['method']}", []).append((stage["accuracy"], spent))
    lines = ["| | top-1 | standard deviation | seconds | seeds |", "|---|---|---|---|---|"]
    for name, pairs in found.items():
        top1, seconds = zip(*pairs, strict=True)
        spread = f"{statistics.stdev(top1):.2f}" if len(top1) > 1 else ""
        lines.append(
            f"| {name} | {statistics.mean(top1):.2f} | {spread} | {statistics.mean(seconds):.0f} | {len(top1)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
