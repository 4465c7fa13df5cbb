"""The run folder: everything a heal leaves behind, written whole or not at all, and enough to go on after a kill.

config.json          how the model is built (timm reads it) and, under "starfish", how the run was asked for
rows.jsonl           one line a step, appended as the run goes on
state/               what is needed to resume; emptied at the end
masks.safetensors    model.safetensors    README.md    result.json (the last to appear: the run is finished)

`slimming` makes of such a run another one, whose model is smaller: its config.json holds the widths under "small".
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from starfish import masks as masks_module
from starfish.activations import logits
from starfish.anatomy import find
from starfish.card import model_card
from starfish.core import Anatomy, Long, Masks, Result, Row, State
from starfish.data import as_images
from starfish.errors import UserError
from starfish.files import read_json, read_safetensors, write_json, write_tensors, write_text
from starfish.models import Loaded, architecture, example, load_run, small_config
from starfish.patterns import loses_channels
from starfish.small import AGREEMENT, cut_of, disagreement, slimmed, smaller, smaller_masks
from starfish.speed import measuring

CHECKED = 4  # inputs of noise on which a smaller model must answer as the masked one
SAVE_SHARE = 0.05  # of the time may go into saving
SAVE_EVERY = 30.0  # seconds at least between two saves
IDENTITY = (
    "model",
    "method",
    "settings",
    "preprocess",
    "blocks",
    "seed",
    "limit",
    "labels",
    "digests",
)  # of config["starfish"]


@dataclass
class Run:
    """One folder, one heal."""

    folder: Path
    config: dict[str, Any]  # config.json; its "starfish" entry identifies the run
    keeps_model: bool = True  # false: of a finished run only the figures stay
    _rows: int = 0
    _last_save: float = field(default_factory=time.monotonic)
    _save_seconds: float = 0.0

    @staticmethod
    def open(folder: Path, config: dict[str, Any], *, resume: bool, keeps_model: bool = True) -> Run:
        """Claim `folder` for this heal; one that holds a run is refused, or with `resume` continued."""
        before = claimed(folder, "config.json", "run", resume=resume)
        if before is None:
            write_json(folder / "config.json", config)
        else:
            check_same(folder, "run", before.get("starfish", {}), config["starfish"], IDENTITY)
        return Run(folder, config, keeps_model)

    @property
    def result(self) -> dict[str, Any] | None:
        """result.json of a finished run."""
        path = self.folder / "result.json"
        return read_json(path) if path.is_file() else None

    def note(self, name: str, value: Any) -> None:
        """Keep a small fact that would be costly to find again."""
        write_json(self.folder / "state" / f"{name}.json", value)

    def noted(self, name: str) -> Any:
        """A fact kept by `note`, or None."""
        path = self.folder / "state" / f"{name}.json"
        return read_json(path) if path.is_file() else None

    def add(self, row: Row) -> None:
        with open(self.folder / "rows.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self._rows += 1

    def save_is_due(self) -> bool:
        since = time.monotonic() - self._last_save
        return since > max(SAVE_EVERY, self._save_seconds / SAVE_SHARE)

    def save(self, tensors: dict[str, Tensor], state: State, facts: dict[str, Any]) -> None:
        """Everything needed to go on, in one file, so that a kill finds either the old state or the new."""
        start = time.monotonic()
        held = {f"model/{name}": tensor for name, tensor in tensors.items()}
        held |= {f"state/{key}": value for key, value in state.items() if isinstance(value, Tensor)}
        plain = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        text = json.dumps({"state": plain, "rows": self._rows, "facts": facts})
        write_tensors(self.folder / "state" / "state.safetensors", held, {"starfish": text})
        self._last_save = time.monotonic()
        self._save_seconds = self._last_save - start

    def restore(self) -> tuple[dict[str, Tensor], State, dict[str, Any], list[Row]] | None:
        """What `save` kept last, with rows.jsonl cut back to that moment; None at a fresh start."""
        path = self.folder / "state" / "state.safetensors"
        if not path.is_file():
            self._cut_rows(0)
            return None
        held, metadata = read_safetensors(path)
        kept = json.loads(metadata["starfish"])
        self._cut_rows(kept["rows"])
        state: State = dict(kept["state"])
        state |= {key.removeprefix("state/"): value for key, value in held.items() if key.startswith("state/")}
        tensors = {key.removeprefix("model/"): value for key, value in held.items() if key.startswith("model/")}
        return tensors, state, kept["facts"], self._cut_rows(kept["rows"])

    def _cut_rows(self, count: int) -> list[Row]:
        path = self.folder / "rows.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)[:count] if path.is_file() else []
        write_text(path, "".join(lines))
        self._rows = count
        return [json.loads(line) for line in lines]

    def finish(self, model: nn.Module, masks: Masks, result: Result) -> None:
        """Write what is left and empty the state."""
        facts = {**result.facts(), "labels": self.config["starfish"].get("labels")}
        if self.keeps_model:
            self.write(model, masks, facts)
        else:
            write_json(self.folder / "result.json", facts)
        for path in (self.folder / "state").glob("*"):
            path.unlink()

    def write(self, model: nn.Module, masks: Masks, facts: dict[str, Any]) -> None:
        """The model, its masks if it has any, and all that is known of it, the result last of all."""
        write_tensors(self.folder / "model.safetensors", model.state_dict())
        if masks:
            masks_module.write(self.folder / "masks.safetensors", masks)
        write_text(self.folder / "README.md", model_card(facts, self.config))
        write_json(self.folder / "result.json", facts)


def claimed(folder: Path, name: str, kind: str, *, resume: bool) -> dict[str, Any] | None:
    """What the file `name` says of the run or comparison in `folder`, which only `resume` may go on with; None where
    the folder is free."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"`{folder}` is a file", "give another folder with -o")
    if (folder / name).exists():
        if not resume:
            raise UserError(f"`{folder}` already holds a {kind}", "go on with --resume, or give another folder with -o")
        for part in folder.rglob(".*.part"):  # of a file that a kill left half written
            part.unlink()
        return dict(read_json(folder / name))
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"`{folder}` is not empty and holds no {kind}", "give another folder with -o")
    return None


def check_same(folder: Path, kind: str, before: dict[str, Any], now: dict[str, Any], keys: Iterable[str]) -> None:
    """Refuse to go on with something else; digests are told apart one by one."""
    now = json.loads(json.dumps(now))
    for key in keys:
        was, is_now = before.get(key), now.get(key)
        if was == is_now:
            continue
        if key == "digests" and was and is_now:
            key = next(part for part in {**was, **is_now} if was.get(part) != is_now.get(part))
            was, is_now, key = was.get(key), is_now.get(key), f"digests.{key}"
        raise UserError(
            f"`{folder}` holds another {kind}: its `{key}` was {was} and is now {is_now}",
            "resume with the same arguments, or give another folder with -o",
        )


def slimming(folder: Path, output: Path) -> Long[dict[str, Any]]:
    """Cut out of a finished run's model the units that are gone whole, and write what is left as a run of its own.

    Its result.json is the run's, with what the models cost measured anew and, under "slim", which units went and how
    far the smaller model's answers are from the masked one's.
    """
    masks, result = _finished(folder)
    loaded, before = load_run(folder), architecture(folder)
    config, inputs = read_json(folder / "config.json"), example(loaded, CHECKED)
    anatomy = _anatomy(folder, loaded, masks)
    small, cut = slimmed(loaded.model, masks, anatomy), cut_of(masks, anatomy, loaded.model)
    facts = {"units": cut.counts(), "disagreement": _checked(small, loaded.model, inputs), "images": len(inputs)}
    speed = yield from measuring(before.model, loaded.model, small, as_images(inputs))
    dense, known = speed["dense"], result.get("speed", {}).get("dense", {})
    same = known.get("parameters") == dense["parameters"]
    dense["nonzero"] = known["nonzero"] if same else None  # built anew it has its sizes, not its weights
    left = smaller_masks(masks, cut)
    run = Run.open(output, {**config, "small": small_config(before.model, small)}, resume=False)
    found = {**result, "speed": speed, "slim": facts}
    run.write(small, left if masks_module.sparsity(left) else {}, found)
    return found


def shipped(folder: Path) -> tuple[nn.Module, Tensor]:
    """The model of a run as it goes on a device, without the units that are gone whole, and an example of its input."""
    loaded = load_run(folder)
    inputs, path = example(loaded, CHECKED), folder / "masks.safetensors"
    if not path.is_file():
        return loaded.model, inputs
    masks = read_safetensors(path)[0]
    cut = cut_of(masks, _anatomy(folder, loaded, masks), loaded.model)
    if not cut:
        return loaded.model, inputs
    small = smaller(loaded.model, cut)
    _checked(small, loaded.model, inputs)
    return small, inputs


def _anatomy(folder: Path, loaded: Loaded, masks: Masks) -> Anatomy:
    blocks = read_json(folder / "config.json")["starfish"].get("blocks")
    return find(loaded.model, example(loaded), blocks=blocks, channels=loses_channels(masks))


def _finished(folder: Path) -> tuple[Masks, dict[str, Any]]:
    if not (folder / "result.json").is_file():
        raise UserError(
            f"`{folder}` holds no finished run", "give a folder that `starfish heal` has written to its end"
        )
    if not (folder / "masks.safetensors").is_file():
        raise UserError(f"`{folder}` has no masks: what was pruned has been cut out of it already")
    return read_safetensors(folder / "masks.safetensors")[0], read_json(folder / "result.json")


def _checked(small: nn.Module, masked: nn.Module, inputs: Tensor) -> float:
    """How far the answers are apart; refused where that is more than rounding."""
    with torch.no_grad():
        found = disagreement(logits(masked, inputs), logits(small, inputs))
    if not found <= AGREEMENT:  # nan is no agreement either
        raise UserError(
            f"without these units the answers differ by {found:.1e} of the largest logit ({AGREEMENT:.0e} may be)",
            "they act on others in a way that starfish does not see; nothing was written, the masked run is good",
        )
    return found


def versions() -> dict[str, str]:
    """Of everything that can change a number."""
    packages = ("starfish-heal", "torch", "torchvision", "timm", "transformers", "safetensors", "numpy", "pillow")
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
