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
CHECKING = 60  # a moment of the recording, of 1000, while the target checks
VERDICT = 2  # the round whose verdict is shown
KEPT = "kept 3"  # what the shown round of the live answer came to
WAIT = 120_000  # milliseconds


def main() -> None:
    """Take them all."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, shape, scheme, moment in (
            ("watch", DESK, "light", None),
            ("watch-dark", DESK, "dark", CHECKING),
            ("phone", PHONE, "light", None),
        ):
            page = opened(browser, url, shape, scheme)
            page.locator("#moment").fill(str(moment or 0))
            for _ in range(0 if moment else VERDICT):
                page.click("#step")
            page.evaluate("() => { document.activeElement.blur(); scrollTo({ top: 0, behavior: 'instant' }); }")
            page.wait_for_timeout(1000)
            page.screenshot(path=DOCS / f"page-{name}.png")
            page.close()
        page = opened(browser, url, {**DESK, "height": 960}, "light")
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
    """A question, answered on a modelled clock and shown round by round."""
    page.wait_for_function("() => document.getElementById('start-why').textContent.includes('plain decoding')")
    page.select_option("#chat-clock", CLOCK)
    page.fill("#question", "How does a rainbow form?")
    page.press("#question", "Enter")
    page.wait_for_selector(".answer[data-done]")
    page.click("#live-first")
    while KEPT not in page.inner_text("#live-state"):
        page.click("#live-step")
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
