"""What draft and lookup said, or would have said, at each token of the text: the evidence that every way of decoding is judged by.

Owns the trail of one request and the draft's habits over many. A token that a draft was asked for has its true entry; one that it was not
asked for gets an entry like those seen lately. Invariant: an entry is made when its token is committed, so nothing here depends on a token
that is not judged yet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from specbranch.core.lookup import Ngrams
from specbranch.core.orders import Branch, Draft

Entry = tuple[float, int]  # the draft's confidence, and the rank of the text's token among its choices (0: the first)
RANKS = 16  # ranks from here on are one: not among the choices of any branch point
BINS = 10
LONGEST_LOOKUP = 15
MEMORY = 96  # entries remembered to stand for unseen ones
GOLDEN = 0.6180339887498949  # steps of an even spread over 0 … 1: unseen entries are no matter of luck
FADING = 0.98
ASTRAY = 0.85  # how sure a draft is on a text that it has led astray, compared with the true one
FAR = 1 << 40  # beyond any text
REPEATED = 2  # tokens: with so many before it known, a token counts as one that lookup could have told
# A middling draft, until one is seen: mostly sure and right, and more so where the text repeats itself.
WHERE_REPEATED: tuple[Entry, ...] = ((0.97, 0), (0.99, 0), (0.95, 0), (0.9, 0), (0.98, 0), (0.6, 1), (0.99, 0), (0.97, 0))
FIRST_GUESS: tuple[Entry, ...] = ((0.97, 0), (0.9, 0), (0.3, 1), (0.99, 0), (0.6, 0), (0.8, 0), (0.4, 3), (0.95, 0), (0.5, 0), (0.3, RANKS))


class Habits:
    """How a draft behaves: its latest entries, how often it is right when so sure, how deep the right token lies when it is not."""

    def __init__(self) -> None:
        # Where lookup is right the draft mostly is, too; so those tokens are apart.
        self._entries = {False: deque(FIRST_GUESS, maxlen=MEMORY), True: deque(WHERE_REPEATED, maxlen=MEMORY)}
        self._right = [(0.5 + at) / BINS * 4 for at in range(BINS)]  # of `_asked`: at first as often as it is sure
        self._asked = [4.0] * BINS
        self._hits = [0.0, *(4.0 * 0.4 * 0.8**rank for rank in range(RANKS - 1))]  # by rank, of those that were not of a lower one
        self._tries = [4.0] * RANKS
        self._spread = 0.5
        self.seen = 0

    def learn(self, sure: float, rank: int | None, width: int, repeated: bool = False) -> Entry:
        """Take in what was seen of a token, and return its whole entry: `rank` None is not among the first `width` choices."""
        if width:
            self.seen += 1
            self._calibrate(sure, rank == 0)
            self._rank(rank, width)
        entry = (sure, self._deeper(sure, width) if rank is None else rank)
        self._entries[repeated].append(entry)
        return entry

    def imagine(self, repeated: bool = False) -> Entry:
        """Return an entry for a token the draft was not asked for."""
        entries = self._entries[repeated]
        return entries[int(self._even() * len(entries))]

    def _calibrate(self, sure: float, right: bool) -> None:
        at = min(int(sure * BINS), BINS - 1)
        self._right[at] = FADING * self._right[at] + right
        self._asked[at] = FADING * self._asked[at] + 1

    def _rank(self, rank: int | None, width: int) -> None:
        for at in range(1, width if rank is None else rank + 1):
            self._tries[at] = FADING * self._tries[at] + 1
            self._hits[at] = FADING * self._hits[at] + (at == rank)

    def _deeper(self, sure: float, width: int) -> int:
        """Imagine the rank of a token that is not among the first `width` choices; 0 of them: the choice itself is not known."""
        u = self._even()
        at = min(int(sure * BINS), BINS - 1)
        chances = [self._right[at] / self._asked[at], *(h / t for h, t in zip(self._hits[1:], self._tries[1:], strict=True))]
        for rank in range(width, RANKS):
            if u < chances[rank]:
                return rank
            u = (u - chances[rank]) / (1.0 - chances[rank])
        return RANKS

    def _even(self) -> float:
        self._spread = (self._spread + GOLDEN) % 1.0
        return self._spread


@dataclass(slots=True)
class Claim:
    """Branches that were drafted from a place of the text on, if the tokens before it come true."""

    start: int  # tokens committed when it was made
    presumed: tuple[int, ...]
    branches: tuple[Branch, ...]
    told: int = 0  # how many of its tokens have been entered


class Trail:
    """The entries of one request's answer, and what lookup would have proposed at each token."""

    def __init__(self, tokens: Sequence[int], habits: Habits, longest: int, shortest: int) -> None:
        self.habits = habits
        self.start = len(tokens)
        self.text = list(tokens)
        self.entries: list[Entry] = []
        self.found: list[tuple[int, tuple[int, ...]]] = []  # how much of the text before was known, and what followed it
        self._misses: list[int] = []  # entries that are not the draft's first choice
        self._unsure: dict[float, list[int]] = {}  # entries less sure than this
        self._claims: list[Claim] = []
        self.ngrams = Ngrams(self.text, longest, shortest)

    @classmethod
    def imagined(cls, habits: Habits, length: int) -> Trail:
        """A text that the draft takes as usual, and in which lookup finds nothing."""
        trail = cls((), habits, 1, 1)
        trail.found, trail.text = [(0, ())] * length, [0] * length
        for _ in range(length):
            trail._add(habits.imagine())
        return trail

    def claim(self, order: Draft, branches: tuple[Branch, ...]) -> None:
        """Note what was drafted, to be compared with the text once that is there."""
        if branches and order.plan.length:
            split = len(order.on.tail) - order.pending
            presumed = order.on.tail[split : split + branches[0].after]
            self._claims.append(Claim(len(order.on) - order.pending, presumed, branches))

    def follow(self, tokens: Sequence[int]) -> None:
        """Enter the tokens committed since the last call."""
        fresh = tokens[len(self.text) :]
        if not fresh:
            return
        for token in fresh:
            self.found.append(self.ngrams.find(LONGEST_LOOKUP))
            self.text.append(token)
        seen = self._resolve()
        for position in range(len(self.text) - len(fresh), len(self.text)):
            self._add(seen[position] if position in seen else self.habits.imagine(self._repeated(position)))

    @property
    def known(self) -> int:
        """How much of the end of the text was there before."""
        return self.ngrams.find(1)[0]

    def looked_up(self, at: int, length: int) -> tuple[int, int] | None:
        """Return how many tokens lookup would have proposed at an entry, at most `length`, and how many came; None: not known yet."""
        proposed = self.found[at][1][:length]
        text, start = self.text, self.start + at
        for count, token in enumerate(proposed):
            if start + count >= len(text):
                return None
            if text[start + count] != token:
                return len(proposed), count
        return len(proposed), len(proposed)

    def right_length(self, place: int, length: int) -> int | None:
        """How many tokens of a chain are accepted; None where the text is too short to tell."""
        miss = _next(self._misses, place)
        if miss < place + length:
            return miss - place
        return length if place + length <= len(self.entries) else None

    def sure_length(self, place: int, most: int, stop_below: float, keep: bool = False) -> int:
        """How many tokens a chain has that ends at the first unsure one, before it or after it.

        Once the draft is wrong it goes on from a text that never came; there it is taken to be less sure than it was on the true one.
        """
        end, miss = _next(self._less_sure(stop_below), place), _next(self._misses, place)
        if miss < end:
            end = _next(self._less_sure(stop_below / ASTRAY), miss + 1)
        return min(end - place + keep, most)

    def _less_sure(self, than: float) -> list[int]:
        if than not in self._unsure:
            self._unsure[than] = [at for at, (sure, _) in enumerate(self.entries) if sure < than]
        return self._unsure[than]

    def _add(self, entry: Entry) -> None:
        at = len(self.entries)
        self.entries.append(entry)
        if entry[1]:
            self._misses.append(at)
        for than, places in self._unsure.items():
            if entry[0] < than:
                places.append(at)

    def _repeated(self, position: int) -> bool:
        """Whether lookup could have told a token."""
        size, followed = self.found[position - self.start]
        return size >= REPEATED and followed[0] == self.text[position]

    def _resolve(self) -> dict[int, Entry]:
        seen: dict[int, Entry] = {}
        self._claims = [claim for claim in self._claims if self._enter(claim, seen)]
        return seen

    def _enter(self, claim: Claim, seen: dict[int, Entry]) -> bool:
        """Enter what has become known of a claim; returns whether more may."""
        text, place = self.text, claim.start + len(claim.presumed)
        if text[claim.start : place] != list(claim.presumed[: len(text) - claim.start]):
            return False
        line = _line(claim.branches, text[place:])
        while claim.told < len(line.confidence):
            at = place + claim.told
            if at >= len(text):
                return True
            heads = [b.tokens[0] for b in claim.branches] if claim.told == 0 else list(line.tokens[claim.told : claim.told + 1])
            rank = heads.index(text[at]) if text[at] in heads else None
            seen[at] = self.habits.learn(line.confidence[claim.told], rank, len(heads), self._repeated(at))
            claim.told += 1
            if rank is None:
                return False
        return False


def _next(places: list[int], start: int) -> int:
    """The first of some places from `start` on; far away if there is none."""
    at = bisect_left(places, start)
    return places[at] if at < len(places) else FAR


def _line(branches: tuple[Branch, ...], text: Sequence[int]) -> Branch:
    """The branch whose head the text has, the first one if none."""
    return next((b for b in branches if text and b.tokens[0] == text[0]), branches[0])
