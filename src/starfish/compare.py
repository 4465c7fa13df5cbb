"""Every method behind the same mask, images and seed: a folder of runs, and the tables made of them.

compare.json    what is compared on what, and a row for each method    compare.md    compare.csv
runs/NAME/seed-N    what heal leaves behind, without the model unless it is asked for
cache/              statistics, shared by all methods
"""

from __future__ import annotations

import csv
import io
import os
import platform
import shlex
import statistics
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from starfish.cache import Cache
from starfish.core import Images, Job, Long, Method
from starfish.devices import forget_peak, peak_rss_mb
from starfish.digests import digest, digest_of_stored
from starfish.errors import UserError
from starfish.files import read_json, write_json, write_text
from starfish.heal import Before, chain_of, healing_, looking, settings_of
from starfish.masks import digest as digest_of_masks
from starfish.masks import sparsity
from starfish.plots import Point, scatter
from starfish.runs import Run, check_same, claimed, versions
from starfish.tables import comparison_notes, comparison_rows, markdown
from starfish.targets import DenseTargets

Chain = Mapping[str, Method]  # name → method, in the order in which they run
IDENTITY = ("model", "preprocess", "blocks", "limit", "labels", "keeps_models", "digests")
OF_A_RUN = ("model", "checkpoint", "preprocess", "blocks", "images", "limit", "eval", "labels", "command")
MEASURED = ("accuracy", "agreement", "kl", "cosine", "seconds")  # those with a deviation over seeds
NO_SECONDS = {"targets": 0.0, "fit": 0.0, "total": 0.0, "shared": 0.0, "alone": 0.0}


def able(chains: Mapping[str, Sequence[Method]], job: Job) -> tuple[dict[str, Chain], dict[str, UserError]]:
    """Those that can run, with every setting made concrete, and why the others cannot."""
    ready: dict[str, Chain] = {}
    refused: dict[str, UserError] = {}
    for name, chain in chains.items():
        try:
            ready[name] = chain_of(job, chain)
        except UserError as error:
            refused[name] = error
    return ready, refused


def refusal(refused: Mapping[str, UserError]) -> UserError:
    """One error for all of them."""
    if len(refused) == 1:
        (name, error), *_ = refused.items()
        return UserError(error.message, f"{error.hint}; or leave `{name}` out".removeprefix("; or "))
    reasons = "\n".join(f"  {name}: {error.message}" for name, error in refused.items())
    hints = dict.fromkeys(error.hint for error in refused.values() if error.hint)
    return UserError(
        f"{len(refused)} of the methods cannot run here:\n{reasons}",
        "; or ".join(["leave them out of --methods", *hints]),
    )


@dataclass
class Comparison:
    """One folder, one mask, many methods."""

    folder: Path
    facts: dict[str, Any]  # compare.json but for its rows
    config: dict[str, Any] = field(default_factory=dict)  # how the model is built, for config.json of the runs
    keeps_models: bool = False
    _before: Before | None = field(default=None, repr=False)
    _images: tuple[Images, str] | None = field(default=None, repr=False)  # hashing them takes a while

    @staticmethod
    def open(
        folder: Path, job: Job, evaluation: Images, chains: Mapping[str, Chain], seeds: Sequence[int], *,
        asked: Mapping[str, Any] | None = None, config: Mapping[str, Any] | None = None, resume: bool = False,
        keeps_models: bool = False,
    ) -> Comparison:  # fmt: skip
        """Claim `folder`. With `resume` one that holds this comparison is gone on with, and may get more methods and
        seeds. `asked` is what else there is to say: the model's name, where the images are from."""
        settings = {name: settings_of(chain) for name, chain in chains.items()}
        facts = {**(asked or {}), **_facts(job, evaluation), "methods": list(chains), "seeds": list(seeds),
                 "settings": settings, "memory": {"of": "method", "base_mb": None},
                 "keeps_models": keeps_models}  # fmt: skip
        facts.setdefault("left_out", {})
        before = claimed(folder, "compare.json", "comparison", resume=resume)
        if before is not None:
            check_same(folder, "comparison", before, facts, IDENTITY)
            _add_to(before, facts, folder)
        comparison = Comparison(folder, facts, dict(config or {}), keeps_models)
        comparison.write()
        return comparison

    def run(self, name: str, chain: Chain, job: Job) -> Run:
        """The folder of one method, opened to begin or to go on."""
        facts = {key: self.facts[key] for key in OF_A_RUN if key in self.facts}
        digests = {**self.facts["digests"], "images": self._admit(job)}
        facts |= {"method": ",".join(chain), "settings": settings_of(chain), "seed": job.seed, "digests": digests}
        config = {**self.config, "starfish": facts}
        return Run.open(self._place(name, job.seed), config, resume=True, keeps_model=self.keeps_models)

    def before(self, job: Job, evaluation: Images) -> Long[Before]:
        """What is the same for all methods, found out once."""
        if self._before is None:
            self._before = yield from looking(job, evaluation)
        return self._before

    def measure_memory(self) -> None:
        """From here on, memory counts for the next method."""
        own = forget_peak()
        base = self.facts["memory"]["base_mb"] or peak_rss_mb()
        self.facts["memory"] = {"of": "method" if own else "process", "base_mb": base}

    def write(self) -> dict[str, Any]:
        """Make the tables of all runs that are finished; returns what compare.json holds."""
        found = {**self.facts, "rows": _rows(self._results(), self.facts["memory"]["base_mb"])}
        write_text(self.folder / "compare.md", _page(found))
        write_text(self.folder / "compare.csv", _spread_sheet(found["rows"]))
        write_json(self.folder / "compare.json", found)
        return found

    def _admit(self, job: Job) -> str:
        """The digest of a job's images, which must be those that other methods had with this seed."""
        if self._images is None or self._images[0] is not job.images:
            self._images = (job.images, digest_of_stored(job.images))
        key = f"images of seed {job.seed}"
        known = self.facts["digests_of_images"].setdefault(str(job.seed), self._images[1])
        check_same(self.folder, "comparison", {key: known}, {key: self._images[1]}, [key])
        return self._images[1]

    def _place(self, name: str, seed: int) -> Path:
        return self.folder / "runs" / name.replace("/", ",") / f"seed-{seed}"

    def _results(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Method → seed → result.json, of those that have come to their end."""
        paths = {name: {seed: self._place(name, seed) / "result.json" for seed in self.facts["seeds"]}
                 for name in self.facts["methods"]}  # fmt: skip
        found = {name: {seed: read_json(path) for seed, path in seeds.items() if path.is_file()}
                 for name, seeds in paths.items()}  # fmt: skip
        return {name: results for name, results in found.items() if results}


def comparing(comparison: Comparison, name: str, chain: Chain, job: Job, evaluation: Images) -> Long[dict[str, Any]]:
    """Heal a copy of `job.model` with the methods of `chain`, or find that done; returns what compare.json then holds.

    Call it for one method after another with the same job: they share its targets, a cache of statistics, and what
    there is to say of the dense model and of the mask. Closing it between two rows saves what is needed to go on.
    """
    run = comparison.run(name, chain, job)
    if run.result is None:
        before = yield from comparison.before(job, evaluation)
        cache = Cache(job.cache.folder if job.cache else comparison.folder / "cache", owner=str(run.folder))
        work = replace(job, model=deepcopy(job.model), cache=cache, state={})
        if isinstance(job.targets, DenseTargets):
            job.targets.begin_run()
        comparison.measure_memory()
        yield from healing_(work, [*chain.values()], evaluation, run, before)
    return comparison.write()


def _facts(job: Job, evaluation: Images) -> dict[str, Any]:
    return {
        "sparsity": sparsity(job.masks),
        "evaluation": {"images": len(evaluation), "labels": evaluation.labels is not None},
        "masks": digest_of_masks(job.masks),
        "digests": {
            "dense": digest(job.dense),
            "masks": digest_of_masks(job.masks),
            "start": digest(job.model),
            "evaluation": digest_of_stored(evaluation),
        },
        "digests_of_images": {},
        "versions": versions(),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "processors": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": str(next(job.model.parameters()).device),
        },
    }


def _add_to(before: dict[str, Any], facts: dict[str, Any], folder: Path) -> None:
    """What the folder holds stays, and what is new comes after it."""
    common = [name for name in facts["settings"] if name in before["settings"]]
    was, now = ({f"settings.{name}": every["settings"][name] for name in common} for every in (before, facts))
    check_same(folder, "comparison", was, now, was)
    facts["settings"] = before["settings"] | facts["settings"]
    facts["methods"] = list(dict.fromkeys([*before["methods"], *facts["methods"]]))
    facts["seeds"] = sorted({*before["seeds"], *facts["seeds"]})
    facts["digests_of_images"], facts["memory"] = before["digests_of_images"], before["memory"]
    left_out = before["left_out"] | facts["left_out"]
    facts["left_out"] = {name: reason for name, reason in left_out.items() if name not in facts["methods"]}


def _rows(results: dict[str, dict[int, dict[str, Any]]], base_mb: float | None) -> list[dict[str, Any]]:
    """The dense model, the plain mask, then a row for each method."""
    if not results:
        return []
    one = next(iter(next(iter(results.values())).values()))
    perfect = {"agreement": 100.0, "kl": 0.0, "cosine": 1.0}
    plain = {name: one["fidelity"][name]["pruned"] for name in perfect}
    return [
        _reference("dense", one, "dense", perfect, base_mb),
        _reference("mask", one, "pruned", plain, base_mb),
        *(_row(name, found) for name, found in results.items()),
    ]


def _reference(
    name: str, result: dict[str, Any], which: str, fidelity: dict[str, float], base_mb: float | None
) -> dict[str, Any]:
    """A row for what no method has touched: as if it had been healed to what it is."""
    accuracy, top5 = ({**result[key], "healed": result[key][which]} for key in ("accuracy", "accuracy_top5"))
    pairs = {key: {"pruned": result["fidelity"][key]["pruned"], "healed": value} for key, value in fidelity.items()}
    return {"method": name, "accuracy": accuracy, "accuracy_top5": top5, "fidelity": pairs, "seconds": NO_SECONDS,
            "peak_rss_mb": base_mb, "settings": {}, "seeds": [], "std": None, "stages": [], "runs": []}  # fmt: skip


def _row(name: str, found: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds."""
    results = [_short(result) for result in found.values()]
    runs = [
        {
            "seed": seed,
            "accuracy": short["accuracy"]["healed"],
            "seconds": short["seconds"]["alone"],
            "agreement": short["fidelity"]["agreement"]["healed"],
        }
        for seed, short in zip(found, results, strict=True)
    ]
    return {
        "method": name,
        **_mean(results),
        "settings": next(iter(found.values()))["settings"],
        "seeds": list(found),
        "std": _deviations(results) if len(results) > 1 else None,
        "runs": runs,
    }  # fmt: skip


def _short(result: dict[str, Any]) -> dict[str, Any]:
    """What of a result.json is averaged. `alone` is what the method takes with nothing there before it."""
    seconds = {"shared": 0.0, **result["seconds"]}
    stages = [{key: stage[key] for key in ("method", "seconds", "accuracy", "agreement", "kl", "cosine")}
              for stage in result["stages"]]  # fmt: skip
    return {
        "accuracy": result["accuracy"],
        "accuracy_top5": result["accuracy_top5"],
        "fidelity": {key: result["fidelity"][key] for key in ("agreement", "kl", "cosine")},
        "seconds": {**seconds, "alone": seconds["targets"] + seconds["fit"] + seconds["shared"]},
        "peak_rss_mb": result["peak_rss_mb"],
        "stages": stages,
    }


def _mean(values: Sequence[Any]) -> Any:
    """Number by number; what is no number is the same in all."""
    first = values[0]
    if isinstance(first, dict):
        return {key: _mean([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [_mean(place) for place in zip(*values, strict=True)]
    return statistics.fmean(values) if isinstance(first, int | float) else first


def _deviations(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    figures = {key: [result["fidelity"][key]["healed"] for result in results] for key in ("agreement", "kl", "cosine")}
    figures |= {"accuracy": [result["accuracy"]["healed"] for result in results],
                "seconds": [result["seconds"]["alone"] for result in results]}  # fmt: skip
    return {name: statistics.stdev(values) for name, values in figures.items() if None not in values}


def _spread_sheet(rows: Sequence[dict[str, Any]]) -> str:
    """Numbers in full, for other programs."""
    lines = [
        {"method": row["method"], "seeds": len(row["seeds"]), "accuracy": row["accuracy"]["healed"],
         **{name: pair["healed"] for name, pair in row["fidelity"].items()},
         **{f"{name}_std": (row["std"] or {}).get(name) for name in MEASURED},
         **{f"seconds_{name}": value for name, value in row["seconds"].items()}, "peak_rss_mb": row["peak_rss_mb"]}
        for row in rows
    ]  # fmt: skip
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]) if lines else ["method"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _page(comparison: dict[str, Any]) -> str:
    """compare.md"""
    lines = [f"# {comparison.get('model', 'A model')}: methods compared", ""]
    lines += [f"{100 * comparison['sparsity']:.1f} % of the weights under the masks are zero.", ""]
    if comparison["rows"]:
        lines += [*markdown(comparison_rows(comparison)), ""]
    lines += [f"- {note}" for note in comparison_notes(comparison)]
    machine, made_with = comparison["machine"], comparison["versions"].items()
    lines += [
        f"- {machine['processors']} processors, {machine['threads']} threads used, {machine['device']};"
        f" {machine['system']}.",
        f"- Versions: {', '.join(' '.join(pair) for pair in made_with)}.",
    ]
    if "command" in comparison:
        lines += ["", "```", shlex.join(["starfish", *comparison["command"]]), "```"]
    return "\n".join([*lines, ""])


def draw(folder: Path, comparison: Mapping[str, Any]) -> list[Path]:
    """compare.png and compare.svg: what each method takes against what it gives back."""
    dense, mask, *rows = comparison["rows"]
    labels = dense["accuracy"]["healed"] is not None
    name, unit = ("accuracy", "top-1, %") if labels else ("agreement", "same answer as the dense model, %")
    errors = [(row["std"] or {}).get(name, 0.0) for row in rows]
    points = [Point(row["method"], max(row["seconds"]["alone"], 1e-3), _figure(row, labels), error)
              for row, error in zip(rows, errors, strict=True)]  # fmt: skip
    lines = {row["method"]: _figure(row, labels) for row in (dense, mask)}
    title = f"{comparison.get('model', 'a model')}, {100 * comparison['sparsity']:.0f} % of the masked weights zero"
    return scatter(folder / "compare", points, lines, title=title, x="seconds (log scale)", y=unit)


def _figure(row: Mapping[str, Any], labels: bool) -> float:
    return float((row["accuracy"] if labels else row["fidelity"]["agreement"])["healed"])
