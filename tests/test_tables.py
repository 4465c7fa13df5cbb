"""Figures as rows of text, with labels and without."""

from __future__ import annotations

from typing import Any

from starfish.tables import (
    comparison_notes,
    comparison_rows,
    cost_rows,
    evaluation_rows,
    markdown,
    milliseconds,
    proof,
    score_rows,
    speed_rows,
    stage_rows,
)


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


COST = {
    "parameters": 5717416,
    "nonzero": 3000000,
    "file_mb": 22.8697,
    "flops": 2514123456,
    "latency_ms": {"1": 12.345, "32": 234.56},
}
COST_ROWS = [
    ("parameters", "5,717,416"),
    ("of them not zero", "3,000,000"),
    ("file, MB", "22.87"),
    ("operations an image, millions", "2,514.1"),
    ("ms for 1 at once", "12.3"),
    ("ms for 32 at once", "235"),
]


def test_what_a_model_costs() -> None:
    """One figure a line; how many weights are not zero only where it is known."""
    assert cost_rows(COST) == COST_ROWS
    assert cost_rows({**COST, "nonzero": None}) == [COST_ROWS[0], *COST_ROWS[2:]]


def test_models_side_by_side() -> None:
    """Those that were measured, the dense one first; a figure that one of them lacks is empty there."""
    small = {**COST, "parameters": 3000000, "latency_ms": {"1": 6.0, "32": 120.0}}
    speed = {"small": small, "dense": {**COST, "nonzero": None}, "input": [3, 224, 224], "verdict": "Faster."}
    assert speed_rows(speed) == [
        ("", "dense", "small"),
        ("parameters", "5,717,416", "3,000,000"),
        ("of them not zero", "", "3,000,000"),
        ("file, MB", "22.87", "22.87"),
        ("operations an image, millions", "2,514.1", "2,514.1"),
        ("ms for 1 at once", "12.3", "6"),
        ("ms for 32 at once", "235", "120"),
    ]
    assert speed_rows({**speed, "masked": COST})[0] == ("", "dense", "masked", "small")


STAGES = [
    {"method": "corp", "accuracy": 41.25, "agreement": 50.0, "seconds": 12.4},
    {"method": "starfish", "accuracy": 66.666, "agreement": 80.5, "seconds": 130.0},
]


def test_methods_in_a_row() -> None:
    """Accuracy after each, without labels how often it answers as the dense model; one alone needs no table."""
    assert stage_rows(STAGES) == [
        ("after", "top-1, %", "seconds"),
        ("corp", "41.25", "12"),
        ("starfish", "66.67", "130"),
    ]
    unlabelled = [{**stage, "accuracy": None} for stage in STAGES]
    assert stage_rows(unlabelled)[:2] == [("after", "same answer as dense, %", "seconds"), ("corp", "50.00", "12")]
    assert stage_rows(STAGES[:1]) == []


def test_the_proof_claims_no_more_than_was_shown() -> None:
    """Tensors that the method was free to change are not said to be as they were."""
    assert proof({"also_changed": []}).endswith("nothing outside the masks has changed by a bit")
    assert "but for 2 tensors that the method may change" in proof({"also_changed": ["a.bias", "b.bias"]})


FACTS = {"images": 1000, **COST}


def test_an_evaluation_with_labels_and_a_dense_model() -> None:
    found = evaluation_rows(
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
        *COST_ROWS,
    ]


def test_what_is_not_known_has_no_row_but_zero_has_one() -> None:
    nothing = {"accuracy": None, "accuracy_standard_error": None, "accuracy_top5": None}
    assert evaluation_rows({**FACTS, **nothing}) == [("images", "1,000"), *COST_ROWS]
    assert evaluation_rows({**FACTS, **nothing, "accuracy": 0.0})[0] == ("top-1, %", "0")


def test_milliseconds_are_readable_at_every_size() -> None:
    """No powers of ten, whatever the model."""
    assert [milliseconds(ms) for ms in (0.04567, 2.4612, 99.94, 487.6, 1063.2)] == [
        "0.0457",
        "2.46",
        "99.9",
        "488",
        "1,063",
    ]


def compared(**changes: Any) -> dict[str, Any]:
    """A comparison of the dense model and one method."""
    perfect = {"agreement": {"healed": 100.0}, "kl": {"healed": 0.0}, "cosine": {"healed": 1.0}}
    dense = {"method": "dense", "accuracy": {"healed": 91.0}, "fidelity": perfect, "std": None, "peak_rss_mb": 700.0,
             "seeds": [], "seconds": {"alone": 0.0, "shared": 0.0}}  # fmt: skip
    mine = {**dense, "method": "mine", "accuracy": {"healed": 88.125}, "peak_rss_mb": 812.4, "seeds": [0],
            "seconds": {"alone": 12.34, "shared": 0.5}, "std": {"accuracy": 0.25, "kl": 0.001}}  # fmt: skip
    facts = {"rows": [dense, mine], "seeds": [0], "memory": {"of": "method", "base_mb": 700.0}, "left_out": {},
             "evaluation": {"images": 500}}  # fmt: skip
    return {**facts, **changes}


def test_a_comparison_has_a_row_a_method() -> None:
    """Deviations where there are some, a mark where a part was found ready; without labels no accuracy."""
    head, dense, mine = comparison_rows(compared())
    assert head == ("method", "top-1, %", "same answer, %", "KL", "cosine", "seconds", "memory, MB")
    assert dense == ("dense", "91.00", "100.00", "0.0000", "1.0000", "–", "–")
    assert mine == ("mine", "88.12 ± 0.25", "100.00", "0.0000 ± 0.0010", "1.0000", "12.3 *", "812")
    rows = [{**row, "accuracy": {"healed": None}} for row in compared()["rows"]]
    assert [row[1] for row in comparison_rows(compared(rows=rows))] == ["same answer, %", "100.00", "100.00"]


def test_a_comparison_says_what_its_figures_mean() -> None:
    """Seeds, what `*` is, whose the memory is, who was left out and why."""
    text = "\n".join(comparison_notes(compared(seeds=[0, 1], left_out={"ce": "it needs labels"})))
    for words in (
        "500 images; over 2 seeds",
        "`seconds.shared`",
        "700 MB were there",
        "Left out: `ce`: it needs labels.",
    ):
        assert words in text
    process = comparison_notes(compared(memory={"of": "process", "base_mb": None}))
    assert "cannot tell methods apart" in process[-1]


def test_a_table_in_markdown() -> None:
    assert markdown([("", "a"), ("b", "1")]) == ["|  | a |", "|---|---|", "| b | 1 |"]
