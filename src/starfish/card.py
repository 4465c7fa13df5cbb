"""The README.md of a run folder: what was done, what it gave back, how to load it and how to run it again."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from starfish.tables import markdown, proof, score_rows, speed_rows, stage_rows

FOLDER = "RUN"  # how the card calls the folder that it lies in
IMAGES = {None: "unlabeled images", "given": "images", "model": "images that the dense model labelled"}
KINDS = {"neuron": "MLP neurons", "qk": "query-key dimensions", "channel": "channels"}


def model_card(result: dict[str, Any], config: dict[str, Any]) -> str:
    facts = config.get("starfish", {})
    name = _called(facts.get("model", "a model of your own"))
    return "\n".join(
        [
            *_front_matter(config),
            f"# {name}, pruned and healed",
            "",
            _what_was_done(result),
            *_cut_out(result),
            "",
            *markdown([("", "dense", "pruned", "healed"), *score_rows(result)]),
            "",
            *_stages(result),
            _measured_on(result),
            "",
            "## Load",
            "",
            "```python",
            *_loading(config),
            "```",
            "",
            "## Size and speed",
            "",
            *_costs(result),
            "## How it was made",
            "",
            *_command(facts),
            f"Seed {result['seed']}, {result['seconds']['total']:.0f} s, "
            f"{result['peak_rss_mb']:.0f} MB of memory at most. "
            f"Versions: {_listed(result['versions'])}.",
            "",
            *(f"- Settings of `{method}`: {_listed(values)}." for method, values in _settings(result).items()),
            "",
            _files(result),
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
    library = "pytorch" if "small" in config else library  # which cannot build a smaller model than it knows
    return ["---", f"library_name: {library}", "tags:", "- pruning", "- starfish", "---", ""]


def _measured_on(result: dict[str, Any]) -> str:
    evaluation, error = result["evaluation"], result["accuracy_standard_error"]["healed"]
    count = evaluation["images"]
    what = f"{count} images that the healing did not see" if evaluation["held_out"] else f"the {count} healing images"
    text = f"Measured on {what}"
    return (
        f"{text}; one standard error of an accuracy is about {error:.1f} points." if error is not None else f"{text}."
    )


def _what_was_done(result: dict[str, Any]) -> str:
    methods = " then ".join(f"`{method}`" for method in _settings(result))
    are = "were" if "slim" in result else "are"
    return (
        f"{100 * result['sparsity']:.1f} % of the weights under the masks {are} zero. "
        f"The others were healed with {methods} on {result['images']} {IMAGES[result.get('labels')]} by "
        f"starfish {result['versions'].get('starfish-heal', '')}; {proof(result)}."
    )


def _settings(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Method → its settings; result.json has those of a single method without its name."""
    methods = result["method"].split(",")
    return result["settings"] if len(methods) > 1 else {methods[0]: result["settings"]}


def _cut_out(result: dict[str, Any]) -> list[str]:
    """What a small model's card says besides: that its zeros are not there any more."""
    if "slim" not in result:
        return []
    units, far = _counted(result["slim"]["units"]), result["slim"]["disagreement"]
    return [
        "",
        f"What was zero as a whole has been cut out of this model: {units}. "
        f"Its logits are those of the model with zeros, up to {far:.0e} of the largest.",
    ]


def _counted(units: dict[str, dict[str, int]]) -> str:
    return " and ".join(f"{n['gone']:,} of {n['units']:,} {KINDS.get(kind, kind)}" for kind, n in units.items())


def _stages(result: dict[str, Any]) -> list[str]:
    rows = stage_rows(result.get("stages", []))
    return ["Method by method:", "", *markdown(rows), ""] if rows else []


def _costs(result: dict[str, Any]) -> list[str]:
    """The figures of dense, masked and small model, what they mean, and how to come by the small one."""
    speed = result.get("speed", {})  # runs of old have none
    lines = [*markdown(speed_rows(speed)), "", speed["verdict"], ""] if speed else []
    if "slim" in result or (speed and "masked" not in speed):
        return lines  # this is the small model
    zeros = "The zeros are stored as zeros: this file is as large as the dense model's."
    if result.get("cut"):
        zeros += f" But {_counted(result['cut'])} are zero as a whole, and can be cut out:"
        lines += [zeros, "", "```", f"starfish slim {FOLDER} -o DIR", "```", ""]
        return [*lines, 'writes the small model, and `starfish.load("DIR")` gives it.', ""]
    return [*lines, zeros, ""]


def _files(result: dict[str, Any]) -> str:
    if "slim" in result:
        return "`result.json` holds every figure."
    return "`masks.safetensors` says where the zeros are, `result.json` holds every figure, `rows.jsonl` every step."


def _loading(config: dict[str, Any]) -> list[str]:
    if "architecture" in config and "small" not in config:
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
