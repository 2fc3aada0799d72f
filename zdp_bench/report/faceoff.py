"""The face-off: every algorithm on one network and data set at one tight ε after another, as one table and one plot.

Runs of `recipe=algorithm_faceoff` that differ only in algorithm, target ε and seed stand in one table, whatever data set, network
or training they were made with; each such setting has a table of its own.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from rich.table import Table as RichTable

from zdp_bench import assets, records
from zdp_bench.records import Record
from zdp_bench.report.number_format import mean_and_deviation

RECIPE = "algorithm_faceoff"


@dataclass(frozen=True)
class FaceOff:
    """One setting: its runs by algorithm, as labelled, and by tight ε aimed at."""

    dataset: str
    provenance: str
    model: str
    digest: str
    runs: dict[tuple[str, float], list[Record]]

    @property
    def name(self) -> str:
        return f"faceoff_{self.dataset}_{self.model}_{self.digest[:6]}"

    @property
    def title(self) -> str:
        return f"{self.model} on {self.dataset} ({self.provenance})"

    @property
    def metric(self) -> str:
        return str(next(iter(self.runs.values()))[0]["headline"]["name"])

    @property
    def algorithms(self) -> list[str]:
        return sorted({algorithm for algorithm, _ in self.runs})

    @property
    def epsilons(self) -> list[float]:
        return sorted({epsilon for _, epsilon in self.runs})

    def values(self, algorithm: str, epsilon: float) -> list[float]:
        """The test metric of each seed; none where that was not run."""
        return [float(run["headline"]["value"]) for run in self.runs.get((algorithm, epsilon), [])]


def read(results: Path) -> list[FaceOff]:
    """Every face-off there are records of, by name."""
    settings: dict[str, list[Record]] = {}
    for record in records.read_all(results):
        if record["recipe"] == RECIPE and record["config"]["privacy"].get("target_epsilon"):
            settings.setdefault(_setting(record), []).append(record)
    found = []
    for digest, runs in settings.items():
        cells: dict[tuple[str, float], list[Record]] = {}
        for run in runs:
            cells.setdefault(
                (_label(run), float(run["config"]["privacy"]["target_epsilon"])), []
            ).append(run)
        data, config = runs[0]["data"], runs[0]["config"]
        found.append(
            FaceOff(data["name"], data["provenance"], config["model"]["name"], digest, cells)
        )
    return sorted(found, key=lambda faceoff: faceoff.name)


def _setting(record: Record) -> str:
    """SHA-256 of what the runs of one face-off share: all but algorithm, ε, seed and claims."""
    config = {
        key: value
        for key, value in record["config"].items()
        if key not in ("algorithm", "seed", "claims")
    }
    config["privacy"] = {
        key: value for key, value in config["privacy"].items() if key != "target_epsilon"
    }
    return hashlib.sha256(
        json.dumps([config, record["data"]["digest"]], sort_keys=True).encode()
    ).hexdigest()


def _label(record: Record) -> str:
    """The algorithm's name, and those of its options that are not its defaults."""
    options = record["config"]["algorithm"]
    defaults = assets.read_yaml(assets.CONF / "algorithm" / f"{options['name']}.yaml")
    changed = {k: v for k, v in options.items() if k != "noise_multiplier" and v != defaults.get(k)}
    return ", ".join([options["name"], *(f"{key}={value}" for key, value in changed.items())])


# ---------------------------------------------------------------------------------------------------------- writing


def as_rich(faceoff: FaceOff) -> RichTable:
    """The table on a terminal."""
    shown = RichTable(
        title=f"{faceoff.title}, test {faceoff.metric} at equal tight ε", title_justify="left"
    )
    for column in _columns(faceoff):
        shown.add_column(column)
    for row in _rows(faceoff):
        shown.add_row(*row)
    return shown


def as_markdown(faceoff: FaceOff, command: str) -> str:
    """The table as Markdown; `command` makes it."""
    columns = _columns(faceoff)
    lines = [f"# {faceoff.title}: test {faceoff.metric} at equal tight ε", ""]
    lines += [f"`{command}` made this from the records; do not edit.", ""]
    lines += ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(row) + " |" for row in _rows(faceoff)]
    trained = next(iter(faceoff.runs.values()))[0]
    notes = [
        f"Every run: {trained['privacy']['steps']:,} steps of {trained['config']['optimizer']['name']}, "
        f"lr {trained['config']['optimizer']['lr']:g}, the same for all algorithms; δ = {trained['privacy']['delta']:g}.",
        "Each algorithm's noise multiplier is calibrated so that the privacy loss distribution of its run has that ε.",
        "Hyper-parameter search is not counted in any ε.",
    ]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]) + "\n"


def as_csv(faceoff: FaceOff) -> str:
    """The numbers behind the table, unrounded: one line an algorithm and ε."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [
            "algorithm",
            "target_epsilon",
            "epsilon_tight",
            "z",
            "noise_multiplier",
            "n",
            "mean",
            "values",
            "seeds",
            "runs",
        ]
    )
    for (algorithm, target), runs in sorted(faceoff.runs.items()):
        privacy, values = runs[0]["privacy"], faceoff.values(algorithm, target)
        told = [
            privacy["epsilon_tight"],
            privacy["z"],
            privacy["noise_multiplier"],
            len(runs),
            round(mean(values), 8),
        ]
        lists = (
            map(str, values),
            (str(run["seed"]) for run in runs),
            (run["run"][:16] for run in runs),
        )
        writer.writerow([algorithm, target, *told, *(" ".join(words) for words in lists)])
    return out.getvalue()


def _columns(faceoff: FaceOff) -> list[str]:
    return ["algorithm", *(f"ε = {epsilon:g}" for epsilon in faceoff.epsilons)]


def _rows(faceoff: FaceOff) -> list[list[str]]:
    def cell(algorithm: str, epsilon: float) -> str:
        values = faceoff.values(algorithm, epsilon)
        return (
            mean_and_deviation(values, "%" if faceoff.metric == "accuracy" else "")
            if values
            else ""
        )

    return [
        [algorithm, *(cell(algorithm, epsilon) for epsilon in faceoff.epsilons)]
        for algorithm in faceoff.algorithms
    ]


def write(faceoff: FaceOff, results: Path, command: str) -> list[Path]:
    """Write `results/tables/faceoff_DATASET_MODEL_DIGEST.md`, which says what `command` makes it, and `.csv`."""
    stem = results / "tables" / faceoff.name
    paths = [stem.with_suffix(".md"), stem.with_suffix(".csv")]
    records.write_text(paths[0], as_markdown(faceoff, command))
    records.write_text(paths[1], as_csv(faceoff))
    return paths
