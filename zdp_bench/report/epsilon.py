"""`zdp-bench epsilon`: every ε that five papers quote, what reproduces it, and what it tightly is.

No data, no training. `papers/epsilon.csv` holds what the papers state, one line for each quoted ε
and reading of it. A line becomes a `Claim`, which an accountant turns into the ε that the paper
would print, and a `Mechanism`, the release as the paper describes it, which has the tight ε. Where
a paper states a target and no σ, σ is calibrated to the target first.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from rich import box
from rich.table import Table as RichTable

from zdp_bench import assets
from zdp_bench.privacy.accountants import Claim, claimed_epsilon
from zdp_bench.privacy.accounting import patient_interval, tight_epsilon, tight_interval
from zdp_bench.privacy.calibration import calibrate
from zdp_bench.privacy.mechanism import Block, Mechanism, NoiseKind, Sampling, Scheme
from zdp_bench.report import papers
from zdp_bench.report.number_format import epsilon as shown
from zdp_bench.report.number_format import interval, rounded
from zdp_bench.report.sheet import Sheet

# Each column, and its width on the terminal, where paper and place share one.
WIDTHS = {
    "paper": 0,
    "where": 12,
    "what": 19,
    "parameters": 27,
    "ε printed": 7,
    "ε reproduced": 10,
    "by": 15,
    "verdict": 10,
    "ε tight": 7,
    "factor": 6,
    "ε tight if Poisson": 8,
    "ε tight per patient": 8,
}

READING = (
    "ε reproduced: by the accountant named beside it, fed what the paper states. Reproduced: its "
    "digits, rounded or truncated, are the printed ones. Calibrated: the paper states a target and "
    "no σ, so σ is the one that accountant gives the target.",
    "ε tight: the privacy loss distribution of the release as the paper describes it, a proven "
    "upper bound. Factor: tight over printed. Batches of fixed size, drawn without replacement, "
    "can only hide WHICH record is there: a neighbour is a replaced record and moves the sum by "
    "2C. No exact law is known of them: the first number is what two data sets that exist are told "
    "apart by, the second is the proven bound. 'If Poisson' is the same noise under Poisson "
    "sampling, records added or removed.",
)

Verdict = Literal["reproduced", "not reproduced", "calibrated"]


@dataclass(frozen=True)
class Quoted:
    """One ε as a paper quotes it: a line of `papers/epsilon.csv`, empty fields None.

    Attributes:
        noise: real, circular (variance σ² in all), per_component (σ² on each part),
            real_on_complex, or none. An ε with real_on_complex is GReDP's, read for the second
            time: the paper prints each once, and describes two noises.
        sigma: None where only a target is stated.
        sensitivity: where σ is the noise on a batch's mean: how far a MODIFIED record moves the
            batch's sum.
        convention: the accountant that reproduces the printed digits, or the one the paper says it
            used.
    """

    paper: str
    place: str
    label: str
    dataset: str
    noise: str
    sampling: Scheme | None
    sigma: float | None
    sensitivity: float | None
    batch_size: int | None
    sample_rate: float | None
    epochs: int | None
    records: int | None
    records_per_patient: int | None
    delta: float | None
    printed: str
    convention: str | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of a quoted ε; None where a number does not apply."""

    quoted: Quoted
    sigma: float | None = None
    z: float = 0.0
    sample_rate: float | None = None
    steps: int | None = None
    reproduced: float
    verdict: Verdict
    tight: float
    tight_at_least: float
    factor: float | None = None
    tight_poisson: float | None = None
    tight_patient: float | None = None
    tight_patient_at_least: float | None = None


def quoted() -> list[Quoted]:
    """Read the quoted ε, in the papers' order."""
    text = (assets.PAPERS / "epsilon.csv").read_text(encoding="utf-8")
    numbers: dict[str, Callable[[str], Any]] = {
        **dict.fromkeys(("sigma", "sensitivity", "sample_rate", "delta"), float),
        **dict.fromkeys(("batch_size", "epochs", "records", "records_per_patient"), int),
    }

    def typed(field: str, value: str) -> Any:
        return numbers.get(field, str)(value) if value else None

    return [
        Quoted(**{field: typed(field, value) for field, value in line.items()})
        for line in csv.DictReader(io.StringIO(text))
    ]


def rows() -> list[Row]:
    """Compute what became of every quoted ε."""
    return [_row(line) for line in quoted()]


def _row(q: Quoted) -> Row:
    inf = math.inf
    if q.noise == "none":
        return Row(quoted=q, reproduced=inf, verdict="reproduced", tight=inf, tight_at_least=inf)
    if not (q.records and q.epochs and q.delta and q.convention and q.sampling):
        line = f"{q.paper}, {q.place}, {q.label}"
        raise ValueError(f"papers/epsilon.csv: the line of {line} lacks a number")
    rate = q.sample_rate or (q.batch_size or 0) / q.records
    steps = q.epochs * (q.records // q.batch_size) if q.batch_size else round(q.epochs / rate)
    claim = Claim(
        q.sigma or 0.0, rate, steps, q.delta, q.records, q.epochs, q.batch_size, q.sensitivity
    )
    if q.sigma is None:
        sigma = calibrate(float(q.printed), q.convention, claim)
        claim = dataclasses.replace(claim, noise_multiplier=sigma)
    reproduced = claimed_epsilon(q.convention, claim)
    verdict: Verdict = "reproduced" if same_digits(q.printed, reproduced) else "not reproduced"
    mechanism = _mechanism(q, claim.noise_multiplier, q.sampling, rate)
    at_least, tight = tight_interval(mechanism, steps, q.delta)
    many = q.records_per_patient
    patient = _patient_interval(mechanism, many, steps, q.delta) if many else (None, None)
    poisson = _mechanism(q, claim.noise_multiplier, "poisson", rate)
    return Row(
        quoted=q,
        sigma=claim.noise_multiplier,
        z=mechanism.z,
        sample_rate=rate,
        steps=steps,
        reproduced=reproduced,
        verdict="calibrated" if q.sigma is None else verdict,
        tight=tight,
        tight_at_least=at_least,
        factor=tight / float(q.printed.lstrip("<")),
        tight_poisson=None if q.sampling == "poisson" else tight_epsilon(poisson, steps, q.delta),
        tight_patient=patient[1],
        tight_patient_at_least=patient[0],
    )


_patient_interval = lru_cache(maxsize=None)(patient_interval)


def _mechanism(q: Quoted, sigma: float, scheme: Scheme, sample_rate: float) -> Mechanism:
    """Return the release as the paper describes it, in units of the clipping bound."""
    assert q.records
    batch = sample_rate * q.records
    bound, std = 1.0, sigma
    if q.sensitivity:  # of a MODIFIED record, so twice one record's share; and σ is on the mean
        bound, std = q.sensitivity / 2, sigma * batch
    return mechanism_of(q.noise, bound, std, Sampling(scheme, sample_rate, batch, q.records))


def mechanism_of(noise: str, bound: float, std: float, sampling: Sampling) -> Mechanism:
    """Return the release of one block, by what a paper calls its noise (see `Quoted.noise`)."""
    kinds: dict[str, tuple[str, float, NoiseKind]] = {
        "real": ("float32", std, "real"),
        "per_component": ("complex64", std, "circular"),
        "circular": ("complex64", std / math.sqrt(2), "circular"),
        "real_on_complex": ("complex64", std, "real_on_complex"),
    }
    dtype, part, kind = kinds[noise]
    return Mechanism((Block("gradient", (1,), dtype, bound, part, kind),), sampling)


def same_digits(printed: str, value: float) -> bool:
    """True if `value` prints as `printed`, rounded or truncated to as many decimals.

    '<1' means less than 1.
    """
    if printed.startswith("<"):
        return value < float(printed[1:])
    decimals = len(printed.partition(".")[2])
    truncated = math.floor(value * 10**decimals + 1e-9) / 10**decimals
    return printed in (f"{value:.{decimals}f}", f"{truncated:.{decimals}f}")


def sheet(table: list[Row]) -> Sheet:
    """Return the papers' table ready to show."""
    verdicts = [row.verdict for row in table]
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in get_args(Verdict))
    printed = sum(row.quoted.noise != "real_on_complex" for row in table)
    return Sheet(
        f"{printed} ε of five papers in {len(table)} readings: {counts}",
        list(WIDTHS),
        [_cells(row) for row in table],
        _notes(table),
        "`zdp-bench epsilon` made this; do not edit.",
        [_numbers(row) for row in table],
    )


def _notes(table: list[Row]) -> list[str]:
    found = {paper: papers.epsilon_note(paper) for paper in (row.quoted.paper for row in table)}
    of_papers = [f"{paper}: {note}" for paper, note in found.items() if note]
    return [*READING, *of_papers, "Hyper-parameter search is not counted in any ε."]


def as_rich(sheet: Sheet) -> RichTable:
    """Return the sheet for a terminal: narrow columns, paper and place in one."""
    rows = [[f"{paper} {where}", *rest] for paper, where, *rest in sheet.rows]
    shown = dataclasses.replace(sheet, columns=sheet.columns[1:], rows=rows).as_rich()
    shown.box, shown.pad_edge = box.SIMPLE_HEAD, False
    for column, name in zip(shown.columns, sheet.columns[1:], strict=True):
        column.header, column.no_wrap = name, False
        column.width, column.overflow = WIDTHS[name], "fold"
        column.justify = "right" if name.startswith("ε") or name == "factor" else "left"
    return shown


def _cells(row: Row) -> list[str]:
    q = row.quoted
    parameters = "no noise"
    if row.steps is not None:
        drawn = "Poisson" if q.sampling == "poisson" else "uniform"
        parameters = (
            f"σ {row.sigma:.4g}, q {row.sample_rate:.3g}, {row.steps:,} steps, δ {q.delta:g}, "
            f"{drawn}, z {row.z:.3g}"
        )
    # One decimal more than is printed, so that rounding and truncation show
    decimals = len(q.printed.partition(".")[2]) + 1
    return [
        q.paper,
        q.place,
        q.label,
        parameters,
        q.printed.replace("inf", "∞"),
        "∞" if math.isinf(row.reproduced) else f"{row.reproduced:.{decimals}f}",
        q.convention or "",
        row.verdict,
        interval(row.tight_at_least, row.tight),
        shown(row.factor),
        shown(row.tight_poisson),
        interval(row.tight_patient_at_least, row.tight_patient),
    ]


def _numbers(row: Row) -> dict[str, object]:
    """Return the numbers behind a row, six digits each; δ last."""
    both = vars(row.quoted) | vars(row) | {"quoted": None, "delta": None}
    kept = {key: value for key, value in both.items() if key not in ("quoted", "delta")}
    return rounded(kept | {"delta": row.quoted.delta})
