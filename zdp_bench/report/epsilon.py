"""`zdp-bench epsilon`: every ε that five papers quote, and the ε of the user's own numbers.

Neither part needs data or training.

`papers/epsilon.csv` contains what the papers state: one line for each quoted ε, or for each of
several ways to read it. A line becomes a `Claim`, from which an accountant computes the ε that the
paper would print, and a `Mechanism`, the release as the paper describes it, which has the tight ε.
If a paper states a target ε but no σ, σ is first calibrated to the target.

For the user's own numbers, each accountant computes the ε at a given σ, or σ is calibrated to a
target ε.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple, get_args

from pydantic import TypeAdapter

from zdp_bench import assets
from zdp_bench.errors import UserError, require
from zdp_bench.privacy.accountants import Claim, recall_claimed_epsilon
from zdp_bench.privacy.accounting import (
    example_epsilon,
    gdp_clt_epsilon,
    patient_epsilon,
    patient_interval,
    rdp_epsilon,
    tight_epsilon,
    tight_interval,
)
from zdp_bench.privacy.calibration import calibrate, solve
from zdp_bench.privacy.mechanism import (
    MAX_COUNT,
    MAX_NOISE,
    MIN_NOISE,
    Block,
    Mechanism,
    NoiseKind,
    Sampling,
    Scheme,
)
from zdp_bench.privacy.memory import call_cached
from zdp_bench.privacy.statement import question, require_delta, round_up, show_epsilon
from zdp_bench.report import papers
from zdp_bench.report.number_format import interval, rounded
from zdp_bench.report.sheet import Sheet

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

# Columns of CSV and JSON with upper bounds, and noise that keeps one; and with lower bounds
ROUNDED_UP = ("sigma", "epsilon", "tight", "factor", "tight_poisson", "tight_patient")
ROUNDED_DOWN = ("at_least", "tight_at_least", "tight_patient_at_least")

Agreement = Literal["reproduced", "not reproduced", "calibrated"]


@dataclass(frozen=True)
class Quoted:
    """One ε as a paper quotes it: a line of `papers/epsilon.csv`. Empty fields are None.

    Attributes:
        place: where the paper quotes it, such as "Table 1".
        label: what the ε is for, such as "MNIST DP-SGD".
        noise: kind of noise: "real", "circular" (variance σ² in total), "per_component" (variance
            σ² on each part), "real_on_complex" or "none". GReDP describes two kinds of noise but
            prints each ε once, so its lines with "real_on_complex" are a second reading.
        sigma: noise multiplier σ; None if the paper states only a target ε.
        sensitivity: if σ is the noise on a batch's mean, how far a MODIFIED record moves the sum of
            the batch.
        examples_per_patient: largest number of examples of one patient.
        printed: ε as printed, or the target ε.
        convention: accountant that reproduces the printed digits, or the one that the paper says it
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
    """A quoted ε beside what we compute from the paper's numbers. None if a number does not apply.

    Attributes:
        sigma: the paper's σ, or the σ that was calibrated to its target.
        z: noise over sensitivity in the weakest direction; 0 without noise.
        reproduced: ε by the paper's accountant.
        tight: upper bound on the true ε.
        tight_at_least: lower bound on the true ε.
        factor: tight ε over printed ε.
        tight_poisson: tight ε of the same noise under Poisson sampling, for another scheme.
        tight_patient: upper bound on the ε of a patient.
        tight_patient_at_least: lower bound on the ε of a patient.
    """

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


def read_quoted() -> list[Quoted]:
    """Read `papers/epsilon.csv`, in the order of the papers."""
    text = (assets.PAPERS / "epsilon.csv").read_text(encoding="utf-8")
    lines = []
    for line in csv.DictReader(io.StringIO(text)):
        lines.append({column: value or None for column, value in line.items()})
    return TypeAdapter(list[Quoted]).validate_python(lines)


def reproduce(quoted: Quoted) -> Reproduction:
    """Compute a quoted ε as the paper's accountant does, and the tight ε of the same release.

    Results are cached (`privacy.memory`).

    Raises:
        ValueError: the line of `papers/epsilon.csv` lacks a number.
    """
    if quoted.noise == "none":
        return Reproduction(
            quoted=quoted,
            reproduced=math.inf,
            verdict="reproduced",
            tight=math.inf,
            tight_at_least=math.inf,
        )
    records, epochs, delta = quoted.records, quoted.epochs, quoted.delta
    convention, scheme = quoted.convention, quoted.sampling
    if not (records and epochs and delta and convention and scheme):
        line = f"{quoted.paper}, {quoted.place}, {quoted.label}"
        raise ValueError(f"papers/epsilon.csv: the line of {line} lacks a number")
    sample_rate = quoted.sample_rate or (quoted.batch_size or 0) / records
    if quoted.batch_size:
        steps = epochs * (records // quoted.batch_size)  # whole batches only
    else:
        steps = round(epochs / sample_rate)
    claim = Claim(
        quoted.sigma or 0.0,
        sample_rate,
        steps,
        delta,
        records,
        epochs,
        quoted.batch_size,
        quoted.sensitivity,
    )
    if quoted.sigma is None:
        sigma = calibrate(float(quoted.printed), convention, claim)
        claim = dataclasses.replace(claim, noise_multiplier=sigma)
    sigma = claim.noise_multiplier
    reproduced = recall_claimed_epsilon(convention, claim)
    mechanism = _mechanism(quoted, sigma, scheme, sample_rate)
    tight_at_least, tight = call_cached(tight_interval, mechanism, steps, delta)
    tight_poisson = None
    if scheme != "poisson":
        poisson_mechanism = _mechanism(quoted, sigma, "poisson", sample_rate)
        tight_poisson = call_cached(tight_epsilon, poisson_mechanism, steps, delta)
    patient_at_least, patient = None, None
    if quoted.examples_per_patient:
        patient_at_least, patient = call_cached(
            patient_interval, mechanism, quoted.examples_per_patient, steps, delta
        )
    return Reproduction(
        quoted=quoted,
        sigma=sigma,
        z=mechanism.z,
        sample_rate=sample_rate,
        steps=steps,
        reproduced=reproduced,
        verdict=_judge(quoted, reproduced),
        tight=tight,
        tight_at_least=tight_at_least,
        factor=tight / float(quoted.printed.lstrip("<")),
        tight_poisson=tight_poisson,
        tight_patient=patient,
        tight_patient_at_least=patient_at_least,
    )


def _judge(quoted: Quoted, reproduced: float) -> Agreement:
    """Return whether the reproduced ε has the printed digits."""
    if quoted.sigma is None:
        return "calibrated"
    return "reproduced" if same_digits(quoted.printed, reproduced) else "not reproduced"


def _mechanism(quoted: Quoted, sigma: float, scheme: Scheme, sample_rate: float) -> Mechanism:
    """Return the release as the paper describes it, in units of the clipping bound."""
    assert quoted.records
    batch_size = sample_rate * quoted.records
    bound, std = 1.0, sigma
    if quoted.sensitivity:
        # A modified record moves the sum by twice one record's bound, and σ is on the mean.
        bound = quoted.sensitivity / 2
        std = sigma * batch_size
    sampling = Sampling(scheme, sample_rate, batch_size, quoted.records)
    return mechanism_of(quoted.noise, bound, std, sampling)


def mechanism_of(noise: str, bound: float, std: float, sampling: Sampling) -> Mechanism:
    """Return the release of a single block.

    Args:
        noise: kind of noise, as in `Quoted.noise`.
        bound: clipping bound of one record.
        std: standard deviation of the noise; for "circular" noise, of both parts together.
        sampling: how a step draws records.
    """
    # dtype, standard deviation on each part, and kind of the block
    blocks: dict[str, tuple[str, float, NoiseKind]] = {
        "real": ("float32", std, "real"),
        "per_component": ("complex64", std, "circular"),
        "circular": ("complex64", std / math.sqrt(2), "circular"),
        "real_on_complex": ("complex64", std, "real_on_complex"),
    }
    dtype, std_of_part, kind = blocks[noise]
    block = Block("gradient", (1,), dtype, bound, std_of_part, kind)
    return Mechanism((block,), sampling)


def same_digits(printed: str, value: float) -> bool:
    """Return True if a value, rounded or truncated, has the printed digits.

    A printed "<1" agrees with any value below 1.
    """
    if printed.startswith("<"):
        return value < float(printed[1:])
    decimals = _count_decimals(printed)
    # Without 1e-9, a value such as 0.29 · 100 = 28.999999999999996 would be truncated to 0.28.
    truncated = math.floor(value * 10**decimals + 1e-9) / 10**decimals
    return printed in (f"{value:.{decimals}f}", f"{truncated:.{decimals}f}")


def _count_decimals(printed: str) -> int:
    return len(printed.partition(".")[2])


def sheet(table: list[Reproduction]) -> Sheet:
    """Return the table of all quoted ε."""
    papers_notes = []
    for paper in dict.fromkeys(row.quoted.paper for row in table):
        note = papers.settings(paper).get("epsilon")
        if note:
            papers_notes.append(f"{paper}: {note}")
    verdicts = [row.verdict for row in table]
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in get_args(Agreement))
    return Sheet(
        f"{_count_printed(table)} ε of five papers in {len(table)} readings: {counts}",
        COLUMNS,
        [_cells(row) for row in table],
        notes=[*READING, *papers_notes, "No ε includes hyper-parameter search."],
        origin="`zdp-bench epsilon --write` made this; do not edit.",
        numbers=[_numbers(row) for row in table],
    )


def _count_printed(table: list[Reproduction]) -> int:
    """Return the number of printed ε. Several readings of one differ in the end of their label."""
    printed = set()
    for row in table:
        name, _, _ = row.quoted.label.partition(",")
        printed.add((row.quoted.paper, row.quoted.place, name, row.quoted.printed))
    return len(printed)


def _cells(row: Reproduction) -> list[str]:
    quoted = row.quoted
    parameters = "no noise"
    if row.steps is not None:
        scheme = "Poisson" if quoted.sampling == "poisson" else "uniform"
        parameters = (
            f"σ {row.sigma:.4g}, q {row.sample_rate:.3g}, {row.steps:,} steps, "
            f"δ {quoted.delta:g}, {scheme}, z {row.z:.3g}"
        )
    reproduced = "∞"
    if not math.isinf(row.reproduced):
        # one more decimal than is printed, so that rounding can be told from truncation
        decimals = _count_decimals(quoted.printed) + 1
        reproduced = f"{row.reproduced:.{decimals}f}"
    return [
        quoted.paper,
        quoted.place,
        quoted.label,
        parameters,
        quoted.printed.replace("inf", "∞"),
        reproduced,
        quoted.convention or "",
        row.verdict,
        interval(row.tight_at_least, row.tight),
        show_epsilon(row.factor),
        show_epsilon(row.tight_poisson),
        interval(row.tight_patient_at_least, row.tight_patient),
    ]


def _numbers(row: Reproduction) -> dict[str, object]:
    """Return the CSV's values of a row, rounded to six digits; δ is the last column."""
    numbers = vars(row.quoted) | vars(row)  # the calibrated σ replaces an empty one
    del numbers["quoted"]
    delta = numbers.pop("delta")
    return rounded(numbers | {"delta": delta}, ROUNDED_UP, ROUNDED_DOWN)


# ------------------------------------------------------------------------- the user's own numbers

# Used if the user gives no number of examples. Only a patient's ε depends on it, and for that the
# number is required.
UNKNOWN_RECORDS = 10**9
NEEDS_EXAMPLES = "needs --examples N, the number of training examples."
CONVENTIONS = {
    "per_component": "real, or complex with σ² on each part",
    "circular": "complex, circular with σ² in all",
}
TIGHT = "tight: an upper bound, nearly exact"
TIGHT_INTERVAL = "tight: from the best attack known to the best proven bound"
LOOSER = "an upper bound, looser"
APPROXIMATION = "NOT a bound: an approximation that can fall below the truth"
OF_PART = "tight, for one example of a unit that is drawn and clipped as one"


@dataclass(frozen=True)
class Training:
    """A user's training except for its noise. All values are valid.

    Attributes:
        examples_per_patient: largest number of examples of one patient. Default: None, if no ε of a
            patient is wanted.
    """

    sampling: Sampling
    steps: int
    delta: float
    examples_per_patient: int | None


def read_training(
    *,
    sampling: Scheme,
    sample_rate: float | None,
    batch_size: int | None,
    examples: int | None,
    steps: int | None,
    epochs: int | None,
    delta: float,
    examples_per_patient: int | None = None,
) -> Training:
    """Return the training that a user's options describe.

    Args:
        sampling: how a step draws examples.
        sample_rate: probability that a step draws an example; or give `batch_size` and `examples`.
        batch_size: expected number of examples per step.
        examples: number of training examples.
        steps: number of steps; or give `epochs`.
        epochs: number of epochs.
        delta: δ of each ε.
        examples_per_patient: see `Training`.

    Raises:
        UserError: an option is missing, out of range, or contradicts another.
    """
    require_delta("--delta", delta)
    _require_count("--steps", steps, MAX_COUNT)
    _require_count("--epochs", epochs, MAX_COUNT)
    _require_count("--examples", examples, MAX_COUNT)
    _require_count_of_examples("--batch-size", batch_size, examples)
    _require_count_of_examples("--examples-per-patient", examples_per_patient, examples)
    if sampling == "full":
        is_full = sample_rate in (None, 1.0) and batch_size is None
        require(is_full, "--sampling", "full", "takes neither sample rate nor batch size")
        sample_rate = 1.0
    elif batch_size and examples:
        sample_rate = batch_size / examples
    if sample_rate is None or (steps is None and epochs is None):
        raise UserError(
            "--sample-rate (or --batch-size with --examples) and --steps (or --epochs) are needed."
        )
    require(0 < sample_rate <= 1, "--sample-rate", sample_rate, "must lie in (0, 1]")
    if sampling == "uniform" and examples:
        is_drawn = round(sample_rate * examples) >= 1
        require(is_drawn, "--sample-rate", sample_rate, f"of {examples:,} is a batch of 0")
    if epochs is not None:
        few_steps = epochs / sample_rate <= MAX_COUNT
        require(few_steps, "--sample-rate", sample_rate, f"makes more than {MAX_COUNT:,} steps")
        steps = round(epochs / sample_rate)
        if sampling == "uniform" and batch_size and examples:
            steps = epochs * (examples // batch_size)  # whole batches only
    assert steps is not None
    records = examples or UNKNOWN_RECORDS
    drawn = Sampling(sampling, sample_rate, sample_rate * records, records)
    return Training(drawn, steps, delta, examples_per_patient)


def _require_count(flag: str, count: int | None, largest: int) -> None:
    if count is not None:
        require(1 <= count <= largest, flag, count, f"must lie between 1 and {largest:,}")


def _require_count_of_examples(flag: str, count: int | None, examples: int | None) -> None:
    """Reject a count that is larger than the number of examples, or given without it."""
    if count is None:
        return
    if examples is None:
        raise UserError(f"{flag}={count}: {NEEDS_EXAMPLES}")
    _require_count(flag, count, examples)


class Answer(NamedTuple):
    """The ε of a training by one accountant, for one kind of noise.

    Attributes:
        noise: a key of `CONVENTIONS`.
        remark: what the accountant bounds.
        at_least: lower bound on the true ε, if one is known.
    """

    noise: str
    sigma: float
    z: float
    accountant: str
    epsilon: float
    remark: str
    at_least: float | None = None


class Bound(NamedTuple):
    """An accountant's ε of (mechanism, steps, δ).

    Attributes:
        remark: what the accountant bounds.
        interval: a lower bound on the true ε, and `epsilon`, if the accountant knows both.
    """

    accountant: str
    remark: str
    epsilon: Callable[[Mechanism, int, float], float]
    interval: Callable[[Mechanism, int, float], tuple[float, float]] | None = None


def answer(training: Training, sigma: float | None, target: float | None) -> Sheet:
    """Return the ε of a training by each accountant, or the noise that a target ε requires.

    There are lines for each of `CONVENTIONS`, because papers measure complex noise in two ways.

    Args:
        training: the training.
        sigma: noise multiplier σ. Ignored with a target.
        target: target ε, which is met by the accountant pld; for a patient if the training has
            `examples_per_patient`.

    Raises:
        UserError: σ or the target is out of range, or no σ gives the target.
    """
    bounds = _bounds(training)
    if target is None:
        is_valid = sigma == 0 or MIN_NOISE <= (sigma or 0.0) <= MAX_NOISE
        require(is_valid, "--sigma", sigma, "must be 0, or lie in 0.0001 to 1000000")
    else:
        require(0 < target < math.inf, "--target-epsilon", target, "must be positive and finite")
        by_pld = [bound for bound in bounds if bound.accountant == "pld"]
        calibrated = [bound for bound in by_pld if bound.remark != OF_PART]
        bounds = calibrated[-1:]  # the bound for a patient is last, if there is one
    answers = []
    for noise, bound in product(CONVENTIONS, bounds):
        if target is not None:
            sigma = _calibrate(training, noise, bound, target)
        answers.append(_answer(training, noise, bound, sigma or 0.0))
    return _show_answers(training, answers)


def _answer(training: Training, noise: str, bound: Bound, sigma: float) -> Answer:
    """Return a bound at σ."""
    mechanism = mechanism_of(noise, 1.0, sigma, training.sampling)
    steps, delta = training.steps, training.delta
    at_least = None
    if bound.interval is not None:
        at_least, _ = bound.interval(mechanism, steps, delta)
    return Answer(
        noise,
        sigma,
        mechanism.z,
        bound.accountant,
        bound.epsilon(mechanism, steps, delta),
        bound.remark,
        at_least,
    )


def _calibrate(training: Training, noise: str, bound: Bound, target: float) -> float:
    """Return the σ at which a bound meets a target ε."""

    def compute_epsilon(sigma: float) -> float:
        mechanism = mechanism_of(noise, 1.0, sigma, training.sampling)
        return bound.epsilon(mechanism, training.steps, training.delta)

    try:
        return solve(target, compute_epsilon)
    except ValueError as error:
        raise UserError(f"--target-epsilon={target:g}: {error}.") from None


def _bounds(training: Training) -> list[Bound]:
    """Return the bounds of all accountants.

    pld also bounds the ε of one example of a unit, and of a patient.
    """
    sampling, examples = training.sampling, training.examples_per_patient
    remark = TIGHT_INTERVAL if sampling.scheme == "uniform" else TIGHT
    bounds = [Bound("pld", remark, tight_epsilon, tight_interval)]
    if sampling.adjacency == "add_or_remove_one":
        bounds.append(Bound("pld", OF_PART, example_epsilon))
    if examples is not None:
        bounds.append(_bound_patient(examples))
    bounds.append(Bound("rdp", LOOSER, rdp_epsilon))
    bounds.append(Bound("gdp_clt", APPROXIMATION, gdp_clt_epsilon))
    return bounds


def _bound_patient(examples: int) -> Bound:
    """Return pld's bound for a patient with so many examples."""
    return Bound(
        "pld",
        f"tight, for a patient or image with {examples} examples",
        lambda mechanism, steps, delta: patient_epsilon(mechanism, examples, steps, delta),
        lambda mechanism, steps, delta: patient_interval(mechanism, examples, steps, delta),
    )


def _show_answers(training: Training, answers: list[Answer]) -> Sheet:
    """Return the answers as a table. Each line of the CSV also states the training."""
    sampling, steps, delta = training.sampling, training.steps, training.delta
    neighbours = sampling.adjacency.replace("_", " ")
    title = (
        f"{sampling.scheme} sampling, q {sampling.sample_rate:g}, {steps:,} steps, "
        f"δ {delta:g}; neighbours: {neighbours}"
    )
    rows = []
    for line in answers:
        row = [
            CONVENTIONS[line.noise],
            f"{round_up(line.sigma, 5):.5g}",
            f"{line.z:.4g}",
            line.accountant,
            interval(line.at_least, line.epsilon),
            line.remark,
        ]
        rows.append(row)
    notes = []
    if sampling.records != UNKNOWN_RECORDS:
        warning = question(delta, sampling.records)
        if warning:
            notes.append(warning)
    setting = {
        "sampling": sampling.scheme,
        "sample_rate": sampling.sample_rate,
        "steps": steps,
        "delta": delta,
    }
    numbers = [setting | rounded(line._asdict(), ROUNDED_UP, ROUNDED_DOWN) for line in answers]
    columns = ["noise", "σ", "z", "accountant", "ε", ""]
    return Sheet(title, columns, rows, notes, numbers=numbers)
