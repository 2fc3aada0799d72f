"""`zdp-bench epsilon`: every ε that five papers quote, and the ε of numbers of your own.

No data, no training. `papers/epsilon.csv` holds what the papers state, one line for each quoted ε
and reading of it. A line becomes a `Claim`, which an accountant turns into the ε that the paper
would print, and a `Mechanism`, the release as the paper describes it, which has the tight ε. Where
a paper states a target and no σ, σ is calibrated to the target first. Of your own numbers every
accountant says its ε at a σ, or the σ for a target ε.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal, NamedTuple, get_args

from pydantic import TypeAdapter

from zdp_bench import assets
from zdp_bench.errors import UserError, require
from zdp_bench.privacy.accountants import Claim, answer_for_mechanisms, claimed_epsilon
from zdp_bench.privacy.accounting import (
    example_epsilon,
    patient_epsilon,
    patient_interval,
    tight_epsilon,
    tight_interval,
)
from zdp_bench.privacy.calibration import calibrate, solve
from zdp_bench.privacy.mechanism import (
    LEAST_NOISE,
    MOST,
    MOST_NOISE,
    Block,
    Mechanism,
    NoiseKind,
    Sampling,
    Scheme,
)
from zdp_bench.privacy.memory import call_cached
from zdp_bench.privacy.statement import question, require_delta
from zdp_bench.privacy.statement import show_epsilon as shown
from zdp_bench.report import papers
from zdp_bench.report.number_format import interval, rounded
from zdp_bench.report.sheet import Sheet

COLUMNS = (
    *("paper", "where", "what", "parameters", "ε printed", "ε reproduced", "by", "verdict"),
    *("ε tight", "factor", "ε tight if Poisson", "ε tight per patient"),
)

READING = (
    "ε reproduced: from the accountant named beside it and the numbers in the paper. Reproduced: "
    "rounded or truncated, it has the printed digits. Calibrated: the paper states a target but no "
    "σ, so we use the σ for which that accountant gives the target.",
    "ε tight: a proven upper bound from the privacy loss distribution of the release as the paper "
    "describes it. Factor: tight over printed. Fixed-size batches, drawn without replacement, can "
    "only hide WHICH example takes part: neighbours differ by a replaced example, which moves the "
    "sum by 2C. No exact law is known for them: an attack on two existing data sets reaches the "
    "first number, and the second is proven. 'If Poisson' is the same noise under Poisson "
    "sampling, with an example added or removed.",
)

Agreement = Literal["reproduced", "not reproduced", "calibrated"]


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
    examples_per_patient: int | None
    delta: float | None
    printed: str
    convention: str | None


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """What became of a quoted ε; None where a number does not apply."""

    quoted: Quoted
    sigma: float | None = None
    z: float = 0.0
    sample_rate: float | None = None
    steps: int | None = None
    reproduced: float
    verdict: Agreement
    tight: float
    tight_at_least: float
    factor: float | None = None
    tight_poisson: float | None = None
    tight_patient: float | None = None
    tight_patient_at_least: float | None = None


def quoted() -> list[Quoted]:
    """Read the quoted ε, in the papers' order."""
    text = (assets.PAPERS / "epsilon.csv").read_text(encoding="utf-8")
    lines = csv.DictReader(io.StringIO(text))
    typed = TypeAdapter(list[Quoted])
    return typed.validate_python([{k: v or None for k, v in line.items()} for line in lines])


def reproduce(q: Quoted) -> Reproduction:
    """Recompute a quoted ε, from the cache if possible."""
    inf = math.inf
    if q.noise == "none":
        return Reproduction(
            quoted=q, reproduced=inf, verdict="reproduced", tight=inf, tight_at_least=inf
        )
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
    reproduced = call_cached(claimed_epsilon, q.convention, claim)
    verdict: Agreement = "reproduced" if same_digits(q.printed, reproduced) else "not reproduced"
    mechanism = _mechanism(q, claim.noise_multiplier, q.sampling, rate)
    at_least, tight = call_cached(tight_interval, mechanism, steps, q.delta)
    many = q.examples_per_patient
    low, high = (
        call_cached(patient_interval, mechanism, many, steps, q.delta) if many else (None,) * 2
    )
    poisson = None
    if q.sampling != "poisson":
        other = _mechanism(q, claim.noise_multiplier, "poisson", rate)
        poisson = call_cached(tight_epsilon, other, steps, q.delta)
    return Reproduction(
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
        tight_poisson=poisson,
        tight_patient=high,
        tight_patient_at_least=low,
    )


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
    """True if `value` prints as `printed`, rounded or truncated; '<1' means less than 1."""
    if printed.startswith("<"):
        return value < float(printed[1:])
    decimals = len(printed.partition(".")[2])
    truncated = math.floor(value * 10**decimals + 1e-9) / 10**decimals
    return printed in (f"{value:.{decimals}f}", f"{truncated:.{decimals}f}")


def sheet(table: list[Reproduction]) -> Sheet:
    """Return the papers' table ready to show."""
    notes = {row.quoted.paper: papers.settings(row.quoted.paper).get("epsilon") for row in table}
    of_papers = [f"{paper}: {note}" for paper, note in notes.items() if note]
    verdicts = [row.verdict for row in table]
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in get_args(Agreement))
    printed = sum(row.quoted.noise != "real_on_complex" for row in table)
    return Sheet(
        f"{printed} ε of five papers in {len(table)} readings: {counts}",
        COLUMNS,
        [_cells(row) for row in table],
        [*READING, *of_papers, "No ε includes hyper-parameter search."],
        "`zdp-bench epsilon --write` made this; do not edit.",
        [_numbers(row) for row in table],
    )


def _cells(row: Reproduction) -> list[str]:
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


def _numbers(row: Reproduction) -> dict[str, object]:
    """Return the numbers behind a row, six digits each; δ last."""
    both = vars(row.quoted) | vars(row) | {"quoted": None, "delta": None}
    kept = {key: value for key, value in both.items() if key not in ("quoted", "delta")}
    return rounded(kept | {"delta": row.quoted.delta})


# ----------------------------------------------------------------------------- numbers of your own

# Stands in where no number of records is given: only a patient's ε depends on it, and asks for it.
UNKNOWN_RECORDS = 10**9
NEEDS_RECORDS = "needs --examples N, the number of training examples."
CONVENTIONS = {
    "per_component": "real, or complex with σ² on each part",
    "circular": "complex, circular with σ² in all",
}
REMARKS = {
    "tight": "tight: an upper bound, nearly exact",
    "bound": "an upper bound, looser",
    "approximation": "NOT a bound: an approximation that can fall below the truth",
}
TIGHT_INTERVAL = "tight: from the best attack known to the best proven bound"
OF_PART = "tight, for one example of a unit that is drawn and clipped as one"


@dataclass(frozen=True)
class OwnNumbers:
    """A user's own training, checked: everything but the noise."""

    sampling: Sampling
    steps: int
    delta: float
    examples_per_patient: int | None


def read_own(
    *,
    sampling: Scheme,
    sample_rate: float | None,
    batch_size: int | None,
    examples: int | None,
    steps: int | None,
    epochs: int | None,
    delta: float,
    examples_per_patient: int | None = None,
) -> OwnNumbers:
    """Return a user's numbers, or refuse one that is missing, out of range, or contradicted."""
    require_delta("--delta", delta)
    counts = {"--steps": (steps, MOST), "--epochs": (epochs, MOST), "--examples": (examples, MOST)}
    counts |= {"--batch-size": (batch_size, examples or 0)}
    counts |= {"--examples-per-patient": (examples_per_patient, examples or 0)}
    for flag, (count, most) in counts.items():
        if count is not None and not most:
            raise UserError(f"{flag}={count}: {NEEDS_RECORDS}")
        fits = count is None or 1 <= count <= most
        require(fits, flag, count, f"must lie between 1 and {most:,}")
    if sampling == "full":
        alone = sample_rate in (None, 1.0) and batch_size is None
        require(alone, "--sampling", "full", "takes neither sample rate nor batch size")
        sample_rate = 1.0
    elif batch_size and examples:
        sample_rate = batch_size / examples
    if sample_rate is None or (steps is None and epochs is None):
        raise UserError(
            "--sample-rate (or --batch-size with --examples) and --steps (or --epochs) are needed."
        )
    require(0 < sample_rate <= 1, "--sample-rate", sample_rate, "must lie in (0, 1]")
    few = epochs is None or epochs / sample_rate <= MOST
    require(few, "--sample-rate", sample_rate, f"makes more than {MOST:,} steps")
    if epochs is not None:
        whole = examples // batch_size if batch_size and examples and sampling == "uniform" else 0
        steps = epochs * whole or round(epochs / sample_rate)
    assert steps is not None
    number = examples or UNKNOWN_RECORDS
    drawn = Sampling(sampling, sample_rate, sample_rate * number, number)
    return OwnNumbers(drawn, steps, delta, examples_per_patient)


class Answer(NamedTuple):
    """One line for a user; `at_least` is a lower bound on the true ε, if one is known."""

    noise: str
    sigma: float
    z: float
    accountant: str
    epsilon: float
    remark: str
    at_least: float | None = None


class Bound(NamedTuple):
    """An accountant's ε of (mechanism, steps, δ), and its lower bound, if it knows one."""

    accountant: str
    remark: str
    epsilon: Callable[[Mechanism, int, float], float]
    at_least: Callable[[Mechanism, int, float], float] | None = None


def answer(given: OwnNumbers, sigma: float | None, target: float | None) -> Sheet:
    """Return ε at σ by every accountant, or the σ of a target ε by pld.

    There is a line for each convention of noise. With `examples_per_patient`, the target is met for
    a patient.
    """
    bounds = _bounds(given)
    if target is None:
        allowed = sigma == 0 or LEAST_NOISE <= (sigma or 0.0) <= MOST_NOISE
        require(allowed, "--sigma", sigma, "must be 0, or lie in 0.0001 to 1000000")
    else:
        require(0 < target < math.inf, "--target-epsilon", target, "must be positive and finite")
        # a patient's is last
        bounds = [one for one in bounds if one.accountant == "pld" and one.remark != OF_PART][-1:]
    answers = []
    for noise, bound in product(CONVENTIONS, bounds):
        bounded = partial(_bound, given, noise, bound.epsilon)
        try:
            found = sigma or 0.0 if target is None else solve(target, bounded)
        except ValueError as error:
            raise UserError(f"--target-epsilon={target:g}: {error}.") from None
        z = mechanism_of(noise, 1.0, found, given.sampling).z
        low = _bound(given, noise, bound.at_least, found) if bound.at_least else None
        line = Answer(noise, found, z, bound.accountant, bounded(found), bound.remark, low)
        answers.append(line)
    return _show_answers(given, answers)


def _bound(
    given: OwnNumbers, noise: str, of: Callable[[Mechanism, int, float], float], sigma: float
) -> float:
    """Return the ε at σ by one of a `Bound`'s functions."""
    return of(mechanism_of(noise, 1.0, sigma, given.sampling), given.steps, given.delta)


def _bounds(given: OwnNumbers) -> list[Bound]:
    """Return what each accountant bounds: pld also one example of a unit, and a patient."""
    bounds, many = [], given.examples_per_patient
    for name, of in answer_for_mechanisms().items():
        fixed_size = of.kind == "tight" and given.sampling.scheme == "uniform"
        remark = TIGHT_INTERVAL if fixed_size else REMARKS[of.kind]
        bounds.append(Bound(name, remark, of.epsilon, of.at_least))
        if name == "pld" and given.sampling.adjacency == "add_or_remove_one":
            bounds.append(Bound(name, OF_PART, example_epsilon))
        if name == "pld" and many is not None:
            remark = f"tight, for a patient or image with {many} examples"
            bounds.append(
                Bound(
                    *(name, remark, lambda m, *of: patient_epsilon(m, many, *of)),
                    lambda m, *of: patient_interval(m, many, *of)[0],
                )
            )
    return bounds


def _show_answers(given: OwnNumbers, answers: list[Answer]) -> Sheet:
    """Return the answers ready to show; the numbers, six digits each, have their setting beside."""
    s = given.sampling
    title = (
        f"{s.scheme} sampling, q {s.sample_rate:g}, {given.steps:,} steps, "
        f"δ {given.delta:g}; neighbours: {s.adjacency.replace('_', ' ')}"
    )
    rows = [
        [
            CONVENTIONS.get(one.noise, one.noise),
            f"{one.sigma:.5g}",
            f"{one.z:.4g}",
            one.accountant,
            interval(one.at_least, one.epsilon),
            one.remark,
        ]
        for one in answers
    ]
    known = s.records != UNKNOWN_RECORDS
    notes = [asked] if known and (asked := question(given.delta, s.records)) else []
    columns = ["noise", "σ", "z", "accountant", "ε", ""]
    setting = {"sampling": s.scheme, "sample_rate": s.sample_rate}
    setting |= {"steps": given.steps, "delta": given.delta}
    numbers = [setting | rounded(one._asdict()) for one in answers]
    return Sheet(title, columns, rows, notes, numbers=numbers)
