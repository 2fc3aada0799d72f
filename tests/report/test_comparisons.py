"""Sentences that compare rows: DeLong's test seed by seed, Student's t over seeds, Bonferroni."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zdp_bench import records
from zdp_bench.report.comparisons import Family, show_p
from zdp_bench.report.significance import delong

TRUTH = np.arange(200) % 2


def make_run(
    recipe: str, seed: int, value: float, metric: str = "roc_auc", tests: int = 200
) -> dict[str, Any]:
    return {
        "recipe": recipe,
        "run": f"{recipe}{seed}".ljust(64, "0"),
        "seed": seed,
        "metrics": {metric: value},
        "data": {"test": tests},
    }


def write_scores(
    results: Path, run: dict[str, Any], skill: float, truth: np.ndarray = TRUTH
) -> np.ndarray:
    noise = np.random.default_rng([run["seed"], int(100 * skill)]).normal(size=len(truth))
    scores = skill * truth + noise
    folder = records.folder(results, run["recipe"], run["run"])
    records.write_scores(folder / "scores.csv", truth, scores)
    return scores


def test_delong_reports_the_largest_p_of_all_seeds(tmp_path: Path) -> None:
    good, bad = (
        [make_run(name, seed, 0.9 + seed / 100) for seed in (1, 2)] for name in ("good", "bad")
    )
    own = [
        delong(TRUTH, write_scores(tmp_path, a, 2.0), write_scores(tmp_path, b, 0.7)).p
        for a, b in zip(good, bad, strict=True)
    ]
    sentences = Family("roc_auc", {"good": good, "bad": bad}).sentences(tmp_path)
    assert sentences[0] == "good: mean 0.915, range 0.910 to 0.920 over 2 seeds."
    assert sentences[-1] == (
        f"good against bad: different, DeLong p {show_p(max(own))} "
        "(seeds 1, 2; threshold 0.05 for 1 comparison)."
    )


def test_three_rows_make_three_comparisons_at_a_third_of_the_threshold(tmp_path: Path) -> None:
    rows = {name: [make_run(name, 1, 0.8)] for name in ("a", "b", "c")}
    for name, skill in (("a", 1.0), ("b", 1.01), ("c", 1.02)):
        write_scores(tmp_path, rows[name][0], skill)
    sentences = Family("roc_auc", rows).sentences(tmp_path)
    assert len(sentences) == 3
    assert all("threshold 0.0167 for 3 comparisons" in sentence for sentence in sentences)


def test_only_scores_of_the_same_test_examples_are_compared(tmp_path: Path) -> None:
    first, second, unscored = (make_run(name, 1, 0.8) for name in ("a", "b", "c"))
    write_scores(tmp_path, first, 1.0)
    write_scores(tmp_path, second, 1.0, truth=1 - TRUTH)
    for rows in ({"a": [first], "b": [second]}, {"a": [first], "c": [unscored]}, {"a": [first]}):
        assert Family("roc_auc", rows).sentences(tmp_path) == []


@pytest.mark.parametrize("truth", [np.array([1]), np.array([0, 1, 1]), np.ones(5, dtype=int)])
def test_a_test_part_without_two_of_each_class_is_not_compared(
    truth: np.ndarray, tmp_path: Path
) -> None:
    rows = {
        name: [make_run(name, seed, float("nan"), tests=len(truth)) for seed in (1, 2)]
        for name in ("a", "b")
    }
    for run in (*rows["a"], *rows["b"]):
        write_scores(tmp_path, run, 1.0, truth=truth)
    assert Family("roc_auc", rows).sentences(tmp_path) == []


def test_other_metrics_are_compared_over_seeds(tmp_path: Path) -> None:
    first, second = (
        [make_run(name, seed, base + seed / 100, "dice") for seed in (1, 2, 3)]
        for name, base in (("a", 0.9), ("b", 0.5))
    )
    sentences = Family("dice", {"a": first, "b": second}).sentences(tmp_path)
    assert sentences[-1].startswith("a against b: different, Student's t p < 0.001")
    assert Family("dice", {"a": first[:1], "b": second[:1]}).sentences(tmp_path) == []


@pytest.mark.parametrize("count", [1, 5])
def test_a_large_family_is_not_compared(count: int, tmp_path: Path) -> None:
    rows = {str(n): [make_run(str(n), seed, 0.5, "dice") for seed in (1, 2)] for n in range(count)}
    assert Family("dice", rows).sentences(tmp_path) == []


def test_scores_are_read_back_as_written(tmp_path: Path) -> None:
    scores = write_scores(tmp_path, make_run("a", 1, 0.8), 1.0)
    read = records.read_scores(records.folder(tmp_path, "a", "a1".ljust(64, "0")) / "scores.csv")
    assert read is not None
    np.testing.assert_array_equal(read[0], TRUTH)
    np.testing.assert_allclose(read[1], scores, rtol=1e-6)
