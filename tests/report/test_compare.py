"""`zdp-bench compare`: what differs between two runs, side by side, and the test that fits."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.test_records import record, save, typed
from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.report import compare
from zdp_bench.report.compare import find_runs
from zdp_bench.report.comparisons import compare_pairs
from zdp_bench.report.sheet import Sheet


def run(recipe: str, seed: int, value: float, metric: str = "accuracy", **config: Any) -> Any:
    made = record(recipe, seed, value, config=config)
    made["data"] |= {"test": 40}
    headline = {"headline": {"name": metric, "value": value}, "metrics": {metric: value}}
    return made | headline


def sheet(first: list[Any], second: list[Any], results: Path) -> Sheet:
    return compare.sheet(typed(first), typed(second), results)


def rows_of(first: list[Any], second: list[Any], results: Path) -> dict[str, list[str]]:
    return {row[0]: list(row[1:]) for row in sheet(first, second, results).rows}


def test_differences_metrics_and_epsilon_are_shown_side_by_side(tmp_path: Path) -> None:
    first = run("a", 1, 0.5, optimizer={"lr": 0.1, "nesterov": False}, claims={"row": "x"})
    other = run("b", 1, 0.75, optimizer={"lr": 0.2}, claims={"row": "y"})
    other["privacy"] |= {"epsilon_tight": 2.5}
    rows = rows_of([first], [other], tmp_path)
    assert rows["optimizer.lr"] == ["0.1", "0.2"]
    assert rows["tight ε"] == ["∞", "2.5"]
    assert rows["test accuracy"] == ["0.5000", "0.7500"]
    assert not {"optimizer.nesterov", "claims.row"} & set(rows)
    shown = sheet([first], [other], tmp_path)
    assert "No test: accuracy needs two seeds" in shown.notes[0]
    assert shown.numbers[0] == {"what": "seed", "first": "1", "second": "1"}


def test_a_choice_of_false_or_0_differs_from_null(tmp_path: Path) -> None:
    first = run("a", 1, 0.5, optimizer={"fused": None, "momentum": 0.0, "nesterov": None})
    other = run("b", 1, 0.5, optimizer={"fused": False, "momentum": None, "nesterov": None})
    rows = rows_of([first], [other], tmp_path)
    assert rows["optimizer.fused"] == ["", "false"]
    assert rows["optimizer.momentum"] == ["0.0", ""]
    assert "optimizer.nesterov" not in rows


def test_seeds_are_compared_by_students_t_and_other_data_by_nothing(tmp_path: Path) -> None:
    first = [run("a", seed, 0.5 + seed / 100) for seed in (1, 2, 3)]
    second = [run("b", seed, 0.9 + seed / 100) for seed in (1, 2, 3)]
    assert rows_of(first, second, tmp_path)["test accuracy"][0] == "0.5200 ± 0.0100 (n = 3)"
    (note,) = sheet(first, second, tmp_path).notes
    assert "first against second: different, Student's t p < 0.001" in note
    second[0]["data"] |= {"digest": "other"}
    assert "no test compares" in sheet(first, second, tmp_path).notes[0]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_values_that_are_not_finite_are_compared_by_nothing(tmp_path: Path, value: float) -> None:
    first = [run("a", seed, value, "psnr") for seed in (1, 2)]
    second = [run("b", seed, 30.0 + seed, "psnr") for seed in (1, 2)]
    assert rows_of(first, second, tmp_path)["test psnr"][1] == "31.5000 ± 0.7071 (n = 2)"
    assert sheet(first, second, tmp_path).notes == ["No test: a value of psnr is not finite."]
    for runs in (first, second):
        sides = {"first": typed(first), "second": typed(runs)}
        assert not any("against" in note for note in compare_pairs("psnr", sides, tmp_path))


def test_roc_aucs_of_one_test_set_are_compared_by_delong(tmp_path: Path) -> None:
    first, second = run("a", 1, 0.9, "roc_auc"), run("b", 1, 0.5, "roc_auc")
    lacking = "No test: roc_auc needs a seed that both sides have"
    assert lacking in sheet([first], [second], tmp_path).notes[0]
    truth, draw = np.arange(40) % 2, np.random.default_rng(0)
    for of, scores in ((first, truth + 0.1 * draw.random(40)), (second, draw.random(40))):
        home = records.folder(tmp_path, of["recipe"], of["run"])
        records.write_scores(home / "scores.csv", truth, scores)
    assert "different, DeLong p < 0.001 (seeds 1" in sheet([first], [second], tmp_path).notes[0]


def test_a_run_is_named_by_recipe_digest_or_filter(tmp_path: Path) -> None:
    documents = [run("a", 1, 0.5), run("a", 2, 0.5), run("ab", 7, 0.5)]
    save(tmp_path, *documents)
    every = typed(documents)
    assert find_runs("a", every) == every[:2]
    assert find_runs("a/a2", every) == [every[1]]
    assert find_runs("ab70", every) == [every[2]]
    assert find_runs("recipe=a seed=2,7", every) == [every[1]]
    with pytest.raises(UserError, match="does not match any run"):
        find_runs("c", every)
    documents[1]["experiment"] = "other"
    every = typed(documents)
    with pytest.raises(UserError, match=r"2 runs .* seed"):
        find_runs("a", every)


def test_runs_on_different_data_are_no_seeds_of_one_experiment() -> None:
    documents = [run("a", 1, 0.5), run("a", 2, 0.5)]
    documents[1]["data"] |= {"digest": "e" * 64}
    with pytest.raises(UserError, match=r"2 runs that differ .*data_digest dddddddd"):
        find_runs("a", typed(documents))


def test_two_runs_of_one_seed_are_no_seeds_of_one_experiment() -> None:
    """Their plug-ins had other code, or their starting weights were others."""
    documents = [run("a", 1, 0.5), run("a", 1, 0.9) | {"run": "f" * 64}]
    with pytest.raises(UserError, match="2 runs that differ in more than their seed"):
        find_runs("a", typed(documents))


@pytest.mark.parametrize(
    ("word", "recipe"),
    [("recipe=b", "b"), ("recipe=a seed=1", "a"), ("seed=1", "a"), ("a100", "a"), ("mine", "a")],
)
def test_a_run_that_two_recipes_share_counts_once(word: str, recipe: str) -> None:
    shared = run("a", 1, 0.5) | {"labels": {"name": "mine"}}
    every = typed([shared, run("a", 2, 0.5), shared | {"recipe": "b"}])
    assert [run.recipe for run in find_runs(word, every)] == [recipe]


@pytest.mark.parametrize(
    "word", ["name=first run", "name=first run seed=1", "seed=1  name=first run"]
)
def test_the_value_of_a_filter_may_contain_spaces(word: str) -> None:
    first, second = run("a", 1, 0.5), run("a", 2, 0.5)
    every = typed([first | {"labels": {"name": "first run"}}, second])
    assert find_runs(word, every) == every[:1]
