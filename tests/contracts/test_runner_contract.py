"""One contract for every Runner: whatever is opened, extended, fed, kept and closed, each row is that of its own tokens
alone.

The reference is a list of lists: a prefix, and nodes that name their parents. It recomputes a row from the tokens of
its path, without any cache. Rows must stay valid as long as their node lives, so all live ones are checked again after
every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from specbranch.config import SamplingParams
from specbranch.core.request import Request
from specbranch.core.rows import RowRunner
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.errors import CacheFull
from specbranch.lab.toys.toys import START, Logits, ToyLaw, ToyRunner
from tiers import each_value

CONTEXT, TAIL = 60, 24
GREEDY = Request(SamplingParams(), seed=0, prompt_length=0)
Truth = Callable[[tuple[int, ...]], list[float]]


@dataclass(frozen=True)
class Subject:
    """A Runner under test, the truth about its model, and how much rounding it is allowed."""

    runner: RowRunner[Any]
    truth: Truth
    tolerance: float
    numbers: Callable[[Any], list[float]] = list


@dataclass
class Held:
    """One sequence of the reference."""

    prefix: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)

    def path(self, node: int) -> list[int]:
        return [] if node == ROOT else [*self.path(self.parents[node]), node]

    def sequence(self, node: int) -> tuple[int, ...]:
        return (*self.prefix, *(self.tokens[n] for n in self.path(node)))


def toy(_: Path) -> Subject:
    law = ToyLaw(vocabulary=9, sharpness=2.0)
    return Subject(ToyRunner(law, CONTEXT, TAIL), lambda tokens: list(law.logits_of(tokens)), 0.0)


def saved_model(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, initializer_range=0.3)).eval()
    model.save_pretrained(folder)
    return model


def by_plain_forward(model: Any) -> Truth:
    import torch

    @cache
    def truth(tokens: tuple[int, ...]) -> list[float]:
        with torch.inference_mode():
            return [float(x) for x in model(torch.tensor([tokens])).logits[0, -1]]

    return truth


def as_numbers(row: Any) -> list[float]:
    return [float(x) for x in row.logits]


def native(folder: Path) -> Subject:
    module = pytest.importorskip("specbranch.models.loading")
    model = saved_model(folder)
    runner = module.load_native(folder, context_length=CONTEXT, tail=TAIL, dtype="float32")
    return Subject(runner, by_plain_forward(model), 2e-4, as_numbers)


def transformers_runner(folder: Path) -> Subject:
    module = pytest.importorskip("specbranch.models.runners.transformers_runner")
    model = saved_model(folder)
    return Subject(
        module.load_transformers(folder, context_length=CONTEXT, tail=TAIL), by_plain_forward(model), 2e-4, as_numbers
    )


SUBJECTS = {"toy": toy, "native": native, "transformers": transformers_runner}


@pytest.fixture(params=list(SUBJECTS))
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    return SUBJECTS[request.param](tmp_path)


class Exercise:
    """Random calls on a Runner and the same on the reference."""

    def __init__(self, subject: Subject, seed: int) -> None:
        self.subject = subject
        self.runner = subject.runner
        self.rng = random.Random(seed)
        self.held: dict[int, Held] = {}
        self.opened = 0
        self.compared = 0
        self.rewound = 0  # times part of a prefix was forgotten
        self.others = 0  # nodes kept beside a path

    def run(self, steps: int) -> None:
        self.open()
        for _ in range(steps):
            self.rng.choices(
                [self.open, self.close, self.extend, self.feed, self.keep, self.rewind], [1, 0.4, 1, 5, 3, 0.4]
            )[0]()
            self.check()
        for seq in list(self.held):
            self.runner.close(seq)

    def open(self) -> None:
        if len(self.held) < 3:
            self.opened += 1
            self.runner.open(self.opened, GREEDY)
            self.held[self.opened] = Held()

    def close(self) -> None:
        if len(self.held) > 1:
            seq = self.rng.choice(list(self.held))
            self.runner.close(seq)
            del self.held[seq]

    def extend(self) -> None:
        for seq, held in self.held.items():
            if not held.tokens:
                tokens = self.some_tokens(self.rng.randint(1, 9))
                if len(held.prefix) + len(tokens) + TAIL < CONTEXT:
                    self.runner.extend(seq, tokens)
                    held.prefix += tokens

    def feed(self) -> None:
        work = [feed for seq in self.shuffled() if (feed := self.some_nodes(seq)).tokens][: self.rng.randint(1, 3)]
        if not work:
            return
        for item, rows in zip(work, self.runner.score(work), strict=True):
            held = self.held[item.seq]
            assert len(rows) == len(item.tokens)
            held.tokens += item.tokens
            held.parents += item.parents
            held.rows += rows

    def keep(self) -> None:
        seq = self.rng.choice(list(self.held))
        held = self.held[seq]
        path = held.path(self.rng.randint(ROOT, len(held.tokens) - 1))
        commit = self.rng.choice([0, len(path), self.rng.randint(0, len(path))])
        commit = min(commit, CONTEXT - len(held.prefix))
        nodes = self.with_others(held, path, commit)
        self.runner.keep(seq, nodes, commit)
        renumbered = {node: at for at, node in enumerate(nodes[commit:])}
        held.prefix += [held.tokens[n] for n in nodes[:commit]]
        held.parents = [renumbered.get(held.parents[n], ROOT) for n in nodes[commit:]]
        held.tokens, held.rows = [held.tokens[n] for n in nodes[commit:]], [held.rows[n] for n in nodes[commit:]]

    def with_others(self, held: Held, path: list[int], commit: int) -> list[int]:
        """The path, and often a part of the tree below its committed nodes."""
        end, nodes = (path[commit - 1] if commit else ROOT), list(path)
        for node, above in enumerate(held.parents):
            hangs = above == end or above in nodes[commit:]
            if node not in nodes and hangs and self.rng.random() < 0.5:
                nodes = sorted([*nodes, node])
                self.others += 1
        return nodes

    def rewind(self) -> None:
        seq = self.rng.choice(list(self.held))
        held = self.held[seq]
        length = self.rng.randint(0, len(held.prefix))
        self.runner.rewind(seq, length)
        self.held[seq] = Held(held.prefix[:length])
        self.rewound += length < len(held.prefix)

    def check(self) -> None:
        """Compare the bookkeeping and the rows of all live nodes."""
        for seq, held in self.held.items():
            slots = self.runner.slots(seq)
            slots.check()
            assert (slots.prefix, slots.tokens, slots.parents) == (held.prefix, held.tokens, held.parents)
            for node, row in enumerate(held.rows):
                self.compare(self.subject.numbers(row), self.subject.truth(held.sequence(node)))

    def compare(self, got: list[float], expected: list[float]) -> None:
        self.compared += 1
        assert len(got) == len(expected) == self.runner.vocabulary
        worst = max(abs(a - b) for a, b in zip(got, expected, strict=True))
        assert worst <= self.subject.tolerance, f"a row is off by {worst}"

    def shuffled(self) -> list[int]:
        return self.rng.sample(list(self.held), len(self.held))

    def some_tokens(self, count: int) -> list[int]:
        # Few different ones: equal tokens on different lines are what a wrong cache confuses.
        return [self.rng.randrange(min(self.runner.vocabulary, 4)) for _ in range(count)]

    def some_nodes(self, seq: int) -> Feed:
        """A chain, several lanes or a tree, below any live nodes."""
        held = self.held[seq]
        room = min(TAIL - len(held.tokens), CONTEXT - len(held.prefix) - len(held.tokens))
        count = min(self.rng.choice([1, 1, 2, 3, 6]), room)
        start, chain = len(held.tokens), self.rng.random() < 0.4
        parents = [
            start + i - 1 if chain and (start + i) else self.rng.randint(ROOT, start + i - 1) for i in range(count)
        ]
        return Feed(seq, tuple(self.some_tokens(count)), tuple(parents))


@each_value
@pytest.mark.parametrize("seed", range(4))
def test_every_live_row_is_that_of_its_own_tokens(subject: Subject, seed: int) -> None:
    exercise = Exercise(subject, seed)
    exercise.run(60)
    assert exercise.compared > 300
    assert exercise.opened > 2
    assert exercise.others > 5


def test_a_sequence_opened_again_remembers_nothing(subject: Subject) -> None:
    runner = subject.runner
    for tokens in ((1, 2, 3), (3, 2)):
        runner.open(1, GREEDY)
        rows = runner.score([Feed(1, tokens, tuple(range(ROOT, len(tokens) - 1)))])[0]
        assert subject.numbers(rows[-1]) == pytest.approx(subject.truth(tokens), abs=max(subject.tolerance, 1e-12))
        runner.close(1)


def test_a_full_cache_is_refused_and_harms_nothing(subject: Subject) -> None:
    runner = subject.runner
    runner.open(1, GREEDY)
    runner.extend(1, [1, 2])
    with pytest.raises(CacheFull, match=r"Need \d+ cache slots, \d+ free"):
        runner.score([Feed(1, (1,) * (TAIL + 1), tuple(range(ROOT, TAIL)))])
    with pytest.raises(CacheFull):
        runner.extend(1, [1] * (CONTEXT + TAIL))
    assert runner.slots(1).sequence(ROOT) == [1, 2]
    row = runner.score([Feed(1, (3,), (ROOT,))])[0][0]
    assert subject.numbers(row) == pytest.approx(subject.truth((1, 2, 3)), abs=max(subject.tolerance, 1e-12))


def test_misuse_is_refused_and_harms_nothing(subject: Subject) -> None:
    runner = subject.runner
    runner.open(1, GREEDY)
    runner.score([Feed(1, (1, 2), (ROOT, ROOT))])
    with pytest.raises(ValueError, match="extend needs an empty tail"):
        runner.extend(1, [1])
    with pytest.raises((ValueError, IndexError)):  # a parent that does not exist
        runner.score([Feed(1, (1,), (7,))])
    with pytest.raises(ValueError, match="no child"):
        runner.keep(1, [0, 1], 1)
    row = runner.score([Feed(1, (3,), (1,))])[0][0]
    assert subject.numbers(row) == pytest.approx(subject.truth((2, 3)), abs=max(subject.tolerance, 1e-12))


def test_a_sequence_not_open_has_no_slots(subject: Subject) -> None:
    with pytest.raises(KeyError):
        subject.runner.slots(5)


class MovesNothing(ToyRunner):
    """Renumbers a kept path without moving its states."""

    def _keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        states = self._states[seq].copy()
        super()._keep(seq, nodes, commit)
        self._states[seq][:] = states[: len(self._states[seq])]


class SeesTheNodeBefore(ToyRunner):
    """Masks by KV slot rather than by ancestry."""

    def _feed(self, item: Feed) -> list[Logits]:
        states, start = self._states[item.seq], len(self._states[item.seq])
        self.slots(item.seq).grow(item.tokens, item.parents)
        for token in item.tokens:
            states.append(self.law.step(states[-1] if states else START, token))
        return [self.law.logits(state) for state in states[start:]]


class CommitsOneLess(ToyRunner):
    """Commits a node too few."""

    def _keep(self, seq: int, nodes: Sequence[int], commit: int) -> None:
        super()._keep(seq, nodes, max(commit - 1, 0))


class ReusesItsRows(ToyRunner):
    """Hands out the same buffer at each call, as a captured graph would."""

    def __init__(self, law: ToyLaw, context_length: int, tail: int) -> None:
        super().__init__(law, context_length, tail)
        self.buffer = [[0.0] * law.vocabulary for _ in range(3 * tail)]

    def _score(self, work: Sequence[Feed]) -> list[list[Logits]]:
        rows = iter(self.buffer)
        out: list[list[Any]] = []
        for made in super()._score(work):
            out.append([next(rows) for _ in made])
            for row, values in zip(out[-1], made, strict=True):
                row[:] = values
        return out


class LosesTheSecondSequence(ToyRunner):
    """Mixes up the sequences of one call."""

    def _score(self, work: Sequence[Feed]) -> list[list[Logits]]:
        rows = super()._score(work)
        return [rows[0], *([rows[0][0]] * len(more) for more in rows[1:])]


class ForgetsToReset(ToyRunner):
    """Opens a sequence on the memory of another and reads from it."""

    def _open(self, seq: int) -> None:
        super()._open(seq)
        self._states[seq] = [7]


@pytest.mark.parametrize(
    "fault", [MovesNothing, SeesTheNodeBefore, CommitsOneLess, ReusesItsRows, LosesTheSecondSequence, ForgetsToReset]
)
def test_a_faulty_runner_breaks_the_contract(fault: type[ToyRunner]) -> None:
    law = ToyLaw(vocabulary=9, sharpness=2.0)
    faulty = Subject(fault(law, CONTEXT, TAIL), lambda tokens: list(law.logits_of(tokens)), 0.0)
    with pytest.raises(AssertionError):
        Exercise(faulty, 0).run(60)
