"""`recipe=./mine.yaml`: a recipe file from anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from tests.test_cli import run as command
from zdp_bench.config import configured
from zdp_bench.config.compose import recipe_body
from zdp_bench.config.digests import experiment_digest
from zdp_bench.errors import UserError

MINE = """
defaults:
  - override /dataset: synthetic_images
  - override /model: real_mlp
  - override /algorithm: dp_sgd
dataset: {shape: [1, 8, 8], train: 60, test: 20}
model: {hidden: [4]}
algorithm: {noise_multiplier: 1.5}
trainer: {sample_rate: 0.5, epochs: 1}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "elsewhere/mine.yaml"
    path.parent.mkdir()
    path.write_text(MINE)
    yield path
    for name in ("mine.yaml", "other.yaml"):
        ConfigStore.instance().repo.get("recipe", {}).pop(name, None)


def test_a_file_is_a_recipe_by_its_name(mine: Path) -> None:
    config = configured([f"recipe={mine}", "seed=3"])
    assert (config.recipe, config.seed) == ("mine", 3)
    assert config.model.options["hidden"] == [4]
    assert config.algorithm.options["noise_multiplier"] == 1.5
    mine.write_text(MINE.replace("1.5", "2.5"))  # read anew each time
    assert configured([f"recipe={mine}"]).algorithm.options["noise_multiplier"] == 2.5


def test_options_meant_for_another_plug_in_are_dropped_as_in_a_recipe_that_ships(
    mine: Path,
) -> None:
    config = configured([f"recipe={mine}", "model=complex_mlp", "dataset.complex_valued=true"])
    assert config.model.name == "complex_mlp"
    assert configured([f"recipe={mine}", "algorithm=sgd"]).algorithm.options == {}
    assert recipe_body("nothing") is None


def test_the_command_line_runs_and_validates_it(
    mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mine.parent)
    assert command(capsys, "run", "recipe=./mine.yaml")[0] == 0
    assert list(Path("results/runs/mine").glob("*/record.json"))
    code, out, _ = command(capsys, "validate", "recipe=mine.yaml", "trainer.epoch=3")
    assert code == 2
    Path("other.yaml").write_text(MINE.replace("epochs: 1", "epochs: 2"))
    code, out, _ = command(capsys, "run", "-m", "recipe=./mine.yaml,other.yaml", "seed=0")
    assert code == 0
    assert "2 jobs, 0 failed" in out


def test_an_exported_recipe_runs_the_same_experiment(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.training.test_run import Silent
    from zdp_bench.extras.sharing.export import export
    from zdp_bench.training.run import run

    outcome = run(configured([f"recipe={mine}", f"paths.results={tmp_path}"]), Silent())
    export(tmp_path, "mine", tmp_path / "model")
    again = tmp_path / "model/recipe.yaml"
    assert experiment_digest(configured([f"recipe={again}"])) == outcome.record["experiment"]
    ConfigStore.instance().repo["recipe"].pop("recipe.yaml")


WRONG = [
    ("none.yaml", None, "there is no such file"),
    ("quickstart.yaml", MINE, "a recipe of zdp-bench has this name"),
    ("a-b.yaml", MINE, "letters, digits and _ only"),
    ("nan.yaml", MINE, "letters, digits and _ only"),
    ("list.yaml", "- 1\n", "holds no keys of a run"),
    ("broken.yaml", "a: [1\n", "is no YAML"),
]


@pytest.mark.parametrize(("name", "text", "says"), WRONG, ids=[line[0] for line in WRONG])
def test_a_file_that_is_no_recipe_is_refused(
    tmp_path: Path, name: str, text: str | None, says: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=says):
        configured([f"recipe={tmp_path / name}"])


def test_a_wrong_key_in_it_is_named(mine: Path) -> None:
    mine.write_text(MINE + "trianer: {epochs: 1}\n")
    with pytest.raises(UserError, match="key 'trianer' is not known"):
        configured([f"recipe={mine}"])
