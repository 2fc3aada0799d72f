"""`zdp-bench results --by`: repetitions as one line, and never a mean over different metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_records import record, save
from zdp_bench.errors import UserError
from zdp_bench.report.results import as_rich, as_text, select


def test_groups_have_count_mean_and_deviation(tmp_path: Path) -> None:
    save(tmp_path, record("a", 1, 0.5), record("a", 2, 0.7), record("b", 1, 0.9))
    save(tmp_path, record("a", 3, 30.0, headline={"name": "psnr", "value": 30.0}))
    frame = select(tmp_path, [], None, None, by="recipe")
    assert frame[["recipe", "metric", "n"]].values.tolist() == [
        ["a", "accuracy", 2],
        ["a", "psnr", 1],
        ["b", "accuracy", 1],
    ]
    assert frame["mean"].tolist() == [pytest.approx(0.6), 30.0, 0.9]
    assert frame["deviation"].iloc[0] == pytest.approx(0.1414, abs=1e-4)
    assert frame["deviation"].isna().tolist() == [False, True, True]
    assert as_text(frame, "md").splitlines()[2] == "| a | accuracy | 2 | 0.6 | 0.1414 |"
    assert as_rich(frame).title == "3 groups of 4 records"
    assert as_rich(select(tmp_path, ["recipe=b"], None, None)).title == "1 record"
    only = select(tmp_path, ["recipe=b"], "recipe,mean", "mean", by="recipe,delta")
    assert only.values.tolist() == [["b", 0.9]]


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'recipe'"):
        select(tmp_path, [], None, None, by="recip")
