"""The planner takes what pays: on scripted texts whose best way is known, by costs that are known or learned."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import fmean

import pytest

from specbranch.clock.profile import CostProfile
from specbranch.clock.shipped import load_profile, shipped_profiles
from specbranch.clock.virtual_clock import MeteredDrafter, VirtualClock
from specbranch.config import Part, SamplingParams, SpeculativeConfig
from specbranch.core.arms import Arm
from specbranch.core.costs import MeasuredCosts
from specbranch.core.experience import Experience, Tally
from specbranch.core.learning import BEYOND_PACE, MOST_BEYOND, SURE
from specbranch.core.lookup import Ngrams
from specbranch.core.loop import Loop
from specbranch.core.market import LaneGrant, RowGrant, granted
from specbranch.core.methods import METHODS
from specbranch.core.orders import Context, Orders, Reports, Span, Verify
from specbranch.core.planner import SPARED, Planner
from specbranch.core.runner import Ask, Feed, Proposal
from specbranch.core.session import Session
from specbranch.core.slots import ROOT
from specbranch.core.trees import NO_TREE, GrowingTree, Growth, Tree
from specbranch.core.way_choice import WayChoice
from specbranch.errors import BadParameter
from specbranch.exec.verifier import Verifier
from specbranch.lab.replay.record import Record, Task
from specbranch.lab.replay.runners import RecordedRunner
from tiers import tiered
from toybench import run_out

AUTO = SpeculativeConfig(method="auto")
PLAINLY = SpeculativeConfig(method="autoregressive")
TEN = load_profile("c10")
HOPELESS = CostProfile(target=((1, 0.01), (2, 0.02), (16, 0.16)), draft=((1, 0.01), (2, 0.02)), slow_down=0.01)
BY_TURNS = CostProfile(target=((1, 0.01), (16, 0.03)), draft=((1, 0.004), (64, 0.006)), overlap=False)
WRONG = 1_000_000  # what a scripted draft says where it is wrong; its further choices follow
PROMPT = (1, 2, 3)
SEEDS = range(3)  # of the texts on which one way to decode is held against another
NEVER = 12  # a rank that is never asked for
ASTRAY = 0.7  # times as sure is a draft that has left the text
FIXED = (
    *(SpeculativeConfig(method="speculative", num_speculative_tokens=n) for n in (1, 2, 4, 8)),
    *(SpeculativeConfig(method="adaptive", num_speculative_tokens=n) for n in (4, 10)),
    *(SpeculativeConfig(method="pearl", num_speculative_tokens=n) for n in (3, 5, 10)),
    *(
        SpeculativeConfig(method="specbranch", policy="confidence", num_speculative_tokens=n, stop_below=0.4)
        for n in (4, 8)
    ),
    SpeculativeConfig(method="lookup", num_speculative_tokens=10),
)


@dataclass(frozen=True)
class Scripted:
    """A text, and at each of its tokens how sure the draft is and which of its choices is the right one."""

    tokens: tuple[int, ...]
    sure: tuple[float, ...]
    rank: tuple[int, ...]

    @classmethod
    def of(cls, tokens: Sequence[int], hits: float, seed: int, others: Sequence[int] = (1, 1, 2, 5, NEVER)) -> Scripted:
        """A draft that is right so often, and surer where it is; where it is not, the right token is one of its
        `others`."""
        rng = random.Random(seed)
        right = [rng.random() < hits for _ in tokens]
        sure = tuple(rng.uniform(0.6, 1.0) if ok else rng.uniform(0.1, 0.7) for ok in right)
        return cls(tuple(tokens), sure, tuple(0 if ok else rng.choice(others) for ok in right))

    def __add__(self, other: Scripted) -> Scripted:
        return Scripted(self.tokens + other.tokens, self.sure + other.sure, self.rank + other.rank)

    @property
    def record(self) -> Record:
        params = SamplingParams(max_tokens=len(self.tokens))
        return Record(Task(PROMPT, params, 0, ()), self.tokens, ())

    def executor(self, profile: CostProfile) -> VirtualClock:
        """Both models on a virtual clock."""
        target = Verifier(RecordedRunner(self.record, 1 << 31, len(self.tokens) + 300))
        return VirtualClock(target, MeteredDrafter(ScriptedRunner(self)), profile)


class ScriptedRunner(RecordedRunner):
    """Says what the script has it say; off the text it is wrong and less sure."""

    def __init__(self, script: Scripted) -> None:
        super().__init__(script.record, 1 << 31, len(script.tokens) + 300)
        self._script = script

    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        self.feed(work)
        marks, lengths = self._marks[0], [len(self.slots(0).sequence(ask.node)) for ask in asks]
        return [
            self._proposal(marks[ask.node] >= 0, at - len(PROMPT), ask) for ask, at in zip(asks, lengths, strict=True)
        ]

    def _proposal(self, on_text: bool, at: int, ask: Ask) -> Proposal:
        script, choices = self._script, [WRONG + rank for rank in range(ask.width)]
        inside = at < len(script.tokens)
        if on_text and inside and script.rank[at] < ask.width:
            choices[script.rank[at]] = script.tokens[at]
        sure = (script.sure[at] if inside else 0.5) * (1.0 if on_text else ASTRAY)
        return Proposal(tuple(choices), sure if ask.measure == "top" else sure**2)


def fresh(count: int, start: int = 100) -> list[int]:
    """Tokens none of which comes twice: lookup finds nothing."""
    return list(range(start, start + count))


def repeating(count: int, period: int = 9, start: int = 50) -> list[int]:
    """The same few tokens again and again."""
    return [start + at % period for at in range(count)]


def play(
    script: Scripted,
    config: SpeculativeConfig,
    profile: CostProfile,
    experience: Experience | None = None,
    arms: list[str] | None = None,
) -> Session:
    """Decode the text, and check that it is the text; `arms` gets the arm of each token."""
    record = script.record
    session = Session(0, PROMPT, record.task.request, len(record.text))
    experience = experience or Experience(profile)
    if arms is not None:
        session.on_round = partial(note_arm, arms)
    loop = Loop(script.executor(profile), costs=experience.learned)
    loop.join(session, METHODS[str(config.method)].start(session, config, experience))
    run_out(loop)
    session.stats.check()
    assert tuple(session.output) == script.tokens
    return session


def note_arm(arms: list[str], orders: Orders, reports: Reports, added: int) -> None:
    arms += [orders.planned.name if orders.planned else "prefill"] * added


def speedup(script: Scripted, profile: CostProfile, session: Session) -> float:
    return play(script, PLAINLY, profile).stats.decode_seconds / session.stats.decode_seconds


KNOWLEDGE: dict[str, Callable[[CostProfile], Experience]] = {
    "known": Experience,
    "learned": lambda profile: Experience(MeasuredCosts(profile.overlap)),
}


@pytest.mark.slow
@pytest.mark.parametrize("knowledge", tiered(KNOWLEDGE, "learned".__eq__))
@pytest.mark.parametrize("hits", tiered((0.0, 0.5, 0.95), (0.5).__eq__))
def test_where_speculation_cannot_pay_it_is_plain_decoding(hits: float, knowledge: str) -> None:
    for seed in SEEDS:
        script, experience = Scripted.of(fresh(300), hits, seed), KNOWLEDGE[knowledge](HOPELESS)
        sessions = [play(script, AUTO, HOPELESS, experience) for _ in range(3)]
        first, second, third = [speedup(script, HOPELESS, session) for session in sessions]
        # Many rows are sent once or twice before their cost is known; a draft is tried for 1 % of the time of all.
        assert first >= 0.85 and second >= 0.93 and third >= 0.97 and (second + third) / 2 >= 0.97, seed
        assert sessions[-1].stats.arms.tokens["plain"] >= 0.95 * 300


@pytest.mark.parametrize("profile", tiered(shipped_profiles(), "h200-1b-8b".__eq__))
@pytest.mark.parametrize("hits", tiered((0.0, 0.3, 0.7, 0.95), (0.3).__eq__))
def test_it_is_never_slower_than_plain_decoding(hits: float, profile: str) -> None:
    costs = load_profile(profile)
    for seed in SEEDS:
        script, experience = Scripted.of(fresh(130), hits, seed), Experience(costs)
        first, later = (play(script, AUTO, costs, experience) for _ in range(2))
        assert speedup(script, costs, first) >= 0.95, "finding out costs too much"
        assert speedup(script, costs, later) >= 0.96  # a cheap draft that is never right is asked now and then


@cache
def best_fixed(script: Scripted, profile: str) -> float:
    """Seconds of the quickest fixed method, chosen knowing the text."""
    return min(play(script, config, load_profile(profile)).stats.decode_seconds for config in FIXED)


@pytest.mark.slow
@pytest.mark.parametrize("knowledge", tiered(KNOWLEDGE, "learned".__eq__))
@pytest.mark.parametrize("hits", tiered((0.5, 0.8), (0.5).__eq__))
@pytest.mark.parametrize("profile", tiered(("c5", "h200-1b-8b", "h200-68m-7b"), "h200-1b-8b".__eq__))
def test_it_is_ahead_of_every_fixed_method(profile: str, hits: float, knowledge: str) -> None:
    costs = load_profile(profile)
    for seed in SEEDS:
        script, experience = Scripted.of(fresh(300), hits, seed), KNOWLEDGE[knowledge](costs)
        planned = [play(script, AUTO, costs, experience) for _ in range(2)][-1]
        assert planned.stats.decode_seconds <= best_fixed(script, profile), seed


@pytest.mark.slow
def test_with_a_draft_auto_is_specbranch() -> None:
    script = Scripted.of(fresh(200), 0.7, 4) + Scripted.of(repeating(100), 0.5, 4)
    one, other = (play(script, SpeculativeConfig(method=method), TEN) for method in ("auto", "specbranch"))
    assert one.stats == other.stats


def test_rounds_begin_with_something_read_only_where_the_draft_works_beside_the_target() -> None:
    script = Scripted.of(fresh(200), 0.7, 4)
    with_overlap, without = (play(script, replace(AUTO, without=parts), TEN).stats for parts in ((), ("overlap",)))
    assert 0 < with_overlap.rounds_begun <= with_overlap.rounds_overlapped <= with_overlap.target_forwards
    assert 0 < with_overlap.both_busy <= with_overlap.draft_busy
    assert without.rounds_overlapped == 0 and without.both_busy == 0.0


def test_text_that_repeats_is_looked_up() -> None:
    for seed in SEEDS:
        script = Scripted.of(repeating(300), 0.5, seed)
        session = play(script, replace(AUTO, without=("overlap",)), TEN)
        assert session.stats.arms.tokens["lookup"] >= 0.8 * 300
        assert speedup(script, TEN, session) > 4


def test_without_a_draft_it_is_plain_decoding_or_lookup() -> None:
    for tokens in (fresh(200), repeating(200)):
        session = play(Scripted.of(tokens, 0.9, 5), AUTO, TEN, Experience(TEN, has_draft=False))
        assert session.stats.arms.tokens.keys() <= {"plain", "lookup"}
        assert session.stats.draft_busy == 0
    assert session.stats.arms.tokens["lookup"] > 150


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
def test_what_is_done_changes_where_a_code_block_begins_and_ends(knowledge: str) -> None:
    """Prose that the draft knows and that never repeats, around a block of code that repeats itself and that the
    draft does not know."""
    prose, code, more = (
        Scripted.of(fresh(200), 0.85, 6),
        Scripted.of(repeating(200), 0.05, 7),
        Scripted.of(fresh(200, 5000), 0.85, 8),
    )
    script = prose + code + more
    config = replace(AUTO, without=("overlap",))
    arms: list[str] = []
    session = play(script, config, BY_TURNS, KNOWLEDGE[knowledge](BY_TURNS), arms)
    looked_up = [arms[start : start + 150].count("lookup") for start in (50, 250, 450)]
    assert looked_up[0] < 15 and looked_up[1] >= 100 and looked_up[2] < 50, looked_up
    parts = [play(part, config, BY_TURNS).stats.decode_seconds for part in (prose, code, more)]
    assert session.stats.decode_seconds < 1.1 * sum(parts)


@pytest.mark.slow
def test_a_draft_that_becomes_useful_is_found_out() -> None:
    """Nothing repeats and nothing is drafted well, until the draft is always right; only a probe can tell."""
    for seed in SEEDS:
        script = Scripted.of(fresh(600), 0.02, seed, [NEVER]) + Scripted.of(fresh(400, 5000), 0.97, 10 + seed)
        arms: list[str] = []
        play(script, AUTO, BY_TURNS, arms=arms)
        assert arms[150:600].count("plain") > 430
        assert arms[720:1000].count("plain") < 40, seed


@pytest.mark.slow
def test_probes_cost_little() -> None:
    script, experience = Scripted.of(fresh(1500), 0.02, 11, [NEVER]), Experience(BY_TURNS)
    play(script, AUTO, BY_TURNS, experience)
    later = play(script, AUTO, BY_TURNS, experience)
    assert later.stats.draft_busy > 0, "it never looks again"
    assert speedup(script, BY_TURNS, later) >= 0.97


def test_what_one_request_has_shown_the_next_one_need_not_find_out() -> None:
    for seed in SEEDS:
        bad, experience = Scripted.of(fresh(60), 0.02, seed, [NEVER]), Experience(cheap := replace(TEN, overlap=False))
        first, *later = [play(bad, AUTO, cheap, experience).stats for _ in range(4)]
        assert fmean(stats.decode_seconds for stats in later) < 0.98 * first.decode_seconds
        assert fmean(stats.draft_busy for stats in later) < 0.75 * first.draft_busy


@pytest.mark.slow
def test_costs_are_learned_from_the_rounds() -> None:
    learned = MeasuredCosts()
    profile = CostProfile(target=((1, 0.01), (16, 0.02)), draft=((1, 0.002), (8, 0.004)), slow_down=0.0, host=0.001)
    play(Scripted.of(fresh(1000), 0.7, 15), AUTO, profile, Experience(learned))
    for rows in (1, 8, 16):
        assert learned.target_seconds(rows) == pytest.approx(profile.target_seconds(rows), rel=0.15)
    assert learned.draft_seconds(2) == pytest.approx(profile.draft_seconds(2), rel=0.3)
    assert learned.host == pytest.approx(0.001)


@pytest.mark.slow
@pytest.mark.parametrize("part", tiered(("overlap", "trees", "branches", "learning"), "trees".__eq__))
def test_every_part_brings_something(part: Part) -> None:
    """Left out, the same texts together take longer: alternatives are often right here, and the draft is worse than
    is usual."""
    longer = 0.0
    for seed in SEEDS:
        script = Scripted.of(fresh(300), 0.6, seed)
        whole, rest = (play(script, replace(AUTO, without=without), load_profile("c5")) for without in ((), (part,)))
        longer += rest.stats.decode_seconds - whole.stats.decode_seconds
        assert part != "trees" or rest.stats.siblings == 0
        assert part != "branches" or rest.stats.losing < 0.5 * whole.stats.losing
    assert longer > 0


@pytest.mark.slow
def test_without_lookup_nothing_is_looked_up() -> None:
    for seed in SEEDS[:1]:
        script = Scripted.of(repeating(200), 0.3, seed)
        whole, rest = (play(script, replace(AUTO, without=without), TEN) for without in ((), ("lookup",)))
        assert "lookup" not in rest.stats.arms.tokens
        assert whole.stats.decode_seconds < 0.5 * rest.stats.decode_seconds


def test_an_unknown_part_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(BadParameter, match=r"Unknown part of a policy 'tree'\. Did you mean 'trees'\?"):
        SpeculativeConfig(without=("tree",))  # type: ignore[arg-type]


@pytest.mark.parametrize(("method", "policy"), [("tree", "confidence"), ("auto", "fixed"), ("pearl", "planner")])
def test_a_policy_that_does_not_fit_is_refused(method: str, policy: str) -> None:
    config = SpeculativeConfig.from_dict({"method": method, "policy": policy})
    with pytest.raises(BadParameter, match=f"Method '{method}' cannot follow policy '{policy}'; expected"):
        METHODS[method].check(method, config)


def test_rows_are_sent_as_far_as_they_pay() -> None:
    flat, steep = (CostProfile(target=((1, 1.0), (16, last)), draft=((1, 0.1),)) for last in (1.0, 4.0))
    counts = {}
    for costs in (flat, steep):
        planner = Planner(Experience(costs))
        planner.begin(10)
        growing = GrowingTree(NO_TREE)
        growing.add_candidates(ROOT, growth_of(planner), range(4), (0.4, 0.3, 0.1, 0.05))
        growing.add_candidates(0, growth_of(planner), range(4), (0.8, 0.1, 0.05, 0.02))
        tree = growing.tree()
        counts[costs] = granted({0: planner.row_offer(tree, planner.candidates(tree, 100))})[0].count
    assert counts[flat] >= 6 and 1 <= counts[steep] <= 3, counts


def test_more_is_taken_in_and_read_at_once_only_where_the_draft_reads_on_beside_the_target() -> None:
    narrow = Growth((1.0,), Experience(TEN).insight.chances(), children=4, least=0.01)
    for costs, without, lanes, like in (
        (TEN, "", 16, replace(narrow, children=8, least=0.001)),
        (TEN, "overlap", 8, narrow),
        (TEN, "branches", 8, narrow),
        (TEN, "branches trees", 1, replace(narrow, children=1)),
        (BY_TURNS, "", 8, narrow),
    ):
        planner = Planner(
            Experience(costs),
            overlap="overlap" not in without,
            trees="trees" not in without,
            branches="branches" not in without,
        )
        planner.begin(10)
        growth = planner.plan_draft_before_verify(NO_TREE, 1, LaneGrant(True))
        assert growth is not None and len(growth.step) == lanes
        assert (growth.children, growth.least) == (like.children, like.least), without


def growth_rate(planner: Planner) -> float:
    return planner.row_offer(NO_TREE, []).rate


@pytest.mark.parametrize(("eight", "lanes"), [(0.001, 16), (0.0014, 6), (0.002, 5)])
def test_a_step_beside_the_target_is_so_wide_that_four_follow_each_other(eight: float, lanes: int) -> None:
    """The target takes as long as five narrow steps."""
    costs = CostProfile(target=((1, 0.005),), draft=((1, 0.001), (4, 0.001), (8, eight)))
    planner = Planner(Experience(costs))
    planner.begin(10)
    growing = GrowingTree(NO_TREE)
    growing.add_candidates(ROOT, growth_of(planner), range(4), (0.4, 0.3, 0.1, 0.05))
    beside = planner.plan_draft_during_verify(growing.tree(), RowGrant(3, 4, growth_rate(planner)))
    assert beside is not None and len(beside.step) == lanes


def test_a_wide_step_that_costs_little_more_is_made_however_short_the_target_takes() -> None:
    costs = CostProfile(target=((1, 0.002),), draft=((1, 0.001), (16, 0.0011)))
    planner = Planner(Experience(costs))
    planner.begin(10)
    growing = GrowingTree(NO_TREE)
    growing.add_candidates(ROOT, growth_of(planner), range(4), (0.4, 0.3, 0.1, 0.05))
    beside = planner.plan_draft_during_verify(growing.tree(), RowGrant(3, 4, growth_rate(planner)))
    assert beside is not None and len(beside.step) == 16


@pytest.mark.parametrize("batch_size", [1, 4])
def test_reading_beside_the_target_has_to_bring_more_than_beginning_with_the_verdict(batch_size: int) -> None:
    found = []
    for asking in (0.0, 0.0001, 0.05):
        costs = CostProfile(target=((1, 0.005), (64, 0.006)), draft=((1, 0.001), (16, 0.0011)), asking=asking)
        planner = Planner(Experience(costs))
        planner.begin(10, batch_size)
        growing = GrowingTree(NO_TREE)
        growing.add_candidates(ROOT, growth_of(planner), range(4), (0.4, 0.3, 0.1, 0.05))
        grant = granted({number: planner.row_offer(growing.tree(), [0]) for number in range(batch_size)})[0]
        found.append(planner.plan_draft_during_verify(growing.tree(), grant) is not None)
    # in a batch nothing is launched with a verdict, so nothing is lost
    assert found == [True, True, batch_size > 1]


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_reading_beside_the_target_spares_a_session_its_part_of_a_step_that_all_share(batch_size: int) -> None:
    costs = CostProfile(target=((1, 0.005), (64, 0.006)), draft=((1, 0.0001), (16, 0.0002)))
    planner = Planner(Experience(costs))
    planner.begin(10, batch_size)
    growing = GrowingTree(NO_TREE)
    growing.add_candidates(ROOT, growth_of(planner), range(4), (0.4, 0.3, 0.1, 0.05))
    offers = {number: planner.row_offer(growing.tree(), [0]) for number in range(batch_size)}
    grant = granted(offers)[0]
    beside = planner.plan_draft_during_verify(growing.tree(), grant)
    assert beside is not None
    assert beside.worth == pytest.approx(SPARED * grant.rate * costs.draft_seconds(batch_size) / batch_size)


def test_what_reading_is_worth_does_not_rise_with_candidates_that_are_hardly_sent() -> None:
    shares = []
    for rank in (0, SURE - 1, SURE):
        planner = Planner(Experience(TEN))
        planner.begin(10)
        growing = GrowingTree(NO_TREE)
        growing.add_candidates(ROOT, replace(growth_of(planner), least=0.0), range(8), (0.3, *[0.1] * 7))
        planner.learning.record_verdict(growing.tree(), [], rank)
        shares.append(planner.insight.cover.shares()[0])
    assert shares[0] == shares[1] > shares[2]


def growth_of(planner: Planner) -> Growth:
    return Growth((0.1,), planner.insight.chances())


BEGINS_AHEAD = replace(TEN, asking=0.0005)


def test_a_round_that_sends_nothing_may_have_the_draft_work_beside_it() -> None:
    """A step launched with a verdict comes before drafting only where looked-up text is sent."""
    planner = Planner(Experience(BEGINS_AHEAD))
    planner.begin(10)
    growing = GrowingTree(NO_TREE)
    growing.graft((5, 6, 7), 4, planner.insight.chances())
    assert planner.launches_lookup(growing.tree(), [0, 1]) and not planner.launches_lookup(NO_TREE, [])
    assert not Planner(Experience(TEN)).launches_lookup(growing.tree(), [0, 1]), "no launch with a verdict there"


@pytest.mark.parametrize("step", [0.0001, 0.1])
def test_what_follows_a_verdict_is_the_draft_where_that_pays_else_what_is_looked_up(step: float) -> None:
    planner = Planner(Experience(replace(BEGINS_AHEAD, draft=((1, step),))), ngrams=Ngrams([1, 2, 3, 9, 8, 7], 4))
    planner.begin(6)
    growing = GrowingTree(NO_TREE)
    growing.add_candidates(ROOT, growth_of(planner), (4, 5), (0.6, 0.2))
    growing.feed([0])
    follows = planner.launch_ahead(growing.tree(), 0)
    assert follows is not None
    assert follows((4,)) is None, "the draft has read it, and may have something to say"
    assert follows((5,)) == ("draft" if step < 0.01 else None), "plain decoding launches its own steps"
    assert follows((5, 1, 2, 3)) == "draft" if step < 0.01 else follows((5, 1, 2, 3))[:3] == (9, 8, 7)  # type: ignore[index]


def test_what_is_saved_for_a_draft_that_does_not_pay_is_gone_once_it_is_asked() -> None:
    experience = Experience(TEN)
    round_of = Orders(verify=Verify(Context(0, (1,)))), Reports(verifying=Span(0.0, 1.0))
    for _ in range(10):
        experience.record_forwards(*round_of, 1)
    experience.reset_probe_credit()
    assert not experience.pay_probe(0.001), "it was saved up while the draft was asked"
    for _ in range(10):
        experience.record_forwards(*round_of, 1)
    assert experience.pay_probe(0.09) and not experience.pay_probe(0.001)


def test_a_price_is_paid_only_beyond_the_time_that_is_free() -> None:
    growth = Growth(
        (1.0, 1.5), Experience(TEN).insight.chances(), free_time=2.0, target_delay=0.1, draft_delay=0.5, worth=1.0
    )
    assert growth.seconds(0.0, 1) == 1.5 and growth.seconds(2.5, 1) == 1.0
    assert growth.price(0.0, 1) == pytest.approx(0.1)  # it fits; the target is held up
    assert growth.price(1.0, 1) == pytest.approx(2.5 - 2.1 + 0.1)
    assert growth.price(3.0, 2) == pytest.approx(1.5)
    assert growth.pace(0.0, [0.9, 0.8]) == 2 and growth.pace(3.0, [0.9, 0.2]) == 0


def test_a_tally_begins_with_the_usual_and_forgets_slowly() -> None:
    tally = Tally((0.5,), trust=10.0, memory=100.0)
    assert tally.shares() == (0.5,)
    for _ in range(300):
        tally.add(0, True)
    assert tally.shares()[0] > 0.95
    for _ in range(100):
        tally.add(0, False)
    assert tally.shares()[0] < 0.6


def stated_truly(count: int, seed: int) -> Scripted:
    """A draft that is right as often as it says; its other candidates are wrong."""
    rng = random.Random(seed)
    sure = [rng.uniform(0.2, 0.98) for _ in range(count)]
    return Scripted(tuple(fresh(count)), tuple(sure), tuple(0 if rng.random() < said else NEVER for said in sure))


@pytest.mark.slow
def test_every_round_and_token_counts_for_one_arm() -> None:
    script, experience = Scripted.of(fresh(150), 0.7, 4) + Scripted.of(repeating(100), 0.5, 4), Experience(TEN)
    rounds = tokens = 0
    for _ in range(2):
        arms: list[str] = []
        stats = play(script, AUTO, TEN, experience, arms).stats
        counted = stats.arms.by_name.values()
        assert sum(arm.rounds for arm in counted) == stats.target_forwards
        assert stats.arms.tokens == Counter(arms[1:])
        assert sum(arm.seconds for arm in counted) == pytest.approx(stats.decode_seconds)
        rounds, tokens = rounds + stats.target_forwards, tokens + stats.emitted - 1
    life = experience.arms.by_name.values()
    assert (sum(arm.rounds for arm in life), sum(arm.tokens for arm in life)) == (rounds, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("profile", tiered(("c10", "h200-1b-8b", "h200x2-1b-8b"), "h200-1b-8b".__eq__))
def test_what_the_model_expects_of_an_arm_is_what_is_seen(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft is as sure off the text as on it; otherwise the shape of a tree would give the text away."""
    monkeypatch.setattr(sys.modules[__name__], "ASTRAY", 1.0)
    costs = load_profile(profile)
    experience = Experience(costs)
    for seed in SEEDS:
        play(stated_truly(300, seed), AUTO, costs, experience)
    stats = play(stated_truly(1000, 9), AUTO, costs, experience).stats
    whole = Arm()
    for arm in stats.arms.by_name.values():
        whole.add(arm)
        assert arm.rounds < 20 or arm.seconds == pytest.approx(arm.expected_seconds, rel=0.1)
    assert whole.seen == pytest.approx(whole.expected, rel=0.1)
    chains = [arm for name, arm in stats.arms.by_name.items() if "chain" in name and arm.rounds > 50]
    assert chains and all(arm.seen == pytest.approx(arm.expected, rel=0.1) for arm in chains)


def test_other_methods_have_no_arms() -> None:
    assert not play(Scripted.of(fresh(30), 0.7, 4), PLAINLY, TEN).stats.arms.by_name


# --- what a request has shown so far ---


def scored(planner: Planner, said: float) -> Tree:
    """The draft's first candidate after the text, of which it is so sure."""
    planner.begin(10)
    growth = planner.plan_draft_before_verify(NO_TREE, 1, LaneGrant(True))
    assert growth is not None
    growing = GrowingTree(NO_TREE)
    growing.add_candidates(ROOT, growth, (7,), (said,))
    return replace(growing.tree(), root_scored=True)


def judge(planner: Planner, count: int, share: float, said: float = 0.85) -> float:
    """Have the target agree with such a share of first candidates, evenly; returns the chance of the next one."""
    for at in range(count):
        right = int((at + 1) * share) > int(at * share)
        planner.learning.record_verdict(scored(planner, said), [], 7 if right else 8)
    return scored(planner, said).nodes[0].chance


@pytest.mark.parametrize("earlier", [0, 3000])
def test_the_chance_of_a_candidate_follows_the_text_within_50_tokens_and_back(earlier: int) -> None:
    experience = Experience(TEN)
    judge(Planner(experience), earlier, 0.9)
    planner = Planner(experience)
    assert judge(planner, 100, 0.9) == pytest.approx(0.9, abs=0.03)
    assert judge(planner, 50, 0.3) < 0.55, "more than half of the way, however much was learned earlier"
    assert not earlier or scored(Planner(experience), 0.85).nodes[0].chance > 0.85, "it is this request's own"
    # Without earlier texts this one is all that is known; a third of it was bad, so 0.75 is its mean.
    assert judge(planner, 50, 0.9) > (0.85 if earlier else 0.75)


def timed(profile: CostProfile) -> MeasuredCosts:
    """Costs as a rehearsal leaves them."""
    costs = MeasuredCosts(profile.overlap)
    for rows in (1, 2, 4, 8, 16, 32):
        costs.target.set(rows, profile.target_seconds(rows))
    for width in (1, 2, 4, 8):
        costs.step.set(width, profile.draft_seconds(width))
    return costs


def slowed(profile: CostProfile, times: float) -> CostProfile:
    target, draft = (tuple((n, times * s) for n, s in points) for points in (profile.target, profile.draft))
    return replace(profile, target=target, draft=draft)


@pytest.mark.parametrize("times", [0.5, 1.0, 2.0])
def test_on_a_slow_machine_drafts_are_used_as_before(times: float) -> None:
    experience, script = Experience(timed(BY_TURNS)), Scripted.of(fresh(300), 0.9, 3)
    play(script, AUTO, BY_TURNS, experience)
    arms: list[str] = []
    session = play(script, AUTO, slowed(BY_TURNS, times), experience, arms)
    assert arms[50:300].count("plain") < 25
    assert speedup(script, slowed(BY_TURNS, times), session) > 1.4


def drafted_round(planner: Planner, accepted: int, seconds: float) -> None:
    """A round in which the draft was asked for more than it promised, or for less."""
    tree = scored(planner, 0.9)
    planner.learning.accept(tree, [0] * accepted, [0] * accepted)
    WayChoice(planner).record_round(1, "planned", accepted + 1, seconds)


def test_what_drafts_bring_beyond_their_first_step_counts_for_and_against_them() -> None:
    planner = Planner(Experience(BY_TURNS))
    for _ in range(20):  # chains of five
        drafted_round(planner, 5, 0.03)
    beyond = planner.insight.beyond
    assert beyond > 0.5
    for _ in range(100):  # plain rounds
        WayChoice(planner).record_round(1, "plain", 1, 0.01)
    assert 0.0 < planner.insight.beyond < 0.5 * beyond, "it fades while no draft is asked"
    for _ in range(40):  # the same step brings nothing, and the round takes three times as long
        drafted_round(planner, 0, 0.03)
    assert planner.insight.beyond < -0.5
    before = planner.insight.beyond
    drafted_round(planner, 0, 1e6)
    assert planner.insight.beyond > before - BEYOND_PACE * MOST_BEYOND, "one round hardly counts"


def test_a_draft_that_has_much_to_catch_up_with_promises_as_little_as_it_brings() -> None:
    """Neither the seconds of prefill nor their price change what drafts are expected to bring."""
    costs = replace(BY_TURNS, draft=((1, 0.004), (64, 0.064)))
    planner = Planner(Experience(costs))
    planner.begin(4000)
    assert planner.plan_draft_before_verify(NO_TREE, 4000, LaneGrant(True)) is not None
    WayChoice(planner).record_round(1, "planned", 1, 0.01 + costs.draft_seconds(4000))
    assert planner.insight.beyond == pytest.approx(0.0, abs=BEYOND_PACE * MOST_BEYOND)


def test_what_a_probe_brings_is_given_back_and_no_more() -> None:
    for accepted, again in ((0, False), (1, True)):
        experience = Experience(BY_TURNS)
        experience.return_probe(0.1)
        planner = Planner(experience)
        planner.begin(10)
        assert planner.plan_draft_before_verify(NO_TREE, 1, LaneGrant(False)) is not None, "a probe"
        planner.learning.accept(scored(planner, 0.9), [0] * accepted, [0])
        experience.reset_probe_credit()
        WayChoice(planner).record_round(1, "planned", 1 + accepted, 0.015)
        assert experience.has_credit(BY_TURNS.draft_seconds(1)) == again
        assert not experience.has_credit(0.01)
