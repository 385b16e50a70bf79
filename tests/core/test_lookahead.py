"""Lookahead decoding: the window is the published pattern as a tree, Jacobi iterations come to the target's text,
the pool speeds it up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest

from specbranch.config import MOST_NODES, NGRAMS, SpeculativeConfig
from specbranch.core.lookahead import NgramPool, Window
from specbranch.core.orders import Aside
from specbranch.core.slots import ROOT, TAIL
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.lab.toys.toys import Logits, State, ToyLaw, ToyRunner
from toybench import Case, Ending, answer, decode, plainly

FAR = 1000


def config(window: int, ngram: int, candidates: int) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="lookahead", lookahead_window=window, lookahead_ngram=ngram, lookahead_candidates=candidates
    )


def filled(width: int, size: int) -> Window:
    """A window after its first rounds; a token tells its row (hundreds) and the position at which it was said."""
    window = Window(size, tuple(range(1, width + size - 2)))
    for row in range(1, size - 1):
        aside = window.aside(FAR)
        assert window.slide(0, [100 * row + aside.tokens[n] % 100 + 1 for n in aside.guessed]) == []
    return window


def line(aside: Aside, node: int) -> list[int]:
    return [] if node == ROOT else [*line(aside, aside.parents[node]), aside.tokens[node]]


def test_a_full_window_is_the_published_pattern() -> None:
    # Figure 3 of the paper, W = 5, N = 4: the newest row's last token sees its column, the oldest row up to it, and the
    # text.
    aside = filled(5, 4).aside(FAR)
    assert len(aside.tokens) == 3 * 5 - 1 and len(aside.guessed) == 5
    lines = [line(aside, node) for node in aside.guessed]
    assert [[token // 100 for token in one] for one in lines] == [[0] * column + [1, 2] for column in range(5)]
    assert [aside.depth(node) for node in aside.guessed] == [2, 3, 4, 5, 6]
    assert len({tuple(one[:column]) for column, one in enumerate(lines)}) == 5 and lines[-1][:4] == list(
        aside.tokens[:4]
    )


@pytest.mark.parametrize(("width", "size"), [(5, 4), (1, 3), (2, 3), (1, 6), (15, 5), (7, 16)])
def test_while_it_fills_each_token_stays_behind_the_one_it_was_said_after(width: int, size: int) -> None:
    window = Window(size, tuple(range(1, width + size - 2)))
    for rounds in range(2 * size):
        aside = window.aside(FAR)
        columns = len(aside.guessed)
        assert columns == (width + size - 3 if rounds == 0 else max(width, width + size - 2 - rounds))
        assert len(aside.tokens) < MOST_NODES
        for node, parent in enumerate(aside.parents):
            if parent != ROOT:  # tokens are the positions they were said at, so neighbours are one apart
                assert aside.tokens[node] == aside.tokens[parent] + 1
        grams = window.slide(rounds, [aside.tokens[n] + 1 for n in aside.guessed])
        assert len(grams) == (width if rounds >= size - 2 else 0)
        assert all(later - earlier == 1 for gram in grams for earlier, later in pairwise(gram[1:]))
        assert all(len(gram) == size for gram in grams)


def test_near_the_limit_the_window_narrows_and_goes_no_deeper() -> None:
    window = filled(6, 4)
    for deepest in (7, 5, 4, 2, 1, 0):
        aside = window.aside(deepest)
        assert len(aside.guessed) == max(min(deepest - 1, 6), 0)
        assert max((aside.depth(node) for node in range(len(aside.tokens))), default=0) <= deepest
        assert len(window.slide(9, [7] * len(aside.guessed))) == len(aside.guessed)


def test_the_pool_keeps_the_ngrams_met_last() -> None:
    pool = NgramPool(2)
    pool.add([(1, 2, 3), (1, 4, 5), (1, 2, 3), (1, 6, 7), (2, 2, 2)])
    assert len(pool) == 3 and len(pool.tree(8, 9)) == 0
    assert [(node.token, node.parent) for node in pool.tree(1, 9).nodes] == [(6, ROOT), (7, 0), (2, ROOT), (3, 2)]


def test_candidates_that_begin_alike_share_nodes_and_are_cut_at_the_limit() -> None:
    pool = NgramPool(5)
    pool.add([(1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 6, 6)])
    assert [(node.token, node.parent, node.depth) for node in pool.tree(1, 9).nodes] == [
        *((2, ROOT, 1), (6, 0, 2), (6, 1, 3), (3, 0, 2), (5, 3, 3), (4, 3, 3)),
    ]
    assert [node.token for node in pool.tree(1, 2).nodes] == [2, 6, 3] and len(pool.tree(1, 0)) == 0


@dataclass(frozen=True, slots=True)
class Knit(ToyLaw):
    """A law with a known continuation: the next token follows from the last two alone."""

    def step(self, state: State, token: int) -> State:
        return (state * self.vocabulary + token) % self.vocabulary**2

    def logits(self, state: State) -> Logits:
        wanted = (state // self.vocabulary + 3 * (state % self.vocabulary) + 1) % self.vocabulary
        return tuple(float(token == wanted) for token in range(self.vocabulary))


def after(tokens: Sequence[int], law: ToyLaw) -> int:
    row = law.logits_of(tokens)
    return row.index(max(row))


def rounds(law: ToyLaw, text: list[int], guesses: Sequence[int], size: int, count: int) -> list[list[tuple[int, ...]]]:
    """The n-grams of each round, a token of the text a round, as if nothing were ever taken; adds to the text."""
    window, found = Window(size, guesses), []
    for _ in range(count):
        aside = window.aside(FAR)
        found.append(window.slide(text[-1], [after([*text, *line(aside, node)], law) for node in aside.guessed]))
        text.append(after(text, law))
    return found


def test_a_target_that_forgets_comes_to_its_own_ngrams_whatever_the_first_guesses_were() -> None:
    law, text = Knit(11), [1, 5]
    found = rounds(law, text, [7, 2, 9, 4, 0, 3], 5, 12)
    assert [len(grams) for grams in found] == [0] * 3 + [4] * 9
    # the first column's first token was a guess, too, when what follows it was said; now it is the text's own
    said = [
        (gram[at - 2 : at], gram[at])
        for grams in found
        for column, gram in enumerate(grams)
        for at in range(2 + (not column), 5)
    ]
    assert all(token == after(before, law) for before, token in said) and len(set(said)) > 20


@pytest.mark.parametrize("right", [8, 6, 3])
def test_guesses_that_are_right_are_a_fixed_point_and_every_round_comes_one_position_further(right: int) -> None:
    """Of a law that depends on every token, so nothing else could bring about the target's own n-grams."""
    law, text = ToyLaw(vocabulary=30), [1, 5]
    truth = list(text)
    for _ in range(30):
        truth.append(after(truth, law))
    guesses = [*truth[2 : 2 + right], *(29 - token for token in truth[2 + right : 10])]
    for at, grams in enumerate(rounds(law, text, guesses, 5, 12)[3:], start=4):
        assert sum(gram == tuple(truth[at + n : at + n + 5]) for n, gram in enumerate(grams)) == right - 2
    assert text == truth[: len(text)]


def repetitive(case: Case, settings: SpeculativeConfig, law: ToyLaw) -> tuple[int, int, float]:
    session = decode(Serial(Verifier(ToyRunner(law))), case, settings)
    assert answer(session) == plainly(case, law)
    stats = session.stats
    return stats.accepted, stats.drafted, stats.emitted / stats.target_forwards


def test_on_a_repetitive_text_nearly_every_round_brings_a_whole_ngram() -> None:
    case = Case((1, 5), 0.0, 0, Ending("long", max_tokens=400))
    # 25 pairs of tokens at most before it repeats itself
    accepted, drafted, each = repetitive(case, config(8, 5, 8), Knit(5))
    assert accepted > 280 and drafted >= accepted and 4.0 < each <= 5.0


def test_longer_ngrams_wider_windows_and_more_candidates_bring_more() -> None:
    case, law = Case((1, 5, 2), 0.0, 0, Ending("long", max_tokens=300)), ToyLaw(vocabulary=3)
    small, *others = (
        repetitive(case, config(*sizes), law)[2] for sizes in ((2, 3, 2), (8, 3, 2), (2, 3, 8), (8, 5, 8))
    )
    assert small > 1.2 and others[-1] == max(others) and others[-1] > 1.2 * small


def test_what_may_be_set_fits_a_tail_at_every_round() -> None:
    assert MOST_NODES == TAIL
    for size in range(NGRAMS[0], NGRAMS[1] + 1):
        width = MOST_NODES // (size - 1) - 1
        settings = config(width, size, 1)
        window = Window(size, [0] * (width + size - 3))
        for _ in range(size):
            aside = window.aside(FAR)
            full = len(window.rows) == size - 1
            assert 1 + len(aside.tokens) + full * settings.lookahead_candidates * (size - 1) <= TAIL
            window.slide(0, [0] * len(aside.guessed))
