"""A line of a paper's table: one of its numbers, and what the runs of one variant give beside it.

Everything that decides what a line says is here. A job of a recipe (`Filling`) has runs; the jobs
of one variant are one number (`Line`). `papers/PAPER/paper.yaml` says which data is the paper's and
what a row lacks (`Rules`). The first line of a row has the paper's own settings, run or not; a line
with a variant is ours.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from statistics import mean, stdev
from typing import Any

from zdp_bench.records import Record
from zdp_bench.report import names, papers
from zdp_bench.report.number_format import duration, interval, mean_and_deviation
from zdp_bench.report.papers import Reference

PUBLISHED = ("as published", "reproduced", "close", "different")  # curves have the first only
OTHER = ("other settings", "other data", "reduced")
EMPTY = ("no data", "not run")

EPSILON_COLUMNS = ("epsilon", "epsilon_rdp")
SHARES = ("accuracy", "roc_auc", "dice", "ssim")  # between 0 and 1: a point is 0.01
LESS_IS_BETTER = ("nmse",)

RULE = (
    "Reproduced: our mean is within one point of the paper's number, or, with three seeds or more, "
    "within two standard deviations. Close: within two points. Different: neither, to whichever "
    "side. A point is 1 %, or 0.01 of a share; of NMSE and PSNR it is 2 % of the number."
)


@dataclass(frozen=True)
class Rules:
    """What counts as the paper's data, and what rows lack: `coverage` in `paper.yaml`.

    Attributes:
        table: the N of PAPER/N.
        published: data set, or 'recipe=NAME', -> how 'PROVENANCE, NOTES' of records must begin.
        differs: data set or variant -> what differs from the paper, in a few words.
        reduced: patterns of variants with less training, or a smaller network, than the paper's.
        lacks: pattern of 'N/ROW' -> what is missing to run it. The first that matches counts.
    """

    table: str
    published: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)
    reduced: Sequence[str] = ()
    lacks: Mapping[str, str] = field(default_factory=dict)

    def is_published(self, recipe: str, data: Mapping[str, Any]) -> bool:
        """True if `data` of a record is what the paper used."""
        wanted = self.published.get(f"recipe={recipe}", self.published.get(data["name"]))
        return wanted is not None and f"{data['provenance']}, {data['notes']}".startswith(wanted)

    def lacking(self, row: str) -> str:
        """Return what is missing to run a row; empty if nothing is."""
        rows = self.lacks.items()
        return next((why for of, why in rows if fnmatchcase(f"{self.table}/{row}", of)), "")


def rules_of(table: str) -> Rules:
    """Return what counts as the paper's data in a table, and what its rows lack."""
    return Rules(table.partition("/")[2], **(papers.settings(table).get("coverage") or {}))


@dataclass(frozen=True)
class Filling:
    """A job of a recipe that fills a row, as the recipe is now.

    Attributes:
        overrides: of the job, beside `recipe=`.
        digest: the experiment digest of its runs.
        on: the data set, where it is not the recipe's own: 'NAME, OPTION=VALUE, ...'.
        seconds: how long a run takes by the quickest record of its kind; None if none tells.
    """

    recipe: str
    overrides: tuple[str, ...]
    row: str
    variant: str | None
    digest: str
    on: str | None = None
    seconds: float | None = field(default=None, compare=False)

    def runs_of(self, every: Iterable[Record]) -> list[Record]:
        """Return the runs that fill the row, by seed: those on the release, if there are any.

        They have this experiment digest, whatever their recipe. It covers all that a run computes
        but its seed, so a run made before the recipe changed fills nothing.
        """
        runs = list_once(
            run
            for run in every
            if run["experiment"] == self.digest and run["data"]["provenance"] != "synthetic"
        )
        return [run for run in runs if run["data"]["provenance"] == "official"] or runs

    @property
    def command(self) -> str:
        """The command whose runs fill the row."""
        name, *options = re.split(r", (?=\w+=)", self.on) if self.on else [""]
        words = [f"dataset={name}"] if name else []
        words = [shlex.quote(w) for w in [*words, *(f"dataset.{option}" for option in options)]]
        return " ".join(["zdp-bench run", f"recipe={self.recipe}", *self.overrides, *words])


def list_once(runs: Iterable[Record]) -> list[Record]:
    """Return runs by seed; one that two recipes made counts once."""
    found: dict[str, Record] = {}
    for run in sorted(runs, key=lambda run: (run["seed"], run["recipe"], run["run"])):
        found.setdefault(run["run"], run)
    return list(found.values())


@dataclass(frozen=True)
class Line:
    """A number of the paper, and beside it the runs of one variant, all seeds or all folds.

    Attributes:
        jobs: each job with its runs; several jobs are the folds of one number.
        variant: what differs from the paper, as its recipe names it; None for the paper's settings.
        on: another data set than the recipe's, as in `Filling`.
    """

    number: Reference
    jobs: tuple[tuple[Filling, tuple[Record, ...]], ...]
    rules: Rules
    variant: str | None = None
    on: str | None = None

    @cached_property
    def runs(self) -> list[Record]:
        """All runs, by seed; there may be none."""
        return list_once(run for _, runs in self.jobs for run in runs)

    @cached_property
    def values(self) -> list[float]:
        """The metric of each seed, as recorded; with several jobs, the mean of each."""
        metric = self.number.column
        of_jobs = [[run["metrics"][metric] for run in runs] for _, runs in self.jobs if runs]
        return [mean(values) for values in of_jobs] if self.over_folds else of_jobs[0]

    @property
    def over_folds(self) -> bool:
        """True if each value is a fold's mean: folds differ by more than seeds do."""
        return sum(bool(runs) for _, runs in self.jobs) > 1

    @property
    def scale(self) -> float:
        """Turns a recorded metric into the paper's unit."""
        return 100.0 if self.number.unit == "%" else 1.0

    @property
    def mean(self) -> float:
        """The mean in the paper's unit."""
        return mean(self.values) * self.scale

    @property
    def shown(self) -> str:
        """'98.01 ± 0.12 % (n = 3)', in brackets if it is not on the paper's data."""
        if not self.runs:
            return ""
        shown = mean_and_deviation(self.values, self.number.unit)
        shown = shown.replace(" (n", " over folds (n") if self.over_folds else shown
        return shown if self.on_paper_data else f"[{shown}]"

    @property
    def privacy(self) -> dict[str, Any]:
        """What the runs spent; of several jobs, the one with most tight ε."""
        spent = max((run["privacy"] for run in self.runs), key=lambda one: one["epsilon_tight"])
        return {"unit": "patient"} | spent  # records of older versions name no unit

    @property
    def tight(self) -> str:
        """'3.4', or '3.4 (image 7.27)' where a unit owns several examples."""
        spent = self.privacy
        tight = interval(spent.get("epsilon_tight_at_least"), spent["epsilon_tight"])
        if "epsilon_patient" not in spent:
            return tight
        owner = interval(spent.get("epsilon_patient_at_least"), spent["epsilon_patient"])
        return tight if owner == tight else f"{tight} ({spent['unit']} {owner})"

    @property
    def on_paper_data(self) -> bool:
        """True if all of it ran on what counts as the paper's data."""
        done = [(job.recipe, run["data"]) for job, runs in self.jobs for run in runs]
        return not self.on and all(self.rules.is_published(*one) for one in done)

    @property
    def status(self) -> str:
        """One of `PUBLISHED`, `OTHER` or `EMPTY`; empty where a paper's table gives no number."""
        of_curve = self.number.table.startswith("fig")
        if not self.runs:
            return "no data" if self.rules.lacking(self.number.row) else "not run"
        if any(fnmatchcase(self.variant or "", pattern) for pattern in self.rules.reduced):
            return "reduced"
        if of_curve and not all(runs for _, runs in self.jobs):
            return "reduced"
        if not self.on_paper_data:
            return "other data"
        if self.variant:
            return "other settings"
        return "as published" if of_curve else judge(self)

    @property
    def reason(self) -> str:
        """What is missing for an empty line, or how long it would take, if known."""
        if self.runs or (why := self.rules.lacking(self.number.row)):
            return "" if self.runs else why
        seconds = [job.seconds for job, _ in self.jobs]
        return "" if None in seconds or not seconds else duration(sum(filter(None, seconds)))

    @property
    def difference(self) -> float | None:
        """Ours less the paper's number; None unless it is as published."""
        if self.status not in PUBLISHED[1:] or self.number.number is None or math.isnan(self.mean):
            return None
        return self.mean - self.number.number

    @property
    def differs(self) -> str:
        """What differs from the paper: the data, if other, and the variant."""
        words = []
        if self.runs and not self.on_paper_data:
            data = str(self.runs[0]["data"]["name"])
            words.append(self.rules.differs.get(data, f"on {names.data(data)}"))
        if self.variant:
            words.append(self.rules.differs.get(self.variant, self.variant))
        return "; ".join(filter(None, words))

    @property
    def label(self) -> str:
        """The paper's name of the row, with what is ours about it: 'MNIST (tuned, ours)'."""
        variant = self.variant and self.rules.differs.get(self.variant, self.variant)
        marks = [f"{variant}, ours"] if variant else []
        marks += [f"on {names.data(self.on)}"] if self.on else []
        return self.number.label + (f" ({'; '.join(marks)})" if marks else "")

    @property
    def command(self) -> str:
        """The command that makes its runs; empty if no recipe does."""
        if len(self.jobs) < 2:
            return self.jobs[0][0].command if self.jobs else ""
        (first, _), *others = self.jobs
        common = [word for word in first.overrides if all(word in f.overrides for f, _ in others)]
        return " ".join(["zdp-bench run -m", f"recipe={first.recipe}", *common])


def judge(line: Line) -> str:
    """Return 'reproduced', 'close' or 'different' (`RULE`).

    A metric that is NaN is 'different', and so is one of which the paper prints no number.
    """
    metric, paper = line.number, line.number.number
    if paper is None or math.isnan(line.mean):
        return "different"
    point = 1.0 if metric.unit == "%" else 0.01 if metric.column in SHARES else 0.02 * abs(paper)
    seeds = [] if line.over_folds else line.values
    spread = 2 * line.scale * stdev(seeds) if len(seeds) >= 3 else 0.0
    away = abs(line.mean - paper) - 1e-9
    if away <= max(point, spread):
        return "reproduced"
    return "close" if away <= 2 * point else "different"


def make_lines(
    numbers: Sequence[Reference],
    fillings: Sequence[Filling],
    every: Sequence[Record],
    rules: Rules,
) -> list[Line]:
    """Return the lines of each number, in the paper's order: its own settings, then variants run.

    Args:
        every: all records.
    """
    jobs = [(filling, tuple(filling.runs_of(every))) for filling in fillings]
    lines = []
    for number in numbers:
        groups: dict[tuple[str, str], list[tuple[Filling, tuple[Record, ...]]]] = {("", ""): []}
        for filling, runs in jobs:
            if filling.row == number.row:
                at = filling.variant or "", filling.on or ""
                groups.setdefault(at, []).append((filling, runs))
        for (variant, on), of in sorted(groups.items()):
            line = Line(number, tuple(of), rules, variant or None, on or None)
            if line.runs or (variant, on) == ("", ""):
                lines.append(line)
    return lines
