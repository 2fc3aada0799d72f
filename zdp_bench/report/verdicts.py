"""Whether a cell of a paper's table is reproduced: said once here, for the report page and for `zdp-bench reproduce`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import stdev

from zdp_bench.report.curves import Curves
from zdp_bench.report.tables import Row, Table

RULE = (
    "Reproduced: our mean lies within one percentage point of the paper's number (2 % of it where the unit is another), or "
    "within two standard deviations over our seeds. Different: it does not, to whichever side."
)


@dataclass(frozen=True)
class Verdict:
    """What became of one cell: reproduced, different, not run, or not compared (a row of ours or on other data), and why."""

    table: str
    row: str
    metric: str
    verdict: str
    why: str


def of_table(table: Table) -> list[Verdict]:
    """The verdict of every row of a table that has been laid out."""
    return [
        Verdict(table.name, row.cells["row"], row.cells["metric"], *judge(row))
        for row in table.rows
    ]


def of_curves(figure: Curves, missing: Mapping[tuple[str, tuple[str, ...]], str]) -> list[Verdict]:
    """The verdict of every curve of a figure: whether it was run. Its points are shown, and compared with no number.

    Args:
        missing: why a (recipe, overrides) was not run, where that is known.
    """
    found = []
    for curve in figure.curves:
        why = "a curve, of which the paper prints few points"
        if not curve.points:
            why = next(
                (
                    missing[key]
                    for f in curve.fillings
                    if (key := (f.recipe, f.overrides)) in missing
                ),
                "",
            )
        kind = "not compared" if curve.points else "not run"
        found.append(
            Verdict(figure.name, f"{curve.panel}: {curve.label}", figure.metric, kind, why)
        )
    return found


def judge(row: Row) -> tuple[str, str]:
    """(verdict, why) of one row."""
    numbers = row.numbers
    if not numbers["n"]:
        return "not run", row.cells["ours"].removeprefix("not run: ")
    if numbers.get("on"):
        return "not compared", "on another data set than the paper's"
    if numbers.get("variant"):
        return "not compared", "a variant of ours"
    if not isinstance(numbers["paper"], float):
        return "not compared", "the paper gives no number"
    values = [float(value) for value in str(numbers["values"]).split()]
    paper, mean = numbers["paper"], sum(values) / len(values)
    percent = numbers["unit"] == "%"
    tolerance = max(
        1.0 if percent else 0.02 * abs(paper), 2 * stdev(values) if len(values) > 1 else 0.0
    )
    unit = " points" if percent else ""
    why = (
        f"{mean - paper:+.3g}{unit}, tolerance {tolerance:.2g}{unit}, {numbers['provenance']} data"
    )
    return ("reproduced" if abs(mean - paper) <= tolerance + 1e-9 else "different"), why


def counts(verdicts: list[Verdict]) -> dict[str, int]:
    """How many there are of each kind, in a fixed order."""
    return {
        kind: sum(v.verdict == kind for v in verdicts)
        for kind in ("reproduced", "different", "not run", "not compared")
    }
