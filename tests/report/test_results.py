"""`zdp-bench results`: records filtered, sorted, grouped, and in every form."""

import io
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from tests.test_records import record, save, typed
from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.report.compare import find_runs
from zdp_bench.report.compare import sheet as compare_runs
from zdp_bench.report.results import sheet, tell_differences


def rows(results: Path, *filters: str, columns: str | None = None, **options: Any) -> list[Any]:
    return [list(row) for row in sheet(results, filters, columns, **options).rows]


def test_records_are_filtered_sorted_and_shown_in_every_form(tmp_path: Path) -> None:
    save(tmp_path, record("a", 1, 0.25), record("a", 2, 0.75), record("b", 1))
    shown = sheet(tmp_path, ["recipe=a"], "recipe,seed,accuracy,epsilon_patient", "accuracy")
    assert shown.title == "2 records"
    assert shown.rows == [["a", "1", "0.25", ""], ["a", "2", "0.75", ""]]
    assert shown.as_text("csv").splitlines() == [
        "recipe,seed,accuracy,epsilon_patient",
        "a,1,0.25,",
        "a,2,0.75,",
    ]
    assert shown.as_text("md").splitlines()[2] == "| a | 1 | 0.25 |  |"
    lines = json.loads(shown.as_text("json"))
    assert lines[1] == {"recipe": "a", "seed": 2, "accuracy": 0.75, "epsilon_patient": None}
    assert shown.as_rich().row_count == 2
    of_recipe = sheet(tmp_path, ["recipe=b"])
    assert of_recipe.title == "1 record"
    assert of_recipe.rows[0][-1] == "b1".ljust(8, "0")  # digests are shortened
    assert json.loads(of_recipe.as_text("json"))[0]["epsilon_tight"] == "inf"
    several = rows(tmp_path, "seed=1,3", columns="recipe", sort="value", descending=True)
    assert several == [["b"], ["a"]]


def test_groups_have_count_mean_and_deviation_of_one_metric(tmp_path: Path) -> None:
    save(tmp_path, record("a", 1, 0.5), record("a", 2, 0.7), record("b", 1, 0.9))
    headline = {"name": "psnr", "value": 30.0}
    save(tmp_path, record("a", 3, 30.0, headline=headline, metrics={"psnr": 30.0}))
    shown = sheet(tmp_path, by="recipe")
    assert shown.title == "3 groups of 4 records"
    assert shown.columns == ["recipe", "metric", "n", "value", "value_sd"]
    assert shown.rows == [
        ["a", "accuracy", "2", "0.6", "0.1414"],
        ["a", "psnr", "1", "30", ""],
        ["b", "accuracy", "1", "0.9", ""],
    ]
    repeated = sheet(tmp_path, by="recipe,recipe", columns="value,value")
    assert (repeated.columns, repeated.rows) == (shown.columns, shown.rows)
    columns = "recipe,accuracy,psnr"  # a column of --by may be asked for again
    both = rows(tmp_path, columns=columns, by="recipe", sort="accuracy", descending=True)
    assert both == [["b", "1", "0.9", "", "0", "", ""], ["a", "2", "0.6", "0.1414", "1", "30", ""]]


def test_n_counts_the_runs_behind_a_mean(tmp_path: Path) -> None:
    """It counted all runs of the group, also those without the metric."""
    runs = [record("a", seed, 0.5) for seed in (1, 2, 3)]
    for run in runs[1:]:
        run["metrics"]["dice"] = 0.5
    save(tmp_path, *runs)
    assert rows(tmp_path, columns="dice", by="recipe") == [["a", "2", "0.5", "0"]]
    several = sheet(tmp_path, columns="dice,accuracy", by="recipe")
    counts = dict(zip(several.columns, several.rows[0], strict=True))
    assert (counts["dice_n"], counts["accuracy_n"], "n" in counts) == ("2", "3", False)
    equal = sheet(tmp_path, columns="value,accuracy", by="recipe")
    assert equal.columns == [
        "recipe",
        "metric",
        "n",
        "value",
        "value_sd",
        "accuracy",
        "accuracy_sd",
    ]


def test_a_number_that_a_record_lacks_is_left_out_of_its_groups_mean(tmp_path: Path) -> None:
    """Among numbers, pandas took it for an undefined one, which empties the mean."""
    for seed, seconds in ((1, None), (2, 3.0), (3, 5.0)):
        save(tmp_path, record("a", seed, measured={"train_seconds": seconds}))
    assert rows(tmp_path, columns="train_seconds", by="recipe") == [["a", "2", "4", "1.414"]]


def test_a_metric_with_the_name_of_another_column_is_shown_and_breaks_nothing(
    tmp_path: Path,
) -> None:
    """One such record ended `results`, `report`, `compare` and `export` in a traceback."""
    metrics = {"accuracy": 0.5, "precision": 0.9, "steps": 40.0, "differs": 3.0, "n": 4.0}
    for seed, precision in ((1, "float32"), (2, "float64")):
        config = {"precision": precision}
        save(tmp_path, record("a", seed, config=config, metrics=metrics))
    shown = "precision,metrics.precision,steps,metrics.steps,metrics.differs,metrics.n"
    assert rows(tmp_path, "metrics.precision=0.9", columns=shown, sort="seed") == [
        [precision, "0.9", "7", "40", "3", "4"] for precision in ("float32", "float64")
    ]
    assert rows(tmp_path, columns="differs", sort="seed") == [
        ["precision float32"],
        ["precision float64"],
    ]
    assert len(find_runs("precision=float64", records.read_all(tmp_path))) == 1


def test_a_run_named_nan_is_found(tmp_path: Path) -> None:
    save(tmp_path, record("a", 1, labels={"name": "nan"}), record("a", 2))
    assert rows(tmp_path, "name=nan", "seed=1", columns="seed") == [["1"]]


def test_a_line_break_in_a_cell_does_not_break_a_markdown_table(tmp_path: Path) -> None:
    save(tmp_path, record("a", 1, labels={"notes": "first line\nsecond | line"}))
    assert "first line second \\| line |" in sheet(tmp_path, columns="seed,notes").as_text("md")


def test_a_group_with_an_undefined_value_has_no_mean(tmp_path: Path) -> None:
    save(tmp_path, record("a", 1, 0.5), record("a", 2, math.nan), record("b", 1, 0.9))
    for column in ("value", "accuracy"):
        shown = rows(tmp_path, columns=column, by="recipe")
        assert [row[0] for row in shown] == ["a", "b"]
        assert [row[-2] for row in shown] == ["", "0.9"]


def test_several_runs_of_one_seed_are_stated(tmp_path: Path) -> None:
    """Their plug-ins had other code, or their starting weights were others."""
    save(tmp_path, record("a", 1), record("a", 1, run="f" * 64))
    assert "several runs of one experiment and seed" in sheet(tmp_path, by="recipe").notes[0]
    assert not sheet(tmp_path, by="recipe,run").notes


def fold(number: int, seed: int, dataset: str = "roahd", lr: float = 0.1) -> records.Document:
    config = {"dataset": {"name": dataset, "fold": number}, "optimizer": {"lr": lr}}
    experiment = f"{number}{lr}".ljust(64, "e")
    run = record("ecg", seed, config=config, experiment=experiment, run=f"{seed}{experiment}"[:64])
    run["data"]["name"] = dataset
    return run


def test_a_mean_over_folds_says_which_seeds_lack_some(tmp_path: Path) -> None:
    """It showed the mean of an interrupted sweep, which may be without its hardest fold."""
    save(tmp_path, *(fold(number, seed) for number in range(9) for seed in (1, 2)))
    missing_in_both = (
        "Means lack folds, perhaps the hardest: ecg, seed 1: 9 of 10; ecg, seed 2: 9 of 10."
    )
    assert sheet(tmp_path, by="recipe").notes == [missing_in_both]
    assert sheet(tmp_path, by="seed").notes == [missing_in_both]
    assert sheet(tmp_path, by="dataset.fold").notes == []  # no mean over folds
    assert sheet(tmp_path).notes == []
    save(tmp_path, fold(9, 2))
    assert sheet(tmp_path, by="recipe").notes == [
        missing_in_both.replace("; ecg, seed 2: 9 of 10", "")
    ]
    save(tmp_path, fold(9, 1))
    save(tmp_path, fold(0, 1, lr=0.5))  # one fold of other settings is no cross-validation
    assert sheet(tmp_path, by="recipe").notes == []


@pytest.mark.parametrize("dataset", ["not_installed", "mnist"])
def test_a_seed_lacks_a_fold_that_another_has_if_their_number_is_unknown(
    tmp_path: Path, dataset: str
) -> None:
    save(tmp_path, *(fold(number, seed, dataset) for number in range(3) for seed in (1, 2)))
    assert sheet(tmp_path, by="recipe").notes == []
    save(tmp_path, fold(3, 2, dataset))
    (note,) = sheet(tmp_path, by="recipe").notes
    assert note == "Means lack folds, perhaps the hardest: ecg, seed 1: 3 of 4."


@pytest.mark.filterwarnings("error")
def test_a_repeated_column_is_shown_once(tmp_path: Path) -> None:
    save(tmp_path, record("a", 1))
    assert sheet(tmp_path, columns="seed,recipe,seed").columns == ["seed", "recipe"]


def test_a_group_of_one_experiment_on_different_data_is_stated(tmp_path: Path) -> None:
    """Own data may change under one configuration, and were averaged as seeds are."""
    runs = [record("a", seed, 0.5, config={"dataset": {"name": "folder"}}) for seed in (1, 2)]
    save(tmp_path, *runs)
    assert not sheet(tmp_path, by="recipe").notes
    runs[1]["data"] |= {"digest": "e" * 64}
    save(tmp_path, *runs)
    assert "on different data: add data_digest" in sheet(tmp_path, by="recipe").notes[0]
    assert not sheet(tmp_path, by="recipe,data_digest").notes
    assert rows(tmp_path, columns="differs") == [["data_digest dddddddd"], ["data_digest eeeeeeee"]]
    # Data that differ because a setting does are told by the setting.
    runs[1]["config"] = {"dataset": {"name": "folder", "size": 8}}
    save(tmp_path, *runs)
    assert rows(tmp_path, columns="differs", sort="seed") == [[""], ["size 8"]]


def test_a_run_that_two_recipes_share_counts_once_in_a_group(tmp_path: Path) -> None:
    shared = record("a", 1, 0.5)
    save(tmp_path, shared, shared | {"recipe": "b"}, record("a", 2, 0.7))
    assert rows(tmp_path, by="metric") == [["accuracy", "2", "0.6", "0.1414"]]
    sizes = [row[2] for row in rows(tmp_path, by="recipe")]
    assert sizes == ["2", "1"]


def test_the_newest_run_is_first_and_says_when_it_began(tmp_path: Path) -> None:
    for seed, day in enumerate(("03", "28", "14")):
        measured = {"started_utc": f"2026-11-{day}T07:08:09+00:00"}
        save(tmp_path, record(seed=seed, measured=measured))
    save(tmp_path, record(seed=3))
    shown = rows(tmp_path, columns="seed,started_utc")
    assert [row[0] for row in shown] == ["1", "2", "0", "3"]
    assert shown[0][1] == "2026-11-28 07:08"
    assert rows(tmp_path, columns="seed", sort="seed")[0] == ["0"]


@pytest.mark.parametrize("width", [80, 60])
def test_the_jobs_of_a_sweep_can_be_told_apart_on_a_narrow_terminal(
    tmp_path: Path, width: int
) -> None:
    for rate in (0.0125, 0.025):
        config = {"optimizer": {"lr": rate}, "algorithm": {"noise_multiplier": 10 * rate}}
        save(tmp_path, configured(1, rate, **config))
    file = io.StringIO()
    Console(file=file, width=width).print(sheet(tmp_path))
    text = re.sub(r"[\s│]", "", file.getvalue())
    assert "…" not in text
    for value in ("0.0125", "0.025", "0.125", "0.25"):
        assert value in text


@pytest.mark.parametrize(
    ("column", "key", "values"),
    [
        ("epsilon_tight", "epsilon_of", ("example", "patient")),
        ("epsilon_claimed", "delta", (1e-5, 1e-3)),
        ("epsilon_patient", "privacy_unit", ("image", "patient")),
    ],
)
def test_epsilon_of_different_units_has_no_mean(
    tmp_path: Path, column: str, key: str, values: tuple[Any, Any]
) -> None:
    for seed, value in enumerate(values):
        run = record("a", seed)
        run["privacy"] |= {key.removeprefix("privacy_"): value}
        save(tmp_path, run)
    message = f"with {key} {values[0]} and {values[1]} have no common mean. Add {key} to --by"
    with pytest.raises(UserError, match=f"^{column}: runs {message}"):
        sheet(tmp_path, columns=column, by="recipe")
    assert len(sheet(tmp_path, columns=column, by=f"recipe,{key}").rows) == 2
    assert len(sheet(tmp_path, columns="value", by="recipe").rows) == 1


@pytest.mark.parametrize(
    "wrong", [{"filters": ["recip=a"]}, {"columns": "recip"}, {"sort": "recip"}, {"by": "recip"}]
)
def test_the_nearest_column_is_suggested(tmp_path: Path, wrong: dict[str, Any]) -> None:
    save(tmp_path, record())
    with pytest.raises(UserError, match="Did you mean 'recipe'"):
        sheet(tmp_path, **wrong)
    with pytest.raises(UserError, match="is not a filter"):
        sheet(tmp_path, ["recipe"])


def configured(seed: int, value: float, **config: Any) -> dict[str, Any]:
    made = record("a", seed, value, config=config)
    return made | {"run": f"{seed}{config['optimizer']['lr']}".ljust(64, "0")}


def test_any_key_of_the_configuration_is_a_column(tmp_path: Path) -> None:
    layers = {"hidden": [4, 2], "name": "m"}
    save(tmp_path, configured(1, 0.5, optimizer={"lr": 1e-5}, model=layers))
    save(tmp_path, configured(2, 0.7, optimizer={"lr": 10.0, "on": None}, model=layers))
    matching_rows = rows(tmp_path, "optimizer.lr=0.00001", columns="seed,optimizer.lr,model.hidden")
    assert matching_rows == [["1", "1e-05", "[4, 2]"]]
    assert len(rows(tmp_path, "model.hidden=[4,2]")) == 2
    assert len(rows(tmp_path, "model.hidden=[4,2],[4]", "optimizer.on=null")) == 2
    assert rows(tmp_path, columns="optimizer.lr", sort="optimizer.lr") == [["1e-05"], ["10"]]
    with pytest.raises(UserError, match=r"Did you mean 'optimizer\.lr'"):
        sheet(tmp_path, [], "optimzer.lr")


def test_one_column_says_what_differs_within_each_recipe(tmp_path: Path) -> None:
    for rate in (0.1, 0.3):
        save(tmp_path, configured(1, rate, optimizer={"lr": rate}, algorithm={"name": "dp_sgd"}))
    own = {"optimizer": {"lr": 9.0, "name": "adam"}, "model": {"name": "lenet5"}}
    data = {"name": "d", "provenance": "synthetic", "digest": "e" * 64, "notes": ""}
    for run, other in (("b1", {}), ("b2", {"data": data})):
        save(tmp_path, record("b", 1, 0.5, config=own) | other | {"run": run.ljust(64, "0")})
    # What differs between recipes is not said.
    assert rows(tmp_path, columns="recipe,differs") == [
        ["a", "lr 0.1"],
        ["a", "lr 0.3"],
        ["b", "official"],
        ["b", "synthetic"],
    ]


def test_runs_that_did_not_end_are_named(tmp_path: Path) -> None:
    save(tmp_path, record("a", 1))
    for recipe in "ab":
        records.write_text(records.folder(tmp_path, recipe, "c" * 64) / "spending.json", "{}")
    assert sheet(tmp_path, ["recipe=a"]).notes == [
        "Not finished: a/cccccccc; the same command continues it."
    ]
    assert "b/cccccccc" in sheet(tmp_path).notes[0]
    with pytest.raises(UserError, match=r"none of 1 record has it.* Not finished: a/cccccccc"):
        sheet(tmp_path, ["seed=41"])


@pytest.mark.parametrize(
    ("filters", "is_named"),
    [
        (["recipe=quick*"], True),
        (["recipe=QUICKSTART"], True),
        (["recipe=*"], True),
        (["recipe=other,quick*"], True),
        (["recipe=*", "recipe=quick*"], True),
        (["recipe=*", "recipe=other"], False),
    ],
)
def test_the_filters_of_records_choose_the_unfinished_runs(
    tmp_path: Path, filters: list[str], is_named: bool
) -> None:
    save(tmp_path, record("quickstart", 1), record("other", 1))
    home = records.folder(tmp_path, "quickstart", "c" * 64)
    records.write_text(home / "spending.json", "{}")
    assert bool(sheet(tmp_path, filters).notes) == is_named


def test_a_table_without_records_says_so(tmp_path: Path) -> None:
    home = records.folder(tmp_path, "quickstart", "c" * 64)
    records.write_text(home / "spending.json", "{}")
    (empty, unfinished) = sheet(tmp_path).notes
    assert empty == "There is no record of a finished run."
    assert unfinished.startswith("Not finished: quickstart/cccccccc")


@pytest.mark.parametrize(
    "condition",
    [
        "run=579a1ebe",
        "run=579A",
        "run=579a*",
        "run=0000,579a1ebe",
        "experiment=e1234567",
        "data_digest=d1234567",
        "ledger_digest=1f234567",
        "commit=c1234567",
        "started_utc=2026-11-28 07:08",
        "started_utc=2026-11-28",
        "started_utc=2026-11-28T07:08:09+00:00",
        "epsilon_tight=∞",
        "epsilon_tight=inf",
        "accuracy=0.8167",
        "accuracy=0.81*",
        "epsilon_patient=0.646",
    ],
)
def test_a_filter_takes_what_the_table_shows(tmp_path: Path, condition: str) -> None:
    run = record(
        seed=1,
        experiment="e1234567".ljust(64, "0"),
        environment={"commit": "c1234567".ljust(40, "0")},
        measured={"started_utc": "2026-11-28T07:08:09+00:00"},
    )
    run["run"] = "579a1ebe".ljust(64, "c")
    run["data"] |= {"digest": "d1234567".ljust(64, "0")}
    run["privacy"] |= {"ledger": {"digest": "1f234567".ljust(64, "0")}}
    run["privacy"] |= {"epsilon_patient": 0.64551}
    run["metrics"] = {"accuracy": 0.816666666}
    later = {"measured": {"started_utc": "2026-11-29T07:08:09+00:00"}}
    other = record(seed=2, **later)
    other["privacy"] |= {"epsilon_tight": 3.0}
    save(tmp_path, run, other)
    assert rows(tmp_path, condition, columns="seed") == [["1"]]
    if "*" not in condition and "," not in condition:
        (matching_run,) = find_runs(condition, records.read_all(tmp_path))
        assert matching_run.seed == 1


def test_a_filter_needs_four_digits_of_a_digest(tmp_path: Path) -> None:
    save(tmp_path, record("a", 1), record("a", 2))
    with pytest.raises(UserError, match="none of 2 records has it"):
        sheet(tmp_path, ["run=a10"])
    assert rows(tmp_path, "commit=null", columns="seed") == [["1"], ["2"]]


def test_a_terminal_gets_the_first_lines_of_many_and_says_so(tmp_path: Path) -> None:
    save(tmp_path, *(record(seed=seed) for seed in range(5)))
    short = sheet(tmp_path, limit=2)
    assert (short.title, len(short.rows)) == ("5 records", 2)
    assert "The first 2; filter or group them" in short.notes[0]


def test_a_thousand_records_of_a_hundred_recipes_are_told_apart_at_once() -> None:
    keys = [f"optimizer.k{number}" for number in range(150)]
    rows = 1000
    columns = {key: [row % 7 for row in range(rows)] for key in keys}
    names = {"recipe": [f"r{row % 100}" for row in range(rows)]}
    nothing = {"variant": [None] * rows, "provenance": ["official"] * rows}
    nothing |= {"data_digest": ["d"] * rows}
    frame = pd.DataFrame(columns | names | nothing)
    began = time.process_time()
    differences = tell_differences(frame, keys)
    assert time.process_time() - began < 0.5  # of the CPU; pandas took 1.2 s
    assert differences[0].split(", ")[:2] == ["k0 0", "k1 0"]


def test_runs_are_found_by_name_tags_and_notes(tmp_path: Path) -> None:
    labels: list[dict[str, Any]] = [
        {"name": "wide net", "tags": ["baseline", "a b"], "notes": "Learns slowly,\nthen fast."},
        {"name": "narrow net", "tags": ["baseline"]},
        {},
    ]
    documents = [record(seed=seed, labels=of) for seed, of in enumerate(labels)]
    save(tmp_path, *documents)
    runs = typed(documents)
    shown = sheet(tmp_path)
    assert list(shown.columns[:3]) == ["recipe", "name", "tags"]
    assert sorted(row[2] for row in shown.rows) == ["", "baseline", "baseline, a b"]
    for condition, seeds in {
        "tags=baseline": ["0", "1"],
        "tags=a b": ["0"],
        "name=wide net": ["0"],
        "name=*NET": ["0", "1"],
        "notes=*slowly*fast*": ["0"],
        "name=null": ["2"],
    }.items():
        seed_rows = rows(tmp_path, condition, columns="seed", sort="seed")
        assert [row[0] for row in seed_rows] == seeds, condition
    (other,) = find_runs("narrow net", runs)
    facts = {row[0]: row[1:] for row in compare_runs([runs[0]], [other], tmp_path).rows}
    assert facts["name"] == ["wide net", "narrow net"]
    assert facts["notes"] == ["Learns slowly,\nthen fast.", ""]
    assert {"name", "tags", "notes"} <= {*records.frame(runs).columns}
    save(tmp_path / "plain", documents[2])
    assert "name" not in sheet(tmp_path / "plain").columns
