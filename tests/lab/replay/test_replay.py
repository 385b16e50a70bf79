"""A replay is the run itself: the same tokens, the same counts, the same charged time, without the target and mostly
without the draft."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from specbranch.config import SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.core.methods import METHODS
from specbranch.core.orders import Context, TokenLogprobs, Verify
from specbranch.core.request import Request, Spot
from specbranch.core.runner import Ask, Feed, Trial
from specbranch.core.slots import ROOT
from specbranch.errors import BadParameter
from specbranch.files import write_whole
from specbranch.lab.replay.decode import Diverged, RecordDecoder, ReplayedModel
from specbranch.lab.replay.reader import READER_ROWS, Reader
from specbranch.lab.replay.record import RECORD_FORMAT, Record, Records, Task
from specbranch.lab.replay.runners import CANDIDATES_KEPT, NO_RECORD, KnownProposal, ProposalStore, RecordedRunner
from specbranch.lab.replay.signals import RecordedForecaster
from specbranch.lab.toys.toys import Logits, ToyRunner, ToySampler
from tiers import tiered
from toybench import PROFILE, VOCABULARY, Case, Ending, Moody, decode, law, plainly, virtual_clock

DRIFT = 0.3
ENDINGS = (Ending("length", 40), Ending("eos", 200, eos_ids=(2,)))
CASES = [
    Case((seed % 5, 3, 1), temperature, seed, ending)
    for seed in range(6)
    for temperature in (0.0, 0.9)
    for ending in ENDINGS
]
TWO_STAGE = ("confidence", "paper", "last")
FIXED = [
    SpeculativeConfig(method=name, policy=policy, num_speculative_tokens=length, max_branches=4, stop_below=0.5)
    for name, policy in (
        *((name, None) for name in METHODS if METHODS[name].policy != "planner"),
        *(("specbranch", p) for p in TWO_STAGE),
    )
    for length in (2, 6)
]
PLANNED = [SpeculativeConfig(method=name) for name in METHODS if METHODS[name].policy == "planner"]
CONFIGS = [*FIXED, *PLANNED]


class Heard:
    """What the toys' forecaster says along a record."""

    longest = 8

    def of(self, record: Record) -> RecordedForecaster:
        text, start = record.text, len(record.task.prompt)
        said = [Moody().signal((*law().logits_of(text[:at]), text[at]), at) for at in range(start, len(text))]
        return RecordedForecaster(start, said)


class CountingRunner(ToyRunner):
    """A toy that counts the rows it computes."""

    fed = forwards = widest = 0

    def _score(self, work: Sequence[Feed]) -> list[list[Logits]]:
        self.forwards += 1
        self.widest = max(self.widest, sum(len(item.tokens) for item in work))
        self.fed += sum(len(item.tokens) for item in work)
        return super()._score(work)


def record_of(case: Case) -> Record:
    answer = plainly(case, law())
    task = Task(case.prompt, case.params, case.seed, case.ending.eos_ids)
    return Record(task, answer.tokens, tuple(((token, 0.0),) for token in answer.tokens))


@pytest.fixture
def draft(tmp_path: Path) -> Iterator[ReplayedModel]:
    memory = ProposalStore(tmp_path / "memory.sqlite")
    yield ReplayedModel("toy", memory, CountingRunner(law(DRIFT)))
    memory.close()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[ReplayedModel]:
    memory = ProposalStore(tmp_path / "target.sqlite")
    yield ReplayedModel("toy", memory, CountingRunner(law()))
    memory.close()


QUICK = [*CONFIGS[::8], FIXED[[config.method for config in FIXED].index("lookahead")]]


@pytest.mark.parametrize(
    "config", tiered(CONFIGS, QUICK.__contains__), ids=lambda c: f"{c.method}-{c.policy}-{c.num_speculative_tokens}"
)
def test_a_replay_counts_and_charges_what_a_live_run_does(
    config: SpeculativeConfig, draft: ReplayedModel, target: ReplayedModel
) -> None:
    drafted = 0
    mine, theirs = Experience(PROFILE), Experience(PROFILE)  # each learns from its own runs
    for case in CASES:
        live = decode(virtual_clock(DRIFT), case, config, experience=mine).stats
        decoder = RecordDecoder(record_of(case), draft, Heard(), target)
        replayed = decoder.decode(config, PROFILE, experience=theirs)
        decoder.close()
        assert asdict(replayed) == asdict(live)
        drafted += live.rejected
    assert drafted > 50 or config.method == "autoregressive", "nothing was ever rejected"


@pytest.mark.parametrize("config", [FIXED[-1], *PLANNED], ids=lambda c: f"{c.method}-{c.policy}")
def test_what_was_drafted_once_is_never_drafted_again(
    config: SpeculativeConfig, draft: ReplayedModel, tmp_path: Path
) -> None:
    decoder = RecordDecoder(record_of(CASES[0]), draft)
    first = decoder.decode(config, PROFILE)
    runner = draft.runner
    assert isinstance(runner, CountingRunner)
    fed, misses = runner.fed, draft.memory.misses
    assert fed > 0
    assert asdict(decoder.decode(config, PROFILE)) == asdict(first)
    assert (runner.fed, draft.memory.misses) == (fed, misses)
    again = ProposalStore(tmp_path / "memory.sqlite")  # and from the file alone
    other = RecordDecoder(decoder.record, replace(draft, memory=again))
    assert asdict(other.decode(config, PROFILE)) == asdict(first)
    assert runner.fed == fed and again.misses == 0


def test_what_a_target_guessed_off_its_record_is_asked_once(target: ReplayedModel, tmp_path: Path) -> None:
    config, runner = SpeculativeConfig(method="lookahead", lookahead_window=4), target.runner
    assert isinstance(runner, CountingRunner)
    decoder = RecordDecoder(record_of(CASES[0]), None, target=target)
    first = decoder.decode(config, PROFILE)
    fed, misses = runner.fed, target.memory.misses
    assert fed > 0 < misses and first.accepted > 0
    assert asdict(decoder.decode(config, PROFILE)) == asdict(first)
    again = ProposalStore(tmp_path / "target.sqlite")  # and from the file alone
    assert asdict(
        RecordDecoder(decoder.record, None, target=replace(target, memory=again)).decode(config, PROFILE)
    ) == asdict(first)
    assert (runner.fed, target.memory.misses, again.misses) == (fed, misses, 0)
    decoder.close()
    other = RecordDecoder(decoder.record, None, target=replace(target, identity="another"))
    other.decode(config, PROFILE)
    other.close()
    assert target.memory.misses == 2 * misses


def test_a_method_that_has_the_target_guess_needs_the_target(draft: ReplayedModel) -> None:
    with pytest.raises(BadParameter, match="'lookahead' needs its tokens after guesses of its own"):
        RecordDecoder(record_of(CASES[0]), draft).decode(SpeculativeConfig(method="lookahead"), PROFILE)


def test_another_draft_seed_or_temperature_remembers_apart(draft: ReplayedModel) -> None:
    warm = next(case for case in CASES if case.temperature)
    others = [Case(warm.prompt, 0.5, warm.seed, warm.ending), Case(warm.prompt, warm.temperature, 77, warm.ending)]
    config = SpeculativeConfig(method="speculative")
    RecordDecoder(record_of(warm), draft).decode(config, PROFILE)
    for case in others:
        before = draft.memory.misses
        live = decode(virtual_clock(DRIFT), case, config).stats
        assert asdict(RecordDecoder(record_of(case), draft).decode(config, PROFILE)) == asdict(live)
        assert draft.memory.misses > before
    before = draft.memory.misses
    RecordDecoder(record_of(warm), replace(draft, identity="another")).decode(config, PROFILE)
    assert draft.memory.misses > before


def test_a_node_off_the_record_says_nothing_even_where_it_meets_the_record_again() -> None:
    record = Record(Task((1, 2), CASES[0].params, 0, ()), (3, 4, 5), ())
    runner = RecordedRunner(record, VOCABULARY, 100)
    runner.open(0, record.task.request)
    runner.extend(0, (1, 2))
    work = [Feed(0, (3, 9, 5, 4, 5, 6), (ROOT, 0, 1, 0, 3, 4))]
    found = runner.verify(work, [Trial(0, Verify(Context(0, ())), node, ()) for node in range(6)])()
    assert [one.token for one in found] == [4, NO_RECORD, NO_RECORD, 5, NO_RECORD, NO_RECORD]
    whole = Verify(Context(3, ()), (9, 5, 4, 5, 6), (ROOT, 0, ROOT, 2, 3))
    assert runner.verify([], [Trial(0, whole, 0, (1, 2, 3, 4, 5))])()[0].path == (2, 3)


def test_what_was_fed_can_be_asked_about_and_what_was_read_as_a_prompt_cannot() -> None:
    record = record_of(CASES[0])
    runner = RecordedRunner(record, VOCABULARY, 100)
    runner.open(0, record.task.request)
    known = [runner.knows(0, ROOT)]
    for move in (
        lambda: runner.extend(0, record.text[:2]),
        lambda: runner.feed([Feed(0, record.text[2:4], (ROOT, 0))]),
        lambda: runner.keep(0, (0, 1), 1),
        lambda: runner.keep(0, (), 0),
        lambda: runner.extend(0, record.text[3:4]),
        lambda: runner.feed([Feed(0, record.text[4:5], (ROOT,))]),
        lambda: runner.keep(0, (0,), 1),
        lambda: runner.rewind(0, 3),
    ):
        move()
        known.append(runner.knows(0, ROOT))
    assert known == [False, False, False, True, True, False, False, True, False]


def test_a_recorded_target_tells_the_log_probabilities_of_its_record() -> None:
    rows = tuple(((token, -0.1), (0, -3.0)) for token in (3, 4, 5))
    record = Record(Task((1, 2), CASES[0].params, 0, ()), (3, 4, 5), rows)
    runner = RecordedRunner(record, VOCABULARY, 100)
    runner.open(0, record.task.request)
    runner.extend(0, (1,))
    trial = Trial(0, Verify(Context(2, ()), (3, 0)), 0, (1, 2), logprobs=1)
    (found,) = runner.verify([Feed(0, (2, 3, 0), (ROOT, 0, 1))], [trial])()
    assert (found.path, found.token) == ((0,), 4)
    assert found.logprobs == (TokenLogprobs(-0.1, ((3, -0.1),)), TokenLogprobs(-0.1, ((4, -0.1),)))


def test_a_replay_by_the_ratio_rule_is_a_sentence() -> None:
    runner = RecordedRunner(record_of(CASES[0]), VOCABULARY, 100)
    with pytest.raises(BadParameter, match="replays the match rule only"):
        runner.open(0, Request(replace(CASES[0].params, temperature=0.9), 0, 3, rule="ratio"))


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=lambda case: str(case.temperature))
def test_reading_ahead_back_and_beside_gives_the_proposals_of_a_fresh_draft(case: Case) -> None:
    text = [1, 3, 0, 2, 5, 4, 1, 1, 0, 3, 2, 2, 5]
    reader = Reader(ToyRunner(law(DRIFT)), Record(Task((1,), case.params, case.seed, ()), tuple(text[1:]), ()))
    asked = [
        [1, 3, 0],
        [1, 3, 0, 2, 5, 0, 0],
        [1, 3, 0, 2, 5, 0, 4],
        text[:9],
        [1],
        [1, 3, 9 % 6, 1],
        text,
        [*text, 4, 4],
    ]
    for _ in range(2):
        for group in (asked[:1], asked[1:3], asked[3:4], asked[4:6], asked[6:]):
            assert reader.read(group) == [fresh(tokens, case) for tokens in group]


def fresh(tokens: list[int], case: Case) -> KnownProposal:
    row, spot = law(DRIFT).logits_of(tokens), Spot(case.session().request, len(tokens), lambda: tokens)
    top, bound = (
        ToySampler().propose([row], [spot], [Ask(0, 0, CANDIDATES_KEPT, measure=kind)])[0]
        for kind in ("top", "entropy")
    )  # type: ignore[arg-type]
    return KnownProposal(top.tokens, top.confidence, bound.confidence, top.odds)


@pytest.mark.slow
def test_what_was_read_ahead_is_not_read_when_it_is_asked_for_and_is_the_same(draft: ReplayedModel) -> None:
    runner = draft.runner
    assert isinstance(runner, CountingRunner)
    strayed = 0
    for case in CASES:
        decoder = RecordDecoder(record_of(case), draft)
        decoder.read_ahead()
        fed = runner.fed
        for config in CONFIGS:
            if config.method in ("speculative", "adaptive"):  # one lane, no longer than what is read ahead
                live = decode(virtual_clock(DRIFT), case, config).stats
                assert asdict(decoder.decode(config, PROFILE)) == asdict(live)
                strayed += live.rejected
        assert runner.fed <= fed + 6  # but for what lies beyond the end of the record
        decoder.close()
    assert strayed > 200
    assert runner.forwards < runner.fed / 3 and runner.widest <= READER_ROWS


def test_a_record_is_read_ahead_once(draft: ReplayedModel) -> None:
    runner = draft.runner
    assert isinstance(runner, CountingRunner)
    for case, more in ((CASES[0], True), (CASES[0], False), (CASES[2], True)):
        fed = runner.fed
        decoder = RecordDecoder(record_of(case), draft)
        decoder.read_ahead()
        decoder.close()
        assert (runner.fed > fed) == more


def test_a_record_that_is_not_what_the_target_says_is_noticed(draft: ReplayedModel) -> None:
    record = record_of(CASES[0])
    decoder = RecordDecoder(replace(record, tokens=record.tokens[:-3]), draft)
    with pytest.raises((Diverged, AssertionError, IndexError)):
        decoder.decode(CONFIGS[0], PROFILE)


def test_more_branches_than_are_remembered_is_a_sentence(draft: ReplayedModel) -> None:
    with pytest.raises(BadParameter, match="a replay stores 12"):
        RecordDecoder(record_of(CASES[0]), draft).decode(
            SpeculativeConfig(method="specbranch", policy="confidence", max_branches=13), PROFILE
        )


@pytest.mark.slow
def test_an_oracle_sends_nothing_that_is_wrong_and_is_quicker(draft: ReplayedModel) -> None:
    rejected, seconds = {"oracle": 0, "confidence": 0}, {"oracle": 0.0, "confidence": 0.0}
    for case in CASES:
        decoder = RecordDecoder(record_of(case), draft)
        for policy in rejected:
            config = SpeculativeConfig(
                method="specbranch", policy=policy, num_speculative_tokens=4, max_branches=4, stop_below=0.3
            )
            stats = decoder.decode(config, PROFILE)
            rejected[policy] += stats.rounds_rejected_inside
            seconds[policy] += stats.decode_seconds
        decoder.close()
    assert rejected["oracle"] == 0 < rejected["confidence"]
    assert seconds["oracle"] < seconds["confidence"]


@pytest.mark.parametrize("how", ["", "-stored"])
def test_another_targets_texts_count_as_ones_own(how: str, tmp_path: Path) -> None:
    task = Task((1, 2), CASES[0].params, 0, ())
    theirs = Records(tmp_path / "theirs", f"0123456789abcdef{how}")
    write_whole(theirs._path(task), json.dumps({"format": RECORD_FORMAT, "tokens": [3, 1], "rows": []}))
    ours = Records(tmp_path / "ours", "fedcba9876543210-stored", tmp_path / "theirs")
    assert ours.find(task) == theirs.find(task) == Record(task, (3, 1), ())
    assert Records(tmp_path / "ours", "fedcba9876543210").find(task) is None
    assert ours.find(replace(task, prompt=(1, 3))) is None
