"""What tables lack: which runs, in which order, and what cannot be run here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import write_mini_mnist
from tests.experiments.test_reproduce import TINY, small
from zdp_bench import assets
from zdp_bench.config import compose, configured, parse
from zdp_bench.data import files
from zdp_bench.errors import UserError
from zdp_bench.experiments import planning
from zdp_bench.extras.standins import scans
from zdp_bench.report import papers

__all__ = ["small"]  # a fixture


@pytest.mark.parametrize(
    "recipe",
    ["chest_xray_strict", "mri_recon", "msd_liver_private", "ecg", "mri_sequence_cl", "speech"],
)
def test_here_knows_the_sets_that_are_got_by_hand(tmp_path: Path, recipe: str) -> None:
    config = parse(compose([f"recipe={recipe}", f"paths.data={tmp_path}"]))
    holds = files.card(config.dataset.name).holds
    assert planning.missing_data(config) == f"the data root lacks {holds}"


def test_here_knows_that_another_task_of_a_release_is_not_there(tmp_path: Path) -> None:
    scans.write_abdomens(tmp_path / "Task04_Hippocampus", 3, seed=0)
    of = {
        task: parse(compose([f"recipe=msd_{task}_private", f"paths.data={tmp_path}"]))
        for task in ("hippocampus", "liver")
    }
    assert planning.missing_data(of["hippocampus"]) == ""
    assert (
        planning.missing_data(of["liver"])
        == "the data root holds some of dataset 'msd', but not what this run reads"
    )


def test_smoke_tries_every_setting_of_a_sweep(small: Path) -> None:
    path = assets.RECIPES / "swept.yaml"
    body = TINY["mnist"].replace("model: {hidden: [4]}", "model: {hidden: [5]}")
    axes = "{optimizer.lr: '0.1,0.2,0.3', 'algorithm.max_grad_norm': '1,2'}"
    path.write_text(f"# swept\n{body}hydra: {{sweeper: {{params: {axes}}}}}\n")
    plan = planning.make_plan(["zeta_dp_2021/1"], "smoke", 1, small / "smoke", ["threads=1"])
    tried = [job.filling.overrides for job in plan.jobs if job.filling.recipe == "swept"]
    assert len(tried) == 4
    assert {word for words in tried for word in words} == {
        *("optimizer.lr=0.1", "optimizer.lr=0.2", "optimizer.lr=0.3"),
        *("algorithm.max_grad_norm=1", "algorithm.max_grad_norm=2"),
    }
    assert [f.overrides for f in plan.fillings["zeta_dp_2021/1"] if f.recipe == "swept"] == tried


def test_every_data_set_of_a_recipe_has_a_stand_in_or_stands_for_itself() -> None:
    for recipe in assets.group(assets.RECIPES):
        config = parse(compose([f"recipe={recipe}"]))
        words = planning.smoke_overrides(config)
        assert words is not None, (
            f"{config.dataset.name} needs `stand_in` on its card, or a NAME_synthetic"
        )
        reduced = parse(compose([f"recipe={recipe}", *words]))
        assert not files.card(reduced.dataset.name).files, "smoke needs no file"


def plan_of(small: Path, root: Path, seeds: int | None = 1) -> planning.Plan:
    extra = [f"paths.data={root}", "threads=1"]
    return planning.make_plan(["zeta_dp_2021/1"], "paper", seeds, small, extra)


def test_runs_that_fill_most_rows_an_hour_come_first_and_a_budget_takes_from_the_top(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mini_mnist(tmp_path)
    took = {"mnist": 100.0, "phasemnist": 60.0}
    monkeypatch.setattr(planning, "seconds_of", lambda config, known, may_try: took[config.recipe])
    ordered = planning.order(plan_of(small, tmp_path, seeds=2), small)
    asked = [(work.job.filling.recipe, work.job.seed, work.cells) for work in ordered]
    assert asked == [
        ("phasemnist", 1, 1),
        ("mnist", 1, 1),
        ("phasemnist", 2, 0),
        ("mnist", 2, 0),
    ]
    assert planning.hours(ordered) == pytest.approx(320 / 3600)
    taken = planning.within(130.0, ordered)
    assert [(work.job.filling.recipe, work.job.seed) for work in taken] == [
        ("phasemnist", 1),
        ("phasemnist", 2),
    ]


def test_a_run_without_its_data_is_last_and_never_taken(small: Path, tmp_path: Path) -> None:
    ordered = planning.order(plan_of(small, tmp_path), small)
    assert all("the data root lacks" in work.lacks for work in ordered)
    assert planning.hours(ordered) == 0
    assert planning.within(1e9, ordered) == []
    lines = planning.sheet(plan_of(small, tmp_path), ordered)
    assert lines.notes[0].startswith("0 runs fill 0 empty rows")


def test_a_plan_says_how_many_rows_it_leaves_out_and_why(small: Path, tmp_path: Path) -> None:
    extra = [f"paths.data={tmp_path}", "threads=1"]
    plan = planning.make_plan(["zeta_dp_2021/1"], "here", 1, small, extra)
    notes = planning.sheet(plan, planning.order(plan, small)).notes
    assert notes[0].startswith("0 runs fill 0 empty rows")
    assert any(note.startswith("2 rows are left out: the data root lacks ") for note in notes)


def test_a_record_that_lacks_what_is_off_takes_as_long() -> None:
    config = configured(["recipe=mnist_cnn"]).resolved
    earlier = {k: v for k, v in config["model"].items() if v is not False}
    assert len(earlier) < len(config["model"])
    assert planning._alike({**config, "model": earlier}) == planning._alike(config)


def test_a_row_has_as_many_runs_as_the_paper(small: Path, tmp_path: Path) -> None:
    assert papers.seeds("zeta_dp_2021/4") == 5
    assert papers.seeds("zeta_dp_2021/1") == 1
    assert len(plan_of(small, tmp_path, seeds=None).jobs) == 2


def test_only_as_published_leaves_variants_out(small: Path, tmp_path: Path) -> None:
    body = TINY["mnist"].replace("row: mnist_private", "row: mnist_private, variant: wider")
    (assets.RECIPES / "wide.yaml").write_text(f"# wide\n{body.replace('[4]', '[5]')}")
    plan = planning.make_plan(["zeta_dp_2021/1"], "paper", 1, small, [], as_published=True)
    assert [job.filling.recipe for job in plan.jobs] == ["mnist", "phasemnist"]
    assert len(plan.fillings["zeta_dp_2021/1"]) == 3


def test_a_records_time_is_that_of_runs_that_take_as_long() -> None:
    config = configured(["recipe=quickstart"])
    more = configured(["recipe=quickstart", "trainer.epochs=40", "algorithm.noise_multiplier=9"])
    known = {planning._alike(config.resolved): 3.0}
    assert planning.seconds_of(more, known) == 120.0
    assert len(known) == 1


def test_a_record_tells_the_time_of_a_run_as_long_whatever_the_order_of_its_keys() -> None:
    config = configured(["recipe=quickstart"]).resolved
    model = dict(reversed(config["model"].items()))
    earlier = {key: value for key, value in model.items() if value is not None}
    assert planning._alike({**config, "model": earlier}) == planning._alike(config)


def test_weights_that_would_be_fetched_are_missing_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    config = parse(compose(["recipe=gredp_transfer", f"paths.data={tmp_path}"]))
    assert "ImageNet's weights of ResNet-18 are not there" in planning.missing_data(config)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "resnet18-f37072fd.pth").touch()
    assert "the data root lacks" in planning.missing_data(config)


@pytest.mark.parametrize(("word", "seconds"), [("40h", 144000), ("90m", 5400), ("2h30m", 9000)])
def test_durations(word: str, seconds: float) -> None:
    assert planning.read_duration(word) == seconds


@pytest.mark.parametrize("word", ["", "2", "2d", "m", "h30"])
def test_what_is_no_duration(word: str) -> None:
    with pytest.raises(UserError, match="must be a time such as"):
        planning.read_duration(word)


def test_a_plan_tries_steps_for_a_while_and_calls_the_rest_unknown(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mini_mnist(tmp_path)
    plan = plan_of(small, tmp_path, seeds=3)
    assert not any("config" in vars(job) for job in plan.jobs), "a plan composes no run"
    monkeypatch.setattr(planning, "TRIALS", -1.0)
    ordered = planning.order(plan, small)
    assert [work.seconds for work in ordered] == [None] * 6
    notes = planning.sheet(plan, ordered).notes
    assert any(note.startswith("6 possible runs are of unknown length") for note in notes)
    monkeypatch.setattr(planning, "TRIALS", 60.0)
    tried = []
    validate = planning.validate
    monkeypatch.setattr(planning, "validate", lambda one: tried.append(one) or validate(one))
    assert all(work.seconds for work in planning.order(plan, small))
    assert len(tried) == 2, "a row is tried once, not once a seed"


def test_an_epoch_in_batches_of_another_size_takes_about_as_long() -> None:
    config = configured(["recipe=quickstart", "trainer.sample_rate=0.25"])
    other = configured(["recipe=quickstart", "trainer.sample_rate=0.5", "trainer.epochs=10"])
    measured = {"measured": {"train_seconds": 8.0}, "config": config.resolved}
    known = planning._recorded([measured])
    assert planning.seconds_of(other, known) == 80.0 / config.trainer.epochs
