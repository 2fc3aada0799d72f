"""The tests of significance, and the sentences that say which rows differ."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.test_records import record, typed
from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.report import comparisons
from zdp_bench.report.comparisons import (
    Paired,
    bonferroni,
    delong,
    paired_t,
    show_p,
    show_threshold,
    students_t,
)

TRUTH = np.arange(200) % 2


def make_run(name: str, seed: int, value: float, metric: str = "roc_auc", tests: int = 200) -> Any:
    made = record(name, seed, metrics={metric: value})
    made["data"]["test"] = tests
    return made


def compare_pairs(metric: str, rows: dict[str, list[Any]], results: Path) -> list[str]:
    runs = {name: typed(documents) for name, documents in rows.items()}
    return comparisons.compare_pairs(metric, runs, results)


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
    sentences = compare_pairs("roc_auc", {"good": good, "bad": bad}, tmp_path)
    assert sentences[0] == "good: mean 0.915, range 0.910 to 0.920 over 2 seeds."
    assert sentences[-1] == (
        f"good against bad: different, DeLong p {show_p(max(own))} "
        "(seeds 1, 2; threshold 0.05 for 1 comparison)."
    )


def test_three_rows_make_three_comparisons_at_a_third_of_the_threshold(tmp_path: Path) -> None:
    rows = {name: [make_run(name, 1, 0.8)] for name in ("a", "b", "c")}
    for name, skill in (("a", 1.0), ("b", 1.01), ("c", 1.02)):
        write_scores(tmp_path, rows[name][0], skill)
    sentences = compare_pairs("roc_auc", rows, tmp_path)
    assert len(sentences) == 3
    assert all("threshold 0.0167 for 3 comparisons" in sentence for sentence in sentences)


DAMAGED_SCORES = [
    "",
    "truth,score\n",
    "x\n1,2,3\n",
    "x\n1,y\n",
    "x\nnan,1\n",
    "x\n1,0.5\n",
    "\x00" * 9,
]


@pytest.mark.parametrize("text", DAMAGED_SCORES)
@pytest.mark.filterwarnings("error")
def test_damaged_scores_are_one_sentence_and_never_fewer(tmp_path: Path, text: str) -> None:
    good, bad = (make_run(name, 1, 0.9) for name in ("good", "bad"))
    for run in (good, bad):
        write_scores(tmp_path, run, 1.0)
    path = records.folder(tmp_path, "bad", bad["run"]) / "scores.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=r"scores\.csv.* damaged"):
        compare_pairs("roc_auc", {"good": [good], "bad": [bad]}, tmp_path)


def test_only_scores_of_the_same_test_examples_are_compared(tmp_path: Path) -> None:
    first, second, unscored = (make_run(name, 1, 0.8) for name in ("a", "b", "c"))
    write_scores(tmp_path, first, 1.0)
    write_scores(tmp_path, second, 1.0, truth=1 - TRUTH)
    for rows in ({"a": [first], "b": [second]}, {"a": [first], "c": [unscored]}, {"a": [first]}):
        assert compare_pairs("roc_auc", rows, tmp_path) == []


def test_scores_of_other_numbers_of_examples_are_not_compared(tmp_path: Path) -> None:
    """Records of earlier versions do not state how many examples they tested."""
    first, shorter = (make_run(name, 1, 0.8) for name in ("a", "b"))
    for run, truth in ((first, TRUTH), (shorter, TRUTH[:-2])):
        run["data"]["test"] = None
        write_scores(tmp_path, run, 1.0, truth=truth)
    assert compare_pairs("roc_auc", {"a": [first], "b": [shorter]}, tmp_path) == []


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
    assert compare_pairs("roc_auc", rows, tmp_path) == []


def test_other_metrics_are_compared_over_seeds(tmp_path: Path) -> None:
    first, second = (
        [make_run(name, seed, base + seed / 100, "dice") for seed in (1, 2, 3)]
        for name, base in (("a", 0.9), ("b", 0.5))
    )
    sentences = compare_pairs("dice", {"a": first, "b": second}, tmp_path)
    assert sentences[-1].startswith("a against b: different, Student's t p < 0.001")
    assert compare_pairs("dice", {"a": first[:1], "b": second[:1]}, tmp_path) == []


@pytest.mark.parametrize("count", [1, 5])
def test_a_large_family_is_not_compared(count: int, tmp_path: Path) -> None:
    rows = {str(n): [make_run(str(n), seed, 0.5, "dice") for seed in (1, 2)] for n in range(count)}
    assert compare_pairs("dice", rows, tmp_path) == []


# Albumin, total protein, K-G score and outcome of 43 patients with ovarian cancer: DeLong et al.
# 1988, as the SAS/STAT manual prints them (PROC LOGISTIC, example "Comparing Receiver Operating
# Characteristic Curves").
TABLE = """\
3.0 5.8 10 0   3.2 6.3 5 1   3.9 6.8 3 1   2.8 4.8 6 0   3.2 5.8 3 1   0.9 4.0 5 0   2.5 5.7 8 0
1.6 5.6 5 1   3.8 5.7 5 1   3.7 6.7 6 1   3.2 5.4 4 1   3.8 6.6 6 1   4.1 6.6 5 1   3.6 5.7 5 1
4.3 7.0 4 1   3.6 6.7 4 0   2.3 4.4 6 1   4.2 7.6 4 0   4.0 6.6 6 0   3.5 5.8 6 1   3.8 6.8 7 1
3.0 4.7 8 0   4.5 7.4 5 1   3.7 7.4 5 1   3.1 6.6 6 1   4.1 8.2 6 1   4.3 7.0 5 1   4.3 6.5 4 1
3.2 5.1 5 1   2.6 4.7 6 1   3.3 6.8 6 0   1.7 4.0 7 0   3.7 6.1 5 1   3.3 6.3 7 1   4.2 7.7 6 1
3.5 6.2 5 1   2.9 5.7 9 0   2.1 4.8 7 1   2.8 6.2 8 0   4.0 7.0 7 1   3.3 5.7 6 1   3.7 6.9 5 1
3.6 6.6 5 1
"""
ALBUMIN, PROTEIN, SCORE, GOOD = np.fromstring(TABLE, sep=" ").reshape(43, 4).T
SCORE = 10 - SCORE


def test_delong_gives_the_printed_numbers() -> None:
    protein, albumin = delong(GOOD, PROTEIN, SCORE), delong(GOOD, ALBUMIN, SCORE)
    assert protein.areas == pytest.approx((0.6478, 0.7258), abs=5e-5)
    assert protein.errors == pytest.approx((0.1000, 0.1028), abs=5e-5)
    assert (protein.error, protein.z**2, protein.p) == pytest.approx(
        (0.1046, 0.5554, 0.4561), abs=5e-5
    )
    assert delong(GOOD, SCORE, PROTEIN).z == pytest.approx(-protein.z)
    assert (albumin.areas[0], albumin.errors[0], albumin.p) == pytest.approx(
        (0.7366, 0.0927, 0.9102), abs=5e-5
    )


def test_the_same_and_the_perfect_do_not_differ() -> None:
    truth, scores = np.array([0, 0, 1, 1, 0, 1]), np.array([0.1, 0.6, 0.4, 0.9, 0.2, 0.8])
    assert (delong(truth, scores, scores).z, delong(truth, scores, scores).p) == (0.0, 1.0)
    assert delong(truth, truth * 1.0, truth * 2.0).p == 1.0
    with pytest.raises(UserError, match="two examples of each class"):
        delong(np.array([0, 0, 1]), scores[:3], scores[:3])
    with pytest.raises(UserError, match="both need a score"):
        delong(truth, scores, scores[:3])


def test_students_t_and_bonferroni() -> None:
    """By hand: means 2 and 5, pooled variance 1, t = −3/√(2/3) on 4 degrees of freedom."""
    assert students_t([1, 2, 3], [4, 5, 6]) == pytest.approx(0.02131, abs=1e-5)
    assert math.isnan(students_t([1], [2, 3]))
    assert students_t([2, 2], [2, 2]) == 1.0
    assert students_t([0.1 + 0.2, 0.3], [0.3, 0.3]) == 1.0
    assert bonferroni(3) == pytest.approx(0.0167, abs=1e-4)


@pytest.mark.parametrize("comparisons", range(1, 51))
def test_a_p_at_its_threshold_is_not_shown_below_it(comparisons: int) -> None:
    """Where 0.05/40 was printed as 0.0013, a p of 0.00127 was not below it, but looked so."""
    threshold = bonferroni(comparisons)
    for p in np.linspace(threshold, 1.1 * threshold, 20):
        assert float(show_p(p).removeprefix("= ")) >= float(show_threshold(threshold))


@pytest.mark.parametrize(
    "test",
    [
        lambda: delong(np.array([0, 0, 1, 1]), np.array([0, 0, 1, 1]), np.array([1, 1, 0, 0])).p,
        lambda: delong(np.array([0, 0, 1, 1]), np.array([0, 0, 1, 1]), np.zeros(4)).z,
        lambda: students_t([2, 2], [3, 3]),
        lambda: students_t([0.1 + 0.2, 0.3], [0.4, 0.4]),
        lambda: students_t(np.float32([0.7, 0.7]).tolist(), [0.4, 0.4]),
        lambda: paired_t([2, 3], [1, 2]).p,
        lambda: paired_t([0.9, 0.8, 0.7], [0.8, 0.7, 0.6]).p,
        lambda: paired_t(np.float32([0.9, 0.8]).tolist(), np.float32([0.8, 0.7]).tolist()).p,
    ],
)
def test_what_differs_without_a_variance_cannot_be_tested(test: Callable[[], float]) -> None:
    """Two examples of each class gave z = ∞ and p = 0; rounding errors gave p = 1e-31."""
    assert math.isnan(test())


@pytest.mark.parametrize("metric", ["roc_auc", "dice"])
def test_a_row_that_cannot_be_tested_says_so(metric: str, tmp_path: Path) -> None:
    truth = np.array([0, 0, 1, 1])
    rows = {
        name: [make_run(name, seed, value, metric, tests=4) for seed in (1, 2)]
        for name, value in (("a", 1.0), ("b", 0.0))
    }
    for run in (*rows["a"], *rows["b"]):
        folder = records.folder(tmp_path, run["recipe"], run["run"])
        turned = truth if run["metrics"][metric] else 1 - truth
        records.write_scores(folder / "scores.csv", truth, turned.astype(float))
    assert compare_pairs(metric, rows, tmp_path)[-1] == (
        "a against b: cannot be tested, because the values differ but have no "
        "variance (seeds 1, 2). "
        "Use more seeds or test examples."
    )
    assert show_p(math.nan) == "= NaN (no variance)"


@pytest.mark.parametrize("infinite", [math.nan, math.inf])
def test_values_that_are_not_finite_are_not_said_to_be_equal(infinite: float) -> None:
    """p was 1: the least and largest of 0.5 and NaN are 0.5, and a part of infinity is infinity."""
    values, finite = [0.5, infinite], [0.5, 0.5]
    assert math.isnan(students_t(values, finite))
    assert math.isnan(students_t(finite, values))
    for pairs in (paired_t(values, finite), paired_t(finite, values)):
        assert pairs is not None
        assert math.isnan(pairs.p)


def test_paired_t() -> None:
    """By hand: differences of mean 2 and deviation 1, t = 2√3 on 2 degrees of freedom."""
    test = paired_t([4, 4, 4], [3, 2, 1])
    assert test is not None
    assert (test.mean_difference, test.p) == (2, pytest.approx(0.0742, abs=1e-4))
    assert (test.low, test.high) == (
        pytest.approx(-0.4841, abs=1e-4),
        pytest.approx(4.4841, abs=1e-4),
    )
    assert paired_t([2, 3], [2, 3]) == Paired(0, 0, 0, 1.0)
    assert paired_t([0.1 + 0.2, 0.3], [0.3, 0.3]) == Paired(0, 0, 0, 1.0)
    assert paired_t([1], [2]) is None
