"""Tuning: the best setting of each method, found by replay, the same every time, and paid for once."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from specbranch.clock.profile import CostProfile
from specbranch.clock.shipped import load_profile
from specbranch.config import SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.core.methods import METHODS
from specbranch.errors import BadParameter
from specbranch.lab.bench import methods, tuning
from specbranch.lab.bench.clocks import Clock
from specbranch.lab.bench.methods import NOT_SEARCHED, SPACES, TRIALS, Name, can_be_tuned, candidates, default_setting
from specbranch.lab.bench.recorded_pair import RecordedPair, Workload
from specbranch.lab.bench.tuning import Goal, TunedSeconds, Tuner, tuning_suites
from specbranch.lab.replay.pricing import NotingDecoder
from specbranch.lab.replay.record import Record
from specbranch.lab.suites.suite import SHIPPED, Prompt, Suite, load_suite
from tiers import tiered

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = ("A branch is a guess", "1 2 3 1 2 3 1 2 3")
SUITES = (Suite("ours", tuple(Prompt(str(at), "", (words,)) for at, words in enumerate(WORDS)), "test"),)
WORKLOAD = Workload(max_tokens=32)
CHEAP = Clock("cheap", load_profile("c20"))
BRANCHES = "specbranch:confidence"  # by its own name it plans by itself
DEAR = Clock("dear", CostProfile(target=((1, 1.0), (16, 3.0)), draft=((1, 0.9),), overlap=False))


@pytest.fixture(scope="module")
def recorded(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedPair]:
    with RecordedPair(target=pair[0], draft=pair[1], folder=tmp_path_factory.mktemp("lab")) as made:
        yield made


@pytest.fixture
def fresh(recorded: RecordedPair) -> RecordedPair:
    """The pair without what earlier searches left behind."""
    recorded.replays.forget()
    for file in kept(recorded):
        file.unlink()
    return recorded


def kept(recorded: RecordedPair) -> list[Path]:
    return sorted(Tuner(recorded, goal())._folder.glob("*.json"))


def goal(clock: Clock = CHEAP, trials: int = 12) -> Goal:
    return Goal(clock, WORKLOAD, SUITES, trials)


def charged(recorded: RecordedPair, config: SpeculativeConfig, clock: Clock, known: Experience | None = None) -> float:
    """The seconds of real replays under the profile; nothing `known` before each of them unless it is given."""
    assert clock.profile is not None
    total = 0.0
    for prompt in SUITES[0].prompts:
        for record in recorded.records(prompt, WORKLOAD):
            total += recorded.replays.decoder(record).decode(config, clock.profile, experience=known).decode_seconds
    return total


@pytest.mark.slow
@pytest.mark.parametrize("clock", [CHEAP, DEAR], ids=lambda clock: clock.name)
@pytest.mark.parametrize("method", ["speculative", "adaptive", "pearl"])
def test_of_one_knob_the_best_value_is_taken(method: str, clock: Clock, fresh: RecordedPair) -> None:
    values = SPACES[method]["num_speculative_tokens"]
    seconds = {
        n: charged(fresh, SpeculativeConfig(method=method, num_speculative_tokens=int(n)), clock) for n in values
    }
    found = Tuner(fresh, goal(clock)).search(method)
    for trial in found.trials:
        assert trial.seconds == pytest.approx(seconds[trial.config.num_speculative_tokens])
    assert found.best.seconds == pytest.approx(min(seconds.values()))
    differs = len({round(value, 6) for value in seconds.values()}) > 3
    # a tiny draft is so unsure that AdaEDL stops at once
    assert differs or method == "adaptive", "the length made no difference"


@pytest.mark.slow
def test_lengths_that_only_get_worse_end_the_search(fresh: RecordedPair) -> None:
    found = Tuner(fresh, goal(DEAR)).search("speculative")
    assert found.best.config.num_speculative_tokens == 1 and 3 < found.looked_at < 12
    assert len(set(fresh.replays.decoded)) == found.looked_at


@pytest.mark.slow
def test_the_best_length_depends_on_what_a_draft_step_costs(fresh: RecordedPair) -> None:
    best = [Tuner(fresh, goal(clock, TRIALS)).setting("speculative").config for clock in (DEAR, CHEAP)]
    assert best[0] is not None and best[1] is not None
    assert best[0].num_speculative_tokens < best[1].num_speculative_tokens


@pytest.mark.slow
@pytest.mark.parametrize("method", [BRANCHES, "lookup", "lookahead"])
def test_several_knobs_are_searched_from_the_usual_setting_on_and_never_end_worse(
    method: str, fresh: RecordedPair
) -> None:
    found = Tuner(fresh, goal(DEAR, 16)).search(method)
    usual = default_setting(method).config
    assert usual is not None and methods.knob_values(found.trials[0].config) == methods.knob_values(usual)
    assert found.best.seconds <= charged(fresh, usual, DEAR) * (1 + 1e-9)
    assert found.best.seconds == pytest.approx(charged(fresh, found.best.config, DEAR))
    assert found.best.seconds < found.trials[0].seconds, "nothing better than the usual setting was found"
    for name, values in SPACES[method].items():
        tried = {getattr(trial.config, name) for trial in found.trials}
        assert len(tried) > 1 and tried <= set(values)


@pytest.mark.slow
def test_a_trial_far_off_on_a_part_of_the_prompts_is_not_tried_on_all(fresh: RecordedPair) -> None:
    many = Suite(
        "many", tuple(Prompt(str(at), "", (f"{at} branches and {at + 1} guesses",)) for at in range(10)), "test"
    )
    found = Tuner(fresh, Goal(DEAR, Workload(max_tokens=12), (many,), 14)).search(BRANCHES)
    decoded = Counter(fresh.replays.decoded)
    assert {config for config, records in decoded.items() if records == 10} == {trial.config for trial in found.trials}
    assert set(decoded.values()) == {tuning.PART, 10} and found.looked_at == 14


@pytest.mark.slow
@pytest.mark.parametrize("method", [BRANCHES, "specbranch"])
def test_a_search_repeats_itself(method: str, fresh: RecordedPair) -> None:
    first = Tuner(fresh, goal()).search(method)
    for file in kept(fresh):
        file.unlink()
    assert Tuner(fresh, goal()).search(method) == first


@pytest.mark.parametrize("clock", tiered((CHEAP, DEAR), DEAR.__eq__), ids=lambda clock: clock.name)
@pytest.mark.parametrize("method", tiered(("tree", "specbranch"), "specbranch".__eq__))
def test_a_method_that_plans_by_itself_is_replayed_by_the_clock_with_one_experience_for_all(
    method: str, clock: Clock, fresh: RecordedPair
) -> None:
    found = Tuner(fresh, goal(clock)).search(method)
    assert found.looked_at == 1 and [trial.config for trial in found.trials] == [default_setting(method).config]
    assert found.best.seconds == pytest.approx(charged(fresh, found.best.config, clock, Experience(clock.profile)))
    assert not fresh.replays.decoded and Tuner(fresh, goal(clock, TRIALS)).setting(method) == found.setting


def test_the_same_question_is_answered_without_a_replay(fresh: RecordedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Tuner(fresh, goal()).search("lookup")
    fresh.replays.forget()
    monkeypatch.setattr(NotingDecoder, "noted", None)
    renamed = replace(CHEAP, name="another name", profile=replace(load_profile("c20"), note="other words"))
    assert Tuner(fresh, goal()).search("lookup") == Tuner(fresh, goal(renamed)).search("lookup") == first
    others = (
        goal(DEAR),
        goal(trials=13),
        replace(goal(), workload=Workload(max_tokens=31)),
        replace(goal(), suites=(one_prompt(),)),
    )
    for other in others:
        with pytest.raises(TypeError):
            Tuner(fresh, other).search("lookup")


def one_prompt() -> Suite:
    return SUITES[0].first(1)


@pytest.mark.slow
def test_another_clock_is_charged_for_what_was_replayed_already(
    fresh: RecordedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    Tuner(fresh, goal()).search("pearl")
    monkeypatch.setattr(NotingDecoder, "noted", None)
    assert Tuner(fresh, goal(DEAR)).search("pearl").trials


def test_a_damaged_file_counts_as_none(fresh: RecordedPair) -> None:
    first = Tuner(fresh, goal()).search("speculative")
    (file,) = kept(fresh)
    for text in ("", "[]", '{"trials": []}', '{"trials": [{"config": {"gamma": 3}, "seconds": 1.0}]}'):
        file.write_text(text)
        assert Tuner(fresh, goal()).search("speculative") == first
    assert len(json.loads(file.read_text())["trials"]) == len(first.trials)


@pytest.mark.slow
def test_an_interrupted_search_leaves_its_trials_and_is_not_kept(
    fresh: RecordedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner, seconds = Tuner(fresh, goal()), Tuner._seconds

    def third_fails(self: Tuner, config: SpeculativeConfig, records: list[Record]) -> float:
        if len(self.tried[BRANCHES]) == 2:
            raise KeyboardInterrupt
        return seconds(self, config, records)

    monkeypatch.setattr(Tuner, "_seconds", third_fails)
    with pytest.raises(KeyboardInterrupt):
        tuner.search(BRANCHES)
    found = tuner.found(BRANCHES)
    assert (
        found is not None and len(found.trials) == 2 and all(isinstance(trial, TunedSeconds) for trial in found.trials)
    )
    assert tuner.found("pearl") is None and not kept(fresh)


def test_progress_is_reported(fresh: RecordedPair) -> None:
    reported: list[tuple[str, int, int]] = []
    Tuner(fresh, goal(), lambda *what: reported.append(what)).search("speculative")
    assert ("Tuning speculative for cheap", 3, 12) in reported and reported[0] == ("Recording the target", 0, 2)


def test_methods_without_knobs_are_left_as_they_are(recorded: RecordedPair) -> None:
    for method in ("autoregressive", "hf-generate"):
        assert Tuner(recorded, goal(Clock())).setting(method) == default_setting(method)


def test_without_a_profile_there_is_nothing_to_charge_by(recorded: RecordedPair) -> None:
    with pytest.raises(BadParameter, match="specbranch profile"):
        Tuner(recorded, goal(Clock())).setting("speculative")


def test_tuning_prompts_are_not_the_first_that_a_bench_takes() -> None:
    mine = {prompt.digest for suite in tuning_suites() for prompt in suite.prompts}
    theirs = {prompt.digest for name in SHIPPED for prompt in load_suite(name).prompts[:8]}
    assert len(mine) == 16 and not mine & theirs


def test_every_method_has_a_space_or_is_left_out_of_searches_by_name() -> None:
    searched = [name for name in SPACES if ":" not in name]
    assert sorted((*searched, *NOT_SEARCHED)) == sorted(METHODS), "a new method belongs to SPACES or to NOT_SEARCHED"
    for name in METHODS:
        assert can_be_tuned(name) == bool(Name.of(name).knobs), name


def test_without_a_draft_only_what_needs_none_is_searched() -> None:
    assert candidates(has_draft=False) == ("autoregressive", "lookup", "lookahead")
    assert candidates(has_draft=True)[0] == "autoregressive" and {BRANCHES, "tree", "specbranch"} < set(
        candidates(has_draft=True)
    )


def test_every_setting_that_a_search_of_lookahead_may_come_to_is_valid() -> None:
    space = SPACES["lookahead"]
    settings = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    made = [methods.config_with("lookahead", values) for values in settings]
    assert {config.lookahead_window for config in made} == set(space["lookahead_window"])
    shorter = [
        config
        for config, values in zip(made, settings, strict=True)
        if config.lookahead_ngram != values["lookahead_ngram"]
    ]
    assert 0 < len(shorter) < len(made) / 4 and min(config.lookahead_ngram for config in shorter) >= 3
