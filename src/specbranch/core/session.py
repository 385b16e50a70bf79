"""One request in progress: its committed tokens, its limits, its end.

Owns the token list; does not decide what is drafted. Invariant: only `commit` appends tokens. So stops, limits and the
end token act alike for a single token and for an accepted block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from specbranch.core.forest import ForestReport, ForestRound
from specbranch.core.grammar import State, guides_in_tree, pruned
from specbranch.core.orders import (
    NOTHING,
    Aside,
    Branch,
    Context,
    Draft,
    Following,
    Follows,
    Grow,
    Orders,
    Plan,
    Reports,
    TokenLogprobs,
    Verdict,
    Verify,
)
from specbranch.core.prediction import Prediction
from specbranch.core.request import Request
from specbranch.core.round_clock import RoundClock
from specbranch.core.sending import SendingLater
from specbranch.core.stats import Stats
from specbranch.core.trees import Growth, Tree, path_of
from specbranch.errors import BadParameter

Origin = Literal["target", "draft", "branch"]
FinishReason = Literal["stop", "length", "error"]
Watcher = Callable[[int], bool]  # called with each appended token; True ends the request (a stop string is complete)
# Called after each round with its orders, its reports, and the number of tokens it added.
RoundWatcher = Callable[[Orders, Reports, int], None]


class Session:
    """The committed tokens of one request, and how many may still follow."""

    def __init__(
        self, number: int, prompt: Sequence[int], request: Request, limit: int, watch: Watcher | None = None
    ) -> None:
        """Start with the prompt; `limit` is the most tokens the sequence may have, prompt included."""
        self.number = number
        self.request = request
        self.limit = min(limit, len(prompt) + request.params.max_tokens)
        self.tokens: list[int] = list(prompt)
        self.origins: list[Origin] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finished: FinishReason | None = None
        self.error: Exception | None = None
        self.stats = Stats()
        self.on_round: RoundWatcher | None = None
        self.prediction: Prediction | None = None  # the text that the caller expects
        self.batch_size = 1  # live sessions, itself included
        self.clock = RoundClock()  # that of its loop
        self.now = 0.0  # when its last round ended, on the executor's clock
        self.launched = False  # a device computes its next token already
        self.in_forest = False  # a device can grow and verify its trees, see `core/forest.py`
        self.drafted_length = (
            request.prompt_length
        )  # tokens that the draft has computed in such rounds, prompt included
        self.waited = 0.0  # seconds of rounds that ran without it; see `take_waited`
        self.state: State | None = request.constraint.start() if request.constraint else None  # of its grammar
        self._rounds: list[ForestRound] = []  # of which its method has not heard
        self._watch = watch
        self._ending = request.ending_ids
        self._sent = {"draft": 0, "target": 0}
        self._drafts = 0

    @property
    def output(self) -> list[int]:
        """The tokens emitted so far."""
        return self.tokens[self.request.prompt_length :]

    @property
    def room(self) -> int:
        """How many tokens may still be emitted."""
        return self.limit - len(self.tokens)

    @property
    def unsent(self) -> int:
        """How many committed tokens no draft order has contained yet."""
        return len(self.tokens) - self._sent["draft"]

    @property
    def undrafted(self) -> int:
        """How many tokens of the answer the draft has to compute before it can work in a round of the forest."""
        return len(self.tokens) - self.drafted_length

    def draft(self, plan: Plan, pending: Branch = NOTHING) -> Draft | None:
        """Order a draft behind the pending chain, clipped to what can still be emitted; None if that is nothing."""
        length = min(plan.length, self.room - len(pending.tokens) - 1)
        if length < min(plan.length, 1):
            return None
        self._drafts += 1
        plan, on = replace(plan, length=length), self._context("draft", pending.tokens)
        return Draft(on, plan, len(pending.tokens), self._drafts, self.state)

    def grow(self, tree: Tree, growth: Growth, sending: SendingLater | None = None) -> Grow:
        """Order the draft to extend a tree behind the committed tokens, no deeper than can still be emitted."""
        self._drafts += 1
        within = growth if growth.deepest < self.room else replace(growth, deepest=self.room - 1)
        sending = None if self.state is not None else sending  # a device does not know a grammar's masks
        return Grow(self._context("draft"), tree, within, self._drafts, sending, state=self.state)

    def verify(self, pending: Branch = NOTHING, follows: Follows | None = None) -> Verify:
        """Order a verify of the pending chain; `follows` as in `Verify`."""
        pending = self.permitted(pending)
        return self._constrained(
            Verify(self._context("target"), pending.tokens, None, pending.q, follows=self._unless_ended(follows))
        )

    def verify_plainly(self, goes_on: bool = True, to_the_end: bool = False) -> Verify:
        """Order the next token; `goes_on` says that one more will follow, `ends` that none will.

        `to_the_end`: so will all later ones, whatever a grammar forces.
        """
        goes_on = goes_on and self.room > 1 and (to_the_end or self.state is None)
        return self._constrained(Verify(self._context("target"), goes_on=goes_on, ends=self.room <= 1))

    def verify_tree(self, tree: Tree, aside: Aside | None = None, follows: Follows | None = None) -> Verify:
        """Order a verify of a tree, with `aside` rows in the same forward; `follows` as in `Verify`."""
        tokens, parents = tuple(n.token for n in tree.nodes), tuple(n.parent for n in tree.nodes)
        return self._constrained(
            Verify(self._context("target"), tokens, parents, aside=aside, follows=self._unless_ended(follows))
        )

    def verify_given(self, tokens: Sequence[int]) -> Verify:
        """Order a verify that accepts given tokens, to get their log-probabilities: no other token is allowed."""
        *before, _ = tokens
        return Verify(self._context("target"), tuple(before), allowed=tuple(frozenset((token,)) for token in tokens))

    def permitted(self, pending: Branch) -> Branch:
        """Return a chain up to the first token that the request's grammar forbids.

        Under the ratio rule a forbidden token that was drawn stays, as the last one: the target rejects it, and the
        rejection is part of what keeps the distribution.
        """
        if self.state is None:
            return pending
        count = self.state.permitted(pending.tokens)
        drawn = count < len(pending.tokens) and pending.q is not None and pending.q[count] is not None
        return pending.cut(0, count + drawn) if count + drawn < len(pending.tokens) else pending

    def permitted_tree(self, tree: Tree) -> Tree:
        """Return a tree without the nodes that the request's grammar forbids."""
        return tree if self.state is None else pruned(self.state, tree)

    def forced(self, most: int) -> tuple[int, ...]:
        """Return the tokens that the request's grammar forces, at most so many; the last token of a request is not
        among them."""
        return () if self.state is None else self.state.forced_chain(min(most, self.room - 1))

    def commit(self, pending: Sequence[int], verdict: Verdict, foreseen: bool = False) -> int:
        """Append the accepted pending tokens, then the bonus token, up to the request's end; returns how many.

        `foreseen`: the draft prepared a branch for this outcome.
        """
        tokens = [*(pending[node] for node in verdict.path), verdict.token]
        origins: list[Origin] = ["draft"] * len(verdict.path)
        origins.append("branch" if foreseen else "target")
        for index, (token, origin) in enumerate(zip(tokens, origins, strict=True)):
            self._append(token, origin)
            if verdict.logprobs:
                self.logprobs.append(verdict.logprobs[index])
            if self.finished:
                return index + 1
        return len(tokens)

    def commit_plain(self, token: int, logprobs: TokenLogprobs | None, seconds: float) -> None:
        """Append a token of plain decoding, whose round took the target some seconds."""
        self._append(token, "target")
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.stats.count_plain(seconds)

    def commit_forest(self, report: ForestReport, verifying: float, now: float) -> None:
        """Append what a round of the forest brought; its method hears of it later, by `take_rounds`.

        `verifying`: seconds that the target worked; `now`: when the round ended.
        """
        tree, tokens = report.tree, report.tokens
        path, bonus = path_of(tree, tokens)
        taken = 0
        for token in tokens:
            self._append(token, "draft" if taken < len(path) else "target" if bonus is None else "branch")
            taken += 1
            if self.finished:
                break
        verified = [n for n, node in enumerate(tree.nodes) if node.sent]
        self.stats.count_forest(tree, verified, path, bonus, taken, verifying)
        self._rounds.append(ForestRound(tree, verified, path, bonus, taken, now - self.now))
        self.now = now

    def take_rounds(self) -> list[ForestRound]:
        """Return the rounds of which its method has not heard, and forget them."""
        rounds, self._rounds = self._rounds, []
        return rounds

    def take_waited(self) -> float:
        """Return the seconds of rounds that ran without this session since the last call, and reset them."""
        waited, self.waited = self.waited, 0.0
        return waited

    def fail(self, error: Exception) -> None:
        """End the request with an error; it keeps its tokens."""
        self.error = error
        self.finished = "error"

    def _context(self, role: Literal["draft", "target"], pending: Sequence[int] = ()) -> Context:
        base = self._sent[role]
        self._sent[role] = len(self.tokens)
        return Context(base, (*self.tokens[base:], *pending), self.tokens)

    def _unless_ended(self, follows: Follows | None) -> Follows | None:
        """Return `follows`, with None for tokens that end the request; each answer is computed once for both models.

        None under a grammar: the masks of the next round are not known before its tokens are.
        """
        if follows is None or self.state is not None:
            return None
        after = follows
        known: dict[tuple[int, ...], Following] = {}

        def following(taken: tuple[int, ...]) -> Following:
            if taken not in known:
                ended = len(taken) >= self.room or not self._ending.isdisjoint(taken)
                known[taken] = None if ended else after(taken)
            return known[taken]

        return following

    def _constrained(self, order: Verify) -> Verify:
        """Return the order with what the request's grammar allows behind each of its rows."""
        if self.state is None:
            return order
        if self.request.by_ratio:  # where nothing may follow there is no law to draw from
            self.state.check()
        return replace(order, allowed=guides_in_tree(self.state, order.tokens, order.parents))

    def _advance(self, token: int) -> bool:
        """Move the grammar behind a token; returns True if nothing can follow."""
        if self.state is None:
            return False
        after = self.state.advance(token)
        if after is None:
            self.state.check()  # at a dead end no score is above another, so the target's token means nothing
            raise BadParameter(
                f"Token {token} is not allowed by the grammar of this request. An answer that starts with given tokens "
                "has to match its grammar."
            )
        if not after.ended:  # no parser hears of end tokens
            self.state = after.commit()
        return after.is_over

    def _append(self, token: int, origin: Origin) -> None:
        over = self._advance(token)
        self.tokens.append(token)
        self.origins.append(origin)
        self.stats.emitted += 1
        watched = self._watch(token) if self._watch else False
        if token in self._ending or watched or over:
            self.finished = "stop"
        elif len(self.tokens) >= self.limit:
            self.finished = "length"
