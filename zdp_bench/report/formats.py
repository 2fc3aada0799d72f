"""Dictionaries, one a line, as Markdown, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import math


def as_text(lines: list[dict[str, object]], form: str) -> str:
    """Dictionaries as Markdown, CSV or JSON."""
    if form == "json":
        return json.dumps(lines, indent=1, ensure_ascii=False)
    if form == "csv":
        return as_csv(lines).rstrip()
    head = "| " + " | ".join(lines[0]) + " |"
    return "\n".join(
        [
            head,
            "|" + " --- |" * len(lines[0]),
            *("| " + " | ".join(map(str, line.values())) + " |" for line in lines),
        ]
    )


def as_csv(lines: list[dict[str, object]]) -> str:
    """Dictionaries as CSV."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def rounded(value: object) -> object:
    """A number to six digits, ∞ as "inf"; anything else as it is."""
    if isinstance(value, float):
        return "inf" if math.isinf(value) else float(f"{value:.6g}")
    return value
