"""The page in a real browser: what is seen at once, what is asked live, by keyboard, on a phone, in both colour
schemes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import Running, load_tiny, running

from specbranch import LLM, SamplingParams
from specbranch.serve.keys import new_key
from specbranch.serve.page import FILES

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
RECORDING = json.loads((FILES / "recording.json").read_text(encoding="utf-8"))
QUESTION = "What is a branch?"
WAIT = 60_000  # milliseconds
SHAPES = {"desk": {"width": 1280, "height": 800}, "phone": {"width": 360, "height": 740}}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


class Visit:
    """A page that is open, and what it asked for and complained of meanwhile."""

    def __init__(self, browser: Any, url: str, shape: str = "desk", **given: Any) -> None:
        self.page = browser.new_page(viewport=SHAPES[shape], **given)
        self.page.set_default_timeout(WAIT)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url, wait_until="domcontentloaded")
        self.at_once = self.page.inner_text("main")
        self.page.wait_for_selector("html[data-watch=ready]")

    def texts(self) -> list[str]:
        """The sentences on the stage: all of them, and those that are seen."""
        return [self.page.text_content(f"#{name} .sentence") for name in ("plain", "ours")]

    def seen(self, name: str) -> str:
        return "".join(self.page.locator(f"#{name} .sentence .there").all_text_contents())

    def moment(self, value: int) -> None:
        """Drag the slider somewhere."""
        self.page.locator("#moment").fill(str(value))

    def ask(self, question: str = QUESTION) -> str:
        """Ask in the chat; returns the answer's words."""
        self.page.fill("#question", question)
        self.page.press("#question", "Enter")
        self.page.locator(".answer[data-done]").last.wait_for()
        return "".join(self.page.locator(".answer").last.locator(".tok").all_text_contents())

    def race(self, clock: str) -> str:
        """Run a race; returns its result."""
        self.page.select_option("#race-clock", clock)
        self.page.click("#race-go")
        self.page.wait_for_selector("#tracks[data-done]")
        return str(self.page.inner_text("#race-result"))

    def violations(self) -> list[str]:
        """What axe finds wrong."""
        axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
        found = axe.run(self.page).response["violations"]
        return [f"{one['id']}: {[node['html'] for node in one['nodes']]}" for one in found]


@pytest.fixture
def visit(browser: Any, served: Running) -> Iterator[Visit]:
    made = Visit(browser, served.url)
    yield made
    assert made.complaints == []
    made.page.close()


def test_the_sentence_writes_itself_unasked_and_is_labelled(visit: Visit) -> None:
    assert "The same answer, sooner." in visit.at_once and "Plain decoding" in visit.at_once
    visit.page.wait_for_function("() => document.getElementById('moment').value > 20")
    assert "recorded" in visit.page.inner_text("#badge") and "Recorded on" in visit.page.inner_text("#recorded")
    assert "modelled, not measured" in visit.page.inner_text("#recorded")
    paints = visit.page.evaluate("performance.getEntriesByType('paint').map(one => [one.name, one.startTime])")
    assert "first-contentful-paint" in dict(paints)
    print(f"first contentful paint after {dict(paints)['first-contentful-paint']:.0f} ms")


def test_both_sentences_end_alike_and_ours_sooner(visit: Visit) -> None:
    assert visit.texts() == [RECORDING["text"]] * 2
    visit.moment(1000)
    assert visit.seen("plain") == visit.seen("ours") == RECORDING["text"]
    times = f"{RECORDING['plain']['seconds'] / RECORDING['ours']['seconds']:.1f} ×"
    assert visit.page.inner_text("#sooner") == f"{times} sooner, 0 characters different"
    visit.moment(400)
    assert len(visit.seen("plain")) < len(visit.seen("ours")) == len(RECORDING["text"])


def test_branches_fan_out_while_the_target_checks_and_are_gone_after_it(visit: Visit) -> None:
    frame = next(one for one in RECORDING["ours"]["frames"] if one["draft"] and one["target"] and one["path"])
    lasts = RECORDING["plain"]["seconds"]
    visit.moment(round(1000 * 0.97 * frame["target"][1] / lasts * 0.96))
    shown = visit.page.locator(".fan text:not(.root)").all_text_contents()
    assert len(shown) > len(frame["path"]) and {frame["nodes"][at][0].strip() for at in frame["path"]} <= set(shown)
    assert visit.page.locator(".fan rect").count() > 0 and "checks" in visit.page.inner_text("#state")
    visit.moment(1000)
    assert visit.page.locator(".fan text").count() == 0


def test_nothing_is_asked_of_another_host(visit: Visit, served: Running) -> None:
    visit.ask()
    visit.race("c10")
    assert len(visit.requests) > 8
    assert [url for url in visit.requests if not url.startswith((served.url, "data:"))] == []


def test_the_chat_says_what_the_engine_says(visit: Visit, reference: LLM) -> None:
    expected = reference.chat([{"role": "user", "content": QUESTION}], SamplingParams(max_tokens=256))
    assert visit.ask() == expected.text
    assert visit.page.inner_text('[data-count="speed"]') != "–"


def test_a_word_tells_who_proposed_it(visit: Visit) -> None:
    visit.page.select_option("#chat-method", "pearl")  # which drafts whether it pays or not
    visit.ask()
    told = {"target": "the target's own", "draft": "was drafted", "branch": "foreseen"}
    for origin, words in told.items():
        found = visit.page.locator(f".answer .tok.{origin}")
        if found.count():
            found.locator("b:not(:empty)").first.click()
            assert words in visit.page.inner_text("#story h3")
            assert visit.page.locator(".tok.chosen").count() == 1
    assert visit.page.locator(".answer .tok.draft, .answer .tok.branch").count() > 0


@pytest.mark.parametrize("clock", ["wall", "c10"])
def test_four_methods_race_to_the_same_text(visit: Visit, clock: str) -> None:
    visit.page.emulate_media(reduced_motion="reduce")
    assert "0 characters different among 4 texts" in visit.race(clock)
    texts = visit.page.locator(".track .said").all_text_contents()
    assert len(texts) == 4 and len(set(texts)) == 1 and texts[0]
    assert ("Modelled, not measured" in visit.page.inner_text("#race-note")) == (clock != "wall")


def test_everything_can_be_done_by_keyboard(visit: Visit) -> None:
    keyboard = visit.page.keyboard
    here = "document.activeElement.id || document.activeElement.className || document.activeElement.textContent"
    passed: list[str] = []

    def tab_to(name: str) -> None:
        for _ in range(40):
            keyboard.press("Tab")
            passed.append(visit.page.evaluate(here))
            if passed[-1] == name:
                return
        raise AssertionError(f"{name} was not among {passed}")

    tab_to("skip")
    tab_to("play")
    keyboard.press("Enter")
    assert visit.page.inner_text("#play") == "Play"
    tab_to("moment")
    keyboard.press("End")
    assert visit.page.locator("#sooner.there").count() == 1
    tab_to("question")
    keyboard.type(QUESTION)
    keyboard.press("Enter")
    visit.page.wait_for_selector(".answer[data-done]")
    words = visit.page.locator(".answer .tok[tabindex]")  # those that have a text
    keyboard.press("Shift+Tab")
    assert visit.page.evaluate("document.activeElement.textContent") == words.nth(0).text_content()
    keyboard.press("ArrowRight")
    assert "chosen" in words.nth(1).get_attribute("class")
    assert visit.page.locator("#story h3").count() == 1
    keyboard.press("End")
    assert "chosen" in words.last.get_attribute("class")
    keyboard.press("Escape")
    assert visit.page.locator(".tok.chosen, #story.told").count() == 0
    tab_to("race-go")
    keyboard.press("Enter")
    visit.page.wait_for_selector("#tracks[data-done]")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("shape", SHAPES)
def test_axe_finds_nothing_wrong_and_nothing_is_wider_than_the_screen(
    browser: Any, served: Running, scheme: str, shape: str
) -> None:
    visit = Visit(browser, served.url, shape, color_scheme=scheme, reduced_motion="reduce")
    colours = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, colours.removeprefix("rgb(").removesuffix(")").split(","))) > 380) == (scheme == "light")
    visit.ask()
    visit.page.locator(".answer .tok b:not(:empty)").first.click()
    visit.race("c10")
    assert visit.violations() == []
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= SHAPES[shape]["width"]
    assert visit.complaints == []
    visit.page.close()


def test_who_wants_less_motion_sees_a_still(browser: Any, served: Running) -> None:
    visit = Visit(browser, served.url, reduced_motion="reduce")
    before = visit.page.input_value("#moment")
    visit.page.wait_for_timeout(300)
    assert visit.page.input_value("#moment") == before and visit.page.inner_text("#play") == "Play"
    assert visit.page.locator(".fan text").count() > 5 and visit.page.locator("#sooner.there").count() == 1
    visit.page.close()


def test_a_key_is_asked_for_where_one_is_wanted(browser: Any, pair: tuple[str, str], tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys", "alice")
    with running(load_tiny(pair), keys=tmp_path / "keys", model_name="tiny") as found:
        visit = Visit(browser, found.url)
        visit.page.wait_for_selector("#key-form:not([hidden])")
        assert visit.seen("plain")  # the recording is for everybody
        for tried, said in (("wrong", "not known"), (key, "tiny")):
            visit.page.fill("#key", tried)
            visit.page.press("#key", "Enter")
            visit.page.wait_for_function(
                "said => document.getElementById('server').textContent.includes(said)", arg=said
            )
        assert visit.page.locator("#key-form").is_hidden() and visit.ask()
        visit.page.close()


def test_a_refusal_is_told_on_the_page(browser: Any, served: Running) -> None:
    visit = Visit(browser, served.url)
    visit.ask("word " * 3000)
    assert "but the context holds 480" in visit.page.locator(".answer .bad").inner_text()
    visit.page.close()


@pytest.mark.default_model
def test_the_recording_is_what_the_default_pair_says(default_reference: LLM) -> None:
    asked = [{"role": "user", "content": RECORDING["question"]}]
    tokens = len(RECORDING["plain"]["pieces"])
    said = default_reference.chat(asked, SamplingParams(max_tokens=tokens))
    assert said.text == RECORDING["text"]
    for run in (RECORDING["plain"], RECORDING["ours"]):
        assert "".join(text for text, _ in run["pieces"]) == said.text
        taken = [
            token
            for one in run["frames"]
            for token in [*(one["nodes"][at][1] for at in one["path"]), one["token"]][: one["added"]]
        ]
        assert tuple(taken) == said.token_ids
