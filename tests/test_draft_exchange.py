"""A running engine takes another draft between two rounds: texts stay those of plain decoding, and nothing of the old
draft is left."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbranch import LLM, AsyncLLM, SamplingParams
from specbranch.errors import BadParameter, ExchangeUnderWay, ModelError
from specbranch.exec.process import Process
from specbranch.exec.serial import Serial

PROMPTS = ["A branch is a guess", "What the large model says", "One two three four five six seven"]
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.8, seed=7)
OPTIONS = {"context_length": 256}


def loaded(pair: tuple[str, str], **given: Any) -> LLM:
    return LLM(*pair, dtype="float64", device="cpu", options=OPTIONS, **given)


@pytest.fixture(scope="module")
def plain(pair: tuple[str, str], nothing_kept: None) -> list[tuple[int, ...]]:
    with loaded(pair, method="autoregressive") as llm:
        return [one.token_ids for one in llm.generate(PROMPTS, PARAMS)]


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def other_draft(pair: tuple[str, str], folder: Path) -> str:
    """The target itself under another name: an ideal draft."""
    return str(shutil.copytree(pair[0], folder / "better"))


async def exchanged_midway(engine: AsyncLLM, draft: str) -> list[tuple[int, ...]]:
    """Exchange the draft once all requests have said something; return what they say in all."""
    streams = [engine.stream(prompt, PARAMS) for prompt in PROMPTS]
    first = [await anext(stream) for stream in streams]
    exchange = asyncio.create_task(engine.exchange_draft(draft))

    async def rest(stream: Any, before: Any) -> tuple[int, ...]:
        last = [before, *[chunk async for chunk in stream]][-1]
        assert last.output is not None
        return tuple(last.output.token_ids)

    said = await asyncio.gather(*map(rest, streams, first))
    await exchange
    return list(said)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["specbranch", "pearl"])
@pytest.mark.parametrize("executor", ["serial", "process"])
def test_running_requests_go_on_with_the_text_of_plain_decoding(
    pair: tuple[str, str], plain: list[tuple[int, ...]], tmp_path: Path, executor: Any, method: str
) -> None:
    better = other_draft(pair, tmp_path)

    async def run() -> None:
        async with AsyncLLM(loaded(pair, executor=executor, method=method)) as engine:
            before = [(await engine.generate(prompt, PARAMS)).token_ids for prompt in PROMPTS]
            midway = await exchanged_midway(engine, better)
            after = [(await engine.generate(prompt, PARAMS)).token_ids for prompt in PROMPTS]
            assert before == midway == after == plain

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "process"])
def test_an_exchange_between_any_two_rounds_changes_no_token(
    pair: tuple[str, str], plain: list[tuple[int, ...]], tmp_path: Path, executor: Any
) -> None:
    """In the middle of a tree, a prefill, a batch: after each round of the first twelve, to and fro."""
    drafts = [other_draft(pair, tmp_path), pair[1]]
    with loaded(pair, executor=executor, speculative={"method": "tree"}) as llm:
        streams = [llm.stream(prompt, PARAMS) for prompt in PROMPTS]
        said: list[tuple[int, ...]] = [() for _ in PROMPTS]
        for step in range(400):
            if step < 12 and (executor == "serial" or step % 4 == 0):
                llm.exchange_draft(drafts[step % 2])
            for at, stream in enumerate(streams):
                if (chunk := next(stream, None)) is not None and chunk.output is not None:
                    said[at] = chunk.output.token_ids
            if all(said):
                break
        assert said == plain
        assert all(slots.free == slots.total for slots in llm.core.loop.executor.kv_slots())


def test_the_new_draft_is_the_one_that_drafts_and_the_old_one_holds_nothing(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    with loaded(pair, method="speculative") as llm:
        executor = llm.core.loop.executor
        assert isinstance(executor, Serial) and (old := executor.draft) is not None
        before = llm.generate(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True)).stats
        stream = llm.stream(PROMPTS[1], PARAMS)
        next(stream)
        llm.exchange_draft(other_draft(pair, tmp_path))
        assert executor.draft is not old and not old.requests and len(executor.draft.requests) == 1
        list(stream)
        after = llm.generate(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True)).stats
        assert after["accepted"] == after["drafted"] > 0 and before["accepted"] < before["drafted"]


@pytest.mark.slow
def test_what_was_learned_of_the_old_draft_ends_with_it(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBRANCH_EXPERIENCE", str(tmp_path / "learned"))
    better = other_draft(pair, tmp_path)
    with loaded(pair, method="tree") as llm:
        llm.generate(PROMPTS, PARAMS)
        insight = llm.decoding.experience.insight
        for _ in range(30):  # so small a draft does not pay, and is hardly asked
            insight.learn("first", 3, True)
        llm.exchange_draft(better)
        assert llm.decoding.experience.insight is insight  # running planners hold it
        assert insight.observations == 0 == sum(insight.first.met)
        insight.learn("first", 5, True)
    until(lambda: len(list((tmp_path / "learned").glob("*.json"))) == 2)  # a thread writes the old draft's
    files = [json.loads(file.read_text()) for file in (tmp_path / "learned").glob("*.json")]
    drafts = {one["circumstances"]["draft"] for one in files}
    assert len(files) == len(drafts) == 2
    met = sorted(sum(sum(insight["first"][2]) for insight in one["insights"].values()) for one in files)
    assert met == [1.0, 30.0]


def test_a_draft_that_does_not_fit_leaves_the_old_one_at_work(
    pair: tuple[str, str], plain: list[tuple[int, ...]], tiny_draft: Path, tmp_path: Path
) -> None:
    damaged = shutil.copytree(tiny_draft, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"no tensors")
    foreign = shutil.copytree(tiny_draft, tmp_path / "foreign")
    config = json.loads((foreign / "config.json").read_text())
    config["specbranch_draft"]["target_fingerprint"] = "0" * 64
    (foreign / "config.json").write_text(json.dumps(config))
    sized = shutil.copytree(tiny_draft, tmp_path / "sized")
    (sized / "config.json").write_text(
        (tiny_draft / "config.json").read_text().replace('"vocab_size": 421', '"vocab_size": 400')
    )
    with loaded(pair) as llm:
        executor = llm.core.loop.executor
        assert isinstance(executor, Serial)
        old = executor.draft
        for name, words in (
            (str(tmp_path / "none"), "There is no draft at"),
            (str(damaged), "missing or damaged"),
            (str(foreign), "was made for"),
            (str(sized), "the embedding is"),
            ("tcp://127.0.0.1:9", "is a draft worker"),
        ):
            with pytest.raises((BadParameter, ModelError), match=words):
                llm.exchange_draft(name)
        assert executor.draft is old
        assert [one.token_ids for one in llm.generate(PROMPTS, PARAMS)] == plain


@pytest.mark.slow
def test_a_process_that_cannot_load_the_draft_leaves_the_old_one_at_work(
    pair: tuple[str, str], plain: list[tuple[int, ...]], tmp_path: Path
) -> None:
    damaged = Path(other_draft(pair, tmp_path))
    with loaded(pair, executor="process") as llm:
        executor = llm.core.loop.executor
        assert isinstance(executor, Process)
        old = executor.child_pid
        (damaged / "model.safetensors").write_bytes(b"no tensors")
        with pytest.raises(ModelError, match="new draft could not start"):
            llm.exchange_draft(str(damaged))
        assert executor.child_pid == old and executor.draft_state == "ready"
        assert [one.token_ids for one in llm.generate(PROMPTS, PARAMS)] == plain


def test_engines_that_cannot_exchange_say_so(pair: tuple[str, str]) -> None:
    with (
        loaded((pair[0],), method="autoregressive") as without,  # type: ignore[arg-type]
        pytest.raises(BadParameter, match="decodes without a draft"),
    ):
        without.exchange_draft(pair[1])
    with (
        LLM(*pair, device="cpu", options={**OPTIONS, "clock": "c10"}) as modelled,
        pytest.raises(BadParameter, match="cannot exchange its draft"),
    ):
        modelled.exchange_draft(pair[1])


@pytest.mark.slow
def test_a_second_exchange_meanwhile_is_refused(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        gate, begun = threading.Event(), threading.Event()
        async with AsyncLLM(loaded(pair)) as engine:
            load = LLM.load_draft

            def slow(llm: LLM, draft: str) -> Any:
                begun.set()
                gate.wait(60)
                return load(llm, draft)

            monkeypatch.setattr(LLM, "load_draft", slow)
            first = asyncio.create_task(engine.exchange_draft(pair[1]))
            await asyncio.to_thread(begun.wait, 60)
            with pytest.raises(ExchangeUnderWay):
                await engine.exchange_draft(pair[1])
            gate.set()
            await first
            await engine.exchange_draft(pair[1])  # afterwards it is taken

    asyncio.run(run())
