"""The face-off as a table: every algorithm on one network and data set at several tight ε.

Runs of `recipe=algorithm_faceoff` that differ only in algorithm, target ε and seed share a table,
whatever data set, network or training they have; each such setting has a table of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from zdp_bench import assets, records
from zdp_bench.records import Record
from zdp_bench.report.number_format import mean_and_deviation
from zdp_bench.report.sheet import Sheet

RECIPE = "algorithm_faceoff"
NON_PRIVATE = "sgd"  # stands at ε = ∞, run with privacy.target_epsilon=null


@dataclass(frozen=True)
class FaceOff:
    """One setting: its runs by algorithm, as labelled, and by target ε, ∞ without privacy."""

    dataset: str
    provenance: str
    model: str
    digest: str
    runs: dict[tuple[str, float], list[Record]]

    @property
    def name(self) -> str:
        """The file name of its table: data set, network, and six digits of the setting's digest."""
        return f"faceoff_{self.dataset}_{self.model}_{self.digest[:6]}"

    @property
    def title(self) -> str:
        """'lenet5 on mnist (official)'."""
        return f"{self.model} on {self.dataset} ({self.provenance})"

    @property
    def metric(self) -> str:
        """The headline metric of its runs."""
        return str(next(iter(self.runs.values()))[0]["headline"]["name"])

    @property
    def algorithms(self) -> list[str]:
        """The algorithms' labels, sorted."""
        return sorted({algorithm for algorithm, _ in self.runs})

    @property
    def epsilons(self) -> list[float]:
        """The target ε, sorted."""
        return sorted({epsilon for _, epsilon in self.runs})

    def values(self, algorithm: str, epsilon: float) -> list[float]:
        """Return the test metric of each seed; none where that was not run."""
        return [float(run["headline"]["value"]) for run in self.runs.get((algorithm, epsilon), [])]

    def sheet(self, command: str) -> Sheet:
        """Return the table ready to show; `command` makes it."""
        unit = "%" if self.metric == "accuracy" else ""
        rows = []
        for algorithm in self.algorithms:
            values = [self.values(algorithm, epsilon) for epsilon in self.epsilons]
            rows.append([algorithm, *(mean_and_deviation(v, unit) if v else "" for v in values)])
        run = next(iter(self.runs.values()))[0]
        optimizer, privacy = run["config"]["optimizer"], run["privacy"]
        notes = [
            f"Every run: {privacy['steps']:,} steps of {optimizer['name']}, "
            f"lr {optimizer['lr']:g}, the same for all algorithms; δ = {privacy['delta']:g}.",
            "Each algorithm's noise multiplier is calibrated so that the privacy loss distribution "
            "of its run has that ε.",
            "Hyper-parameter search is not counted in any ε.",
        ]
        if math.inf in self.epsilons:
            notes.append(
                f"ε = ∞: the same with algorithm={NON_PRIVATE} privacy.target_epsilon=null."
            )
        return Sheet(
            f"{self.title}: test {self.metric} at equal tight ε",
            ["algorithm", *(f"ε = {epsilon:g}".replace("inf", "∞") for epsilon in self.epsilons)],
            rows,
            notes,
            f"`{command}` made this from the records; do not edit.",
            [self._numbers(algorithm, target) for algorithm, target in sorted(self.runs)],
        )

    def _numbers(self, algorithm: str, target: float) -> dict[str, object]:
        runs, values = self.runs[algorithm, target], self.values(algorithm, target)
        privacy = runs[0]["privacy"]
        return {
            "algorithm": algorithm,
            "target_epsilon": target,
            "epsilon_tight": privacy["epsilon_tight"],
            "z": privacy["z"],
            "noise_multiplier": privacy["noise_multiplier"],
            "n": len(runs),
            "mean": round(mean(values), 8),
            "values": " ".join(map(str, values)),
            "seeds": " ".join(str(run["seed"]) for run in runs),
            "runs": " ".join(run["run"][:16] for run in runs),
        }


def read(results: Path) -> list[FaceOff]:
    """Return every face-off that there are records of, by name."""
    settings: dict[str, dict[tuple[str, float], list[Record]]] = {}
    for run in records.read_all(results):
        target = run["config"]["privacy"].get("target_epsilon")
        if target is None and run["config"]["algorithm"]["name"] == NON_PRIVATE:
            target = math.inf
        if run["recipe"] == RECIPE and target:
            cells = settings.setdefault(_setting(run), {})
            cells.setdefault((_label(run), float(target)), []).append(run)
    found = []
    for digest, cells in settings.items():
        run = next(iter(cells.values()))[0]
        data, model = run["data"], run["config"]["model"]["name"]
        found.append(FaceOff(data["name"], data["provenance"], model, digest, cells))
    return sorted(found, key=lambda faceoff: faceoff.name)


def _setting(run: Record) -> str:
    """Return the SHA-256 of what the runs of one face-off share: not algorithm, ε, seed, claims.

    As in an experiment's digest, an option that is off counts as not there: records that are older
    than it belong to the same face-off.
    """
    varied = ("algorithm.", "claims.", "seed", "privacy.target_epsilon")
    config = {
        key: value
        for key, value in records.flatten(run["config"]).items()
        if not (key.startswith(varied) or value is None or value is False or value == "record")
    }
    shared = json.dumps([config, run["data"]["digest"]], sort_keys=True)
    return hashlib.sha256(shared.encode()).hexdigest()


def _label(run: Record) -> str:
    """Return the algorithm's name, and those of its options that are not its defaults."""
    options = run["config"]["algorithm"]
    defaults = assets.read_yaml(assets.CONF / "algorithm" / f"{options['name']}.yaml")
    changed = {k: v for k, v in options.items() if k != "noise_multiplier" and v != defaults.get(k)}
    return ", ".join([options["name"], *(f"{key}={value}" for key, value in changed.items())])
