"""The page: everything on it, nothing outside of it; one rule for verdicts; it fits a phone."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from base64 import b64encode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_tables import FILLINGS, TABLE, own
from tests.test_records import record, save
from zdp_bench.errors import UserError
from zdp_bench.report import epsilon_curves, page, tables, verdicts


def private(recipe: str, seed: int, value: float) -> dict[str, Any]:
    epochs = [
        {"epoch": n, "step": n, "epsilon_tight": 0.5 * n, "accuracy": value * n / 4}
        for n in range(1, 5)
    ]
    run = own(recipe, seed, value, epochs=epochs)
    run["privacy"] |= {"epsilon_tight": 2.0}
    return run


def write_page(results: Path) -> Path:
    return page.write([tables.build(TABLE, results, FILLINGS)], results, results / "report.html")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A page on two papers' rows, one of them run thrice, beside a measured table and a figure."""
    results = tmp_path / "results"
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


class Reader(HTMLParser):
    """Collects the links of a page; fails if a tag is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)
        self.handle_startendtag(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href")
        ]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_beside_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    links = Reader(text).links
    outside = [link for link in links if not link.startswith(("#", "data:image/svg+xml;base64,"))]
    assert len(outside) == 4
    assert all((path.parent / link).is_file() for link in outside)
    within_svg = ("#m", "#C", "#g", "#D")
    inside = [link for link in links if link.startswith("#") and not link.startswith(within_svg)]
    assert all(link[1:] in text for link in inside)
    assert "<script" not in text
    unnamed = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)|//[a-z]+\.[a-z]+(?<!www\.w3)", unnamed)


def test_the_page_shows_paper_beside_ours_and_claimed_beside_tight(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    row = text[text.index("PhaseMNIST ζ-DP-SGD</td>") :].split("</tr>")[0]
    ours = ("99.15 ± 0.10 % (n = 3)", 'class="over">0.53 / 2<', "derived", "seed 3")
    for shown in ("99.0 %", *ours, "reproduced"):
        assert shown in row, shown
    assert '<li class="reproduced"><b>1</b>' in text
    assert '<li class="different"><b>1</b>' in text
    assert "4 cells: 2 as published (1 reproduced, 1 different), 0 on other or reduced data" in text
    assert "&lt;script&gt;" in text
    assert text.count("<svg") == text.count("<img") == 1
    assert 'aria-label="Ziller et al. 2021 (ζ-DP), Table 1: test metric against tight ε"' in text


def test_a_drawing_that_somebody_made_runs_no_script(path: Path) -> None:
    """It is shown as an image, in which browsers run nothing, and the page allows no script."""
    drawing = path.parent / "figures" / "p_fig1.svg"
    drawing.write_text('<svg xmlns="http://www.w3.org/2000/svg"><script>steal()</script></svg>')
    text = write_page(path.parent).read_text(encoding="utf-8")
    assert "steal" not in text
    assert b64encode(drawing.read_bytes()).decode() in text
    assert "Content-Security-Policy\" content=\"default-src 'none'" in text


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("figures/p_fig1.svg", b"<html>not found</html>", "is no SVG drawing"),
        ("tables/measured.md", "# Größe".encode("latin-1"), "is not UTF-8 text"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_one_sentence(
    path: Path, name: str, content: bytes, says: str
) -> None:
    (path.parent / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{Path(name).name}: {says}"):
        write_page(path.parent)


def test_two_pages_of_the_same_records_differ_only_in_the_time(path: Path) -> None:
    first = path.read_text(encoding="utf-8")
    second = write_page(path.parent).read_text(encoding="utf-8")
    time = re.compile(r"Made .*? UTC")
    assert time.sub("", first) == time.sub("", second)


def test_a_verdict_says_why(tmp_path: Path) -> None:
    save(tmp_path, own("phasemnist", 1, 0.98), record("mnist", 1, 0.9))
    table = tables.build(TABLE, tmp_path, FILLINGS)
    missing = {"mnist_nonprivate".ljust(64, "e"): "the data root lacks MNIST"}
    found = [(one.verdict, one.why) for one in verdicts.of_table(table, missing)]
    assert found == [
        ("reproduced", "Δ -1.00"),
        ("other data", "on d"),
        ("not run", ""),
        ("not run", "the data root lacks MNIST"),
    ]


def test_curves_need_a_private_run() -> None:
    unbounded = record("r", 1, 0.9, epochs=[{"epsilon_tight": math.inf, "accuracy": 0.9}])
    assert epsilon_curves.draw([unbounded]) is None
    plain = record("plain", 1, 0.95, epochs=[])
    figure = epsilon_curves.draw([private("r", 1, 0.9), private("r", 2, 0.8), plain])
    assert figure is not None
    assert len(figure.axes[0].lines) == 3
    assert figure.axes[0].get_legend_handles_labels()[1] == ["r, mnist", "plain, d (ε = ∞)"]


BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_the_page_fits_a_phone_in_a_browser(path: Path, tmp_path: Path) -> None:
    probe = path.with_name("probe.html")
    script = (
        "<script>document.title = [document.documentElement.scrollWidth, innerWidth, "
        "document.querySelectorAll('svg').length]</script></body>"
    )
    text = path.read_text(encoding="utf-8").replace("</body>", script)
    probe.write_text(text, encoding="utf-8")
    words = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=500,900"]
    words += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", probe.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=True)
    title = re.search(r"<title>(\d+),(\d+),(\d+)</title>", done.stdout)
    assert title, done.stdout[:500]
    width, window, drawings = map(int, title.groups())
    assert width <= window, "the page is wider than the phone"
    assert drawings == 2
