"""One line for each number of a paper's table: as published, our best, what differs, the status.

`papers/PAPER/paper.yaml` says which data is the paper's and why a row was not run
(`papers.Coverage`). A run without a variant has the paper's settings. A run with one is ours: one
variant stands in the line, the others in `tableN_runs.md`. No test metric decides which one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean, stdev

from zdp_bench.report.number_format import mean_and_deviation
from zdp_bench.report.papers import Coverage, Reference
from zdp_bench.report.rows import Row

COLUMNS = (
    "row",
    "metric",
    "paper",
    "as published",
    "Δ",
    "best of ours",
    "what differs",
    "ε printed / tight",
    "status",
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


@dataclass(frozen=True)
class Pool:
    """Runs that stand in a line as one number: all seeds of a job, or all folds of a sweep."""

    rows: tuple[Row, ...]

    @cached_property
    def values(self) -> list[float]:
        """The metric of each seed; with several jobs (folds), the mean of each."""
        if len(self.rows) == 1:
            return self.rows[0].values
        return [mean(row.values) for row in self.rows]

    @property
    def mean(self) -> float:
        """The mean in the paper's unit."""
        return mean(self.values) * self.rows[0].scale

    @property
    def published_data(self) -> bool:
        """True if all of it ran on what counts as the paper's data."""
        return all(row.published_data for row in self.rows)

    @property
    def data(self) -> str:
        """The name of the data set."""
        return str(self.rows[0].runs[0]["data"]["name"])

    @property
    def tight(self) -> float:
        """The tight ε of a record, the largest of the jobs."""
        return max(row.privacy["epsilon_tight"] for row in self.rows)

    @property
    def epsilons(self) -> str:
        """The tight ε; behind it that of a patient or another unit, if that differs: '3.4 (image
        7.26)'.
        """
        row = max(self.rows, key=lambda row: row.privacy["epsilon_tight"])
        value, _, unit = row.per_unit.partition(" (")
        return f"{row.tight} ({unit[:-1]} {value})" if unit else row.tight

    @property
    def cell(self) -> str:
        """The number as shown, in brackets if it is not on the paper's data."""
        shown = mean_and_deviation(self.values, self.rows[0].metric.unit)
        return shown if self.published_data else f"[{shown}]"


@dataclass(frozen=True)
class Line:
    """A number of the paper, and what stands beside it.

    Attributes:
        epsilon_printed: as the paper prints it; None where it prints none.
        epsilon_rdp: what it prints by RDP accounting beside it; None where it does not.
        own: the paper's settings; None where they were not run.
        best: the best variant of ours; None where none was run, or none is better than `own`.
        differs: what differs from the paper in the number shown, in a few words.
        lacking: why the paper's settings were not run: a status, and what is missing or how long.
    """

    metric: Reference
    epsilon_printed: str | None
    epsilon_rdp: str | None
    own: Pool | None
    best: Pool | None
    differs: str
    lacking: tuple[str, str]

    @property
    def status(self) -> str:
        """One of `coverage.STATUSES`."""
        if self.own and self.own.published_data:
            return judge(self.own, self.metric)
        shown = self.own or self.best
        if not shown:
            return self.lacking[0]
        return "reduced" if shown.published_data else "other data"

    @property
    def difference(self) -> float | None:
        """Ours as published less the paper's; None unless the data is the paper's."""
        if not self.own or not self.own.published_data or self.metric.number is None:
            return None
        return None if math.isnan(self.own.mean) else self.own.mean - self.metric.number

    @property
    def cells(self) -> dict[str, str]:
        """What each column shows."""
        difference = "" if self.difference is None else f"{self.difference:+.3g}"
        if self.difference is not None and self.metric.unit == "%":
            difference = f"{self.difference:+.2f}"
        why = "" if self.own or self.best else self.lacking[1]
        shown = (
            self.metric.label,
            self.metric.column.replace("_", " "),
            self.metric.printed,
            self.own.cell if self.own else "",
            difference,
            self.best.cell if self.best else "",
            self.differs,
            self._epsilons(),
            f"{self.status} ({why})" if why else self.status,
        )
        return dict(zip(COLUMNS, shown, strict=True))

    def _epsilons(self) -> str:
        printed = (self.epsilon_printed or "–").replace("inf", "∞")
        printed += f" ({self.epsilon_rdp} by RDP)" if self.epsilon_rdp else ""
        spent = list(dict.fromkeys(pool.epsilons for pool in (self.own, self.best) if pool))
        if len(spent) == 2:
            spent = [spent[0], f"best {spent[1]}"]
        if not spent or spent == [printed] == ["∞"]:
            return printed
        return f"{printed} / {', '.join(spent)}"

    @property
    def numbers(self) -> dict[str, object]:
        """What the CSV holds: the numbers behind the cells, unrounded."""
        numbers: dict[str, object] = {
            "row": self.metric.row,
            "label": self.metric.label,
            "metric": self.metric.column,
            "unit": self.metric.unit,
            "paper": self.metric.number,
            "status": self.status,
            "reason": "" if self.own or self.best else self.lacking[1],
            "difference": None if self.difference is None else round(self.difference, 6),
            "differs": self.differs,
            "epsilon_printed": self.epsilon_printed,
            "epsilon_rdp": self.epsilon_rdp,
        }
        for name, pool in (("published", self.own), ("best", self.best)):
            numbers |= dict.fromkeys(f"{name}_{column}" for column in POOLED)
            if pool:
                numbers |= {f"{name}_{k}": v for k, v in _numbers(pool).items()}
        return numbers


POOLED = (
    "mean",
    "deviation",
    "n",
    "paper_data",
    "recipe",
    "variant",
    "data",
    "provenance",
    "epsilon_claimed",
    "epsilon_tight",
    "epsilon_unit",
    "unit",
)


def _numbers(pool: Pool) -> dict[str, object]:
    first = pool.rows[0]
    spread = stdev(pool.values) * first.scale if len(pool.values) > 1 else None
    values = (
        round(pool.mean, 6),
        None if spread is None else round(spread, 6),
        len(pool.values),
        pool.published_data,
        first.filling.recipe,
        first.filling.variant,
        pool.data,
        first.provenance,
        first.privacy["epsilon_claimed"],
        pool.tight,
        first.privacy.get("epsilon_patient"),
        first.privacy["unit"],
    )
    return dict(zip(POOLED, values, strict=True))


def judge(own: Pool, metric: Reference) -> str:
    """Return 'reproduced', 'close' or 'different' (`RULE`).

    A metric that is NaN, or a number that the paper does not print, is 'different'.
    """
    paper = metric.number
    if paper is None or math.isnan(own.mean):
        return "different"
    point = 1.0 if metric.unit == "%" else 0.01 if metric.column in SHARES else 0.02 * abs(paper)
    scale = own.rows[0].scale
    spread = 2 * scale * stdev(own.values) if len(own.values) >= 3 else 0.0
    away = abs(own.mean - paper) - 1e-9
    if away <= max(point, spread):
        return "reproduced"
    return "close" if away <= 2 * point else "different"


def lines(numbers: Sequence[Reference], rows: Sequence[Row], rules: Coverage) -> list[Line]:
    """Return a line for each number of the paper's table but its ε, in the paper's order.

    Args:
        rows: all that may stand in the table, with or without runs.
    """
    made = []
    for name in dict.fromkeys(number.row for number in numbers):
        printed = {number.column: number for number in numbers if number.row == name}
        claims = [printed.pop(column, None) for column in EPSILON_COLUMNS]
        claim, rdp = (found.value if found else None for found in claims)
        pools = _pools([row for row in rows if row.filling.row == name and row.runs])
        own, best = _choose(pools, next(iter(printed)), rules)
        for column, metric in printed.items():
            if metric.number is None:
                continue
            pair = own.get(column) if own else None, best.get(column) if best else None
            made.append(
                Line(metric, claim, rdp, *pair, _differs(*pair, rules), rules.lacking(name))
            )
    return made


def _pools(rows: Sequence[Row]) -> list[dict[str, Pool]]:
    """Return the rows with runs as {metric: pool}, one mapping for each variant and data set."""
    found: dict[tuple[str | None, str | None], dict[str, list[Row]]] = {}
    for row in rows:
        key = row.filling.variant, row.filling.on
        found.setdefault(key, {}).setdefault(row.metric.column, []).append(row)
    return [{column: Pool(tuple(many)) for column, many in pool.items()} for pool in found.values()]


def _choose(
    pools: Sequence[Mapping[str, Pool]], first: str, rules: Coverage
) -> tuple[Mapping[str, Pool] | None, Mapping[str, Pool] | None]:
    """Return the pool of the paper's settings and the best of ours.

    Generated data stands in no line. Of our variants one on the paper's data comes first, then
    the first that `paper.yaml` does not set aside: never the best on the test set. One that has
    more tight ε than the paper's settings, or is worse than those on the same data, is left out.

    Args:
        first: the metric that counts if the headline is not in the table.
    """

    def headline(pool: Mapping[str, Pool]) -> Pool:
        name = next(iter(pool.values())).rows[0].runs[0]["headline"]["name"]
        return pool.get(name) or pool[first]

    def score(pool: Mapping[str, Pool]) -> float:
        sign = -1.0 if headline(pool).rows[0].metric.column in LESS_IS_BETTER else 1.0
        return sign * headline(pool).mean

    real = [pool for pool in pools if headline(pool).rows[0].provenance != "synthetic"]
    real = [pool for pool in real if not math.isnan(headline(pool).mean)]
    published = [pool for pool in real if headline(pool).rows[0].as_published]
    published.sort(key=lambda pool: headline(pool).rows[0].filling.on or "")
    own = published[0] if published else None
    ours = [pool for pool in real if not headline(pool).rows[0].as_published]
    ours = [pool for pool in ours if not rules.is_aside(headline(pool).rows[0].filling.variant)]
    if own:
        limit, data = SAME_EPSILON * headline(own).tight, headline(own).data
        ours = [pool for pool in ours if headline(pool).tight <= limit]
        ours = [p for p in ours if headline(p).data != data or score(p) > score(own)]
    return own, min(ours, key=lambda pool: not headline(pool).published_data, default=None)


def _differs(own: Pool | None, best: Pool | None, rules: Coverage) -> str:
    """Return what differs from the paper: the data, if it is other, and the variant."""
    shown = best or own
    if not shown:
        return ""
    words = [] if shown.published_data else [rules.of_data(shown.data)]
    if variant := shown.rows[0].filling.variant:
        words.append(rules.of_variant(variant))
    return "; ".join(word for word in words if word)
