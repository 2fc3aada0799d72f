"""A table shows only what was run, as the recipe is now, and says how to fill what is empty."""

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
from zdp_bench.report import papers, tables

TABLE = "zeta_dp_2021/1"
ROWS = {
    "phasemnist": "phasemnist_private",
    "phasemnist_tuned": "phasemnist_private",
    "mnist": "mnist_private",
    "phasemnist_nonprivate": "phasemnist_nonprivate",
    "mnist_nonprivate": "mnist_nonprivate",
}


def filling(recipe: str, **more: Any) -> tables.Filling:
    variant = "tuned" if recipe == "phasemnist_tuned" else None
    return replace(tables.Filling(recipe, (), ROWS[recipe], variant, recipe.ljust(64, "e")), **more)


FILLINGS = [filling(recipe) for recipe in ROWS]


def build(results: Path, *more: tables.Filling) -> tables.Table:
    return tables.build(TABLE, results, [*FILLINGS, *more])


def cells(results: Path) -> dict[str, dict[str, str]]:
    return {row.filling.recipe: row.cells for row in build(results).rows}


def test_an_empty_table_says_what_fills_it(tmp_path: Path) -> None:
    shown = cells(tmp_path)
    assert list(shown) == list(ROWS)
    assert shown["phasemnist"]["paper"] == "99.0 %"
    assert shown["phasemnist"]["ours"] == "not run: `zdp-bench run recipe=phasemnist`"
    assert shown["phasemnist"]["ε tight"] == shown["phasemnist"]["provenance"] == ""
    assert shown["phasemnist_nonprivate"]["ε printed"] == "∞"
    assert shown["phasemnist_tuned"]["row"].endswith("(tuned, ours)")


def test_an_empty_cell_says_why_if_that_is_known(tmp_path: Path) -> None:
    table = tables.build(
        TABLE, tmp_path, FILLINGS, {"mnist".ljust(64, "e"): "the data root lacks MNIST"}
    )
    ours = {row.filling.recipe: row.cells["ours"] for row in table.rows}
    assert ours["mnist"] == "not run: the data root lacks MNIST"


def test_seeds_are_averaged_and_the_difference_is_ours_minus_theirs(tmp_path: Path) -> None:
    values = {1: 0.97, 2: 0.98, 3: 0.99}
    save(tmp_path, *(record("phasemnist", seed, value) for seed, value in values.items()))
    shown = cells(tmp_path)["phasemnist"]
    assert shown["ours"] == "98.00 ± 1.00 % (n = 3)"
    assert shown["difference"] == "-1.00"
    rest = [shown[column] for column in ("ε claimed", "ε tight", "δ", "provenance")]
    assert rest == ["0.5", "∞", "1e-05", "official"]


def test_fixed_size_batches_have_an_interval(tmp_path: Path) -> None:
    run = record("phasemnist", 1, 0.97)
    run["privacy"] |= {"epsilon_tight": 33.217, "epsilon_tight_at_least": 30.37}
    run["privacy"] |= {"epsilon_patient": 302.7, "epsilon_patient_at_least": 244.6}
    save(tmp_path, run)
    table = build(tmp_path)
    (row,) = (row for row in table.rows if row.filling.recipe == "phasemnist")
    assert row.cells["ε tight"] == "30.4 to 33.2"
    assert row.cells["ε per unit"] == "245 to 303 (patient)"
    assert row.numbers["epsilon_tight_at_least"] == 30.37
    assert tables.INTERVAL in table.notes
    run["privacy"] |= {"epsilon_tight_at_least": 33.217}
    save(tmp_path, run)
    assert tables.INTERVAL not in build(tmp_path).notes


def test_a_run_with_anything_overridden_fills_no_cell(tmp_path: Path) -> None:
    save(tmp_path, record("phasemnist", 1, 0.97, experiment="another"))
    assert cells(tmp_path)["phasemnist"]["ours"].startswith("not run")


def test_an_equal_run_of_another_recipe_fills_the_cell_and_counts_once(tmp_path: Path) -> None:
    equal = {"experiment": "phasemnist".ljust(64, "e")}
    again = record("phasemnist_copy", 1, 0.97, **equal) | {"run": record("phasemnist", 1)["run"]}
    save(tmp_path, record("another", 2, 0.99, **equal), record("phasemnist", 1, 0.97), again)
    row = next(row for row in build(tmp_path).rows if row.filling.recipe == "phasemnist")
    assert [(run["seed"], run["recipe"]) for run in row.runs] == [(1, "phasemnist"), (2, "another")]
    assert row.cells["ours"] == "98.00 ± 1.41 % (n = 2)"


def test_markdown_and_csv_are_written(tmp_path: Path) -> None:
    save(tmp_path, record("phasemnist", 1, 0.97))
    markdown, plain = build(tmp_path).write(tmp_path)
    assert markdown.name == "zeta_dp_2021_table1.md"
    lines = markdown.read_text().splitlines()
    assert lines[0] == "# zeta_dp_2021, Table 1"
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    rows = list(csv.DictReader(io.StringIO(plain.read_text())))
    assert float(rows[0]["mean"]) == 97.0
    assert rows[0]["runs"] == record("phasemnist", 1)["run"][:16]
    assert rows[2]["n"] == "0"


def test_a_measured_table_is_not_built_from_records(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="measured by `zdp-bench bench zeta_dp_2021/7`"):
        tables.build("zeta_dp_2021/7", tmp_path, [])


def test_a_run_on_other_data_has_its_own_line_and_is_compared_with_nothing(tmp_path: Path) -> None:
    digest = "s" * 64
    save(tmp_path, record("mnist", 1, 0.9), record("mnist", 2, 0.8, experiment=digest))
    table = build(tmp_path, filling("mnist", digest=digest, on="fashion_mnist"))
    own, other = (row.cells for row in table.rows if row.filling.recipe == "mnist")
    assert (own["row"], own["ours"], own["paper"]) == (
        "MNIST DP-SGD",
        "90.00 % (n = 1)",
        "95.67 %",
    )
    assert (other["row"], other["ours"]) == ("MNIST DP-SGD (on fashion_mnist)", "80.00 % (n = 1)")
    assert other["paper"] == other["difference"] == other["ε printed"] == ""
    assert tables.OTHER_DATA in table.notes


@pytest.mark.parametrize(
    ("on", "words"),
    [
        ("fashion_mnist", "dataset=fashion_mnist"),
        (
            "phasemnist, second_seed=3, size=[8, 8]",
            "dataset=phasemnist dataset.second_seed=3 'dataset.size=[8, 8]'",
        ),
    ],
)
def test_an_empty_line_on_other_data_says_what_fills_it(
    tmp_path: Path, on: str, words: str
) -> None:
    table = build(tmp_path, filling("mnist", digest="s" * 64, on=on))
    (line,) = (row.cells["ours"] for row in table.rows if row.filling.on)
    assert line == f"not run: `zdp-bench run recipe=mnist {words}`"


def test_a_patients_epsilon_is_a_column_where_patients_own_several_records(tmp_path: Path) -> None:
    assert "ε per unit" not in build(tmp_path).columns
    patient, image, alone = (record(name) for name in ("mnist", "phasemnist", "phasemnist_tuned"))
    patient["privacy"] |= {"records_per_patient": 3, "epsilon_patient": 7.5}
    image["privacy"] |= {"records_per_patient": 2, "epsilon_patient": 8.5, "unit": "image"}
    alone["privacy"] |= {"records_per_patient": 1, "epsilon_patient": math.inf, "unit": "patient"}
    save(tmp_path, patient, image, alone)
    shown = {name: line["ε per unit"] for name, line in cells(tmp_path).items()}
    assert shown["mnist"] == "7.5 (patient)"
    assert shown["phasemnist"] == "8.5 (image)"
    assert shown["phasemnist_tuned"] == "∞"
    assert "| 8.5 (image) |" in build(tmp_path).sheet().as_markdown()


# -------------------------------------------------------------------------------- what papers print


def test_a_number_that_a_paper_does_not_give_has_no_unit() -> None:
    number = papers.Reference("a paper", "1", "row", "Row", "accuracy", "93.4", "%", "", "0.01")
    assert number.printed == "93.4 ± 0.01 %"
    assert replace(number, value="not given", deviation="").printed == "not given"
    spread = replace(number, value="0.848", unit="", deviation="", range="0.814 to 0.881")
    assert spread.printed == "0.848 (0.814 to 0.881)"


def test_a_second_epsilon_that_a_paper_prints_stands_beside_the_first(tmp_path: Path) -> None:
    strict = tables.Filling("chest", (), "strict", None, "c" * 64)
    (row,) = tables.build("deepee_2021/1", tmp_path, [strict]).rows
    assert row.cells["ε printed"] == "0.52 (0.62 by RDP)"
    assert row.numbers["epsilon_printed"] == "0.52"


def test_the_nearest_table_is_suggested() -> None:
    with pytest.raises(UserError, match=r"Did you mean 'zeta_dp_2021/1'"):
        papers.recipes_of("zeta_dp_2021/11")


def test_a_papers_notes_are_below_its_tables(tmp_path: Path) -> None:
    (note,) = papers.notes(TABLE)
    assert "Poisson" in note
    assert note in build(tmp_path).notes
    assert papers.notes("dp_dfa_2020/fig2")[0].startswith("C is read in two ways")
    assert papers.notes("zeta_dp_2024/1") == []
