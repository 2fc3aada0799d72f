"""The box at a run's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.test_records import record
from zdp_bench.report.summary import as_rich


def show(**privacy: Any) -> dict[str, str]:
    one = record()
    one["privacy"] |= privacy
    table = as_rich(one, Path("record.json"), found=False)
    return dict(zip(*(map(str, column.cells) for column in table.columns), strict=True))


@pytest.mark.parametrize(
    ("privacy", "row"),
    [
        ({"unit": "image", "records_per_patient": 2, "epsilon_patient": 4.4452}, "ε of an image"),
        (
            {"records_per_patient": 80, "epsilon_patient": 4.4452},
            "ε of a patient",
        ),  # before records named their unit
    ],
)
def test_the_epsilon_of_a_unit_stands_below_the_records(privacy: dict[str, Any], row: str) -> None:
    rows = list(show(**privacy).items())
    place = [name for name, _ in rows].index("tight ε")
    assert rows[place + 1] == (
        row,
        f"4.45  (tight, of its {privacy['records_per_patient']} training records together)",
    )


@pytest.mark.parametrize(
    "privacy", [{}, {"unit": "patient", "records_per_patient": 1, "epsilon_patient": 1.0}]
)
def test_a_record_that_is_a_unit_has_one_epsilon(privacy: dict[str, Any]) -> None:
    assert not [name for name in show(**privacy) if name.startswith("ε of")]


def test_tight_epsilon_is_an_interval_where_its_law_is_not_exact() -> None:
    for at_least, words in (
        (30.37, "30.4 to 33.2  (PLD"),
        (33.217, "33.2  (PLD"),
        (None, "33.2  (PLD"),
    ):
        assert show(epsilon_tight=33.217, epsilon_tight_at_least=at_least)["tight ε"].startswith(
            words
        )
