"""A real server on loopback, in a thread, over a real engine; and clients that behave and misbehave."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from openai import OpenAI

from specbranch import LLM, AsyncLLM
from specbranch.serve.app import create_app
from specbranch.serve.run import GracefulServer
from specbranch.serve.settings import ServerSettings
from specbranch.serve.unix_socket import UnixSocket

WAIT = 120.0  # seconds after which a test gives up
PROMPT = "A branch is a guess about what the large model will say next."


@dataclass(frozen=True)
class Running:
    """A server that runs."""

    url: str
    engine: AsyncLLM
    server: GracefulServer
    http: httpx.Client

    def openai(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=WAIT)

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        sent = json.dumps(body).encode()  # in ASCII, so that anything can be sent
        return self.http.post(path, content=sent, headers={"content-type": "application/json", **headers})

    def error(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Send a request that is refused; return the status and the error."""
        response = self.post(path, body)
        assert set(response.json()) == {"error"}, response.text
        return response.status_code, response.json()["error"]

    def is_idle(self) -> bool:
        """Whether nothing is under way, and nothing is held."""
        stats, limits = self.engine.stats(), self.server._limits
        free = all(kv_slots.free == kv_slots.total for kv_slots in stats.kv_slots)
        return free and not stats.running and not stats.waiting and not limits.requests and not limits.samples

    def submitted(self) -> int:
        """How many requests wait to be admitted while the engine is held."""
        tasks = list(self.engine._thread._inbox.tasks)
        return sum(getattr(task, "func", None) == self.engine._thread._admit for task in tasks)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The engine does nothing meanwhile."""
        gate, there = threading.Event(), threading.Event()

        def wait() -> None:
            there.set()
            gate.wait(WAIT)

        self.engine._thread.post(wait)
        assert there.wait(WAIT)
        try:
            yield
        finally:
            gate.set()


def load_tiny(pair: tuple[str, str], context_length: int = 480, **given: Any) -> LLM:
    return LLM(*pair, dtype="float64", device="cpu", options={"context_length": context_length}, **given)


@contextmanager
def running(llm: LLM, max_batch: int = 8, tracer_provider: Any = None, **given: Any) -> Iterator[Running]:
    engine = AsyncLLM(llm, max_batch=max_batch)
    settings = ServerSettings(port=0, max_batch=max_batch, **given)
    unix = UnixSocket.of(settings)
    server = GracefulServer(create_app(engine, settings, tracer_provider), settings, unix)
    thread = threading.Thread(target=server.run, args=(unix and [unix.bind()],), daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive())
    with client_of(server.address) as http:
        yield Running(server.address, engine, server, http)
    server.stop()
    thread.join(WAIT)
    assert not thread.is_alive() and not engine.is_alive


def client_of(address: str) -> httpx.Client:
    """A client of a server at a port, or at a unix socket."""
    if not address.startswith("unix:"):
        return httpx.Client(base_url=address, timeout=WAIT)
    transport = httpx.HTTPTransport(uds=address.removeprefix("unix:"))
    return httpx.Client(base_url="http://specbranch", transport=transport, timeout=WAIT)


def until(true: Callable[[], bool]) -> None:
    """Wait for something that is bound to happen."""
    end = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which has to end as it should."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def texts(reply: list[dict[str, Any]]) -> dict[int, str]:
    """What a stream says, by choice."""
    found: dict[int, str] = {}
    for choice in (choice for event in reply for choice in event["choices"]):
        new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        found[choice["index"]] = found.get(choice["index"], "") + new
    return found


class Visitor:
    """A client that goes away when it likes."""

    def __init__(self, url: str, path: str, body: dict[str, Any], small: bool = False) -> None:
        """`small`: the system takes few bytes for it while it does not read."""
        host, port = url.removeprefix("http://").split(":")
        self._socket = socket.socket()
        if small:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.settimeout(WAIT)
        self._socket.connect((host, int(port)))
        sent = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(sent)}"
        self._socket.sendall(head.encode() + b"\r\n\r\n" + sent)

    def hear(self, what: bytes) -> None:
        """Read until something was said."""
        heard = b""
        while what not in heard:
            new = self._socket.recv(4096)
            assert new, heard
            heard += new

    def leave(self) -> None:
        self._socket.close()
