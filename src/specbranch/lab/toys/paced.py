"""An engine without models: every round takes a fixed time, in which the thread sleeps as if it waited for a GPU.

Owns an executor that repeats a given text, and an `LLM` over it. It serves to measure what surrounds the models (the
server, the engine's thread) and to test it with a real tokenizer. Invariant: an answer depends on its request's seed,
sample and prompt length alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from specbranch.assembly import Parts
from specbranch.config import SpeculativeConfig
from specbranch.core.costs import MeasuredCosts
from specbranch.core.grammar import allowed_by
from specbranch.core.loop import DraftState, KVSlots, Loop
from specbranch.core.methods import METHODS, PLAIN
from specbranch.core.orders import Orders, Reports, Span, TokenLogprobs, Verdict, Verify
from specbranch.core.request import Request
from specbranch.core.scheduler import Scheduler
from specbranch.decoding import Decoding
from specbranch.engine import LLM, LLMView
from specbranch.engine_core import EngineCore, LoadedModels
from specbranch.exec.verifier import Verifier
from specbranch.experiences import Experiences
from specbranch.hrad.engine_predictor import EnginePredictor
from specbranch.lab.toys.toys import ToyLaw, ToyRunner

if TYPE_CHECKING:
    from specbranch.text.tokenizer import Tokenizer

ANSWER_STRIDE = 7919  # tokens between the starts of two answers whose seeds differ by one


class PacedExecutor:
    """Answers every verify order with the next token of a text, one round each `seconds`.

    `ahead`: the device starts a round when the one before it ends, as a GPU does whose next step was launched ahead.
    Otherwise it starts when it is asked to, and waits for the host's work between two rounds.
    """

    restarts = late_captures = 0
    draft_state: DraftState = "none"

    def __init__(self, text: Sequence[int], seconds: float = 0.0, ahead: bool = False, host: float = 0.0) -> None:
        """`host`: seconds of a round in which the thread computes instead of sleeping, as a launch does."""
        self._text, self._seconds, self._ahead, self._host = text, seconds, ahead, host
        self._requests: dict[int, Request] = {}
        self._end = 0.0  # of the round that was launched ahead
        self.now: Callable[[], float] = time.perf_counter
        self.rounds = 0

    def open(self, session: int, request: Request) -> None:
        """Note a session's request."""
        self._requests[session] = request

    def run(self, orders: Mapping[int, Orders]) -> dict[int, Reports]:
        """Sleep for the rest of a round, then answer every session."""
        start = self.now()
        while self.now() < start + self._host:
            pass
        launched = self._ahead and self._end > 0.0
        end = self._end if launched else start + self._seconds
        if (left := end - self.now()) > 0:
            time.sleep(left)
        self._end = max(end, start) + self._seconds
        self.rounds += 1
        span = Span(start, self.now(), len(orders))
        return {session: self._report(session, one, span) for session, one in orders.items()}

    def kv_slots(self) -> tuple[KVSlots, ...]:
        """Return none: nothing is stored."""
        return ()

    def free(self, session: int) -> None:
        """Forget a session."""
        self._requests.pop(session, None)

    def close(self) -> None:
        """Nothing to stop."""

    def _report(self, session: int, orders: Orders, span: Span) -> Reports:
        verify = orders.verify
        if verify is None:
            return Reports(reached=len(orders.prefill.on) if orders.prefill else None)
        return Reports(verdict=self._verdict(self._requests[session], verify), verifying=span)

    def _verdict(self, request: Request, verify: Verify) -> Verdict:
        if verify.allowed is not None:  # a text to score
            path, token = tuple(range(len(verify.tokens))), min(allowed_by(verify.allowed[-1]) or (0,))
        else:
            start = (request.seed + request.sample) * ANSWER_STRIDE
            path, token = (), self._text[(start + len(verify.on)) % len(self._text)]
        if request.params.logprobs is None:
            return Verdict(path, token)
        scores = tuple(self._scores(one, request.params.logprobs) for one in verify.taken(path, token))
        return Verdict(path, token, scores)

    def _scores(self, token: int, top: int) -> TokenLogprobs:
        others = (self._text[(token + at) % len(self._text)] for at in range(top))
        return TokenLogprobs(-0.25 - token % 7, tuple((one, -0.25 - at) for at, one in enumerate(others)))


class PacedLLM(LLM):
    """An LLM that repeats a text at a given pace. It decodes plainly, and holds no memory."""

    def __init__(
        self, tokenizer: Tokenizer, executor: PacedExecutor, context_length: int = 1 << 16, max_batch: int = 64
    ) -> None:
        """Put a queue of requests in front of an executor."""
        self.target, self.cache_dtype = "paced", "float32"
        verifier = Verifier(ToyRunner(ToyLaw(tokenizer.vocabulary_size), context_length))
        parts = Parts(tokenizer, verifier, executor, "native", "float32", "float32", "float32", "cpu", captures=False)
        models = LoadedModels(parts, False, EnginePredictor(None, self.target, None, verifier))
        experiences = Experiences(MeasuredCosts(False), False)
        core = EngineCore(models, Scheduler(Loop(executor)), experiences)
        decoding = Decoding(SpeculativeConfig(method=PLAIN), METHODS[PLAIN], experiences)
        LLMView.__init__(self, core, decoding, max_batch)
