"""`starfish demo`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from starfish.cli.healing import heal
from starfish.cli.inputs import load_pictures
from starfish.cli.options import Json
from starfish.console import say

DEMO_SPARSITY = 0.85
DEMO_SETTINGS = ["epochs=10", "lr=1e-3"]
DEMO_NEXT = """
What you have now: {run} holds the healed model, its masks, every figure (result.json) and a model card (README.md).

Your own model, with a folder of unlabeled images:
  $ starfish inspect timm/deit_tiny_patch16_224
  $ starfish prune timm/deit_tiny_patch16_224 --sparsity 0.6 -o masks.safetensors
  $ starfish heal timm/deit_tiny_patch16_224 --masks masks.safetensors --images my-images/ -o my-run
A checkpoint that some other tool has pruned: --pruned FILE in place of --masks."""


def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="The run folder.")] = Path("starfish-demo"),
    json: Json = False,
) -> None:
    """Prune a small vision transformer hard and heal it, offline, in about a minute."""
    import shutil
    from importlib.resources import files

    from starfish import masks as masks_module
    from starfish.models import load
    from starfish.pruners import prune
    from starfish.pruners.magnitude import Magnitude

    folder = Path(str(files("starfish"))) / "demo"
    run = output / "run"
    if (run / "config.json").is_file():  # of an earlier demo
        shutil.rmtree(run)
    say(f"A vision transformer trained on Fashion-MNIST loses {DEMO_SPARSITY:.0%} of the weights of each layer.")
    loaded = load(f"local-dir:{folder}")
    pictures = load_pictures(str(folder / "images.npz"), loaded.preprocess, loaded)
    masks_module.write(output / "masks.safetensors", prune(loaded.model, Magnitude(DEMO_SPARSITY), pictures))
    heal(
        model=loaded.name,
        masks=output / "masks.safetensors",
        images=str(folder / "images.npz"),
        evaluation=str(folder / "images.npz"),
        output=run,
        sets=DEMO_SETTINGS,
        json=json,
    )
    say(DEMO_NEXT.format(run=run))
