"""What an answer cost, and what speculation did for it.

Owns how figures of several samples are added up. Names of the speculation's are those of vLLM (its #48915).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest

from specbranch.answer import Output
from specbranch.serve.protocol import AnswerMetrics, CachedTokens, CompletionDetails, SpeculativeMetrics, Usage


def usage(
    prompts: Sequence[Sequence[int]],
    outputs: Mapping[int, Output],
    n: int,
    predicted: bool = False,
    reasoning: Callable[[Output], int] | None = None,
) -> Usage:
    """Return the token counts of a request. A prompt counts once, however many samples it has.

    `predicted`: the request has a prediction, whose tokens are counted, too. `reasoning`: counts an answer's tokens of
    reasoning; None: there is no reasoning.
    """
    cached = sum(one.stats["prompt_tokens_cached"] for index, one in outputs.items() if index % n == 0)
    counts = usage_so_far(prompts, sum(len(one.token_ids) for one in outputs.values()))
    whole = Usage(**counts.model_dump(exclude_unset=True), prompt_tokens_details=CachedTokens(cached_tokens=cached))
    details = _predicted(outputs.values()) if predicted else {}
    if reasoning is not None:
        details["reasoning_tokens"] = sum(map(reasoning, outputs.values()))
    if details:
        whole.completion_tokens_details = CompletionDetails(**details)
    return whole


def _predicted(outputs: Iterable[Output]) -> dict[str, int]:
    """Return what became of the prediction's tokens, in all samples together."""
    stats = [one.stats for one in outputs]
    names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
    return {name: sum(one[name] for one in stats) for name in names}


def usage_so_far(prompts: Sequence[Sequence[int]], said: int) -> Usage:
    """Return the token counts of a running request."""
    read = sum(map(len, prompts))
    return Usage(prompt_tokens=read, completion_tokens=said, total_tokens=read + said)


def answer_metrics(outputs: Mapping[int, Output]) -> AnswerMetrics:
    """Return what speculation did, for all samples together."""
    stats = [one.stats for one in outputs.values()]
    steps, drafted, accepted = (sum(one[name] for one in stats) for name in ("target_forwards", "drafted", "accepted"))
    at = [sum(column) for column in zip_longest(*(one["accepted_by_position"] for one in stats), fillvalue=0)]
    figures = SpeculativeMetrics(
        num_spec_steps=steps,
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=accepted,
        draft_acceptance_rate=accepted / drafted if drafted else None,
        mean_acceptance_length=1 + accepted / steps if steps else None,
        # a path is accepted up to some position: acceptance at a position includes acceptance at all before it
        acceptance_histogram=[one - other for one, other in pairwise([steps, *at, 0])],
        num_spec_tokens=len(at),
        num_accepted_tokens_per_pos=at,
        num_rollback_tokens=sum(sum(one["rollback"].values()) for one in stats),
        num_branches=sum(one["branch_points"] for one in stats),
        num_branch_hits=sum(one["branch_hits"] for one in stats),
        methods=sorted({one.method for one in outputs.values()}),
    )
    return AnswerMetrics(speculative_decoding=figures)
