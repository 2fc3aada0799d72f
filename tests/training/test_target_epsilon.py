"""privacy.target_epsilon and claimed_epsilon: the noise multiplier is found, used and recorded,
whatever was configured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.test_budget import carry_out
from zdp_bench.config import compose, parse
from zdp_bench.config.digests import experiment_digest
from zdp_bench.errors import UserError
from zdp_bench.privacy.calibration import calibrate_mechanism
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling
from zdp_bench.training.build import build_algorithm
from zdp_bench.training.plan import Plan


@pytest.mark.parametrize("noise", ["circular", "per_component"])
@pytest.mark.parametrize("trainer", ["poisson", "uniform"])
def test_the_tight_epsilon_of_the_run_is_the_target(
    tmp_path: Path, noise: str, trainer: str
) -> None:
    batches = (
        []
        if trainer == "poisson"
        else ["trainer=uniform", "trainer.sample_rate=null", "trainer.batch_size=140"]
    )
    record, _, _ = carry_out(
        tmp_path,
        "privacy.target_epsilon=2",
        f"algorithm.noise={noise}",
        *batches,
        "trainer.epochs=1",
    )
    privacy = record["privacy"]
    assert privacy["epsilon_tight"] == pytest.approx(2, rel=1e-3)
    assert privacy["epsilon_tight"] <= 2
    exact = trainer == "poisson"  # of fixed-size batches only bounds are known
    assert (privacy["epsilon_tight_at_least"] == privacy["epsilon_tight"]) == exact
    assert (
        1.5 < privacy["epsilon_tight_at_least"] < privacy["epsilon_patient_at_least"]
    )  # of an image in two examples
    assert record["config"]["algorithm"]["noise_multiplier"] == privacy["noise_multiplier"]
    shift = 1 if trainer == "poisson" else 2
    assert privacy["noise_multiplier"] == pytest.approx(
        privacy["z"] * shift * (2**0.5 if noise == "circular" else 1)
    )


def test_the_claimed_epsilon_is_what_the_accountant_says(tmp_path: Path) -> None:
    record, _, _ = carry_out(
        tmp_path, "privacy.claimed_epsilon=3", "accountant=rdp", "algorithm.noise=circular"
    )
    assert record["privacy"]["epsilon_claimed"] == pytest.approx(3, rel=1e-3)
    assert record["privacy"]["epsilon_tight"] > 3  # circular noise gives z = σ/√2


def test_what_is_calibrated_is_no_choice() -> None:
    def digest(*overrides: str) -> str:
        return experiment_digest(parse(compose(["recipe=quickstart", *overrides])))

    assert digest("privacy.target_epsilon=2") == digest(
        "privacy.target_epsilon=2", "algorithm.noise_multiplier=9"
    )
    assert digest("privacy.target_epsilon=2") != digest("privacy.target_epsilon=3")
    assert digest("privacy.target_epsilon=2") != digest("privacy.claimed_epsilon=2")
    assert digest("algorithm.noise_multiplier=9") != digest()


class _NoNoiseSomewhere:
    """An algorithm that leaves a direction without noise."""

    def __init__(self, problem: object, **options: float) -> None:
        pass

    def mechanism(self) -> Mechanism:
        sampling = Sampling("poisson", 0.1, 10, 100)
        return Mechanism((Block("b", (2,), "complex128", 1.0, 1.0, "real_on_complex"),), sampling)


def test_a_mechanism_without_noise_somewhere_reaches_no_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = parse(compose(["recipe=quickstart", "privacy.target_epsilon=2"]))
    monkeypatch.setattr("zdp_bench.training.build.lookup", lambda kind, name: _NoNoiseSomewhere)
    with pytest.raises(
        UserError,
        match=r"target_epsilon=2 with algorithm=zeta_dp_sgd: some direction gets no noise",
    ):
        build_algorithm(config, None, Plan.of(config, 1000))  # type: ignore[arg-type]


def test_one_search_serves_every_algorithm_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def unit(std: float) -> Mechanism:
        return Mechanism(
            (Block("b", (2,), "float32", 1.0, std, "real"),), Sampling("poisson", 0.1, 10, 100)
        )

    found = calibrate_mechanism(1.0, unit(1.0), 20, 1e-5)
    monkeypatch.setattr(
        "zdp_bench.privacy.calibration._search", lambda *_: pytest.fail("searched again")
    )
    assert calibrate_mechanism(1.0, unit(0.25), 20, 1e-5) == pytest.approx(4 * found, rel=1e-9)
