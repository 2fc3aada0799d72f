"""`zdp-bench results`: records filtered, sorted, grouped, and in every form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.test_records import record, save
from zdp_bench.errors import UserError
from zdp_bench.report.results import select, sheet


def test_records_are_filtered_sorted_and_shown_in_every_form(tmp_path: Path) -> None:
    save(tmp_path, record("a", 1, 0.25), record("a", 2, 0.75), record("b", 1))
    shown = sheet(select(tmp_path, ["recipe=a"], "recipe,seed,value,epsilon_patient", "value"))
    assert shown.title == "2 records"
    assert shown.rows == [["a", "1", "0.25", ""], ["a", "2", "0.75", ""]]
    assert shown.as_text("csv").splitlines() == [
        "recipe,seed,value,epsilon_patient",
        "a,1,0.25,",
        "a,2,0.75,",
    ]
    assert shown.as_text("md").splitlines()[2] == "| a | 1 | 0.25 |  |"
    lines = json.loads(shown.as_text("json"))
    assert lines[1] == {"recipe": "a", "seed": 2, "value": 0.75, "epsilon_patient": None}
    assert shown.as_rich().row_count == 2
    one = sheet(select(tmp_path, ["recipe=b"], None, None))
    assert one.title == "1 record"
    assert one.rows[0][-1] == "b1".ljust(12, "0")  # digests are shortened
    assert json.loads(one.as_text("json"))[0]["epsilon_tight"] == "inf"


def test_groups_have_count_mean_and_deviation_of_one_metric(tmp_path: Path) -> None:
    save(tmp_path, record("a", 1, 0.5), record("a", 2, 0.7), record("b", 1, 0.9))
    save(
        tmp_path,
        record("a", 3, 30.0, headline={"name": "psnr", "value": 30.0}, metrics={"psnr": 30.0}),
    )
    shown = sheet(select(tmp_path, [], None, None, by="recipe"))
    assert shown.title == "3 groups of 4 records"
    assert shown.rows == [
        ["a", "accuracy", "2", "0.6", "0.1414"],
        ["a", "psnr", "1", "30", ""],
        ["b", "accuracy", "1", "0.9", ""],
    ]
    only = select(tmp_path, ["recipe=b"], "recipe,mean", "mean", by="recipe,delta")
    assert only.to_numpy().tolist() == [["b", 0.9]]


@pytest.mark.parametrize(
    "wrong",
    [{"filters": ["recip=a"]}, {"columns": "recip"}, {"sort": "recip"}, {"by": "recip"}],
)
def test_the_nearest_column_is_suggested(tmp_path: Path, wrong: dict[str, Any]) -> None:
    save(tmp_path, record())
    with pytest.raises(UserError, match="Did you mean 'recipe'"):
        select(tmp_path, **{"filters": [], "columns": None, "sort": None} | wrong)
    with pytest.raises(UserError, match="is no filter"):
        select(tmp_path, ["recipe"], None, None)
