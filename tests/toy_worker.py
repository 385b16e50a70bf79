"""A toy draft worker on a network: in a thread of the test, or as a process (`python -m toy_worker`) that can be
stopped and killed."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from specbranch.assembly import ServedDraft
from specbranch.errors import VocabularyMismatch
from specbranch.exec.address import LinkAddress
from specbranch.exec.child_speed import ChildLimits
from specbranch.exec.dialling import Dial, TargetVocabulary
from specbranch.exec.door import bound
from specbranch.exec.draft_server import DraftServer
from specbranch.exec.drafter import Drafter
from specbranch.exec.link import HEADER, StreamLink
from specbranch.exec.messages import Served
from specbranch.exec.process import Process
from toybench import VOCABULARY, make_drafter, make_verifier

DRIFT = 0.1
SERVED = Served("toy", "toy-identity", "cpu", "toy-fingerprint", VOCABULARY)
TOKENS = {token: f"token {token}" for token in range(VOCABULARY)}
SECRET = b"a secret of some length"
LIMITS = ChildLimits(start=30.0, first=60.0, hung=20.0, grace=0.1, unmeasured=0.5)


def serving(
    port: int = 0, key: bytes = b"", context: ssl.SSLContext | None = None, drafter: Drafter | None = None
) -> AbstractContextManager[int]:
    """Serve toy drafts in a thread; gives the port."""
    return serving_draft(ServedDraft(drafter or make_drafter(DRIFT), SERVED, TOKENS), port, key, context)


@contextmanager
def serving_draft(
    draft: ServedDraft, port: int = 0, key: bytes = b"", context: ssl.SSLContext | None = None
) -> Iterator[int]:
    """Serve a draft in a thread; gives the port. Whatever ends the worker early is raised at the end."""
    listener = bound(LinkAddress("127.0.0.1", port))
    number: int = listener.getsockname()[1]
    server = DraftServer(draft.drafter, draft.served, draft.tokens, listener, key, context, draft.evaluation)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            server.run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield number
    finally:
        if thread.is_alive():
            server.stop()
        thread.join(30.0)
        assert not thread.is_alive()
        for error in failed:
            raise error


def vocabulary(fingerprint: str = SERVED.fingerprint, size: int = VOCABULARY) -> TargetVocabulary:
    """A toy target's vocabulary: it shares the tokens of the toy worker."""

    def compare(theirs: int, tokens: Mapping[int, str]) -> int:
        if tokens != TOKENS:
            raise VocabularyMismatch("Draft and target have different vocabularies.")
        return min(theirs, size)

    return TargetVocabulary(fingerprint, size, compare)


def reach(
    port: int, tls: bool = False, limits: ChildLimits = LIMITS, target: TargetVocabulary | None = None
) -> Process:
    """An executor whose draft is at a port; to be closed."""
    address = LinkAddress("127.0.0.1", port, tls)
    return Process(make_verifier(), Dial(address, target or vocabulary(), limits))


class WorkerProcess:
    """A toy worker in a process of its own."""

    def __init__(self, port: int = 0, halts_at: int = 0) -> None:
        """`halts_at`: it stops itself in the middle of this message."""
        command = [sys.executable, "-m", "toy_worker", str(port), str(halts_at)]
        path = os.pathsep.join(sys.path)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
        assert self.process.stdout
        self.port = int(self.process.stdout.readline())

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()


class HaltingLink(StreamLink):
    """A link that stops its own process in the middle of a message."""

    left = 0

    def post(self, message: bytes) -> None:
        """Queue a message."""
        HaltingLink.left -= 1
        if HaltingLink.left != 0:
            super().post(message)
            return
        frame = HEADER.pack(len(message)) + message
        self._outgoing += frame[: len(frame) // 2]
        self.pump()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._outgoing += frame[len(frame) // 2 :]


def main(port: int, halts_at: int) -> None:
    """Serve until a signal."""
    from specbranch.exec import draft_server

    HaltingLink.left = halts_at
    draft_server.StreamLink = HaltingLink  # type: ignore[misc]
    listener = bound(LinkAddress("127.0.0.1", port))
    server = DraftServer(make_drafter(DRIFT), SERVED, TOKENS, listener)
    signal.signal(signal.SIGTERM, server.stop)
    signal.signal(signal.SIGINT, server.stop)
    print(listener.getsockname()[1], flush=True)
    server.run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))


def free_port() -> int:
    """A port that nobody uses just now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number: int = listener.getsockname()[1]
    return number
