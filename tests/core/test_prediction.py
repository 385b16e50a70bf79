"""A prediction proposes its own beginning, moves on with the answer, and is found again where the answer left it."""

from __future__ import annotations

import random

from specbranch.core.prediction import OPENING, PredictedNgrams, Prediction, ngrams_of
from specbranch.core.slots import ROOT
from specbranch.core.trees import Node, Tree

PROMPT = [90, 91, 92]


def lookup(expected: list[int], tokens: list[int], longest: int = 3, shortest: int = 1) -> PredictedNgrams:
    return PredictedNgrams(Prediction(expected), tokens, len(PROMPT), longest, shortest)


def test_the_first_guess_is_the_beginning_of_the_prediction() -> None:
    assert lookup([1, 2, 3, 4], [*PROMPT]).find(3) == (4, (1, 2, 3))


def test_it_moves_on_with_each_predicted_token_and_ends_with_the_prediction() -> None:
    tokens = [*PROMPT, 1, 2]
    ngrams = lookup([1, 2, 3, 4], tokens)
    assert ngrams.propose(3) == (3, 4)
    tokens += [3, 4]
    assert ngrams.propose(3) == ()


def test_a_repeated_phrase_is_followed_where_the_answer_stands_and_not_at_its_latest_occurrence() -> None:
    expected = [7, 8, 1, 7, 8, 2, 7, 8, 3]
    tokens = [*PROMPT, 7, 8]
    ngrams = lookup(expected, tokens)
    for right in (1, 2, 3):
        assert ngrams.propose(1) == (right,)
        tokens += [right, 7, 8]


def test_behind_another_token_it_goes_on_at_the_next_occurrence_of_what_follows() -> None:
    expected = [1, 2, 3, 4, 5, 6, 3, 4, 9]
    tokens = [*PROMPT, 1, 2, 50]
    ngrams = lookup(expected, tokens)
    assert ngrams.propose(2) == ()
    tokens += [3, 4]
    assert ngrams.propose(2) == (5, 6)  # the occurrence behind the place where it left, not the latest


def test_words_before_a_prediction_do_not_lose_it() -> None:
    tokens = [*PROMPT, 60]
    ngrams = lookup([1, 2, 3], tokens)
    assert ngrams.propose(3) == (1, 2, 3)
    tokens += range(61, 61 + OPENING)
    assert ngrams.propose(3) == ()


def test_a_longer_match_in_the_text_wins_over_a_single_word_of_the_prediction() -> None:
    tokens = [1, 2, 3, 4, 5]
    ngrams = PredictedNgrams(Prediction([40, 3, 60]), tokens, 5, 3)
    tokens += [2, 3]
    assert ngrams.propose(1) == (4,)
    tokens += [50, 3]
    assert ngrams.propose(1) == (60,)


def test_tokens_that_are_to_be_appended_give_what_their_commit_gives() -> None:
    rng = random.Random(1)
    proposed = 0
    for _ in range(200):
        expected = [rng.randrange(4) for _ in range(rng.randint(1, 20))]
        tokens = [rng.randrange(4) for _ in range(3)]
        ngrams = lookup(expected, tokens, rng.randint(2, 4), rng.randint(1, 2))
        for _ in range(8):
            behind = tuple(rng.randrange(4) for _ in range(rng.randint(1, 3)))
            ahead = ngrams.find(4, behind)
            tokens += behind
            assert ngrams.find(4) == ahead
            proposed += bool(ahead[1])
    assert proposed > 500


def test_tokens_ahead_do_not_change_what_was_proposed_for_this_verify() -> None:
    expected = Prediction([1, 2, 3])
    ngrams = PredictedNgrams(expected, [*PROMPT], len(PROMPT), 3)
    ngrams.find(3)
    ngrams.find(3, (1, 2))
    assert expected.proposed == (1, 2, 3)


def test_verified_tokens_of_a_prediction_are_counted_along_its_path() -> None:
    expected = Prediction([1, 2, 3])
    assert expected.sent_in_chain([1, 2, 3]) == 0  # nothing was proposed
    expected.proposed = (1, 2, 3)
    assert expected.sent_in_chain([1, 2, 9]) == 2 and expected.sent_in_chain([1, 2, 9]) == 0
    expected.proposed = (1, 2, 3)
    nodes = [(1, ROOT), (5, ROOT), (2, 0), (2, 1), (3, 2)]
    tree = Tree(tuple(Node(token, parent, 0.5, 0.5, 1) for token, parent in nodes))
    assert expected.sent_in_tree(tree, [0, 1, 2, 3]) == [0, 2]


def test_without_a_prediction_lookup_is_that_of_the_text() -> None:
    assert type(ngrams_of([1, 2], 2, None, 3, 1)) is not PredictedNgrams
