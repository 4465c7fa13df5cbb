"""The one way in: healing_ measures, times, saves and proves; the method between only changes weights.

Read core.py before this and methods/ after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from starfish import evaluate, settings
from starfish import masks as masks_module
from starfish.anatomy import find, unwrap
from starfish.cache import Cache
from starfish.core import Anatomy, Images, Job, Long, Masks, Method, Result, Row, finish
from starfish.data import as_images
from starfish.devices import peak_rss_mb, to_device
from starfish.digests import digest_of_stored
from starfish.errors import UserError, listed
from starfish.log import Log
from starfish.methods import METHODS, default_methods, name_of
from starfish.methods.batchnorm import batchnorms
from starfish.methods.corp import foldable
from starfish.patterns import loses_channels
from starfish.proof import Proof
from starfish.runs import Run, versions
from starfish.small import Cut, cut_of, grow_, is_smaller, smaller, smaller_anatomy, smaller_masks
from starfish.speed import measuring
from starfish.targets import DenseTargets


def heal_(
    model: nn.Module,
    dense: nn.Module,
    masks: Masks,
    images: Any,
    method: Method | Sequence[Method] | None = None,
    *,
    evaluation: Any = None,
    blocks: str | None = None,
    seed: int = 0,
    cache: Cache | None = None,
) -> Result:
    """Heal `model` in place so that it follows `dense`, leaving every pruned weight zero and every other tensor alone.

    `method` is one or several in a row; without it, what suits the masks. `images` and `evaluation` are tensors of
    inputs, batches of them, or anything like `core.Images`. Without `evaluation` the result is measured on the healing
    images themselves, and says so.
    """
    job = job_of(model, dense, masks, images, blocks=blocks, seed=seed, cache=cache)
    chosen = method or [METHODS[name] for name in default_methods(job)]
    return finish(healing_(job, chosen, job.images if evaluation is None else as_images(evaluation)))


def job_of(
    model: nn.Module, dense: nn.Module, masks: Masks, images: Any, *, blocks: str | None = None, seed: int = 0,
    cache: Cache | None = None,
) -> Job:  # fmt: skip
    """Check what is given and look at the architecture; `model` may come wrapped, and its zeros are made here."""
    model, dense, images = unwrap(model), unwrap(dense), as_images(images)
    device = next(model.parameters()).device
    masks_module.check(masks, model)
    masks = {name: mask.to(device) for name, mask in masks.items()}
    inputs = to_device(images.batch([0, len(images) - 1]), device)
    anatomy = find(dense, inputs, blocks=blocks, channels=loses_channels(masks))
    if is_smaller(model, dense):  # some other tool has cut it: its units are what is left of them
        anatomy = _anatomy_of_smaller(model, dense, anatomy, inputs)
    masks_module.apply_(model, masks)
    return Job(model, dense, masks, images, anatomy, DenseTargets(dense, anatomy, images, device=device), seed, cache)


def _anatomy_of_smaller(model: nn.Module, dense: nn.Module, anatomy: Anatomy, inputs: Any) -> Anatomy:
    """That of the dense model, whose blocks must put out what the smaller one's do; of units it has none to lose."""
    try:
        sizes = [evaluate.output_sizes(net, anatomy, inputs) for net in (model, dense)]
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"the smaller model does not run: {reason}",
            "its layers must fit each other; was it saved whole, after cutting?",
        ) from error
    different = [name for name in anatomy.blocks if sizes[0][name] != sizes[1][name]]
    if different:
        name = different[0]
        raise UserError(
            f"in the smaller model {listed(different)} puts out {sizes[0][name]} channels, in the dense one"
            f" {sizes[1][name]}: they cannot be compared",
            "align the blocks whose outputs have kept their width: --blocks REGEX",
        )
    weights, whole = dict(model.named_parameters()), dict(dense.named_parameters())
    tail = {name: module for name, module in anatomy.tail.items() if len(weights[name]) == len(whole[name])}
    return replace(anatomy, units=(), tail=tail)


@dataclass(frozen=True)
class Before:
    """What there is to say before any healing: the same for every method, so that a comparison finds it out once."""

    dense_BK: Tensor  # the dense model's answers
    pruned: evaluate.Measured


def looking(job: Job, evaluation: Images, run: Run | None = None) -> Long[Before]:
    dense_BK = yield from evaluate.predict(job.dense, evaluation, "dense")
    return Before(dense_BK, (yield from _measured(job, dense_BK, evaluation, run, "pruned")))


def healing_(
    job: Job, method: Method | Sequence[Method], evaluation: Images, run: Run | None = None,
    before: Before | None = None,
) -> Long[Result]:  # fmt: skip
    """`heal_`, row by row. Closing the generator between two rows saves what `run` needs to resume.

    With `before`, a comparison's, the speed of the model is not measured: no method changes it.
    """
    start = time.monotonic()
    chain = _settled(chain_of(job, method), run)
    proof = Proof(job, frozenset().union(*(one.also_changes(job) for one in chain.values())))
    known = before or (yield from looking(job, evaluation, run))
    measured = partial(_measured, job, known.dense_BK, evaluation, run)
    cut = cut_of(job.masks, job.anatomy, job.model)
    log = Log(job, proof.free, run, chain=len(chain) > 1)
    log.restore_()
    stages, after = yield from _stages(job, chain, cut, log, measured)

    mask_intact, frozen_intact = proof.check()
    small = smaller(job.model, cut) if cut and before is None else None
    top = [evaluate.accuracy(known.dense_BK, evaluation.labels, top=top) for top in (1, 5)]
    trained = [stage for stage in stages if stage["loss"]["last"] is not None] or stages
    result = Result(
        method=",".join(chain),
        settings=settings_of(chain),
        stages=stages,
        images=len(job.images),
        epochs=trained[-1]["settings"].get("epochs"),
        seed=job.seed,
        sparsity=masks_module.sparsity(job.masks),
        mask_intact=mask_intact,
        frozen_intact=frozen_intact,
        **evaluate.scores((top[0], top[1]), known.pruned, after, job.anatomy.blocks, len(evaluation)),
        evaluation={"images": len(evaluation), "labels": evaluation.labels is not None,
                    "held_out": digest_of_stored(evaluation) != digest_of_stored(job.images)},
        loss=trained[-1]["loss"],
        seconds={**log.seconds, "total": time.monotonic() - start + log.earlier,
                 **({"shared": log.shared()} if log.shared() else {})},
        peak_rss_mb=peak_rss_mb() - _held_mb(job),
        unchanged=proof.unchanged(),
        also_changed=sorted(proof.free),
        cut=cut.counts(),
        speed={} if before else (yield from measuring(job.dense, job.model, small, evaluation)),
        versions=versions(),
        rows=log.rows,
    )  # fmt: skip
    if run is not None:
        run.finish(job.model, job.masks, result)
    return result


def _stages(
    job: Job, chain: dict[str, Method], cut: Cut, log: Log, measured: Callable[[str], Long[evaluate.Measured]]
) -> Long[tuple[list[dict[str, Any]], evaluate.Measured]]:
    """One method after another, each from what the one before it left; what came of each, and of the last."""
    stages = []
    for place, (name, method) in enumerate(chain.items()):
        if place >= log.place:
            yield from _fit(job, method, name, cut, log)
        after = yield from measured("healed" if place + 1 == len(chain) else f"after {name}")
        stages.append({"method": name, "settings": _settings(method), "seconds": log.spent(place),
                       "loss": log.losses(name), "accuracy": after.top1, "agreement": after.agreement,
                       "kl": after.kl, "cosine": evaluate.mean(after.cosines)})  # fmt: skip
    return stages, after


def _fit(job: Job, method: Method, name: str, cut: Cut, log: Log) -> Iterator[Row]:
    """One method on the model, in the small shape where units are gone and the method does not need to see them."""
    work = job if method.masked() or not cut else smaller_job(job, cut)

    def give_back_() -> None:
        if work is not job:
            grow_(job.model, work.model, cut)

    log.begin_stage(name, give_back_)
    grad_flags = [(parameter, parameter.requires_grad) for parameter in job.model.parameters()]
    try:
        for row in method.fit(work):
            log.see(row)
            yield row
    except GeneratorExit:
        log.save()
        raise
    finally:
        for parameter, flag in grad_flags:
            parameter.requires_grad_(flag)
        job.model.eval()
    log.end_stage()


def smaller_job(job: Job, cut: Cut) -> Job:
    """The same healing of the model without the units that are gone."""
    assert isinstance(job.targets, DenseTargets)
    rows = {module: cut.kept.get((weight, 0)) for weight, module in job.anatomy.tail.items()}
    kept = cut.outputs | {module: stays for module, stays in rows.items() if stays is not None}
    return replace(
        job,
        model=smaller(job.model, cut),
        masks=smaller_masks(job.masks, cut),
        anatomy=smaller_anatomy(job.anatomy, cut),
        targets=job.targets.narrowed(kept),
    )


def chain_of(job: Job, method: Method | Sequence[Method]) -> dict[str, Method]:
    """Name → method, ready for this job, in the order in which they run."""
    chain: dict[str, Method] = {}
    for one in [method] if isinstance(method, Method) else method:
        name = name_of(one)
        if name in chain:
            raise UserError(f"the chain has the method `{name}` twice", "each can run once")
        if chain and one.starts_over():
            raise UserError(
                f"`{name}` starts from the dense weights, so what {listed(list(chain))} did would be lost",
                "put it first",
            )
        chain[name] = check_method(one, job)
    return chain


def check_method(method: Method, job: Job) -> Method:
    """The method with every open setting made concrete; refused where a setting or what it needs is missing."""
    settings.check(method)
    missing = lacks(method, job)
    if missing is not None:
        raise missing
    return method.settle(job)


def lacks(method: Method, job: Job) -> UserError | None:
    """What keeps a method from this job, whatever its settings."""
    needs = method.needs()
    if "labels" in needs and job.images.labels is None:
        return UserError(
            f"the method `{name_of(method)}` needs labels and the images have none",
            "give a folder with one sub-folder a class, take the dense model's answers for labels (--pseudo-labels), or"
            " use a method without labels such as starfish",
        )
    if method.masked() and is_smaller(job.model, job.dense):
        return UserError(
            f"the method `{name_of(method)}` looks at the weights that went, and this model has been made smaller",
            "heal it with starfish, or give masks and the dense model: --masks",
        )
    if "batchnorm" in needs and not batchnorms(job.model):
        return UserError(f"the method `{name_of(method)}` needs BatchNorm layers and the model has none")
    if "units" in needs and not foldable(job):
        return UserError(
            f"the method `{name_of(method)}` needs masks in which whole neurons, query-key dimensions or channels are"
            " gone, and these have none",
            "`starfish prune --pattern structured` makes such; for other masks use starfish",
        )
    return None


def _settled(chain: dict[str, Method], run: Run | None) -> dict[str, Method]:
    """What was settled when the run began holds for its whole life."""
    noted = run.noted("methods") if run else None
    if noted is not None:
        return {name: replace(method, **noted[name]) for name, method in chain.items()}  # type: ignore[type-var]  # every method is a dataclass
    if run is not None:
        run.note("methods", {name: _settings(method) for name, method in chain.items()})
    return chain


def settings_of(chain: Mapping[str, Method]) -> dict[str, Any]:
    """The settings of the one method, or of each of several by its name."""
    settings = {name: _settings(method) for name, method in chain.items()}
    return settings if len(chain) > 1 else next(iter(settings.values()))


def _settings(method: Method) -> dict[str, Any]:
    return asdict(method)  # type: ignore[call-overload, no-any-return]  # every method is a dataclass


def _measured(job: Job, dense_BK: Tensor, evaluation: Images, run: Run | None, stage: str) -> Long[evaluate.Measured]:
    noted = run.noted(stage) if run else None
    if noted is not None:
        return evaluate.Measured(**noted)
    found = yield from evaluate.measure(job.model, job.dense, dense_BK, evaluation, job.anatomy, stage)
    if run is not None:
        run.note(stage, asdict(found))
    return found


def _held_mb(job: Job) -> float:
    """Targets that stay in memory for other methods of a comparison are no cost of this one."""
    return job.targets.held_mb() if isinstance(job.targets, DenseTargets) else 0.0
