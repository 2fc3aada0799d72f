"""A table has a line for each number of the paper, and shows only what was run."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.test_records import record, save
from zdp_bench.errors import UserError
from zdp_bench.report import cells, papers, tables
from zdp_bench.report.cells import Filling, Measured, Rules

TABLE = "zeta_dp_2021/1"
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


def build(results: Path, *more: Filling) -> tables.Table:
    return tables.build(TABLE, results, [*FILLINGS, *more])


def lines(results: Path, *more: Filling) -> dict[str, dict[str, str]]:
    """The lines of the paper, as shown, by row."""
    return {cell.metric.row: tables.show(cell) for cell in build(results, *more).cells}


def runs(results: Path, *more: Filling) -> list[dict[str, str]]:
    """The runs, as shown."""
    sheet = build(results, *more).runs_sheet()
    return [dict(zip(sheet.columns, row, strict=True)) for row in sheet.rows]


def own(recipe: str, *args: Any, **more: Any) -> dict[str, Any]:
    """A record on what counts as the paper's data."""
    name, notes = ("phasemnist", "official MNIST, ...") if "phase" in recipe else ("mnist", "")
    run = record(recipe, *args, **more)
    provenance = "derived" if notes else "official"
    run["data"] = {"name": name, "provenance": provenance, "digest": "d" * 64, "notes": notes}
    return run


def test_an_empty_table_has_a_line_for_each_number_and_names_the_commands(tmp_path: Path) -> None:
    shown = lines(tmp_path)
    assert list(shown) == list(dict.fromkeys(ROWS.values()))
    private = shown["phasemnist_private"]
    assert (private["paper"], private["ε printed / tight"]) == ("99.0 %", "0.53")
    assert (private["as published"], private["best of ours"], private["status"]) == (
        "",
        "",
        "not run",
    )
    assert shown["phasemnist_nonprivate"]["ε printed / tight"] == "∞"
    table = build(tmp_path)
    assert table.count.sentence.startswith(
        "4 cells: 0 as published, 0 with other settings or data, 4 "
    )
    assert "Not run: `zdp-bench run recipe=phasemnist`." in table.notes
    assert "zdp-bench run" not in table.sheet().as_markdown()


def test_seeds_are_averaged_and_the_difference_is_ours_minus_theirs(tmp_path: Path) -> None:
    values = {1: 0.97, 2: 0.98, 3: 0.99}
    save(tmp_path, *(own("phasemnist", seed, value) for seed, value in values.items()))
    shown = lines(tmp_path)["phasemnist_private"]
    assert shown["as published"] == "98.00 ± 1.00 % (n = 3)"
    assert (shown["Δ"], shown["status"]) == ("-1.00", "reproduced")
    assert shown["ε printed / tight"] == "0.53 / ∞"
    (row,) = runs(tmp_path)
    assert [row[c] for c in ("ε claimed", "ε tight", "δ", "data")] == [
        "0.5",
        "∞",
        "1e-05",
        "derived",
    ]
    assert row["command"] == "`zdp-bench run recipe=phasemnist`"


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ({"provenance": "derived"}, "mnist"),
        ({"name": "d"}, "mnist"),
        ({"notes": "unchecked MNIST files"}, "phasemnist"),
    ],
)
def test_a_number_on_other_data_is_in_brackets_and_compared_with_nothing(
    tmp_path: Path, data: dict[str, str], name: str
) -> None:
    run = own(name, 1, 0.97)
    run["data"] |= data
    save(tmp_path, run)
    shown = lines(tmp_path)[ROWS[name]]
    assert (shown["as published"], shown["Δ"]) == ("[97.00 % (n = 1)]", "")
    assert shown["status"] == "other data"
    assert shown["what differs"] == f"on {run['data']['name']}"


def test_runs_on_a_copy_of_the_data_count_only_until_the_data_itself_is_there(
    tmp_path: Path,
) -> None:
    copy, release = own("mnist", 1, 0.50), own("mnist", 2, 0.97)
    copy["data"] |= {"provenance": "derived", "notes": "through JPEG"}
    save(tmp_path, copy)
    assert lines(tmp_path)["mnist_private"]["as published"] == "[50.00 % (n = 1)]"
    save(tmp_path, release)
    assert lines(tmp_path)["mnist_private"]["as published"] == "97.00 % (n = 1)"


def test_fixed_size_batches_have_an_interval(tmp_path: Path) -> None:
    run = own("phasemnist", 1, 0.97)
    run["privacy"] |= {"epsilon_tight": 33.217, "epsilon_tight_at_least": 30.37}
    run["privacy"] |= {"epsilon_patient": 302.7, "epsilon_patient_at_least": 244.6}
    save(tmp_path, run)
    table = build(tmp_path)
    (row,) = runs(tmp_path)
    assert row["ε tight"] == "30.3 to 33.3"
    assert row["ε per unit"] == "244 to 303 (patient)"
    assert table.runs_sheet().numbers[0]["epsilon_tight_at_least"] == 30.37
    cell = lines(tmp_path)["phasemnist_private"]["ε printed / tight"]
    assert cell == "0.53 / 30.3 to 33.3 (patient 244 to 303)"
    assert tables.INTERVAL in table.notes
    assert tables.INTERVAL in table.sheet().notes
    run["privacy"] |= {"epsilon_tight_at_least": 33.217}
    save(tmp_path, run)
    assert tables.INTERVAL not in build(tmp_path).notes


def test_an_equal_run_of_another_recipe_fills_the_cell_and_counts_once(tmp_path: Path) -> None:
    equal = {"experiment": "phasemnist".ljust(64, "e")}
    again = record("phasemnist_copy", 1, 0.97, **equal) | {"run": record("phasemnist", 1)["run"]}
    save(tmp_path, record("another", 2, 0.99, **equal), record("phasemnist", 1, 0.97), again)
    row = next(row for row in build(tmp_path).rows if row.filling.recipe == "phasemnist")
    assert [(run["seed"], run["recipe"]) for run in row.runs] == [(1, "phasemnist"), (2, "another")]
    assert runs(tmp_path)[0]["ours"] == "98.00 ± 1.41 % (n = 2)"


def test_the_lines_and_the_runs_are_written_as_markdown_and_csv(tmp_path: Path) -> None:
    save(tmp_path, own("phasemnist", 1, 0.97))
    paths = build(tmp_path).write(tmp_path)
    stems = ("zeta_dp_2021_table1", "zeta_dp_2021_table1_runs")
    assert [path.name for path in paths] == [f"{s}.{end}" for s in stems for end in ("md", "csv")]
    for markdown in paths[::2]:
        text = markdown.read_text().splitlines()
        assert len({line.count("|") for line in text if line.startswith("|")}) == 1
    text = paths[0].read_text()
    assert text.startswith(
        "# Ziller et al. 2021 (ζ-DP), Table 1\n\n4 cells: 1 as published (1 private by the "
    )
    assert text.count("\n| ") == 2 + 4
    line, *_ = csv.DictReader(io.StringIO(paths[1].read_text()))
    assert (line["row"], line["status"], line["published_mean"]) == (
        "phasemnist_private",
        "close",
        "97.0",
    )
    assert float(line["difference"]) == -2
    runs = list(csv.DictReader(io.StringIO(paths[3].read_text())))
    assert runs[0]["runs"] == record("phasemnist", 1)["run"][:16]
    assert runs[2]["n"] == "0"


def test_a_run_that_is_no_papers_changes_no_file(tmp_path: Path) -> None:
    save(tmp_path, own("phasemnist", 1, 0.97))
    before = [(path, path.stat().st_ino) for path in build(tmp_path).write(tmp_path)]
    save(tmp_path, own("mnist", 1, 0.9, experiment="mine".ljust(64, "e")), record("quickstart"))
    assert [(path, path.stat().st_ino) for path in build(tmp_path).write(tmp_path)] == before


def test_a_measured_table_is_not_built_from_records(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="measured by `zdp-bench bench zeta_dp_2021/7`"):
        tables.build("zeta_dp_2021/7", tmp_path, [])


def test_the_same_recipe_on_another_data_set_fills_only_an_empty_line(tmp_path: Path) -> None:
    digest = "s" * 64
    moved = filling("mnist", digest=digest, on="fashion_mnist")
    other = own("mnist", 2, 0.8, experiment=digest)
    other["data"] |= {"name": "fashion_mnist"}
    save(tmp_path, other)
    shown = lines(tmp_path, moved)["mnist_private"]
    assert (shown["as published"], shown["Δ"]) == ("[80.00 % (n = 1)]", "")
    save(tmp_path, own("mnist", 1, 0.9))
    assert lines(tmp_path, moved)["mnist_private"]["as published"] == "90.00 % (n = 1)"
    labels = [row["row"] for row in runs(tmp_path, moved)]
    assert labels == ["MNIST DP-SGD", "MNIST DP-SGD (on fashion_mnist)"]


def test_generated_data_stands_in_no_line(tmp_path: Path) -> None:
    run = own("mnist", 1, 0.9)
    run["data"] |= {"provenance": "synthetic"}
    save(tmp_path, run)
    assert lines(tmp_path)["mnist_private"]["status"] == "not run"
    assert [row["row"] for row in runs(tmp_path)] == ["MNIST DP-SGD"]


def test_a_patients_epsilon_stands_where_patients_own_several_records(tmp_path: Path) -> None:
    patient, image, alone = (own(name) for name in ("mnist", "phasemnist", "phasemnist_tuned"))
    patient["privacy"] |= {"examples_per_patient": 3, "epsilon_patient": 7.5}
    image["privacy"] |= {"examples_per_patient": 2, "epsilon_patient": 8.5, "unit": "image"}
    alone["privacy"] |= {"examples_per_patient": 1, "epsilon_patient": math.inf, "unit": "patient"}
    save(tmp_path, patient, image, alone)
    shown = [row["ε per unit"] for row in runs(tmp_path)]
    assert shown == ["8.5 (image)", "∞", "7.5 (patient)"]
    assert lines(tmp_path)["mnist_private"]["ε printed / tight"] == "0.53 / ∞ (patient 7.5)"


# ---------------------------------------------------------------------------- the best of ours


def spend(run: dict[str, Any], tight: float) -> dict[str, Any]:
    run["privacy"] |= {"epsilon_tight": tight}
    return run


@pytest.mark.parametrize(
    ("value", "tight", "shown"),
    [
        (0.98, 3.1, "98.00 % (n = 1)"),  # within 5 %
        (0.98, 3.3, ""),  # bought with privacy
        (0.96, 3.0, ""),  # worse than the paper's settings
        (math.nan, 3.0, ""),
    ],
)
def test_the_best_of_ours_is_better_at_no_more_epsilon(
    tmp_path: Path, value: float, tight: float, shown: str
) -> None:
    save(tmp_path, spend(own("phasemnist", 1, 0.97), 3.0))
    save(tmp_path, spend(own("phasemnist_tuned", 1, value), tight))
    line = lines(tmp_path)["phasemnist_private"]
    assert (line["as published"], line["best of ours"]) == ("97.00 % (n = 1)", shown)
    assert line["what differs"] == ("tuned" if shown else "")
    spent = {3.0: "3", 3.1: "3, best 3.1"}[tight] if shown else "3"
    assert line["ε printed / tight"] == f"0.53 / {spent}"
    assert line["status"] == "close"


def test_of_variants_one_on_the_papers_data_comes_first(tmp_path: Path) -> None:
    other = filling("phasemnist", digest="o" * 64, variant="more epochs")
    save(tmp_path, own("phasemnist_tuned", 1, 0.9), record("x", 1, 0.99, experiment="o" * 64))
    line = lines(tmp_path, other)["phasemnist_private"]
    assert line["best of ours"] == "90.00 % (n = 1)"
    assert (line["what differs"], line["status"], line["Δ"]) == ("tuned", "other settings", "")
    save(tmp_path, record("phasemnist_tuned", 1, 0.9))
    line = lines(tmp_path, other)["phasemnist_private"]
    assert line["best of ours"] == "[99.00 % (n = 1)]"
    assert (line["what differs"], line["status"]) == ("on d; more epochs", "other data")


def test_the_test_set_does_not_choose_among_variants(tmp_path: Path) -> None:
    other = filling("phasemnist", digest="o" * 64, variant="zealous")
    for first, second in ((0.98, 0.99), (0.99, 0.98)):
        save(tmp_path, own("phasemnist_tuned", 1, first), own("x", 1, second, experiment="o" * 64))
        assert lines(tmp_path, other)["phasemnist_private"]["what differs"] == "tuned"


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
    assert (
        lines(tmp_path, *folds)["mnist_private"]["best of ours"]
        == "72.50 ± 17.68 % over folds (n = 2)"
    )
    labels = [row["row"] for row in runs(tmp_path, *folds)]
    assert labels == [f"MNIST DP-SGD (folds, ours), dataset.fold={n}" for n in (0, 1)]


def test_a_variant_that_is_set_aside_stands_with_the_runs_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = Rules(
        "1",
        aside=["tun*"],
        reduced=["tun*"],
        differs={"tuned": "another rate"},
        not_run={"2/*": "their pictures", "1/mnist_*": 2.5, "1/p*": "their numbers"},
    )
    monkeypatch.setattr(cells, "rules_of", lambda table: rules)
    save(tmp_path, own("phasemnist_tuned", 1, 0.9))
    line = lines(tmp_path)
    assert line["phasemnist_private"]["best of ours"] == ""
    assert line["phasemnist_private"]["status"] == "no data (their numbers)"
    assert line["mnist_private"]["status"] == "too dear (~2.5 h)"
    monkeypatch.setattr(cells, "rules_of", lambda table: replace(rules, aside=[]))
    line = lines(tmp_path)["phasemnist_private"]
    assert line["what differs"] == "on phasemnist; another rate"
    assert line["status"] == "reduced", "before 'other data'"


@pytest.mark.parametrize(
    ("metric", "unit", "paper", "values", "status"),
    [
        ("accuracy", "%", "99.0", [0.98], "reproduced"),  # at the tolerance
        ("accuracy", "%", "99.0", [0.969], "different"),
        ("accuracy", "%", "99.0", [0.95, 0.99], "close"),  # two seeds have no deviation to speak of
        ("accuracy", "%", "99.0", [0.95, 0.99, 0.95], "reproduced"),
        ("roc_auc", "", "0.88", [0.87], "reproduced"),
        ("roc_auc", "", "0.88", [0.91], "different"),
        ("psnr", "dB", "30.0", [29.4], "reproduced"),
    ],
)
def test_a_status_is_judged_by_points_or_deviations(
    metric: str, unit: str, paper: str, values: list[float], status: str
) -> None:
    number = papers.Reference("p", "1", "r", "R", metric, paper, unit, "")
    found = [record("r", seed, metrics={metric: value}) for seed, value in enumerate(values)]
    ours = Measured(number, ((Filling("r", (), "r", None, "d"), tuple(found)),), True)
    assert cells.judge(ours, number) == status
    folds = tuple((one, (run,)) for run in found for one, _ in ours.jobs)
    if len(found) == 3:
        assert cells.judge(replace(ours, jobs=folds), number) == "different", "folds are no seeds"


# -------------------------------------------------------------------------------- what papers print


def test_a_number_that_a_paper_does_not_give_has_no_unit() -> None:
    number = papers.Reference("a paper", "1", "row", "Row", "accuracy", "93.4", "%", "", "0.01")
    assert number.printed == "93.4 ± 0.01 %"
    assert replace(number, value="not given", deviation="").printed == "not given"
    spread = replace(number, value="0.848", unit="", deviation="", range="0.814 to 0.881")
    assert spread.printed == "0.848 (0.814 to 0.881)"


def test_a_second_epsilon_that_a_paper_prints_stands_beside_the_first(tmp_path: Path) -> None:
    strict = Filling("chest", (), "strict", None, "c" * 64)
    sheet = tables.build("deepee_2021/1", tmp_path, [strict]).sheet()
    assert sheet.rows[-1][-2] == "0.52 (0.62 by RDP)"
    line = sheet.numbers[-1]
    assert (line["epsilon_printed"], line["epsilon_rdp"]) == ("0.52", "0.62")


def test_a_papers_notes_are_below_its_tables(tmp_path: Path) -> None:
    (note,) = papers.notes(TABLE)
    assert "Poisson" in note
    assert note in build(tmp_path).notes
    assert papers.notes("dp_dfa_2020/fig2")[0].startswith("C is section 4.2")
    assert papers.notes("zeta_dp_2024/1") == []
