"""One greedy request, decoded alone on an executor: the unit in which costs are measured and compared."""

from __future__ import annotations

from collections.abc import Sequence

from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.costs import MeasuredCosts
from specbranch.core.experience import Experience
from specbranch.core.loop import Executor, Loop
from specbranch.core.methods import find_method
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.core.trace import Trace


def greedy_session(prompt: Sequence[int], tokens: int, eos: Sequence[int] = ()) -> Session:
    """Return a request for this many tokens, or fewer if an end token comes."""
    request = Request(SamplingParams(max_tokens=tokens), 0, len(prompt), eos_ids=tuple(eos))
    return Session(0, prompt, request, len(prompt) + tokens)


def start(executor: Executor, session: Session, method: str, trace: Trace | None = None) -> Loop:
    """Start a request with a method that learns costs; return its loop."""
    costs, config = MeasuredCosts(), SpeculativeConfig(method=method)
    loop = Loop(executor, trace, costs)
    loop.join(session, find_method(method, True).start(session, config, Experience(costs)))
    return loop


def decode(executor: Executor, session: Session, method: str) -> Session:
    """Decode a request to its end."""
    loop = start(executor, session, method)
    try:
        while loop.live:
            loop.step()
    finally:
        loop.remove(session)
    if session.error is not None:
        raise session.error
    return session
