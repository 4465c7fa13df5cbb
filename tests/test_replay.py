"""A part of a model run again puts out what it did in the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import IMAGES, tiny_vit
from networks import Reader, seeded
from starfish.activations import call
from starfish.replay import entering, order_of, outputs, plain, run, runs_once, start_of


def test_operations_are_leaves_in_order_and_hand_overs_are_none() -> None:
    """Attention that keeps its projection to itself is one operation; dropout, which does nothing here, is none."""
    model = seeded(Reader)
    with plain():
        order = order_of(model, IMAGES[:2], [f"blocks.{place}" for place in range(3)])
    of_block = ("norm", "attention", "linear", "relu")
    assert order.operations == ("stem", *(f"blocks.{place}.{name}" for place in range(3) for name in of_block), "head")
    assert order.follower == {"blocks.0": "blocks.1", "blocks.1": "blocks.2"}


@pytest.mark.parametrize(
    ("weight", "count", "first", "chain"),
    [
        ("stem.weight", 4, "stem", ("",)),
        ("blocks.0.attention.in_proj_weight", 3, "blocks.0.attention", ("blocks.0",)),
        ("blocks.0.attention.out_proj.weight", 4, "blocks.0.attention", ("blocks.0", "blocks.1")),
        ("blocks.0.linear.weight", 7, "blocks.0.linear", ("blocks.0", "blocks.1", "blocks.2")),
        ("blocks.2.linear.weight", 7, "blocks.2.linear", ("blocks.2",)),
        ("head.weight", 4, "head", ("head",)),
    ],
)
def test_replayed_outputs_are_those_of_the_whole_model(
    weight: str, count: int, first: str, chain: tuple[str, ...]
) -> None:
    """From the block's kept input, with its other arguments, come the very numbers of a run of the whole model."""
    model = seeded(Reader)
    seen: list[Tensor] = []
    with plain(), torch.no_grad():
        order = order_of(model, IMAGES[:2], [f"blocks.{place}" for place in range(3)])
        start = start_of(weight, order, count)
        assert (start.first, start.chain) == (first, chain)
        kept = entering(model, start.chain, IMAGES)
        found = outputs(model, start, kept, order.operations, count)
        names = order.operations[order.operations.index(first) :][:count]
        if chain == ("blocks.2",):
            names = names[:2]  # the head reads a mean of it
        handles = [model.get_submodule(name).register_forward_hook(lambda _m, _i, y: seen.append(first_of(y).clone()))
                   for name in names]  # fmt: skip
        call(model, IMAGES)
        again = outputs(model, start, kept, order.operations, count)
    for handle in handles:
        handle.remove()
    assert len(found) == len(names)
    assert all(torch.equal(one, other) for one, other in zip(found, seen[: len(found)], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True)), "it wrote into what was kept"


def first_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]  # type: ignore[no-any-return]


# The method.


def test_a_block_alone_reads_what_entered_it() -> None:
    """Run once more by itself, a block hands its layers what they read in the whole model."""
    model, heard = tiny_vit(), []
    hook = model.get_submodule("blocks.1.mlp.fc1").register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
    (given,) = entering(model, ["blocks.1"], IMAGES)
    assert not heard  # the model stopped where the block begins
    run(model, "blocks.1", given)
    call(model, IMAGES)
    hook.remove()
    assert torch.equal(heard[0], heard[1])


def test_what_runs_once() -> None:
    """A block whose weights are shared by two places does not."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(self.one(x)))  # type: ignore[no-any-return]

    model, x = Twice(), torch.randn(2, 4)
    assert not runs_once(model, x, "one")
    assert runs_once(model, x, "two")
