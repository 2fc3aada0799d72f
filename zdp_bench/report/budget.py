"""`zdp-bench budget`: what all runs on each data set have spent together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from zdp_bench.privacy.composition import Spending, Spent, together
from zdp_bench.report.number_format import epsilon
from zdp_bench.report.sheet import Numbers, Sheet

COLUMNS = ("data set", "digest", "noise", "runs", "ε together", "ε of a unit", "unit", "δ")
HOW = (
    "ε together: tight, of all runs of the line composed as one; the sum of their ε is larger. "
    "Seeded noise protects from those who cannot compute it, secure noise from everybody."
)
APART = (
    "{name} has {count} digests (other options or other files): where they share examples, "
    "those have at most the sum of their ε and of their δ."
)
MIXED = (
    "Poisson batches hide whether an example is there, fixed-size batches which one it is: no "
    "tight ε of both together is known."
)
ALL = "all"


def sheet(spendings: Sequence[Spending], delta: float | None, unknown: Sequence[Path]) -> Sheet:
    """Return the lines of each data set: its runs by their noise, and all together.

    Args:
        delta: at which ε is stated; by default the smallest of a data set's runs.
        unknown: ledgers of runs that are in no line.
    """
    groups = _by(sorted(spendings, key=lambda one: (one.dataset, one.data)), lambda one: one.data)
    lines = [line for group in groups for line in _lines(group, delta)]
    cells = [
        [
            f"{line['dataset']}, {line['provenance']}",
            str(line["data_digest"])[:12],
            str(line["noise"]),
            str(line["runs"]),
            _shown(line["epsilon"]),
            _shown(line["epsilon_unit"]),
            str(line["unit"] or ""),
            f"{line['delta']:g}",
        ]
        for line in lines
    ]
    return Sheet("Budget", COLUMNS, cells, _notes(spendings, lines, unknown), "", lines)


def _shown(value: object) -> str:
    return epsilon(value) if isinstance(value, float) else ""


def _notes(
    spendings: Sequence[Spending], lines: Sequence[Numbers], unknown: Sequence[Path]
) -> list[str]:
    notes = [HOW] if lines else []
    digests = Counter(name for name, _ in {(one.dataset, one.data) for one in spendings})
    notes += [APART.format(name=n, count=c) for n, c in sorted(digests.items()) if c > 1]
    notes += [MIXED] if any(line["epsilon"] is None for line in lines) else []
    if stopped := sum(not one.finished for one in spendings):
        notes.append(f"Runs that have not ended: {stopped}; every step they plan is counted.")
    return [*notes, *(f"In no line, for nothing says on which data: {path}." for path in unknown)]


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
    one, owned = max(runs, key=lambda run: run.examples), max(run.examples for run in runs)
    told = owned > 1 or any(run.by_unit for run in runs)
    per_unit = [replace(run.spent, examples=run.examples) for run in runs]
    return {
        "dataset": one.dataset,
        "provenance": one.provenance,
        "data_digest": one.data,
        "noise": noise,
        "runs": len(runs),
        "unfinished": sum(not run.finished for run in runs),
        "epsilon": _together([run.spent for run in runs], delta),
        "epsilon_unit": _together(per_unit, delta) if told else None,
        "unit": one.unit if told else None,
        "records_per_unit": owned,
        "delta": delta,
    }


def _together(spent: Sequence[Spent], delta: float) -> float | None:
    """Return the ε of all; None where none is known."""
    try:
        return together(spent, delta)
    except ValueError:
        return None


def _by(spendings: Iterable[Spending], key: Callable[[Spending], str]) -> list[list[Spending]]:
    groups: dict[str, list[Spending]] = {}
    for one in spendings:
        groups.setdefault(key(one), []).append(one)
    return list(groups.values())
