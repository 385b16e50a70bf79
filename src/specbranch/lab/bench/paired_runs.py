"""The runs of a bench: every method on the same prompts, by the wall clock or replayed from records by a profile.

Owns the order of the runs. Invariants: a run in the store is never repeated, and an interrupted replay ends with the
rows of an uninterrupted one. By the wall clock the methods take turns on each prompt, so all share the other load of
the machine. The first run of each is dropped. A replay that differs from its record stops the bench.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from specbranch.config import SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.lab.bench.clocks import Clock
from specbranch.lab.bench.methods import LLAMACPP, Setting
from specbranch.lab.bench.recorded_pair import RecordedPair, Workload
from specbranch.lab.bench.run_store import PromptRun, RunStore, output_digest
from specbranch.lab.recheck.repeat import repeat
from specbranch.lab.replay.pricing import has_fixed_decisions
from specbranch.lab.replay.record import Record
from specbranch.lab.suites.suite import Prompt, Suite
from specbranch.progress import StepsDone


class AskedPrompt(NamedTuple):
    """A prompt of a suite, and the workload to answer it with."""

    workload: Workload
    suite: Suite
    at: int  # its number in the suite
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class PairRuns:
    """The runs of one pair. Settings may differ by clock, because baselines are tuned for each."""

    suites: tuple[Suite, ...]
    workloads: tuple[Workload, ...]
    settings: tuple[Setting, ...]
    repeats: int = 1
    outside: int | None = None  # prompts of each suite for methods of other engines, which are slow; None: all

    @property
    def asked(self) -> list[AskedPrompt]:
        """All prompts, in the order in which they are run."""
        return [
            AskedPrompt(workload, suite, at, prompt)
            for workload in self.workloads
            for suite in self.suites
            for at, prompt in enumerate(suite.prompts)
        ]


class OtherEngine(Protocol):
    """A method of another engine."""

    def answer(self, method: str, record: Record) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Answer a record's prompt; return the tokens and the statistics of the turn."""
        ...


NOBODY: Mapping[str, OtherEngine] = MappingProxyType({})


def record_all(recorded: RecordedPair, runs: PairRuns, progress: StepsDone) -> None:
    """Let the target answer the prompts that it has not answered before."""
    recorded.record([(asked.prompt, asked.workload) for asked in runs.asked], progress)


def replay(recorded: RecordedPair, runs: PairRuns, clock: Clock, store: RunStore, progress: StepsDone) -> None:
    """Replay every setting from the records, with time charged by a profile.

    A planned method decides by what it learned from earlier prompts. If one of its prompts is missing, the finished
    ones are replayed too, so that it learns the same. This is fast, because the draft's proposals are stored.
    """
    store.refuse_another(_blank(recorded, runs.asked[0], runs.settings[0], clock))
    done = store.done
    # One experience of each setting for all prompts, as in an LLM.
    known = {
        setting.config: Experience(clock.profile, recorded.draft is not None, recorded.prior)
        for setting in runs.settings
    }
    blanks = [[(_blank(recorded, asked, setting, clock), setting) for setting in runs.settings] for asked in runs.asked]
    learning = {setting for runs_of in blanks for blank, setting in runs_of if blank.key not in done and setting.plans}
    for number, (asked, runs_of) in enumerate(zip(runs.asked, blanks, strict=True)):
        progress(f"Replaying {recorded.pair} by {clock.name}", number, len(blanks))
        wanted = [(blank, setting) for blank, setting in runs_of if blank.key not in done or setting in learning]
        if wanted:
            for made in _replayed(recorded, recorded.records(asked.prompt, asked.workload), wanted, clock, known):
                if made.key not in done:
                    store.append(made)


def _replayed(
    recorded: RecordedPair,
    records: Sequence[Record],
    wanted: list[tuple[PromptRun, Setting]],
    clock: Clock,
    known: Mapping[SpeculativeConfig | None, Experience],
) -> Iterator[PromptRun]:
    turns: list[list[dict[str, Any]]] = [[] for _ in wanted]
    for record in records:
        for results, (_, setting) in zip(turns, wanted, strict=True):
            assert setting.config is not None and clock.profile is not None
            stats = recorded.replays.stats(record, setting.config, clock.profile, known[setting.config])
            results.append(stats.summary())
    text = output_digest(record.tokens for record in records)  # replays are checked against it
    for results, (blank, _) in zip(turns, wanted, strict=True):
        yield replace(blank, turns=tuple(results), output=text)


def measure(
    recorded: RecordedPair,
    runs: PairRuns,
    store: RunStore,
    progress: StepsDone,
    outside: Mapping[str, OtherEngine] = NOBODY,
) -> None:
    """Run every setting by the wall clock; the order of methods rotates by one from prompt to prompt."""
    rounds = [(turn, asked) for turn in range(runs.repeats) for asked in runs.asked]
    store.refuse_another(_blank(recorded, runs.asked[0], runs.settings[0], Clock()))
    done, warm = store.done, set[str]()
    for number, (turn, asked) in enumerate(rounds):
        progress(f"Measuring {recorded.pair}", number, len(rounds))
        records = recorded.records(asked.prompt, asked.workload)
        turned = number % len(runs.settings)
        for setting in (*runs.settings[turned:], *runs.settings[:turned]):
            blank = replace(_blank(recorded, asked, setting, Clock()), repeat=turn)
            beyond = setting.config is None and runs.outside is not None and asked.at >= runs.outside
            if blank.key in done or beyond:
                continue
            if setting.method not in warm:
                _answer(recorded, setting, records[0], outside)
                warm.add(setting.method)
            answers = [_answer(recorded, setting, record, outside) for record in records]
            output = output_digest(tokens for tokens, _ in answers)
            store.append(replace(blank, turns=tuple(summary for _, summary in answers), output=output))


def _answer(
    recorded: RecordedPair, setting: Setting, record: Record, outside: Mapping[str, OtherEngine]
) -> tuple[tuple[int, ...], dict[str, Any]]:
    if setting.config is None:
        return outside[setting.method].answer(setting.method, record)
    task = record.task
    output = repeat(recorded.llm.using(speculative=setting.config), task.prompt, task.params, task.seed)
    return tuple(output.token_ids), output.stats


def _blank(recorded: RecordedPair, asked: AskedPrompt, setting: Setting, clock: Clock) -> PromptRun:
    """Return a run without its results."""
    rule = "match" if setting.config is None else setting.config.rule
    # In half precision and with stored weights transformers rounds differently, and near-ties may fall differently.
    # llama.cpp always does.
    exact = asked.workload.temperature == 0 and recorded.llm.weights in ("float32", "float64")
    exact = exact and setting.method not in LLAMACPP
    return PromptRun(
        pair=recorded.pair,
        suite=asked.suite.name,
        method=setting.method,
        temperature=asked.workload.temperature,
        prompt=asked.prompt.id,
        digest=asked.prompt.digest,
        repeat=0,
        turns=(),
        output="",
        clock=clock.name,
        rule=rule if setting.config is not None or exact else "other",
        setting=setting.shown | _predictor(recorded, setting),
        models=recorded.digest,
        charges=clock.profile.digest if clock.profile is not None else "",
        devices=clock.profile.devices if clock.profile is not None and setting.drafts else 1,
    )


def _predictor(recorded: RecordedPair, setting: Setting) -> dict[str, Any]:
    """Return the predictor that a setting uses, if any."""
    if not setting.uses_signals:
        return {}
    return {"predictor": recorded.forecasts.predictor.digest[:8] if recorded.forecasts is not None else "none"}


@dataclass(frozen=True, slots=True)
class ReplayCheck:
    """The agreement of a sample of live runs with their replay."""

    runs: int
    same_text: int
    counted: int  # runs without a planner, whose decisions depend on the clock
    same_counts: int  # counted runs that drafted, accepted and verified exactly as much


def check_replay(recorded: RecordedPair, runs: PairRuns, clock: Clock, most: int = 8) -> ReplayCheck:
    """Repeat a sample of replays with both models. Texts must agree; counts may differ if two drafts nearly tie."""
    possible = [
        setting for setting in runs.settings if setting.config is not None and setting.config.policy != "oracle"
    ]
    settings = [setting for setting in possible if setting.needs_draft] or possible[:1]
    prompts = [suite.prompts[0] for suite in runs.suites]
    same_text = counted = same_counts = tried = 0
    for prompt, setting in islice(zip(cycle(prompts), cycle(settings), strict=False), most):
        record = recorded.records(prompt, runs.workloads[0])[0]
        assert setting.config is not None and clock.profile is not None
        replayed = recorded.replays.stats(record, setting.config, clock.profile).summary()
        tokens, live = _answer(recorded, setting, record, NOBODY)
        tried += 1
        same_text += tokens == record.tokens
        if has_fixed_decisions(setting.config):
            counted += 1
            same_counts += all(live[name] == replayed[name] for name in ("drafted", "accepted", "target_forwards"))
    return ReplayCheck(tried, same_text, counted, same_counts)
