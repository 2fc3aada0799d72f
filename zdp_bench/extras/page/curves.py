"""Learning curves as the page draws them: test loss and test metric of each evaluation."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.records import Record
from zdp_bench.records.index import read_of_each

INDEX = ".curves.index"  # in a results folder
MOST_POINTS = 100  # of a curve; more are not told apart at the width of a page
DIGITS = 5  # of a value

# "epoch", "epsilon_tight" and each metric -> a value per evaluation
Curves = dict[str, list[float]]


def curves_of_all(results: Path) -> dict[Path, Curves]:
    """Return the curves of each run in a results folder, by its record's file."""
    version = sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    return read_of_each(results, INDEX, version, _read_curves)


def _read_curves(path: Path) -> Curves | None:
    """Return the curves of a record's file; None if it is damaged."""
    try:
        record = records.read(path)
    except UserError:  # which `read_all` tells
        return None
    return curves_of(record) if record else None


def curves_of(record: Record) -> Curves:
    """Return the curves of a run: epochs, tight ε, loss and headline metric of its evaluations.

    The last evaluation of a run that its budget stopped is within an epoch: 2.4. A run that was
    evaluated once has no curve.
    """
    headline = record.headline.name
    rows = record.document.get("epochs") or []
    for metrics in (("loss", headline), (headline,)):  # the second for tasks without a loss
        evaluations = [row for row in rows if _is_whole(row, ("step", "epsilon_tight", *metrics))]
        ends = [row for row in evaluations if row.get("epoch")]
        if len(evaluations) > 1 and ends:
            return _columns(evaluations, metrics, ends[0]["step"] / ends[0]["epoch"])
    return {}


def _columns(
    evaluations: list[dict[str, Any]], metrics: tuple[str, ...], steps_per_epoch: float
) -> Curves:
    """Return the values of evaluations by name, thinned."""
    kept = _thin(evaluations)
    curves = {"epoch": [_rounded(row["step"] / steps_per_epoch) for row in kept]}
    for name in ("epsilon_tight", *metrics):
        curves[name] = [_rounded(row[name]) for row in kept]
    return curves


def _is_whole(row: Any, columns: tuple[str, ...]) -> bool:
    """True if an evaluation of a record has a number in each column, and a step above 0."""
    numbers = [row.get(name) for name in columns]
    return all(type(number) in (int, float) for number in numbers) and row["step"] > 0


def _thin(evaluations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most `MOST_POINTS` evaluations, the first and the last among them."""
    last = len(evaluations) - 1
    count = min(len(evaluations), MOST_POINTS)
    return [evaluations[round(number * last / (count - 1))] for number in range(count)]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
