"""All tables in one command: which runs, in which order; none repeated; a verdict on each cell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import write_mini_mnist
from tests.test_cli import run
from tests.test_records import record, save
from zdp_bench import assets
from zdp_bench.config import configured
from zdp_bench.data import files
from zdp_bench.errors import UserError
from zdp_bench.experiments import claims, reproduce
from zdp_bench.extras.standins import scans
from zdp_bench.registry import find
from zdp_bench.report import papers, tables

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
    monkeypatch.setenv("COLUMNS", "200")  # no sentence is folded
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


def test_one_of_several_equal_runs_is_made(small: Path, tmp_path: Path) -> None:
    """Two recipes with one configuration: the record of either fills the rows of both."""
    write_mini_mnist(tmp_path / "root")
    mnist = assets.RECIPES / "mnist.yaml"
    copy = TINY["mnist"].replace("row: mnist_private", "row: mnist_private, variant: again")
    (assets.RECIPES / "zcopy.yaml").write_text(f"# zcopy\n{copy}")
    where = [f"paths.data={tmp_path / 'root'}", "threads=1"]
    plan = reproduce.make_plan(["zeta_dp_2021/1"], "paper", 1, small, where)
    assert [job.filling.recipe for job in plan.jobs] == ["mnist", "phasemnist"]
    assert plan.merged == 1
    used = {"dataset": plan.jobs[0].row.resolved["dataset"]}
    save(small, record("mnist", 1, experiment=plan.jobs[0].filling.digest, config=used))
    (assets.RECIPES / "first.yaml").write_text(mnist.read_text())
    plan = reproduce.make_plan(["zeta_dp_2021/1"], "paper", 1, small, where)
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
    assert "4 cells: 0 as published, 0 with other settings or data, 4 empty" in out
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
    assert all(row.filling.on or not row.runs for row in made.rows)  # no paper's cell has one
    code, out, _ = run(capsys, "reproduce", *words)
    assert out.count("(done before)") == 2


def test_here_says_what_the_data_root_lacks(
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
    assert "4 cells: 0 as published, 0 with other settings or data, 4 empty" in out
    assert "the data root lacks train-images-idx3-ubyte.gz and 3 more" in out


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
    assert "10 cells: 0 as published, 1 with other settings or data (1 other data), 9 empty" in out
    assert run(capsys, "report", "--results", str(small / "smoke"))[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs a table"),
        (["zeta_dp_2021/1", "--profile", "smoke"], "not both"),
        (["zeta_dp_2021/1", "--budget", "2 days"], "must be a time such as 40h, 90m or 2h30m"),
        (["--profile", "smoke", "--plan"], "a run of each recipe"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, _, err = run(capsys, "reproduce", *words)
    assert code == 2
    assert message in err


def test_what_takes_over_an_hour_waits_for_a_yes(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "missing_data", lambda config: "")
    monkeypatch.setattr(reproduce, "seconds_of", lambda config, known, may_try: 2000.0)
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


# planning


@pytest.mark.parametrize("recipe", ["chest_xray_strict", "mri_recon"])
def test_here_knows_the_sets_that_are_got_by_hand(tmp_path: Path, recipe: str) -> None:
    config = configured([f"recipe={recipe}", f"paths.data={tmp_path}"])
    holds = files.card(config.dataset.name).holds
    assert reproduce.missing_data(config) == f"the data root lacks {holds}"


def test_here_knows_that_another_task_of_a_release_is_not_there(tmp_path: Path) -> None:
    scans.write_abdomens(tmp_path / "Task04_Hippocampus", 3, seed=0)
    of = {
        task: configured([f"recipe=msd_{task}_private", f"paths.data={tmp_path}"])
        for task in ("hippocampus", "liver")
    }
    assert reproduce.missing_data(of["hippocampus"]) == ""
    assert (
        reproduce.missing_data(of["liver"])
        == "the data root holds some of dataset 'msd', but not what this run reads"
    )


def test_smoke_makes_the_first_job_of_a_recipe_once(small: Path) -> None:
    path = assets.RECIPES / "swept.yaml"
    body = TINY["mnist"].replace("model: {hidden: [4]}", "model: {hidden: [5]}")
    path.write_text(f"# swept\n{body}hydra: {{sweeper: {{params: {{optimizer.lr: '0.1,0.2'}}}}}}\n")
    plan = reproduce.make_plan(["zeta_dp_2021/1"], "smoke", None, small / "smoke", ["threads=1"])
    made = [(job.filling.overrides, job.seed) for job in plan.jobs if "swept" in str(job)]
    assert made == [(("optimizer.lr=0.1",), 1)]


def test_every_data_set_of_a_recipe_has_a_stand_in_or_stands_for_itself() -> None:
    chosen: dict[str, str] = {}  # one recipe for each data set
    for recipe, path in assets.group(assets.RECIPES).items():
        entries = [*assets.read_yaml(path).get("defaults", []), {"override /dataset": "none"}]
        names = [entry.get("override /dataset") for entry in entries if isinstance(entry, dict)]
        chosen.setdefault(next(filter(None, names)), recipe)
    assert len(chosen) > 12
    for recipe in chosen.values():
        config = configured([f"recipe={recipe}"])
        words = reproduce.smoke_overrides(config)
        assert words is not None, (
            f"{config.dataset.name} needs `stand_in` on its card, or a NAME_synthetic"
        )
        reduced = configured([f"recipe={recipe}", *words])
        assert not files.card(reduced.dataset.name).files, "smoke needs no file"


def plan_of(small: Path, root: Path, seeds: int | None = 1) -> reproduce.ReproductionPlan:
    extra = [f"paths.data={root}", "threads=1"]
    return reproduce.make_plan(["zeta_dp_2021/1"], "paper", seeds, small, extra)


def test_runs_that_fill_most_rows_an_hour_come_first_and_a_budget_takes_from_the_top(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mini_mnist(tmp_path)
    took = {"mnist": 100.0, "phasemnist": 60.0}
    monkeypatch.setattr(reproduce, "seconds_of", lambda config, known, may_try: took[config.recipe])
    ordered = reproduce.order(plan_of(small, tmp_path, seeds=2), small)
    asked = [(work.job.filling.recipe, work.job.seed, work.cells) for work in ordered]
    assert asked == [("phasemnist", 1, 1), ("mnist", 1, 1), ("phasemnist", 2, 0), ("mnist", 2, 0)]
    assert reproduce.hours(ordered) == pytest.approx(320 / 3600)
    taken = reproduce.within(130.0, ordered)
    assert [(work.job.filling.recipe, work.job.seed) for work in taken] == [
        ("phasemnist", 1),
        ("phasemnist", 2),
    ]


def test_a_run_without_its_data_is_last_and_never_taken(small: Path, tmp_path: Path) -> None:
    ordered = reproduce.order(plan_of(small, tmp_path), small)
    assert all("the data root lacks" in work.lacks for work in ordered)
    assert reproduce.hours(ordered) == 0
    assert reproduce.within(1e9, ordered) == []
    lines = reproduce.sheet(plan_of(small, tmp_path), ordered)
    assert lines.notes[0].startswith("0 runs fill 0 empty rows")
    extra = [f"paths.data={tmp_path}", "threads=1"]
    plan = reproduce.make_plan(["zeta_dp_2021/1"], "here", 1, small, extra)
    notes = reproduce.sheet(plan, reproduce.order(plan, small)).notes
    assert any(note.startswith("2 rows are left out: the data root lacks ") for note in notes)
    assert (papers.seeds("zeta_dp_2021/4"), papers.seeds("zeta_dp_2021/1")) == (5, 1)
    assert len(plan_of(small, tmp_path, seeds=None).jobs) == 2, "as many runs as the paper has"


def test_only_as_published_leaves_variants_out(small: Path, tmp_path: Path) -> None:
    body = TINY["mnist"].replace("row: mnist_private", "row: mnist_private, variant: wider")
    (assets.RECIPES / "wide.yaml").write_text(f"# wide\n{body.replace('[4]', '[5]')}")
    plan = reproduce.make_plan(["zeta_dp_2021/1"], "paper", 1, small, [], as_published=True)
    assert [job.filling.recipe for job in plan.jobs] == ["mnist", "phasemnist"]
    assert len(plan.fillings["zeta_dp_2021/1"]) == 3


def test_weights_that_would_be_fetched_are_missing_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    config = configured(["recipe=gredp_transfer", f"paths.data={tmp_path}"])
    assert "ImageNet's weights of ResNet-18 are not there" in reproduce.missing_data(config)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "resnet18-f37072fd.pth").touch()
    assert "the data root lacks" in reproduce.missing_data(config)


def test_a_plan_tries_steps_for_a_while_and_calls_the_rest_unknown(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mini_mnist(tmp_path)
    plan = plan_of(small, tmp_path, seeds=3)
    assert not any("config" in vars(job) for job in plan.jobs), "a plan composes no run"
    monkeypatch.setattr(reproduce, "TRIALS", -1.0)
    ordered = reproduce.order(plan, small)
    assert [work.seconds for work in ordered] == [None] * 6
    notes = reproduce.sheet(plan, ordered).notes
    assert any(note.startswith("6 possible runs are of unknown length") for note in notes)
    monkeypatch.setattr(reproduce, "TRIALS", 60.0)
    tried = []
    validate = reproduce.validate
    monkeypatch.setattr(reproduce, "validate", lambda one: tried.append(one) or validate(one))
    assert all(work.seconds for work in reproduce.order(plan, small))
    assert len(tried) == 2, "a row is tried once, not once a seed"


def test_a_records_time_is_that_of_runs_that_take_as_long() -> None:
    config = configured(["recipe=quickstart", "trainer.sample_rate=0.25"])
    # An earlier record: its keys in another order, and without those that are off by default.
    model = dict(reversed(config.resolved["model"].items()))
    earlier = {key: value for key, value in model.items() if value not in (None, False)}
    assert len(earlier) < len(model)
    record = {"measured": {"train_seconds": 8.0}, "config": {**config.resolved, "model": earlier}}
    known = reproduce._recorded([record])
    for words in (["algorithm.noise_multiplier=9"], ["trainer.sample_rate=0.5"]):
        other = configured(["recipe=quickstart", "trainer.epochs=10", *words])
        assert reproduce.seconds_of(other, known) == 80.0 / config.trainer.epochs
    assert not [time for time in known.values() if time != 8.0 / config.trainer.epochs]


def test_durations() -> None:
    for word, seconds in {"40h": 144000, "90m": 5400, "2h30m": 9000}.items():
        assert reproduce.read_duration(word) == seconds
    for word in ("", "2", "2d", "m", "h30"):
        with pytest.raises(UserError, match="must be a time such as"):
            reproduce.read_duration(word)
