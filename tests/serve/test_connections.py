"""Connections that send nothing, too slowly, or are too many do not keep anybody else out."""

from __future__ import annotations

import json
import logging
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from running import PROMPT, WAIT, Running, load_tiny, running, until

from specbranch.serve.connections import RESERVE, Connections
from specbranch.serve.logs import JsonLines, Repeats
from specbranch.serve.settings import ServerSettings

COMPLETE = "/v1/completions"
SHORT: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 4, "seed": 1}
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
UNFINISHED = {
    "nothing": b"",
    "half a header": b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-ty",
    "half a body": b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: 99\r\n\r\n{",
    "half a second header": HEALTH + b"GET /hea",
    "half a refused body": b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{",
}


@pytest.fixture(scope="module")
def impatient(pair: tuple[str, str], nothing_kept: None) -> Iterator[Running]:
    with running(load_tiny(pair), read_timeout=0.2, max_per_address=3) as found:
        yield found


def connected(server: Running, small: bool = False) -> socket.socket:
    one = socket.socket()
    if small:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.settimeout(WAIT)
    one.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    return one


def rest(one: socket.socket) -> bytes:
    """All that is said until the connection is closed."""
    heard = b""
    try:
        while new := one.recv(2**16):
            heard += new
    except ConnectionResetError:
        pass
    return heard


@pytest.mark.parametrize("name", UNFINISHED)
def test_a_connection_that_does_not_finish_its_request_is_closed(impatient: Running, name: str) -> None:
    with closing(connected(impatient)) as one:
        one.sendall(UNFINISHED[name])
        heard = rest(one)
    assert (b"request_too_slow" in heard) == (name in ("half a header", "half a body", "half a second header"))
    assert (b"HTTP/1.1 408" in heard) == (b"request_too_slow" in heard)
    assert impatient.http.get("/health").status_code == 200


def test_a_body_that_keeps_coming_has_the_time_it_needs(impatient: Running) -> None:
    body = json.dumps(SHORT).encode().ljust(2**16)
    with closing(connected(impatient)) as one:
        head = f"POST {COMPLETE} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
        one.sendall(f"{head}{len(body)}\r\nconnection: close\r\n\r\n".encode() + body[:50000])
        until(lambda: len(impatient.server._connections) > 0)
        with pytest.raises(TimeoutError):
            one.settimeout(0.6)  # three times what a body of no bytes has
            one.recv(1)
        one.settimeout(WAIT)
        one.sendall(body[50000:])
        assert b"HTTP/1.1 200" in rest(one)


def test_a_new_connection_replaces_the_one_that_waited_longest(pair: tuple[str, str]) -> None:
    with running(load_tiny(pair), max_per_address=3) as server:
        idle = [connected(server) for _ in range(3)]
        until(lambda: len(server.server._connections) == 3)
        assert server.http.get("/health").status_code == 200
        assert rest(idle[0]) == b"" and len(server.server._connections) == 3
        for one in idle[1:]:
            one.sendall(HEALTH)
            assert one.recv(2**16).startswith(b"HTTP/1.1 200")
        metrics = server.http.get("/metrics").text
        assert 'connections_cut_total{model_name="target",engine="0",reason="crowded"} 1' in metrics
        for one in idle:
            one.close()


@pytest.mark.parametrize("limit", ["max_per_address", "max_connections"])
def test_connections_that_are_answered_are_not_closed_for_others(pair: tuple[str, str], limit: str) -> None:
    with running(load_tiny(pair), **{limit: 2}) as server, ThreadPoolExecutor() as pool:
        with server.held():
            answers = [pool.submit(server.post, COMPLETE, SHORT) for _ in range(2)]
            until(lambda: server.server._limits.requests == 2)
            with closing(connected(server)) as one:
                refused = rest(one)
        assert refused.startswith(b"HTTP/1.1 503") and b"too_many_connections" in refused
        assert b"retry-after" in refused
        assert [answer.result().status_code for answer in answers] == [200, 200]


@pytest.mark.slow  # what fills the buffers takes a while
def test_a_client_that_does_not_read_is_cut_off(pair: tuple[str, str]) -> None:
    with running(load_tiny(pair), timeout=0.3) as server, closing(connected(server, small=True)) as one:
        one.settimeout(5)
        with pytest.raises(OSError):  # either it cannot be sent on, or it is refused
            for _ in range(20_000):
                one.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 100)
        until(lambda: server.server._connections.cuts["unread"] == 1)
        assert server.http.get("/health").status_code == 200


@contextmanager
def files_allowed(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="files are counted by /proc")
def test_idle_connections_do_not_use_up_the_files_of_the_process(pair: tuple[str, str]) -> None:
    llm = load_tiny(pair)
    with files_allowed(len(list(Path("/proc/self/fd").iterdir())) + 40), running(llm, max_connections=60) as server:
        idle = [connected(server) for _ in range(100)]  # each has two ends here
        assert server.http.get("/health", timeout=20).status_code == 200
        assert len(server.server._connections) <= 60
        for one in idle:
            one.close()


def test_where_files_are_few_connections_are_fewer(caplog: pytest.LogCaptureFixture) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        pytest.skip("there is no limit here")
    connections = Connections(ServerSettings(max_connections=10 * hard))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        connections.fit_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard and connections._most < hard - RESERVE
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert f"may have {hard} open files" in caplog.text


def test_a_line_that_repeats_is_counted_and_written_a_few_times() -> None:
    log, lines = logging.getLogger("specbranch.repeated"), list[str]()

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(JsonLines(with_text=False).format(record))

    handler = Kept()
    handler.addFilter(Repeats())
    log.addHandler(handler)
    try:
        for at in range(1000):
            log.warning("No file is left for connection %d.", at)
            log.warning("request", extra={"facts": {"request_id": at}})
    finally:
        log.removeHandler(handler)
    written = [json.loads(line) for line in lines]
    of_request = [line["request_id"] for line in written if line["message"] == "request"]
    assert of_request == list(range(1000))
    repeated = [line.get("repeated") for line in written if line["message"] != "request"]
    assert repeated == [None, None, None, 10, 100, 1000]


def test_a_connection_is_kept_from_request_to_request(impatient: Running) -> None:
    with closing(connected(impatient)) as one:
        for _ in range(3):
            one.sendall(HEALTH)
            heard = b""
            while not heard.endswith(b'{"status":"ok"}'):
                new = one.recv(2**16)
                assert new, "it was closed"
                heard += new
            time.sleep(0.25)  # longer than a header may take: none has started
