"""Coverage: every cell of every paper is counted, and README and pages show what is counted."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from tests.test_cli import run
from tests.test_package import ROOT
from zdp_bench.report import coverage, papers
from zdp_bench.report.cells import Count

RESULTS = ROOT / "results"
CELLS = {
    "zeta_dp_2021/1": 4,
    "zeta_dp_2021/2": 2,
    "zeta_dp_2021/3": 2,
    "zeta_dp_2021/4": 10,
    "zeta_dp_2021/5": 6,
    "zeta_dp_2024/1": 12,
    "deepee_2021/1": 3,
    "deepee_2021/2": 2,
    "gredp_2024/1": 16,
    "gredp_2024/7": 20,
    "gredp_2024/8": 32,
}


def test_a_count_is_told_in_one_sentence() -> None:
    statuses = ["reproduced"] * 2 + ["different"] * 2 + ["other data"] * 19 + ["reduced"]
    assert Count.count(statuses).sentence == (
        "24 cells: 4 as published (2 reproduced, 2 different), 20 on other or reduced data, "
        "0 empty."
    )
    few = Count.count(["close"], "curves") + Count.count(["no data", "no data", "too dear"])
    assert few.sentence == (
        "4 curves: 1 as published (1 close), 0 on other or reduced data, "
        "3 empty (2 no data, 1 too dear)."
    )
    assert Count.count(["as published"], "curves").sentence.startswith("1 curve: 1 as published, 0")


@pytest.mark.parametrize("results", [RESULTS, Path("/nowhere")])
def test_the_result_tables_of_the_papers_have_109_numbers(results: Path) -> None:
    counts = coverage.of_tables(results)
    sizes = {n: c.numbers["cells"] for n, c in counts.items() if not papers.is_figure(n)}
    assert sizes == CELLS
    assert sum(sizes.values()) == 109


def test_a_table_that_was_not_written_is_empty(tmp_path: Path) -> None:
    count = coverage.of_tables(tmp_path)["zeta_dp_2021/1"]
    assert count.numbers["empty"] == count.numbers["cells"] == 4


def test_a_curve_counts_with_the_best_of_its_rows(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    lines = ["row,status", "lenet5,reduced", "lenet5,as published", "lenet5,other data", ""]
    (tmp_path / "tables" / "gredp_2024_fig4.csv").write_text("\n".join(lines))
    count = coverage.of_tables(tmp_path)["gredp_2024/fig4"]
    assert count.sentence == (
        "4 curves: 1 as published, 0 on other or reduced data, 3 empty (3 too dear)."
    )


def test_the_command_prints_every_table_and_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "coverage", "--results", str(RESULTS), "--format", "csv")
    assert code == 0
    lines = {line["table"]: line for line in csv.DictReader(io.StringIO(out))}
    assert lines["all tables"]["cells"] == "109"
    assert set(lines) == {*coverage.of_tables(RESULTS), "all tables", "all figures (curves)"}
    parts = ("as published", "other or reduced", "empty")
    for line in lines.values():
        assert sum(int(line[part]) for part in parts) == int(line["cells"])
    sentence = coverage.sheet(RESULTS).notes[0]
    for form in ("rich", "md"):
        code, out, _ = run(capsys, "coverage", "--results", str(RESULTS), "--format", form)
        assert code == 0
        assert sentence in " ".join(out.split())
    code, out, _ = run(capsys, "coverage", "--results", str(RESULTS), "--format", "json")
    assert json.loads(out)[0]["table"] == "deepee_2021/1"


def test_the_readme_shows_the_total() -> None:
    sentence = coverage.sheet(RESULTS).notes[0]
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert sentence in text, f"the results changed: write '{sentence}' in README.md"


def test_every_empty_cell_has_a_reason_and_every_table_is_there() -> None:
    for name, count in coverage.of_tables(RESULTS).items():
        assert count.of["not run"] == 0, f"say in paper.yaml why {name} has rows that were not run"
    for name in papers.available():
        stem = papers.file_stem(name)
        stem = stem if papers.recipes_of(name) else f"bench_{stem}"
        text = (RESULTS / "tables" / f"{stem}.md").read_text(encoding="utf-8")
        assert not papers.recipes_of(name) or " as published" in text.split("\n")[2], name
