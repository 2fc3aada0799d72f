"""The box at a run's end."""

from pathlib import Path
from typing import Any

import pytest

from tests.test_records import record
from zdp_bench.records import Record
from zdp_bench.report.terminal import show_run


def show(**privacy: Any) -> dict[str, str]:
    run = record()
    run["privacy"] |= privacy
    return dict(show_run(Record.of(run), Path("record.json"), was_recorded=False).rows)


@pytest.mark.parametrize(
    ("privacy", "row"),
    [
        ({"unit": "image", "examples_per_patient": 2, "epsilon_patient": 4.4452}, "ε per image"),
        # A record of before the unit was named
        ({"examples_per_patient": 80, "epsilon_patient": 4.4452}, "ε per patient"),
        ({"unit": "patient", "examples_per_patient": 1, "epsilon_patient": 1.0}, None),
        ({"examples_per_patient": 1, "epsilon_of": "person", "epsilon_part": 2.0}, None),
        ({}, None),
    ],
)
def test_the_epsilon_of_a_unit_with_several_records_follows_the_records(
    privacy: dict[str, Any], row: str | None
) -> None:
    rows = show(**privacy)
    assert [name for name in rows if name.startswith("ε per")] == ([row] if row else [])
    if row:
        assert list(rows)[list(rows).index("tight ε") + 1] == row
        many = privacy["examples_per_patient"]
        assert rows[row] == f"4.45  (tight, covers its {many} training examples)"


@pytest.mark.parametrize(
    ("privacy", "protected"),
    [
        ({"unit": "example"}, "an example"),  # the data set states no owners
        ({"unit": "image"}, "an example (each image has one)"),
        ({"unit": "patient", "examples_per_patient": 1}, "an example (each patient has one)"),
        ({"unit": "image", "examples_per_patient": 2, "epsilon_patient": 4.0}, "an example"),
        ({"unit": "person", "epsilon_of": "person", "epsilon_part": 2.0}, "a person"),
        (
            {
                "unit": "recording",
                "epsilon_of": "recording",
                "examples_per_patient": 3,
                "epsilon_patient": 1.0,
            },
            "a recording, with all its examples",
        ),
    ],
)
def test_the_box_always_says_what_epsilon_protects(privacy: dict[str, Any], protected: str) -> None:
    assert show(**privacy)["ε protects"] == protected


def test_validation_examples_are_said_not_to_be_protected() -> None:
    assert "not protected" not in show()
    run = record()
    run["data"]["validation"] = 1200
    rows = dict(show_run(Record.of(run), Path("record.json"), was_recorded=False).rows)
    assert rows["not protected"] == "1,200 validation examples"


@pytest.mark.parametrize(
    ("at_least", "words"),
    [(30.37, "30.3 to 33.3  (PLD"), (33.217, "33.3  (PLD"), (None, "33.3  (PLD")],
)
def test_tight_epsilon_is_an_interval_where_its_law_is_not_exact(
    at_least: float | None, words: str
) -> None:
    shown = show(epsilon_tight=33.217, epsilon_tight_at_least=at_least)
    assert shown["tight ε"].startswith(words)
