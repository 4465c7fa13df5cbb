"""How good a model is: top-1 and top-5 with labels; without, how closely it follows the dense model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from starfish.activations import Recorder, logits, positions
from starfish.core import Anatomy, Images, Long
from starfish.devices import to_device
from starfish.methods.objectives import cosine, kl_loss

BATCH = 64
COSINE_IMAGES = 256  # block cosines are averaged over at most so many images


@dataclass(frozen=True)
class Measured:
    """One model on one set of images. Percent; None where there are no labels."""

    top1: float | None
    top5: float | None
    agreement: float  # with the dense model's first answer
    kl: float  # from the dense model's class probabilities
    cosines: list[float]  # of each block's output with the dense model's


def predict(model: nn.Module, images: Images, stage: str) -> Long[Tensor]:
    """Logits of every image, in float32."""
    model.eval()
    device = next(model.parameters()).device
    answers = []
    for start in range(0, len(images), BATCH):
        indices = list(range(start, min(start + BATCH, len(images))))
        with torch.no_grad():
            answers.append(logits(model, to_device(images.batch(indices), device)).float().cpu())
        yield {"stage": stage, "done": indices[-1] + 1, "total": len(images)}
    return torch.cat(answers)


def measure(
    model: nn.Module, dense: nn.Module, dense_BK: Tensor, images: Images, anatomy: Anatomy, stage: str
) -> Long[Measured]:
    """Everything there is to say of `model` on `images`; `dense_BK` is what the dense model answers there."""
    answers_BK = yield from predict(model, images, stage)
    cosines = yield from block_cosines(model, dense, images, anatomy, stage)
    return Measured(
        top1=accuracy(answers_BK, images.labels),
        top5=accuracy(answers_BK, images.labels, top=5),
        agreement=agreement(answers_BK, dense_BK),
        kl=float(kl_loss(answers_BK, dense_BK)),
        cosines=cosines,
    )


def accuracy(answers_BK: Tensor, labels_B: Tensor | None, top: int = 1) -> float | None:
    """Percent of images whose label is among the `top` answers; None without labels or with fewer classes."""
    if labels_B is None or answers_BK.shape[-1] < top:
        return None
    return 100 * float((answers_BK.topk(top).indices == labels_B[:, None]).any(1).double().mean())


def standard_error(percent: float | None, count: int) -> float | None:
    """Of an accuracy in percent, measured on `count` images."""
    return None if percent is None else 100 * math.sqrt(percent / 100 * (1 - percent / 100) / count)


def agreement(answers_BK: Tensor, dense_BK: Tensor) -> float:
    """Percent of images for which both give the same first answer."""
    return 100 * float((answers_BK.argmax(-1) == dense_BK.argmax(-1)).double().mean())


def block_cosines(
    model: nn.Module, dense: nn.Module, images: Images, anatomy: Anatomy, stage: str
) -> Long[list[float]]:
    """Mean cosine to the dense model's output over all positions, block by block."""
    size = min(len(images), COSINE_IMAGES)
    totals = torch.zeros(len(anatomy.blocks), dtype=torch.float64)
    for start in range(0, size, BATCH):
        indices = list(range(start, min(start + BATCH, size)))
        batch = images.batch(indices)
        student, teacher = (_outputs(m, batch, anatomy, len(indices)) for m in (model, dense))
        for place, name in enumerate(anatomy.blocks):
            totals[place] += float(cosine(student[name], teacher[name]).mean()) * len(indices)
        yield {"stage": f"{stage}, blocks", "done": indices[-1] + 1, "total": size}
    return [float(total) / size for total in totals]


def output_sizes(model: nn.Module, anatomy: Anatomy, inputs: Any) -> dict[str, int]:
    """Block → the channels that it puts out."""
    model.eval()
    return {name: x_BPC.shape[-1] for name, x_BPC in _outputs(model, inputs, anatomy, 2).items()}


@torch.no_grad()
def _outputs(model: nn.Module, batch: Any, anatomy: Anatomy, images: int) -> dict[str, Tensor]:
    device = next(model.parameters()).device
    with Recorder(model, anatomy.blocks) as recorder:
        logits(model, to_device(batch, device))
        outputs = recorder.take()
    return {name: positions(outputs[name], anatomy.layouts[name], images) for name in anatomy.blocks}


def scores(dense: tuple[float | None, float | None], pruned: Measured, healed: Measured, blocks: tuple[str, ...],
           count: int) -> dict[str, Any]:  # fmt: skip
    """The keys of result.json that tell what healing gave back; `dense` is its top-1 and top-5."""

    top1 = {"dense": dense[0], "pruned": pruned.top1, "healed": healed.top1}
    return {
        "accuracy": top1,
        "accuracy_top5": {"dense": dense[1], "pruned": pruned.top5, "healed": healed.top5},
        "accuracy_standard_error": {name: standard_error(value, count) for name, value in top1.items()},
        "fidelity": {
            "agreement": {"pruned": pruned.agreement, "healed": healed.agreement},
            "kl": {"pruned": pruned.kl, "healed": healed.kl},
            "cosine": {"pruned": mean(pruned.cosines), "healed": mean(healed.cosines)},
            "blocks": {
                name: {"pruned": before, "healed": after}
                for name, before, after in zip(blocks, pruned.cosines, healed.cosines, strict=True)
            },
        },
    }


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
