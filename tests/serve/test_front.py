"""A front before two replicas: they are one real server, reached through two relays that can end."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import WAIT, Running, events, until

from specbranch.cluster.front import MOST_TRIES, Front, create_front
from specbranch.cluster.leases import Ended, ReplicaAddress
from specbranch.cluster.upstream import Upstream
from specbranch.lab.scale.relay import Relay, Weather
from specbranch.serve.keys import new_key
from specbranch.serve.run import GracefulServer
from specbranch.serve.settings import ServerSettings

LONG = {"prompt": "Smile", "max_tokens": 400, "ignore_eos": True, "seed": 5, "temperature": 1}
SHORT = {**LONG, "max_tokens": 12}


class Lent:
    """A replica that is lent without Ray."""

    id = ""

    def __init__(self, address: ReplicaAddress) -> None:
        self.address = address

    def watch(self, upstream: Upstream) -> None:
        pass

    async def ended(self) -> Ended:
        return Ended({"prompt_tokens": 3}, ())


class TwoRelays:
    """Lends the first one that need not be avoided."""

    def __init__(self, relays: Sequence[Relay]) -> None:
        self.relays, self.lent = relays, 0
        self.ways: dict[str, int] = {}

    def running(self) -> list[ReplicaAddress]:
        return [ReplicaAddress(f"r{number}", "127.0.0.1", one.port, "s") for number, one in enumerate(self.relays)]

    async def lend(self, key: str | None, avoid: Sequence[str]) -> Lent:
        self.lent += 1
        found = self.running()
        return Lent(next((one for one in found if one.replica not in avoid), found[0]))


class Served:
    """A front that runs in a thread."""

    def __init__(self, server: GracefulServer, replicas: TwoRelays, http: httpx.Client) -> None:
        self.server, self.replicas, self.http = server, replicas, http


@contextmanager
def fronted(ports: Sequence[int], **given: Any) -> Iterator[Served]:
    settings = ServerSettings(port=0, max_batch=8, **given)
    with Relay(ports[0], Weather()) as first, Relay(ports[1], Weather()) as second:
        replicas = TwoRelays((first, second))
        server = GracefulServer(create_front(Front(replicas, settings, 2), settings), settings)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        until(lambda: server.started or not thread.is_alive())
        with httpx.Client(base_url=server.address, timeout=WAIT) as http:
            yield Served(server, replicas, http)
        server.stop()
        thread.join(WAIT)
        assert not thread.is_alive()


def port_of(served: Running) -> int:
    return int(served.url.rpartition(":")[2])


@pytest.fixture
def front(served: Running) -> Iterator[Served]:
    with fronted([port_of(served)] * 2) as found:
        yield found


@pytest.fixture(scope="module")
def nobody() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def said(response: httpx.Response) -> str:
    return "".join(choice["text"] for event in events(response) for choice in event["choices"])


def test_answers_of_a_front_are_those_of_its_replicas(front: Served, served: Running) -> None:
    expected = served.post("/v1/completions", SHORT).json()["choices"]
    answer = front.http.post("/v1/completions", json=SHORT, headers={"x-request-id": "mine"})
    assert answer.json()["choices"] == expected and answer.headers["x-request-id"] == "mine"
    assert said(front.http.post("/v1/completions", json={**SHORT, "stream": True})) == expected[0]["text"]
    assert front.http.get("/v1/models?x=1").json()["data"][0]["id"] == "tiny"
    assert front.http.get("/").headers["content-type"].startswith("text/html")
    assert front.http.post("/v1/completions", json={"prompt": 5}).status_code == 400
    assert front.http.get("/ready").json() == {"status": "ready", "draft": "ready", "replicas": 2}


def test_a_replica_that_ends_in_a_stream_ends_it_with_an_error_object(front: Served) -> None:
    with front.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        heard = [next(lines)]
        front.replicas.relays[0].cut()
        heard += [line for line in lines if line]
    assert heard[-1] == "data: [DONE]"
    error = json.loads(heard[-2].removeprefix("data: "))["error"]
    assert error["type"] == "server_error" and error["code"] == "replica_lost"
    assert all("choices" in json.loads(line[6:]) for line in heard[:-2])  # nothing but whole events before
    assert front.http.post("/v1/completions", json=SHORT).status_code == 200
    assert 'specbranch:streams_lost_total{replica="front"} 1' in front.http.get("/metrics").text


def test_a_response_that_is_lost_ends_with_its_typed_events(front: Served) -> None:
    body = {"input": "Smile", "max_output_tokens": 400, "ignore_eos": True, "stream": True}
    with front.http.stream("POST", "/v1/responses", json=body) as response:
        lines = response.iter_lines()
        heard = [next(lines)]
        front.replicas.relays[0].cut()
        heard += [line for line in lines if line.startswith("data: ")]
    found = [json.loads(line[6:]) for line in heard if line.startswith("data: ")]
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    assert [one["type"] for one in found[-2:]] == ["error", "response.failed"]
    assert found[-1]["response"]["id"] == found[0]["response"]["id"] and found[-1]["response"]["status"] == "failed"


def test_a_request_without_a_first_token_is_sent_again_elsewhere(served: Running, nobody: int) -> None:
    with fronted([nobody, port_of(served)]) as front:
        assert said(front.http.post("/v1/completions", json={**SHORT, "stream": True}))
        assert front.replicas.lent == 2
        assert 'specbranch:requests_resent_total{replica="front"} 1' in front.http.get("/metrics").text


def test_a_whole_answer_whose_replica_ends_is_written_by_another(front: Served, served: Running) -> None:
    expected = served.post("/v1/completions", SHORT).json()["choices"]
    found: list[httpx.Response] = []
    with served.held():
        ask = threading.Thread(target=lambda: found.append(front.http.post("/v1/completions", json=SHORT)))
        ask.start()
        until(lambda: served.submitted() == 1)
        front.replicas.relays[0].cut()
        until(lambda: front.replicas.lent == 2)
    ask.join(WAIT)
    assert found[0].json()["choices"] == expected


def test_a_request_that_ends_every_replica_is_given_up(nobody: int) -> None:
    with fronted([nobody, nobody]) as front:
        answer = front.http.post("/v1/completions", json=SHORT)
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "replica_lost"
        assert front.replicas.lent == MOST_TRIES
        assert front.http.get("/ready").status_code == 503 and front.http.get("/health").status_code == 200
        assert 'replica="front"' in front.http.get("/metrics").text


def test_metrics_have_the_lines_of_every_replica_and_each_declaration_once(front: Served) -> None:
    text = front.http.get("/metrics").text
    declared = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(declared) == len(set(declared)) > 30
    labels = set(re.findall(r'^specbranch:connections_open\{replica="(\w+)"', text, re.MULTILINE))
    assert labels == {"r0", "r1", "front"}


def test_keys_and_their_limits_are_those_of_the_address(served: Running, tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    sent = {"authorization": f"Bearer {new_key(keys, 'alice')}"}
    with fronted([port_of(served)] * 2, keys=keys, max_per_key=1) as front, ThreadPoolExecutor() as others:

        def ask(**headers: str) -> int:
            return front.http.post("/v1/completions", json=SHORT, headers=headers).status_code

        assert ask() == 401 and ask(authorization="Bearer sb-wrong") == 401
        assert front.http.get("/metrics").status_code == 200
        with served.held():
            first = others.submit(ask, **sent)
            until(lambda: served.submitted() == 1)
            assert ask(**sent) == 429
        assert first.result(WAIT) == 200 and ask(**sent) == 200


def test_a_first_ctrl_c_lets_answers_finish_and_a_second_does_not(front: Served) -> None:
    with front.http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 100, "stream": True}) as response:
        lines = response.iter_lines()
        heard = [next(lines)]
        front.server.handle_exit(signal.SIGINT, None)
        assert not front.server.force_exit
        heard += [line for line in lines if line]
    assert heard[-1] == "data: [DONE]" and "error" not in heard[-2]
    front.server.handle_exit(signal.SIGINT, None)
    assert front.server.force_exit
