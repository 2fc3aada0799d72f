"""Judges whether a cell of a paper's table is reproduced, for the page and `reproduce`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import stdev

from zdp_bench.report.curves import Curves
from zdp_bench.report.tables import Missing, Row, Table

RULE = (
    "Reproduced: our mean lies within one percentage point of the paper's number (2 % of it where "
    "the unit is another), or within two standard deviations over our seeds. Different: it does "
    "not, to whichever side."
)
KINDS = ("reproduced", "different", "not run", "not compared")


@dataclass(frozen=True)
class Verdict:
    """What became of one cell: one of `KINDS`, and why."""

    table: str
    row: str
    metric: str
    verdict: str
    why: str


def of_table(table: Table) -> list[Verdict]:
    """Return the verdict on every row of a table."""
    return [Verdict(table.name, row.label, row.cells["metric"], *judge(row)) for row in table.rows]


def of_curves(figure: Curves, missing: Missing) -> list[Verdict]:
    """Return the verdict on every curve of a figure: whether it was run.

    Args:
        missing: why jobs were not run, where that is known.
    """
    verdicts = []
    for curve in figure.curves:
        jobs = [filling.digest for filling in curve.fillings]
        verdict = "not run", next((missing[job] for job in jobs if job in missing), "")
        if curve.points:
            verdict = "not compared", "a curve, of which the paper prints few points"
        label = f"{curve.panel}: {curve.label}"
        verdicts.append(Verdict(figure.name, label, figure.metric, *verdict))
    return verdicts


def judge(row: Row) -> tuple[str, str]:
    """Return (verdict, why) of one row."""
    if not row.runs:
        return "not run", row.cells["ours"].removeprefix("not run: ")
    if row.filling.on:
        return "not compared", "on another data set than the paper's"
    if row.filling.variant:
        return "not compared", "a variant of ours"
    if row.paper is None:
        return "not compared", "the paper gives no number"
    percent = row.metric.unit == "%"
    spread = 2 * row.scale * stdev(row.values) if len(row.values) > 1 else 0.0
    tolerance = max(1.0 if percent else 0.02 * abs(row.paper), spread)
    unit = " points" if percent else ""
    difference = row.mean - row.paper
    why = f"{difference:+.3g}{unit}, tolerance {tolerance:.2g}{unit}, {row.provenance} data"
    return ("reproduced" if abs(difference) <= tolerance + 1e-9 else "different"), why


def counts(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Return how many verdicts there are of each kind."""
    counted = Counter(verdict.verdict for verdict in verdicts)
    return {kind: counted[kind] for kind in KINDS}
