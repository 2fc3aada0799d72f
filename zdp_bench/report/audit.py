"""The audit's findings as a table: on the terminal, as Markdown, CSV and JSON, and under `results/tables`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from zdp_bench import records
from zdp_bench.report.number_format import epsilon
from zdp_bench.report.results import as_text as frame_as_text

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
    "ε at least: what the attack shows, with the stated confidence. 'flagged': that is more than is claimed, so the claim is "
    "false. 'passes': this attack did not refute it.",
    "One release: Clopper-Pearson bounds on a learned test, at the δ where it sees most; a Gaussian release claims an ε for "
    "every δ. One run: Steinke, Nasr & Jagielski 2023, at the recipe's δ.",
)


def as_expected(finding: Finding) -> bool:
    return finding["expected"] in (finding["verdict"], "either")


def _cells(finding: Finding) -> list[str]:
    return [
        finding["case"],
        finding["claim"],
        epsilon(finding["epsilon_claimed"]),
        epsilon(finding["lower_bound"]),
        f"{finding['delta']:g}",
        f"{100 * finding['confidence']:g} %",
        finding["verdict"],
        finding["expected"],
        finding["evidence"],
    ]


def as_rich(findings: list[Finding], title: str) -> Table:
    """The findings on a terminal; what is not as expected stands out."""
    table = Table(
        title=title, title_justify="left", caption="\n".join(NOTES), caption_justify="left"
    )
    for column in COLUMNS:
        table.add_column(column)
    for finding in findings:
        table.add_row(*_cells(finding), style=None if as_expected(finding) else "bold red")
    return table


def as_text(findings: list[Finding], form: str, title: str) -> str:
    """The findings as Markdown (with title and notes), CSV or JSON; an infinite ε is "inf" there."""
    if form == "md":
        lines = [f"# {title}", "", "| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
        lines += [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(finding)) + " |"
            for finding in findings
        ]
        return "\n".join([*lines, "", *(f"- {note}" for note in NOTES)])
    plain = [
        {k: str(v) if isinstance(v, float) and math.isinf(v) else v for k, v in finding.items()}
        for finding in findings
    ]
    return frame_as_text(pd.DataFrame(plain), form)


def write(findings: list[Finding], results: Path, recipe: str, title: str) -> list[Path]:
    """Write `results/tables/audit.md` and `.csv` for the quickstart, `audit_RECIPE.*` for any other recipe."""
    stem = results / "tables" / ("audit" if recipe == "quickstart" else f"audit_{recipe}")
    paths = [stem.with_suffix(".md"), stem.with_suffix(".csv")]
    for path in paths:
        records.write_text(path, as_text(findings, path.suffix[1:], title) + "\n")
    return paths
