"""Coverage: every cell of every paper is counted, and README and pages show what is counted."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path

import pytest

from tests.test_cli import run
from tests.test_package import ROOT
from zdp_bench.report import coverage, papers
from zdp_bench.report.cells import AGAIN, PROTECTIONS, Count, Standing, count_once, protection_of

RESULTS = ROOT / "results"
PAGE = re.split(r"<!-- made by coverage (\w+) -->", (ROOT / "docs/papers.md").read_text("utf-8"))
SECTIONS = dict(zip(PAGE[1::2], PAGE[2::2], strict=True))
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


def test_a_count_is_told_in_one_sentence_that_sets_apart_what_protects() -> None:
    none, tight, claim = PROTECTIONS
    cells = [Standing("reproduced", none), Standing("reproduced", claim), Standing("close", tight)]
    cells += [Standing("different", claim), Standing("reduced"), *[Standing("other data")] * 2]
    assert Count.count(cells).sentence == (
        "7 cells: 4 as published (1 not private: 1 reproduced; 1 private with a finite tight ε: "
        "1 close; 2 private by the paper's ε only, with a tight ε of ∞: 1 reproduced, 1 "
        "different), 3 with other settings or data (2 other data, 1 reduced), 0 empty."
    )
    curves = [Standing("as published", tight), *map(Standing, ("no data", "no data", "too dear"))]
    assert Count.count(curves, "curves").sentence == (
        "4 curves: 1 as published (1 private with a finite tight ε), 0 with other settings or "
        "data, 3 empty (2 no data, 1 too dear)."
    )
    assert Count.count(curves[:1], "curves").sentence.startswith("1 curve: 1 as published (1 ")
    for epsilons, protection in {(9, 1): tight, (1, math.inf): claim}.items():
        assert protection_of(*epsilons) == protection
    assert protection_of(math.inf, math.inf) == none


def test_a_run_that_fills_cells_of_two_tables_counts_once() -> None:
    found = [Standing("close", PROTECTIONS[2], f"accuracy {run}") for run in "aba"]
    found += [Standing("too dear", "", "accuracy")] * 2
    once = count_once(found)
    assert [one.status for one in once] == ["close", "close", AGAIN, "too dear", "too dear"]
    assert Count.count(once).sentence.endswith(
        "2 empty (2 too dear), 1 the same run as in another table."
    )


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
    lines = ["row,status,protection", "lenet5,reduced,", "lenet5,as published,not private", ""]
    (tmp_path / "tables" / "gredp_2024_fig4.csv").write_text("\n".join(lines))
    count = coverage.of_tables(tmp_path)["gredp_2024/fig4"]
    assert count.sentence == (
        "4 curves: 1 as published (1 not private), 0 with other settings or data, "
        "3 empty (3 too dear)."
    )


def test_the_command_prints_every_table_and_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "coverage", "--results", str(RESULTS), "--format", "csv")
    assert code == 0
    lines = {line["table"]: line for line in csv.DictReader(io.StringIO(out))}
    assert lines["all tables"]["cells"] == "109"
    assert set(lines) == {*coverage.of_tables(RESULTS), "all tables", "all figures (curves)"}
    parts = ("as published", "other settings or data", "empty", AGAIN)
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


NUMBER = re.compile(r"(?<![\w.,/^-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w/²×^]|[.,]\d)")


def read_numbers(text: str) -> list[str]:
    return [number.replace(",", "") for number in NUMBER.findall(text)]


@pytest.mark.parametrize("paper", SECTIONS)
def test_the_numbers_of_a_papers_section_stand_in_one_table(paper: str) -> None:
    """All decimals of a row (but its head), or of a sentence with a %, are in one result table.

    A result table is what `results/tables` shows of it and of its runs, and what the paper prints.
    A number of the section may be rounded. Code and whole numbers are not looked at.
    """
    tables: dict[str, set[float]] = {}
    folder = RESULTS / "tables"
    printed = (ROOT / "papers" / paper).glob("*.csv")
    shown = [
        path for name in (f"{paper}_", "epsilon", "faceoff") for path in folder.glob(f"{name}*.md")
    ]
    for path in (*printed, *shown):
        name = path.stem.removesuffix("_runs").removeprefix(f"{paper}_")
        tables.setdefault(name, set()).update(map(float, read_numbers(path.read_text("utf-8"))))
    text = re.sub(r"```.*?```|`[^`]*`", "", SECTIONS[paper], flags=re.S)
    for block in re.split(r"\n\n|\n(?=- )", text):
        if block.lstrip().startswith("|"):
            lines = [line.partition("|")[2].partition("|")[2] for line in block.split("\n")]
        else:
            lines = [s for s in re.split(r"(?<=[.:;]) ", " ".join(block.split())) if "%" in s]
        for line in lines:
            numbers = [number for number in read_numbers(line) if "." in number]
            missing = {
                name: [n for n in numbers if not any(_rounds_to(found, n) for found in table)]
                for name, table in tables.items()
            }
            nearest = min(missing, key=lambda name: len(missing[name]))
            assert not missing[nearest], f"{line}: {nearest} has no {missing[nearest]}"


def _rounds_to(found: float, shown: str) -> bool:
    digits = len(shown.partition(".")[2])
    return abs(found - float(shown)) <= 0.5001 * 10**-digits


def test_every_empty_cell_has_a_reason_and_every_table_is_there() -> None:
    for name, count in coverage.of_tables(RESULTS).items():
        assert count.of["not run"] == 0, f"say in paper.yaml why {name} has rows that were not run"
    for name in papers.available():
        stem = papers.file_stem(name)
        stem = stem if papers.recipes_of(name) else f"bench_{stem}"
        text = (RESULTS / "tables" / f"{stem}.md").read_text(encoding="utf-8")
        assert not papers.recipes_of(name) or " as published" in text.split("\n")[2], name
