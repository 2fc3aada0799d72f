"""A table shows only what was run, as the recipe stands, and says how to fill what is empty."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest

from tests.test_records import record, save
from zdp_bench import assets
from zdp_bench.errors import UserError
from zdp_bench.report import listing, numbers, tables

TABLE = "zeta_dp_2021/1"
EXPECTED = {recipe: recipe.ljust(64, "e") for recipe in tables.recipes_of(TABLE)}


def cells(results: Path) -> dict[str, dict[str, str]]:
    return {row.numbers["recipe"]: row.cells for row in tables.build(TABLE, results, EXPECTED).rows}  # type: ignore[misc]


def test_an_empty_table_says_what_fills_it(tmp_path: Path) -> None:
    shown = cells(tmp_path)
    assert list(shown) == ["phasemnist", "phasemnist_tuned", "mnist", "phasemnist_nonprivate", "mnist_nonprivate"]
    assert shown["phasemnist"]["paper"] == "99.0 %"
    assert shown["phasemnist"]["ours"] == "not run: `zdp-bench run recipe=phasemnist`"
    assert shown["phasemnist"]["ε tight"] == shown["phasemnist"]["provenance"] == ""
    assert shown["phasemnist_nonprivate"]["ε printed"] == "∞"
    assert shown["phasemnist_tuned"]["row"].endswith("(tuned, ours)")


def test_seeds_are_averaged_and_the_difference_is_ours_minus_theirs(tmp_path: Path) -> None:
    save(tmp_path, record("phasemnist", 1, 0.97), record("phasemnist", 2, 0.98), record("phasemnist", 3, 0.99))
    shown = cells(tmp_path)["phasemnist"]
    assert shown["ours"] == "98.00 ± 1.00 % (n = 3)"
    assert shown["difference"] == "-1.00"
    assert (shown["ε claimed"], shown["ε tight"], shown["δ"], shown["provenance"]) == ("0.5", "∞", "1e-05", "official")


def test_a_run_with_anything_overridden_fills_no_cell(tmp_path: Path) -> None:
    save(tmp_path, record("phasemnist", 1, 0.97, experiment="another"))
    assert cells(tmp_path)["phasemnist"]["ours"].startswith("not run")


def test_markdown_and_csv_are_written_and_readable(tmp_path: Path) -> None:
    save(tmp_path, record("phasemnist", 1, 0.97))
    made = tables.build(TABLE, tmp_path, EXPECTED)
    markdown, plain = tables.write(made, tmp_path)
    assert markdown.name == "zeta_dp_2021_table1.md"
    lines = markdown.read_text().splitlines()
    assert lines[0] == "# zeta_dp_2021, Table 1"
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    rows = list(csv.DictReader(io.StringIO(plain.read_text())))
    assert float(rows[0]["mean"]) == 97.0
    assert rows[0]["runs"] == record("phasemnist", 1)["run"][:16]
    assert rows[2]["n"] == "0"


def test_unknown_tables_are_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"Did you mean 'zeta_dp_2021/1'"):
        tables.recipes_of("zeta_dp_2021/11")


def test_a_measured_table_is_not_laid_out_from_records(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="measured by `zdp-bench bench zeta_dp_2021/7`"):
        tables.build("zeta_dp_2021/7", tmp_path, {})


def test_every_claim_names_a_row_of_its_table() -> None:
    for name, path in assets.group(assets.RECIPES).items():
        claim = assets.read_yaml(path).get("claims")
        if claim:
            assert claim["row"] in {number.row for number in tables.reference(claim["table"])}, name


def test_numbers_are_printed_one_way() -> None:
    assert [numbers.epsilon(value) for value in (math.inf, 3.3967, 0.05, None, math.nan)] == ["∞", "3.4", "0.05", "", ""]
    assert numbers.mean_and_deviation([0.5], "%") == "50.00 % (n = 1)"
    assert numbers.mean_and_deviation([1.0, 3.0], "dB") == "2.00 ± 1.41 dB (n = 2)"


# ------------------------------------------------------------------------------------------------------------- listing


def test_results_filter_sort_and_print(tmp_path: Path) -> None:
    save(tmp_path, record("a", 1, 0.25), record("a", 2, 0.75), record("b", 1))
    frame = listing.select(tmp_path, ["recipe=a"], "recipe,seed,value", "value")
    assert frame["seed"].tolist() == [1, 2]
    assert listing.as_text(frame, "csv").splitlines() == ["recipe,seed,value", "a,1,0.25", "a,2,0.75"]
    assert listing.as_text(frame, "md").splitlines()[2] == "| a | 1 | 0.25 |"
    assert '"seed":2' in listing.as_text(frame, "json")
    assert listing.as_rich(frame).row_count == 2


@pytest.mark.parametrize(("filters", "columns", "sort"), [(["recip=a"], None, None), ([], "recip", None), ([], None, "recip")])
def test_misspelt_columns_are_suggested(tmp_path: Path, filters: list[str], columns: str | None, sort: str | None) -> None:
    save(tmp_path, record())
    with pytest.raises(UserError, match="Did you mean 'recipe'"):
        listing.select(tmp_path, filters, columns, sort)
    with pytest.raises(UserError, match="is no filter"):
        listing.select(tmp_path, ["recipe"], None, None)
