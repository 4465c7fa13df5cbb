"""The model card says what was done and how to load it, and nothing about the machine it was done on."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from starfish.card import model_card
from test_tables import COST, STAGES, result

LABELLED = {
    **result(labels=True),
    "sparsity": 0.6125,
    "method": "starfish",
    "images": 1000,
    "seed": 7,
    "seconds": {"total": 123.4},
    "peak_rss_mb": 2048.3,
    "settings": {"lr": 0.0006, "epochs": 10},
    "versions": {"python": "3.11.9", "starfish-heal": "0.1.0", "torch": "2.15.0"},
    "evaluation": {"images": 500, "labels": True, "held_out": True},
    "accuracy_standard_error": {"dense": 2.0, "pruned": 0.8, "healed": 2.1},
    "also_changed": [],
    "stages": STAGES[1:],
    "cut": {},
    "speed": {"dense": COST, "masked": COST, "input": [3, 224, 224], "verdict": "The masked model is no faster."},
}
UNLABELLED = {
    **LABELLED,
    **result(labels=False),
    "evaluation": {"images": 500, "labels": False, "held_out": False},
    "accuracy_standard_error": {"dense": None, "pruned": None, "healed": None},
}
TIMM = {"architecture": "deit_tiny_patch16_224", "model_args": {}}
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "timm/deit_tiny_patch16_224": (TIMM, "timm"),
    "deit_tiny_patch16_224": (TIMM, "timm"),
    "timm/mobilenetv1_100?pad_type=same": (TIMM, "timm"),
    "hf-hub:timm/some": (TIMM, "timm"),
    "local-dir:/home/someone/secret/folder": (TIMM, "timm"),
    "torchvision/vit_b_16@IMAGENET1K_V1": ({}, "pytorch"),
    "hf/google/vit-base-patch16-224": ({"model_type": "vit"}, "transformers"),
    "hf//home/someone/secret/folder": ({"model_type": "vit"}, "transformers"),
    "mine.models:build?depth=3": ({}, "pytorch"),
}


def card(name: str, figures: dict[str, Any] = LABELLED, **facts: Any) -> str:
    return model_card(figures, {**CONFIGS[name][0], "starfish": {"model": name, **facts}})


def test_model_method_images_and_figures_are_named() -> None:
    text = card("timm/deit_tiny_patch16_224")
    for part in (
        "# timm/deit_tiny_patch16_224, pruned and healed",
        "61.3 % of the weights under the masks are zero",
        "`starfish` on 1000 unlabeled images by starfish 0.1.0",
        "| top-1, % | 72.12 | 3.00 | 66.67 |",
        "| block cosine to dense | 1.0000 | 0.3000 | 0.9877 |",
        "Measured on 500 images that the healing did not see; one standard error of an accuracy is about 2.1 points.",
        "Seed 7, 123 s, 2048 MB",
        "lr 0.0006, epochs 10",
        "torch 2.15.0",
    ):
        assert part in text, part


def test_without_labels_no_accuracy_is_claimed() -> None:
    text = card("timm/deit_tiny_patch16_224", UNLABELLED)
    assert "top-1" not in text
    assert "None" not in text
    assert "same answer as dense" in text
    assert "Measured on the 500 healing images." in text


def table(text: str, start: str) -> list[str]:
    """The lines of the Markdown table whose first line begins so."""
    lines = text.splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith(start))
    last = next(place for place in range(first, len(lines)) if not lines[place].startswith("|"))
    return lines[first:last]


def test_what_the_models_cost_and_what_that_means() -> None:
    """All figures side by side and the verdict; zeros that lie about are said to be stored."""
    text = card("timm/deit_tiny_patch16_224")
    assert table(text, "|  | dense | masked |")[1:3] == ["|---|---|---|", "| parameters | 5,717,416 | 5,717,416 |"]
    assert "The masked model is no faster." in text
    assert "stored as zeros: this file is as large as the dense model's." in text
    assert "starfish slim" not in text


SMALL = {**COST, "parameters": 3500000}
UNITS = {"neuron": {"units": 9216, "gone": 4608}, "qk": {"units": 384, "gone": 192}}
CUT = {
    **LABELLED,
    "cut": UNITS,
    "speed": {**LABELLED["speed"], "small": SMALL, "verdict": "The small model is faster."},
}


def test_units_gone_can_be_cut_out() -> None:
    """A run whose units are gone has a small model, and the card says what it costs and how to get it."""
    text = card("timm/deit_tiny_patch16_224", CUT)
    assert "| parameters | 5,717,416 | 5,717,416 | 3,500,000 |" in table(text, "|  | dense | masked | small |")
    assert "4,608 of 9,216 MLP neurons and 192 of 384 query-key dimensions are zero as a whole" in text
    assert "\nstarfish slim RUN -o DIR\n" in text
    assert 'starfish.load("DIR")' in text
    assert "The small model is faster." in text
    assert 'timm.create_model("local-dir:RUN", pretrained=True)' in text
    assert "no smaller" not in text


@pytest.mark.parametrize("name", CONFIGS)
def test_the_card_of_a_small_model(name: str) -> None:
    """It holds no zeros and no library builds it: starfish.load does."""
    slim = {**CUT, "slim": {"units": UNITS, "disagreement": 3.4e-7, "images": 4}}
    text = model_card(slim, {**CONFIGS[name][0], "small": {}, "starfish": {"model": name}})
    assert "4,608 of 9,216 MLP neurons" in text
    assert "up to 3e-07 of the largest" in text
    assert "under the masks were zero" in text
    assert 'starfish.load("RUN")' in text
    assert yaml.safe_load(text.split("---\n")[1])["library_name"] == "pytorch"
    for wrong in ("stored as zeros", "starfish slim", "timm.create_model", "rows.jsonl", "masks.safetensors"):
        assert wrong not in text


def test_a_model_that_came_in_small() -> None:
    """Cut by another tool: nothing is left to cut, and its file is no larger than it must be."""
    text = card("timm/deit_tiny_patch16_224", {**LABELLED, "speed": {"dense": COST, "small": SMALL, "verdict": "Yes."}})
    assert "| parameters | 5,717,416 | 3,500,000 |" in table(text, "|  | dense | small |")
    assert "stored as zeros" not in text
    assert "starfish slim" not in text


def test_whose_labels_the_images_had() -> None:
    """None were needed, the user's own, or the dense model's answers."""
    for labels, images in (
        (None, "unlabeled images"),
        ("given", "images"),
        ("model", "images that the dense model labelled"),
    ):
        assert f"on 1000 {images} by starfish" in card("timm/deit_tiny_patch16_224", {**LABELLED, "labels": labels})


def test_methods_in_a_row_each_with_figures_and_settings() -> None:
    """What came of each, and its settings by its name; a single method reads the same way without the table."""
    settings = {"corp": {"ridge": "auto"}, "starfish": {"lr": 0.0006, "epochs": 10}}
    text = card(
        "timm/deit_tiny_patch16_224", {**CUT, "method": "corp,starfish", "settings": settings, "stages": STAGES}
    )
    assert "healed with `corp` then `starfish` on 1000 unlabeled images" in text
    assert table(text, "| after |")[2:] == ["| corp | 41.25 | 12 |", "| starfish | 66.67 | 130 |"]
    assert "Settings of `corp`: ridge auto." in text
    assert "Settings of `starfish`: lr 0.0006, epochs 10." in text
    alone = card("timm/deit_tiny_patch16_224")
    assert "| after |" not in alone
    assert "Settings of `starfish`: lr 0.0006, epochs 10." in alone


def test_what_may_have_changed_is_not_said_to_be_untouched() -> None:
    text = card("timm/deit_tiny_patch16_224", {**LABELLED, "also_changed": ["head.bias"]})
    assert "but for 1 tensors that the method may change" in text
    assert "but for" not in card("timm/deit_tiny_patch16_224")


def test_runs_of_old_knew_neither_costs_nor_stages() -> None:
    """A card can still be written for them."""
    old = {name: value for name, value in LABELLED.items() if name not in {"speed", "stages", "cut"}}
    text = card("timm/deit_tiny_patch16_224", old)
    assert "stored as zeros" in text
    assert "## How it was made" in text


@pytest.mark.parametrize("name", CONFIGS)
def test_the_front_matter_is_yaml_that_names_the_library(name: str) -> None:
    start, front, body = card(name).split("---\n", 2)
    assert start == ""
    assert yaml.safe_load(front) == {"library_name": CONFIGS[name][1], "tags": ["pruning", "starfish"]}
    assert body.startswith("\n# ")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("figures", [LABELLED, UNLABELLED])
def test_no_path_of_the_machine_is_told(name: str, figures: dict[str, Any]) -> None:
    text = card(name, figures, images="/home/someone/pictures", eval="/home/someone/eval", checkpoint="/data/w.pt")
    for part in ("/home", "/data", "someone", "secret", "pictures"):
        assert part not in text
    assert name.rpartition("/")[2] in text


def test_the_command_is_given_as_it_was_typed() -> None:
    command = ["heal", "timm/x", "--images", "/home/me/my pictures", "-o", "run"]
    text = card("timm/deit_tiny_patch16_224", command=command)
    assert "starfish heal timm/x --images '/home/me/my pictures' -o run" in text
    assert "starfish heal" not in card("timm/deit_tiny_patch16_224")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("hf-hub:timm/some", 'timm.create_model("local-dir:RUN", pretrained=True)'),
        ("local-dir:/home/someone/secret/folder", 'timm.create_model("local-dir:RUN", pretrained=True)'),
        ("torchvision/vit_b_16@IMAGENET1K_V1", 'starfish.load("RUN")'),
        ("mine.models:build?depth=3", 'starfish.load("RUN")'),
    ],
)
def test_the_way_to_load_fits_the_model(name: str, line: str) -> None:
    assert line in card(name)


def test_a_model_of_ones_own_is_loaded_by_its_state_dict() -> None:
    text = model_card(LABELLED, {"starfish": {"seed": 1}})
    assert "# a model of your own, pruned and healed" in text
    assert 'load_file("RUN/model.safetensors")' in text
    assert "library_name: pytorch" in text
