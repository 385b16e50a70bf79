"""The identity tests can fail: each planted off-by-one is found by them.

A fault on the target's side changes the output. Under the match rule a fault on the draft's side cannot. It shows as a
rejection of a draft that has the target's own law and noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specbranch.config import SpeculativeConfig
from specbranch.core.orders import Context
from specbranch.core.request import Spot
from specbranch.core.runner import Ask, Feed, Trial
from specbranch.core.slots import ROOT
from specbranch.core.verify import Outcome
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.exec.worker import Worker
from specbranch.lab.toys.toys import START, Logits, ToyRunner
from tiers import tiered
from toybench import Case, Ending, answer, decode, law, plainly, total

METHODS_WITH_DRAFT = ("speculative", "pearl", "specbranch")


class CommitsOneTooMany(ToyRunner):
    """Rolls back one token less than was rejected."""

    def _keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        slots = self.slots(seq)
        last = nodes[-1] if nodes else ROOT
        extra = (
            [node for node, parent in enumerate(slots.parents) if parent == last][:1]
            if commit == len(nodes) > 0
            else []
        )
        super()._keep(seq, [*nodes, *extra], commit + len(extra))


class KeepsTheLastRows(ToyRunner):
    """Cuts the cache at the wrong end of the tail."""

    def _keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        start, states = len(self.slots(seq).prefix), self._states[seq].copy()
        super()._keep(seq, nodes, commit)
        self._states[seq][start:] = states[len(states) - len(nodes) :]


class MovesNothing(ToyRunner):
    """Renumbers a kept path without moving its rows."""

    def _keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        states = self._states[seq].copy()
        super()._keep(seq, nodes, commit)
        self._states[seq][:] = states[: len(self._states[seq])]


class SeesTheNodeBefore(ToyRunner):
    """Masks by KV slot rather than by ancestry: a lane sees its neighbour. On chains there is no difference."""

    def _score(self, work: Sequence[Feed]) -> list[list[Logits]]:
        return [self._chained(item) for item in work]

    def _chained(self, item: Feed) -> list[Logits]:
        states, start = self._states[item.seq], len(self._states[item.seq])
        self.slots(item.seq).grow(item.tokens, item.parents)
        for token in item.tokens:
            states.append(self.law.step(states[-1] if states else START, token))
        return [self.law.logits(state) for state in states[start:]]


class LosesATokenOfThePrompt(ToyRunner):
    """Reads a long prompt but for its first token."""

    def _extend(self, seq: int, tokens: Sequence[int]) -> None:
        super()._extend(seq, tokens)
        states = self._states[seq]
        states[:] = [START]
        for token in tokens[1:]:
            states.append(self.law.step(states[-1], token))


class Sound(Worker):
    """No fault at all."""


class PositionOffByOne(ToyRunner):
    """Draws with the noise of the next position."""

    def spot(self, seq: int, node: int, ask: Ask | None = None) -> Spot:
        spot = super().spot(seq, node, ask)
        return spot._replace(position=spot.position + 1)


class PlaceForPosition(ToyRunner):
    """Takes a node's KV slot for its position in the sequence; on chains they are equal."""

    def spot(self, seq: int, node: int, ask: Ask | None = None) -> Spot:
        return super().spot(seq, node, ask)._replace(position=len(self.slots(seq).prefix) + node + 1)


class TrustsTheBase(Worker):
    """Feeds all of an order's tail, whatever it holds already."""

    def align(self, session: int, on: Context, pending: int = 0) -> tuple[int, list[int]]:
        return super().align(session, Context(len(self.slots(session).prefix), on.tail, on.history), pending)


class AlignsOneShort(Worker):
    """Takes the last token that an order states for one it has already read."""

    def align(self, session: int, on: Context, pending: int = 0) -> tuple[int, list[int]]:
        end, rest = super().align(session, on, pending)
        return end, rest[1:] if len(rest) > 1 else rest


class ReusesStaleRows(ToyRunner):
    """Keeps rows under the numbers they had before a cut."""

    def keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        before = dict(self._rows[seq])
        super().keep(seq, nodes, commit)
        self._rows[seq] = before


class ReusesARowAfterATrim(ToyRunner):
    """After a cut, answers for the end of the prefix with the row of the last token that was drafted."""

    def keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        before = self._rows[seq]
        last = before[max(before)] if before else None
        super().keep(seq, nodes, commit)
        if last is not None and ROOT in self._rows[seq]:
            self._rows[seq][ROOT] = last


class ReadsTheRowBefore(ToyRunner):
    """Answers for a node by the row of the one before it."""

    def score(self, work: Sequence[Feed]) -> list[list[Logits]]:
        made = super().score(work)
        for item in work:
            rows = self._rows[item.seq]
            self._rows[item.seq] = {node: rows.get(node - 1, row) for node, row in rows.items()}
        return made


class AcceptsOneTooMany(ToyRunner):
    """Takes the first rejected token too."""

    def _outcome(self, trial: Trial) -> Outcome:
        path, token = super()._outcome(trial)
        return (*path, len(path)) if len(path) < len(trial.nodes) else path, token


def pair(runner: type[ToyRunner], worker: type[Worker], of_draft: bool) -> Serial:
    """A pair with a fault in one model: in a draft that is otherwise perfect, or in a target beside a weak draft, with
    much to roll back."""
    faulty = type("Faulty", (worker, Drafter if of_draft else Verifier), {})(runner(law()))
    if of_draft:
        return Serial(Verifier(ToyRunner(law())), faulty)
    return Serial(faulty, Drafter(ToyRunner(law(0.3))))


def cases() -> list[tuple[Case, SpeculativeConfig]]:
    """Requests as in the identity test, fewer."""
    out = []
    for seed, method in ((seed, method) for seed in range(3) for method in METHODS_WITH_DRAFT):
        policy = "confidence" if method == "specbranch" else None
        config = SpeculativeConfig(
            method=method, policy=policy, num_speculative_tokens=4, max_branches=24, stop_below=0.45
        )
        prompt = tuple((seed + i * i) % 6 for i in range(4 if seed % 2 else 25))
        out.append((Case(prompt, (0.0, 0.7, 1.3)[seed % 3], seed, Ending("long", max_tokens=40)), config))
    return out


def wrong_answers(executor: Serial) -> int:
    return sum(answer(decode(executor, case, config)) != plainly(case, law()) for case, config in cases())


def rejections(executor: Serial) -> int:
    """What a perfect draft should never see: a token rejected, or a first head that was not hit."""
    sessions = [decode(executor, case, config) for case, config in cases()]
    missed = total(sessions, "branch_points") - total(sessions, "branch_hits") + total(sessions, "branch_hits_other")
    return total(sessions, "tested_at") - total(sessions, "accepted_at") + missed


def test_without_a_fault_nothing_is_found() -> None:
    assert wrong_answers(pair(ToyRunner, Sound, of_draft=False)) == 0
    assert wrong_answers(pair(ToyRunner, Sound, of_draft=True)) == 0
    assert rejections(pair(ToyRunner, Sound, of_draft=True)) == 0


def test_a_target_that_keeps_too_much_is_put_right_by_the_next_order() -> None:
    """An order states the text: what is held beyond it, or instead of it, is forgotten."""
    assert wrong_answers(pair(CommitsOneTooMany, Sound, of_draft=False)) == 0


@pytest.mark.parametrize(
    "fault",
    tiered(
        (KeepsTheLastRows, LosesATokenOfThePrompt, PositionOffByOne, ReadsTheRowBefore, AcceptsOneTooMany),
        (KeepsTheLastRows, PositionOffByOne, AcceptsOneTooMany).__contains__,
    ),
)
def test_a_fault_in_the_targets_cache_changes_the_output(fault: type[ToyRunner]) -> None:
    assert wrong_answers(pair(fault, Sound, of_draft=False)) > 0


@pytest.mark.parametrize("fault", [TrustsTheBase])
def test_a_fault_in_the_targets_worker_changes_the_output(fault: type[Worker]) -> None:
    assert wrong_answers(pair(ToyRunner, fault, of_draft=False)) > 0


@pytest.mark.parametrize(
    "fault",
    tiered(
        (
            *(CommitsOneTooMany, KeepsTheLastRows, MovesNothing, SeesTheNodeBefore, LosesATokenOfThePrompt),
            *(PositionOffByOne, PlaceForPosition, ReusesARowAfterATrim, ReadsTheRowBefore),
        ),
        (CommitsOneTooMany, MovesNothing, SeesTheNodeBefore, ReusesARowAfterATrim).__contains__,
    ),
)
def test_a_fault_in_the_drafts_cache_makes_a_perfect_draft_fail(fault: type[ToyRunner]) -> None:
    executor = pair(fault, Sound, of_draft=True)
    assert rejections(executor) > 0
    assert wrong_answers(executor) == 0, "the draft alone must not be able to change the output"


@pytest.mark.parametrize("fault", [AlignsOneShort])
def test_a_fault_in_the_drafts_worker_makes_a_perfect_draft_fail(fault: type[Worker]) -> None:
    executor = pair(ToyRunner, fault, of_draft=True)
    assert rejections(executor) > 0
    assert wrong_answers(executor) == 0, "the draft alone must not be able to change the output"


def test_a_draft_that_loses_track_of_its_rows_is_loud() -> None:
    with pytest.raises(KeyError):
        rejections(pair(ReusesStaleRows, Sound, of_draft=True))
