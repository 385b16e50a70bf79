"""Take the pictures of docs/page.md: the server's page in a real browser.

specbranch serve &
python scripts/show_page.py http://127.0.0.1:8000

Needs Chromium and the extra dev (playwright). What is live on them is whatever the server answers.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parents[1] / "docs"
DESK, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
CLOCK = "c10"
CHECKING, FLYING = 60, 112  # moments of the recording, of 1000: while the target checks, and just after its verdict
WAIT = 120_000  # milliseconds


def main() -> None:
    """Take them all."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, shape, scheme, moment in (
            ("watch", DESK, "light", CHECKING),
            ("watch-dark", DESK, "dark", FLYING),
            ("phone", PHONE, "light", CHECKING),
        ):
            page = opened(browser, url, shape, scheme)
            page.locator("#moment").fill(str(moment))
            page.evaluate("() => { document.activeElement.blur(); scrollTo({ top: 0, behavior: 'instant' }); }")
            page.wait_for_timeout(1000)
            page.screenshot(path=DOCS / f"page-{name}.png")
            page.close()
        page = opened(browser, url, {**DESK, "height": 1230}, "light")
        chat(page)
        page.close()
        page = opened(browser, url, {**DESK, "height": 1020}, "dark")
        race(page)
        browser.close()


def opened(browser: Any, url: str, shape: dict[str, int], scheme: str) -> Any:
    """The page, once its recording plays and the server has said who it is."""
    page = browser.new_page(viewport=shape, color_scheme=scheme)
    page.set_default_timeout(WAIT)
    page.goto(url)
    page.wait_for_selector("html[data-watch=ready]")
    page.wait_for_selector(f"#race-clock option[value={CLOCK}]", state="attached")
    return page


def chat(page: Any) -> None:
    """A question, its answer on a modelled clock, and the story of a word."""
    page.select_option("#chat-clock", CLOCK)
    page.fill("#question", "How does a rainbow form?")
    page.press("#question", "Enter")
    page.wait_for_selector(".answer[data-done]")
    words = page.locator(".answer .tok.branch b:not(:empty)")
    words.nth(words.count() // 2).click()
    page.mouse.move(0, 0)
    page.evaluate("() => scrollTo({ top: document.getElementById('chat').offsetTop, behavior: 'instant' })")
    page.wait_for_timeout(500)
    page.screenshot(path=DOCS / "page-chat.png")


def race(page: Any) -> None:
    """One prompt, four ways."""
    page.select_option("#race-clock", CLOCK)
    page.click("#race-go")
    page.wait_for_selector("#tracks[data-done]")
    page.evaluate("() => scrollTo({ top: document.getElementById('race').offsetTop, behavior: 'instant' })")
    page.wait_for_timeout(1000)
    page.screenshot(path=DOCS / "page-race.png")


if __name__ == "__main__":
    main()
