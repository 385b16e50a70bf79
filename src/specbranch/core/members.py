"""The sessions of a loop: what each method asks for next, and how far both models have prefilled its prompt.

Owns the state of a session between two rounds. Does not own which orders run (`core/loop.py`,
`core/prefill_budget.py`). Invariant: a model has computed at least the tokens that are noted here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specbranch.core.costs import MOST_UNCOMPUTED
from specbranch.core.forest import ForestReport
from specbranch.core.market import Offer
from specbranch.core.methods import MethodRounds
from specbranch.core.orders import Branch, Context, Deferred, Draft, Orders, Prefill, Reports, TokenLogprobs
from specbranch.core.session import Session


@dataclass(slots=True, eq=False)
class Member:
    """A session in the loop."""

    session: Session
    method: MethodRounds
    prefill_turn: int  # prefill goes round-robin: the lowest turn is next
    wants: Orders | Offer
    plain_rounds: int = 0  # that the loop may make before it asks the method again
    deferred: Deferred | None = None  # the work that its method puts off until the device computes
    committed: bool = False  # plain rounds have committed tokens since `wants` was made
    decodes: bool = False  # the executor can decode it in a plain batch
    prefilled: int = 0  # tokens in the target's KV cache, until `prefill_done`
    prefill_done: bool = False  # the target has verified once: each verify order computes all tokens before it
    draft_prefilled: int = 0  # tokens in the draft's KV cache
    drafted: Reports | None = None  # the draft's answer to `wants`, whose verify order has not been answered yet
    draft_behind: bool = False  # the method asked for a draft, and the draft has to prefill first
    paused: bool = False  # its consumer does not take tokens at present

    def take(self, wants: Orders | Offer) -> None:
        """Note what its method asks for."""
        self.wants, self.committed, self.drafted = wants, False, None
        orders = self.orders
        self.plain_rounds, self.deferred = (0, None) if orders is None else (orders.plain_rounds, orders.deferred)

    def commit(self, token: int, logprobs: TokenLogprobs | None, seconds: float) -> None:
        """Commit a token of a plain round, of which its method does not hear."""
        self.session.commit_plain(token, logprobs, seconds)
        self.plain_rounds -= 1
        self.prefill_done = self.committed = True

    def commit_forest(self, report: ForestReport, verifying: float, now: float) -> None:
        """Commit a round of the forest, of which its method hears later."""
        self.session.commit_forest(report, verifying, now)
        self.plain_rounds -= 1
        self.prefill_done = self.committed = True

    def renew(self) -> None:
        """Bring its orders up to date: plain rounds have committed tokens since they were made."""
        if self.committed and isinstance(self.wants, Orders):
            verify = self.session.verify_plainly(to_the_end=True)
            self.wants, self.committed = replace(self.wants, verify=verify, plain_rounds=self.plain_rounds), False

    @property
    def orders(self) -> Orders | None:
        """What its method asks for; None while it waits for the answer to an offer."""
        return self.wants if isinstance(self.wants, Orders) else None

    @property
    def next_orders(self) -> Orders | None:
        """The half of its orders that runs next where both do not run at once: its draft, then its verify."""
        orders = self.orders
        if orders is None or orders.draft is None or orders.verify is None:
            return orders
        return Orders(draft=orders.draft) if self.drafted is None else replace(orders, draft=None)

    @property
    def head(self) -> Branch | None:
        """The first drafted branch that continues the whole chain to be verified; the target judges its head."""
        draft = self.orders.draft if self.orders else None
        if self.drafted is None or not isinstance(draft, Draft):
            return None
        return next((one for one in self.drafted.branches if one.tokens and one.after == draft.pending), None)

    @property
    def uncomputed(self) -> int:
        """How many tokens the target has to prefill; the last token goes with the first decode step."""
        return 0 if self.prefill_done else max(len(self.session.tokens) - 1 - self.prefilled, 0)

    @property
    def draft_uncomputed(self) -> int:
        """How many tokens the draft has to prefill for what is asked of it.

        Up to MOST_UNCOMPUTED tokens count as none: a draft step computes them on the way.
        """
        asked = self.draft_behind or (isinstance(self.wants, Orders) and self.wants.draft is not None)
        uncomputed = len(self.session.tokens) - 1 - self.draft_prefilled
        return uncomputed if asked and uncomputed > MOST_UNCOMPUTED else 0

    @property
    def needs_draft(self) -> bool:
        """True if the loop may not skip what the method wants drafted.

        Under the ratio rule the sampled tokens depend on the draft's. A draft of length 0 is prefill alone: it proposes
        nothing, so the loop may skip it.
        """
        draft = self.orders.draft if self.orders else None
        return self.session.request.by_ratio and not (isinstance(draft, Draft) and draft.plan.length == 0)

    def prefill_order(self, most: int, joins: bool = False) -> Prefill:
        """Order the target to prefill about `most` tokens more; `joins`: the next round decodes.

        Only the first order has the whole prompt, for the prefix cache: a later one costs the same behind any context.
        """
        tokens, start = self.session.tokens, self.prefilled
        end = min(start + most, len(tokens) - 1) if start else len(tokens) - 1
        return Prefill(Context(start, tuple(tokens[start:end]), tokens), most, tokens[-1] if joins else None)

    def draft_prefill_order(self, most: int) -> Prefill:
        """Order the draft to prefill about `most` tokens more: whole chunks of its own, so it gets the whole prompt."""
        tokens, start = self.session.tokens, self.draft_prefilled
        return Prefill(Context(start, tuple(tokens[start : len(tokens) - 1]), tokens), most)

    def restart_prefill(self) -> None:
        """Note that neither model holds any of its tokens."""
        self.prefilled, self.prefill_done, self.draft_prefilled, self.draft_behind = 0, False, 0, False

    def note_prefill(self, orders: Orders, reports: Reports) -> None:
        """Note how far both models have prefilled; a draft that reports no length counts as caught up."""
        if orders.verify is not None:
            self.prefill_done = True
        elif reports.reached is not None:
            self.prefilled = reports.reached
        if orders.draft is not None:
            reached = reports.draft_reached
            self.draft_prefilled = len(self.session.tokens) if reached is None else reached
            self.draft_behind = self.draft_behind and self.draft_uncomputed > 0
