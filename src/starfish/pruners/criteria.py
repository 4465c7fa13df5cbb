"""What a unit is worth: CORP's rankers (methods.md 10.1) and the representation mismatch (15.2).

B images, N rows (a token or a pixel of an image each), C units, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from starfish.activations import Recorder, call, positions
from starfish.core import Anatomy, Images, Long, Unit
from starfish.devices import to_device
from starfish.errors import UserError
from starfish.methods.objectives import NORM_FLOOR
from starfish.statistics import BATCH, Heard, ears_at, heard, listening

Scores = dict[int, Tensor]
"""Place of a family among those that were asked for → the score of each of its units; the lowest go first."""

ACTIVE = 0.01  # of the layer's root mean square over an image: below it a neuron is not active


@dataclass
class Energy:
    """Sums over rows of what a family's units put out, and for query-key dimensions of queries and keys."""

    square_C: Tensor | float = 0.0
    active_C: Tensor | float = 0.0
    token_C: Tensor | float = 0.0  # q²k² of the same token
    query_C: Tensor | float = 0.0
    key_C: Tensor | float = 0.0
    rows: int = 0

    def add_(self, unit: Unit, batch: Heard) -> None:
        if unit.kind == "qk":
            q, k = (x.double().square().transpose(1, 2).flatten(2).flatten(0, 1)
                    for x in (batch.queries(unit), batch.keys(unit)))  # fmt: skip
            self.token_C, self.query_C, self.key_C = (old + new.sum(0) for old, new in (
                (self.token_C, q * k), (self.query_C, q), (self.key_C, k)))  # fmt: skip
            self.rows += len(q)
            return
        for part in unit.readers:
            x_BNC = batch.rows(unit, part).double()
            least = ACTIVE * x_BNC.square().mean((1, 2), keepdim=True).sqrt()
            self.square_C = self.square_C + x_BNC.square().sum((0, 1))
            self.active_C = self.active_C + (x_BNC.abs() > least).double().sum((0, 1))
            self.rows += x_BNC.shape[0] * x_BNC.shape[1]


def _energy(e: Energy) -> Tensor:
    return torch.as_tensor(e.square_C) / e.rows


def _active(e: Energy) -> Tensor:
    return torch.as_tensor(e.active_C) / e.rows


Ranker = Callable[[Energy, Tensor], Tensor]  # from energies and the score of the weights alone

CRITERIA: dict[str, Ranker | None] = {
    "energy": lambda e, w: _energy(e),
    "active": lambda e, w: _active(e),
    "active_energy": lambda e, w: _active(e) * _energy(e),
    "weight": lambda e, w: w,
    "energy_weight": lambda e, w: _energy(e) * w,
    "active_weight": lambda e, w: _active(e) * w,
    "ensemble": lambda e, w: _active(e) * _energy(e) * w,
    "mismatch": None,  # a pass with gradients of its own
}
QK_CRITERIA: dict[str, Ranker | None] = {
    "token": lambda e, w: torch.as_tensor(e.token_C) / e.rows,
    "pairs": lambda e, w: torch.as_tensor(e.query_C) / e.rows * torch.as_tensor(e.key_C) / e.rows,
    "weight": lambda e, w: w,
    "mismatch": None,
}
NEEDS_IMAGES = (CRITERIA.keys() | QK_CRITERIA.keys()) - {"weight"}


def scores_of(
    dense: nn.Module, anatomy: Anatomy, families: Sequence[Unit], images: Images | None, criteria: dict[str, str],
    draws: int, seed: int,
) -> Long[Scores]:  # fmt: skip
    """A score for every unit of every family, by the criterion of its kind."""
    chosen = [criteria[unit.kind] for unit in families]
    energies = [Energy() for _ in families]
    if set(chosen) - {"weight", "mismatch"}:
        for row, batch in heard(listening(dense, families), anatomy, _there(images), families, "energies"):
            for energy, unit in zip(energies, families, strict=True):
                energy.add_(unit, batch)
            yield row
    gates: Scores = {}
    if "mismatch" in chosen:
        gates = yield from mismatch(dense, anatomy, families, _there(images), draws=draws, seed=seed)
    scores: Scores = {}
    for place, (unit, name) in enumerate(zip(families, chosen, strict=True)):
        ranker = (QK_CRITERIA if unit.kind == "qk" else CRITERIA)[name]
        scores[place] = gates[place] if ranker is None else ranker(energies[place], weight_score(dense, unit)).double()
    return scores


def _there(images: Images | None) -> Images:
    if images is None:
        raise UserError("this criterion looks at what the model does", "give images with --images, or criterion=weight")
    return images


@torch.no_grad()
def weight_score(dense: nn.Module, unit: Unit) -> Tensor:
    """The product of the norms of what makes a unit and what reads it; ‖W_q[j]‖·‖W_k[j]‖ for query-key dimensions."""
    score = torch.ones(unit.count, dtype=torch.float64)
    makes: dict[str, Tensor] = {}
    for part in unit.parts:
        tensor = dense.state_dict()[part.parameter].double()
        if tensor.ndim > 1:
            square = tensor.narrow(part.dim, part.start, unit.count).movedim(part.dim, 0).flatten(1).square().sum(1)
            side = part.side or ("reads" if part.dim else "makes")
            makes[side] = makes.get(side, 0) + square.cpu()
    for square in makes.values():
        score = score * square.sqrt()
    return score


def mismatch(
    dense: nn.Module, anatomy: Anatomy, families: Sequence[Unit], images: Images, *, draws: int, seed: int
) -> Long[Scores]:
    """½ E‖∂r̂/∂m‖² over blocks: the second-order loss of the alignment when a unit's gate m closes (15.2).

    Hutchinson: with random signs v, φ = Σ ⟨v, r̂⟩/√L, the mean of (∂φ/∂m)² over draws; all gates from one backward pass.
    """
    ears = listening(dense, families).requires_grad_(False)
    device = next(ears.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    totals: Scores = {place: torch.zeros(unit.count, dtype=torch.float64) for place, unit in enumerate(families)}
    with ears_at(ears, families) as taps, Recorder(ears, anatomy.blocks) as recorder:
        for start in range(0, len(images), BATCH):
            indices = list(range(start, min(start + BATCH, len(images))))
            with torch.enable_grad():  # not around the yield
                call(ears, _tracked(to_device(images.batch(indices), device)))
                outputs = recorder.take()
                batch = Heard(ears, taps, anatomy.layouts, len(indices))
                for draw in range(draws):
                    phi = _probe(outputs, anatomy, len(indices), generator)
                    _add_gates_(totals, families, batch, phi, keep=draw + 1 < draws)
            yield {"stage": "mismatch", "done": indices[-1] + 1, "total": len(images)}
    return {place: total / (2 * draws * len(images)) for place, total in totals.items()}


def _tracked(inputs: Any) -> Any:
    """The same inputs for autograd to follow, since the weights are not; they themselves stay as they are."""
    if isinstance(inputs, Mapping):
        return {name: _tracked(tensor) for name, tensor in inputs.items()}
    return inputs.detach().requires_grad_().clone() if inputs.is_floating_point() else inputs


def _probe(outputs: dict[str, Tensor], anatomy: Anatomy, images: int, generator: torch.Generator) -> Tensor:
    """Σ over blocks of ⟨v, r̂⟩/√L, one direction a token, random signs v."""
    terms = []
    for name, output in outputs.items():
        x_BPC = positions(output, anatomy.layouts[name], images)
        unit_BPC = x_BPC / x_BPC.norm(dim=-1, keepdim=True).clamp_min(NORM_FLOOR)
        signs = torch.randint(0, 2, unit_BPC.shape, generator=generator, dtype=torch.int8).to(x_BPC.device)
        terms.append((unit_BPC * (2 * signs - 1)).sum() / (len(outputs) * x_BPC.shape[1]) ** 0.5)
    return torch.stack(terms).sum()


def _add_gates_(totals: Scores, families: Sequence[Unit], batch: Heard, phi: Tensor, *, keep: bool) -> None:
    """Per-image derivatives of φ by each gate: Σ over rows of activation times gradient, squared."""
    tensors = [*batch.taps.into.values(), *(x for name, x in batch.taps.out_of.items() if name.endswith(".queries"))]
    gradients = torch.autograd.grad(phi, tensors, retain_graph=keep, allow_unused=True)
    names = [*batch.taps.into, *(name for name in batch.taps.out_of if name.endswith(".queries"))]
    effect = {name: x.detach() * (torch.zeros_like(x) if g is None else g)
              for name, x, g in zip(names, tensors, gradients, strict=True)}  # fmt: skip
    for place, unit in enumerate(families):
        gates_BC = batch.summed(effect, unit)
        totals[place] += gates_BC.double().square().sum(0).cpu()
