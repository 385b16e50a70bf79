"""Rows that a verification computes aside are never accepted, change no verdict, and give the target's own
continuation there."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from specbranch.config import Rule, SamplingParams
from specbranch.core import noise
from specbranch.core.orders import Aside, Context, Sparse, Verify
from specbranch.core.request import Request
from specbranch.core.slots import ROOT, TAIL
from specbranch.exec.verifier import Verifier
from specbranch.exec.worker import UNCOMPUTED_AT_ONCE
from specbranch.lab.toys.toys import ListLaw, ToyRunner, shaped
from toybench import VOCABULARY, law

RULES: tuple[tuple[float, Rule], ...] = ((0.0, "match"), (0.8, "match"), (0.8, "ratio"))


def request_of(temperature: float, rule: Rule, seed: int, text: tuple[int, ...]) -> Request:
    return Request(SamplingParams(temperature=temperature), seed, len(text), rule=rule)


def opened(request: Request) -> Verifier:
    verifier = Verifier(ToyRunner(law()))
    verifier.open(0, request)
    return verifier


def judged(verifier: Verifier, order: Verify) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    scored, failed = verifier.score({0: order})
    assert not failed
    verdict = verifier.judge(scored, {})[0]
    return verdict.path, verdict.token, verdict.guessed


def goes_on(tokens: tuple[int, ...], request: Request) -> int:
    """What the target says after some tokens, from its law and its variates alone."""
    row, draw = law().logits_of(tokens), (request.seed, request.sample, len(tokens))
    if request.by_ratio:
        return ListLaw(shaped(row, request.params.temperature)).draw(noise.uniform(*draw, "own"))
    perturb = [0.0] * len(row) if request.greedy else noise.gumbel_row(*draw, len(row))
    scores = [x / (request.params.temperature or 1.0) + g for x, g in zip(row, perturb, strict=True)]
    return scores.index(max(scores))


def some_aside(rng: random.Random, count: int = 12) -> Aside:
    parents = tuple(rng.randint(ROOT, node - 1) if rng.random() < 0.5 else node - 1 for node in range(count))
    return Aside(
        tuple(rng.randrange(VOCABULARY) for _ in parents), parents, tuple(rng.sample(range(count), count // 2))
    )


def path_to(aside: Aside, node: int) -> tuple[int, ...]:
    return () if node == ROOT else (*path_to(aside, aside.parents[node]), aside.tokens[node])


def some_order(rng: random.Random, text: tuple[int, ...], request: Request) -> Verify:
    parents = (ROOT, 0, ROOT, 2, 3)
    q = (
        tuple(Sparse((0, 1, 2), (0.5, 0.3, 0.2)) if rng.random() < 0.5 else None for _ in parents)
        if request.by_ratio
        else None
    )
    return Verify(Context(0, text), tuple(rng.randrange(3) for _ in parents), parents, q)


@pytest.mark.parametrize(("temperature", "rule"), RULES)
def test_a_forecast_comes_with_the_targets_rounds_and_changes_no_verdict(temperature: float, rule: Rule) -> None:
    rng, taken = random.Random(1), 0
    for seed in range(40):
        text = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 4, 40))))
        request = request_of(temperature, rule, seed, text)
        order, aside = some_order(rng, text, request), some_aside(rng)
        path, token, reported = judged(opened(request), replace(order, aside=aside))
        assert (path, token, ()) == judged(opened(request), order)
        assert reported == tuple(goes_on((*text, *path_to(aside, node)), request) for node in aside.guessed)
        taken += len(path)
    assert taken > 10


@pytest.mark.parametrize(("temperature", "rule"), RULES)
def test_the_targets_own_token_is_not_taken_from_aside(temperature: float, rule: Rule) -> None:
    for seed in range(10):
        text = (1, 2, seed % VOCABULARY)
        request = request_of(temperature, rule, seed, text)
        first = goes_on(text, request)
        second = goes_on((*text, first), request)
        verifier = opened(request)
        assert judged(verifier, Verify(Context(0, text), aside=Aside((first, second), (ROOT, 0), (0,)))) == (
            (),
            first,
            (second,),
        )
        assert verifier.slots(0).prefix == list(text) and not verifier.slots(0).tokens
        assert judged(verifier, Verify(Context(len(text), (first,))))[:2] == ((), second)


def test_a_tail_full_of_guesses_leaves_room_for_tokens_that_were_lost() -> None:
    text = tuple(token % VOCABULARY for token in range(3 * UNCOMPUTED_AT_ONCE))
    request = request_of(0.8, "match", 5, text[:2])  # the rest are steps, read again
    aside = Aside((1,) * (TAIL - 1), tuple(range(ROOT, TAIL - 2)), (0, TAIL - 2))
    reported = judged(opened(request), Verify(Context(0, text), aside=aside))[2]
    assert reported == tuple(goes_on((*text, *path_to(aside, node)), request) for node in aside.guessed)
