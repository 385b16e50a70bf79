"""Rounds read off a text are the rounds that decoding makes."""

from __future__ import annotations

import pytest
import torch

from specbranch.config import SpeculativeConfig
from specbranch.core.forecast import ALL, NONE, SOME
from specbranch.core.trace import Trace
from specbranch.training.hrad.rounds import UNKNOWN_LABEL, LabelledRounds, outcomes, walk
from toybench import Case, Ending, decode, law, serial

DRIFT, LENGTH, LONGEST = 0.3, 4, 9


def agreed(tokens: tuple[int, ...], prompt: int) -> list[bool]:
    """Where a greedy toy draft's first choice is the text's next token; the answer's first token is the target's
    own."""
    draft = law(DRIFT)
    rows = [draft.logits_of(tokens[:at]) for at in range(prompt + 1, len(tokens))]
    return [True, *(row.index(max(row)) == token for row, token in zip(rows, tokens[prompt + 1 :], strict=True))]


@pytest.mark.parametrize("seed", range(8))
def test_walked_rounds_are_those_of_speculative_decoding(seed: int) -> None:
    case = Case((seed % 5, 3, 1), 0.0, seed, Ending("length", 60))
    trace = Trace()
    session = decode(serial(DRIFT), case, SpeculativeConfig(method="speculative", num_speculative_tokens=LENGTH), trace)
    judged = [event.accepted for event in trace.events if event.accepted is not None][1:]  # the first is the prefill
    starts = list(walk(agreed(tuple(session.tokens), len(case.prompt)), LENGTH, LONGEST))
    walked = [min(start.taken, LENGTH) for start in starts]
    assert walked[:-1] == judged[: len(walked) - 1]  # the last one may be cut short by the end
    assert [start.before for start in starts] == [UNKNOWN_LABEL, *walked[:-1]]
    assert len(set(walked)) > 2


def rounds_of(taken: list[int], left: list[int]) -> LabelledRounds:
    many = len(taken)
    zeros = torch.zeros(many, dtype=torch.int64)
    return LabelledRounds(
        torch.zeros(many, 2),
        torch.tensor(taken),
        torch.tensor(left),
        zeros,
        torch.zeros(many, 4),
        torch.zeros(many, 4),
        zeros,
        zeros,
    )


def test_labels_tell_none_some_and_all_and_what_the_end_leaves_open() -> None:
    labels = rounds_of([0, 2, 4, 2], [9, 9, 9, 2]).labels().tolist()
    assert labels == [[NONE] * 4, [ALL, ALL, SOME, SOME], [ALL] * 4, [ALL, ALL, UNKNOWN_LABEL, UNKNOWN_LABEL]]


def test_positions_are_judged_up_to_the_first_wrong_token_and_no_farther_than_the_text() -> None:
    seen, true = outcomes(rounds_of([0, 2, 4, 2], [9, 9, 9, 2]))
    assert seen.int().tolist() == [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert (true & seen).int().tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
