"""Every method on one mask: which gives back most, and at what cost.

    python benchmarks/rivals.py [NAME …] [--seeds 0,1,2]    all questions, or some of those below

The folder of weights and images: STARFISH_DATA.

Everything is one `starfish compare`, as a user would call it; where methods need labels, the dense model gives them
(--pseudo-labels). benchmarks/results/rivals/NAME.json and .md get its tables. Runs are kept in --work (a folder beside
the results that git does not know) and gone on with when the script is called again, with more seeds too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from heal import CIFAR, DEIT, HERE, IMAGENET, RESNET, sets, starfish

RESULTS = HERE / "results" / "rivals"
OF_THIS_MACHINE = ("command", "checkpoint", "images", "eval")  # paths, which say nothing elsewhere
ONE_SHOT = ("least_squares", "sparsegpt", "woodfisher", "cbs", "chita", "falcon", "kwon", "snows")
# A convolutional network gets its BatchNorm statistics anew after each method that leaves them alone: the control.
CONTROLLED = [*ONE_SHOT, *(f"{name}/batchnorm" for name in ONE_SHOT[:-1])]
ALL = ["batchnorm", *CONTROLLED, "starfish", "mse", "kl", "ce", "starfish+kl", "least_squares/starfish"]
GLOBAL = [*sets("per=global"), "--scope", "conv_fc"]

# name: (model, what is pruned, images, methods, options)
QUESTIONS: dict[str, tuple[list[str], list[str], list[str], list[str], list[str]]] = {
    **{f"resnet20-{share}": (RESNET, [*GLOBAL, "--sparsity", share], CIFAR, ALL, ["--pseudo-labels"])
       for share in ("0.6", "0.7", "0.8")},
    "resnet20-0.8-variants": (RESNET, [*GLOBAL, "--sparsity", "0.8"], CIFAR,
        ["least_squares", "chita", "chita/batchnorm"],
        ["--pseudo-labels", *sets("chita.stages=8", "least_squares.inputs=dense")]),
    "deit-0.7": (DEIT, ["--scope", "qkv+out+mlp", "--sparsity", "0.7"], IMAGENET,
        ["least_squares", "sparsegpt", "starfish", "mse", "kl", "snows"],
        sets("snows.images=256")),  # with 512 it takes twice as long as all the others
    "deit-0.7-layer": (DEIT, ["--scope", "qkv+out+mlp", "--sparsity", "0.7"], IMAGENET, ["least_squares", "sparsegpt"],
        sets("least_squares.inputs=layer")),
}  # fmt: skip


def main(names: list[str], seeds: str, work: Path) -> None:
    for name in names or QUESTIONS:
        model, pruning, images, methods, options = QUESTIONS[name]
        masks, folder = work / f"{name}.safetensors", work / name
        if not masks.is_file():
            starfish("prune", *model, *pruning, "-o", str(masks))
        starfish("compare", *model, "--masks", str(masks), *images, "--methods", ",".join(methods), *options,
                 "--seeds", seeds, "--resume", "-o", str(folder))  # fmt: skip
        found = json.loads((folder / "compare.json").read_text())
        RESULTS.mkdir(parents=True, exist_ok=True)
        kept = {key: value for key, value in found.items() if key not in OF_THIS_MACHINE}
        (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")
        page = (folder / "compare.md").read_text().split("\n```\n")[0]
        (RESULTS / f"{name}.md").write_text(page.rstrip() + "\n")
        print(page, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[[], *QUESTIONS])
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--work", type=Path, default=HERE / "runs")
    given = parser.parse_args()
    main(given.names, given.seeds, given.work)
