"""A full pool with a prefix cache: whoever finds no memory waits or is preempted, nobody fails, and no page is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest

from paged_toys import PagedToyRunner
from specbranch.clock.virtual_clock import MeteredDrafter, VirtualClock
from specbranch.config import SpeculativeConfig
from specbranch.core.loop import KVSlots, Loop
from specbranch.core.methods import METHODS
from specbranch.core.orders import Context, Verify
from specbranch.core.pages import PageTable, Pool
from specbranch.core.prefill_budget import RoundLimits
from specbranch.core.runner import Feed, Trial, Verdicts
from specbranch.core.scheduler import Scheduler
from specbranch.core.session import Session
from specbranch.errors import PoolFull
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from tiers import tiered
from toybench import NAMES, SHARED, Case, Ending, Timeless, answer, config_of, law, next_number, plainly

DRIFT = 0.2
MOST_ROUNDS = 20_000
BEGINNING = tuple(random.Random(1).randrange(6) for _ in range(40))


def toy(pages: int, page: int = 8, prefill_chunk: int = 4, drift: float = 0.0, tail: int = 32) -> PagedToyRunner:
    return PagedToyRunner(law(drift), pages, page, prefill_chunk, 400, tail)


def desk(target: PagedToyRunner, draft: PagedToyRunner | None = None, **given: object) -> Scheduler:
    executor = Serial(Verifier(target), Drafter(draft) if draft else None)
    limits = RoundLimits(prefill_chunk=target.prefill_chunk, prompt_tokens=target.prefill_chunk)
    return Scheduler(Loop(executor, limits=limits), **given)  # type: ignore[arg-type]


def submit(scheduler: Scheduler, case: Case, config: SpeculativeConfig) -> Session:
    session = case.session(next_number(), 400)
    start = partial(METHODS[config.method].start, session, config, Timeless(SHARED))
    scheduler.submit(session, start)
    return session


def finish(scheduler: Scheduler, *runners: PagedToyRunner) -> None:
    """Run to the end; pages and requests agree after each round, and nobody holds anything at last."""
    for _ in range(MOST_ROUNDS):
        if not scheduler.tickets:
            break
        scheduler.step()
        for runner in runners:
            runner.check()
    assert not scheduler.tickets
    assert all(runner.kv_slots_free == runner.kv_slots for runner in runners)


@pytest.mark.parametrize("method", ["autoregressive", "lookup", "tree", "specbranch"])
@pytest.mark.parametrize("length", [5, 8, 20])
def test_equal_prompts_share_a_pool_that_has_room_for_one(length: int, method: str) -> None:
    """The second one shares the first one's last page, which the first one would have to copy then."""
    case = Case(BEGINNING[:length], 0.7, 3, Ending("long", max_tokens=12, ignore_eos=True))
    tail = 0 if method == "autoregressive" else 32
    target, draft = toy(pages=-(-(length + 12 + tail) // 8)), toy(pages=20, drift=DRIFT)
    scheduler = desk(target, draft, ahead=1)  # which admits both, as far as it can
    sessions = [submit(scheduler, case, config_of(method, "match")) for _ in range(3)]
    finish(scheduler, target, draft)
    assert {answer(session) for session in sessions} == {plainly(case, law())}


def requests(rng: random.Random, count: int, names: Sequence[str]) -> list[tuple[Case, SpeculativeConfig]]:
    """Requests of some methods, most of which share a prefix."""
    asked: list[tuple[Case, SpeculativeConfig]] = []
    for at in range(count):
        beginning = BEGINNING[: rng.choice((3, 7, 7, 9, 9, 30))]
        prompt = (*beginning, *(rng.randrange(6) for _ in range(rng.choice((0, 0, 0, 1, 9)))))
        ending = Ending("any", max_tokens=rng.choice((1, 6, 14)), ignore_eos=True)
        asked.append((Case(prompt, rng.choice((0.0, 0.9)), at, ending), config_of(rng.choice(names), "match")))
    return asked


@pytest.mark.parametrize("seed", tiered(range(60), quick=lambda seed: seed < 8 or seed in (19, 26)))
def test_in_any_small_pool_every_text_is_that_of_the_request_alone(seed: int) -> None:
    rng = random.Random(seed)
    page, prefill_chunk = rng.choice(((1, 4), (8, 3), (8, 16), (32, 16), (64, 16), (64, 16)))
    names, tail = rng.choice(((("autoregressive",), 0), (NAMES, 24)))
    least = -(-(39 + 14 + tail) // page)  # the longest request alone, and its tail
    target = toy(least + rng.choice((0, 0, 1, 3)), page, prefill_chunk, tail=24)
    draft = toy(rng.choice((1, 2, 4, least, 2 * least)), page, prefill_chunk, DRIFT, tail=24)
    scheduler = desk(target, draft, ahead=rng.choice((1, 4)), most=rng.choice((2, 5, None)))
    left, asked = requests(rng, 14, names), list[tuple[Case, Session]]()
    while left:
        case, config = left.pop()
        asked.append((case, submit(scheduler, case, config)))
        for _ in range(rng.choice((0, 0, 0, 1, 6))):
            scheduler.step()
            target.check()
            draft.check()
    finish(scheduler, target, draft)
    for case, session in asked:
        assert answer(session) == plainly(case, law()), (case, session.error)


def test_a_refused_order_releases_the_pages_of_its_prompt() -> None:
    target = toy(pages=2)
    verifier = Verifier(target)
    cases = [Case(BEGINNING[:12], 0.0, 0, Ending("long")) for _ in range(2)]
    for number, case in enumerate(cases):
        verifier.open(number, case.session().request)
    orders = {number: Verify(Context(0, case.prompt)) for number, case in enumerate(cases)}
    scored, failed = verifier.score(orders)
    assert list(failed) == [1] and isinstance(failed[1], PoolFull)
    assert not target._states[1].table.pages
    assert verifier.judge(scored, {})[0].token == plainly(cases[0], law()).tokens[0]
    target.check()


class Short(PagedToyRunner):
    """A target whose pool is full for a whole forward, some times."""

    times = 3

    def verify(self, work: list[Feed], trials: list[Trial]) -> Verdicts:  # type: ignore[override]
        if work and self.times > 0 and len(self._states) > 1:
            self.times -= 1
            raise PoolFull("Need 1 more cache page.")
        return super().verify(work, trials)


@pytest.mark.parametrize("method", ["autoregressive", "speculative", "tree"])
def test_a_round_without_memory_preempts_the_youngest_and_ends_nobody(method: str) -> None:
    target = Short(law(), 100, 8, 4, context_length=400)
    scheduler = desk(target, toy(100, drift=DRIFT))
    cases = [Case((at, 1, 2), 0.7, at, Ending("long", max_tokens=12)) for at in range(4)]
    sessions = [submit(scheduler, case, config_of(method, "match")) for case in cases]
    while target.times:
        scheduler.step()
    assert [ticket.session for ticket in scheduler.tickets if ticket.state == "waiting"] == sessions[1:]
    finish(scheduler, target)
    assert [answer(session) for session in sessions] == [plainly(case, law()) for case in cases]


def test_copies_of_shared_pages_do_not_count_as_free() -> None:
    target = toy(pages=6)
    verifier = Verifier(target)
    for number in range(3):
        verifier.open(number, Case(BEGINNING[:13], 0.0, 0, Ending("long")).session().request)
        target.extend(number, BEGINNING[target.recall(number, BEGINNING[:12]) : 12])
    # two pages are held by all three, and two of them will copy the second one, which is not full
    assert target.pool.free == 4 and target.kv_slots_free == 2 * 8
    for number in range(3):
        target.demand(number, 1)
        target.check()
    assert target.pool.free == 2 and target.kv_slots_free == 2 * 8


def test_kv_slots_are_counted_in_whole_pages() -> None:
    kv_slots = KVSlots("target", 64, 64, page=8)
    assert [kv_slots.missing(length) for length in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert [kv_slots.missing(9, held) for held in (0, 1, 8, 9)] == [16, 8, 8, 0]
    assert KVSlots("draft", 64, 64).missing(9, 4) == 5


def test_room_that_cannot_be_had_leaves_the_table_as_it_was() -> None:
    pool, copies = Pool(3, 4), list[object]()
    one, other = PageTable(pool), PageTable(pool)
    one.reach(6)
    other.exchange(one.pages)
    with pytest.raises(PoolFull):
        other.reserve(6, 9, copies.extend)  # one page behind the others, and a copy of the second
    assert other.pages == one.pages and not copies and pool.free == 1
    pool.check([one, other])


@pytest.mark.parametrize("served", [True, False])
def test_a_modelled_request_waits_for_memory_where_somebody_else_makes_rounds(served: bool) -> None:
    """Where nobody does, waiting would never end: it fails by a sentence."""
    target = toy(pages=5)
    first = desk(target)
    first.served = served
    draft = MeteredDrafter(toy(100, drift=DRIFT))
    modelled = Scheduler(Loop(VirtualClock(Verifier(target), draft, SHARED)), first=first)
    cases = [Case(BEGINNING[at : at + 9], 0.7, at, Ending("long", max_tokens=20, ignore_eos=True)) for at in range(2)]
    plain = config_of("autoregressive", "match")
    ours = submit(first, cases[0], plain)
    first.step()
    theirs = submit(modelled, cases[1], plain)
    for _ in range(200):
        modelled.step()
        first.step()
    assert answer(ours) == plainly(cases[0], law())
    if served:
        assert answer(theirs) == plainly(cases[1], law())
    else:
        assert isinstance(theirs.error, PoolFull)
    assert not first.guests and target.kv_slots_free == target.kv_slots


def test_requests_go_before_modelled_ones_when_memory_is_short() -> None:
    target = toy(pages=5)
    first = desk(target)
    modelled = Scheduler(Loop(VirtualClock(Verifier(target), None, SHARED)), first=first)
    cases = [Case(BEGINNING[at : at + 9], 0.7, at, Ending("long", max_tokens=20, ignore_eos=True)) for at in range(2)]
    plain = config_of("autoregressive", "match")
    theirs = submit(modelled, cases[1], plain)
    for _ in range(4):
        modelled.step()
    ours = submit(first, cases[0], plain)
    while not ours.finished:
        first.step()
    assert answer(ours) == plainly(cases[0], law())
    while not theirs.finished:
        modelled.step()
    assert answer(theirs) == plainly(cases[1], law()) and modelled.snapshot().preemptions == 1


def test_what_rests_gives_its_memory_to_one_that_waits_while_others_run() -> None:
    target = toy(pages=7)
    scheduler = desk(target, ahead=16)
    plain = config_of("autoregressive", "match")
    cases = [Case(BEGINNING[at : at + 9], 0.7, at, Ending("long", max_tokens=40, ignore_eos=True)) for at in range(3)]
    running, slow = (submit(scheduler, case, plain) for case in cases[:2])
    for _ in range(5):
        scheduler.step()
    ticket = next(one for one in scheduler.tickets if one.session is slow)
    scheduler.set_paused(ticket, True)
    other = submit(scheduler, Case(cases[2].prompt, 0.7, 2, Ending("short", max_tokens=4, ignore_eos=True)), plain)
    while not other.finished:
        scheduler.step()
    assert not other.error and not running.finished and ticket.state == "waiting"
    scheduler.set_paused(ticket, False)
    finish(scheduler, target)
    assert [answer(one) for one in (running, slow)] == [plainly(case, law()) for case in cases[:2]]
