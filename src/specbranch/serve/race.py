"""The page's race: one prompt by several methods, turn by turn.

Owns who races, how often, and what is said of a turn. The methods take turns, so that load that comes and goes meets
them all; the first turn warms up and does not count. Invariant: a client that leaves cancels the running request.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing

from specbranch.answer import Chunk
from specbranch.core.methods import PLAIN
from specbranch.errors import SpecBranchError
from specbranch.machine_load import LoadMeter, roughness
from specbranch.serve.witness import LiveEvent, Witness, finished, pieces

RACERS = (PLAIN, "speculative", "pearl", "specbranch")
RACE_TURNS = 3  # that count; the median is shown
TURNS_END = 60.0  # seconds after which no further turn starts: three are too many for a slow model
RACE_SECONDS = 20  # that a race takes, about
Chunks = AsyncGenerator[Chunk, None]
Decode = Callable[[str, Witness], tuple[Chunks, Callable[[], None]]]  # by method: its chunks, and a way to cancel


async def by_turns(decode: Decode, measured: bool) -> AsyncGenerator[LiveEvent, None]:
    """Run all methods by turns. Modelled time needs no more than one turn, and nothing to warm up."""
    lanes, meter = {name: list[float]() for name in RACERS}, LoadMeter()
    for turn in _turns(measured):
        for name in tuple(lanes):
            yield {"lane": name, "turn": turn}
            last = 0.0
            async with aclosing(_turn(decode, name)) as events:
                async for one in events:
                    if "error" in one:  # such as a method that needs a draft where there is none
                        del lanes[name]
                    last = one["steps"][-1][0] if one.get("steps") else last
                    if turn or "error" in one:
                        yield {"lane": name, "turn": turn, **one}
            if turn and last and name in lanes:
                lanes[name].append(last)
    if measured:
        # a planned method's turns differ because it learns; plain decoding's are equal work
        yield {"rough": roughness(meter.other_cores(), [lanes.get(PLAIN, [])])}


def _turns(measured: bool) -> Iterator[int]:
    """The numbers of the turns; 0 is the one that does not count."""
    if not measured:
        yield 1
        return
    end = time.monotonic() + TURNS_END
    for turn in range(RACE_TURNS + 1):
        if turn < 2 or time.monotonic() < end:
            yield turn


async def _turn(decode: Decode, name: str) -> AsyncGenerator[LiveEvent, None]:
    """The events of one turn, times in seconds since its first token; what it cannot do is an event, too."""
    seen, first = Witness(), None
    try:
        chunks, cancel = decode(name, seen)
    except SpecBranchError as error:
        yield {"error": str(error)}
        return
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                frames = [frame for frame in seen.take() if frame.added]
                first = frames[0].end if frames and first is None else first
                steps = [[round(frame.end - (first or 0.0), 6), frame.added] for frame in frames]
                yield {"steps": steps, "pieces": pieces(chunk), "done": finished(chunk.output)}
    except SpecBranchError as error:
        yield {"error": str(error)}
    finally:
        cancel()
