"""What is too much is refused, with a status that says so; nothing is lost, and nothing stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import PROMPT, Running, Visitor, load_tiny, running, until

from specbranch.errors import BadParameter
from specbranch.serve.keys import new_key
from specbranch.serve.settings import ServerSettings

COMPLETE = "/v1/completions"
SHORT: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 4, "seed": 1}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    return file, new_key(file, "ann"), new_key(file, "bob")


@pytest.fixture(scope="module")
def narrow(pair: tuple[str, str], keys: tuple[Path, str, str], nothing_kept: None) -> Iterator[Running]:
    """A server with little room."""
    limits: dict[str, Any] = {"max_queue": 2, "max_per_key": 2, "max_tokens": 50, "max_body": 2000, "timeout": 60.0}
    with running(load_tiny(pair), max_batch=1, keys=keys[0], **limits) as found:
        yield found


def asked(server: Running, key: str, **given: Any) -> httpx.Response:
    return server.post(COMPLETE, {**SHORT, **given}, authorization=f"Bearer {key}")


def test_a_full_queue_and_a_busy_key_get_a_time_to_retry(narrow: Running, keys: tuple[Path, str, str]) -> None:
    _, ann, bob = keys
    with ThreadPoolExecutor() as pool:
        with narrow.held():
            answers = [pool.submit(asked, narrow, ann) for _ in range(2)]
            until(lambda: narrow.server._limits.requests == 2)
            busy = asked(narrow, ann)
            answers.append(pool.submit(asked, narrow, bob))
            until(lambda: narrow.server._limits.requests == 3)
            full = asked(narrow, bob)
        assert [answer.result().status_code for answer in answers] == [200] * 3
    for refused, code in ((busy, "too_many_requests"), (full, "queue_full")):
        assert refused.status_code == 429 and refused.json()["error"]["code"] == code
        assert int(refused.headers["retry-after"]) >= 1
    until(narrow.is_idle)
    assert asked(narrow, ann).status_code == 200


def test_samples_count_one_by_one(narrow: Running, keys: tuple[Path, str, str]) -> None:
    assert asked(narrow, keys[1], n=3).status_code == 200
    too_many = asked(narrow, keys[1], n=4)
    assert too_many.status_code == 400 and "takes 3 at a time" in too_many.json()["error"]["message"]


def test_answers_bodies_and_times_have_their_bounds(narrow: Running, keys: tuple[Path, str, str]) -> None:
    long = asked(narrow, keys[1], max_tokens=51)
    assert long.status_code == 400 and "writes 50 at most" in long.json()["error"]["message"]
    unsaid = narrow.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Smile"}], "ignore_eos": True},
        authorization=f"Bearer {keys[1]}",
    )
    assert unsaid.json()["usage"]["completion_tokens"] == 50
    late = asked(narrow, keys[1], deadline=1e-6)
    assert late.status_code == 408 and late.json()["error"]["code"] == "deadline_passed"
    until(narrow.is_idle)


def test_a_large_body_is_refused_whether_or_not_its_length_is_said(
    narrow: Running, keys: tuple[Path, str, str]
) -> None:
    headers = {"authorization": f"Bearer {keys[1]}", "content-type": "application/json"}
    body = b'{"prompt": "' + b"x" * 3000 + b'"}'
    for content in (body, iter([body[:1500], body[1500:]])):
        response = narrow.http.post(COMPLETE, content=content, headers=headers)
        assert response.status_code == 413 and "longer than 2000 bytes" in response.json()["error"]["message"]


def test_a_server_that_stops_finishes_what_it_began_and_refuses_what_is_new(pair: tuple[str, str]) -> None:
    with running(load_tiny(pair)) as server, ThreadPoolExecutor(1) as pool, httpx.Client(base_url=server.url) as kept:
        kept.get("/health")  # its connection is there already, and stays
        with server.held():
            answer = pool.submit(server.post, COMPLETE, SHORT)
            until(lambda: server.server._limits.requests == 1)
            server.server.stop()
            time.sleep(0.3)  # uvicorn looks ten times a second whether it is to stop
            for ask in (kept.post, lambda path, **given: httpx.post(server.url + path, **given)):
                refused = ask(COMPLETE, json=SHORT)
                assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
                assert int(refused.headers["retry-after"]) >= 1 and refused.headers["connection"] == "close"
            assert httpx.get(f"{server.url}/v1/models").status_code == 503
            assert kept.get("/ready").status_code == 503 and kept.get("/health").status_code == 200
        assert answer.result().status_code == 200
        until(lambda: not server.engine.is_alive)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


@pytest.mark.slow  # uvicorn counts its own grace in seconds
def test_a_server_waits_for_its_answers_no_longer_than_its_grace(pair: tuple[str, str]) -> None:
    with running(load_tiny(pair), grace=0.2) as server, server.held():
        visitor = Visitor(server.url, COMPLETE, {**SHORT, "stream": True})
        until(lambda: server.server._limits.requests == 1)
        server.server.stop()
        until(lambda: server.server._limits.requests == 0)
        visitor.leave()


@pytest.mark.parametrize(
    "given",
    [
        *({"max_queue": 0}, {"max_tokens": 0}, {"port": 70000}, {"max_connections": 0}, {"max_per_address": 0}),
        *({"timeout": 0}, {"timeout": 1e10}, {"timeout": float("nan")}, {"grace": float("inf")}, {"read_timeout": -1}),
    ],
    ids=str,
)
def test_limits_that_make_no_sense_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(BadParameter, match=f"^{next(iter(given))} is "):
        ServerSettings(**given)
