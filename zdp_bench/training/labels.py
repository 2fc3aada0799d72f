"""Name, tags and notes, by which people find a run. They do not affect what it computes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from zdp_bench import records
from zdp_bench.config.schema import LABELS, Run
from zdp_bench.records import Record
from zdp_bench.training.run_folder import Outcome

log = logging.getLogger(__name__)


def labels_of(config: Run) -> dict[str, dict[str, Any]]:
    """Return a record's section `labels` with the labels that are set; {} if none is."""
    labels = {key: getattr(config, key) for key in LABELS if getattr(config, key)}
    return {"labels": labels} if labels else {}


def relabel(outcome: Outcome, config: Run) -> Outcome:
    """Add the configured labels to the record of a run that had finished before.

    An empty label removes the record's. A warning states that claims stay as they are.
    """
    recorded_claims = outcome.record.get("claims") or {}
    claims = {key: recorded_claims.get(key) for key in vars(config.claims)}
    if claims != vars(config.claims):
        log.warning(
            "claims: this run was done before, and its record keeps the claims %s; force=true runs "
            "it again, with yours",
            claims,
        )
    before = dict(outcome.record.get("labels") or {})
    labels = dict(before)
    for key in LABELS:
        label = getattr(config, key)
        if label:
            labels[key] = label
        elif label is not None:
            labels.pop(key, None)
    if labels == before:
        return outcome
    document = {key: value for key, value in outcome.record.document.items() if key != "labels"}
    if labels:
        document["labels"] = labels
    records.write(outcome.path, document)
    return replace(outcome, record=Record.of(document))
