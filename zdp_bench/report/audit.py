"""The audit's findings as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from zdp_bench.report.number_format import epsilon
from zdp_bench.report.sheet import Sheet

Finding = dict[str, Any]  # `audit.Finding` as plain values

COLUMNS = (
    "case",
    "claim",
    "ε claimed",
    "ε at least",
    "δ",
    "confidence",
    "verdict",
    "expected",
    "evidence",
)
NOTES = (
    "ε at least: what the attack shows, with the stated confidence. 'flagged': that is more than "
    "is claimed, so the claim is false. 'passes': this attack did not refute it.",
    "One release: Clopper-Pearson bounds on three learned tests (a projection, distances, equal "
    "numbers), at the δ where they see most; a Gaussian release claims an ε for every δ. One run: "
    "Steinke, Nasr & Jagielski 2023, at the recipe's δ.",
)


def as_expected(finding: Finding) -> bool:
    """True if the verdict is the expected one, or none is."""
    return finding["expected"] in (finding["verdict"], "either")


def sheet(findings: list[Finding], title: str) -> Sheet:
    """Return the findings ready to show."""
    return Sheet(title, COLUMNS, [_cells(finding) for finding in findings], NOTES, "", findings)


def _cells(finding: Finding) -> list[str]:
    return [
        finding["case"],
        finding["claim"],
        epsilon(finding["epsilon_claimed"]),
        epsilon(finding["lower_bound"], at_least=True),
        f"{finding['delta']:g}",
        f"{100 * finding['confidence']:g} %",
        finding["verdict"],
        finding["expected"],
        finding["evidence"],
    ]


def as_rich(findings: list[Finding], title: str) -> Table:
    """Return the findings for a terminal; what is not as expected stands out."""
    table = sheet(findings, title).as_rich()
    for row, finding in zip(table.rows, findings, strict=True):
        row.style = None if as_expected(finding) else "bold red"
    return table


def write(findings: list[Finding], results: Path, recipe: str, title: str) -> list[Path]:
    """Write `results/tables/audit.md` and `.csv`; `audit_RECIPE.*` if it is not the quickstart."""
    name = "audit" if recipe == "quickstart" else f"audit_{recipe}"
    return sheet(findings, title).write(results / "tables" / name)
