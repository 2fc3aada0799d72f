"""The page: everything on it, nothing outside of it; one rule for verdicts."""

import json
import math
import os
import re
import shutil
import sys
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_tables import FILLINGS, TABLE, own
from tests.test_records import record, save, typed
from zdp_bench import records
from zdp_bench.extras.page import page
from zdp_bench.extras.page.curves import MAX_POINTS, curves_of
from zdp_bench.report import tables

EVIL = "<script>window.harmed = true; alert(1)</script><img src=x onerror=alert(2)>"


def private(recipe: str, seed: int, value: float) -> dict[str, Any]:
    epochs = [
        {"epoch": n, "step": n, "epsilon_tight": 0.5 * n, "accuracy": value * n / 4}
        for n in range(1, 5)
    ]
    run = own(recipe, seed, value, epochs=epochs)
    run["privacy"] |= {"epsilon_tight": 2.0, "ledger": {"digest": "l" * 64, "entries": 4}}
    run["config"] = {"optimizer": {"lr": seed / 10}}
    return run


def write_page(results: Path) -> Path:
    table = tables.build(TABLE, results, FILLINGS)
    return page.write({TABLE: table}, results, results / "report.html")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_page(tmp_path / "results")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_page(tmp_path_factory.mktemp("page")).read_text(encoding="utf-8")


def make_page(results: Path) -> Path:
    """A page on two papers' rows, one of them run thrice, beside a measured table and a figure."""
    save(results, *(private("phasemnist", seed, 0.9895 + seed / 1000) for seed in (1, 2, 3)))
    save(results, own("phasemnist_nonprivate", 1, 0.5, epochs=[]))
    (results / "tables").mkdir()
    (results / "tables" / "measured.md").write_text(
        "# Measured\n\n| a | b |\n| --- | --- |\n| <script>x</script> | 1 |\n"
    )
    (results / "figures").mkdir()
    (results / "figures" / "p_fig1.svg").write_text(
        '<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="3pt" height="3pt" '
        'viewBox="0 0 3 3"><metadata>made by</metadata><path/></svg>'
    )
    return write_page(results)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path.name)])
@pytest.mark.parametrize("name", ["tables/a.md", "figures/a.svg"])
def test_a_file_that_cannot_be_read_is_left_out_with_a_warning(
    tmp_path: Path,
    name: str,
    make: Callable[[Path], object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One file refused the whole page."""
    make_page(tmp_path)
    make(tmp_path / name)
    text = write_page(tmp_path).read_text(encoding="utf-8")
    assert 'id="figure-p_fig1"' in text
    assert "<h3>Measured</h3>" in text
    assert re.search(rf"left out: .*{name}: .*\.\n", capsys.readouterr().err)


@pytest.mark.skipif(sys.platform == "darwin", reason="its file systems refuse such names")
def test_names_of_files_that_are_not_utf_8_are_shown(tmp_path: Path) -> None:
    """They were a traceback, and there was no page."""
    make_page(tmp_path)
    (drawing,) = (tmp_path / "figures").glob("*.svg")
    drawing.rename(drawing.with_name(os.fsdecode(b"a\xff.svg")))
    run = next((tmp_path / "runs" / "phasemnist").iterdir())
    run.rename(run.with_name(os.fsdecode(b"\xff")))
    text = write_page(tmp_path).read_text(encoding="utf-8")
    assert 'id="figure-a\ufffd"' in text
    assert "runs/phasemnist/%FF/record.json" in {run["record"] for run in data_of(text)["runs"]}


def data_of(text: str) -> dict[str, Any]:
    """The page's data, as its scripts read it."""
    (data,) = re.findall(r'<script type="application/json" id="runs-data">(.*?)</script>', text)
    page_data: dict[str, Any] = json.loads(data)
    return page_data


def test_the_page_needs_nothing_beside_it(text: str) -> None:
    outside = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    links = re.findall(r'(?:src|href)="([^"]*)"', outside)
    assert all(link.startswith(("#", "data:image/svg+xml;base64,")) for link in links)
    ids = {run["cells"]["run"] for run in data_of(text)["runs"]}
    inside = [link[1:] for link in links if link.startswith("#")]
    assert ids
    assert all(f'id="{link}"' in text for link in inside)


def test_only_the_pages_own_scripts_may_run(text: str) -> None:
    scripts = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    assert len(scripts) == text.count("<script>") == 5
    hashes = {b64encode(sha256(script.encode()).digest()).decode() for script in scripts}
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', text)
    assert set(re.findall(r"sha256-([\w+/=]+)", policy)) == hashes
    assert unescape(policy).startswith("default-src 'none'; script-src")
    assert "unsafe-inline" not in policy.split("style-src")[0]


def test_libraries_keep_their_licences_and_versions(text: str) -> None:
    for words in ("(c) 2015-2026 Oli Folkerd", "Chart.js Contributors", "Chart.js v4.6.1"):
        assert words in text, words
    assert "sourceMappingURL" not in text


def test_what_privacy_costs_and_how_tables_stand_come_before_the_runs(path: Path) -> None:
    assert 'id="cost"' not in path.read_text(encoding="utf-8")
    made = "`zdp-bench table cost` made this from the records; do not edit."
    cost = f"# What privacy costs\n\n{made}\n\n| task |\n| --- |\n| Films |\n"
    (path.parent / "tables" / "cost.md").write_text(cost)
    text = write_page(path.parent).read_text(encoding="utf-8")
    order = [f'id="{part}"' for part in ("cost", "standing", "runs", "papers", "figures")]
    assert [*map(text.index, order)] == sorted(map(text.index, order))
    assert text.count("<td>Films</td>") == 1
    (path.parent / "tables" / "cost_own.md").write_text("# Of mine\n\n| task |\n| --- |\n| X |\n")
    assert "<td>X</td>" in write_page(path.parent).read_text(encoding="utf-8"), "a second table"
    assert "do not edit" not in text


def test_a_phone_leaves_out_the_same_columns_wherever_they_stand(path: Path) -> None:
    for columns in (["task", "δ", "n", "runs"], ["task", "n", "δ", "metric", "runs", "others"]):
        lines = (columns, ["---"] * len(columns), [f"of {column}" for column in columns])
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        (path.parent / "tables" / "cost.md").write_text(f"# What privacy costs\n\n{table}\n")
        text = write_page(path.parent).read_text(encoding="utf-8")
        for column in columns:
            aside = ' class="aside"' if column in ("n", "δ", "runs") else ""
            assert f"<th{aside}>{column}</th>" in text
            assert f"<td{aside}>of {column}</td>" in text


def test_a_folder_of_own_runs_has_no_tables_of_papers(tmp_path: Path) -> None:
    save(tmp_path, record("mine", 4, 0.25, claims={"table": None, "row": None, "variant": None}))
    text = write_page(tmp_path).read_text(encoding="utf-8")
    assert 'id="runs"' in text
    assert not re.search('id="(papers|standing|cost|figures)"', text)


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    runs = [record("a", seed, config={"lr": lr}) for seed, lr in ((1, 0.1), (2, 0.1), (1, 0.3))]
    runs[2]["run"] = "f" * 64
    twin = runs[0] | {"run": "e" * 64}
    made = page.runs_of(typed([*runs, twin]), tmp_path, tmp_path / "page.html")
    names = [run["cells"]["name"] for run in made["runs"]]
    assert names[:3] == ["a, lr 0.1, seed 1 (a10000)", "a, lr 0.1, seed 2", "a, lr 0.3, seed 1"]
    assert names[3] == "a, lr 0.1, seed 1 (eeeeee)"


def test_a_run_links_to_its_own_record(tmp_path: Path) -> None:
    """A renamed folder's link led nowhere, and a copy's to the first run."""
    save(tmp_path, record("a", 1))
    (folder,) = (tmp_path / "runs" / "a").iterdir()
    shutil.copytree(folder, folder.with_name("kept copy"))
    made = page.runs_of(records.read_all(tmp_path), tmp_path, tmp_path / "page.html")
    links = {run["record"] for run in made["runs"]}
    assert links == {f"runs/a/{folder.name}/record.json", "runs/a/kept%20copy/record.json"}


def test_names_that_are_no_text_are_shown_as_text(tmp_path: Path) -> None:
    made = page.runs_of(typed([record("a", 1, config={"model": {"name": 5}})]), tmp_path, tmp_path)
    assert made["runs"][0]["cells"]["model"] == "5"


def test_a_run_has_the_name_tags_and_notes_that_it_was_given(tmp_path: Path) -> None:
    labels = {"name": "wide", "tags": ["a", "b"], "notes": "why"}
    runs = typed([record("r", 1, labels=labels), record("r", 2)])
    made = page.runs_of(runs, tmp_path, tmp_path / "page.html")
    named, plain = made["runs"]
    assert [run["cells"]["name"] for run in (named, plain)] == ["wide: r, seed 1", "r, seed 2"]
    pairs = dict(made["pairs"][place] for place in named["Name, tags and notes"])
    assert pairs == {"name": "wide", "tags": '["a", "b"]', "notes": "why"}
    assert "Name, tags and notes" not in plain


STEPS = [{"epoch": n, "step": 10 * n, "epsilon_tight": n / 3, "loss": 1 / n} for n in range(1, 4)]


@pytest.mark.parametrize(
    ("epochs", "curves"),
    [
        (
            [row | {"accuracy": row["step"] / 30} for row in STEPS],
            {
                "epoch": [1, 2, 3],
                "epsilon_tight": [0.33334, 0.66667, 1],
                "loss": [1, 0.5, 0.33333],
                "accuracy": [0.33333, 0.66667, 1],
            },
        ),
        (
            [
                {"epoch": 1, "step": 10, "epsilon_tight": math.inf, "accuracy": 0.5},
                {"epoch": None, "step": 14, "epsilon_tight": math.inf, "accuracy": 0.6},
            ],
            {"epoch": [1, 1.4], "epsilon_tight": [math.inf] * 2, "accuracy": [0.5, 0.6]},
        ),
        (
            [  # of 2.5 steps
                {"epoch": 1, "step": 2, "epsilon_tight": 1.0, "accuracy": 0.5},
                {"epoch": 2, "step": 5, "epsilon_tight": 1.0, "accuracy": 0.5},
                {"epoch": None, "step": 6, "epsilon_tight": 1.0, "accuracy": 0.5},
            ],
            {"epoch": [1, 2, 2.4], "epsilon_tight": [1.0] * 3, "accuracy": [0.5] * 3},
        ),
        ([row | {"accuracy": 1.0, "epoch": "x"} for row in STEPS], {}),
        (STEPS, {}),
        ([STEPS[0] | {"accuracy": 1.0}], {}),
        ([{"accuracy": "x", "step": [], "epsilon_tight": None}] * 3, {}),
        ([{"epoch": 1, "step": 0, "epsilon_tight": 1.0, "accuracy": 1.0}] * 3, {}),
        (None, {}),
    ],
)
def test_a_curve_has_every_evaluation_with_its_numbers(
    epochs: Any, curves: dict[str, list[float]]
) -> None:
    assert curves_of(*typed([record(epochs=epochs)])) == curves


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    epochs = [
        {"epoch": n, "step": n, "epsilon_tight": n / 1000, "accuracy": 1.0} for n in range(1, 1001)
    ]
    across = curves_of(*typed([record(epochs=epochs)]))["epoch"]
    assert (len(across), across[0], across[-1]) == (MAX_POINTS, 1, 1000)


def test_runs_outside_papers_are_there_with_their_privacy(path: Path) -> None:
    save(path.parent, record("mine", 4, 0.25, claims={"table": None, "row": None, "variant": None}))
    text = write_page(path.parent).read_text(encoding="utf-8")
    assert "5 runs, 1 of them outside papers" in text
    runs = {run["cells"]["recipe"]: run for run in data_of(text)["runs"]}
    assert runs["mine"]["cells"]["paper"] == "outside papers"
    assert runs["phasemnist"]["cells"]["what"] == "phasemnist"
    pairs = data_of(text)["pairs"]
    spent = dict(pairs[place] for place in runs["phasemnist"]["Privacy and ledger"])
    assert (spent["epsilon_tight"], spent["ledger.entries"]) == (2.0, 4)
    (setting,) = runs["phasemnist"]["Configuration"]
    assert pairs[setting][0] == "optimizer.lr"
    assert (path.parent / runs["mine"]["record"]).is_file()


def test_the_page_shows_paper_beside_ours_and_how_tables_stand(text: str) -> None:
    row = text[text.index("<td>PhaseMNIST ζ-DP-SGD</td>") :].split("</tr>")[0]
    for shown in ("99.0 %", "99.15 ± 0.10 % (n = 3)", "reproduced"):
        assert shown in row, shown
    assert '<li class="reproduced"><b>1</b>' in text
    assert '<li class="different"><b>1</b>' in text
    assert "4 numbers: 2 as published (" in text


def test_data_holds_no_markup_and_no_end_of_a_line(tmp_path: Path) -> None:
    for text in (EVIL, "</script>", "&amp;", "a\u2028b\u2029c"):
        written = str(page.escape_json({"a": text, "b": math.inf}))
        assert not re.search("[<>&\u2028\u2029]", written)
        assert json.loads(written) == {"a": text, "b": {"number": "Infinity"}}


def test_a_drawing_is_shown_as_an_image_and_a_table_as_text(path: Path) -> None:
    """In images browsers run nothing."""
    drawing = path.parent / "figures" / "p_fig1.svg"
    drawing.write_text(f'<svg xmlns="http://www.w3.org/2000/svg">{EVIL}</svg>')
    text = write_page(path.parent).read_text(encoding="utf-8")
    assert b64encode(drawing.read_bytes()).decode() in text
    assert "&lt;script&gt;" in text
    assert EVIL not in text
