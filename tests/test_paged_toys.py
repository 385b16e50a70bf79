"""Toys whose cache is a bounded pool with a prefix cache: what is said is what the law says, and no page is lost."""

from __future__ import annotations

import random

import pytest

from paged_toys import PagedToyRunner
from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.core.loop import Loop
from specbranch.core.methods import find_method
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.errors import CacheFull
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.lab.toys.toys import ToyRunner
from tiers import tiered
from toybench import LIMIT, law

DRIFT = 0.2
BEGINNINGS = [[random.Random(n).randrange(6) for _ in range(60)] for n in range(3)]
METHODS = ("autoregressive", "speculative", "specbranch", "tree", "lookup")


class Pair:
    """A target and a draft on paged toys, beside the same without pages."""

    def __init__(self, pages: int, page: int = 8, chunk: int = 4) -> None:
        self.target, self.draft = (PagedToyRunner(law(drift), pages, page, chunk, tail=32) for drift in (0.0, DRIFT))
        self.loop = Loop(Serial(Verifier(self.target), Drafter(self.draft)))
        self.plain = Loop(Serial(Verifier(ToyRunner(law()))))

    def check(self) -> None:
        self.target.check()
        self.draft.check()


def session(number: int, rng: random.Random) -> Session:
    beginning = rng.choice(BEGINNINGS)[: rng.choice((3, 20, 33, 60))]
    prompt = [*beginning, *(rng.randrange(6) for _ in range(rng.choice((0, 1, 9))))]
    params = SamplingParams(temperature=rng.choice((0.0, 1.0)), max_tokens=rng.choice((1, 5, 12)))
    return Session(number, prompt, Request(params, number, len(prompt)), LIMIT)


def join(loop: Loop, one: Session, method: str) -> None:
    loop.join(one, find_method(method, True).start(one, SpeculativeConfig(method=method), Experience()))


def expected(pair: Pair, one: Session) -> list[int]:
    prompt = one.tokens[: one.request.prompt_length]
    alone = Session(one.number, prompt, one.request, LIMIT)
    join(pair.plain, alone, "autoregressive")
    while pair.plain.live:
        pair.plain.step()
    return alone.tokens


def serve(pair: Pair, requests: int, at_once: int, compared: float) -> list[Session]:
    """Serve many requests, some at a time, and some given up; after each the pages are in order."""
    rng, done, live = random.Random(requests), list[Session](), list[Session]()
    while len(done) < requests:
        while len(live) < at_once and len(done) + len(live) < requests:
            live.append(session(len(done) + len(live), rng))
            join(pair.loop, live[-1], rng.choice(METHODS))
        pair.loop.step()
        if rng.random() < 0.02 and live:
            pair.loop.remove(live[-1])
            live[-1].finished = live[-1].finished or "error"
        for one in [one for one in live if one.finished]:
            live.remove(one)
            done.append(one)
            pair.check()
            if one.finished != "error" and rng.random() < compared:
                assert one.tokens == expected(pair, one)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("requests", tiered((300, 10_000), quick=lambda count: count < 1000))
def test_no_page_is_lost_over_many_requests(requests: int) -> None:
    pair = Pair(pages=60)
    done = serve(pair, requests, 6, compared=0.3)
    for runner in (pair.target, pair.draft):
        assert runner.kv_slots_free == runner.kv_slots == 480 and runner.pool.idle > 0
    read = sum(one.stats.prompt_tokens_read for one in done)
    assert sum(one.stats.prompt_tokens_cached for one in done) > read > 0
    assert sum(one.stats.draft_prompt_tokens_cached for one in done) > 0


@pytest.mark.parametrize("chunk", tiered((1, 3, 8, 16), (3, 16).__contains__))
def test_the_text_does_not_depend_on_how_much_fits(chunk: int) -> None:
    for pages in (14, 30):
        done = serve(Pair(pages, 8, chunk), 60, 2, compared=1.0)
        assert sum(one.error is None for one in done) > 40


def test_a_request_that_finds_no_room_says_so_and_takes_nothing() -> None:
    pair = Pair(pages=6)
    one, other = (Session(n, [n] * 30, Request(SamplingParams(max_tokens=4), 0, 30), LIMIT) for n in range(2))
    for both in (one, other):
        join(pair.loop, both, "autoregressive")
    pair.loop.step()
    assert isinstance(other.error, CacheFull) and "free (of 6)" in str(other.error) and one.error is None
    pair.check()
    while pair.loop.live:
        pair.loop.step()
    assert pair.target.kv_slots_free == 48


def test_a_page_with_two_meanings_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts above depend on the content of the pages."""
    pair = Pair(pages=60)
    serve(pair, 20, 2, compared=0.0)
    memory = pair.target._memory
    memory[:] = memory[1:] + memory[:1]
    with pytest.raises(AssertionError):
        serve(pair, 40, 2, compared=1.0)
