"""Many methods on one mask: rows that are what each heal would give by itself, however the comparison came about."""

from __future__ import annotations

import csv
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import starfish
from cases import Case, quick
from starfish.compare import Comparison, able, comparing, draw, refusal
from starfish.core import Job, Method, Row, finish
from starfish.data import Preprocess, StoredImages, as_images
from starfish.heal import job_of

FOUR = ("starfish", "kl", "batchnorm", "corp/starfish")


def job(images: Tensor, seed: int = 0, masks: str = "cnn-channels", labels: Tensor | None = None) -> Job:
    model, dense, chosen, _ = Case("starfish", masks).build(images)
    return job_of(model, dense, chosen, StoredImages(images, Preprocess(), labels), seed=seed)


def methods(names: Sequence[str]) -> dict[str, list[Method]]:
    return {name: [quick(starfish.METHODS[part]) for part in name.split("/")] for name in names}


def compare(
    folder: Path, images: Tensor, chains: dict[str, list[Method]], *, labels: Tensor | None = None,
    seeds: Sequence[int] = (0,), resume: bool = False, stop: tuple[str, int] | None = None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """What compare.json holds; or stopped after so many rows of a method."""
    found: dict[str, Any] = {}
    held_out = StoredImages(images, Preprocess(), labels)
    comparison = None
    for seed in seeds:
        one = job(images, seed, more.pop("masks", "cnn-channels"))
        ready, refused = able(chains, one)
        assert not refused
        if comparison is None:
            comparison = Comparison.open(folder, one, held_out, ready, seeds, resume=resume, **more)
        for name, chain in ready.items():
            work = comparing(comparison, name, chain, one, held_out)
            if stop is not None and stop[0] == name:
                rows = 0
                while rows < stop[1]:
                    rows += "stage" not in next(work)
                work.close()
                return {}
            found = finish(work)
    return found


def without_costs(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows, less what differs from one time to the next."""
    rows = json.loads(json.dumps(found["rows"]))
    for row in rows:
        for what in (row, *row["stages"], *row["runs"], row["std"] or {}):
            what.pop("seconds", None)
            what.pop("peak_rss_mb", None)
    return rows  # type: ignore[no-any-return]


def test_every_row_is_what_a_heal_gives(images: Tensor, labels: Tensor, tmp_path: Path) -> None:
    """Sharing changes no bit: accuracy and fidelity are those of heal_ alone; dense and mask come first."""
    found = compare(tmp_path / "c", images, methods(FOUR), labels=labels)
    rows = {row["method"]: row for row in found["rows"]}
    assert list(rows) == ["dense", "mask", *FOUR]
    for name, chain in methods(FOUR).items():
        start = job(images)
        alone = starfish.heal_(start.model, start.dense, start.masks, images, chain,
                               evaluation=[(images, labels)])  # fmt: skip
        assert rows[name]["accuracy"] == alone.accuracy, name
        for measure in ("agreement", "kl", "cosine"):
            assert rows[name]["fidelity"][measure] == alone.fidelity[measure], name
        assert rows["mask"]["accuracy"]["healed"] == alone.accuracy["pruned"]
        assert rows["dense"]["accuracy"]["healed"] == alone.accuracy["dense"]
        assert rows["mask"]["fidelity"]["kl"]["healed"] == alone.fidelity["kl"]["pruned"]
    assert rows["dense"]["fidelity"]["agreement"]["healed"] == 100
    assert [stage["method"] for stage in rows["corp/starfish"]["stages"]] == ["corp", "starfish"]
    assert rows["starfish"]["settings"]["epochs"] == 3
    assert rows["starfish"]["std"] is None


def test_files_of_a_comparison(images: Tensor, labels: Tensor, tmp_path: Path) -> None:
    """JSON with all facts, a page, a sheet with the same figures, a picture; of the runs no weights."""
    found = compare(tmp_path / "c", images, methods(FOUR[:3]), labels=labels, asked={"model": "tiny"})
    assert json.loads((tmp_path / "c" / "compare.json").read_text()) == found
    assert {"model", "digests", "sparsity", "evaluation", "seeds", "settings", "versions", "machine", "memory",
            "left_out", "rows"} <= found.keys()  # fmt: skip
    for row in found["rows"]:
        assert {"targets", "fit", "total", "shared", "alone"} == row["seconds"].keys()
    with open(tmp_path / "c" / "compare.csv", newline="") as file:
        sheet = list(csv.DictReader(file))
    assert [line["method"] for line in sheet] == [row["method"] for row in found["rows"]]
    assert [float(line["kl"]) for line in sheet] == [row["fidelity"]["kl"]["healed"] for row in found["rows"]]
    page = (tmp_path / "c" / "compare.md").read_text()
    assert page.startswith("# tiny")
    assert f"| batchnorm | {found['rows'][-1]['accuracy']['healed']:.2f} |" in page
    assert all(path.stat().st_size > 5000 for path in draw(tmp_path / "c", found))
    assert {path.name for path in (tmp_path / "c/runs/kl/seed-0").iterdir()} == {"config.json", "result.json",
                                                                                "rows.jsonl", "state"}  # fmt: skip
    assert not list((tmp_path / "c").rglob("model.safetensors"))


def test_models_are_kept_where_asked(images: Tensor, tmp_path: Path) -> None:
    compare(tmp_path / "c", images, methods(["corp/starfish"]), keeps_models=True)
    (model,) = (tmp_path / "c").rglob("model.safetensors")
    assert model.parent == tmp_path / "c" / "runs" / "corp,starfish" / "seed-0"
    assert (model.parent / "README.md").is_file()


def test_stopped_and_resumed_gives_the_same_rows(images: Tensor, tmp_path: Path) -> None:
    """In the second method, in both parts of a chain; a finished run is not made again."""
    chains = methods(("starfish", "kl", "corp/starfish"))
    whole = compare(tmp_path / "whole", images, chains)
    for place, stop in enumerate([("kl", 2), ("corp/starfish", 1), ("corp/starfish", 6)]):
        compare(tmp_path / "c", images, chains, stop=stop, resume=place > 0)
    first = tmp_path / "c" / "runs" / "starfish" / "seed-0" / "result.json"
    before = first.stat().st_mtime_ns
    found = compare(tmp_path / "c", images, chains, resume=True)
    assert without_costs(found) == without_costs(whole)
    assert first.stat().st_mtime_ns == before
    for name in ("starfish", "kl", "corp,starfish"):
        rows = [(tmp_path / folder / "runs" / name / "seed-0" / "rows.jsonl").read_text() for folder in ("whole", "c")]
        assert rows[0] == rows[1]


def test_seeds_give_means_and_deviations(images: Tensor, labels: Tensor, tmp_path: Path) -> None:
    """Over the runs of each method; a method that draws nothing deviates by nothing."""
    found = compare(tmp_path / "c", images, methods(["kl", "batchnorm"]), labels=labels, seeds=(0, 5))
    rows = {row["method"]: row for row in found["rows"]}
    results = [json.loads((tmp_path / f"c/runs/kl/seed-{seed}/result.json").read_text()) for seed in (0, 5)]
    kl = [result["fidelity"]["kl"]["healed"] for result in results]
    assert len(set(kl)) == 2
    assert rows["kl"]["fidelity"]["kl"]["healed"] == pytest.approx(statistics.mean(kl), rel=1e-12)
    assert rows["kl"]["std"]["kl"] == pytest.approx(statistics.stdev(kl), rel=1e-12)
    top1 = [result["accuracy"]["healed"] for result in results]
    assert rows["kl"]["std"]["accuracy"] == pytest.approx(statistics.stdev(top1), rel=1e-12)
    assert [run["seed"] for run in rows["kl"]["runs"]] == [0, 5]
    assert rows["batchnorm"]["std"]["kl"] == 0
    assert "±" in (tmp_path / "c" / "compare.md").read_text()


def test_methods_and_seeds_are_added(images: Tensor, tmp_path: Path) -> None:
    """With --resume alone, and what was there stays though it is not named again."""
    compare(tmp_path / "c", images, methods(["kl"]))
    with pytest.raises(starfish.UserError, match="already holds a comparison"):
        compare(tmp_path / "c", images, methods(["batchnorm"]))
    found = compare(tmp_path / "c", images, methods(["batchnorm"]), seeds=(1,), resume=True)
    rows = {row["method"]: row for row in found["rows"]}
    assert list(rows) == ["dense", "mask", "kl", "batchnorm"]
    assert (rows["kl"]["seeds"], rows["batchnorm"]["seeds"], found["seeds"]) == ([0], [1], [0, 1])


def test_another_comparison_is_refused(images: Tensor, tmp_path: Path) -> None:
    """Another mask, other settings, other images to heal on or to measure on: named, and nothing is run."""
    compare(tmp_path / "c", images, methods(["kl"]))
    before = (tmp_path / "c" / "compare.json").read_bytes()
    with pytest.raises(starfish.UserError, match=r"another comparison: its `digests.masks` was"):
        compare(tmp_path / "c", images, methods(["kl"]), resume=True, masks="cnn-unstructured")
    other = {"kl": [replace(methods(["kl"])["kl"][0], lr=1.0)]}  # type: ignore[type-var]  # every method is a dataclass
    with pytest.raises(starfish.UserError, match=r"`settings.kl` was"):
        compare(tmp_path / "c", images, other, resume=True)
    with pytest.raises(starfish.UserError, match=r"`digests.evaluation` was"):
        compare(tmp_path / "c", images + 1, methods(["kl"]), resume=True)
    assert (tmp_path / "c" / "compare.json").read_bytes() == before
    one, held_out = job(images + 1), as_images(images)
    chains, _ = able(methods(["batchnorm"]), one)
    comparison = Comparison.open(tmp_path / "c", one, held_out, chains, [0], resume=True)
    with pytest.raises(starfish.UserError, match=r"`images of seed 0` was"):
        finish(comparing(comparison, "batchnorm", chains["batchnorm"], one, held_out))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").touch()
    with pytest.raises(starfish.UserError, match="holds no comparison"):
        compare(tmp_path / "other", images, methods(["kl"]), resume=True)


def test_all_that_cannot_run_are_refused_together(images: Tensor) -> None:
    """Each by name with its reason, and the ways out; those that can are ready."""
    chains = methods(["ce", "kl", "starfish/corp", "batchnorm"])
    ready, refused = able(chains, job(images, masks="vit-neurons"))
    assert (list(ready), list(refused)) == (["kl"], ["ce", "starfish/corp", "batchnorm"])
    error = refusal(refused)
    for text in ("3 of the methods", "ce: the method `ce` needs labels", "BatchNorm layers", "starts from the dense"):
        assert text in error.message
    assert "leave them out" in error.hint
    assert "--pseudo-labels" in error.hint
    assert "leave `ce` out" in refusal({"ce": refused["ce"]}).hint


def stages_of(work: Iterator[Row]) -> list[str]:
    return [str(row["stage"]) for row in work if "stage" in row]


def test_targets_are_filled_once(images: Tensor, tmp_path: Path) -> None:
    """Blocks by the first that aligns them, logits by the first that reads them; the dense model answers once."""
    chains, _ = able(methods(["mse", "kl", "starfish+kl"]), job(images))
    one, held_out = job(images), as_images(images)
    comparison = Comparison.open(tmp_path / "c", one, held_out, chains, [0])
    seen = {name: stages_of(comparing(comparison, name, chain, one, held_out)) for name, chain in chains.items()}
    assert [stages.count("targets") for stages in seen.values()] == [1, 1, 0]
    assert [stages.count("dense") for stages in seen.values()] == [1, 0, 0]
    assert [stages.count("pruned") for stages in seen.values()] == [1, 0, 0]
    seconds = [row["seconds"] for row in comparison.write()["rows"][2:]]
    assert [each["shared"] > 0 for each in seconds] == [False, False, True]
    for each in seconds:
        assert each["alone"] == each["targets"] + each["fit"] + each["shared"]
    assert "*: a part was found ready" in (tmp_path / "c" / "compare.md").read_text()


def test_statistics_are_gathered_once(images: Tensor, tmp_path: Path) -> None:
    """A chain finds those of the closed form before it, and counts the seconds that they had taken."""
    found = compare(tmp_path / "c", images, methods(["corp", "corp/starfish"]))
    rows = {row["method"]: row for row in found["rows"]}
    assert list((tmp_path / "c" / "cache").glob("statistics-*"))
    assert rows["corp"]["seconds"]["shared"] == 0
    assert 0 < rows["corp/starfish"]["seconds"]["shared"] <= rows["corp"]["seconds"]["fit"]


@dataclass(frozen=True)
class Hungry(Method):
    """Takes much memory for a moment."""

    megabytes: int = 200

    def fit(self, job: Job) -> Iterator[Row]:
        held = torch.ones(self.megabytes * 2**18)
        yield {"step": 1, "steps": 1, "sum": float(held.sum())}


@dataclass(frozen=True)
class Modest(Method):
    """Takes next to nothing."""

    def fit(self, job: Job) -> Iterator[Row]:
        yield {"step": 1, "steps": 1}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell how much was held since when")
def test_memory_is_each_methods_own(images: Tensor, tmp_path: Path) -> None:
    """A modest method after a hungry one has its own peak, and not the hungry one's."""
    found = compare(tmp_path / "c", images, {"hungry": [Hungry()], "modest": [Modest()]})
    assert found["memory"]["of"] == "method"
    peaks = {row["method"]: row["peak_rss_mb"] for row in found["rows"]}
    assert peaks["hungry"] > peaks["modest"] + 150
    assert found["memory"]["base_mb"] <= peaks["modest"] + 50
