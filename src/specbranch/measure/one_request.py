"""One greedy request, decoded by itself on some executor: what costs are measured and compared by."""

from __future__ import annotations

from collections.abc import Sequence

from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.costs import LearnedCosts
from specbranch.core.experience import Experience
from specbranch.core.loop import Executor, Loop
from specbranch.core.methods import find_method
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.core.trace import Trace


def start(
    executor: Executor,
    prompt: Sequence[int],
    method: str,
    tokens: int,
    eos: Sequence[int] = (),
    trace: Trace | None = None,
) -> tuple[Loop, Session]:
    """Begin a request by a method that learns costs as it goes; it is live until its end."""
    request = Request(SamplingParams(max_tokens=tokens), 0, len(prompt), eos_ids=tuple(eos))
    costs, session = LearnedCosts(), Session(0, prompt, request, len(prompt) + tokens)
    loop, config = Loop(executor, trace, costs), SpeculativeConfig(method=method)
    loop.join(session, find_method(method, True).start(session, config, Experience(costs)))
    return loop, session


def decode(executor: Executor, prompt: Sequence[int], method: str, tokens: int, eos: Sequence[int] = ()) -> Session:
    """Decode a request to its end."""
    loop, session = start(executor, prompt, method, tokens, eos)
    try:
        while loop.live:
            loop.step()
    finally:
        loop.leave(session)
    if session.error is not None:
        raise session.error
    return session
