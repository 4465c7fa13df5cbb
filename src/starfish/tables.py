"""Results as rows of text, for a terminal or a page."""

from __future__ import annotations

from typing import Any


def score_rows(result: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(what, dense, pruned, healed) for every figure the result has."""
    accuracy, top5, fidelity = result["accuracy"], result["accuracy_top5"], result["fidelity"]
    rows: list[tuple[str, str, str, str]] = []
    if accuracy["healed"] is not None:
        rows.append(("top-1, %", *_three(accuracy, 2)))
    if top5["healed"] is not None:
        rows.append(("top-5, %", *_three(top5, 2)))
    rows.append(("same answer as dense, %", *_three({"dense": 100.0, **fidelity["agreement"]}, 2)))
    rows.append(("KL from dense", *_three({"dense": 0.0, **fidelity["kl"]}, 4)))
    rows.append(("block cosine to dense", *_three({"dense": 1.0, **fidelity["cosine"]}, 4)))
    return rows


def _three(values: dict[str, float], digits: int) -> tuple[str, str, str]:
    dense, pruned, healed = (f"{values[name]:.{digits}f}" for name in ("dense", "pruned", "healed"))
    return dense, pruned, healed


def size_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """What `starfish evaluate` found, one figure a line."""
    fidelity = facts.get("fidelity", {})
    figures = [
        ("top-1, %", facts["accuracy"]),
        ("one standard error", facts["accuracy_standard_error"]),
        ("top-5, %", facts["accuracy_top5"]),
        ("same answer as dense, %", fidelity.get("agreement")),
        ("KL from dense", fidelity.get("kl")),
        ("block cosine to dense", fidelity.get("cosine")),
        ("images", facts["images"]),
        ("parameters", facts["parameters"]),
        ("of them not zero", facts["nonzero"]),
    ]
    return [
        (name, f"{value:,}" if isinstance(value, int) else f"{value:.4g}")
        for name, value in figures
        if value is not None
    ]
