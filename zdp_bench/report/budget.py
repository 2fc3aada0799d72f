"""`zdp-bench budget`: what all runs on each data set have spent together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from zdp_bench.privacy.composition import Spending, Spent, spent_of_one, together
from zdp_bench.privacy.memory import remember
from zdp_bench.records import is_deleted
from zdp_bench.report.number_format import epsilon
from zdp_bench.report.sheet import Numbers, Sheet

COLUMNS = ("data set", "digest", "noise", "runs", "total ε", "ε per unit", "unit", "δ")
IMPORTANT = ("data set", "total ε", "ε per unit", "unit", "noise", "runs", "δ")
HOW = (
    "total ε: the tight ε of the line's runs, composed; it is less than the sum of their ε. "
    "Seeded noise protects against those who cannot compute it, secure noise against everyone."
)
TOGETHER = (
    "{names}: runs with other options, or on other data sets that share files, are in one line. "
    "If a run has no list of its files, so are all runs on data of that name."
)
COUNTED = "Counted: the {count} runs in {results}. Runs in other folders are not included."
MIXED = (
    "No joint ε is known for Poisson batches, which hide whether an example takes part, with "
    "fixed-size batches, which hide which one does; nor for runs with different units of privacy."
)
ALL = "all"


def sheet(
    spendings: Sequence[Spending],
    delta: float | None,
    unknown: Sequence[Path],
    results: Path,
    dataset: str | None = None,
) -> Sheet:
    """Return each data set's runs by noise, and together, at `delta` or else their least δ."""
    groups = group_by_data(spendings)
    if dataset:
        groups = [group for group in groups if any(one.dataset == dataset for one in group)]
    lines = [line for group in groups for line in _lines(group, delta)]
    cells = [
        [
            f"{line['dataset']}, {line['provenance']}",
            ", ".join(found[:12] for found in str(line["data_digest"]).split(", ")),
            str(line["noise"]),
            str(line["runs"]),
            _shown(line["epsilon"]),
            _shown(line["epsilon_unit"]),
            str(line["unit"] or ""),
            f"{line['delta']:g}",
        ]
        for line in lines
    ]
    notes = [*_notes(groups, lines, unknown), COUNTED.format(count=len(spendings), results=results)]
    return Sheet("Budget", COLUMNS, cells, notes, "", lines, important=IMPORTANT)


def say_together(spendings: Sequence[Spending]) -> list[str]:
    """Return a sentence with the ε of several runs together, for each data set with several."""
    said = []
    for group in group_by_data(spendings):
        line = _line(ALL, group, min(one.delta for one in group))
        if len(group) > 1:
            found = _shown(line["epsilon"]) or "not known"
            of_unit = _shown(line["epsilon_unit"])
            owner = f", per {line['unit']} {of_unit}" if of_unit else ""
            said.append(
                f"Tight ε of these {len(group)} runs on {line['dataset']} together: {found}{owner} "
                f"(δ {line['delta']:g}); `zdp-bench budget` counts earlier ones too."
            )
    return said


def group_by_data(spendings: Sequence[Spending]) -> list[list[Spending]]:
    """Return the runs in groups: those that may share examples, directly or by way of others."""
    alike = _by(
        sorted(spendings, key=lambda one: (one.dataset, one.data)),
        lambda one: (one.data, one.dataset, one.sources),
    )
    groups: list[list[list[Spending]]] = []
    for some in alike:
        near = [group for group in groups if any(some[0].may_share(other[0]) for other in group)]
        groups = [group for group in groups if group not in near]
        groups.append([*(other for group in near for other in group), some])
    return [[one for some in group for one in some] for group in groups]


def _shown(value: object) -> str:
    return epsilon(value) if isinstance(value, float) else ""


def _notes(
    groups: Sequence[Sequence[Spending]], lines: Sequence[Numbers], unknown: Sequence[Path]
) -> list[str]:
    notes = [HOW] if lines else []
    several = [group for group in groups if len({one.data for one in group}) > 1]
    notes += [TOGETHER.format(names=_list(one.dataset for one in group)) for group in several]
    told = [[line["epsilon"], *([line["epsilon_unit"]] if line["unit"] else [])] for line in lines]
    notes += [MIXED] if any(None in line for line in told) else []
    if stopped := sum(not one.finished for group in groups for one in group):
        notes.append(f"Unfinished runs: {stopped}; all their planned steps are counted.")
    if deleted := sum(is_deleted(one.home) for group in groups for one in group):
        notes.append(f"Deleted runs: {deleted}; what they spent is counted.")
    return [*notes, *(f"Not listed, because their data is unknown: {path}." for path in unknown)]


def _lines(group: Sequence[Spending], delta: float | None) -> list[Numbers]:
    """Return the lines of one data set."""
    delta = delta or min(one.delta for one in group)
    kinds = _by(group, _noise)
    lines = [_line(_noise(runs[0]), runs, delta) for runs in kinds]
    return lines if len(lines) == 1 else [*lines, _line(ALL, group, delta)]


def _noise(one: Spending) -> str:
    if not one.is_private:
        return "none"
    batches = ", fixed-size batches" if one.spent.sampling.adjacency == "replace_one" else ""
    return f"{'secure' if one.secure else 'seeded'}{batches}"


def _line(noise: str, runs: Sequence[Spending], delta: float) -> Numbers:
    """Return what some runs on one data set have spent."""
    owned = max(run.examples for run in runs)
    told = owned > 1 or any(run.by_unit for run in runs)
    return {
        "dataset": _list(run.dataset for run in runs),
        "provenance": _list(run.provenance for run in runs),
        "data_digest": _list(run.data for run in runs),
        "noise": noise,
        "runs": len(runs),
        "unfinished": sum(not run.finished for run in runs),
        "epsilon": _epsilon_of_one(runs, False, delta),
        "epsilon_unit": _epsilon_of_one(runs, True, delta) if told else None,
        "unit": _list(run.unit for run in runs) if told else None,
        "records_per_unit": owned,
        "delta": delta,
    }


def _list(words: Iterable[str]) -> str:
    return ", ".join(sorted(set(words)))


def _epsilon_of_one(runs: Sequence[Spending], of_unit: bool, delta: float) -> float | None:
    """Return the ε of all for one example, or one unit; None where none is known."""
    try:
        spent = spent_of_one(runs, of_unit)
    except ValueError:
        return None
    found: float | None = remember(together_if_known, spent, delta)
    return found


def together_if_known(spent: Sequence[Spent], delta: float) -> float | None:
    """Return the ε of all; None where none is known."""
    try:
        return together(spent, delta)
    except ValueError:
        return None


def _by(spendings: Iterable[Spending], key: Callable[[Spending], Any]) -> list[list[Spending]]:
    groups: dict[Any, list[Spending]] = {}
    for one in spendings:
        groups.setdefault(key(one), []).append(one)
    return list(groups.values())
