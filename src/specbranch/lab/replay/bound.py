"""What no choice of rows could exceed: how much of the records is named before the target says it, and what forwards of
so many rows would give if only what is right were sent.

Owns the arithmetic. Invariant: a method that sends what this draft or the text itself names, `MOST_SENT` at a time, is
never faster than the bound while the batch is full.
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
    """How much of some answers is named before the target says it, the first token of each left out."""

    tokens: int
    looked: int  # of these, named by the text itself
    rounds: int  # that cannot be spared: in each all that is named is taken, and one token more
    context: float  # tokens before them, on average

    @property
    def most(self) -> float:
        """Tokens that a round can take on average, beyond the one that the target says by itself."""
        return self.tokens / self.rounds - 1.0


def named_tokens(records: Sequence[Record], draft: ReplayedModel | None) -> NamedTokens:
    """Look along records at what the draft says after their very tokens, and at what followed the same words before."""
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
    """How much faster than plain decoding of as many at once any choice of rows could be.

    If all rows but right ones are left out, a round has as many rows as it gives tokens. A step of the draft takes its
    time, or holds up the target that works beside it; what the text names takes none.
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
    """Which tokens of an answer, but the first, a line that is looked up anywhere before them has in their place."""
    text, start, config = record.text, len(record.task.prompt) + 1, SpeculativeConfig()
    found, before = [False] * (len(text) - start), list(text[:start])
    ngrams = Ngrams(before, config.ngram_max, config.ngram_min)
    for at in range(start, len(text)):
        for place, (token, said) in enumerate(zip(ngrams.propose(LOOKED), text[at:], strict=False), start=at):
            if token != said:
                break
            found[place - start] = True
        before.append(text[at])
    return found


def _proposed(record: Record, draft: ReplayedModel) -> list[bool]:
    """Which tokens of an answer, but the first, are among the draft's candidates after all that comes before them."""
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
    """How many rounds a text needs at least: whatever is named from where one begins is taken, and one token more."""
    rounds, at = 0, 0
    while at < len(named):
        end = at
        while end < len(named) and end - at < MOST_SENT and named[end]:
            end += 1
        rounds, at = rounds + 1, end + 1
    return rounds


def _below(points: RowPoints) -> RowPoints:
    """The greatest convex curve below some points: no mixture of rounds takes less on average."""
    hull: RowPoints = []
    for point in points:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(one: tuple[float, float], other: tuple[float, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


def _at(hull: RowPoints, rows: float) -> float:
    """The curve's seconds at a number of rows; beyond its end it goes on along its last slope."""
    if len(hull) == 1:
        return hull[0][1]
    at = next((n for n in range(1, len(hull)) if rows <= hull[n][0]), len(hull) - 1)
    return hull[at - 1][1] + _slope(hull[at - 1], hull[at]) * (rows - hull[at - 1][0])
