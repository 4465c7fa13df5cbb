"""Gradients of the loss on mini-batches, for the methods that build a Fisher matrix from them (methods.md 5).

N gradients, C weights of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from starfish.activations import logits
from starfish.cache import Cache
from starfish.core import Images, Long, Row
from starfish.data import digest_of, room
from starfish.devices import to_device
from starfish.errors import UserError

CHUNK = 64  # images at a time in a large mini-batch
MOST_KEPT = 2**30  # bytes of all gradients that are kept for the next method; more is found out anew


def settled(images: Images, gradients: int, batch: int) -> tuple[int, int]:
    """How many gradients these images give, and of how many images each is: no image is in two of them."""
    for name, value in (("gradients", gradients), ("batch", batch)):
        if value < 1:
            raise UserError(f"`{name}` is {value}", "give 1 or more")
    batch = min(batch, len(images))
    return min(gradients, len(images) // batch), batch


def collecting(
    model: nn.Module, names: Sequence[str], images: Images, *, gradients: int, batch: int, seed: int = 0,
    cache: Cache | None = None,
) -> Long[dict[str, Tensor]]:  # fmt: skip
    """For each of these parameters its gradients of the mean cross-entropy of each mini-batch, as x_NC in float32.

    The order of the images is a function of the seed. The model stays as it is; a copy of it works, in evaluation mode.
    """
    labels = labels_of(images)
    gradients, batch = settled(images, gradients, batch)
    facts = [f"gradients of {name} {gradients} {batch} {seed} {digest_of(labels)}" for name in names]
    if cache and 4 * gradients * sum(model.get_parameter(name).numel() for name in names) > MOST_KEPT:
        cache = None
    keys = cache.keys(model, images, facts) if cache else [""] * len(names)
    if cache and cache.has(keys):
        found = {name: cache.read(key) for name, key in zip(names, keys, strict=True)}
        if all(found.values()):
            return {name: tensors["gradients"] for name, tensors in found.items() if tensors}
    sizes = [model.get_parameter(name).numel() for name in names]
    whole = room((gradients * sum(sizes),), torch.float32)  # asked for at once: part by part there is always room
    parts = torch.split(whole, [gradients * size for size in sizes])
    collected = {name: part.view(gradients, -1) for name, part in zip(names, parts, strict=True)}
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[: gradients * batch]
    yield from _fill_(collected, model, images, labels, order.view(gradients, batch))
    for name, key in zip(names, keys, strict=True):
        if cache:
            cache.write(key, {"gradients": collected[name]})
    return collected


def labels_of(images: Images) -> Tensor:
    if images.labels is None:
        raise UserError(
            "gradients of the cross-entropy need labels and the images have none",
            "give a folder with one sub-folder a class, or use what needs no labels",
        )
    return images.labels.long().cpu()


def _fill_(
    collected: dict[str, Tensor], model: nn.Module, images: Images, labels: Tensor, order_NB: Tensor
) -> Iterator[Row]:
    """One pass forward and back for each chunk of each mini-batch.

    A loop: what torch vectorises over samples makes of every convolution one with a group a sample, which a CPU does
    no faster, and does not know every model.
    """
    net = deepcopy(model).eval().requires_grad_(False)
    weights = [net.get_parameter(name).requires_grad_(True) for name in collected]
    device = weights[0].device
    for place, indices in enumerate(order_NB):
        with torch.enable_grad():
            parts = [
                _of(net, weights, to_device(images.batch(chunk.tolist()), device), labels[chunk].to(device))
                for chunk in indices.split(CHUNK)
            ]
        for name, *each in zip(collected, *parts, strict=True):
            collected[name][place] = torch.stack(each).sum(0).flatten() / len(indices)
        yield {"stage": "gradients", "done": place + 1, "total": len(order_NB)}


def _of(net: nn.Module, weights: Sequence[Tensor], inputs: object, labels: Tensor) -> tuple[Tensor, ...]:
    """Of the sum over these images; zeros for what the logits do not depend on."""
    return torch.autograd.grad(loss_sum(logits(net, inputs).float(), labels), weights, materialize_grads=True)


def loss_sum(scores_BK: Tensor, labels_B: Tensor) -> Tensor:
    """The cross-entropies, summed; labels must be of the model's classes."""
    labels_B = labels_B.long().to(scores_BK.device)
    wrong = labels_B[(labels_B < 0) | (labels_B >= scores_BK.shape[-1])]
    if len(wrong):
        raise UserError(
            f"there is a label {int(wrong[0])} and the model has {scores_BK.shape[-1]} classes",
            "are these images of the classes that the model was trained for?",
        )
    return F.cross_entropy(scores_BK, labels_B, reduction="sum")
