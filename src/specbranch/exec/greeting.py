"""How the two ends of a network link meet: TLS if there is a certificate, then a proof that both have the secret.

Owns the greeting: the target names the protocol and a random number, the worker answers with its own, the target proves
the secret over both numbers, the worker proves it back (HMAC-SHA256, compared in constant time). So a worker says
nothing but a random number to strangers, and a recorded greeting is worth nothing later. Does not own messages.
Invariant: each side ends within its time limit, and reads at most `MOST_GREETING` bytes a frame.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import ssl
import time
from pathlib import Path

from specbranch.errors import BadParameter
from specbranch.exec.address import CA_VARIABLE, KEY_VARIABLE, LinkAddress
from specbranch.exec.link import HEADER, Stream

PROTOCOL = b"specbranch-link/"
MAGIC = PROTOCOL + b"2\n"  # with the version of the messages
NONCE = 32  # bytes
MOST_GREETING = 256  # bytes of a frame before the secret is proved
GREETING_SECONDS = 5.0  # for all of it
KEEP_ALIVE = 20  # seconds without a byte, after which the system asks whether the other end is still there


class Refused(Exception):
    """The greeting failed; a sentence says why."""


class TlsStream:
    """A TLS socket as a stream that does not block."""

    def __init__(self, stream: ssl.SSLSocket) -> None:
        self._stream = stream

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._stream.fileno()

    def setblocking(self, flag: bool, /) -> None:
        """Set whether it blocks."""
        self._stream.setblocking(flag)

    def send(self, data: bytearray, /) -> int:
        """Write what can be written."""
        try:
            return self._stream.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def recv(self, count: int, /) -> bytes:
        """Read a record; all of it, because `poll` does not see what is decrypted already."""
        try:
            came = self._stream.recv(count)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        return came + self._stream.recv(rest) if came and (rest := self._stream.pending()) else came

    def close(self) -> None:
        """Close it."""
        self._stream.close()


class Deadline:
    """Bounds all waits on a socket by one moment."""

    def __init__(self, stream: socket.socket, seconds: float) -> None:
        self._stream, self._end = stream, time.monotonic() + seconds
        self.apply()

    def apply(self) -> None:
        """Let the next call on the socket wait only for what is left."""
        left = self._end - time.monotonic()
        if left <= 0.0:
            raise TimeoutError("the other end takes too long")
        self._stream.settimeout(left)

    def send(self, message: bytes) -> None:
        """Send a frame."""
        self.apply()
        self._stream.sendall(HEADER.pack(len(message)) + message)

    def receive(self) -> bytes:
        """Receive a frame."""
        return self._exactly(self._length(self._exactly(HEADER.size)))

    def _length(self, header: bytes) -> int:
        length = int(HEADER.unpack(header)[0])
        if length > MOST_GREETING:
            raise Refused(_foreign(header))
        return length

    def _exactly(self, count: int) -> bytes:
        got = b""
        while len(got) < count:
            self.apply()
            came = self._stream.recv(count - len(got))
            if not came:
                raise Refused(_foreign(got) if got else "the other end hung up")
            got += came
        return got


def tuned(stream: socket.socket) -> None:
    """Send small messages at once, and notice another end that is gone without a word."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", KEEP_ALIVE), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def as_stream(made: socket.socket) -> Stream:
    """Return a connected socket as a stream for a link."""
    return TlsStream(made) if isinstance(made, ssl.SSLSocket) else made


def connect(address: LinkAddress, key: bytes, trusted: str | None) -> tuple[socket.socket, float]:
    """Connect to a worker, in a thread that may wait; returns the socket and the seconds of a round trip."""
    try:
        stream = socket.create_connection((address.host, address.port), timeout=GREETING_SECONDS)
    except OSError as error:
        raise Refused(
            f"nobody answers there ({error.strerror or error}). Start a worker on that machine: specbranch "
            f"draft-worker --listen HOST:{address.port}"
        ) from None
    try:
        tuned(stream)
        if address.tls:
            stream.settimeout(GREETING_SECONDS)
            stream = _secured(stream, address, trusted)
        return stream, prove(stream, key)
    except BaseException:
        stream.close()
        raise


def prove(stream: socket.socket, key: bytes) -> float:
    """Greet as a target; returns the seconds of a round trip."""
    ours = secrets.token_bytes(NONCE)
    try:
        until = Deadline(stream, GREETING_SECONDS)
        start = time.perf_counter()
        until.send(MAGIC + ours)
        hello = until.receive()
        round_trip = time.perf_counter() - start
        theirs = _nonce(hello)
        until.send(_proof(key, b"target", ours + theirs))
        proved = until.receive()
    except TimeoutError:
        raise Refused("it does not answer; it is stopped, overloaded, or no draft worker") from None
    except ConnectionError as error:
        said = (
            f"it hung up ({error.strerror or error}); it is full, or has a certificate: then it is tls://, not tcp://"
        )
        raise Refused(said) from None
    except OSError as error:
        raise Refused(f"the connection broke ({error.strerror or error})") from None
    if not hmac.compare_digest(proved, _proof(key, b"worker", ours + theirs)):
        has = "has another secret" if key else "wants a secret"
        raise Refused(f"the worker {has}. Set {KEY_VARIABLE} to the same value for worker and target")
    return round_trip


def admit(stream: socket.socket, key: bytes) -> None:
    """Greet as a worker; raises Refused for whoever does not prove the secret."""
    ours = secrets.token_bytes(NONCE)
    try:
        until = Deadline(stream, GREETING_SECONDS)
        hello = until.receive()
        if not hello.startswith(PROTOCOL):
            raise Refused("it speaks another protocol")
        until.send(MAGIC + ours)
        theirs = _nonce(hello)
        proved = until.receive()
        if not hmac.compare_digest(proved, _proof(key, b"target", theirs + ours)):
            until.send(b"")
            raise Refused("its secret is not ours")
        until.send(_proof(key, b"worker", theirs + ours))
    except OSError as error:
        raise Refused(f"its greeting ended ({error.strerror or error})") from None


def worker_context(certificate: Path, private_key: Path | None) -> ssl.SSLContext:
    """Return the TLS settings of a worker, from certificate files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, private_key)
    except (OSError, ssl.SSLError) as error:
        raise BadParameter(
            f"The certificate in {certificate} cannot be used ({error.strerror or error}). Expected PEM files: the "
            "certificate in --tls-cert, its private key in --tls-key."
        ) from None
    return context


def _secured(stream: socket.socket, address: LinkAddress, trusted: str | None) -> ssl.SSLSocket:
    try:
        context = ssl.create_default_context(cafile=trusted or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context.wrap_socket(stream, server_hostname=address.host)
    except ssl.SSLCertVerificationError as error:
        raise Refused(
            f"its certificate is not trusted ({error.verify_message}). Set {CA_VARIABLE} to a file with the "
            "certificate of the worker or its authority"
        ) from None
    except TimeoutError:
        raise Refused("it does not answer; it is stopped, overloaded, or no draft worker") from None
    except (OSError, ValueError) as error:
        raise Refused(f"no TLS can be set up ({error}); a worker without --tls-cert is tcp://, not tls://") from None


def _proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, MAGIC + role + nonces, "sha256")


def _nonce(hello: bytes) -> bytes:
    if hello.startswith(PROTOCOL) and not hello.startswith(MAGIC):
        spoken = hello[len(PROTOCOL) :].partition(b"\n")[0][:9].decode("ascii", "replace")
        raise Refused(f"it speaks version {spoken} of the link; install the same version of specbranch on both sides")
    if not hello.startswith(MAGIC) or len(hello) != len(MAGIC) + NONCE:
        raise Refused("it is no draft worker of ours")
    return hello[len(MAGIC) :]


def _foreign(header: bytes) -> str:
    """Say who answered, by its first bytes: a TLS record begins with its kind and the version 3.x."""
    if header[:1] in (b"\x15", b"\x16") and header[1:2] == b"\x03":
        return "it speaks TLS; its address is tls://, not tcp://"
    return "what came is no message of ours"
