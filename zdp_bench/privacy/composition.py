"""The ε of several runs on the same examples, tight.

Runs draw their batches and noise independently, so they compose as the steps of one run would: the
laws of their privacy losses are convolved (`loss_distribution.py`), and one δ is left for all. That
is far below the sum of their ε.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from zdp_bench.privacy.accounting import HOPELESS, patient_epsilon, shifts_of_step
from zdp_bench.privacy.loss_distribution import (
    epsilon_together,
    poisson_laws,
    shared_width,
    uniform_laws,
)
from zdp_bench.privacy.mechanism import Mechanism, Sampling

ROUNDING = 1e-9  # relative; two bounds C give one noise multiplier two values of z


@dataclass(frozen=True)
class Spent:
    """Steps of one mechanism that were taken on a data set."""

    z: float  # the effective noise multiplier; 0: without noise
    sampling: Sampling
    steps: int
    examples: int = 1  # how many come or go together: 1, or a patient's


@dataclass(frozen=True)
class Spending:
    """What one run has spent."""

    home: Path  # its folder
    recipe: str
    dataset: str
    provenance: str
    data: str  # the digest of its data set
    spent: Spent  # for one example
    examples: int  # how many shares of a unit (a patient, a speaker) a step may hold
    unit: str
    delta: float  # at which the run states its ε
    secure: bool  # cryptographic noise; else whoever knows seed and data can compute it
    finished: bool  # False if it was stopped or is under way; all its steps are counted
    by_unit: bool = False  # steps draw and clip units, so that `spent` is a unit's
    sources: frozenset[str] | None = None  # the files that its data were made of, if known
    title: str = ""  # what its user calls the data set

    @property
    def shown(self) -> str:
        """What people call the data set."""
        return self.title or self.dataset

    def may_share(self, other: Spending) -> bool:
        """True if some examples may be in both runs' data: they read a common file.

        Where the files of one are not known, all data of a name may be the same, but generated.
        """
        return self.may_read(other.dataset, other.data, other.sources)

    def may_read(
        self,
        dataset: str,
        data: str,
        sources: frozenset[str] | None,
    ) -> bool:
        """True if some examples of a data set, its digest and its files may be in the run's."""
        if self.data == data:
            return True
        if self.sources and sources:
            return not self.sources.isdisjoint(sources)
        return self.dataset == dataset and self.provenance != "synthetic"

    @property
    def is_private(self) -> bool:
        """True if its ε can be finite."""
        return self.spent.z > 0 and self.spent.sampling.scheme != "shuffled"


def spent_of_one(runs: Sequence[Spending], of_unit: bool) -> list[Spent]:
    """Return what each run spent of one example, or of one unit with all its examples.

    Raises:
        ValueError: some hide other units, or a unit where others hide an example, whose ε a unit's
            does not bound.
    """
    hidden = {run.unit if of_unit or run.by_unit else "example" for run in runs}
    if len(hidden) > 1:
        raise ValueError(f"runs that protect different units ({', '.join(sorted(hidden))})")
    if not of_unit:
        return [run.spent for run in runs]
    return [replace(run.spent, examples=run.examples) for run in runs]


class _Kind(NamedTuple):
    """Steps that have one law, in the order in which laws are composed."""

    z: float
    sampling: Sampling
    examples: int  # that come or go together

    def order(self) -> tuple[float, float, int, int]:
        """Return what kinds are sorted by, so that equal spendings have equal ε."""
        return self.z, self.sampling.sample_rate, self.sampling.records, self.examples


def together(spendings: Iterable[Spent], delta: float) -> float:
    """Return an upper bound on the ε of everything that was spent on one data set.

    Formal guarantees: the bound holds for any adaptive order of the runs. It is exact up to the
    grid, for Poisson and full batches; for fixed-size batches as exact as `pld_uniform`.

    Raises:
        ValueError: some runs compare data sets with one example more or less, others with one
            replaced; no ε is known that covers both tightly.
    """
    taken = [spent for spent in spendings if spent.steps]
    if not taken:
        return 0.0
    steps = _steps_of_kinds(taken)
    kinds = sorted(steps, key=_Kind.order)
    if any(kind.z < HOPELESS or kind.sampling.scheme == "shuffled" for kind in kinds):
        return math.inf
    # of several examples in different subsets no law is known
    if any(spent.sampling.cycle > 1 and spent.examples > 1 for spent in taken):
        return math.inf
    adjacencies = {kind.sampling.adjacency for kind in kinds}
    if len(adjacencies) > 1:
        raise ValueError(
            "runs with Poisson and with fixed-size batches protect different neighbours"
        )
    if len(kinds) == 1:
        (kind,) = kinds
        mechanism = Mechanism.of_z(kind.z, kind.sampling)
        return patient_epsilon(mechanism, kind.examples, steps[kind], delta)
    shifts = [(*shifts_of_step(*kind), steps[kind]) for kind in kinds]
    width = shared_width(shifts, delta)
    laws_of = uniform_laws if adjacencies == {"replace_one"} else poisson_laws
    every = sum(steps.values())
    parts = [(laws_of(z, drawn, every, delta, width), number) for z, drawn, number in shifts]
    return epsilon_together(parts, delta)


def _steps_of_kinds(taken: Sequence[Spent]) -> dict[_Kind, int]:
    """Return how many steps of each kind were taken that an example may be drawn for."""
    least = _merge_rounding(spent.z for spent in taken)
    steps: dict[_Kind, int] = defaultdict(int)
    for spent in taken:
        examples = min(spent.examples, spent.sampling.records)
        kind = _Kind(least[spent.z], spent.sampling.of_one, examples)
        steps[kind] += spent.sampling.steps_of_one(spent.steps)
    return steps


def _merge_rounding(values: Iterable[float]) -> dict[float, float]:
    """Return for each z the least that differs from it by rounding alone: less noise, more ε."""
    merged: dict[float, float] = {}
    least = -math.inf
    for z in sorted(set(values)):
        if z > least * (1 + ROUNDING):
            least = z
        merged[z] = least
    return merged
