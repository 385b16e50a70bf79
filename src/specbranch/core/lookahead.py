"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): the target guesses n-grams, and verifies earlier guesses.

Owns the window, the pool, and the order of rounds; no draft model takes part. One forward of the target has both
branches. *Lookahead*: the window holds the last N − 1 iterations of Jacobi decoding. Its oldest row is a chain behind
the text's last token. Each newer row is below it, column by column: a token sees the text, the oldest row up to its own
column, and its own column's tokens of the rows between. So the published attention pattern is a tree, in which a
token's depth is its position. The target's tokens after the newest row are the next row, and each column is then an
n-gram. *Verification*: the pool's n-grams that start with the text's last token.

As published, the window moves by one column a round, however many tokens were accepted. It starts with tokens drawn
from the prompt, and its own tokens are never accepted. Three things differ. Candidates with a common beginning share
nodes, which saves rows; the longest match is the same. Near the request's limit the window narrows, so that no row lies
beyond it. If tokens are sampled, the window is filled with the noise of its positions, not greedily: that is what the
target would choose there. Invariant: the session receives only what the verdict says.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from specbranch.config import SpeculativeConfig
from specbranch.core.orders import Aside, Orders, Reports
from specbranch.core.policy import Policy
from specbranch.core.rounds import FORCED_AT_ONCE, MethodRounds, verdict_of
from specbranch.core.session import Session
from specbranch.core.slots import ROOT
from specbranch.core.trees import Node, Tree

Ngram = tuple[int, ...]


class NgramPool:
    """N-grams by their first token, at most as many as are verified at once; the latest ones stay."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rests: dict[int, dict[Ngram, None]] = {}  # by first token; the latest comes last

    def __len__(self) -> int:
        return sum(map(len, self._rests.values()))

    def add(self, ngrams: Iterable[Ngram]) -> None:
        """Add n-grams; if one first token has too many, the oldest is dropped."""
        for first, *rest in ngrams:
            held = self._rests.setdefault(first, {})
            held.pop(tuple(rest), None)
            held[tuple(rest)] = None
            if len(held) > self._most:
                del held[next(iter(held))]

    def tree(self, first: int, deepest: int) -> Tree:
        """Return what followed a token as a tree of bounded depth; the latest n-gram is its main path."""
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
    """The last rows of Jacobi iterations, oldest first. It makes no n-grams until it has N − 1 rows.

    The text's last token is before the oldest row, so every newer row has one token more.
    """

    def __init__(self, size: int, guesses: Sequence[int]) -> None:
        """Start with one row of W + N − 3 guesses; `size` is N, the length of the n-grams.

        Each round until the window is full uses up one guess.
        """
        self.rows = [tuple(guesses)]
        self._size = size

    def aside(self, deepest: int) -> Aside:
        """Return the rows as a tree below the text's last token; the target answers after the newest row.

        Columns beyond the depth `deepest` are dropped.
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
        """Add the next row and move by one column; returns the n-grams once the window is full.

        `current` is the text's last token.
        """
        oldest, *newer = self.rows
        if len(self.rows) < self._size - 1:
            self.rows = [row[1:] for row in self.rows] + [tuple(guessed[1:] if newer else guessed)]
            return []
        self.rows = [newer[0][1:], *newer[1:], tuple(guessed)]
        # if the oldest row was dropped, the text's last token remains
        return list(zip((current, *oldest), *newer, guessed, strict=False))


def lookahead(session: Session, config: SpeculativeConfig, policy: Policy) -> MethodRounds:
    """Verify n-grams that the target guessed in earlier rounds; it guesses on in the same forward."""
    pool, window = NgramPool(config.lookahead_candidates), Window(config.lookahead_ngram, _guesses(session, config))
    while not session.finished:
        current = session.tokens[-1]
        tree = _candidates(session, pool, current)
        reports = yield Orders(verify=session.verify_tree(tree, window.aside(session.room - 1)))
        pool.add(window.slide(current, verdict_of(reports).guessed))
        _absorb(session, tree, reports)


def _candidates(session: Session, pool: NgramPool, current: int) -> Tree:
    """Return what to verify behind the text's last token: what a grammar forces, else the pool's n-grams."""
    if forced := session.forced(FORCED_AT_ONCE):
        nodes = [Node(token, depth - 2, 0.0, 0.0, depth, sent=True) for depth, token in enumerate(forced, start=1)]
        return Tree(tuple(nodes))
    return session.permitted_tree(pool.tree(current, session.room - 1))


def _guesses(session: Session, config: SpeculativeConfig) -> list[int]:
    """Draw the first row from the prompt; the same request gets the same row."""
    rng = random.Random(f"{session.request.seed} {session.request.sample}")
    count = config.lookahead_window + config.lookahead_ngram - 3
    return rng.choices(session.tokens[: session.request.prompt_length], k=count)


def _absorb(session: Session, tree: Tree, reports: Reports) -> None:
    """Commit a verdict and count what it decided of the candidates."""
    verdict = verdict_of(reports)
    taken = session.commit([node.token for node in tree.nodes], verdict)
    session.stats.take(reports)
    session.stats.end_round()
    session.stats.judge_tree(tree, range(len(tree)), verdict.path, None, taken)
