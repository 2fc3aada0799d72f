"""The audit: its statistics against exact values, what it must let pass, what it must catch, in every way it can be broken."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom
from torch import Tensor

from zdp_bench import audit as module
from zdp_bench import cli, registry
from zdp_bench import engine as engine_module
from zdp_bench.algorithms import Problem, mean
from zdp_bench.audit import (
    CASES,
    RELEASE_DELTA,
    Coordinates,
    Finding,
    Subject,
    attack_recipe_release,
    attack_release,
    attack_with_gradients,
    attack_with_inputs,
    canary_supports,
    clopper_pearson,
    guess_p_value,
    release_bound,
    run_bound,
)
from zdp_bench.config import compose, parse
from zdp_bench.errors import UserError
from zdp_bench.experiment import Plan
from zdp_bench.gradients import Batch, clipping, reference
from zdp_bench.privacy.accounting import gdp_epsilon
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling

QUICK = {"opacus": 14_000, "opacus_secure": 2_000, "opacus_ghost": 2_000}  # trials; the others get 20,000


# ------------------------------------------------------------------------------------------------------------ statistics


def test_clopper_pearson_at_the_ends() -> None:
    lower, upper = clopper_pearson(np.array([0, 50]), 50, 0.01)
    assert lower[0] == 0.0
    assert upper[0] == pytest.approx(1 - 0.01 ** (1 / 50))
    assert lower[1] == pytest.approx(0.01 ** (1 / 50))
    assert upper[1] == 1.0


@pytest.mark.parametrize("p", [0.001, 0.03, 0.2, 0.5, 0.9])
def test_clopper_pearson_fails_no_more_often_than_it_says(p: float) -> None:
    n, alpha = 60, 0.05
    hits = np.arange(n + 1)
    lower, upper = clopper_pearson(hits, n, alpha)
    probability = binom.pmf(hits, n, p)
    assert probability[lower > p].sum() <= alpha
    assert probability[upper < p].sum() <= alpha


@pytest.mark.parametrize(
    ("canaries", "guesses", "right", "delta", "printed"),
    [(100, 100, 75, 0.0, 0.702), (100, 100, 75, 1e-4, 0.699), (1000, 100, 75, 1e-4, 0.673), (100_000, 1510, 1439, 1e-5, 2.675)],
)
def test_the_run_bound_gives_the_papers_examples(canaries: int, guesses: int, right: int, delta: float, printed: float) -> None:
    """Steinke et al. 2023: section 6, and the examples beside the code of appendix D; all at 95 %."""
    assert run_bound(canaries, guesses, right, delta, 0.95) == pytest.approx(printed, abs=1e-3)


def test_the_p_value_is_the_formula_written_out() -> None:
    for guesses, epsilon, delta in product((1, 5, 12), (0.0, 0.7, 3.0), (0.0, 1e-3)):
        q = math.exp(epsilon) / (1 + math.exp(epsilon))
        pmf = [math.comb(guesses, w) * q**w * (1 - q) ** (guesses - w) for w in range(guesses + 1)]
        for right in range(guesses + 1):
            tail = sum(pmf[right:])
            extra = max((sum(pmf[max(0, right - i) : right]) / i for i in range(1, guesses + 1)), default=0.0)
            expected = min(1.0, tail + 2 * 15 * delta * extra)
            assert guess_p_value(15, guesses, right, epsilon, delta) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (1.0, 0.01), (2.0, 0.002)])
def test_no_mechanism_that_is_private_beats_the_p_value(epsilon: float, delta: float) -> None:
    """Randomised response that tells a bit plainly with probability δ, and one that tells all of them together."""
    m, q = 25, math.exp(epsilon) / (1 + math.exp(epsilon))
    for right in range(m + 1):
        bound = guess_p_value(m, m, right, epsilon, delta)
        assert binom.sf(right - 1, m, q) <= bound + 1e-12
        assert binom.sf(right - 1, m, delta + (1 - delta) * q) <= bound + 1e-12
        assert delta + (1 - delta) * binom.sf(right - 1, m, q) <= bound + 1e-12 or delta * m > 1


def test_randomised_response_is_bounded_below_its_epsilon() -> None:
    rng, epsilon = np.random.default_rng(0), 1.0
    accuracy = math.exp(epsilon) / (1 + math.exp(epsilon))
    bounds = [run_bound(400, 400, int(rng.binomial(400, accuracy)), 1e-5, 0.95) for _ in range(120)]
    assert np.mean([bound > epsilon for bound in bounds]) <= 0.09
    assert np.median(bounds) > 0.6 * epsilon


def test_the_run_bound_grows_with_right_guesses_and_falls_with_delta() -> None:
    bounds = [run_bound(200, 100, right, 1e-5, 0.95) for right in range(40, 101, 6)]
    assert bounds == sorted(bounds)
    assert bounds[0] == 0.0
    assert run_bound(200, 100, 90, 1e-3, 0.95) < run_bound(200, 100, 90, 0.0, 0.95)
    assert run_bound(50, 50, 50, 0.0, 0.99) == pytest.approx(math.log(0.01 ** (1 / 50) / (1 - 0.01 ** (1 / 50))), rel=1e-6)


def gaussian(shift: float, seed: int, dimensions: int = 3) -> Callable[[bool, int], Tensor]:
    rng = np.random.default_rng(seed)

    def release(there: bool, count: int) -> Tensor:
        rows = rng.standard_normal((count, dimensions))
        rows[:, 0] += shift * there
        return torch.from_numpy(rows)

    return release


@pytest.mark.parametrize("shift", [0.0, 0.3, 1.0])
def test_the_release_bound_holds_as_often_as_it_says(shift: float) -> None:
    truth = gdp_epsilon(shift, 0.01) if shift else 0.0
    bounds = [attack_release(gaussian(shift, seed), 800, 0.01, 0.9)[0] for seed in range(100)]
    assert np.mean([bound > truth for bound in bounds]) <= 0.1


@pytest.mark.parametrize("shift", [0.5, 1.0, 1.5])
def test_the_attack_on_a_gaussian_release_comes_near_its_epsilon(shift: float) -> None:
    bound, evidence = attack_release(gaussian(shift, 0), 100_000, 0.01, 0.99)
    assert 0.75 * gdp_epsilon(shift, 0.01) < bound < gdp_epsilon(shift, 0.01)
    assert "false alarms" in evidence


def test_the_release_bound_is_the_definition() -> None:
    hits, alarms, trials = np.array(9_000), np.array(1_000), 10_000
    lower, upper = clopper_pearson(hits, trials, 0.005)[0], clopper_pearson(alarms, trials, 0.005)[1]
    assert release_bound(hits, alarms, trials, 0.01, 0.99) == pytest.approx(math.log((lower - 0.01) / upper))


def test_a_direction_without_noise_is_found_unaided() -> None:
    """Noise everywhere but along one hidden direction, and a shift that lies almost across it."""
    rng = np.random.default_rng(1)
    axes = np.linalg.qr(rng.standard_normal((6, 6)))[0]
    shift = axes[:, 0] + 1e-3 * axes[:, 5]

    def release(there: bool, count: int) -> Tensor:
        noise = rng.standard_normal((count, 6))
        noise[:, 5] = 0.0
        return torch.from_numpy(noise @ axes.T + shift * there)

    bound, evidence = attack_release(release, 2000, 0.01, 0.99)
    assert evidence == "the attack wins 3,000 of 3,000"
    assert bound == pytest.approx(math.log((0.005 ** (1 / 1500) - 0.01) / (1 - 0.005 ** (1 / 1500))))


# -------------------------------------------------------------------------------------------------------- built-in cases


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_built_in_case_gets_the_verdict_it_deserves(case: module.Case) -> None:
    if case.needs:
        pytest.importorskip(case.needs)
    finding = case.audit(seed=0, confidence=0.99, trials=QUICK.get(case.name, 20_000))
    assert finding.verdict == case.expected, finding
    assert finding.epsilon_claimed == pytest.approx(gdp_epsilon(1 / case.z, RELEASE_DELTA))


@pytest.mark.parametrize("case", [c for c in CASES if not c.needs], ids=[c.name for c in CASES if not c.needs])
def test_the_verdicts_do_not_hang_on_the_seed(case: module.Case) -> None:
    verdicts = [case.audit(seed, 0.99, trials=20_000).verdict for seed in (1, 2)]
    assert verdicts == [case.expected] * 2


def test_the_same_seed_gives_the_same_finding() -> None:
    case = next(case for case in CASES if case.name == "circular_2021")
    assert case.audit(5, 0.99, 2000) == case.audit(5, 0.99, 2000)
    assert case.audit(5, 0.99, 2000) != case.audit(6, 0.99, 2000)


def test_real_noise_in_the_fourier_domain_loses_every_time_whatever_sigma_is() -> None:
    """Wang et al. 2024, Algorithm 2, at σ = 1000: the odd part of the gradient is released without noise."""
    _, evidence = attack_release(module._fourier(0, noise="real", std=1000.0), 1000, 0.01, 0.99)
    assert evidence == "the attack wins 1,500 of 1,500"


def test_the_sound_cases_would_be_caught_at_a_smaller_claim() -> None:
    """What passes, passes because its claim is right, not because the attack is blind."""
    for name, z in (("per_component", 1.6), ("circular", 1.2), ("gredp", 1.6), ("gredp_complex_at_z", 1.2)):
        case = next(case for case in CASES if case.name == name)
        assert dataclasses.replace(case, z=z).audit(0, 0.99, 20_000).verdict == "flagged"


def test_the_clipper_that_measures_too_little_does_so_by_much() -> None:
    release = module._under_measured(0)
    moved = release(True, 4000).mean(dim=0) - release(False, 4000).mean(dim=0)
    assert float(moved.norm()) > 1.3  # an ordinary record; the bound is 1, the standard error about 0.1


def test_a_case_is_skipped_where_its_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    finding = next(case for case in CASES if case.needs).audit(0, 0.99)
    assert (finding.verdict, finding.as_expected) == ("skipped", True)
    assert finding.evidence == "opacus is not installed"


# ----------------------------------------------------------------------------------------------------------- coordinates

EVERY_KIND = (
    Block("real", (3, 2), "float64", 1.0, 1.0, "real"),
    Block("circular", (4,), "complex128", 1.0, 1.0, "circular"),
    Block("correlated", (2, 2), "complex128", 1.0, 1.0, "correlated", rho=0.5),
    Block("hermitian", (2, 3, 4), "complex128", 1.0, 1.0, "hermitian", fft_dims=(1, 2)),
    Block("half", (5,), "complex128", 1.0, 1.0, "real_on_complex"),
    Block("scalar", (), "float64", 1.0, 1.0, "real"),
)
POISSON = Sampling("poisson", 0.25, 25.0, 100)


def zeros(mechanism: Mechanism) -> dict[str, Tensor]:
    return {b.name: torch.zeros(b.shape, dtype=getattr(torch, b.dtype)) for b in mechanism.blocks}


def test_coordinates_are_an_isometry_of_every_kind_of_block() -> None:
    mechanism = Mechanism(EVERY_KIND, POISSON)
    coordinates = Coordinates(mechanism)
    assert coordinates.size == 6 + 8 + 8 + 24 + 10 + 1 == len(coordinates.kinds())
    vector = torch.randn(coordinates.size, dtype=torch.float64)
    blocks = zeros(mechanism)
    coordinates.add(vector, to=blocks)
    torch.testing.assert_close(coordinates.of(blocks), vector, rtol=1e-12, atol=1e-12)
    length = math.sqrt(sum(float(value.abs().square().sum()) for value in blocks.values()))
    assert length == pytest.approx(float(vector.norm()))
    signal = torch.fft.ifftn(blocks["hermitian"], dim=(1, 2), norm="ortho")
    assert float(signal.imag.abs().max()) < 1e-12


@pytest.mark.parametrize("joint", [True, False])
def test_canaries_have_exactly_the_bound_and_are_orthogonal(joint: bool) -> None:
    bounds = (2.0, 2.0) if joint else (2.0, 3.0)
    blocks = (
        Block("a", (40,), "float64", bounds[0], 1.0, "real"),
        Block("b", (30,), "complex128", bounds[1], 1.0, "circular"),
        *(() if joint else (Block("small", (3,), "float64", 9.0, 1.0, "real"),)),
    )
    mechanism = Mechanism(blocks, POISSON, joint=joint)
    coordinates = Coordinates(mechanism)
    indices, values = canary_supports(mechanism, coordinates, 10, 4, np.random.default_rng(0))
    dense = np.zeros((10, coordinates.size))
    for row, index, value in zip(dense, indices, values, strict=True):
        row[index] = value
    assert np.allclose(dense @ dense.T, np.diag(np.diag(dense @ dense.T)))
    for row in dense:
        total = zeros(mechanism)
        coordinates.add(torch.from_numpy(row), to=total)
        norms = [float(total[block.name].abs().square().sum()) ** 0.5 for block in blocks]
        if joint:
            assert math.hypot(*norms) == pytest.approx(2.0)
        else:
            assert norms == pytest.approx([2.0, 3.0, 0.0])  # no room for ten in the smallest


# ---------------------------------------------------------------------------------------------------- a recipe's own run

TINY = ["recipe=quickstart", "model.hidden=[6]", "trainer.epochs=2", "trainer.sample_rate=0.1", "threads=1"]
UNIFORM = ["trainer.sampling=uniform", "trainer.sample_rate=null", "trainer.batch_size=144"]


def subject(*overrides: str) -> Subject:
    return Subject.of(parse(compose([*TINY, *overrides])))


def run_findings(*overrides: str, confidence: float = 0.99) -> list[Finding]:
    return [
        *attack_recipe_release(subject(*overrides), confidence, 600),
        attack_with_gradients(subject(*overrides), confidence, 400, 1000),
        attack_with_inputs(subject(*overrides), confidence, 400, 1000),
    ]


@pytest.mark.parametrize("overrides", [[], UNIFORM, ["privacy.secure=true"]])
def test_a_sound_recipe_passes(overrides: list[str]) -> None:
    secure = "privacy.secure=true" in overrides  # drawn anew in every run of this test, which must not fail by chance
    findings = run_findings(*overrides, confidence=1 - 1e-8 if secure else 0.99)
    assert all(finding.as_expected for finding in findings), findings
    assert [f.verdict for f in findings if f.expected == "passes"] == ["passes"] * 4
    assert findings[-1].epsilon_claimed == findings[-2].epsilon_claimed > 0


def test_a_recipe_that_claims_more_than_its_mechanism_gives_is_told_so() -> None:
    findings = attack_recipe_release(subject("algorithm.noise=circular", "algorithm.noise_multiplier=0.8"), 0.95, 6000)
    assert [finding.verdict for finding in findings] == ["passes", "passes", "flagged"]
    assert findings[2].expected == "either"
    assert "noise multiplier: z = 0.8" in findings[2].claim


def weakened(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], Tensor]) -> None:
    """Spoil the noise at its source, for the engine and for the attack on one release alike."""
    real = engine_module.add_noise

    def add_noise(total: dict[str, Tensor], mechanism: Mechanism, source: Any, step: int) -> dict[str, Tensor]:
        before = {name: value.clone() for name, value in total.items()}
        noisy = real(total, mechanism, source, step)
        return {name: before[name] + spoil(noisy[name] - before[name]) for name in noisy}

    monkeypatch.setattr(engine_module, "add_noise", add_noise)
    monkeypatch.setattr(module, "add_noise", add_noise)


def forget_imaginary(noise: Tensor) -> Tensor:
    return torch.complex(noise.real, torch.zeros_like(noise.imag)) if noise.is_complex() else noise


def forget_one_bias(noise: Tensor) -> Tensor:
    return torch.zeros_like(noise) if noise.shape == (10,) else noise


@pytest.mark.parametrize(
    ("spoil", "runs_too"),
    [(torch.zeros_like, True), (forget_imaginary, True), (forget_one_bias, False), (lambda n: n / 2, False)],
)
def test_a_recipe_with_broken_noise_is_caught(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], Tensor], runs_too: bool
) -> None:
    weakened(monkeypatch, spoil)
    assert attack_recipe_release(subject(), 0.99, 1200)[0].verdict == "flagged"
    if runs_too:
        finding = attack_with_gradients(subject(), 0.99, 400, 1000)
        assert finding.verdict == "flagged", finding
        assert int(finding.evidence.split()[0]) > 85  # of 100; some canaries are in and never drawn


def test_a_recipe_whose_sampling_takes_too_many_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record in every step, where a tenth is claimed."""
    monkeypatch.setattr(Plan, "draw", lambda self, seed, step, secure=False: (np.arange(1437), 143.7))
    finding = attack_with_gradients(subject("trainer.epochs=4"), 0.99, 400, 1000)
    assert finding.verdict == "flagged", finding


def test_a_recipe_whose_clipping_lets_too_much_through_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms measured 2.4 times too small: the check before training refuses it, and the attack by records finds it too."""
    monkeypatch.setattr(reference, "clip_factors", lambda norms, bound: clipping.clip_factors(norms / 2.4, bound))
    with pytest.raises(UserError, match="exceeds its bound"):
        subject("algorithm.gradients=reference")
    monkeypatch.setattr(module, "check_model", lambda *_: [])
    worst, hostile = attack_recipe_release(subject("algorithm.gradients=reference"), 0.99, 1200)
    assert worst.verdict == "passes"  # noise and mechanism agree; it is the contributions that are too large
    assert hostile.verdict == "flagged"


def test_gradient_canaries_are_drawn_by_the_recipes_own_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[np.ndarray] = []
    real = Plan.draw

    def spy(self: Plan, seed: int, step: int, secure: bool = False) -> tuple[np.ndarray, float]:
        drawn = real(self, seed, step, secure)
        taken.append(drawn[0])
        return drawn

    monkeypatch.setattr(Plan, "draw", spy)
    attack_with_gradients(subject(), 0.99, 100, 7)
    assert len(taken) == 7
    of = subject()
    assert all((a == of.plan.draw(0, step)[0]).all() for step, a in enumerate(taken[:7]))


def test_steps_limit_the_run_and_the_claim() -> None:
    short, whole = (attack_with_gradients(subject(), 0.99, 100, steps) for steps in (5, 1000))
    assert short.epsilon_claimed < whole.epsilon_claimed
    assert short.claim == "tight ε of the first 5 of 20 steps"
    assert whole.claim == "tight ε of 20 steps"


def test_a_run_is_audited_the_same_for_the_same_seed() -> None:
    assert attack_with_gradients(subject(), 0.99, 100, 5) == attack_with_gradients(subject(), 0.99, 100, 5)
    assert attack_with_inputs(subject(), 0.99, 100, 5) == attack_with_inputs(subject(), 0.99, 100, 5)


def test_input_canaries_are_seen_where_nothing_protects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide network without noise learns wrong targets by heart; the black box attack must see it."""
    weakened(monkeypatch, torch.zeros_like)
    more = ["model.hidden=[128]", "trainer.epochs=60", "algorithm.max_grad_norm=10", "optimizer.lr=1.0"]
    finding = attack_with_inputs(subject(*more), 0.99, 400, 10_000)
    assert finding.lower_bound > 0.5, finding


# ------------------------------------------------------------------------------------- any registered algorithm, as it is


class Invented:
    """An algorithm nobody knows: per-block bounds, a spectrum, correlated noise; `lie` times more than its mechanism says."""

    private = True

    def __init__(self, problem: Problem, *, lie: float = 1.0) -> None:
        self.problem, self.lie = problem, lie
        self.names = list(dict(problem.model.named_parameters()))

    def mechanism(self) -> Mechanism:
        shapes = {name: tuple(p.shape) for name, p in self.problem.model.named_parameters()}
        kinds: list[dict[str, Any]] = [{"noise": "hermitian", "fft_dims": (0, 1)}, {"noise": "circular"}]
        kinds += [{"noise": "correlated", "rho": -0.6}, {"noise": "circular"}]
        blocks = [
            Block(name, shapes[name], "complex64", bound, 3.0 * bound, **kind)
            for name, bound, kind in zip(self.names, (1.0, 0.5, 2.0, 0.1), kinds, strict=True)
        ]
        return Mechanism(tuple(blocks), self.problem.sampling, joint=False)

    def contributions(self, batch: Batch) -> dict[str, Tensor]:
        gradients = reference.per_sample_gradients(self.problem.model, self.problem.loss, batch)
        first = self.names[0]
        spectra = torch.fft.fftn(gradients[first].real, dim=(1, 2), norm="ortho")
        raw = gradients | {first: spectra}
        shares = {}
        for block in self.mechanism().blocks:
            clipped, _ = reference.clip({block.name: raw[block.name]}, [([block.name], block.bound)])
            shares[block.name] = self.lie * clipped[block.name]
        return shares

    def accumulate(self, total: dict[str, Tensor], batch: Batch) -> None:
        for name, share in self.contributions(batch).items():
            total[name] += share.sum(dim=0)

    def postprocess(self, noisy: dict[str, Tensor], expected_batch_size: float) -> dict[str, Tensor]:
        first = self.names[0]
        signal = torch.fft.ifftn(noisy[first], dim=(0, 1), norm="ortho").real
        return mean(noisy | {first: torch.complex(signal, torch.zeros_like(signal))}, expected_batch_size)


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Subject]:
    registry.names("algorithm")
    monkeypatch.setitem(registry._builders["algorithm"], "invented", Invented)
    return lambda *more: subject(
        "algorithm.name=invented", *(f"~algorithm.{k}" for k in ("noise_multiplier", "max_grad_norm", "noise")), *more
    )


PLAIN = ("~algorithm.gradient", "~algorithm.gradients")


def test_an_algorithm_the_audit_never_heard_of_is_audited(invented: Callable[..., Subject]) -> None:
    findings = [
        *attack_recipe_release(invented(*PLAIN), 0.99, 2000),
        attack_with_gradients(invented(*PLAIN), 0.99, 100, 1000),
        attack_with_inputs(invented(*PLAIN), 0.99, 100, 1000),
    ]
    assert [finding.verdict for finding in findings] == ["passes"] * 4
    assert findings[0].lower_bound > 0.4 * findings[0].epsilon_claimed  # it moves all blocks at once, along the weak direction


def test_and_caught_when_its_contributions_exceed_its_mechanism(
    invented: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "check_model", lambda *_: [])
    lying = invented("+algorithm.lie=4.0", *PLAIN)
    assert attack_recipe_release(lying, 0.99, 1200)[1].verdict == "flagged"


def test_and_caught_when_one_of_its_blocks_lacks_noise(invented: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    weakened(monkeypatch, forget_one_bias)
    assert attack_recipe_release(invented(*PLAIN), 0.99, 1000)[0].verdict == "flagged"


def test_what_has_no_epsilon_is_not_audited() -> None:
    with pytest.raises(UserError, match="its ε is ∞"):
        subject("algorithm.noise_multiplier=0")
    with pytest.raises(UserError, match="its ε is ∞"):
        subject("algorithm=sgd")


# ------------------------------------------------------------------------------------------------------ the command line


def zdp_bench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["audit", *words])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def found(verdict: str, expected: str = "passes") -> Finding:
    return Finding("case", "claim |x|", math.inf, 1.25, 1e-5, 0.99, verdict, expected, "evidence")  # type: ignore[arg-type]


def test_the_exit_code_is_1_when_a_verdict_is_not_the_expected_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for findings, code in (
        ([found("passes")], 0),
        ([found("passes"), found("flagged", "flagged"), found("skipped", "skipped"), found("flagged", "either")], 0),
        ([found("flagged")], 1),
        ([found("passes"), found("passes", "flagged")], 1),
    ):
        monkeypatch.setattr(module, "audit", lambda *_, findings=findings: iter(findings))
        assert zdp_bench(capsys, "recipe=quickstart", "--results", str(tmp_path))[0] == code


@pytest.mark.parametrize("form", ["rich", "md", "csv", "json"])
def test_every_format_holds_every_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str
) -> None:
    monkeypatch.setattr(module, "audit", lambda *_: iter([found("passes"), found("flagged", "flagged")]))
    code, out, err = zdp_bench(capsys, "recipe=quickstart", "--format", form, "--results", str(tmp_path))
    assert code == 0
    if form == "csv":
        assert [row["verdict"] for row in csv.DictReader(io.StringIO(out))] == ["passes", "flagged"]
    elif form == "json":
        assert [row["epsilon_claimed"] for row in json.loads(out)] == ["inf", "inf"]
    else:
        assert out.count("passes") >= 2
        assert "∞" in out
    tables = tmp_path / "tables"
    assert f"written: {tables / 'audit.md'}" in err
    assert "claim \\|x\\|" in (tables / "audit.md").read_text()
    assert (tables / "audit.csv").read_text().count("\n") == 3


def test_another_recipes_table_has_its_own_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "audit", lambda *_: iter([found("passes")]))
    zdp_bench(capsys, "recipe=mnist", "--results", str(tmp_path))
    assert {path.name for path in (tmp_path / "tables").iterdir()} == {"audit_mnist.md", "audit_mnist.csv"}


def test_chosen_cases_alone_are_attacked_and_nothing_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["recipe=quickstart", "--cases", "circular_2021,gredp", "--format", "json", "--results", str(tmp_path)]
    code, out, _ = zdp_bench(capsys, *words)
    assert code == 0
    assert [(row["case"], row["verdict"]) for row in json.loads(out)] == [("circular_2021", "flagged"), ("gredp", "passes")]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--cases", "circular_2012"], "case 'circular_2012' is not known. Did you mean 'circular_2021'"),
        (["--confidence", "1.5"], "--confidence=1.5: must lie in"),
        (["--canaries", "2"], "--canaries=2: must be at least 10"),
        (["--steps", "0"], "--steps=0: must be at least 1"),
        (["algorithm.noise_multiplier=0", "--cases", "recipe"], "its ε is ∞"),
        (["algorithm.noise_multiplyer=1"], "Did you mean 'algorithm.noise_multiplier'"),
    ],
)
def test_mistakes_end_in_one_sentence(capsys: pytest.CaptureFixture[str], words: list[str], sentence: str) -> None:
    code, out, err = zdp_bench(capsys, "recipe=quickstart", *words)
    assert code == 2
    assert sentence in err
    assert "Traceback" not in out + err


def test_the_names_of_the_cases_are_different() -> None:
    assert not [pair for pair in combinations([case.name for case in CASES], 2) if pair[0] == pair[1]]
