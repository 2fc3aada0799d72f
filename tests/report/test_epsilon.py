"""`zdp-bench epsilon`: every ε of the five papers, and a user's own numbers."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import subprocess
import sys
import time
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
        started = time.perf_counter()
        rows = epsilon.rows()
        assert time.perf_counter() - started < 60  # 15 s on an idle core
    return rows


def of(table: list[Row], paper: str, place: str = "") -> list[Row]:
    return [row for row in table if row.quoted.paper == paper and row.quoted.place.startswith(place)]


def test_every_quoted_epsilon_is_there(table: list[Row]) -> None:
    assert {
        paper: len(of(table, paper)) for paper in ("zeta_dp_2021", "dp_dfa_2020", "deepee_2021", "zeta_dp_2024", "gredp_2024")
    } == {
        "zeta_dp_2021": 11,
        "dp_dfa_2020": 24,
        "deepee_2021": 6,
        "zeta_dp_2024": 10,
        "gredp_2024": 30,
    }
    assert len(table) == 81


def test_dp_dfa_23_of_24_to_the_digit(table: list[Row]) -> None:
    (wrong,) = [row for row in of(table, "dp_dfa_2020") if row.verdict != "reproduced"]
    assert wrong.quoted.printed == "13.75"
    assert math.floor(wrong.reproduced * 100) / 100 == 13.78


def test_deepee_four_of_six(table: list[Row]) -> None:
    verdicts = {row.quoted.printed: row.verdict for row in of(table, "deepee_2021")}
    assert {printed for printed, verdict in verdicts.items() if verdict == "reproduced"} == {"0.52", "2.69", "0.12", "2.81"}
    assert {printed for printed, verdict in verdicts.items() if verdict == "not reproduced"} == {"0.62", "0.35"}


def test_zeta_2021_only_table_1_is_reproduced(table: list[Row]) -> None:
    verdicts = {(row.quoted.place, row.quoted.printed): row.verdict for row in of(table, "zeta_dp_2021")}
    assert verdicts["Table 1", "0.53"] == "reproduced"
    for where in (("Table 2", "1.76"), ("Table 3", "1.47"), ("Table 5", "0.67")):
        assert verdicts[where] == "not reproduced"


def test_zeta_2021_tight_epsilon_counts_circular_noise_and_its_sampling(table: list[Row]) -> None:
    complex_row, real_row = (row for row in of(table, "zeta_dp_2021", "Table 1") if row.quoted.printed == "0.53")
    assert complex_row.tight_poisson == pytest.approx(pld(1.1 / math.sqrt(2), 0.01, 1000, 1e-5))
    assert complex_row.tight == pytest.approx(pld_uniform(1.1 / math.sqrt(2) / 2, 0.01, 1000, 1e-5))
    assert real_row.tight_poisson == pytest.approx(pld(1.1, 0.01, 1000, 1e-5))


def test_gredp_target_2_is_3_4_with_complex_noise_and_infinite_with_real(table: list[Row]) -> None:
    rows = [row for row in of(table, "gredp_2024", "Table VIII") if row.quoted.printed == "2" and row.quoted.dataset == "MNIST"]
    noisy, naked = rows
    assert noisy.tight == pytest.approx(3.4, abs=0.05)
    assert naked.tight == math.inf
    assert all(row.tight == math.inf for row in of(table, "gredp_2024") if row.quoted.noise == "real_on_complex")


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
        digits = [(a.replace(",", "").rstrip("."), b.replace(",", "").rstrip(".")) for a, b in pairs]
        assert all(a == b or math.isclose(float(a), float(b), rel_tol=0.02) for a, b in digits), "run `zdp-bench epsilon`"


def test_the_papers_table_in_every_form(
    table: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.setattr(epsilon, "rows", lambda: table)
    results = ("--results", str(tmp_path))
    code, out, _ = run(capsys, *results)
    assert code == 0
    assert "not reproduced" in out
    assert "epsilon.csv" in out.replace("\n", "")
    assert (tmp_path / "tables" / "epsilon.md").read_text(encoding="utf-8") == run(capsys, *results, "--format", "md")[1].rstrip(
        "\n"
    ) + "\n"
    lines = json.loads(run(capsys, *results, "--format", "json")[1])
    cells = list(csv.DictReader(io.StringIO(run(capsys, *results, "--format", "csv")[1])))
    assert len(lines) == len(cells) == 81
    assert [line["tight"] for line in lines if line["noise"] == "real_on_complex"] == ["inf"] * 15
    assert lines[0]["printed"] == cells[0]["printed"] == "0.53"


SETTING = ("--sample-rate", "0.01", "--steps", "1000", "--delta", "1e-5")


def test_a_users_own_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--sigma", "1.1", *SETTING, "--format", "json")
    answers = {(line["noise"], line["accountant"]): line["epsilon"] for line in json.loads(out)}
    assert code == 0
    assert answers["per_component", "pld"] == pytest.approx(1.5154, abs=1e-3)
    assert answers["circular", "pld"] == pytest.approx(pld(1.1 / math.sqrt(2), 0.01, 1000, 1e-5), rel=1e-4)
    assert set(answers) == {(noise, name) for noise in ("per_component", "circular") for name in ("pld", "rdp", "gdp_clt")}
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


def test_a_patients_epsilon_stands_beside_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--sigma", "2", *SETTING, "--records", "5000", "--records-per-patient", "3", "--accountant", "pld")
    record, patient, *_ = json.loads(run(capsys, *words, "--format", "json")[1])
    assert patient["epsilon"] > record["epsilon"]
    assert "3 records" in patient["remark"]


@pytest.mark.parametrize("accountant", ["pld", "rdp", "gdp_clt", "deepee_2021"])
def test_a_target_is_answered_with_sigma(accountant: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--target-epsilon", "2", *SETTING, "--records", "60000", "--accountant", accountant)
    for line in json.loads(run(capsys, *words, "--format", "json")[1]):
        assert 1.995 < line["epsilon"] <= 2
        again = json.loads(run(capsys, "--sigma", repr(line["sigma"]), *words[2:], "--format", "json")[1])
        same = next(other for other in again if other["noise"] == line["noise"])
        assert same["epsilon"] == pytest.approx(line["epsilon"], rel=1e-3)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--sigma -1", "--sigma=-1.0: must be 0 or more"),
        ("--sigma nan", "--sigma=nan: must be 0 or more"),
        ("--sigma x", "invalid float value"),
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
def test_bad_numbers_end_in_one_sentence(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_missing_numbers_end_in_one_sentence(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
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
