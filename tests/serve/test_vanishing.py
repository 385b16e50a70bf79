"""Clients that go away take nothing with them, and leave nothing behind; a draft worker that dies is not missed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from running import PROMPT, Running, Visitor, events, load_tiny, running, until

from specbranch import LLM, SamplingParams
from tiers import tiered

COMPLETE = "/v1/completions"
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def visited(pair: tuple[str, str], nothing_kept: None) -> Iterator[Running]:
    with running(load_tiny(pair)) as found:
        yield found


@pytest.mark.parametrize("visitors", tiered((10, 200), (10).__eq__))
def test_clients_that_vanish_in_mid_stream_free_everything(visited: Running, reference: LLM, visitors: int) -> None:
    before = visited.engine.stats()
    for at in range(visitors):
        visitor = Visitor(visited.url, COMPLETE, {**LONG, "stream": True, "n": 1 + at % 3})
        visitor.hear(b"data: ")
        visitor.leave()
    until(visited.is_idle)
    after = visited.engine.stats()
    ended = after.cancelled + after.finished - before.cancelled - before.finished
    assert ended == after.submitted - before.submitted >= visitors and after.cancelled > before.cancelled
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=20)
    answer = visited.post(COMPLETE, {"prompt": PROMPT, "seed": 5, "max_tokens": 20}).json()
    assert answer["choices"][0]["text"] == reference.generate(PROMPT, params).text


def test_clients_that_vanish_while_they_wait_are_forgotten(visited: Running) -> None:
    before = visited.engine.stats().cancelled
    with visited.held():
        waiting = [Visitor(visited.url, COMPLETE, {**LONG, "stream": stream}) for stream in (True, False) * 3]
        waiting.append(Visitor(visited.url, COMPLETE, {**LONG, "echo": True, "logprobs": 1, "max_tokens": 0}))
        until(lambda: visited.submitted() == 7)  # the engine cannot cancel what it never heard of
        for visitor in waiting:
            visitor.leave()
        until(lambda: visited.server._limits.requests == 0)
    until(lambda: visited.engine.stats().cancelled == before + 7)
    until(visited.is_idle)


def test_an_engine_that_fails_in_mid_stream_says_so_and_serves_the_next(
    pair: tuple[str, str], reference: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load_tiny(pair)
    verify, left = llm.target_runner.verify, [8]

    def broken(*given: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("CUDA error: an illegal memory access")
        return verify(*given)

    monkeypatch.setattr(llm.target_runner, "verify", broken)
    with running(llm) as server:
        *reply, last = events(server.post(COMPLETE, {**LONG, "stream": True}))
        assert reply and last["error"]["type"] == "server_error" and "illegal memory" in last["error"]["message"]
        left[0] = 3
        status, error = server.error(COMPLETE, LONG)
        assert status == 500 and error["type"] == "server_error"
        assert server.http.get("/ready").status_code == 200
        answer = server.post(COMPLETE, {"prompt": PROMPT, "seed": 5, "max_tokens": 20}).json()
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=20)
    assert answer["choices"][0]["text"] == reference.generate(PROMPT, params).text


@pytest.mark.slow  # each new worker imports torch; tests/exec has quick ones
def test_a_draft_worker_that_is_killed_comes_back_while_requests_go_on(pair: tuple[str, str], reference: LLM) -> None:
    kills = 5
    llm = load_tiny(pair, executor="process", method="pearl")
    executor: Any = llm.scheduler.loop.executor
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=60, ignore_eos=True)
    expected = reference.generate(PROMPT, params).text
    body = {"prompt": PROMPT, "temperature": 0.8, "seed": 2, "max_tokens": 60, "ignore_eos": True}
    with running(llm) as server, ThreadPoolExecutor(3) as pool:

        def ask() -> list[str]:
            said = []
            while server.engine.stats().draft_restarts < kills:
                said.append(server.post(COMPLETE, body).json()["choices"][0]["text"])
            return said

        clients = [pool.submit(ask) for _ in range(3)]
        for done in range(kills):
            until(lambda done=done: server.engine.stats().draft_restarts == done and executor.child_pid is not None)  # type: ignore[misc]
            os.kill(executor.child_pid, signal.SIGKILL)
        for client in clients:
            assert set(client.result()) == {expected}
        until(server.is_idle)
        reply = f'specbranch:draft_restarts_total{{model_name="target",engine="0"}} {kills}'
        assert reply in server.http.get("/metrics").text
