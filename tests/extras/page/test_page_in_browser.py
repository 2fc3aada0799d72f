"""The page in a real browser: it sorts, filters and opens runs; no script in a record is run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright")

from PIL import Image
from playwright.sync_api import Browser, Page

from tests.extras.page.browser import CHROMIUM, PHONE, WIDE, chromium, see
from tests.extras.page.test_page import EVIL, private, write_page
from tests.report.test_tables import own
from tests.test_records import save
from zdp_bench import cli
from zdp_bench.extras.page.page import write as write_report
from zdp_bench.report.comparisons import students_t

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


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
    return write_page(results, lambda record: f"---\n---\n\n{EVIL}\n\n[x](javascript:alert(1))")


def column(page: Page, field: str) -> list[str]:
    return page.locator(f"#runs-table .tabulator-cell[tabulator-field={field}]").all_inner_texts()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE])
def test_the_page_fits_says_nothing_and_asks_for_nothing(
    browser: Browser, file: Path, size: tuple[int, int], scheme: str
) -> None:
    with see(browser, file, size, scheme) as seen:
        page = seen.page
        page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        page.evaluate("document.querySelectorAll('.choose').forEach((d) => (d.open = false))")
        page.click("#runs-table .tabulator-row >> nth=0 >> a")
        page.wait_for_selector("#run[open] #run-name")
        assert page.evaluate("document.documentElement.scrollWidth") == size[0]
        assert page.evaluate("document.querySelector('#run').scrollWidth") <= size[0]
        assert seen.said == []
        assert [url for url in seen.requests if not url.startswith("data:")] == [file.as_uri()]


def test_what_a_record_a_drawing_or_a_table_holds_stays_text(browser: Browser, file: Path) -> None:
    with see(browser, file, WIDE) as seen:
        page = seen.page
        for name in (EVIL, "what differs"):  # configuration keys and record columns as columns
            page.evaluate("document.querySelector('.choose').open = true")
            page.locator("#columns label", has_text=name).last.click()
        page.click("h1")  # closes the choice of columns
        page.fill("#search", "evil")
        page.click("#runs-table .tabulator-row >> nth=0 >> a")
        page.locator("#run details:not([open]) > summary").click()
        assert EVIL in page.inner_text("#run-body")
        assert EVIL in page.inner_text("#run .card")
        page.click("#run-head button")
        page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        assert EVIL in page.inner_text("#measured")
        assert page.evaluate("window.harmed") is None
        assert page.locator("a[href^=javascript]").count() == 0
        assert seen.said == []


def test_a_click_on_a_heading_sorts_what_is_lacking_last(browser: Browser, file: Path) -> None:
    with see(browser, file, WIDE) as seen:
        heading = seen.page.locator(".tabulator-col[tabulator-field=value]")
        heading.click()
        assert column(seen.page, "value") == ["10.00 %", "60.00 %", "70.00 %", "80.00 %"]
        heading.click()
        assert column(seen.page, "value") == ["80.00 %", "70.00 %", "60.00 %", "10.00 %"]
        assert column(seen.page, "epsilon_tight") == ["2", "2", "2", "∞"]


def test_search_filters_and_a_limit_on_epsilon_choose_runs(browser: Browser, file: Path) -> None:
    with see(browser, file, WIDE) as seen:
        page = seen.page
        page.fill("#limit", "5")
        assert page.inner_text("#count") == "3 of 4 runs"
        page.fill("#search", "optimizer.lr=0.2 phase")
        assert page.inner_text("#count") == "1 of 4 runs"
        page.click("text=Clear")
        page.wait_for_selector("#count:has-text('4 of 4')")
        page.select_option("#filters select[aria-label=recipe]", "evil")
        assert page.inner_text("#count") == "1 of 4 runs"
        page.fill("#search", "nothing like this")
        assert "No run matches" in page.inner_text("#runs-table")


def test_a_run_opens_by_click_and_by_address_and_columns_are_kept(
    browser: Browser, file: Path
) -> None:
    with see(browser, file, WIDE) as seen:
        page = seen.page
        page.click(".choose summary")
        page.check("#columns label:has-text('optimizer.lr') input")
        assert sorted(column(page, "'setting:optimizer.lr'")) == ["", "0.1", "0.2", "0.3"]
        page.click("h1")
        page.locator(".tabulator-cell[tabulator-field=value]", has_text="70.00").click()
        page.wait_for_selector("#run[open]")
        shown = page.inner_text("#run-body")
        for word in ("PhaseMNIST", "70.00 %", "optimizer.lr", "ε tight", "ledger", "Model card"):
            assert word in shown, word
        assert page.evaluate("Chart.getChart('curve').data.datasets[0].data.length") == 4
        address = page.url
        assert "#run-phasemnist2" in address
        page.keyboard.press("Escape")
        page.wait_for_function("location.hash === ''")
        page.goto(address)
        page.wait_for_selector("#run[open] #run-name")
        page.reload()
        page.wait_for_selector("#count:has-text('runs')")
        assert sorted(column(page, "'setting:optimizer.lr'")) == ["", "0.1", "0.2", "0.3"]


def test_runs_are_compared_by_curves_differences_and_the_test(
    browser: Browser, tmp_path: Path
) -> None:
    runs = [private(of, n, at + n / 100) for of, at in (("a", 0.5), ("b", 0.8)) for n in (1, 2, 3)]
    for run in runs:
        run["config"] = {"optimizer": {"lr": {"a": 0.1, "b": 0.3}[run["recipe"]]}}
    save(tmp_path, *runs, own("evil", 9, 0.1, epochs=[]))
    with see(browser, write_page(tmp_path), PHONE) as seen:
        page = seen.page
        assert page.is_disabled("#compare")
        for name in ("a, seed 1", "b, seed 2"):
            page.locator(".tabulator-row", has_text=name).locator("input").check()
        page.click("#compare:has-text('Compare 2')")
        shown = page.inner_text("#run-body")
        p = students_t([0.51, 0.52, 0.53], [0.81, 0.82, 0.83])
        assert p < 0.001
        assert "a against b: different, Student's t p < 0.001 (seeds 1, 2, 3; threshold" in shown
        assert "optimizer.lr\t0.1\t0.3" in shown
        assert page.evaluate("Chart.getChart('curve').data.datasets.map((s) => s.label)") == [
            "a, seed 1",
            "b, seed 2",
        ]
        assert page.evaluate("document.querySelector('#run').scrollWidth") <= PHONE[0]
        assert seen.said == []


PICTURES = {"wide": ROOT / "docs" / "report_wide.png", "phone": ROOT / "docs" / "report_phone.png"}
SHOWN = Path(__file__).with_name("pictures.json")  # what the page consisted of when they were taken
# Of the runs' part and of a run that is open; numbers and names of runs are no structure.
STRUCTURE = """() => {
  const seen = (e) => e.offsetParent;
  const texts = (all) => [...document.querySelectorAll(all)].filter(seen).map((e) => e.textContent);
  return {
    runs: texts('#runs h2, #runs .tabulator-col-title'),
    tools: [...document.querySelectorAll('#tools :is(input, select, button, summary)')]
      .filter((e) => !e.closest('#columns'))
      .map((e) => e.id || e.options?.[0].textContent || e.textContent),
    open: texts('#run-body summary h3'),
  };
}"""


def open_run(page: Page) -> dict[str, Any]:
    """Open the first run; return what the page consists of."""
    page.click("#runs-table .tabulator-row >> nth=0 >> a")
    page.wait_for_selector("#run[open]")
    found: dict[str, Any] = page.evaluate(STRUCTURE)
    return found


def test_the_pictures_of_the_manual_show_the_page_as_it_is(
    browser: Browser, tmp_path: Path
) -> None:
    """Take them anew if the page consists of something else: look at them and commit them."""
    file = tmp_path / "report.html"
    with see(browser, write_report([], ROOT / "results", file), WIDE) as seen:
        found = open_run(seen.page)
    if SHOWN.is_file() and found == json.loads(SHOWN.read_text(encoding="utf-8")):
        return
    with pytest.raises(SystemExit):
        cli.main(["report", "--results", str(ROOT / "results"), "--output", str(file)])
    with see(browser, file, WIDE) as seen:
        top = {"x": 0, "y": 0, "width": WIDE[0], "height": 1300}
        seen.page.screenshot(path=PICTURES["wide"], clip=top, full_page=True)
    with see(browser, file, PHONE) as seen:
        open_run(seen.page)
        seen.page.wait_for_timeout(300)
        seen.page.screenshot(path=PICTURES["phone"])
    for path in PICTURES.values():  # 128 colours are enough for text, at a third of the size
        Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
    SHOWN.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    pytest.fail("the page has changed: the pictures in docs are taken anew, look and commit them")
