"""A line of a paper's table: one of its numbers, and the result of our runs of one variant.

A job of a recipe fills a row (`Filling`), and the jobs of one variant yield one number (`Line`).
The first line of a row has the paper's own settings, even if it was not run. Lines with a variant
are ours. `papers/PAPER/paper.yaml` states which data is the paper's and what a row lacks (`Rules`).
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from statistics import mean

from zdp_bench import records
from zdp_bench.records import Data, Epoch, Privacy, Record
from zdp_bench.report import names, papers
from zdp_bench.report.number_format import deviation, interval
from zdp_bench.report.papers import Axes, Reference
from zdp_bench.tasks.metric import Metric, describe

PUBLISHED = ("as published", "reproduced", "close", "different")  # of a curve: only the first
OTHER = ("other settings", "other data", "reduced")
FAILED = ("did not learn",)
EMPTY = ("no data", "not run")

# What the commas before 'OPTION=VALUE' separate, whatever a value in quotes contains
OPTIONS = re.compile(r'(?:"(?:\\.|[^"\\])*"|[^",]|,(?! \w+=))+')
EPSILON_COLUMNS = ("epsilon", "epsilon_rdp")

RULE = (
    "Reproduced: our mean is within one point of the paper's number or, with three or more seeds, "
    "within two standard deviations. Close: within two points. Different: otherwise. A point is "
    "1 %, or 0.01 for metrics between 0 and 1; for NMSE and PSNR, it is 2 % of the number. Did not "
    "learn: most runs end within a point of guessing, or their records warn of it."
)


@dataclass(frozen=True)
class Rules:
    """Which data is the paper's, and what rows lack: `coverage` in `paper.yaml`.

    Attributes:
        table: N of PAPER/N.
        published: for each data set, or 'recipe=NAME', a prefix of 'PROVENANCE, NOTES'. A record
            whose data has this prefix is on the paper's data.
        differs: for each data set or variant, what differs from the paper, in a few words.
        reduced: patterns of variants with less training, or a smaller network, than in the paper.
        lacks: for each pattern of 'N/ROW', what is missing to run the row. The first match is used.
    """

    table: str
    published: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)
    reduced: Sequence[str] = ()
    lacks: Mapping[str, str] = field(default_factory=dict)

    def is_published(self, recipe: str, data: Data) -> bool:
        """Return True if a record's data is the data that the paper used."""
        prefix = self.published.get(f"recipe={recipe}", self.published.get(data.name))
        if prefix is None:
            return False
        return f"{data.provenance}, {data.notes}".startswith(prefix)

    def lacking(self, row: str) -> str:
        """Return what is missing to run a row; empty if nothing is."""
        for pattern, reason in self.lacks.items():
            if fnmatchcase(f"{self.table}/{row}", pattern):
                return reason
        return ""


def rules_of(table: str) -> Rules:
    """Return the rules of a table."""
    number = table.partition("/")[2]
    coverage = papers.settings(table).get("coverage") or {}
    return Rules(number, **coverage)


@dataclass(frozen=True)
class Filling:
    """A job of a recipe that fills a row, as the recipe is now.

    Attributes:
        recipe: name of the recipe.
        overrides: overrides of the job, without `recipe=`.
        row: the row that it fills.
        variant: what differs from the paper; None for the paper's settings.
        digest: experiment digest of its runs.
        substitute: the data set that replaces the recipe's own, as 'NAME, OPTION=VALUE, ...'; None
            if there is none.
        target_epsilon: target ε of its runs; ∞ if they have none.
        seed: the job's own seed, which its runs may override. Folds of one result share it.
        seconds: time of a run, estimated from the fastest similar record; None if there is none.
    """

    recipe: str
    overrides: tuple[str, ...]
    row: str
    variant: str | None
    digest: str
    substitute: str | None = None
    target_epsilon: float = math.inf
    seed: int = 0
    seconds: float | None = field(default=None, compare=False)

    def runs_of(self, all_records: Iterable[Record]) -> list[Record]:
        """Return the runs that fill the row, sorted by seed.

        They are the runs with this experiment digest, whatever their recipe. The digest covers
        everything that a run computes except its seed, so runs from before a change of the recipe
        do not count. If some of them used official data, the others do not count either. Nor do
        runs on other data than the last one, such as a derived data set that has changed since. Of
        the runs of a seed, which had other starting weights or code of a plug-in, the last counts.
        """
        runs = deduplicate(
            run
            for run in all_records
            if run.experiment == self.digest and run.data.provenance != "synthetic"
        )
        kept = keep_counted(runs)
        seeds = [str(run.seed) for run in prefer_official(runs) if run not in kept]
        if seeds:
            records.warn_left_out(
                f"seed {', '.join(seeds)} of recipe {self.recipe}, on other data than its last "
                "run. Delete these runs, and run the recipe again with those seeds."
            )
        by_start = sorted(kept, key=lambda run: run.measured.started_utc)
        last_runs = {run.seed: run for run in by_start}
        for run in kept:
            if run is not last_runs[run.seed]:
                records.warn_left_out(
                    f"run {run.run[:16]} of recipe {run.recipe}, because a later run of seed "
                    f"{run.seed} had other starting weights or other code of a plug-in. Delete the "
                    "one that is not to count."
                )
        return sorted(last_runs.values(), key=lambda run: run.seed)

    @property
    def command(self) -> str:
        """The command that starts these runs."""
        words = ["zdp-bench run", f"recipe={self.recipe}", *self.overrides]
        if self.substitute:
            name, *options = map(str.strip, OPTIONS.findall(self.substitute))
            words.append(shlex.quote(f"dataset={name}"))
            words += [shlex.quote(f"dataset.{option}") for option in options]
        return " ".join(words)


def deduplicate(runs: Iterable[Record]) -> list[Record]:
    """Return runs sorted by seed, each once, even if two recipes share it."""
    by_digest: dict[str, Record] = {}
    for run in sorted(runs, key=lambda run: (run.seed, run.recipe, run.run)):
        by_digest.setdefault(run.run, run)
    return list(by_digest.values())


def prefer_official(runs: Sequence[Record]) -> Sequence[Record]:
    """Return the runs of an experiment that used official data; if there are none, all."""
    return [run for run in runs if run.data.provenance == "official"] or runs


def keep_counted(runs: Sequence[Record]) -> list[Record]:
    """Return the runs of an experiment that fill a row, on official data if any are."""
    return keep_last_data(prefer_official(runs))


def keep_last_data(runs: Sequence[Record]) -> list[Record]:
    """Return the runs of an experiment that used the same data as its last run."""
    if not runs:
        return []
    last = max(runs, key=lambda run: run.measured.started_utc)
    return [run for run in runs if run.data.digest == last.data.digest]


def privacy_after(privacy: Privacy, epoch: Epoch) -> Privacy:
    """Return the ε of a run after one of its epochs. That of an owner is not known."""
    return replace(
        privacy,
        epsilon_claimed=_claimed(privacy, epoch.step, epoch.number or 0),
        epsilon_tight=math.nan if epoch.epsilon_tight is None else epoch.epsilon_tight,
        epsilon_tight_at_least=None,
        epsilon_patient=None,
        epsilon_patient_at_least=None,
        steps=epoch.step,
    )


def show_tight(privacy: Privacy) -> str:
    """Return the tight ε as text: '3.4', or '3.4 (image 7.27)' if a unit owns several examples."""
    tight = interval(privacy.epsilon_tight_at_least, privacy.epsilon_tight)
    owner = interval(privacy.epsilon_patient_at_least, privacy.epsilon_patient)
    return tight if owner in ("", tight) else f"{tight} ({privacy.unit} {owner})"


@dataclass(frozen=True)
class Line:
    """A number of the paper, or a point of its curve, and the runs of one variant.

    Attributes:
        number: the paper's number. Its value is empty if the text states none.
        jobs: the jobs with their runs, one of each digest. Several jobs are the folds of one
            number, or a curve.
        rules: rules of the table.
        variant: what differs from the paper, as the recipe names it; None for the paper's settings.
        substitute: substitute data set, as in `Filling`.
        axes: axes of a figure, whose lines are points of curves; None for a table.
        x: x of the point.
        claims: the ε that the paper prints here, and another one by Rényi accounting.
        values: metric of each seed, or mean of each fold, in the paper's unit.
        spent: privacy of the run with the largest ε; None without a run. At a point of a curve, it
            is that after the epoch.
    """

    number: Reference
    jobs: tuple[tuple[Filling, tuple[Record, ...]], ...]
    rules: Rules
    variant: str | None = None
    substitute: str | None = None
    axes: Axes | None = None
    x: str = ""
    claims: tuple[str, str] = ("", "")
    values: tuple[float, ...] = ()
    spent: Privacy | None = None

    @cached_property
    def runs(self) -> list[Record]:
        """All runs, sorted by seed; may be empty."""
        return deduplicate(run for _, runs in self.jobs for run in runs)

    @property
    def is_papers(self) -> bool:
        """True if the line has the paper's settings and the recipe's own data."""
        return not self.variant and not self.substitute

    @property
    def over_folds(self) -> bool:
        """True if each value is the mean of a fold. Folds differ more than seeds do."""
        return self.axes is None and len(self.jobs) > 1

    @property
    def on_paper_data(self) -> bool:
        """True if every run used the paper's data."""
        if self.substitute:
            return False
        for job, runs in self.jobs:
            if not all(self.rules.is_published(job.recipe, run.data) for run in runs):
                return False
        return True

    @property
    def lacking(self) -> str:
        """What is missing to fill an empty line; empty if nothing is."""
        return "" if self.runs else self.rules.lacking(self.number.row)

    @cached_property
    def status(self) -> str:
        """One of `PUBLISHED`, `OTHER`, `FAILED` or `EMPTY`."""
        if not self.runs:
            return "no data" if self.lacking else "not run"
        failed = [run for run in self.runs if did_not_learn(run)]
        if 2 * len(failed) > len(self.runs):
            return "did not learn"
        variant = self.variant or ""
        if any(fnmatchcase(variant, pattern) for pattern in self.rules.reduced):
            return "reduced"
        if not all(runs for _, runs in self.jobs):  # part of a curve, or of the folds
            return "reduced"
        if not self.on_paper_data:
            return "other data"
        if self.variant:
            return "other settings"
        if self.axes:
            return "as published"
        return judge(self.number, self.values, self.over_folds)

    @property
    def difference(self) -> float | None:
        """Our mean minus the paper's number; None unless the line is as published."""
        if not self.values or self.status not in PUBLISHED or self.number.number is None:
            return None
        difference = mean(self.values) - self.number.number
        return None if math.isnan(difference) else difference

    @property
    def differs(self) -> str:
        """What differs from the paper: the data, if other, and the variant."""
        words = []
        if self.runs and not self.on_paper_data:
            data = str(self.runs[0].data.name)
            words.append(self.rules.differs.get(data, f"on {names.words(data)}"))
        if self.variant:
            words.append(self.rules.differs.get(self.variant, self.variant))
        return "; ".join(filter(None, words))

    @property
    def command(self) -> str:
        """The command that starts its runs; empty if there is no recipe."""
        if not self.jobs:
            return ""
        fillings = [filling for filling, _ in self.jobs]
        first = fillings[0]
        if len(fillings) == 1:
            return first.command
        words = ["zdp-bench run -m", f"recipe={first.recipe}"]
        for override in first.overrides:
            if all(override in filling.overrides for filling in fillings):
                words.append(override)
        return " ".join(words)


def did_not_learn(run: Record) -> bool:
    """Return True if a record has a warning, or its headline is at most a point above guessing.

    NaN has not learned. Any other score has, if no guess is known.
    """
    if run.warning:
        return True
    metric = describe(run.headline.name)
    guess = guess_of(run, metric)
    if guess is None:
        return math.isnan(run.headline.value)
    return not metric.is_above(run.headline.value, guess, metric.point(guess))


def guess_of(run: Record, metric: Metric) -> float | None:
    """Return the score of a constant answer or, in reconstruction, of the zero-filled image.

    None if it is unknown. Classes are assumed to be of equal size.
    """
    zero_filled = run.metrics.get(f"zero_filled_{metric.name}")
    if zero_filled is not None:
        return float(zero_filled)
    classes = run.data.example.get("outputs", 0)
    if metric.name == "accuracy" and classes > 1:
        return 1 / classes
    return metric.guess


def judge(number: Reference, values: Sequence[float], over_folds: bool = False) -> str:
    """Return 'reproduced', 'close' or 'different' by `RULE`.

    The result is 'different' if our mean is not finite, or if the paper prints no number.

    Args:
        number: the paper's number.
        values: our values, in the paper's unit.
        over_folds: whether the values are means of folds, whose spread is then ignored. Default:
            False.
    """
    if number.number is None or not math.isfinite(mean(values)):
        return "different"
    point = 1.0
    if number.unit != "%":
        point = describe(number.column).point(number.number)
    spread = 0.0
    if len(values) >= 3 and not over_folds:
        spread = 2 * deviation(values)
    difference = abs(mean(values) - number.number) - 1e-9  # so that rounding is no difference
    if difference <= max(point, spread):
        return "reproduced"
    return "close" if difference <= 2 * point else "different"


def make_lines(
    numbers: Sequence[Reference],
    fillings: Sequence[Filling],
    all_records: Sequence[Record],
    rules: Rules,
    axes: Axes | None = None,
) -> list[Line]:
    """Return the lines of a table in the order of the paper.

    The lines of a number are its own settings, then variants. Numbers 'METRIC at X' are points of
    the curve METRIC.

    Args:
        numbers: the paper's numbers.
        fillings: the jobs that fill its rows.
        all_records: all records.
        rules: rules of the table.
        axes: axes of a figure. Default: None, for a table.
    """
    printed: Printed = {}
    for number in numbers:
        column, _, x = number.column.partition(" at ")
        printed[number.row, column, x] = number
    jobs = [(filling, tuple(filling.runs_of(all_records))) for filling in fillings]
    rows = list(dict.fromkeys(number.row for number in numbers))
    heads = []
    for number in numbers:
        if number.column not in EPSILON_COLUMNS and " at " not in number.column:
            heads.append(number)
    lines: list[Line] = []
    for number in sorted(heads, key=lambda head: rows.index(head.row)):
        jobs_of_row = [(filling, runs) for filling, runs in jobs if filling.row == number.row]
        for (variant, substitute), jobs_of_line in sorted(_by_variant(jobs_of_row).items()):
            measured_jobs = tuple(
                (filling, _keep_measured(runs, number.column, axes))
                for filling, runs in jobs_of_line
            )
            line = Line(number, measured_jobs, rules, variant or None, substitute or None, axes)
            if line.runs or line.is_papers:
                lines += _points(line, printed)
    return lines


Printed = dict[tuple[str, str, str], Reference]  # by row, column and x
JobRuns = tuple[Filling, tuple[Record, ...]]


def _by_variant(jobs: Iterable[JobRuns]) -> dict[tuple[str, str], list[JobRuns]]:
    """Group the jobs of a row by variant and substitute. The paper's own settings come first.

    Of jobs with one digest, which have the same runs, a group has only the first.
    """
    groups: dict[tuple[str, str], dict[str, JobRuns]] = {("", ""): {}}
    for filling, runs in jobs:
        key = filling.variant or "", filling.substitute or ""
        groups.setdefault(key, {}).setdefault(filling.digest, (filling, runs))
    return {key: list(jobs_of_group.values()) for key, jobs_of_group in groups.items()}


def _points(line: Line, printed: Printed) -> list[Line]:
    """Return a line with its values or, for a curve, a line for each x of our runs or the text.

    Args:
        line: the line, without values.
        printed: the paper's numbers.
    """
    row, metric = line.number.row, line.number.column
    scale = 100.0 if line.number.unit == "%" else 1.0
    measured = _measure_curve(line, printed) if line.axes else {"": _measure_line(line)}
    unprinted = replace(line.number, value="")
    points = []
    for x in sorted(measured, key=lambda x: float(x or 0)) or [""]:
        values, spent = measured.get(x, ([], []))
        claims = []
        for column in EPSILON_COLUMNS:
            claim = printed.get((row, column, x))
            claims.append(claim.value if claim else "")
        point = replace(
            line,
            number=printed.get((row, metric, x), unprinted),
            x=x,
            claims=(claims[0], claims[1]),
            values=tuple(scale * value for value in values),
            spent=max(spent, key=lambda spent: spent.epsilon_tight, default=None),
        )
        points.append(point)
    return points


Measured = tuple[list[float], list[Privacy]]  # the metric of each run, and its ε


def _measure_line(line: Line) -> Measured:
    """Return the metric of each seed or, if jobs are folds of a number, the mean of each job."""
    metric = line.number.column
    values_of_jobs = []
    for _, runs in line.jobs:
        if runs:
            values_of_jobs.append([run.metrics[metric] for run in runs])
    spent = [run.privacy for run in line.runs]
    if line.over_folds:
        return [mean(values) for values in values_of_jobs], spent
    return (values_of_jobs[0] if values_of_jobs else []), spent


def _measure_curve(line: Line, printed: Printed) -> dict[str, Measured]:
    """Return the metrics of the runs by x, including any x that only the text states."""
    assert line.axes is not None
    measured: dict[str, Measured] = {}
    for run in line.runs:
        for x_value, value, spent in _measure(run, line.number.column, line.axes.x):
            values_at_x, spent_at_x = measured.setdefault(f"{x_value:g}", ([], []))
            values_at_x.append(value)
            spent_at_x.append(spent)
    if line.is_papers:
        for row, _, x in printed:
            if row == line.number.row and x:
                measured.setdefault(x, ([], []))
    return measured


def _measure(run: Record, metric: str, axis: str) -> Iterator[tuple[float, float, Privacy]]:
    """Yield x, metric and ε of a run or, if x is the epoch, of each of its epochs."""
    if axis != "epoch":
        settings = [run.get(path) for path in axis.split(" or ")]
        x = next(setting for setting in settings if setting is not None)
        yield float(x), run.metrics[metric], run.privacy
    else:
        for epoch in run.epochs:
            if epoch.number is not None:
                yield epoch.number, epoch.metrics[metric], privacy_after(run.privacy, epoch)


def _keep_measured(runs: Sequence[Record], metric: str, axes: Axes | None) -> tuple[Record, ...]:
    """Return the runs that have a metric at each x of a figure; warn of others."""
    kept = []
    for run in runs:
        lacking = _lacking(run, metric, axes)
        if lacking:
            records.warn_left_out(f"run {run.run[:16]} of recipe {run.recipe}: {lacking}.")
        else:
            kept.append(run)
    return tuple(kept)


def _lacking(run: Record, metric: str, axes: Axes | None) -> str:
    """Return what a run lacks for a line, and how to add it; empty if it lacks nothing."""
    if metric not in run.metrics:
        return f"its record has no {metric}. Carry it out again with force=true"
    if axes is None or axes.x != "epoch":
        return ""
    epochs = [epoch for epoch in run.epochs if epoch.number is not None]
    is_complete = run.has_each_epoch and all(metric in epoch.metrics for epoch in epochs)
    if epochs and is_complete:
        return ""
    return (
        f"it has no {metric} after each epoch, as a figure needs. Carry it out again with "
        "force=true execution.evaluate=each"
    )


def _claimed(privacy: Privacy, step: int, epoch: int) -> float:
    """Return the ε that a run's accountant would claim if the run had ended at this step."""
    if privacy.noise_multiplier is None:
        return math.nan
    # Imported here, because printing a table needs neither dp-accounting nor torch.
    from zdp_bench.privacy.accountants import Claim, recall_claimed_epsilon

    sampling = privacy.sampling
    claim = Claim(
        privacy.noise_multiplier,
        sampling.sample_rate,
        sampling.steps_of_one(step),
        privacy.delta,
        sampling.records,
        epoch,
    )
    return recall_claimed_epsilon(privacy.claimed_by, claim)
