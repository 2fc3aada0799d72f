"""Whether the rows of a table differ by more than chance, in sentences under it: every pair of rows that ran on the same data.

ROC-AUCs are compared by DeLong's test on the same test records, seed by seed; the largest p of all seeds is told, so that no
lucky seed makes a difference. Other metrics are compared over seeds by Student's t-test. Both are held to Bonferroni's threshold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from zdp_bench import records
from zdp_bench.records import Record
from zdp_bench.report.significance import bonferroni, delong, students_t

LARGEST = 4  # rows; ten activations would make 45 pairs


@dataclass(frozen=True)
class Family:
    """The rows of one metric that ran on the same data: label -> runs."""

    metric: str
    rows: dict[str, list[Record]]

    def sentences(self, results: Path) -> list[str]:
        """The range of every row with several seeds, then every pair that can be compared; of a large family nothing."""
        if not 2 <= len(self.rows) <= LARGEST:
            return []
        told = []
        for label, runs in self.rows.items():
            values = [run["metrics"][self.metric] for run in runs]
            if len(values) > 1 and not any(map(math.isnan, values)):
                spread = f"{min(values):.3f} to {max(values):.3f} over {len(values)} seeds"
                told.append(f"{label}: mean {sum(values) / len(values):.3f}, range {spread}.")
        pairs = list(combinations(self.rows, 2))
        for first, second in pairs:
            test, p, seeds = self._compare(self.rows[first], self.rows[second], results)
            if math.isnan(p):
                continue
            verdict = "different" if p < bonferroni(len(pairs)) else "not shown to be different"
            told.append(
                f"{first} against {second}: {verdict}, {test} p {written(p)} (seeds {', '.join(map(str, seeds))}; threshold "
                f"{bonferroni(len(pairs)):.3g} for {len(pairs)} comparison{'s' if len(pairs) > 1 else ''})."
            )
        return told

    def _compare(
        self, first: list[Record], second: list[Record], results: Path
    ) -> tuple[str, float, list[int]]:
        """The test's name, p and the seeds it rests on; p is NaN where nothing can be compared."""
        if self.metric != "roc_auc":
            p = students_t(
                [run["metrics"][self.metric] for run in first],
                [run["metrics"][self.metric] for run in second],
            )
            return "Student's t", p, sorted({run["seed"] for run in (*first, *second)})
        found = {}
        for a in first:
            for b in second:
                if a["seed"] == b["seed"] and a["data"]["test"] == b["data"]["test"]:
                    one, other = (_scores(run, results) for run in (a, b))
                    if one and other and (one[0] == other[0]).all() and _two_of_each(one[0]):
                        found[a["seed"]] = delong(one[0], one[1], other[1]).p
        return "DeLong", max(found.values(), default=math.nan), sorted(found)


def _two_of_each(truth: np.ndarray) -> bool:
    """Fewer of a class have no ROC-AUC to compare: an excerpt's test part may hold one record."""
    return 2 <= truth.sum() <= len(truth) - 2


def _scores(run: Record, results: Path) -> tuple[np.ndarray, np.ndarray] | None:
    return records.read_scores(records.folder(results, run["recipe"], run["run"]) / "scores.csv")


def written(p: float) -> str:
    """'= 0.0123', '< 0.001'."""
    return "< 0.001" if p < 0.001 else f"= {p:.3g}"
