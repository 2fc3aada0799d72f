"""`zdp-bench results`: records filtered, sorted, grouped, and in every form."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.test_records import record, save
from zdp_bench.errors import UserError
from zdp_bench.report.results import select, sheet
from zdp_bench.report.sheet import Sheet


def test_records_are_filtered_sorted_and_shown_in_every_form(tmp_path: Path) -> None:
    save(tmp_path, record("a", 1, 0.25), record("a", 2, 0.75), record("b", 1))
    shown = sheet(select(tmp_path, ["recipe=a"], "recipe,seed,value,epsilon_patient", "value"))
    assert shown.title == "2 records"
    assert shown.rows == [["a", "1", "0.25", ""], ["a", "2", "0.75", ""]]
    assert shown.as_text("csv").splitlines() == [
        "recipe,seed,value,epsilon_patient",
        "a,1,0.25,",
        "a,2,0.75,",
    ]
    assert shown.as_text("md").splitlines()[2] == "| a | 1 | 0.25 |  |"
    lines = json.loads(shown.as_text("json"))
    assert lines[1] == {"recipe": "a", "seed": 2, "value": 0.75, "epsilon_patient": None}
    assert shown.as_text("html").count("<tr>") == 3
    assert shown.as_rich().row_count == 2
    one = sheet(select(tmp_path, ["recipe=b"], None, None))
    assert one.title == "1 record"
    assert one.rows[0][-1] == "b1".ljust(8, "0")  # digests are shortened
    assert json.loads(one.as_text("json"))[0]["epsilon_tight"] == "inf"


def test_groups_have_count_mean_and_deviation_of_one_metric(tmp_path: Path) -> None:
    save(tmp_path, record("a", 1, 0.5), record("a", 2, 0.7), record("b", 1, 0.9))
    save(
        tmp_path,
        record("a", 3, 30.0, headline={"name": "psnr", "value": 30.0}, metrics={"psnr": 30.0}),
    )
    shown = sheet(select(tmp_path, [], None, None, by="recipe"))
    assert shown.title == "3 groups of 4 records"
    assert shown.rows == [
        ["a", "accuracy", "2", "0.6", "0.1414"],
        ["a", "psnr", "1", "30", ""],
        ["b", "accuracy", "1", "0.9", ""],
    ]
    only = select(tmp_path, ["recipe=b"], "recipe,mean", "mean", by="recipe,delta")
    assert only.frame.to_numpy().tolist() == [["b", 0.9]]


@pytest.mark.parametrize(
    "wrong",
    [{"filters": ["recip=a"]}, {"columns": "recip"}, {"sort": "recip"}, {"by": "recip"}],
)
def test_the_nearest_column_is_suggested(tmp_path: Path, wrong: dict[str, Any]) -> None:
    save(tmp_path, record())
    with pytest.raises(UserError, match="Did you mean 'recipe'"):
        select(tmp_path, **{"filters": [], "columns": None, "sort": None} | wrong)
    with pytest.raises(UserError, match="is no filter"):
        select(tmp_path, ["recipe"], None, None)


def configured(seed: int, value: float, **config: Any) -> dict[str, Any]:
    made = record("a", seed, value, config=config)
    return made | {"run": f"{seed}{config['optimizer']['lr']}".ljust(64, "0")}


def test_any_key_of_the_configuration_is_a_column(tmp_path: Path) -> None:
    layers = {"hidden": [4, 2], "name": "m"}
    save(tmp_path, configured(1, 0.5, optimizer={"lr": 1e-5}, model=layers))
    save(tmp_path, configured(2, 0.7, optimizer={"lr": 10.0, "on": None}, model=layers))
    found = select(tmp_path, ["optimizer.lr=0.00001"], "seed,optimizer.lr,model.hidden", None)
    assert found.frame.to_numpy().tolist() == [[1, 1e-5, "[4, 2]"]]
    assert len(select(tmp_path, ["model.hidden=[4,2]"], None, None).frame) == 2
    assert len(select(tmp_path, ["optimizer.on=null"], None, None).frame) == 2
    assert sheet(select(tmp_path, [], "optimizer.lr", "optimizer.lr")).rows == [["1e-05"], ["10"]]
    short = select(tmp_path, ["lr=10"], "lr,hidden", None)
    assert list(short.frame.columns) == ["optimizer.lr", "model.hidden"]
    with pytest.raises(UserError, match=r"Did you mean 'optimizer\.lr'"):
        select(tmp_path, [], "optimzer.lr", None)


def test_what_differs_is_shown_and_what_is_the_same_is_said_once(tmp_path: Path) -> None:
    for seed, rate in ((1, 0.1), (2, 0.1), (1, 0.3)):
        save(tmp_path, configured(seed, rate, optimizer={"lr": rate}, trainer={"epochs": 3}))
    shown = sheet(select(tmp_path, [], None, None))
    assert shown.columns == ["seed", "lr", "value", "run"]
    assert {tuple(row[:3]) for row in shown.rows} == {
        ("1", "0.1", "0.1"),
        ("2", "0.1", "0.1"),
        ("1", "0.3", "0.3"),
    }
    assert "recipe a" in shown.notes[0]
    assert "steps 7" in shown.notes[0]
    assert shown.numbers[0]["steps"] == 7  # CSV and JSON keep every column
    many = {f"k{n}": {"lr": n} for n in range(9)}
    save(tmp_path, configured(4, 0.1, optimizer={"lr": 0.1}, trainer={"epochs": 3}, **many))
    assert "k4.lr, k5.lr" in sheet(select(tmp_path, [], None, None)).notes[-1]


def test_of_several_recipes_one_column_says_what_differs_within_each(tmp_path: Path) -> None:
    for rate in (0.1, 0.3):
        algorithm = {"name": "dp_sgd", "noise_multiplier": rate}
        config = {"optimizer": {"lr": rate}, "algorithm": algorithm}
        save(tmp_path, configured(1, rate, privacy={"target_epsilon": 10 * rate}, **config))
    own = {"optimizer": {"lr": 9.0, "name": "adam"}, "model": {"name": "lenet5"}}
    other = {"name": "d", "provenance": "synthetic", "digest": "e" * 64, "notes": ""}
    for run, data in (("b1", {}), ("b2", {"data": other})):
        made = record("b", 1, 0.5, config=own) | data
        save(tmp_path, made | {"run": run.ljust(64, "0")})
    shown = sheet(select(tmp_path, [], None, None))
    assert shown.columns == ["recipe", "differs", "value", "run"]
    # The noise follows from the target; what is between recipes is not said.
    assert [row[:2] for row in shown.rows] == [
        ["a", "lr 0.1, ε 1"],
        ["a", "lr 0.3, ε 3"],
        ["b", "official"],
        ["b", "synthetic"],
    ]
    assert "Also different: provenance; --columns shows them." in shown.notes
    assert shown.numbers[3]["provenance"] == "synthetic"
    console = Console(width=50, file=StringIO())
    console.print(shown.as_rich())
    assert len(console.file.getvalue().splitlines()) < 20  # type: ignore[attr-defined]


def test_a_group_says_what_it_averages_over(tmp_path: Path) -> None:
    for seed, rate in ((1, 0.1), (2, 0.1), (1, 0.3)):
        save(tmp_path, configured(seed, rate, optimizer={"lr": rate}))
    shown = sheet(select(tmp_path, [], None, None, by="recipe"))
    assert shown.columns[-1] == "averages_over"
    assert shown.rows[0][-1] == "optimizer.lr"
    assert "1 of 1 groups average over runs that differ in more than their seed" in shown.notes[0]
    apart = sheet(select(tmp_path, [], None, None, by="recipe,optimizer.lr"))
    assert [row[3] for row in apart.rows] == ["2", "1"]
    assert "averages_over" not in apart.columns
    assert not apart.notes
    other = {"name": "d", "provenance": "official", "digest": "e" * 64, "notes": ""}
    save(tmp_path, configured(9, 0.1, optimizer={"lr": 0.1}) | {"data": other})
    assert "data_digest" in select(tmp_path, [], None, None, by="recipe").frame.to_csv()


def told(tmp_path: Path, *runs: dict[str, Any]) -> Sheet:
    """Return the table of some runs of one recipe, each of another configuration."""
    for seed, config in enumerate(runs):
        made = record("a", 1, 0.5, config={"optimizer": {"lr": 1.0}} | config)
        save(tmp_path, made | {"run": f"{seed}".ljust(64, "0")})
    return sheet(select(tmp_path, [], None, None))


def test_whose_an_epsilon_is_stands_beside_it_where_units_differ(tmp_path: Path) -> None:
    save(tmp_path, record("a", 1, 0.5), record("b", 1, 0.5))
    assert "epsilon_of" not in select(tmp_path, [], None, None).frame
    other = record("c", 1, 0.5)
    other["privacy"]["epsilon_of"] = "patient"
    save(tmp_path, other)
    shown = sheet(select(tmp_path, [], None, None))
    place = list(shown.columns).index("epsilon_of")
    assert [row[place] for row in shown.rows] == ["example", "example", "patient"]


def test_a_terminal_gets_the_first_lines_of_many_and_says_so(tmp_path: Path) -> None:
    save(tmp_path, *(record(seed=seed) for seed in range(5)))
    found = select(tmp_path, [], None, None)
    short = sheet(found, most=2)
    assert short.title == "5 records"
    assert len(short.rows) == 2
    assert "The first 2; filter or group them (--by), or print all (--format csv)." in short.notes
    assert len(sheet(found).rows) == 5
