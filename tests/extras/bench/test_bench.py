"""The bench: sides must agree before they are timed, ratios are to the fastest baseline, and what
is written can be read.
"""

import csv
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.test_cli import leave
from zdp_bench.errors import UserError
from zdp_bench.extras.bench import measure, tables
from zdp_bench.extras.bench.measure import by_turns, peak_memory, require_agreement
from zdp_bench.extras.bench.steps import SIDES, Examples
from zdp_bench.extras.bench.workload import NETWORKS, Step, Workload
from zdp_bench.gradients.program import state_of

ROOT = Path(__file__).resolve().parents[3]
REAL = Workload("real_conv_linear", (3, 6, 6), 1, 4, "squares", {"channels": 2})
COMPLEX = Workload("complex_conv_linear", (3, 6, 6), 1, 4, "squares", {"channels": 2})
MAP = Workload("complex_unet", (1, 8, 8), 1, 3, "map", {"width": 2, "depth": 1})
CLASSES = Workload("vgg11", (3, 32, 32), 2, 3, "classes", {"hidden": 4, "width": 8, "pool": 1})


def _sides(workload: Workload) -> list[str]:
    every = [side for side in SIDES if side != "warm"]
    if workload.is_complex:
        return [side for side in every if "Opacus" not in side]
    return every


@pytest.mark.parametrize("workload", [REAL, COMPLEX, MAP, CLASSES], ids=lambda w: w.model)
def test_all_sides_compute_the_same_and_run(workload: Workload) -> None:
    if not workload.is_complex:
        pytest.importorskip("opacus")
    steps = {side: SIDES[side](workload) for side in _sides(workload)}
    require_agreement(steps)
    for step in steps.values():
        step.run()


@pytest.mark.parametrize("model", NETWORKS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_users_network_is_found_to_keep_examples_apart_in_batches(model: str) -> None:
    """Else its examples would run one at a time, and the loop be many times slower."""
    shape = (3, 16, 16) if "cnn" in model else (12, 16)
    workload = Workload(model, shape, 10, 4, "classes", {"width": 16})
    assert not state_of(workload.build(), workload.examples(last=False)[0]).alone


def test_every_step_of_a_side_draws_fresh_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise in every step marches the weights off, until gradients are denormal and
    slow.
    """
    drawn: list[int] = []
    monkeypatch.setattr(
        "zdp_bench.extras.bench.steps.private_step", lambda training, step, *_: drawn.append(step)
    )
    side = SIDES["private, fast"](REAL)
    for _ in range(3):
        side.run()
    assert drawn == [0, 1, 2]


def test_sides_that_disagree_are_not_timed() -> None:
    right, wrong = (
        Step(lambda: None, lambda v=value: torch.tensor([1.0, v])) for value in (2.0, 2.1)
    )
    broken = Step(lambda: None, lambda: torch.tensor([1.0, torch.nan]))
    for other in (wrong, broken):
        with pytest.raises(UserError, match="'sum, other'"):
            require_agreement({"sum, right": right, "sum, other": other})


def test_ratios_are_to_the_fastest_side_that_may_be_the_baseline() -> None:
    small, large = torch.randn(20, 20), torch.randn(300, 300)
    runs = {"real": lambda: small @ small, "non-private": lambda: large @ large}
    base, timings = by_turns(runs | {"private": lambda: small}, 0.0)
    fast, slow = timings["real"], timings["non-private"]
    assert base == "real"
    assert fast["ratio"] == fast["ratio_low"] == 1.0
    assert slow["milliseconds"] > fast["milliseconds"]
    assert slow["ratio_low"] > 1


def test_the_papers_ratios() -> None:
    for table, above, below, ratio in [
        ("zeta_dp_2021/6", "conv_complex", "conv_real", 6.73),
        ("zeta_dp_2021/7", "private_complex", "nonprivate_complex", 44.7),
        ("zeta_dp_2021/7", "private_real", "nonprivate_real", 176.9),
    ]:
        assert tables._paper_ratio(table, above, below) == pytest.approx(ratio, rel=1e-3)


@pytest.mark.slow
def test_peak_memory_counts_the_weights() -> None:
    wide = Workload("real_mlp", (1000,), 2, 2, "classes", {"hidden": [10_000]})  # 40 MB of weights
    peak, again = (peak_memory(wide, "private, fast") for _ in range(2))
    if peak is None or again is None:
        pytest.skip("this system does not say how much memory a process has")
    assert 2 * 38 < peak < 400  # weights and sum at least
    assert abs(again / peak - 1) < 0.05  # what an allocator keeps for later is not in it


def test_on_a_gpu_memory_is_that_of_the_step_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights of the sides that were timed before were counted as each step's memory."""
    process = Mock(return_value=SimpleNamespace(returncode=0, stdout="30.0\n"))
    monkeypatch.setattr(measure.subprocess, "run", process)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert peak_memory(REAL, "non-private") == 30
    assert "zdp_bench.extras.bench.measure" in process.call_args.args[0]
    monkeypatch.setitem(SIDES, "warm", lambda workload: None)
    monkeypatch.setattr(measure, "_run_twice", lambda workload, side: None)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda: 100 * 2**20)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: 130 * 2**20)
    assert measure._measure(asdict(REAL), "non-private") == 30


def test_all_whole_loops_read_the_same_examples_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours read the batch at once, and the others collated it."""
    pytest.importorskip("opacus")
    read: list[int] = []
    original = Examples.__getitem__

    def get(self: Examples, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        read.append(index)
        return original(self, index)

    monkeypatch.setattr(Examples, "__getitem__", get)
    for side in [side for side in SIDES if "whole loop" in side]:
        step = SIDES[side](REAL)
        read.clear()
        step.run()
        assert sorted(read) == [0, 1, 2, 3], side


ROW: tables.Row = {"case": "a case", "side": "private, fast", "milliseconds": 12.3456}
ROW |= {"ratio": 1.25, "ratio_low": 1.2, "ratio_high": 1.3, "deviation": None}
ROW |= {"memory": 100.0, "memory_ratio": 1.5, "paper_ratio": 44.7}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that writes these rows as a table, of a device, and returns the paths."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(tables, "hold_memory", lambda: False)

    def write(rows: list[tables.Row], on: str = "cpu (one)") -> tuple[Path, Path]:
        cases = [[*of] for _, of in groupby(rows, lambda row: row["case"])]
        monkeypatch.setitem(tables.TABLES, "library", lambda quick: iter(cases))
        facts = {"device": on, "threads": "2", "python": "3", "torch": "2.11"}
        monkeypatch.setattr(tables, "environment", lambda threads: facts)
        assert [
            row["case"] for case in tables.run("library", False, 2, tmp_path) for row in case
        ] == [row["case"] for row in rows]
        markdown, numbers = tables.paths_of("library", False, tmp_path)
        return markdown, numbers

    yield write
    torch.set_num_threads(threads)


def test_a_table_is_written_with_what_it_was_measured_on(measured: Any) -> None:
    other = {"side": "private, vmap", "deviation": 1e-7, "memory": None, "memory_ratio": None}
    markdown, numbers = measured([ROW, ROW | other])
    page = markdown.read_text()
    assert "| private, fast | 12.3 | 1.25 | 1.20 to 1.30 | 100 | 1.50 | 44.7 |  |" in page
    assert "| private, vmap | 12.3 | 1.25 | 1.20 to 1.30 |  |  | 44.7 | 1e-07 |" in page
    assert "On cpu (one), 2 threads (python 3, torch 2.11, allocator as malloc likes)." in page
    first, second = csv.DictReader(numbers.read_text().splitlines())
    assert (first["threads"], first["ratio"], first["deviation"]) == ("2", "1.25", "")
    assert (second["torch"], second["deviation"]) == ("2.11", "1e-07")


def test_a_case_is_written_once_it_is_measured(measured: Any, tmp_path: Path) -> None:
    measured([])

    def stopped(quick: bool) -> Iterator[list[tables.Row]]:
        yield [ROW]
        raise KeyboardInterrupt

    tables.TABLES["library"] = stopped
    with pytest.raises(KeyboardInterrupt):
        list(tables.run("library", False, 2, tmp_path))
    assert list(tables.read(tables.paths_of("library", False, tmp_path)[1]).case) == [ROW["case"]]


HEADER = (
    b"date,case,side,device,threads,milliseconds,ratio,ratio_low,ratio_high,deviation,memory,"
    b"memory_ratio,paper_ratio,python\n"
)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"case,side\n",
        b"\xff\xfe",
        b'case,device\n"a',
        b"case,side,device,threads\nc,s,cpu,1\n",
        HEADER + b"2026,c,s,cpu,1,fast,1,1,1,,,,,3\n",
    ],
)
def test_a_damaged_table_is_refused_before_anything_is_measured(
    measured: Any, tmp_path: Path, content: bytes
) -> None:
    """The first measurement was lost, after minutes."""
    measured([])
    cases = iter([[ROW]])
    tables.TABLES["library"] = lambda quick: cases
    _, numbers = tables.paths_of("library", False, tmp_path)
    numbers.parent.mkdir()
    numbers.write_bytes(content)
    with pytest.raises(UserError, match=r"bench_library\.csv: "):
        list(tables.run("library", False, 2, tmp_path))
    assert list(cases) == [[ROW]]


def test_a_page_states_the_date_wherever_its_column_is(tmp_path: Path) -> None:
    path = tmp_path / "bench_library.csv"
    path.write_bytes(HEADER + b"2026-12-01,c,s,cpu,1,2,1,1,1,,,,,3.11\n")
    assert "(python 3.11, date 2026-12-01)" in tables.as_markdown("library", tables.read(path))


def test_a_page_says_what_its_rows_were_measured_with(tmp_path: Path) -> None:
    path = tmp_path / "bench_library.csv"
    side = "zdp-bench's whole loop"
    for date, device, memory, lines in [
        ("2026-11-26", "NVIDIA H200", "30", [tables.FORMER_MEMORY, tables.FORMER_BATCHES]),
        ("2026-11-29", "cpu (one)", "30", [tables.FORMER_BATCHES]),
        ("2026-12-01", "NVIDIA H200", "30", []),
    ]:
        row = f"{date},c,{side},{device},1,2,1,1,1,,{memory},1,,3.11\n"
        path.write_bytes(HEADER + row.encode())
        page = tables.as_markdown("library", tables.read(path))
        former = [tables.FORMER_MEMORY, tables.FORMER_BATCHES]
        assert [text for text in former if text in page] == lines
    startup = tables.as_markdown("startup", tables.read(path))
    assert "`import torch`" in startup
    assert "non-private" not in startup


def test_what_another_machine_measured_stays_beside_it(measured: Any) -> None:
    times = iter(map(float, range(1, 99)))
    for on in ("cpu (one)", "cpu (other)", "cpu (other)"):
        rows = [ROW | {"case": f"MLP, batch {n}", "milliseconds": next(times)} for n in (1, 2)]
        markdown, numbers = measured(rows, on)
    lines = csv.DictReader(numbers.read_text().splitlines())
    assert [(line["case"][-1], line["device"], float(line["milliseconds"])) for line in lines] == [
        ("1", "cpu (one)", 1.0),
        ("1", "cpu (other)", 5.0),
        ("2", "cpu (one)", 2.0),
        ("2", "cpu (other)", 6.0),
    ]
    page = markdown.read_text()
    assert page.count("## MLP, batch 2") == 1
    assert page.count("On cpu (one), 2 threads") == page.count("On cpu (other), 2 threads") == 2


@pytest.mark.parametrize(
    "table", ["deepee_2021_table3", "library", "startup", "zeta_dp_2021_table7", "zoo"]
)
def test_a_committed_table_is_what_its_numbers_give(table: str) -> None:
    stem = ROOT / f"results/tables/bench_{table}"
    page = stem.with_suffix(".md").read_text(encoding="utf-8")
    name = page.partition("\n")[0].removeprefix("# Measured: ")
    assert tables.as_markdown(name, tables.read(stem.with_suffix(".csv"))) == page


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["zeta_dp_2021/9"], "Did you mean 'zeta_dp_2021/"),
        (["library", "--threads", "0"], "equal to 1"),
    ],
)
def test_bad_arguments_end_in_a_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in leave(["bench", *words], capsys)
