"""Strangers at a draft worker's door are refused; they learn nothing, leave nothing, and stop nobody."""

from __future__ import annotations

import random
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from specbranch.config import SamplingParams
from specbranch.core.orders import Context, Draft, Orders, Plan
from specbranch.core.request import Request
from specbranch.errors import BadParameter, ModelError
from specbranch.exec import door, greeting
from specbranch.exec.address import CA_VARIABLE, KEY_VARIABLE
from specbranch.exec.greeting import prove, worker_context
from specbranch.exec.link import StreamLink
from specbranch.exec.messages import Hello, Join, Recipe, Work
from specbranch.exec.process import Process
from specbranch.exec.wire import to_bytes
from toy_worker import SECRET, reach, serving

HANG = 30.0  # seconds: a guard against hangs


@pytest.fixture(autouse=True)
def the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, SECRET.decode())
    monkeypatch.setattr(greeting, "GREETING_SECONDS", 1.0)
    monkeypatch.setattr(door, "GREETING_SECONDS", 1.0)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate and its private key."""
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not here, and it makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-keyout", str(key), "-out", str(made)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return made, key


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=HANG)


def gets(stream: socket.socket, data: bytes) -> bytes:
    """What a stranger gets back until it is turned away."""
    got = b""
    with stream, suppress(OSError):
        stream.sendall(data)
        while came := stream.recv(1 << 16):
            got += came
    return got


def drafts(executor: Process) -> bool:
    """Order a draft; returns whether one came."""
    executor.open(0, Request(SamplingParams(), 0, 2))
    report = executor.run({0: Orders(Draft(Context(0, (1, 2)), Plan(2)))})[0]
    executor.free(0)
    return bool(report.branches)


STRANGERS: dict[str, bytes] = {
    "a browser": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "a huge frame": struct.pack(">Q", 100 << 20) + b"[" * 1000,
    "a hello of 100 MB": struct.pack(">Q", 100 << 20) + greeting.MAGIC,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),
    "an order": struct.pack(">Q", 20) + to_bytes(Join(6))[:20].ljust(20),
    "a pickle": struct.pack(">Q", 5) + b"\x80\x04K\x01.",
    "another version": struct.pack(">Q", 50) + greeting.PROTOCOL + b"9\n" + bytes(32),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_is_refused_and_learns_nothing(who: str) -> None:
    with serving(key=SECRET) as port:
        stranger = connected(port)
        got = gets(stranger, STRANGERS[who])
        expected = greeting.MAGIC if who == "another version" else b""
        assert got[8 : 8 + len(greeting.MAGIC)] == expected and SECRET not in got
        with closing(reach(port)) as executor:
            assert drafts(executor)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0


def until_equal(count: Callable[[], int], most: int) -> bool:
    end = time.monotonic() + HANG
    while count() > most and time.monotonic() < end:
        time.sleep(0.02)
    return count() <= most


@pytest.mark.parametrize("seconds", [0.5, pytest.param(60.0, marks=pytest.mark.slow)])
def test_random_bytes_leave_no_file_and_no_thread_and_the_worker_drafts_on(seconds: float) -> None:
    rng = random.Random(4)
    with serving(key=SECRET) as port, closing(reach(port)) as executor:
        assert drafts(executor)
        files, threads = open_files(), threading.active_count()
        end = time.monotonic() + seconds
        held, drafted = list[socket.socket](), 0
        while time.monotonic() < end:
            with suppress(OSError):
                stream = connected(port)
                stream.sendall(rng.randbytes(rng.randrange(1, 3000)))
                (held.append if rng.random() < 0.2 else socket.socket.close)(stream)
            if len(held) > 30:
                held.pop(rng.randrange(30)).close()
            drafted += drafts(executor)  # not each time: on a busy machine an answer may be late
        for stream in held:
            stream.close()
        assert drafted and executor.restarts == 0
        assert until_equal(lambda: int(not drafts(executor)), 0)
        assert until_equal(threading.active_count, threads)
        assert until_equal(open_files, files)


def test_those_who_say_nothing_are_sent_away_and_others_are_served_meanwhile() -> None:
    with serving(key=SECRET) as port:
        silent = [connected(port) for _ in range(20)]
        with closing(reach(port)) as executor:
            assert drafts(executor)
        assert [one.recv(1) for one in silent] == [b""] * 20
        for one in silent:
            one.close()


def framed(message: bytes) -> bytes:
    return struct.pack(">Q", len(message)) + message


UNWELCOME = {
    "a frame of 100 MB": struct.pack(">Q", 100 << 20) + b"x",
    "no message": framed(b"\x80\x04K\x01."),
    "a recipe": framed(to_bytes(Hello((), Recipe("os:abort")))),
    "an order out of turn": framed(to_bytes(Work(1, {}))),
    "a session that was never opened": framed(to_bytes(Join(6)))
    + framed(to_bytes(Work(1, {3: Draft(Context(0, (1, 2)), Plan(2))}))),
}


@pytest.mark.parametrize("what", UNWELCOME)
def test_a_target_that_sends_nonsense_loses_its_connection_and_others_do_not(what: str) -> None:
    with serving(key=SECRET) as port, closing(reach(port)) as executor:
        assert drafts(executor)
        stream = connected(port)
        prove(stream, SECRET)
        stream.settimeout(HANG)
        gets(stream, UNWELCOME[what])  # it ends
        assert drafts(executor) and executor.restarts == 0


def test_a_link_in_tls_drafts_and_a_plain_one_is_told_what_to_write(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CA_VARIABLE, str(certificate[0]))
    with serving(key=SECRET, context=worker_context(*certificate)) as port:
        with closing(reach(port, tls=True)) as executor:
            assert drafts(executor)
        with pytest.raises(ModelError, match="tls://, not tcp://"):
            reach(port)
        assert SECRET not in gets(connected(port), b"GET / HTTP/1.1\r\n\r\n")
        monkeypatch.delenv(CA_VARIABLE)
        with pytest.raises(ModelError, match=r"its certificate is not trusted .*Set SPECBRANCH_LINK_CA"):
            reach(port, tls=True)
    with serving(key=SECRET) as port, pytest.raises(ModelError, match="a worker without --tls-cert is tcp://"):
        reach(port, tls=True)


def test_large_messages_cross_a_tls_link_whole(certificate: tuple[Path, Path]) -> None:
    client = ssl.create_default_context(cafile=str(certificate[0]))
    ours, theirs = socket.socketpair()
    made: list[ssl.SSLSocket] = []
    shaking = threading.Thread(
        target=lambda: made.append(worker_context(*certificate).wrap_socket(theirs, server_side=True))
    )
    shaking.start()
    near = client.wrap_socket(ours, server_hostname="localhost")
    shaking.join()
    one, other = StreamLink(greeting.as_stream(near)), StreamLink(greeting.as_stream(made[0]))
    messages = [random.Random(size).randbytes(size) for size in (0, 1, 16_384, 70_000, 1_500_000)]
    for message in messages:
        one.post(message)
    got: list[bytes] = []
    end = time.monotonic() + HANG
    while len(got) < len(messages) and time.monotonic() < end:
        one.pump()
        other.pump(0.01)
        while (data := other.peek()) is not None:
            got.append(data)
            other.drop()
    assert got == messages
    one.close()
    other.close()


def test_a_certificate_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    with pytest.raises(BadParameter, match="cannot be used"):
        worker_context(tmp_path / "cert.pem", None)
