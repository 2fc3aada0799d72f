"""`zdp-bench epsilon`: every ε of the five papers."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path

import pytest

from zdp_bench.cli import main
from zdp_bench.privacy.accounting import pld, pld_uniform
from zdp_bench.report import epsilon
from zdp_bench.report.epsilon import Row, same_digits


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return epsilon.rows()


def of(table: list[Row], paper: str, place: str = "") -> list[Row]:
    return [
        row for row in table if row.quoted.paper == paper and row.quoted.place.startswith(place)
    ]


def printed(table: list[Row], verdict: str) -> set[str]:
    return {row.quoted.printed for row in table if row.verdict == verdict}


def test_every_quoted_epsilon_is_there(table: list[Row]) -> None:
    quoted = {
        "zeta_dp_2021": 11,
        "dp_dfa_2020": 24,
        "deepee_2021": 6,
        "zeta_dp_2024": 10,
        "gredp_2024": 30,  # 15, read with two noises
    }
    assert {paper: len(of(table, paper)) for paper in quoted} == quoted
    assert len(table) == 81
    assert epsilon.sheet(table).title.startswith("66 ε of five papers in 81 readings: ")


def test_of_dp_dfa_23_of_24_are_reproduced_to_the_digit(table: list[Row]) -> None:
    (wrong,) = [row for row in of(table, "dp_dfa_2020") if row.verdict != "reproduced"]
    assert wrong.quoted.printed == "13.75"
    assert math.floor(wrong.reproduced * 100) / 100 == 13.78


def test_of_deepee_four_of_six_are_reproduced(table: list[Row]) -> None:
    rows = of(table, "deepee_2021")
    assert printed(rows, "reproduced") == {"0.52", "2.69", "0.12", "2.81"}
    assert printed(rows, "not reproduced") == {"0.62", "0.35"}


def test_of_zeta_2021_only_table_1_is_reproduced(table: list[Row]) -> None:
    rows = of(table, "zeta_dp_2021")
    assert printed(of(table, "zeta_dp_2021", "Table 1"), "reproduced") >= {"0.53"}
    assert printed(rows, "not reproduced") >= {"1.76", "1.47", "0.67"}


def test_tight_epsilon_of_zeta_2021_counts_circular_noise_and_its_sampling(
    table: list[Row],
) -> None:
    complex_row, real_row = (
        row for row in of(table, "zeta_dp_2021", "Table 1") if row.quoted.printed == "0.53"
    )
    z = 1.1 / math.sqrt(2)
    assert complex_row.tight_poisson == pytest.approx(pld(z, 0.01, 1000, 1e-5))
    assert complex_row.tight == pytest.approx(pld_uniform(z / 2, 0.01, 1000, 1e-5))
    assert real_row.tight_poisson == pytest.approx(pld(1.1, 0.01, 1000, 1e-5))


def test_only_fixed_size_batches_have_an_interval(table: list[Row]) -> None:
    for row in table:
        fixed = row.quoted.sampling == "uniform" and row.tight < math.inf
        assert row.tight_at_least <= row.tight
        assert (row.tight_at_least < row.tight) == fixed
    assert epsilon.sheet(of(table, "zeta_dp_2021", "Table 1")).rows[0][8] == "30.3 to 33.3"


def test_a_target_of_2_is_3_4_with_gredps_complex_noise_and_infinite_with_real(
    table: list[Row],
) -> None:
    with_complex, with_real = (
        row
        for row in of(table, "gredp_2024", "Table VIII")
        if row.quoted.printed == "2" and row.quoted.dataset == "MNIST"
    )
    assert with_complex.tight == pytest.approx(3.4, abs=0.05)
    assert with_real.tight == math.inf
    real = [row for row in of(table, "gredp_2024") if row.quoted.noise == "real_on_complex"]
    assert {row.tight for row in real} == {math.inf}


def test_calibrated_rows_meet_their_target(table: list[Row]) -> None:
    calibrated = [row for row in table if row.verdict == "calibrated"]
    assert len(calibrated) == 40
    for row in calibrated:
        assert float(row.quoted.printed) * 0.998 < row.reproduced <= float(row.quoted.printed)


def test_a_patient_of_the_2024_paper_has_a_much_larger_epsilon_than_a_record(
    table: list[Row],
) -> None:
    for row in of(table, "zeta_dp_2024"):
        assert row.tight_patient is not None
        assert row.tight_patient > 100 * row.tight


@pytest.mark.parametrize(
    ("printed", "value", "same"),
    [
        ("4.43", 4.4387, True),  # truncated
        ("2.69", 2.6881, True),  # rounded
        ("0.12", 0.1193, True),
        ("13.75", 13.7855, False),
        ("17.8", 17.80, True),
        ("0.53", 0.5399, True),
        ("0.53", 0.5401, False),
        ("0.53", 0.5249, False),
        ("<1", 0.62, True),
        ("<1", 1.0, False),
    ],
)
def test_same_digits(printed: str, value: float, same: bool) -> None:
    assert same_digits(printed, value) is same


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["epsilon", *words])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_committed_tables_are_these(table: list[Row], tmp_path: Path) -> None:
    """All their words, and all their numbers up to last digits, which may depend on the machine."""
    committed = Path(__file__).parents[2] / "results" / "tables"
    number = re.compile(r"(?<![\w])\d[\d.,]*(?:e[-+]?\d+)?")
    for path in epsilon.sheet(table).write(tmp_path / "epsilon"):
        here, there = (file.read_text(encoding="utf-8") for file in (path, committed / path.name))
        assert number.sub("#", here) == number.sub("#", there), "run `zdp-bench epsilon`"
        for pair in zip(number.findall(here), number.findall(there), strict=True):
            a, b = (digits.replace(",", "").rstrip(".") for digits in pair)
            assert a == b or math.isclose(float(a), float(b), rel_tol=0.02), (
                "run `zdp-bench epsilon`"
            )


def test_the_papers_table_has_every_form(
    table: list[Row],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(epsilon, "rows", lambda: table)

    def show(form: str) -> str:
        code, out, _ = run(capsys, "--results", str(tmp_path), "--format", form)
        assert code == 0
        return out

    shown = show("rich")
    assert "not reproduced" in shown
    assert "epsilon.csv" in shown.replace("\n", "")
    assert (tmp_path / "tables" / "epsilon.md").read_text(encoding="utf-8") == show("md")
    lines = json.loads(show("json"))
    cells = list(csv.DictReader(io.StringIO(show("csv"))))
    assert len(lines) == len(cells) == 81
    assert [line["tight"] for line in lines if line["noise"] == "real_on_complex"] == ["inf"] * 15
    assert lines[0]["printed"] == cells[0]["printed"] == "0.53"
