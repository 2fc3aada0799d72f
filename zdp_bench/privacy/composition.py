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

from zdp_bench.privacy.accounting import HOPELESS, patient_epsilon, patients_draws, patients_share
from zdp_bench.privacy.loss_distribution import (
    Mixture,
    epsilon_together,
    one_example,
    poisson_laws,
    shared_width,
    uniform_laws,
)
from zdp_bench.privacy.mechanism import Mechanism, Sampling

ROUNDING = 1e-9  # relative; two bounds C give one noise multiplier two values of z
DRAWN_EVERY_STEP = Mixture((-math.inf, 0.0))


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

    def may_share(self, other: Spending) -> bool:
        """True if some examples may be in both runs' data: they read a common file.

        Where the files of one are not known, all data of a name may be the same, but generated.
        """
        return self.may_read(other.dataset, other.data, other.sources)

    def may_read(self, dataset: str, data: str, sources: frozenset[str] | None) -> bool:
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
    return [replace(run.spent, examples=run.examples) if of_unit else run.spent for run in runs]


def together(spent: Iterable[Spent], delta: float) -> float:
    """Return an upper bound on the ε of everything that was spent on one data set.

    Formal guarantees: the bound holds for any adaptive order of the runs. It is exact up to the
    grid, for Poisson and full batches; for fixed-size batches as exact as `pld_uniform`.

    Raises:
        ValueError: some runs compare data sets with one example more or less, others with one
            replaced; no ε is known that covers both tightly.
    """
    taken = [one for one in spent if one.steps]
    least = _merge_rounding(one.z for one in taken)
    steps: dict[tuple[float, Sampling, int], int] = defaultdict(int)
    for one in taken:
        sampling, number = one.sampling.of_one(one.steps)
        steps[least[one.z], sampling, min(one.examples, sampling.records)] += number
    if not steps:
        return 0.0
    # of several examples in different subsets no law is known
    unknown = any(one.sampling.cycle > 1 and one.examples > 1 for one in taken)
    if unknown or any(z < HOPELESS or of.scheme == "shuffled" for z, of, _ in steps):
        return math.inf
    if len({sampling.adjacency for _, sampling, _ in steps}) > 1:
        raise ValueError(
            "runs with Poisson and with fixed-size batches protect different neighbours"
        )
    if len(steps) == 1:
        (((z, sampling, count), number),) = steps.items()
        return patient_epsilon(Mechanism.of_z(z, sampling), count, number, delta)
    # In one order, so that equal spendings have equal ε.
    ordered = sorted(
        steps, key=lambda kind: (kind[0], kind[1].sample_rate, kind[1].records, kind[2])
    )
    kinds = [(*_law(*kind), steps[kind]) for kind in ordered]
    replaced = next(iter(steps))[1].adjacency == "replace_one"
    laws, width = uniform_laws if replaced else poisson_laws, shared_width(kinds, delta)
    every = sum(number for _, _, number in kinds)
    parts = [(laws(z, drawn, every, delta, width), number) for z, drawn, number in kinds]
    return epsilon_together(parts, delta)


def _merge_rounding(values: Iterable[float]) -> dict[float, float]:
    """Return for each z the least that differs from it by rounding alone: less noise, more ε."""
    found: dict[float, float] = {}
    least = -math.inf
    for z in sorted(set(values)):
        least = least if z <= least * (1 + ROUNDING) else z
        found[z] = least
    return found


def _law(z: float, sampling: Sampling, count: int) -> tuple[float, Mixture]:
    """Return the noise in units of one shift, and the law of how many of `count` a step draws."""
    rate = sampling.sample_rate
    if sampling.scheme == "full" or rate >= 1:
        return z / count, DRAWN_EVERY_STEP
    if sampling.scheme == "poisson":
        return z, one_example(rate) if count == 1 else patients_draws(rate, count)
    batch = round(rate * sampling.records)
    if count == 1:
        return z, one_example(rate)
    if count + batch > sampling.records:  # every batch holds some
        return z / min(count, batch), DRAWN_EVERY_STEP
    return z, patients_share(sampling, count)
