"""Results as rows of text, for a terminal or a page."""

from __future__ import annotations

from collections.abc import Sequence
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


def stage_rows(stages: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """What each of several methods in a row gave back; the first row has the names. Empty for a single method."""
    if len(stages) < 2:
        return []
    key, name = ("accuracy", "top-1, %")
    if stages[0]["accuracy"] is None:
        key, name = ("agreement", "same answer as dense, %")
    return [("after", name, "seconds"),
            *((stage["method"], f"{stage[key]:.2f}", f"{stage['seconds']:.0f}") for stage in stages)]  # fmt: skip


def proof(result: dict[str, Any]) -> str:
    """What a heal has shown of the tensors it was not to touch."""
    free = len(result["also_changed"])
    but = f", but for {free} tensors that the method may change (`also_changed` in result.json)" if free else ""
    return f"every pruned weight is zero, and nothing outside the masks has changed by a bit{but}"


def comparison_rows(comparison: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line a method, dense model and plain mask first; the first row has the names.

    With several seeds means, and how far single seeds are from them (standard deviation).
    """
    rows = comparison["rows"]
    labels = any(row["accuracy"]["healed"] is not None for row in rows)
    head = ["method", *(["top-1, %"] if labels else []), "same answer, %", "KL", "cosine", "seconds", "memory, MB"]
    return [tuple(head), *(_compared(row, labels) for row in rows)]


def _compared(row: dict[str, Any], labels: bool) -> tuple[str, ...]:
    fidelity, std = row["fidelity"], row["std"] or {}
    figures = [("accuracy", row["accuracy"]["healed"], 2)] if labels else []
    figures += [("agreement", fidelity["agreement"]["healed"], 2), ("kl", fidelity["kl"]["healed"], 4),
                ("cosine", fidelity["cosine"]["healed"], 4)]  # fmt: skip
    shown = [f"{value:.{digits}f}" + (f" ± {std[name]:.{digits}f}" if name in std else "")
             for name, value, digits in figures]  # fmt: skip
    if not row["seeds"]:  # no method
        return (row["method"], *shown, "–", "–")
    seconds = f"{row['seconds']['alone']:.1f}" + (" *" if row["seconds"]["shared"] else "")
    return (row["method"], *shown, seconds, f"{row['peak_rss_mb']:.0f}")


def comparison_notes(comparison: dict[str, Any]) -> list[str]:
    """What to know when reading the table, a sentence each."""
    seeds, memory, evaluation = comparison["seeds"], comparison["memory"], comparison["evaluation"]
    times = f"over {len(seeds)} seeds, ± one standard deviation" if len(seeds) > 1 else f"seed {seeds[0]}"
    fewer = [f"`{row['method']}` {len(row['seeds'])}" for row in comparison["rows"]
             if row["seeds"] and len(row["seeds"]) < len(seeds)]  # fmt: skip
    times += f" (but {', '.join(fewer)})" if fewer else ""
    notes = [f"Measured on {evaluation['images']} images; {times}."]
    if any(row["seconds"]["shared"] for row in comparison["rows"]):
        notes.append(
            "*: a part was found ready, made by a method before; the seconds this had taken are counted in"
            " (`seconds.shared`)."
        )
    if memory["of"] == "process":
        notes.append("Memory is the most that the process had held so far: this system cannot tell methods apart.")
    elif memory["base_mb"] is not None:
        notes.append(
            f"Of the memory, {memory['base_mb']:.0f} MB were there before any method: libraries, model, images."
        )
    notes += [f"Left out: `{name}`: {reason}." for name, reason in comparison["left_out"].items()]
    return notes


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table; the first row has the names."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


MODELS = ("dense", "masked", "small")  # of the figures in `speed`


def speed_rows(speed: dict[str, Any]) -> list[tuple[str, ...]]:
    """What the dense, the masked and the small model cost, those that were measured; the first row has their names."""
    names = [name for name in MODELS if name in speed]
    costs = [dict(cost_rows(speed[name])) for name in names]
    longest = max(costs, key=len)  # of a dense model that was built anew it is not known how much of it is zero
    return [("", *names), *((what, *(cost.get(what, "") for cost in costs)) for what in longest)]


def cost_rows(cost: dict[str, Any]) -> list[tuple[str, str]]:
    """What one model costs, one figure a line."""
    rows = [("parameters", f"{cost['parameters']:,}")]
    if cost["nonzero"] is not None:
        rows.append(("of them not zero", f"{cost['nonzero']:,}"))
    rows.append(("file, MB", f"{cost['file_mb']:.2f}"))
    rows.append(("operations an image, millions", f"{cost['flops'] / 1e6:,.1f}"))
    return rows + [(f"ms for {batch} at once", milliseconds(ms)) for batch, ms in cost["latency_ms"].items()]


def milliseconds(ms: float) -> str:
    """Three digits, whole ones from a hundred on."""
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def evaluation_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """What `starfish evaluate` found, one figure a line."""
    fidelity = facts.get("fidelity", {})
    figures = [
        ("top-1, %", facts["accuracy"]),
        ("one standard error", facts["accuracy_standard_error"]),
        ("top-5, %", facts["accuracy_top5"]),
        ("same answer as dense, %", fidelity.get("agreement")),
        ("KL from dense", fidelity.get("kl")),
        ("block cosine to dense", fidelity.get("cosine")),
    ]
    shown = [(name, f"{value:.4g}") for name, value in figures if value is not None]
    return [*shown, ("images", f"{facts['images']:,}"), *cost_rows(facts)]
