"""The token budget of a round: how many prompt tokens it computes, and whose.

Owns the limits of a round, what prompt tokens cost beside decode rows, and whose turn it is. Does not own the orders of
decoding sessions (`core/loop.py`). Invariants: a round prefills at least one chunk, so every prompt gets ahead.
Prompts take turns. A budget depends on measured times and on numbers of tokens, never on which tokens these are.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from statistics import median

from specbranch.core.cost_curves import seconds_at
from specbranch.core.costs import MeasuredCosts
from specbranch.core.market import MOST_LANES, MOST_ROWS
from specbranch.core.members import Member
from specbranch.core.orders import Orders, Span, Verify
from specbranch.core.round_clock import RoundClock
from specbranch.core.runner import TimesForwards

# Prompt tokens may make the gap between two tokens of a decoding session this many times as long. The aim is a gap at
# p99 of at most twice the median.
LONGEST_ROUND = 1.7
LONGEST_FORWARD = 1.75  # the same for the target's forward by itself
FORGOTTEN_AFTER = 2  # rounds without prompt tokens
MOST_PROMPT_TOKENS = 8192  # of a round that also decodes
TIMES_BEFORE_USE = 3  # rounds of about one size; fewer are not trusted, as the first may include a setup
ROUNDS_KEPT = 9  # rounds of about one size; their median is the estimate
LATEST_ROUNDS = 3  # their median corrects the table: it follows a context that grows, and ignores one slow round
# In a round in which the target prefills nothing, the draft may prefill this many times its budget for sessions that
# already decode.
DRAFT_PREFILL_FACTOR = 4


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """What one round may hold.

    `prompt_tokens` is the prefill budget of a round that also decodes, until the costs of prompt tokens are measured.
    None: a round prefills whole prompts. At least one chunk, and one token for each decoding session, always fit.
    `prompt_tokens_alone` is the budget of a round in which nobody decodes, and the most of any other. None: whole
    prompts.
    `batched_tokens` (`max_num_batched_tokens`): the most decode rows and prompt tokens of a round together, instead of
    both budgets. Decode rows always run, and at least one chunk of a prompt.
    """

    rows: int = MOST_ROWS
    lanes: int = MOST_LANES
    prefill_chunk: int = 256
    prompt_tokens: int | None = None
    prompt_tokens_alone: int | None = None
    batched_tokens: int | None = None


@dataclass(slots=True)
class PrefillBudget:
    """How many tokens one model may still prefill in a round."""

    left: int
    prefill_chunk: int
    used: int = 0

    def take(self, uncomputed: int) -> int:
        """Take all uncomputed tokens, or the whole chunks of them that fit; returns how many tokens that is."""
        whole_chunks = max(self.left, 0) // self.prefill_chunk * self.prefill_chunk
        taken = uncomputed if uncomputed <= self.left else whole_chunks
        self.left -= taken
        self.used += taken
        return taken


class TimesBySize:
    """Medians of the latest seconds, by size; sizes between two powers of two share theirs."""

    def __init__(self) -> None:
        self._times: dict[int, deque[tuple[int, float]]] = {}

    def add(self, size: int, seconds: float) -> None:
        """Learn a time."""
        self._times.setdefault(size.bit_length(), deque(maxlen=ROUNDS_KEPT)).append((size, seconds))

    def points(self) -> list[tuple[int, float]]:
        """Return seconds by size, ascending, where enough times are known."""
        trusted = [times for _, times in sorted(self._times.items()) if len(times) >= TIMES_BEFORE_USE]
        return [(round(median(n for n, _ in times)), median(s for _, s in times)) for times in trusted]


class CorrectedTable:
    """What prompt tokens add to a round: the runner's table, and what rounds of each padded size took beyond it lately.

    The table knows the padding. It was timed without context, and without the host: rounds show both. What one prompt
    has shown is forgotten after it, because the next one has another context.
    """

    def __init__(self, table: TimesForwards) -> None:
        self._table = table
        self._beyond: dict[float, deque[float]] = {}  # by the table's seconds, which tell padded sizes apart

    def learn(self, rows: int, tokens: int, seconds: float) -> None:
        """Learn what prompt tokens have added to a round of so many decode rows."""
        usual, forward = self._table.forward_seconds(rows), self._table.forward_seconds(rows, tokens)
        if usual is not None and forward is not None:
            # two zeros: one slow round does not count
            lately = self._beyond.setdefault(forward, deque([0.0] * (LATEST_ROUNDS - 1), maxlen=LATEST_ROUNDS))
            lately.append(seconds - (forward - usual))

    def forget(self) -> None:
        """Forget what rounds have shown."""
        self._beyond.clear()

    def most_within(self, allowed: float, rows: int, waiting: Iterable[int]) -> int | None:
        """Return how many prompt tokens add at most `allowed` seconds; None: these rows were not timed.

        `waiting`: the uncomputed tokens of each prompt. A prompt that ends adds a decode row.
        """
        usual = self._table.forward_seconds(rows) if rows > 0 else None
        if usual is None:
            return None
        # A gap may be long for other reasons; so the forward by itself is bounded, too.
        longest = min(usual + allowed, LONGEST_FORWARD * usual)
        ends = list(accumulate(sorted(waiting)))  # tokens after which one more prompt can end

        def fits(tokens: int) -> bool:
            forward = self._table.forward_seconds(rows + bisect_right(ends, tokens), tokens)
            return forward is not None and forward + self._beyond_at(forward) <= longest

        return _largest(fits, MOST_PROMPT_TOKENS)

    def _beyond_at(self, forward: float) -> float:
        """Return what a round takes beyond the table: as the next smaller size that was seen, else the next larger."""
        smaller = [seen for seen in self._beyond if seen <= forward]
        nearest = max(smaller) if smaller else min(self._beyond, default=None)
        return 0.0 if nearest is None else max(median(self._beyond[nearest]), 0.0)


class PromptCosts:
    """The seconds that prompt tokens add to the gap between two tokens of a decoding session, learned from rounds.

    A gap is the time between the ends of two rounds of the target. So it includes drafting, and the host's work.
    Until enough gaps are timed, the learned seconds of a forward serve, or the runner's table (`TimesForwards`). Where
    the table has a forward, what prompt tokens add follows from it (`CorrectedTable`); else from medians by size.
    """

    def __init__(self, costs: MeasuredCosts | None = None, table: TimesForwards | None = None) -> None:
        """Know nothing yet; `costs`: learned seconds of forwards without prompt tokens."""
        self._costs, self._table = costs, table
        self._corrected = CorrectedTable(table) if table else None
        self._gaps = TimesBySize()  # without prompt tokens, by decode rows
        self._added = TimesBySize()  # what prompt tokens add, by their number
        self._without_prompts = 0  # rounds in a row
        self._ended: float | None = None  # when the last round of the target ended
        self.tokens_ahead = 0  # prompt tokens of a step that was launched ahead; the next gap includes them
        self.clock = RoundClock()

    def pause(self) -> None:
        """Note an idle pause: the time to the next round is no gap."""
        self._ended = None

    def observe(self, span: Span | None, decodes: bool, now: float, ahead: bool = False) -> None:
        """Learn from a round that has just ended; `span`: the target's work in it, None: it had none.

        `decodes`: some session decoded in it. `ahead`: its prompt tokens go with the next round's step.
        """
        if span is None:  # drafting counts as a part of the next gap
            return
        read = sum(prompt.read for prompt in span.prompts.values())
        tokens, self.tokens_ahead = self.tokens_ahead + (0 if ahead else read), read if ahead else 0
        before, self._ended = self._ended, now
        if decodes:
            factor = self._costs.factor if self._costs is not None else 1.0
            self.clock.end_round(None if tokens or before is None else (now - before) / factor)
        if before is None or not decodes:
            return
        self._without_prompts = 0 if tokens else self._without_prompts + 1
        if self._corrected and self._without_prompts == FORGOTTEN_AFTER:
            self._corrected.forget()
        if not tokens:
            self._gaps.add(span.tokens - read, now - before)
        elif (usual := self._usual(span.tokens - read)) is not None:
            self._learn(span.tokens - read, tokens, now - before - usual)

    def most_tokens(self, rows: int, waiting: Iterable[int] = ()) -> int | None:
        """Return how many prompt tokens fit beside so many decode rows; None: nothing is known.

        `waiting`: the uncomputed tokens of each prompt.
        """
        usual = self._usual(rows)
        if usual is None:
            return None
        allowed = (LONGEST_ROUND - 1.0) * usual
        by_table = self._corrected.most_within(allowed, rows, waiting) if self._corrected else None
        if by_table is not None:
            return by_table
        points = self._added.points()
        return min(_most_within(points, allowed), MOST_PROMPT_TOKENS) if points else None

    def _learn(self, rows: int, tokens: int, seconds: float) -> None:
        """Learn what prompt tokens have added to a gap."""
        self._added.add(tokens, max(seconds, 0.0))
        if self._corrected:
            self._corrected.learn(rows, tokens, seconds)

    def _usual(self, rows: int) -> float | None:
        """Return the seconds of a gap with so many decode rows and no prompt tokens; None: unknown."""
        points = self._gaps.points()
        if points and points[0][0].bit_length() <= rows.bit_length() <= points[-1][0].bit_length():
            return seconds_at(points, rows, slope=0.0)
        if rows > 0 and self._costs is not None and self._costs.covers(rows):
            return self._costs.target_seconds(rows)
        return self._table.forward_seconds(rows) if rows > 0 and self._table else None


class Prefills:
    """Decides in each round which prompts are prefilled, and by how much."""

    def __init__(self, costs: PromptCosts, limits: RoundLimits) -> None:
        self.costs, self.limits = costs, limits
        self._turns = count()

    def next_turn(self) -> int:
        """Return the next turn of prefill."""
        return next(self._turns)

    def add(self, batch: dict[int, Orders], members: Sequence[Member]) -> dict[int, Orders]:
        """Return the orders of a target round: those of `batch`, and prefill for the other members."""
        decoding = [member for member in members if member.session.number in batch]
        others = [member for member in members if member.session.number not in batch]
        draft = self._add(batch, others, len(batch), rows_of(batch.values()), len(members) == 1, joins=False)
        self._prefill_late_drafts(sorted(decoding, key=_turn), batch, draft)
        return batch

    def beside_plain(self, members: Sequence[Member], decoding: int) -> dict[int, Orders]:
        """Return prefill orders for members, in a round in which `decoding` others decode plainly.

        A prompt that ends joins the step that is launched with this round.
        """
        orders: dict[int, Orders] = {}
        if members:
            self._add(orders, members, decoding, decoding, alone=False, joins=True)
        return orders

    def _add(
        self,
        batch: dict[int, Orders],
        members: Sequence[Member],
        decoding: int,
        rows: int,
        alone: bool,
        joins: bool,
    ) -> PrefillBudget:
        """Add prefill orders for members; returns what is left of the draft's budget.

        `decoding`: sessions that decode, with so many decode rows. `alone`: there is one session. `joins`: a prompt
        that ends joins a step that is launched ahead.
        """
        tokens = self._prompt_tokens(decoding, rows, [member.uncomputed for member in members])
        target, draft = (PrefillBudget(tokens, self.limits.prefill_chunk) for _ in range(2))
        for member in sorted(members, key=_turn):
            if orders := self._prefill_orders(member, target, draft, alone, joins):
                batch[member.session.number] = orders
        if target.used == 0:
            draft.left *= DRAFT_PREFILL_FACTOR
        return draft

    def _prompt_tokens(self, decoding: int, rows: int, waiting: Sequence[int]) -> int:
        """Return the prefill budget of a round with so many decoding sessions and decode rows."""
        limits = self.limits
        if limits.batched_tokens is not None:
            return max(limits.batched_tokens - rows, limits.prefill_chunk)
        most = limits.prompt_tokens if decoding else limits.prompt_tokens_alone
        if most is None:
            return sys.maxsize
        if decoding and (measured := self.costs.most_tokens(rows, waiting)) is not None:
            most = min(measured, limits.prompt_tokens_alone or measured)
        return max(most, limits.prefill_chunk, decoding)

    def _prefill_orders(
        self, member: Member, target: PrefillBudget, draft: PrefillBudget, alone: bool, joins: bool
    ) -> Orders | None:
        """Return prefill orders for a session, or its own orders if the budget covers all that is uncomputed.

        Orders that verify compute the rest of the prompt themselves, so the first token comes out of the forward that
        ends the prompt. A session that is alone, or whose tokens depend on its draft, waits for the draft's prefill.
        """
        uncomputed, draft_uncomputed = member.uncomputed, member.draft_uncomputed
        taken, draft_taken = target.take(uncomputed), draft.take(draft_uncomputed)
        ends = member.orders is not None and taken == uncomputed and self._has_row(target)
        if member.orders and ends and not joins:
            if draft_taken == draft_uncomputed:
                return member.orders
            if member.orders.verify and not (alone or member.needs_draft):
                return self._without_draft(member, member.orders, draft_taken)
        if not taken and not draft_taken:
            return None
        member.prefill_turn = self.next_turn()
        verify = member.orders.verify if member.orders else None
        joins_next = joins and ends and verify is not None and _rows(verify) == 1
        return Orders(
            draft=member.draft_prefill_order(draft_taken) if draft_taken else None,
            prefill=member.prefill_order(taken, joins_next) if taken else None,
        )

    def _has_row(self, target: PrefillBudget) -> bool:
        """True if the decode row of a prompt's last token fits; only `batched_tokens` counts it."""
        if self.limits.batched_tokens is None:
            return True
        target.left -= 1
        return target.left >= 0

    def _prefill_late_drafts(self, decoding: Iterable[Member], batch: dict[int, Orders], draft: PrefillBudget) -> None:
        """Have the draft prefill for decoding sessions whose cache it has to catch up on; they draft nothing then."""
        if self.limits.prompt_tokens is None:
            return
        for member in decoding:
            if uncomputed := member.draft_uncomputed:
                number = member.session.number
                batch[number] = self._without_draft(member, batch[number], draft.take(uncomputed))

    def _without_draft(self, member: Member, orders: Orders, taken: int) -> Orders:
        """Return a session's orders with prefill of `taken` tokens by the draft in place of drafting."""
        member.draft_behind = True
        if not taken:
            return replace(orders, draft=None)
        member.prefill_turn = self.next_turn()
        return replace(orders, draft=member.draft_prefill_order(taken))


def rows_of(orders: Iterable[Orders]) -> int:
    """Return how many decode rows the verify orders of a round have."""
    return sum(_rows(order.verify) for order in orders if order.verify)


def _rows(verify: Verify) -> int:
    return 1 + len(verify.tokens) + (len(verify.aside.tokens) if verify.aside else 0)


def _most_within(points: list[tuple[int, float]], allowed: float) -> int:
    """Return how many tokens add at most `allowed` seconds; at most twice as many as were timed."""
    slope = 1.0 / points[0][0]  # of one point alone: seconds are proportional to tokens
    return _largest(lambda tokens: seconds_at(points, tokens, slope) <= allowed, 2 * points[-1][0])


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` that fits, 0 if none does; all below a fitting one fit."""
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least


def _turn(member: Member) -> int:
    return member.prefill_turn
