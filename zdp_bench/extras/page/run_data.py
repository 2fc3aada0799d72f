"""The runs as the page's data: a row each, with configuration, curve, privacy and card.

Runs have most settings and most lines of their cards in common, so that each stands once, in
`pairs` and `lines`, and a run names it by its place.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markdown_it import MarkdownIt

from zdp_bench import records
from zdp_bench.records import Record
from zdp_bench.report import names
from zdp_bench.report.comparisons import compare_rows
from zdp_bench.report.number_format import epsilon, interval, name_one
from zdp_bench.report.results import DIFFERS, flatten, read_frame, tell_differences

POINTS = 50  # of a curve, at most
TESTED = 80  # experiments on one data set that are tested in pairs, at most; the newest
OWN = "outside papers"


@dataclass(frozen=True)
class Column:
    """A column of the table of runs.

    Attributes:
        kind: how the page formats and sorts it: text, words (long), number, epsilon, value (in
            its metric's unit), metric (its name), mark, date, seconds, or run.
        wide, narrow: whether it is shown unasked, on a screen and on a phone.
        any: what its list of values to filter by says while none is chosen; no list if empty.
    """

    key: str
    title: str
    kind: str = "text"
    wide: bool = False
    narrow: bool = False
    any: str = ""


COLUMNS = (
    Column("name", "run", "run", wide=True, narrow=True),
    Column("differs", "what differs", "words"),
    Column("algorithm", "algorithm", wide=True, any="any algorithm"),
    Column("model", "network", any="any network"),
    Column("dataset", "data set", any="any data set"),
    Column("metric", "metric", "metric", wide=True, any="any metric"),
    Column("value", "test", "value", wide=True, narrow=True),
    Column("epsilon_tight", "ε tight", "epsilon", wide=True, narrow=True),
    Column("epsilon_claimed", "ε claimed", "epsilon", wide=True),
    Column("epsilon_of", "ε of"),  # shown unasked where it differs
    Column("epsilon_patient", "ε per unit", "epsilon"),
    Column("provenance", "data", "mark", wide=True, any="any provenance"),
    Column("recipe", "recipe", any="any recipe"),
    Column("seed", "seed", "number"),
    Column("started_utc", "date", "date", wide=True),
    Column("paper", "fills table", any="any table"),
    Column("variant", "variant"),
    Column("delta", "δ", "number"),
    Column("z", "noise z", "number"),
    Column("steps", "steps", "number"),
    Column("sampling", "sampling"),
    Column("expected_batch_size", "batch", "number"),
    Column("parameters_real", "parameters", "number"),
    Column("train_seconds", "time", "seconds"),
    Column("device", "device"),
    Column("commit", "commit"),
    Column("run", "id"),
)
FACTS = {
    "recipe": "recipe",
    "seed": "seed",
    "data": "data.notes",
    "examples to train": "data.train",
    "examples to test": "data.test",
    "real parameters": "model.parameters_real",
    "stopped by": "stopped_by",
    "device": "environment.device",
    "threads": "environment.threads",
    "commit": "environment.commit",
    "run": "run",
}


def build(
    every: list[Record], results: Path, page: Path, card: Callable[[Record], str]
) -> dict[str, Any]:
    """Return what the page's scripts read; paths of records are relative to the page.

    Args:
        card: gives a record's model card in Markdown; empty where the record lacks what one states.
    """
    frame, keys = read_frame(every)
    frame[DIFFERS] = tell_differences(frame, keys)
    lines: list[dict[Any, Any]] = frame.astype(object).where(frame.notna(), None).to_dict("records")
    several = frame["epsilon_of"].nunique() > 1
    pairs, words = _Pool(), _Pool()
    parser = markdown_parser()
    varied = [key for key in keys if len({str(value) for value in frame[key]}) > 1]
    titles = name_runs(every, [line[DIFFERS] for line in lines])
    experiments = _Pool()
    runs = [
        {
            "cells": _cells(run, line, title),
            "experiment": experiments.place(_experiment(run)),
            "config": [pairs.place(pair) for pair in flatten(run["config"]).items()],
            "curve": _curve(run),
            "privacy": [pairs.place(pair) for pair in _privacy(run)],
            "facts": [pairs.place(pair) for pair in _facts(run)],
            "card": [words.place(word) for word in _card(card(run), parser)],
            "record": _link(run, results, page),
        }
        for run, line, title in zip(every, lines, titles, strict=True)
    ]
    metrics = dict.fromkeys([*names.METRICS, *(key for run in every for key in run["metrics"])])
    return {
        "columns": [
            asdict(column) | ({"wide": True} if column.key == "epsilon_of" and several else {})
            for column in COLUMNS
        ],
        "settings": varied,
        "metrics": {key: [names.metric(key), names.unit(key)] for key in metrics},
        "pairs": pairs.entries,
        "lines": words.entries,
        "runs": runs,
        "tests": _test(every, results, experiments),
    }


def name_runs(every: list[Record], differs: list[str]) -> list[str]:
    """Return names that tell runs apart: 'mnist, lr 0.1, seed 2', and of twins their digits."""
    made = [
        ", ".join(filter(None, (run["recipe"], what, f"seed {run['seed']}")))
        for run, what in zip(every, differs, strict=True)
    ]
    twins = Counter(made)
    return [
        f"{name} ({run['run'][:6]})" if twins[name] > 1 else name
        for name, run in zip(made, every, strict=True)
    ]


def _experiment(run: Record) -> tuple[str, str, str]:
    return run["experiment"], run["data"]["digest"], run["headline"]["name"]


def _test(every: list[Record], results: Path, experiments: _Pool) -> dict[str, list[Any]]:
    """Return {'3 17': [p, seeds]}: the test of `compare` for pairs of experiments on one data set.

    p is that of DeLong's test for ROC AUC, else of Student's t over seeds.
    """
    rows: dict[tuple[str, str], dict[int, list[Record]]] = {}
    for run in sorted(every, key=lambda run: str(records.get(run, "measured.started_utc"))):
        _, data, metric = key = _experiment(run)
        rows.setdefault((data, metric), {}).setdefault(experiments.place(key), []).append(run)
    found = {}
    for (_, metric), of in rows.items():
        for one, other in combinations([*of][-TESTED:], 2):
            _, p, seeds = compare_rows(metric, of[one], of[other], results)
            if not math.isnan(p):
                found[f"{min(one, other)} {max(one, other)}"] = [float(f"{p:.3g}"), seeds]
    return found


def markdown_parser() -> MarkdownIt:
    """Return a parser that leaves raw HTML as text and loads no picture."""
    return MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")


class _Pool:
    """Entries that stand once, and the place of each."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self._places: dict[str, int] = {}

    def place(self, entry: Any) -> int:
        key = repr(entry)
        if key not in self._places:
            self._places[key] = len(self.entries)
            self.entries.append(entry)
        return self._places[key]


def _cells(run: Record, line: dict[Any, Any], title: str) -> dict[str, Any]:
    """Return the values of `COLUMNS`, those that the run has."""
    claims = run.get("claims") or {}
    named = {
        "name": title,
        "what": names.run(run),
        "algorithm": names.algorithm(line["algorithm"] or ""),
        "dataset": names.data(line["dataset"]),
        "model": names.model(line["model"] or ""),
        "paper": claims.get("table") or OWN,
        "run": run["run"][:16],
        "commit": (line["commit"] or "")[:12],
    }
    cells = {column.key: line.get(column.key) for column in COLUMNS} | named
    return {key: value for key, value in cells.items() if value not in (None, "")}


def _curve(run: Record) -> dict[str, list[float | None]]:
    """Return epoch, tight ε so far and each metric, of `POINTS` epochs at most, the last included.

    The step after a run's last whole epoch has none, and is left out.
    """
    epochs = [epoch for epoch in run.get("epochs") or [] if epoch.get("epoch") is not None]
    if len(epochs) < 2:
        return {}
    every = -(-len(epochs) // POINTS)
    kept = [epoch for n, epoch in enumerate(epochs) if (len(epochs) - 1 - n) % every == 0]
    shown = ["epoch", "epsilon_tight", *run["metrics"]]
    series = {key: [epoch.get(key) for epoch in kept] for key in shown}
    return {
        key: [
            float(f"{v:.{9 if key == 'epsilon_tight' else 5}g}") if isinstance(v, float) else v
            for v in values
        ]
        for key, values in series.items()
        if not key.startswith("zero_filled_") and any(v is not None for v in values)
    }


def _privacy(run: Record) -> list[tuple[str, str]]:
    """Return what the run spent and how, in words; what an old record lacks is left out."""
    privacy = run["privacy"]
    sampling, ledger = privacy.get("sampling") or {}, privacy.get("ledger") or {}
    owner = f"ε of {name_one(privacy['unit'])}"
    many = privacy["examples_per_patient"]
    rate = sampling.get("sample_rate")
    found = {
        "ε tight": interval(privacy.get("epsilon_tight_at_least"), privacy["epsilon_tight"]),
        f"{owner} with up to {many} examples": interval(
            privacy.get("epsilon_patient_at_least"), privacy.get("epsilon_patient")
        ),
        "ε claimed": f"{epsilon(privacy['epsilon_claimed'])} ({privacy['claimed_by']})",
        "δ": f"{privacy['delta']:g}",
        "steps": f"{privacy['steps']:,}",
        "sampling": f"{sampling.get('scheme')}, rate {rate:.4g}" if rate else "",
        "neighbours": str(privacy.get("adjacency", "")).replace("_", " "),
        "noise": _noise(privacy),
        "randomness": privacy.get("randomness", ""),
        "releases in the ledger": f"{ledger['entries']:,}" if "entries" in ledger else "",
        "ledger's digest": str(ledger.get("digest", "")),
    }
    return [(name, value) for name, value in found.items() if value]


def _noise(privacy: dict[str, Any]) -> str:
    sigma = privacy.get("noise_multiplier")
    least = f"z {privacy['z']:.4g} where it is least"
    return f"σ {sigma:.4g}, {least}" if sigma is not None else least


def _facts(run: Record) -> list[tuple[str, str]]:
    found = {name: records.get(run, path) for name, path in FACTS.items()}
    found["data"] = ", ".join(filter(None, (run["data"]["provenance"], run["data"]["notes"])))
    return [
        (name, f"{value:,}" if isinstance(value, int) and name != "seed" else str(value))
        for name, value in found.items()
        if value not in (None, "")
    ]


def _card(markdown: str, parser: MarkdownIt) -> list[str]:
    """Return the lines of a card as HTML, without its YAML head; raw HTML in it stays text."""
    body = markdown.split("\n---\n", 1)[-1]
    return parser.render(body).split("\n") if markdown else []


def _link(run: Record, results: Path, page: Path) -> str:
    record = records.folder(results, run["recipe"], run["run"]) / "record.json"
    return quote(Path(os.path.relpath(record, page.parent)).as_posix())
