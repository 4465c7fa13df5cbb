"""The README.md of a run folder: what was done, what it gave back, how to load it and how to run it again."""

from __future__ import annotations

import shlex
from typing import Any

from starfish.tables import score_rows

FOLDER = "RUN"  # how the card calls the folder that it lies in


def model_card(result: dict[str, Any], config: dict[str, Any]) -> str:
    facts = config.get("starfish", {})
    name = facts.get("model", "a model of your own")
    table = ["| | " + " | ".join(("dense", "pruned", "healed")) + " |", "|---|---|---|---|"]
    table += [f"| {row[0]} | " + " | ".join(row[1:]) + " |" for row in score_rows(result)]
    proof = "every pruned weight is zero and every tensor outside the masks is bit-identical to what it was"
    return "\n".join(
        [
            *_front_matter(name),
            f"# {name}, pruned and healed",
            "",
            f"{100 * result['sparsity']:.1f} % of the weights under the masks are zero. The others were healed with "
            f"`{result['method']}` on {result['images']} unlabeled images by starfish "
            f"{result['versions'].get('starfish-heal', '')}; {proof}.",
            "",
            *table,
            "",
            _measured_on(result),
            "",
            "## Load",
            "",
            "```python",
            *_loading(name),
            "```",
            "",
            "The zeros are stored as zeros: this file is no smaller and this model no faster than the dense one.",
            "",
            "## How it was made",
            "",
            *_command(facts),
            f"Seed {result['seed']}, {result['seconds']['total']:.0f} s, {result['peak_rss_mb']:.0f} MB of memory at most. "
            f"Settings: {_listed(result['settings'])}. Versions: {_listed(result['versions'])}.",
            "",
            "`masks.safetensors` says where the zeros are, `result.json` holds every figure, `rows.jsonl` every step.",
            "",
        ]
    )


def _front_matter(name: str) -> list[str]:
    library = "transformers" if name.startswith("hf/") else "timm" if ":" not in name.split("?")[0] else "pytorch"
    return ["---", f"library_name: {library}", "tags:", "- pruning", "- starfish", "---", ""]


def _measured_on(result: dict[str, Any]) -> str:
    evaluation, error = result["evaluation"], result["accuracy_standard_error"]["healed"]
    what = "images that the healing did not see" if evaluation["held_out"] else "the healing images themselves"
    text = f"Measured on {evaluation['images']} {what}"
    return (
        f"{text}; one standard error of an accuracy is about {error:.1f} points." if error is not None else f"{text}."
    )


def _loading(name: str) -> list[str]:
    if ":" in name.split("?")[0] or name.startswith(("torchvision/", "hf/")):
        return ["import starfish", "", f'model = starfish.load("{FOLDER}")']
    return ["import timm", "", f'model = timm.create_model("local-dir:{FOLDER}", pretrained=True)']


def _command(facts: dict[str, Any]) -> list[str]:
    if "command" not in facts:
        return []
    return ["```", shlex.join(["starfish", *facts["command"]]), "```", ""]


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
