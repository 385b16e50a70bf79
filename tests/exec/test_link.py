"""A link hands on whole messages, blocks nobody, and survives an interrupt at any line or says that it is lost."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from specbranch.exec import link as link_module
from specbranch.exec.link import HEADER, LinkLost, StreamLink
from toybench import Interrupted

HANG = 30.0  # seconds: longer than anything here takes on any machine


@pytest.fixture
def ends() -> Iterator[tuple[StreamLink, socket.socket]]:
    ours, theirs = socket.socketpair()
    link = StreamLink(ours, most=1 << 20)
    yield link, theirs
    link.close()
    theirs.close()


def framed(message: bytes) -> bytes:
    return HEADER.pack(len(message)) + message


def test_messages_come_whole_and_in_order_however_their_bytes_come(ends: tuple[StreamLink, socket.socket]) -> None:
    link, other = ends
    rng = random.Random(1)
    messages = [rng.randbytes(size) for size in (0, 1, 7, 8, 9, 300, 5000)]
    stream, heard = b"".join(map(framed, messages)), list[bytes]()
    while stream:
        size = rng.randint(1, 700)
        other.sendall(stream[:size])
        stream = stream[size:]
        link.pump(HANG)
        while (message := link.take()) is not None:
            heard.append(message)
    assert heard == messages


def test_a_message_that_is_not_dropped_is_heard_again(ends: tuple[StreamLink, socket.socket]) -> None:
    link, other = ends
    other.sendall(framed(b"one") + framed(b"two"))
    link.pump(HANG)
    assert link.peek() == link.peek() == b"one"
    link.drop()
    assert link.take() == b"two"
    assert link.take() is None


def test_nobody_waits_for_bytes_while_a_whole_message_is_there(ends: tuple[StreamLink, socket.socket]) -> None:
    link, other = ends
    other.sendall(framed(b"answer"))
    link.pump(HANG)
    started_at = time.monotonic()
    link.pump(HANG)
    assert time.monotonic() - started_at < HANG / 2
    assert link.take() == b"answer"


def test_half_a_message_is_waited_for_no_longer_than_was_said(ends: tuple[StreamLink, socket.socket]) -> None:
    link, other = ends
    other.sendall(framed(b"a long answer")[:-1])
    link.pump(HANG)
    link.pump(0.01)
    assert link.take() is None
    other.sendall(b"r")
    link.pump(HANG)
    assert link.take() == b"a long answer"


def test_writing_to_an_end_that_does_not_read_returns_at_once_and_goes_on_later(
    ends: tuple[StreamLink, socket.socket],
) -> None:
    link, other = ends
    message = random.Random(2).randbytes(3_000_000)
    link.post(message)
    for _ in range(100):
        link.pump()
    assert link.unsent > 0
    got = b""
    while link.unsent or len(got) < len(message) + HEADER.size:
        link.pump()
        got += other.recv(1 << 20)
    assert got == framed(message)


@pytest.mark.parametrize("length", [(1 << 20) + 1, 2**40, 2**64 - 1])
def test_a_message_larger_than_expected_ends_the_link_before_it_has_come(
    ends: tuple[StreamLink, socket.socket], length: int
) -> None:
    link, other = ends
    other.sendall(struct.pack(">Q", length) + b"some bytes")
    link.pump(HANG)
    with pytest.raises(LinkLost, match=r"a message of [\d,]+ bytes was announced; at most 1,048,576 are expected"):
        link.take()


def test_what_was_said_before_hanging_up_is_heard_first(ends: tuple[StreamLink, socket.socket]) -> None:
    link, other = ends
    other.sendall(framed(b"last words") + b"\0\0")
    other.close()
    for _ in range(3):
        link.post(b"nobody reads this")
        link.pump()
    assert link.take() == b"last words"
    with pytest.raises(LinkLost, match=r"hung up|gone"):
        link.take()
    link.post(b"nor this")
    assert link.unsent == 0


def test_a_closed_link_says_so_and_waits_for_nothing(ends: tuple[StreamLink, socket.socket]) -> None:
    link, _ = ends
    link.close()
    link.pump(None)
    with pytest.raises(LinkLost, match="it was closed"):
        link.take()


def exchange(link: StreamLink, other: socket.socket, requests: list[bytes], heard: list[bytes]) -> None:
    """Send what is left of some requests; each is answered by its own bytes."""
    while requests:
        link.post(requests[0])
        requests.pop(0)
        while link.unsent:
            link.pump()
            with suppress(BlockingIOError):
                other.sendall(other.recv(1 << 16, socket.MSG_DONTWAIT))
        link.pump(HANG)
        while (message := link.peek()) is not None:
            heard.append(message)
            link.drop()


def test_an_interrupt_at_any_line_leaves_a_link_that_works_or_says_it_is_lost() -> None:
    lost = whole = 0
    for at in range(1, 120):
        ours, other = socket.socketpair()
        link, heard = StreamLink(ours), list[bytes]()
        requests = [b"one", b"two" * 500]
        with suppress(KeyboardInterrupt), Interrupted(at, link_module):
            exchange(link, other, requests, heard)
        try:
            exchange(link, other, [b"three", b"four"], heard)
        except LinkLost as error:
            assert "interrupt" in str(error)
            lost += 1
        else:
            # each message once, or again where it was not dropped; never a part of one, nor two mixed
            assert set(heard) <= {b"one", b"two" * 500, b"three", b"four"} and heard[-1] == b"four"
            whole += 1
        other.close()
        link.close()
    assert lost and whole
