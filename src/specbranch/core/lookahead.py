"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): the target guesses its own n-grams, beside the verification of
earlier ones.

Owns the window, the pool, and the order of rounds; no draft model takes part. One forward of the target reads both
branches. *Lookahead*: the window holds the last N − 1 iterations of Jacobi decoding. Its oldest row follows the text's
last token as a chain, and the newer ones hang on it column by column: a token sees the text, the oldest row up to its
own column, and its own column's tokens of the rows between. So the published attention pattern is a tree, in which a
token's depth is its position. What the target says after the newest row is the next one, and each column then is an
n-gram. *Verification*: the pool's n-grams behind the text's last token.

As published the window moves by one place a round, however many tokens were taken, begins with tokens drawn from the
prompt, and what it holds is never taken itself. Three things differ. Candidates that begin alike share nodes, so that
they take fewer rows; the longest match is the same. Towards the request's limit the window narrows, so that nothing is
read beyond. And where tokens are sampled it is filled with the noise of its places, not greedily: that is what the
target would say there. Invariant: the session receives only what the verdict says.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from specbranch.config import SpeculativeConfig
from specbranch.core.orders import Aside, Orders, Reports
from specbranch.core.policy import Policy
from specbranch.core.rounds import MethodRounds, verdict_of
from specbranch.core.session import Session
from specbranch.core.slots import ROOT
from specbranch.core.trees import Node, Tree

Ngram = tuple[int, ...]


class NgramPool:
    """N-grams by their first token, as many for each as are verified at once; of those the ones met last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rests: dict[int, dict[Ngram, None]] = {}  # by first token; the one met last comes last

    def __len__(self) -> int:
        return sum(map(len, self._rests.values()))

    def add(self, ngrams: Iterable[Ngram]) -> None:
        """Take n-grams in; where there are too many of one first token, the one that was not met for longest goes."""
        for first, *rest in ngrams:
            held = self._rests.setdefault(first, {})
            held.pop(tuple(rest), None)
            held[tuple(rest)] = None
            if len(held) > self._most:
                del held[next(iter(held))]

    def tree(self, first: int, deepest: int) -> Tree:
        """Return what followed a token, as a tree no deeper than asked for; what was met last is its main path."""
        nodes: list[Node] = []
        known: dict[tuple[int, int], int] = {}
        for rest in reversed(self._rests.get(first, {})):
            here = ROOT
            for depth, token in enumerate(rest[:deepest], start=1):
                if (here, token) not in known:
                    known[here, token] = len(nodes)
                    nodes.append(Node(token, here, 0.0, 0.0, depth, sent=True))
                here = known[here, token]
        return Tree(tuple(nodes))


class Window:
    """The last rows of Jacobi iterations, oldest first; as long as there are fewer than N − 1, nothing is made of them.

    The text's last token stands before the oldest row, so that every newer row has one token more.
    """

    def __init__(self, size: int, guesses: Sequence[int]) -> None:
        """`size` is that of the n-grams, N. The first row are W + N − 3 guesses: each round until the window is full
        takes one of them."""
        self.rows = [tuple(guesses)]
        self._size = size

    def aside(self, deepest: int) -> Aside:
        """Lay the rows out as a tree below the text's last token, to be told what the target says after the newest.

        Columns that would be deeper than asked for are given up.
        """
        columns = max(deepest + 2 - len(self.rows), 0)
        self.rows = [self.rows[0][: max(columns - 1, 0)], *(row[:columns] for row in self.rows[1:])]
        oldest, *newer = self.rows
        tokens, parents = list(oldest), list(range(ROOT, len(oldest) - 1))
        last, above = range(len(oldest)), range(ROOT, len(oldest))
        for row in newer:
            last = range(len(tokens), len(tokens) + len(row))
            tokens += row
            parents += above[: len(row)]
            above = last
        return Aside(tuple(tokens), tuple(parents), tuple(last))

    def slide(self, current: int, guessed: Sequence[int]) -> list[Ngram]:
        """Take the next row in and move by one place; returns the n-grams, if the window is full. `current` is the
        text's last token."""
        oldest, *newer = self.rows
        if len(self.rows) < self._size - 1:
            self.rows = [row[1:] for row in self.rows] + [tuple(guessed[1:] if newer else guessed)]
            return []
        self.rows = [newer[0][1:], *newer[1:], tuple(guessed)]
        # an oldest row that is given up leaves the text's last token
        return list(zip((current, *oldest), *newer, guessed, strict=False))


def lookahead(session: Session, config: SpeculativeConfig, policy: Policy) -> MethodRounds:
    """Verify n-grams that the target guessed in earlier rounds, and have it guess on in the same forward; nothing is
    drafted by a model."""
    pool, window = NgramPool(config.lookahead_candidates), Window(config.lookahead_ngram, _guesses(session, config))
    while not session.finished:
        current = session.tokens[-1]
        tree = pool.tree(current, session.room - 1)
        reports = yield Orders(verify=session.verify_tree(tree, window.aside(session.room - 1)))
        pool.add(window.slide(current, verdict_of(reports).guessed))
        _absorb(session, tree, reports)


def _guesses(session: Session, config: SpeculativeConfig) -> list[int]:
    """Draw the first row from the prompt; the same for the same request."""
    rng = random.Random(f"{session.request.seed} {session.request.sample}")
    count = config.lookahead_window + config.lookahead_ngram - 3
    return rng.choices(session.tokens[: session.request.prompt_length], k=count)


def _absorb(session: Session, tree: Tree, reports: Reports) -> None:
    """Commit a verdict and count what it did to the candidates."""
    verdict = verdict_of(reports)
    taken = session.commit([node.token for node in tree.nodes], verdict)
    session.stats.take(reports)
    session.stats.end_round()
    session.stats.judge_tree(tree, range(len(tree)), verdict.path, None, taken)
