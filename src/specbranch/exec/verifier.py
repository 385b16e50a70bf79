"""Verifying: carries out Verify orders of several sessions in one forward, judged by the request's rule where the model is.

Owns the target's side of a round, in two halves: `score` starts the model, `judge` takes its verdicts once a sampled head is known.
Invariant: after a verdict the target's cache holds the accepted path as committed prefix, token i at place i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specbranch.core.orders import Branch, Context, Verdict, Verify
from specbranch.core.runner import Feed, Forecaster, Head, Judged, Runner, Trial, Verdicts
from specbranch.core.slots import ROOT
from specbranch.errors import SpecBranchError
from specbranch.exec.worker import Stale, Worker, chain_after


@dataclass(frozen=True, slots=True)
class Scored:
    """Orders whose forward was started: the verdicts that come with it, and those that wait for a sampled head."""

    judged: tuple[Trial, ...]
    verdicts: Verdicts
    waiting: tuple[Trial, ...]

    def __contains__(self, session: int) -> bool:
        return any(trial.seq == session for trial in (*self.judged, *self.waiting))


class Verifier(Worker):
    """The target model at work, perhaps with someone who foretells what becomes of the next draft."""

    def __init__(self, runner: Runner, forecaster: Forecaster | None = None) -> None:
        super().__init__(runner)
        self.forecaster = forecaster

    def score(self, orders: Mapping[int, Verify], heads: Mapping[int, Branch] | None = None) -> tuple[Scored, dict[int, SpecBranchError]]:
        """Feed what each order needs, all in one forward; a session that cannot be served is reported apart.

        `heads` are the first branches drafted beside each order, judged where their head was sampled; nothing: they are told to `judge`.
        """
        work: list[Feed] = []
        trials: list[Trial] = []
        failed: dict[int, SpecBranchError] = {}
        for session, order in orders.items():
            try:
                feed, trial = self._work(session, order)
            except SpecBranchError as error:
                failed[session] = error
            else:
                work += [feed] if feed.tokens else []
                trials.append(_with_head(trial, heads or {}))
        waiting = tuple(trial for trial in trials if heads is None and self.request(trial.seq).by_ratio)
        judged = tuple(trial for trial in trials if heads is not None or not self.request(trial.seq).by_ratio)
        self._count(work)
        return Scored(judged, self.runner.verify(work, judged), waiting), failed

    def judge(self, scored: Scored, heads: Mapping[int, Branch]) -> dict[int, Verdict]:
        """Decide each order; `heads` as for `score`, for those that were not told there."""
        waiting = [_with_head(trial, heads) for trial in scored.waiting]
        judged = [*scored.verdicts(), *(self.runner.verify((), waiting)() if waiting else ())]
        return {trial.seq: self._verdict(trial, found) for trial, found in zip((*scored.judged, *waiting), judged, strict=True)}

    def margin(self, session: int, tokens: Sequence[int], first: int, second: int) -> float:
        """Return by how many logits the target prefers `first` to `second` after these tokens; 0 is a tie."""
        feed, _ = self._work(session, Verify(Context(0, tuple(tokens))))
        self.runner.feed([feed] if feed.tokens else [])
        return self.runner.margin(session, len(self.slots(session).tokens) - 1, first, second)

    def _work(self, session: int, order: Verify) -> tuple[Feed, Trial]:
        try:
            _, rest = self.align(session, order.on)  # all of the context is committed, so the tail is empty now
        except Stale:
            _, rest = self.align(session, order.on.whole())
        count, root = len(order.tokens), len(rest) - 1
        self.runner.demand(session, len(rest) + count)
        # Behind `rest` node i of the order becomes node len(rest) + i, and its root the last of `rest`, or ROOT.
        below = tuple(len(rest) + order.parent(n) for n in range(count))
        foretold = self.forecaster is not None and self.request(session).foretold
        nodes = tuple(range(len(rest), len(rest) + count))
        trial = Trial(session, order, root, nodes, None, self.request(session).params.logprobs, foretold)
        return Feed(session, (*rest, *order.tokens), (*chain_after(ROOT, 0, len(rest)), *below)), trial

    def _verdict(self, trial: Trial, found: Judged) -> Verdict:
        line = [*range(trial.root + 1), *(trial.nodes[n] for n in found.path)]
        self.runner.keep(trial.seq, line, len(line))
        signal = None
        if trial.foretold and self.forecaster is not None:
            signal = self.forecaster.signal(found.said, len(trial.order.on) + len(found.path))
        return Verdict(found.path, found.token, found.logprobs, signal)


def _with_head(trial: Trial, heads: Mapping[int, Branch]) -> Trial:
    """Add the sampled head that continues the whole chain, if there is one."""
    first, count = heads.get(trial.seq), len(trial.order.tokens)
    if first is None or first.q is None or first.q[0] is None or first.after != count:
        return trial
    return replace(trial, head=Head(count - 1, first.tokens[0], first.q[0]))
