"""Figures as rows of text, with labels and without."""

from __future__ import annotations

from typing import Any

from starfish.tables import score_rows, size_rows


def result(*, labels: bool, top5: bool = True) -> dict[str, Any]:
    """The part of result.json that tables read."""
    none = {"dense": None, "pruned": None, "healed": None}
    return {
        "accuracy": {"dense": 72.125, "pruned": 3.0, "healed": 66.666} if labels else none,
        "accuracy_top5": {"dense": 91.0, "pruned": 9.5, "healed": 88.0} if labels and top5 else none,
        "fidelity": {
            "agreement": {"pruned": 4.0, "healed": 80.5},
            "kl": {"pruned": 5.4321, "healed": 0.12345},
            "cosine": {"pruned": 0.3, "healed": 0.98765},
        },
    }


FIDELITY = [
    ("same answer as dense, %", "100.00", "4.00", "80.50"),
    ("KL from dense", "0.0000", "5.4321", "0.1235"),
    ("block cosine to dense", "1.0000", "0.3000", "0.9877"),
]


def test_with_labels_accuracy_comes_first() -> None:
    assert score_rows(result(labels=True)) == [
        ("top-1, %", "72.12", "3.00", "66.67"),
        ("top-5, %", "91.00", "9.50", "88.00"),
        *FIDELITY,
    ]


def test_fewer_than_five_classes_have_no_top5() -> None:
    assert [row[0] for row in score_rows(result(labels=True, top5=False))] == [
        "top-1, %",
        *(row[0] for row in FIDELITY),
    ]


def test_without_labels_there_is_fidelity() -> None:
    assert score_rows(result(labels=False)) == FIDELITY


FACTS = {"images": 1000, "parameters": 5717416, "nonzero": 3000000}


def test_sizes_with_labels_and_a_dense_model() -> None:
    found = size_rows(
        {
            **FACTS,
            "accuracy": 72.8,
            "accuracy_standard_error": 1.40712,
            "accuracy_top5": 91.25,
            "fidelity": {"agreement": 80.0, "kl": 0.00012345, "cosine": 0.98},
        }
    )
    assert found == [
        ("top-1, %", "72.8"),
        ("one standard error", "1.407"),
        ("top-5, %", "91.25"),
        ("same answer as dense, %", "80"),
        ("KL from dense", "0.0001234"),
        ("block cosine to dense", "0.98"),
        ("images", "1,000"),
        ("parameters", "5,717,416"),
        ("of them not zero", "3,000,000"),
    ]


def test_what_is_not_known_has_no_row_but_zero_has_one() -> None:
    nothing = {"accuracy": None, "accuracy_standard_error": None, "accuracy_top5": None}
    assert [name for name, _ in size_rows({**FACTS, **nothing})] == ["images", "parameters", "of them not zero"]
    assert size_rows({**FACTS, **nothing, "accuracy": 0.0})[0] == ("top-1, %", "0")
