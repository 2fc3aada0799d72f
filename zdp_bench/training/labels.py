"""Name, tags and notes of a run: what people find it by, and no part of what it computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zdp_bench import records
from zdp_bench.config.schema import LABELS, Run
from zdp_bench.records import Record
from zdp_bench.training.run_folder import Outcome


def labels_of(config: Run) -> dict[str, dict[str, Any]]:
    """Return a record's section `labels`, with those that are set; without any, nothing."""
    labels = {key: getattr(config, key) for key in LABELS if getattr(config, key)}
    return {"labels": labels} if labels else {}


def relabel(outcome: Outcome, config: Run) -> Outcome:
    """Return a run that was done before with the labels it is given now, which its record keeps."""
    before = dict(outcome.record.get("labels") or {})
    labels = before | labels_of(config).get("labels", {})
    if labels == before:
        return outcome
    document = outcome.record.document | {"labels": labels}
    records.write(outcome.path, document)
    return replace(outcome, record=Record.of(document))
