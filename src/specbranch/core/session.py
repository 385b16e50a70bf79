"""One request in progress: its committed tokens, its limits, its end.

Owns the token list; `commit` is the only place that appends to it, so stops, limits and the end token act alike whether
a token came alone or in an accepted block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

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
from specbranch.core.request import Request
from specbranch.core.sending import SendingLater
from specbranch.core.stats import Stats
from specbranch.core.trees import Growth, Tree

Origin = Literal["target", "draft", "branch"]
FinishReason = Literal["stop", "length", "error"]
Watcher = Callable[[int], bool]  # told of each token appended; True ends the request (a stop string is complete)
# Told of each round: what was ordered, what came back, how many tokens it added.
RoundWatcher = Callable[[Orders, Reports, int], None]


class Session:
    """Committed tokens of one request and what may still be added."""

    def __init__(
        self, number: int, prompt: Sequence[int], request: Request, limit: int, watch: Watcher | None = None
    ) -> None:
        """`limit` is the most tokens the sequence may have, prompt included."""
        self.number = number
        self.request = request
        self.limit = min(limit, len(prompt) + request.params.max_tokens)
        self.tokens: list[int] = list(prompt)
        self.origins: list[Origin] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finished: FinishReason | None = None
        self.error: Exception | None = None
        self.stats = Stats()
        self.on_round: RoundWatcher | None = None  # somebody who looks on
        self.batch_size = 1  # sessions that decode beside it, itself included
        self.now = 0.0  # on the executor's clock, when its last round ended
        self.waited = 0.0  # seconds of rounds that passed without it, since it last took part
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
        """How many committed tokens the draft was not told yet."""
        return len(self.tokens) - self._sent["draft"]

    def draft(self, plan: Plan, pending: Branch = NOTHING) -> Draft | None:
        """Order a draft after the pending chain, clipped to what could still be emitted; None if that is nothing."""
        length = min(plan.length, self.room - len(pending.tokens) - 1)
        if length < min(plan.length, 1):
            return None
        self._drafts += 1
        return Draft(
            self._context("draft", pending.tokens), replace(plan, length=length), len(pending.tokens), self._drafts
        )

    def grow(self, tree: Tree, growth: Growth, sending: SendingLater | None = None) -> Grow:
        """Order a tree to be grown behind the committed text, no deeper than could still be emitted."""
        self._drafts += 1
        within = growth if growth.deepest < self.room else replace(growth, deepest=self.room - 1)
        return Grow(self._context("draft"), tree, within, self._drafts, sending)

    def verify(self, pending: Branch = NOTHING, follows: Follows | None = None) -> Verify:
        """Order the pending chain to be judged; `follows` as for the order."""
        return Verify(self._context("target"), pending.tokens, None, pending.q, follows=self._unless_ended(follows))

    def verify_plainly(self) -> Verify:
        """Order the next token, and say whether one more will be wanted."""
        return Verify(self._context("target"), goes_on=self.room > 1)

    def verify_tree(self, tree: Tree, aside: Aside | None = None, follows: Follows | None = None) -> Verify:
        """Order a tree to be judged, and what else is to be read with it; `follows` as for the order."""
        tokens, parents = tuple(n.token for n in tree.nodes), tuple(n.parent for n in tree.nodes)
        return Verify(self._context("target"), tokens, parents, aside=aside, follows=self._unless_ended(follows))

    def verify_given(self, tokens: Sequence[int]) -> Verify:
        """Order tokens to be taken whatever the target would say, so that it tells how likely they are: nothing else is
        allowed."""
        *before, _ = tokens
        return Verify(self._context("target"), tuple(before), allowed=tuple(frozenset((token,)) for token in tokens))

    def commit(self, pending: Sequence[int], verdict: Verdict, foreseen: bool = False) -> int:
        """Append the accepted ones of the pending tokens, then the target's own, up to the request's end; returns how
        many were appended.

        `foreseen`: the draft had presumed this very outcome.
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

    def take_waited(self) -> float:
        """Return the seconds of rounds that ran without this session since the last call, and reset them."""
        waited, self.waited = self.waited, 0.0
        return waited

    def fail(self, error: Exception) -> None:
        """End the request with an error; what was emitted stays."""
        self.error = error
        self.finished = "error"

    def _context(self, role: Literal["draft", "target"], pending: Sequence[int] = ()) -> Context:
        base = self._sent[role]
        self._sent[role] = len(self.tokens)
        return Context(base, (*self.tokens[base:], *pending), self.tokens)

    def _unless_ended(self, follows: Follows | None) -> Follows | None:
        """Nothing follows on tokens that end the text. Both models may ask, which is worked out once."""
        if follows is None:
            return None
        after = follows
        said: dict[tuple[int, ...], Following] = {}

        def following(taken: tuple[int, ...]) -> Following:
            if taken not in said:
                ended = len(taken) >= self.room or not self._ending.isdisjoint(taken)
                said[taken] = None if ended else after(taken)
            return said[taken]

        return following

    def _append(self, token: int, origin: Origin) -> None:
        self.tokens.append(token)
        self.origins.append(origin)
        self.stats.emitted += 1
        watched = self._watch(token) if self._watch else False
        if token in self._ending or watched:
            self.finished = "stop"
        elif self.room <= 0:
            self.finished = "length"
