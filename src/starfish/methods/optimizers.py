"""What takes the steps of the loop: torch's optimisers, for weights of any shape, with a state that has names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from starfish.core import State

OPTIMIZERS = ("adamw", "adam", "sgd", "muon")


class Optimizer:
    """One or two of torch's: Muon takes matrices, and what is none (biases, norms, depthwise filters) goes to AdamW.

    Muon sees a convolution as the matrix of outputs × all that one of them reads.
    """

    def __init__(self, name: str, weights: Mapping[str, nn.Parameter], weight_decay: float) -> None:
        matrices = {key: weight for key, weight in weights.items() if name == "muon" and _is_matrix(weight)}
        self._rest = {key: weight for key, weight in weights.items() if key not in matrices}
        self._seen = {key: nn.Parameter(weight.detach().flatten(1).clone()) for key, weight in matrices.items()}
        self._weights = matrices
        self._parts: list[torch.optim.Optimizer] = []
        if self._seen:
            self._parts.append(
                torch.optim.Muon([*self._seen.values()], weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            )
        if self._rest:
            self._parts.append(_of_torch(name, [*self._rest.values()], weight_decay))

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One step with the gradients that the weights hold."""
        for key, seen in self._seen.items():
            weight = self._weights[key]
            seen.copy_(weight.flatten(1))
            seen.grad = None if weight.grad is None else weight.grad.flatten(1)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
        for key, seen in self._seen.items():
            self._weights[key].copy_(seen.view_as(self._weights[key]))

    def state(self) -> State:
        """What must be kept to go on."""
        return {
            f"optimizer/{name}/{key}": value
            for name, weight in self._named()
            for part in self._parts
            for key, value in part.state.get(weight, {}).items()
            if value is not None
        }

    def restore_(self, state: State) -> None:
        for name, weight in self._named():
            prefix = f"optimizer/{name}/"
            held = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            if held:
                self._parts[0 if name in self._seen else -1].state[weight] = held

    def _named(self) -> list[tuple[str, Tensor]]:
        return [*self._seen.items(), *self._rest.items()]


def _is_matrix(weight: Tensor) -> bool:
    return weight.ndim > 1 and weight.flatten(1).shape[1] > 1 and not (weight.ndim > 2 and weight.shape[1] == 1)


def _of_torch(name: str, weights: list[nn.Parameter], weight_decay: float) -> torch.optim.Optimizer:
    fused = weights[0].device.type in {"cpu", "cuda", "mps"}
    if name == "sgd":
        return torch.optim.SGD(weights, momentum=0.9, weight_decay=weight_decay, fused=fused)
    make = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    return make(weights, weight_decay=weight_decay, fused=fused)
