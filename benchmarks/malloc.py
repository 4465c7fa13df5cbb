"""What does it cost that malloc gives large activations back to the system? One training step, with and without.

python benchmarks/malloc.py        writes benchmarks/results/malloc.json: images a second, and their ratio
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from starfish.runs import versions

RESULTS = Path(__file__).parent / "results" / "malloc.json"
MODELS = {"tf_efficientnet_lite0": 64, "deit_tiny_patch16_224": 32}
STEP = """
import sys, time, timm, torch
from starfish.devices import keep_freed_memory
name, images, keep = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
assert not keep or keep_freed_memory()
model, inputs, best = timm.create_model(name).eval(), torch.randn(images, 3, 224, 224), float("inf")
for _ in range(4):
    start = time.perf_counter()
    model(inputs).square().mean().backward()
    best = min(best, time.perf_counter() - start)
print(images / best)
"""


def main() -> None:
    facts: dict[str, object] = {"versions": versions()}
    for name, images in MODELS.items():
        rates = {keep: rate(name, images, keep) for keep in (False, True)}
        facts[name] = {"batch": images, "given back": rates[False], "kept": rates[True],
                       "ratio": round(rates[True] / rates[False], 2)}  # fmt: skip
        print(name, facts[name], flush=True)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(facts, indent=1) + "\n")


def rate(name: str, images: int, keep: bool) -> float:
    """Best of four steps, in a process of its own."""
    command = [sys.executable, "-c", STEP, name, str(images), str(keep)]
    return round(float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout), 1)


if __name__ == "__main__":
    main()
