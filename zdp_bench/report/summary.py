"""The small table at a run's end: one record, on the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from zdp_bench.records import Record
from zdp_bench.report.number_format import epsilon, interval, name_one


def as_rich(record: Record, path: Path, found: bool) -> Table:
    """One record; `found` says that the run was done before."""
    privacy, data, headline = record["privacy"], record["data"], record["headline"]
    title = f"{record['recipe']}, seed {record['seed']}" + (
        " (done before; force=true runs it again)" if found else ""
    )
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_row(f"test {headline['name'].replace('_', ' ')}", f"{headline['value']:.4f}")
    table.add_row(
        "claimed ε", f"{epsilon(privacy['epsilon_claimed'])}  (accountant {privacy['claimed_by']})"
    )
    tight = interval(privacy.get("epsilon_tight_at_least"), privacy["epsilon_tight"])
    table.add_row("tight ε", f"{tight}  (PLD of what was run, z = {privacy['z']:.4g})")
    if (many := privacy.get("records_per_patient", 1)) > 1:
        together = interval(privacy.get("epsilon_patient_at_least"), privacy["epsilon_patient"])
        table.add_row(
            f"ε of {name_one(privacy.get('unit', 'patient'))}",
            f"{together}  (tight, of its {many:,} training records together)",
        )
    table.add_row("δ", f"{privacy['delta']:g}")
    table.add_row(
        "steps",
        f"{privacy['steps']:,}"
        + ("" if record["stopped_by"] == "epochs" else "  (stopped by the budget)"),
    )
    table.add_row(
        "data",
        f"{data['name']}, {data['provenance']}" + (f": {data['notes']}" if data["notes"] else ""),
    )
    table.add_row("record", str(path))
    return table
