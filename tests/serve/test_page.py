"""The page in a real browser: what it shows at once and live, by keyboard, on a phone, in both colour schemes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import PROMPT, Running, events, load_tiny, running

from specbranch import LLM, SamplingParams
from specbranch.machine_load import LoadMeter
from specbranch.serve.keys import new_key
from specbranch.serve.page import FILES
from tiers import each_value, tiered

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
RECORDING = json.loads((FILES / "recording.json").read_text(encoding="utf-8"))
QUESTION = "What is a branch?"
WAIT = 120_000  # milliseconds
SHAPES = {"desk": {"width": 1280, "height": 800}, "phone": {"width": 360, "height": 740}}
NAMES = ["target: large, decides", "draft: small, guesses"]
COVERED = """() => {
    const bottom = [...document.querySelectorAll(".answer .sum")].at(-1).getBoundingClientRect().bottom;
    return bottom > document.getElementById("dock").getBoundingClientRect().top;
}"""
LOW = {"width": 360, "height": 420}  # a phone whose keyboard is up


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

    def __init__(
        self, browser: Any, url: str, shape: str = "desk", routed: dict[str, Any] | None = None, **given: Any
    ) -> None:
        """`routed`: addresses that are answered here and not by the server, with what they answer."""
        self.page = browser.new_page(viewport={**SHAPES, "low": LOW}[shape], **given)
        self.page.set_default_timeout(WAIT)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        for path, answer in (routed or {}).items():
            self.routed(path, **answer)
        self.page.goto(url, wait_until="domcontentloaded")
        self.at_once = self.page.inner_text("main")
        self.page.wait_for_selector("html[data-watch=ready]")

    def routed(self, path: str, **answer: Any) -> None:
        """Answer what the page asks of an address here, instead of the server."""
        self.page.route(path, lambda route: route.fulfill(**answer))

    def answers(self, tokens: list[str], **frame: Any) -> None:
        """Answer the chat with given tokens, for what the tiny models do not say; `frame`: of every round."""
        self.routed("**/v1/live/chat", body=answer_of(tokens, **frame), content_type="text/event-stream")

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

    def in_view(self, selector: str) -> bool:
        """Whether the whole of an element is on the screen."""
        box, height = self.page.locator(selector).last.bounding_box(), self.page.evaluate("innerHeight")
        return bool(box and box["y"] > -1 and box["y"] + box["height"] < height + 1)  # parts of pixels apart

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


@pytest.mark.slow
def test_the_sentence_writes_itself_unasked_and_is_labelled(visit: Visit) -> None:
    assert "The same answer, sooner." in visit.at_once and "Plain decoding" in visit.at_once
    visit.page.wait_for_function("() => document.getElementById('moment').value > 20")
    assert "recorded" in visit.page.inner_text("#badge") and "Recorded on" in visit.page.inner_text("#recorded")
    assert "modelled, not measured" in visit.page.inner_text("#recorded")
    paints = visit.page.evaluate("performance.getEntriesByType('paint').map(one => [one.name, one.startTime])")
    assert "first-contentful-paint" in dict(paints)
    print(f"first contentful paint after {dict(paints)['first-contentful-paint']:.0f} ms")


@pytest.mark.slow
def test_both_sentences_end_alike_and_ours_sooner(visit: Visit) -> None:
    assert visit.texts() == [RECORDING["text"]] * 2
    visit.moment(1000)
    assert visit.seen("plain") == visit.seen("ours") == RECORDING["text"]
    times = f"{RECORDING['plain']['seconds'] / RECORDING['ours']['seconds']:.1f} ×"
    assert visit.page.inner_text("#sooner") == f"{times} sooner, 0 characters different"
    visit.moment(400)
    assert len(visit.seen("plain")) < len(visit.seen("ours")) == len(RECORDING["text"])


@pytest.mark.slow
def test_branches_fan_out_while_the_target_checks_and_are_gone_after_it(visit: Visit) -> None:
    frame = next(one for one in RECORDING["ours"]["frames"] if one["draft"] and one["target"] and one["path"])
    lasts = RECORDING["plain"]["seconds"]
    visit.moment(round(1000 * 0.97 * frame["target"][1] / lasts * 0.96))
    shown = visit.page.locator(".fan text:not(.root)").all_text_contents()
    assert len(shown) > len(frame["path"]) and {frame["nodes"][at][0].strip() for at in frame["path"]} <= set(shown)
    assert visit.page.locator(".fan rect").count() > 0 and "checks" in visit.page.inner_text("#state")
    visit.moment(1000)
    assert visit.page.locator(".fan text").count() == 0


@pytest.mark.slow
def test_nothing_is_asked_of_another_host(visit: Visit, served: Running) -> None:
    visit.ask()
    visit.race("c10")
    assert len(visit.requests) > 8
    assert [url for url in visit.requests if not url.startswith((served.url, "data:"))] == []


@pytest.mark.slow
def test_the_chat_says_what_the_engine_says(visit: Visit, reference: LLM) -> None:
    expected = reference.chat([{"role": "user", "content": QUESTION}], SamplingParams(max_tokens=256))
    assert visit.ask() == expected.text
    assert visit.page.inner_text('[data-count="speed"]') != "–"


@pytest.mark.slow
def test_a_word_tells_who_proposed_it(visit: Visit) -> None:
    visit.page.select_option("#chat-method", "pearl")  # which drafts whether it pays or not
    visit.ask()
    reply = {"target": "the target's own", "draft": "was drafted", "branch": "foreseen"}
    for origin, words in reply.items():
        found = visit.page.locator(f".answer .tok.{origin}")
        if found.count():
            found.locator("b:not(:empty)").first.click()
            assert words in visit.page.inner_text("#story h3")
            assert visit.page.locator(".tok.chosen").count() == 1
    assert visit.page.locator(".answer .tok.draft, .answer .tok.branch").count() > 0


@pytest.mark.slow
@pytest.mark.parametrize("clock", tiered(("wall", "c10"), "wall".__eq__))
def test_four_methods_race_to_the_same_text(visit: Visit, clock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadMeter, "other_cores", lambda meter: 1.5)
    visit.page.emulate_media(reduced_motion="reduce")
    assert f"0 characters different among {12 if clock == 'wall' else 4} texts" in visit.race(clock)
    texts = visit.page.locator(".track .said").all_text_contents()
    assert len(texts) == 4 and len(set(texts)) == 1 and texts[0]
    note = visit.page.inner_text("#race-note")
    assert ("Modelled, not measured" in note) == (clock != "wall") == ("median of 3 turns" not in note)
    assert ("This machine is busy, figures are rough" in visit.page.inner_text("#race-rough")) == (clock == "wall")


@pytest.mark.slow
def test_a_race_offers_an_answer_that_copies_and_a_free_one_and_says_why(visit: Visit, served: Running) -> None:
    visit.page.emulate_media(reduced_motion="reduce")
    copying, free = served.http.get("/v1/live").json()["examples"]
    visit.page.wait_for_selector("#race-kind option[value=free]", state="attached")
    assert visit.page.input_value("#race-prompt") == copying["prompt"]
    for example in (copying, free):
        visit.page.select_option("#race-kind", example["name"])
        assert visit.page.input_value("#race-prompt") == example["prompt"]
    visit.race("c10")
    why = visit.page.inner_text("#race-why")
    assert free["why"] in why and "A forward of the target brought SpecBranch" in why
    visit.page.fill("#race-prompt", PROMPT)
    assert visit.page.input_value("#race-kind") == ""


@pytest.mark.slow
def test_everything_can_be_done_by_keyboard(visit: Visit) -> None:
    keyboard = visit.page.keyboard
    here = "document.activeElement.id || document.activeElement.className || document.activeElement.textContent"
    passed: list[str] = []

    def tab_to(name: str, key: str = "Tab") -> None:
        for _ in range(40):
            keyboard.press(key)
            passed.append(visit.page.evaluate(here))
            if passed[-1] == name:
                return
        raise AssertionError(f"{name} was not among {passed}")

    tab_to("skip")
    tab_to("play")
    keyboard.press("Enter")
    assert visit.page.inner_text("#play") == "Play"
    tab_to("step")
    keyboard.press("Enter")
    assert visit.page.inner_text("#stepped").startswith("round ")
    tab_to("moment")
    keyboard.press("End")
    assert visit.page.locator("#sooner.there").count() == 1
    tab_to("question")
    keyboard.type(QUESTION)
    keyboard.press("Enter")
    visit.page.wait_for_selector(".answer[data-done]")
    words = visit.page.locator(".answer .tok[tabindex]")  # those that have a text
    rounds = "document.getElementById('live-state').textContent"
    tab_to("live-step", "Shift+Tab")
    keyboard.press("Enter")
    assert visit.page.evaluate(rounds).startswith("Round 1 of ")
    keyboard.press("Shift+Tab")  # Run
    keyboard.press("Enter")
    visit.page.wait_for_selector(".answer[data-done]")
    while "tok" not in visit.page.evaluate("document.activeElement.className"):
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


@pytest.mark.slow
@each_value
@pytest.mark.parametrize("scheme", tiered(("light", "dark"), "dark".__eq__))
@pytest.mark.parametrize("shape", tiered(SHAPES, "phone".__eq__))
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


@pytest.mark.slow
def test_who_wants_less_motion_sees_a_still(browser: Any, served: Running) -> None:
    visit = Visit(browser, served.url, reduced_motion="reduce")
    before = visit.page.input_value("#moment")
    visit.page.wait_for_timeout(300)
    assert visit.page.input_value("#moment") == before and visit.page.inner_text("#play") == "Play"
    assert visit.page.locator(".fan text").count() > 5 and visit.page.locator("#sooner.there").count() == 1
    visit.page.close()


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_wrong_key_is_answered_beside_its_field(browser: Any, pair: tuple[str, str], tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys", "alice")
    with running(load_tiny(pair), keys=tmp_path / "keys") as found:
        visit = Visit(browser, found.url, "phone", reduced_motion="reduce")
        visit.page.fill("#key", "wrong")
        visit.page.press("#key", "Enter")
        said = visit.page.get_by_role("alert").filter(has_text="not known")
        said.wait_for()
        assert visit.in_view("#key-said") and visit.page.get_attribute("#key", "aria-invalid") == "true"
        assert visit.violations() == []
        visit.page.fill("#key", key)
        visit.page.press("#key", "Enter")
        visit.page.wait_for_selector("#key-form", state="hidden")
        assert said.count() == 0
        visit.page.close()


@pytest.mark.slow
def test_a_key_that_was_taken_away_is_asked_for_again(browser: Any, pair: tuple[str, str], tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys", "alice")
    with running(load_tiny(pair), keys=tmp_path / "keys") as found:
        visit = Visit(browser, found.url)
        visit.page.fill("#key", key)
        visit.page.press("#key", "Enter")
        visit.page.wait_for_selector("#key-form", state="hidden")
        visit.page.route("**/v1/live/chat", lambda route: route.fulfill(status=401, json={"error": {"message": "No."}}))
        visit.ask()
        assert visit.page.locator("#key-form").is_visible() and visit.page.inner_text("#key-said")
        visit.page.close()


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["desk", "phone", "low"])
def test_the_chat_follows_its_answer_and_the_field_stays_in_view(browser: Any, served: Running, shape: str) -> None:
    visit = Visit(browser, served.url, shape)
    if shape != "low":
        visit.answers(["word\n"] * 60)
    visit.ask()
    assert visit.page.evaluate("document.getElementById('talk').offsetHeight > innerHeight")
    assert visit.in_view("#send") and visit.in_view(".answer .sum") and not visit.page.evaluate(COVERED)
    for block in ("start", "center"):
        visit.page.locator(".answer").first.evaluate(
            "(one, block) => one.scrollIntoView({ block, behavior: 'instant' })", block
        )
        assert visit.in_view("#question") and visit.in_view("#send") and visit.in_view("#live-step")
    visit.page.close()


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_names_stand_on_the_picture_and_a_step_goes_on_by_one_round(browser: Any, served: Running, shape: str) -> None:
    visit = Visit(browser, served.url, shape, reduced_motion="reduce")
    assert visit.page.locator("#ours .lanes text").all_text_contents() == NAMES
    assert visit.page.locator("#plain .lanes text").all_text_contents() == NAMES[:1]
    rounds = [one for one in RECORDING["ours"]["frames"] if one["number"] > 0]
    visit.moment(0)
    checked = rolled_back = 0
    for nth, frame in [*enumerate(rounds, 1), (1, rounds[0])]:
        checked, rolled_back = (0, 0) if nth == 1 else (checked, rolled_back)
        visit.page.click("#step")
        assert visit.page.inner_text("#state").startswith(f"round {nth} of {len(rounds)}: ")
        checked, rolled_back = checked + frame["checked"], rolled_back + frame["rolled_back"]
        share = f"{rolled_back} of {checked} checked ({100 * rolled_back / checked:.0f} %)" if checked else "0"
        assert visit.page.inner_text("#rolled") == share
        labels = visit.page.locator(".fan .say tspan").all_text_contents()
        if frame["checked"] and frame["added"] > len(frame["path"]):
            kept = [f"kept: {len(frame['path'])}", f"rolled back: {frame['rolled_back']}"]
            assert labels == [*kept, f"target adds: {frame['text'].strip()}"]
        if nth == len(rounds):
            visit.page.click("#step")
            assert visit.seen("ours") == RECORDING["text"] and visit.page.input_value("#moment") == "1000"
    assert rolled_back == rounds[0]["rolled_back"]
    visit.page.close()


@pytest.mark.slow
def test_a_live_answer_waits_and_goes_on_by_one_round_a_step(visit: Visit, served: Running) -> None:
    asked = {"messages": [{"role": "user", "content": QUESTION}], "method": "speculative"}
    frames = [one for event in events(served.post("/v1/live/chat", asked)) for one in event["frames"]]
    words, state = visit.page.locator(".answer .tok"), visit.page.locator("#live-state")
    visit.page.select_option("#chat-method", "speculative")
    visit.page.click("#live-pause")
    visit.page.fill("#question", QUESTION)
    visit.page.press("#question", "Enter")
    state.filter(has_text=f"Before the first of {len(frames)} rounds").wait_for()
    assert words.count() == 0 and len(frames) > 4
    for nth in range(1, 5):
        visit.page.click("#live-step")
        assert state.inner_text().startswith(f"Round {nth} of {len(frames)}: ")
        assert words.count() == sum(one["added"] for one in frames[:nth])
    visit.page.click("#live-pause")
    visit.page.wait_for_selector(".answer[data-done]")
    rolled_back, checked = (sum(one[name] for one in frames) for name in ("rolled_back", "checked"))
    assert visit.page.inner_text('[data-count="rolled"]') == str(rolled_back) != "0"
    assert f"{100 * rolled_back / checked:.0f} % of {checked} checked" in visit.page.inner_text("#rolled-share")
    visit.page.click("#live-first")
    assert words.count() == 0
    visit.page.click("#live-step")
    assert words.count() == frames[0]["added"] == 1


@pytest.mark.slow
def test_the_live_part_starts_with_what_the_server_found_to_pay(visit: Visit, served: Running) -> None:
    start, about = (served.http.get(f"/v1/live{path}").json() for path in ("/start", ""))
    visit.page.locator("#start-why").filter(has_text=start["why"]).wait_for()
    assert visit.page.input_value("#chat-clock") == start["clock"]
    visit.page.click("#start-ask")
    assert visit.page.inner_text(".asked-by") == about["examples"][0]["prompt"]
    assert visit.page.locator("#start").is_hidden()
    visit.page.locator(".answer[data-done]").wait_for()


@pytest.mark.slow
def test_where_the_server_says_so_the_live_part_starts_on_a_modelled_clock(browser: Any, served: Running) -> None:
    start = {"example": "free", "clock": "c10", "method": "pearl", "why": "Nothing pays here."}
    visit = Visit(browser, served.url, "phone", {"**/v1/live/start": {"json": start}})
    visit.page.locator("#start-why").filter(has_text="Nothing pays here.").wait_for()
    assert [visit.page.input_value(f"#chat-{name}") for name in ("clock", "method")] == ["c10", "pearl"]
    visit.page.close()


CODE = [
    "Use",
    " `",
    "a",
    " b",
    "`",
    ":",
    "\n",
    "```",
    "py",
    "\n",
    "print",
    "(1)",
    "\n",
    "``",
    "`",
    "\n",
    "Then",
    " it",
    ".",
]
HOSTILE = [
    "<script>hacked = 1</script>",
    "<img src=x onerror='hacked = 1'>",
    "`<b>`",
    "\n```<i>\n",
    "</span><svg onload=hacked=1>",
]


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "code"), [(CODE, CODE[1:5] + CODE[7:16]), (HOSTILE, HOSTILE[2:])])
def test_code_is_monospaced_and_nothing_a_model_says_is_markup(
    visit: Visit, tokens: list[str], code: list[str]
) -> None:
    visit.answers(tokens)
    assert visit.ask() == "".join(tokens)
    words = visit.page.locator(".answer .tok").evaluate_all(
        "all => all.map((one) => [one.textContent, getComputedStyle(one).fontFamily.includes('monospace')])"
    )
    assert [text for text, _ in words] == tokens
    assert [text for text, mono in words if mono] == code
    visit.page.locator(".answer .tok").last.click()
    assert visit.page.evaluate("typeof hacked") == "undefined"
    made = visit.page.evaluate("[...document.querySelectorAll('#chat *')].map((one) => one.localName)")
    assert not {"script", "img", "i"} & set(made)
    assert visit.page.locator(".answer .block").count() == 1


def answer_of(tokens: list[str], **given: Any) -> str:
    """What the server sends of an answer whose every token the target said, and had rejected before."""

    def frame(number: int, text: str) -> dict[str, Any]:
        node = [text, number, -1, 50, number, 1]
        counts = {"drafted": 1, "added": 1, "checked": 1, "rolled_back": 1}
        plain = {"draft": None, "target": [number, number + 1], "path": [], "hit": None, "guided": [], "batch": None}
        return {"number": number, "nodes": [node], "token": number, "text": text, **counts, **plain, **given}

    done = {"method": "specbranch", "finish_reason": "stop", "tokens": len(tokens), "ttft_seconds": 0.1, "arms": {}}
    parts = [
        {"pieces": [[text, "target"]], "frames": [frame(at, text)], "done": None} for at, text in enumerate(tokens)
    ]
    return "".join(f"data: {json.dumps(one)}\n\n" for one in [*parts, {"pieces": [], "frames": [], "done": done}])


@pytest.mark.slow
def test_what_a_grammar_forced_has_a_colour_of_its_own(visit: Visit) -> None:
    pytest.importorskip("llguidance")
    assert visit.page.locator("#guided-legend").is_hidden()
    visit.page.select_option("#chat-form", "json")
    assert visit.page.locator("#guided-legend").is_visible()
    visit.ask()
    colour = "one => getComputedStyle(one.querySelector('b')).backgroundColor"
    shown = {
        kind: visit.page.locator(f".answer .tok.{kind}").first.evaluate(colour) for kind in ("forced", "masked", "free")
    }
    assert len(set(shown.values())) == 3
    visit.page.locator(".answer .tok.forced b:not(:empty)").first.click()
    assert "Forced: the grammar left no other token" in visit.page.inner_text("#story")


@pytest.mark.slow
def test_an_answer_decoded_with_others_says_its_share_of_the_batch(visit: Visit) -> None:
    visit.answers(["a", "b"], batch={"requests": 5, "own_rows": 7, "rows": 16})
    visit.ask()
    assert visit.page.inner_text("#round figcaption") == "In this forward: 1 of 5 requests, 7 of 16 rows."


@pytest.mark.slow
def test_who_scrolls_back_while_an_answer_is_written_is_left_there(browser: Any, served: Running) -> None:
    visit = Visit(browser, served.url, "low")
    with served.held():
        visit.page.fill("#question", QUESTION)
        visit.page.press("#question", "Enter")
        visit.page.wait_for_selector(".answer", state="attached")
        top = visit.page.evaluate("() => { scrollBy({ top: -200, behavior: 'instant' }); return scrollY; }")
        visit.page.wait_for_function("() => new Promise((done) => requestAnimationFrame(() => done(true)))")
    visit.page.wait_for_selector(".answer[data-done]")
    assert visit.page.evaluate("scrollY") == pytest.approx(top, abs=2) and top > 0  # parts of pixels apart
    visit.page.close()


@pytest.mark.slow
def test_a_question_entered_during_an_answer_is_asked_after_it(visit: Visit, served: Running) -> None:
    questions, sent = [QUESTION, "And a tree?"], list[Any]()
    visit.page.on("request", lambda one: sent.append(one.post_data_json) if one.url.endswith("/chat") else None)
    with served.held():
        for question in questions:
            visit.page.fill("#question", question)
            visit.page.press("#question", "Enter")
        visit.page.press("#question", "Enter")  # an empty field stops nothing
        assert visit.page.locator(".asked-by").all_inner_texts() == questions
        assert visit.page.locator(".asked-by.waiting").count() == 1 and visit.page.inner_text("#send") == "Stop"
    visit.page.locator(".answer[data-done]").nth(1).wait_for()
    first = "".join(visit.page.locator(".answer").first.locator(".tok").all_text_contents())
    assert [one["content"] for one in sent[1]["messages"]] == [QUESTION, first, questions[1]]
    assert visit.page.locator(".answer .bad").count() == 0
    assert visit.page.locator(".asked-by.waiting").count() == 0 and visit.page.inner_text("#send") == "Ask"


@pytest.mark.slow
def test_stop_stops_the_answer_and_keeps_what_was_typed(visit: Visit, served: Running) -> None:
    with served.held():
        visit.page.fill("#question", QUESTION)
        visit.page.press("#question", "Enter")
        visit.page.fill("#question", "half a que")
        visit.page.click("#send")
        visit.page.wait_for_selector(".answer[data-done]")
        assert visit.page.locator(".answer .bad").inner_text() == "Stopped."
        assert visit.page.input_value("#question") == "half a que"


@pytest.mark.slow
def test_the_recording_keeps_its_height_while_it_plays(browser: Any, served: Running) -> None:
    visit = Visit(browser, served.url, "phone", reduced_motion="reduce")
    for width in (320, 360, 412, 1280):
        visit.page.set_viewport_size({"width": width, "height": 740})
        heights = visit.page.evaluate(
            """async () => {
                const moment = document.getElementById("moment"), found = new Set();
                await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
                for (let at = 0; at <= 1000; at += 5) {
                    moment.value = at;
                    moment.dispatchEvent(new Event("input"));
                    found.add(document.getElementById("stage").getBoundingClientRect().height);
                }
                return [...found];
            }"""
        )
        assert len(heights) == 1, (width, heights)
    visit.page.close()


@pytest.mark.slow
def test_the_story_of_a_word_does_not_cover_the_word(browser: Any, served: Running) -> None:
    visit = Visit(browser, served.url, "phone")
    visit.page.select_option("#chat-method", "pearl")
    visit.ask()
    words = visit.page.locator(".answer .tok[role=button] b:not(:empty)")
    covered = """() => {
        const word = document.querySelector(".tok.chosen").getBoundingClientRect();
        const story = document.getElementById("story").getBoundingClientRect();
        return word.bottom > story.top || word.top < 0;
    }"""
    for shape in (SHAPES["phone"], LOW):
        visit.page.set_viewport_size(shape)
        for at in (0, words.count() // 2, words.count() - 1):
            words.nth(at).evaluate("one => one.scrollIntoView({ block: 'end', behavior: 'instant' })")
            words.nth(at).dispatch_event("click")
            assert not visit.page.evaluate(covered), (shape, at)
            visit.page.keyboard.press("ArrowLeft")
            assert not visit.page.evaluate(covered), (shape, at)
            visit.page.keyboard.press("Escape")
    visit.page.close()


@pytest.mark.slow
def test_a_refusal_is_shown_on_the_page(browser: Any, served: Running) -> None:
    visit = Visit(browser, served.url)
    visit.ask("word " * 3000)
    assert "but the context holds 480" in visit.page.locator(".answer .bad").inner_text()
    visit.page.close()


@pytest.mark.slow
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
