"""The target's worker: verifies orders of several sessions in one forward, by each request's rule.

Owns the target's side of a round, in two halves: `start` starts the model, `judge` takes its verdicts. Between them
`add_heads` may pass sampled heads, so that a device judges by itself. Invariant: after a verdict the target's KV cache
holds the accepted path as committed prefix, token i in KV slot i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from specbranch.core.forecast import Forecaster
from specbranch.core.orders import NO_PREFILL, Aside, Branch, Context, Prefill, Receiver, Verdict, Verify
from specbranch.core.plain_rounds import PlainOrders
from specbranch.core.runner import (
    NO_TOKEN,
    DecodesBatches,
    Feed,
    Head,
    Judged,
    PlainStep,
    ReceivesTrees,
    Runner,
    Trial,
    Verdicts,
    VerifyWork,
)
from specbranch.core.sending import SendingLater
from specbranch.core.slots import ROOT
from specbranch.errors import SpecBranchError
from specbranch.exec.worker import Stale, Worker, chain_after

NOTHING_ASIDE = Aside((), (), ())

OnVerdicts = Callable[[Mapping[int, Verdict]], None]


@dataclass(frozen=True, slots=True)
class Scored:
    """Orders whose forward is running: their verdicts, the guesses of `aside` rows, and trials that wait for a sampled
    head."""

    judged: tuple[Trial, ...]
    guessed: tuple[Trial, ...]
    verdicts: Verdicts
    waiting: tuple[Trial, ...]
    last: Verdicts | None = None  # of the waiting trials, once their heads are known
    freed: frozenset[int] = frozenset()  # sessions whose sequences are gone, or whose orders came again

    @property
    def ready(self) -> bool:
        """True if taking the verdicts would not wait."""
        return self.verdicts.ready() and (self.last is None or self.last.ready())

    def __contains__(self, session: int) -> bool:
        return any(trial.seq == session for trial in (*self.judged, *self.waiting))


@dataclass(frozen=True, slots=True)
class Started:
    """The target's half of a round, running: its forward, how far prompts are prefilled, and whose orders failed."""

    scored: Scored | None  # None: there is nothing to verify
    reached: dict[int, int]
    failed: dict[int, SpecBranchError]


@dataclass(frozen=True, slots=True)
class PlainDecoding:
    """A round of plain decoding, running: its step, how far prompts are prefilled, and who found no memory.

    `verified`: verify orders whose rows are in the step; `launched`: those whose rows are in the next one.
    """

    step: PlainStep
    reached: dict[int, int]
    failed: dict[int, SpecBranchError]
    verified: Scored | None
    launched: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Forward:
    """The rows of a target forward that has its memory, and what is asked of it."""

    work: list[Feed]
    judged: tuple[Trial, ...]
    guessed: tuple[Trial, ...]
    waiting: tuple[Trial, ...]


class Verifier(Worker):
    """The target model at work, with a forecaster if a predictor is used."""

    def __init__(self, runner: Runner, forecaster: Forecaster | None = None) -> None:
        super().__init__(runner)
        self.forecaster = forecaster
        self._receives = runner if isinstance(runner, ReceivesTrees) else None
        self._batches = runner if isinstance(runner, DecodesBatches) else None
        self._launched: Scored | None = None  # verify orders in a decode step that is launched, and not read yet

    def free(self, session: int) -> None:
        """Free a session's KV cache; its verify order in flight gets no verdict."""
        super().free(session)
        if self._launched is not None:
            self._launched = replace(self._launched, freed=self._launched.freed | {session})

    @property
    def begun(self) -> Callable[[], float] | None:
        """When the last verify started, which may be before it was ordered; None: when it was ordered."""
        read = any(held.prompt is not NO_PREFILL for held in self._held.values())  # in the same order, before
        return self._receives.begun if self._receives and not read else None

    def receiver(self, session: int, on: Context, sending: SendingLater) -> Receiver | None:
        """Return who receives a tree behind this sequence, to verify it at once; None: the verify is ordered."""
        request = self.request(session)
        asked = request.params.logprobs is not None or (self.forecaster is not None and request.wants_forecast)
        asked = asked or request.is_constrained  # a device does not know a grammar's masks
        return None if asked or self._receives is None else self._receives.receiver(session, on, sending)

    def start(
        self, orders: Mapping[int, Verify], heads: Mapping[int, Branch] | None, reads: Mapping[int, Prefill]
    ) -> Started:
        """Start the target's half of a round; `heads` as for `score`.

        Verify orders get memory first. Then the Prefill orders `reads` are put off, so that the forward of the verify
        orders takes their chunks along. If a prompt takes a page of the prefix cache that a verify order writes to, the
        copy of that page may find no memory; then the whole round raises `PoolFull`.
        """
        self._launched = None  # their orders come again
        forward, failed = self._planned(orders, heads)
        reached, short = self.prefill(reads)
        scored = self._scored(forward) if orders else None
        self.runner.flush()  # without a verify order, or if its rows are all computed, no forward has taken the chunks
        return Started(scored, reached, failed | short)

    @property
    def decodes_batches(self) -> bool:
        """True if the model makes rounds of plain decoding for a batch."""
        return self._batches is not None

    def decodes(self, session: int, length: int) -> bool:
        """True if the session can be decoded in a plain batch, behind `length` tokens; then also behind more."""
        request = self.request(session)
        forecasts = request.wants_forecast and self.forecaster is not None
        if self._batches is None or forecasts:
            return False
        return self._batches.decodes(session, length)

    def decode(self, orders: PlainOrders) -> PlainDecoding | None:
        """Start a round of plain decoding, together with orders of other sessions; None: it has to be ordered.

        Verify orders get memory before prompts, as in `start`. Their rows go with the step that is launched now, and
        the next call reads that one. If it does not come, the same orders can be carried out again.
        """
        verified, self._launched = self._launched, None
        if verified is not None:  # after a round that only drafted, orders come again: these count
            verified = replace(verified, freed=verified.freed | orders.verifies.keys())
        if self._batches is None:
            return None
        forward, failed = self._planned(orders.verifies, orders.heads)
        trials = (*forward.judged, *forward.guessed)
        verify = VerifyWork(forward.work, trials) if trials else None
        if not self._batches.fits(orders.texts, verify):
            return None
        reached, short = self.prefill(orders.prefills)
        step = self._batches.decode(orders.texts, orders.going_on, verify, orders.masks)
        if step is None:
            return None
        self.runner.flush()  # if no step was launched, none has taken the chunks
        self.rows_fed += step.rows
        launched: frozenset[int] = frozenset()
        if step.verdicts is not None:
            self._launched = Scored(forward.judged, forward.guessed, step.verdicts, ())
            launched = frozenset([trial.seq for trial in forward.judged])
        return PlainDecoding(step, reached, {**short, **step.failed, **failed}, verified, launched)

    def score(
        self, orders: Mapping[int, Verify], heads: Mapping[int, Branch] | None = None
    ) -> tuple[Scored, dict[int, SpecBranchError]]:
        """Start one forward for all orders; returns it, and the errors of sessions that cannot be served.

        `heads` are the first branches drafted for each order; a sampled head is judged with it. None: `judge` gets
        them.
        """
        forward, failed = self._planned(orders, heads)
        return self._scored(forward), failed

    def prefill(self, orders: Mapping[int, Prefill]) -> tuple[dict[int, int], dict[int, SpecBranchError]]:
        """Prefill further, without asking; returns how many tokens are held of each session, and the errors.

        The forward may be put off until the next one, or until `Runner.flush`.
        """
        reached: dict[int, int] = {}
        failed: dict[int, SpecBranchError] = {}
        for session, order in orders.items():
            try:
                with self.releasing(session):
                    reached[session] = self.continue_prefill(session, order)
                joins = self._batches is not None and not self.request(session).is_constrained
                if joins and order.last is not None and reached[session] == len(order.on):
                    assert self._batches is not None
                    self._batches.join(session, order.last)
            except SpecBranchError as error:
                failed[session] = error
        return reached, failed

    def _planned(
        self, orders: Mapping[int, Verify], heads: Mapping[int, Branch] | None
    ) -> tuple[_Forward, dict[int, SpecBranchError]]:
        """Reserve the memory of all orders; returns their forward, and the errors of those that find none."""
        work: list[Feed] = []
        trials: list[Trial] = []
        guessed: list[Trial] = []
        failed: dict[int, SpecBranchError] = {}
        for session, order in orders.items():
            try:
                with self.releasing(session):
                    feed, trial = self._work(session, order)
            except SpecBranchError as error:
                failed[session] = error
            else:
                work += [feed] if feed.tokens else []
                trials.append(_with_head(trial, heads or {}))
                guessed += _guesses(trial)
        waiting = tuple(trial for trial in trials if heads is None and self.request(trial.seq).by_ratio)
        judged = tuple(trial for trial in trials if heads is not None or not self.request(trial.seq).by_ratio)
        return _Forward(work, judged, tuple(guessed), waiting), failed

    def _scored(self, forward: _Forward) -> Scored:
        self._count(forward.work)
        verdicts = self.runner.verify(forward.work, (*forward.judged, *forward.guessed))
        return Scored(forward.judged, forward.guessed, verdicts, forward.waiting)

    def add_heads(self, scored: Scored, heads: Mapping[int, Branch]) -> Scored:
        """Start to judge the waiting trials with their heads; `heads` as for `score`."""
        waiting = tuple(_with_head(trial, heads) for trial in scored.waiting)
        return replace(scored, waiting=waiting, last=self.runner.verify((), waiting) if waiting else Verdicts(list))

    def judge(
        self, scored: Scored, heads: Mapping[int, Branch], on_verdicts: OnVerdicts | None = None
    ) -> dict[int, Verdict]:
        """Take the verdicts of all orders; `heads` as for `score`, if they were not passed before.

        `on_verdicts` is called before the KV cache is brought in line with the verdicts. A session whose scores are not
        finite has no verdict.
        """
        found = scored.verdicts()
        scored = scored if scored.last else self.add_heads(scored, heads)
        assert scored.last
        judged = [*found[: len(scored.judged)], *scored.last()]
        said: dict[int, list[int]] = {}
        for trial, one in zip(scored.guessed, found[len(scored.judged) :], strict=True):
            said.setdefault(trial.seq, []).append(one.token)
        sound = [
            (trial, one)
            for trial, one in zip((*scored.judged, *scored.waiting), judged, strict=True)
            if trial.seq not in scored.freed and _is_finite(one, said.get(trial.seq, ()))
        ]
        verdicts = {t.seq: self._verdict(t, one, tuple(said.get(t.seq, ()))) for t, one in sound}
        if on_verdicts is not None:
            on_verdicts(verdicts)
        for trial, one in sound:
            if not one.kept:
                kept = trial.nodes_on(one.path)
                self.runner.keep(trial.seq, kept, len(kept))
        return verdicts

    def margin(self, session: int, tokens: Sequence[int], first: int, second: int) -> float:
        """Return by how many logits the target prefers `first` to `second` after these tokens; 0 is a tie."""
        feed, _ = self._work(session, Verify(Context(0, tuple(tokens))))
        self.runner.feed([feed] if feed.tokens else [])
        return self.runner.margin(session, len(self.slots(session).tokens) - 1, first, second)

    def _work(self, session: int, order: Verify) -> tuple[Feed, Trial]:
        count, aside = len(order.tokens), order.aside or NOTHING_ASIDE
        try:
            _, rest = self.align(session, order.on)  # the whole context is committed, so the tail is empty now
        except Stale:
            _, rest = self.align(session, order.on.whole())
        if aside.tokens:  # these may leave room for no more than the last token
            rest = self._catch_up(
                session, rest, len(rest), at_once=max(self.slots(session).room - count - len(aside.tokens), 1)
            )
        root = len(rest) - 1
        self.runner.demand(session, len(rest) + count + len(aside.tokens))
        # Node i of the order becomes node len(rest) + i, and its root the last of `rest`, or ROOT. `aside` rows come
        # last.
        below = (
            *[len(rest) + parent for parent in order.parents or range(ROOT, count - 1)],
            *(root if p < 0 else len(rest) + count + p for p in aside.parents),
        )
        wants_forecast = self.forecaster is not None and self.request(session).wants_forecast
        nodes = tuple(range(len(rest), len(rest) + count))
        logprobs = self.request(session).params.logprobs
        trial = Trial(session, order, root, nodes, None, logprobs, wants_forecast, order.allowed)
        return Feed(session, (*rest, *order.tokens, *aside.tokens), (*chain_after(ROOT, 0, len(rest)), *below)), trial

    def _verdict(self, trial: Trial, found: Judged, guessed: tuple[int, ...]) -> Verdict:
        signal = None
        if trial.wants_forecast and self.forecaster is not None:
            signal = self.forecaster.signal(found.said, len(trial.order.on) + len(found.path))
        return Verdict(found.path, found.token, found.logprobs, signal, guessed)


def _is_finite(found: Judged, guessed: Sequence[int]) -> bool:
    """True if every row that was used has finite scores.

    A row that is not finite spoils all its log-probabilities, even if none of its tokens could be chosen.
    """
    return NO_TOKEN not in (found.token, *guessed) and not any(math.isnan(one.logprob) for one in found.logprobs or ())


def _guesses(trial: Trial) -> list[Trial]:
    """Return trials for the target's token after each guessed node: each is a verify of nothing at that node."""
    aside, first = trial.order.aside, trial.root + 1 + len(trial.nodes)
    if aside is None:
        return []
    on = len(trial.order.on)
    return [Trial(trial.seq, Verify(Context(on + aside.depth(node), ())), first + node, ()) for node in aside.guessed]


def _with_head(trial: Trial, heads: Mapping[int, Branch]) -> Trial:
    """Add the sampled head that continues the whole chain, if there is one."""
    first, count = heads.get(trial.seq), len(trial.order.tokens)
    if first is None or first.q is None or first.q[0] is None or first.after != count:
        return trial
    return replace(trial, head=Head(count - 1, first.tokens[0], first.q[0]))
