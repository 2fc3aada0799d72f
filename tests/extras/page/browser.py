"""A page in headless Chromium: opened from disk, watched for errors and requests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
WIDE, PHONE = (1280, 900), (390, 844)


@dataclass
class Seen:
    """A page, and what it said and asked for that it should not."""

    page: Page
    said: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def see(
    browser: Browser, file: Path, size: tuple[int, int], scheme: str = "light"
) -> Iterator[Seen]:
    """Open a file at a size in CSS pixels, and wait until its table of runs stands."""
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,  # type: ignore[arg-type]
        locale="en-GB",
    )
    page = context.new_page()
    seen = Seen(page)
    page.on("console", lambda message: seen.said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: seen.said.append(f"error: {error}"))
    page.on("dialog", lambda box: (seen.said.append(f"dialog: {box.message}"), box.dismiss()))
    page.on("request", lambda request: seen.requests.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("#count:has-text('runs')")
    yield seen
    context.close()
