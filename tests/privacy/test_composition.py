"""What several runs spend together: against dp-accounting, against one long run, and in order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from dp_accounting.pld import PLDAccountant

from zdp_bench.privacy import composition
from zdp_bench.privacy.accounting import gdp_epsilon, patient_epsilon, pld, pld_uniform
from zdp_bench.privacy.composition import (
    ROUNDING,
    Spending,
    SpentSteps,
    compose_epsilon,
    list_spent_steps,
)
from zdp_bench.privacy.mechanism import Mechanism, Sampling

DELTA = 1e-5


def poisson(rate: float, records: int = 1000) -> Sampling:
    return Sampling("poisson", rate, rate * records, records)


def uniform(batch: int, records: int = 1000) -> Sampling:
    return Sampling("uniform", batch / records, batch, records)


FULL = Sampling("full", 1.0, 1000, 1000)
RUNS = [
    [(1.0, poisson(0.05), 100), (2.0, poisson(0.1), 200)],
    [(0.8, poisson(0.01), 1000), (3.0, poisson(0.5), 10), (1.5, poisson(0.02), 300)],
    [(8.0, FULL, 3), (1.1, poisson(0.02), 500)],
    [(5.0, poisson(0.001), 5), (0.7, poisson(0.01), 2000)],
]


@pytest.mark.parametrize(("runs", "delta"), [*zip(RUNS, [1e-5, 1e-6] * 2, strict=True)])
def test_runs_together_are_what_dp_accounting_says(
    runs: list[tuple[float, Sampling, int]], delta: float
) -> None:
    theirs = PLDAccountant(value_discretization_interval=1e-3)
    for z, sampling, steps in runs:
        event: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(z)
        if sampling.sample_rate < 1:
            event = dp_accounting.PoissonSampledDpEvent(sampling.sample_rate, event)
        theirs.compose(event, steps)
    ours = compose_epsilon([SpentSteps(*run) for run in runs], delta)
    # theirs is an upper bound too, on another grid
    assert ours == pytest.approx(theirs.get_epsilon(delta), rel=1e-3)
    assert ours < sum(compose_epsilon([SpentSteps(*run)], delta) for run in runs)
    # both are rounded up, the whole on the finer grid
    assert ours > 0.999 * max(compose_epsilon([SpentSteps(*run)], delta) for run in runs)


@pytest.mark.parametrize("many", [1, 2, 10])
@pytest.mark.parametrize("big", [(1.0, poisson(0.5), 10), (1.0, FULL, 1)])
def test_steps_that_leak_hardly_anything_add_hardly_anything(
    big: tuple[float, Sampling, int], many: int
) -> None:
    """Their law has two cells on the grid of the other run's, which are no rounding."""
    small = SpentSteps(10.0, poisson(0.001), many)
    alone = compose_epsilon([SpentSteps(*big)], DELTA)
    together = compose_epsilon([SpentSteps(*big), small], DELTA)
    assert 0.9999 * alone < together < alone + compose_epsilon([small], DELTA)
    theirs = PLDAccountant(value_discretization_interval=1e-3)
    for z, sampling, steps in (big, (10.0, poisson(0.001), many)):
        gaussian = dp_accounting.GaussianDpEvent(z)
        rate = sampling.sample_rate
        event = gaussian if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, gaussian)
        theirs.compose(event, steps)
    assert together == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-3)


def test_fixed_size_batches_that_leak_hardly_anything_add_hardly_anything() -> None:
    big, small = SpentSteps(0.5, uniform(300), 10), SpentSteps(5.0, uniform(1), 2)
    alone = compose_epsilon([big], DELTA)
    assert 0.9999 * alone < compose_epsilon([big, small], DELTA) < 1.001 * alone


@pytest.mark.parametrize("sampling", [poisson(0.01), uniform(10)])
def test_a_tiny_delta_is_bounded_by_renyi_divergences(sampling: Sampling) -> None:
    """A law on a grid counts its cut tails as disclosure, which makes its ε infinite."""
    runs = [SpentSteps(2.0, sampling, 1000), SpentSteps(8.0, FULL, 2)]
    if sampling.scheme == "uniform":
        runs[1] = SpentSteps(4.0, uniform(50), 100)
    for delta in (1e-15, 1e-30):
        alone = [compose_epsilon([run], delta) for run in runs]
        assert max(alone) < compose_epsilon(runs, delta) < sum(alone)


def test_a_tiny_delta_of_a_patient_is_bounded_by_renyi_divergences_only_in_every_step() -> None:
    """Those of one example would state too small an ε for two that are drawn."""
    runs = [SpentSteps(2.0, poisson(0.05), 100, 2), SpentSteps(8.0, poisson(0.05), 10, 2)]
    assert compose_epsilon(runs, 1e-12) > compose_epsilon(runs[:1], 1e-12)
    runs = [SpentSteps(16.0, FULL, 2, 2), SpentSteps(12.0, FULL, 3, 2)]
    exact = gdp_epsilon(2 * math.hypot(math.sqrt(2) / 16, math.sqrt(3) / 12), 1e-30)
    assert exact < compose_epsilon(runs, 1e-30) < 1.05 * exact


def test_what_is_together_is_never_more_than_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [SpentSteps(z, poisson(0.05), 100) for z in (1.0, 2.0)]
    halves = sum(compose_epsilon([run], DELTA / 2) for run in runs)
    monkeypatch.setattr(composition, "epsilon_together", lambda *_: math.inf)
    assert compose_epsilon(runs, DELTA) == pytest.approx(halves, rel=1e-12)


def test_two_runs_of_one_mechanism_are_one_long_run() -> None:
    run = SpentSteps(1.0, poisson(0.05), 100)
    assert compose_epsilon([run, run], DELTA) == pytest.approx(pld(1.0, 0.05, 200, DELTA), rel=1e-9)
    assert compose_epsilon([run], DELTA) == pytest.approx(pld(1.0, 0.05, 100, DELTA), rel=1e-9)
    assert compose_epsilon([], DELTA) == 0
    assert compose_epsilon([SpentSteps(1.0, poisson(0.05), 0)], DELTA) == 0


@pytest.mark.parametrize(("z", "rate"), [(1.0, 0.05), (0.6, 0.01), (4.0, 0.3)])
def test_a_run_that_is_composed_in_two_kinds_costs_as_in_one(z: float, rate: float) -> None:
    """The path of several kinds, on a kind that the path of one knows exactly."""
    halves = [SpentSteps(z, poisson(rate), 150), SpentSteps(z * (1 + 1e-12), poisson(rate), 150)]
    assert compose_epsilon(halves, DELTA) == pytest.approx(pld(z, rate, 300, DELTA), rel=2e-3)
    batch = round(1000 * rate)
    halves = [SpentSteps(z, uniform(batch), 150), SpentSteps(z * (1 + 1e-12), uniform(batch), 150)]
    whole = pld_uniform(z, batch / 1000, 300, DELTA)
    assert compose_epsilon(halves, DELTA) == pytest.approx(whole, rel=2e-3)


def test_full_batches_compose_in_closed_form() -> None:
    runs = [SpentSteps(4.0, FULL, 3), SpentSteps(9.0, FULL, 5)]
    exact = gdp_epsilon(math.sqrt(3 / 16 + 5 / 81), DELTA)
    assert exact <= compose_epsilon(runs, DELTA) * (1 + 1e-9)
    assert compose_epsilon(runs, DELTA) == pytest.approx(exact, rel=1e-3)
    # a batch of all examples hides nothing but which
    replaced = [SpentSteps(4.0, uniform(1000), 3), SpentSteps(9.0, uniform(1000), 5)]
    assert compose_epsilon(replaced, DELTA) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("sampling", [FULL, poisson(1.0)], ids=["full", "poisson"])
@pytest.mark.parametrize(("first", "second"), [(4, 4), (2, 7), (1, 16)])
def test_a_patient_who_is_in_every_step_composes_in_closed_form(
    sampling: Sampling, first: int, second: int
) -> None:
    """Such steps move the sum by all examples at their bounds: Gaussian DP of count·√steps/z."""
    runs = [SpentSteps(30.0, sampling, 3, first), SpentSteps(45.0, sampling, 5, second)]
    exact = gdp_epsilon(math.hypot(first / 30 * math.sqrt(3), second / 45 * math.sqrt(5)), DELTA)
    assert compose_epsilon(runs, DELTA) == pytest.approx(exact, rel=1e-3)
    assert compose_epsilon(runs, DELTA) >= exact * (1 - 1e-9)
    alone = gdp_epsilon(second / 45 * math.sqrt(5), DELTA)
    assert compose_epsilon(runs[1:], DELTA) == pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize("count", [2, 5])
def test_a_patient_whose_examples_are_drawn_is_what_dp_accounting_says(count: int) -> None:
    """The number of a patient's examples in a step is binomial; each moves the sum by a bound."""
    theirs = PLDAccountant(value_discretization_interval=1e-3)
    runs = [SpentSteps(5.0, poisson(0.05), 40, count), SpentSteps(4.0, poisson(0.2), 10, count)]
    for run in runs:
        rate = run.sampling.sample_rate
        drawn = [
            math.comb(count, k) * rate**k * (1 - rate) ** (count - k) for k in range(count + 1)
        ]
        event = MixtureOfGaussiansDpEvent(run.z, range(count + 1), drawn)
        theirs.compose(event, run.steps)
    assert compose_epsilon(runs, DELTA) == pytest.approx(theirs.get_epsilon(DELTA), rel=2e-3)


@pytest.mark.parametrize("sampling", [poisson(0.05), uniform(50)])
def test_a_patients_examples_compose_as_one_patients(sampling: Sampling) -> None:
    halves = [SpentSteps(2.0, sampling, 60, 4), SpentSteps(2.0 * (1 + 1e-12), sampling, 60, 4)]
    whole = patient_epsilon(Mechanism.of_z(2.0, sampling), 4, 120, DELTA)
    assert compose_epsilon(halves, DELTA) == pytest.approx(whole, rel=3e-3)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kinds", [1, 2])
def test_a_private_number_of_examples_changes_no_epsilon(count: int, kinds: int) -> None:
    """It is stated as 0, and the ε of runs of two kinds was 0 as well."""
    runs = [SpentSteps(z, poisson(0.05), 60, count) for z in (3.0, 5.0)[:kinds]]
    private = [replace(run, sampling=replace(run.sampling, records=0)) for run in runs]
    assert compose_epsilon(private, DELTA) == compose_epsilon(runs, DELTA) > 0.1


@pytest.mark.parametrize("others", [[], [SpentSteps(2.0, poisson(0.1), 40)]])
def test_of_a_cycle_an_example_is_in_one_step_and_a_patient_perhaps_in_all(
    others: list[SpentSteps],
) -> None:
    in_cycles = SpentSteps(1.0, replace(poisson(0.05), cycle=4), 98)
    of_one = SpentSteps(1.0, poisson(0.05), 25)
    together = compose_epsilon([of_one, *others], DELTA)
    assert compose_epsilon([in_cycles, *others], DELTA) == together < math.inf
    of_two = SpentSteps(1.0, replace(poisson(0.05), cycle=2), 98, examples=2)
    assert compose_epsilon([of_two, *others], DELTA) == math.inf


@pytest.mark.parametrize(("batch", "count"), [(997, 4), (990, 20), (500, 501)])
def test_batches_that_all_hold_some_of_a_patient_hide_nothing_in_any_path(
    batch: int, count: int
) -> None:
    runs = [SpentSteps(z, uniform(batch), 5, count) for z in (9.0, 9.1)]
    least, most = (
        patient_epsilon(Mechanism.of_z(z, uniform(batch)), count, 10, DELTA) for z in (9.1, 9.0)
    )
    assert least < compose_epsilon(runs, DELTA) < most * 1.001


def at_a_node(samplings: Sequence[Sampling], z: float, steps: int, count: int) -> SpentSteps:
    """The steps of a federation, at one of whose nodes the examples are."""
    first, *others = samplings
    return SpentSteps(z, first, steps, count, tuple(others))


def largest_of_nodes(spent: SpentSteps) -> float:
    epsilons = []
    for sampling in spent.samplings:
        release, count = Mechanism.of_z(spent.z, sampling), sampling.cap_examples(spent.examples)
        epsilons.append(patient_epsilon(release, count, spent.steps, DELTA))
    return max(epsilons)


@pytest.mark.parametrize("sizes", [(5, 1000), (1000, 5), (20, 400, 20)])
def test_of_nodes_with_the_same_rate_the_one_that_holds_most_of_a_patient_counts(
    sizes: tuple[int, ...],
) -> None:
    """Of a node with 5 examples, a patient has 5 at most; the ε was 6 instead of 143."""
    spent = at_a_node([poisson(0.1, size) for size in sizes], 4.0, 100, 50)
    assert compose_epsilon([spent], DELTA) == largest_of_nodes(spent) > 100


@pytest.mark.parametrize("scheme", ["poisson", "uniform"])
def test_of_any_nodes_the_bound_is_at_least_that_of_each(scheme: str) -> None:
    """In random settings, alone and beside other steps of the same examples."""
    rng = np.random.default_rng(3)
    for _ in range(12):
        count, steps = int(rng.integers(1, 30)), int(10 ** rng.uniform(0, 2))
        samplings = []
        for size in rng.integers(4, 500, size=3):
            records, batch = int(size), int(rng.integers(1, max(2, size // 4)))
            by_rate = poisson(float(rng.uniform(0.01, 0.3)), records)
            samplings.append(by_rate if scheme == "poisson" else uniform(batch, records))
        spent = at_a_node(samplings, float(rng.uniform(3, 20)), steps, count)
        largest = largest_of_nodes(spent)
        assert largest * (1 - 1e-6) <= compose_epsilon([spent], DELTA) < 1.5 * largest
    beside = SpentSteps(9.0, samplings[0], 3, count)
    for sampling in samplings:
        elsewhere = compose_epsilon(
            [replace(spent, sampling=sampling, elsewhere=()), beside], DELTA
        )
        assert elsewhere <= compose_epsilon([spent, beside], DELTA) * (1 + 1e-6)


def test_nodes_whose_every_batch_holds_some_of_a_patient_hide_nothing() -> None:
    spent = at_a_node([uniform(7, 21), uniform(40, 52)], 9.0, 5, 24)
    assert compose_epsilon([spent], DELTA) == pld(9.0 / 24, 1.0, 5, DELTA)
    some = at_a_node([uniform(7, 21), uniform(2, 52)], 9.0, 5, 24)
    assert largest_of_nodes(some) <= compose_epsilon([some], DELTA) < math.inf


@pytest.mark.parametrize(
    "other", [Sampling("shuffled", 0.05, 5, 100), replace(poisson(0.01), cycle=2)]
)
def test_a_node_without_guarantee_makes_the_whole_infinite(other: Sampling) -> None:
    spent = at_a_node([poisson(0.05), other], 4.0, 10, 2)
    assert compose_epsilon([spent], DELTA) == math.inf
    assert compose_epsilon([replace(spent, elsewhere=())], DELTA) < math.inf


def test_nodes_that_hide_different_neighbours_have_no_common_epsilon() -> None:
    with pytest.raises(ValueError, match="different neighbours"):
        compose_epsilon([at_a_node([poisson(0.05), uniform(5)], 4.0, 10, 2)], DELTA)


def test_a_run_without_noise_or_guarantee_makes_the_whole_infinite() -> None:
    run, shuffled = SpentSteps(1.0, poisson(0.05), 100), Sampling("shuffled", 0.05, 50, 1000)
    assert compose_epsilon([run, SpentSteps(0.0, poisson(0.05), 1)], DELTA) == math.inf
    assert compose_epsilon([SpentSteps(1.0, shuffled, 1)], DELTA) == math.inf
    with pytest.raises(ValueError, match="different neighbours"):
        compose_epsilon([run, SpentSteps(1.0, uniform(50), 100)], DELTA)


def run_on(data: str, provenance: str = "own", dataset: str = "folder") -> Spending:
    """A run by patients; `data` lists file:owner, or file alone, as its digest does."""
    words = [word.partition(":") for word in data.split()]
    return Spending(
        home=Path(data),
        recipe="r",
        dataset=dataset,
        provenance=provenance,
        data=data,
        spent=SpentSteps(1.0, poisson(0.05), 100),
        shares_per_owner=1,
        unit="patient",
        delta=DELTA,
        secure=False,
        finished=True,
        by_owner=True,
        sources=frozenset(file for file, _, _ in words),
        owners={file: owner for file, _, owner in words if owner},
    )


def test_a_run_is_private_with_any_noise_unless_its_batches_are_shuffled() -> None:
    shuffled = Sampling("shuffled", 0.05, 50, 1000)
    cases = ((0.0, poisson(0.05), False), (0.5, poisson(0.05), True), (0.5, shuffled, False))
    for z, sampling, is_private in cases:
        run = replace(run_on("a:1"), spent=SpentSteps(z, sampling, 100))
        assert run.is_private == is_private


UNKNOWN = replace(run_on("a"), sources=None)  # its files are not known


@pytest.mark.parametrize(
    ("run", "other", "may_share"),
    [
        (run_on("a b", dataset="x"), run_on("b c", dataset="y"), True),
        (run_on("a b"), run_on("c"), False),
        (run_on("a", "synthetic", "x"), run_on("a", "synthetic", "y"), True),  # one digest
        (UNKNOWN, run_on("b"), True),
        (run_on("b"), UNKNOWN, True),
        (UNKNOWN, run_on("b", dataset="other"), False),
        (replace(UNKNOWN, provenance="synthetic"), run_on("b", "synthetic"), False),
    ],
)
def test_runs_may_share_examples_if_they_read_a_common_file_or_may_have(
    run: Spending, other: Spending, may_share: bool
) -> None:
    assert run.may_share(other) == may_share
    assert (run.shown, replace(run, title="scans").shown) == (run.dataset, "scans")


@pytest.mark.parametrize(
    ("runs", "are_same"),
    [
        ([run_on("a:1 b:1 c:2"), run_on("a:x b:x c:y")], True),  # other names
        ([run_on("a:1 b:1 c:2"), run_on("a:1 b:1 c:2 d:2 e:3")], True),  # more files
        ([run_on("a:1 b:1 c:2"), run_on("a:1 d:3")], True),
        ([run_on("a:1 b:1 c:2"), run_on("a:1 b:2 c:3")], False),  # split
        ([run_on("a:1 b:2"), run_on("a:1 b:1")], False),  # merged
        ([run_on("a:1 b:1"), run_on("b:1 c:1"), run_on("a:1 c:2")], False),  # by way of the second
        ([run_on("a b:1"), run_on("a b:1 c:2")], True),  # a file of several owners, such as a mask
        ([run_on("a:1 b:1"), run_on("a b")], False),  # of an earlier version
        ([run_on("a b"), run_on("a b c")], True),  # by the definition of the data set
        ([run_on("a b"), run_on("a c", dataset="mine")], False),
        ([run_on("a:1 b:1"), run_on("a b c", "official", "chest_xray")], False),
        ([run_on("a b", "official", "msd"), run_on("a c", "derived", "msd_volumes")], True),
    ],
)
@pytest.mark.parametrize("by_owner", [True, False])
def test_runs_compose_per_unit_only_if_a_unit_of_one_is_no_two_units_of_another(
    runs: list[Spending], are_same: bool, by_owner: bool
) -> None:
    """Units of one name were taken for the same, so the ε of one that is several was too small."""
    runs = [replace(run, by_owner=by_owner) for run in runs]
    for ordered in (runs, runs[::-1]):
        if are_same:
            assert len(list_spent_steps(ordered, True)) == len(runs)
        else:
            with pytest.raises(ValueError, match="each patient has other files"):
                list_spent_steps(ordered, True)
    if not by_owner:  # an example is the same in all
        assert list_spent_steps(runs, False) == [run.spent for run in runs]
    else:
        with pytest.raises(ValueError, match=r"different units \(example, patient\)"):
            list_spent_steps(runs, False)


def test_many_kinds_of_steps_stay_an_upper_bound_near_the_sum_of_their_variances() -> None:
    """Twelve kinds that hardly differ cost a little less than as many steps of the worst."""
    kinds = [SpentSteps(1.0 + 0.001 * n, poisson(0.02), 25) for n in range(12)]
    assert pld(1.011, 0.02, 300, DELTA) < compose_epsilon(kinds, DELTA) < pld(1.0, 0.02, 300, DELTA)


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        (
            [SpentSteps(1.0, poisson(0.05), 100), SpentSteps(2.0, poisson(0.1), 200, 3)],
            13.0196467425,
        ),
        ([SpentSteps(1.5, uniform(50), 100), SpentSteps(3.0, uniform(50), 50, 2)], 2.1722186700),
    ],
)
def test_an_epsilon_of_runs_is_the_same_from_version_to_version(
    runs: list[SpentSteps], expected: float
) -> None:
    assert compose_epsilon(runs, DELTA) == pytest.approx(expected, rel=1e-7)


def test_noise_multipliers_that_differ_by_rounding_count_as_the_smallest() -> None:
    close = [2.0, 2.0 * (1 + ROUNDING / 2), 2.0 * (1 + 2 * ROUNDING), 0.5]
    merged = composition._merge_rounding(close)
    assert [merged[z] for z in close] == [2.0, 2.0, close[2], 0.5]
