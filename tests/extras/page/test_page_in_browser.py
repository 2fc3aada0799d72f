"""The page in a real browser: it sorts, filters and opens runs; no script in a record is run."""

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("playwright")

from playwright.sync_api import Browser, Page, sync_playwright

from tests.extras.page.test_page import EVIL, private, write_page
from tests.report.test_tables import own
from tests.test_records import save

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
WIDE, PHONE = (1280, 900), (390, 844)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")]


CUT = """[...document.querySelectorAll(".tabulator-cell")]
    .filter((cell) => cell.scrollWidth > cell.clientWidth).map((cell) => cell.textContent)"""


@dataclass
class Seen:
    """A page, and what it said and asked for that it should not."""

    page: Page
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def see(
    browser: Browser, file: Path, size: tuple[int, int], scheme: str = "light"
) -> Iterator[Seen]:
    """Open a file from disk at a size in CSS pixels, and wait until its table of runs stands."""
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,  # type: ignore[arg-type]
        locale="en-GB",
    )
    page = context.new_page()
    seen = Seen(page)
    page.on("console", lambda message: seen.messages.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: seen.messages.append(f"error: {error}"))
    page.on("dialog", lambda box: (seen.messages.append(f"dialog: {box.message}"), box.dismiss()))
    page.on("request", lambda request: seen.requests.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("#count:has-text('runs')")
    yield seen
    context.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of four runs, one of them of somebody who means harm, with a table and a drawing."""
    results = tmp_path_factory.mktemp("results")
    save(results, *(private("phasemnist", seed, 0.5 + seed / 10) for seed in (1, 2, 3)))
    evil = own("evil", 9, 0.1, epochs=[], claims={"table": None, "row": None, "variant": EVIL})
    evil["config"] = {"model": {"name": EVIL}, EVIL: EVIL, "link": "</script>" + EVIL}
    evil["data"]["notes"] = EVIL
    save(results, evil)
    for folder, name, text in (
        ("tables", "measured.md", f"# {EVIL}\n\n![x](http://example.org/x.png)\n\n{EVIL}\n"),
        ("figures", "p.svg", f'<svg xmlns="http://www.w3.org/2000/svg">{EVIL}</svg>'),
    ):
        (results / folder).mkdir()
        (results / folder / name).write_text(text)
    return write_page(results)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE])
def test_the_page_fits_says_nothing_and_asks_for_nothing(
    browser: Browser, file: Path, size: tuple[int, int], scheme: str
) -> None:
    with see(browser, file, size, scheme) as seen:
        page = seen.page
        assert page.evaluate(CUT) == [], "no name or number is cut"
        page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        page.click("#runs-table .tabulator-row >> nth=0 >> a")
        page.wait_for_selector("#run[open] #run-name")
        assert page.evaluate("document.documentElement.scrollWidth") == size[0]
        assert page.evaluate("document.querySelector('#run').scrollWidth") <= size[0]
        assert seen.messages == []
        assert [url for url in seen.requests if not url.startswith("data:")] == [file.as_uri()]


def test_what_a_record_a_drawing_or_a_table_holds_stays_text(browser: Browser, file: Path) -> None:
    with see(browser, file, WIDE) as seen:
        page = seen.page
        page.fill("#search", "evil")
        page.click("#runs-table .tabulator-row >> nth=0 >> a")
        assert EVIL in page.inner_text("#run-body")
        page.click("#run-head button")
        page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        assert EVIL in page.inner_text("#measured")
        assert page.evaluate("window.harmed") is None
        assert page.locator("a[href^=javascript]").count() == 0
        assert seen.messages == []


def test_search_filters_and_a_limit_on_epsilon_choose_runs(browser: Browser, file: Path) -> None:
    points = "Chart.getChart('scatter').data.datasets.map((set) => set.data.length)"
    with see(browser, file, WIDE) as seen:
        page = seen.page
        page.fill("#limit", "5")
        assert page.inner_text("#count") == "3 of 4 runs"
        assert sum(page.evaluate(points)) == 3  # the chart follows
        page.fill("#search", "optimizer.lr=0.2 phase")
        assert page.inner_text("#count") == "1 of 4 runs"
        page.click("text=Clear")
        page.wait_for_selector("#count:has-text('4 of 4')")
        page.select_option("#filters select[name=recipe]", "evil")
        assert page.inner_text("#count") == "1 of 4 runs"
        page.fill("#search", "nothing like this")
        assert "No run matches" in page.inner_text("#runs-table")


def test_a_run_opens_by_click_and_by_address(browser: Browser, file: Path) -> None:
    with see(browser, file, WIDE) as seen:
        page = seen.page
        page.locator(".tabulator-cell[tabulator-field=value]", has_text="70.00").click()
        page.wait_for_selector("#run[open]")
        shown = page.inner_text("#run-body")
        for word in ("phasemnist", "70.00 %", "optimizer.lr", "ε tight", "ledger"):
            assert word in shown, word
        address = page.url
        assert "#run-phasemnist/phasemnist2" in address
        page.keyboard.press("Escape")
        page.wait_for_function("location.hash === ''")
        page.goto(address)
        page.wait_for_selector("#run[open] #run-name")


def test_runs_of_any_number_and_name_open_and_say_what_tables_say(
    browser: Browser, tmp_path: Path
) -> None:
    values = {"nan": math.nan, "inf": -math.inf, "-inf": math.inf}
    shown = {"nan": "undefined", "inf": "-∞ dB", "-inf": "∞ dB"}
    shared_run = "5" * 64
    for seed, (name, value) in enumerate(values.items()):
        run = own("mri", seed, 0.5, labels={"name": name, "tags": [], "notes": ""})
        run["headline"] = {"name": "psnr", "value": value}
        run["metrics"] = {"psnr": value}
        save(tmp_path, run)
    save(tmp_path, own("first", 7, 0.5, run=shared_run), own("second", 7, 0.5, run=shared_run))
    with see(browser, write_page(tmp_path), WIDE) as seen:
        page = seen.page
        for seed, (name, text) in enumerate(shown.items()):
            page.fill("#search", "psnr")
            row = page.locator(".tabulator-row", has_text=f"{name}: mri, seed {seed}")
            assert row.locator("[tabulator-field=value]").inner_text() == text
            row.locator("a").click()
            assert text in page.inner_text("#run[open] .tiles")
            page.click("#run-head button")
        for recipe in ("first", "second"):
            page.fill("#search", recipe)
            page.click("#runs-table .tabulator-row >> nth=0 >> a")
            assert f"runs/{recipe}/" in page.inner_text("#run-body")
            page.click("#run-head button")
        assert seen.messages == []


CURVES = (
    "Chart.getChart('curves')?.data.datasets.map((set) => [set.label, set.data.map((p) => p.x)])"
)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a sweep over fourteen learning rates and of a run of another recipe."""
    results = tmp_path_factory.mktemp("sweep")
    save(results, *(private("films", seed, 0.02 * seed) for seed in range(11, 25)))
    save(results, private("scans", 1, 0.9))
    return write_page(results)


@pytest.mark.parametrize("size", [WIDE, PHONE])
def test_the_curves_of_a_sweep_are_overlaid(
    browser: Browser, sweep: Path, size: tuple[int, int]
) -> None:
    with see(browser, sweep, size) as seen:
        page = seen.page
        assert "The first 12 of 15 runs" in page.inner_text("#curves-note")
        assert len(page.evaluate(CURVES)) == 12
        page.fill("#search", "optimizer.lr=1.2 films")
        assert page.evaluate(CURVES) == [["films, lr 1.2, seed 12", [1, 2, 3, 4]]]
        page.fill("#search", "optimizer.lr=1. films")
        names = {name for name, _ in page.evaluate(CURVES)}
        assert names == {f"lr {seed / 10:g}, seed {seed}" for seed in range(11, 20)}
        page.select_option("#curves-across", "epsilon_tight")
        assert {tuple(xs) for _, xs in page.evaluate(CURVES)} == {(0.5, 1, 1.5, 2)}
        assert page.evaluate("document.documentElement.scrollWidth") == size[0]
        assert page.evaluate("Chart.getChart('curves').width") <= size[0]
        assert seen.messages == []


LEGEND = """(() => {
    const chart = Chart.getChart('curves');
    const ends = chart.legend.legendHitBoxes.map((box) => [box.left, box.left + box.width]);
    return [chart.legend.legendItems.map((entry) => entry.text), ends.flat(), chart.width];
})()"""


@pytest.mark.parametrize("size", [WIDE, PHONE])
def test_the_legend_tells_runs_apart_and_fits_the_chart(
    browser: Browser, tmp_path: Path, size: tuple[int, int]
) -> None:
    """The key with the most values comes first, and only what follows is cut."""
    runs = [private("films", seed, 0.02 * seed) for seed in range(1, 5)]
    for number, run in enumerate(runs):
        options = ["a_long_option_of_the_data_set", "another_long_option_of_the_data_set"]
        run["config"]["dataset"] = dict.fromkeys(options, number % 2)
    save(tmp_path, *runs)
    with see(browser, write_page(tmp_path), size) as seen:
        labels, ends, width = seen.page.evaluate(LEGEND)
        assert len({label[:12] for label in labels}) == 4, labels
        assert all(0 <= end <= width for end in ends), (ends, width)
        assert any(label.endswith("…") for label in labels) == (size == PHONE), labels
        assert seen.messages == []


@pytest.mark.parametrize("size", [WIDE, PHONE])
def test_a_run_shows_its_curves_and_leads_to_those_of_its_recipe(
    browser: Browser, sweep: Path, size: tuple[int, int]
) -> None:
    with see(browser, sweep, size) as seen:
        page = seen.page
        page.fill("#search", "films seed 17")
        page.click("#runs-table .tabulator-row >> nth=0 >> a")
        curve = "Chart.getChart(document.querySelector('#run-curves canvas')).data.datasets[0].data"
        shown = page.evaluate(f"{curve}.map((point) => [point.x, point.y])")
        assert shown == [[n, pytest.approx(8.5 * n)] for n in range(1, 5)]
        page.select_option("#run-curves select", "epsilon_tight")
        assert page.evaluate(f"{curve}.map((point) => point.x)") == [0.5, 1, 1.5, 2]
        assert page.evaluate("document.querySelector('#run').scrollWidth") <= size[0]
        page.click("text=All runs of this recipe")
        page.wait_for_selector("#count:has-text('14 of 15 runs')")
        assert not page.is_visible("#run")
        assert len(page.evaluate(CURVES)) == 12
        assert seen.messages == []


def test_runs_without_epsilon_or_epochs_have_no_curve_against_it(
    browser: Browser, tmp_path: Path
) -> None:
    plain = private("plain", 1, 0.5)
    plain["epochs"] = [row | {"epsilon_tight": math.inf} for row in plain["epochs"]]
    save(tmp_path, plain, own("bare", 1, 0.5, epochs=[]))
    with see(browser, write_page(tmp_path), WIDE) as seen:
        page = seen.page
        assert [name for name, _ in page.evaluate(CURVES)] == ["plain, seed 1"]
        page.select_option("#curves-across", "epsilon_tight")
        assert "None of these runs has a curve to draw here." in page.inner_text("#curves-note")
        page.fill("#search", "bare")
        page.click("#runs-table .tabulator-row >> nth=0 >> a")
        assert page.locator("#run-curves").count() == 0
        page.click("#run-head button")
        page.fill("#search", "plain")
        page.click("#runs-table .tabulator-row >> nth=0 >> a")
        assert page.locator("#run-curves select").count() == 0
        assert seen.messages == []


def test_the_chart_says_what_it_leaves_out_and_mixes(browser: Browser, tmp_path: Path) -> None:
    """Diverged runs vanished, and ε of patients and of images shared the axis without a word."""
    for number, value in enumerate((0.5, math.nan, 0.7)):
        run = own(f"r{number}", number, value)
        run["privacy"] |= {"epsilon_tight": 2.0, "epsilon_of": "patient" if number else "image"}
        save(tmp_path, run)
    with see(browser, write_page(tmp_path), WIDE) as seen:
        note = seen.page.inner_text("#scatter-note")
        assert note.startswith("Not drawn: 1 run with an undefined or infinite metric")
        assert "not comparable: image at δ = 0.00001; patient at δ = 0.00001." in note
        seen.page.select_option("[name=epsilon_of]", "image")
        assert seen.page.inner_text("#scatter-note") == ""
        assert seen.messages == []


def test_many_labels_have_different_points(browser: Browser, tmp_path: Path) -> None:
    """The ninth looked like the first."""
    for number in range(70):
        run = own(f"r{number:02}", number, 0.5)
        run["privacy"] |= {"epsilon_tight": 2.0}
        save(tmp_path, run)
    looks = """Chart.getChart('scatter').data.datasets.map(
        (set) => `${set.borderColor} ${set.pointStyle}`)"""
    with see(browser, write_page(tmp_path), WIDE) as seen:
        seen.page.select_option("#scatter-colour", "recipe")
        assert len(set(seen.page.evaluate(looks))) == 64
        labels = seen.page.evaluate(
            "Chart.getChart('scatter').data.datasets.map((set) => set.label)"
        )
        assert labels[-1] == "7 others"
