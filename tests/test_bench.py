"""The bench: sides must agree before they are timed, ratios are to the fastest baseline, and what is written can be read."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from zdp_bench.bench import tables
from zdp_bench.bench.measure import Step, by_turns, peak_memory, require_agreement
from zdp_bench.bench.steps import ALGORITHMS, SIDES, Workload, computes, may_be_baseline
from zdp_bench.bench.tables import Row
from zdp_bench.cli import main
from zdp_bench.errors import UserError

REAL = Workload("real_conv_linear", (3, 6, 6), 1, 4, "squares", {"channels": 2})
COMPLEX = Workload("complex_conv_linear", (3, 6, 6), 1, 4, "squares", {"channels": 2})
MAP = Workload("complex_unet", (1, 8, 8), 1, 3, "map", {"width": 2, "depth": 1})
DENSE = Workload("real_mlp", (4, 4), 3, 5, "classes", {"hidden": [6], "activation": "sigmoid"})
CLASSES = Workload("vgg11", (3, 32, 32), 2, 3, "classes", {"hidden": 4})


def _sides(workload: Workload) -> list[str]:
    every = [side for side in SIDES if side != "warm" and side not in ALGORITHMS]
    if workload.is_complex:
        return [side for side in every if "Opacus" not in side]
    return [side for side in every if "torch's" not in side]


@pytest.mark.parametrize("workload", [REAL, COMPLEX, MAP, CLASSES], ids=lambda w: w.model)
def test_all_sides_compute_the_same_and_run(workload: Workload) -> None:
    if not workload.is_complex:
        pytest.importorskip("opacus")
    steps = {side: SIDES[side](workload) for side in _sides(workload)}
    require_agreement(steps, {side: computes(side) for side in steps})
    for step in steps.values():
        step.run()


@pytest.mark.parametrize("side", ALGORITHMS)
def test_every_algorithm_takes_its_own_step(side: str) -> None:
    step = SIDES[side](DENSE)
    before = step.answer()
    step.run()
    assert computes(side) == side
    assert not torch.equal(step.answer(), before)


def test_sides_that_disagree_are_not_timed() -> None:
    right, wrong = (Step(lambda: None, lambda v=value: torch.tensor([1.0, v])) for value in (2.0, 2.1))
    with pytest.raises(UserError, match="'wrong' is off by"):
        require_agreement({"right": right, "wrong": wrong}, {"right": "sum", "wrong": "sum"})
    broken = Step(lambda: None, lambda: torch.tensor([1.0, torch.nan]))
    with pytest.raises(UserError, match="'broken'"):
        require_agreement({"right": right, "broken": broken}, {"right": "sum", "broken": "sum"})


def test_ratios_are_to_the_fastest_side_that_may_be_the_baseline() -> None:
    small, large = torch.randn(20, 20), torch.randn(300, 300)
    runs = {"fast": lambda: small @ small, "slow": lambda: large @ large, "other": lambda: small @ small}
    timings = by_turns(runs, lambda name: name != "other", 0.0)
    assert timings["fast"].low == timings["fast"].high == 1.0
    assert timings["slow"].milliseconds > timings["fast"].milliseconds
    assert timings["slow"].low > 1


def test_torchs_slow_complex_layers_are_no_baseline() -> None:
    assert may_be_baseline("non-private, channels first")
    assert not may_be_baseline("non-private, torch's complex layers")
    assert not may_be_baseline("private, fast")


def test_the_papers_ratios() -> None:
    assert round(tables._paper_ratio("zeta_dp_2021/6", "conv_complex", "conv_real"), 2) == 6.73
    assert round(tables._paper_ratio("zeta_dp_2021/7", "private_complex", "nonprivate_complex"), 1) == 44.7
    assert round(tables._paper_ratio("zeta_dp_2021/7", "private_real", "nonprivate_real"), 1) == 176.9


def test_peak_memory_counts_the_weights() -> None:
    wide = Workload("real_mlp", (1000,), 2, 2, "classes", {"hidden": [10_000]})  # 40 MB of weights
    peak = peak_memory({**vars(wide)}, "private, fast", 1)
    assert peak is None or 3 * 38 < peak < 400  # weights, sum and noise at least


def test_a_table_is_written_with_what_it_was_measured_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("a case", "private, fast", 12.3456, 1.25, 1.2, 1.3, 1e-7, memory=100.0, memory_ratio=1.5, paper_ratio=44.7)
    monkeypatch.setitem(tables._TABLES, "scaling", lambda quick, threads: iter([row]))
    monkeypatch.setattr(tables, "hold_memory", lambda: False)
    threads = torch.get_num_threads()
    _, (markdown, numbers) = tables.run("scaling", False, 2, tmp_path)
    torch.set_num_threads(threads)
    assert "| private, fast | 12.3 ms | 1.25 | 1.20 to 1.30 | 100 | 1.50 | 44.7 | 1e-07 |" in markdown.read_text()
    assert "2 threads" in markdown.read_text()
    line = next(csv.DictReader(numbers.read_text().splitlines()))
    assert line["threads"] == "2"
    assert line["torch"] == torch.__version__.split("+")[0] or line["torch"] == torch.__version__
    assert float(line["ratio"]) == 1.25


@pytest.mark.parametrize(
    ("words", "sentence"), [(["zeta_dp_2021/9"], "Did you mean 'zeta_dp_2021/"), (["scaling", "--threads", "0"], "at least 1")]
)
def test_bad_arguments_end_in_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *words])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
