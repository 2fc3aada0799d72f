"""The face-off: one sweep over every algorithm, ending in a table and a figure; who refuses the network is skipped."""

from __future__ import annotations

import csv
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from zdp_bench import records
from zdp_bench.report import faceoff

SMALL = [
    "dataset=phase_digits",
    "model=complex_mlp",
    "model.hidden=[8]",
    "trainer.epochs=1",
    "trainer.sample_rate=0.2",
    "privacy.target_epsilon=2,8",
    "seed=0,1",
    "threads=1",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faceoff")
    words = ["run", "-m", "recipe=algorithm_faceoff", *SMALL, f"paths.results={folder}"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    ran = subprocess.run(
        [sys.executable, "-m", "zdp_bench", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "skipped: algorithm=dp_sgd is for real networks" in " ".join(ran.stdout.split())
    return folder


def test_it_ends_in_one_table_and_one_figure(results: Path) -> None:
    (table,) = (results / "tables").glob("faceoff_phase_digits_complex_mlp_*.csv")
    lines = list(csv.DictReader(table.read_text(encoding="utf-8").splitlines()))
    told = {(line["algorithm"], float(line["target_epsilon"])) for line in lines}
    assert told == {
        (algorithm, epsilon) for algorithm in ("dp_dfa", "zeta_dp_sgd") for epsilon in (2.0, 8.0)
    }
    for line in lines:
        assert float(line["epsilon_tight"]) == pytest.approx(
            float(line["target_epsilon"]), rel=1e-3
        )
        assert line["seeds"] == "0 1"
    assert (results / "figures" / "faceoff.png").stat().st_size > 5000
    assert (results / "figures" / "faceoff.svg").exists()
    page = table.with_suffix(".md").read_text(encoding="utf-8")
    assert "| zeta_dp_sgd |" in page
    command = re.search("`(zdp-bench .*)` made this", page)
    assert command
    assert set(shlex.split(command[1])[3:]) == {"recipe=algorithm_faceoff", *SMALL} - {"threads=1"}


def test_runs_of_another_setting_stand_in_a_table_of_their_own(results: Path) -> None:
    (one,) = faceoff.read(results)
    run = records.read_all(results)[0]
    run["config"] = {**run["config"], "trainer": {**run["config"]["trainer"], "epochs": 9}}
    run["run"] = "f" * 64
    path = records.folder(results, faceoff.RECIPE, run["run"]) / "record.json"
    records.write(path, run)
    try:
        assert {f.digest for f in faceoff.read(results)} > {one.digest}
    finally:
        path.unlink()


def test_choices_of_an_algorithm_that_are_not_its_defaults_are_named(results: Path) -> None:
    run = records.read_all(results)[0]
    run["config"]["algorithm"] = {
        "name": "gredp",
        "noise": "complex",
        "noise_multiplier": 3.0,
        "max_grad_norm": 1.0,
    }
    assert faceoff._label(run) == "gredp, noise=complex"
