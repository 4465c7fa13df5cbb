"""SNOWS: layer by layer, Newton steps on the surviving weights so that what comes next is as it was (methods.md 9)."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor, nn

from starfish.core import Images, Job, Method, Row
from starfish.data import spread
from starfish.devices import to_device
from starfish.errors import UserError, listed
from starfish.methods.newton import (
    Product,
    armijo_,
    block_diagonal,
    conjugate_gradients,
    gauss_newton,
    hessian,
    mismatch,
)
from starfish.replay import Arguments, Order, Start, entering, order_of, outputs, plain, start_of

CHUNK = 50_000  # kept weights between which the released code has products
SHORT, STALLED, PATIENCE = 0.1, 0.995, 5  # a step, a ratio of losses, how many of these in a row: then a layer is done
PRODUCTS, TARGETS = ("gauss_newton", "hessian", "blockdiag"), ("dense", "same")


@dataclass(frozen=True)
class Snows(Method):
    """Newton steps, layer by layer, so that the operations after each put out what the dense model's do (SNOWS).

    Set for a processor: the authors look 20 to 40 operations ahead in a CNN, take up to 500 products a step, batches
    of 512 and more, and three passes. Targets are of the dense prefix (theirs are `same`), and the last batch, which
    judges the steps, takes one of its own.
    """

    look_ahead: int = 0  # operations matched, the layer's own counted: K + 1; 0: 8, or 4 with attention
    passes: int = 1  # over the images, for each layer
    batch_size: int = 64  # images of a Newton step
    images: int = 512  # of which steps are taken, spread over all there are; 0: all
    product: Literal["gauss_newton", "hessian", "blockdiag"] = "gauss_newton"  # blockdiag: of the Hessian, as released
    cg_steps: int = 10  # products for one Newton step at most
    cg_tolerance: float = 1e-3  # residual over gradient at which they are enough
    damp: float = 1e-4  # added to the diagonal
    targets: Literal["dense", "same"] = "dense"  # same, as released: the dense block on what enters the pruned one
    warm_start: bool = False  # first fit the layer's own output, by the same steps; not for depthwise filters

    def masked(self) -> bool:
        return True

    def settle(self, job: Job) -> Snows:
        self._check()
        return replace(self, look_ahead=self.look_ahead or (4 if job.anatomy.attends else 8))

    def _check(self) -> None:
        for name, known in (("product", PRODUCTS), ("targets", TARGETS)):
            if getattr(self, name) not in known:
                raise UserError(f"`{name}` is `{getattr(self, name)}`", f"it can be {listed(list(known))}")
        for name, least in (("look_ahead", 0), ("batch_size", 1), ("images", 0), ("passes", 1), ("cg_steps", 1),
                            ("damp", 0), ("cg_tolerance", 0)):  # fmt: skip
            if getattr(self, name) < least:
                raise UserError(f"`{name}` is {getattr(self, name)}", f"it must be at least {least}")

    def fit(self, job: Job) -> Iterator[Row]:
        """Layers still to come have the dense model's weights while one is fitted, and so nothing to make good for.

        A weight is written when its layer is done, so that a kill before leaves the layer to begin again.
        """
        method = self.settle(job)
        # Matrices are multiplied in another order where one asks for its gradient; of that no mismatch may come.
        work, dense = (deepcopy(net).requires_grad_(False).eval() for net in (job.model, job.dense))
        batches, device = method._batches(job), next(work.parameters()).device
        with plain():
            order = order_of(work, to_device(job.images.batch([0, len(job.images) - 1]), device), job.anatomy.blocks)
        starts = {name: start_of(name, order, method.look_ahead) for name in job.masks}
        layers = sorted(job.masks, key=lambda name: (order.operations.index(starts[name].first), name))
        done = int(job.state.get("step", 0))
        for name in layers[done:]:
            _copy_(work, dense, name)
        for _, group in groupby(list(enumerate(layers))[done:], key=lambda item: starts[item[1]].entry):
            here = list(group)
            chain = max((starts[name].chain for _, name in here), key=len)
            kept = [batch.behind(work, dense, chain, self.targets) for batch in batches]
            for step, name in here:
                _copy_(work, job.model, name)
                weight = work.get_parameter(name)
                alone = job.anatomy.roles.get(name) == "depthwise"
                layer = _Layer(work, dense, weight, ~job.masks[name], alone, order, starts[name], kept)
                row = yield from method._fit_layer(layer, {"done": step, "total": len(layers)})
                weight.requires_grad_(False)
                _copy_(job.model, work, name)
                job.state["step"] = step + 1
                yield {"step": step + 1, "steps": len(layers), "layer": name, **row}

    def _batches(self, job: Job) -> list[_Batch]:
        """Of equal size, in an order of their own: images may come class by class. The last judges all steps."""
        images = spread(job.images, self.images)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(job.seed))
        chunks = order.tensor_split(max(1, round(len(images) / self.batch_size)))
        return [_Batch(images, chunk.tolist()) for chunk in chunks]

    def _fit_layer(self, layer: _Layer, place: Row) -> Generator[Row, None, Row]:
        """The row of a layer. The first fit counts only where it makes the objective smaller: nothing may grow."""
        before = layer.judge(self.look_ahead).loss()
        if self.warm_start and not layer.depthwise:
            as_it_was = layer.weight.detach().clone()
            yield from self._newton(layer, 1, place)
            if not layer.judge(self.look_ahead).loss() <= before:
                layer.weight.data.copy_(as_it_was)
        after, accepted, products = yield from self._newton(layer, self.look_ahead, place)
        return {"before": before, "after": after, "newton": accepted, "cg": products}

    def _newton(self, layer: _Layer, count: int, place: Row) -> Generator[Row, None, tuple[float, int, int]]:
        """The loss on the last batch, the steps accepted and the products taken."""
        judge = layer.judge(count)
        loss, accepted, products, stalled = judge.loss(), 0, 0, 0
        for _ in range(self.passes):
            length = 0.0
            for batch in range(len(layer.kept)):
                if loss == 0 or stalled == PATIENCE:
                    return loss, accepted, products
                step, used = self._step(layer, batch, count)
                slope = judge.slope(step) if used else 0.0
                length, after = armijo_(layer.weight, step, judge.loss, loss, slope)
                stalled = stalled + 1 if after > STALLED * loss else 0
                loss, accepted, products = after, accepted + (length > 0), products + used
                yield {"stage": "layers", **place}
            if length < SHORT:
                break
        return loss, accepted, products

    def _step(self, layer: _Layer, batch: int, count: int) -> tuple[Tensor, int]:
        """δ of (H_ZZ + damp·I) δ = −g, Z the entries that survive; zero where nothing hears the weight."""
        put_out = layer.put_out(batch, count)
        loss = mismatch(put_out, layer.targets(batch, count))
        gradient = layer.gradient(loss)
        if not gradient.any():
            return gradient, 0
        product = self._product(put_out, loss, layer)
        return conjugate_gradients(lambda v: product(v).masked_fill_(layer.gone, 0), gradient, self.damp, self.cg_steps,
                                   self.cg_tolerance)  # fmt: skip

    def _product(self, put_out: Sequence[Tensor], loss: Tensor, layer: _Layer) -> Product:
        if self.product == "gauss_newton":
            return gauss_newton(put_out, layer.weight)
        exact = hessian(loss, layer.weight)
        return block_diagonal(exact, ~layer.gone, CHUNK) if self.product == "blockdiag" else exact


@dataclass(frozen=True)
class _Batch:
    images: Images
    indices: list[int]

    def behind(self, work: nn.Module, dense: nn.Module, chain: Sequence[str], targets: str) -> _Kept:
        """What enters the chain in the pruned network, and what the dense one is given there."""
        inputs = to_device(self.images.batch(self.indices), next(work.parameters()).device)
        with plain():
            entered = entering(work, chain, inputs)
            return _Kept(entered, entered if targets == "same" else entering(dense, chain, inputs))


@dataclass(frozen=True)
class _Kept:
    pruned: list[Arguments]
    dense: list[Arguments]


@dataclass(frozen=True)
class _Layer:
    """One weight of the partly pruned network, and what it is fitted to."""

    work: nn.Module
    dense: nn.Module
    weight: Tensor
    gone: Tensor
    depthwise: bool
    order: Order
    start: Start
    kept: list[_Kept]  # by batch

    def put_out(self, batch: int, count: int) -> list[Tensor]:
        self.weight.requires_grad_(torch.is_grad_enabled())
        with plain():
            return outputs(self.work, self.start, self.kept[batch].pruned, self.order.operations, count)

    @torch.no_grad()
    def targets(self, batch: int, count: int) -> list[Tensor]:
        with plain():
            return outputs(self.dense, self.start, self.kept[batch].dense, self.order.operations, count)

    def gradient(self, loss: Tensor) -> Tensor:
        """By the entries that survive; its graph stays for products."""
        if not loss.requires_grad:
            return torch.zeros_like(self.weight)
        (found,) = torch.autograd.grad(loss, self.weight, retain_graph=True)
        return found.masked_fill(self.gone, 0)

    def judge(self, count: int) -> _Judge:
        return _Judge(self, count, self.targets(-1, count))


@dataclass(frozen=True)
class _Judge:
    """The last batch: what a step is worth is asked of the same images as the slope along it."""

    layer: _Layer
    count: int
    targets: list[Tensor]

    @torch.no_grad()
    def loss(self) -> float:
        return float(mismatch(self.layer.put_out(-1, self.count), self.targets))

    def slope(self, step: Tensor) -> float:
        gradient = self.layer.gradient(mismatch(self.layer.put_out(-1, self.count), self.targets))
        return float((gradient.double() * step.double()).sum())


@torch.no_grad()
def _copy_(to: nn.Module, other: nn.Module, name: str) -> None:
    to.get_parameter(name).copy_(other.get_parameter(name))
