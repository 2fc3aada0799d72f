"""The page: everything on it, nothing outside of it; verdicts by one rule; it fits a phone in a real browser."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_tables import FILLINGS, TABLE, filling
from tests.test_records import record, save
from zdp_bench.report import epsilon_curves, page, tables, verdicts


def private(recipe: str, seed: int, value: float, **more: Any) -> dict:
    epochs = [
        {"epoch": n, "step": n, "epsilon_tight": 0.5 * n, "accuracy": value * n / 4}
        for n in range(1, 5)
    ]
    of = record(recipe, seed, value, epochs=epochs, **more)
    of["privacy"] |= {"epsilon_tight": 2.0}
    return of


@pytest.fixture
def made(tmp_path: Path) -> tuple[str, Path]:
    """A page on two papers' rows, one of them run thrice, beside a measured table and a figure."""
    results = tmp_path / "results"
    save(results, *(private("phasemnist", seed, 0.9895 + seed / 1000) for seed in (1, 2, 3)))
    save(results, record("phasemnist_nonprivate", 1, 0.5, epochs=[]))
    (results / "tables").mkdir()
    (results / "tables" / "measured.md").write_text(
        "# Measured\n\n| a | b |\n| --- | --- |\n| <script>x</script> | 1 |\n"
    )
    (results / "figures").mkdir()
    head = '<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="3pt" height="3pt" viewBox="0 0 3 3">'
    (results / "figures" / "p_fig1.svg").write_text(
        head + "<metadata>made by</metadata><path/></svg>"
    )
    path = page.write([tables.build(TABLE, results, FILLINGS)], results, results / "report.html")
    return path.read_text(encoding="utf-8"), path


class Outline(HTMLParser):
    """Tags that are opened and closed, and everything that leads out of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.out: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)
        self.out += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.ids += [value or "" for name, value in attrs if name == "id" and tag == "section"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.out += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_beside_it(made: tuple[str, Path]) -> None:
    text, path = made
    outline = Outline()
    outline.feed(text)
    assert outline.open == []
    outside = [link for link in outline.out if not link.startswith("#")]
    assert len(outside) == 4
    for link in outside:
        assert (path.parent / link).is_file(), link
    for link in outline.out:
        if link.startswith("#") and not link.startswith(
            ("#m", "#C", "#g", "#D")
        ):  # but for what an SVG uses of itself
            assert link[1:] in text
    assert "<script" not in text
    assert not re.search(
        r"@import|url\(\s*['\"]?(?!#)|//[a-z]+\.[a-z]+(?<!www\.w3)",
        re.sub(r'xmlns(:\w+)?="[^"]*"', "", text),
    )


def test_the_page_shows_paper_beside_ours_and_claimed_beside_tight(made: tuple[str, Path]) -> None:
    text, _ = made
    row = text[text.index("PhaseMNIST ζ-DP-SGD</td>") :].split("</tr>")[0]
    for shown in (
        "99.0 %",
        "99.15 ± 0.10 % (n = 3)",
        ">0.53<",
        ">0.5<",
        'class="over">2<',
        "official",
        "reproduced",
        "seed 3",
    ):
        assert shown in row, shown
    assert '<li class="reproduced"><b>1</b>' in text
    assert '<li class="different"><b>1</b>' in text
    assert "zdp-bench run recipe=mnist" in text
    assert "&lt;script&gt;" in text
    assert text.count("<svg") == 2
    assert 'aria-label="zeta_dp_2021, Table 1: test metric against tight ε"' in text
    assert "made by" not in text


def test_two_pages_of_the_same_records_are_the_same_but_for_the_time(
    made: tuple[str, Path], tmp_path: Path
) -> None:
    text, path = made
    results = path.parent
    again = page.write([tables.build(TABLE, results, FILLINGS)], results, path).read_text(
        encoding="utf-8"
    )
    assert re.sub(r"Made .*? UTC", "", again) == re.sub(r"Made .*? UTC", "", text)


@pytest.mark.parametrize(
    ("values", "more", "verdict"),
    [
        ([0.98], {}, "reproduced"),  # 99.0 - 1.0, at the tolerance
        ([0.979], {}, "different"),
        ([0.95, 0.99], {}, "reproduced"),  # two deviations are 5.7 points
        ([], {}, "not run"),
        ([0.99], {"variant": "tuned"}, "not compared"),
        ([0.99], {"on": "d"}, "not compared"),
    ],
)
def test_verdicts(tmp_path: Path, values: list[float], more: dict, verdict: str) -> None:
    save(tmp_path, *(record("phasemnist", seed, value) for seed, value in enumerate(values)))
    table = tables.build(TABLE, tmp_path, [filling("phasemnist", **more)])
    (found,) = verdicts.of_table(table)
    assert found.verdict == verdict, found
    assert verdicts.counts([found])[verdict] == 1


def test_a_number_the_paper_does_not_print_is_compared_with_nothing(tmp_path: Path) -> None:
    save(tmp_path, record("phasemnist", 1, 0.9))
    (row,) = tables.build(TABLE, tmp_path, [filling("phasemnist")]).rows
    unprinted = replace(row, metric=replace(row.metric, value="not given"))
    assert verdicts.judge(unprinted) == ("not compared", "the paper gives no number")


def test_curves_need_a_private_run() -> None:
    assert (
        epsilon_curves.draw(
            [record("r", 1, 0.9, epochs=[{"epsilon_tight": math.inf, "accuracy": 0.9}])]
        )
        is None
    )
    figure = epsilon_curves.draw(
        [private("r", 1, 0.9), private("r", 2, 0.8), record("plain", 1, 0.95, epochs=[])]
    )
    assert figure is not None
    assert len(figure.axes[0].lines) == 3
    assert figure.axes[0].get_legend_handles_labels()[1] == ["r, d", "plain, d (ε = ∞)"]


BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_the_page_fits_a_phone_in_a_browser(made: tuple[str, Path], tmp_path: Path) -> None:
    text, path = made
    probe = path.with_name("probe.html")
    script = "<script>document.title = [document.documentElement.scrollWidth, innerWidth, document.querySelectorAll('svg').length]"
    probe.write_text(text.replace("</body>", script + "</script></body>"), encoding="utf-8")
    words = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    seen = subprocess.run(
        [*words, "--window-size=500,900", "--dump-dom", probe.as_uri()],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    ).stdout
    title = re.search(r"<title>(\d+),(\d+),(\d+)</title>", seen)
    assert title, seen[:500]
    width, window, drawings = map(int, title.groups())
    assert width <= window, "the page is wider than the phone"
    assert drawings == 2
