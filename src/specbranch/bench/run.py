"""Benches carried out: every method on the same prompts, by the wall clock or from records by a profile, one
measurement at a time.

Owns the order of the runs. Invariants: what is in the store is not written again, and a replay that was interrupted
ends with the rows of one that was not; by the wall clock methods take turns on each prompt, so that whatever the
machine does besides is shared by all, and the first run of each is dropped; a replay that strays from its record stops
it all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from specbranch.bench.clocks import Clock
from specbranch.bench.lab import Lab, Workload
from specbranch.bench.methods import Setting
from specbranch.bench.prompt_runs import PromptRun, RunStore, output_digest
from specbranch.bench.results import BASELINE
from specbranch.config import SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.core.methods import METHODS
from specbranch.measure.pair import StepsDone
from specbranch.replay.pricing import has_fixed_decisions
from specbranch.replay.record import Record
from specbranch.suites.suite import Prompt, Suite

Known = Mapping[SpeculativeConfig | None, Experience]  # what each way to decode has learned


@dataclass(frozen=True, slots=True)
class PairRuns:
    """What to run with one pair: settings may differ by clock, as baselines are tuned for each."""

    suites: tuple[Suite, ...]
    workloads: tuple[Workload, ...]
    settings: tuple[Setting, ...]
    repeats: int = 1
    outside: int | None = None  # prompts of each suite that methods from outside, which are slow, answer; nothing: all


class Outside(Protocol):
    """A way to answer that is not this engine's."""

    def answer(self, method: str, record: Record) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Answer a record's prompt; returns the tokens and what is told of the turn."""
        ...


def record_all(lab: Lab, job: PairRuns, progress: StepsDone) -> None:
    """Have the target answer whatever it has not answered before."""
    asked = [(prompt, workload) for workload in job.workloads for suite in job.suites for prompt in suite.prompts]
    for done, (prompt, workload) in enumerate(asked):
        progress("Recording the target", done, len(asked))
        lab.records(prompt, workload)
    progress("Recording the target", len(asked), len(asked))


def replay(lab: Lab, job: PairRuns, clock: Clock, store: RunStore, progress: StepsDone) -> None:
    """Run every setting from the records, charged by a profile.

    A planned method decides by what it learned from the prompts before. So where a prompt of it is missing, those that
    are done are replayed again, to learn from, which is quick: the draft's words are remembered.
    """
    asked = [
        (workload, suite, prompt) for workload in job.workloads for suite in job.suites for prompt in suite.prompts
    ]
    store.refuse_another(_blank(lab, job.suites[0], job.suites[0].prompts[0], job.workloads[0], job.settings[0], clock))
    done = store.done
    known = {
        setting.config: Experience(clock.profile, lab.draft is not None) for setting in job.settings
    }  # for all prompts, as in an LLM
    runs = [
        [(_blank(lab, suite, prompt, w, setting, clock), setting) for setting in job.settings]
        for w, suite, prompt in asked
    ]
    learning = {setting for line in runs for blank, setting in line if blank.key not in done and _plans(setting)}
    for number, ((workload, _, prompt), line) in enumerate(zip(asked, runs, strict=True)):
        progress(f"Replaying {lab.pair} by {clock.name}", number, len(asked))
        wanted = [(blank, setting) for blank, setting in line if blank.key not in done or setting in learning]
        if wanted:
            for measurement in _replayed(lab, lab.records(prompt, workload), wanted, clock, known):
                if measurement.key not in done:
                    store.append(measurement)


def _plans(setting: Setting) -> bool:
    """Whether it decides by experience."""
    return setting.config is not None and METHODS[setting.config.method or BASELINE].plans(setting.config)


def _replayed(
    lab: Lab, records: Sequence[Record], wanted: list[tuple[PromptRun, Setting]], clock: Clock, known: Known
) -> Iterator[PromptRun]:
    turns: list[list[dict[str, Any]]] = [[] for _ in wanted]
    for record in records:
        for lines, (_, setting) in zip(turns, wanted, strict=True):
            assert setting.config is not None and clock.profile is not None
            stats = lab.replays.stats(record, setting.config, clock.profile, known[setting.config])
            lines.append(stats.summary())
    text = output_digest(record.tokens for record in records)  # what a replay gave was checked against it
    for lines, (blank, _) in zip(turns, wanted, strict=True):
        yield replace(blank, turns=tuple(lines), output=text)


def measure(lab: Lab, job: PairRuns, store: RunStore, progress: StepsDone, outside: Outside | None = None) -> None:
    """Run every setting by the wall clock, method by method on each prompt, the order turned by one from prompt to
    prompt."""
    asked = [
        (w, suite, at, prompt) for w in job.workloads for suite in job.suites for at, prompt in enumerate(suite.prompts)
    ]
    rounds = [(repeat, *one) for repeat in range(job.repeats) for one in asked]
    store.refuse_another(
        _blank(lab, job.suites[0], job.suites[0].prompts[0], job.workloads[0], job.settings[0], Clock())
    )
    done, warm = store.done, set[str]()
    for number, (repeat, workload, suite, at, prompt) in enumerate(rounds):
        progress(f"Measuring {lab.pair}", number, len(rounds))
        records = lab.records(prompt, workload)
        turned = number % len(job.settings)
        for setting in (*job.settings[turned:], *job.settings[:turned]):
            blank = replace(_blank(lab, suite, prompt, workload, setting, Clock()), repeat=repeat)
            beyond = setting.config is None and job.outside is not None and at >= job.outside
            if blank.key in done or beyond:
                continue
            if setting.method not in warm:
                _answered(lab, setting, records[:1], outside)
                warm.add(setting.method)
            outputs, lines = _answered(lab, setting, records, outside)
            store.append(replace(blank, turns=tuple(lines), output=output_digest(outputs)))


def _answered(
    lab: Lab, setting: Setting, records: Sequence[Record], outside: Outside | None
) -> tuple[list[tuple[int, ...]], list[dict[str, Any]]]:
    """Answer the prompt of each record anew."""
    answers = [_answer(lab, setting, record, outside) for record in records]
    return [tokens for tokens, _ in answers], [line for _, line in answers]


def _answer(
    lab: Lab, setting: Setting, record: Record, outside: Outside | None
) -> tuple[tuple[int, ...], dict[str, Any]]:
    if setting.config is None:
        assert outside is not None
        return outside.answer(setting.method, record)
    task = record.task
    output = lab.llm.using(speculative=setting.config).repeat(task.prompt, task.params, task.seed, 0)
    if output.error is not None:
        raise output.error
    return tuple(output.token_ids), output.stats


def _blank(lab: Lab, suite: Suite, prompt: Prompt, workload: Workload, setting: Setting, clock: Clock) -> PromptRun:
    """A run that was not made yet."""
    rule = "match" if setting.config is None else setting.config.rule
    rounds_otherwise = lab.llm.dtype not in (
        "float32",
        "float64",
    )  # transformers in half precision: near-ties fall otherwise
    outside_the_rule = setting.config is None and (workload.temperature > 0 or rounds_otherwise)
    return PromptRun(
        pair=lab.pair,
        suite=suite.name,
        method=setting.method,
        temperature=workload.temperature,
        prompt=prompt.id,
        digest=prompt.digest,
        repeat=0,
        turns=(),
        output="",
        clock=clock.name,
        rule="other" if outside_the_rule else rule,
        setting=setting.shown | _predictor(lab, setting),
        models=lab.digest,
        charges=clock.profile.digest if clock.profile is not None else "",
        devices=clock.profile.devices if clock.profile is not None and setting.drafts else 1,
    )


def _predictor(lab: Lab, setting: Setting) -> dict[str, Any]:
    """Which predictor a setting goes by, if it goes by one."""
    config = setting.config
    if config is None or not METHODS[config.method or BASELINE].heeds_signals(config):
        return {}
    return {"predictor": lab.forecasts.predictor.digest[:8] if lab.forecasts is not None else "none"}


@dataclass(frozen=True, slots=True)
class ReplayCheck:
    """How a sample of live runs compares with its replay."""

    runs: int
    same_text: int
    # runs whose counts can be the same: what the planner decides depends on the clock, and these are not run by it
    counted: int
    same_counts: int  # of them: drafted, accepted and target forwards alike


def check_replay(lab: Lab, job: PairRuns, clock: Clock, most: int = 8) -> ReplayCheck:
    """Repeat a sample of replays with both models, to see that they agree; texts must, counts may differ where two
    drafts nearly tie."""
    import itertools

    workload = job.workloads[0]
    possible = [setting for setting in job.settings if setting.config is not None and setting.config.policy != "oracle"]
    settings = [setting for setting in possible if setting.needs_draft] or possible[:1]
    prompts = [suite.prompts[0] for suite in job.suites]
    text = counted = counts = runs = 0
    for prompt, setting in itertools.islice(
        zip(itertools.cycle(prompts), itertools.cycle(settings), strict=False), most
    ):
        record = lab.records(prompt, workload)[0]
        assert setting.config is not None and clock.profile is not None
        replayed = lab.replays.stats(record, setting.config, clock.profile).summary()
        tokens, live = _answer(lab, setting, record, None)
        runs += 1
        text += tokens == record.tokens
        if has_fixed_decisions(setting.config):
            counted += 1
            counts += all(live[name] == replayed[name] for name in ("drafted", "accepted", "target_forwards"))
    return ReplayCheck(runs, text, counted, counts)
