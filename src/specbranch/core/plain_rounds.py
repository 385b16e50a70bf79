"""Rounds of plain decoding for a whole batch, with one round launched ahead.

Where all sessions decode plainly, their methods need not be asked round by round. The executor decodes one token of
each, and launches the next round before it has read this one. Owns which sessions take part in such a round. Does not
own what becomes of their tokens (`core/loop.py`). Invariant: a session's tokens are those of its own orders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from specbranch.core.members import Member
from specbranch.core.orders import Orders, Prefill, Span, TokenLogprobs
from specbranch.errors import SpecBranchError


@dataclass(frozen=True, slots=True)
class PlainOrders:
    """One round of plain decoding, for all sessions that take part."""

    texts: Mapping[int, Sequence[int]]  # the sessions' tokens; all but the last are computed
    going_on: Collection[int]  # sessions that decode at least one token more
    prefills: Mapping[int, Prefill]  # of other sessions, in the same forward
    meanwhile: Callable[[], None]  # work of the host while the device computes


@dataclass(frozen=True, slots=True)
class PlainReports:
    """What came back of it."""

    tokens: Mapping[int, int]  # sessions without a row in this round have none
    span: Span
    ahead: bool  # the round was launched with the one before it
    launched: frozenset[int]  # sessions that have a row in the round that is launched now
    reached: Mapping[int, int]  # how many tokens the target holds of prompts
    failed: Mapping[int, SpecBranchError]
    logprobs: Mapping[int, TokenLogprobs]  # of sessions that want them


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
    prefilling: list[Member]
    goes_on: bool = True  # False: read what is launched, and launch nothing behind it


class PlainRounds:
    """Finds out if the next round is one of plain decoding."""

    def __init__(self, executor: object) -> None:
        able = isinstance(executor, DecodesPlainly) and executor.decodes_plainly
        self.executor = executor if isinstance(executor, DecodesPlainly) and able else None
        self.launched: frozenset[int] = frozenset()  # sessions whose next token is being computed
        self.has_failed = False  # a warning said so

    def batch(self, live: Iterable[Member], chunked: bool) -> PlainBatch | None:
        """Return the sessions of the next round; None: it is none of plain decoding.

        `chunked`: prompts are prefilled in chunks. If a session asks for something else, a round that is launched
        already is read first, so that it is not in vain.
        """
        if self.executor is None:
            return None
        decoding, prefilling, others = list[Member](), list[Member](), False
        for member in live:
            if member.paused:
                continue
            if (member.decodes and member.prefill_done and member.plain_rounds > 1) or self._is_plain(member):
                decoding.append(member)
            elif chunked and member.uncomputed and not member.draft_uncomputed:
                prefilling.append(member)
            else:
                others = True
        if others:
            decoding = [member for member in decoding if member.session.number in self.launched]
            prefilling = []
        return PlainBatch(decoding, prefilling, not others) if decoding else None

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
    return {one.session.number for one in batch.decoding if one.session.room > 1 and _repeats(one)}


def _repeats(member: Member) -> bool:
    return member.plain_rounds > 1 or (isinstance(member.wants, Orders) and _goes_on(member.wants))


def _goes_on(orders: Orders) -> bool:
    return orders.verify is not None and orders.verify.goes_on
