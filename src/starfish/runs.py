"""The run folder: everything a heal leaves behind, written whole or not at all, and enough to go on after a kill.

config.json          how the model is built (timm reads it) and, under "starfish", how the run was asked for
rows.jsonl           one line a step, appended as the run goes on
state/               what is needed to resume; emptied at the end
masks.safetensors    model.safetensors    README.md    result.json (the last to appear: the run is finished)
"""

from __future__ import annotations

import json
import platform
import resource
import sys
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from starfish import masks as masks_module
from starfish.card import model_card
from starfish.core import Masks, Result, Row, State
from starfish.errors import UserError
from starfish.files import read_json, read_safetensors, write_json, write_tensors, write_text

SAVE_SHARE = 0.05  # of the time may go into saving
SAVE_EVERY = 30.0  # seconds at least between two saves
IDENTITY = ("model", "method", "settings", "preprocess", "blocks", "seed", "limit", "digests")  # of config["starfish"]


@dataclass
class Run:
    """One folder, one heal."""

    folder: Path
    config: dict[str, Any]  # config.json; its "starfish" entry identifies the run
    _rows: int = 0
    _last_save: float = field(default_factory=time.monotonic)
    _save_seconds: float = 0.0

    @staticmethod
    def open(folder: Path, config: dict[str, Any], *, resume: bool) -> Run:
        """Claim `folder` for this heal; one that holds a run is refused, or with `resume` continued."""
        run = Run(folder, config)
        for part in folder.rglob(".*.part") if folder.is_dir() else ():  # of a file that a kill left half written
            part.unlink()
        if folder.exists() and not folder.is_dir():
            raise UserError(f"`{folder}` is a file", "give another folder with -o")
        if (folder / "config.json").exists():
            if not resume:
                raise UserError(
                    f"`{folder}` already holds a run", "go on with --resume, or give another folder with -o"
                )
            run._check_same(read_json(folder / "config.json").get("starfish", {}))
        elif folder.exists() and any(folder.iterdir()):
            raise UserError(f"`{folder}` is not empty and holds no run", "give another folder with -o")
        else:
            write_json(folder / "config.json", config)
        return run

    def _check_same(self, before: dict[str, Any]) -> None:
        now = json.loads(json.dumps(self.config["starfish"]))
        changed = [key for key in IDENTITY if now.get(key) != before.get(key)]
        if changed:
            key = changed[0]
            raise UserError(
                f"`{self.folder}` holds another run: its `{key}` was {before.get(key)} and is now {now[key]}",
                "resume with the same arguments, or give another folder with -o",
            )

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

    def save(self, tensors: dict[str, Tensor], state: State, facts: dict[str, float]) -> None:
        """Everything needed to go on, in one file, so that a kill finds either the old state or the new."""
        start = time.monotonic()
        held = {f"model/{name}": tensor for name, tensor in tensors.items()}
        held |= {f"state/{key}": value for key, value in state.items() if isinstance(value, Tensor)}
        plain = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        text = json.dumps({"state": plain, "rows": self._rows, "facts": facts})
        write_tensors(self.folder / "state" / "state.safetensors", held, {"starfish": text})
        self._last_save = time.monotonic()
        self._save_seconds = self._last_save - start

    def restore(self) -> tuple[dict[str, Tensor], State, dict[str, float], list[Row]] | None:
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
        """Write what is left, the result last of all, and empty the state."""
        write_tensors(self.folder / "model.safetensors", model.state_dict())
        masks_module.write(self.folder / "masks.safetensors", masks)
        facts = result.facts()
        write_text(self.folder / "README.md", model_card(facts, self.config))
        write_json(self.folder / "result.json", facts)
        for path in (self.folder / "state").glob("*"):
            path.unlink()


def peak_rss_mb() -> float:
    """The most memory this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


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
