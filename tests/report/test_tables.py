"""A table shows only what was run, as the recipe stands, and says how to fill what is empty."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.test_records import record, save
from zdp_bench import assets, cli
from zdp_bench.config import compose, parse
from zdp_bench.config.digests import experiment_digest
from zdp_bench.errors import UserError
from zdp_bench.experiments import claims, sweep
from zdp_bench.report import number_format, papers, tables
from zdp_bench.report import results as listing

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


EXPECTED = [filling(recipe) for recipe in ROWS]


def cells(results: Path) -> dict[str, dict[str, str]]:
    return {row.numbers["recipe"]: row.cells for row in tables.build(TABLE, results, EXPECTED).rows}  # type: ignore[misc]


def test_an_empty_table_says_what_fills_it(tmp_path: Path) -> None:
    shown = cells(tmp_path)
    assert list(shown) == [
        "phasemnist",
        "phasemnist_tuned",
        "mnist",
        "phasemnist_nonprivate",
        "mnist_nonprivate",
    ]
    assert shown["phasemnist"]["paper"] == "99.0 %"
    assert shown["phasemnist"]["ours"] == "not run: `zdp-bench run recipe=phasemnist`"
    assert shown["phasemnist"]["ε tight"] == shown["phasemnist"]["provenance"] == ""
    assert shown["phasemnist_nonprivate"]["ε printed"] == "∞"
    assert shown["phasemnist_tuned"]["row"].endswith("(tuned, ours)")


def test_seeds_are_averaged_and_the_difference_is_ours_minus_theirs(tmp_path: Path) -> None:
    save(
        tmp_path,
        record("phasemnist", 1, 0.97),
        record("phasemnist", 2, 0.98),
        record("phasemnist", 3, 0.99),
    )
    shown = cells(tmp_path)["phasemnist"]
    assert shown["ours"] == "98.00 ± 1.00 % (n = 3)"
    assert shown["difference"] == "-1.00"
    assert (shown["ε claimed"], shown["ε tight"], shown["δ"], shown["provenance"]) == (
        "0.5",
        "∞",
        "1e-05",
        "official",
    )


def test_fixed_size_batches_have_an_interval(tmp_path: Path) -> None:
    of = record("phasemnist", 1, 0.97)
    of["privacy"] |= {"epsilon_tight": 33.217, "epsilon_tight_at_least": 30.37}
    of["privacy"] |= {"epsilon_patient": 302.7, "epsilon_patient_at_least": 244.6}
    save(tmp_path, of)
    made = tables.build(TABLE, tmp_path, EXPECTED)
    (row,) = (row for row in made.rows if row.numbers["recipe"] == "phasemnist")
    assert (row.cells["ε tight"], row.cells["ε per unit"]) == (
        "30.4 to 33.2",
        "245 to 303 (patient)",
    )
    assert row.numbers["epsilon_tight_at_least"] == 30.37
    assert tables.INTERVAL in made.notes
    of["privacy"] |= {"epsilon_tight_at_least": 33.217}
    save(tmp_path, of)
    assert tables.INTERVAL not in tables.build(TABLE, tmp_path, EXPECTED).notes


def test_a_number_that_a_paper_does_not_give_has_no_unit() -> None:
    number = papers.Reference("a paper", "1", "row", "Row", "accuracy", "93.4", "%", "", "0.01")
    assert number.printed == "93.4 ± 0.01 %"
    assert replace(number, value="not given", deviation="").printed == "not given"


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
        papers.recipes_of("zeta_dp_2021/11")


def test_a_measured_table_is_not_laid_out_from_records(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="measured by `zdp-bench bench zeta_dp_2021/7`"):
        tables.build("zeta_dp_2021/7", tmp_path, [])


@pytest.mark.parametrize("table", papers.available())
def test_every_claim_names_a_row_of_its_table(table: str) -> None:
    rows = {number.row for number in papers.reference(table)}
    assert {one.row for one in claims.fillings(table, Path("none"))} <= rows


def test_a_run_on_other_data_has_a_line_of_its_own_and_is_compared_with_nothing(
    tmp_path: Path,
) -> None:
    digest = "s" * 64
    save(tmp_path, record("mnist", 1, 0.9), record("mnist", 2, 0.8, experiment=digest))
    made = tables.build(
        TABLE, tmp_path, [*EXPECTED, filling("mnist", digest=digest, on="fashion_mnist")]
    )
    lines = [row.cells for row in made.rows if row.numbers["recipe"] == "mnist"]
    assert [line["row"] for line in lines] == ["MNIST DP-SGD", "MNIST DP-SGD (on fashion_mnist)"]
    assert [line["ours"] for line in lines] == ["90.00 % (n = 1)", "80.00 % (n = 1)"]
    assert [line["paper"] for line in lines] == ["95.67 %", ""]
    assert lines[1]["difference"] == lines[1]["ε printed"] == ""
    assert any("no reproduction" in note for note in made.notes)


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
def test_a_line_on_other_data_that_is_not_run_says_what_fills_it(
    tmp_path: Path, on: str, words: str
) -> None:
    made = tables.build(TABLE, tmp_path, [*EXPECTED, filling("mnist", digest="s" * 64, on=on)])
    (line,) = [row.cells["ours"] for row in made.rows if f"on {on}" in row.cells["row"]]
    assert line == f"not run: `zdp-bench run recipe=mnist {words}`"


def test_other_data_is_found_by_the_digest_of_the_recipe_with_it(tmp_path: Path) -> None:
    moved = parse(compose(["recipe=mnist", "dataset=fashion_mnist"]))
    more = parse(compose(["recipe=mnist", "dataset=fashion_mnist", "trainer.epochs=1"]))
    for seed, run in enumerate((moved, more)):
        save(
            tmp_path,
            record(
                "mnist",
                seed,
                experiment=experiment_digest(run),
                config={"dataset": run.resolved["dataset"]},
            ),
        )
    on = [one for one in claims.fillings(TABLE, tmp_path) if one.on]
    assert [(one.recipe, one.on, one.digest) for one in on] == [
        ("mnist", "fashion_mnist", experiment_digest(moved))
    ]


def test_a_patients_epsilon_is_a_column_where_patients_own_several_records(tmp_path: Path) -> None:
    assert "ε per unit" not in tables.build(TABLE, tmp_path, EXPECTED).columns
    one = record("mnist", 1)
    one["privacy"] |= {"records_per_patient": 3, "epsilon_patient": 7.5}
    save(tmp_path, one)
    made = tables.build(TABLE, tmp_path, EXPECTED)
    assert "ε per unit" in made.columns
    assert [row.cells["ε per unit"] for row in made.rows if row.numbers["recipe"] == "mnist"] == [
        "7.5 (patient)"
    ]
    image = record("phasemnist", 1)
    image["privacy"] |= {"records_per_patient": 2, "epsilon_patient": 8.5, "unit": "image"}
    alone = record("phasemnist_tuned", 1)  # of a set where each record is a unit of its own
    alone["privacy"] |= {"records_per_patient": 1, "epsilon_patient": math.inf, "unit": "patient"}
    save(tmp_path, image, alone)
    shown = cells(tmp_path)
    assert [shown[recipe]["ε per unit"] for recipe in ("phasemnist", "phasemnist_tuned")] == [
        "8.5 (image)",
        "∞",
    ]
    assert "| 8.5 (image) |" in tables.as_markdown(tables.build(TABLE, tmp_path, EXPECTED))


@pytest.fixture
def sweeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe that sweeps: one row a model, seeds aside."""
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    body = """
        defaults: [{override /dataset: phase_digits}]
        claims: {table: zeta_dp_2021/1, row: "${algorithm.gradient}"}
        hydra: {sweeper: {params: {algorithm.gradient: "wirtinger,autograd", seed: "1,2", model.hidden: "[8]"}}}
    """
    (recipes / "sweeping.yaml").write_text(textwrap.dedent(body), encoding="utf-8")
    monkeypatch.setattr(assets, "RECIPES", recipes)
    return "sweeping"


def test_a_sweep_fills_a_row_with_each_job(sweeping: str) -> None:
    jobs = [
        ("algorithm.gradient=wirtinger", "model.hidden=[8]"),
        ("algorithm.gradient=autograd", "model.hidden=[8]"),
    ]
    assert claims.jobs_of(sweeping) == jobs
    with pytest.raises(
        UserError, match=r"row of zeta_dp_2021/1 in recipe 'sweeping', 'wirtinger' is not known"
    ):
        claims.fillings(TABLE, Path("none"))


def test_the_sweep_is_hydras_own(
    sweeping: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        sweep.Job,
        "__call__",
        lambda self, config: seen.append(f"{config.algorithm.gradient} {config.seed}"),
    )
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", "-m", f"recipe={sweeping}", f"paths.results={tmp_path}"])
    assert stop.value.code == 0
    assert sorted(seen) == ["autograd 1", "autograd 2", "wirtinger 1", "wirtinger 2"]


def test_numbers_are_printed_one_way() -> None:
    assert [number_format.epsilon(value) for value in (math.inf, 3.3967, 0.05, None, math.nan)] == [
        "∞",
        "3.4",
        "0.05",
        "",
        "",
    ]
    assert number_format.mean_and_deviation([0.5], "%") == "50.00 % (n = 1)"
    assert number_format.mean_and_deviation([0.5, math.nan], "%") == "undefined (n = 2)"
    assert number_format.mean_and_deviation([0.042], "") == "0.0420 (n = 1)"
    assert number_format.mean_and_deviation([1.0, 3.0], "dB") == "2.00 ± 1.41 dB (n = 2)"


# ------------------------------------------------------------------------------------------------------------- listing


def test_results_filter_sort_and_print(tmp_path: Path) -> None:
    save(tmp_path, record("a", 1, 0.25), record("a", 2, 0.75), record("b", 1))
    frame = listing.select(tmp_path, ["recipe=a"], "recipe,seed,value", "value")
    assert frame["seed"].tolist() == [1, 2]
    assert listing.as_text(frame, "csv").splitlines() == [
        "recipe,seed,value",
        "a,1,0.25",
        "a,2,0.75",
    ]
    assert listing.as_text(frame, "md").splitlines()[2] == "| a | 1 | 0.25 |"
    assert '"seed":2' in listing.as_text(frame, "json")
    assert listing.as_rich(frame).row_count == 2


@pytest.mark.parametrize(
    ("filters", "columns", "sort"),
    [(["recip=a"], None, None), ([], "recip", None), ([], None, "recip")],
)
def test_misspelt_columns_are_suggested(
    tmp_path: Path, filters: list[str], columns: str | None, sort: str | None
) -> None:
    save(tmp_path, record())
    with pytest.raises(UserError, match="Did you mean 'recipe'"):
        listing.select(tmp_path, filters, columns, sort)
    with pytest.raises(UserError, match="is no filter"):
        listing.select(tmp_path, ["recipe"], None, None)


def test_what_a_paper_leaves_to_say_stands_under_its_tables(tmp_path: Path) -> None:
    assert any(
        "Poisson" in note and "A.3" in note
        for note in tables.build(TABLE, tmp_path, EXPECTED).notes
    )
    assert papers.notes("dp_dfa_2020/fig2")[0].startswith("C is read in two ways")
    assert papers.notes("deepee_2021/1") == []


def test_every_private_row_of_a_paper_is_claimed_by_a_papers_accountant() -> None:
    """As the note under every table says; an ∞ is one by any accountant."""
    general = {"pld", "rdp", "rdp_wor", "gdp_clt"}
    for recipe in assets.group(assets.RECIPES):
        run = parse(compose([f"recipe={recipe}"]))
        assert (
            not run.claims.table or run.algorithm.name == "sgd" or run.accountant not in general
        ), recipe
