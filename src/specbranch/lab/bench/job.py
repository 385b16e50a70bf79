"""A bench from its order to its files: it prepares, tunes and runs every pair, and writes the results.

Owns the sequence of the work and the folder of results. Invariants: an interrupted bench leaves its measurements in the
folder, and the same order resumes there. One pair is released before the next is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from specbranch.errors import BadParameter
from specbranch.lab.bench.aggregate import rows_of
from specbranch.lab.bench.clocks import Clock, free_memory, given_clock, kept_machine_clock
from specbranch.lab.bench.methods import LLAMACPP, TRANSFORMERS, Setting, default_setting
from specbranch.lab.bench.order import BenchOrder
from specbranch.lab.bench.other_engines.llamacpp import LlamaCpp, built_with, check_file
from specbranch.lab.bench.other_engines.transformers_methods import Transformers, check_target
from specbranch.lab.bench.pair_setup import (
    USUAL_CONTEXT,
    BenchPair,
    Group,
    PairOrder,
    Running,
    Subject,
    make_subject,
    trained_context,
)
from specbranch.lab.bench.paired_runs import (
    OtherEngine,
    PairRuns,
    ReplayCheck,
    check_replay,
    measure,
    record_all,
    replay,
)
from specbranch.lab.bench.recorded_pair import RecordedPair
from specbranch.lab.bench.report import draw_timeline, pictures, save_report
from specbranch.lab.bench.results import Results
from specbranch.lab.bench.run_store import RunStore
from specbranch.lab.bench.tuning import Goal, Tuner, tuning_suites
from specbranch.lab.suites.suite import ALL_SHIPPED, Suite, load_suites
from specbranch.progress import StepsDone
from specbranch.provenance import Provenance

DRAWN = ("specbranch", "pearl")  # methods that --timeline draws


@dataclass(frozen=True, slots=True)
class Reporter:
    """The ways in which a job reports to its user."""

    progress: StepsDone
    say: Callable[[str], None]  # prints a sentence next to the results
    fetch: Callable[[str], object]  # fetches a model, showing the download


def run_bench(order: BenchOrder, reporter: Reporter) -> Results:
    """Carry out an order, write its results and return them."""
    subjects = [_subject(order, pair, reporter) for pair in order.pairs]
    named = order.suites or (() if order.prompts else (ALL_SHIPPED,))
    # Suites may be fetched, so all checks come first.
    suites = load_suites(named, files=order.prompts, data=order.data, limit=order.limit)
    pairs = [_bench_pair(order, *one, suites, reporter) for one in zip(order.pairs, subjects, strict=True)]
    with RunStore(order.out / "runs.jsonl", _plan(order, pairs)) as store:
        identities: dict[str, Any] = {}
        try:
            for pair in pairs:
                identities |= _PairJob(order, pair, store, reporter).run()
                free_memory()
        except KeyboardInterrupt:
            reporter.say(f"Interrupted; the measurements are in {order.out}. The same command resumes.")
            if store.runs:
                _write(_results(order, pairs, store, identities), order.out)
            raise
        results = _results(order, pairs, store, identities)
    _write(results, order.out)
    return results


def _subject(order: BenchOrder, pair: PairOrder, reporter: Reporter) -> Subject:
    """Return a pair in the requested shapes."""
    if pair.target_shape or pair.draft_shape or order.contexts:
        reporter.fetch(pair.models[0])
    return make_subject(pair, order.running, order.out / "models")


def _bench_pair(
    order: BenchOrder, pair: PairOrder, subject: Subject, suites: Sequence[Suite], reporter: Reporter
) -> BenchPair:
    """Combine a pair with its prompts, and with filler text if the order asks for long contexts."""
    group = Group(tuple(suite.first(pair.limit) for suite in suites), tuning_suites(order.tuning_prompts))
    contexts = _contexts(order, subject, reporter) if order.contexts else ()
    if not contexts:
        return BenchPair(subject, (group,), pair.outside_limit)
    answer = order.workloads[0].max_tokens
    groups = tuple(group.with_filler(context, subject.source[0], answer) for context in contexts)
    longest = max(contexts)
    return BenchPair(subject, groups, pair.outside_limit, longest if longest > USUAL_CONTEXT else None)


def _contexts(order: BenchOrder, subject: Subject, reporter: Reporter) -> tuple[int, ...]:
    """Return the context lengths that the target supports; a preset's longer ones are dropped with a note."""
    target = subject.source[0]
    most = trained_context(target)
    fitting = tuple(length for length in order.contexts if length <= most)
    beyond = [length for length in order.contexts if length > most]
    made = f"{target} supports contexts of up to {most} tokens"
    if beyond and not (order.may_leave_out_contexts and fitting):
        raise BadParameter(f"--context is {beyond[0]}, but {made}. Give a smaller one, or another --target.")
    if beyond:
        reporter.say(f"{subject.title}: a context of {beyond[0]} tokens is left out: {made}.")
    return fitting


def _plan(order: BenchOrder, pairs: Sequence[BenchPair]) -> dict[str, Any]:
    """Return the plan of a folder of results. Pairs, methods, clocks, prompts or repeats may be added later."""
    suites = sorted((suite for pair in pairs for suite in pair.suites), key=lambda suite: len(suite.prompts))
    prompts = {suite.name: [prompt.digest for prompt in suite.prompts] for suite in suites}
    workload = order.workloads[0]
    plan = {"max_tokens": workload.max_tokens, "seed": workload.seed, "suites": prompts}
    return {**plan, "experience": True} if order.keep_experience else plan


@dataclass(frozen=True, slots=True)
class _PairJob:
    """One pair of an order and everything to run with it."""

    order: BenchOrder
    pair: BenchPair
    store: RunStore
    reporter: Reporter

    def run(self) -> dict[str, Any]:
        """Run everything; return the identity of the pair's models under its title."""
        order, subject = self.order, self.pair.subject
        self.reporter.fetch(subject.source[0])
        if order.has_transformers:
            check_target(subject.target)
        if order.has_llamacpp:
            check_file(subject.target)
            self.reporter.say(f"{built_with()}.")
        if not order.force_profile:
            for clock in order.clocks:
                clock.refuse_other_pair(subject.target, subject.draft)
        # Measure the machine before the pair is loaded for the runs: both at once would take twice the memory.
        machine = self._machine() if order.by_the_wall and order.tunes else None
        apart = self._tuned_apart(machine) if machine is not None and not subject.is_plain else {}
        self.reporter.progress(f"Loading {subject.title}", 0, 1)
        with RecordedPair(
            target=subject.target,
            draft=subject.draft,
            folder=order.records,
            predictor=order.predictor,
            keep_experience=order.keep_experience,
            title=subject.title,
            running=subject.running,
            context_length=self.pair.context_length,
            texts=order.texts,
            warm_up=order.warm_up if order.by_the_wall else "lazy",
            max_batch=1,
        ) as recorded:
            # These load nothing until their first answer.
            outside = dict.fromkeys(TRANSFORMERS, Transformers(recorded)) | dict.fromkeys(LLAMACPP, LlamaCpp(recorded))
            done = []
            for clock, group in product(order.clocks, self.pair.groups):
                settings = apart.get(group) or self._settings(recorded, machine if clock.is_wall else clock, group)
                done.append(PairRuns(group.suites, order.workloads, settings, order.repeats, self.pair.outside))
                self._run(recorded, done[-1], clock, outside)
            if order.timeline and order.by_the_wall:
                self._draw(recorded, done[0])
            return {recorded.pair: recorded.identity}

    def _run(self, recorded: RecordedPair, runs: PairRuns, clock: Clock, outside: Mapping[str, OtherEngine]) -> None:
        """Run one group of prompts by one clock; with the first profile, also repeat a sample with both models."""
        record_all(recorded, runs, self.reporter.progress)
        if clock.is_wall:
            measure(recorded, runs, self.store, self.reporter.progress, outside)
            return
        replay(recorded, runs, clock, self.store, self.reporter.progress)
        if clock is self.order.clocks[0] and self.order.texts is None:
            self.reporter.say(_agreement(recorded.pair, check_replay(recorded, runs, clock)))

    def _machine(self) -> Clock | None:
        """Return the profile to tune by for the wall clock: the given one, or this machine's with the pair."""
        order, subject = self.order, self.pair.subject
        if order.profile is not None:
            return given_clock(order.profile, subject, order.force_profile)
        if subject.draft is None:
            return None
        return kept_machine_clock(subject, subject.draft, order.out, self.reporter.progress, far=bool(order.contexts))

    def _tuned_apart(self, clock: Clock) -> dict[Group, tuple[Setting, ...]]:
        """Tune an inflated pair, or one with several processes, with its source models: decisions are the same, and
        costs are the pair's."""
        subject = self.pair.subject
        with RecordedPair(
            target=subject.source[0],
            draft=subject.source[1],
            folder=self.order.records,
            predictor=self.order.predictor,
            running=Running(device=subject.running.device),
            context_length=self.pair.context_length,
        ) as small:
            found = {group: self._settings(small, clock, group) for group in self.pair.groups}
        del small
        free_memory()
        return found

    def _settings(self, recorded: RecordedPair, clock: Clock | None, group: Group) -> tuple[Setting, ...]:
        """Return the settings of all methods: tuned by a clock, or the usual ones without a clock; then those given by
        hand."""
        order = self.order
        if clock is None or not order.tune:
            return (*map(default_setting, order.methods), *order.settings)
        tuner = Tuner(recorded, Goal(clock, order.workloads[0], group.tuning, order.trials), self.reporter.progress)
        return (*map(tuner.setting, order.methods), *order.settings)

    def _draw(self, recorded: RecordedPair, runs: PairRuns) -> None:
        """Draw the answer to the first prompt, for each method with a timeline."""
        record = recorded.records(runs.suites[0].prompts[0], runs.workloads[0])[0]
        for setting in runs.settings:
            if setting.method in DRAWN:
                self.reporter.progress(f"Drawing {setting.method}", 0, 1)
                draw_timeline(recorded, setting, record, self.order.out)


def _agreement(pair: str, found: ReplayCheck) -> str:
    return (
        f"{pair}: of {found.runs} replays repeated with both models {found.same_text} gave the same text and "
        f"{found.same_counts} of the {found.counted} that do not go by the clock drafted and accepted exactly as much."
    )


def _results(order: BenchOrder, pairs: Sequence[BenchPair], store: RunStore, identities: Mapping[str, Any]) -> Results:
    """Return rows and provenance, including pairs that earlier commands ran."""
    import torch

    workload = order.workloads[0]
    before = _earlier(order.out)
    commands = [*((before.command or "").split("\n") if before else ()), order.command]
    made = Provenance.here(
        pairs={**(before.pairs if before else {}), **identities},
        workload={"max_tokens": workload.max_tokens, "seed": workload.seed, "chat_template": True},
        settings={"repeats": order.repeats, "tuned": order.tune, "threads": torch.get_num_threads()}
        | ({"llamacpp": built_with()} if order.has_llamacpp else {}),
        suites={
            **(before.suites if before else {}),
            **{suite.name: Path(suite.source).name for pair in pairs for suite in pair.suites},
        },
        command="\n".join(dict.fromkeys(one for one in commands if one)),
    )
    return Results(rows_of(store.runs), made)


def _earlier(out: Path) -> Provenance | None:
    """Return the provenance of the results in a folder, if there are any."""
    try:
        return Results.load(out / "results.json").provenance
    except BadParameter:
        return None


def _write(results: Results, out: Path) -> None:
    results.save(out / "results.json")
    results.save_csv(out / "results.csv")
    save_report(results, out / "report.html", pictures(out))
