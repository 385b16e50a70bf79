"""Under the ratio rule a draft that fails in mid-request leaves the target's joint law as it is, on either executor.

`test_streams` holds exactly what comes before and behind the failure. Here it is the round of the failure, whose
pending chain has lost the draft behind it. A planted fault in that very round is caught.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from test_law_ratio import DRAFT, TARGET

from exact import CAUGHT, PROMPT, SOUND, Drawn, joint_law, requests
from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.runner import Feed, Trial
from specbranch.core.session import Session
from specbranch.core.verify import Outcome
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.streams import Streams
from specbranch.exec.verifier import Verifier
from specbranch.lab.toys.toys import Logits, ToyRunner
from toybench import Deferred, run_out

pytestmark = pytest.mark.slow

LENGTH = 4  # tokens of the joint window
MOST = 8  # of an answer: behind the window there is still something to draft, so a chain is pending in it
SEEDS = 2000
STEPS = 7  # the draft fails at one of these steps
ENOUGH = 200


class FailsOnce(ToyRunner):
    """A draft that fails at a given step."""

    left = 0

    def _score(self, work: Sequence[Feed]) -> list[list[Logits]]:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("CUDA out of memory.")
        return super()._score(work)


class Believing(Deferred):
    """Fault: what is pending when the draft fails is taken without a test."""

    draft: FailsOnce

    def _outcome(self, trial: Trial) -> Outcome:
        if self.draft.left > 0 or not trial.order.q:
            return super()._outcome(trial)
        last = len(trial.order.tokens) - 1
        law = self.sampler.law(self._rows[trial.seq][trial.node(last)], self._spot_of(trial, last))
        return tuple(range(last + 1)), law.draw(self._uniform(trial)(last + 1, "own", 0))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """A draft that fails is warned of, here thousands of times."""
    caplog.set_level(logging.ERROR, "specbranch")


def drawn(kind: type[Serial], method: str, target: type[Deferred] = Deferred) -> Drawn:
    """Run a request for each seed, with a draft that fails at the first step, the second, and so on."""
    name, _, policy = method.partition(":")
    config = SpeculativeConfig(
        method=name, policy=policy or None, num_speculative_tokens=2, stop_below=0.3, rule="ratio"
    )  # type: ignore[arg-type]
    draft, judge, found = FailsOnce(DRAFT, 64), target(TARGET, lambda: 1, 64), Drawn()
    if isinstance(judge, Believing):
        judge.draft = draft
    loop = Loop(kind(Verifier(judge), Drafter(draft)))
    for request in requests(SamplingParams(temperature=1.0, max_tokens=MOST), "ratio", range(SEEDS)):
        session, draft.left = Session(request.seed, PROMPT, request, 64), 1 + request.seed % STEPS
        loop.join(session, METHODS[name].start(session, config, Experience()))
        run_out(loop)
        found.take(session)
    found.outputs = [tokens[:LENGTH] for tokens in found.outputs]
    return found


@pytest.mark.parametrize("kind", [Serial, Streams])
@pytest.mark.parametrize("method", ["pearl", "specbranch:confidence", "speculative"])
def test_a_draft_that_fails_leaves_the_law_as_it_is(kind: type[Serial], method: str) -> None:
    found = drawn(kind, method)
    assert found.totals["rounds_without_draft"] > ENOUGH and found.totals["rejected"] > ENOUGH
    assert found.p_value(joint_law(TARGET, PROMPT, LENGTH)) > SOUND


@pytest.mark.parametrize("kind", [Serial, Streams])
def test_a_chain_that_is_believed_because_its_draft_failed_is_caught(kind: type[Serial]) -> None:
    assert drawn(kind, "pearl", Believing).p_value(joint_law(TARGET, PROMPT, LENGTH)) < CAUGHT
