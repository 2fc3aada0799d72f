"""The face-off: one sweep over every algorithm, ending in a table and a figure."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shlex
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from zdp_bench import records
from zdp_bench.cli import main
from zdp_bench.cli.commands.faceoff import command_of
from zdp_bench.report import faceoff, figures

SMALL = [
    "dataset=phase_digits",
    "model=complex_mlp",
    "model.hidden=[8]",
    "trainer.epochs=1",
    "trainer.sample_rate=0.2",
    "privacy.target_epsilon=2,8",
    "seed=0",
    "threads=1",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with a small face-off; an algorithm that refuses the network is skipped."""
    folder = tmp_path_factory.mktemp("faceoff")
    words = [*SMALL, "algorithm=dp_sgd,zeta_dp_sgd", f"paths.results={folder}"]
    with redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit) as left:
        main(["faceoff", *words])
    assert not left.value.code, said.getvalue()
    assert "skipped: algorithm=dp_sgd is for real networks" in " ".join(said.getvalue().split())
    return folder


def test_it_ends_in_one_table_and_one_figure(results: Path) -> None:
    (table,) = (results / "tables").glob("faceoff_phase_digits_complex_mlp_*.csv")
    lines = list(csv.DictReader(table.read_text(encoding="utf-8").splitlines()))
    assert {(line["algorithm"], float(line["target_epsilon"])) for line in lines} == {
        ("zeta_dp_sgd", 2.0),
        ("zeta_dp_sgd", 8.0),
    }
    for line in lines:
        target = float(line["target_epsilon"])
        assert float(line["epsilon_tight"]) == pytest.approx(target, rel=1e-3)
        assert line["seeds"] == "0"
    assert (results / "figures" / "faceoff.png").stat().st_size > 5000
    assert (results / "figures" / "faceoff.svg").exists()
    page = table.with_suffix(".md").read_text(encoding="utf-8")
    assert "| zeta_dp_sgd |" in page
    command = re.search("`(zdp-bench .*)` made this", page)
    assert command
    assert set(shlex.split(command[1])[2:]) == {*SMALL} - {"threads=1"}


def test_seeds_share_a_cell_and_another_setting_has_its_own_table(results: Path) -> None:
    (own,) = faceoff.read(results)
    run = records.read_all(results)[0]
    trained = {**run["config"]["trainer"], "epochs": 9}
    more = [
        {**run, "run": "e" * 64, "seed": 1},
        {**run, "run": "f" * 64, "config": {**run["config"], "trainer": trained}},
    ]
    paths = [records.folder(results, faceoff.RECIPE, one["run"]) / "record.json" for one in more]
    try:
        for path, record in zip(paths, more, strict=True):
            records.write(path, record)
        found = {setting.digest: setting for setting in faceoff.read(results)}
        assert found.keys() > {own.digest}
        numbers = found[own.digest].sheet("zdp-bench run").numbers
        assert sorted(line["seeds"] for line in numbers) == ["0", "0 1"]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def test_options_of_an_algorithm_that_are_not_its_defaults_are_named(results: Path) -> None:
    run = records.read_all(results)[0]
    run["config"]["algorithm"] = {
        "name": "gredp",
        "noise": "complex",
        "noise_multiplier": 3.0,
        "max_grad_norm": 1.0,
    }
    assert faceoff._label(run) == "gredp, noise=complex"


def test_runs_without_privacy_stand_at_infinity_and_are_no_part_of_the_sweep(
    results: Path,
) -> None:
    (own,) = faceoff.read(results)
    run = records.read_all(results)[0]
    open_run = {
        **run,
        "run": "a" * 64,
        "config": {
            **run["config"],
            "algorithm": {"name": "sgd"},
            "privacy": {**run["config"]["privacy"], "target_epsilon": None},
        },
    }
    path = records.folder(results, faceoff.RECIPE, open_run["run"]) / "record.json"
    try:
        records.write(path, open_run)
        (found,) = faceoff.read(results)
        assert found.digest == own.digest
        assert found.values("sgd", math.inf) == [run["headline"]["value"]]
        sheet = found.sheet(command_of(found))
        assert sheet.columns[-1] == "ε = ∞"
        assert command_of(found) == command_of(own)
        (axes, *_) = figures.draw("faceoff", results, results).axes
        assert axes.get_legend_handles_labels()[1][0] == "non-private"
    finally:
        path.unlink(missing_ok=True)


def test_a_record_older_than_an_option_is_part_of_its_face_off(
    results: Path, tmp_path: Path
) -> None:
    shutil.copytree(results / "runs", tmp_path / "runs")
    path = min((tmp_path / "runs").glob("*/*/record.json"))
    record = json.loads(path.read_text(encoding="utf-8"))
    del record["config"]["trainer"]["ema"], record["config"]["privacy"]["unit"]
    path.write_text(json.dumps(record), encoding="utf-8")
    names = [found.name for found in faceoff.read(results)]
    assert [found.name for found in faceoff.read(tmp_path)] == names
