"""Builds tables of our own: what recipes reach at several ε, side by side (`papers/ours.yaml`).

A line is a row, or a variant of one. Its columns are the targets of ε, of the runs whose experiment
digest is that of a job of the recipes that claim it. ε = ∞ is training without privacy. With
`compare: VARIANT`, notes below hold that variant against the others of its row, seed by seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.privacy.accounting import part_epsilon
from zdp_bench.privacy.mechanism import Mechanism, Sampling
from zdp_bench.privacy.memory import remember
from zdp_bench.records import Record, is_of_unit
from zdp_bench.report import names, papers
from zdp_bench.report.cells import SHARES, Filling
from zdp_bench.report.comparisons import Paired, bonferroni, paired_t, show_p
from zdp_bench.report.number_format import epsilon, mean_and_deviation
from zdp_bench.report.sheet import Sheet
from zdp_bench.report.tables import Table, origin


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
    def metric(self) -> str:
        """The headline metric of its runs."""
        return str(next(iter(self.runs.values()))[0]["headline"]["name"])

    @property
    def unit(self) -> str:
        """Whose presence ε hides."""
        private = [runs[0] for target, runs in self.runs.items() if target < math.inf]
        return str(private[0]["privacy"]["epsilon_of"]) if private else ""

    @property
    def delta(self) -> str:
        """The δ of its private runs."""
        private = [runs[0]["privacy"] for at, runs in self.runs.items() if at < math.inf]
        return ", ".join(sorted({f"{one['delta']:g}" for one in private}))

    def values(self, target: float) -> list[float]:
        """Return the test metric of each seed, the mean of its folds."""
        found: dict[int, list[float]] = {}
        for run in self.runs.get(target, []):
            found.setdefault(run["seed"], []).append(float(run["headline"]["value"]))
        return [mean(folds) for folds in found.values()]

    def kept(self, target: float) -> float | None:
        """Return the share of the non-private score above the floor that is kept, or None."""
        if self.floor is None or not self.values(target) or not self.values(math.inf):
            return None
        gain = mean(self.values(math.inf)) - self.floor
        return (mean(self.values(target)) - self.floor) / gain if gain > 0 else None


def build(name: str, results: Path, fillings: Sequence[Filling]) -> Table:
    """Lay out a table of our own.

    Args:
        fillings: the jobs of its recipes (see `experiments.claims.fillings`).

    Raises:
        UserError: none of its runs is there.
    """
    of = papers.ours()[name]
    every = records.read_all(results)
    found: dict[tuple[str, str | None], dict[float, dict[tuple[int, Any], Record]]] = {}
    for filling in fillings:
        for run in [] if filling.on else filling.runs_of(every):
            target = run["config"]["privacy"].get("target_epsilon") or math.inf
            cells = found.setdefault((filling.row, filling.variant), {})
            cut = run["seed"], run["config"].get("dataset", {}).get("fold")
            cells.setdefault(float(target), {})[cut] = run
    if not found:
        raise UserError(
            f"{results}: has no run of table {name}. `zdp-bench reproduce {name}` makes them."
        )
    lines = [
        Line(
            row,
            variant,
            (options or {}).get("floor") if of.get("kept") else None,
            {target: list(runs.values()) for target, runs in found[row, variant].items()},
        )
        for row, options in of["rows"].items()
        for variant in sorted((v for r, v in found if r == row), key=lambda v: place(v, of))
    ]
    notes = [*(of.get("notes") or ()), *_of_parts(lines)]
    notes += compare_variants(lines, of.get("compare"))
    notes += _name_works(name)
    targets = sorted({target for line in lines for target in line.runs}, reverse=True)
    grouped = any(line.variant for line in lines)
    heads = ["non-private" if math.isinf(target) else f"ε = {target:g}" for target in targets]
    columns = ["task", *(["variant"] if grouped else [])]
    others = papers.published().get(name, {})
    columns += ["ε hides", "δ", "metric", "runs", *heads, *(["others"] if others else [])]
    rows = []
    for line in lines:
        count = sorted({len(runs) for runs in line.runs.values()})
        seeds = f"{count[0]} to {count[-1]}" if len(count) > 1 else str(count[0])
        named = [line.row, *([names.algorithm(line.variant or "")] if grouped else [])]
        shown = [_show(line, target) for target in targets]
        shown += [_show_others(others.get(line.row, []))] if others else []
        rows.append([*named, line.unit, line.delta, names.metric(line.metric), seeds, *shown])
    numbers = [_numbers(line, target) for line in lines for target in sorted(line.runs)]
    return Table(name, [], Sheet(of["title"], columns, rows, notes, origin(name), numbers))


def place(variant: str | None, of: dict[str, Any]) -> tuple[int, str]:
    """Return what sorts variants: those that the table lists come first, in its order."""
    listed = list(of.get("variants") or ())
    return (listed.index(variant) if variant in listed else len(listed), str(variant))


def compare_variants(lines: Sequence[Line], chosen: str | None) -> list[str]:
    """Compare each variant with the others of its row, at each ε, by a paired t-test.

    Bonferroni's threshold is that of all comparisons of the table.
    """
    pairs = [
        (line, other)
        for line in lines
        for other in lines
        if line.row == other.row and line.variant == chosen != other.variant
    ]
    tests = [_compare(*pair) for pair in pairs]
    every = [test for of_pair in tests for test in of_pair.values()]
    if not every:
        return []
    threshold = bonferroni(len(every))
    better = sum(test.p < threshold and test.mean > 0 for test in every)
    worse = sum(test.p < threshold and test.mean < 0 for test in every)
    said = (
        f"Of {len(every)} comparisons, {chosen} is better in {better}, worse in {worse} and not "
        f"shown to be different in {len(every) - better - worse}: paired t-tests over seeds, "
        f"threshold of p {threshold:.2g} (Bonferroni). Below: mean difference [95 % interval]."
    )
    return [said, *(_say_tests(*pair, of) for pair, of in zip(pairs, tests, strict=True) if of)]


def _compare(line: Line, other: Line) -> dict[float, Paired]:
    """Return the test at each ε, over the seeds that both lines have."""
    found = {}
    for target in sorted(set(line.runs) & set(other.runs), reverse=True):
        ours, theirs = (
            {run["seed"]: float(run["headline"]["value"]) for run in of.runs[target]}
            for of in (line, other)
        )
        seeds = sorted(ours.keys() & theirs.keys())
        test = paired_t([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
        if test is not None:
            found[target] = test
    return found


def _say_tests(line: Line, other: Line, tests: dict[float, Paired]) -> str:
    """Return 'MNIST, complex − channels: non-private +0.3 [+0.1, +0.5] %, p = 0.01; ε = 8 …'."""
    scale, digits, _ = _form(line)
    unit = " points" if line.metric == "accuracy" else ""
    said = []
    for target, test in tests.items():
        mean, low, high = (f"{scale * x:+.{digits}f}" for x in (test.mean, test.low, test.high))
        at = "non-private" if math.isinf(target) else f"ε = {target:g}"
        said.append(f"{at}: {mean} [{low}, {high}]{unit}, p {show_p(test.p)}")
    return f"{line.row}, {line.variant} − {other.variant}. {'; '.join(said)}."


def _of_parts(lines: Sequence[Line]) -> list[str]:
    """State the ε of one of several examples, where all of an owner's are drawn as one."""
    told: dict[str, list[str]] = {}
    for line in lines:
        spent = {at: runs[0]["privacy"] for at, runs in line.runs.items() if math.isfinite(at)}
        if all(is_of_unit(one) and one["examples_per_patient"] > 1 for one in spent.values()):
            parts = ", ".join(_part(spent[at]) for at in sorted(spent, reverse=True))
            told.setdefault(parts, []).append(line.row)
    told.pop("", None)  # of lines without a private run
    if not told:
        return []
    found = "; ".join(f"{', '.join(rows)}: {parts}" for parts, rows in told.items())
    return [f"One of an owner's examples is replaced, not removed, and has a larger ε. {found}."]


def _part(privacy: dict[str, Any]) -> str:
    mechanism = Mechanism.of_z(privacy["z"], Sampling(**privacy["sampling"]))
    return epsilon(remember(part_epsilon, mechanism, privacy["steps"], privacy["delta"]))


def _show_others(results: Sequence[dict[str, Any]]) -> str:
    """Return '81.4 % at ε = 8 [2]' of each result of others."""
    return ", ".join(f"{one['value']} at ε = {one['epsilon']:g} [{one['work']}]" for one in results)


def _name_works(table: str) -> list[str]:
    """Name the works that a table's results of others are from."""
    every = papers.published()
    cited = {one["work"] for results in every.get(table, {}).values() for one in results}
    return [f"[{number}] {every['works'][number]}." for number in sorted(cited)]


def _form(line: Line) -> tuple[float, int, str]:
    """Return how a line's metric is shown: factor, digits, unit."""
    if line.metric == "accuracy":
        return 100.0, 1, "%"
    return 1.0, 3 if line.metric in SHARES else 4, ""


def _show(line: Line, target: float) -> str:
    """Return '89.3 ± 0.1 % (98 %)': mean, deviation over seeds, and what is kept."""
    values = line.values(target)
    if not values:
        return ""
    _, digits, unit = _form(line)
    shown = mean_and_deviation(values, unit, digits).partition(" (n")[0]
    kept = line.kept(target) if math.isfinite(target) else None
    return shown if kept is None else f"{shown} ({100 * kept:.0f} %)"


def _numbers(line: Line, target: float) -> dict[str, object]:
    """Return what the CSV holds of a cell: the numbers behind it."""
    runs, values = line.runs[target], line.values(target)
    privacy, kept = runs[0]["privacy"], line.kept(target)
    owner = privacy.get("epsilon_patient")
    return {
        "row": line.row,
        "variant": line.variant,
        "recipe": runs[0]["recipe"],
        "metric": line.metric,
        "target_epsilon": target,
        "epsilon_tight": epsilon(privacy["epsilon_tight"]),
        "epsilon_of_owner": epsilon(owner) if owner is not None else "",
        "unit": line.unit,
        "delta": privacy["delta"],
        "mean": round(mean(values), 6),
        "kept": None if kept is None else round(kept, 4),
        "n": len(values),
        "values": " ".join(f"{value:.6g}" for value in values),
        "seeds": " ".join(str(seed) for seed in dict.fromkeys(run["seed"] for run in runs)),
        "data": f"{runs[0]['data']['name']}, {runs[0]['data']['provenance']}",
        "runs": " ".join(run["run"][:16] for run in runs),
    }
