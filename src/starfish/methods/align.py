"""STARFISH, and every rival that differs from it by its loss alone: one visible loop (methods.md 12 and 13).

B images, P positions, C channels, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from starfish import augment as augmentation
from starfish import masks
from starfish.activations import Recorder, logits, positions
from starfish.core import Images, Job, Method, Row
from starfish.devices import autocast, choose_precision, to_device
from starfish.errors import UserError, listed
from starfish.methods import objectives
from starfish.methods.batchnorm import are_folded, batchnorms, reestimate_, statistics_names
from starfish.methods.optimizers import OPTIMIZERS, Optimizer

OBJECTIVES = {
    "cosine": "every block's output points the same way as the dense model's (STARFISH, eq. 1)",
    "mse": "mean squared difference of every block's output from the dense model's",
    "relative_mse": "squared difference of every block's output over the squared size of the dense model's",
    "kl": "KL divergence of the class probabilities from the dense model's",
    "ce": "cross-entropy with the labels",
    "cosine+kl": "half the block alignment and half the KL divergence",
}
BATCHNORM_POLICIES = ("freeze", "adapt", "train", "train+adapt")


@dataclass(frozen=True)
class Starfish(Method):
    """Train only the surviving weights so that the pruned model follows the dense one."""

    objective: str = "cosine"  # cosine, mse, relative_mse, kl, ce, cosine+kl
    lr: float = 0.0  # at the first step; 0: 2e-3 with muon, else 6e-4
    min_lr: float = 1e-6  # at the end of the cosine schedule
    warmup_steps: int = 0  # steps in which the rate rises in a line to the schedule
    epochs: int = 0  # 0: about as many as make 448 steps of 32 images, but 10 to 64
    batch_size: int = 0  # 0: 32, or 64 for a network without attention
    optimizer: str = "muon"  # adamw, adam, sgd (momentum 0.9), muon (matrices; AdamW takes the rest)
    weight_decay: float = 0.0
    clip: float = 0.0  # largest norm of the masked gradient; 0 does not clip
    view: str = "next_norm"  # block outputs as the next block reads them, through the dense model's norm; or raw
    head: float = (
        0.1  # share of the loss that positions have which the head reads alone (class tokens); 0: as any other
    )
    granularity: str = "auto"  # token, sample, channel-position; auto: token with attention, else sample
    shuffle: bool = True  # a new order each epoch; false: one order for all epochs, as the authors' code
    precision: str = "auto"  # fp32, bf16; auto: bf16 where the device is good at it. The loss is always fp32
    bn: str = "auto"  # freeze, adapt, train, train+adapt
    train_v: bool = True  # false: the V rows of a fused qkv weight stay as they are where the mask keeps them all
    temperature: float = 1.0  # of the KL divergence
    train: str = "weights"  # weights, and joined by + biases (of the masked layers), norms (of the blocks)
    augment: str = "auto"  # such as flip,crop:0.5, for the dense model answers any input; none; auto: flip:1 of images
    views: int = 2  # of each image, the first as it is, their targets kept; 0: a new one each step, answered anew
    tail: bool = True  # also align the outputs of pruned layers after the last block, which nothing else would train

    def needs(self) -> frozenset[str]:
        return frozenset({"labels"} if self.objective == "ce" else ())

    def also_changes(self, job: Job) -> frozenset[str]:
        statistics = frozenset[str]() if self.bn == "freeze" else statistics_names(job.model)
        return statistics | frozenset(_beside(job, self.train))

    def settle(self, job: Job) -> Starfish:
        self._check()
        attention = job.anatomy.attends
        norms = batchnorms(job.model)
        weights = [job.model.get_parameter(name) for name in job.masks]
        bn = ("freeze" if not norms or are_folded(norms) else DEFAULT_BATCHNORM) if self.bn == "auto" else self.bn
        mirrored = self.views != 1 and augmentation.are_images(job.images.batch([0]))
        return replace(
            self,
            epochs=self.epochs or min(64, max(10, round(STEPS * 32 / len(job.images)))),
            lr=self.lr or (MUON_RATE if self.optimizer == "muon" else RATE),
            augment=("flip:1" if mirrored else "none") if self.augment == "auto" else self.augment,
            batch_size=self.batch_size or (32 if attention else 64),
            granularity=("token" if attention else "sample") if self.granularity == "auto" else self.granularity,
            precision=choose_precision(self.precision, weights[0].device, weights),
            bn=bn,
        )

    def _check(self) -> None:
        _one_of("objective", self.objective, OBJECTIVES)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("granularity", self.granularity, ("auto", "token", "sample", "channel-position"))
        _one_of("bn", self.bn, ("auto", *BATCHNORM_POLICIES))
        _one_of("view", self.view, VIEWS)
        for part in self.train.split("+"):
            _one_of("train", part, TRAINABLE)
        if self.augment != "auto":
            augmentation.check(self.augment, alone=self.views > 0)
            if self.views == 1 and not augmentation.is_none(self.augment):
                raise UserError(
                    "with `views` 1 images are shown as they are", "give 2 or more, or 0 for a new view each step"
                )
        if self.head > 1:
            raise UserError(f"`head` is {self.head}", "it is a share of the loss: from 0 to 1")
        for name, value, least in (("epochs", self.epochs, 0), ("batch_size", self.batch_size, 0), ("lr", self.lr, 0),
                                   ("views", self.views, 0), ("head", self.head, 0)):  # fmt: skip
            if value < least:
                raise UserError(f"`{name}` is {value}", f"it must be at least {least}")

    def fit(self, job: Job) -> Iterator[Row]:
        parts = set(self.objective.split("+"))
        aligned, with_logits = bool(parts & objectives.BLOCK_LOSSES.keys()), "kl" in parts
        tail = [module for name, module in job.anatomy.tail.items() if self.tail and name in job.masks]
        names = (*job.anatomy.blocks, *tail) if aligned else ()
        images = self._images(job)
        targets, fresh = job.targets.of(images), self._is_fresh()
        yield from targets.prepare(modules=names, logits=with_logits, precision=self.precision, keep=not fresh)
        device = next(job.model.parameters()).device
        weights = {name: job.model.get_parameter(name) for name in (*job.masks, *_beside(job, self.train))}
        trainable, norms = _trainable(job, self.train_v), self._norms(job)
        zeros = {name: mask for name, mask in job.masks.items() if not bool(mask.all())}  # a small model may have none

        if "step" not in job.state and "adapt" in self.bn:
            yield from reestimate_(job.model, job.images)
        job.model.requires_grad_(False).eval()  # eval: no dropout; batch statistics only where asked for
        for weight in weights.values():
            weight.requires_grad_(True)
        optimizer = Optimizer(self.optimizer, weights, self.weight_decay)
        optimizer.restore_(job.state)

        size = len(job.images)
        steps_per_epoch = math.ceil(size / self.batch_size)
        steps = self.epochs * steps_per_epoch
        for step in range(int(job.state.get("step", 0)), steps):
            epoch, batch = divmod(step, steps_per_epoch)
            order = self._order(size, len(images) // size, job.seed, epoch)
            indices = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            inputs = to_device(self._inputs(images, indices, job.seed, step), device)

            for norm in batchnorms(job.model) if "train" in self.bn else ():
                norm.train()
            with Recorder(job.model, names) as recorder, autocast(device, self.precision):
                answer_BK = logits(job.model, inputs)
                outputs = recorder.take()
            job.model.eval()
            student = {name: positions(outputs[name], job.anatomy.layouts[name], len(indices)) for name in names}
            dense, dense_BK = targets.read(indices, inputs)
            labels_B = images.labels[indices].to(device) if images.labels is not None else None
            seen = [{name: norms[name](x.float()) if name in norms else x for name, x in side.items()}
                    for side in (student, dense)]  # fmt: skip
            loss, reported = self._loss(seen[0], seen[1], answer_BK, dense_BK, labels_B, job.anatomy.head_positions)

            job.model.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            _mask_gradients_(weights, trainable)
            if self.clip:
                torch.nn.utils.clip_grad_norm_(weights.values(), self.clip)
            optimizer.step(self.rate(step, steps))
            masks.apply_(job.model, zeros)

            job.state.update(optimizer.state(), step=step + 1)
            yield {"step": step + 1, "steps": steps, "epoch": epoch + 1, "loss": float(loss.detach()), **reported,
                   "lr": self.rate(step, steps), "images": len(indices)}  # fmt: skip
        if "adapt" in self.bn:
            yield from reestimate_(job.model, job.images)

    def _is_fresh(self) -> bool:
        """Does every step show images as they never were before?"""
        return not self.views and not augmentation.is_none(self.augment)

    def _images(self, job: Job) -> Images:
        several = self.views > 1 and not augmentation.is_none(self.augment)
        return augmentation.Views(job.images, self.augment, self.views, job.seed) if several else job.images

    def _inputs(self, images: Images, indices: list[int], seed: int, step: int) -> Any:
        """The images, or a new view of them that is a function of seed and step alone."""
        found = images.batch(indices)
        if not self._is_fresh():
            return found
        return augmentation.augmented(found, self.augment, torch.Generator().manual_seed(seed * 1_000_003 + step))

    def _norms(self, job: Job) -> dict[str, nn.Module]:
        """Block → the dense model's norm that its output is seen through. Outputs that were cut narrower fit none."""
        if self.view == "raw":
            return {}
        narrowed = {block for unit in job.anatomy.units for block, _ in unit.outputs}
        found = {block: norm for block, norm in job.anatomy.next_norms.items() if block not in narrowed}
        return {block: deepcopy(job.dense.get_submodule(norm)).requires_grad_(False) for block, norm in found.items()}

    def rate(self, step: int, steps: int) -> float:
        """Learning rate before step `step` of `steps`: a cosine from `lr` to `min_lr`, after the warm-up."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
        return self.min_lr + (self.lr - self.min_lr) * (1 + math.cos(math.pi * done)) / 2

    def _order(self, size: int, views: int, seed: int, epoch: int) -> list[int]:
        """A function of seed and epoch alone, so that a resumed run needs no random state. An epoch sees each of `size`
        images once, in one of its views, and the next epoch in the next of them."""
        order = list(range(size))
        if self.shuffle:
            order = torch.randperm(size, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
        return [image + size * ((image + epoch) % views) for image in order]

    def _loss(
        self,
        student: dict[str, Tensor],
        dense: dict[str, Tensor],
        answer_BK: Tensor,
        dense_BK: Tensor | None,
        labels_B: Tensor | None,
        head_positions: Sequence[int],
    ) -> tuple[Tensor, dict[str, float]]:
        """The objective and what is reported beside it. All blocks weigh the same, and so do the parts of a sum."""
        terms: dict[str, Tensor] = {}
        for part in self.objective.split("+"):
            if part == "kl":
                assert dense_BK is not None
                terms[part] = objectives.kl_loss(answer_BK, dense_BK, self.temperature)
            elif part == "ce":
                assert labels_B is not None
                terms[part] = objectives.ce_loss(answer_BK, labels_B)
            else:
                blocks = [self._block_loss(part, student[name], dense[name], head_positions) for name in dense]
                terms[part] = torch.stack(blocks).mean()
        parts = {name: float(term.detach()) for name, term in terms.items()}
        if "cosine" in parts:
            parts["cosine"] = 1 - parts["cosine"]  # reported as it is, not as a loss
        return torch.stack([*terms.values()]).mean(), parts

    def _block_loss(self, part: str, student_BPC: Tensor, dense_BPC: Tensor, head_positions: Sequence[int]) -> Tensor:
        """Over all positions, and with a share of its own over those that the head reads."""
        measure = objectives.BLOCK_LOSSES[part]
        whole = measure(student_BPC, dense_BPC, self.granularity)
        singled_out = bool(self.head) and self.granularity != "sample" and len(head_positions) > 0
        if not singled_out or student_BPC.shape[1] <= max(head_positions):
            return whole
        read = [x_BPC[:, list(head_positions)] for x_BPC in (student_BPC, dense_BPC)]
        return (1 - self.head) * whole + self.head * measure(read[0], read[1], self.granularity)


RATE, MUON_RATE = 6e-4, 2e-3
STEPS = 448  # of 32 images: takes no longer than the paper's ten epochs in full precision (benchmarks/structured.py)
DEFAULT_BATCHNORM = "train+adapt"
VIEWS = ("raw", "next_norm")
TRAINABLE = ("weights", "biases", "norms")


def _one_of(name: str, value: str, known: object) -> None:
    choices = list(known)  # type: ignore[call-overload]
    if value not in choices:
        raise UserError(f"`{name}` is `{value}`", f"it can be {listed(choices, 9)}")


def _trainable(job: Job, train_v: bool) -> dict[str, Tensor]:
    """Where gradients may act, if not everywhere: the mask, less the rows of V where they are to stay."""
    trainable = {name: mask for name, mask in job.masks.items() if not bool(mask.all())}
    if train_v:
        return trainable
    for name, mask in job.masks.items():
        if job.anatomy.roles.get(name) == "qkv":
            values = len(job.dense.get_parameter(name)) // 3  # of which none are cut, unlike queries and keys
            if bool(mask[-values:].all()):
                trainable[name] = mask.clone()
                trainable[name][-values:] = False
    return trainable


def _beside(job: Job, train: str) -> list[str]:
    """Tensors outside the masks that train with them: biases of the masked layers, norms of the blocks."""
    held = {name.rpartition(".")[0] for name in job.masks}
    parts, found = train.split("+"), []
    for name, parameter in job.model.named_parameters():
        path, _, key = name.rpartition(".")
        module = job.model.get_submodule(path)
        in_block = any(f"{path}.".startswith(f"{block}.") for block in job.anatomy.blocks)
        is_layer = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)) or not _is_leaf(module)
        is_bias = path in held and is_layer and key.endswith("bias")
        is_norm = in_block and not is_layer and "Norm" in type(module).__name__
        if parameter.ndim == 1 and (("biases" in parts and is_bias) or ("norms" in parts and is_norm)):
            found.append(name)
    return [name for name in found if name not in job.masks]


def _is_leaf(module: nn.Module) -> bool:
    return not any(module.children())


def _mask_gradients_(weights: dict[str, nn.Parameter], trainable: dict[str, Tensor]) -> None:
    """Before clipping and before the optimiser sees them, so that moments of pruned entries stay exactly zero.

    A weight that no aligned output depends on has no gradient and keeps its masked value.
    """
    for name, where in trainable.items():
        gradient = weights[name].grad
        if gradient is not None:
            gradient.masked_fill_(~where, 0.0)
