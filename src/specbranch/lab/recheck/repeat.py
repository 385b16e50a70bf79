"""An earlier answer made again: the same prompt, the same noise.

Owns what the lab asks of an engine beyond what users do. Invariant: an answer repeated under the match rule has the
same tokens, whatever the method.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbranch.answer import Output
from specbranch.config import SamplingParams
from specbranch.core.request import Request
from specbranch.engine import LLM, LLMView


def repeat(
    llm: LLMView,
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int,
    sample: int = 0,
    forced: tuple[int, ...] = (),
    most: int | None = None,
) -> Output:
    """Answer a prompt with the noise of an earlier answer. The answer starts with the `forced` tokens, and has `most`
    tokens at most."""
    return llm.run(llm.core.make_answer(list(prompt), params, llm.decoding, seed, sample, forced, most))


def margin(llm: LLM, tokens: Sequence[int], request: Request, first: int, second: int) -> float:
    """Return how far apart two candidates for the token after `tokens` are for the target, in logits."""
    verifier, number = llm.core.verifier, next(llm.core.models.numbers)
    verifier.open(number, request)
    try:
        return verifier.margin(number, tokens, first, second)
    finally:
        verifier.free(number)
