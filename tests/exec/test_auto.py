"""`auto` takes the way of decoding that pays: on scripted texts whose best way is known, by costs that are known or learned."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from specbranch.bench.record import Record, Task
from specbranch.bench.replay import RecordedRunner, RecordedSampler
from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.arms import LOOKUPS, OVERLAPPED, PLAIN, SERIAL, Arm, Prices, Walker, as_top
from specbranch.core.costs import LearnedCosts
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.orders import TokenLogprobs
from specbranch.core.pilot import Experience, Pilot
from specbranch.core.request import Spot
from specbranch.core.rounds import InFlight
from specbranch.core.runner import Ask, Law, Proposal
from specbranch.core.session import Session
from specbranch.core.trail import ASTRAY, RANKS, Habits, Trail
from specbranch.exec.verifier import Verifier
from specbranch.sim.clock import MeteredDrafter, VirtualClock
from specbranch.sim.profile import CostProfile
from specbranch.sim.shipped import load_profile, shipped_profiles
from toybench import run_out

AUTO = SpeculativeConfig(method="auto")
PLAINLY = SpeculativeConfig(method="autoregressive")
FIVE = load_profile("c5")
TEN = load_profile("c10")
HOPELESS = CostProfile(target=((1, 0.01), (2, 0.02), (16, 0.16)), draft=((1, 0.01), (2, 0.02)), slow_down=0.01)
BY_TURNS = CostProfile(target=((1, 0.01), (16, 0.03)), draft=((1, 0.002), (64, 0.003)), overlap=False)
WRONG = 1_000_000  # what a scripted draft says where it is wrong; its further choices follow
PROMPT = (1, 2, 3)


@dataclass(frozen=True)
class Scripted:
    """A text, and at each of its tokens how sure the draft is and which of its choices is the right one."""

    tokens: tuple[int, ...]
    sure: tuple[float, ...]
    rank: tuple[int, ...]

    @classmethod
    def of(cls, tokens: Sequence[int], hits: float, seed: int) -> Scripted:
        """A draft that is right so often, and surer where it is."""
        rng = random.Random(seed)
        right = [rng.random() < hits for _ in tokens]
        sure = tuple(rng.uniform(0.6, 1.0) if ok else rng.uniform(0.1, 0.7) for ok in right)
        return cls(tuple(tokens), sure, tuple(0 if ok else rng.choice((1, 1, 2, 5, RANKS)) for ok in right))

    def __add__(self, other: Scripted) -> Scripted:
        return Scripted(self.tokens + other.tokens, self.sure + other.sure, self.rank + other.rank)

    @property
    def record(self) -> Record:
        params = SamplingParams(max_tokens=len(self.tokens))
        return Record(Task(PROMPT, params, 0, ()), self.tokens, ())

    def executor(self, profile: CostProfile) -> VirtualClock:
        """Both models on a virtual clock."""
        record, room = self.record, len(self.tokens) + 300
        target = Verifier(RecordedRunner(record, 1 << 31, room), RecordedSampler(record))
        return VirtualClock(target, MeteredDrafter(RecordedRunner(record, 1 << 31, room), ScriptedSampler(self)), profile)


class ScriptedSampler:
    """Says what the script has it say; off the text it is wrong and less sure."""

    def __init__(self, script: Scripted) -> None:
        self._script = script

    def propose(self, rows: Sequence[int], spots: Sequence[Spot], asks: Sequence[Ask]) -> list[Proposal]:
        return [self._proposal(row >= 0, spot.position - len(PROMPT), ask) for row, spot, ask in zip(rows, spots, asks, strict=True)]

    def _proposal(self, on_text: bool, at: int, ask: Ask) -> Proposal:
        script, choices = self._script, [WRONG + rank for rank in range(ask.width)]
        inside = at < len(script.tokens)
        if on_text and inside and script.rank[at] < ask.width:
            choices[script.rank[at]] = script.tokens[at]
        sure = (script.sure[at] if inside else 0.5) * (1.0 if on_text else ASTRAY)
        return Proposal(tuple(choices), sure if ask.measure == "top" else _as_entropy(sure))

    def pick(self, rows: Sequence[int], spots: Sequence[Spot]) -> list[int]:
        raise NotImplementedError

    def law(self, row: int, spot: Spot) -> Law:
        raise NotImplementedError

    def margin(self, row: int, spot: Spot, first: int, second: int) -> float:
        raise NotImplementedError

    def logprobs(self, row: int, token: int, top: int) -> TokenLogprobs:
        raise NotImplementedError


def _as_entropy(sure: float) -> float:
    """The bound whose usual top probability is `sure`."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if as_top(middle) < sure else (low, middle)
    return low


def fresh(count: int, start: int = 100) -> list[int]:
    """Tokens none of which comes twice: lookup finds nothing."""
    return list(range(start, start + count))


def repeating(count: int, period: int = 9, start: int = 50) -> list[int]:
    """The same few tokens again and again."""
    return [start + at % period for at in range(count)]


def play(script: Scripted, config: SpeculativeConfig, profile: CostProfile, experience: Experience | None = None) -> Session:
    """Decode the text, and check that it is the text."""
    record = script.record
    session = Session(0, PROMPT, record.task.request, len(record.text))
    loop = Loop(script.executor(profile))
    loop.join(session, METHODS[str(config.method)].start(session, config, experience))
    run_out(loop)
    session.stats.check()
    assert tuple(session.output) == script.tokens
    return session


def speedup(script: Scripted, profile: CostProfile, session: Session) -> float:
    return play(script, PLAINLY, profile).stats.decode_seconds / session.stats.decode_seconds


def methods_between(session: Session, start: int, stop: int) -> dict[str, int]:
    """Tokens by method in a part of the answer."""
    counts: dict[str, int] = {}
    for (at, method), (end, _) in zip(session.stats.choices, [*session.stats.choices[1:], (session.stats.emitted, "")], strict=True):
        counts[method] = counts.get(method, 0) + max(min(end, stop) - max(at, start), 0)
    return counts


KNOWLEDGE: dict[str, Callable[[CostProfile], Experience]] = {
    "known": Experience,
    "learned": lambda profile: Experience(LearnedCosts(profile.overlap)),
}


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
@pytest.mark.parametrize("hits", [0.0, 0.5, 0.95])
def test_where_speculation_cannot_pay_it_is_plain_decoding(hits: float, knowledge: str) -> None:
    script, experience = Scripted.of(fresh(300), hits, 1), KNOWLEDGE[knowledge](HOPELESS)
    sessions = [play(script, AUTO, HOPELESS, experience) for _ in range(3)]
    assert all(speedup(script, HOPELESS, session) >= (0.97 if at else 0.9) for at, session in enumerate(sessions))
    assert sessions[-1].stats.by_method["autoregressive"] >= 0.95 * 300


@pytest.mark.parametrize("profile", shipped_profiles())
@pytest.mark.parametrize("hits", [0.0, 0.3, 0.7, 0.95])
def test_it_is_never_slower_than_plain_decoding(hits: float, profile: str) -> None:
    script, costs = Scripted.of(fresh(400), hits, 2), load_profile(profile)
    experience = Experience(costs)
    first, later = (play(script, AUTO, costs, experience) for _ in range(2))
    assert speedup(script, costs, first) >= 0.95, "finding out costs too much"
    assert speedup(script, costs, later) >= 0.97


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
@pytest.mark.parametrize("hits", [0.5, 0.8])
@pytest.mark.parametrize("profile", ["c5", "h200-1b-8b", "h200-68m-7b"])
def test_it_is_near_the_best_fixed_method(profile: str, hits: float, knowledge: str) -> None:
    script, costs = Scripted.of(fresh(600), hits, 3), load_profile(profile)
    experience = KNOWLEDGE[knowledge](costs)
    chosen = [play(script, AUTO, costs, experience) for _ in range(2)][-1]
    fixed = [play(script, replace(config_of(arm), method=arm.method), costs) for arm in (*SERIAL, *OVERLAPPED) if not arm.look]
    best = min(session.stats.decode_seconds for session in fixed)
    assert best / chosen.stats.decode_seconds >= 0.95


def config_of(arm: Arm) -> SpeculativeConfig:
    return SpeculativeConfig(num_speculative_tokens=arm.length or 1, stop_below=arm.stop_below, max_branches=arm.width)


def test_what_is_found_is_verified_as_far_as_further_rows_are_cheap() -> None:
    flat, steep = (CostProfile(target=((1, 1.0), (16, last)), draft=((1, 0.1),)) for last in (1.0, 4.0))
    assert Prices(flat).found.length == 15 and Prices(steep).found.length <= 5


def test_text_that_repeats_is_looked_up() -> None:
    script = Scripted.of(repeating(300), 0.5, 4)
    session = play(script, AUTO, TEN, Experience(TEN))
    assert session.stats.by_method["lookup"] >= 0.9 * 300
    assert speedup(script, TEN, session) > 4


def test_without_a_draft_it_is_plain_decoding_or_lookup() -> None:
    for tokens in (fresh(200), repeating(200)):
        session = play(Scripted.of(tokens, 0.9, 5), AUTO, TEN, Experience(TEN, has_draft=False))
        assert session.stats.by_method.keys() <= {"autoregressive", "lookup"}
        assert session.stats.draft_busy == 0
    assert session.stats.by_method["lookup"] > 150


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
def test_the_choice_changes_where_a_code_block_begins_and_ends(knowledge: str) -> None:
    """Prose that the draft knows and that never repeats, around a block of code that repeats itself and that the draft does not know."""
    prose, code, more = Scripted.of(fresh(200), 0.85, 6), Scripted.of(repeating(200), 0.05, 7), Scripted.of(fresh(200, 5000), 0.85, 8)
    script = prose + code + more
    session = play(script, AUTO, TEN, KNOWLEDGE[knowledge](TEN))
    looked_up = [methods_between(session, start, start + 150).get("lookup", 0) for start in (50, 250, 450)]
    assert looked_up[0] < 15 and looked_up[1] > 130 and looked_up[2] < 50, looked_up
    parts = [play(part, AUTO, TEN, Experience(TEN)).stats.decode_seconds for part in (prose, code, more)]
    assert session.stats.decode_seconds < 1.1 * sum(parts)


def test_a_draft_that_becomes_useful_is_found_out() -> None:
    """Nothing repeats and nothing is drafted well, until the draft is always right; only a probe can tell."""
    script = Scripted.of(fresh(600), 0.02, 9) + Scripted.of(fresh(800, 5000), 0.97, 10)
    session = play(script, AUTO, BY_TURNS, Experience(BY_TURNS))
    assert methods_between(session, 150, 600)["autoregressive"] > 400
    drafted = sum(count for method, count in methods_between(session, 1000, 1400).items() if method not in ("autoregressive", "lookup"))
    assert drafted > 380


def test_probes_cost_little() -> None:
    script, experience = Scripted.of(fresh(1500), 0.02, 11), Experience(BY_TURNS)
    play(script, AUTO, BY_TURNS, experience)
    later = play(script, AUTO, BY_TURNS, experience)
    assert later.stats.drafted > 0, "it never looks again"
    assert speedup(script, BY_TURNS, later) >= 0.98


def test_what_one_request_has_shown_the_next_one_need_not_find_out() -> None:
    bad, good = Scripted.of(fresh(60), 0.02, 12), Scripted.of(fresh(60), 0.95, 13)
    experience = Experience(BY_TURNS)
    seconds = [play(bad, AUTO, BY_TURNS, experience).stats.decode_seconds for _ in range(3)]
    assert seconds[-1] < seconds[0]
    assert speedup(bad, BY_TURNS, play(bad, AUTO, BY_TURNS, experience)) >= 0.98
    learned = Experience(LearnedCosts())
    first, second = (play(good, AUTO, TEN, learned) for _ in range(2))
    assert second.stats.decode_seconds < 0.95 * first.stats.decode_seconds
    assert "autoregressive" not in second.stats.by_method


def test_a_draft_that_was_not_worth_its_while_does_not_read_the_next_prompt() -> None:
    script, experience = Scripted.of(fresh(200), 0.0, 14), Experience(HOPELESS)
    play(script, AUTO, HOPELESS, experience)
    later = play(script, AUTO, HOPELESS, experience)
    assert later.stats.draft_busy == 0 and later.stats.drafted == 0


def test_costs_are_learned_from_the_rounds() -> None:
    learned = LearnedCosts()
    profile = CostProfile(target=((1, 0.01), (5, 0.014), (16, 0.02)), draft=((1, 0.002), (6, 0.004)), slow_down=0.0005, host=0.001)
    play(Scripted.of(fresh(1000), 0.7, 15), AUTO, profile, Experience(learned))
    for rows in (1, 5):
        assert learned.target_seconds(rows) == pytest.approx(profile.target_seconds(rows), rel=0.1)
    assert learned.draft_seconds(1) == pytest.approx(0.002, rel=0.25)
    assert learned.host == pytest.approx(0.001)


class Stubborn(Pilot):
    """Stays with one arm."""

    def choose(self, pending: InFlight) -> Arm:
        self.arm, self._until = ONLY[-1], 1 << 30
        return super().choose(pending)


class Stubbornness(Experience):
    def pilot(self, session: Session, config: SpeculativeConfig) -> Pilot:
        return Stubborn(self, session, config)


ONLY: list[Arm] = []


@pytest.mark.parametrize("arm", (PLAIN, *LOOKUPS, *SERIAL, *OVERLAPPED), ids=str)
@pytest.mark.parametrize("profile", ["c5", "h200-1b-8b"])
def test_a_forecast_is_what_the_arm_takes(arm: Arm, profile: str) -> None:
    """The walker of an arm, on the true trail, against the arm itself on the virtual clock."""
    script = Scripted.of(repeating(200, 17), 0.8, 16) + Scripted.of(fresh(400), 0.7, 17) + Scripted.of(repeating(200), 0.9, 18)
    costs, walker = load_profile(profile), Walker(arm)
    walker.long.memory = 1e9
    walker.walk(true_trail(script), Prices(costs))
    ONLY.append(arm)
    taken = play(script, AUTO, costs, Stubbornness(costs)).stats
    assert walker.long.rate == pytest.approx((taken.emitted - 1) / taken.decode_seconds, rel=0.06)


@pytest.mark.parametrize("arm", [arm for arm in (*SERIAL, *OVERLAPPED) if not arm.look and arm.method != "adaptive"], ids=str)
def test_an_arm_is_its_method(arm: Arm) -> None:
    script = Scripted.of(fresh(400), 0.7, 17)
    ONLY.append(arm)
    alone, chosen = play(script, replace(config_of(arm), method=arm.method), TEN), play(script, AUTO, TEN, Stubbornness(TEN))
    assert chosen.stats.decode_seconds == pytest.approx(alone.stats.decode_seconds)
    assert chosen.stats.tested_at == alone.stats.tested_at


def true_trail(script: Scripted) -> Trail:
    habits = Habits()
    trail = Trail((*PROMPT, script.tokens[0]), habits, AUTO.ngram_max, AUTO.ngram_min)
    entries = iter(list(zip(script.sure, script.rank, strict=True))[1:])
    habits.imagine = lambda repeated=False: next(entries)  # type: ignore[method-assign]
    trail.follow([*PROMPT, *script.tokens])
    return trail
