"""Under a grammar and the ratio rule every method emits the target's masked law, against exact enumeration.

The draft may have the masks, or not, as in another process: then forbidden tokens that were drawn are sent, and
rejected. To drop them instead is the planted fault, which must be caught.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from exact import CAUGHT, PROMPT, SOUND, Drawn, Tokens, draw_with, requests
from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.core.grammar import Constraint
from specbranch.core.methods import METHODS
from specbranch.core.orders import Branch, Drafted, DraftOrder
from specbranch.core.session import Session
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.lab.toys.toys import ToyLaw, ToyRunner, shaped
from tiers import each_value
from toy_grammar import ToyGrammar, ToyParser

LENGTH, SEEDS = 4, 1000
TARGET = ToyLaw(vocabulary=4, seed=4, sharpness=1.3)
DRAFT = ToyLaw(vocabulary=4, seed=4, sharpness=1.3, drift=0.8)
GRAMMAR = ToyGrammar(6, 4, force=0.1, end=0.0, over=0.0)
METHOD_POLICIES = [("speculative", None), ("pearl", None), ("specbranch", "confidence"), ("autoregressive", None)]


class Apart(Drafter):
    """A draft without a parser, as in another process."""

    def draft(self, orders: Mapping[int, DraftOrder], *given: Any) -> dict[int, Drafted]:
        return super().draft({session: replace(order, state=None) for session, order in orders.items()}, *given)


def masked_law() -> dict[Tokens, float]:
    """The probability of every continuation, from the target's logits and the grammar alone."""
    joint: dict[Tokens, float] = {(): 1.0}
    for _ in range(LENGTH):
        following: dict[Tokens, float] = {}
        for line, mass in joint.items():
            allowed = GRAMMAR.allowed(line)
            logits = [x if t in allowed else -math.inf for t, x in enumerate(TARGET.logits_of((*PROMPT, *line)))]
            following |= {(*line, t): mass * p for t, p in enumerate(shaped(logits, 1.0)) if p > 0.0}
        joint = following
    return joint


def drawn(method: str, policy: str | None, drafter: type[Drafter], seeds: int = SEEDS) -> Drawn:
    params = SamplingParams(temperature=1.0, max_tokens=LENGTH)
    constraint = Constraint(partial(ToyParser, GRAMMAR), frozenset())
    wanted = [replace(request, constraint=constraint) for request in requests(params, "ratio", range(seeds))]
    config = SpeculativeConfig(
        method=method,
        policy=policy,
        rule="ratio",
        num_speculative_tokens=3,
        stop_below=0.2,  # type: ignore[arg-type]
    )
    executor = Serial(Verifier(ToyRunner(TARGET, 64)), drafter(ToyRunner(DRAFT, 64)))
    return draw_with(executor, lambda session: METHODS[method].start(session, config, Experience()), wanted, 50)


@each_value
@pytest.mark.parametrize("drafter", [Drafter, Apart])
@pytest.mark.parametrize(("method", "policy"), METHOD_POLICIES)
def test_the_law_is_the_masked_one(method: str, policy: str | None, drafter: type[Drafter]) -> None:
    found = drawn(method, policy, drafter)
    assert found.p_value(masked_law()) > SOUND
    assert method == "autoregressive" or found.totals["rejected"] > 100


@pytest.mark.slow
def test_dropping_forbidden_tokens_that_were_drawn_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(self: Session, pending: Branch) -> Branch:
        assert self.state is not None
        return pending.cut(0, self.state.permitted(pending.tokens))

    monkeypatch.setattr(Session, "permitted", cut)
    assert drawn("speculative", None, Apart, 2 * SEEDS).p_value(masked_law()) < CAUGHT
