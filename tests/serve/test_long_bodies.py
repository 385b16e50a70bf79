"""Long bodies, refused or not, hold up nobody: not by their texts, their lists, their messages or their mistakes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from running import PROMPT, WAIT, Running, Visitor, load_tiny, running, until

from specbranch import LLM
from specbranch.serve import protocol
from specbranch.serve.text_work import LONG_BODY

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hi"}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a text": (COMPLETE, {"prompt": "branch " * 50_000}, "context_length_exceeded"),
    "a text to tokenise": ("/tokenize", {"prompt": "branch " * 50_000}, "context_length_exceeded"),
    "a message": (CHAT, {"messages": [{"role": "user", "content": "branch " * 50_000}]}, "context_length_exceeded"),
    "token ids": (COMPLETE, {"prompt": [7] * 200_000}, "context_length_exceeded"),
    "messages": (CHAT, {"messages": [USER] * 20_000}, "context_length_exceeded"),
    "more messages": (CHAT, {"messages": [USER] * 90_000}, "objects and lists"),
    "ids with a mistake": (COMPLETE, {"prompt": [7] * 300_000 + ["x"]}, "prompt: expected a text, token ids"),
    "names": (CHAT, {f"name{at}": at for at in range(100_000)}, "an object with 100000 names"),
    "biases": (CHAT, {"messages": [USER], "logit_bias": {str(at): "x" for at in range(2000)}}, "up to 1024 token ids"),
    "ends": (COMPLETE, {"prompt": "x", "stop_token_ids": [1] * 300_000}, "up to 1024 token ids"),
    "messages on the page": ("/v1/live/chat", {"messages": [{"role": 1}] * 60_000}, "messages"),
}


@pytest.fixture(scope="module")
def busy(pair: tuple[str, str], nothing_kept: None) -> Iterator[Running]:
    with running(load_tiny(pair), max_queue=2, max_batch=1) as found:
        yield found


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_too_much_is_refused_with_a_sentence(busy: Running, name: str) -> None:
    path, body, said = REFUSED[name]
    status, error = busy.error(path, body)
    assert status == 400 and (error["code"] == said or said in error["message"]), error
    until(busy.is_idle)


def test_a_text_is_refused_by_its_characters_without_being_read(busy: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    encode = busy.engine.tokenizer.encode
    monkeypatch.setattr(
        busy.engine.tokenizer, "encode", lambda text, special=True: read.append(len(text)) or encode(text, special)
    )
    for path, body, code in (REFUSED[name] for name in ("a text", "a text to tokenise", "a message")):
        assert busy.error(path, body)[1]["code"] == code
    assert not read
    assert busy.post(COMPLETE, {"prompt": PROMPT, "max_tokens": 1}).status_code == 200 and read == [len(PROMPT)]


def test_a_long_body_is_checked_in_another_thread_than_the_loops(
    busy: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()
    check = protocol.without_neutral

    def noted(*given: Any) -> Any:
        seen.add(threading.get_ident())
        return check(*given)

    monkeypatch.setattr(protocol, "without_neutral", noted)
    assert busy.error(CHAT, {"messages": [{**USER, "role": "robot"}]})[0] == 400
    (loop,) = seen
    seen.clear()
    assert busy.error(CHAT, {"messages": [USER] * 2000 + [{**USER, "role": "robot"}]})[0] == 400
    assert seen and loop not in seen


def test_long_texts_have_their_tokens_and_long_lists_of_tokens_their_texts(served: Running, reference: LLM) -> None:
    text = "\u0635" * 100 + PROMPT * 40
    ids = reference.tokenizer.encode(text)
    assert served.post("/tokenize", {"prompt": text}).json()["tokens"] == ids
    answer = served.post("/detokenize", {"tokens": ids * 200}).json()
    assert answer["prompt"] == reference.tokenizer.decode(ids * 200, skip_special=False)


@pytest.mark.slow
def test_a_request_is_counted_before_it_has_tokens(busy: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, waiting = threading.Event(), threading.Semaphore(0)
    encode = busy.engine.tokenizer.encode

    def slow(text: str, special: bool = True) -> list[int]:
        waiting.release()
        assert gate.wait(WAIT)
        return encode(text, special)

    monkeypatch.setattr(busy.engine.tokenizer, "encode", slow)
    with ThreadPoolExecutor() as pool:
        asked = [
            ("/tokenize", {"prompt": "x"}),
            (COMPLETE, {"prompt": "x", "max_tokens": 1}),
            (CHAT, {"messages": [USER]}),
        ]
        answers = [pool.submit(busy.post, path, {**body}) for path, body in asked]
        for _ in asked:
            assert waiting.acquire(timeout=WAIT)
        full = busy.error(COMPLETE, {"prompt": "x"})
        gate.set()
        assert [answer.result().status_code for answer in answers] == [200] * 3
    assert full[0] == 429 and full[1]["code"] == "queue_full"
    until(busy.is_idle)


def test_long_bodies_wait_for_one_another_and_short_ones_for_none(
    busy: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, started = threading.Event(), list[int]()
    encode = busy.engine.tokenizer.encode

    def slow(text: str, special: bool = True) -> list[int]:
        started.append(len(text))
        if len(text) > LONG_BODY:
            assert gate.wait(WAIT)
            return [1]
        return encode(text, special)

    monkeypatch.setattr(busy.engine.tokenizer, "encode", slow)
    monkeypatch.setattr(busy.engine.tokenizer, "least_tokens", lambda text: 0)
    long = {"prompt": "x" * (LONG_BODY + 1), "max_tokens": 1}
    first = Visitor(busy.url, COMPLETE, long)
    until(lambda: len(started) == 1)
    second = Visitor(busy.url, COMPLETE, {**long, "deadline": 0.2})
    second.hear(b"HTTP/1.1 408")
    assert busy.post("/tokenize", {"prompt": "x"}).json()["count"] == 1
    first.leave()  # its thread works on, and is counted as long as it does
    assert started == [LONG_BODY + 1, 1] and busy.server._limits.requests == 1
    gate.set()
    until(busy.is_idle)
    second.leave()
