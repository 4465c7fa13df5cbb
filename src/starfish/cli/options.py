"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="timm/NAME, torchvision/NAME, hf/NAME, local-dir:FOLDER, package.module:factory"
    ),
]
Checkpoint = Annotated[Path | None, typer.Option(help="Load the dense weights from this file, not from the net.")]
Pickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Read pickled files, which can run code. Only if you trust them.")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="K=V", help="A setting of the method, pruner or preprocessing.")
]
Blocks = Annotated[
    str | None, typer.Option(metavar="REGEX", help="The modules to align, where starfish does not find them.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, mps …")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Masks = Annotated[Path | None, typer.Option(help="Masks, in any container `starfish inspect` reads.")]
Pruned = Annotated[
    Path | None, typer.Option(help="A pruned checkpoint: its zeros are the mask, its weights the start.")
]
Images = Annotated[str, typer.Option(help="Unlabeled images: a folder, folders by class, a .npz or .safetensors file.")]
Limit = Annotated[int | None, typer.Option(help="Take so many of the images, a seeded sample.")]
PseudoLabels = Annotated[
    bool, typer.Option("--pseudo-labels", help="Take the dense model's first answers as labels of the images.")
]
CacheFolder = Annotated[
    Path | None, typer.Option(help="Keep statistics of the images in this folder, for further heals of this model.")
]
Seed = Annotated[int, typer.Option(help="Of the image sample and the order of batches.")]
