"""Builds tables of our own: what recipes reach at several ε, side by side (`papers/ours.yaml`).

A line is a row, or a variant of one. Its columns are the targets of ε, of the runs whose experiment
digest is that of a job of the recipes that claim it. ε = ∞ is training without privacy. With
`compare: VARIANT`, notes below hold that variant against the others of its row, seed by seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.privacy.accounting import part_epsilon
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.memory import remember
from zdp_bench.records import Privacy, Record
from zdp_bench.report import names, papers
from zdp_bench.report.cells import Filling, list_once
from zdp_bench.report.comparisons import bonferroni, paired_t, show_p
from zdp_bench.report.number_format import epsilon, mean_and_deviation
from zdp_bench.report.sheet import Sheet
from zdp_bench.report.tables import origin
from zdp_bench.tasks.metric import Metric, describe


@dataclass(frozen=True)
class Line:
    """A row, or one variant of it.

    Attributes:
        floor: the metric of knowing nothing; None where no share is shown.
        runs: target ε, ∞ without privacy -> a run for each seed and fold.
    """

    row: str
    variant: str | None
    floor: float | None
    runs: dict[float, list[Record]]

    @property
    def metric(self) -> Metric:
        """The headline metric of its runs."""
        return describe(next(iter(self.runs.values()))[0].headline.name)

    @property
    def form(self) -> tuple[float, int, str]:
        """How its metric is shown: factor, digits, unit."""
        metric, digits = self.metric, 4
        if metric.unit:
            digits = 1
        elif metric.is_share:
            digits = 3
        return metric.scale, digits, metric.unit

    @property
    def spent(self) -> dict[float, Privacy]:
        """What its private runs spent, by target ε, the largest first."""
        targets = sorted((at for at in self.runs if at < math.inf), reverse=True)
        return {at: self.runs[at][0].privacy for at in targets}

    @property
    def owners(self) -> list[int]:
        """How many owners, or examples that have none, its private runs train on; of each size."""
        return sorted(
            {
                run.privacy.sampling.records
                for target, runs in self.runs.items()
                for run in runs
                if target < math.inf
            }
        )

    @property
    def unit(self) -> str:
        """Whose participation ε protects."""
        return next((str(one.epsilon_of) for one in self.spent.values()), "")

    def values(self, target: float) -> dict[int, float]:
        """Return the test metric of each seed, the mean of its folds."""
        found: dict[int, list[float]] = {}
        for run in self.runs.get(target, []):
            found.setdefault(run.seed, []).append(float(run.headline.value))
        return {seed: mean(folds) for seed, folds in found.items()}

    def kept(self, target: float) -> float | None:
        """Return the share of the non-private gain over the floor that is kept, or None."""
        whole, left = (self.values(at).values() for at in (math.inf, target))
        if self.floor is None or not whole or not left:
            return None
        gain = self.metric.gain(mean(whole), self.floor)
        return self.metric.gain(mean(left), self.floor) / gain if gain > 0 else None


def build(name: str, results: Path, fillings: Sequence[Filling]) -> Sheet:
    """Lay out a table of our own from `experiments.claims.fillings`."""
    of, every = papers.ours()[name], records.read_all(results)
    found: dict[tuple[str, str | None], dict[float, list[Record]]] = {}
    for filling in fillings:
        for run in [] if filling.on else filling.runs_of(every):
            target = float(run.config["privacy"].get("target_epsilon") or math.inf)
            at = found.setdefault((filling.row, filling.variant), {})
            at[target] = list_once([*at.get(target, []), run])
    if not found:
        raise UserError(
            f"{results}: has no run of table {name}. `zdp-bench reproduce {name}` makes them."
        )
    rows, order = of["rows"], list(of.get("variants") or ())
    floors = {row: (options or {}).get("floor") for row, options in rows.items()}
    lines = [
        Line(row, variant, floors[row] if of.get("kept") else None, runs)
        for (row, variant), runs in found.items()
    ]
    places = {variant: place for place, variant in enumerate(order)}  # others come behind
    lines.sort(key=lambda one: (places.get(str(one.variant), len(order)), str(one.variant)))
    lines.sort(key=lambda one: list(rows).index(one.row))
    targets = sorted({target for line in lines for target in line.runs}, reverse=True)
    others = papers.published().get(name, {})
    grouped = any(line.variant for line in lines)
    shown = [_show(line, targets, grouped, others) for line in lines]
    cited = sorted({one["work"] for of_row in others.values() for one in of_row})
    notes = [*(of.get("notes") or ()), *_of_parts(lines)]
    notes += compare_variants(lines, of.get("compare"))
    notes += [f"[{number}] {papers.published()['works'][number]}." for number in cited]
    numbers = [_numbers(line, target) for line in lines for target in sorted(line.runs)]
    cells = [[*row.values()] for row in shown]
    return Sheet(of["title"], [*shown[0]], cells, notes, origin(name), numbers)


def _show(
    line: Line, targets: Sequence[float], grouped: bool, others: dict[str, list[dict[str, Any]]]
) -> dict[str, str]:
    """Return the cells of a line by column: '89.3 ± 0.1 % (98 %)', with what is kept."""
    scale, digits, unit = line.form
    cells = {"task": line.row}
    if grouped:
        cells["variant"] = names.algorithm(line.variant or "")
    count = sorted({len(runs) for runs in line.runs.values()})
    cells["ε protects"] = line.unit
    if line.floor is not None:
        cells["n"] = " or ".join(f"{owners:,}" for owners in line.owners)
    cells |= {
        "δ": ", ".join(sorted({f"{one.delta:g}" for one in line.spent.values()})),
        "metric": line.metric.label,
        "runs": f"{count[0]} to {count[-1]}" if len(count) > 1 else str(count[0]),
    }
    for target in targets:
        values = [*line.values(target).values()]
        shown = mean_and_deviation(values, unit, digits, scale) if values else ""
        shown = shown.partition(" (n")[0]
        kept = line.kept(target) if target < math.inf else None
        cells[_head(target)] = shown if kept is None else f"{shown} ({100 * kept:.0f} %)"
    if others:
        cells["others"] = _cite(others.get(line.row))
    return cells


def _cite(results: list[dict[str, Any]] | None) -> str:
    """Return published results in words: '69.3 % at ε = 3 [1]'; None if nobody searched."""
    if results is None:
        return ""
    cited = []
    for result in results:
        unit = f" per {result['unit']}" if "unit" in result else ""
        cited.append(f"{result['value']} at ε = {result['epsilon']:g}{unit} [{result['work']}]")
    return ", ".join(cited) or "none known"


def _head(target: float) -> str:
    return "non-private" if math.isinf(target) else f"ε = {target:g}"


def _numbers(line: Line, target: float) -> dict[str, object]:
    """Return what the CSV holds of a cell: the numbers behind it."""
    runs, values, kept = line.runs[target], line.values(target), line.kept(target)
    privacy, data = runs[0].privacy, runs[0].data
    return {
        "row": line.row,
        "variant": line.variant,
        "recipe": runs[0].recipe,
        "metric": line.metric.name,
        "target_epsilon": target,
        "epsilon_tight": epsilon(privacy.epsilon_tight),
        "epsilon_of_owner": epsilon(privacy.epsilon_patient),
        "unit": line.unit,
        "owners": " ".join(map(str, line.owners)),
        "delta": privacy.delta,
        "mean": round(mean(values.values()), 6),
        "kept": None if kept is None else round(kept, 4),
        "n": len(values),
        "values": " ".join(f"{value:.6g}" for value in values.values()),
        "seeds": " ".join(map(str, values)),
        "data": f"{data.name}, {data.provenance}",
        "runs": " ".join(run.run[:16] for run in runs),
    }


def compare_variants(lines: Sequence[Line], chosen: str | None) -> list[str]:
    """Compare each variant with the others of its row, at each ε, by a paired t-test.

    It is over the seeds that both have. Bonferroni's threshold is that of all comparisons.
    """
    said, gains, tests = [], [], []
    for line, other in product(lines, lines):
        if line.row != other.row or not line.variant == chosen != other.variant:
            continue
        scale, digits, unit = line.form
        words = []
        for target in sorted(line.runs.keys() & other.runs.keys(), reverse=True):
            ours, theirs = line.values(target), other.values(target)
            both = sorted(ours.keys() & theirs.keys())
            test = paired_t([ours[seed] for seed in both], [theirs[seed] for seed in both])
            if test is not None:
                tests.append(test)
                gains.append(line.metric.gain(test.mean, 0.0))
                at = [f"{scale * x:+.{digits}f}" for x in (test.mean, test.low, test.high)]
                points = " points" if unit == "%" else ""
                words.append(
                    f"{_head(target)}: {at[0]} [{at[1]}, {at[2]}]{points}, p {show_p(test.p)}"
                )
        if words:
            said.append(f"{line.row}, {line.variant} − {other.variant}. {'; '.join(words)}.")
    if not tests:
        return []
    threshold = bonferroni(len(tests))
    shown = [gain for gain, test in zip(gains, tests, strict=True) if test.p < threshold]
    better, worse = sum(gain > 0 for gain in shown), sum(gain < 0 for gain in shown)
    head = (
        f"Of {len(tests)} comparisons, {chosen} is better in {better}, worse in {worse} and not "
        f"shown to be different in {len(tests) - better - worse}: paired t-tests over seeds, "
        f"threshold of p {threshold:.2g} (Bonferroni). Below: mean difference [95 % interval]."
    )
    return [head, *said]


def _of_parts(lines: Sequence[Line]) -> list[str]:
    """State the ε of one of several examples, where all of an owner's are drawn as one."""
    told: dict[str, list[str]] = {}
    for line in lines:
        parts = []
        for one in line.spent.values():
            if one.is_of_unit and one.examples_per_patient > 1:
                mechanism = Mechanism.of_z(one.z, one.sampling)
                part = remember(part_epsilon, mechanism, one.steps, one.delta)
                parts.append(epsilon(part))
        if parts and len(parts) == len(line.spent):
            told.setdefault(", ".join(parts), []).append(line.row)
    if not told:
        return []
    found = "; ".join(f"{', '.join(rows)}: {parts}" for parts, rows in told.items())
    why = "as removing it replaces the owner's mean"
    return [f"A single example of an owner has a larger ε, {why}. {found}."]
