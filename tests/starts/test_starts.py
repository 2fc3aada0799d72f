"""`zdp-bench new`: each start runs as it was written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from tests.test_cli import run as command
from tests.test_package import ROOT
from zdp_bench.config import configured
from zdp_bench.errors import UserError
from zdp_bench.experiments.validate import validate
from zdp_bench.starts import KINDS, write_start


def test_the_recipe_validates_and_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = command(capsys, "new", "recipe", "mine")
    assert code == 0
    assert "zdp-bench validate recipe=./mine.yaml" in out
    report = validate(configured(["recipe=./mine.yaml"]), trial=False)
    assert report.privacy["epsilon_tight"] == pytest.approx(3, rel=0.01)
    ConfigStore.instance().repo["recipe"].pop("mine.yaml")


@pytest.mark.parametrize("kind", ["dataset", "algorithm"])
def test_the_plug_in_trains_as_it_is(tmp_path: Path, kind: str) -> None:
    files = write_start(kind, "mine", tmp_path)
    assert [path.name for path in files] == ["pyproject.toml", "zdp_mine.py"]
    assert all("NAME" not in path.read_text() for path in files)
    site = tmp_path / "site"  # what pip writes: an entry point beside the module
    (site / "zdp_mine-0.1.0.dist-info").mkdir(parents=True)
    (site / "zdp_mine-0.1.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: zdp-mine\nVersion: 0.1.0\n"
    )
    (site / "zdp_mine-0.1.0.dist-info/entry_points.txt").write_text(
        "[zdp_bench.plugins]\nmine = zdp_mine\n"
    )
    (site / "zdp_mine.py").write_text(files[1].read_text())
    words = ["run", "recipe=quickstart", f"{kind}=mine", "trainer.epochs=1", "model.hidden=[4]"]
    if kind == "algorithm":
        words += ["algorithm.noise_multiplier=1.5", "algorithm.max_grad_norm=1"]
    done = subprocess.run(
        [sys.executable, "-m", "zdp_bench", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{site}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tight ε" in done.stdout


def test_names_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for kind, taken in zip(KINDS, ("quickstart", "mnist", "dp_sgd"), strict=True):
        with pytest.raises(UserError, match=f"there is a {kind} '{taken}' already"):
            write_start(kind, taken, tmp_path)
    with pytest.raises(UserError, match="cannot be a name"):
        write_start("recipe", "my-recipe", tmp_path)
    write_start("recipe", "mine", tmp_path)
    with pytest.raises(UserError, match="is there already"):
        write_start("recipe", "mine", tmp_path)
