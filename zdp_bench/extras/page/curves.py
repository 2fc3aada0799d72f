"""Learning curves for the page: test loss and test metric of each evaluation."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.privacy.statement import round_epsilon
from zdp_bench.records import Record
from zdp_bench.records.index import read_of_each

INDEX = ".curves.index"  # in a results folder
MAX_POINTS = 100  # of a curve, because more cannot be distinguished at the width of a page
DIGITS = 5  # significant digits of a value

# "epoch", "epsilon_tight" and each metric -> a value per evaluation
Curves = dict[str, list[float]]


def curves_of_all(results: Path) -> dict[Path, Curves]:
    """Return the curves of each run in a results folder, by the path of its record."""
    version = sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    return read_of_each(results, INDEX, version, _read_curves)


def _read_curves(path: Path) -> Curves | None:
    """Return the curves of a record, None if its file is damaged."""
    try:
        record = records.read(path)
    except UserError:  # `read_all` reports it
        return None
    return curves_of(record) if record else None


def curves_of(record: Record) -> Curves:
    """Return the curves of a run: epoch, tight ε, loss and headline metric of its evaluations.

    The epoch is fractional, such as 2.4, if a budget stopped the run within an epoch. A run with
    only one evaluation has no curves.
    """
    headline = record.headline.name
    rows = record.document.get("epochs") or []
    for metrics in (("loss", headline), (headline,)):  # the second for tasks without a loss
        columns = ("step", "epsilon_tight", *metrics)
        evaluations = [row for row in rows if _is_complete(row, columns)]
        epoch_ends = [row for row in evaluations if _ends_epoch(row)]
        if len(evaluations) > 1 and epoch_ends:
            steps_per_epoch = epoch_ends[-1]["step"] / epoch_ends[-1]["epoch"]
            return _columns(evaluations, metrics, steps_per_epoch)
    return {}


def _columns(
    evaluations: list[dict[str, Any]], metrics: tuple[str, ...], steps_per_epoch: float
) -> Curves:
    """Return the values of at most `MAX_POINTS` evaluations by name."""
    points = _thin(evaluations)
    curves = {"epoch": [_rounded(_epoch_of(row, steps_per_epoch)) for row in points]}
    curves["epsilon_tight"] = [round_epsilon(row["epsilon_tight"], digits=DIGITS) for row in points]
    for name in metrics:
        curves[name] = [_rounded(row[name]) for row in points]
    return curves


def _ends_epoch(row: dict[str, Any]) -> bool:
    """Return whether an evaluation is that after a whole epoch."""
    return type(row.get("epoch")) in (int, float) and row["epoch"] > 0


def _epoch_of(row: dict[str, Any], steps_per_epoch: float) -> float:
    """Return the epoch of an evaluation: an epoch's steps may be no whole number, such as 2.5."""
    epoch: float = row["epoch"] if _ends_epoch(row) else row["step"] / steps_per_epoch
    return epoch


def _is_complete(row: Any, columns: tuple[str, ...]) -> bool:
    """Return whether an evaluation has a number in each column, and a positive step."""
    numbers = [row.get(name) for name in columns]
    return all(type(number) in (int, float) for number in numbers) and row["step"] > 0


def _thin(evaluations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most `MAX_POINTS` evenly spaced evaluations, including the first and the last."""
    last = len(evaluations) - 1
    count = min(len(evaluations), MAX_POINTS)
    return [evaluations[round(index * last / (count - 1))] for index in range(count)]


def _rounded(value: float) -> float:
    """Return a value rounded to `DIGITS` significant digits."""
    return float(f"{value:.{DIGITS}g}")
