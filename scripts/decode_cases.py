"""What plain decoding of a batch reaches, and how much of a round the device idles.

Owns the measurement and its bars; `measure_prefill.py` chooses and prints it. A round's time is the median gap between
two tokens of a request, prompts left out. Beside a request that needs the host in each round, rounds alternate, so
there the mean counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import torch
from device_idle import idle_share
from prefill_cases import Figure, Sizes
from prefill_prompts import short_prompts

from specbranch import SamplingParams
from specbranch.answer import Answer
from specbranch.config import SpeculativeConfig
from specbranch.core.runner import TimesForwards
from specbranch.engine import LLMView
from specbranch.extras import LLGUIDANCE
from specbranch.lab.bench.recorded_pair import RecordedPair
from specbranch.lab.bench.results import BASELINE
from specbranch.lab.bench.under_load import Arrivals

RATE_BARS = {1: 240.0, 4: 940.0, 16: 3600.0, 64: 10_500.0}  # tokens a second at 8B
IDLE_BAR = 2.0  # per cent of a round
STEP_BAR = 0.97  # share of what its bare step allows
REPLAYS = 200  # of a bare step
SAMPLINGS: dict[str, tuple[dict[str, Any], float]] = {  # parameters, and the least share of the greedy rate
    "temperature 0.8": ({"temperature": 0.8}, 0.98),
    "top-p 0.9": ({"temperature": 0.8, "top_p": 0.9}, 0.95),
    "penalties and log-probabilities": ({"presence_penalty": 0.5, "logprobs": 5}, 0.95),
}
DRAFTING = "speculative"
OTHERS: dict[str, tuple[SpeculativeConfig, dict[str, Any]]] = {  # requests that need the host in each round
    "one under the ratio rule": (SpeculativeConfig(method=BASELINE, rule="ratio"), {"temperature": 0.8}),
    "one with drafts": (SpeculativeConfig(method=DRAFTING), {}),
    "one with a grammar": (SpeculativeConfig(method=BASELINE), {"regex": "[a-z ]*"}),
}
OTHERS_BAR = 0.97  # the least share of the rate without such a request


def decode_figures(recorded: RecordedPair, sizes: Sizes) -> Iterator[Figure]:
    """Measure tokens a second of plain decoding by batch size; in the largest batch also by sampling parameters, and
    beside a request that needs the host."""
    llm = recorded.llm.using(BASELINE)
    batches = [count for count in RATE_BARS if count <= sizes.at_once]
    for count in batches:
        prompts = short_prompts(recorded.llm.tokenizer, count)
        gaps = _gaps(_Batch(llm, prompts), sizes)
        greedy = median(gaps)
        yield Figure("decode", f"{count} at once", count / greedy, "tokens/s", RATE_BARS[count], at_least=True)
        runner = recorded.llm.core.loop.executor.target.runner
        if count == 1 and isinstance(runner, TimesForwards):
            yield from _share_of_bare_step(_Batch(llm, prompts), runner, greedy, sizes.tokens)
        work = partial(_answered, _Batch(llm, prompts), sizes.tokens)
        idle, short = idle_share(work) if torch.cuda.is_available() else (None, 0.0)
        note = "" if idle is None else f"a round takes {1000 * greedy:.2f} ms; {short:.1f} % in gaps within a graph"
        yield Figure("decode", f"{count} at once, the device idles", idle, "%", IDLE_BAR, note=note)
        if count == batches[-1]:
            for name, (params, bar) in SAMPLINGS.items():
                share = greedy / median(_gaps(_Batch(llm, prompts, params), sizes))
                yield Figure("decode", f"{count} at once, {name}", share, "of greedy", bar, at_least=True)
            for name, (config, params) in OTHERS.items() if count > 1 else ():
                if config.method == DRAFTING and recorded.models[1] is None:
                    continue
                if "regex" in params and not LLGUIDANCE.is_installed:
                    continue
                other = recorded.llm.using(speculative=config)
                share = fmean(gaps) / fmean(_gaps(_Batch(llm, prompts, {}, other, params), sizes))
                yield Figure("decode", f"{count} at once, {name}", share, "of all plain", OTHERS_BAR, at_least=True)


def _share_of_bare_step(batch: _Batch, runner: Any, greedy: float, tokens: int) -> Iterator[Figure]:
    """Compare a round of one request with its step by itself, without a context and behind the request's own."""
    empty = runner.forward_seconds(1)
    note = f"its bare step without context allows {1.0 / empty:.0f} tokens/s" if empty else "its step was not timed"
    if not torch.cuda.is_available():
        return
    bare = _replayed_seconds(batch, runner.graphs, tokens)
    note = f"it allows {1.0 / bare:.0f} tokens/s; {note}"
    yield Figure("decode", "1 at once, of its bare step", bare / greedy, "", STEP_BAR, at_least=True, note=note)


def _replayed_seconds(batch: _Batch, graphs: Any, tokens: int) -> float:
    """Return the seconds of the last step of an answer, launched again and again without a host in between."""
    launched: list[tuple[Any, ...]] = []
    run = graphs.run_brought

    def noted(*given: Any) -> Any:
        launched.append(given)
        return run(*given)

    graphs.run_brought = noted
    try:
        _answered(batch, tokens)
    finally:
        graphs.run_brought = run
    with torch.inference_mode():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(REPLAYS):
            run(*launched[-1])
        end.record()
        torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1000.0 / REPLAYS


@dataclass(frozen=True, slots=True)
class _Batch:
    """Requests that decode plainly, the last one perhaps otherwise."""

    llm: LLMView
    prompts: Sequence[list[int]]
    params: dict[str, Any] = field(default_factory=dict)
    other: LLMView | None = None  # that decodes the last prompt
    other_params: dict[str, Any] = field(default_factory=dict)

    def answers(self, tokens: int) -> list[Answer]:
        """Make the answers; that of `other` is the last."""
        asked = [(self.llm, prompt, self.params) for prompt in self.prompts]
        if self.other is not None:
            asked[-1] = self.other, self.prompts[-1], self.other_params
        return [
            answer
            for llm, prompt, params in asked
            for answer in llm.core.make_samples(
                prompt, SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1, **params), llm.decoding
            )
        ]


def _gaps(batch: _Batch, sizes: Sizes) -> list[float]:
    """Return the seconds between two tokens of requests that decode plainly, while all requests decode."""
    gaps: list[float] = []
    for turn in range(1 + sizes.turns):  # the first turn warms up
        arrivals = _answered(batch, sizes.tokens)
        plain = arrivals if batch.other is None else arrivals[:-1]
        last_start = max(one.times[0] for one in arrivals)
        first_end = min(one.times[-1] for one in arrivals)
        if turn:
            gaps += [
                later - earlier
                for one in plain
                for earlier, later in pairwise(one.times)
                if last_start <= earlier and later <= first_end
            ]
    return gaps


def _answered(batch: _Batch, tokens: int) -> list[Arrivals]:
    answers = batch.answers(tokens)
    arrivals = [Arrivals() for _ in answers]
    for answer, arrived in zip(answers, arrivals, strict=True):
        answer.session.on_round = arrived.note
    for answer in batch.llm.core.run_all(answers, len(answers)):
        if (error := answer.output().error) is not None:
            raise error
    return arrivals
