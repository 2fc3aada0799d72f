"""Name, tags and notes, by which people find a run. They do not affect what it computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zdp_bench import records
from zdp_bench.config.schema import LABELS, Run
from zdp_bench.records import Record
from zdp_bench.training.run_folder import Outcome


def labels_of(config: Run) -> dict[str, dict[str, Any]]:
    """Return a record's section `labels` with the labels that are set; {} if none is."""
    labels = {key: getattr(config, key) for key in LABELS if getattr(config, key)}
    return {"labels": labels} if labels else {}


def relabel(outcome: Outcome, config: Run) -> Outcome:
    """Add the configured labels to the record of a run that had finished before."""
    before = dict(outcome.record.get("labels") or {})
    labels = before | labels_of(config).get("labels", {})
    if labels == before:
        return outcome
    document = outcome.record.document | {"labels": labels}
    records.write(outcome.path, document)
    return replace(outcome, record=Record.of(document))
