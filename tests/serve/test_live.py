"""What the page asks live: a chat is the engine's own text with all its rounds, a race's lanes end alike."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from running import PROMPT, Running, Visitor, events, load_tiny, running, until

from specbranch import LLM, SamplingParams, machine_load
from specbranch.clock.shipped import WALL
from specbranch.machine_load import LoadMeter
from specbranch.serve.keys import new_key
from specbranch.serve.live import CLOCKS
from specbranch.serve.race import RACE_TURNS, RACERS
from specbranch.serve.start import chosen
from tiers import each_value, tiered

CHAT, RACE = "/v1/live/chat", "/v1/live/race"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40}
RACED: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 10}


@pytest.fixture(autouse=True)
def idle_before(served: Running) -> None:
    """A race is over when its connection is closed, a moment after its last event; until then another is refused."""
    until(served.is_idle)


def joined(reply: list[dict[str, Any]]) -> str:
    return "".join(text for one in reply for text, _ in one.get("pieces", ()))


@each_value
@pytest.mark.parametrize("clock", [WALL, "c10"])
@pytest.mark.parametrize("method", [None, *RACERS])
def test_a_chat_is_the_text_of_the_engine_with_all_its_rounds(
    served: Running, reference: LLM, method: str | None, clock: str
) -> None:
    reply = events(served.post(CHAT, {**ASKED, "method": method, "clock": clock, "temperature": 0.8, "seed": 4}))
    expected = reference.chat(ASKED["messages"], SamplingParams(temperature=0.8, seed=4, max_tokens=40))
    pieces = [piece for one in reply for piece in one["pieces"]]
    assert joined(reply) == expected.text == reply[-1]["done"]["text"]
    assert sum(frame["added"] for one in reply for frame in one["frames"]) == len(pieces) == reply[-1]["done"]["tokens"]
    assert {origin for _, origin in pieces} <= ({"target"} if method == RACERS[0] else {"target", "draft", "branch"})
    if method == "specbranch":
        done = reply[-1]["done"]
        assert sum(arm["tokens"] for arm in done["arms"].values()) == done["tokens"] - 1


def test_a_conversation_goes_on_and_its_oldest_turns_are_left_out_when_it_is_full(
    served: Running, reference: LLM
) -> None:
    turns = [{"role": role, "content": f"{role} {PROMPT}"} for role in ("user", "assistant")]
    last, params = {"role": "user", "content": "And?"}, SamplingParams(max_tokens=40)
    for before in (1, 12):
        messages = [*turns * before, last]
        fits = [len(reference.tokenizer.chat(messages[at:])) <= 480 - 40 for at in range(0, len(messages), 2)]
        left_out = 2 * fits.index(True)
        reply = events(served.post(CHAT, {**ASKED, "messages": messages}))
        assert reply[0].get("left_out", 0) == left_out and (left_out > 0) == (before > 1)
        assert joined(reply) == reference.chat(messages[left_out:], params).text


def test_a_long_conversation_is_tokenised_a_few_times_and_not_once_for_each_turn(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    encode = served.engine.tokenizer.encode
    monkeypatch.setattr(
        served.engine.tokenizer, "encode", lambda text, special=True: read.append(len(text)) or encode(text, special)
    )
    turns = [{"role": role, "content": PROMPT} for role in ("user", "assistant")] * 99
    answer = events(served.post(CHAT, {**ASKED, "messages": [*turns, {"role": "user", "content": "And?"}]}))
    assert answer[0]["left_out"] > 150 and answer[-1]["done"]["text"]
    assert 1 <= len(read) <= 7  # 100 turns are halved


def test_a_word_that_was_drafted_has_its_node_in_the_round_it_came_in(served: Running) -> None:
    reply = events(served.post(CHAT, {**ASKED, "method": "specbranch", "max_tokens": 120}))
    origins = [origin for one in reply for _, origin in one["pieces"]]
    position = 0
    for frame in (frame for one in reply for frame in one["frames"]):
        drafted = origins[position : position + min(frame["added"], len(frame["path"]))]
        position += frame["added"]
        assert set(drafted) <= {"draft"}
        if frame["hit"] is not None:
            assert frame["nodes"][frame["hit"]][1] == frame["token"] and origins[position - 1] != "target"
    assert position == len(origins)


@pytest.mark.parametrize("clock", tiered((WALL, *CLOCKS), WALL.__eq__))
def test_a_race_ends_with_the_same_text_in_every_lane(served: Running, reference: LLM, clock: str) -> None:
    reply = events(served.post(RACE, {**RACED, "clock": clock}))
    expected = reference.chat([{"role": "user", "content": PROMPT}], SamplingParams(max_tokens=10))
    turns = range(1, (RACE_TURNS if clock == WALL else 1) + 1)
    lanes = {
        (name, turn): [one for one in reply if (one.get("lane"), one.get("turn")) == (name, turn)]
        for name in RACERS
        for turn in turns
    }
    for lane in lanes.values():
        steps = [step for one in lane for step in one.get("steps", ())]
        assert joined(lane) == expected.text and sum(added for _, added in steps) == len(expected.token_ids)
        assert steps[0][0] == 0.0 and [at for at, _ in steps] == sorted(at for at, _ in steps)
    if clock == "c10":  # where a forward of the target takes 10 ms
        plain = [step for one in lanes["autoregressive", 1] for step in one.get("steps", ())]
        assert [at for at, _ in plain] == pytest.approx([n / 100 for n in range(len(plain))])


@pytest.mark.parametrize(("other_cores", "said"), [(1.5, "This machine is busy, figures are rough"), (0.0, "")])
def test_methods_race_by_turns_after_a_warm_up_and_a_busy_machine_is_reported(
    served: Running, monkeypatch: pytest.MonkeyPatch, other_cores: float, said: str
) -> None:
    monkeypatch.setattr(LoadMeter, "other_cores", lambda meter: other_cores)
    monkeypatch.setattr(machine_load, "SPREAD", 1e9)
    reply = events(served.post(RACE, {**RACED, "max_tokens": 4}))
    starts = [(one["turn"], one["lane"]) for one in reply if "lane" in one and "steps" not in one]
    assert starts == [(turn, name) for turn in range(RACE_TURNS + 1) for name in RACERS]
    assert not [one for one in reply if one.get("turn") == 0 and "steps" in one]
    assert reply[-1]["rough"].startswith(said) and bool(reply[-1]["rough"]) == bool(said)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["speculative", "specbranch"])
def test_the_frames_of_a_chat_roll_back_what_its_statistics_say(served: Running, method: str) -> None:
    reply = events(served.post(CHAT, {**ASKED, "method": method, "clock": "c10", "max_tokens": 60}))
    frames, rollback = [frame for one in reply for frame in one["frames"]], reply[-1]["done"]["rollback"]
    assert sum(one["rolled_back"] for one in frames) == rollback["rejected"] + rollback["tree_siblings"] > 0


def test_the_page_starts_where_a_trial_on_this_server_says_and_tries_once(served: Running) -> None:
    before = served.engine.stats().finished
    first = served.http.get("/v1/live/start").json()
    assert first["example"] == "copying" and first["method"] is None and "tokens a second" in first["why"]
    assert (first["clock"] == WALL) == ("It pays here" in first["why"])
    asked = served.engine.stats().finished
    assert served.http.get("/v1/live/start").json() == first
    assert before <= asked == served.engine.stats().finished
    until(served.is_idle)


@pytest.mark.parametrize(
    ("rates", "can_model", "clock", "said"),
    [
        ((30.0, 60.0), True, WALL, "2.0 × as fast as plain decoding (60 against 30"),
        ((30.0, 31.0), True, "c10", "nothing now: 31 tokens a second against 30"),
        ((30.0, 31.0), False, WALL, "It does not pay here: 31 tokens a second against 30"),
    ],
)
def test_where_nothing_pays_the_page_starts_on_a_modelled_clock_and_says_why(
    reference: LLM, rates: tuple[float, float], can_model: bool, clock: str, said: str
) -> None:
    answer = reference.chat(ASKED["messages"], SamplingParams(max_tokens=4))
    plain, ours = (replace(answer, stats={**answer.stats, "tokens_per_second": rate}) for rate in rates)
    found = chosen(plain, ours, None, can_model)
    assert found.clock == clock and said in found.why
    busy = replace(ours, stats={**ours.stats, "arms": {"plain": {"rounds": 9}, "lookup": {"rounds": 1}}})
    assert ("decoded nearly every round plainly" in chosen(plain, busy, None, can_model).why) == (rates[1] < 33)


def test_an_answer_in_a_form_says_what_its_grammar_forced(served: Running) -> None:
    pytest.importorskip("llguidance")
    assert served.http.get("/v1/live").json()["forms"].keys() == {"json"}
    reply = events(served.post(CHAT, {**ASKED, "form": "json", "max_tokens": 60}))
    guided = [mark for one in reply for frame in one["frames"] for mark in frame["guided"]]
    assert len(guided) == reply[-1]["done"]["tokens"] and set(guided) == {"free", "forced", "masked"}
    assert re.match(r'\{\s*"short_answer"\s*:', joined(reply))
    status, error = served.error(CHAT, {**ASKED, "form": "verse"})
    assert status == 400 and "expected one of json" in error["message"]


def test_the_page_is_offered_a_prompt_to_copy_from_and_a_free_one(served: Running) -> None:
    offered = served.http.get("/v1/live").json()["examples"]
    assert [one["name"] for one in offered] == ["copying", "free"] and all(
        one["prompt"] and one["why"] for one in offered
    )


@pytest.mark.slow
def test_races_are_run_one_at_a_time_and_by_known_clocks(served: Running) -> None:
    status, error = served.error(RACE, {**RACED, "clock": "c11"})
    assert status == 400 and "expected one of wall, c10" in error["message"]
    with served.held():
        visitor = Visitor(served.url, RACE, RACED)
        visitor.hear(b"autoregressive")
        status, error = served.error(RACE, RACED)
        assert status == 429 and "Another race" in error["message"]
        visitor.leave()
    until(served.is_idle)
    assert events(served.post(RACE, RACED))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**ASKED, "max_tokens": 400}),
        pytest.param(CHAT, {**ASKED, "max_tokens": 400, "clock": "c10"}, marks=pytest.mark.slow),
        pytest.param(RACE, RACED, marks=pytest.mark.slow),
        (RACE, {**RACED, "clock": "c10", "max_tokens": 100}),
    ],
    ids=["chat", "modelled chat", "race", "modelled race"],
)
def test_whoever_leaves_takes_the_request_along(served: Running, path: str, body: dict[str, Any]) -> None:
    visitor = Visitor(served.url, path, body)
    visitor.hear(b"pieces")
    visitor.leave()
    until(served.is_idle)
    assert events(served.post(CHAT, ASKED))[-1]["done"]["tokens"] <= 40
    until(served.is_idle)


def test_whoever_leaves_before_the_first_word_is_forgotten(served: Running) -> None:
    before = served.engine.stats().cancelled
    with served.held():
        waiting = [Visitor(served.url, CHAT, {**ASKED, "max_tokens": 400}) for _ in range(3)]
        until(lambda: served.submitted() == 3)
        for visitor in waiting:
            visitor.leave()
        until(lambda: served.server._limits.requests == 0)
    until(lambda: served.engine.stats().cancelled == before + 3)
    until(served.is_idle)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {**ASKED, "max_tokens": 0},
        {**ASKED, "temperature": -1},
        {**ASKED, "colour": "green"},
        {**ASKED, "method": "quickest"},
        {**ASKED, "clock": "c11"},
        {"messages": [{"role": "user", "content": "word " * 2000}]},
    ],
)
def test_what_cannot_be_answered_is_refused_by_a_sentence(served: Running, body: dict[str, Any]) -> None:
    status, error = served.error(CHAT, body)
    assert status == 400 and error["message"]
    until(served.is_idle)


def test_limits_and_keys_hold_for_the_page_too(pair: tuple[str, str], tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys", "alice")
    with running(load_tiny(pair), keys=tmp_path / "keys", max_tokens=5, max_per_key=1) as found:
        allowed = {"authorization": f"Bearer {key}"}
        assert found.http.get("/").status_code == found.http.get("/page/recording.json").status_code == 200
        assert found.http.get("/v1/live").status_code == found.post(CHAT, ASKED).status_code == 401
        assert found.http.get("/v1/live", headers=allowed).json()["racers"] == list(RACERS)
        assert events(found.post(CHAT, ASKED, **allowed))[-1]["done"]["tokens"] <= 5
        until(found.is_idle)
        with found.held():
            admitted = found.server._limits.admit("alice", 1)
            assert found.post(CHAT, ASKED, **allowed).status_code == 429
            admitted.leave()


@pytest.mark.slow
def test_modelled_seconds_are_in_no_metric(served: Running) -> None:
    def answered() -> float:
        lines = served.http.get("/metrics").text.splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if line.startswith("specbranch:request_success_total")
        )

    before = answered()
    for clock, more in (("c10", 0), (WALL, 1)):
        served.post(CHAT, {**ASKED, "clock": clock})
        assert answered() == before + more


@pytest.mark.parametrize("clock", [WALL, "c10"])
def test_a_race_without_a_draft_says_who_cannot_run(pair: tuple[str, str], clock: str) -> None:
    with running(LLM(pair[0], dtype="float64", device="cpu", options={"context_length": 480})) as found:
        reply = events(found.post(RACE, {**RACED, "clock": clock}))
        errors = {one["lane"] for one in reply if "error" in one}
        assert {"speculative", "pearl"} <= errors and "autoregressive" not in errors
        assert len([one for one in reply if "error" in one]) == len(errors)  # once each, not in every turn
        texts = {
            name: joined([one for one in reply if (one.get("lane"), one.get("turn")) == (name, 1)])
            for name in set(RACERS) - errors
        }
        assert len(set(texts.values())) == 1 and all(texts.values())
