"""A draft that reads a text before it is asked what follows: trees are those that grow without it, and no text
changes by it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.orders import Following, Reports
from specbranch.core.planner import Planner
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.core.trees import Tree
from specbranch.exec.serial import Serial
from specbranch.exec.streams import Streams
from specbranch.models.gpu.growing import TextRead
from specbranch.models.gpu.runner import GpuRunner
from test_streams_models import decode, decoders, executor
from tiny_models import some_tokens
from toybench import PROFILE, Timeless, run_out

__all__ = ["decoders"]
pytestmark = pytest.mark.usefixtures("one_thread")
PARAMS = [SamplingParams(temperature=0.0, max_tokens=60), SamplingParams(temperature=0.9, max_tokens=60)]
# What follows a verdict may be begun with it, and beside the target nothing is drafted.
AHEAD = replace(PROFILE, asking=1e-6, slow_down=1.0)


def planned(
    works: Serial, method: str, params: SamplingParams, number: int, length: int = 25
) -> tuple[list[int], list[Tree]]:
    """The text of a request, and the trees that grew."""
    prompt = some_tokens(length, seed=number)
    session = Session(number, prompt, Request(params, number, len(prompt), eos_ids=(7,)), 295)
    trees: list[Tree] = []

    def note(orders: Any, reports: Reports, added: int) -> None:
        if reports.tree is not None:
            trees.append(reports.tree)

    session.on_round = note
    loop = Loop(works)
    config = SpeculativeConfig(method=method, ngram_min=1)  # type: ignore[arg-type]
    loop.join(session, METHODS[method].start(session, config, Timeless(AHEAD)))
    run_out(loop)
    session.stats.check()
    for worker in (works.target, works.draft):
        assert worker is not None
        worker.runner.check()  # type: ignore[attr-defined]
    return session.tokens, trees


def counts(works: Serial) -> tuple[int, int]:
    assert works.draft is not None
    draft = works.draft.runner
    assert isinstance(draft, GpuRunner)
    return draft.read, draft.read_right


@pytest.mark.parametrize("method", ["tree", "specbranch"])
@pytest.mark.parametrize("kind", [Serial, Streams])
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "hot"])
def test_trees_and_texts_are_those_that_come_without_it(
    params: SamplingParams,
    kind: type[Serial],
    method: str,
    decoders: tuple[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    works = executor(decoders, kind)[0]
    found = [planned(works, method, params, number, length) for number, length in enumerate((9, 25, 230))]
    begun, right = counts(works)
    assert begun > 10 and right >= 0.9 * begun
    monkeypatch.setattr(Serial, "_read_ahead", lambda *given: None)
    without = executor(decoders, kind)[0]
    assert [planned(without, method, params, number, length) for number, length in enumerate((9, 25, 230))] == found
    assert counts(without) == (0, 0)


def always(said: Following) -> Callable[..., Following]:
    return lambda *given: said


@pytest.mark.parametrize("kind", [Serial, Streams])
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "hot"])
def test_a_text_that_was_read_for_nothing_changes_no_text(
    params: SamplingParams, kind: type[Serial], decoders: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft reads after every verdict, also where it has read what follows, and half of that is forgotten."""
    works, rng, ends = executor(decoders, kind)[0], random.Random(1), TextRead.ends
    monkeypatch.setattr(Planner, "_following", always("draft"))
    monkeypatch.setattr(TextRead, "ends", lambda *given: ends(*given) and rng.random() < 0.5)
    for number in range(3):
        expected = decode(executor(decoders, Serial)[0], "autoregressive", params, number).tokens
        assert decode(works, "specbranch", params, number).tokens == expected
        prompt = 5 + 20 * (number % 2)
        assert planned(works, "specbranch", params, number, prompt)[0][: len(expected)] == expected[:295]
    begun, right = counts(works)
    assert begun > right > 0


@pytest.mark.parametrize("shaping", [{"top_p": 0.8}, {"presence_penalty": 0.5}])
def test_nothing_is_read_where_more_than_a_graph_is_wanted(shaping: dict[str, Any], decoders: tuple[Any, Any]) -> None:
    params, works = SamplingParams(temperature=0.8, max_tokens=30, **shaping), executor(decoders, Serial)[0]
    expected = decode(executor(decoders, Serial)[0], "autoregressive", params, 1).tokens
    assert planned(works, "specbranch", params, 1)[0] == expected
    assert counts(works) == (0, 0)


def test_a_draft_that_fails_at_it_leaves_the_text_to_the_target(
    decoders: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: GpuRunner, feed: Any) -> bool:
        raise RuntimeError("out of memory")

    works, expected = executor(decoders)[0], decode(executor(decoders, Serial)[0], "autoregressive", PARAMS[0], 1)
    monkeypatch.setattr(GpuRunner, "read_ahead", fail)
    assert planned(works, "specbranch", PARAMS[0], 1)[0] == expected.tokens
    assert "go on without it" in caplog.text
