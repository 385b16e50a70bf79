"""A grammar for toys: what may follow depends on every token of the answer, so a state of another branch shows.

Owns a parser in plain Python, and plain decoding with its masks, from the law alone. Invariant: the reference uses
neither states nor sessions, so a fault in them cannot hide on both sides.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from specbranch.core import noise
from specbranch.core.grammar import Constraint, Mask
from specbranch.core.session import Session
from specbranch.lab.toys.toys import ListLaw, ToyLaw, shaped
from toybench import LIMIT, Answer, Case

ENDS = {1, 2, 3}  # tokens that end some request: where nothing else may follow, an answer may end


@dataclass(frozen=True)
class ToyGrammar:
    """Forbids, forces and ends at random; `force`: how often one token alone may follow, `end`: how often it may
    end."""

    seed: int
    vocabulary: int
    force: float = 0.3
    end: float = 0.2
    over: float = 0.03
    dead: int | None = None  # behind so many tokens nothing may follow, and the answer may not end

    def allowed(self, tokens: Sequence[int]) -> set[int]:
        """The tokens that may follow, but for end tokens."""
        rng = self._random("allowed", tokens)
        if len(tokens) == self.dead:
            return set()
        if tokens and rng.random() < self.over:
            return set()
        count = 1 if rng.random() < self.force else rng.randint(2, self.vocabulary)
        return set(rng.sample(range(self.vocabulary), count))

    def accepts(self, tokens: Sequence[int]) -> bool:
        """True if the answer may end."""
        if len(tokens) == self.dead:
            return False
        return not self.allowed(tokens) - ENDS or self._random("accepts", tokens).random() < self.end

    def _random(self, purpose: str, tokens: Sequence[int]) -> random.Random:
        return random.Random(f"{self.seed} {purpose} {list(tokens)}")


class ToyParser:
    """Parses by a toy grammar, and notes what it was asked."""

    def __init__(self, grammar: ToyGrammar) -> None:
        self.grammar, self.tokens, self.masks, self.rolled_back = grammar, list[int](), 0, 0

    def consume(self, token: int) -> None:
        assert token in self.grammar.allowed(self.tokens), "it was told to consume what it forbids"
        self.tokens.append(token)

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self.tokens)
        self.rolled_back += count
        del self.tokens[-count:]

    def mask(self) -> bytes:
        self.masks += 1
        return Mask.of(self.grammar.allowed(self.tokens)).bits

    def allows(self, token: int) -> bool:
        return token in self.grammar.allowed(self.tokens)

    def forced(self) -> int | None:
        return Mask.of(self.grammar.allowed(self.tokens)).only

    def accepts(self) -> bool:
        return self.grammar.accepts(self.tokens)

    def failure(self) -> str:
        return ""


def constrained(case: Case, grammar: ToyGrammar, number: int = 0, limit: int = LIMIT) -> Session:
    """A session whose answer follows a grammar."""
    plain = case.session(number, limit)
    constraint = Constraint(partial(ToyParser, grammar), plain.request.ending_ids)
    request = replace(plain.request, constraint=constraint)
    return Session(number, case.prompt, request, limit, case.ending.watch() if case.ending.watch else None)


def plainly(case: Case, model: ToyLaw, grammar: ToyGrammar) -> Answer:
    """Decode token by token from the law alone, with the masks of the whole answer so far."""
    tokens, ending = list(case.prompt), case.ending
    watcher = ending.watch() if ending.watch else None
    ends = set(ending.stop_token_ids) | (set() if ending.ignore_eos else set(ending.eos_ids))
    for _ in range(ending.max_tokens):
        said = tokens[len(case.prompt) :]
        allowed = grammar.allowed(said) - ends | (ends if grammar.accepts(said) else set())
        tokens.append(_drawn(model, case, tokens, allowed.__contains__))
        watched = watcher is not None and watcher(tokens[-1])
        said = tokens[len(case.prompt) :]
        if tokens[-1] in ends or watched or (grammar.accepts(said) and not grammar.allowed(said) - ends):
            return Answer(tuple(said), "stop")
    return Answer(tuple(tokens[len(case.prompt) :]), "length")


def _drawn(model: ToyLaw, case: Case, tokens: list[int], allowed: Callable[[int], bool]) -> int:
    logits = [x if allowed(t) else -math.inf for t, x in enumerate(model.logits_of(tokens))]
    if case.temperature == 0.0:
        return logits.index(max(logits))
    if case.rule == "ratio":
        return ListLaw(shaped(logits, case.temperature)).draw(noise.uniform(case.seed, 0, len(tokens), "own"))
    gumbel = noise.gumbel_row(case.seed, 0, len(tokens), len(logits))
    scores = [x / case.temperature + g for x, g in zip(logits, gumbel, strict=True)]
    return scores.index(max(scores))
