"""Write the model of a loop of one's own as a folder that can be handed on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.extras.sharing import folder as files
from zdp_bench.extras.sharing.own_card import card
from zdp_bench.gradients.clipping import trainable
from zdp_bench.training.build import count_real
from zdp_bench.training.checkpoint import state_digest
from zdp_bench.training.machine import environment


def write_own(
    to: Path,
    model: nn.Module,
    ledger: Path,
    about: dict[str, Any],
    privacy: dict[str, Any],
    metrics: Mapping[str, float],
) -> None:
    """Write weights, ledger, report and card into an empty or new folder.

    A folder that holds this very export is left as it is, so that a script can run twice.

    Args:
        about: name, algorithm, inputs, data and owners, as `Private.export` gives them.
        privacy: what `Private.report` returned.

    Raises:
        UserError: the folder holds something else, or a metric is no number.
    """
    if not isinstance(metrics, Mapping):
        raise UserError(f"metrics={metrics!r}: give a dictionary of numbers by name.")
    weights = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    report = {
        "format": 1,
        **about,
        "parameters_real": count_real(trainable(model).values()),
        "privacy": privacy,
        "metrics": {name: _number(name, value) for name, value in metrics.items()},
        "environment": environment(next(model.parameters()).device),
        "measured": {"weights": {"digest": state_digest(weights)}},
    }
    if _holds(to, report):
        return
    files.require_empty(to)
    files.begin(to)
    files.write_weights(to / files.WEIGHTS, weights)
    records.write(to / files.REPORT, report)
    files.copy_ledger(ledger, to)
    records.write_text(to / files.CARD, card(files.read_report(to)))
    files.write_sums(to)


def _holds(folder: Path, report: dict[str, Any]) -> bool:
    """True if the folder is the whole export of the same weights, ledger and metrics."""
    whole = all((folder / name).is_file() for name in (files.SUMS, files.REPORT))
    if not whole or files.is_unfinished(folder):
        return False
    there, ours = (records.to_json(one) for one in (files.read_report(folder), report))
    return all(there.get(key) == ours[key] for key in ours if key != "environment")


def _number(name: str, value: Any) -> float:
    """Return a metric as a float, for a card."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"metrics: '{name}' is {value!r}; give one number for each name.") from None
