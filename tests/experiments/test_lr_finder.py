"""The learning-rate range test: its suggestion, its ε, and that no run shares its noise."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.test_run import carry_out, configured
from zdp_bench.cli import main
from zdp_bench.data import Examples, Splits
from zdp_bench.data.phasemnist import PhaseDigits
from zdp_bench.errors import UserError
from zdp_bench.experiments.lr_finder import find_steepest, range_test
from zdp_bench.experiments.validate import validate
from zdp_bench.privacy.noise import SeededNoise
from zdp_bench.report.terminal import show_range_test
from zdp_bench.training import setup


def test_the_steepest_fall_is_found() -> None:
    rates = [10 ** (-5 + step / 10) for step in range(50)]
    # They fall around 1e-3; smoothing looks back, so the fall is found a little later.
    losses = [1 - 0.8 / (1 + math.exp(-8 * (math.log10(rate) + 3))) for rate in rates]
    assert 3e-4 < (find_steepest(rates, losses) or 0) < 6e-3
    assert find_steepest(rates, list(range(50))) is None
    assert find_steepest(rates[:2], [1.0, 0.5]) is None
    assert find_steepest(rates, [*losses[:40], *[math.nan] * 10]) == find_steepest(
        rates[:40], losses[:40]
    )


@pytest.fixture
def _validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the quickstart's test examples its validation examples, too."""
    load = PhaseDigits.load

    def load_validated(digits: PhaseDigits, root: Path) -> Splits:
        splits = load(digits, root)
        examples = Examples(splits.test.inputs, splits.test.targets)
        return dataclasses.replace(splits, validation=examples)

    monkeypatch.setattr(PhaseDigits, "load", load_validated)


@pytest.mark.usefixtures("_validated")
def test_it_costs_its_steps_and_is_repeatable(tmp_path: Path) -> None:
    config = configured(tmp_path)
    found = range_test(config, 1e-3, 1.0, steps=6)
    assert found.rates == pytest.approx([10 ** (-3 + 0.6 * step) for step in range(found.steps)])
    assert len(found.losses) == found.steps <= 6
    report = validate(config, trial=False)
    assert 0 < found.epsilon < report.privacy["epsilon_tight"] < found.epsilon_with_run
    assert range_test(config, 1e-3, 1.0, steps=6) == found
    assert not torch.equal(
        torch.tensor(range_test(config, 2e-3, 1.0, steps=6).losses), torch.tensor(found.losses)
    )


@pytest.mark.usefixtures("_validated")
def test_a_loss_that_is_no_number_ends_the_test_as_an_explosion_does(tmp_path: Path) -> None:
    found = range_test(configured(tmp_path), 1e29, 1e30, steps=6)
    assert found.steps < 6
    assert math.isnan(found.losses[-1])


@pytest.mark.usefixtures("_validated")
def test_test_and_run_share_the_noise_that_reaches_a_target_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test must use the larger noise of a run that counts its steps."""
    seen = []
    real = setup.build_algorithm

    def build(*given: Any) -> Any:
        config, algorithm = real(*given)
        seen.append(algorithm.mechanism().z)
        return config, algorithm

    monkeypatch.setattr(setup, "build_algorithm", build)
    found = range_test(configured(tmp_path, "privacy.target_epsilon=2"), 1e-3, 1e12, steps=12)
    assert found.to_count == 12 >= found.steps
    record = carry_out(
        tmp_path, "privacy.target_epsilon=2", f"privacy.range_test_steps={found.to_count}"
    ).record
    assert record["privacy"]["z"] == pytest.approx(seen[0], rel=1e-12)
    assert record["privacy"]["epsilon_tight"] == pytest.approx(found.epsilon_with_run)
    assert record["privacy"]["epsilon_tight"] <= 2
    with pytest.raises(
        UserError,
        match=r"range_test_steps=12 with privacy\.target_epsilon: each range test would change",
    ):
        range_test(
            configured(tmp_path, "privacy.target_epsilon=2", "privacy.range_test_steps=12"), steps=5
        )


@pytest.mark.usefixtures("_validated")
def test_it_stops_where_the_loss_explodes_and_counts_earlier_tests(tmp_path: Path) -> None:
    found = range_test(configured(tmp_path, "privacy.range_test_steps=7"), 1.0, 1e12, steps=30)
    assert found.steps < 30
    assert not found.losses[-1] <= 4 * min(loss for loss in found.losses if math.isfinite(loss))
    assert found.to_count == 7 + found.steps


@pytest.mark.usefixtures("_validated")
def test_its_noise_is_never_that_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal noise on two different sums could be subtracted: runs and tests differ in seeds."""
    seeds: list[int] = []

    def noise(seed: int) -> SeededNoise:
        seeds.append(seed)
        return SeededNoise(seed)

    monkeypatch.setattr(setup, "SeededNoise", noise)
    for lowest in (1e-3, 2e-3):
        range_test(configured(tmp_path), lowest, 1.0, steps=3)
    assert len({*seeds, configured(tmp_path).seed}) == 3


def test_a_run_counts_the_tests_steps_in_every_epsilon_and_in_its_budget(tmp_path: Path) -> None:
    plain, counted = (
        carry_out(tmp_path, *more).record["privacy"]
        for more in ([], ["privacy.range_test_steps=15"])
    )
    assert (plain["range_test_steps"], counted["range_test_steps"]) == (0, 15)
    assert counted["steps"] == plain["steps"] + 15
    assert counted["ledger"]["entries"] == plain["ledger"]["entries"]
    for key in ("epsilon_tight", "epsilon_rdp", "epsilon_patient"):
        assert counted[key] > plain[key]
    budget = 0.8 * counted["epsilon_tight"]
    words = ["privacy.range_test_steps=15", f"privacy.max_epsilon={budget}"]
    stopped = carry_out(tmp_path / "b", *words).record
    assert stopped["stopped_by"] == "budget"
    assert stopped["privacy"]["epsilon_tight"] <= budget


def test_wrong_ranges_and_sets_without_validation_are_refused(tmp_path: Path) -> None:
    config = configured(tmp_path)
    for arguments, message in (
        ((0.0, 1.0, 5), "--lowest"),
        ((1.0, 0.1, 5), "below --highest"),
        ((0.1, 1.0, 2), "--steps=2"),
    ):
        with pytest.raises(UserError, match=message):
            range_test(config, *arguments)
    with pytest.raises(UserError, match="phase_digits has none"):
        range_test(config)


@pytest.mark.usefixtures("_validated")
def test_the_verb_prints_the_bill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=quickstart", f"paths.data={tmp_path}", "--steps", "4", "--highest", "0.5"]
    for form in ("json", "rich"):
        with pytest.raises(SystemExit) as ended:
            main(["find-lr", *words, "--format", form])
        assert ended.value.code == 0
        out = capsys.readouterr().out
        if form == "json":
            assert json.loads(out)["steps"] == 4
        else:
            assert "privacy.range_test_steps=4" in "".join(out.split())


@pytest.mark.usefixtures("_validated")
def test_a_budget_ends_the_test_before_the_step_that_would_pass_it(tmp_path: Path) -> None:
    whole = range_test(configured(tmp_path), 1e-3, 0.5, steps=6)
    assert whole.budget is None
    budget = 0.99 * whole.epsilon
    found = range_test(configured(tmp_path, f"privacy.max_epsilon={budget}"), 1e-3, 0.5, steps=6)
    assert 3 <= found.steps < whole.steps
    assert len(found.rates) == found.steps
    assert found.epsilon <= budget
    assert found.budget == pytest.approx(budget)
    assert (
        f"stopped before a tight ε of {budget:g}"
        in show_range_test(dataclasses.asdict(found)).notes
    )
    with pytest.raises(
        UserError,
        match=r"privacy\.max_epsilon=0\.48: the budget pays for [12] steps of .* test, and 3",
    ):
        range_test(configured(tmp_path, "privacy.max_epsilon=0.48"), steps=6)
