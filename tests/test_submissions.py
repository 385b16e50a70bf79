"""Submissions over an engine without models: who makes text, who is woken and how often, what a cancel leaves."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from paced import paced
from specbranch import AsyncLLM, SamplingParams
from specbranch.answer import Chunk
from specbranch.errors import DeadlinePassed, EngineFailed, RequestCancelled
from specbranch.lab.toys.paced import PacedExecutor
from specbranch.submission import Submission
from specbranch.text.detokenizer import Detokenizer

WAIT = 60.0
ENGINE = "specbranch"  # the name of the engine's thread
ENDLESS = SamplingParams(max_tokens=60_000, ignore_eos=True, seed=1)


def run(work: Callable[[AsyncLLM], Coroutine[Any, Any, Any]], seconds: float = 0.0, **given: Any) -> Any:
    async def whole() -> Any:
        async with AsyncLLM(paced(seconds), **given) as engine:
            return await asyncio.wait_for(work(engine), WAIT)

    return asyncio.run(whole())


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.002)


def params(at: int = 0, **given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "ignore_eos": True, "seed": at, **given})


def pass_deadline(submission: Submission) -> None:
    """Let the deadline of a stream pass once its consumer has taken all tokens; the engine's thread calls this."""
    end = time.monotonic() + WAIT
    while submission._taken < submission._count and time.monotonic() < end:
        time.sleep(0.002)
    submission.tickets[0].deadline = float("-inf")


async def holding(engine: AsyncLLM) -> SamplingParams:
    """Return parameters with which the last character of a text is always held back: it may begin a stop string."""
    spoken = (await engine.generate("Smile", params(max_tokens=400))).text
    return params(max_tokens=60_000, stop=[character + "\0" for character in sorted(set(spoken))])


def test_an_event_loop_is_woken_at_most_once_a_round_for_all_its_streams() -> None:
    async def work(engine: AsyncLLM) -> tuple[int, int, list[int]]:
        loop, woken = asyncio.get_running_loop(), Counter[str]()
        wake = loop.call_soon_threadsafe

        def counted(*given: Any, **named: Any) -> Any:
            woken[threading.current_thread().name] += 1
            return wake(*given, **named)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]

        async def read(at: int) -> int:
            return len("".join([chunk.text async for chunk in engine.submit("Smile", params(at), streams=True)]))

        lengths = await asyncio.gather(*(read(at) for at in range(16)))
        executor = engine._llm.scheduler.loop.executor
        assert isinstance(executor, PacedExecutor)
        return woken[ENGINE], executor.rounds, lengths

    woken, rounds, lengths = run(work, 0.001, max_batch=16)
    assert 1 < woken <= rounds < 200 and min(lengths) > 40


@pytest.mark.parametrize("stop", [(), ("never said",)])
@pytest.mark.parametrize("streams", [True, False])
def test_the_engines_thread_makes_text_for_stop_strings_alone(
    monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...], streams: bool
) -> None:
    decoded, inner = Counter[str](), Detokenizer.feed_one

    def counted(reader: Detokenizer, token: int) -> str:
        decoded[threading.current_thread().name] += 1
        return inner(reader, token)

    monkeypatch.setattr(Detokenizer, "feed_one", counted)

    async def work(engine: AsyncLLM) -> None:
        await engine.submit("Smile", params(stop=stop), streams=streams).output()

    run(work)
    assert decoded == Counter({ENGINE if stop else "MainThread": 40})


def test_a_long_answer_is_decoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, inner = set[str](), Detokenizer.feed_one

    def noted(reader: Detokenizer, token: int) -> str:
        decoded.add(threading.current_thread().name)
        return inner(reader, token)

    monkeypatch.setattr(Detokenizer, "feed_one", noted)

    async def work(engine: AsyncLLM) -> Any:
        return await engine.submit("Smile", params(max_tokens=1100)).output()

    assert len(run(work).token_ids) == 1100
    assert len(decoded) == 1 and decoded.isdisjoint((ENGINE, "MainThread"))


def test_a_consumer_that_is_behind_gets_fewer_chunks_with_the_same_text_and_is_paused() -> None:
    async def work(engine: AsyncLLM) -> tuple[list[Chunk], list[Chunk], int]:
        asked = partial(engine.submit, "Smile", params(max_tokens=400), streams=True)
        quick = [chunk async for chunk in asked()]
        slow, other, held = asked(), engine.submit("Smile", params(1, max_tokens=300)), list[Chunk]()
        await until(lambda: engine.stats().resting == 1)
        behind = slow._count
        await other.output()  # it is not delayed
        assert engine.stats().resting == 1 and slow._count == behind
        while not held or held[-1].output is None:
            await until(lambda: slow._count - slow._taken > 32 or slow._is_over())
            if (chunk := slow.take()) is not None:
                held.append(chunk)
        return quick, held, behind

    quick, held, behind = run(work, 0.0005, buffer=32)
    assert behind == 33 and len(held) <= 13 < len(quick)
    assert "".join(one.text for one in held) == "".join(one.text for one in quick) == held[-1].output.text
    pieces = [piece for chunk in held for piece in chunk.pieces]
    assert pieces == list(quick[-1].output.pieces) and len(pieces) == 400


async def _held(engine: AsyncLLM) -> Submission:
    """The engine has not seen it yet."""
    gate = threading.Event()
    engine._thread.post(lambda: gate.wait(WAIT) and None)
    one = engine.submit("Smile", ENDLESS, streams=True)
    asyncio.get_running_loop().call_later(0.02, gate.set)
    return one


async def _queued(engine: AsyncLLM) -> Submission:
    first = engine.submit("Smile", ENDLESS)
    one = engine.submit("Smile", ENDLESS, streams=True)
    await until(lambda: engine.stats().waiting == 1)
    asyncio.get_running_loop().call_later(0.05, first.cancel)
    return one


async def _running(engine: AsyncLLM) -> Submission:
    one = engine.submit("Smile", ENDLESS, streams=True)
    async for _ in one:
        return one
    raise AssertionError


async def _whole(engine: AsyncLLM) -> Submission:
    one = engine.submit("Smile", ENDLESS)
    await until(lambda: engine.stats().running == 1)
    return one


async def _paused(engine: AsyncLLM) -> Submission:
    one = engine.submit("Smile", ENDLESS, streams=True)
    await until(lambda: engine.stats().resting == 1)
    return one


@pytest.mark.parametrize("state", [_held, _queued, _running, _whole, _paused])
@pytest.mark.parametrize("twice", [True, False])
def test_a_request_may_be_cancelled_in_every_state(
    state: Callable[[AsyncLLM], Coroutine[Any, Any, Submission]], twice: bool
) -> None:
    async def work(engine: AsyncLLM) -> None:
        one = await state(engine)
        waiting = asyncio.ensure_future(one.output())  # whoever waits learns of the end
        await asyncio.sleep(0)
        for _ in range(1 + twice):
            one.cancel()
        with pytest.raises(RequestCancelled):
            await waiting
        with pytest.raises(RequestCancelled):
            async for _ in one:
                pass
        assert one.take() is None
        await until(lambda: not engine.stats().running and not engine.stats().waiting)
        assert not engine._thread._open and engine.stats().finished == 0
        assert (await engine.generate("Smile", params())).finish_reason == "length"

    run(work, buffer=16, max_batch=1)


def test_a_finished_request_that_is_cancelled_keeps_its_output() -> None:
    async def work(engine: AsyncLLM) -> None:
        one = engine.submit("Smile", params(), streams=True)
        await until(lambda: engine.stats().finished == 1)
        one.cancel()
        chunks = [chunk async for chunk in one]
        one.cancel()
        assert "".join(chunk.text for chunk in chunks) == (await one.output()).text != ""
        assert one.take() is None and engine.stats().cancelled == 0

    run(work)


def test_text_that_cannot_be_made_ends_its_stream_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(engine: AsyncLLM) -> Any:
        bad, good = (engine.submit("Smile", params(at, max_tokens=300), streams=True) for at in range(2))
        await until(lambda: bool(bad.answers))
        monkeypatch.setattr(bad.answers[0], "take", lambda count: 1 / 0)
        with pytest.raises(EngineFailed, match="ZeroDivisionError"):
            async for _ in bad:
                pass
        return [chunk async for chunk in good][-1].output

    assert len(run(work, 0.0005).token_ids) == 300


def test_whoever_waits_no_longer_is_forgotten() -> None:
    async def work(engine: AsyncLLM) -> None:
        one = await _whole(engine)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.to_thread(one.result, 0.001)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(one.output(), 0.001)
        assert one._listeners == [] and one._awaited == 0
        one.cancel()

    run(work)


def test_threads_and_tasks_read_streams_side_by_side() -> None:
    async def work(engine: AsyncLLM) -> tuple[list[str], list[str]]:
        async def in_task(at: int) -> str:
            return "".join([chunk.text async for chunk in engine.submit("Smile", params(at), streams=True)])

        def in_thread(at: int) -> str:
            return "".join(chunk.text for chunk in engine.submit("Smile", params(at), streams=True))

        tasks = asyncio.gather(*(in_task(at) for at in range(6)))
        threads = asyncio.gather(*(asyncio.to_thread(in_thread, at) for at in range(6)))
        return await tasks, await threads

    tasks, threads = run(work, 0.0005)
    assert tasks == threads and len(set(tasks)) == 6


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_text_held_back_for_a_stop_string_comes_with_the_deadline(kind: str) -> None:
    async def whole() -> list[Chunk]:
        async with AsyncLLM(paced(kind=kind)) as engine:
            stream = engine.submit("Smile", await holding(engine), {"deadline": WAIT}, streams=True)
            first = await anext(aiter(stream))
            engine._thread.post(partial(pass_deadline, stream))
            return [first] + [chunk async for chunk in stream]

    chunks = asyncio.run(whole())
    output = chunks[-1].output
    assert output is not None and isinstance(output.error, DeadlinePassed)
    assert not chunks[-1].pieces and chunks[-1].text
    assert "".join(chunk.text for chunk in chunks) == output.text == "".join(piece.text for piece in output.pieces)


def test_a_stream_sends_the_text_held_back_before_it_raises_that_it_is_late() -> None:
    async def work(engine: AsyncLLM) -> None:
        held, heard, taken = await holding(engine), "", set[Submission]()

        def end_streams() -> None:
            taken.update(engine._thread._open)
            for stream in engine._thread._open:
                pass_deadline(stream)

        with pytest.raises(DeadlinePassed):
            async for chunk in engine.stream("Smile", held, {"deadline": WAIT}):
                heard += chunk.text
                engine._thread.post(end_streams)
        (stream,) = taken
        assert heard and heard == stream.result(0).text

    run(work)
