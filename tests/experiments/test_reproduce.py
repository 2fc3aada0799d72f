"""All tables in one command: no run is repeated, and every cell has a verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import write_mini_mnist
from tests.test_cli import run
from zdp_bench import assets
from zdp_bench.experiments import claims, planning
from zdp_bench.registry import find
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
    (recipes / "quickstart.yaml").symlink_to(assets.RECIPES / "quickstart.yaml")  # plans read paths
    monkeypatch.setattr(assets, "RECIPES", recipes)
    others = lambda kind, name: None if name == "measure" else find(kind, name)  # noqa: E731
    monkeypatch.setattr("zdp_bench.experiments.reproduce.find", others)
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
    assert table.count("% (n = 2)] |") == 2, "not the official MNIST"
    assert "derived" in (small / "tables" / "zeta_dp_2021_table1_runs.md").read_text()
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
    plan = planning.make_plan(["zeta_dp_2021/1"], "paper", 1, small, where)
    assert [job.filling.recipe for job in plan.jobs] == ["mnist", "phasemnist"]
    words = ["zeta_dp_2021/1", "--results", str(small), *where]
    code, out, err = run(capsys, "reproduce", *words)
    assert (code, err) == (0, "")
    assert "recipe=zcopy" not in out
    assert plan.merged == 1
    assert not (small / "runs" / "zcopy").exists()
    assert "Not run" not in (small / "tables" / "zeta_dp_2021_table1_runs.md").read_text()
    (assets.RECIPES / "first.yaml").write_text(mnist.read_text())
    plan = planning.make_plan(["zeta_dp_2021/1"], "paper", 1, small, where)
    assert [job.filling.recipe for job in plan.jobs] == ["mnist", "phasemnist"]


@pytest.mark.slow
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
    assert "4 cells: 0 as published, 0 on other or reduced data, 4 empty" in out
    assert out.count("run on generated data") == 2
    stem = small / "smoke" / "tables" / "zeta_dp_2021_table1"
    runs = stem.with_name(f"{stem.name}_runs.md").read_text()
    assert "on synthetic_images, smoke" in runs
    assert "- SMOKE: " in runs
    assert "- SMOKE: " in stem.with_suffix(".md").read_text()
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
    assert "4 cells: 0 as published, 0 on other or reduced data, 4 empty" in out
    assert "the data root lacks train-images-idx3-ubyte.gz and 3 more" in out
    write_mini_mnist(tmp_path / "root")
    code, out, err = run(capsys, "reproduce", *words)
    assert code == 0, err
    assert "4 cells: 0 as published, 2 on other or reduced data, 2 empty" in out
    assert "[2/2]" in out


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
    assert out.count("run on generated data") == 1
    assert "diverged at epoch" in out.split("Every cell")[1]


def test_a_papers_curves_are_tables_too(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in TINY:
        (assets.RECIPES / f"{name}.yaml").unlink()
    body = TINY["mnist"].replace(
        "{table: zeta_dp_2021/1, row: mnist_private}",
        "{table: dp_dfa_2020/fig4, row: fashion_mnist_dp_dfa_1.28}",
    )
    (assets.RECIPES / "drawn.yaml").write_text(f"# drawn\n{body}")
    code, out, err = run(
        capsys, "reproduce", "--profile", "smoke", "--results", str(small), "threads=1"
    )
    assert (code, err) == (0, "")
    assert "- SMOKE: " in (small / "smoke" / "tables" / "dp_dfa_2020_fig4.md").read_text()
    assert "10 cells: 0 as published, 1 on other or reduced data, 9 empty" in out
    assert run(capsys, "report", "--results", str(small / "smoke"))[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs a table"),
        (["zeta_dp_2021/1", "--profile", "smoke"], "not both"),
        (["--profile", "smok"], "Did you mean 'smoke'?"),
        (["zeta_dp_2021/1", "--budget", "2 days"], "must be a time such as 40h, 90m or 2h30m"),
        (["zeta_dp_2021/1", "--only", "published"], "Did you mean 'as-published'?"),
        (["zeta_dp_2021/1", "--launcher", "slum"], "Did you mean 'slurm'?"),
        (["--profile", "smoke", "--plan"], "takes minutes"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, _, err = run(capsys, "reproduce", *words)
    assert code == 2
    assert message in err


def test_what_takes_over_an_hour_waits_for_a_yes(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "missing_data", lambda config: "")
    monkeypatch.setattr(planning, "seconds_of", lambda config, known, may_try: 2000.0)
    words = ["zeta_dp_2021/1", "--results", str(small), "--seeds", "1", "paths.data=/nowhere"]
    code, _, err = run(capsys, "reproduce", *words)
    assert code == 2
    assert "2 runs of about 1.1 hours together: say --yes" in err
    code, out, _ = run(capsys, "reproduce", *words, "--budget", "40m", "--plan")
    assert code == 0
    assert "1 runs fill 1 empty rows in about 0.6 hours" in " ".join(out.split())
    assert not (small / "runs").exists()


def test_a_launcher_carries_the_runs_out(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In other processes, which find the recipes of this installation only."""
    for name in TINY:
        (assets.RECIPES / f"{name}.yaml").unlink()
    body = TINY["mnist"].replace("/dataset: mnist", "/dataset: phase_digits")
    body = body.replace("/model: real_mlp", "/model: complex_mlp").replace("dp_sgd", "zeta_dp_sgd")
    body = body.replace("dataset: {check: false}\n", "")
    (assets.RECIPES / "digits.yaml").write_text(f"# digits\n{body}")
    words = ["zeta_dp_2021/1", "--results", str(small), "--seeds", "2", "threads=1"]
    words += ["--launcher", "joblib", "hydra.launcher.n_jobs=1"]
    code, _, err = run(capsys, "reproduce", *words)
    assert (code, err) == (0, "")
    assert len(list(small.glob("runs/digits/*/record.json"))) == 2
    assert run(capsys, "reproduce", *words)[0] == 0
