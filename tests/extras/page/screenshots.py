"""Makes the pictures of docs/results.md: `python -m tests.extras.page.screenshots`.

With them it writes what the page consists of. A test fails when the page consists of something
else, so that nobody forgets to make the pictures anew.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page

from tests.extras.page.browser import PHONE, WIDE, chromium, see
from zdp_bench.extras.page import page

ROOT = Path(__file__).resolve().parents[3]
MANIFEST = Path(__file__).with_name("screenshots.json")
PICTURES = {"wide": ROOT / "docs" / "report_wide.png", "phone": ROOT / "docs" / "report_phone.png"}
# Of the runs' part and of a run that is open; numbers and names of runs are no structure.
STRUCTURE = """() => {
  const texts = (selector) => [...document.querySelectorAll(selector)].map((e) => e.textContent);
  return {
    runs: texts('#runs h2, #runs th, #runs .tabulator-col-title'),
    tools: [...document.querySelectorAll('#tools :is(input, select, button, summary)')]
      .filter((e) => !e.closest('#columns'))
      .map((e) => e.id || e.options?.[0].textContent || e.textContent),
    open: texts('#run-body summary h3'),
  };
}"""


def structure(page: Page) -> dict[str, Any]:
    """Return what a page consists of, with its first run opened."""
    page.click("#runs-table .tabulator-row >> nth=0 >> a")
    page.wait_for_selector("#run[open]")
    found: dict[str, Any] = page.evaluate(STRUCTURE)
    return found


def write_page(folder: Path) -> Path:
    """Write the page of the committed records, without the papers' tables, which take a while."""
    return page.write([], ROOT / "results", folder / "report.html")


def digests() -> dict[str, str]:
    """Return the SHA-256 of each picture."""
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in PICTURES.items()
        if path.is_file()
    }


def take(browser: Browser, file: Path) -> dict[str, Any]:
    """Take both pictures; return what the page consists of."""
    with see(browser, file, WIDE) as seen:
        whole = {"x": 0, "y": 0, "width": WIDE[0], "height": 1440}  # to the end of the scatter
        seen.page.screenshot(path=PICTURES["wide"], clip=whole, full_page=True)
        found = structure(seen.page)
    with see(browser, file, PHONE) as seen:
        structure(seen.page)
        seen.page.wait_for_timeout(300)
        seen.page.screenshot(path=PICTURES["phone"])
    for path in PICTURES.values():  # 128 colours are enough for text, at a third of the size
        Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
    return found


def main() -> None:
    """Write the pictures and the manifest."""
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        found = take(browser, write_page(Path(folder)))
    manifest = {"structure": found, "pictures": digests()}
    MANIFEST.write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
