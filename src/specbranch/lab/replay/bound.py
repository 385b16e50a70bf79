"""An upper bound on the speedup of any choice of rows, computed from records.

Owns the arithmetic. It asks how many tokens of the records the draft or the text itself names in advance. It then
assumes that the target verifies only correct rows. Invariant: a method that sends such tokens, at most `MOST_SENT` at a
time, is never faster than the bound while the batch is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import fmean

from specbranch.config import SpeculativeConfig
from specbranch.core.costs import Costs
from specbranch.core.lookup import Ngrams
from specbranch.core.market import MOST_ROWS
from specbranch.core.planner import LOOKED, WIDE
from specbranch.core.runner import Ask, Feed
from specbranch.core.slots import ROOT
from specbranch.lab.replay.decode import ReplayedModel
from specbranch.lab.replay.reader import Reader
from specbranch.lab.replay.record import Record

MOST_SENT = 15  # tokens that a planner sends at a time
FINELY = 100  # parts of a token a round that are looked at

RowPoints = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class NamedTokens:
    """How many answer tokens are named before the target emits them; the first token of each answer is left out."""

    tokens: int
    looked: int  # of these, named by the text itself
    rounds: int  # that cannot be spared: in each all that is named is taken, and one token more
    context: float  # tokens before them, on average

    @property
    def most(self) -> float:
        """The most tokens that a round can gain on average, beyond the target's own."""
        return self.tokens / self.rounds - 1.0


def named_tokens(records: Sequence[Record], draft: ReplayedModel | None) -> NamedTokens:
    """Compare each record with the draft's proposals after the same tokens, and with what followed the same n-grams
    earlier."""
    tokens = looked = rounds = 0
    for record in records:
        by_text = _looked_up(record)
        by_draft = _proposed(record, draft) if draft else [False] * len(by_text)
        tokens += len(by_text)
        looked += sum(by_text)
        rounds += _rounds([one or other for one, other in zip(by_text, by_draft, strict=True)])
    context = fmean(len(record.text) - len(record.tokens) / 2 for record in records)
    return NamedTokens(tokens, looked, max(rounds, 1), context)


def bound(costs: Costs, at_once: int, named: NamedTokens) -> float:
    """Return the largest speedup over plain decoding at the same batch size.

    With only correct rows, a round has as many rows as it yields tokens. A draft step takes its own time, or slows down
    the target that runs in parallel; looked-up tokens are free.
    """
    context, looked = named.context, named.looked / max(named.tokens, 1)
    forwards = _below(
        [
            (float(rows), costs.target_seconds(rows, context))
            for rows in range(at_once, max(min(at_once * (MOST_SENT + 1), MOST_ROWS), at_once) + 1)
        ]
    )
    step = costs.draft_seconds(at_once, context)
    step = min(step, costs.slow_down) if costs.overlap else step
    rates = [1.0 / (forwards[0][1] + costs.host)]
    for part in range(1, int(named.most * FINELY) + 1):
        sent = part / FINELY
        steps = max(sent - looked * (1.0 + sent), 0.0)
        rates.append((1.0 + sent) / (_at(forwards, at_once * (1.0 + sent)) + steps * step + costs.host))
    return max(rates) / rates[0]


def _looked_up(record: Record) -> list[bool]:
    """Mark the answer tokens (except the first) that some earlier n-gram match would have named."""
    text, start, config = record.text, len(record.task.prompt) + 1, SpeculativeConfig()
    found, before = [False] * (len(text) - start), list(text[:start])
    ngrams = Ngrams(before, config.ngram_max, config.ngram_min)
    for at in range(start, len(text)):
        for position, (token, said) in enumerate(zip(ngrams.propose(LOOKED), text[at:], strict=False), start=at):
            if token != said:
                break
            found[position - start] = True
        before.append(text[at])
    return found


def _proposed(record: Record, draft: ReplayedModel) -> list[bool]:
    """Mark the answer tokens (except the first) that are among the draft's candidates."""
    text, start = record.text, len(record.task.prompt)
    found: list[bool] = []
    with closing(Reader(draft.runner, record)) as reader:
        runner = draft.worker(record, reader).runner
        runner.open(0, record.task.request)
        runner.extend(0, text[:start])
        for token, following in zip(text[start:], text[start + 1 :], strict=False):
            made = runner.propose([Feed(0, (token,), (ROOT,))], [Ask(0, 0, WIDE.candidates)])
            found.append(following in made[0].tokens)
            runner.keep(0, (0,), 1)
        runner.close(0)
    return found


def _rounds(named: Sequence[bool]) -> int:
    """Return the minimum number of rounds: each takes all named tokens from its start, and one more."""
    rounds, at = 0, 0
    while at < len(named):
        end = at
        while end < len(named) and end - at < MOST_SENT and named[end]:
            end += 1
        rounds, at = rounds + 1, end + 1
    return rounds


def _below(points: RowPoints) -> RowPoints:
    """Return the greatest convex curve below some points: no mixture of rounds takes less time on average."""
    hull: RowPoints = []
    for point in points:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(one: tuple[float, float], other: tuple[float, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


def _at(hull: RowPoints, rows: float) -> float:
    """Return the curve's seconds at a number of rows; beyond its end the last slope continues."""
    if len(hull) == 1:
        return hull[0][1]
    at = next((n for n in range(1, len(hull)) if rows <= hull[n][0]), len(hull) - 1)
    return hull[at - 1][1] + _slope(hull[at - 1], hull[at]) * (rows - hull[at - 1][0])
