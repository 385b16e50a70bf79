"""Verifying: carries out Verify orders of several sessions in one forward, and judges them by the request's rule.

Owns the target's side of a round, in two halves: `score` runs the model, `judge` decides once a sampled head is known. Invariant: after
a verdict the target's cache holds the accepted path as committed prefix, token i at place i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specbranch.core import noise
from specbranch.core.noise import Purpose
from specbranch.core.orders import Branch, Context, Signal, TokenLogprobs, Verdict, Verify
from specbranch.core.runner import Feed, Forecaster, Law, Runner, Sampler
from specbranch.core.slots import ROOT
from specbranch.core.verify import Head, Outcome, Uniform, accept_match, accept_ratio
from specbranch.errors import SpecBranchError
from specbranch.exec.worker import Stale, Worker, chain_after


@dataclass(frozen=True, slots=True)
class Scored:
    """An order whose rows are made: `line` are the nodes of the context not yet committed, then `nodes` those of its tokens."""

    order: Verify
    line: list[int]
    nodes: list[int]

    def node(self, index: int) -> int:
        """The cache node of the order's token `index`, ROOT for the end of the context."""
        return self.nodes[index] if index != ROOT else self.line[-1]


class Verifier(Worker):
    """The target model at work, perhaps with someone who foretells from its rows what becomes of the next draft."""

    def __init__(self, runner: Runner, sampler: Sampler, forecaster: Forecaster | None = None) -> None:
        super().__init__(runner, sampler)
        self.forecaster = forecaster

    def score(self, orders: Mapping[int, Verify]) -> tuple[dict[int, Scored], dict[int, SpecBranchError]]:
        """Feed what each order needs, all in one forward; a session that cannot be served is reported apart."""
        work: list[Feed] = []
        failed: dict[int, SpecBranchError] = {}
        for session, order in orders.items():
            try:
                work.append(self._work(session, order))
            except SpecBranchError as error:
                failed[session] = error
        if self.forecaster:
            self.forecaster.attend(any(self.request(item.seq).foretold for item in work))
        fed = [item for item in work if item.tokens]
        nodes = dict(zip((item.seq for item in fed), self.feed(fed) if fed else [], strict=True))
        return {item.seq: _scored(orders[item.seq], nodes.get(item.seq, [])) for item in work}, failed

    def judge(self, scored: Mapping[int, Scored], heads: Mapping[int, Branch]) -> dict[int, Verdict]:
        """Decide each order; `heads` are the first branches drafted beside it, needed where their head was sampled."""
        return {session: self._verdict(session, item, heads.get(session)) for session, item in scored.items()}

    def margin(self, session: int, tokens: Sequence[int], first: int, second: int) -> float:
        """Return by how many logits the target prefers `first` to `second` after these tokens; 0 is a tie."""
        self.score({session: Verify(Context(0, tuple(tokens)))})
        node = len(self.slots(session).tokens) - 1
        return self.sampler.margin(self.row(session, node), self.spot(session, node), first, second)

    def _work(self, session: int, order: Verify) -> Feed:
        try:
            _, rest = self.align(session, order.on)  # all of the context is committed, so the tail is empty now
        except Stale:
            _, rest = self.align(session, order.on.whole())
        self.slots(session).demand(len(rest) + len(order.tokens))
        # Behind `rest` node i of the order becomes node len(rest) + i, and its root the last of `rest`, or ROOT.
        below = tuple(len(rest) + order.parent(n) for n in range(len(order.tokens)))
        return Feed(session, (*rest, *order.tokens), (*chain_after(ROOT, 0, len(rest)), *below))

    def _verdict(self, session: int, item: Scored, first: Branch | None) -> Verdict:
        path, token = self._outcome(session, item, first)
        logprobs = self._logprobs(session, item, path, token)
        signal = self._signal(session, item, path, token)
        line = [*item.line[1:], *(item.nodes[n] for n in path)]
        self._keep(session, line, len(line))
        return Verdict(path, token, logprobs, signal)

    def _signal(self, session: int, item: Scored, path: tuple[int, ...], token: int) -> Signal | None:
        """What is foretold of the draft behind the verdict's token, by the row that led to it."""
        if self.forecaster is None or not self.request(session).foretold:
            return None
        return self.forecaster.signal(self.row(session, item.node(path[-1] if path else ROOT)), token)

    def _outcome(self, session: int, item: Scored, first: Branch | None) -> Outcome:
        if not self.request(session).by_ratio:
            nodes = [item.node(i) for i in range(ROOT, len(item.nodes))]
            rows, spots = [self.row(session, n) for n in nodes], [self.spot(session, n) for n in nodes]
            return accept_match(item.order, self.sampler.pick(rows, spots))

        def law(index: int) -> Law:
            node = item.node(index)
            return self.sampler.law(self.row(session, node), self.spot(session, node))

        return accept_ratio(item.order, law, self._uniform(session, item), _head(item.order, first))

    def _uniform(self, session: int, item: Scored) -> Uniform:
        request, start = self.request(session), len(item.order.on)

        def uniform(depth: int, purpose: Purpose, attempt: int) -> float:
            return noise.uniform(request.seed, request.sample, start + depth, purpose, attempt)

        return uniform

    def _logprobs(self, session: int, item: Scored, path: tuple[int, ...], token: int) -> tuple[TokenLogprobs, ...] | None:
        top = self.request(session).params.logprobs
        if top is None:
            return None
        tokens = [*(item.order.tokens[n] for n in path), token]
        nodes = [item.node(n) for n in (ROOT, *path)]
        return tuple(self.sampler.logprobs(self.row(session, n), t, top) for n, t in zip(nodes, tokens, strict=True))


def _scored(order: Verify, nodes: list[int]) -> Scored:
    split = len(nodes) - len(order.tokens)
    return Scored(order, [ROOT, *nodes[:split]], nodes[split:])


def _head(order: Verify, first: Branch | None) -> Head | None:
    """The sampled head that continues the whole chain, if there is one."""
    if first is None or first.q is None or first.q[0] is None or first.after != len(order.tokens):
        return None
    return Head(len(order.tokens) - 1, first.tokens[0], first.q[0])
