"""Build our own tables, GRIDS of tasks by target ε, from results of recipes (`papers/ours.yaml`).

A row of a table is a task. Each row has one printed line or, if the table compares variants (such
as algorithms), one line for each variant. There is one column per target ε, and ∞ is training
without privacy.

Jobs of a recipe fill a line. A job (`Filling`, in `report.cells`) has one target ε and, with
cross-validation, one fold. The runs of a job are those with its experiment digest, which covers
everything but the seed. `Filling.runs_of` leaves out runs on synthetic data, runs on unofficial
data if any run has official data, and runs on other data than the last run's.

With `retained_gain: true`, a table also shows the gain of private training over the row's trivial
`baseline`, as a percentage of the gain of non-private training.

With `compare: VARIANT`, notes below the table compare that variant with the others of its row, by
t-tests that pair runs of the same seed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.privacy.accounting import example_epsilon
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.memory import call_cached
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.records import Privacy, Record
from zdp_bench.report import names, papers
from zdp_bench.report.cells import Filling, deduplicate
from zdp_bench.report.comparisons import Paired, bonferroni, paired_t, show_p, show_threshold
from zdp_bench.report.number_format import mean_and_deviation
from zdp_bench.report.sheet import Sheet
from zdp_bench.report.tables import origin
from zdp_bench.tasks.metric import Metric, describe

# Why a table leaves out a seed
EXCEEDS = "the tight ε exceeds the target"
NO_TARGET = "they are private without a target ε"
UNFINISHED = "not all folds have finished"

LineKey = tuple[str, str | None]  # row and variant
RunsByTarget = dict[float, list[Record]]  # target ε -> the runs of all seeds and folds


@dataclass(frozen=True)
class GridLine:
    """A line of a table: a row, or one variant of it.

    Attributes:
        baseline: Score of the trivial baseline; None if the table does not show the retained gain.
        runs: The runs, one for each seed and fold, by target ε (∞: without privacy). The runs of
            a seed are left out if one of its folds has not finished within the target ε, or if it
            is private without a target ε.
    """

    row: str
    variant: str | None
    baseline: float | None
    runs: RunsByTarget

    @property
    def metric(self) -> Metric:
        """The headline metric, which all runs of a line have in common."""
        first_run = next(iter(self.runs.values()))[0]
        return describe(first_run.headline.name)

    @property
    def display_format(self) -> tuple[float, int, str]:
        """The factor, the number of decimals and the unit with which the metric is shown."""
        metric = self.metric
        if metric.unit:
            digits = 1
        elif metric.is_fraction:
            digits = 3
        else:
            digits = 4
        return metric.scale, digits, metric.unit

    @property
    def private_targets(self) -> list[float]:
        """The target ε of its private runs, the largest first."""
        return sorted((target for target in self.runs if target < math.inf), reverse=True)

    @property
    def privacy_by_target(self) -> dict[float, Privacy]:
        """The privacy by target ε, from the largest target to the smallest.

        Of the runs at a target, it is the privacy of the run with the largest tight ε.
        """
        return {target: _largest_privacy(self.runs[target]) for target in self.private_targets}

    @property
    def unit_counts(self) -> list[int]:
        """The distinct numbers of privacy units (examples or owners) in its private training sets.

        They are in ascending order. They may differ between folds.
        """
        counts: set[int] = set()
        for target in self.private_targets:
            # `records` of a sampling is the number of privacy units that a step draws from.
            counts |= {run.privacy.sampling.records for run in self.runs[target]}
        return sorted(counts)

    @property
    def privacy_unit(self) -> str:
        """Name of the unit that ε protects, such as 'patient'; empty without a private run."""
        first_privacy = next(iter(self.privacy_by_target.values()), None)
        return first_privacy.epsilon_of if first_privacy else ""

    def scores_by_seed(self, target: float) -> dict[int, float]:
        """Return the mean of the test metric over the folds, by seed."""
        folds: dict[int, list[float]] = {}
        for run in self.runs.get(target, []):
            folds.setdefault(run.seed, []).append(float(run.headline.value))
        return {seed: mean(values) for seed, values in folds.items()}

    def retained_gain(self, target: float) -> float | None:
        """Return (private − baseline) / (non-private − baseline) at a target ε.

        None without a baseline, without runs, or if non-private training gains nothing.
        """
        non_private = list(self.scores_by_seed(math.inf).values())
        private = list(self.scores_by_seed(target).values())
        if self.baseline is None or not non_private or not private:
            return None
        whole_gain = self.metric.gain(mean(non_private), self.baseline)
        if whole_gain <= 0:
            return None
        return self.metric.gain(mean(private), self.baseline) / whole_gain


def build(name: str, results: Path, fillings: Sequence[Filling]) -> Sheet:
    """Return one of our own tables.

    Args:
        name: name of the table in `papers/ours.yaml`.
        results: results folder.
        fillings: the jobs of recipes that fill its rows (`experiments.claims.fillings`).

    Raises:
        UserError: No run of the table has finished.
    """
    layout = papers.ours()[name]
    runs_by_line = _group_runs(fillings, records.read_all(results))
    lines = _make_lines(layout, runs_by_line, fillings)
    left_out = _note_seeds_left_out(lines, runs_by_line)
    if not lines:
        missing = "no seed with all folds within its target ε" if runs_by_line else "no run"
        reasons = "".join(f" {note}" for note in left_out)
        raise UserError(
            f"{results}: has {missing} for table {name}.{reasons} `zdp-bench reproduce {name}` "
            "makes missing runs."
        )
    targets = sorted({target for line in lines for target in line.runs}, reverse=True)
    published = papers.published(name)
    has_variants = any(line.variant for line in lines)
    # Tables that show the retained gain also show the number of privacy units that train.
    shows_units = bool(layout.get("retained_gain"))
    cells_of_lines = [
        _cells_of(line, targets, published, has_variants, shows_units) for line in lines
    ]
    notes = [*(layout.get("notes") or ()), *_note_epsilon_of_one_example(lines)]
    notes += left_out
    notes += compare_variants(lines, layout.get("compare"))
    notes += _works_cited(published, papers.works())
    csv_rows = [_csv_row(line, target) for line in lines for target in sorted(line.runs)]
    columns = list(cells_of_lines[0])
    cell_rows = [list(cells.values()) for cells in cells_of_lines]
    return Sheet(layout["title"], columns, cell_rows, notes, origin=origin(name), numbers=csv_rows)


def _group_runs(
    fillings: Sequence[Filling], all_records: Sequence[Record]
) -> dict[LineKey, RunsByTarget]:
    """Group runs by line, then by target ε."""
    runs_by_line: dict[LineKey, RunsByTarget] = {}
    for filling in fillings:
        if filling.substitute:  # a table shows only runs on the recipe's own data set
            continue
        for run in filling.runs_of(all_records):
            by_target = runs_by_line.setdefault((filling.row, filling.variant), {})
            by_target.setdefault(filling.target_epsilon, []).append(run)
    # Jobs that differ only in their seed have one digest, so each of them yields the same runs.
    return {
        key: {target: deduplicate(runs) for target, runs in by_target.items()}
        for key, by_target in runs_by_line.items()
    }


def _make_lines(
    layout: Mapping[str, Any],
    runs_by_line: Mapping[LineKey, RunsByTarget],
    fillings: Sequence[Filling],
) -> list[GridLine]:
    """Return the lines in the order of the table's rows and, within each, of its variants.

    A line without a seed to show is left out.
    """
    rows = layout["rows"]
    num_folds = _count_folds(fillings)
    lines = []
    for (row, variant), by_target in runs_by_line.items():
        baseline = None
        if layout.get("retained_gain"):
            baseline = (rows[row] or {}).get("baseline")
        complete_runs: RunsByTarget = {}
        for target, all_runs in by_target.items():
            runs = _keep_complete_seeds(all_runs, target, num_folds[row, variant, target])
            if runs:
                complete_runs[target] = runs
        if complete_runs:
            lines.append(GridLine(row, variant, baseline, complete_runs))
    variants = list(layout.get("variants") or ())

    def sort_key(line: GridLine) -> tuple[int, int, str]:
        variant = line.variant or ""
        rank = len(variants)  # unlisted variants come last
        if variant in variants:
            rank = variants.index(variant)
        return list(rows).index(line.row), rank, variant

    return sorted(lines, key=sort_key)


def _count_folds(fillings: Sequence[Filling]) -> dict[tuple[str, str | None, float], int]:
    """Return the number of folds of each row, variant and target ε.

    The folds are the digests of the jobs with the same row, variant, target ε and seed. They are
    counted for each seed separately, because a recipe may set the seed of its split to the run's
    seed. The split is part of the digest, so the digests then differ between seeds, but are no
    further folds.
    """
    # row, variant and target ε -> seed -> digests of the jobs
    folds: dict[tuple[str, str | None, float], dict[int, set[str]]] = {}
    for filling in fillings:
        if filling.substitute:
            continue
        cell = filling.row, filling.variant, filling.target_epsilon
        folds_by_seed = folds.setdefault(cell, {})
        folds_by_seed.setdefault(filling.seed, set()).add(filling.digest)
    return {cell: max(map(len, by_seed.values())) for cell, by_seed in folds.items()}


def _keep_complete_seeds(runs: Sequence[Record], target: float, num_folds: int) -> list[Record]:
    """Return the runs within a target ε, of those seeds that have such a run of every fold.

    A mean over only some folds would mislead, because a missing fold may be the hardest one. A run
    exceeds its target ε if it was stopped and took steps again with new noise, because such steps
    count twice.
    """
    fitting = [run for run in runs if not _why_not_counted(run, target)]
    # `_group_runs` keeps one run of each seed and fold.
    num_folds_of_seed = Counter(run.seed for run in fitting)
    return [run for run in fitting if num_folds_of_seed[run.seed] >= num_folds]


def _why_not_counted(run: Record, target: float) -> str:
    """Return why a run does not count at a target ε (∞: without privacy); empty if it counts."""
    if run.privacy.epsilon_tight > target:
        return EXCEEDS
    if math.isinf(target) and run.privacy.epsilon_tight < math.inf:
        return NO_TARGET
    return ""


def _largest_privacy(runs: Sequence[Record]) -> Privacy:
    """Return the privacy of the run with the largest tight ε."""
    return max((run.privacy for run in runs), key=lambda privacy: privacy.epsilon_tight)


def _works_cited(
    published: Mapping[str, Sequence[Mapping[str, Any]]], works: Mapping[int, str]
) -> list[str]:
    """Return a note for each work that a row cites.

    Args:
        published: the published results of each row.
        works: the works, by the numbers with which results cite them.
    """
    cited = sorted({result["work"] for results in published.values() for result in results})
    return [f"[{number}] {works[number]}." for number in cited]


def _cells_of(
    line: GridLine,
    targets: Sequence[float],
    published: Mapping[str, list[dict[str, Any]]],
    has_variants: bool,
    shows_units: bool,
) -> dict[str, str]:
    """Return the cells of a line by column; all lines of a table have the same columns."""
    cells = {"task": line.row}
    if has_variants:
        cells["variant"] = names.variant(line.variant or "")
    cells["ε protects"] = line.privacy_unit
    if shows_units:
        cells["n"] = " or ".join(f"{count:,}" for count in line.unit_counts)
    deltas = sorted({f"{privacy.delta:g}" for privacy in line.privacy_by_target.values()})
    cells["δ"] = ", ".join(deltas)
    cells["metric"] = line.metric.label
    run_counts = sorted({len(runs) for runs in line.runs.values()})
    cells["runs"] = str(run_counts[0])
    if len(run_counts) > 1:
        cells["runs"] = f"{run_counts[0]} to {run_counts[-1]}"
    for target in targets:
        cells[_heading(target)] = _show_values(line, target)
    if published:
        cells["others"] = _cite(published.get(line.row))
    return cells


def _show_values(line: GridLine, target: float) -> str:
    """Return mean, deviation and retained gain: '89.3 ± 0.1 % (98 %)'; empty without a run."""
    scale, digits, unit = line.display_format
    values = list(line.scores_by_seed(target).values())
    if not values:
        return ""
    shown = mean_and_deviation(values, unit, digits, scale, with_count=False)
    retained = line.retained_gain(target)
    if retained is None or math.isinf(target):
        return shown
    return f"{shown} ({100 * retained:.0f} %)"


def _cite(results: list[dict[str, Any]] | None) -> str:
    """Return published results in words: '69.3 % at ε = 3 [1]', or 'none known'."""
    if results is None:  # nobody searched for any
        return ""
    cited = []
    for result in results:
        unit = f" per {result['unit']}" if "unit" in result else ""
        cited.append(f"{result['value']} at ε = {result['epsilon']:g}{unit} [{result['work']}]")
    return ", ".join(cited) or "none known"


def _heading(target: float) -> str:
    return "non-private" if math.isinf(target) else f"ε = {target:g}"


def _csv_row(line: GridLine, target: float) -> dict[str, object]:
    """Return the values of a line at one target ε, by column of the CSV."""
    runs = line.runs[target]
    scores = line.scores_by_seed(target)
    retained = line.retained_gain(target)
    privacy, data = _largest_privacy(runs), runs[0].data
    return {
        "row": line.row,
        "variant": line.variant,
        "recipe": runs[0].recipe,
        "metric": line.metric.name,
        "target_epsilon": target,
        "epsilon_tight": show_epsilon(privacy.epsilon_tight),
        # Despite its name, `epsilon_patient` is the ε of any kind of owner.
        "epsilon_of_owner": show_epsilon(privacy.epsilon_patient),
        "unit": line.privacy_unit,
        "num_units": " ".join(map(str, line.unit_counts)),
        "delta": privacy.delta,
        "mean": round(mean(scores.values()), 6),
        "retained_gain": None if retained is None else round(retained, 4),
        "num_seeds": len(scores),
        "values": " ".join(f"{score:.6g}" for score in scores.values()),
        "seeds": " ".join(map(str, scores)),
        "data": f"{data.name}, {data.provenance}",
        "runs": " ".join(record.run[:16] for record in runs),
    }


@dataclass(frozen=True)
class Comparison:
    """A variant compared with another of its row at one ε, over the seeds that both have.

    Attributes:
        line: the line of the variant.
        other: the line of the other variant.
        target: the target ε.
        test: the test of the differences `line` − `other`.
    """

    line: GridLine
    other: GridLine
    target: float
    test: Paired

    @property
    def is_better(self) -> bool:
        """True if the variant has the better mean."""
        difference = self.test.mean_difference
        return difference < 0 if self.line.metric.less_is_better else difference > 0

    def is_different(self, threshold: float) -> bool:
        """Return True if the test shows a difference.

        If all seeds have the same difference, there is no test: p is 1 if the difference is 0, and
        else NaN, so no difference is shown.
        """
        return self.test.p < threshold  # False for NaN

    def __str__(self) -> str:
        """'ε = 3: +0.5 [+0.1, +0.9] points, p < 0.001'."""
        scale, digits, unit = self.line.display_format
        test = self.test
        difference = f"{scale * test.mean_difference:+.{digits}f}"
        interval = f"[{scale * test.low:+.{digits}f}, {scale * test.high:+.{digits}f}]"
        points = " points" if unit == "%" else ""
        return f"{_heading(self.target)}: {difference} {interval}{points}, p {show_p(test.p)}"


def compare_variants(lines: Sequence[GridLine], chosen: str | None) -> list[str]:
    """Compare the chosen variant with the others of its row, at each ε, by a paired t-test.

    The Bonferroni correction counts all comparisons of the table.
    """
    if chosen is None:
        return []
    comparisons: list[Comparison] = []
    sentences = []
    for line in lines:
        if line.variant != chosen:
            continue
        others = [other for other in lines if other.row == line.row and other.variant != chosen]
        for other in others:
            at_each_epsilon = _compare(line, other)
            if at_each_epsilon:
                shown = "; ".join(map(str, at_each_epsilon))
                sentences.append(f"{line.row}, {line.variant} − {other.variant}. {shown}.")
            comparisons += at_each_epsilon
    if not comparisons:
        return []
    count = len(comparisons)
    threshold = bonferroni(count)
    different = [comparison for comparison in comparisons if comparison.is_different(threshold)]
    num_better = sum(comparison.is_better for comparison in different)
    num_worse = len(different) - num_better
    head = (
        f"Of {count} comparisons, {chosen} is better in {num_better}, worse in {num_worse} and not "
        f"shown to be different in {count - len(different)}: paired t-tests over seeds, threshold "
        f"of p {show_threshold(threshold)} (Bonferroni). Below: mean difference [95 % interval]."
    )
    return [head, *sentences]


def _compare(line: GridLine, other: GridLine) -> list[Comparison]:
    """Compare two lines at each ε that both have, the largest first."""
    comparisons = []
    for target in sorted(line.runs.keys() & other.runs.keys(), reverse=True):
        values, other_values = line.scores_by_seed(target), other.scores_by_seed(target)
        seeds = sorted(values.keys() & other_values.keys())
        test = paired_t([values[seed] for seed in seeds], [other_values[seed] for seed in seeds])
        if test is not None:
            comparisons.append(Comparison(line, other, target, test))
    return comparisons


def _note_epsilon_of_one_example(lines: Sequence[GridLine]) -> list[str]:
    """State the ε of a single example where owners are the unit and have several examples.

    Leaving out an owner moves the sum by at most the clipping bound C, because the owner's share is
    gone. Leaving out one example of an owner replaces the owner's share by another share of norm at
    most C, which moves the sum by up to 2C. So, unlike in group privacy, one example has a larger ε
    than all examples of an owner.
    """
    # ε at each target, such as "15.2, 6.21" -> the rows that share it
    rows_by_epsilons: dict[str, list[str]] = {}
    for line in lines:
        privacies = list(line.privacy_by_target.values())
        if not privacies or not all(map(_has_owners_with_several_examples, privacies)):
            continue
        epsilons = ", ".join(map(_epsilon_of_one_example, privacies))
        rows = rows_by_epsilons.setdefault(epsilons, [])
        if line.row not in rows:  # variants of a row repeat its name
            rows.append(line.row)
    if not rows_by_epsilons:
        return []
    sentences = [f"{', '.join(rows)}: {epsilons}" for epsilons, rows in rows_by_epsilons.items()]
    stated = "; ".join(sentences)
    why = (
        "leaving it out replaces the owner's clipped share by another, at a distance of up to 2C "
        "(C: the clipping norm); leaving out the owner removes a share of at most C"
    )
    return [f"A single example of an owner has a larger ε: {why}. {stated}."]


def _note_seeds_left_out(
    lines: Sequence[GridLine], runs_by_line: Mapping[LineKey, RunsByTarget]
) -> list[str]:
    """State which seeds the table leaves out: their ε is not the target, or they lack a fold."""
    kept_runs = {(line.row, line.variant): line.runs for line in lines}
    left_out: dict[str, list[str]] = {EXCEEDS: [], NO_TARGET: [], UNFINISHED: []}
    for (row, variant), all_runs in runs_by_line.items():
        name = row if variant is None else f"{row}, {variant}"
        for target in sorted(all_runs, reverse=True):
            kept = kept_runs.get((row, variant), {}).get(target, [])
            kept_seeds = {run.seed for run in kept}
            runs_left_out = [run for run in all_runs[target] if run.seed not in kept_seeds]
            # If a run of a seed does not count, the reason is stated, and not the missing fold.
            reasons = {run.seed: UNFINISHED for run in runs_left_out}
            for run in runs_left_out:
                if reason := _why_not_counted(run, target):
                    reasons[run.seed] = reason
            for reason, places in left_out.items():
                seeds = [seed for seed in reasons if reasons[seed] == reason]
                where = name if reason == NO_TARGET else f"{name}, {_heading(target)}"
                if seeds:
                    places.append(f"{where}: {_name_seeds(seeds)}")
    return [
        f"Left out, because {reason}: {'; '.join(places)}."
        for reason, places in left_out.items()
        if places
    ]


def _name_seeds(seeds: Collection[int]) -> str:
    """Return 'seed 1, 2'."""
    return f"seed {', '.join(map(str, sorted(seeds)))}"


def _has_owners_with_several_examples(privacy: Privacy) -> bool:
    """Return True if the privacy unit is an owner, who may have several examples."""
    return privacy.by_owner and privacy.examples_per_patient > 1


def _epsilon_of_one_example(privacy: Privacy) -> str:
    """Return the ε of one of an owner's examples."""
    # ε depends on z, the effective noise multiplier, and not on the shapes of the weights.
    mechanism = Mechanism.of_z(privacy.z, privacy.sampling)
    return show_epsilon(call_cached(example_epsilon, mechanism, privacy.steps, privacy.delta))
