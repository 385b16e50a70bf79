"""Where the live part of the page starts: an edit by the server's own clock if that pays here, else by a modelled one.

Owns the trial that decides it, and the sentences that give the reason. Invariant: nothing runs before a page asks, and
a trial that was finished is not repeated.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

from specbranch.answer import Output
from specbranch.async_engine import AsyncLLM
from specbranch.clock.shipped import WALL
from specbranch.config import SamplingParams
from specbranch.core.methods import PLAIN
from specbranch.errors import SpecBranchError
from specbranch.serve.examples import COPYING
from specbranch.submission import RequestOptions

START_METHOD = "specbranch"  # tried if the server's own method is plain decoding
START_CLOCK = "c10"  # the clock of the page where nothing pays
START_GAIN = 1.1  # as fast as plain decoding: less is not seen
TRIAL_TOKENS = 40  # of each answer
TRIAL_TURNS = 2  # of each way; the quickest counts, because load only slows down
START_SECONDS = 20.0  # for each answer
MOSTLY_PLAIN = 0.8  # of the rounds


@dataclass(frozen=True, slots=True)
class Start:
    """The example, the clock and the method that the page begins with; None: the server's own method."""

    example: str
    clock: str
    method: str | None
    why: str


class Trial:
    """Answers the example by plain decoding and by speculation, once, when the first page asks."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._method = None if engine.method != PLAIN else START_METHOD
        self._running: asyncio.Task[Start | None] | None = None

    async def start(self) -> Start:
        """Return where the page starts. A trial that found no time is made again for the next page."""
        if self._running is None:
            self._running = asyncio.create_task(self._measured())
        running = self._running
        found = await asyncio.shield(running)  # whoever leaves stops no trial that others wait for
        if found is None and self._running is running:
            self._running = None
        return found or Start(COPYING.name, WALL, self._method, COPYING.why)

    async def _measured(self) -> Start | None:
        """Measure; None: an answer did not come in time, or not at all."""
        try:
            await self._answer(self._method)  # it warms up: the planner times both models, compiled steps compile
            turns = [(await self._answer(PLAIN), await self._answer(self._method)) for _ in range(TRIAL_TURNS)]
        except SpecBranchError:
            return None
        plain, ours = (max(answers, key=_rate) for answers in zip(*turns, strict=True))
        return chosen(plain, ours, self._method, await self._can_model())

    async def _answer(self, method: str | None) -> Output:
        options = RequestOptions(method=method, deadline=START_SECONDS, priority=-1)
        asked = [{"role": "user", "content": COPYING.prompt}]
        return await self._engine.generate(asked, SamplingParams(max_tokens=TRIAL_TOKENS), options)

    async def _can_model(self) -> bool:
        made = self._engine.aside(lambda llm: iter([llm.modelled(START_CLOCK)]))
        try:
            async with aclosing(made):
                return bool([one async for one in made])
        except SpecBranchError:  # the draft lives in another process
            return False


def chosen(plain: Output, ours: Output, method: str | None, can_model: bool) -> Start:
    """Choose by two answers to the same prompt."""
    slow, quick = _rate(plain), _rate(ours)
    rates = f"{quick:.0f} tokens a second against {slow:.0f} by plain decoding"
    if quick >= START_GAIN * slow > 0.0:
        gain = f"{quick / slow:.1f} × as fast as plain decoding ({quick:.0f} against {slow:.0f} tokens a second)"
        return Start(
            COPYING.name, WALL, method, f"It pays here: measured on this server, it runs {gain}. {COPYING.why}"
        )
    if not can_model:
        return Start(COPYING.name, WALL, method, f"It does not pay here: {rates}. {_reason(ours)}")
    why = f"By its own clock this server gains nothing now: {rates}. {_reason(ours)} So this part starts on a modelled "
    return Start(
        COPYING.name, START_CLOCK, method, f"{why}clock: models, guesses and verdicts are real, times are computed."
    )


def _rate(answer: Output) -> float:
    return answer.stats["tokens_per_second"] or 0.0


def _reason(ours: Output) -> str:
    """Say why speculation gained nothing."""
    arms = ours.stats.get("arms") or {}
    rounds = sum(arm["rounds"] for arm in arms.values())
    if rounds and arms.get("plain", {"rounds": 0})["rounds"] >= MOSTLY_PLAIN * rounds:
        return "The planner decoded nearly every round plainly, because no guess was expected to pay."
    brought = ours.stats["tokens_per_forward"] or 1.0
    return (
        f"A forward of the target brought {brought:.1f} tokens, but guessing and checking took as long as that saved."
    )
