"""`zdp-bench epsilon` with a user's own numbers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest

from tests.report.test_epsilon import run
from zdp_bench.privacy.accounting import pld, pld_uniform

Capture = pytest.CaptureFixture[str]

SETTING = "--sample-rate 0.01 --steps 1000 --delta 1e-5"


def answers(capsys: Capture, words: str) -> list[dict[str, Any]]:
    code, out, _ = run(capsys, *words.split(), "--format", "json")
    assert code == 0
    return json.loads(out)


def test_sigma_is_answered_with_every_epsilon(capsys: Capture) -> None:
    lines = answers(capsys, f"--sigma 1.1 {SETTING}")
    found = {(line["noise"], line["accountant"]): line["epsilon"] for line in lines}
    assert set(found) == {
        (noise, accountant)
        for noise in ("per_component", "circular")
        for accountant in ("pld", "rdp", "gdp_clt")
    }
    assert found["per_component", "pld"] == pytest.approx(1.5154, abs=1e-3)
    circular = pld(1.1 / math.sqrt(2), 0.01, 1000, 1e-5)
    assert found["circular", "pld"] == pytest.approx(circular, rel=1e-4)
    assert lines[0]["at_least"] == lines[0]["epsilon"]
    shown = run(capsys, "--sigma", "1.1", *SETTING.split())[1]
    assert "NOT a bound" in shown


def test_epochs_of_fixed_size_batches_have_whole_batches(capsys: Capture) -> None:
    training = "--batch-size 64 --records 1000 --epochs 4 --sampling uniform"
    lines = answers(capsys, f"--sigma 1.1 {training} --accountant pld")
    assert [line["steps"] for line in lines] == [4 * 15, 4 * 15]
    assert lines[0]["epsilon"] == pytest.approx(pld_uniform(0.55, 0.064, 60, 1e-5), rel=1e-4)


def test_fixed_size_batches_are_answered_with_an_interval(capsys: Capture) -> None:
    training = f"{SETTING} --records 60000 --records-per-patient 8 --sampling uniform"
    _, _, _, _, record, patient, *others = answers(capsys, f"--sigma 1.1 {training}")
    assert record["at_least"] == pytest.approx(30.4, abs=0.05)
    assert record["epsilon"] == pytest.approx(33.2, abs=0.05)
    assert record["epsilon"] < patient["at_least"] < patient["epsilon"]
    assert [other["at_least"] for other in others] == [None, None]
    assert "30.3 to 33.3" in run(capsys, "--sigma", "1.1", *training.split())[1]


def test_a_patients_epsilon_follows_the_records(capsys: Capture) -> None:
    training = f"{SETTING} --records 5000 --records-per-patient 3"
    record, patient, *_ = answers(capsys, f"--sigma 2 {training} --accountant pld")
    assert patient["epsilon"] > record["epsilon"]
    assert "3 records" in patient["remark"]


@pytest.mark.parametrize("accountant", ["pld", "rdp", "gdp_clt", "deepee_2021"])
def test_a_target_is_answered_with_sigma(accountant: str, capsys: Capture) -> None:
    training = f"{SETTING} --records 60000 --accountant {accountant}"
    for line in answers(capsys, f"--target-epsilon 2 {training}"):
        assert 1.995 < line["epsilon"] <= 2
        again = answers(capsys, f"--sigma {line['sigma']!r} {training}")
        same = next(other for other in again if other["noise"] == line["noise"])
        assert same["epsilon"] == pytest.approx(line["epsilon"], rel=1e-3)


DRAWN = "--sample-rate 0.01 --steps 10 "


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (DRAWN + "--sigma 1e-300", "--sigma=1e-300: must be 0, or lie in 0.0001 to 1000000"),
        (DRAWN + "--sigma 1e300", "--sigma=1e+300: must be 0, or lie in"),
        (DRAWN + "--sigma -1", "--sigma=-1.0: must be 0, or lie in"),
        (DRAWN + "--sigma nan", "--sigma=nan: must be 0, or lie in"),
        (DRAWN + "--sigma x", "--sigma=x: must be a number, 0 or more."),
        (DRAWN + "--target-epsilon 0", "must be positive"),
        (DRAWN + "--target-epsilon 1e9", "nothing to calibrate"),
        (DRAWN + "--sigma 1 --target-epsilon 1", "not both"),
        (DRAWN + "--sigma 1 --delta 2", "must lie above 0 and below 0.1"),
        (DRAWN + "--sigma 1 --epochs 3", "not both"),
        (DRAWN + "--sigma 1 --accountant pdl", "Did you mean 'pld'?"),
        (DRAWN + "--sigma 1 --accountant deepee_2021", "needs --records"),
        (DRAWN + "--target-epsilon 1 --accountant pdl", "Did you mean 'pld'?"),
        (DRAWN + "--sigma 1 --sampling posson", "Did you mean 'poisson'?"),
        (DRAWN + "--sigma 1 --batch-size 10", "not both"),
        (DRAWN + "--sigma 1 --records 0", "must be at least 1"),
        (DRAWN + "--sigma 1 --records-per-patient 3", "needs --records"),
        (DRAWN + "--sigma 1 --records 10 --records-per-patient 30", "must lie in 1 to 10"),
        (DRAWN + "--sigma 1 --bogus", "is not known"),
        (DRAWN + "--sigma 1 --format xml", "is not known"),
        ("--sigma 1 --steps 3", "--sample-rate is missing"),
        ("--sigma 1 --sample-rate 2 --steps 3", "must lie in (0, 1]"),
        ("--sigma 1 --sample-rate 0.1", "one of them is needed"),
        ("--sigma 1 --sample-rate 0.1 --steps 0", "must be at least 1"),
        ("--sigma 1 --sample-rate 0.1 --epochs 0", "must be at least 1"),
        ("--sigma 1 --batch-size 10 --steps 3", "needs --records"),
        ("--sigma 1 --batch-size 10 --records 5 --steps 3", "must lie between 1 and the 5 records"),
        ("--sigma 1 --sampling full --sample-rate 0.5 --steps 3", "takes neither"),
        ("--delta 1e-3", "says too little"),
        ("--steps 10", "says too little"),
    ],
)
def test_wrong_numbers_end_in_one_sentence(words: str, says: str, capsys: Capture) -> None:
    code, out, err = run(capsys, *words.split())
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_it_needs_no_torch() -> None:
    words = ["epsilon", "--sigma", "1", "--sample-rate", "0.1", "--steps", "3"]
    code = (
        f"import sys\nfrom zdp_bench.cli import main\ntry: main({words})\n"
        "except SystemExit as end: assert not end.code\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
