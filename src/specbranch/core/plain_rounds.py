"""Rounds of plain decoding for a whole batch, with one round launched ahead.

Where most sessions decode plainly, their methods need not be asked round by round. The executor decodes one token of
each, and launches the next round before it has read this one. The few sessions that want anything else share these
rounds: the rows of a verify order go with the step that is launched, the next round reads them, and meanwhile the host
asks their methods. So they verify in every second round, and the others do not wait for the host.

Owns which sessions take part in such a round, and what is sent to an executor and comes back. Does not own what becomes
of that (`core/plain_loop.py`). Invariant: a session's tokens are those of its own orders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from specbranch.core.grammar import Guide
from specbranch.core.members import Member
from specbranch.core.orders import Branch, DraftOrder, Orders, Prefill, Reports, Span, TokenLogprobs, Verify
from specbranch.errors import SpecBranchError

# Sessions that decode plainly in such a round, at least, if others share it; and there are no fewer of them than of the
# others. In a smaller batch all sessions are ordered one by one: that costs the host little, and the others verify in
# every round.
LEAST_PLAIN = 4


@dataclass(frozen=True, slots=True)
class PlainOrders:
    """One round of plain decoding, for all sessions that take part."""

    texts: Mapping[int, Sequence[int]]  # the sessions' tokens; all but the last are computed
    going_on: Collection[int]  # sessions that decode at least one token more
    others: Mapping[int, Orders]  # of other sessions: to verify, or else to prefill or to draft
    heads: Mapping[int, Branch]  # of verify orders: see `Member.head`
    masks: Mapping[int, Guide]  # what may follow the texts of sessions with a grammar
    meanwhile: Callable[[], None]  # work of the host while the device computes

    @property
    def verifies(self) -> dict[int, Verify]:
        """The verify orders; their rows are in the step that this round launches."""
        return {session: order.verify for session, order in self.others.items() if order.verify}

    @property
    def prefills(self) -> dict[int, Prefill]:
        """The target's prefill orders; their chunks are in the step that this round launches."""
        return {session: order.prefill for session, order in self.others.items() if order.prefill}

    @property
    def drafts(self) -> dict[int, DraftOrder]:
        """The draft orders, of this round."""
        return {session: order.draft for session, order in self.others.items() if order.draft}

    @property
    def unverified(self) -> dict[int, Orders]:
        """The other orders that this round answers."""
        return {session: order for session, order in self.others.items() if not order.verify}


@dataclass(frozen=True, slots=True)
class PlainReports:
    """What came back of it."""

    tokens: Mapping[int, int]  # sessions without a row in this round have none
    span: Span
    ahead: bool  # the round was launched with the one before it
    launched: frozenset[int]  # sessions that have a row in the round that is launched now
    failed: Mapping[int, SpecBranchError]  # sessions that found no memory, whatever they ordered
    logprobs: Mapping[int, TokenLogprobs]  # of sessions that want them
    others: Mapping[int, Reports]  # of prefill and draft orders
    verified: Mapping[int, Reports]  # of verify orders of the round before, whose rows this round has read
    verifying: frozenset[int]  # sessions whose verify order the next round answers, if nothing else comes before it


@runtime_checkable
class DecodesPlainly(Protocol):
    """An executor that may make rounds of plain decoding."""

    @property
    def decodes_plainly(self) -> bool:
        """True if its target can do that."""
        ...

    def decodes(self, session: int, length: int) -> bool:
        """True if the target decodes this session so, behind `length` tokens; then also behind more."""
        ...

    def decode(self, orders: PlainOrders) -> PlainReports | None:
        """Decode one token of each session; None: they have to order it."""
        ...


@dataclass(frozen=True, slots=True)
class PlainBatch:
    """The sessions of a round of plain decoding."""

    decoding: list[Member]
    prefilling: list[Member]  # one of both models has to prefill for what they want
    others: list[Member]  # they want something else
    goes_on: bool = True  # False: read what is launched, and launch nothing behind it


class PlainRounds:
    """Finds out if the next round is one of plain decoding."""

    def __init__(self, executor: object) -> None:
        able = isinstance(executor, DecodesPlainly) and executor.decodes_plainly
        self.executor = executor if isinstance(executor, DecodesPlainly) and able else None
        self.launched: frozenset[int] = frozenset()  # sessions whose next token is being computed
        self.verifying: frozenset[int] = frozenset()  # sessions whose verify order is being computed with these
        self.has_failed = False  # a warning said so

    def forget(self) -> None:
        """Forget what is launched: its orders come again."""
        self.launched = self.verifying = frozenset()

    def batch(self, live: Iterable[Member], chunked: bool) -> PlainBatch | None:
        """Return the sessions of the next round; None: it is none of plain decoding.

        `chunked`: prompts are prefilled in chunks. If too many sessions ask for something else, a round that is
        launched already is read first, so that it is not in vain.
        """
        if self.executor is None:
            return None
        decoding, prefilling, others, whole = list[Member](), list[Member](), list[Member](), False
        for member in live:
            if member.paused:
                continue
            if member.session.number in self.verifying:
                others.append(member)
            elif (member.decodes and member.prefill_done and member.plain_rounds > 1) or self._is_plain(member):
                decoding.append(member)
            elif not chunked:
                whole = whole or member.uncomputed > 0  # its own orders prefill the whole prompt
                others.append(member)
            else:
                (prefilling if member.uncomputed or member.draft_uncomputed else others).append(member)
        asking = len(others) + sum([member.draft_uncomputed > 0 for member in prefilling])
        # rows of the others go with a step that is launched ahead: without one they would wait, round after round
        waits = bool(others) and not any(_lasts(member) for member in decoding)
        if whole or waits or (asking and len(decoding) < max(LEAST_PLAIN, asking)):
            launched = [member for member in decoding if member.session.number in self.launched]
            return PlainBatch(launched, [], [], goes_on=False) if launched else None
        return PlainBatch(decoding, prefilling, others) if decoding else None

    def _is_plain(self, member: Member) -> bool:
        """True if a session asks for its next token alone, and the executor can decode it."""
        orders, session = member.orders, member.session
        if orders is None or orders.verify is None or orders.draft is not None or not orders.verify.is_plain:
            return False
        if member.uncomputed or member.draft_behind:
            return False
        if not member.decodes and self.executor is not None:
            member.decodes = self.executor.decodes(session.number, len(session.tokens))
        return member.decodes


def going_on(batch: PlainBatch) -> set[int]:
    """Return the sessions that decode at least one token more, unless this one ends them."""
    if not batch.goes_on:
        return set()
    return {one.session.number for one in batch.decoding if _lasts(one)}


def _lasts(member: Member) -> bool:
    return (member.plain_rounds > 1 or _goes_on(member.orders)) and member.session.room > 1


def _goes_on(orders: Orders | None) -> bool:
    return orders is not None and orders.verify is not None and orders.verify.goes_on
