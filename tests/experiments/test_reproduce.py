"""All tables in one command: no run is repeated, and every cell has a verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import write_mini_mnist
from tests.test_cli import run
from zdp_bench import assets
from zdp_bench.bench import tables as measured
from zdp_bench.config import compose, parse
from zdp_bench.data import files
from zdp_bench.data.synthetic import volumes
from zdp_bench.experiments import claims, reproduce
from zdp_bench.report import tables

# Two recipes of a paper's table.
TRAINING = """
model: {hidden: [4]}
algorithm: {noise_multiplier: 1.0, max_grad_norm: 1.0}
trainer: {sample_rate: 0.5, epochs: 1}
dataset: {check: false}
"""
TINY = {
    "mnist": """\
defaults:
  - override /dataset: mnist
  - override /model: real_mlp
  - override /algorithm: dp_sgd
claims: {table: zeta_dp_2021/1, row: mnist_private}"""
    + TRAINING,
    "phasemnist": """\
defaults:
  - override /dataset: phasemnist
claims: {table: zeta_dp_2021/1, row: phasemnist_private}"""
    + TRAINING,
}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two recipes, one table, nothing to measure; returns the results folder."""
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    for name, body in TINY.items():
        (recipes / f"{name}.yaml").write_text(f"# {name}\n{body}")
    monkeypatch.setattr(assets, "RECIPES", recipes)
    monkeypatch.setattr(measured, "available", list)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    return tmp_path / "results"


def test_a_table_runs_what_it_lacks(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mini_mnist(tmp_path / "root")
    words = ["zeta_dp_2021/1", "--results", str(small), "--seeds", "2"]
    words += [f"paths.data={tmp_path / 'root'}", "threads=1"]
    code, out, err = run(capsys, "reproduce", *words)
    assert (code, err) == (0, "")
    table = (small / "tables" / "zeta_dp_2021_table1.md").read_text()
    assert table.count("(n = 2)") == 2
    assert "derived" in table
    assert out.count("done before") == 0
    code, out, _ = run(capsys, "reproduce", *words)
    assert out.count("done before") == 4


def test_one_of_several_equal_runs_is_made(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two recipes with one configuration: the record of either fills the rows of both."""
    write_mini_mnist(tmp_path / "root")
    mnist = assets.RECIPES / "mnist.yaml"
    copy = TINY["mnist"].replace("row: mnist_private", "row: mnist_private, variant: again")
    (assets.RECIPES / "zcopy.yaml").write_text(f"# zcopy\n{copy}")
    where = [f"paths.data={tmp_path / 'root'}", "threads=1"]
    plan = reproduce.make_plan(["zeta_dp_2021/1"], "paper", 1, small, where)
    assert [job.filling.recipe for job in plan.jobs] == ["mnist", "phasemnist"]
    words = ["zeta_dp_2021/1", "--results", str(small), *where]
    code, out, err = run(capsys, "reproduce", *words)
    assert (code, err) == (0, "")
    assert "recipe=zcopy seed=1: done before, by the equal recipe=mnist" in out
    assert not (small / "runs" / "zcopy").exists()
    assert "not run" not in (small / "tables" / "zeta_dp_2021_table1.md").read_text()
    (assets.RECIPES / "first.yaml").write_text(mnist.read_text())
    plan = reproduce.make_plan(["zeta_dp_2021/1"], "paper", 1, small, where)
    assert [job.filling.recipe for job in plan.jobs] == ["mnist", "phasemnist"]


def test_smoke_runs_everything_on_generated_data_and_fills_no_paper_cell(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    words = ["--profile", "smoke", "--results", str(small), "threads=1", "paths.data=/nowhere"]
    code, out, err = run(capsys, "reproduce", *words)
    assert (code, err) == (0, "")
    assert (
        "/2] zeta_dp_2021/1  recipe=phasemnist seed=1: accuracy" in out
    )  # the jobs end in any order
    assert "[2/2] zeta_dp_2021/1" in out
    assert "2 cells: 0 reproduced, 0 different, 0 not run, 2 not compared" in out
    written = (small / "smoke" / "tables" / "zeta_dp_2021_table1.md").read_text()
    assert "on synthetic_images, smoke" in written
    assert "- SMOKE: " in written
    assert (small / "smoke" / "report.html").is_file()
    assert [path.name for path in small.iterdir()] == ["smoke"]
    made = tables.build(
        "zeta_dp_2021/1", small / "smoke", claims.fillings("zeta_dp_2021/1", small / "smoke")
    )
    assert all(row.numbers["n"] == 0 for row in made.rows if not row.numbers["on"]), (
        "a smoke run stands in a paper's cell"
    )
    code, out, _ = run(capsys, "reproduce", *words)
    assert out.count("(done before)") == 2


def test_here_runs_what_the_data_root_holds_and_says_what_it_lacks(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--profile",
        "here",
        "--results",
        str(small),
        "threads=1",
        f"paths.data={tmp_path / 'root'}",
    ]
    code, out, err = run(capsys, "reproduce", *words)
    assert (code, err) == (0, "")
    assert "2 cells: 0 reproduced, 0 different, 2 not run, 0 not compared" in out
    assert "the data root lacks train-images-idx3-ubyte.gz and 3 more" in out
    write_mini_mnist(tmp_path / "root")
    code, out, err = run(capsys, "reproduce", *words)
    assert code == 0, err
    assert "2 cells: 0 reproduced, 2 different" in out
    assert "[2/2]" in out


@pytest.mark.parametrize(
    "recipe",
    ["chest_xray_strict", "mri_recon", "msd_liver_private", "ecg", "mri_sequence_cl", "speech"],
)
def test_here_knows_the_sets_that_are_got_by_hand(tmp_path: Path, recipe: str) -> None:
    config = parse(compose([f"recipe={recipe}", f"paths.data={tmp_path}"]))
    holds = files.card(config.dataset.name).holds
    assert reproduce.missing_data(config) == f"the data root lacks {holds}"


def test_here_knows_that_another_task_of_a_release_is_not_there(tmp_path: Path) -> None:
    volumes.write_set(tmp_path / "Task04_Hippocampus", 3, seed=0)
    of = {
        task: parse(compose([f"recipe=msd_{task}_private", f"paths.data={tmp_path}"]))
        for task in ("hippocampus", "liver")
    }
    assert reproduce.missing_data(of["hippocampus"]) == ""
    assert (
        reproduce.missing_data(of["liver"])
        == "the data root holds some of dataset 'msd', but not what this run reads"
    )


def test_a_run_that_fails_is_told_and_the_rest_is_made(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = assets.RECIPES / "mnist.yaml"
    path.write_text(path.read_text().replace("\nmodel:", "\noptimizer: {lr: 1.0e+30}\nmodel:"))
    code, out, err = run(
        capsys, "reproduce", "--profile", "smoke", "--results", str(small), "threads=1"
    )
    assert code == 2
    assert "zdp-bench: recipe=mnist seed=1: diverged at epoch" in err
    assert "1 not run, 1 not compared" in out


def test_paper_is_estimated_before_it_starts(small: Path, tmp_path: Path) -> None:
    write_mini_mnist(tmp_path / "root")
    extra = [f"paths.data={tmp_path / 'root'}", "dataset.check=false", "threads=1"]
    plan = reproduce.make_plan(["zeta_dp_2021/1"], "paper", 2, small, extra)
    assert (len(plan.jobs), plan.missing) == (4, {})
    head, *lines = reproduce.estimate(plan.jobs, small)
    assert head.startswith("to run: 4 runs, about ")
    assert [line.split(":")[0].strip() for line in lines] == ["mnist", "phasemnist"]
    assert all("three steps on cpu" in line for line in lines)
    (tmp_path / "root" / "MNIST" / "raw" / "train-images-idx3-ubyte.gz").write_bytes(b"no picture")
    head, *lines = reproduce.estimate(plan.jobs[:1], small)
    assert head.endswith("; 1 runs could not be estimated")
    assert "unknown" in lines[0]
    assert not list(small.glob("runs/*/*")), "an estimate leaves nothing behind"


def test_a_papers_curves_are_tables_too(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in TINY:
        (assets.RECIPES / f"{name}.yaml").unlink()
    body = TINY["mnist"].replace(
        "{table: zeta_dp_2021/1, row: mnist_private}",
        "{table: dp_dfa_2020/fig4, row: fashion_mnist_dp_dfa_0.64}",
    )
    (assets.RECIPES / "drawn.yaml").write_text(f"# drawn\n{body}")
    code, out, err = run(
        capsys, "reproduce", "--profile", "smoke", "--results", str(small), "threads=1"
    )
    assert (code, err) == (0, "")
    assert "- SMOKE: " in (small / "smoke" / "tables" / "dp_dfa_2020_fig4.md").read_text()
    assert "0 reproduced, 0 different" in out
    assert "1 not compared" in out
    assert run(capsys, "report", "--results", str(small / "smoke"))[0] == 0


def test_smoke_tries_every_setting_of_a_sweep(small: Path) -> None:
    path = assets.RECIPES / "swept.yaml"
    body = TINY["mnist"].replace("model: {hidden: [4]}", "model: {hidden: [5]}")
    axes = "{optimizer.lr: '0.1,0.2,0.3', 'algorithm.max_grad_norm': '1,2'}"
    path.write_text(f"# swept\n{body}hydra: {{sweeper: {{params: {axes}}}}}\n")
    plan = reproduce.make_plan(["zeta_dp_2021/1"], "smoke", 1, small / "smoke", ["threads=1"])
    tried = [job.filling.overrides for job in plan.jobs if job.filling.recipe == "swept"]
    assert len(tried) == 4
    assert {word for words in tried for word in words} == {
        *("optimizer.lr=0.1", "optimizer.lr=0.2", "optimizer.lr=0.3"),
        *("algorithm.max_grad_norm=1", "algorithm.max_grad_norm=2"),
    }
    assert [f.overrides for f in plan.fillings["zeta_dp_2021/1"] if f.recipe == "swept"] == tried


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs a table"),
        (["zeta_dp_2021/1", "--profile", "smoke"], "not both"),
        (["--profile", "smok"], "Did you mean 'smoke'?"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, _, err = run(capsys, "reproduce", *words)
    assert code == 2
    assert message in err


def test_every_data_set_of_a_recipe_has_a_stand_in_or_stands_for_itself() -> None:
    for recipe in assets.group(assets.RECIPES):
        config = parse(compose([f"recipe={recipe}"]))
        words = reproduce.smoke_overrides(config)
        assert words is not None, (
            f"{config.dataset.name} needs `stand_in` on its card, or a NAME_synthetic"
        )
        reduced = parse(compose([f"recipe={recipe}", *words]))
        assert not files.card(reduced.dataset.name).files, "smoke needs no file"
