"""Agreement of a draft with a target, on toys whose choices are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from specbranch.core.learning import SURE
from specbranch.core.runner import Ask, Feed, Proposal
from specbranch.core.trees import CLASSES, EDGES
from specbranch.lab.toys.toys import ToyRunner
from specbranch.training.distill.agreement import (
    LONGEST,
    AnsweredPrompt,
    agreement_of,
    compare,
    judged_text,
    step_seconds,
)
from toybench import law

PROMPT = (1, 2, 3)


def greedy(count: int, drift: float = 0.0) -> tuple[int, ...]:
    ids = list(PROMPT)
    for _ in range(count):
        logits = law(drift).logits_of(ids)
        ids.append(logits.index(max(logits)))
    return tuple(ids[len(PROMPT) :])


def ranks(answer: tuple[int, ...], drift: float) -> list[int]:
    """The rank of each token of the answer for a draft, from its law alone."""
    found = []
    for at, token in enumerate(answer):
        logits = law(drift).logits_of((*PROMPT, *answer[:at]))
        found.append(sorted(range(len(logits)), key=lambda t: (-logits[t], t)).index(token) + 1)
    return found


def test_the_target_agrees_with_itself() -> None:
    found = compare(ToyRunner(law()), [AnsweredPrompt(PROMPT, greedy(80))])
    assert (found.tokens, found.top1, found.top3) == (80, 1.0, 1.0)
    assert found.expected_length == tuple(float(n) for n in range(1, LONGEST + 1))


def test_shares_and_lengths_are_those_of_the_laws() -> None:
    answer = greedy(150)
    by_law = ranks(answer, 0.2)
    found = compare(ToyRunner(law(0.2)), [AnsweredPrompt(PROMPT, answer)])
    assert found.top1 == pytest.approx(sum(r == 1 for r in by_law) / 150)
    assert found.top3 == pytest.approx(sum(r <= 3 for r in by_law) / 150)
    assert 0.2 < found.top1 < found.top3 < 1.0
    starts = range(150 - LONGEST + 1)
    pairs = [(by_law[at], by_law[at + 1]) for at in starts]
    assert found.expected_length[1] == pytest.approx(
        sum((a == 1) + (a == 1 and b == 1) for a, b in pairs) / len(starts)
    )


def test_the_counts_are_those_of_the_laws() -> None:
    """Token by token and class by class, from the draft's law alone."""
    answer, wide = greedy(150), [[0, 0] for _ in range(2 * CLASSES)]
    for at, token in enumerate(answer):
        logits = law(0.2).logits_of((*PROMPT, *answer[:at]))
        whole = sum(math.exp(one) for one in logits)
        best = sorted(range(len(logits)), key=lambda t: (-logits[t], t))[:SURE]
        for rank, candidate in enumerate(best):
            said = math.exp(logits[candidate]) / whole
            counts = wide[(CLASSES if rank else 0) + sum(said >= edge for edge in EDGES)]
            counts[0] += 1
            counts[1] += candidate == token
    found = compare(ToyRunner(law(0.2)), [AnsweredPrompt(PROMPT, answer)], "one text").evaluation
    first, other = wide[:CLASSES], wide[CLASSES:]
    assert [list(one) for one in zip(found.first.met, found.first.right, strict=True)] == first
    assert [list(one) for one in zip(found.other.met, found.other.right, strict=True)] == other
    assert (found.positions, found.text) == (150, "one text") and sum(one[0] for one in other) == 3 * 150
    by_law = ranks(answer, 0.2)
    assert (found.hits, found.covered) == (sum(r == 1 for r in by_law), sum(r <= SURE for r in by_law))


def test_a_text_longer_than_the_drafts_context_counts_as_far_as_it_reaches() -> None:
    found = compare(ToyRunner(law(), context_length=40), [AnsweredPrompt(PROMPT, greedy(80))])
    assert found.tokens == 40 - len(PROMPT)


def test_nothing_to_compare_is_no_agreement() -> None:
    assert compare(ToyRunner(law()), [AnsweredPrompt(PROMPT, ())]).tokens == 0


def test_a_measured_step_leaves_no_sequence_open() -> None:
    runner = ToyRunner(law())
    assert step_seconds(runner, PROMPT, times=3) > 0
    with pytest.raises(KeyError):
        runner.slots(-1)


class Forgetful(ToyRunner):
    """A draft that says what its law says at the first node of a call, and nonsense after further ones."""

    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        said = super().propose(work, asks)
        nonsense = [replace(one, tokens=(-1,) * len(one.tokens)) for one in said]
        return [one if ask.node == 0 else other for one, other, ask in zip(said, nonsense, asks, strict=True)]


def test_a_draft_that_needs_its_targets_features_is_judged_by_depth() -> None:
    answer = greedy(85, 0.2)
    text = AnsweredPrompt(PROMPT, answer)
    draft, target = ToyRunner(law(0.4)), ToyRunner(law(0.2))
    plain, unrolled = judged_text(draft, text), judged_text(draft, text, target)
    assert plain.positions == unrolled.positions and (plain.stretch, unrolled.stretch) == (None, LONGEST)
    assert len(list(plain.drafts())) == 76 and len(list(unrolled.drafts())) == 8
    every_tenth = [ranks(answer, 0.4)[at : at + LONGEST] for at in range(0, 76, LONGEST)]
    first = sum(one[0] == 1 for one in every_tenth)
    both = sum(one[0] == one[1] == 1 for one in every_tenth)
    assert agreement_of([unrolled]).by_depth[:2] == (first / 8, both / first) and 0 < both < first
    forgetful = agreement_of([judged_text(Forgetful(law(0.4)), text, target)])
    assert forgetful.by_depth[:2] == (first / 8, 0.0) and forgetful.tokens_a_forward[4] == 1 + first / 8
    with pytest.raises(KeyError):
        target.slots(-1)


def test_the_expected_speed_weighs_tokens_against_draft_steps() -> None:
    found = agreement_of([judged_text(ToyRunner(law()), AnsweredPrompt(PROMPT, greedy(60)))])
    assert found.by_depth == (1.0,) * LONGEST and found.tokens_a_forward[4] == 6.0
    assert found.speed(5, 0.1) == pytest.approx(6 / 1.5) and found.speed(5, 0.0) == 6.0
