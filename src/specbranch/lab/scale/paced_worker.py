"""A real draft worker with a toy of timed steps, in a process of its own.

Owns that process, and `PacedWorker`, which starts and ends it. Invariant: the process ends with the `with` block, and
also when whoever started it is gone.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from types import TracebackType

from specbranch.clock.profile import CostProfile
from specbranch.errors import ModelError
from specbranch.exec.address import LinkAddress
from specbranch.exec.dialling import Dial, TargetVocabulary
from specbranch.exec.door import bound
from specbranch.exec.draft_server import DraftServer
from specbranch.exec.drafter import Drafter
from specbranch.exec.messages import Served
from specbranch.lab.scale.paced_pair import PacedDraft
from specbranch.lab.scale.texts import make_texts

FINGERPRINT = "toys of the lab"
ENDING_SECONDS = 5.0  # that the process has to end


class PacedWorker:
    """The process, and the port it listens on."""

    def __init__(self, profile: CostProfile, agreement: float) -> None:
        given = json.dumps({"profile": asdict(profile), "agreement": agreement})
        command = [sys.executable, "-m", "specbranch.lab.scale.paced_worker", given]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        said = self._process.stdout.readline()
        if not said.strip().isdigit():
            self.__exit__(None, None, None)
            raise ModelError("The toy draft worker could not start; its own messages say why.")
        self.port = int(said)

    def __enter__(self) -> PacedWorker:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()  # it ends by that
        try:
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def dial(port: int, vocabulary: int) -> Dial:
    """Return how a toy target reaches a toy worker."""
    known = TargetVocabulary(FINGERPRINT, vocabulary, lambda size, tokens: min(size, vocabulary))
    return Dial(LinkAddress("127.0.0.1", port), known)


def main(given: str) -> None:
    """Serve until standard input ends."""
    asked = json.loads(given)
    scripts = make_texts(asked["agreement"])
    drafter = Drafter(PacedDraft(scripts, CostProfile(**asked["profile"])))
    served = Served("a toy", "a toy", "cpu", FINGERPRINT, scripts.vocabulary)
    listener = bound(LinkAddress("127.0.0.1", 0))
    server = DraftServer(drafter, served, {}, listener)
    threading.Thread(target=_stop_at_end, args=(server,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    print(listener.getsockname()[1], flush=True)
    server.run()


def _stop_at_end(server: DraftServer) -> None:
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main(sys.argv[1])
