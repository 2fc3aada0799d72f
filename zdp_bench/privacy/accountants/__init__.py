"""The accountants that make a claim: from the numbers a paper states to the ε it would print.

An accountant is a function of a `Claim`, registered under the name that `accountant: {name: ...}`
and `zdp-bench epsilon --accountant` use. Its YAML in `conf/accountant/` says in its first line what
it is.

    @register("accountant", "my_paper_2027")
    def my_paper_2027(claim: Claim) -> float: ...

Such a function is a convention: it believes the numbers it is given. One that also has an ε for the
mechanism that was run says so with `@for_mechanisms`, and `zdp-bench epsilon` lists it for every
kind of noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.registry import lookup, names


@dataclass(frozen=True)
class Claim:
    """The numbers a paper gives to its accountant: the NOMINAL noise multiplier σ, whatever the
    mechanism really gives.

    Attributes:
        noise_multiplier: σ as the paper states it.
        sample_rate: probability that an example is drawn, or batch / examples.
        steps: how many were taken.
        delta: the δ of the claim.
        records: training examples.
        epochs: passes over them.
        batch_size: stated batch; None: sample_rate × examples.
        sensitivity: where σ is the noise on the MEAN of a batch (DP-DFA), how far one example moves
            the batch's SUM; else None.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    delta: float
    records: int
    epochs: int
    batch_size: int | None = None
    sensitivity: float | None = None

    @property
    def batch(self) -> int:
        """The stated batch size, or the expected one."""
        return self.batch_size or max(1, round(self.sample_rate * self.records))


Accountant = Callable[[Claim], float]
Bound = Callable[[Mechanism, int, float], float]  # (mechanism, steps, δ) -> ε


@dataclass(frozen=True)
class ForMechanisms:
    """What an accountant says of a mechanism that was run.

    Attributes:
        kind: tight (exact or nearly so), bound (looser), or approximation (can fall below the
            truth).
        epsilon: its ε.
        at_least: a lower bound on the true ε, where it knows one.
    """

    kind: Literal["tight", "bound", "approximation"]
    epsilon: Bound
    at_least: Bound | None = None


A = TypeVar("A", bound=Accountant)


def for_mechanisms(
    kind: Literal["tight", "bound", "approximation"],
    epsilon: Bound,
    at_least: Bound | None = None,
) -> Callable[[A], A]:
    """Let the decorated accountant answer for mechanisms too; see `ForMechanisms`."""

    def enter(accountant: A) -> A:
        accountant.for_mechanisms = ForMechanisms(kind, epsilon, at_least)  # type: ignore[attr-defined]
        return accountant

    return enter


def claimed_epsilon(accountant: str, claim: Claim) -> float:
    """The ε that an accountant claims.

    Raises:
        UserError: there is no accountant of this name.
    """
    return float(lookup("accountant", accountant)(claim))


def answer_for_mechanisms() -> dict[str, ForMechanisms]:
    """The accountants that have an ε for a mechanism: tight ones first, then bounds, then
    approximations.
    """
    found = {
        name: getattr(lookup("accountant", name), "for_mechanisms", None)
        for name in names("accountant")
    }
    order = ("tight", "bound", "approximation")
    answering = {name: answer for name, answer in found.items() if answer}
    return dict(sorted(answering.items(), key=lambda item: order.index(item[1].kind)))
