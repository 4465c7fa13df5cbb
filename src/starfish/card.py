"""The README.md of a run folder: what was done, what it gave back, how to load it and how to run it again."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from starfish.tables import score_rows

FOLDER = "RUN"  # how the card calls the folder that it lies in


def model_card(result: dict[str, Any], config: dict[str, Any]) -> str:
    facts = config.get("starfish", {})
    name = _called(facts.get("model", "a model of your own"))
    table = ["| | " + " | ".join(("dense", "pruned", "healed")) + " |", "|---|---|---|---|"]
    table += [f"| {row[0]} | " + " | ".join(row[1:]) + " |" for row in score_rows(result)]
    proof = "every pruned weight is zero and every tensor outside the masks is bit-identical to what it was"
    return "\n".join(
        [
            *_front_matter(config),
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
            *_loading(config),
            "```",
            "",
            "The zeros are stored as zeros: this file is no smaller and this model no faster than the dense one.",
            "",
            "## How it was made",
            "",
            *_command(facts),
            f"Seed {result['seed']}, {result['seconds']['total']:.0f} s, "
            f"{result['peak_rss_mb']:.0f} MB of memory at most. "
            f"Settings: {_listed(result['settings'])}. Versions: {_listed(result['versions'])}.",
            "",
            "`masks.safetensors` says where the zeros are, `result.json` holds every figure, `rows.jsonl` every step.",
            "",
        ]
    )


def _called(name: str) -> str:
    """A model in a folder goes by the folder's name: where it lay is nobody's business."""
    kind = next((kind for kind in ("local-dir:", "hf/") if name.startswith(kind)), "")
    path = Path(name.removeprefix(kind))
    return f"{kind}{path.name}" if kind == "local-dir:" or path.is_absolute() else name


def _front_matter(config: dict[str, Any]) -> list[str]:
    library = "timm" if "architecture" in config else "transformers" if "model_type" in config else "pytorch"
    return ["---", f"library_name: {library}", "tags:", "- pruning", "- starfish", "---", ""]


def _measured_on(result: dict[str, Any]) -> str:
    evaluation, error = result["evaluation"], result["accuracy_standard_error"]["healed"]
    count = evaluation["images"]
    what = f"{count} images that the healing did not see" if evaluation["held_out"] else f"the {count} healing images"
    text = f"Measured on {what}"
    return (
        f"{text}; one standard error of an accuracy is about {error:.1f} points." if error is not None else f"{text}."
    )


def _loading(config: dict[str, Any]) -> list[str]:
    if "architecture" in config:
        return ["import timm", "", f'model = timm.create_model("local-dir:{FOLDER}", pretrained=True)']
    if "model" in config.get("starfish", {}):
        return ["import starfish", "", f'model = starfish.load("{FOLDER}")']
    return ["from safetensors.torch import load_file", "",
            f'model.load_state_dict(load_file("{FOLDER}/model.safetensors"))  # your own model']  # fmt: skip


def _command(facts: dict[str, Any]) -> list[str]:
    if "command" not in facts:
        return []
    return ["```", shlex.join(["starfish", *facts["command"]]), "```", ""]


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
