"""Tables of our own where runs are missing; `test_tables.py` holds the committed ones."""

import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.tasks.plugin import register_task
from tests.test_records import record, save
from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.report import grids
from zdp_bench.report.cells import Filling


def filling(
    name: str,
    row: str = "Fashion-MNIST",
    variant: str | None = None,
    target: float = 3.0,
    seed: int = 1,
) -> Filling:
    digest = name.ljust(64, "e")
    return Filling(name, (), row, variant, digest, target_epsilon=target, seed=seed)


def run(name: str, value: float) -> dict[str, Any]:
    made: dict[str, Any] = record(name, 1, value)
    made["privacy"] |= {"epsilon_tight": 3.0, "epsilon_of": "patient"}
    return made


def test_a_run_of_other_settings_or_without_its_open_twin_is_shown_as_what_it_is(
    tmp_path: Path,
) -> None:
    save(tmp_path, run("private", 0.8), run("stranger", 0.99))
    (line,) = grids.build("cost", tmp_path, [filling("private")]).numbers
    assert (line["values"], line["retained_gain"]) == ("0.8", None)


def test_a_row_states_how_many_owners_its_private_runs_train_on(tmp_path: Path) -> None:
    private, other = run("private", 0.8), run("other", 0.7)
    private["privacy"]["sampling"]["records"] = 1947
    other["privacy"]["sampling"]["records"] = 90
    other["privacy"]["epsilon_tight"] = 1.0
    save(tmp_path, private, other)
    sheet = grids.build("cost", tmp_path, [filling("private"), filling("other", target=1.0)])
    assert sheet.rows[0][sheet.columns.index("n")] == "90 or 1,947"
    assert {line["num_units"] for line in sheet.numbers} == {"90 1947"}
    assert {line["num_seeds"] for line in sheet.numbers} == {1}


@pytest.mark.parametrize(
    ("row", "cited"),
    [
        ("Fashion-MNIST", "89.7 % at ε = 3 [1]"),
        ("Chest films", "0.882 at ε = 2.81 per film [4]"),
        ("Skin lesions", "none known"),
    ],
)
def test_a_published_result_names_its_unit_or_that_none_is_known(
    tmp_path: Path, row: str, cited: str
) -> None:
    save(tmp_path, run("private", 0.8))
    sheet = grids.build("cost", tmp_path, [filling("private", row)])
    assert sheet.rows[0][sheet.columns.index("others")] == cited


def test_the_epsilon_of_one_example_names_a_row_once_whatever_its_variants(
    tmp_path: Path,
) -> None:
    variants = ("magnitude", "channels", "complex")
    for variant in variants:
        made = run(variant, 0.8)
        made["privacy"] |= {"examples_per_patient": 40}
        save(tmp_path, made)
    fillings = [filling(variant, "Spoken words", variant) for variant in variants]
    notes = grids.build("complex", tmp_path, fillings).notes
    (stated,) = [note for note in notes if note.startswith("A single example of an owner")]
    assert stated.count("Spoken words") == 1


def test_an_empty_table_of_ours_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="zdp-bench reproduce cost"):
        grids.build("cost", tmp_path, [filling("private")])


def run_of_error(name: str, seed: int, value: float) -> dict[str, Any]:
    made = run(name, value)
    made |= {"seed": seed, "run": f"{name}{seed}".ljust(64, "0")}
    made |= {"headline": {"name": "mae", "value": value}, "metrics": {"mae": value}}
    return made


def test_a_variant_with_smaller_errors_is_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_task(monkeypatch)
    errors = {"complex": (1.0, 1.1), "channels": (2.01, 2.1)}
    for name, values in errors.items():
        runs = [run_of_error(name, seed, value) for seed, value in enumerate(values)]
        save(tmp_path, *runs)
    fillings = [filling(name, "PhaseMNIST", name) for name in errors]
    grid = grids.build("complex", tmp_path, fillings)
    assert any("complex is better in 1, worse in 0" in note for note in grid.notes)
    assert grid.rows[0][-1] == "2.1 ± 0.1 digits", "channels"
    assert "mean error" in grid.rows[0]


def test_the_threshold_of_forty_comparisons_is_stated_with_the_digits_of_p() -> None:
    names = ["complex", *(f"other {number}" for number in range(10))]
    runs = [Mock(seed=seed) for seed in (1, 2)]
    for result in runs:
        result.headline = Mock(value=0.5)
        result.headline.name = "accuracy"
    of_targets = dict.fromkeys((1.0, 2.0, 3.0, 8.0), runs)
    lines = [grids.GridLine("row", name, None, of_targets) for name in names]
    head = grids.compare_variants(lines, "complex")[0]
    assert head.startswith("Of 40 comparisons, complex is better in 0, worse in 0")
    assert "threshold of p 0.00125 (Bonferroni)" in head


def test_the_share_kept_of_an_error_is_of_what_it_fell_below_the_floor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_task(monkeypatch)
    open_run = run_of_error("open", 1, 0.1)
    open_run["privacy"]["epsilon_tight"] = math.inf
    save(tmp_path, open_run, run_of_error("private", 1, 0.2))
    fillings = [filling("open", "Chest films", target=math.inf), filling("private", "Chest films")]
    lines = grids.build("cost", tmp_path, fillings).numbers
    assert [line["retained_gain"] for line in lines] == [0.75, 1.0]


def save_folds(results: Path, seeds_without_hard_fold: tuple[int, ...]) -> list[Filling]:
    """Save an easy and a hard fold of two seeds, and return the jobs."""
    for seed in (1, 2):
        for fold, value in (("easy", 0.9), ("hard", 0.5)):
            if fold == "easy" or seed not in seeds_without_hard_fold:
                save(results, run(fold, value) | {"seed": seed, "run": f"{fold}{seed}".ljust(64)})
    return [filling("easy", "ECG"), filling("hard", "ECG")]


@pytest.mark.parametrize(
    ("missing", "values", "seeds"), [((), "0.7 0.7", "1 2"), ((2,), "0.7", "1")]
)
def test_a_seed_without_its_hardest_fold_is_left_out_and_named(
    tmp_path: Path, missing: tuple[int, ...], values: str, seeds: str
) -> None:
    sheet = grids.build("cost", tmp_path, save_folds(tmp_path, missing))
    (line,) = sheet.numbers
    assert (line["values"], line["seeds"]) == (values, seeds)
    assert sheet.rows[0][sheet.columns.index("runs")] == str(len(line["runs"].split()))
    notes = [note for note in sheet.notes if note.startswith("Left out")]
    assert [note.rpartition(": ")[0] for note in notes] == [
        "Left out, because not all folds have finished: ECG, ε = 3"
    ] * len(missing)


def test_a_fold_that_every_seed_lacks_leaves_all_of_them_out(tmp_path: Path) -> None:
    fillings = save_folds(tmp_path, (1, 2))
    with pytest.raises(UserError, match=r"has no seed with all folds .* for table cost\. Left out"):
        grids.build("cost", tmp_path, fillings)
    save(tmp_path, run("private", 0.8))
    sheet = grids.build("cost", tmp_path, [filling("private"), *fillings])
    assert [line["row"] for line in sheet.numbers] == ["Fashion-MNIST"]
    (note,) = [note for note in sheet.notes if note.startswith("Left out")]
    assert note.endswith("not all folds have finished: ECG, ε = 3: seed 1, 2.")


def test_a_seed_whose_epsilon_exceeds_the_target_is_left_out_and_named(tmp_path: Path) -> None:
    """A run that took steps again after a stop counted them, but stood at its target ε."""
    for seed, epsilon in ((1, 2.9), (2, 3.1), (3, 2.95)):
        made = run("private", seed / 10) | {"seed": seed, "run": f"private{seed}".ljust(64)}
        made["privacy"] |= {"epsilon_tight": epsilon, "epsilon_patient": 2 * epsilon}
        save(tmp_path, made)
    sheet = grids.build("cost", tmp_path, [filling("private")])
    (line,) = sheet.numbers
    assert (line["seeds"], line["values"], line["num_seeds"]) == ("1 3", "0.1 0.3", 2)
    assert (line["epsilon_tight"], line["epsilon_of_owner"]) == ("2.95", "5.9"), "the largest"
    (note,) = [note for note in sheet.notes if note.startswith("Left out")]
    assert note.endswith("the tight ε exceeds the target: Fashion-MNIST, ε = 3: seed 2.")


def test_a_fold_whose_epsilon_exceeds_the_target_leaves_its_seed_out(tmp_path: Path) -> None:
    fillings = save_folds(tmp_path, ())
    spent = run("hard", 0.5) | {"seed": 2, "run": "hard2".ljust(64)}
    spent["privacy"] |= {"epsilon_tight": 3.1}
    save(tmp_path, spent)
    sheet = grids.build("cost", tmp_path, fillings)
    assert [line["seeds"] for line in sheet.numbers] == ["1"]
    (note,) = [note for note in sheet.notes if note.startswith("Left out")]
    assert note.endswith("the tight ε exceeds the target: ECG, ε = 3: seed 2.")


def test_a_private_run_without_a_target_is_not_non_private(tmp_path: Path) -> None:
    """It stood in the column of training without privacy."""
    open_run = run("open", 0.9) | {"seed": 2, "run": "open2".ljust(64)}
    open_run["privacy"]["epsilon_tight"] = math.inf
    save(tmp_path, run("open", 0.8), open_run)
    sheet = grids.build("cost", tmp_path, [filling("open", target=math.inf)])
    (line,) = sheet.numbers
    assert (line["seeds"], line["values"]) == ("2", "0.9")
    (note,) = [note for note in sheet.notes if note.startswith("Left out")]
    assert note == "Left out, because they are private without a target ε: Fashion-MNIST: seed 1."
    save(tmp_path / "other", run("open", 0.8))
    with pytest.raises(UserError, match="private without a target ε: Fashion-MNIST: seed 1"):
        grids.build("cost", tmp_path / "other", [filling("open", target=math.inf)])


def test_of_two_runs_of_a_seed_the_last_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second counted as a fold, which left out every other seed as unfinished."""
    records.warn_left_out.cache_clear()
    for seed, start, value in ((1, "01", 0.5), (1, "02", 0.8), (2, "01", 0.9)):
        made = run("private", value) | {"seed": seed, "run": f"{start}{seed}".ljust(64, "0")}
        save(tmp_path, made | {"measured": {"started_utc": f"2026-01-{start}T00:00:00Z"}})
    sheet = grids.build("cost", tmp_path, [filling("private")])
    (line,) = sheet.numbers
    assert (line["values"], line["seeds"]) == ("0.8 0.9", "1 2")
    assert not any(note.startswith("Left out") for note in sheet.notes)
    assert "run 0110000000000000 of recipe private, because a later" in capsys.readouterr().err


def test_jobs_with_a_seed_each_are_repetitions_and_no_folds(tmp_path: Path) -> None:
    save(tmp_path, run("split1", 0.9), run("split2", 0.5) | {"seed": 2})
    fillings = [filling(f"split{seed}", "ECG", seed=seed) for seed in (1, 2, 3)]
    (line,) = grids.build("cost", tmp_path, fillings).numbers
    assert (line["values"], line["seeds"]) == ("0.9 0.5", "1 2")


def test_a_variant_is_compared_over_the_seeds_that_both_have(tmp_path: Path) -> None:
    save(tmp_path, run("complex", 0.8), run("channels", 0.7))
    fillings = [filling(name, "PhaseMNIST", name) for name in ("complex", "channels")]
    grid = grids.build("complex", tmp_path, fillings)
    assert not any("complex −" in note for note in grid.notes)
