"""The one way in: healing_ measures, times, saves and proves; the method between only changes weights.

Read core.py before this and methods/ after it.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from starfish import evaluate
from starfish import masks as masks_module
from starfish.anatomy import find, unwrap
from starfish.core import Images, Job, Long, Masks, Method, Result, Row, finish
from starfish.data import as_images, digest_of
from starfish.devices import to_device
from starfish.errors import UserError, listed
from starfish.methods import name_of
from starfish.methods.align import Starfish
from starfish.methods.batchnorm import batchnorms
from starfish.runs import Run, peak_rss_mb, versions
from starfish.targets import DenseTargets


def heal_(
    model: nn.Module,
    dense: nn.Module,
    masks: Masks,
    images: Any,
    method: Method | None = None,
    *,
    evaluation: Any = None,
    blocks: str | None = None,
    seed: int = 0,
) -> Result:
    """Heal `model` in place so that it follows `dense`, leaving every pruned weight zero and every other tensor alone.

    `images` and `evaluation` are tensors of inputs, batches of them, or anything like `core.Images`. Without
    `evaluation` the result is measured on the healing images themselves, and says so.
    """
    job = job_of(model, dense, masks, images, blocks=blocks, seed=seed)
    return finish(healing_(job, method or Starfish(), job.images if evaluation is None else as_images(evaluation)))


def job_of(
    model: nn.Module, dense: nn.Module, masks: Masks, images: Any, *, blocks: str | None = None, seed: int = 0
) -> Job:
    """Check what is given and look at the architecture; `model` may come wrapped, and its zeros are made here."""
    model, dense, images = unwrap(model), unwrap(dense), as_images(images)
    device = next(model.parameters()).device
    masks_module.check(masks, model)
    masks = {name: mask.to(device) for name, mask in masks.items()}
    anatomy = find(dense, to_device(images.batch([0, len(images) - 1]), device), blocks=blocks)
    masks_module.apply_(model, masks)
    return Job(model, dense, masks, images, anatomy, DenseTargets(dense, anatomy, images, device=device), seed)


def healing_(job: Job, method: Method, evaluation: Images, run: Run | None = None) -> Long[Result]:
    """`heal_`, row by row. Closing the generator between two rows saves what `run` needs to resume."""
    start = time.monotonic()
    method = _settled(check_method(method, job), run)
    proof = _Proof(job, method.also_changes(job))
    dense_BK = yield from evaluate.predict(job.dense, evaluation, "dense")
    before = yield from _before(job, dense_BK, evaluation, run)

    log = _Log(job, proof.free, run)
    log.restore_()
    grad_flags = [(parameter, parameter.requires_grad) for parameter in job.model.parameters()]
    try:
        for row in method.fit(job):
            log.see(row)
            yield row
    except GeneratorExit:
        log.save()
        raise
    finally:
        for parameter, flag in grad_flags:
            parameter.requires_grad_(flag)
        job.model.eval()
    log.close()

    mask_intact, frozen_intact = proof.check()
    after = yield from evaluate.measure(job.model, job.dense, dense_BK, evaluation, job.anatomy, "healed")
    top = [evaluate.accuracy(dense_BK, evaluation.labels, top=top) for top in (1, 5)]
    result = Result(
        method=name_of(method),
        settings=asdict(method),  # type: ignore[call-overload]  # every method is a dataclass
        images=len(job.images),
        epochs=asdict(method).get("epochs"),  # type: ignore[call-overload]
        seed=job.seed,
        sparsity=masks_module.sparsity(job.masks),
        mask_intact=mask_intact,
        frozen_intact=frozen_intact,
        **evaluate.scores((top[0], top[1]), before, after, job.anatomy.blocks, len(evaluation)),
        evaluation={"images": len(evaluation), "labels": evaluation.labels is not None,
                    "held_out": evaluation is not job.images},
        loss=log.losses(),
        seconds={**log.seconds, "total": time.monotonic() - start + log.earlier},
        peak_rss_mb=peak_rss_mb(),
        unchanged=proof.unchanged(),
        also_changed=sorted(proof.free),
        versions=versions(),
        rows=log.rows,
    )  # fmt: skip
    if run is not None:
        run.finish(job.model, job.masks, result)
    return result


def check_method(method: Method, job: Job) -> Method:
    """The method with every open setting made concrete; refused where a setting or what it needs is missing."""
    needs = method.needs()
    if "labels" in needs and job.images.labels is None:
        raise UserError(
            f"the method `{name_of(method)}` needs labels and the images have none",
            "give a folder with one sub-folder a class, or use a method without labels such as starfish",
        )
    if "batchnorm" in needs and not batchnorms(job.model):
        raise UserError(f"the method `{name_of(method)}` needs BatchNorm layers and the model has none")
    return method.settle(job)


def _settled(method: Method, run: Run | None) -> Method:
    """What was settled when the run began holds for its whole life."""
    noted = run.noted("method") if run else None
    if noted is not None:
        return replace(method, **noted)  # type: ignore[type-var]  # every method is a dataclass
    if run is not None:
        run.note("method", asdict(method))  # type: ignore[call-overload]
    return method


def _before(job: Job, dense_BK: Tensor, evaluation: Images, run: Run | None) -> Long[evaluate.Measured]:
    noted = run.noted("pruned") if run else None
    if noted is not None:
        return evaluate.Measured(**noted)
    before = yield from evaluate.measure(job.model, job.dense, dense_BK, evaluation, job.anatomy, "pruned")
    if run is not None:
        run.note("pruned", asdict(before))
    return before


class _Proof:
    """Fingerprints from before the healing, to show afterwards that nothing moved but what may."""

    def __init__(self, job: Job, free: frozenset[str]) -> None:
        self.job, self.free = job, free
        self.masked = fingerprints(job.model, job.masks)
        self.frozen = fingerprints(job.model, self._frozen_names())

    def _frozen_names(self) -> list[str]:
        """All but the masked tensors, other names for them (tied weights), and what the method declared."""
        state = self.job.model.state_dict()
        masked = {state[name].data_ptr() for name in self.job.masks}
        return [
            name for name, tensor in state.items() if name not in self.free and tensor.data_ptr() not in masked
        ]  # fmt: skip

    def check(self) -> tuple[bool, bool]:
        """Are the pruned weights zero, and all frozen tensors as they were?"""
        now = fingerprints(self.job.model, self.frozen)
        moved = [name for name in self.frozen if now[name] != self.frozen[name]]
        assert not moved, f"the method changed {listed(moved)}, which are none of its masks"
        mask_intact = masks_module.zeros_intact(self.job.model, self.job.masks)
        assert mask_intact, "the method revived pruned weights"
        return mask_intact, not moved

    def unchanged(self) -> list[str]:
        """Masked tensors that came out as they went in."""
        now = fingerprints(self.job.model, self.masked)
        return [name for name in self.masked if now[name] == self.masked[name]]


def digest(model: nn.Module) -> str:
    """One hash of all that a model holds."""
    facts = sorted(fingerprints(model, model.state_dict()).items())
    return hashlib.sha256(str(facts).encode()).hexdigest()


def fingerprints(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """A hash of the bytes of each tensor."""
    state = model.state_dict()
    return {name: digest_of(state[name]) for name in names}


@dataclass
class _Log:
    """Rows seen, seconds spent, and when to save."""

    job: Job
    free: frozenset[str]  # tensors outside the masks that belong to the state
    run: Run | None
    rows: list[Row] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"targets": 0.0, "fit": 0.0})
    earlier: float = 0.0  # seconds of the sessions before this one
    _tick: float = field(default_factory=time.monotonic)
    _start: float = field(default_factory=time.monotonic)

    def restore_(self) -> None:
        kept = self.run.restore() if self.run else None
        if kept is None:
            return
        tensors, state, facts, self.rows = kept
        self.job.model.load_state_dict(tensors, strict=False)
        self.job.state.update(state)
        self.earlier = facts.pop("earlier")
        self.seconds.update(facts)

    def see(self, row: Row) -> None:
        now = time.monotonic()
        self.seconds["targets" if row.get("stage") == "targets" else "fit"] += now - self._tick
        self._tick = now
        if "stage" in row:
            return
        _check_finite(row)
        self.rows.append(row)
        if self.run is not None:
            self.run.add(row)
            if self.run.save_is_due():
                self.save()

    def save(self) -> None:
        if self.run is None or not self.rows:
            return
        state = self.job.model.state_dict()
        tensors = {name: state[name] for name in (*self.job.masks, *sorted(self.free))}
        spent = time.monotonic() - self._start + self.earlier
        self.run.save(tensors, self.job.state, {**self.seconds, "earlier": spent})

    def close(self) -> None:
        """What a method does after its last row counts as fitting. Saved, lest a kill while measuring costs it all."""
        self.seconds["fit"] += time.monotonic() - self._tick
        self.save()

    def losses(self) -> dict[str, float | None]:
        """Mean loss of the first and of the last epoch."""
        with_loss = [row for row in self.rows if "loss" in row]
        return {
            "first": _mean([float(row["loss"]) for row in with_loss if row["epoch"] == with_loss[0]["epoch"]]),
            "last": _mean([float(row["loss"]) for row in with_loss if row["epoch"] == with_loss[-1]["epoch"]]),
        }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _check_finite(row: Row) -> None:
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(
                f"`{name}` became {value} at step {row.get('step', '?')}",
                "lower the learning rate (--set lr=1e-4), or calculate in full precision (--set precision=fp32)",
            )
