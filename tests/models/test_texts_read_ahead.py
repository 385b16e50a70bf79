"""A draft that prefills a text before a proposal is ordered: trees and texts are those without it."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from counting_runner import CountingRunner
from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.orders import Context, Following, Orders, Prefill, Reports
from specbranch.core.planner import Planner
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.core.trees import Tree
from specbranch.exec.serial import Serial
from specbranch.exec.streams import Streams
from specbranch.models.forward import transfer
from specbranch.models.gpu.growing import TextRead
from specbranch.models.gpu.runner import GpuRunner
from test_streams_models import decode, decoders, executor
from tiers import each_value, tiered
from tiny_models import some_tokens
from toybench import PROFILE, Timeless, run_out

__all__ = ["decoders"]
pytestmark = pytest.mark.usefixtures("one_thread")
PARAMS = [SamplingParams(temperature=0.0, max_tokens=24), SamplingParams(temperature=0.9, max_tokens=24)]
# The next step may be launched with a verdict, and nothing is drafted beside the target.
AHEAD = replace(PROFILE, asking=1e-6, slow_down=1.0)


def planned(
    works: Serial, method: str, params: SamplingParams, number: int, length: int = 25, repeats: int = 1
) -> tuple[list[int], list[Tree]]:
    """The text of a request, and its trees; `repeats`: how often its prompt says the same."""
    prompt = some_tokens(length, seed=number) * repeats
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
    assert isinstance(draft, CountingRunner)
    return draft.texts_read, draft.texts_right


@pytest.mark.slow
def test_a_step_is_launched_with_the_verdict_on_a_tree_and_makes_its_moves(
    decoders: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_here_already", lambda: False)  # so that there is time to write steps out
    params = PARAMS[0]
    works = executor(decoders, Streams)[0]
    target, plain = works.target.runner, executor(decoders, Serial)[0]
    assert isinstance(target, CountingRunner)
    keep, moved = target.keep, list[int]()

    def kept(seq: int, nodes: Any, commit: int) -> None:
        keep(seq, nodes, commit)
        if sys._getframe(1).f_code.co_name == "follow":
            moved.append(len(target.launcher.moves))

    monkeypatch.setattr(target, "keep", kept)
    for number in range(8):
        text = planned(works, "specbranch", params, number, 40, repeats=4)[0]
        assert text == planned(plain, "autoregressive", params, number, 40, repeats=4)[0]
    assert len(moved) > 5 and any(moved) and target.followed_right >= 0.8 * target.followed


@each_value
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
    launched, right = counts(works)
    assert launched > 10 and right >= 0.9 * launched
    monkeypatch.setattr(Serial, "_read_ahead", lambda *given: None)
    without = executor(decoders, kind)[0]
    assert [planned(without, method, params, number, length) for number, length in enumerate((9, 25, 230))] == found
    assert counts(without) == (0, 0)


def always(said: Following) -> Callable[..., Following]:
    return lambda *given: said


@pytest.mark.slow
@each_value
@pytest.mark.parametrize("kind", tiered((Serial, Streams), lambda kind: kind is Streams))
@pytest.mark.parametrize("params", tiered(PARAMS, PARAMS[1].__eq__), ids=["greedy", "hot"])
def test_a_text_that_was_read_for_nothing_changes_no_text(
    params: SamplingParams, kind: type[Serial], decoders: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft reads after every verdict, also where it has read what follows, and half of that is forgotten."""
    works, rng, ends = executor(decoders, kind)[0], random.Random(1), TextRead.ends
    monkeypatch.setattr(Planner, "_next_after", always("draft"))
    monkeypatch.setattr(TextRead, "ends", lambda *given: ends(*given) and rng.random() < 0.5)
    for number in range(2):
        expected = decode(executor(decoders, Serial)[0], "autoregressive", params, number).tokens
        assert decode(works, "specbranch", params, number).tokens == expected
        prompt = 5 + 20 * (number % 2)
        assert planned(works, "specbranch", params, number, prompt)[0][: len(expected)] == expected[:295]
    launched, right = counts(works)
    assert launched > right > 0


def test_what_is_only_read_does_not_begin_where_an_earlier_tree_began(decoders: tuple[Any, Any]) -> None:
    works = executor(decoders)[0]
    planned(works, "tree", PARAMS[0], 1)
    assert works.draft is not None and works.draft.begun is not None
    prompt = tuple(some_tokens(40))
    works.open(9, Request(PARAMS[0], 0, len(prompt)))
    now = time.perf_counter()
    report = works.run({9: Orders(Prefill(Context(0, prompt[:-1], prompt), 64))})[9]
    assert report.drafting is not None and report.drafting.start > now
    works.free(9)


def test_a_text_is_sent_from_where_it_is_held() -> None:
    text = list(range(20))
    on = Context(12, tuple(text[12:15]), text)
    assert [on.plus((15, 16), held) for held in (5, 12, 14, 15)] == [
        Context(held, tuple(text[held:17])) for held in (5, 12, 14, 15)
    ]
    assert on.plus((15, 16), 17) == Context(15, (15, 16)), "where the same was read before, it is told again"


@pytest.mark.parametrize("shaping", tiered(({"top_p": 0.8}, {"presence_penalty": 0.5}), {"top_p": 0.8}.__eq__))
def test_nothing_is_read_where_more_than_a_graph_is_wanted(shaping: dict[str, Any], decoders: tuple[Any, Any]) -> None:
    params, works = SamplingParams(temperature=0.8, max_tokens=12, **shaping), executor(decoders, Serial)[0]
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
