"""`zdp-bench epsilon`: every ε of the five papers, and the ε of numbers of your own."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.test_cli import run
from zdp_bench.privacy.accounting import pld, pld_replaced, pld_uniform
from zdp_bench.report import epsilon
from zdp_bench.report.epsilon import Quoted, Reproduction, same_digits

# The lines that every change computes; nightly runs compute all.
SOME = {
    ("zeta_dp_2021", "PhaseMNIST", "0.53"),
    ("zeta_dp_2021", "fastMRI knee", "inf"),
    ("deepee_2021", "MSD liver", "0.12"),
    ("deepee_2021", "MSD liver", "0.35"),
    ("gredp_2024", "MNIST", "2"),
    ("dp_dfa_2020", "Fashion-MNIST", "13.75"),
    ("zeta_dp_2024", "MSD brain", "1"),
}


def is_quick(line: Quoted) -> bool:
    return (line.paper, line.dataset, line.printed) in SOME


@pytest.fixture(scope="module", params=["some", pytest.param("all", marks=pytest.mark.slow)])
def table(request: pytest.FixtureRequest) -> list[Reproduction]:
    lines = [line for line in epsilon.read_quoted() if request.param == "all" or is_quick(line)]
    return [epsilon.reproduce(line) for line in lines]


def test_every_quoted_epsilon_is_there() -> None:
    counts = {
        "zeta_dp_2021": 13,  # 11, two of them read with two batch sizes
        "dp_dfa_2020": 24,
        "deepee_2021": 6,
        "zeta_dp_2024": 10,
        "gredp_2024": 30,  # 15, read with two noises
    }
    assert Counter(line.paper for line in epsilon.read_quoted()) == counts


def test_of_dp_dfa_23_of_24_are_reproduced_to_the_digit(table: list[Reproduction]) -> None:
    of_paper = [row for row in table if row.quoted.paper == "dp_dfa_2020"]
    (wrong,) = [row for row in of_paper if row.verdict != "reproduced"]
    assert wrong.quoted.printed == "13.75"
    assert math.floor(wrong.reproduced * 100) / 100 == 13.78


def test_only_fixed_size_batches_have_an_interval(table: list[Reproduction]) -> None:
    for row in table:
        fixed = row.quoted.sampling == "uniform" and row.tight < math.inf
        assert row.tight_at_least <= row.tight
        assert (row.tight_at_least < row.tight) == fixed
    assert epsilon.sheet(table).rows[0][8] == "30.3 to 33.3"  # Table 1 of ζ-DP


def test_calibrated_rows_meet_their_target(table: list[Reproduction]) -> None:
    calibrated = [row for row in table if row.verdict == "calibrated"]
    assert calibrated
    for row in calibrated:
        assert float(row.quoted.printed) * 0.998 < row.reproduced <= float(row.quoted.printed)


@pytest.mark.parametrize(
    ("printed", "value", "same"),
    [
        ("4.43", 4.4387, True),  # truncated
        ("2.69", 2.6881, True),  # rounded
        ("13.75", 13.7855, False),
        ("0.53", 0.5401, False),
        ("0.53", 0.5249, False),
        ("<1", 0.62, True),
    ],
)
def test_same_digits(printed: str, value: float, same: bool) -> None:
    assert same_digits(printed, value) is same


def test_the_committed_tables_are_these(table: list[Reproduction]) -> None:
    """All their words, and all their numbers up to last digits, which may depend on the machine."""
    committed = Path(__file__).parents[2] / "results" / "tables"
    number = re.compile(r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?")
    quoted = epsilon.read_quoted()
    sheet = epsilon.sheet(table)
    for form, head in (("csv", "paper,"), ("md", "| paper |")):
        lines = (committed / f"epsilon.{form}").read_text(encoding="utf-8").splitlines()
        first = next(n for n, line in enumerate(lines) if line.startswith(head))
        first += 1 if form == "csv" else 2
        text = sheet.as_text(form).splitlines()
        made = text[next(n for n, line in enumerate(text) if line.startswith(head)) :]
        made = made[1 if form == "csv" else 2 :]
        for row, here in zip(table, made, strict=False):
            there = lines[first + quoted.index(row.quoted)]
            assert number.sub("#", here) == number.sub("#", there), "zdp-bench epsilon --write"
            for pair in zip(number.findall(here), number.findall(there), strict=True):
                a, b = (float(digits.replace(",", "")) for digits in pair)
                assert math.isclose(a, b, rel_tol=0.02), "zdp-bench epsilon --write"


Capture = pytest.CaptureFixture[str]

SETTING = "--sample-rate 0.01 --steps 1000 --delta 1e-5"


def answers(capsys: Capture, words: str) -> list[dict[str, Any]]:
    code, out, _ = run(capsys, "epsilon", *words.split(), "--format", "json")
    assert code == 0
    return json.loads(out)


def test_sigma_is_answered_with_every_epsilon(capsys: Capture) -> None:
    lines = answers(capsys, f"--sigma 1.1 {SETTING}")
    parts = [line for line in lines if "one example of a unit" in line["remark"]]
    by_hand = [pld_replaced(z, 0.01, 1000, 1e-5) for z in (1.1, 1.1 / math.sqrt(2))]
    assert [line["epsilon"] for line in parts] == pytest.approx(by_hand, rel=1e-4)
    whole = [line for line in lines if line not in parts]
    epsilons = {(line["noise"], line["accountant"]): line["epsilon"] for line in whole}
    assert set(epsilons) == {
        (noise, accountant)
        for noise in ("per_component", "circular")
        for accountant in ("pld", "rdp", "gdp_clt")
    }
    assert epsilons["per_component", "pld"] == pytest.approx(1.5154, abs=1e-3)
    circular = pld(1.1 / math.sqrt(2), 0.01, 1000, 1e-5)
    assert epsilons["circular", "pld"] == pytest.approx(circular, rel=1e-4)
    exact = pld(1.1, 0.01, 1000, 1e-5)  # in six digits, the bounds are rounded away from it
    assert exact * (1 - 1e-5) < lines[0]["at_least"] <= exact <= lines[0]["epsilon"]
    shown = run(capsys, "epsilon", "--sigma", "1.1", *SETTING.split())[1]
    assert "NOT a bound" in shown


def test_epochs_of_fixed_size_batches_have_whole_batches(capsys: Capture) -> None:
    training = "--batch-size 64 --examples 1000 --epochs 4 --sampling uniform"
    lines = answers(capsys, f"--sigma 1.1 {training}")
    assert {line["steps"] for line in lines} == {4 * 15}
    assert lines[0]["epsilon"] == pytest.approx(pld_uniform(0.55, 0.064, 60, 1e-5), rel=1e-4)


def test_fixed_size_batches_are_answered_with_an_interval(capsys: Capture) -> None:
    training = f"{SETTING} --examples 60000 --examples-per-patient 8 --sampling uniform"
    _, _, _, _, record, patient, *others = answers(capsys, f"--sigma 1.1 {training}")
    assert record["at_least"] == pytest.approx(30.4, abs=0.05)
    assert record["epsilon"] == pytest.approx(33.2, abs=0.05)
    assert record["epsilon"] < patient["at_least"] < patient["epsilon"]
    assert [other["at_least"] for other in others] == [None, None]


def test_a_patients_epsilon_follows_the_records(capsys: Capture) -> None:
    training = f"{SETTING} --examples 5000 --examples-per-patient 3"
    record, part, patient, *_ = answers(capsys, f"--sigma 2 {training}")
    assert patient["epsilon"] > part["epsilon"] > record["epsilon"]
    assert "3 examples" in patient["remark"]


def test_a_target_is_answered_with_sigma(capsys: Capture) -> None:
    for line in answers(capsys, f"--target-epsilon 2 {SETTING} --examples 60000"):
        assert 1.995 < line["epsilon"] <= 2
        assert line["accountant"] == "pld"
        z = line["sigma"] / (math.sqrt(2) if line["noise"] == "circular" else 1)
        assert pld(z, 0.01, 1000, 1e-5) == pytest.approx(line["epsilon"], rel=1e-3)


@pytest.mark.parametrize("target", [0.5, 2, 4, 8])
@pytest.mark.parametrize("steps", [100, 300])
def test_the_sigma_that_is_shown_keeps_the_target(target: float, steps: int) -> None:
    """Rounded to the nearest, every other one had a larger ε: 4.01 instead of 4."""
    training = epsilon.read_training(
        sampling="poisson",
        sample_rate=0.01,
        batch_size=None,
        examples=None,
        steps=steps,
        epochs=None,
        delta=1e-5,
    )
    sheet = epsilon.answer(training, None, target)
    for sigma in (float(sheet.rows[0][1]), sheet.numbers[0]["sigma"]):
        assert pld(sigma, 0.01, steps, 1e-5) <= target
    assert sheet.numbers[0]["epsilon"] <= target


def test_the_numbers_of_a_quoted_epsilon_are_rounded_to_the_safe_side() -> None:
    quoted = next(line for line in epsilon.read_quoted() if line.paper == "gredp_2024")
    row = Reproduction(
        quoted=quoted,
        sigma=1.00000049,
        reproduced=2.00000049,
        verdict="reproduced",
        tight=1.2345671,
        tight_at_least=1.2345679,
        tight_patient=3.0000001,
    )
    numbers = epsilon._numbers(row)
    assert (numbers["tight"], numbers["tight_at_least"]) == (1.23457, 1.23456)
    assert (numbers["sigma"], numbers["tight_patient"]) == (1.00001, 3.00001)
    assert numbers["reproduced"] == 2.0


DRAWN = "--sample-rate 0.01 --steps 10 "


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (DRAWN + "--sigma 1e-300", "--sigma=1e-300: must be 0, or lie in 0.0001 to 1000000"),
        (DRAWN + "--sigma x", "--sigma: invalid float value: 'x'"),
        (DRAWN + "--target-epsilon 0", "must be positive"),
        (DRAWN + "--target-epsilon 1e9", "nothing to calibrate"),
        (DRAWN + "--sigma 1 --target-epsilon 1", "not allowed with argument --sigma"),
        (DRAWN + "--sigma 1 --delta 2", "must lie above 0 and below 0.1"),
        (DRAWN + "--sigma 1 --epochs 3", "not allowed with argument --steps"),
        (DRAWN + "--sigma 1 --sampling posson", "Did you mean 'poisson'?"),
        (DRAWN + "--sigma 1 --examples-per-patient 3", "needs --examples"),
        (DRAWN + "--sigma 1 --examples 10 --examples-per-patient 30", "between 1 and 10"),
        ("--sigma 1 --steps 3", "are needed"),
        ("--sigma 1 --sample-rate 2 --steps 3", "must lie in (0, 1]"),
        (
            "--sigma 1 --steps 3 --sampling uniform --sample-rate 1e-4 --examples 1000",
            "of 1,000 is a batch of 0",
        ),
        ("--sigma 1 --sample-rate 0.1", "are needed"),
        ("--sigma 1 --batch-size 10 --steps 3", "needs --examples"),
        ("--sigma 1 --sampling full --sample-rate 0.5 --steps 3", "takes neither"),
        ("--steps 10", "is not enough"),
    ],
)
def test_wrong_numbers_end_in_one_sentence(words: str, says: str, capsys: Capture) -> None:
    code, out, err = run(capsys, "epsilon", *words.split())
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.strip().splitlines()) == 1
