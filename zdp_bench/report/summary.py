"""The small table at a run's end: one record, on the terminal."""

from __future__ import annotations

from pathlib import Path

from zdp_bench.records import Record, is_of_unit
from zdp_bench.report.number_format import epsilon, interval, name_one
from zdp_bench.report.sheet import Sheet


def sheet(record: Record, path: Path, found: bool) -> Sheet:
    """Return a record's main numbers; `found` says that the run was done before."""
    privacy, data, headline = record["privacy"], record["data"], record["headline"]
    before = " (done before; force=true runs it again)" if found else ""
    tight = interval(privacy.get("epsilon_tight_at_least"), privacy["epsilon_tight"])
    rows = [
        [f"test {headline['name'].replace('_', ' ')}", f"{headline['value']:.4f}"],
        [
            "claimed ε",
            f"{epsilon(privacy['epsilon_claimed'])}  (accountant {privacy['claimed_by']})",
        ],
        ["tight ε", f"{tight}  (PLD of what was run, z = {privacy['z']:.4g})"],
    ]
    if (many := privacy.get("records_per_patient", 1)) > 1:
        together = interval(privacy.get("epsilon_patient_at_least"), privacy["epsilon_patient"])
        owner = name_one(privacy.get("unit", "patient"))
        whose = f"of its {many:,} training records together"
        if is_of_unit(privacy):
            whose = "its records drawn and clipped as one"
        rows.append([f"ε of {owner}", f"{together}  (tight, {whose})"])
    stopped = "" if record["stopped_by"] == "epochs" else "  (stopped by the budget)"
    notes = f": {data['notes']}" if data["notes"] else ""
    rows += [
        ["δ", f"{privacy['delta']:g}"],
        ["steps", f"{privacy['steps']:,}{stopped}"],
        ["data", f"{data['name']}, {data['provenance']}{notes}"],
        ["record", str(path)],
    ]
    return Sheet(f"{record['recipe']}, seed {record['seed']}{before}", (), rows)
