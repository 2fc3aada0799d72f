"""The attack on others' trainings, and on the shipped scripts: what is true passes, what is not is
flagged, and mistakes are named.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from zdp_bench.errors import UserError
from zdp_bench.extras.audit.foreign import DELTAS, StatedClaim, run_once, step
from zdp_bench.privacy.accounting import gdp_epsilon, pld, pld_uniform

Example = tuple[Any, Any]
BLANK: list[Example] = [(torch.zeros(3), i) for i in range(4)]
GAUSSIAN = {"noise_multiplier": 1.0}
SAMPLED = {"noise_multiplier": 0.1, "steps": 3}


def clip(x: Tensor) -> Tensor:
    return x / x.norm().clamp(min=1.0)


def gaussian(examples: list[Example], seed: int, std: float = 1.0) -> dict[str, Tensor]:
    """The sum of clipped inputs and noise."""
    generator = torch.Generator().manual_seed(seed)
    noise = std * torch.randn(3, generator=generator)
    return {"sum": torch.stack([clip(x) for x, _ in examples]).sum(dim=0) + noise}


def sampled(
    examples: list[Example], seed: int, rate: float = 0.5, noise: float = 0.1
) -> dict[str, Tensor]:
    """Three steps with Poisson batches, all released."""
    rng = np.random.default_rng(seed)
    sums = {}
    for i in range(3):
        drawn = rng.random(len(examples)) < rate
        shares = [clip(x) * bool(d) for (x, _), d in zip(examples, drawn, strict=True)]
        drawn_noise = noise * torch.from_numpy(rng.standard_normal(3))
        sums[f"step {i}"] = torch.stack(shares).sum(dim=0) + drawn_noise
    return sums


def stepwise(
    examples: list[Example], seed: int, fresh: bool = False, weights: bool = True
) -> dict[str, Tensor]:
    """Four steps with noise of size 1: of each its update, or the weights after it."""
    rng = np.random.default_rng(seed)
    updates = []
    for i in range(4):
        if fresh or i == 0:
            noise = torch.from_numpy(rng.standard_normal(3)).float()
        drawn = rng.random(len(examples)) < 0.5
        shares = [clip(x) * bool(d) for (x, _), d in zip(examples, drawn, strict=True)]
        updates.append(torch.stack(shares).sum(dim=0) + noise)
    seen = 1 - 0.1 * torch.stack(updates).cumsum(dim=0) if weights else torch.stack(updates)
    return {f"step {i}": each for i, each in enumerate(seen)}


def restart(examples: list[Example], seed: int, anew: bool = True) -> dict[str, Tensor]:
    """One step on two weights. With a seed, deepee starts its generator anew for each."""
    shares = torch.stack([clip(x) for x, _ in examples]) / math.sqrt(2)
    generator = torch.Generator().manual_seed(seed)
    released = {}
    for name, total in {"weight": shares.sum(dim=0), "bias": -shares[:, :2].sum(dim=0)}.items():
        if anew:
            generator.manual_seed(seed)
        released[name] = total + torch.randn(len(total), generator=generator)
    return released


def skip_long(examples: list[Example], seed: int, noisy: bool = False) -> dict[str, Tensor]:
    """The weights after a step that is left out where the sum, clean or noisy, is long."""
    clean = torch.stack([clip(x) for x, _ in examples]).sum(dim=0)
    release = gaussian(examples, seed)
    is_long = release["sum"].norm() > 2 if noisy else clean.norm() > 0.5
    return {"weights": torch.ones(3) - (0.0 if is_long else 0.1) * release["sum"]}


def constant(examples: list[Example], seed: int) -> dict[str, Tensor]:
    return {"sum": torch.full((3,), 0.3)} if len(examples) > 4 else gaussian(examples, seed)


def untouched(examples: list[Example], seed: int) -> dict[str, Tensor]:
    """No noise on what no example touches, as a sparse embedding has it."""
    release = gaussian(examples, seed)["sum"]
    return {"sum": torch.cat([release, release.flip(0) * bool(len(examples) > 4)])}


def overflow(examples: list[Example], seed: int, value: float = math.nan) -> dict[str, Tensor]:
    """Not finite where an example is long."""
    release = gaussian(examples, seed)["sum"]
    is_long = any(x.norm() > 50 for x, _ in examples)
    return {"sum": torch.full((3,), value) if is_long else release}


def fixed_size(examples: list[Example], seed: int) -> dict[str, Tensor]:
    """One step with half of the examples, drawn without replacement."""
    rng = np.random.default_rng(seed)
    batch = rng.permutation(len(examples))[: len(examples) // 2]
    total = torch.stack([clip(examples[i][0]) for i in batch]).sum(dim=0)
    return {"sum": total + 0.2 * torch.from_numpy(rng.standard_normal(3))}


@pytest.mark.parametrize(
    ("train", "claim", "runs", "verdict"),
    [
        (gaussian, GAUSSIAN, 400, "passes"),
        (gaussian, {"epsilon": 4.38, "delta": 1e-5}, 400, "passes"),
        (sampled, SAMPLED | {"sample_rate": 0.5}, 200, "passes"),
        (gaussian, {"noise_multiplier": 2.0}, 1000, "flagged"),
        (gaussian, {"epsilon": 0.1, "delta": 1e-5}, 1000, "flagged"),
        (sampled, SAMPLED | {"sample_rate": 0.3}, 400, "flagged"),
    ],
)
def test_true_claims_pass_and_false_ones_are_flagged_with_few_runs(
    train: Callable[..., Mapping[str, Tensor]], claim: dict[str, float], runs: int, verdict: str
) -> None:
    assert step(train, BLANK, claim, runs=runs).verdict == verdict


@pytest.mark.parametrize("unit", [3e37, 1e99])
def test_a_release_of_large_numbers_is_measured_as_it_is(unit: float) -> None:
    """Beyond 1e30, both neighbours' numbers were replaced by the same one."""

    def count(examples: list[Example], seed: int) -> dict[str, Tensor]:
        noise = 1e-6 * torch.randn(1, generator=torch.Generator().manual_seed(seed))
        return {"sum": unit * (len(examples) + noise.double())}

    assert step(count, BLANK, GAUSSIAN, runs=60).verdict == "flagged"


@pytest.mark.parametrize("examples", [torch.zeros(4, 2, 3), np.zeros((4, 2, 3))])
def test_the_examples_may_be_an_array_of_pairs(examples: Any) -> None:
    def train(pairs: list[Example], seed: int) -> dict[str, Tensor]:
        return gaussian([(torch.as_tensor(x).float(), y) for x, y in pairs], seed)

    assert step(train, examples, GAUSSIAN, runs=40).verdict == "passes"


STEPS = {"noise_multiplier": 1.0, "sample_rate": 0.5, "steps": 4}


@pytest.mark.parametrize(
    ("broken", "claim"),
    [
        (skip_long, GAUSSIAN),
        (constant, GAUSSIAN),
        (untouched, GAUSSIAN),
        (stepwise, STEPS),
        (partial(stepwise, weights=False), STEPS),
        (restart, GAUSSIAN),
        (overflow, GAUSSIAN),
        (partial(overflow, value=-math.inf), GAUSSIAN),
    ],
)
def test_what_no_projection_shows_is_flagged_in_200_runs(
    broken: Callable[..., Mapping[str, Tensor]], claim: dict[str, float]
) -> None:
    assert step(broken, BLANK, claim, runs=200).verdict == "flagged"


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_looks_like_it_and_is_sound_passes(seed: int) -> None:
    for sound in (partial(skip_long, noisy=True), partial(restart, anew=False)):
        assert step(sound, BLANK, GAUSSIAN, runs=200, seed=seed).verdict == "passes"
    for weights in (True, False):
        sound = partial(stepwise, fresh=True, weights=weights)
        assert step(sound, BLANK, STEPS, runs=200, seed=seed).verdict == "passes"


@pytest.mark.parametrize(("of_owners", "verdict"), [(True, "passes"), (False, "flagged")])
def test_clipping_of_records_that_is_sold_as_an_owner_s_is_flagged(
    of_owners: bool, verdict: str
) -> None:
    """Examples are (x, owner); four of one owner come and go together."""

    def train(examples: list[Example], seed: int) -> dict[str, Tensor]:
        owned: dict[Any, list[Tensor]] = {}
        for number, (x, owner) in enumerate(examples):
            owned.setdefault(owner if of_owners else number, []).append(x)
        means = [(torch.stack(xs).mean(dim=0), None) for xs in owned.values()]
        return gaussian(means, seed)

    patient: list[Example] = [(torch.ones(3), "p") for _ in range(4)]
    assert step(train, BLANK, GAUSSIAN, canary=patient, seed=1).verdict == verdict
    assert step(train, BLANK, GAUSSIAN, canary=patient[0], seed=1).verdict == "passes"


def test_a_replaced_example_counts_double_and_its_batches_have_a_fixed_size() -> None:
    x = torch.tensor([9.0, 0.0, 0.0])
    pair: dict[str, Any] = {"canary": (x, 0), "instead": (-x, 0)}
    full = step(gaussian, BLANK, {"noise_multiplier": 1.0, "sample_rate": 1.0}, **pair)
    assert full.verdict == "passes"
    # an added example's claim, for twice the move
    assert step(gaussian, BLANK, {"noise_multiplier": 2.0}, **pair, runs=1000).verdict == "flagged"
    half = {"noise_multiplier": 0.2, "sample_rate": 0.5}
    examples = [(torch.zeros(3), 0) for _ in range(9)]
    assert step(fixed_size, examples, half, **pair).verdict == "passes"
    third = half | {"sample_rate": 0.3}
    assert step(fixed_size, examples, third, **pair).verdict == "flagged"


def test_every_run_has_a_seed_and_a_list_of_its_own() -> None:
    seen: list[tuple[int, int]] = []

    def spoils(examples: list[Example], seed: int) -> dict[str, Tensor]:
        seen.append((seed, len(examples)))
        result = gaussian(examples, seed)
        examples.clear()
        return result

    step(spoils, BLANK, GAUSSIAN, canary=(torch.ones(3), 0), runs=40)
    assert len(seen) == 80
    pairs, tests = seen[:20], seen[20:]
    assert [seed for seed, _ in pairs[::2]] == [seed for seed, _ in pairs[1::2]]
    assert len({seed for seed, _ in tests}) == 60
    assert [length for _, length in tests] == [4] * 30 + [5] * 30


def test_the_loudest_candidate_is_the_canary() -> None:
    tried: list[Any] = []

    def picky(examples: list[Example], seed: int) -> dict[str, Tensor]:
        tried.extend(examples[4:])
        loud = sum(float(x.norm()) * (y == 2) for x, y in examples)
        return {"sum": torch.tensor([loud]) + gaussian(examples, seed)["sum"]}

    step(picky, BLANK, GAUSSIAN, runs=40)
    x, y = tried[-1]
    assert y == 2
    assert x.norm() > 50


def test_complex_tensors_are_released_as_two_parts() -> None:
    flat = run_once(lambda *_: {"w": torch.tensor([[1 + 2j, 3j]]), "n": torch.tensor(4)}, [], 0)
    values = {key: value.tolist() for key, value in flat.items()}
    assert values == {("w", "real"): [1.0, 0.0], ("w", "imag"): [2.0, 3.0], ("n", ""): [4.0]}


def test_a_sparse_tensor_is_released_with_its_zeros() -> None:
    flat = run_once(lambda *_: {"w": torch.eye(2).to_sparse()}, [], 0)
    assert flat["w", ""].tolist() == [1.0, 0.0, 0.0, 1.0]


def test_a_part_of_a_complex_tensor_hides_no_tensor_of_that_name() -> None:
    release = {"w.real": torch.tensor(4.0), "w": torch.tensor([1 + 2j])}
    flat = run_once(lambda *_: release, [], 0)
    assert sorted(float(value[0]) for value in flat.values()) == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"runs": 10}, "runs=10: must be at least 40"),
        ({"confidence": 1.0}, "confidence=1.0: must lie in"),
        ({"examples": []}, "examples=\\[\\]: must not be empty"),
        ({"examples": 5}, "examples: a value of type int was given, but a list is required"),
        ({"examples": [(torch.ones(3), 1, 2)]}, "examples: must be pairs"),
        ({"examples": torch.ones(4)}, "examples: must be pairs"),
        ({"make_step": lambda *_: {"w": np.array([1e101])}}, "exceed 1e\\+100"),
        ({"make_step": lambda *_: {"w": np.array(["a"])}}, "'w' contains no numbers"),
        ({"make_step": lambda *_: [1]}, "must return a dictionary of tensors by name, not list"),
        ({"make_step": lambda *_: {"w": "x"}}, "'w' is a str"),
        ({"make_step": lambda *_: {"w": torch.tensor([math.nan])}}, "without the canary"),
        ({"make_step": lambda e, _: {"w": torch.zeros(len(e))}}, "the same names and shapes"),
    ],
)
def test_mistakes_end_in_one_sentence(changed: dict[str, Any], sentence: str) -> None:
    given = {"make_step": gaussian, "examples": BLANK, "claimed": GAUSSIAN} | changed
    with pytest.raises(UserError, match=sentence):
        step(**given)


def test_an_epsilon_is_claimed_for_its_delta_alone() -> None:
    claim = StatedClaim.read({"epsilon": 2, "delta": 1e-5})
    assert (claim.text, claim.deltas, claim.epsilon(1e-5)) == ("ε = 2 at δ = 1e-05", (1e-5,), 2.0)


def test_a_mechanism_claims_its_tight_epsilon_for_every_delta() -> None:
    full = StatedClaim.read({"noise_multiplier": 2.0})
    assert full.epsilon(0.01) == pytest.approx(gdp_epsilon(0.5, 0.01))
    settings = {"noise_multiplier": 0.8, "sample_rate": 0.1, "steps": 20}
    assert StatedClaim.read(settings).epsilon(1e-5) == pld(0.8, 0.1, 20, 1e-5)
    assert StatedClaim.read(settings, replaced=True).epsilon(1e-5) == pld_uniform(
        0.4, 0.1, 20, 1e-5
    )
    assert StatedClaim.read(settings).text == "σ = 0.8, rate 0.1, 20 steps"
    assert full.deltas == DELTAS


@pytest.mark.parametrize(
    ("claimed", "sentence"),
    [
        (2.0, "claimed: give"),
        ({"epsilon": 1.0}, "claimed: give"),
        ({"noise_multiplyer": 1.0}, "claimed: give"),
        ({"epsilon": math.inf, "delta": 1e-5}, "claimed epsilon=inf"),
        ({"epsilon": 1.0, "delta": 0}, "claimed delta=0.0"),
        ({"epsilon": "a", "delta": 1e-5}, "claimed epsilon: a value of type str"),
        ({"epsilon": None, "delta": 1e-5}, "claimed epsilon: a value of type NoneType"),
        ({"noise_multiplier": 1, "steps": 2.9}, "claimed steps=2.9: must be a whole number"),
        ({"noise_multiplier": 0}, "claimed noise_multiplier=0.0"),
        ({"noise_multiplier": 1, "steps": 10**400}, "claimed steps: is too large a number"),
        ({"noise_multiplier": 1, "sample_rate": 2}, "claimed sample_rate=2.0"),
    ],
)
def test_a_claim_that_cannot_be_meant_is_one_sentence(claimed: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        StatedClaim.read(claimed)


@pytest.mark.parametrize(
    ("script", "function", "runs", "claimed", "verdict"),
    [
        ("by_hand", "right", 100, {}, "passes"),
        ("by_hand", "loss_mean", 200, {}, "flagged"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("by_hand", "noise_per_micro_batch", 400, {}, "flagged"),
                ("by_hand", "right", 200, {"noise_multiplier": 4.0}, "flagged"),
                ("opacus_loop", "shuffled", 160, {}, "flagged"),
                ("opacus_loop", "poisson", 60, {}, "passes"),
                ("opacus_loop", "poisson", 160, {"sample_rate": 0.15}, "flagged"),
            ]
        ),
    ],
)
def test_the_shipped_scripts_get_the_verdict_they_deserve(
    script: str, function: str, runs: int, claimed: dict[str, float], verdict: str
) -> None:
    """Right ones pass because their claims are right: at smaller ones they are flagged."""
    if script == "opacus_loop":
        pytest.importorskip("opacus")
    module = importlib.import_module(f"zdp_bench.extras.audit.examples.{script}")
    claimed = module.CLAIMED | claimed
    audit = step(getattr(module, function), module.EXAMPLES, claimed, runs=runs, seed=0)
    assert audit.verdict == verdict
