"""Benches on a tiny pair: replays agree with live runs, nothing is run twice, methods take turns, conversations go
on as plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specbranch import LLM
from specbranch.clock.shipped import load_profile
from specbranch.core.experience import Experience
from specbranch.core.methods import METHODS
from specbranch.errors import BadParameter
from specbranch.lab.bench import paired_runs as running
from specbranch.lab.bench.aggregate import rows_of
from specbranch.lab.bench.clocks import Clock
from specbranch.lab.bench.methods import Setting, chosen_methods, default_setting, given_setting, variant
from specbranch.lab.bench.paired_runs import PairRuns, check_replay, measure, record_all, replay
from specbranch.lab.bench.presets import ABLATION
from specbranch.lab.bench.recorded_pair import RecordedPair, Workload
from specbranch.lab.bench.run_store import RunStore
from specbranch.lab.recheck.repeat import repeat
from specbranch.lab.replay.record import Record
from specbranch.lab.replay.runners import ProposalStore
from specbranch.lab.suites.suite import Prompt, Suite
from tiers import tiered
from tiny_predictor import made

torch.set_num_threads(1)
CODE = Suite("code", (Prompt("c1", "coding", ("def add(a, b):",)), Prompt("c2", "coding", ("import os",))), "a test")
TALK = Suite("talk", (Prompt("t1", "writing", ("Tell me of herons.", "And of reeds?")),), "a test")
C5 = Clock("c5", load_profile("c5"))
NAMES = (*METHODS, "specbranch:confidence")
SETTINGS = tuple(default_setting(name, {"num_speculative_tokens": 3}) for name in NAMES)


@pytest.fixture(scope="module")
def recorded(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedPair]:
    with RecordedPair(target=pair[0], draft=pair[1], folder=tmp_path_factory.mktemp("lab")) as made:
        yield made


def job(settings: tuple[Setting, ...] = SETTINGS, temperature: float = 0.0, repeats: int = 1) -> PairRuns:
    return PairRuns((CODE, TALK), (Workload(temperature=temperature, max_tokens=12),), settings, repeats)


def nothing(what: str, done: int, of: int) -> None:
    """Show no progress."""


@pytest.mark.parametrize("temperature", tiered((0.0, 0.8), (0.8).__eq__))
def test_replays_count_what_live_runs_on_the_same_clock_count(
    recorded: RecordedPair, pair: tuple[str, str], temperature: float
) -> None:
    workload = Workload(temperature=temperature, max_tokens=10)
    with LLM(*pair, options={"clock": "c5", "prefix_cache": False}) as live:
        for setting in SETTINGS:
            assert setting.config is not None and C5.profile is not None
            known = Experience(C5.profile)  # the LLM has one of its own for each setting
            for record in recorded.records(TALK.prompts[0], workload):
                view, task = live.using(speculative=setting.config), record.task
                output = repeat(view, task.prompt, task.params, task.seed)
                replayed = recorded.replays.decoder(record).decode(setting.config, C5.profile, experience=known)
                assert tuple(output.token_ids) == record.tokens
                assert output.stats == _about(replayed.summary()), setting.method


@pytest.mark.slow
def test_replays_start_from_the_drafts_evaluation_as_live_runs_do(
    pair: tuple[str, str], tiny_draft: Path, tmp_path: Path
) -> None:
    models, settings = (pair[0], str(tiny_draft)), (default_setting("specbranch"),)
    with RecordedPair(None, *models, folder=tmp_path / "lab") as made, RunStore(tmp_path / "runs.jsonl", {}) as store:
        assert made.prior is not None and made.prior.positions
        replay(made, job(settings), C5, store, nothing)
        tasks = [record.task for prompt in CODE.prompts for record in made.records(prompt, job().asked[0].workload)]
    with LLM(*models, options={"clock": "c5", "prefix_cache": False}) as live:
        view = live.using(speculative=settings[0].config)
        outputs = [repeat(view, task.prompt, task.params, task.seed) for task in tasks]
    replayed = [turn for run in store.runs if run.suite == "code" for turn in run.turns]
    assert [output.stats for output in outputs] == [_about(turn) for turn in replayed]


def _about(summary: dict[str, Any]) -> dict[str, Any]:
    """Seconds only nearly: the clock of one has run longer before."""
    return {name: _nearly(value) for name, value in summary.items()}


def _nearly(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _nearly(inner) for name, inner in value.items()}
    return pytest.approx(value) if isinstance(value, float) else value


class Parrot:
    """A way from outside that repeats the record, and counts."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def answer(self, method: str, record: Record) -> tuple[tuple[int, ...], dict[str, Any]]:
        self.asked.append(method)
        return record.tokens, {"tokens": len(record.tokens), "ttft_seconds": 0.1, "decode_seconds": 1.0}


def test_methods_from_outside_may_answer_fewer_prompts(recorded: RecordedPair, tmp_path: Path) -> None:
    settings, outside = tuple(map(default_setting, ("autoregressive", "hf-generate"))), Parrot()
    with RunStore(tmp_path / "runs.jsonl", {}) as store:
        measure(recorded, replace(job(settings), outside=1), store, nothing, {"hf-generate": outside})
    rows = {(row.suite, row.method): row for row in rows_of(store.runs)}
    assert {key: row.prompts for key, row in rows.items()} == {
        ("code", "autoregressive"): 2,
        ("code", "hf-generate"): 1,
        ("talk", "autoregressive"): 1,
        ("talk", "hf-generate"): 1,
    }
    assert len(outside.asked) == 1 + 1 + 2, "a warm-up, and the first prompt of each suite, one of which has two turns"
    assert all(row.lossless and row.speedup for row in rows.values())


def test_the_second_turn_is_asked_after_the_targets_own_first_answer(recorded: RecordedPair) -> None:
    first, second = recorded.records(TALK.prompts[0], Workload(max_tokens=24))
    text = recorded.llm.tokenizer.decode(second.task.prompt)
    answer = recorded.llm.tokenizer.decode([token for token in first.tokens if token not in first.task.eos_ids])
    assert "Tell me of herons." in text and "And of reeds?" in text and answer.strip() in text


def test_every_prompt_has_a_seed_of_its_own_that_stays(recorded: RecordedPair) -> None:
    workload = Workload(temperature=0.8)
    seeds = [workload.seed_of(prompt, turn) for prompt in (*CODE.prompts, *TALK.prompts) for turn in (0, 1)]
    assert len(set(seeds)) == 6 and seeds == [
        workload.seed_of(p, t) for p in (*CODE.prompts, *TALK.prompts) for t in (0, 1)
    ]
    assert replace(workload, seed=1).seed_of(CODE.prompts[0], 0) not in seeds


@pytest.mark.slow
def test_a_replayed_bench_has_a_row_for_each_method_and_suite_and_all_are_lossless(
    recorded: RecordedPair, tmp_path: Path
) -> None:
    record_all(recorded, job(), nothing)
    with RunStore(tmp_path / "runs.jsonl", {}) as store:
        replay(recorded, job(), C5, store, nothing)
        rows = rows_of(store.runs)
    assert {(row.suite, row.method) for row in rows} == {
        (suite, s.method) for suite in ("code", "talk") for s in SETTINGS
    }
    assert all(row.lossless and row.clock == "c5" and row.tokens_per_second for row in rows)
    assert {row.speedup for row in rows if row.method == "autoregressive"} == {1.0}


@pytest.mark.slow
def test_a_replay_that_was_interrupted_ends_with_the_rows_of_one_that_was_not(
    recorded: RecordedPair, tmp_path: Path
) -> None:
    planned = tuple(default_setting(name) for name in ("autoregressive", "specbranch", "tree", "auto"))
    with RunStore(tmp_path / "whole.jsonl", {}) as store:
        replay(recorded, job(planned), C5, store, nothing)
        whole = list(store.runs)
    for cut in range(1, len(whole)):  # also in the middle of a prompt
        path = tmp_path / f"{cut}.jsonl"
        with RunStore(path, {}) as store:
            for measurement in whole[:cut]:
                store.append(measurement)
        with RunStore(path, {}) as store:
            replay(recorded, job(planned), C5, store, nothing)
            assert store.runs == whole, cut


@pytest.mark.slow
def test_what_is_in_the_store_is_not_replayed_again(
    recorded: RecordedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs.jsonl"
    with RunStore(path, {}) as store:
        replay(recorded, replace(job(), suites=(CODE,)), C5, store, nothing)
        kept = len(store.runs)
    replayed: list[tuple[str, str]] = []
    real = running._replayed
    monkeypatch.setattr(
        running,
        "_replayed",
        lambda recorded, records, wanted, *rest: (
            replayed.extend((b.prompt, s.method) for b, s in wanted) or real(recorded, records, wanted, *rest)
        ),
    )  # type: ignore[func-returns-value]
    with RunStore(path, {}) as store:
        replay(recorded, job(), C5, store, nothing)
        assert len(store.runs) == kept + len(SETTINGS)
    assert {method for prompt, method in replayed if prompt == "t1"} == {s.method for s in SETTINGS}
    # they learn from it
    assert {method for prompt, method in replayed if prompt != "t1"} == {
        "specbranch",
        "tree",
        "auto",
    }
    replayed.clear()
    with RunStore(path, {}) as store:
        replay(recorded, job(), C5, store, nothing)
    assert not replayed, "nothing was missing"


def test_by_the_wall_clock_methods_take_turns_and_the_first_run_is_dropped(
    recorded: RecordedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real = running._answer
    monkeypatch.setattr(
        running,
        "_answer",
        lambda recorded, setting, *rest: order.append(setting.method) or real(recorded, setting, *rest),
    )  # type: ignore[func-returns-value]
    two = (default_setting("autoregressive"), default_setting("speculative"))
    with RunStore(tmp_path / "runs.jsonl", {}) as store:
        measure(recorded, PairRuns((CODE,), (Workload(max_tokens=12),), two, repeats=2), store, nothing)
        kept = [(m.repeat, m.prompt, m.method) for m in store.runs]
        assert all(row.lossless and row.repeats == 2 for row in rows_of(store.runs))
    first, second = "autoregressive", "speculative"
    assert order[:4] == [first, first, second, second]  # each warms up once
    assert order[4:] == [second, first, first, second, second, first]
    assert [name for _, _, name in kept] == [first, second, second, first, first, second, second, first]


def test_a_run_that_says_something_else_is_not_lossless(
    recorded: RecordedPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = running._answer

    def liar(recorded: RecordedPair, setting: Setting, record: Any, outside: Any) -> Any:
        tokens, line = real(recorded, setting, record, outside)
        return ((*tokens[:-1], 7), line) if setting.method == "speculative" else (tokens, line)

    monkeypatch.setattr(running, "_answer", liar)
    with RunStore(tmp_path / "runs.jsonl", {}) as store:
        measure(
            recorded,
            PairRuns(
                (CODE,),
                (Workload(max_tokens=12),),
                (default_setting("autoregressive"), default_setting("speculative")),
                1,
            ),
            store,
            nothing,
        )
        found = {row.method: row.lossless for row in rows_of(store.runs)}
    assert found == {"autoregressive": True, "speculative": False}


@pytest.mark.slow
def test_a_sample_of_replays_repeated_with_both_models_agrees(recorded: RecordedPair) -> None:
    agreement = check_replay(recorded, job(), C5, most=6)  # of six settings with a draft two plan by the clock
    assert (agreement.runs, agreement.same_text, agreement.counted, agreement.same_counts) == (6, 6, 4, 4)


@pytest.mark.slow
def test_two_settings_of_a_planned_method_learn_apart(recorded: RecordedPair, tmp_path: Path) -> None:
    both = (default_setting("specbranch", {"without": ["lookup"]}), default_setting("specbranch"))
    found = []
    for settings in (both, both[1:]):
        with RunStore(tmp_path / f"{len(settings)}.jsonl", {}) as store:
            replay(recorded, job(settings), C5, store, nothing)
            found.append([one for one in store.runs if not one.setting])
    assert found[0] == found[1] and found[0]


def test_plain_decoding_always_runs_and_a_draft_is_asked_for_where_it_is_needed() -> None:
    assert chosen_methods(["pearl", "hf-lookup", "pearl"], has_draft=True) == ("autoregressive", "pearl", "hf-lookup")
    with pytest.raises(BadParameter, match="'hf-assisted' needs a draft model"):
        chosen_methods(["hf-assisted"], has_draft=False)
    with pytest.raises(BadParameter, match="Did you mean 'pearl'"):
        chosen_methods(["perl"], has_draft=True)


def test_a_draft_is_at_work_where_it_is_needed_or_may_pay() -> None:
    drafting = {name for name in (*METHODS, "hf-generate", "hf-assisted") if default_setting(name).drafts}
    assert drafting == {"speculative", "adaptive", "pearl", "tree", "specbranch", "auto", "hf-assisted"}


def test_a_lab_that_cannot_be_opened_lets_go_of_what_was(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[type] = []

    def note(kind: Any) -> None:
        close = kind.close
        monkeypatch.setattr(kind, "close", lambda self: (closed.append(kind), close(self)))

    note(LLM)
    note(ProposalStore)
    (tmp_path / "targets").write_text("no folder")
    with pytest.raises(BadParameter, match="cannot be used"):
        RecordedPair(target=pair[0], draft=pair[1], folder=tmp_path)
    assert closed == [ProposalStore, LLM], "the draft's memory, and both models"


def test_texts_of_others_are_taken_and_none_is_made_up(
    recorded: RecordedPair, pair: tuple[str, str], tmp_path: Path
) -> None:
    short, long = Workload(max_tokens=24), Workload(max_tokens=25)
    said = [record.tokens for record in recorded.records(TALK.prompts[0], short)]
    with RecordedPair(target=pair[0], draft=pair[1], folder=tmp_path, texts=recorded.folder) as other:
        assert [record.tokens for record in other.records(TALK.prompts[0], short)] == said
        with pytest.raises(BadParameter, match=r"holds no text for prompt t1.*--max-tokens"):
            other.records(TALK.prompts[0], long)
    assert not list((tmp_path / "records").glob("*/*.json"))


def test_a_setting_tells_what_matters_and_nothing_else() -> None:
    assert default_setting("autoregressive").shown == {}
    assert default_setting("speculative", {"num_speculative_tokens": 3}).shown == {"num_speculative_tokens": 3}
    assert default_setting("speculative", {"policy": "confidence"}).shown["stop_below"] == 0.4
    assert set(default_setting("specbranch:confidence").shown) == {
        "num_speculative_tokens",
        "stop_below",
        "max_branches",
    }
    assert default_setting("specbranch:entropy").shown.keys() == {"num_speculative_tokens", "max_branches"}
    assert default_setting("specbranch").shown == default_setting("tree").shown == {}
    assert default_setting("specbranch", {"without": "trees"}).shown == {"without": ("trees",)}
    assert default_setting("hf-generate").shown == {}


def test_settings_given_by_hand_go_by_the_name_that_tells_how_they_decode() -> None:
    assert given_setting({"method": "specbranch", "policy": "confidence"}) == default_setting("specbranch:confidence")
    assert given_setting({"method": "specbranch", "policy": "planner"}).method == "specbranch"
    assert given_setting({"method": "speculative", "policy": "confidence"}).shown["policy"] == "confidence"
    with pytest.raises(BadParameter, match="cannot follow policy 'entropy'"):
        given_setting({"method": "tree", "policy": "entropy"})


def test_a_name_may_leave_parts_out_and_set_something_else() -> None:
    paper = default_setting("specbranch:paper", {"num_speculative_tokens": 7})
    less = variant("specbranch:paper-hrad-branches", paper)
    assert less.config == replace(paper.config, without=("hrad", "branches"))
    assert less.shown == {"num_speculative_tokens": 7, "stop_below": 0.4, "without": ("hrad", "branches")}
    other = variant("specbranch:paper@stop_below=0.2@max_branches=12", paper)
    assert (other.config.num_speculative_tokens, other.config.stop_below, other.config.max_branches) == (7, 0.2, 12)
    assert default_setting("specbranch-trees").config.without == ("trees",)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("specbranch-leaves", "part of a policy"),
        ("specbranch:paper-trees", "has no part 'trees'"),
        ("specbranch:paper@stop_below", "expected @SETTING=VALUE"),
        ('specbranch@method="pearl"', "sets 'method' after '@'"),
        ("specbranch@colour=3", "speculative setting"),
        ("spec-branch", "Unknown method"),
    ],
)
def test_a_name_that_makes_no_sense_is_a_sentence(name: str, words: str) -> None:
    with pytest.raises(BadParameter, match=words):
        default_setting(name)


@pytest.mark.slow
def test_every_setting_of_the_ablation_can_be_run(recorded: RecordedPair) -> None:
    settings = tuple(default_setting(name) for name in ABLATION)
    assert len({(setting.method, str(setting.shown)) for setting in settings}) == len(settings)
    decoder = recorded.replays.decoder(recorded.records(CODE.prompts[0], Workload(max_tokens=24))[0])
    for setting in settings:
        decoder.decode(setting.config, C5.profile)


@pytest.mark.slow
def test_forecasts_along_a_record_are_those_of_the_live_target_and_are_kept(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    predictor = made(*pair, tmp_path / "predictor")
    config = {"method": "specbranch", "policy": "paper", "num_speculative_tokens": 4, "stop_below": 0.1}
    settings = (default_setting("specbranch:paper", config), default_setting("specbranch:paper-hrad", config))
    for _ in range(2):  # the second time nothing is read
        with RecordedPair(target=pair[0], draft=pair[1], folder=tmp_path / "lab", predictor=str(predictor)) as recorded:
            agreement = check_replay(recorded, job(settings), C5)
            assert (agreement.same_text, agreement.same_counts) == (agreement.runs, agreement.counted) == (8, 8)
            record = recorded.records(CODE.prompts[0], Workload(max_tokens=12))[0]
            decoder = recorded.replays.decoder(record)
            one, other = (decoder.decode(setting.config, C5.profile) for setting in settings)
            assert (one.drafted, one.dropped) != (other.drafted, other.dropped), "signals made no difference"
    assert len(list((tmp_path / "lab" / "forecasts").glob("*/*.npy"))) == 1
