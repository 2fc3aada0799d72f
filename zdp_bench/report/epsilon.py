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
from typing import Any, Literal, get_args

from zdp_bench import assets
from zdp_bench.errors import UserError, require
from zdp_bench.privacy.accountants import Claim, answer_for_mechanisms, claimed_epsilon
from zdp_bench.privacy.accounting import (
    part_epsilon,
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
from zdp_bench.privacy.memory import remember
from zdp_bench.privacy.statement import question, require_delta
from zdp_bench.registry import lookup
from zdp_bench.report import papers
from zdp_bench.report.number_format import epsilon as shown
from zdp_bench.report.number_format import interval, rounded
from zdp_bench.report.sheet import Sheet

COLUMNS = (
    *("paper", "where", "what", "parameters", "ε printed", "ε reproduced", "by", "verdict"),
    *("ε tight", "factor", "ε tight if Poisson", "ε tight per patient"),
)

READING = (
    "ε reproduced: by the accountant named beside it, fed what the paper states. Reproduced: its "
    "digits, rounded or truncated, are the printed ones. Calibrated: the paper states a target and "
    "no σ, so σ is the one that accountant gives the target.",
    "ε tight: the privacy loss distribution of the release as the paper describes it, a proven "
    "upper bound. Factor: tight over printed. Batches of fixed size, drawn without replacement, "
    "can only hide WHICH example is there: a neighbour is a replaced example and moves the sum by "
    "2C. No exact law is known of them: the first number is what two data sets that exist are told "
    "apart by, the second is the proven bound. 'If Poisson' is the same noise under Poisson "
    "sampling, examples added or removed.",
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
    numbers: dict[str, Callable[[str], Any]] = {
        **dict.fromkeys(("sigma", "sensitivity", "sample_rate", "delta"), float),
        **dict.fromkeys(("batch_size", "epochs", "records", "examples_per_patient"), int),
    }

    def typed(field: str, value: str) -> Any:
        return numbers.get(field, str)(value) if value else None

    return [
        Quoted(**{field: typed(field, value) for field, value in line.items()})
        for line in csv.DictReader(io.StringIO(text))
    ]


def rows() -> list[Reproduction]:
    """Compute what became of every quoted ε, or remember it."""
    return [reproduce(line) for line in quoted()]


def reproduce(q: Quoted) -> Reproduction:
    """Compute what became of a quoted ε."""
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
    reproduced = remember(claimed_epsilon, q.convention, claim)
    verdict: Agreement = "reproduced" if same_digits(q.printed, reproduced) else "not reproduced"
    mechanism = _mechanism(q, claim.noise_multiplier, q.sampling, rate)
    at_least, tight = remember(tight_interval, mechanism, steps, q.delta)
    many = q.examples_per_patient
    low, high = remember(patient_interval, mechanism, many, steps, q.delta) if many else (None,) * 2
    poisson = None
    if q.sampling != "poisson":
        other = _mechanism(q, claim.noise_multiplier, "poisson", rate)
        poisson = remember(tight_epsilon, other, steps, q.delta)
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
    """True if `value` prints as `printed`, rounded or truncated to as many decimals.

    '<1' means less than 1.
    """
    if printed.startswith("<"):
        return value < float(printed[1:])
    decimals = len(printed.partition(".")[2])
    truncated = math.floor(value * 10**decimals + 1e-9) / 10**decimals
    return printed in (f"{value:.{decimals}f}", f"{truncated:.{decimals}f}")


def sheet(table: list[Reproduction]) -> Sheet:
    """Return the papers' table ready to show."""
    verdicts = [row.verdict for row in table]
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in get_args(Agreement))
    printed = sum(row.quoted.noise != "real_on_complex" for row in table)
    return Sheet(
        f"{printed} ε of five papers in {len(table)} readings: {counts}",
        COLUMNS,
        [_cells(row) for row in table],
        _notes(table),
        "`zdp-bench epsilon` made this; do not edit.",
        [_numbers(row) for row in table],
    )


def _notes(table: list[Reproduction]) -> list[str]:
    found = {paper: papers.epsilon_note(paper) for paper in (row.quoted.paper for row in table)}
    of_papers = [f"{paper}: {note}" for paper, note in found.items() if note]
    return [*READING, *of_papers, "No ε includes hyper-parameter search."]


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

# Stands in where no number of records is given: only the papers' conventions and a patient's ε
# depend on it, and those ask for it.
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
PART = 0  # in the place of a patient's number of records: one of a unit's examples
TIGHT_INTERVAL = "tight: from the best attack known to the best proven bound"


@dataclass(frozen=True)
class OwnNumbers:
    """A user's own training, checked: everything but the noise."""

    sampling: Sampling
    steps: int
    epochs: int
    delta: float
    examples_per_patient: int | None


@dataclass(frozen=True)
class Answer:
    """One line for a user: which noise, which accountant, σ and ε.

    Attributes:
        at_least: a lower bound on the true ε; None where the accountant knows none.
    """

    noise: str
    sigma: float
    z: float
    accountant: str
    epsilon: float
    remark: str
    at_least: float | None = None


def read_own(
    *,
    sampling: Scheme,
    sample_rate: float | None,
    batch_size: int | None,
    examples: int | None,
    steps: int | None,
    epochs: int | None,
    delta: float,
    cycle: int | None = None,
    examples_per_patient: int | None = None,
) -> OwnNumbers:
    """Check a user's numbers.

    Raises:
        UserError: one is missing, out of range, or contradicts another.
    """
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
    number, cycle = examples or UNKNOWN_RECORDS, cycle or 1
    fits = cycle == 1 or (sampling == "poisson" and sample_rate * cycle <= 1)
    rule = "needs Poisson sampling, and at most 1 / sample rate subsets"
    require(fits, "--cycle", cycle, rule)
    drawn = Sampling(sampling, sample_rate * cycle, sample_rate * number, number, cycle)
    epochs = epochs or max(1, round(steps * sample_rate))
    return OwnNumbers(drawn, steps, epochs, delta, examples_per_patient)


def for_sigma(given: OwnNumbers, sigma: float, accountant: str | None) -> list[Answer]:
    """Return ε at σ by every accountant, or by one, for both conventions of noise.

    A paper's accountant has one answer, what it would claim.

    Raises:
        UserError: σ is out of range, or no accountant has this name.
    """
    allowed = sigma == 0 or LEAST_NOISE <= sigma <= MOST_NOISE
    require(allowed, "--sigma", sigma, "must be 0, or lie in 0.0001 to 1000000")
    if accountant and _is_convention(given, accountant):
        return [_claim_at(given, sigma, accountant)]
    bounds = [bound for bound in _bounds(given) if accountant in (None, bound[0])]
    return [_answer(given, noise, sigma, *bound) for noise in CONVENTIONS for bound in bounds]


def for_target(given: OwnNumbers, target: float, accountant: str | None) -> list[Answer]:
    """Return the σ that meets a target ε by an accountant (default pld).

    One for each convention of noise; one in all for a paper's accountant. With
    `examples_per_patient`, pld meets the target for a patient.

    Raises:
        UserError: the target cannot be met, or no accountant has this name.
    """
    name = accountant or "pld"
    convention = _is_convention(given, name)
    require(0 < target < math.inf, "--target-epsilon", target, "must be positive and finite")
    try:
        if convention:
            sigma = calibrate(target, name, _claim(given, 0.0))
            return [_claim_at(given, sigma, name)]
        # a patient's is last
        bound = [one for one in _bounds(given) if one[0] == name and one[1] != PART][-1]
        found = {
            noise: remember(solve, target, _epsilon_at, given, noise, *bound)
            for noise in CONVENTIONS
        }
        return [_answer(given, noise, sigma, *bound) for noise, sigma in found.items()]
    except ValueError as error:
        raise UserError(f"--target-epsilon={target:g}: {error}.") from None


def _bounds(given: OwnNumbers) -> list[tuple[str, int | None]]:
    """Return each accountant of mechanisms; after pld, pld of a patient with so many examples.

    Before that pld of `PART`, where it differs.
    """
    bounds: list[tuple[str, int | None]] = []
    for name in answer_for_mechanisms():
        bounds.append((name, None))
        if name == "pld" and given.sampling.adjacency == "add_or_remove_one":
            bounds.append((name, PART))
        if name == "pld" and given.examples_per_patient:
            bounds.append((name, given.examples_per_patient))
    return bounds


def _answer(given: OwnNumbers, noise: str, sigma: float, name: str, many: int | None) -> Answer:
    """Return an accountant's ε of noise of one convention."""
    mechanism = mechanism_of(noise, 1.0, sigma, given.sampling)
    steps, delta = given.steps, given.delta
    if many == PART:
        low: float | None = None
    elif many:
        low = patient_interval(mechanism, many, steps, delta)[0]
    else:
        at_least = answer_for_mechanisms()[name].at_least
        low = at_least(mechanism, steps, delta) if at_least else None
    high, remark = _epsilon_at(sigma, given, noise, name, many), _remark(given, name, many)
    return Answer(noise, sigma, mechanism.z, name, high, remark, low)


def _epsilon_at(sigma: float, given: OwnNumbers, noise: str, name: str, many: int | None) -> float:
    mechanism = mechanism_of(noise, 1.0, sigma, given.sampling)
    if many == PART:
        return part_epsilon(mechanism, given.steps, given.delta)
    if many:
        return patient_epsilon(mechanism, many, given.steps, given.delta)
    return answer_for_mechanisms()[name].epsilon(mechanism, given.steps, given.delta)


def _remark(given: OwnNumbers, name: str, many: int | None) -> str:
    if many == PART:
        return "tight, for one example of a unit that is drawn and clipped as one"
    if many:
        return f"tight, for a patient or image with {many} examples"
    kind = answer_for_mechanisms()[name].kind
    fixed_size = kind == "tight" and given.sampling.scheme == "uniform"
    return TIGHT_INTERVAL if fixed_size else REMARKS[kind]


def _claim_at(given: OwnNumbers, sigma: float, accountant: str) -> Answer:
    claimed = claimed_epsilon(accountant, _claim(given, sigma))
    remark = "what this convention would claim"
    return Answer("as claimed", sigma, sigma, accountant, claimed, remark)


def _claim(given: OwnNumbers, sigma: float) -> Claim:
    s, steps = given.sampling.of_one(given.steps)
    return Claim(sigma, s.sample_rate, steps, given.delta, s.records, given.epochs)


def _is_convention(given: OwnNumbers, accountant: str) -> bool:
    """True if the accountant makes a claim from stated numbers, False if it bounds a mechanism.

    Raises:
        UserError: there is no such accountant, or it needs to know how many records there are.
    """
    if accountant in answer_for_mechanisms():
        return False
    lookup("accountant", accountant)
    if given.sampling.records == UNKNOWN_RECORDS:
        raise UserError(f"--accountant={accountant}: {NEEDS_RECORDS}")
    return True


def answers_sheet(given: OwnNumbers, answers: list[Answer]) -> Sheet:
    """Return the answers ready to show; the numbers, six digits each, have their setting beside."""
    s = given.sampling
    turns = f" in one step of {s.cycle}" if s.cycle > 1 else ""
    title = (
        f"{s.scheme} sampling, q {s.sample_rate:g}{turns}, {given.steps:,} steps, "
        f"δ {given.delta:g}; "
        f"neighbours: {s.adjacency}"
    )
    rows = [
        [
            CONVENTIONS.get(answer.noise, answer.noise),
            f"{answer.sigma:.5g}",
            f"{answer.z:.4g}",
            answer.accountant,
            interval(answer.at_least, answer.epsilon),
            answer.remark,
        ]
        for answer in answers
    ]
    known = s.records != UNKNOWN_RECORDS
    notes = [asked] if known and (asked := question(given.delta, s.records)) else []
    columns = ["noise", "σ", "z", "accountant", "ε", ""]
    common = {"sampling": s.scheme, "sample_rate": s.sample_rate}
    common |= {"steps": given.steps, "delta": given.delta}
    numbers = [common | rounded(vars(answer)) for answer in answers]
    return Sheet(title.replace("_", " "), columns, rows, notes, numbers=numbers)
