"""Tables of our own: a line for each row and variant, a column for each target of ε."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from tests.test_records import record, save
from zdp_bench.errors import UserError
from zdp_bench.report import grids
from zdp_bench.report.cells import Filling

ROW = "Fashion-MNIST"


def filling(name: str, row: str = ROW, variant: str | None = None) -> Filling:
    return Filling(name, (), row, variant, name.ljust(64, "e"))


def run(name: str, seed: int, value: float, target: float | None, **privacy: Any) -> dict[str, Any]:
    made: dict[str, Any] = record(name, seed, value)
    made["config"]["privacy"] = {"target_epsilon": target}
    made["privacy"] |= {"epsilon_tight": target or math.inf, "epsilon_of": "patient"} | privacy
    return made


def test_a_cell_is_the_mean_over_seeds_and_what_is_kept_above_the_floor(tmp_path: Path) -> None:
    private = [run("private", seed, value, 3.0) for seed, value in ((1, 0.8), (2, 0.82))]
    save(tmp_path, run("open", 1, 0.9, None), *private)
    grid = grids.build("cost", tmp_path, [filling("open"), filling("private")])
    shown = dict(zip(grid.columns, grid.rows[0], strict=True))
    assert shown["ε protects"] == "patient"
    assert (shown["non-private"], shown["ε = 3"]) == ("90.0 %", "81.0 ± 1.4 % (89 %)")
    assert shown["runs"] == "1 to 2"
    with grid.write(tmp_path / "cost")[1].open() as file:
        numbers = list(csv.DictReader(file))
    assert [line["values"] for line in numbers] == ["0.8 0.82", "0.9"]


def test_a_run_of_other_settings_or_without_its_open_twin_is_shown_as_what_it_is(
    tmp_path: Path,
) -> None:
    save(tmp_path, run("private", 1, 0.8, 3.0), run("stranger", 1, 0.99, 3.0))
    (line,) = grids.build("cost", tmp_path, [filling("private")]).numbers
    assert (line["values"], line["kept"]) == ("0.8", None)


def test_a_seed_counts_once_with_the_mean_of_its_folds_beside_what_others_report(
    tmp_path: Path,
) -> None:
    folds = [("a", 1, 0.8, 0), ("b", 1, 0.9, 1), ("a", 2, 0.85, 0), ("b", 2, 0.89, 1)]
    runs = [run(name, seed, value, 3.0) for name, seed, value, _ in folds]
    for made, (*_, fold) in zip(runs, folds, strict=True):
        made["config"]["dataset"] = {"fold": fold}
    save(tmp_path, *runs)
    sheet = grids.build("cost", tmp_path, [filling("a"), filling("b")])
    (line,) = sheet.numbers
    assert (line["values"], line["seeds"], line["n"]) == ("0.85 0.87", "1 2", 2)
    shown = dict(zip(sheet.columns, sheet.rows[0], strict=True))
    assert shown["others"] == "89.7 % at ε = 3 [1]"
    assert [note[:3] for note in sheet.notes[-3:]] == ["[1]", "[2]", "[3]"]


def test_an_empty_table_of_ours_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="zdp-bench reproduce cost"):
        grids.build("cost", tmp_path, [filling("private")])


VALUES = {
    "magnitude": [0.5, 0.52, 0.51],
    "channels": [0.9, 0.92, 0.94],
    "complex": [0.9, 0.93, 0.93],
}


def test_variants_stand_in_the_tables_order_and_are_compared_seed_by_seed(tmp_path: Path) -> None:
    for name, values in VALUES.items():
        save(tmp_path, *(run(name, seed, value, 3.0) for seed, value in enumerate(values)))
    fillings = [filling(name, "PhaseMNIST", name) for name in VALUES]
    grid = grids.build("complex", tmp_path, fillings)
    assert [line["variant"] for line in grid.numbers] == list(VALUES)
    said, magnitude, channels = grid.notes[-3:]
    assert said.startswith("Of 2 comparisons, complex is better in 1, worse in 0 and not shown")
    assert magnitude.startswith("PhaseMNIST, complex − magnitude. ε = 3: +41.0 [")
    assert channels == ("PhaseMNIST, complex − channels. ε = 3: +0.0 [-2.5, +2.5] points, p = 1.")


def test_a_variant_is_compared_over_the_seeds_that_both_have(tmp_path: Path) -> None:
    save(tmp_path, run("complex", 1, 0.8, 3.0), run("channels", 1, 0.7, 3.0))
    fillings = [filling(name, "PhaseMNIST", name) for name in ("complex", "channels")]
    grid = grids.build("complex", tmp_path, fillings)
    assert not any("complex −" in note for note in grid.notes)
