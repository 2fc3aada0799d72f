"""A cell: one number of a paper's table, what we measured of it, what differs, and its status.

Everything that decides what a cell says is here. A job of a recipe (`Filling`) has runs, which by
one metric are one number (`Measured`). `papers/PAPER/paper.yaml` says which data is the paper's and
why a row was not run (`Rules`). A run without a variant has the paper's settings. A run with one is
ours: one variant stands in the cell (`_choose`), the others in `tableN_runs.md`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from statistics import mean, stdev
from typing import Any

from zdp_bench.records import Record
from zdp_bench.report import papers
from zdp_bench.report.number_format import interval, mean_and_deviation
from zdp_bench.report.papers import Reference

PUBLISHED = ("as published", "reproduced", "close", "different")  # curves have the first only
OTHER = ("other settings", "other data", "reduced")
EMPTY = ("no data", "too dear", "not run")
AGAIN = "same run"  # in totals: another table's cell has counted it
STATUSES = (*PUBLISHED, *OTHER, *EMPTY, AGAIN)
PROTECTIONS = (
    "not private",
    "private with a finite tight ε",
    "private by the paper's ε only, with a tight ε of ∞",
)

EPSILON_COLUMNS = ("epsilon", "epsilon_rdp")
SHARES = ("accuracy", "roc_auc", "dice", "ssim")  # between 0 and 1: a point is 0.01
LESS_IS_BETTER = ("nmse",)
SAME_EPSILON = 1.05  # a best of ours has at most this much more tight ε than the row as published

RULE = (
    "Reproduced: our mean is within one point of the paper's number, or, with three seeds or more, "
    "within two standard deviations. Close: within two points. Different: neither, to whichever "
    "side. A point is 1 %, or 0.01 of a share; of NMSE and PSNR it is 2 % of the number."
)


# -------------------------------------------------------------------- what the papers' files say


@dataclass(frozen=True)
class Rules:
    """What counts as the paper's data, and why rows are empty: `coverage` in `paper.yaml`.

    Attributes:
        table: the N of PAPER/N.
        published: data set, or 'recipe=NAME', -> how 'PROVENANCE, NOTES' of records must begin.
        differs: data set or variant -> what differs from the paper, in a few words.
        aside: patterns of variants that stand in `tableN_runs.md` only.
        reduced: patterns of variants with less training, or a smaller network, than the paper's.
        not_run: pattern of 'N/ROW' -> what is missing, or the hours that a run takes. The first
            that matches counts.
    """

    table: str
    published: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)
    aside: Sequence[str] = ()
    reduced: Sequence[str] = ()
    not_run: Mapping[str, str | float] = field(default_factory=dict)

    def is_published(self, recipe: str, data: Mapping[str, Any]) -> bool:
        """True if `data` of a record is what the paper used."""
        wanted = self.published.get(f"recipe={recipe}", self.published.get(data["name"]))
        return wanted is not None and f"{data['provenance']}, {data['notes']}".startswith(wanted)

    def of_data(self, name: str) -> str:
        """Return how a data set differs from the paper's; empty if its variants say so."""
        return self.differs.get(name, f"on {name}")

    def of_variant(self, variant: str) -> str:
        """Return how a variant differs from the paper: its name says so, or `differs`."""
        return self.differs.get(variant, variant)

    def is_aside(self, variant: str | None) -> bool:
        """True if a variant is no candidate for 'best of ours'."""
        return any(fnmatchcase(variant or "", pattern) for pattern in self.aside)

    def status(self, variant: str | None, on_paper_data: bool) -> str:
        """Return the status of what is not as published; 'reduced' comes before 'other data'."""
        if any(fnmatchcase(variant or "", pattern) for pattern in self.reduced):
            return "reduced"
        return "other settings" if on_paper_data else "other data"

    def lacking(self, row: str) -> tuple[str, str]:
        """Return the status of a row without runs, and what is missing or how long it takes."""
        for pattern, why in self.not_run.items():
            if fnmatchcase(f"{self.table}/{row}", pattern):
                return ("no data", why) if isinstance(why, str) else ("too dear", f"~{why:g} h")
        return "not run", ""


def rules_of(table: str) -> Rules:
    """Return what counts as the paper's data in a table, and why its rows are empty."""
    return Rules(table.partition("/")[2], **(papers.settings(table).get("coverage") or {}))


# ------------------------------------------------------------------------------- what was measured


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

    def runs_of(self, every: Iterable[Record]) -> list[Record]:
        """Return the runs that fill the cell, by seed: those on the release, if there are any."""
        runs = list_once(run for run in every if self.fits(run))
        return [run for run in runs if run["data"]["provenance"] == "official"] or runs

    @property
    def command(self) -> str:
        """The command whose runs fill the cell."""
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


def mark(label: str, variant: str | None, on: str | None) -> str:
    """'MNIST', 'tuned', 'fashion_mnist' -> 'MNIST (tuned, ours; on fashion_mnist)'."""
    marks = ([f"{variant}, ours"] if variant else []) + ([f"on {on}"] if on else [])
    return label + (f" ({'; '.join(marks)})" if marks else "")


@dataclass(frozen=True)
class Measured:
    """One number: the runs of a job, all seeds, or of several jobs, all folds, by one metric.

    Attributes:
        jobs: each job with its runs.
        on_paper_data: true if all of it ran on what counts as the paper's data.
        label: the paper's name of the row, with what is ours about it, where it is a line.
    """

    metric: Reference
    jobs: tuple[tuple[Filling, tuple[Record, ...]], ...]
    on_paper_data: bool
    label: str = ""

    def add(self, other: Measured) -> Measured:
        """Return both as one number."""
        on_paper_data = self.on_paper_data and other.on_paper_data
        return Measured(self.metric, self.jobs + other.jobs, on_paper_data)

    @property
    def filling(self) -> Filling:
        """The job, or the first of several."""
        return self.jobs[0][0]

    @cached_property
    def runs(self) -> list[Record]:
        """All runs, by seed; there may be none."""
        return list_once(run for _, runs in self.jobs for run in runs)

    @cached_property
    def values(self) -> list[float]:
        """The metric of each seed, as recorded; with several jobs, the mean of each."""
        column = self.metric.column
        if len(self.jobs) == 1:
            return [run["metrics"][column] for run in self.runs]
        return [mean(run["metrics"][column] for run in runs) for _, runs in self.jobs]

    @property
    def over_folds(self) -> bool:
        """True if each value is a fold's mean: they differ by more than seeds do."""
        return len(self.jobs) > 1

    @property
    def shown(self) -> str:
        """'98.01 ± 0.12 % (n = 3)': mean and deviation; over folds it says so."""
        shown = mean_and_deviation(self.values, self.metric.unit)
        return shown.replace(" (n", " over folds (n") if self.over_folds else shown

    @property
    def scale(self) -> float:
        """Turns a recorded metric into the paper's unit."""
        return 100.0 if self.metric.unit == "%" else 1.0

    @property
    def mean(self) -> float:
        """The mean in the paper's unit."""
        return mean(self.values) * self.scale

    @property
    def privacy(self) -> dict[str, Any]:
        """What the runs spent, of several jobs the one with most tight ε.

        The same for every seed, because no ε depends on data.
        """
        spent = max((run["privacy"] for run in self.runs), key=lambda one: one["epsilon_tight"])
        return {"unit": "patient"} | spent  # records of older versions name no unit

    @property
    def protection(self) -> str:
        """One of `PROTECTIONS`."""
        return protection_of(self.privacy["epsilon_claimed"], self.privacy["epsilon_tight"])

    @property
    def data(self) -> dict[str, Any]:
        """What the runs say of their data; there must be runs."""
        data: dict[str, Any] = self.runs[0]["data"]
        return data

    @property
    def tight(self) -> str:
        """The tight ε of a record, as shown."""
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


def protection_of(claimed: float, tight: float) -> str:
    """Return which of `PROTECTIONS` a claimed and a tight ε are."""
    if math.isfinite(tight):
        return PROTECTIONS[1]
    return PROTECTIONS[2] if math.isfinite(claimed) else PROTECTIONS[0]


def measure(
    numbers: Sequence[Reference], fillings: Sequence[Filling], every: Sequence[Record], rules: Rules
) -> list[Measured]:
    """Return every job by each metric of its row, with the runs that fit it, if any."""
    found = []
    for filling in fillings:
        runs = tuple(filling.runs_of(every))
        published = all(rules.is_published(filling.recipe, run["data"]) for run in runs)
        of_row = (number for number in numbers if number.row == filling.row)
        jobs = ((filling, runs),)
        found += [Measured(metric, jobs, published and not filling.on) for metric in of_row]
    return found


Variant = Mapping[str, Measured]  # by metric


def join(rows: Sequence[Measured]) -> list[Variant]:
    """Return rows by metric, one mapping for each variant and data set."""
    found: dict[tuple[str | None, str | None], dict[str, Measured]] = {}
    for row in rows:
        one = found.setdefault((row.filling.variant, row.filling.on), {})
        before = one.get(row.metric.column)
        one[row.metric.column] = before.add(row) if before else row
    return list(found.values())


# ------------------------------------------------------------------------- the cell and its status


@dataclass(frozen=True)
class Cell:
    """A number of the paper, and what stands beside it.

    Attributes:
        epsilon_printed: as the paper prints it; None where it prints none.
        epsilon_rdp: what it prints by RDP accounting beside it; None where it does not.
        published: the paper's settings; None where they were not run.
        best: the best variant of ours; None where none was run, or none is better.
        rules: of its table.
    """

    metric: Reference
    epsilon_printed: str | None
    epsilon_rdp: str | None
    published: Measured | None
    best: Measured | None
    rules: Rules

    @property
    def measured(self) -> dict[str, Measured]:
        """What was measured, by the name of its column."""
        both = {"as published": self.published, "best of ours": self.best}
        return {name: measured for name, measured in both.items() if measured}

    @property
    def status(self) -> str:
        """One of `STATUSES`."""
        if self.published and self.published.on_paper_data:
            return judge(self.published, self.metric)
        if shown := self.published or self.best:
            return self.rules.status(shown.filling.variant, shown.on_paper_data)
        return self.rules.lacking(self.metric.row)[0]

    @property
    def standing(self) -> Standing:
        """How it counts."""
        judged = self.status in PUBLISHED
        shown = [m for m in (self.published, None if judged else self.best) if m]
        runs = sorted(run["run"][:16] for one in shown for run in one.runs)
        protection = self.published.protection if self.published and judged else ""
        return Standing(self.status, protection, " ".join([self.metric.column, *runs]))

    @property
    def differs(self) -> str:
        """What differs from the paper in the number shown: the data, if other, and the variant."""
        shown = self.best or self.published
        if not shown:
            return ""
        words = [] if shown.on_paper_data else [self.rules.of_data(shown.data["name"])]
        if variant := shown.filling.variant:
            words.append(self.rules.of_variant(variant))
        return "; ".join(word for word in words if word)

    @property
    def reason(self) -> str:
        """Why the cell is empty; empty where it is not."""
        return "" if self.measured else self.rules.lacking(self.metric.row)[1]

    @property
    def difference(self) -> float | None:
        """Ours as published less the paper's; None unless the data is the paper's."""
        ours = self.published
        if not ours or not ours.on_paper_data or self.metric.number is None:
            return None
        return None if math.isnan(ours.mean) else ours.mean - self.metric.number


def judge(ours: Measured, metric: Reference) -> str:
    """Return 'reproduced', 'close' or 'different' (`RULE`).

    A metric that is NaN, or a number that the paper does not print, is 'different'.
    """
    paper = metric.number
    if paper is None or math.isnan(ours.mean):
        return "different"
    point = 1.0 if metric.unit == "%" else 0.01 if metric.column in SHARES else 0.02 * abs(paper)
    seeds = [] if ours.over_folds else ours.values
    spread = 2 * ours.scale * stdev(seeds) if len(seeds) >= 3 else 0.0
    away = abs(ours.mean - paper) - 1e-9
    if away <= max(point, spread):
        return "reproduced"
    return "close" if away <= 2 * point else "different"


def judge_curve(ours: Measured, rules: Rules) -> str:
    """Return the status of a figure's curve; 'as published' if all its jobs were run so."""
    if not ours.runs:
        return rules.lacking(ours.metric.row)[0]
    if not all(runs for _, runs in ours.jobs):
        return "reduced"
    if ours.on_paper_data and not ours.filling.variant:
        return "as published"
    return rules.status(ours.filling.variant, ours.on_paper_data)


def make_cells(numbers: Sequence[Reference], rows: Sequence[Measured], rules: Rules) -> list[Cell]:
    """Return a cell for each number of the paper's table but its ε, in the paper's order.

    Args:
        rows: all that may stand in the table, with or without runs.
    """
    made = []
    for name in dict.fromkeys(number.row for number in numbers):
        printed = {number.column: number for number in numbers if number.row == name}
        claims = [printed.pop(column, None) for column in EPSILON_COLUMNS]
        claim, rdp = (found.value if found else None for found in claims)
        variants = join([row for row in rows if row.filling.row == name and row.runs])
        published, best = _choose(variants, next(iter(printed)), rules)
        for column, metric in printed.items():
            if metric.number is not None:
                pair = published.get(column), best.get(column)
                made.append(Cell(metric, claim, rdp, *pair, rules))
    return made


def _choose(variants: Sequence[Variant], first: str, rules: Rules) -> tuple[Variant, Variant]:
    """Return what was measured with the paper's settings, and the best of ours; {} if nothing.

    Generated data stands in no cell. Of our variants one on the paper's data comes first, then
    the first that `paper.yaml` does not set aside: never the best on the test set. One that has
    more tight ε than the paper's settings, or is worse than those on the same data, is left out.

    Args:
        first: the metric that counts if the headline is not in the table.
    """

    def headline(variant: Variant) -> Measured:
        name = next(iter(variant.values())).runs[0]["headline"]["name"]
        return variant.get(name) or variant[first]

    def score(variant: Variant) -> float:
        sign = -1.0 if headline(variant).metric.column in LESS_IS_BETTER else 1.0
        return sign * headline(variant).mean

    real = [v for v in variants if headline(v).data["provenance"] != "synthetic"]
    real = [v for v in real if not math.isnan(headline(v).mean)]
    published = [v for v in real if headline(v).filling.variant is None]
    published.sort(key=lambda variant: headline(variant).filling.on or "")
    ours = [v for v in real if headline(v).filling.variant is not None]
    ours = [v for v in ours if not rules.is_aside(headline(v).filling.variant)]
    if published:
        own = headline(published[0])
        limit = SAME_EPSILON * own.privacy["epsilon_tight"]
        ours = [v for v in ours if headline(v).privacy["epsilon_tight"] <= limit]
        ours = [
            v
            for v in ours
            if headline(v).data["name"] != own.data["name"] or score(v) > score(published[0])
        ]
    best = min(ours, key=lambda variant: not headline(variant).on_paper_data, default={})
    return (published or [{}])[0], best


@dataclass(frozen=True)
class Verdict:
    """What became of one cell or curve, for `reproduce`: its standing, and why."""

    table: str
    row: str
    metric: str
    standing: Standing
    why: str

    @property
    def verdict(self) -> str:
        """One of `STATUSES`."""
        return self.standing.status


# ---------------------------------------------------------------------------------- how many cells


@dataclass(frozen=True)
class Standing:
    """How a cell or curve counts.

    Attributes:
        status: one of `STATUSES`.
        protection: one of `PROTECTIONS` if it is as published, else empty.
        runs: its metric and the runs that the status speaks of, as text.
    """

    status: str
    protection: str = ""
    runs: str = ""


def count_once(standings: Iterable[Standing]) -> list[Standing]:
    """Return standings in which a run that has filled an earlier cell is `AGAIN`."""
    found, seen = [], set[str]()
    for one in standings:
        found.append(Standing(AGAIN) if one.runs in seen else one)
        if one.status not in EMPTY and one.runs:
            seen.add(one.runs)
    return found


@dataclass(frozen=True)
class Count:
    """How many cells of a table, or curves of a figure, have which status and protection."""

    of: Counter[tuple[str, str]]
    unit: str = "cells"

    @classmethod
    def count(cls, standings: Iterable[Standing], unit: str = "cells") -> Count:
        """Count standings."""
        return cls(Counter((one.status, one.protection) for one in standings), unit)

    @property
    def numbers(self) -> dict[str, int]:
        """The counts by name, as CSV holds them."""
        sums = {
            "cells": self.of.total(),
            "as published": self._sum(PUBLISHED),
            **{name: self._sum(PUBLISHED, name) for name in PROTECTIONS},
            "other settings or data": self._sum(OTHER),
            "empty": self._sum(EMPTY),
        }
        return sums | {status: self._sum([status]) for status in STATUSES[1:]}

    @property
    def sentence(self) -> str:
        """The counts in words: '24 cells: 4 as published (1 not private: ...), 20 with ...'."""
        total, unit = self.of.total(), self.unit if self.of.total() != 1 else self.unit[:-1]
        kinds = [
            f"{number} {name}{self._named(PUBLISHED[1:], name, ': {}')}"
            for name in PROTECTIONS
            if (number := self._sum(PUBLISHED, name))
        ]
        again = self._sum([AGAIN])
        return (
            f"{total} {unit}: {self._sum(PUBLISHED)} as published"
            f"{' ({})'.format('; '.join(kinds)) if kinds else ''}, "
            f"{self._sum(OTHER)} with other settings or data{self._named(OTHER)}, "
            f"{self._sum(EMPTY)} empty{self._named(EMPTY)}"
            f"{f', {again} the same run as in another table' if again else ''}."
        )

    def _sum(self, statuses: Iterable[str], protection: str | None = None) -> int:
        kinds = ("", *PROTECTIONS) if protection is None else (protection,)
        return sum(self.of[status, kind] for status in statuses for kind in kinds)

    def _named(
        self, statuses: Iterable[str], protection: str | None = None, form: str = " ({})"
    ) -> str:
        found = [(self._sum([status], protection), status) for status in statuses]
        words = ", ".join(f"{number} {status}" for number, status in found if number)
        return form.format(words) if words else ""
