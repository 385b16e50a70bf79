"""Rounds that verify looked-up text on a GPU's runner, here on the CPU: the next step is launched with the verdict, and
no text changes."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from counting_runner import CountingRunner
from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.lookup import Ngrams
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.pages import PAGE
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.streams import Streams
from specbranch.exec.verifier import Verifier
from specbranch.models.forward import transfer
from specbranch.models.gpu.chains import ChainSheets, chain_choosing, chain_rows
from specbranch.models.gpu.layout import SMALLEST_BUCKET, pack, views
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.loading import load_native
from tiers import each_value, tiered
from tiny_models import saved, some_tokens, tiny
from toybench import PROFILE, Timeless, run_out

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY, WARM = SamplingParams(temperature=0.0, max_tokens=24), SamplingParams(temperature=0.3, max_tokens=24)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = saved(tiny("llama"), tmp_path_factory.mktemp("target"))
    return load_native(folder, context_length=600, dtype="float64").decoder


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


@cache
def plain(decoder: Any, temperature: float, prompt: tuple[int, ...]) -> list[int]:
    """The text of plain decoding, which many tests compare theirs with."""
    params = GREEDY if temperature == 0.0 else WARM
    return decode(GpuRunner(decoder, 600), "autoregressive", params, list(prompt), Serial)


def prompts() -> list[list[int]]:
    """Texts that say everything twice; some end shortly before a page does."""
    rng = random.Random(4)
    halves = [some_tokens(length, seed=length) for length in (9, 30, 125, 128)]
    return [[*half, *half, *half[: rng.randrange(1, 4)]] for half in halves]


@each_value
@pytest.mark.parametrize("kind", [Serial, Streams])
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("method", ["lookup", "auto"])
def test_texts_are_those_of_plain_decoding_and_what_was_launched_is_what_is_ordered(
    method: str, params: SamplingParams, kind: type[Serial], decoder: Any
) -> None:
    runner = CountingRunner(decoder, 600)
    for prompt in prompts():
        expected = plain(decoder, params.temperature, tuple(prompt))
        assert decode(runner, method, params, prompt, kind) == expected
    least = 20 if method == "lookup" else 5  # a planned method launches plain rounds ahead, not behind a verdict
    assert runner.followed > least and runner.followed_right >= 0.9 * runner.followed


@pytest.mark.slow
@pytest.mark.parametrize("params", tiered((GREEDY, WARM), WARM.__eq__), ids=["greedy", "warm"])
def test_what_was_written_out_before_a_verdict_is_taken(
    params: SamplingParams, decoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_here_already", lambda: False)  # so that there is time to write
    taken, take = [], ChainSheets.take

    def noting(self: ChainSheets, *given: Any) -> Any:
        taken.append(take(self, *given))
        return taken[-1]

    monkeypatch.setattr(ChainSheets, "take", noting)
    runner = CountingRunner(decoder, 600)
    for prompt in prompts():
        expected = plain(decoder, params.temperature, tuple(prompt))
        assert decode(runner, "lookup", params, prompt, Streams) == expected
    assert sum(step is not None for step in taken) > 0.7 * len(taken) > 20
    assert runner.followed_right >= 0.9 * runner.followed


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_a_sheet_holds_what_is_packed_for_its_rows(params: SamplingParams, decoder: Any) -> None:
    runner, request = GpuRunner(decoder, 600), Request(params, 5, 20)
    runner.open(0, request)
    runner.extend(0, some_tokens(270))
    table, spare = runner.sequences[0].table, runner.pool.pages * PAGE
    sheets = ChainSheets(spare, SMALLEST_BUCKET, 316)
    starts = (3, 40, 190, 200, 256, 300)
    sheets.write(0, request, table, (*starts, 301), lambda: False, (16, 4, 1))
    assert sheets.take(0, table, 301, some_tokens(15), None) is None, "a row would lie beyond the last position"
    moves = np.array([[5, 9], [3, 4]])
    for start in starts:
        for count in (16, 16, 11, 4, 3, 1):
            for wanted in (moves, None):
                tokens = some_tokens(count, seed=start + count)
                found = sheets.take(0, table, start, tokens, wanted)
                rows = chain_rows(table, tokens, start)
                packed, bucket = pack([rows], spare, chain_choosing(request, rows), wanted)
                assert found is not None and found[1] == bucket
                there, expected = (views(torch.from_numpy(one), bucket) for one in (found[0], packed))
                for name in ("tokens", "positions", "slots", "shared", "own_count"):
                    assert torch.equal(getattr(there, name)[:count], getattr(expected, name)[:count]), name
                for row, length in enumerate(expected.own_count[:count].tolist()):
                    assert torch.equal(there.own[row, :length], expected.own[row, :length])
                assert torch.equal(there.choosing[:, :count], expected.choosing[:, :count])
                assert torch.equal(there.tables, expected.tables)
                made = int(there.counts[0])
                assert made == int(expected.counts[0]) and torch.equal(there.moves[:, :made], expected.moves[:, :made])
    assert sheets.take(0, table, 200, some_tokens(17), None) is None
    assert sheets.take(1, table, 200, some_tokens(3), None) is None
    sheets.forget()
    assert sheets.take(0, table, 200, some_tokens(3), None) is None
    stopped = ChainSheets(spare, SMALLEST_BUCKET, 316)
    stopped.write(0, request, table, starts, lambda: True, (1,))
    assert stopped.take(0, table, 3, [8], None) and stopped.take(0, table, 40, [8], None) is None


@pytest.mark.slow
def test_a_step_that_was_launched_for_other_tokens_is_left_alone(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    find, rng, runner = Ngrams.find, random.Random(2), CountingRunner(decoder, 600)

    def wrong(self: Ngrams, length: int, behind: tuple[int, ...] = ()) -> tuple[int, tuple[int, ...]]:
        size, found = find(self, length, behind)
        return (size, tuple(rng.randrange(131) for _ in range(5))) if behind else (size, found)

    monkeypatch.setattr(Ngrams, "find", wrong)
    for prompt in prompts():
        expected = plain(decoder, WARM.temperature, tuple(prompt))
        assert decode(runner, "lookup", WARM, prompt, Streams) == expected
    # a round that verifies nothing but its own token has been launched, whatever came behind
    assert runner.followed > 20 and runner.followed_right < runner.followed


@pytest.mark.parametrize("shaping", [{"top_p": 0.8}, {"logprobs": 1}, {"presence_penalty": 0.5}])
def test_nothing_is_launched_where_more_than_a_graph_is_wanted(shaping: dict[str, Any], decoder: Any) -> None:
    params, runner, prompt = (
        SamplingParams(temperature=0.3, max_tokens=30, **shaping),
        CountingRunner(decoder, 600),
        prompts()[1],
    )
    expected = decode(GpuRunner(decoder, 600), "autoregressive", params, prompt, Serial)
    assert decode(runner, "lookup", params, prompt, Serial) == expected and runner.followed == 0


@pytest.mark.slow
def test_several_sessions_and_one_that_leaves_begin_nothing_wrong(decoder: Any) -> None:
    runner = CountingRunner(decoder, 600)
    loop, texts = Loop(Serial(Verifier(runner))), prompts()[:4]
    sessions = [Session(n, text, Request(WARM, n, len(text), eos_ids=(7,)), 600) for n, text in enumerate(texts)]
    config = SpeculativeConfig(method="lookup", ngram_min=1)
    for turn in range(200):
        if turn % 7 == 0 and turn // 7 < len(sessions):
            loop.join(sessions[turn // 7], METHODS["lookup"].start(sessions[turn // 7], config, Timeless(PROFILE)))
        if turn == 9:
            loop.remove(sessions[0])
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


@pytest.mark.slow
def test_a_step_that_would_reach_beyond_a_page_is_not_launched_ahead(decoder: Any) -> None:
    """Every token has been said before, so that much is looked up and little of it is right."""
    runner, prompt = CountingRunner(decoder, 600), [*range(10, 131), *range(10, 131)]
    expected = decode(GpuRunner(decoder, 600), "autoregressive", WARM, prompt, Serial)
    assert decode(runner, "lookup", WARM, prompt, Streams) == expected and len(expected) > 256
    assert runner.followed > 5 and runner.followed - runner.followed_right <= 1, "the last is asked for by nobody"
