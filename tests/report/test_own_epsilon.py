"""`zdp-bench epsilon` with a user's own numbers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.test_epsilon import run
from zdp_bench.privacy.accounting import pld, pld_uniform


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


SETTING = ("--sample-rate", "0.01", "--steps", "1000", "--delta", "1e-5")


def test_a_users_own_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--sigma", "1.1", *SETTING, "--format", "json")
    answers = {(line["noise"], line["accountant"]): line["epsilon"] for line in json.loads(out)}
    assert code == 0
    assert answers["per_component", "pld"] == pytest.approx(1.5154, abs=1e-3)
    assert answers["circular", "pld"] == pytest.approx(
        pld(1.1 / math.sqrt(2), 0.01, 1000, 1e-5), rel=1e-4
    )
    assert set(answers) == {
        (noise, name)
        for noise in ("per_component", "circular")
        for name in ("pld", "rdp", "gdp_clt")
    }
    assert "NOT a bound" in run(capsys, "--sigma", "1.1", *SETTING)[1]


def test_epochs_batches_and_uniform_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--sigma",
        "1.1",
        "--batch-size",
        "64",
        "--records",
        "1000",
        "--epochs",
        "4",
        "--sampling",
        "uniform",
        "--accountant",
        "pld",
    )
    lines = json.loads(run(capsys, *words, "--format", "json")[1])
    assert [line["steps"] for line in lines] == [4 * 15, 4 * 15]  # whole batches of an epoch
    assert lines[0]["epsilon"] == pytest.approx(pld_uniform(0.55, 0.064, 60, 1e-5), rel=1e-4)


def test_fixed_size_batches_are_answered_with_an_interval(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (
        "--sigma",
        "1.1",
        *SETTING,
        "--records",
        "60000",
        "--records-per-patient",
        "8",
        "--sampling",
        "uniform",
    )
    _, _, _, _, record, patient, *others = json.loads(run(capsys, *words, "--format", "json")[1])
    assert record["at_least"] == pytest.approx(30.4, abs=0.05)
    assert record["epsilon"] == pytest.approx(33.2, abs=0.05)
    assert record["epsilon"] < patient["at_least"] < patient["epsilon"]
    assert [other["at_least"] for other in others] == [None, None]
    assert "30.4 to 33.2" in run(capsys, *words)[1]
    exact, *_ = json.loads(run(capsys, "--sigma", "1.1", *SETTING, "--format", "json")[1])
    assert exact["at_least"] == exact["epsilon"]


def test_a_patients_epsilon_stands_beside_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--sigma",
        "2",
        *SETTING,
        "--records",
        "5000",
        "--records-per-patient",
        "3",
        "--accountant",
        "pld",
    )
    record, patient, *_ = json.loads(run(capsys, *words, "--format", "json")[1])
    assert patient["epsilon"] > record["epsilon"]
    assert "3 records" in patient["remark"]


@pytest.mark.parametrize("accountant", ["pld", "rdp", "gdp_clt", "deepee_2021"])
def test_a_target_is_answered_with_sigma(
    accountant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--target-epsilon", "2", *SETTING, "--records", "60000", "--accountant", accountant)
    for line in json.loads(run(capsys, *words, "--format", "json")[1]):
        assert 1.995 < line["epsilon"] <= 2
        again = json.loads(
            run(capsys, "--sigma", repr(line["sigma"]), *words[2:], "--format", "json")[1]
        )
        same = next(other for other in again if other["noise"] == line["noise"])
        assert same["epsilon"] == pytest.approx(line["epsilon"], rel=1e-3)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--sigma 1e-300", "--sigma=1e-300: must be 0, or lie in 0.0001 to 1000000"),
        ("--sigma 1e300", "--sigma=1e+300: must be 0, or lie in"),
        ("--sigma -1", "--sigma=-1.0: must be 0, or lie in"),
        ("--sigma nan", "--sigma=nan: must be 0, or lie in"),
        ("--sigma x", "--sigma=x: must be a number, 0 or more."),
        ("--target-epsilon 0", "must be positive"),
        ("--target-epsilon 1e9", "nothing to calibrate"),
        ("--sigma 1 --target-epsilon 1", "not both"),
        ("--sigma 1 --delta 2", "must lie in (0, 1)"),
        ("--sigma 1 --epochs 3", "not both"),
        ("--sigma 1 --accountant pdl", "Did you mean 'pld'?"),
        ("--sigma 1 --accountant deepee_2021", "needs --records"),
        ("--target-epsilon 1 --accountant pdl", "Did you mean 'pld'?"),
        ("--sigma 1 --sampling posson", "Did you mean 'poisson'?"),
        ("--sigma 1 --batch-size 10", "not both"),
        ("--sigma 1 --records 0", "must be at least 1"),
        ("--sigma 1 --records-per-patient 3", "needs --records"),
        ("--sigma 1 --records 10 --records-per-patient 30", "must lie in 1 to 10"),
        ("--sigma 1 --bogus", "is not known"),
        ("--sigma 1 --format xml", "is not known"),
    ],
)
def test_bad_numbers_end_in_one_sentence(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "--sample-rate", "0.01", "--steps", "10", *words.split())
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
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
def test_missing_numbers_end_in_one_sentence(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
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
