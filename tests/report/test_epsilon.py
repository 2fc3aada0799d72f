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
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture(scope="module")
def table(cache: Path) -> list[Row]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        return epsilon.rows()


def of(table: list[Row], paper: str, place: str = "") -> list[Row]:
    return [
        row for row in table if row.quoted.paper == paper and row.quoted.place.startswith(place)
    ]


def test_every_quoted_epsilon_is_there(table: list[Row]) -> None:
    assert {
        paper: len(of(table, paper))
        for paper in ("zeta_dp_2021", "dp_dfa_2020", "deepee_2021", "zeta_dp_2024", "gredp_2024")
    } == {
        "zeta_dp_2021": 11,
        "dp_dfa_2020": 24,
        "deepee_2021": 6,
        "zeta_dp_2024": 10,
        "gredp_2024": 30,
    }
    assert len(table) == 81
    assert epsilon._title(table).startswith(
        "66 ε of five papers in 81 readings: "
    )  # GReDP's 15 are read with two noises


def test_dp_dfa_23_of_24_to_the_digit(table: list[Row]) -> None:
    (wrong,) = [row for row in of(table, "dp_dfa_2020") if row.verdict != "reproduced"]
    assert wrong.quoted.printed == "13.75"
    assert math.floor(wrong.reproduced * 100) / 100 == 13.78


def test_deepee_four_of_six(table: list[Row]) -> None:
    verdicts = {row.quoted.printed: row.verdict for row in of(table, "deepee_2021")}
    assert {printed for printed, verdict in verdicts.items() if verdict == "reproduced"} == {
        "0.52",
        "2.69",
        "0.12",
        "2.81",
    }
    assert {printed for printed, verdict in verdicts.items() if verdict == "not reproduced"} == {
        "0.62",
        "0.35",
    }


def test_zeta_2021_only_table_1_is_reproduced(table: list[Row]) -> None:
    verdicts = {
        (row.quoted.place, row.quoted.printed): row.verdict for row in of(table, "zeta_dp_2021")
    }
    assert verdicts["Table 1", "0.53"] == "reproduced"
    for where in (("Table 2", "1.76"), ("Table 3", "1.47"), ("Table 5", "0.67")):
        assert verdicts[where] == "not reproduced"


def test_zeta_2021_tight_epsilon_counts_circular_noise_and_its_sampling(table: list[Row]) -> None:
    complex_row, real_row = (
        row for row in of(table, "zeta_dp_2021", "Table 1") if row.quoted.printed == "0.53"
    )
    assert complex_row.tight_poisson == pytest.approx(pld(1.1 / math.sqrt(2), 0.01, 1000, 1e-5))
    assert complex_row.tight == pytest.approx(pld_uniform(1.1 / math.sqrt(2) / 2, 0.01, 1000, 1e-5))
    assert real_row.tight_poisson == pytest.approx(pld(1.1, 0.01, 1000, 1e-5))


def test_only_fixed_size_batches_have_an_interval(table: list[Row]) -> None:
    for row in table:
        assert row.tight_at_least <= row.tight
        assert (row.tight_at_least < row.tight) == (
            row.quoted.sampling == "uniform" and row.tight < math.inf
        )
    assert epsilon._cells(of(table, "zeta_dp_2021", "Table 1")[0])[8] == "30.4 to 33.2"


def test_gredp_target_2_is_3_4_with_complex_noise_and_infinite_with_real(table: list[Row]) -> None:
    rows = [
        row
        for row in of(table, "gredp_2024", "Table VIII")
        if row.quoted.printed == "2" and row.quoted.dataset == "MNIST"
    ]
    noisy, naked = rows
    assert noisy.tight == pytest.approx(3.4, abs=0.05)
    assert naked.tight == math.inf
    assert all(
        row.tight == math.inf
        for row in of(table, "gredp_2024")
        if row.quoted.noise == "real_on_complex"
    )


def test_calibrated_rows_meet_their_target(table: list[Row]) -> None:
    calibrated = [row for row in table if row.verdict == "calibrated"]
    assert len(calibrated) == 40
    for row in calibrated:
        assert float(row.quoted.printed) * 0.998 < row.reproduced <= float(row.quoted.printed)


def test_a_patient_of_the_2024_paper_is_not_a_record(table: list[Row]) -> None:
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
    """All their words, and all their numbers but for the last digits, which may differ between machines."""
    committed = Path(__file__).parents[2] / "results" / "tables"
    number = re.compile(r"(?<![\w])\d[\d.,]*(?:e[-+]?\d+)?")
    for path in epsilon.write(table, tmp_path):
        here, there = (file.read_text(encoding="utf-8") for file in (path, committed / path.name))
        assert number.sub("#", here) == number.sub("#", there), "run `zdp-bench epsilon`"
        pairs = zip(number.findall(here), number.findall(there), strict=True)
        digits = [
            (a.replace(",", "").rstrip("."), b.replace(",", "").rstrip(".")) for a, b in pairs
        ]
        assert all(a == b or math.isclose(float(a), float(b), rel_tol=0.02) for a, b in digits), (
            "run `zdp-bench epsilon`"
        )


def test_the_papers_table_in_every_form(
    table: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setattr(epsilon, "rows", lambda: table)
    results = ("--results", str(tmp_path))
    code, out, _ = run(capsys, *results)
    assert code == 0
    assert "not reproduced" in out
    assert "epsilon.csv" in out.replace("\n", "")
    assert (tmp_path / "tables" / "epsilon.md").read_text(encoding="utf-8") == run(
        capsys, *results, "--format", "md"
    )[1].rstrip("\n") + "\n"
    lines = json.loads(run(capsys, *results, "--format", "json")[1])
    cells = list(csv.DictReader(io.StringIO(run(capsys, *results, "--format", "csv")[1])))
    assert len(lines) == len(cells) == 81
    assert [line["tight"] for line in lines if line["noise"] == "real_on_complex"] == ["inf"] * 15
    assert lines[0]["printed"] == cells[0]["printed"] == "0.53"
