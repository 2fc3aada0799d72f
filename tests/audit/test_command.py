"""`zdp-bench audit`: exit codes, every format, what it writes, and mistakes."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest

from zdp_bench import audit as module
from zdp_bench import cli
from zdp_bench.audit.finding import Finding


def zdp_bench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["audit", *words])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def found(verdict: str, expected: str = "passes") -> Finding:
    return Finding("case", "claim |x|", math.inf, 1.25, 1e-5, 0.99, verdict, expected, "evidence")  # type: ignore[arg-type]


def test_the_exit_code_is_1_when_a_verdict_is_not_the_expected_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for findings, code in (
        ([found("passes")], 0),
        (
            [
                found("passes"),
                found("flagged", "flagged"),
                found("skipped", "skipped"),
                found("flagged", "either"),
            ],
            0,
        ),
        ([found("flagged")], 1),
        ([found("passes"), found("passes", "flagged")], 1),
    ):
        monkeypatch.setattr(module, "audit", lambda *_, findings=findings: iter(findings))
        assert zdp_bench(capsys, "recipe=quickstart", "--results", str(tmp_path))[0] == code


@pytest.mark.parametrize("form", ["rich", "md", "csv", "json"])
def test_every_format_holds_every_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str
) -> None:
    monkeypatch.setattr(
        module, "audit", lambda *_: iter([found("passes"), found("flagged", "flagged")])
    )
    code, out, err = zdp_bench(
        capsys, "recipe=quickstart", "--format", form, "--results", str(tmp_path)
    )
    assert code == 0
    if form == "csv":
        assert [row["verdict"] for row in csv.DictReader(io.StringIO(out))] == ["passes", "flagged"]
    elif form == "json":
        assert [row["epsilon_claimed"] for row in json.loads(out)] == ["inf", "inf"]
    else:
        assert out.count("passes") >= 2
        assert "∞" in out
    tables = tmp_path / "tables"
    assert f"written: {tables / 'audit.md'}" in err
    assert "claim \\|x\\|" in (tables / "audit.md").read_text()
    assert (tables / "audit.csv").read_text().count("\n") == 3


def test_another_recipes_table_has_its_own_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "audit", lambda *_: iter([found("passes")]))
    zdp_bench(capsys, "recipe=mnist", "--results", str(tmp_path))
    assert {path.name for path in (tmp_path / "tables").iterdir()} == {
        "audit_mnist.md",
        "audit_mnist.csv",
    }


def test_chosen_cases_alone_are_attacked_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [
        "recipe=quickstart",
        "--cases",
        "circular_2021,gredp",
        "--format",
        "json",
        "--results",
        str(tmp_path),
    ]
    code, out, _ = zdp_bench(capsys, *words)
    assert code == 0
    assert [(row["case"], row["verdict"]) for row in json.loads(out)] == [
        ("circular_2021", "flagged"),
        ("gredp", "passes"),
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--cases", "circular_2012"],
            "case 'circular_2012' is not known. Did you mean 'circular_2021'",
        ),
        (["--confidence", "1.5"], "--confidence=1.5: must lie in"),
        (["--canaries", "2"], "--canaries=2: must be at least 10"),
        (["--steps", "0"], "--steps=0: must be at least 1"),
        (["algorithm.noise_multiplier=0", "--cases", "recipe"], "its ε is ∞"),
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
