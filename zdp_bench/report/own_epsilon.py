"""`zdp-bench epsilon` with a user's own numbers: ε by every accountant at a σ, or σ for a target ε.

No data, no training.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from zdp_bench.errors import UserError, require, unknown
from zdp_bench.privacy.accountants import Claim, answer_for_mechanisms, claimed_epsilon
from zdp_bench.privacy.accounting import patient_epsilon, patient_interval
from zdp_bench.privacy.calibration import calibrate, solve
from zdp_bench.privacy.mechanism import LEAST_NOISE, MOST, MOST_NOISE, Mechanism, Sampling
from zdp_bench.privacy.statement import question, require_delta
from zdp_bench.registry import lookup
from zdp_bench.report.epsilon import mechanism_of
from zdp_bench.report.number_format import interval, rounded
from zdp_bench.report.sheet import Sheet

# Stands in where no number of records is given: only the papers' conventions and a patient's ε
# depend on it, and those ask for it.
UNKNOWN_RECORDS = 10**9
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


@dataclass(frozen=True)
class Setting:
    """A user's own training, checked: everything but the noise."""

    sampling: Sampling
    steps: int
    epochs: int
    delta: float
    records_per_patient: int | None


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


@dataclass(frozen=True)
class Bound:
    """What an accountant says of a mechanism after the steps of a setting."""

    accountant: str
    remark: str
    epsilon: Callable[[Mechanism], float]
    at_least: Callable[[Mechanism], float] | None

    def answer(self, noise: str, sigma: float, sampling: Sampling) -> Answer:
        """Return this accountant's ε of noise of one convention."""
        of = mechanism_of(noise, 1.0, sigma, sampling)
        low = self.at_least(of) if self.at_least else None
        return Answer(noise, sigma, of.z, self.accountant, self.epsilon(of), self.remark, low)


def setting(
    *,
    sampling: str | None,
    sample_rate: float | None,
    batch_size: int | None,
    records: int | None,
    steps: int | None,
    epochs: int | None,
    delta: float | None,
    records_per_patient: int | None = None,
) -> Setting:
    """Check a user's numbers; the defaults are Poisson sampling and δ = 1e-5.

    Raises:
        UserError: one is missing, out of range, or contradicts another.
    """
    sampling, delta = sampling or "poisson", 1e-5 if delta is None else delta
    if sampling not in ("poisson", "uniform", "full"):
        raise unknown("sampling", sampling, ("poisson", "uniform", "full"))
    require_delta("--delta", delta)
    for flag, count in (("--steps", steps), ("--epochs", epochs), ("--records", records)):
        require(count is None or count > 0, flag, count, "must be at least 1")
        require(count is None or count <= MOST, flag, count, f"must be at most {MOST:,}")
    if sampling == "full":
        alone = sample_rate in (None, 1.0) and batch_size is None
        require(alone, "--sampling", "full", "takes neither sample rate nor batch size")
        sample_rate = 1.0
    elif batch_size is not None:
        flag = "--batch-size"
        require(sample_rate is None, flag, batch_size, "say it or --sample-rate, not both")
        known = _known(records, flag, batch_size)
        fits = 0 < batch_size <= known
        require(fits, flag, batch_size, f"must lie between 1 and the {known:,} records")
        sample_rate = batch_size / known
    if sample_rate is None:
        raise UserError("--sample-rate is missing: say it, or --batch-size with --records.")
    require(0 < sample_rate <= 1, "--sample-rate", sample_rate, "must lie in (0, 1]")
    if (steps is None) == (epochs is None):
        wrong = "one of them is needed." if steps is None else "not both."
        raise UserError(f"say either --steps or --epochs, {wrong}")
    few = epochs is None or epochs / sample_rate <= MOST
    require(few, "--sample-rate", sample_rate, f"makes more than {MOST:,} steps")
    if steps is None:
        assert epochs is not None
        whole = records // batch_size if batch_size and records and sampling == "uniform" else 0
        steps = epochs * whole or round(epochs / sample_rate)
    if records_per_patient is not None:
        flag = "--records-per-patient"
        known = _known(records, flag, records_per_patient)
        owned = 1 <= records_per_patient <= known
        require(owned, flag, records_per_patient, f"must lie in 1 to {known:,}")
    number = records or UNKNOWN_RECORDS
    drawn = Sampling(sampling, sample_rate, sample_rate * number, number)  # type: ignore[arg-type]
    epochs = epochs or max(1, round(steps * sample_rate))
    return Setting(drawn, steps, epochs, delta, records_per_patient)


def _known(records: int | None, flag: str, value: int) -> int:
    if records is None:
        raise UserError(f"{flag}={value}: needs --records N, the number of training records.")
    return records


def for_sigma(given: Setting, sigma: float, accountant: str | None) -> list[Answer]:
    """Return ε at σ by every accountant, or by one, for both conventions of noise.

    A paper's accountant has one answer, what it would claim.

    Raises:
        UserError: σ is out of range, or no accountant has this name.
    """
    allowed = sigma == 0 or LEAST_NOISE <= sigma <= MOST_NOISE
    require(allowed, "--sigma", sigma, "must be 0, or lie in 0.0001 to 1000000")
    if accountant and _is_convention(given, accountant):
        return [_claim_at(given, sigma, accountant)]
    bounds = [bound for bound in _bounds(given) if accountant in (None, bound.accountant)]
    return [bound.answer(noise, sigma, given.sampling) for noise in CONVENTIONS for bound in bounds]


def for_target(given: Setting, target: float, accountant: str | None) -> list[Answer]:
    """Return the σ that meets a target ε by an accountant (default pld).

    One for each convention of noise; one in all for a paper's accountant. With
    `records_per_patient`, pld meets the target for a patient.

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
        bounds = [bound for bound in _bounds(given) if bound.accountant == name]
        bound = bounds[-1]  # a patient's ε comes after a record's
        answers = []
        for noise in CONVENTIONS:
            question = {
                "given": dataclasses.asdict(given),
                "noise": noise,
                "by": name,
                "remark": bound.remark,
            }

            def epsilon_at(sigma: float, noise: str = noise) -> float:
                return bound.epsilon(mechanism_of(noise, 1.0, sigma, given.sampling))

            sigma = solve(target, epsilon_at, question)
            answers.append(bound.answer(noise, sigma, given.sampling))
        return answers
    except ValueError as error:
        raise UserError(f"--target-epsilon={target:g}: {error}.") from None


def _claim_at(given: Setting, sigma: float, accountant: str) -> Answer:
    claimed = claimed_epsilon(accountant, _claim(given, sigma))
    remark = "what this convention would claim"
    return Answer("as claimed", sigma, sigma, accountant, claimed, remark)


def _claim(given: Setting, sigma: float) -> Claim:
    s = given.sampling
    return Claim(sigma, s.sample_rate, given.steps, given.delta, s.records, given.epochs)


def _is_convention(given: Setting, accountant: str) -> bool:
    """True if the accountant makes a claim from stated numbers, False if it bounds a mechanism.

    Raises:
        UserError: there is no such accountant, or it needs to know how many records there are.
    """
    if accountant in answer_for_mechanisms():
        return False
    lookup("accountant", accountant)
    if given.sampling.records == UNKNOWN_RECORDS:
        raise UserError(
            f"--accountant={accountant}: needs --records N, the number of training records."
        )
    return True


def _bounds(given: Setting) -> list[Bound]:
    """Return what each accountant says of a mechanism; after pld, pld of a patient if wanted."""
    remarks = REMARKS
    if given.sampling.scheme == "uniform":
        remarks = REMARKS | {"tight": TIGHT_INTERVAL}

    def after(bound: Callable[[Mechanism, int, float], float]) -> Callable[[Mechanism], float]:
        return lambda mechanism: bound(mechanism, given.steps, given.delta)

    bounds = [
        Bound(
            name, remarks[of.kind], after(of.epsilon), after(of.at_least) if of.at_least else None
        )
        for name, of in answer_for_mechanisms().items()
    ]
    if many := given.records_per_patient:
        text = f"tight, for a patient or image with {many} records"
        high = after(lambda m, steps, delta: patient_epsilon(m, many, steps, delta))
        low = after(lambda m, steps, delta: patient_interval(m, many, steps, delta)[0])
        place = next(i for i, bound in enumerate(bounds) if bound.accountant == "pld") + 1
        bounds.insert(place, Bound("pld", text, high, low))
    return bounds


def sheet(given: Setting, answers: list[Answer]) -> Sheet:
    """Return the answers as a table for the terminal."""
    s = given.sampling
    title = (
        f"{s.scheme} sampling, q {s.sample_rate:g}, {given.steps:,} steps, δ {given.delta:g}; "
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
    return Sheet(title.replace("_", " "), columns, rows, notes)


def numbers(given: Setting, answers: list[Answer]) -> Sheet:
    """Return the answers as plain numbers, six digits each, with their setting beside them."""
    common = {
        "sampling": given.sampling.scheme,
        "sample_rate": given.sampling.sample_rate,
        "steps": given.steps,
        "delta": given.delta,
    }
    return Sheet.of_numbers([common | rounded(vars(answer)) for answer in answers])
