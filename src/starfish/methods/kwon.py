"""Kwon et al. 2022: one factor for every head, neuron or channel that stays, by least squares (methods.md 11.4).

B images, N rows (a token or a pixel of an image each), G groups of a convolution, I columns of a group's weight (inputs
times taps), O its outputs, U units of a group, each with a factor of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from starfish.activations import Recorder, Taps, call, positions
from starfish.anatomy.heads import heads_of
from starfish.core import Anatomy, Images, Job, Long, Method, Part, Row, Unit
from starfish.data import spread
from starfish.devices import to_device
from starfish.errors import UserError
from starfish.masks import apply_
from starfish.statistics import BATCH, Heard, audible, exact, listening, path_of

LIMIT = 10.0  # a factor beyond ±10 says that the equations are not to be trusted, there and further on
STRAIGHT = 1e-3  # of the largest difference: how far what follows from an output may be from a multiple of it
READS_CHANNELS = {"conv", "depthwise", "head"}


@dataclass(frozen=True)
class Kwon(Method):
    """Rescale the heads, neurons and channels that stay, layer by layer, in closed form; one factor each (Kwon et al.).

    The teacher is the dense model. What an attention or MLP adds to the stream is fitted together with the stream that
    it is added to; the attention that runs first is left as it is. Biases stay.
    """

    images: int = 256  # on which the layers are compared, spread over all there are; 0: all

    def masked(self) -> bool:
        return True

    def settle(self, job: Job) -> Kwon:
        if self.images < 0:
            raise UserError(f"`images` is {self.images}", "give how many are to be looked at, or 0 for all")
        if not _layers(job):
            raise UserError(
                "no layer that reads heads, neurons or channels has a mask, so there is nothing to rescale",
                "attentions are rescaled in what reads their heads (scope out), but for the first of them, and MLPs in"
                " their second layer (scope mlp_out); for other masks use starfish",
            )
        return self

    def fit(self, job: Job) -> Iterator[Row]:
        """A resumed run finds the layers that are done in the model."""
        layers = _layers(job)
        student, teacher = (listening(net, _attentions(net, job.anatomy)) for net in (job.model, job.dense))
        images = spread(job.images, self.images)
        for step, unit in enumerate(layers, 1):
            if step <= int(job.state.get("step", 0)) or "stopped" in job.state:
                continue
            place = _place(teacher, job, unit)
            factors = (yield from _gathered(student, teacher, job, images, unit, place)).solve()
            if not factors.stopped:
                for net in (student, job.model):
                    _scale_(net, unit, factors.of_unit, job)
            job.state["step"] = step
            if factors.stopped:
                job.state["stopped"] = factors.stopped
            yield {"step": step, "steps": len(layers), "layer": path_of(unit.readers[0]), "compared_at": place.text(),
                   **factors.row()}  # fmt: skip


def _attentions(net: nn.Module, anatomy: Anatomy) -> list[Unit]:
    """Those that can be taken apart, so that what each of their layers reads is heard."""
    return [unit for unit in anatomy.units if unit.kind == "qk" and audible(net, unit)]


def _layers(job: Job) -> list[Unit]:
    """Masked weights that read units, in the order in which they run; groups of columns have a factor each."""
    heads = [unit for unit in heads_of(job.anatomy, job.dense) if unit.readers[0].parameter in job.masks]
    others = [_columns(name, role, job) for name, role in job.anatomy.roles.items()
              if name in job.masks and role in READS_CHANNELS | {"mlp_out"}]  # fmt: skip
    alive = [unit for unit in (*heads, *others) if bool(job.masks[unit.readers[0].parameter].any())]
    known = {path_of(unit.readers[0]): unit for unit in alive}
    outs = [path_of(unit.readers[0]) for unit in heads_of(job.anatomy, job.dense)]
    ears = listening(job.dense, _attentions(job.dense, job.anatomy))
    with torch.no_grad(), Recorder(ears, list(dict.fromkeys([*known, *outs]))) as recorder:
        call(ears, _two(job))
        order = recorder.fired
    first = next((path for path in order if path in outs), None)  # it reads what the teacher's reads (11.4)
    return [known[path] for path in order if path in known and path != first]


def _columns(name: str, role: str, job: Job) -> Unit:
    layer = job.dense.get_submodule(name.rpartition(".")[0])
    groups = layer.groups if isinstance(layer, (nn.Conv1d, nn.Conv2d)) else 1
    count = job.dense.get_parameter(name).shape[1] * groups
    kind = "neuron" if role == "mlp_out" else "channel"
    return Unit(kind, _block_of(name, job.anatomy), count, count, (Part(name, 1),))


def _block_of(name: str, anatomy: Anatomy) -> str:
    return max((block for block in anatomy.blocks if name.startswith(f"{block}.")), key=len, default="")


def _two(job: Job) -> Any:
    return to_device(job.images.batch([0, len(job.images) - 1]), next(job.dense.parameters()).device)


@dataclass(frozen=True)
class _Place:
    """Where two models are compared: what goes into a module, or comes out of it, is a residual + gain · output."""

    path: str
    side: str  # into, block or own: the last two come out
    gain_O: Tensor

    def text(self) -> str:
        return {"into": f"input of {self.path}", "block": f"output of {self.path}", "own": "its own output"}[self.side]


@dataclass(frozen=True)
class _Ear:
    """What one batch did in one model, at a layer and where its output may have arrived."""

    heard: Heard
    unit: Unit
    out: Mapping[str, Tensor]

    def read(self) -> Tensor:
        """x_BNI, in float64: all that each row of the layer's output depends on."""
        return self.heard.patches(self.unit, self.unit.readers[0])

    def at(self, place: _Place) -> Tensor:
        """x_BNO, in float64, the rows as above."""
        layout = self.heard.layouts.get(self.unit.block)
        if place.side == "block" and layout is not None:
            return exact(positions(self.out[place.path], layout, self.heard.images))
        x = self.heard.taps.into[place.path] if place.side == "into" else self.out[place.path]
        if place.side == "own" and self.heard.ears.get_parameter(self.unit.readers[0].parameter).ndim > 2:
            x = x.movedim(1, -1)  # a convolution has its channels before the pixels
        elif x.ndim == 3 and layout is not None:
            x = x.movedim(layout.batch, 0)  # a sequence may come first
        return exact(x.reshape(self.heard.images, -1, x.shape[-1]))

    def size_at(self, place: _Place) -> int:
        return (self.heard.taps.into if place.side == "into" else self.out)[place.path].numel()


@torch.no_grad()
def _hear(
    net: nn.Module, job: Job, unit: Unit, inputs: Any, *, into: Sequence[str], out: Sequence[str],
    weights: Mapping[str, Tensor] | None = None,
) -> _Ear:  # fmt: skip
    """Run the model, perhaps with some other weights."""
    images = len(next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs)
    positional, keywords = ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})
    with Taps(net, into=into) as taps, Recorder(net, out) as recorder:
        functional_call(net, dict(weights or {}), positional, keywords)
        return _Ear(Heard(net, taps, job.anatomy.layouts, images), unit, recorder.take())


def _place(net: nn.Module, job: Job, unit: Unit) -> _Place:
    """The first tensor of the block that holds what the layer puts out, added to something else.

    Found by experiment: with the layer silent such a tensor is less by a multiple of that, by channel (LayerScale).
    """
    path = path_of(unit.readers[0])
    layer = net.get_submodule(path)
    own = _Place(path, "own", torch.ones(len(net.get_parameter(unit.readers[0].parameter)), dtype=torch.float64))
    if not unit.block or not isinstance(layer, nn.Linear):
        return own  # between convolutions lie norms and ReLUs
    leaves = [f"{unit.block}.{name}" for name, module in net.get_submodule(unit.block).named_modules()
              if not any(module.children()) and any(True for _ in module.parameters())]  # fmt: skip
    silence = {f"{path}.{name}": torch.zeros_like(tensor) for name, tensor in layer.named_parameters()}
    loud, silent = (_hear(net, job, unit, _two(job), into=leaves, out=[unit.block, path], weights=weights)
                    for weights in ({}, silence))  # fmt: skip
    y_NO = loud.at(own).flatten(0, 1)
    for name, side in (*((leaf, "into") for leaf in loud.heard.taps.into), (unit.block, "block")):
        place = _Place(name, side, own.gain_O)
        if loud.size_at(place) == y_NO.numel():
            gain_O = _gain(loud.at(place).flatten(0, 1), silent.at(place).flatten(0, 1), y_NO)
            if gain_O is not None:
                return _Place(name, side, gain_O)
    return own


def _gain(with_NO: Tensor, without_NO: Tensor, y_NO: Tensor) -> Tensor | None:
    """By which multiple of y the first is more than the second, if it is so in every row and y is not all of it."""
    if with_NO.shape != y_NO.shape or not without_NO.any():
        return None
    more_NO = with_NO - without_NO
    gain_O = (more_NO * y_NO).sum(0) / y_NO.square().sum(0).clamp_min(torch.finfo(torch.float64).tiny)
    off = (more_NO - gain_O * y_NO).abs().max()
    if not bool(gain_O.any()) or bool(off > STRAIGHT * more_NO.abs().max()):
        return None
    return torch.where((gain_O - 1).abs() <= STRAIGHT, 1.0, gain_O)  # what is off by so little is rounding


@dataclass(frozen=True)
class _Factors:
    of_unit: Tensor  # one for each; 1 where nothing is left of it
    before: float
    after: float
    stopped: str = ""  # why these and all further ones are not used

    def row(self) -> Row:
        row: Row = {"before": self.before, "after": self.after, "least": float(self.of_unit.min()),
                    "largest": float(self.of_unit.max())}  # fmt: skip
        return {**row, "stopped": self.stopped} if self.stopped else row


@dataclass
class _Equations:
    """min over z of ‖r − Σ z_u c_u‖², c_u what unit u adds to the output: sums over rows (11.4)."""

    W_GOI: Tensor  # times the gain
    unit_GI: Tensor  # which unit, of those that stay in its group, a column belongs to
    kept: Tensor  # which unit of all these are, group by group
    count: int  # units in all
    constant: bool  # one more column of ones, whose factor is not used: in heads
    sums: dict[str, Tensor] = field(default_factory=dict)
    entries: int = 0

    def add_(self, x_BNI: Tensor, r_BNO: Tensor) -> None:
        groups, outputs, columns = self.W_GOI.shape
        x_GNI = x_BNI.reshape(-1, groups, columns).movedim(1, 0)
        r_GNO = r_BNO.reshape(-1, groups, outputs).movedim(1, 0)
        new = {"gram": x_GNI.mT @ x_GNI, "cross": (r_GNO @ self.W_GOI * x_GNI).sum(1), "read": x_GNI.sum(1),
               "rest": r_GNO.sum(), "square": r_GNO.square().sum()}  # fmt: skip
        self.sums = {name: self.sums.get(name, 0) + value for name, value in new.items()}
        self.entries += r_BNO.numel()

    def solve(self) -> _Factors:
        A_GUU, b_GU = self._normal()
        z_GU = damped(*self._with_constant(A_GUU, b_GU))[:, : b_GU.shape[1]]
        before = float(self.sums["square"])
        after = before - float((2 * z_GU * b_GU - z_GU * (A_GUU @ z_GU[..., None])[..., 0]).sum())
        ones = torch.ones(self.count, dtype=torch.float64)
        found = ones.index_copy(0, self.kept, (1 + z_GU).flatten().cpu())
        errors = before / self.entries, max(after, 0.0) / self.entries
        if not bool(found.isfinite().all()):
            return _Factors(ones, errors[0], errors[0], "the equations have no solution")
        if bool(found.abs().max() > LIMIT):
            return _Factors(found, errors[0], errors[0], f"a factor is beyond {LIMIT:g}")
        if after > before:  # of heads, once the constant is dropped
            return _Factors(ones, errors[0], errors[0])
        return _Factors(found, *errors)

    def _normal(self) -> tuple[Tensor, Tensor]:
        """A = (WᵀW) ⊙ (XᵀX) and the right-hand side, summed over the columns of each unit."""
        A_GII = self.W_GOI.mT @ self.W_GOI * self.sums["gram"]
        return self._by_unit(self._by_unit(A_GII).mT).mT, self._by_unit(self.sums["cross"][:, None])[:, 0]

    def _by_unit(self, x_GKI: Tensor) -> Tensor:
        """x_GKU"""
        units = int(self.unit_GI.max()) + 1
        x_GKU = x_GKI.new_zeros(*x_GKI.shape[:2], units)
        return x_GKU.scatter_add_(2, self.unit_GI[:, None].expand_as(x_GKI), x_GKI)

    def _with_constant(self, A_GUU: Tensor, b_GU: Tensor) -> tuple[Tensor, Tensor]:
        if not self.constant:
            return A_GUU, b_GU
        ones_GU = self._by_unit((self.W_GOI.sum(1) * self.sums["read"])[:, None])
        corner = A_GUU.new_full((1, 1, 1), self.entries)
        wide = torch.cat([torch.cat([A_GUU, ones_GU.mT], 2), torch.cat([ones_GU, corner], 2)], 1)
        return wide, torch.cat([b_GU, self.sums["rest"].view(1, 1)], 1)


def damped(A_GUU: Tensor, b_GU: Tensor) -> Tensor:
    """argmin ‖A z − b‖² + ‖z‖² for symmetric A, what LSMR finds with damping 1.

    With A = Σ λ v vᵀ it is Σ λ/(λ²+1) v vᵀ b, and λ/(λ²+1) the real part of 1/(λ+i): the condition is not squared.
    """
    A_GUU = (A_GUU + A_GUU.mT) / 2
    shifted = torch.complex(A_GUU, torch.eye(A_GUU.shape[-1], dtype=A_GUU.dtype, device=A_GUU.device).expand_as(A_GUU))
    z_GU: Tensor = torch.linalg.solve(shifted, b_GU.to(shifted.dtype)).real
    return z_GU


def _gathered(
    student: nn.Module, teacher: nn.Module, job: Job, images: Images, unit: Unit, place: _Place
) -> Long[_Equations]:
    """One pass of both models over the images."""
    path = path_of(unit.readers[0])
    equations, columns = _equations(student, job, unit, place)
    device = next(student.parameters()).device
    into = list(dict.fromkeys([path, *([place.path] if place.side == "into" else [])]))
    out = [] if place.side == "into" else [place.path]
    only = job.anatomy.head_positions if unit.kind == "neuron" and unit.block == job.anatomy.blocks[-1] else ()
    chosen = list(only) if only and place.side == "block" else slice(None)  # class tokens of the last MLP
    for start in range(0, len(images), BATCH):
        indices = list(range(start, min(start + BATCH, len(images))))
        inputs = to_device(images.batch(indices), device)
        ear, target = (_hear(net, job, unit, inputs, into=into, out=out) for net in (student, teacher))
        r_BNO = target.at(place) - ear.at(place)
        equations.add_(ear.read()[:, chosen][..., columns], r_BNO[:, chosen])
        yield {"stage": f"layer {path}", "done": indices[-1] + 1, "total": len(images)}
    return equations


def _equations(student: nn.Module, job: Job, unit: Unit, place: _Place) -> tuple[_Equations, Tensor]:
    """Still without rows; and which of the columns that the layer reads they are about: those of units that stay."""
    reader = unit.readers[0].parameter
    groups = unit.count // student.get_parameter(reader).shape[1]
    W_OI = exact(student.get_parameter(reader).detach()).flatten(1)
    W_GOI = (W_OI * place.gain_O.to(W_OI)[:, None]).view(groups, -1, W_OI.shape[1])
    taps = W_GOI.shape[2] * groups // unit.count
    unit_I = torch.arange(unit.groups, device=W_GOI.device).repeat_interleave(unit.count // unit.groups * taps)
    if groups > 1:
        kept = torch.arange(unit.groups)
        columns = torch.arange(len(unit_I), device=W_GOI.device)
        unit_GI = unit_I.view(groups, -1) - unit_I.view(groups, -1)[:, :1]
    else:
        alive = job.masks[reader].flatten(1).any(0).view(unit.groups, -1).any(1).to(W_GOI.device)
        columns, kept = alive[unit_I].nonzero()[:, 0], alive.nonzero()[:, 0].cpu()
        unit_GI = (alive.cumsum(0) - 1)[unit_I[columns]][None]
        W_GOI = W_GOI[:, :, columns]
    return _Equations(W_GOI, unit_GI, kept, unit.groups, unit.kind == "head"), columns


@torch.no_grad()
def _scale_(net: nn.Module, unit: Unit, of_unit: Tensor, job: Job) -> None:
    """Into the columns that read the units; a group of a convolution reads its own."""
    reader = unit.readers[0].parameter
    weight = net.get_parameter(reader)
    groups, inputs = unit.count // weight.shape[1], weight.shape[1]
    by_group = exact(weight).reshape(groups, len(weight) // groups, inputs, -1)
    of_column = of_unit.repeat_interleave(unit.count // unit.groups).to(by_group.device)
    weight.copy_((by_group * of_column.view(groups, 1, inputs, 1)).view_as(weight))
    apply_(net, {reader: job.masks[reader]})
