"""Every method on every executor gives, token for token, what plain decoding gives with the same seed.

Thousands of runs on toys whose law depends on every token. Each cell (method × executor × temperature) also proves that
it was hard enough. It counts branch hits on other heads, rejections inside chains, whole chains accepted, and ends
inside accepted blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import zip_longest
from typing import NamedTuple

import pytest

from specbranch.config import HeadKind, SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.core.loop import Executor
from specbranch.core.methods import MethodRounds
from specbranch.core.orders import Branch, Context, Verdict
from specbranch.core.policy import Entropy, Policy
from specbranch.core.session import Session, Watcher
from specbranch.core.trace import Trace
from specbranch.core.tree_rounds import decode_tree
from specbranch.exec.drafter import Drafter
from specbranch.exec.process import Process
from specbranch.exec.serial import Serial
from specbranch.lab.toys.toys import ToyRunner
from tiers import covering, each_pair, each_value, tiered
from toybench import (
    PROFILE,
    VOCABULARY,
    Answer,
    Case,
    Ending,
    Timeless,
    Wanderer,
    acceptance,
    answer,
    decode,
    law,
    make_verifier,
    plainly,
    process,
    serial,
    streams,
    total,
    virtual_clock,
    wandering,
)

TEMPERATURES = (0.0, 0.7, 1.3)
DRIFTS = (0.08, 0.3, 0.8)
SEEDS = 24
# without a draft: the vocabulary of texts in which n-grams recur, and do not end too soon
BY_NGRAMS = {"lookup": 2, "lookahead": 3}
KINDS = ("serial", "process", "process until target", "streams", "streams until target", "clock", "clock until target")
FORKING = ("pearl", "confidence")  # the methods that can draft until the target is done
ENOUGH = 100

CONFIGS = {
    "autoregressive": SpeculativeConfig(method="autoregressive"),
    "speculative": SpeculativeConfig(method="speculative", num_speculative_tokens=4),
    "adaptive": SpeculativeConfig(method="adaptive", num_speculative_tokens=4),
    "pearl": SpeculativeConfig(method="pearl", num_speculative_tokens=4),
    "confidence": SpeculativeConfig(
        method="specbranch", policy="confidence", num_speculative_tokens=4, max_branches=24, stop_below=0.45
    ),
    "paper": SpeculativeConfig(
        method="specbranch", policy="paper", num_speculative_tokens=4, max_branches=24, stop_below=0.3
    ),
    "last": SpeculativeConfig(
        method="specbranch", policy="last", num_speculative_tokens=4, max_branches=24, stop_below=0.3
    ),
    "tree": SpeculativeConfig(method="tree"),
    "specbranch": SpeculativeConfig(method="specbranch", ngram_max=2),
    "lookup": SpeculativeConfig(method="lookup", num_speculative_tokens=2),
    "lookahead": SpeculativeConfig(method="lookahead", lookahead_window=4, lookahead_ngram=3, lookahead_candidates=4),
    "auto": SpeculativeConfig(method="auto", ngram_max=2),
    "wandering": SpeculativeConfig(method="auto"),  # plans without a reason
}
PLANNED = ("tree", "specbranch", "auto", "wandering")


def stops_after_a_zero_and_a_one() -> Watcher:
    """Stand for a stop string of two tokens."""
    seen: list[int] = []

    def watch(token: int) -> bool:
        seen.append(token)
        return seen[-2:] == [0, 1]

    return watch


ENDINGS = (
    Ending("long", max_tokens=64),
    Ending("end token", eos_ids=(1,)),
    Ending("odd limit", max_tokens=31),
    Ending("one token", max_tokens=1),
    Ending("stop ids", stop_token_ids=(0, 4)),
    Ending("end token ignored", eos_ids=(1,), ignore_eos=True),
    Ending("watched", watch=stops_after_a_zero_and_a_one),
    Ending("long", max_tokens=64),
    Ending("two tokens", max_tokens=2),
    Ending("both", eos_ids=(1,), stop_token_ids=(0,), ignore_eos=True, watch=stops_after_a_zero_and_a_one),
)


class Strict(Entropy):
    """AdaEDL with a threshold that these small vocabularies can fall under; counts the chains that ended early."""

    ended_early = 0

    def __init__(self, length: int) -> None:
        super().__init__(length, threshold=0.47)

    def observe(self, pending: Branch, verdict: Verdict) -> None:
        super().observe(pending, verdict)
        Strict.ended_early += len(pending.tokens) < self.length


class Cell(NamedTuple):
    """One method on one executor at one temperature."""

    temperature: float
    method: str
    kind: str

    @property
    def quick(self) -> bool:
        """Where the models take turns, one method; `SAMPLED` has a few answers of all the others."""
        return self.temperature == 0.7 and self.kind == "serial" and self.method == "pearl"

    @property
    def until_target(self) -> bool:
        return self.kind.endswith("until target")

    @property
    def vocabulary(self) -> int:
        return BY_NGRAMS.get(self.method, VOCABULARY)

    @property
    def drafts(self) -> tuple[float, ...]:
        return DRIFTS if self.method not in (*BY_NGRAMS, "autoregressive") else (0.0,)

    def config(self) -> SpeculativeConfig:
        # Until the target is done: longer than there is time for, so that it is time that ends a branch.
        return (
            replace(CONFIGS[self.method], until_target=True, num_speculative_tokens=6)
            if self.until_target
            else CONFIGS[self.method]
        )

    def policy(self) -> Policy | None:
        return Strict(CONFIGS["adaptive"].num_speculative_tokens) if self.method == "adaptive" else None

    def experience(self) -> Experience | None:
        return Timeless(PROFILE) if self.method in PLANNED else None

    @property
    def start(self) -> Callable[[Session], MethodRounds] | None:
        return wandering if self.method == "wandering" else None

    @property
    def blocks(self) -> int:
        """How many blocks of cases may be tried: where lengths depend on the clock, one may not be hard enough."""
        return 5 if self.executor == "process until target" else 1

    @property
    def executor(self) -> str:
        """A planner drafts until the target is done, wherever that is a time that passes."""
        return "process until target" if self.kind == "process" and self.method in PLANNED else self.kind

    def cases(self, block: int = 0) -> list[Case]:
        count = (4 if self.method in BY_NGRAMS else 2 if self.method in PLANNED else 1) * SEEDS
        return [case(block * count + seed, self.temperature, self.vocabulary) for seed in range(count)]


CELLS = [
    Cell(t, m, k)
    for t in TEMPERATURES
    for m in CONFIGS
    for k in KINDS
    if m in FORKING or not k.endswith("until target")
]

# Every method on every executor, and each of the two at every temperature.
SAMPLED = [CELLS[number] for number in covering(CELLS)]


def case(seed: int, temperature: float, vocabulary: int = VOCABULARY) -> Case:
    # The prompt varies by more than the seed, or all greedy runs would be one. Some prompts are longer than what is
    # computed row by row.
    prompt = tuple((seed * 7 + i * i) % vocabulary for i in range(3 + seed % 4 * 9))
    return Case(
        (*prompt, seed % vocabulary, seed // vocabulary % vocabulary), temperature, seed, ENDINGS[seed % len(ENDINGS)]
    )


@cache
def truth(request: Case, vocabulary: int) -> Answer:
    return plainly(request, law(0.0, vocabulary))


@pytest.fixture(scope="module")
def executor_of() -> Iterator[Callable[[str, float, int], Executor]]:
    """Executors, each made once and used by many sessions, as a service would."""
    with ExitStack() as stack:

        @cache
        def child(drift: float, vocabulary: int, target_seconds: float, draft_seconds: float) -> Process:
            made = process(drift, vocabulary, target_seconds, draft_seconds)
            stack.callback(made.close)
            return made

        def make(kind: str, drift: float, vocabulary: int) -> Executor:
            if kind == "serial":
                return serial(drift, vocabulary)
            if kind.startswith("clock"):
                return virtual_clock(drift, vocabulary)
            if kind.startswith("streams"):
                return streams(drift, vocabulary)
            # An instant target would be done before the draft has started, and no branch would be drafted.
            seconds = (0.001, 0.00005) if kind.endswith("until target") else (0.0, 0.0)
            return child(drift, vocabulary, *seconds)

        yield make


def run_cell(
    cell: Cell, executor_of: Callable[[str, float, int], Executor], trace: Trace
) -> dict[float, list[Session]]:
    """Run the cases of a cell with each draft; every answer is compared as it comes."""
    runs: dict[float, list[Session]] = {drift: [] for drift in cell.drafts}
    for drift, block in ((drift, block) for block in range(cell.blocks) for drift in cell.drafts):
        if block and min(hardness(cell, runs).values()) >= enough(cell):
            break
        executor, experience = executor_of(cell.executor, drift, cell.vocabulary), cell.experience()
        for request in cell.cases(block):
            session = decode(executor, request, cell.config(), trace, cell.policy(), experience, cell.start)
            assert answer(session) == truth(request, cell.vocabulary), (cell, drift, request)
            runs[drift].append(session)
    return runs


def enough(cell: Cell) -> int:
    """How often each hard case must have come up.

    The planner avoids what does not pay, so it meets fewer; how far a draft in a process of its own gets depends on
    the machine.
    """
    return ENOUGH // 2 if cell.method in PLANNED or cell.kind == "process" else ENOUGH


def hardness(cell: Cell, runs: dict[float, list[Session]]) -> dict[str, int]:
    """The counts that say that a cell's runs met what could have gone wrong."""
    sessions = [session for of_one in runs.values() for session in of_one]
    names = ["rounds_rejected_inside", "rounds_all_accepted"] if cell.method != "autoregressive" else []
    names += (
        ["branch_hits_other"]
        if cell.method in ("confidence", "paper", "last", "specbranch", "auto", "wandering")
        else []
    )
    names += ["siblings"] if cell.method in (*PLANNED, "lookahead") else []
    return {name: total(sessions, name) for name in names}


@pytest.mark.parametrize(
    "cell",
    tiered(CELLS, Cell.quick.fget),
    ids=lambda cell: f"{cell.method}-{cell.kind}-{cell.temperature}".replace(" ", "-"),
)
def test_output_is_that_of_plain_decoding(cell: Cell, executor_of: Callable[[str, float, int], Executor]) -> None:
    trace, Strict.ended_early = Trace(), 0
    runs = run_cell(cell, executor_of, trace)
    sessions = [session for of_one in runs.values() for session in of_one]
    assert {session.finished for session in sessions} == {"stop", "length"}
    if cell.method == "autoregressive":
        return
    counts = hardness(cell, runs)
    assert min(counts.values()) >= enough(cell), counts
    assert sum(s.finished == "stop" and s.origins[-1] == "draft" for s in sessions) >= 2, (
        "no end inside an accepted block"
    )
    if cell.method in ("specbranch", "auto", "wandering"):
        hits = [sum(column) for column in zip_longest(*(s.stats.hits_at for s in sessions), fillvalue=0)]
        assert sum(count >= 20 for count in hits) >= 3, f"branches are hit at too few places: {hits}"
    if cell.method in PLANNED:
        return
    if cell.method == "adaptive":
        assert Strict.ended_early >= ENOUGH
    if cell.until_target:
        lengths = [max(event.branches) for event in trace.events if event.branches]
        assert sum(1 < length < cell.config().num_speculative_tokens for length in lengths) >= ENOUGH, (
            "time ended no branch"
        )
    rates = [acceptance(of_one) for of_one in runs.values()]
    assert all(0.2 <= rate <= 0.95 for rate in rates), rates
    assert len(rates) == 1 or (rates[0] > 0.75 and rates[-1] < 0.65), rates


@pytest.mark.parametrize(
    "cell", SAMPLED, ids=lambda cell: f"{cell.method}-{cell.kind}-{cell.temperature}".replace(" ", "-")
)
def test_a_few_answers_of_every_method_on_every_executor_are_those_of_plain_decoding(
    cell: Cell, executor_of: Callable[[str, float, int], Executor]
) -> None:
    drift = cell.drafts[len(cell.drafts) // 2]
    executor, experience = executor_of(cell.executor, drift, cell.vocabulary), cell.experience()
    for request in cell.cases()[1:4]:  # they end by a token, by an odd limit, and after one token
        session = decode(executor, request, cell.config(), None, cell.policy(), experience, cell.start)
        assert answer(session) == truth(request, cell.vocabulary), request


def test_thousands_of_runs_are_compared() -> None:
    assert sum(len(cell.cases()) * len(cell.drafts) for cell in CELLS) >= 3000


@each_value
@pytest.mark.parametrize("kind", ["serial", "process", "streams", "clock"])
@pytest.mark.parametrize("method", ["speculative", "adaptive", "pearl", "confidence"])
def test_a_perfect_draft_is_never_rejected(
    method: str, kind: str, executor_of: Callable[[str, float, int], Executor]
) -> None:
    """Faults on the draft's side cannot change the output; here they show, since draft and target share law and
    noise."""
    executor = executor_of(kind, 0.0, VOCABULARY)
    cell = Cell(0.0, method, kind)
    for temperature in TEMPERATURES:
        sessions = [decode(executor, case(seed, temperature), cell.config()) for seed in range(10)]
        assert total(sessions, "accepted_at") == total(sessions, "tested_at") > 100
        assert total(sessions, "branch_hits") == total(sessions, "branch_points")
        assert total(sessions, "branch_hits_other") == 0


@pytest.mark.parametrize("kind", tiered(("serial", "process", "streams", "clock"), "serial".__eq__))
@pytest.mark.parametrize("method", PLANNED)
def test_a_perfect_draft_is_never_rejected_by_a_planner(
    method: str, kind: str, executor_of: Callable[[str, float, int], Executor]
) -> None:
    """What the draft likes best is what the target says, in the tree and at every branch; an end ends what is looked
    up, too."""
    executor, cell = executor_of(kind, 0.0, VOCABULARY), Cell(0.0, method, kind)
    config = replace(cell.config(), without=("lookup",))
    for temperature in TEMPERATURES:
        experience, start = Timeless(PROFILE), cell.start and (lambda session: decode_tree(session, Wanderer(session)))
        sessions = [
            decode(executor, case(seed, temperature), config, None, None, experience, start) for seed in range(10)
        ]
        assert total(sessions, "accepted") > 100 and total(sessions, "branch_hits_other") == 0
        assert total(sessions, "rejected") == 0 or method == "wandering"  # which may send the second best alone


BY_RATIO = ("autoregressive", "speculative", "adaptive", "pearl", "confidence", *BY_NGRAMS)


def ratio_case(seed: int, temperature: float) -> Case:
    plain = case(seed, temperature)
    return Case(plain.prompt, temperature, seed, plain.ending, rule="ratio")


@each_pair
@pytest.mark.parametrize("heads", ["sampled", "top"])
@pytest.mark.parametrize("kind", ["process", "streams", "clock"])
@pytest.mark.parametrize("method", BY_RATIO)
def test_under_ratio_every_executor_gives_what_serial_gives(
    method: str, kind: str, heads: HeadKind, executor_of: Callable[[str, float, int], Executor]
) -> None:
    config = replace(CONFIGS[method], rule="ratio", heads=heads)
    for drift, temperature in ((0.06, 0.7), (0.3, 1.3)):
        executor, reference = executor_of(kind, drift, VOCABULARY), serial(drift)
        sessions: list[Session] = []
        for seed in range(3):
            request = ratio_case(seed, temperature)
            session, expected = decode(executor, request, config), decode(reference, request, config)
            assert answer(session) == answer(expected)
            assert session.stats.accepted_at == expected.stats.accepted_at
            sessions.append(session)
        assert method in ("autoregressive", *BY_NGRAMS) or 0 < acceptance(sessions) < 1


def test_under_ratio_another_seed_gives_another_output() -> None:
    """The comparison above would be empty if the seed did not matter."""
    executor = serial(0.3)
    outputs = {
        answer(decode(executor, Case((1, 2), 1.3, seed, ENDINGS[0], "ratio"), CONFIGS["speculative"]))
        for seed in range(20)
    }
    assert len(outputs) == 20


class CountingDrafter(Drafter):
    """Counts how often it was sent a whole sequence."""

    sent_whole = 0

    def stale(self, session: int, on: Context) -> bool:
        found = super().stale(session, on)
        self.sent_whole += found
        return found


def test_a_draft_with_a_shorter_context_only_stops_helping() -> None:
    draft = CountingDrafter(ToyRunner(law(0.06), context_length=16, tail=24))
    executor = Serial(make_verifier(), draft)
    for method in ("speculative", "pearl", "confidence", "tree", "specbranch"):
        request = Case((1, 2, 3), 0.7, 5, Ending("long", max_tokens=120))
        session = decode(
            executor, request, replace(CONFIGS[method], without=("lookup",)), experience=Experience(PROFILE)
        )
        assert answer(session) == truth(request, VOCABULARY)
        assert "draft" in session.origins[:14]
        assert "draft" not in session.origins[50:]
    assert draft.sent_whole == 0, "it gets whole sequences again and again"


@pytest.mark.parametrize("method", ["speculative", "adaptive", "pearl", "confidence", "tree", "specbranch"])
def test_a_draft_that_lost_nothing_is_never_sent_a_whole_sequence(method: str) -> None:
    draft = CountingDrafter(ToyRunner(law(0.3)))
    for seed in range(4):
        decode(Serial(make_verifier(), draft), case(seed, 0.7), CONFIGS[method], experience=Timeless(PROFILE))
    assert draft.sent_whole == 0
