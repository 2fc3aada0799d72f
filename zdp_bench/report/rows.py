"""The runs that fill a row of a paper's table: what fills it, and what it measured.

A recipe's `claims` names the row it fills; a recipe that sweeps fills a row with each of its jobs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import Any

from zdp_bench.records import Record
from zdp_bench.report.number_format import epsilon, interval, mean_and_deviation
from zdp_bench.report.papers import Reference


@dataclass(frozen=True)
class Filling:
    """What fills a row: a job of a recipe, as the recipe stands now.

    Attributes:
        overrides: of the job, beside `recipe=`.
        digest: the experiment digest of its runs.
        on: the data set, where it is not the recipe's own: 'NAME, OPTION=VALUE, ...'.
    """

    recipe: str
    overrides: tuple[str, ...]
    row: str
    variant: str | None
    digest: str
    on: str | None = None

    def fits(self, run: Record) -> bool:
        """True if a run fills the cell: it has this experiment digest, whatever its recipe.

        The digest covers all that a run computes but its seed. A run with any other key
        overridden, or made before the recipe changed, has another digest and fills nothing.
        """
        return bool(run["experiment"] == self.digest)

    @property
    def command(self) -> str:
        """The command whose runs fill the cell."""
        name, *options = re.split(r", (?=\w+=)", self.on) if self.on else [""]
        words = [f"dataset={name}"] if name else []
        words = [shlex.quote(w) for w in [*words, *(f"dataset.{option}" for option in options)]]
        return " ".join(["zdp-bench run", f"recipe={self.recipe}", *self.overrides, *words])


@dataclass(frozen=True)
class Row:
    """The runs of one filling, by one metric of the paper's row: a line of `tableN_runs.md`.

    Attributes:
        published_data: true if the runs' data is what the paper used (`papers.Coverage`).
        variant: what differs from the paper in a run of ours, in a few words; None as published.
        job: overrides that tell it from others with the same row, variant and data set.
    """

    filling: Filling
    metric: Reference
    runs: Sequence[Record]
    published_data: bool
    variant: str | None = None
    job: str = ""

    @property
    def label(self) -> str:
        """The paper's name of the row, with what is ours about it."""
        label = mark(self.metric.label, self.variant, self.filling.on)
        return f"{label}, {self.job}" if self.job else label

    @property
    def scale(self) -> float:
        """Turns a recorded metric into the paper's unit."""
        return 100.0 if self.metric.unit == "%" else 1.0

    @cached_property
    def values(self) -> list[float]:
        """The metric of each run, as recorded."""
        return [run["metrics"][self.metric.column] for run in self.runs]

    @property
    def mean(self) -> float:
        """The mean over all runs, in the paper's unit."""
        return mean(self.values) * self.scale

    @property
    def privacy(self) -> dict[str, Any]:
        """What the runs spent: the same for every seed, because no ε depends on data."""
        unnamed = {"unit": "patient"}  # in records of older versions
        return unnamed | self.runs[0]["privacy"]

    @property
    def provenance(self) -> str:
        """The provenance of the data; empty without runs."""
        return self.runs[0]["data"]["provenance"] if self.runs else ""

    @property
    def as_published(self) -> bool:
        """True if the settings are the paper's, so no variant of ours, on whatever data."""
        return self.filling.variant is None

    @cached_property
    def cells(self) -> dict[str, str]:
        """What each column shows; there must be runs."""
        spent = self.privacy
        return {
            "row": self.label,
            "metric": self.metric.column.replace("_", " "),
            "ours": mean_and_deviation(self.values, self.metric.unit),
            "ε claimed": epsilon(spent["epsilon_claimed"]),
            "ε tight": self.tight,
            "ε per unit": self.per_unit,
            "δ": f"{spent['delta']:g}",
            "data": self.provenance,
            "command": f"`{self.filling.command}`",
        }

    @property
    def tight(self) -> str:
        """The tight ε of a record."""
        spent = self.privacy
        return interval(spent.get("epsilon_tight_at_least"), spent["epsilon_tight"])

    @property
    def per_unit(self) -> str:
        """The tight ε of a patient or another unit; its name follows if it is not a record's."""
        spent = self.privacy
        if "epsilon_patient" not in spent:
            return ""
        together = interval(spent.get("epsilon_patient_at_least"), spent["epsilon_patient"])
        return together if together == self.tight else f"{together} ({spent['unit']})"

    @property
    def numbers(self) -> dict[str, object]:
        """What the CSV holds: the numbers behind the cells, unrounded."""
        numbers: dict[str, object] = {
            "row": self.label,
            "recipe": self.filling.recipe,
            "overrides": " ".join(self.filling.overrides),
            "on": self.filling.on,
            "variant": self.filling.variant,
            "metric": self.metric.column,
            "unit": self.metric.unit,
            "n": len(self.runs),
        }
        if not self.runs:
            return numbers
        spent = self.privacy
        return numbers | {
            "mean": round(self.mean, 6),
            "lowest": round(min(self.values) * self.scale, 6),
            "highest": round(max(self.values) * self.scale, 6),
            "values": " ".join(f"{value * self.scale:.6g}" for value in self.values),
            "seeds": " ".join(str(run["seed"]) for run in self.runs),
            "epsilon_claimed": spent["epsilon_claimed"],
            "claimed_by": spent["claimed_by"],
            "epsilon_tight": spent["epsilon_tight"],
            "epsilon_tight_at_least": spent.get("epsilon_tight_at_least"),
            "epsilon_patient": spent.get("epsilon_patient"),
            "records_per_patient": spent.get("records_per_patient"),
            "privacy_unit": spent["unit"],
            "delta": spent["delta"],
            "z": spent["z"],
            "steps": spent["steps"],
            "provenance": self.provenance,
            "runs": " ".join(run["run"][:16] for run in self.runs),
        }


def fitting(every: Iterable[Record], fillings: Sequence[Filling]) -> list[Record]:
    """Return the runs that fit any of `fillings`; a run that two recipes made counts once."""
    runs: dict[str, Record] = {}
    for run in every:
        if any(filling.fits(run) for filling in fillings):
            runs.setdefault(run["run"], run)
    return sorted(runs.values(), key=lambda run: int(run["seed"]))


def mark(label: str, variant: str | None, on: str | None) -> str:
    """'MNIST', 'tuned', 'fashion_mnist' -> 'MNIST (tuned, ours; on fashion_mnist)'."""
    marks = ([f"{variant}, ours"] if variant else []) + ([f"on {on}"] if on else [])
    return label + (f" ({'; '.join(marks)})" if marks else "")
