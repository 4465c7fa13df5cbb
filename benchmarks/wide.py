"""How much memory do the layer-wise methods take on a layer 5,120 wide?

    python benchmarks/wide.py        prints and writes benchmarks/results/wide.json; some minutes

Two MLPs of 256 → 5,120 → 256 on random tokens, 0.7 of their weights gone, one method a process, so that a peak is its
own. What the process holds before the method begins (libraries, model, images) is `base_mb`.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "wide.json"
WIDTH, INPUTS, TOKENS, IMAGES = 5120, 256, 197, 48
METHODS = ("least_squares", "sparsegpt")


def measured(name: str) -> dict[str, float]:
    """In a process of its own."""
    import torch
    from torch import Tensor, nn

    import starfish
    from starfish.devices import forget_peak, peak_rss_mb

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(INPUTS)
            self.fc1, self.fc2 = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, INPUTS)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.fc2(torch.relu(self.fc1(self.norm(x))))

    torch.manual_seed(0)
    dense = nn.Sequential(Mlp(), Mlp()).eval()
    images = torch.randn(IMAGES, TOKENS, INPUTS)
    masks = starfish.prune(dense, starfish.Magnitude(0.7, scope="mlp"), images)
    base = peak_rss_mb()
    forget_peak()
    result = starfish.heal_(deepcopy(dense), dense, masks, images, starfish.METHODS[name])
    return {"base_mb": round(base), "peak_mb": round(peak_rss_mb()), "seconds": round(result.seconds["fit"], 1),
            "cosine": result.fidelity["cosine"]}  # fmt: skip


def main() -> None:
    found = {}
    for name in METHODS:
        out = subprocess.run([sys.executable, __file__, name], check=True, stdout=subprocess.PIPE, text=True).stdout
        found[name] = json.loads(out.splitlines()[-1])
        print(name, found[name], flush=True)
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    shape = {"width": WIDTH, "inputs": INPUTS, "tokens": TOKENS, "images": IMAGES, "sparsity": 0.7}
    RESULTS.write_text(json.dumps({"machine": machine, "shape": shape, "methods": found}, indent=1) + "\n")


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1]))) if len(sys.argv) > 1 else main()
