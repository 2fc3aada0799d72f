"""Says in sentences below a table which of its rows differ by more than chance.

Every pair of rows that ran on the same data is compared. ROC-AUCs are compared by DeLong's test on
the same test examples, seed by seed; of all seeds the largest p counts, so that no lucky seed makes
a difference. Other metrics are compared over seeds by Student's t-test. Both are held to
Bonferroni's threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    rows: dict[str, Sequence[Record]]

    def sentences(self, results: Path) -> list[str]:
        """Return the range of every row with several seeds, then the comparison of every pair.

        A family of more than four rows, or of one, has no sentences.
        """
        if not 2 <= len(self.rows) <= LARGEST:
            return []
        said = []
        for label, runs in self.rows.items():
            values = [run["metrics"][self.metric] for run in runs]
            if len(values) > 1 and not any(map(math.isnan, values)):
                spread = f"{min(values):.3f} to {max(values):.3f} over {len(values)} seeds"
                said.append(f"{label}: mean {sum(values) / len(values):.3f}, range {spread}.")
        pairs = list(combinations(self.rows, 2))
        threshold = bonferroni(len(pairs))
        family = f"{len(pairs)} comparison{'s' if len(pairs) > 1 else ''}"
        for first, second in pairs:
            test, p, seeds = self._compare(self.rows[first], self.rows[second], results)
            if math.isnan(p):
                continue
            verdict = "different" if p < threshold else "not shown to be different"
            said.append(
                f"{first} against {second}: {verdict}, {test} p {show_p(p)} (seeds "
                f"{', '.join(map(str, seeds))}; threshold {threshold:.3g} for {family})."
            )
        return said

    def _compare(
        self, first: Sequence[Record], second: Sequence[Record], results: Path
    ) -> tuple[str, float, list[int]]:
        """Return the test's name, p and the seeds compared; p is NaN where nothing can be."""
        if self.metric != "roc_auc":
            values = [[run["metrics"][self.metric] for run in runs] for runs in (first, second)]
            seeds = {run["seed"] for run in (*first, *second)}
            return "Student's t", students_t(*values), sorted(seeds)
        p_of_seed = {}
        for a in first:
            for b in second:
                if a["seed"] == b["seed"] and a["data"]["test"] == b["data"]["test"]:
                    one, other = _scores(a, results), _scores(b, results)
                    if one and other and (one[0] == other[0]).all() and _has_both(one[0]):
                        p_of_seed[a["seed"]] = delong(one[0], one[1], other[1]).p
        return "DeLong", max(p_of_seed.values(), default=math.nan), sorted(p_of_seed)


def _has_both(truth: np.ndarray) -> bool:
    """True with two examples of each class: a ROC-AUC of fewer has no variance to compare."""
    return 2 <= truth.sum() <= len(truth) - 2


def _scores(run: Record, results: Path) -> tuple[np.ndarray, np.ndarray] | None:
    return records.read_scores(records.folder(results, run["recipe"], run["run"]) / "scores.csv")


def show_p(p: float) -> str:
    """'= 0.0123', '< 0.001'."""
    return "< 0.001" if p < 0.001 else f"= {p:.3g}"
