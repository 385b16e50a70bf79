"""A draft worker sends its draft's evaluation with the greeting; one that makes no sense is ignored with a sentence."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from threading import Thread

import pytest

from specbranch.assembly import ModelChoice, ServedDraft, draft_evaluation
from specbranch.core.draft_evaluation import ClassCounts, DraftEvaluation
from specbranch.core.experience import Experience
from specbranch.core.trees import CLASSES, EDGES
from specbranch.exec.address import KEY_VARIABLE
from specbranch.exec.dialling import MOST_EVALUATION
from specbranch.exec.greeting import Refused, admit
from specbranch.exec.link import LinkLost, StreamLink
from specbranch.exec.messages import Evaluated, Join, Ready, TellEvaluation
from specbranch.exec.wire import from_bytes, to_bytes
from toy_worker import DRIFT, SERVED, TOKENS, reach, serving, serving_draft
from toybench import make_drafter

COUNTS = ClassCounts((10,) * CLASSES, (9,) * CLASSES)
SOME = DraftEvaluation(COUNTS, ClassCounts((40,) * CLASSES, (1,) * CLASSES), "some text")


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def test_a_target_plans_by_the_evaluation_that_its_worker_sends() -> None:
    served = ServedDraft(make_drafter(DRIFT), SERVED, TOKENS, SOME)
    with serving_draft(served) as port, closing(reach(port)) as executor:
        assert executor.evaluation == SOME
        choice = ModelChoice(f"tcp://127.0.0.1:{port}")
        assert draft_evaluation(choice, executor) == SOME
        assert Experience(prior=executor.evaluation).insight.chances() != Experience().insight.chances()


def test_a_draft_without_an_evaluation_is_used_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as port, closing(reach(port)) as executor:
        assert executor.evaluation is None and executor.draft_state == "ready"
    assert not caplog.records


def told(evaluation: DraftEvaluation = SOME, edges: tuple[float, ...] = EDGES) -> bytes:
    return to_bytes(Evaluated(evaluation, edges))


BAD: dict[str, tuple[bytes, str]] = {
    "no message": (b"\x80\x04K\x01.", "no message of ours"),
    "another message": (to_bytes(Ready()), "said Ready instead of it"),
    "other classes": (told(edges=EDGES[:-1]), "other classes"),
    "too few classes": (told(replace(SOME, first=ClassCounts((1,), (1,)))), "counted in 1 classes"),
    "more right than met": (told(replace(SOME, other=ClassCounts(COUNTS.right, COUNTS.met))), "more that are right"),
    "counts below 0": (told(replace(SOME, first=ClassCounts((-1,) * CLASSES, (-1,) * CLASSES))), "impossible count"),
    "huge counts": (told(replace(SOME, first=ClassCounts((10**300,) * CLASSES, (1,) * CLASSES))), "impossible count"),
    "fractions": (told().replace(b"[10,", b"[1.5,", 1), "where a list of int was expected"),
    "a long text": (told(replace(SOME, text="x" * MOST_EVALUATION)), "at most 65,536 are expected"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_evaluation_is_ignored_with_a_sentence(what: str, caplog: pytest.LogCaptureFixture) -> None:
    answer, said = BAD[what]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=worker, args=(listener, lambda link: link.post(answer)), daemon=True).start()
        with closing(reach(listener.getsockname()[1])) as executor:
            assert executor.evaluation is None and executor.draft_state == "ready"
    assert len(caplog.records) == 1
    assert "The evaluation of the draft at tcp://127.0.0.1:" in caplog.text and said in caplog.text


def worker(listener: socket.socket, tell: Callable[[StreamLink], None]) -> None:
    """A worker that greets as it should."""
    with suppress(OSError, Refused, LinkLost):
        stream, _ = listener.accept()
        admit(stream, b"")
        link = StreamLink(stream)
        link.post(to_bytes(SERVED))
        while True:
            link.pump(None)
            while (data := link.take()) is not None:
                message = from_bytes(data)
                if isinstance(message, TellEvaluation):
                    tell(link)
                elif isinstance(message, Join):
                    link.post(to_bytes(Ready()))
