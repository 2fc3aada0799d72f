"""The result of an attack: the ε it refutes, the ε that was claimed, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["passes", "flagged", "skipped"]
Expected = Literal["passes", "flagged", "skipped", "either"]


@dataclass(frozen=True)
class Finding:
    """One attack and its result."""

    case: str
    claim: str
    epsilon_claimed: float
    lower_bound: float
    delta: float
    confidence: float
    verdict: Verdict
    expected: Expected
    evidence: str

    @property
    def as_expected(self) -> bool:
        return self.expected in (self.verdict, "either")

    @staticmethod
    def of(
        case: str,
        claim: str,
        claimed: float,
        bound: float,
        delta: float,
        confidence: float,
        expected: Expected,
        evidence: str,
    ) -> Finding:
        """Make a finding whose verdict follows from the bound."""
        verdict: Verdict = "flagged" if bound > claimed else "passes"
        return Finding(case, claim, claimed, bound, delta, confidence, verdict, expected, evidence)
