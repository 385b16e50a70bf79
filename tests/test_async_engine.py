"""AsyncLLM as a user has it: many tasks and threads, one pair of models."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from specbranch import LLM, AsyncLLM, RequestOptions, SamplingParams, experiences
from specbranch.answer import Answer, Chunk
from specbranch.core.methods import METHODS
from specbranch.decoding import Decoding
from specbranch.errors import BadParameter, DeadlinePassed, EngineFailed, RequestCancelled, SpecBranchError
from tiers import tiered

PROMPT = "A branch is a guess about what the large model will say next."
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True)
LONG = SamplingParams(temperature=0.8, seed=3, max_tokens=400, ignore_eos=True)
WAIT = 60.0  # seconds after which a test gives up


def load(pair: tuple[str, str], clock: str | None = None, **given: Any) -> LLM:
    return LLM(*pair, dtype="float64", device="cpu", options={"context_length": 480, "clock": clock}, **given)


@pytest.fixture(scope="module")
def reference(pair: tuple[str, str]) -> Iterator[LLM]:
    with load(pair, method="autoregressive") as llm:
        yield llm


def run(pair: tuple[str, str], work: Callable[[AsyncLLM], Coroutine[Any, Any, Any]], **given: Any) -> Any:
    """Do some work with an engine, within a time."""

    async def whole() -> Any:
        async with AsyncLLM(load(pair), **given) as engine:
            return await asyncio.wait_for(work(engine), WAIT)

    return asyncio.run(whole())


MIXED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.8, "seed": 1}, {}),
    ({"temperature": 0.0, "repetition_penalty": 1.3}, {"method": "specbranch"}),
    ({"temperature": 0.7, "seed": 2, "presence_penalty": 0.5, "logprobs": 2}, {"method": "tree"}),
    ({"temperature": 1.0, "seed": 3, "top_p": 0.9, "stop": ("e",)}, {"speculative": {"method": "pearl"}}),
    ({"temperature": 1.0, "seed": 4, "top_k": 5, "n": 3}, {"speculative": False}),
    ({"temperature": 0.6, "seed": 5, "min_p": 0.1}, {"method": "lookup", "priority": 2}),
    ({"temperature": 0.9, "seed": 6, "frequency_penalty": 0.4}, {"speculative": {"policy": "confidence"}}),
    ({"temperature": 0.9, "seed": 7, "logit_bias": {9: 3.0}}, {"method": "speculative", "deadline": WAIT}),
    ({"temperature": 0.0}, {"method": "lookahead"}),
    ({"temperature": 0.9, "seed": 8}, {"method": "auto"}),
]
PROMPTS: list[Any] = [PROMPT, "Smile", [5, 6, 7] * 30, [{"role": "user", "content": "Hello"}], PROMPT * 4]


def test_requests_of_every_kind_at_once_give_what_each_gives_alone(pair: tuple[str, str], reference: LLM) -> None:
    asked = [
        (PROMPTS[at % len(PROMPTS)], SamplingParams(max_tokens=12, ignore_eos=True, **params), how)
        for at, (params, how) in enumerate(MIXED)
    ]

    async def work(engine: AsyncLLM) -> list[Any]:
        return await asyncio.gather(*(engine.generate(prompt, params, how) for prompt, params, how in asked))

    outputs = run(pair, work)
    for (prompt, params, how), got in zip(asked, outputs, strict=True):
        is_chat = isinstance(prompt[0], dict)
        expected = reference.chat(prompt, params) if is_chat else reference.generate([prompt], params)[0]
        assert (got.text, got.token_ids, got.finish_reason) == (
            expected.text,
            expected.token_ids,
            expected.finish_reason,
        )
        assert [one.token_ids for one in got.alternatives] == [one.token_ids for one in expected.alternatives]
        assert (got.logprobs is None) == (expected.logprobs is None) and got.method == how.get("method", got.method)
        for ours, theirs in zip(got.logprobs or (), expected.logprobs or (), strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("method", tiered(("speculative", "pearl"), "pearl".__eq__))
def test_the_ratio_rule_gives_the_same_tokens_in_a_batch(pair: tuple[str, str], method: str) -> None:
    config = {"method": method, "rule": "ratio"}
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=20, ignore_eos=True) for seed in range(5)]

    async def work(engine: AsyncLLM) -> list[Any]:
        return await asyncio.gather(*(engine.generate(PROMPT * 3, one, {"speculative": config}) for one in params))

    with load(pair, speculative=config) as alone:
        expected = [alone.generate(PROMPT * 3, one).token_ids for one in params]
    assert [output.token_ids for output in run(pair, work)] == expected


@pytest.mark.slow
def test_streams_add_up_to_their_answers(pair: tuple[str, str], reference: LLM) -> None:
    async def one(engine: AsyncLLM, prompt: str) -> list[Chunk]:
        return [chunk async for chunk in engine.stream(prompt, PARAMS)]

    async def work(engine: AsyncLLM) -> list[list[Chunk]]:
        return await asyncio.gather(*(one(engine, prompt) for prompt in (PROMPT, "Smile", PROMPT)))

    for prompt, chunks in zip((PROMPT, "Smile", PROMPT), run(pair, work), strict=True):
        output = chunks[-1].output
        assert output is not None and output.text == reference.generate(prompt, PARAMS).text
        assert "".join(chunk.text for chunk in chunks) == output.text and len(chunks) > 3
        assert all(chunk.output is None for chunk in chunks[:-1])


@pytest.mark.slow
def test_threads_send_requests_too(pair: tuple[str, str], reference: LLM) -> None:
    engine, found = AsyncLLM(load(pair)), dict[int, Any]()

    def ask(at: int) -> None:
        params = SamplingParams(temperature=0.8, seed=at, max_tokens=20, ignore_eos=True)
        if at % 2:
            found[at] = engine.submit(PROMPT, params).result(WAIT).token_ids
        else:
            *_, last = engine.submit(PROMPT, params, streams=True)
            found[at] = last.output.token_ids if last.output else None

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    engine.shut_down()
    for at in range(6):
        params = SamplingParams(temperature=0.8, seed=at, max_tokens=20, ignore_eos=True)
        assert found[at] == reference.generate(PROMPT, params).token_ids


async def _until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["close the iterator", "cancel the task", "cancel the submission"])
def test_a_request_that_is_cancelled_is_gone_and_disturbs_no_other(
    pair: tuple[str, str], reference: LLM, way: str
) -> None:
    async def work(engine: AsyncLLM) -> Any:
        other = asyncio.ensure_future(engine.generate(PROMPT, PARAMS))
        if way == "close the iterator":
            async with aclosing(engine.stream(PROMPT, LONG)) as chunks:  # type: ignore[type-var]
                await anext(chunks)
        elif way == "cancel the task":
            task = asyncio.ensure_future(engine.generate(PROMPT, LONG))
            await _until(lambda: engine.stats().running == 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            submission = engine.submit(PROMPT, LONG)
            submission.cancel()
            with pytest.raises(RequestCancelled):
                await submission.output()
        output = await other
        await _until(lambda: engine.stats().running == 0)
        assert engine.stats().cancelled == 1 and engine.stats().finished == 1
        assert all(kv_slots.free == kv_slots.total for kv_slots in engine.stats().kv_slots)
        return output

    assert run(pair, work).token_ids == reference.generate(PROMPT, PARAMS).token_ids


def test_a_slow_consumer_rests_and_holds_up_nobody(pair: tuple[str, str], reference: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=50, ignore_eos=True)

    async def work(engine: AsyncLLM) -> Any:
        slow = engine.stream("Smile", params)
        chunks = [await anext(slow)]
        await _until(lambda: engine.stats().resting == 1)
        behind = engine.stats().tokens
        quick = await engine.generate(PROMPT, PARAMS)
        assert engine.stats().resting == 1 and engine.stats().tokens <= behind + 30
        chunks += [chunk async for chunk in slow]
        return quick, chunks

    quick, chunks = run(pair, work, max_batch=1, buffer=8)
    assert quick.token_ids == reference.generate(PROMPT, PARAMS).token_ids
    assert chunks[-1].output.token_ids == reference.generate("Smile", params).token_ids
    assert "".join(chunk.text for chunk in chunks) == chunks[-1].output.text


def test_a_request_past_its_deadline_ends_with_what_it_has(pair: tuple[str, str], reference: LLM) -> None:
    async def work(engine: AsyncLLM) -> Any:
        waiting = engine.submit(PROMPT, LONG)
        late = engine.submit("Smile", LONG, {"deadline": 1e-6})
        with pytest.raises(DeadlinePassed, match="not finished within"):
            await engine.generate(PROMPT, LONG, {"deadline": 1e-6})
        output = await late.output()
        waiting.cancel()
        return output

    output = run(pair, work, max_batch=1)
    assert output.finish_reason == "error" and isinstance(output.error, DeadlinePassed)
    few = replace(LONG, max_tokens=len(output.token_ids) + 1)
    assert output.token_ids == reference.generate("Smile", few).token_ids[:-1]


def test_closing_finishes_what_there_is_or_cancels_it(pair: tuple[str, str]) -> None:
    async def drained() -> Any:
        engine = AsyncLLM(load(pair))
        submissions = [engine.submit(PROMPT, PARAMS) for _ in range(3)]
        await engine.close()
        with pytest.raises(BadParameter, match="was closed"):
            engine.submit(PROMPT, PARAMS)
        return [submission.result(0) for submission in submissions]

    async def dropped() -> None:
        engine = AsyncLLM(load(pair))
        submissions = [engine.submit(PROMPT, LONG) for _ in range(3)]
        await engine.close(drain=False)
        for submission in submissions:
            with pytest.raises(RequestCancelled, match="closed before"):
                await submission.output()

    assert {len(output.token_ids) for output in asyncio.run(drained())} == {30}
    asyncio.run(dropped())


def test_an_error_in_the_thread_reaches_every_caller_and_the_next_request_is_served(
    pair: tuple[str, str], reference: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(engine: AsyncLLM) -> Any:
        runner, failing = engine._llm.target_runner, True
        verify = runner.verify

        def broken(*given: Any) -> Any:
            if failing:
                raise RuntimeError("CUDA error: an illegal memory access\nand more")
            return verify(*given)

        monkeypatch.setattr(runner, "verify", broken)
        answers = [engine.generate(PROMPT, PARAMS) for _ in range(3)]
        stream = engine.stream(PROMPT, PARAMS)
        for error in await asyncio.gather(*answers, anext(stream), return_exceptions=True):
            assert isinstance(error, SpecBranchError | RuntimeError) and "illegal memory access" in str(error)
        failing = False
        return await engine.generate(PROMPT, PARAMS)

    assert run(pair, work).token_ids == reference.generate(PROMPT, PARAMS).token_ids


def test_a_thread_that_dies_leaves_nobody_waiting(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(engine: AsyncLLM) -> None:
        def dying(*given: Any) -> None:
            raise SystemExit("gone")

        monkeypatch.setattr(engine._llm.scheduler.loop, "step", dying)
        for error in await asyncio.gather(*(engine.generate(PROMPT, PARAMS) for _ in range(3)), return_exceptions=True):
            assert isinstance(error, EngineFailed | BadParameter)

    run(pair, work)


MISUSES: dict[str, tuple[Callable[[AsyncLLM], Any], str]] = {
    "an empty prompt": (lambda engine: engine.submit([]), "prompt is empty"),
    "a long prompt": (lambda engine: engine.submit([5] * 500), "the context holds 480"),
    "an unknown method": (
        lambda engine: engine.submit("x", options={"method": "specbranhc"}),
        "Did you mean 'specbranch'",
    ),
    "an unknown parameter": (lambda engine: engine.submit("x", {"temprature": 1}), "Did you mean 'temperature'"),
    "a stream of several": (lambda engine: engine.stream("x", {"n": 2}), "a stream carries one sample"),
    "no deadline": (lambda engine: engine.submit("x", options={"deadline": 0}), "deadline is 0"),
    "a deadline that is no number": (
        lambda engine: engine.submit("x", options={"deadline": float("nan")}),
        "deadline is nan",
    ),
    "a deadline that is over": (lambda engine: engine.submit("x", options={"deadline": -1.0}), "deadline is -1.0"),
    "a deadline that is said": (lambda engine: engine.submit("x", options={"deadline": True}), "deadline is True"),
    "a priority in words": (lambda engine: engine.submit("x", options={"priority": "high"}), "priority is 'high'"),
    "an unknown argument": (lambda engine: engine.submit("x", methd="tree"), "Did you mean 'method'"),
    "an unknown option": (lambda engine: engine.submit("x", None, {"prioritty": 1}), "Did you mean 'priority'"),
    "a number for options": (lambda engine: engine.submit("x", None, 5), "expected RequestOptions or a mapping"),
    "the oracle": (
        lambda engine: engine.submit("x", options={"speculative": {"policy": "oracle"}}),
        "only a replay does",
    ),
}


def test_misuse_gets_a_sentence_at_once(pair: tuple[str, str]) -> None:
    async def work(engine: AsyncLLM) -> None:
        for do, sentence in MISUSES.values():
            with pytest.raises(SpecBranchError, match=sentence):
                do(engine)
        assert engine.stats().submitted == 0

    run(pair, work)
    with load(pair) as llm, pytest.raises(BadParameter, match="max_batch is 0"):
        AsyncLLM(llm, max_batch=0)


@pytest.mark.slow
def test_every_method_can_be_asked_for_by_a_request(pair: tuple[str, str], reference: LLM) -> None:
    async def work(engine: AsyncLLM) -> list[Any]:
        return await asyncio.gather(*(engine.generate(PROMPT, PARAMS, {"method": name}) for name in METHODS))

    outputs = run(pair, work)
    assert [output.method for output in outputs] == list(METHODS)
    assert {output.token_ids for output in outputs} == {reference.generate(PROMPT, PARAMS).token_ids}


@pytest.mark.parametrize("method", tiered(("autoregressive", "pearl", "specbranch"), "specbranch".__eq__))
def test_a_watcher_sees_every_token(pair: tuple[str, str], reference: LLM, method: str) -> None:
    from specbranch.serve.frames import Film, Frame

    film, frames = Film(), list[Frame]()

    async def work(engine: AsyncLLM) -> Any:
        def see(*reported: Any) -> None:
            frames.extend(filter(None, [film.see(*reported)]))

        beside = engine.submit("Smile", PARAMS)  # without a watcher
        output = await engine.submit(PROMPT, PARAMS, {"method": method, "on_round": see}).output()
        await beside.output()
        return output

    output = run(pair, work)
    added = [[*(frame.nodes[node].token for node in frame.path), frame.token][: frame.added] for frame in frames]
    assert [token for tokens in added for token in tokens] == list(output.token_ids)
    assert output.token_ids == reference.generate(PROMPT, PARAMS).token_ids


@pytest.mark.slow
def test_a_modelled_answer_is_made_between_the_rounds_of_others(pair: tuple[str, str], reference: LLM) -> None:
    async def work(engine: AsyncLLM) -> Any:
        other = asyncio.ensure_future(engine.generate("Smile", PARAMS))
        made = [chunk async for chunk in engine.aside(lambda llm: llm.modelled("c10").stream(PROMPT, PARAMS))]
        left = engine.aside(lambda llm: llm.modelled("c10").stream(PROMPT, LONG))
        await anext(left)
        await left.aclose()
        output = await other
        await engine.generate("Smile", PARAMS)  # a round later
        assert all(kv_slots.free == kv_slots.total for kv_slots in engine.stats().kv_slots)
        with pytest.raises(BadParameter, match="cost profile"):
            await anext(engine.aside(lambda llm: llm.modelled("c11").stream(PROMPT, PARAMS)))
        return output, made

    other, made = run(pair, work)
    assert other.token_ids == reference.generate("Smile", PARAMS).token_ids
    assert made[-1].output.token_ids == reference.generate(PROMPT, PARAMS).token_ids
    # on a modelled clock plain decoding takes 10 ms a token
    with load(pair) as llm:
        plain = llm.modelled("c10").using("autoregressive").generate(PROMPT, PARAMS)
    assert plain.stats["tokens_per_second"] == pytest.approx(100.0)


def test_whoever_looks_on_has_a_chunk_a_round_so_that_a_long_prompt_holds_up_nobody(pair: tuple[str, str]) -> None:
    rounds: list[Any] = []
    with load(pair) as llm:
        params, loop = SamplingParams(max_tokens=5, ignore_eos=True), llm.scheduler.loop
        loop.limits = replace(
            loop.limits, prompt_tokens_alone=loop.limits.prefill_chunk
        )  # as an AsyncLLM has them, but for 8
        chunks = list(llm.modelled("c10").stream(list(range(5, 400)), params, lambda *seen: rounds.append(seen)))
    assert len(chunks) == len(rounds) and len([one for one in chunks if not one.pieces]) > 3
    assert "".join(one.text for one in chunks) == chunks[-1].output.text  # type: ignore[union-attr]


@pytest.mark.slow
def test_time_is_not_modelled_for_a_draft_in_another_process(pair: tuple[str, str]) -> None:
    with load(pair, executor="process") as llm, pytest.raises(BadParameter, match="process of its own"):
        llm.modelled("c10")


@pytest.mark.parametrize("deadline", tiered((1e10, float("inf"), 10**400), (10**400).__eq__))
def test_no_deadline_is_too_far_away(pair: tuple[str, str], deadline: float) -> None:
    async def work(engine: AsyncLLM) -> Any:
        slow = engine.submit(PROMPT, LONG, {"deadline": deadline}, streams=True)
        await _until(lambda: engine.stats().resting == 1)  # and the thread waits for nothing but the deadline
        output = await engine.generate(PROMPT, PARAMS, {"deadline": deadline})
        assert engine.is_alive
        slow.cancel()
        return output

    assert len(run(pair, work, buffer=4).token_ids) == 30


def test_a_result_may_be_waited_for_longer_than_a_clock_counts(pair: tuple[str, str]) -> None:
    async def work(engine: AsyncLLM) -> Any:
        return await asyncio.to_thread(engine.submit(PROMPT, PARAMS).result, 1e12)

    assert len(run(pair, work).token_ids) == 30


@pytest.mark.parametrize("by", ["a thread", "a task"])
def test_a_stream_may_be_waited_for_as_a_whole(pair: tuple[str, str], reference: LLM, by: str) -> None:
    async def work(engine: AsyncLLM) -> Any:
        stream = engine.submit(PROMPT, PARAMS, streams=True)
        await _until(lambda: engine.stats().resting == 1)
        output = await (asyncio.to_thread(stream.result, WAIT) if by == "a thread" else stream.output())
        chunks = [chunk async for chunk in stream]  # nothing of it is lost
        assert "".join(chunk.text for chunk in chunks) == output.text
        return output

    assert run(pair, work, buffer=4).token_ids == reference.generate(PROMPT, PARAMS).token_ids


def test_a_result_that_is_not_waited_for_any_more_lets_its_stream_rest(pair: tuple[str, str]) -> None:
    async def work(engine: AsyncLLM) -> None:
        stream = engine.submit(PROMPT, LONG, streams=True)
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(stream.result, 0.0)
        await _until(lambda: engine.stats().resting == 1)
        stream.cancel()

    run(pair, work, buffer=4)


def test_on_a_modelled_clock_a_resting_request_has_its_deadline_too(pair: tuple[str, str]) -> None:
    async def whole() -> Any:
        async with AsyncLLM(load(pair, clock="c10", method="autoregressive"), buffer=4) as engine:
            stream = engine.submit(PROMPT, LONG, {"deadline": 0.5}, streams=True)  # modelled seconds take no time
            await asyncio.wait_for(_until(lambda: engine.stats().failed == 1), WAIT)
            return [chunk async for chunk in stream][-1].output

    output = asyncio.run(whole())
    assert isinstance(output.error, DeadlinePassed) and "within its 0.5 s" in str(output.error)


def _grumbling(llm: LLM) -> Iterator[int]:
    try:
        yield from range(1, 9)
    finally:
        raise OSError("it does not close")


def _endless(llm: LLM) -> Iterator[int]:
    raise StopIteration("nothing to begin with")


def test_no_task_in_the_thread_ends_it(pair: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    async def work(engine: AsyncLLM) -> Any:
        made = engine.aside(_grumbling)
        assert await anext(made) == 1
        await made.aclose()
        with pytest.raises(RuntimeError, match="before it had begun"):
            await anext(engine.aside(_endless))
        engine._thread.post(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
        return await engine.generate(PROMPT, PARAMS)

    assert len(run(pair, work).token_ids) == 30
    assert "it does not close" in caplog.text and "ZeroDivisionError" in caplog.text


def test_a_text_that_cannot_be_made_ends_its_own_request(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Answer.output

    def failing(answer: Answer) -> Any:
        if answer.session.request.seed == 77:
            raise ValueError("no such text")
        return whole(answer)

    monkeypatch.setattr(Answer, "output", failing)

    async def work(engine: AsyncLLM) -> Any:
        other = engine.submit(PROMPT, replace(PARAMS, max_tokens=90))
        with pytest.raises(EngineFailed, match="no such text"):
            await engine.generate(PROMPT, replace(PARAMS, seed=77))
        return await other.output()

    assert len(run(pair, work).token_ids) == 90


def test_a_watcher_that_raises_is_left_alone_by_its_request_and_all_others(
    pair: tuple[str, str], reference: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(engine: AsyncLLM) -> list[Any]:
        def stumbling(*reported: Any) -> None:
            raise ZeroDivisionError("of the watcher")

        asked = [engine.submit(PROMPT, PARAMS, {"on_round": stumbling}), engine.submit("Smile", PARAMS)]
        return [await one.output() for one in asked]

    outputs = run(pair, work)
    assert [one.token_ids for one in outputs] == [
        reference.generate(prompt, PARAMS).token_ids for prompt in (PROMPT, "Smile")
    ]
    assert caplog.text.count("on_round watcher raised") == 1


@pytest.mark.slow
def test_samples_are_sent_all_or_none(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AsyncLLM(load(pair))
    thread = engine._thread
    post = thread.post

    def closing_after(*tasks: Any, refuse: bool = False) -> None:
        post(*tasks, refuse=refuse)
        with thread._inbox.changed:
            thread._inbox.closing = thread._inbox.closing or refuse

    monkeypatch.setattr(thread, "post", closing_after)
    submissions = engine.submit_each(PROMPT, replace(PARAMS, n=3))
    assert [len(one.result(WAIT).token_ids) for one in submissions] == [30] * 3
    with pytest.raises(BadParameter, match="was closed"):
        engine.submit_each(PROMPT, replace(PARAMS, n=3))
    engine.shut_down()
    assert engine.stats().submitted == 3


def test_an_option_of_a_request_as_a_keyword_still_works(pair: tuple[str, str]) -> None:
    async def work(engine: AsyncLLM) -> tuple[str, str]:
        with pytest.warns(DeprecationWarning, match=r"AsyncLLM.submit\(method=…\) is the older spelling"):
            older = engine.submit("Smile", PARAMS, method="lookup")
        newer = await engine.generate("Smile", PARAMS, RequestOptions(method="pearl", priority=1))
        return (await older.output()).method, newer.method

    assert run(pair, work) == ("lookup", "pearl")


def test_configurations_without_end_are_not_kept(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiences, "MOST_CONFIGURATIONS", 16)
    one = SamplingParams(max_tokens=1)

    def decodings() -> int:
        gc.collect()
        return sum(isinstance(found, Decoding) for found in gc.get_objects())

    async def work(engine: AsyncLLM) -> tuple[int, int]:
        before = decodings()
        for at in range(30):
            await engine.generate("Smile", one, {"speculative": {"method": "speculative", "stop_below": at / 1000}})
        return len(engine._llm.core.experiences._made), decodings() - before

    kept, more = run(pair, work)
    assert kept <= 16 and more < 10
