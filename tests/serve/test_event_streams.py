"""Streams over an engine without models: whatever the tokens fall into, the text is that of the whole answer."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from running import WAIT, Running, Visitor, events, running, until

from paced import paced
from specbranch.serve.connections import WRITER, BodyWriter, GuardedProtocol

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
LONG: dict[str, Any] = {"prompt": "Smile", "ignore_eos": True, "seed": 1, "stream": True}
USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module", params=["byte level", "byte fallback"])
def repeating(request: pytest.FixtureRequest, nothing_kept: None) -> Iterator[Running]:
    with running(paced(kind=request.param), max_batch=16) as found:
        yield found


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system holds little for new connections, so a client that does not read is soon noticed."""
    made = GuardedProtocol.connection_made

    def with_small(protocol: GuardedProtocol, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        made(protocol, transport)

    monkeypatch.setattr(GuardedProtocol, "connection_made", with_small)


@pytest.fixture(scope="module")
def quick(nothing_kept: None) -> Iterator[Running]:
    with running(paced(), max_batch=16) as found:
        yield found


def drawn(draw: random.Random, spoken: str) -> tuple[str, dict[str, Any]]:
    """A random request; its stop strings are cut from a text that is spoken, or nearly."""
    path = draw.choice((CHAT, COMPLETE))
    asked: dict[str, Any] = {"max_tokens": draw.randrange(1, 70), "seed": draw.randrange(50), "n": draw.randrange(1, 4)}
    asked["ignore_eos"] = draw.random() < 0.5
    if draw.random() < 0.5:
        starts = [draw.randrange(len(spoken)) for _ in range(draw.randrange(1, 4))]
        asked["stop"] = [spoken[start : start + draw.randrange(1, 12)] for start in starts]
        asked["min_tokens"] = min(draw.choice((0, 0, 9)), asked["max_tokens"])
    top = draw.choice((None, None, 0, 3))
    if path == CHAT:
        asked["messages"] = [{"role": "user", "content": "Smile 🙂"}]
        return path, asked if top is None else {**asked, "logprobs": True, "top_logprobs": top}
    asked |= {"prompt": draw.choice(("Smile 🙂", ["Zwölf", "a"])), "echo": draw.random() < 0.3}
    return path, asked if top is None else {**asked, "logprobs": top}


def joined(reply: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices of a stream, put together as a whole answer has them."""
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in reply for choice in event["choices"]):
        one = found.setdefault(choice["index"], {"text": "", "logprobs": {}, "finish_reason": None})
        one["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for name, values in (choice["logprobs"] or {}).items():
            one["logprobs"][name] = [*one["logprobs"].get(name, ()), *values] if values is not None else None
        assert one["finish_reason"] is None, "something was sent after the end"
        one["finish_reason"] = choice["finish_reason"]
    return found


def test_a_stream_has_what_the_whole_answer_has(repeating: Running) -> None:
    draw = random.Random(11)
    spoken = repeating.post(COMPLETE, {**LONG, "max_tokens": 300, "stream": False}).json()["choices"][0]["text"]
    ended: set[str] = set()
    for _ in range(20):
        path, asked = drawn(draw, spoken)
        whole = repeating.post(path, asked).json()
        options = draw.choice((USAGE, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}))
        *reply, last = events(repeating.post(path, {**asked, "stream": True, **options}))
        for index, one in joined(reply).items():
            expected = whole["choices"][index]
            text = expected["text"] if path == COMPLETE else expected["message"]["content"]
            assert one["text"] == text and one["finish_reason"] == expected["finish_reason"], asked
            assert one["logprobs"] == (expected["logprobs"] or {}), asked
            if not asked.get("min_tokens") and not asked.get("echo"):
                assert not any(stop in one["text"] for stop in asked.get("stop", ()))
            ended.add(one["finish_reason"])
        assert len(joined(reply)) == len(whole["choices"])
        cached = [usage.pop("prompt_tokens_details", None) for usage in (last["usage"], whole["usage"])]
        assert last["usage"] == whole["usage"] and all(cached) and last["choices"] == []
    assert ended == {"stop", "length"}


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_a_stream_past_its_deadline_has_the_text_that_was_held_back_for_a_stop_string(
    path: str, repeating: Running
) -> None:
    body = {"messages": [{"role": "user", "content": "Smile"}]} if path == CHAT else {"prompt": "Smile"}
    body |= {"ignore_eos": True, "seed": 1, "stream": True}
    spoken = joined(events(repeating.post(path, {**body, "max_tokens": 400})))[0]["text"]
    stops = [character + "\0" for character in sorted(set(spoken))]  # the last character is always held back
    thread, streams = repeating.engine._thread, []

    def pass_deadline() -> None:
        """Once the server has taken all tokens of the stream, its deadline passes."""
        streams.extend(thread._open)
        until(lambda: streams[0]._taken == streams[0]._count)
        streams[0].tickets[0].deadline = float("-inf")

    with ThreadPoolExecutor() as pool:
        late = {**body, "max_tokens": 60_000, "stop": stops, "deadline": WAIT}
        answer = pool.submit(repeating.post, path, late)
        until(lambda: any(stream._taken for stream in thread._open))
        thread.post(pass_deadline)
        *said, error = events(answer.result())
    assert error["error"]["code"] == "deadline_passed"
    assert joined(said)[0]["text"] == streams[0].result(0).text != ""
    until(repeating.is_idle)


def test_every_event_says_the_same_of_its_answer(quick: Running) -> None:
    for path, body in (
        (COMPLETE, LONG),
        (CHAT, {"messages": [{"role": "user", "content": "Smile"}], "stream": True, "ignore_eos": True}),
    ):
        reply = events(quick.post(path, {**body, "max_tokens": 50, "n": 2, **USAGE}))
        common = [
            {name: event[name] for name in event if name not in ("choices", "usage", "metrics")} for event in reply
        ]
        assert all(one == common[0] for one in common) and len(reply) > 4
        assert {"id", "object", "created", "model", "system_fingerprint"} == set(common[0])
        assert all(event["usage"] is None for event in reply[:-1]) and reply[-1]["usage"]["completion_tokens"] == 100
        for choice in (choice for event in reply for choice in event["choices"]):
            names = ("index", "text") if path == COMPLETE else ("index", "delta")
            assert list(choice) == [*names, "logprobs", "finish_reason"]


def test_a_client_that_does_not_read_pauses_its_answer_alone_and_gets_it_in_fewer_events(
    quick: Running, small_buffers: None
) -> None:
    body = {**LONG, "max_tokens": 4000, "logprobs": 5}
    expected = events(quick.post(COMPLETE, body))
    sleeper = Visitor(quick.url, COMPLETE, body, small=True)
    until(lambda: quick.engine.stats().resting == 1)
    assert len(events(quick.post(COMPLETE, {**LONG, "max_tokens": 20}))) > 1  # others go on
    assert quick.engine.stats().resting == 1
    heard = b""
    while b"[DONE]" not in heard[-64:]:
        heard += sleeper._socket.recv(2**20)
    sleeper.leave()
    said = [json.loads(line[6:]) for line in unchunked(heard).split(b"\n\n") if line.startswith(b"data: {")]
    assert joined(said) == joined(expected)
    counts = [len(event["choices"][0]["logprobs"]["tokens"]) for event in said if event["choices"][0]["logprobs"]]
    assert max(counts) > 100 and len(counts) < 4000
    until(quick.is_idle)


def unchunked(answer: bytes) -> bytes:
    """The body of an answer in chunks."""
    body, at = b"", answer.index(b"\r\n\r\n") + 4
    while at < len(answer):
        size, _, _ = answer[at:].partition(b"\r\n")
        at += len(size) + 2
        body += answer[at : at + int(size, 16)]
        at += int(size, 16) + 2
    return body


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_stream_is_framed_as_its_client_can_read_it(quick: Running, version: str) -> None:
    sent = json.dumps({**LONG, "max_tokens": 30}).encode()
    host, port = quick.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT) as client:
        head = f"POST {COMPLETE} HTTP/{version}\r\nhost: {host}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(sent)}\r\n\r\n"
        client.sendall(head.encode() + sent)
        answer = b""
        while new := client.recv(2**16):
            answer += new
    assert (b"chunked" in answer) == (version == "1.1")
    body = unchunked(answer) if version == "1.1" else answer.partition(b"\r\n\r\n")[2]
    lines = [line for line in body.split(b"\n\n") if line]
    assert lines[-1] == b"data: [DONE]" and all(line.startswith(b"data: ") for line in lines)
    whole = quick.post(COMPLETE, {**LONG, "max_tokens": 30, "stream": False}).json()["choices"][0]["text"]
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == whole


def test_without_a_direct_writer_a_stream_is_the_same(quick: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    direct = [event["choices"] for event in events(quick.post(COMPLETE, {**LONG, "max_tokens": 30, "n": 2}))]

    async def plain(protocol: GuardedProtocol, scope: Any, receive: Any, send: Any) -> None:
        assert WRITER not in scope
        await protocol._served_app(scope, receive, send)

    monkeypatch.setattr(GuardedProtocol, "_with_writer", plain)
    fresh = Visitor(quick.url, COMPLETE, {**LONG, "max_tokens": 30, "n": 2})
    heard = b""
    while b"[DONE]" not in heard:
        heard += fresh._socket.recv(2**16)
    said = [json.loads(line[6:]) for line in unchunked(heard).split(b"\n\n") if line.startswith(b"data: {")]
    assert joined(said) == joined([{"choices": choices} for choices in direct])


def test_one_connection_carries_streams_and_whole_answers_in_turn(quick: Running) -> None:
    for at in range(3):
        asked = {**LONG, "max_tokens": 25, "seed": at}
        streamed = joined(events(quick.post(COMPLETE, asked)))[0]["text"]
        assert streamed == quick.post(COMPLETE, {**asked, "stream": False}).json()["choices"][0]["text"]
    until(lambda: len(quick.server._connections) <= 2)


def test_clients_that_leave_while_they_do_not_read_free_everything(quick: Running, small_buffers: None) -> None:
    sleepers = [
        Visitor(quick.url, COMPLETE, {**LONG, "max_tokens": 20_000, "logprobs": 5}, small=True) for _ in range(3)
    ]
    until(lambda: quick.engine.stats().resting == 3)
    for sleeper in sleepers:
        sleeper.leave()
    until(quick.is_idle)


def test_an_event_that_fails_to_be_written_ends_its_stream_alone(
    quick: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = BodyWriter.write, [3]

    def broken(writer: BodyWriter, data: bytes) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("no such transport")
        write(writer, data)

    monkeypatch.setattr(BodyWriter, "write", broken)
    hurt = Visitor(quick.url, COMPLETE, {**LONG, "max_tokens": 2000})
    while hurt._socket.recv(2**16):  # until the server closes it
        pass
    assert left[0] <= 0
    until(quick.is_idle)
    assert events(quick.post(COMPLETE, {**LONG, "max_tokens": 20}))
