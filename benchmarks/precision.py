"""How much faster is a training step in bf16 than in fp32? Ratios within one run; devices.py stands on them.

python benchmarks/precision.py        weights: random, so none are needed; writes benchmarks/results/precision.json
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import timm
import torch

from starfish.devices import autocast
from starfish.runs import versions

MODELS = ("deit_tiny_patch16_224", "tf_efficientnet_lite0", "resnet18", "convnext_atto")
RESULTS = Path(__file__).parent / "results" / "precision.json"


def main(images: int = 16, repeats: int = 5) -> None:
    ratio: dict[str, float] = {}
    for name in MODELS:
        model = timm.create_model(name).eval()
        inputs = torch.randn(images, 3, 224, 224)
        seconds = {
            precision: [step(model, inputs, precision) for _ in range(repeats)] for precision in ("fp32", "bf16")
        }
        best = {precision: min(found) for precision, found in seconds.items()}
        ratio[name] = round(best["fp32"] / best["bf16"], 2)
        print(name, ratio[name], flush=True)
    facts = {"images": images, "repeats": repeats, "versions": versions(), "ratio": ratio}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(facts, indent=1) + "\n")


def step(model: torch.nn.Module, inputs: torch.Tensor, precision: str) -> float:
    start = time.perf_counter()
    with autocast(inputs.device, precision):
        loss = model(inputs).float().square().mean()
    loss.backward()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
