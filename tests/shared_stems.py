"""Random requests whose prompts share beginnings, sent to one engine in any order; for tests on CPUs and GPUs.

Owns the requests and how they arrive. Invariant: a request is made from its seed alone, so the same request can be
answered alone in another engine.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from specbranch import LLM, AsyncLLM, SamplingParams
from specbranch.answer import Answer
from specbranch.core.pages import PAGE
from specbranch.core.scheduler import Snapshot
from specbranch.errors import RequestCancelled
from specbranch.models.runners.native import NativeRunner
from tiny_pair import VOCABULARY

STEMS = (0, 1, 60, 256, 300, 511, 770, 900)  # tokens that prompts begin with
LONGEST_END = 200  # tokens behind a stem
LONGEST_ANSWER = 24
STEM_CONTEXT = 1400
METHODS = ("autoregressive", "specbranch", "tree", "speculative", "pearl", "lookup", "adaptive", "auto")
Text = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and how it is sent."""

    prompt: list[int]
    params: SamplingParams
    method: str
    cancelled: bool = False  # some time after it was sent
    wait: float = 0.0  # seconds before it is sent, and before it is cancelled


def random_requests(count: int, seed: int, vocabulary: int, cancelled: float = 0.1) -> list[Asked]:
    """Make requests: stems that are beginnings of each other or not, random ends, temperatures 0 and 0.8."""
    rng = random.Random(seed)
    texts = [[rng.randrange(3, vocabulary) for _ in range(max(STEMS))] for _ in range(2)]
    return [_request(rng, texts, vocabulary, cancelled) for _ in range(count)]


def _request(rng: random.Random, texts: Sequence[Sequence[int]], vocabulary: int, cancelled: float) -> Asked:
    stem = rng.choice(texts)[: rng.choice(STEMS)]
    # an end that follows the stem's own text now and then shares more than the stem, or all of it
    end = [rng.randrange(3, vocabulary) for _ in range(rng.randint(1, LONGEST_END))]
    prompt = [*stem, *(end if rng.random() < 0.85 else end[:1])]
    params = SamplingParams(
        temperature=rng.choice((0.0, 0.8)),
        seed=rng.randrange(1000),
        max_tokens=rng.randint(1, LONGEST_ANSWER),
        ignore_eos=True,
    )
    wait = rng.choice((0.0, 0.0, 0.002, 0.02))
    return Asked(prompt, params, rng.choice(METHODS), rng.random() < cancelled, wait)


def crossing_pages(count: int) -> list[Asked]:
    """Requests that need another page while they decode; every other prompt is long."""
    found = []
    for at, one in enumerate(random_requests(count, seed=5, vocabulary=VOCABULARY, cancelled=0.0)):
        text = one.prompt * 1000
        length = 3 * PAGE - 20 + at if at % 2 else PAGE - 5 - at
        found.append(replace(one, prompt=text[:length], params=replace(one.params, max_tokens=30), wait=0.0))
    return found


def texts_alone(llm: LLM, asked: Sequence[Asked]) -> list[Text]:
    """Answer each request by plain decoding, one at a time; the LLM should have no prefix cache."""
    plain = llm.using("autoregressive")
    return [tuple(plain.generate([one.prompt], one.params)[0].token_ids) for one in asked]


def texts_together(llm: LLM, asked: Sequence[Asked], max_batch: int) -> tuple[list[Text | None], Snapshot]:
    """Send all requests to one engine; return their texts (None: cancelled), and the engine's counts at the end.

    The pages of both models are checked. Closes the LLM.
    """
    return asyncio.run(_together(llm, asked, max_batch))


async def _together(llm: LLM, asked: Sequence[Asked], max_batch: int) -> tuple[list[Text | None], Snapshot]:
    async with AsyncLLM(llm, max_batch=max_batch) as engine:
        gate = asyncio.Semaphore(2 * max_batch)
        texts = await asyncio.gather(*(_answered(engine, gate, one) for one in asked))
        check_free(llm)
        return texts, engine.stats()


async def _answered(engine: AsyncLLM, gate: asyncio.Semaphore, one: Asked) -> Text | None:
    async with gate:
        await asyncio.sleep(one.wait)
        submission = engine.submit(one.prompt, one.params, {"method": one.method})
        if one.cancelled:
            await asyncio.sleep(one.wait)
            submission.cancel()
        with suppress(RequestCancelled):
            output = await submission.output()
            if output.error is not None:
                raise output.error
            return tuple(output.token_ids)
        return None


def compare_texts(asked: Sequence[Asked], alone: Sequence[Text], together: Sequence[Text | None]) -> int:
    """Assert that no text differs; returns how many were compared. Cancelled requests may have none."""
    assert all(one.cancelled for one, text in zip(asked, together, strict=True) if text is None)
    different = [
        f"request {at}: {one.method}, {len(one.prompt)} tokens, temperature {one.params.temperature}"
        for at, (one, expected, text) in enumerate(zip(asked, alone, together, strict=True))
        if text is not None and text != expected
    ]
    assert not different, f"{len(different)} texts differ from the same request alone: {different[:5]}"
    return sum(text is not None for text in together)


def texts_preempted(llm: LLM, asked: Sequence[Asked], max_batch: int) -> tuple[list[Text], int]:
    """Answer all requests, and preempt each once while its prompt is computed; returns texts and preemptions.

    The others arrive when the first one decodes, so a round computes a part of a prompt only.
    """
    core, scheduler = llm.core, llm.scheduler
    scheduler.most = max_batch
    first, *others = answers = _answers(llm, asked)
    core.enqueue(first)
    while not first.session.stats.emitted:
        scheduler.step()
    tickets, preempted = [core.enqueue(answer) for answer in others], set[int]()
    while not all(answer.session.finished for answer in answers):
        scheduler.step()
        for ticket in tickets:
            number = ticket.session.number
            if ticket.state == "live" and number not in preempted and core.loop.uncomputed(ticket.session):
                scheduler._preempt(ticket)
                preempted.add(number)
    check_free(llm)
    return [answer.output().token_ids for answer in answers], len(preempted)


def cancel_in_prefill(llm: LLM, others: Sequence[Asked], prompt: list[int], rounds: int) -> tuple[list[Text], bool]:
    """Decode some requests; a long prompt arrives, and is cancelled after so many rounds of its prefill.

    Returns the others' texts, and whether a part of the prompt was not computed by then.
    """
    core, scheduler = llm.core, llm.scheduler
    answers = _answers(llm, others)
    (long,) = core.make_samples(prompt, SamplingParams(max_tokens=4), llm.using("specbranch").decoding)
    for answer in answers:
        core.enqueue(answer)
    while not all(answer.session.stats.emitted for answer in answers):
        scheduler.step()
    ticket = core.enqueue(long)
    scheduler.step()
    while core.loop.uncomputed(long.session) == len(prompt) - 1:  # a round of a draft alone computes nothing of it
        scheduler.step()
    for _ in range(rounds - 1):
        scheduler.step()
    midway = core.loop.uncomputed(long.session) > 0 and not all(answer.session.finished for answer in answers)
    scheduler.cancel(ticket)
    while not all(answer.session.finished for answer in answers):
        scheduler.step()
    check_free(llm)
    return [answer.output().token_ids for answer in answers], midway


def check_free(llm: LLM) -> None:
    """Check the pages of both models; all of them must be free."""
    for runner in (llm.target_runner, *([llm.drafter.runner] if llm.drafter else [])):
        assert isinstance(runner, NativeRunner)
        runner.check()
        assert runner.kv_slots_free == runner.kv_slots


def _answers(llm: LLM, asked: Sequence[Asked]) -> list[Answer]:
    each = (llm.core.make_samples(one.prompt, one.params, llm.using(one.method).decoding) for one in asked)
    return [answer for answers in each for answer in answers]
