"""A table has a line for each number of the paper, and shows only what was run."""

import csv
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.test_package import ROOT
from tests.test_records import record, save, typed
from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.experiments.claims import build_table
from zdp_bench.report import cells, papers, tables
from zdp_bench.report.cells import Filling, Rules
from zdp_bench.report.sheet import Sheet

TABLE = "zeta_dp_2021/1"
RESULTS = ROOT / "results"
ROWS = {
    "phasemnist": "phasemnist_private",
    "phasemnist_tuned": "phasemnist_private",
    "mnist": "mnist_private",
    "phasemnist_nonprivate": "phasemnist_nonprivate",
    "mnist_nonprivate": "mnist_nonprivate",
}


def filling(recipe: str, **more: Any) -> Filling:
    variant = "tuned" if recipe == "phasemnist_tuned" else None
    return replace(Filling(recipe, (), ROWS[recipe], variant, recipe.ljust(64, "e")), **more)


FILLINGS = [filling(recipe) for recipe in ROWS]


def build(results: Path, *more: Filling) -> Sheet:
    return tables.build(TABLE, results, [*FILLINGS, *more])


def lines(results: Path, *more: Filling) -> list[dict[str, str]]:
    """The lines of the table, as shown."""
    sheet = build(results, *more)
    return [dict(zip(sheet.columns, row, strict=True)) for row in sheet.rows]


def line(results: Path, label: str, *more: Filling, at: int = 0) -> dict[str, str]:
    """One line of a row: the paper's own settings, or a variant below them."""
    return [shown for shown in lines(results, *more) if shown["row"] == label][at]


def own(recipe: str, *args: Any, **more: Any) -> dict[str, Any]:
    """A record on what counts as the paper's data."""
    name, notes = ("phasemnist", "official MNIST, ...") if "phase" in recipe else ("mnist", "")
    run = record(recipe, *args, **more)
    provenance = "derived" if notes else "official"
    run["data"] = {"name": name, "provenance": provenance, "digest": "d" * 64, "notes": notes}
    return run


PHASE, MNIST = "PhaseMNIST ζ-DP-SGD", "MNIST DP-SGD"


def test_an_empty_table_has_a_line_for_each_number_with_the_command_that_fills_it(
    tmp_path: Path,
) -> None:
    shown = lines(tmp_path)
    assert len(shown) == len(set(ROWS.values()))
    private = line(tmp_path, PHASE)
    assert [private[c] for c in ("paper", "ours", "ε printed", "ε tight", "status", "command")] == [
        "99.0 %",
        "",
        "0.53",
        "",
        "not run",
        "`zdp-bench run recipe=phasemnist`",
    ]
    assert build(tmp_path).origin.startswith("4 numbers: 0 as published, 4 not run.")


def test_seeds_are_averaged_and_the_difference_is_ours_minus_theirs(tmp_path: Path) -> None:
    values = {1: 0.97, 2: 0.98, 3: 0.99}
    save(tmp_path, *(own("phasemnist", seed, value) for seed, value in values.items()))
    shown = line(tmp_path, PHASE)
    assert (shown["ours"], shown["Δ"]) == ("98.00 ± 1.00 % (n = 3)", "-1.00")
    assert (shown["ε claimed"], shown["ε tight"], shown["δ"]) == ("0.5", "∞", "1e-05")
    assert shown["status"] == "reproduced"


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ({"provenance": "derived"}, "mnist"),
        ({"name": "cifar10"}, "mnist"),
        ({"notes": "unchecked MNIST files"}, "phasemnist"),
    ],
)
def test_a_number_on_other_data_is_in_brackets_and_compared_with_nothing(
    tmp_path: Path, data: dict[str, str], name: str
) -> None:
    run = own(name, 1, 0.97)
    run["data"] |= data
    save(tmp_path, run)
    shown = line(tmp_path, MNIST if name == "mnist" else PHASE)
    assert (shown["ours"], shown["Δ"]) == ("[97.00 % (n = 1)]", "")
    assert shown["status"] == "other data"
    assert shown["what differs"].startswith("on ")


def test_runs_on_a_copy_of_the_data_count_only_until_the_data_itself_is_there(
    tmp_path: Path,
) -> None:
    copy, release = own("mnist", 1, 0.50), own("mnist", 2, 0.97)
    copy["data"] |= {"provenance": "derived", "notes": "through JPEG"}
    save(tmp_path, copy)
    assert line(tmp_path, MNIST)["ours"] == "[50.00 % (n = 1)]"
    save(tmp_path, release)
    assert line(tmp_path, MNIST)["ours"] == "97.00 % (n = 1)"


def test_runs_on_changed_data_are_left_out_of_the_mean_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {"started_utc": "2026-01-01T00:00:00Z"}
    earlier = [
        own("phasemnist", seed, 0.5, run=f"{seed}" * 64, measured=measured) for seed in (1, 3)
    ]
    for run in earlier:
        run["data"]["digest"] = "0" * 64
    later = [
        own("phasemnist", 1, 0.97, measured={"started_utc": "2026-01-02T00:00:00Z"}),
        own("phasemnist", 2, 0.98, measured=measured),
    ]
    save(tmp_path, *earlier, *later)
    records.warn_left_out.cache_clear()
    assert line(tmp_path, PHASE)["ours"] == "97.50 ± 0.71 % (n = 2)"
    assert "seed 1, 3 of recipe phasemnist, on other data" in capsys.readouterr().err


def test_of_two_runs_of_a_seed_the_last_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of one seed with other starting weights were averaged as if they were two seeds."""
    for start, value in (("01", 0.5), ("02", 0.97)):
        measured = {"started_utc": f"2026-01-{start}T00:00:00Z"}
        save(tmp_path, own("phasemnist", 1, value, run=start.ljust(64, "0"), measured=measured))
    save(tmp_path, own("phasemnist", 2, 0.98))
    records.warn_left_out.cache_clear()
    cells = build(tmp_path).numbers[0]
    assert (cells["values"], cells["seeds"], cells["n"]) == ("97 98", "1 2", 2)
    assert "run 0100000000000000 of recipe phasemnist, because a" in capsys.readouterr().err


def test_fixed_size_batches_have_an_interval(tmp_path: Path) -> None:
    run = own("phasemnist", 1, 0.97)
    run["privacy"] |= {"epsilon_tight": 33.217, "epsilon_tight_at_least": 30.37}
    run["privacy"] |= {"epsilon_patient": 302.7, "epsilon_patient_at_least": 244.6}
    save(tmp_path, run)
    assert line(tmp_path, PHASE)["ε tight"] == "30.3 to 33.3 (patient 244 to 303)"
    sheet = build(tmp_path)
    assert sheet.numbers[0]["epsilon_tight_at_least"] == 30.37
    assert tables.INTERVAL in sheet.notes
    run["privacy"] |= {"epsilon_tight_at_least": 33.217, "epsilon_patient_at_least": 302.7}
    save(tmp_path, run)
    assert tables.INTERVAL not in build(tmp_path).notes


def test_an_equal_run_of_another_recipe_fills_the_line_and_counts_once(tmp_path: Path) -> None:
    equal = {"experiment": "phasemnist".ljust(64, "e")}
    again = record("phasemnist_copy", 1, 0.97, **equal) | {"run": record("phasemnist", 1)["run"]}
    save(tmp_path, record("another", 2, 0.99, **equal), record("phasemnist", 1, 0.97), again)
    cells = build(tmp_path).numbers[0]
    assert (cells["seeds"], cells["n"]) == ("1 2", 2)
    assert line(tmp_path, PHASE)["ours"] == "[98.00 ± 1.41 % (n = 2)]"


def test_the_lines_are_written_as_markdown_and_csv(tmp_path: Path) -> None:
    save(tmp_path, own("phasemnist", 1, 0.97))
    paths = build(tmp_path).write(papers.file_of(TABLE, tmp_path))
    assert [path.name for path in paths] == [f"zeta_dp_2021_table1.{end}" for end in ("md", "csv")]
    text = paths[0].read_text()
    assert len({row.count("|") for row in text.splitlines() if row.startswith("|")}) == 1
    assert text.startswith(
        "# Ziller et al. 2021 (ζ-DP), Table 1\n\n4 numbers: 1 as published (1 cl"
    )
    first, *_ = csv_lines = list(csv.DictReader(io.StringIO(paths[1].read_text())))
    expected = {"row": "phasemnist_private", "status": "close", "mean": "97.0", "n": "1"}
    assert first | expected == first
    assert float(first["difference"]) == -2
    assert first["runs"] == record("phasemnist", 1)["run"][:16]
    assert csv_lines[1]["n"] == "0"


def test_a_run_that_is_no_papers_changes_no_file(tmp_path: Path) -> None:
    save(tmp_path, own("phasemnist", 1, 0.97))
    at = papers.file_of(TABLE, tmp_path)
    before = [(path, path.stat().st_ino) for path in build(tmp_path).write(at)]
    save(tmp_path, own("mnist", 1, 0.9, experiment="mine".ljust(64, "e")), record("quickstart"))
    assert [(path, path.stat().st_ino) for path in build(tmp_path).write(at)] == before


def test_a_measured_table_is_not_built_from_records(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`zdp-bench bench zeta_dp_2021/7` measures"):
        tables.build("zeta_dp_2021/7", tmp_path, [])


def test_other_data_and_variants_stand_below_the_papers_settings(tmp_path: Path) -> None:
    moved = filling("mnist", digest="s" * 64, substitute="fashion_mnist")
    other = own("mnist", 2, 0.8, experiment="s" * 64)
    other["data"] |= {"name": "fashion_mnist"}
    save(tmp_path, other, own("phasemnist_tuned", 1, 0.9))
    shown = {(cells["row"], cells["what differs"]): cells for cells in lines(tmp_path, moved)}
    assert list(shown)[:4] == [
        (PHASE, ""),
        (PHASE, "tuned"),
        (MNIST, ""),
        (MNIST, "on fashion mnist"),
    ]
    assert [cells["status"] for cells in shown.values()][:4] == [
        "not run",
        "other settings",
        "not run",
        "other data",
    ]
    assert shown[MNIST, "on fashion mnist"]["ours"] == "[80.00 % (n = 1)]"
    assert shown[MNIST, "on fashion mnist"]["command"].endswith("mnist dataset=fashion_mnist`")
    assert shown[PHASE, "tuned"]["Δ"] == "", "a variant is compared with nothing"


def test_generated_data_stands_in_no_line(tmp_path: Path) -> None:
    run = own("mnist", 1, 0.9)
    run["data"] |= {"provenance": "synthetic"}
    save(tmp_path, run)
    assert line(tmp_path, MNIST)["status"] == "not run"


@pytest.mark.parametrize(
    ("spent", "tight"),
    [
        ({"epsilon_patient": 7.5}, "∞ (patient 7.5)"),
        ({"epsilon_patient": 8.5, "unit": "image"}, "∞ (image 8.5)"),
        ({"epsilon_patient": math.inf, "unit": "patient"}, "∞"),
    ],
)
def test_an_owners_epsilon_stands_where_it_differs(
    tmp_path: Path, spent: dict[str, Any], tight: str
) -> None:
    run = own("mnist")
    run["privacy"] |= spent
    save(tmp_path, run)
    assert line(tmp_path, MNIST)["ε tight"] == tight


def test_folds_stand_in_a_line_as_their_mean(tmp_path: Path) -> None:
    folds = [
        filling(
            "mnist", digest=str(n) * 64, variant="folds", overrides=("a=1", f"dataset.fold={n}")
        )
        for n in (0, 1)
    ]
    values = {(0, 1): 0.8, (0, 2): 0.9, (1, 1): 0.6}
    save(
        tmp_path,
        *(
            own("mnist", seed, v, experiment=str(n) * 64) | {"run": f"{n}{seed}" * 32}
            for (n, seed), v in values.items()
        ),
    )
    shown = line(tmp_path, MNIST, *folds, at=1)
    assert shown["ours"] == "72.50 ± 17.68 % over folds (n = 2)"
    assert shown["command"] == "`zdp-bench run -m recipe=mnist a=1`"


@pytest.mark.parametrize("folds_with_runs", [1, 4, 5])
def test_part_of_the_folds_is_a_reduced_number(tmp_path: Path, folds_with_runs: int) -> None:
    """With three seeds of one fold of five, their spread reproduced the paper's number."""
    digests = [str(fold) * 64 for fold in range(5)]
    folds = [filling("mnist", digest=digest, overrides=(digest[0],)) for digest in digests]
    for fold, digest in enumerate(digests[:folds_with_runs]):
        for seed, value in enumerate((0.98, 0.90, 0.82)):
            run = own("mnist", seed, value, experiment=digest)
            save(tmp_path, run | {"run": f"{fold}{seed}" * 32})
    table = tables.build(TABLE, tmp_path, folds)
    (cells_of_line,) = [line for line in table.numbers if line["row"] == "mnist_private"]
    is_whole = folds_with_runs == len(folds)
    assert cells_of_line["status"] == ("different" if is_whole else "reduced")
    assert (cells_of_line["over"], cells_of_line["n"]) == ("folds", folds_with_runs)


def test_jobs_with_the_same_runs_are_no_folds(tmp_path: Path) -> None:
    """Such as two recipes with one configuration, or all folds on one other data set."""
    save(tmp_path, own("mnist", 1, 0.97), own("mnist", 2, 0.95))
    again = replace(filling("mnist"), recipe="mnist_again")
    cells = line(tmp_path, MNIST, again)
    assert cells["ours"] == "96.00 ± 1.41 % (n = 2)"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_has_no_deviation(tmp_path: Path, value: float) -> None:
    for seed, accuracy in enumerate((0.9, value, 0.9)):
        save(tmp_path, own("mnist", seed, accuracy))
    (cells_of_line,) = [
        cells for cells in build(tmp_path).numbers if cells["row"] == "mnist_private"
    ]
    assert (cells_of_line["n"], cells_of_line["deviation"]) == (3, None)
    assert line(tmp_path, MNIST)["ours"] == "undefined (n = 3)"


def test_papers_say_what_is_reduced_what_differs_and_what_rows_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = Rules(
        "1",
        reduced=["tun*"],
        differs={"tuned": "another rate"},
        lacks={"2/*": "their pictures", "1/mnist_p*": "their numbers"},
    )
    monkeypatch.setattr(cells, "rules_of", lambda table: rules)
    save(tmp_path, own("phasemnist_tuned", 1, 0.9))
    assert line(tmp_path, MNIST)["status"] == "no data (their numbers)"
    shown = line(tmp_path, PHASE, at=1)
    assert shown["what differs"] == "on phasemnist; another rate"
    assert shown["status"] == "reduced", "before 'other data'"


@pytest.mark.parametrize(
    ("metric", "unit", "paper", "values", "status"),
    [
        ("accuracy", "%", "99.0", [98.0], "reproduced"),  # at the tolerance
        ("accuracy", "%", "99.0", [96.9], "different"),
        ("accuracy", "%", "99.0", [math.nan], "different"),
        ("psnr", "dB", "30.0", [math.inf, 30.0, 30.0, 30.0], "different"),
        ("accuracy", "%", "99.0", [95.0, 99.0], "close"),  # two seeds have no deviation to speak of
        ("accuracy", "%", "99.0", [95.0, 99.0, 95.0], "reproduced"),
        ("roc_auc", "", "0.88", [0.87], "reproduced"),
        ("roc_auc", "", "0.88", [0.91], "different"),
        ("psnr", "dB", "30.0", [29.4], "reproduced"),
    ],
)
def test_a_status_is_judged_by_points_or_deviations(
    metric: str, unit: str, paper: str, values: list[float], status: str
) -> None:
    number = papers.Reference("p", "1", "r", "R", metric, paper, unit, "")
    assert cells.judge(number, values) == status
    if len(values) == 3:
        assert cells.judge(number, values, over_folds=True) == "different", "folds are no seeds"


WARNED = {"warning": "the model does not seem to learn"}
TEN_CLASSES = {"data": record()["data"] | {"example": {"outputs": 10}}}


@pytest.mark.parametrize(
    ("metric", "value", "more", "learned"),
    [
        ("accuracy", 0.11, TEN_CLASSES, False),  # at the tolerance
        ("accuracy", 0.111, TEN_CLASSES, True),
        ("accuracy", 0.111, {}, True),  # of how many classes an old record does not state
        ("accuracy", 0.97, TEN_CLASSES | WARNED, False),
        ("accuracy", 0.97, WARNED, False),
        ("accuracy", math.nan, TEN_CLASSES, False),
        ("roc_auc", 0.3, {}, False),
        ("roc_auc", 0.52, {}, True),
        ("dice", 0.0, {}, False),
        ("ssim", 0.6, {"metrics": {"zero_filled_ssim": 0.595}}, False),
        ("nmse", 0.5, {"metrics": {"zero_filled_nmse": 0.505}}, False),
        ("nmse", 0.4, {"metrics": {"zero_filled_nmse": 0.505}}, True),
        ("perplexity", 0.0, {}, True),  # of which no guess is known
        ("perplexity", math.nan, {}, False),
    ],
)
def test_a_run_did_not_learn_if_it_warns_or_is_no_better_than_guessing(
    metric: str, value: float, more: dict[str, Any], learned: bool
) -> None:
    document = record(headline={"name": metric, "value": value}, **more)
    (run,) = typed([document])
    assert cells.did_not_learn(run) != learned


@pytest.mark.parametrize(("at_chance", "status"), [(1, "different"), (2, "did not learn")])
def test_a_line_did_not_learn_if_most_of_its_runs_did_not(
    tmp_path: Path, at_chance: int, status: str
) -> None:
    for seed in range(3):
        more = WARNED if seed < at_chance else {}
        save(tmp_path, own("mnist", seed, 0.9, **more))
    shown = line(tmp_path, MNIST)
    assert shown["status"] == status
    assert bool(shown["Δ"]) == (status == "different"), "of a run that learnt alone"


# -------------------------------------------------------------------------------- what papers print


def test_a_number_that_a_paper_does_not_give_has_no_unit() -> None:
    number = papers.Reference("a paper", "1", "row", "Row", "accuracy", "93.4", "%", "", "0.01")
    assert number.printed == "93.4 ± 0.01 %"
    assert replace(number, value="not given", deviation="").printed == "not given"
    spread = replace(number, value="0.848", unit="", deviation="", range="0.814 to 0.881")
    assert spread.printed == "0.848 (0.814 to 0.881)"


# ----------------------------------------------------------------------------------- what is shown


TABLES = [*filter(papers.recipes_of, papers.available()), *papers.ours()]
LONG = "gredp_2024/fig3epochs"  # the claimed ε of each epoch take seconds


@pytest.fixture(scope="module")
def committed_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with the committed records, which are read once."""
    folder = tmp_path_factory.mktemp("results")
    (folder / "runs").symlink_to(RESULTS / "runs")
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == LONG else n for n in TABLES]
)
def test_the_committed_tables_are_what_the_committed_records_give(
    name: str, committed_runs: Path
) -> None:
    for path in build_table(name, committed_runs).write(papers.file_of(name, committed_runs)):
        committed = RESULTS / "tables" / path.name
        assert committed.read_bytes() == path.read_bytes(), f"`zdp-bench table {name} --write`"
