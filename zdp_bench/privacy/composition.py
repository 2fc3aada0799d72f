"""Compute the tight ε of several runs on the same examples.

Runs draw their batches and noise independently, so they compose like the steps of a single run: the
distributions of their privacy losses are convolved (`loss_distribution.py`), and one δ covers all.
The result is far below the sum of the runs' ε.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from zdp_bench.privacy.accounting import (
    EVERY_STEP,
    HOPELESS,
    SMALL_DELTA,
    composed_epsilon,
    laws_of,
    patient_epsilon,
    pld,
    rdp_together,
    shifts_at_worst,
)
from zdp_bench.privacy.loss_distribution import (
    Mixture,
    epsilon_together,
    has_law,
    shared_width,
)
from zdp_bench.privacy.mechanism import Mechanism, Sampling

ROUNDING = 1e-9  # relative; by rounding, z of one noise multiplier depends on the bound C


@dataclass(frozen=True)
class SpentSteps:
    """Steps of one mechanism that were taken on a data set.

    Attributes:
        z: effective noise multiplier; 0 without noise.
        sampling: how a step draws its examples.
        steps: number of steps.
        examples: number of examples that come or go together: 1, or those of a patient.
        elsewhere: the samplings of a federation's other nodes. The examples are all at one node,
            which may be any.
    """

    z: float
    sampling: Sampling
    steps: int
    examples: int = 1
    elsewhere: tuple[Sampling, ...] = ()

    @property
    def samplings(self) -> tuple[Sampling, ...]:
        """The samplings of all nodes, or that of a central run."""
        return self.sampling, *self.elsewhere


@dataclass(frozen=True)
class Spending:
    """What one run has spent.

    Attributes:
        home: the run's folder.
        recipe: name of its recipe.
        dataset: name of its data set.
        provenance: where the data come from, such as "synthetic".
        data: digest of the data set.
        spent: its steps, for one example or, with `by_owner`, for one unit.
        shares_per_owner: largest number of shares of one owner (a patient, a speaker) in a step.
        unit: what owns several examples, such as "patient".
        delta: δ at which the run states its ε.
        secure: whether noise is cryptographic. Otherwise, anyone who knows seed and data can
            compute it.
        finished: whether the run has finished. If not, all its planned steps are counted.
        by_owner: whether steps draw and clip units, so that `spent` is a unit's.
        sources: the files from which the data were made; None if they are not known.
        owners: the owner of each file of a single owner, if the user states the owners. Names of
            owners need not be the same in two runs.
        title: what the run's user calls the data set, or "".
    """

    home: Path
    recipe: str
    dataset: str
    provenance: str
    data: str
    spent: SpentSteps
    shares_per_owner: int
    unit: str
    delta: float
    secure: bool
    finished: bool
    by_owner: bool = False
    sources: frozenset[str] | None = None
    owners: Mapping[str, str] = field(default_factory=dict)
    title: str = ""

    @property
    def shown(self) -> str:
        """The data set's name to show: its title, if it has one."""
        return self.title or self.dataset

    def may_share(self, other: Spending) -> bool:
        """Return True if some examples may be in the data of both runs.

        That is so if the runs read a common file. If the files of one are not known, any two data
        sets with the same name may share examples, unless they are synthetic.
        """
        return self.may_read(other.dataset, other.data, other.sources)

    def may_read(
        self,
        dataset: str,
        data: str,
        sources: frozenset[str] | None,
    ) -> bool:
        """Return True if some examples of a data set may be in the run's data; see `may_share`.

        Args:
            dataset: name of the data set.
            data: its digest.
            sources: the files from which it was made; None if they are not known.
        """
        if self.data == data:
            return True
        if self.sources and sources:
            return not self.sources.isdisjoint(sources)
        return self.dataset == dataset and self.provenance != "synthetic"

    @property
    def is_private(self) -> bool:
        """True if the run's ε can be finite."""
        schemes = {sampling.scheme for sampling in self.spent.samplings}
        return self.spent.z > 0 and "shuffled" not in schemes


def list_spent_steps(runs: Sequence[Spending], for_owner: bool) -> list[SpentSteps]:
    """Return what each run spent on one example or, with `for_owner`, on one unit.

    Raises:
        ValueError: The runs protect different units, or some protect a unit (`Spending.by_owner`),
            whose ε does not bound that of an example, or units of the same name are not the same: a
            unit of one run may then be several of another.
    """
    hidden = {run.unit if for_owner or run.by_owner else "example" for run in runs}
    if not for_owner:
        hidden.add("example")
    if len(hidden) > 1:
        raise ValueError(f"runs that protect different units ({', '.join(sorted(hidden))})")
    if hidden != {"example"} and not _have_same_owners(runs):
        (unit,) = hidden
        raise ValueError(f"runs that protect different units (each {unit} has other files)")
    if not for_owner:
        return [run.spent for run in runs]
    return [replace(run.spent, examples=run.shares_per_owner) for run in runs]


def _have_same_owners(runs: Sequence[Spending]) -> bool:
    """Return True if no unit of a run is several units of another, as far as is known.

    The user states who owns a file of `provenance` "own", and may state otherwise for another run.
    """
    # Runs of earlier versions state no owners, so prefer others.
    sorted_runs = sorted(runs, key=lambda run: bool(run.owners))
    run_of_data = {(run.data, run.dataset): run for run in sorted_runs}
    distinct_runs = [*run_of_data.values()]
    if len(distinct_runs) < 2:
        return True
    if all(run.owners for run in distinct_runs):
        return _are_owners_consistent([run.owners for run in distinct_runs])
    if any(run.owners for run in distinct_runs):
        return False
    # The definition of a data set states the owners, in the same way for all its runs.
    is_own = any(run.provenance == "own" for run in distinct_runs)
    return not is_own or len({run.dataset for run in distinct_runs}) == 1


def _are_owners_consistent(owners_of_runs: Sequence[Mapping[str, str]]) -> bool:
    """Return True if files that belong together by way of any runs have one owner in each run.

    Args:
        owners_of_runs: for each run, file -> owner.
    """
    parents: dict[Hashable, Hashable] = {}  # file or owner -> another of the same unit

    def find_root(node: Hashable) -> Hashable:
        while (parent := parents.setdefault(node, node)) != node:
            parents[node] = parents[parent]  # halves the path
            node = parents[node]
        return node

    for number, owners in enumerate(owners_of_runs):
        for file, owner in owners.items():
            parents[find_root((number, owner))] = find_root(file)
    for number, owners in enumerate(owners_of_runs):
        distinct_owners = {*owners.values()}
        units = {find_root((number, owner)) for owner in distinct_owners}
        if len(units) < len(distinct_owners):
            return False
    return True


class _Kind(NamedTuple):
    """A kind of steps, whose privacy losses all have the same distribution.

    Attributes:
        samplings: how a step may draw its examples: several, if each has its own worst cases.
        examples: number of examples that come or go together.
    """

    z: float
    samplings: tuple[Sampling, ...]
    examples: int

    def order(self) -> tuple[float, list[tuple[float, int]], int]:
        """Return the sort key of kinds. A fixed order gives equal spendings the same ε."""
        return self.z, [_order_of(sampling) for sampling in self.samplings], self.examples

    def shifts(self) -> tuple[float, Mixture]:
        """Return the noise in units of a shift, and an upper bound on the shifts of a step."""
        return shifts_at_worst(self.z, self.samplings, self.examples)

    def epsilon(self, steps: int, delta: float) -> float:
        """Return the tight ε of so many steps."""
        first, *others = self.samplings
        if not others:
            return patient_epsilon(Mechanism.of_z(self.z, first), self.examples, steps, delta)
        noise, drawn = self.shifts()
        if drawn == EVERY_STEP:
            return pld(noise, 1.0, steps, delta)
        return composed_epsilon(laws_of(first), noise, drawn, steps, delta)


def _order_of(sampling: Sampling) -> tuple[float, int]:
    return sampling.sample_rate, sampling.records


def compose_epsilon(spendings: Iterable[SpentSteps], delta: float) -> float:
    """Return an upper bound on the ε of everything that was spent on one data set.

    Formal guarantees: the bound holds for any adaptive order of the runs. For Poisson and full
    batches, it is exact up to the grid. For fixed-size batches, it is as exact as `pld_uniform`. It
    never exceeds the sum of the ε of k kinds of steps at δ/k each nor, below `SMALL_DELTA`, the
    Rényi-DP ε.

    Raises:
        ValueError: some runs compare data sets under add-or-remove-one, others under replace-one.
            No tight ε is known that covers both.
    """
    taken = [spent for spent in spendings if spent.steps]
    if not taken:
        return 0.0
    steps = _steps_of_kinds(taken)
    kinds = sorted(steps, key=_Kind.order)
    samplings = [sampling for spent in taken for sampling in spent.samplings]
    schemes = {sampling.scheme for sampling in samplings}
    if "shuffled" in schemes or any(kind.z < HOPELESS for kind in kinds):
        return math.inf
    # No distribution is known for several examples in different subsets.
    several = [spent for spent in taken if spent.examples > 1]
    if any(sampling.cycle > 1 for spent in several for sampling in spent.samplings):
        return math.inf
    if len({sampling.adjacency for sampling in samplings}) > 1:
        raise ValueError(
            "runs with Poisson and with fixed-size batches protect different neighbours"
        )
    if len(kinds) == 1:
        (kind,) = kinds
        return kind.epsilon(steps[kind], delta)
    bounds = [_sum_epsilons(steps, delta)]
    if delta < SMALL_DELTA:  # as in `tight_epsilon`
        bounds.append(_rdp_epsilon(steps, delta))
    shifts = [(*kind.shifts(), steps[kind]) for kind in kinds]
    is_uniform = samplings[0].adjacency == "replace_one"
    if not all(has_law(z, drawn, is_uniform) for z, drawn, _ in shifts):
        return min(bounds)
    laws_of_step = laws_of(samplings[0])
    width = shared_width(shifts, delta, is_uniform)
    num_steps = sum(steps.values())
    parts = [
        (laws_of_step(z, drawn, num_steps, delta, width), number) for z, drawn, number in shifts
    ]
    return min(epsilon_together(parts, delta), *bounds)


def _sum_epsilons(steps: Mapping[_Kind, int], delta: float) -> float:
    """Return the sum of the ε of each kind's steps, which have an equal share of δ each."""
    share = delta / len(steps)
    return sum(kind.epsilon(number, share) for kind, number in steps.items())


def _rdp_epsilon(steps: Mapping[_Kind, int], delta: float) -> float:
    """Return the Rényi-DP ε of all steps; ∞ if one may draw several of the examples."""
    parts = []
    for kind, number in steps.items():
        z, drawn = kind.shifts()
        if kind.examples > 1 and drawn != EVERY_STEP:
            return math.inf
        rate = 1.0 if drawn == EVERY_STEP else kind.samplings[0].sample_rate
        parts.append((z, rate, number))
    is_uniform = any(kind.samplings[0].scheme == "uniform" for kind in steps)
    return rdp_together(parts, "uniform" if is_uniform else "poisson", delta)


def _steps_of_kinds(taken: Sequence[SpentSteps]) -> dict[_Kind, int]:
    """Return, for each kind, the number of steps that may draw a given example."""
    least = _merge_rounding(spent.z for spent in taken)
    steps: dict[_Kind, int] = defaultdict(int)
    for spent in taken:
        samplings = _list_worst(spent)
        examples = max(sampling.cap_examples(spent.examples) for sampling in samplings)
        kind = _Kind(least[spent.z], samplings, examples)
        steps[kind] += max(each.steps_of_one(spent.steps) for each in spent.samplings)
    return steps


def _list_worst(spent: SpentSteps) -> tuple[Sampling, ...]:
    """Return the samplings that no other node's sampling covers; one, unless each may be worst."""
    worst: list[Sampling] = []
    for each in sorted(spent.samplings, key=_order_of, reverse=True):
        sampling = each.of_one
        if any(other.covers(sampling, spent.examples) for other in worst):
            continue
        worst = [other for other in worst if not sampling.covers(other, spent.examples)]
        worst.append(sampling)
    return tuple(worst)


def _merge_rounding(values: Iterable[float]) -> dict[float, float]:
    """Return, for each z, the smallest one that equals it up to rounding, which bounds its ε."""
    ordered = sorted(set(values))
    merged: dict[float, float] = {}
    least = ordered[0]
    for z in ordered:
        if z > least * (1 + ROUNDING):
            least = z
        merged[z] = least
    return merged
