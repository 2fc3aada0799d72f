"""What became of every cell, for the page and `reproduce`: its status, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zdp_bench.report.curves import Curves
from zdp_bench.report.tables import Table

Missing = Mapping[str, str]  # experiment digest -> why it was not run


@dataclass(frozen=True)
class Verdict:
    """What became of one cell: one of `coverage.STATUSES`, and why."""

    table: str
    row: str
    metric: str
    verdict: str
    why: str


def of_table(table: Table, missing: Missing | None = None) -> list[Verdict]:
    """Return the verdict on every number of a table.

    Args:
        missing: why jobs were not run, where that is known.
    """
    verdicts = []
    for line in table.lines:
        rows = [row for row in table.rows if row.metric == line.metric]
        why = line.differs or line.lacking[1]
        if line.difference is not None:
            why = f"Δ {line.cells['Δ']}"
        elif not line.own and not line.best:
            known = [(missing or {}).get(row.filling.digest, "") for row in rows]
            made_up = "run on generated data" if any(row.runs for row in rows) else ""
            why = next(filter(None, known), made_up or why)
        label, metric = line.metric.label, line.cells["metric"]
        verdicts.append(Verdict(table.name, label, metric, line.status, why))
    return verdicts


def of_curves(figure: Curves, missing: Missing | None = None) -> list[Verdict]:
    """Return the verdict on every curve of a figure: whether it was run.

    Args:
        missing: why jobs were not run, where that is known.
    """
    verdicts = []
    for curve in figure.curves:
        jobs = [filling.digest for filling in curve.fillings]
        why = next((missing[job] for job in jobs if job in missing), "") if missing else ""
        label = f"{curve.panel}: {curve.label}"
        why = "" if curve.points else why
        verdicts.append(Verdict(figure.name, label, figure.metric, curve.status, why))
    return verdicts
