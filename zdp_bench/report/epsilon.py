"""`zdp-bench epsilon`: the ε that five papers quote, what reproduces it, and what it tightly is. No data, no training.

What the papers state stands in `papers/epsilon.csv`, one line a quoted ε and
reading of it. Each line becomes two things: a `Claim`,
which its convention (an accountant by name) turns into the ε the paper would print; and a `Mechanism`, the release as the paper
describes it, from which the tight ε follows. Where a paper states a target and no σ, σ is calibrated to the target first.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.table import Table as RichTable

from zdp_bench import assets
from zdp_bench.privacy.accountants import Claim, claimed_epsilon
from zdp_bench.privacy.accounting import patient_interval, tight_epsilon, tight_interval
from zdp_bench.privacy.calibration import calibrate
from zdp_bench.privacy.mechanism import Block, Mechanism, NoiseKind, Sampling, Scheme
from zdp_bench.records import write_text
from zdp_bench.report.formats import as_csv, rounded
from zdp_bench.report.number_format import epsilon as shown
from zdp_bench.report.number_format import interval

COLUMNS = (
    "paper",
    "where",
    "what",
    "parameters",
    "ε printed",
    "ε reproduced",
    "by",
    "verdict",
    "ε tight",
    "factor",
    "ε tight if Poisson",
    "ε tight per patient",
)

NOTES = (
    "ε reproduced: by the accountant named beside it, fed what the paper states. Reproduced: its digits, rounded or truncated, "
    "are the printed ones. Calibrated: the paper states a target and no σ, so σ is the one that accountant gives the target.",
    "ε tight: the privacy loss distribution of the release as the paper describes it, a proven upper bound. Factor: tight over "
    "printed. Batches of fixed size, drawn without replacement, can only hide WHICH record is there: a neighbour is "
    "a replaced record and moves the sum by 2C. No exact law is known of them: the first number is what two data sets that exist "
    "are told apart by, the second is the proven bound. "
    "'If Poisson' is the same noise under Poisson sampling, records added or removed.",
    "zeta_dp_2021: its Theorems 1 and 2 give circular noise of variance σ² the privacy of σ² on each part; z is σ/√2 before the "
    "sum's move is counted. Sampling as in its A.3 (uniform without replacement).",
    "dp_dfa_2020: z = σ·m/C, since its section 4.2 defines C for a modified record. If C bounds one record's share instead, z is "
    "half of that. The captions stand for CIFAR-10 too, but count 60,000 records there, where it has 50,000.",
    "zeta_dp_2024: a patient has 20 slices of 4 sequences, 80 records. Its guarantees are 'per patient', but nothing says how; "
    "per patient is what 80 separately clipped and sampled records give where σ meets the target per record.",
    "gredp_2024: with complex noise exactly DP-SGD at z = σ/√2; with real noise in the frequency domain half of the gradient is "
    "released without any. Each of its 15 ε is listed twice, once with either noise. Epochs (30) are not stated. Its ε 'around "
    "0.31 at the beginning' of a training that ends at 2 (4.2.1) names no epoch and is not listed; at that σ one step has 0.504.",
    "Hyper-parameter search is not counted in any ε.",
)


@dataclass(frozen=True)
class Quoted:
    """One ε as a paper quotes it: a line of `papers/epsilon.csv`, empty fields None.

    Attributes:
        noise: real, circular (variance σ² in all), per_component (σ² on each part), real_on_complex, or none. An ε with
            real_on_complex is GReDP's, read for the second time: it prints each once, and describes two noises.
        sigma: None where only a target is stated.
        sensitivity: where σ is the noise on a batch's mean: how far a MODIFIED record moves the batch's sum.
        convention: the accountant that reproduces the printed digits, or the one the paper says it used.
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


@dataclass(frozen=True)
class Row:
    """What became of a quoted ε; None where a number does not apply."""

    quoted: Quoted
    sigma: float | None
    z: float
    sample_rate: float | None
    steps: int | None
    reproduced: float
    verdict: Literal["reproduced", "not reproduced", "calibrated"]
    tight: float
    tight_at_least: float
    factor: float | None
    tight_poisson: float | None
    tight_patient: float | None
    tight_patient_at_least: float | None


def quoted() -> list[Quoted]:
    """The ε quoted in the five papers, in the papers' order."""
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
    """The papers' table, computed."""
    return [_row(line) for line in quoted()]


def _row(q: Quoted) -> Row:
    if q.noise == "none":
        return Row(
            q,
            None,
            0.0,
            None,
            None,
            math.inf,
            "reproduced",
            math.inf,
            math.inf,
            None,
            None,
            None,
            None,
        )
    if not (q.records and q.epochs and q.delta and q.convention and q.sampling):
        raise ValueError(
            f"papers/epsilon.csv: the line of {q.paper}, {q.place}, {q.label} lacks a number"
        )
    rate = q.sample_rate or (q.batch_size or 0) / q.records
    steps = q.epochs * (q.records // q.batch_size) if q.batch_size else round(q.epochs / rate)
    claim = Claim(
        q.sigma or 0.0, rate, steps, q.delta, q.records, q.epochs, q.batch_size, q.sensitivity
    )
    verdict: Literal["reproduced", "not reproduced", "calibrated"]
    if q.sigma is None:
        claim = dataclasses.replace(
            claim, noise_multiplier=calibrate(float(q.printed), q.convention, claim)
        )
        verdict = "calibrated"
    reproduced = claimed_epsilon(q.convention, claim)
    if q.sigma is not None:
        verdict = "reproduced" if same_digits(q.printed, reproduced) else "not reproduced"
    mechanism = described(q, claim.noise_multiplier, q.sampling, rate)
    at_least, tight = tight_interval(mechanism, steps, q.delta)
    per_patient = q.records_per_patient
    patient = _patient(mechanism, per_patient, steps, q.delta) if per_patient else (None, None)
    poisson = described(q, claim.noise_multiplier, "poisson", rate)
    return Row(
        q,
        claim.noise_multiplier,
        mechanism.z,
        rate,
        steps,
        reproduced,
        verdict,
        tight,
        at_least,
        tight / float(q.printed.lstrip("<")),
        None if q.sampling == "poisson" else tight_epsilon(poisson, steps, q.delta),
        patient[1],
        patient[0],
    )


def described(q: Quoted, sigma: float, scheme: Scheme, sample_rate: float) -> Mechanism:
    """The release as the paper describes it, in units of the clipping bound."""
    assert q.records
    batch = sample_rate * q.records
    # Where the paper's C is the move of a MODIFIED record, one record's share is half of it, and σ sits on the mean.
    bound, std = (q.sensitivity / 2, sigma * batch) if q.sensitivity else (1.0, sigma)
    return mechanism_of(q.noise, bound, std, Sampling(scheme, sample_rate, batch, q.records))


def mechanism_of(noise: str, bound: float, std: float, sampling: Sampling) -> Mechanism:
    """The release of one block, by what a paper calls its noise; see `Quoted.noise`."""
    kinds: dict[str, tuple[str, float, NoiseKind]] = {
        "real": ("float32", std, "real"),
        "per_component": ("complex64", std, "circular"),
        "circular": ("complex64", std / math.sqrt(2), "circular"),
        "real_on_complex": ("complex64", std, "real_on_complex"),
    }
    dtype, part, kind = kinds[noise]
    return Mechanism((Block("gradient", (1,), dtype, bound, part, kind),), sampling)


_patient = lru_cache(maxsize=None)(patient_interval)


def same_digits(printed: str, value: float) -> bool:
    """Whether `value` prints as `printed`, rounded or truncated to as many decimals; '<1' means less than 1."""
    if printed.startswith("<"):
        return value < float(printed[1:])
    decimals = len(printed.partition(".")[2])
    truncated = math.floor(value * 10**decimals + 1e-9) / 10**decimals
    return f"{value:.{decimals}f}" == printed or f"{truncated:.{decimals}f}" == printed


def _cells(row: Row) -> tuple[str, ...]:
    q = row.quoted
    parameters = "no noise"
    if row.steps is not None and row.sigma is not None and row.sample_rate is not None:
        rate, sampling = (
            f"{row.sample_rate:.3g}",
            "Poisson" if q.sampling == "poisson" else "uniform",
        )
        parameters = f"σ {row.sigma:.4g}, q {rate}, {row.steps:,} steps, δ {q.delta:g}, {sampling}, z {row.z:.3g}"
    return (
        q.paper,
        q.place,
        q.label,
        parameters,
        q.printed.replace("inf", "∞"),
        _beside(q.printed, row.reproduced),
        q.convention or "",
        row.verdict,
        interval(row.tight_at_least, row.tight),
        "" if row.factor is None else f"{shown(row.factor)}",
        shown(row.tight_poisson),
        interval(row.tight_patient_at_least, row.tight_patient),
    )


def _beside(printed: str, value: float) -> str:
    """`value` with one decimal more than is printed, so that rounding and truncation show."""
    return "∞" if math.isinf(value) else f"{value:.{len(printed.partition('.')[2]) + 1}f}"


def as_rich(table: list[Row]) -> RichTable:
    """The papers' table on a terminal."""
    made = RichTable(
        title=_title(table),
        title_justify="left",
        caption="\n".join(NOTES),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    widths = {
        "what": 19,
        "parameters": 27,
        "ε printed": 7,
        "ε reproduced": 10,
        "by": 15,
        "verdict": 10,
        "ε tight": 7,
        "factor": 6,
    }
    for column in ("where", *COLUMNS[2:]):
        right = column.startswith("ε") or column == "factor"
        made.add_column(
            column,
            justify="right" if right else "left",
            width=widths.get(column, 8 if right else 12),
            overflow="fold",
        )
    for row in table:
        paper, where, *rest = _cells(row)
        made.add_row(f"{paper} {where}", *rest)
    return made


def _title(table: list[Row]) -> str:
    counts = {
        verdict: sum(row.verdict == verdict for row in table)
        for verdict in ("reproduced", "not reproduced", "calibrated")
    }
    printed = sum(row.quoted.noise != "real_on_complex" for row in table)
    verdicts = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    return f"{printed} ε of five papers in {len(table)} readings: {verdicts}"


def as_markdown(table: list[Row]) -> str:
    """The papers' table as Markdown."""
    lines = [f"# {_title(table)}", "", "`zdp-bench epsilon` made this; do not edit.", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in table]
    return "\n".join([*lines, "", *(f"- {note}" for note in NOTES)]) + "\n"


def plain(table: list[Row]) -> list[dict[str, object]]:
    """The numbers behind the table, one dictionary a row, to six digits; ∞ as "inf"."""
    return [
        {
            key: rounded(value)
            for key, value in (vars(row.quoted) | vars(row)).items()
            if key not in ("quoted", "delta")
        }
        | {"delta": row.quoted.delta}
        for row in table
    ]


def write(table: list[Row], results: Path) -> list[Path]:
    """Write `results/tables/epsilon.md` and `.csv`."""
    paths = [results / "tables" / "epsilon.md", results / "tables" / "epsilon.csv"]
    write_text(paths[0], as_markdown(table))
    write_text(paths[1], as_csv(plain(table)))
    return paths
