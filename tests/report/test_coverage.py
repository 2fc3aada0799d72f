"""Coverage: every cell of every paper is counted, and README and pages show what is counted."""

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_cli import run
from tests.test_package import ROOT
from zdp_bench.errors import UserError
from zdp_bench.report import coverage

RESULTS = ROOT / "results"
PAGE = re.split(r"<!-- made by coverage (\w+) -->", (ROOT / "docs/papers.md").read_text("utf-8"))
SECTIONS = dict(zip(PAGE[1::2], PAGE[2::2], strict=True))


def make(*lines: tuple[str, str, str, str]) -> list[dict[str, str]]:
    keys = ("row", "status", "epsilon_tight", "runs")
    made = [dict(zip(keys, line, strict=True)) for line in lines]
    return [line | {"metric": "accuracy", "epsilon_claimed": "1.0"} for line in made]


def test_a_number_counts_with_the_best_of_its_lines_and_a_run_once() -> None:
    first = make(
        ("a", "different", "inf", "1"),
        ("a", "other settings", "1.0", "2"),
        ("b", "not run", "", ""),
        ("b", "reduced", "1.0", "3"),
        ("c", "no data", "", ""),
        ("d", "", "1.0", "4"),
        ("f", "did not learn", "inf", "6"),
        ("g", "did not learn", "inf", "7"),
        ("g", "reduced", "1.0", "8"),
    )
    first[4]["reason"] = "their pictures"
    again = make(("a", "close", "inf", "1"), ("e", "close", "2.0", "5"))
    assert coverage.sentence([first, again]) == (
        "7 numbers: 2 as published (1 close, 1 different; 1 of 2 private with a tight ε of "
        "∞), 2 reduced, 1 did not learn, 1 no data, 1 counted above."
    )
    counts = coverage.count([first, again])
    assert (counts[coverage.UNBOUNDED], counts["why: their pictures"]) == (1, 1)
    assert coverage.sentence([make(("a", "as published", "1.0", "1"))], "curve") == (
        "1 curve: 1 as published."
    )


def _cut(text: str) -> str:
    return text[: len(text) // 2]


def _drop(text: str, *columns: str) -> str:
    lines = list(csv.DictReader(io.StringIO(text)))
    file = io.StringIO()
    writer = csv.DictWriter(file, list(lines[0]))
    writer.writeheader()
    writer.writerows([line | dict.fromkeys(columns, "") for line in lines])
    return file.getvalue()


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        lambda text: _drop(text, "epsilon_tight"),
        lambda text: _drop(text, "epsilon_tight", "runs"),
        lambda text: "",
        lambda text: text.replace("different", "differnt"),
        lambda text: text.replace("status", "state", 1),
    ],
)
def test_a_damaged_table_is_one_sentence(tmp_path: Path, damage: Callable[[str], str]) -> None:
    name = "gredp_2024_table1.csv"
    text = (RESULTS / "tables" / name).read_text(encoding="utf-8")
    path = tmp_path / "tables" / name
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    assert coverage.read("gredp_2024/1", tmp_path)
    path.write_text(damage(text), encoding="utf-8")
    with pytest.raises(UserError, match=r"gredp_2024_table1\.csv: is damaged"):
        coverage.read("gredp_2024/1", tmp_path)
    path.write_bytes(b"\xff" + text.encode())
    with pytest.raises(UserError, match=r"gredp_2024_table1\.csv: is damaged"):
        coverage.read("gredp_2024/1", tmp_path)


def test_every_number_of_the_papers_is_counted_with_and_without_records(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, "coverage", "--results", str(RESULTS), "--format", "csv")
    assert code == 0
    shown = [*csv.DictReader(io.StringIO(out))]
    empty = coverage.sheet(Path("/nowhere")).numbers
    sizes = {line["table"]: int(line["all"]) for line in shown}
    assert sizes == {line["table"]: line["all"] for line in empty}
    assert (sizes["all tables"], sizes["all figures"]) == (109, 62)
    for line in shown:
        assert sum(int(line[status]) for status in coverage.STATUSES) == int(line["all"])


def test_the_readme_shows_the_total() -> None:
    counts = coverage.count(coverage.of_paper(RESULTS))
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in ("reproduced", "close", "different"))
    published = sum(counts[kind] for kind in ("reproduced", "close", "different"))
    shown = f"{published} have runs as published: {kinds}"
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert shown in text, f"the results changed: write this into README.md\n{shown}"
    assert f"Of {sum(counts[status] for status in coverage.STATUSES)} table numbers" in text


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
        name = path.stem.removeprefix(f"{paper}_")
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
                name: [n for n in numbers if not any(_rounds_to(printed, n) for printed in table)]
                for name, table in tables.items()
            }
            nearest = min(missing, key=lambda name: len(missing[name]))
            assert not missing[nearest], f"{line}: {nearest} has no {missing[nearest]}"


def _rounds_to(printed: float, shown: str) -> bool:
    digits = len(shown.partition(".")[2])
    return abs(printed - float(shown)) <= 0.5001 * 10**-digits
