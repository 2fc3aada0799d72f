"""`zdp-bench budget`: the joint ε of all runs on each data set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from zdp_bench.privacy.composition import Spending, SpentSteps, compose_epsilon, list_spent_steps
from zdp_bench.privacy.memory import call_cached
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.records import group_by, is_deleted
from zdp_bench.report.sheet import Sheet

COLUMNS = ("data set", "digest", "noise", "runs", "total ε", "ε per unit", "unit", "δ")
IMPORTANT = ("data set", "total ε", "ε per unit", "unit", "noise", "runs", "δ")
HOW = (
    "total ε: the tight ε of the line's runs, composed; it is less than the sum of their ε. "
    "Seeded noise protects against those who cannot compute it, secure noise against everyone."
)
TOGETHER = (
    "{names}: runs whose data share files count together, whatever their options. A run without a "
    "list of its files counts with every run on a data set of that name."
)
COUNTED = "Counted: the {count} runs in {results}. Runs in other folders are not included."
MIXED = (
    "No joint ε is known for Poisson batches, which hide whether an example takes part, together "
    "with fixed-size batches, which hide which one does; nor for runs with different privacy "
    "units, or in which the same files belong to other owners."
)
ALL = "all"


@dataclass(frozen=True)
class Line:
    """The joint ε of some runs on one data set, or on data sets that share files.

    Attributes:
        noise: kind of noise of the runs; `ALL` for runs of all kinds.
        runs: number of runs.
        unfinished: number of runs that have not finished.
        epsilon: ε of what the runs protect, an example or a unit; None if it is not known.
        epsilon_unit: ε of one unit; None if it is not known, or if each unit has one example.
        unit: kind of owner of several examples; None if no owner has several.
        records_per_unit: largest number of examples of one unit.
        delta: δ of both ε.
    """

    dataset: str
    provenance: str
    data_digest: str
    noise: str
    runs: int
    unfinished: int
    epsilon: float | None
    epsilon_unit: float | None
    unit: str | None
    records_per_unit: int
    delta: float

    @staticmethod
    def of(noise: str, runs: Sequence[Spending], delta: float) -> Line:
        """Return the line of some runs, whose noise is of one kind."""
        records_per_unit = max(run.shares_per_owner for run in runs)
        has_units = records_per_unit > 1 or any(run.by_owner for run in runs)
        # A unit's ε stands for the total if all runs protect units.
        protects_units = all(run.by_owner for run in runs)
        return Line(
            dataset=_list(run.shown for run in runs),
            provenance=_list(run.provenance for run in runs),
            data_digest=_list(run.data for run in runs),
            noise=noise,
            runs=len(runs),
            unfinished=sum(not run.finished for run in runs),
            epsilon=joint_epsilon(runs, for_owner=protects_units, delta=delta),
            epsilon_unit=joint_epsilon(runs, for_owner=True, delta=delta) if has_units else None,
            unit=_list(run.unit for run in runs) if has_units else None,
            records_per_unit=records_per_unit,
            delta=delta,
        )

    @property
    def is_known(self) -> bool:
        """True if the total ε is known and, if the line has units, also that of a unit."""
        if self.epsilon is None:
            return False
        return self.unit is None or self.epsilon_unit is not None

    def cells(self) -> list[str]:
        """Return the cells of the line, in the order of `COLUMNS`."""
        digests = [digest[:12] for digest in self.data_digest.split(", ")]
        return [
            f"{self.dataset}, {self.provenance}",
            ", ".join(digests),
            self.noise,
            str(self.runs),
            show_epsilon(self.epsilon),
            show_epsilon(self.epsilon_unit),
            self.unit or "",
            f"{self.delta:g}",
        ]


def sheet(
    spendings: Sequence[Spending],
    delta: float | None,
    unknown: Sequence[Path],
    results: Path,
    dataset: str | None = None,
) -> Sheet:
    """Return the joint ε of the runs on each data set, by kind of noise and in total.

    Args:
        spendings: what each run spent.
        delta: δ of each ε. Default: the smallest δ of the runs on a data set.
        unknown: folders of runs whose data is not known; a note names them.
        results: results folder that the runs are in.
        dataset: name of one data set. Default: all data sets.
    """
    groups = group_by_data(spendings)
    if dataset:
        groups = [group for group in groups if _is_on(dataset, group)]
    lines: list[Line] = []
    for group in groups:
        lines += _lines(group, delta)
    notes = _notes(groups, lines, unknown)
    num_runs = sum(len(group) for group in groups)
    notes.append(COUNTED.format(count=num_runs, results=results))
    cells = [line.cells() for line in lines]
    numbers = [vars(line) for line in lines]
    return Sheet("Budget", COLUMNS, cells, notes, numbers=numbers, important=IMPORTANT)


def _is_on(dataset: str, group: Sequence[Spending]) -> bool:
    """Return True if one of the runs is on a data set, which may be named as it is shown."""
    return any(dataset in (run.dataset, run.shown) for run in group)


def describe_together(spendings: Sequence[Spending]) -> list[str]:
    """Return a sentence with the joint ε of some runs for each data set with more than one run."""
    sentences = []
    for group in group_by_data(spendings):
        if len(group) < 2:
            continue
        line = Line.of(ALL, group, min(run.delta for run in group))
        sentences.append(
            f"Tight ε of these {len(group)} runs on {line.dataset} together: "
            f"{_describe_epsilon(line)} (δ {line.delta:g}); `zdp-bench budget` counts earlier "
            "ones too."
        )
    return sentences


def _describe_epsilon(line: Line) -> str:
    """Describe the ε of an example and of a unit: '1.2' or '1.2, per patient 3.4'."""
    epsilon_unit = show_epsilon(line.epsilon_unit)
    if epsilon_unit and line.epsilon == line.epsilon_unit:  # steps draw whole units
        return f"{epsilon_unit} per {line.unit}"
    epsilon = show_epsilon(line.epsilon) or "not known"
    return f"{epsilon}, per {line.unit} {epsilon_unit}" if epsilon_unit else epsilon


def group_by_data(spendings: Sequence[Spending]) -> list[list[Spending]]:
    """Group the runs that may share examples, directly or through other runs."""
    sorted_runs = sorted(spendings, key=lambda run: (run.dataset, run.data))
    # A group consists of lists of runs on the same data. All runs of a list share examples with
    # the same other runs, so it is enough to compare the first run of each list.
    groups: list[list[list[Spending]]] = []
    for runs in group_by(sorted_runs, lambda run: (run.data, run.dataset, run.sources)).values():
        merged: list[list[Spending]] = []
        separate: list[list[list[Spending]]] = []
        for group in groups:
            if any(runs[0].may_share(others[0]) for others in group):
                merged += group
            else:
                separate.append(group)
        groups = [*separate, [*merged, runs]]
    return [list(chain.from_iterable(group)) for group in groups]


def _notes(
    groups: Sequence[Sequence[Spending]], lines: Sequence[Line], unknown: Sequence[Path]
) -> list[str]:
    """Return the sentences below the table."""
    runs = list(chain.from_iterable(groups))
    notes = [HOW] if lines else []
    for group in groups:
        if len({run.data for run in group}) > 1:
            notes.append(TOGETHER.format(names=_list(run.shown for run in group)))
    if not all(line.is_known for line in lines):
        notes.append(MIXED)
    unfinished = sum(not run.finished for run in runs)
    if unfinished:
        notes.append(f"Unfinished runs: {unfinished}; all their planned steps are counted.")
    deleted = sum(is_deleted(run.home) for run in runs)
    if deleted:
        notes.append(f"Deleted runs: {deleted}; what they spent is counted.")
    notes += [f"Not listed, because their data is unknown: {path}." for path in unknown]
    return notes


def _lines(group: Sequence[Spending], delta: float | None) -> list[Line]:
    """Return the lines of one group: one for each kind of noise, and one for all runs together."""
    delta = delta or min(run.delta for run in group)
    lines = [Line.of(_noise(runs[0]), runs, delta) for runs in group_by(group, _noise).values()]
    if len(lines) > 1:
        lines.append(Line.of(ALL, group, delta))
    return lines


def _noise(run: Spending) -> str:
    """Return the kind of a run's noise, such as 'seeded' or 'secure, fixed-size batches'."""
    if not run.is_private:
        return "none"
    kind = "secure" if run.secure else "seeded"
    if run.spent.sampling.adjacency == "replace_one":
        return f"{kind}, fixed-size batches"
    return kind


def _list(words: Iterable[str]) -> str:
    """Return the distinct words in alphabetical order, separated by commas."""
    return ", ".join(sorted(set(words)))


def joint_epsilon(runs: Sequence[Spending], for_owner: bool, delta: float) -> float | None:
    """Return the joint ε of one example or, with `for_owner`, of one unit.

    None if it is not known.
    """
    try:
        spent = list_spent_steps(runs, for_owner)
    except ValueError:
        return None
    epsilon: float | None = call_cached(compose_if_known, spent, delta)
    return epsilon


def compose_if_known(spent: Sequence[SpentSteps], delta: float) -> float | None:
    """Return the joint ε; None if it is not known (see `compose_epsilon`)."""
    try:
        return compose_epsilon(spent, delta)
    except ValueError:
        return None
