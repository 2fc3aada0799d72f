"""`zdp-bench epsilon` with a user's own numbers: every accountant at a σ, or the σ for a target. No data, no training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.table import Table as RichTable

from zdp_bench.errors import UserError, require, unknown
from zdp_bench.privacy.accountants import Claim, answer_for_mechanisms, claimed_epsilon
from zdp_bench.privacy.accounting import (
    LEAST_NOISE,
    MOST,
    MOST_NOISE,
    patient_epsilon,
    patient_interval,
)
from zdp_bench.privacy.calibration import calibrate, solve
from zdp_bench.privacy.mechanism import Mechanism, Sampling
from zdp_bench.registry import lookup
from zdp_bench.report import formats
from zdp_bench.report.epsilon import mechanism_of
from zdp_bench.report.formats import rounded
from zdp_bench.report.number_format import interval


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
        at_least: a lower bound on what the accountant bounds from above; None where it knows none.
    """

    noise: str
    sigma: float
    z: float
    accountant: str
    epsilon: float
    remark: str
    at_least: float | None = None


UNKNOWN_RECORDS = (
    10**9
)  # stands in where it does not matter: for all but the papers' conventions and per-patient ε
CONVENTIONS = {
    "per_component": "real, or complex with σ² on each part",
    "circular": "complex, circular with σ² in all",
}
Bound = Callable[[Mechanism], float]
CLAIMED = "what this convention would claim"


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
    """Check a user's numbers; sampling is Poisson and δ 1e-5 where nothing is said.

    Raises:
        UserError: one is missing, out of range, or contradicts another.
    """
    sampling, delta = sampling or "poisson", 1e-5 if delta is None else delta
    if sampling not in ("poisson", "uniform", "full"):
        raise unknown("sampling", sampling, ("poisson", "uniform", "full"))
    require(0 < delta < 1, "--delta", delta, "must lie in (0, 1)")
    for flag, count in (("--steps", steps), ("--epochs", epochs), ("--records", records)):
        require(count is None or count > 0, flag, count, "must be at least 1")
        require(count is None or count <= MOST, flag, count, f"must be at most {MOST:,}")
    if sampling == "full":
        require(
            sample_rate in (None, 1.0) and batch_size is None,
            "--sampling",
            "full",
            "takes neither sample rate nor batch size",
        )
        sample_rate = 1.0
    elif batch_size is not None:
        require(
            sample_rate is None, "--batch-size", batch_size, "say it or --sample-rate, not both"
        )
        if records is None:
            raise UserError(
                f"--batch-size={batch_size}: needs --records N, the number of training records."
            )
        require(
            0 < batch_size <= records,
            "--batch-size",
            batch_size,
            f"must lie between 1 and the {records:,} records",
        )
        sample_rate = batch_size / records
    if sample_rate is None:
        raise UserError("--sample-rate is missing: say it, or --batch-size with --records.")
    require(0 < sample_rate <= 1, "--sample-rate", sample_rate, "must lie in (0, 1]")
    if (steps is None) == (epochs is None):
        raise UserError(
            "say either --steps or --epochs, "
            + ("not both." if steps is not None else "one of them is needed.")
        )
    require(
        epochs is None or epochs / sample_rate <= MOST,
        "--sample-rate",
        sample_rate,
        f"makes more than {MOST:,} steps",
    )
    if steps is None:
        assert epochs is not None
        steps = (
            epochs * (records // batch_size)
            if batch_size and records and sampling == "uniform"
            else round(epochs / sample_rate)
        )
    if records_per_patient is not None:
        if records is None:
            raise UserError(
                f"--records-per-patient={records_per_patient}: needs --records N, the number of training records."
            )
        require(
            1 <= records_per_patient <= records,
            "--records-per-patient",
            records_per_patient,
            f"must lie in 1 to {records:,}",
        )
    number = records or UNKNOWN_RECORDS
    drawn = Sampling(sampling, sample_rate, sample_rate * number, number)  # type: ignore[arg-type]
    return Setting(
        drawn, steps, epochs or max(1, round(steps * sample_rate)), delta, records_per_patient
    )


def for_sigma(given: Setting, sigma: float, accountant: str | None) -> list[Answer]:
    """ε at a user's σ: PLD, RDP and GDP-CLT for both conventions of noise, or one accountant's claim.

    Raises:
        UserError: σ is out of range, or no accountant has this name.
    """
    require(
        sigma == 0 or LEAST_NOISE <= sigma <= MOST_NOISE,
        "--sigma",
        sigma,
        "must be 0, or lie in 0.0001 to 1000000",
    )
    if _is_convention(given, accountant):
        return [
            Answer(
                "as claimed",
                sigma,
                sigma,
                str(accountant),
                claimed_epsilon(str(accountant), _claim(given, sigma)),
                CLAIMED,
            )
        ]
    answers = []
    for noise in CONVENTIONS:
        mechanism = mechanism_of(noise, 1.0, sigma, given.sampling)
        for name, epsilon_of, remark, at_least in _accountants(given, accountant):
            low = at_least(mechanism) if at_least else None
            answers.append(
                Answer(noise, sigma, mechanism.z, name, epsilon_of(mechanism), remark, low)
            )
    return answers


def for_target(given: Setting, target: float, accountant: str | None) -> list[Answer]:
    """The σ that meets a target ε, for both conventions of noise (or for one paper's), by an accountant (default pld).

    Raises:
        UserError: the target cannot be met, or no accountant has this name.
    """
    name = accountant or "pld"
    convention = _is_convention(given, name)
    require(0 < target < math.inf, "--target-epsilon", target, "must be positive and finite")
    try:
        if convention:
            sigma = calibrate(target, name, _claim(given, 0.0))
            return [
                Answer(
                    "as claimed",
                    sigma,
                    sigma,
                    name,
                    claimed_epsilon(name, _claim(given, sigma)),
                    CLAIMED,
                )
            ]
        answers = []
        entries = _accountants(given, name)
        if given.records_per_patient:
            entries = entries[1:] if name == "pld" else entries  # the target is then the patient's
        _, epsilon_of, remark, at_least = entries[0]
        for noise in CONVENTIONS:
            question = {
                "given": dataclasses.asdict(given),
                "noise": noise,
                "by": name,
                "remark": remark,
            }

            def of(sigma: float, noise: str = noise) -> float:
                return epsilon_of(mechanism_of(noise, 1.0, sigma, given.sampling))

            sigma = solve(target, of, question)
            mechanism = mechanism_of(noise, 1.0, sigma, given.sampling)
            low = at_least(mechanism) if at_least else None
            answers.append(Answer(noise, sigma, mechanism.z, name, of(sigma), remark, low))
        return answers
    except ValueError as error:
        raise UserError(f"--target-epsilon={target:g}: {error}.") from None


def _claim(given: Setting, sigma: float) -> Claim:
    s = given.sampling
    return Claim(sigma, s.sample_rate, given.steps, given.delta, s.records, given.epochs)


def _is_convention(given: Setting, accountant: str | None) -> bool:
    """Whether the accountant makes a claim from nominal numbers, rather than bound a mechanism.

    Raises:
        UserError: there is no such accountant, or it needs to know how many records there are.
    """
    if accountant is None or accountant in answer_for_mechanisms():
        return False
    lookup("accountant", accountant)
    if given.sampling.records == UNKNOWN_RECORDS:
        raise UserError(
            f"--accountant={accountant}: needs --records N, the number of training records."
        )
    return True


def _accountants(given: Setting, only: str | None) -> list[tuple[str, Bound, str, Bound | None]]:
    """Name, ε and a remark of each accountant, and a lower bound where it knows one."""
    steps, delta, per_patient = given.steps, given.delta, given.records_per_patient
    remarks = {
        "tight": "tight: from the best attack known to the best proven bound"
        if given.sampling.scheme == "uniform"
        else "tight: an upper bound, nearly exact",
        "bound": "an upper bound, looser",
        "approximation": "NOT a bound: an approximation that can fall below the truth",
    }

    def after(bound: Any) -> Any:
        return bound and (lambda mechanism: bound(mechanism, steps, delta))

    every: list[tuple[str, Bound, str, Bound | None]] = [
        (name, after(answer.epsilon), remarks[answer.kind], after(answer.at_least))
        for name, answer in answer_for_mechanisms().items()
    ]
    if per_patient:
        text = f"tight, for a patient or image with {per_patient} records"
        patient = partial(
            patient_epsilon, records_per_patient=per_patient, steps=steps, delta=delta
        )
        every.insert(
            1, ("pld", patient, text, lambda m: patient_interval(m, per_patient, steps, delta)[0])
        )
    return [entry for entry in every if only in (None, entry[0])]


def as_rich(given: Setting, answers: list[Answer]) -> RichTable:
    """A user's answers on a terminal."""
    s = given.sampling
    title = f"{s.scheme} sampling, q {s.sample_rate:g}, {given.steps:,} steps, δ {given.delta:g}; neighbours: {s.adjacency}"
    table = RichTable(title=title.replace("_", " "), title_justify="left")
    for column in ("noise", "σ", "z", "accountant", "ε", ""):
        table.add_column(column)
    for a in answers:
        epsilon = interval(a.at_least, a.epsilon)
        table.add_row(
            CONVENTIONS.get(a.noise, a.noise),
            f"{a.sigma:.5g}",
            f"{a.z:.4g}",
            a.accountant,
            epsilon,
            a.remark,
        )
    return table


def as_text(given: Setting, answers: list[Answer], form: str) -> str:
    """A user's answers as Markdown, CSV or JSON."""
    common = {
        "sampling": given.sampling.scheme,
        "sample_rate": given.sampling.sample_rate,
        "steps": given.steps,
    }
    own = [{key: rounded(value) for key, value in vars(answer).items()} for answer in answers]
    return formats.as_text([common | {"delta": given.delta} | answer for answer in own], form)
