"""A prediction: the text that a caller expects, as OpenAI's predicted outputs have it. Lookup proposes its tokens.

Owns where an answer stands in its prediction, and the count of proposed tokens. Does not own the search of the text
itself (`lookup.py`). Invariant: a prediction is no part of the sequence; it only proposes tokens, which the target
verifies as any others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from specbranch.core.lookup import LONGEST_MATCH, Ngrams
from specbranch.core.slots import ROOT
from specbranch.core.trees import Tree

OPENING_MATCH = 4  # tokens for which the beginning of the answer counts, as a match with the prediction's beginning
OPENING = 8  # tokens of an answer behind which the prediction's beginning is no guess any more
TRUSTED = 4  # tokens of a match with the prediction that win over any match in the text


class Prediction:
    """The expected tokens of one answer, and what lookup proposed of them in this round."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tuple(tokens)
        self.proposed: tuple[int, ...] = ()  # for the next verify; empty: lookup proposed nothing of it

    def sent_in_chain(self, chain: Sequence[int]) -> int:
        """Return how many tokens of a verified chain came from the prediction."""
        sent, proposed = 0, self._taken()
        for token, expected in zip(chain, proposed, strict=False):
            if token != expected:
                break
            sent += 1
        return sent

    def sent_in_tree(self, tree: Tree, verified: Sequence[int]) -> list[int]:
        """Return the verified nodes of a tree that came from the prediction: a path from the root."""
        path, inside, here = list[int](), set(verified), ROOT
        for token in self._taken():
            found = tree.child(here, token)
            if found is None or found not in inside:
                break
            path.append(found)
            here = found
        return path

    def _taken(self) -> tuple[int, ...]:
        """Return what was proposed, once: a verify that lookup had no part in counts nothing."""
        taken, self.proposed = self.proposed, ()
        return taken


class Standing(NamedTuple):
    """Where an answer stands in its prediction."""

    at: int = 0  # the position of the token that is expected next
    words: int = OPENING_MATCH  # tokens before it that equal the answer's end; 0: the answer has left the prediction
    left_at: int = 0  # where the answer last followed the prediction for two tokens or more


class PredictedNgrams(Ngrams):
    """Lookup in a prediction and in the text: the prediction wins unless the text has a clearly longer match.

    An answer starts at the prediction's beginning and moves on with each token that is as predicted. After another
    token it goes on behind the next occurrence of its last n-gram in the prediction.
    """

    def __init__(
        self, prediction: Prediction, tokens: Sequence[int], prompt_length: int, longest: int, shortest: int = 1
    ) -> None:
        super().__init__(tokens, longest, shortest)
        self._prediction, self._read = prediction, prompt_length
        self._first, self._longest = prompt_length, longest
        self._standing = Standing()
        self._ends = _ngram_ends(prediction.tokens, self._sizes)

    def find(self, length: int, behind: tuple[int, ...] = ()) -> tuple[int, tuple[int, ...]]:
        """Find what comes next in the prediction, or in the text as `Ngrams.find` does."""
        words, tokens = super().find(length, behind)
        standing = self._now(behind)
        guess = self._prediction.tokens[standing.at : standing.at + max(length, 0)]
        predicted = bool(guess) and standing.words >= max(min(words, TRUSTED), 1)
        if not behind:
            self._prediction.proposed = guess if predicted else ()
        return (standing.words, guess) if predicted else (words, tokens)

    def _now(self, behind: tuple[int, ...]) -> Standing:
        """Return where the answer stands behind its tokens and `behind`, which are not committed yet."""
        for end in range(self._read + 1, len(self._tokens) + 1):
            answered = end - self._first
            recent = tuple(self._tokens[end - min(self._longest, answered) : end])
            self._standing = self._after(self._standing, recent, answered)
        self._read = max(self._read, len(self._tokens))
        standing, answered = self._standing, len(self._tokens) - self._first
        last = tuple(self._tokens[max(len(self._tokens) - self._longest, self._first) :])
        for token in behind:
            answered += 1
            last = (*last, token)[-self._longest :]
            standing = self._after(standing, last, answered)
        return standing

    def _after(self, standing: Standing, recent: tuple[int, ...], answered: int) -> Standing:
        """Return where an answer of `answered` tokens stands; `recent`: its last ones, the newest included."""
        expected, at = self._prediction.tokens, standing.at
        if standing.words and at < len(expected) and expected[at] == recent[-1]:
            return Standing(at + 1, min(standing.words + 1, LONGEST_MATCH), at + 1)
        for size in self._sizes:
            ends = self._ends.get(recent[-size:]) if size <= len(recent) else None
            if ends:
                later = bisect_right(ends, standing.left_at)
                found = ends[later] if later < len(ends) else ends[-1]
                return Standing(found, size, found if size > 1 else standing.left_at)
        untouched = at == 0 and answered < OPENING
        return Standing(at, 1 if untouched else 0, standing.left_at)


def ngrams_of(
    tokens: Sequence[int], prompt_length: int, prediction: Prediction | None, longest: int, shortest: int
) -> Ngrams:
    """Return the lookup of a request: in its text, and in its prediction if it has one."""
    if prediction is None:
        return Ngrams(tokens, longest, shortest)
    return PredictedNgrams(prediction, tokens, prompt_length, longest, shortest)


def _ngram_ends(tokens: Sequence[int], sizes: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    """Map each n-gram to the positions behind its occurrences, in their order."""
    found: dict[tuple[int, ...], list[int]] = {}
    for end in range(1, len(tokens) + 1):
        for size in sizes:
            if size <= end:
                found.setdefault(tuple(tokens[end - size : end]), []).append(end)
    return found
