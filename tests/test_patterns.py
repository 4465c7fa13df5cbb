"""Patterns are found exactly: one entry out of line breaks them."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Tensor

from starfish import patterns as P
from starfish.core import Anatomy, Masks, Part, Unit


def n_m(n: int, m: int, rows: int, width: int) -> Tensor:
    """A random N:M mask whose last group may be short."""
    torch.manual_seed(n * m)
    mask = torch.zeros(rows, width).bool()
    for row in mask:
        for start in range(0, width, m):
            group = row[start : start + m]
            group[torch.randperm(len(group))[:n]] = True
    return mask


def per_channel(mask: Tensor, channels: int, kernel: int) -> Tensor:
    """A conv mask (o, i, k, k) whose rows run along the input channels."""
    return mask.view(-1, kernel, kernel, channels).permute(0, 3, 1, 2)


def columns_of(width: int, *gone: int) -> Tensor:
    mask = torch.ones(6, width).bool()
    mask[:, list(gone)] = False
    return mask


def one_more(mask: Tensor) -> Tensor:
    """With a single kept entry pruned."""
    changed = mask.clone()
    changed[tuple(changed.nonzero()[-1])] = False
    return changed


PATTERNS: dict[str, tuple[Tensor, str]] = {
    "dense": (torch.ones(4, 4).bool(), "dense"),
    "1:2": (n_m(1, 2, 16, 16), "1:2"),
    "2:4": (n_m(2, 4, 16, 16), "2:4"),
    "3:4": (n_m(3, 4, 16, 16), "3:4"),
    "4:8": (n_m(4, 8, 16, 32), "4:8"),
    "5:16": (n_m(5, 16, 16, 32), "5:16"),
    "20:32": (n_m(20, 32, 16, 64), "20:32"),
    "2:4 and a rest of 1": (n_m(2, 4, 16, 17), "2:4"),
    "2:4 and a rest of 3": (n_m(2, 4, 16, 19), "2:4"),
    "2:4 but for an entry": (one_more(n_m(2, 4, 16, 16)), "unstructured"),
    "2:4 but for the rest": (one_more(n_m(2, 4, 16, 17)), "unstructured"),
    "2:4 of a lone row": (n_m(2, 4, 1, 16), "2:4"),
    "2:4 of a conv": (per_channel(n_m(2, 4, 8, 72), 8, 3), "2:4"),
    "2:4 across channels": (n_m(2, 4, 8, 72).view(8, 8, 3, 3), "unstructured"),
    "rows": (columns_of(8, 1, 5).t(), "rows"),
    "rows of a conv": (columns_of(8, 1).t()[:, :, None, None].expand(8, 6, 3, 3), "rows"),
    "columns": (columns_of(8, 1, 5), "columns"),
    "columns of a conv": (columns_of(8, 1)[:, :, None, None].expand(6, 8, 3, 3), "columns"),
    "rows+columns": (columns_of(6, 1) & columns_of(6, 2, 3).t(), "rows+columns"),
    "rows but for an entry": (one_more(columns_of(8, 1, 5).t()), "unstructured"),
    "columns but for an entry": (one_more(columns_of(8, 1, 5)), "unstructured"),
    "all gone": (torch.zeros(4, 4).bool(), "rows"),
    "a bias": (torch.tensor([1, 0, 1]).bool(), "rows"),
}


@pytest.mark.parametrize("kind", PATTERNS)
def test_the_pattern_of_a_tensor_is_found(kind: str) -> None:
    """And a single entry out of line breaks it."""
    mask, pattern = PATTERNS[kind]
    summary = P.summarise({"w": mask})
    assert (summary.layers[0].pattern, summary.pattern) == (pattern, pattern)
    assert summary.layers[0].zeros == int((~mask).sum())


def test_the_overall_pattern_is_shared_or_mixed() -> None:
    """Dense tensors do not count."""
    dense, semi, rows = torch.ones(16, 16).bool(), n_m(2, 4, 16, 16), columns_of(8, 1).t()
    assert P.summarise({"a": dense, "b": semi}).pattern == "2:4"
    assert P.summarise({"a": rows, "b": semi, "c": dense, "d": rows}).pattern == "mixed: rows, 2:4"


ANATOMY = Anatomy(
    blocks=("block",),
    layouts={},
    roles={"qkv.weight": "qkv", "fc1.weight": "mlp_in", "fc2.weight": "mlp_out"},
    units=(
        Unit("neuron", "block", 8, 1, (Part("fc1.weight", 0), Part("fc1.bias", 0), Part("fc2.weight", 1))),
        Unit("qk", "block", 6, 2, (Part("qkv.weight", 0), Part("qkv.weight", 0, 6), Part("qkv.bias", 0))),
    ),
    untrained=(),
    tail={},
)


def structured(neurons: list[int], dims: list[int]) -> Masks:
    masks = {"qkv.weight": torch.ones(18, 6), "fc1.weight": torch.ones(8, 6), "fc2.weight": torch.ones(6, 8)}
    masks["fc1.weight"][neurons] = 0
    masks["fc2.weight"][:, neurons] = 0
    masks["qkv.weight"][dims + [6 + dim for dim in dims]] = 0
    return {name: mask.bool() for name, mask in masks.items()}


def test_whole_units_are_found() -> None:
    """Neurons and query-key dimensions that are gone explain the zeros, are counted, and leave nothing inconsistent."""
    masks = structured([1, 4, 5], [0, 5])
    summary = P.summarise(masks, ANATOMY)
    assert [(layer.role, layer.pattern) for layer in summary.layers] == [
        ("qkv", "qk dims"),
        ("mlp_in", "neurons"),
        ("mlp_out", "neurons"),
    ]
    assert [unit.text for unit in summary.units] == ["neurons 3/8", "qk dims 1/3 per head"]
    assert [unit.gone for unit in summary.units] == [(3,), (1, 1)]
    assert (summary.pattern, summary.inconsistencies) == ("mixed: qk dims, neurons", ())
    assert summary.layers[0].sparsity == 4 / 18
    assert json.loads(json.dumps(dataclasses.asdict(summary)))["units"][0]["gone"] == [3]


def test_masked_biases_belong_to_their_units() -> None:
    """The bias entries of gone neurons are theirs; biases left alone do not keep a neuron."""
    bias = torch.ones(8).bool()
    bias[[1, 4]] = False
    masks = structured([1, 4], []) | {"fc1.bias": bias}
    assert P.summarise(masks, ANATOMY).layers[-1].pattern == "neurons"
    masks["fc1.bias"] = ~bias
    summary = P.summarise(masks, ANATOMY)
    assert (summary.layers[-1].pattern, summary.units[0].text) == ("rows", "neurons 2/8")


def test_units_with_more_zeros_are_not_the_whole_pattern() -> None:
    """One zero beside the gone neurons and the tensor is not called neurons."""
    masks = structured([1, 4], [])
    masks["fc1.weight"][0, 0] = False
    summary = P.summarise(masks, ANATOMY)
    assert [layer.pattern for layer in summary.layers] == ["dense", "unstructured", "neurons"]
    assert summary.units[0].text == "neurons 2/8"


def test_half_dead_units_are_told() -> None:
    """A row without its column, a query without its key: named with counts, and not called gone."""
    masks = structured([1], [])
    masks["fc1.weight"][[2, 3]] = False
    masks["qkv.weight"][4] = False
    summary = P.summarise(masks, ANATOMY)
    assert [unit.text for unit in summary.units] == ["neurons 1/8"]
    neurons, dims = summary.inconsistencies
    assert "2 of 8 neurons" in neurons
    assert "2 in `fc1.weight` rows, 0 in `fc2.weight` columns" in neurons
    assert "1 of 6 qk dims" in dims
    assert "1 in `qkv.weight` rows, 0 in `qkv.weight` rows from 6" in dims


def test_a_scope_with_half_of_a_unit_is_inconsistent() -> None:
    """Without a mask for fc2 its columns are alive."""
    masks = structured([1], [])
    del masks["fc2.weight"]
    summary = P.summarise(masks, ANATOMY)
    assert summary.units == ()
    assert "0 in `fc2.weight` columns" in summary.inconsistencies[0]
    assert summary.layers[1].pattern == "rows"


def test_heads_must_lose_equal_numbers() -> None:
    """Two dimensions of the first head and one of the second cannot be cut out as they are."""
    summary = P.summarise(structured([], [0, 1, 3]), ANATOMY)
    assert [unit.text for unit in summary.units] == ["qk dims 1 to 2/3 per head"]
    assert summary.inconsistencies == ("`block`: the heads lose unequal numbers of qk dims (2, 1)",)
    neurons = dataclasses.replace(ANATOMY, units=(dataclasses.replace(ANATOMY.units[0], groups=2),))
    assert P.summarise(structured([1], []), neurons).inconsistencies == ()


def test_rows_that_die_by_chance_are_no_inconsistency() -> None:
    """In an unstructured mask nobody meant to cut anything."""
    masks = structured([], [])
    masks["fc1.weight"][2] = False
    masks["fc1.weight"][3, 1] = False
    assert P.summarise(masks, ANATOMY).inconsistencies == ()
