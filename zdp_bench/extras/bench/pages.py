"""Write what `zdp-bench bench` measured: a page to read, and a CSV that later measurements join."""

from __future__ import annotations

import csv
import platform
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from zdp_bench.errors import UserError
from zdp_bench.report.number_format import rounded
from zdp_bench.report.sheet import markdown_table, to_csv


@dataclass(frozen=True)
class Measurement:
    """One side of one comparison; ratios are to the fastest side that may be the baseline.

    Attributes:
        deviation: from the first side that computes the same; None for that side itself.
    """

    case: str
    side: str
    milliseconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    deviation: float | None
    memory: float | None = None
    memory_ratio: float | None = None
    paper_ratio: float | None = None
    note: str = ""


Measured = tuple[Measurement, dict[str, str]]  # a row, and what it was measured on and with


def machine(facts: dict[str, str]) -> tuple[str, str]:
    """Return device and threads: only rows that share them are compared."""
    return facts["device"], facts["threads"]


def environment(threads: int) -> dict[str, str]:
    """Describe what a measurement is made on and with."""
    named = ("torch", "numpy", "opacus")
    on = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu ({_processor()})"
    return {
        "device": on,
        "threads": str(threads),
        "python": platform.python_version(),
        **{name: installed(name) or "not installed" for name in named},
        "date": datetime.now(UTC).date().isoformat(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def installed(name: str) -> str | None:
    """Return a distribution's version; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


COLUMNS = (
    "side",
    "time",
    "× baseline",
    "quartiles",
    "peak MiB",
    "× its memory",
    "paper's ratio",
    "agrees to",
)


def cells(row: Measurement) -> dict[str, str]:
    """Format a row, by column."""

    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    if row.note:
        return dict(zip(COLUMNS, (row.side, row.note, *[""] * (len(COLUMNS) - 2)), strict=True))
    quartiles = f"{row.ratio_low:.2f} to {row.ratio_high:.2f}"
    numbers = (
        f"{row.milliseconds:.3g} ms"
        if row.milliseconds < 1000
        else f"{row.milliseconds / 1000:.3g} s",
        f"{row.ratio:.2f}",
        quartiles,
        shown(row.memory, ".0f"),
        shown(row.memory_ratio, ".2f"),
    )
    return dict(
        zip(
            COLUMNS,
            (row.side, *numbers, shown(row.paper_ratio, ".1f"), shown(row.deviation, ".0e")),
            strict=True,
        )
    )


def as_markdown(table: str, measured: list[Measured]) -> str:
    """Write one table for each case and machine."""
    lines = [
        f"# Measured: {table}",
        "",
        f"`zdp-bench bench {table}` made this. Times are the best of rounds taken by turns; the "
        "baseline of a case is its",
        "fastest non-private side or, where operations are compared, 'real': torch's default "
        "layout. Only the ratios travel to",
        "another machine. 'Agrees to': the deviation from the first side that computes the same; "
        "empty where there is none.",
        "Peak memory: the most that a step holds at once, in a process of its own, without what an "
        "allocator keeps for later.",
        "",
    ]
    machines = dict.fromkeys(machine(facts) for _, facts in measured)
    for case in dict.fromkeys(row.case for row, _ in measured):
        lines += [f"## {case}", ""]
        of_case = [(row, facts) for row, facts in measured if row.case == case]
        for on in machines:
            if own := [(row, facts) for row, facts in of_case if machine(facts) == on]:
                known = own[0][1].items()
                others = ", ".join(
                    f"{key} {value}" for key, value in known if key not in ("device", "threads")
                )
                lines += [f"On {on[0]}, {on[1]} threads ({others}).", ""]
                lines += markdown_table(COLUMNS, [list(cells(row).values()) for row, _ in own])
                lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def as_csv(measured: list[Measured]) -> str:
    """Write the numbers, and on every line what they were measured on."""
    # Another version may have written more facts, or fewer.
    return to_csv([rounded(asdict(row)) | known for row, known in measured])


def read_csv(path: Path) -> list[Measured]:
    """Read what `as_csv` wrote.

    Raises:
        UserError: the file is something else.
    """
    kinds = {field.name: str(field.type) for field in fields(Measurement)}
    measured = []
    reader = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    if lacking := {*kinds, "device", "threads"} - {*(reader.fieldnames or ())}:
        raise UserError(
            f"{path}: has no column '{min(lacking)}', as a table of `zdp-bench bench` has; move it "
            "away, and measure again."
        )
    for line in reader:
        values: dict[str, Any] = {}
        for name, kind in kinds.items():
            text = line.pop(name)
            values[name] = text if kind == "str" else float(text) if text else None
        measured.append((Measurement(**values), dict(line)))
    return measured
