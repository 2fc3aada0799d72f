"""All tables in one command: which runs, in which order; none repeated; a verdict on each cell."""

from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.conftest import write_mini_mnist
from tests.data.helpers import dataset
from tests.test_cli import run
from tests.test_records import record, save
from zdp_bench import assets, records
from zdp_bench.config import configured
from zdp_bench.data import files
from zdp_bench.errors import UserError
from zdp_bench.experiments import claims, reproduce
from zdp_bench.experiments.times import read_times, seconds_of
from zdp_bench.experiments.validate import validate
from zdp_bench.records import Record
from zdp_bench.report import papers
from zdp_bench.report.papers import check_claims
from zdp_bench.training.setup import load_data

# Two recipes of a paper's table.
TRAINING = """
model: {hidden: [4]}
algorithm: {noise_multiplier: 1.0, max_grad_norm: 1.0}
trainer: {sample_rate: 0.5, epochs: 1}
dataset: {check: false}
"""
TINY = {
    "mnist": """\
defaults: [{override /dataset: mnist}, {override /model: real_mlp}, {override /algorithm: dp_sgd}]
claims: {table: zeta_dp_2021/1, row: mnist_private}"""
    + TRAINING,
    "phasemnist": """\
defaults: [{override /dataset: phasemnist}]
claims: {table: zeta_dp_2021/1, row: phasemnist_private}"""
    + TRAINING,
}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two recipes of one table; returns the results folder."""
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    for name, body in TINY.items():
        (recipes / f"{name}.yaml").write_text(f"# {name}\n{body}")
    (recipes / "quickstart.yaml").symlink_to(assets.RECIPES / "quickstart.yaml")  # plans read paths
    monkeypatch.setattr(assets, "RECIPES", recipes)
    monkeypatch.setenv("COLUMNS", "200")  # no sentence is folded
    return tmp_path / "results"


def test_a_table_runs_what_it_lacks_once(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mini_mnist(tmp_path / "root")
    words = ["zeta_dp_2021/1", f"paths.results={small}", "--seeds", "2"]
    words += [f"paths.data={tmp_path / 'root'}", "threads=1"]
    code, out, err = run(capsys, "reproduce", *words)
    assert (code, err) == (0, "")
    table = (small / "tables" / "zeta_dp_2021_table1.md").read_text()
    assert table.count("% (n = 2)] |") == 2, "not the official MNIST"
    assert len(list(small.glob("runs/*/*/record.json"))) == 4
    code, out, _ = run(capsys, "reproduce", *words, "--plan")
    assert "Nothing to run" in out
    code, out, _ = run(capsys, "reproduce", *words[:-2], "--seeds", "3", *words[-2:], "--plan")
    assert "2 runs." in out
    assert out.count("1 s") >= 1, "the records tell how long a run takes"


def test_one_of_several_equal_runs_is_made(small: Path, tmp_path: Path) -> None:
    """Two recipes with one configuration: the record of either fills the rows of both."""
    copy = TINY["mnist"].replace("row: mnist_private", "row: mnist_private, variant: again")
    (assets.RECIPES / "zcopy.yaml").write_text(f"# zcopy\n{copy}")
    plan = plan_of(small, tmp_path)
    assert [row.filling.recipe for row in plan.rows] == ["mnist", "phasemnist"]
    save(small, record("mnist", 1, experiment=plan.rows[0].filling.digest))
    (assets.RECIPES / "first.yaml").write_text((assets.RECIPES / "mnist.yaml").read_text())
    assert [row.filling.recipe for row in plan_of(small, tmp_path).rows] == ["phasemnist"]


def test_a_run_on_data_that_has_changed_since_is_planned_again(small: Path, tmp_path: Path) -> None:
    (planned,) = [
        row for row in plan_of(small, tmp_path, seeds=2).rows if row.filling.recipe == "mnist"
    ]
    for seed, day in ((1, 1), (2, 2)):
        run = record("mnist", seed, experiment=planned.filling.digest)
        run["data"]["digest"] = f"{seed}" * 64
        save(small, run | {"measured": {"started_utc": f"2026-01-0{day}T00:00:00Z"}})
    seeds = {row.filling.recipe: row.seeds for row in plan_of(small, tmp_path, seeds=2).rows}
    assert seeds["mnist"] == (1,)


def test_a_seed_that_does_not_count_in_the_table_is_planned(small: Path, tmp_path: Path) -> None:
    """The plan said that the row has its runs, and the table left out those on derived data."""
    (planned,) = [
        row for row in plan_of(small, tmp_path, seeds=2).rows if row.filling.recipe == "mnist"
    ]
    for day, (seed, provenance) in enumerate([(2, "official"), (1, "derived"), (2, "derived")], 1):
        run = record("mnist", seed, experiment=planned.filling.digest)
        run["run"] = f"{day}" * 64
        run["data"] |= {"digest": provenance[0] * 64, "provenance": provenance}
        save(small, run | {"measured": {"started_utc": f"2026-01-0{day}T00:00:00Z"}})
    assert [run.seed for run in planned.filling.runs_of(records.read_all(small))] == [2]
    seeds = {row.filling.recipe: row.seeds for row in plan_of(small, tmp_path, seeds=2).rows}
    assert seeds["mnist"] == (1,)


@pytest.mark.parametrize(
    ("word", "device"),
    [("device=auto", "cuda"), ("device=cpu", "cpu"), ("device=cuda:1", "cuda")],
)
def test_times_are_those_of_the_device_that_runs_get(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, device: str
) -> None:
    """By default, a machine with a GPU showed the times of CPUs."""
    read = Mock(return_value={})
    monkeypatch.setattr(reproduce, "read_times", read)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    reproduce.make_plan(["zeta_dp_2021/1"], "paper", 1, small, [f"paths.data={tmp_path}", word])
    assert read.call_args.args[1] == device


def test_a_table_with_more_seeds_plans_those_that_another_table_lacks(
    small: Path, tmp_path: Path
) -> None:
    """Both orders plan each seed of a run that two tables share once."""
    for name in TINY:
        (assets.RECIPES / f"{name}.yaml").unlink()
    rows = {"zeta_dp_2021/1": "mnist_private", "zeta_dp_2021/4": "igaussian"}
    for table, row in rows.items():
        body = TINY["mnist"].replace("zeta_dp_2021/1, row: mnist_private", f"{table}, row: {row}")
        (assets.RECIPES / f"table{table[-1]}.yaml").write_text(f"# {table}\n{body}")
    extra = [f"paths.data={tmp_path}", "threads=1"]
    for tables in ([*rows], [*reversed(rows)], ["zeta_dp_2021/4"]):
        plan = reproduce.make_plan(tables, "paper", None, small, extra)
        assert len({row.filling.digest for row in plan.rows}) == 1
        assert sorted(seed for row in plan.rows for seed in row.seeds) == [1, 2, 3, 4, 5]
        (title,) = {reproduce.make_plan(tables, "here", None, small, extra).sheet().title}
        assert title == "Nothing to run."


def test_here_leaves_out_what_the_data_root_lacks_and_as_published_variants(
    small: Path, tmp_path: Path
) -> None:
    body = TINY["mnist"].replace("row: mnist_private", "row: mnist_private, variant: wider")
    (assets.RECIPES / "wide.yaml").write_text(f"# wide\n{body.replace('[4]', '[5]')}")
    every, here = (plan_of(small, tmp_path, profile=profile) for profile in ("paper", "here"))
    assert (len(every.rows), every.left_out.total()) == (3, 0)
    assert (len(here.rows), here.left_out.total()) == (0, 3)
    assert all("the data root does not have dataset" in why for why in here.left_out)
    published = plan_of(small, tmp_path, as_published=True)
    assert [row.filling.recipe for row in published.rows] == ["mnist", "phasemnist"]


def test_a_run_that_fails_is_told_and_the_rest_is_made(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On generated data, which fills no paper's cell."""
    path = assets.RECIPES / "mnist.yaml"
    path.write_text(path.read_text().replace("\nmodel:", "\noptimizer: {lr: 1.0e+30}\nmodel:"))
    words = ["--profile", "smoke", f"paths.results={small}", "threads=1", "paths.data=/nowhere"]
    assert "2 runs." in run(capsys, "reproduce", *words, "--plan")[1]
    code, _, err = run(capsys, "reproduce", *words)
    assert code == 2
    assert "diverged at epoch" in err
    assert len(list(small.glob("smoke/runs/*/*/record.json"))) == 1
    assert [path.name for path in small.iterdir()] == ["smoke"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs a table"),
        (["zeta_dp_2021/1", "--profile", "smoke"], "not both"),
        (["zeta_dp_2021/1", "--launcher", "jobs"], "launcher"),
        (["zeta_dp_2021/1", "--plan", "--launcher", "jobs"], "launcher"),
        (
            ["zeta_dp_2021/1", "--plan", "--launcher", "joblib", "hydra.launcher.jobs=1"],
            "key 'hydra.launcher.jobs' is not a key of this launcher",
        ),
        (
            ["zeta_dp_2021/1", "--plan", "hydra.launcher.n_jobs=1"],
            "key 'hydra.launcher.n_jobs' is not a key of this launcher",
        ),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, _, err = run(capsys, "reproduce", *words)
    assert code == 2
    assert message in err


def test_a_launcher_carries_the_runs_out(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In other processes, which find the recipes of this installation only."""
    for name in TINY:
        (assets.RECIPES / f"{name}.yaml").unlink()
    body = TINY["phasemnist"].replace("/dataset: phasemnist", "/dataset: phase_digits")
    body = body.replace("dataset: {check: false}\n", "")
    (assets.RECIPES / "digits.yaml").write_text(f"# digits\n{body}")
    words = ["zeta_dp_2021/1", f"paths.results={small}", "--seeds", "2", "threads=1"]
    words += ["--launcher", "joblib", "hydra.launcher.n_jobs=1"]
    planned = run(capsys, "reproduce", *words, "--plan")[1]
    assert "submitted with launcher=joblib hydra.launcher.n_jobs=1." in planned
    code, _, err = run(capsys, "reproduce", *words)
    assert (code, err) == (0, "")
    assert len(list(small.glob("runs/digits/*/record.json"))) == 2
    assert run(capsys, "reproduce", *words)[0] == 0


# planning


def test_here_knows_that_another_task_of_a_release_is_not_there(tmp_path: Path) -> None:
    dataset("msd_synthetic", volumes=3).write(tmp_path)  # type: ignore[attr-defined]
    (tmp_path / "Task03_Liver").rename(tmp_path / "Task04_Hippocampus")
    of = {
        task: configured([f"recipe=msd_{task}_private", f"paths.data={tmp_path}"])
        for task in ("hippocampus", "liver")
    }
    assert reproduce.missing_data(of["hippocampus"]) == ""
    assert "not the files that this run needs" in reproduce.missing_data(of["liver"])


def test_smoke_makes_the_first_job_of_a_recipe_once(small: Path) -> None:
    path = assets.RECIPES / "swept.yaml"
    body = TINY["mnist"].replace("model: {hidden: [4]}", "model: {hidden: [5]}")
    path.write_text(f"# swept\n{body}hydra: {{sweeper: {{params: {{optimizer.lr: '0.1,0.2'}}}}}}\n")
    plan = reproduce.make_plan(["zeta_dp_2021/1"], "smoke", None, small / "smoke", ["threads=1"])
    made = [(row.filling.overrides, row.seeds) for row in plan.rows if "recipe=swept" in row.words]
    assert made == [(("optimizer.lr=0.1",), (1,))]


@pytest.mark.parametrize(
    "recipe", ["msd_hippocampus_voxels", "msd_hippocampus_private", "ecg_class_means"]
)
def test_the_stand_in_that_missing_files_name_fits_the_recipe(recipe: str, tmp_path: Path) -> None:
    config = configured([f"recipe={recipe}", f"paths.data={tmp_path}"])
    with pytest.raises(UserError, match=r"Or use dataset=.+\.$") as missing:
        load_data(config)
    words = str(missing.value).rpartition("Or use ")[2].rstrip(".").split()
    validate(configured([f"recipe={recipe}", *words]), trial=False)


def test_a_plan_with_nothing_to_run_says_so() -> None:
    assert reproduce.Plan([], Counter()).sheet().title == "Nothing to run: every row has its runs."
    lacking = reproduce.Plan([], Counter({"no data": 2})).sheet()
    assert (lacking.title, *lacking.notes) == ("Nothing to run.", "2 rows left out: no data")


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


def test_every_smoke_run_is_valid_on_its_stand_in(tmp_path: Path) -> None:
    """One was of a fold, which its stand-in does not have: the whole command ended there."""
    tables = [*filter(papers.recipes_of, papers.available()), *papers.ours()]
    for words in reproduce.make_plan(tables, "smoke", None, tmp_path, ["threads=1"]).runs:
        config = configured(words)
        check_claims(config.claims.table, config.claims.row)
        assert not files.card(config.dataset.name).files


def plan_of(
    small: Path, root: Path, seeds: int | None = 1, profile: str = "paper", **more: bool
) -> reproduce.Plan:
    extra = [f"paths.data={root}", "threads=1"]
    return reproduce.make_plan(["zeta_dp_2021/1"], profile, seeds, small, extra, **more)


def test_the_results_folder_may_have_any_name(small: Path, tmp_path: Path) -> None:
    """The plan was listed, and its start ended in a traceback of Hydra."""
    folder = small / "a=b, (c) {d}"
    for profile in ("paper", "smoke"):
        for row in plan_of(folder, tmp_path, profile=profile).rows:
            assert configured(list(row.words)).results == folder


def test_a_plan_has_as_many_seeds_as_the_paper_and_the_shortest_first(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (papers.seeds("zeta_dp_2021/4"), papers.seeds("zeta_dp_2021/1")) == (5, 1)
    assert len(plan_of(small, tmp_path, seeds=None).runs) == 2
    took = {"phasemnist": 60.0, "mnist": 100.0}
    monkeypatch.setattr(claims, "seconds_of", lambda resolved, times: took.get(resolved["recipe"]))
    plan = plan_of(small, tmp_path, seeds=2)
    assert [row.seconds for row in plan.rows] == [120.0, 200.0]
    assert plan.sheet().notes == ["4 runs.", "In sequence, the timed runs take 5 min."]
    del took["phasemnist"]
    shown = plan_of(small, tmp_path).sheet().rows
    assert [row[-1] for row in shown] == ["2 min", "not timed"]


def test_weights_that_would_be_fetched_are_missing_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    config = configured(["recipe=gredp_transfer", f"paths.data={tmp_path}"])
    assert "the ImageNet weights of ResNet-18 are missing" in reproduce.missing_data(config)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "resnet18-f37072fd.pth").touch()
    assert "the data root does not have" in reproduce.missing_data(config)


def test_a_time_is_that_of_the_quickest_run_of_its_kind_on_the_same_device() -> None:
    config = configured(["recipe=quickstart", "trainer.sample_rate=0.25"])
    # An earlier record: its keys in another order, and without those that are off by default.
    model = dict(reversed(config.resolved["model"].items()))
    earlier = {key: value for key, value in model.items() if value not in (None, False)}
    assert len(earlier) < len(model)
    every = [
        Record.of(
            record(
                measured={"train_seconds": seconds, **measured},
                environment={"device": device},
                config={**config.resolved, "model": earlier},
            )
        )
        for seconds, device, measured in [
            (8.0, "cpu (x86_64)", {}),
            (9.0, "cpu (x86_64)", {}),
            (2.0, "cuda (NVIDIA)", {}),
            (1.0, "cpu (x86_64)", {"resumed_at_step": 7}),
        ]
    ]
    stopped_early = record(
        measured={"train_seconds": 1.0},
        environment={"device": "cpu (x86_64)"},
        config={**config.resolved, "model": earlier},
        stopped_by="budget",
    )
    every.append(Record.of(stopped_early))
    for device, seconds in {"cpu": 8.0, "cuda": 2.0}.items():
        times = read_times(every, device)
        for words in (["algorithm.noise_multiplier=9"], ["trainer.sample_rate=0.5"]):
            other = configured(["recipe=quickstart", "trainer.epochs=10", *words]).resolved
            assert seconds_of(other, times) == 10 * seconds / config.trainer.epochs
        wider = configured(["recipe=quickstart", "model.hidden=[7]"]).resolved
        assert seconds_of(wider, times) is None
