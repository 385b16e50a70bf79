"""Prompt lookup proposes what followed the longest, latest earlier occurrence of the text's end."""

from __future__ import annotations

import random

from specbranch.core.lookup import LONGEST_MATCH, Ngrams


def searched(tokens: list[int], longest: int, shortest: int, length: int) -> tuple[int, ...]:
    """The same by plain search, from the end backwards."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                longer = list(tokens)
                while len(longer) < end + length:  # as if what was found had been said
                    longer.append(longer[len(longer) - len(tokens) + end])
                return tuple(longer[end : end + length])
    return ()


def test_it_equals_a_plain_search_on_growing_texts() -> None:
    rng = random.Random(0)
    found = 0
    for _ in range(60):
        tokens = [rng.randrange(4) for _ in range(rng.randint(1, 12))]
        longest = rng.randint(1, 4)
        shortest = rng.randint(1, longest)
        ngrams = Ngrams(tokens, longest, shortest)
        for _ in range(15):
            length = rng.randint(1, 5)
            proposal = ngrams.propose(length)
            assert proposal == searched(tokens, longest, shortest, length)
            found += bool(proposal)
            behind = [rng.randrange(4) for _ in range(rng.randint(0, 4))]
            if behind and rng.random() < 0.5:  # asked for before they are there
                assert ngrams.find(length, tuple(behind))[1] == searched(tokens + behind, longest, shortest, length)
            tokens += behind
    assert found > 300


def test_the_end_of_the_text_is_no_occurrence_of_itself() -> None:
    assert Ngrams([1, 2, 3], 3).propose(4) == ()


def test_the_latest_occurrence_wins() -> None:
    assert Ngrams([7, 1, 7, 2, 7], 1).propose(1) == (2,)


def test_the_longest_suffix_wins_over_a_later_shorter_one() -> None:
    assert Ngrams([1, 7, 5, 2, 7, 6, 1, 7], 2).propose(1) == (5,)


def test_a_short_suffix_is_ignored_if_asked() -> None:
    assert Ngrams([7, 1, 3, 7], 3, shortest=2).propose(2) == ()


def test_a_proposal_may_run_into_the_text_it_continues() -> None:
    assert Ngrams([1, 2, 1, 2], 2).propose(5) == (1, 2, 1, 2, 1)


def test_nothing_is_proposed_where_nothing_may_be_added() -> None:
    assert Ngrams([7, 1, 7], 1).propose(0) == ()


def test_an_empty_text_and_a_single_token_propose_nothing() -> None:
    assert Ngrams([], 3).propose(3) == ()
    assert Ngrams([1], 3).propose(3) == ()


def test_a_match_is_counted_as_far_as_it_goes() -> None:
    rng = random.Random(1)
    for _ in range(200):
        tokens = [rng.randrange(3) for _ in range(rng.randint(2, 60))]
        cut = rng.randint(1, len(tokens))
        for text, behind in ((tokens, ()), (tokens[:cut], tuple(tokens[cut:]))):
            ngrams = Ngrams(text, 4)
            words, found = ngrams.find(3, behind)
            ends = [end for end in range(1, len(tokens)) if tokens[:end][-4:] == tokens[-4:]]
            if ends and len(tokens) > 4:  # of the last four the latest position counts, however far the match goes
                end = ends[-1]
                far = next((n for n in range(end) if tokens[end - n - 1] != tokens[-n - 1]), end)
                assert words == min(far, LONGEST_MATCH) and found[: len(tokens) - end] == tuple(tokens[end : end + 3])
            else:
                assert words < 4
