"""Rounds that verify looked-up text on a GPU's runner, here on the CPU: what follows on a verdict is begun with it, and
no text changes by that."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.lookup import Ngrams
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.streams import Streams
from specbranch.exec.verifier import Verifier
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.native import load_native
from tiny_models import saved, some_tokens, tiny
from toybench import PROFILE, Timeless, run_out

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY, WARM = SamplingParams(temperature=0.0, max_tokens=60), SamplingParams(temperature=0.3, max_tokens=60)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place: Path = saved(tiny("llama"), tmp_path_factory.mktemp("target"))
    return load_native(place, context_length=600, dtype="float64").decoder


def decode(runner: GpuRunner, method: str, params: SamplingParams, prompt: list[int], kind: type[Serial]) -> list[int]:
    """The text of one request, whose draft is the target itself."""
    draft = Drafter(GpuRunner(runner.decoder, 600)) if method == "specbranch" else None
    loop, config = Loop(kind(Verifier(runner), draft)), SpeculativeConfig(method=method, ngram_min=1)  # type: ignore[arg-type]
    session = Session(1, prompt, Request(params, 1, len(prompt), eos_ids=(7,)), 600)
    experience = Timeless(replace(PROFILE, asking=1e-6))
    experience.has_draft = draft is not None
    loop.join(session, METHODS[method].start(session, config, experience))
    run_out(loop)
    runner.check()
    return session.tokens


def prompts() -> list[list[int]]:
    """Texts that say everything twice; some end shortly before a page does."""
    rng = random.Random(4)
    halves = [some_tokens(length, seed=length) for length in (9, 30, 122, 125, 127, 128)]
    return [[*half, *half, *half[: rng.randrange(1, 4)]] for half in halves]


@pytest.mark.parametrize("kind", [Serial, Streams])
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("method", ["lookup", "auto"])
def test_texts_are_those_of_plain_decoding_and_what_was_begun_is_what_is_ordered(
    method: str, params: SamplingParams, kind: type[Serial], decoder: Any
) -> None:
    runner = GpuRunner(decoder, 600)
    for prompt in prompts():
        assert decode(runner, method, params, prompt, kind) == decode(
            GpuRunner(decoder, 600), "autoregressive", params, prompt, Serial
        )
    assert runner.followed > 20 and runner.followed_right >= 0.9 * runner.followed


def test_a_step_that_was_begun_for_other_tokens_is_left_alone(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    find, rng, runner = Ngrams.find, random.Random(2), GpuRunner(decoder, 600)

    def wrong(self: Ngrams, length: int, behind: tuple[int, ...] = ()) -> tuple[int, tuple[int, ...]]:
        size, found = find(self, length, behind)
        return (size, tuple(rng.randrange(131) for _ in range(5))) if behind else (size, found)

    monkeypatch.setattr(Ngrams, "find", wrong)
    for prompt in prompts():
        expected = decode(GpuRunner(decoder, 600), "autoregressive", WARM, prompt, Serial)
        assert decode(runner, "lookup", WARM, prompt, Streams) == expected
    # a round that verifies nothing but its own token has been begun, whatever came behind
    assert runner.followed > 20 and runner.followed_right < runner.followed


@pytest.mark.parametrize("shaping", [{"top_p": 0.8}, {"logprobs": 1}, {"presence_penalty": 0.5}])
def test_nothing_is_begun_where_more_than_a_graph_is_wanted(shaping: dict[str, Any], decoder: Any) -> None:
    params, runner, prompt = (
        SamplingParams(temperature=0.3, max_tokens=30, **shaping),
        GpuRunner(decoder, 600),
        prompts()[1],
    )
    expected = decode(GpuRunner(decoder, 600), "autoregressive", params, prompt, Serial)
    assert decode(runner, "lookup", params, prompt, Serial) == expected and runner.followed == 0


def test_several_sessions_and_one_that_leaves_begin_nothing_wrong(decoder: Any) -> None:
    runner = GpuRunner(decoder, 600)
    loop, texts = Loop(Serial(Verifier(runner))), prompts()[:4]
    sessions = [Session(n, text, Request(WARM, n, len(text), eos_ids=(7,)), 600) for n, text in enumerate(texts)]
    config = SpeculativeConfig(method="lookup", ngram_min=1)
    for turn in range(200):
        if turn % 7 == 0 and turn // 7 < len(sessions):
            loop.join(sessions[turn // 7], METHODS["lookup"].start(sessions[turn // 7], config, Timeless(PROFILE)))
        if turn == 9:
            loop.leave(sessions[0])
        if loop.live:
            loop.step()
    for number, session in list(enumerate(sessions))[1:]:
        request = Request(WARM, number, len(texts[number]), eos_ids=(7,))
        alone = Session(number, texts[number], request, 600)
        plain = Loop(Serial(Verifier(GpuRunner(decoder, 600))))
        plain.join(
            alone, METHODS["autoregressive"].start(alone, SpeculativeConfig(method="autoregressive"), Timeless(PROFILE))
        )
        run_out(plain)
        assert session.tokens == alone.tokens
    runner.check()
    assert runner.pool.free == runner.pool.pages


def test_what_would_reach_beyond_a_page_is_not_begun(decoder: Any) -> None:
    """Every token has been said before, so that much is looked up and little of it is right."""
    runner, prompt = GpuRunner(decoder, 600), [*range(10, 131), *range(10, 131)]
    expected = decode(GpuRunner(decoder, 600), "autoregressive", WARM, prompt, Serial)
    assert decode(runner, "lookup", WARM, prompt, Streams) == expected and len(expected) > 256
    assert runner.followed > 5 and runner.followed - runner.followed_right <= 1, "the last is asked for by nobody"
