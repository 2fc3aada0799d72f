"""Every case gets the verdict it deserves, and gets it because of what it claims."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math

import pytest

from tests.extras.audit.cases import CASES, AuditCase
from zdp_bench import cli
from zdp_bench.extras.audit import recipe as module
from zdp_bench.extras.audit.release import RELEASE_DELTA, Finding
from zdp_bench.privacy.accounting import gdp_epsilon


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_case_gets_the_verdict_it_deserves(case: AuditCase) -> None:
    finding = case.audit(seed=0, confidence=0.99, trials=20_000)
    assert finding.verdict == case.expected, finding
    if case.rate == 1:
        assert finding.epsilon_claimed == pytest.approx(gdp_epsilon(1 / case.z, RELEASE_DELTA))
    elif case.steps == 1:  # at a δ above the rate
        assert finding.epsilon_claimed == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.trials > 2_000],
    ids=lambda case: case.name,
)
def test_the_verdict_is_the_same_for_another_seed(case: AuditCase) -> None:
    assert case.audit(1, 0.99, trials=20_000).verdict == case.expected


def test_the_same_seed_gives_the_same_finding() -> None:
    case = next(case for case in CASES if case.name == "circular_2021")
    assert case.audit(5, 0.99, 2000) == case.audit(5, 0.99, 2000)
    assert case.audit(5, 0.99, 2000) != case.audit(6, 0.99, 2000)


def test_the_sound_cases_would_be_caught_at_a_smaller_claim() -> None:
    """What passes, passes because its claim is right, not because the attack is blind."""
    for name, z in (
        ("per_component", 1.6),
        ("circular", 1.2),
    ):
        case = next(case for case in CASES if case.name == name)
        assert dataclasses.replace(case, z=z).audit(0, 0.99, 20_000).verdict == "flagged"


def zdp_bench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["audit", *words])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def found(verdict: str) -> Finding:
    return Finding("case", "claim |x|", math.inf, 1.25, 1e-5, 0.99, verdict, "evidence")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ([found("passes"), found("passes")], 0),
        ([found("passes"), found("flagged")], 1),
    ],
)
@pytest.mark.parametrize("form", ["rich", "csv", "json"])
def test_every_format_holds_every_finding_and_the_exit_code_says_whether_one_is_flagged(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    findings: list[Finding],
    code: int,
    form: str,
) -> None:
    monkeypatch.setattr(module, "audit", lambda *_: iter(findings))
    left, out, _ = zdp_bench(capsys, "recipe=quickstart", "--format", form)
    assert left == code
    verdicts = [finding.verdict for finding in findings]
    if form == "csv":
        assert [row["verdict"] for row in csv.DictReader(io.StringIO(out))] == verdicts
    elif form == "json":
        assert [(row["verdict"], row["epsilon_claimed"]) for row in json.loads(out)] == [
            (verdict, "inf") for verdict in verdicts
        ]
    else:
        assert all(verdict in out for verdict in verdicts)
        assert "∞" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--confidence", "1.5"], "--confidence=1.5: must lie in"),
        (["--canaries", "2"], "--canaries=2: must be at least 10"),
        (["--steps", "0"], "--steps=0: must be at least 1"),
        (["algorithm.noise_multiplier=0"], "its ε is ∞"),
        (["algorithm.noise_multiplyer=1"], "Did you mean 'algorithm.noise_multiplier'"),
    ],
)
def test_mistakes_end_in_one_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    code, out, err = zdp_bench(capsys, "recipe=quickstart", *words)
    assert code == 2
    assert sentence in err
    assert "Traceback" not in out + err
