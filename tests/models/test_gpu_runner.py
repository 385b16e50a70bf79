"""A GPU's runner, here on the CPU: it answers as the reference does, with one copy up and one read a question."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from counting_runner import CountingRunner
from specbranch.config import SamplingParams
from specbranch.core.orders import Aside, Context, Sparse, Verify
from specbranch.core.pages import Pool
from specbranch.core.request import Request
from specbranch.core.runner import Ask, Feed, Head, Judged, PadsForwards, Proposal, Runner, Trial, Verdicts
from specbranch.core.slots import ROOT
from specbranch.exec.verifier import Verifier
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.step_rows import rows_of_chunk
from specbranch.models.forward.transfer import BUFFERS, Transfer
from specbranch.models.gpu.layout import MOST_STEP_ROWS, Choosing, bucket_of
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from test_identity_models import SHAPINGS, compare
from tiers import each_value, tiered
from tiny_models import planted, saved, some_tokens, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 131
REQUESTS = {
    "greedy": Request(SamplingParams(), 3, 4),
    "match": Request(SamplingParams(temperature=0.9), 3, 4),
    "shaped": Request(SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, logit_bias={5: 2.0}), 3, 4),
    "ratio": Request(SamplingParams(temperature=1.3), 3, 4, rule="ratio"),
    "ratio, shaped": Request(SamplingParams(temperature=1.3, top_k=40, presence_penalty=0.5), 3, 4, rule="ratio"),
    "foretold": Request(SamplingParams(temperature=0.7, logprobs=3), 3, 4, wants_forecast=True),
}


def on_graphs(path: Path, *, context_length: int, device: str, dtype: torch.dtype) -> Runner:
    plain = load_native(path, context_length=context_length, device=device, dtype=dtype)
    return GpuRunner(plain.decoder, context_length)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_native(
        saved(tiny("llama"), tmp_path_factory.mktemp("llama")), context_length=600, dtype="float64"
    ).decoder


@pytest.fixture
def both(decoder: Any) -> tuple[NativeRunner, GpuRunner]:
    return NativeRunner(decoder, 600), GpuRunner(decoder, 600)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny("llama")
    saved(target, folder / "target")
    torch.manual_seed(5)
    for parameter in target.parameters():
        parameter.data.add_(torch.randn_like(parameter) * parameter.data.std() * 0.12)
    return folder / "target", saved(target, folder / "draft")


@pytest.mark.slow
@pytest.mark.parametrize("shaping", tiered(("greedy", "everything"), "everything".__eq__))
def test_every_method_gives_autoregressive_tokens(shaping: str, pair: tuple[Path, Path]) -> None:
    sessions = compare(on_graphs, *pair, SHAPINGS[shaping], runs=2 if shaping == "greedy" else 1)
    assert sum(session.stats.accepted for session in sessions.values()) > 0
    assert sum(session.stats.rejected for session in sessions.values()) > 0


def sparse(rng: random.Random, token: int) -> Sparse:
    """A law of a few tokens, one of them given."""
    ids = list(dict.fromkeys([token, *rng.sample(range(VOCABULARY), 5)]))
    weights = [rng.random() for _ in ids]
    ranked = sorted(zip(ids, weights, strict=True), key=lambda one: -one[1])
    return Sparse(tuple(i for i, _ in ranked), tuple(w / sum(weights) for _, w in ranked))


def tree(rng: random.Random, on: Sequence[int], likely: Sequence[int], drawn: bool) -> Verify:
    """A tree of tokens, many of them likely, equal siblings among them; by the ratio rule some were drawn."""
    count = rng.choice((0, 1, 3, 8, 14))
    parents = tuple(rng.randint(ROOT, node - 1) if rng.random() < 0.5 else node - 1 for node in range(count))
    tokens = tuple(rng.choice(likely) if rng.random() < 0.8 else rng.randrange(VOCABULARY) for _ in range(count))
    q = tuple(sparse(rng, token) if rng.random() < 0.6 else None for token in tokens) if drawn else None
    return Verify(Context(0, tuple(on)), tokens, parents, q)


def trial_of(
    rng: random.Random, seq: int, on: Sequence[int], request: Request, likely: Sequence[int]
) -> tuple[Feed, Trial]:
    order = tree(rng, on, likely, request.by_ratio)
    parents = tuple(1 + order.parent(node) for node in range(len(order.tokens)))
    head = (
        Head(rng.randint(ROOT, len(order.tokens) - 1), (token := rng.choice(likely)), sparse(rng, token))
        if rng.random() < 0.5
        else None
    )
    allowed = tuple(
        frozenset(rng.sample(range(VOCABULARY), 60)) if rng.random() < 0.5 else None
        for _ in range(len(order.tokens) + 1)
    )
    trial = Trial(seq, order, 0, tuple(range(1, len(order.tokens) + 1)), head if request.by_ratio else None)
    trial = replace(
        trial,
        logprobs=request.params.logprobs,
        wants_forecast=request.wants_forecast,
        allowed=allowed if rng.random() < 0.3 else None,
    )
    return Feed(seq, (on[-1], *order.tokens), (ROOT, *parents)), trial


def likely_after(runner: NativeRunner, text: Sequence[int], request: Request) -> list[int]:
    """Tokens that the target may say after a text."""
    runner.open(99, replace(request, rule="match"))
    runner.extend(99, text[:-1])
    asked = runner.propose([Feed(99, (text[-1],), (ROOT,))], [Ask(99, 0, 4, "top")])[0].tokens
    runner.close(99)
    return list(asked)


@pytest.mark.parametrize("name", tiered((*REQUESTS, "mixed"), "mixed".__eq__))
def test_verdicts_are_those_of_the_reference(name: str, both: tuple[NativeRunner, GpuRunner]) -> None:
    rng, taken, heads = random.Random(name), 0, 0
    for number in range(20):
        requests = [
            rng.choice(list(REQUESTS.values())) if name == "mixed" else REQUESTS[name]
            for _ in range(rng.choice((1, 1, 3)))
        ]
        requests = [replace(request, seed=number) for request in requests]
        texts = [some_tokens(rng.choice((3, 40, 300)), seed=rng.randrange(1000)) for _ in requests]
        likely = [likely_after(both[0], text, request) for text, request in zip(texts, requests, strict=True)]
        made = [trial_of(rng, seq, text, requests[seq], likely[seq]) for seq, text in enumerate(texts)]
        found = [verdicts_of(runner, requests, texts, made) for runner in both]
        for trial, one, other in zip((trial for _, trial in made), *found, strict=True):
            assert_same(one, other)
            taken += len(one.path)
            heads += trial.head is not None and one.token == trial.head.token
    assert taken > 4, "nothing was ever taken"
    assert heads > 1 or "ratio" not in name, "no head was ever taken"


@pytest.mark.parametrize("name", tiered((*REQUESTS, "mixed"), ("ratio", "shaped", "mixed").__contains__))
def test_scores_of_rows_aside_are_those_of_the_reference(name: str, both: tuple[NativeRunner, GpuRunner]) -> None:
    rng, verifiers = random.Random(name), [Verifier(runner) for runner in both]
    for number in range(4):
        orders = {}
        for seq in range(rng.choice((1, 3))):
            request = replace(
                rng.choice(list(REQUESTS.values())) if name == "mixed" else REQUESTS[name],
                seed=number,
                wants_forecast=False,
            )
            text = some_tokens(rng.choice((4, 40, 300)), seed=rng.randrange(1000))
            shape = tree(rng, text, range(VOCABULARY), drawn=False)
            aside = Aside(
                shape.tokens, shape.parents or (), tuple(rng.sample(range(len(shape.tokens)), len(shape.tokens) // 2))
            )
            orders[seq] = replace(tree(rng, text, likely_after(both[0], text, request), request.by_ratio), aside=aside)
            for verifier in verifiers:
                verifier.open(seq, replace(request, prompt_length=len(text)))
        found = [verifier.judge(verifier.score(orders, {})[0], {}) for verifier in verifiers]
        assert [(v.path, v.token, v.guessed) for v in found[0].values()] == [
            (v.path, v.token, v.guessed) for v in found[1].values()
        ]
        assert [len(v.guessed) for v in found[1].values()] == [
            len(order.aside.guessed) for order in orders.values() if order.aside
        ]
        for seq, verifier in itertools.product(orders, verifiers):
            verifier.free(seq)
            verifier.runner.check()


def network(seen: torch.Tensor) -> torch.Tensor:
    return seen[:, :7].tanh() + seen.mean(-1, keepdim=True)


def verdicts_of(
    runner: NativeRunner,
    requests: Sequence[Request],
    texts: Sequence[Sequence[int]],
    made: Sequence[tuple[Feed, Trial]],
) -> list[Judged]:
    runner.probe(2, network)
    for seq, (request, text) in enumerate(zip(requests, texts, strict=True)):
        runner.open(seq, request)
        runner.extend(seq, text[:-1])
    judged = runner.verify([feed for feed, _ in made], [trial for _, trial in made])()
    for seq in range(len(requests)):
        runner.close(seq)
    runner.check()
    return judged


def assert_same(one: Judged, other: Judged) -> None:
    assert (one.path, one.token) == (other.path, other.token)
    assert (one.said is None) == (other.said is None) and one.said == pytest.approx(other.said, abs=1e-9)
    assert (one.logprobs is None) == (other.logprobs is None)
    for a, b in zip(one.logprobs or (), other.logprobs or (), strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-5) and [t for t, _ in a.top] == [t for t, _ in b.top]


@pytest.mark.parametrize("name", ["greedy", "match", "shaped", "ratio"])
def test_proposals_are_those_of_the_reference_also_of_nodes_read_before(
    name: str, both: tuple[NativeRunner, GpuRunner]
) -> None:
    text = some_tokens(40)
    feeds = [Feed(0, (text[-1], 3, 4), (ROOT, 0, 0)), Feed(0, (5, 6), (1, 3))]
    asks = [
        [Ask(0, 0), Ask(0, 2, 3, "top")],
        [Ask(0, 4, 2), Ask(0, 0, 5, "top", "entropy"), Ask(0, 3, allowed=frozenset((1, 2, 99)))],
    ]
    answers: list[list[Proposal]] = []
    for runner in both:
        runner.open(0, REQUESTS[name])
        runner.extend(0, text[:-1])
        answers.append(
            [answer for feed, some in zip(feeds, asks, strict=True) for answer in runner.propose([feed], some)]
        )
    for one, other in zip(*answers, strict=True):
        assert one.tokens == other.tokens and one.confidence == pytest.approx(other.confidence, abs=1e-6)
    assert set(answers[0][-1].tokens) <= {1, 2, 99}


class Counting(CountingRunner):
    """Notes how often each call of a kind crossed to the device and back."""

    def crossing(self, kind: str, before: tuple[int, int]) -> None:
        self.__dict__.setdefault("crossed", []).append(
            (kind, self.transfer.copies - before[0], self.transfer.reads - before[1])
        )

    def propose(self, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        before = self.transfer.copies, self.transfer.reads
        answers = super().propose(work, asks)
        self.crossing("propose" if asks else "read", before)
        return answers

    def verify(self, work: Sequence[Feed], trials: Sequence[Trial]) -> Verdicts:
        before, right = (self.transfer.copies, self.transfer.reads), self.received_right
        verdicts = super().verify(work, trials)
        before = (
            before[0],
            before[1] + self.received_right - right,
        )  # what was launched with a tree is compared with the order, which came long before
        assert self.transfer.reads == before[1], "a verification waited before its verdicts were called for"

        def counted() -> list[Judged]:
            found = verdicts()
            self.crossing("verify", before)
            return found

        return Verdicts(counted)


@pytest.mark.slow
@pytest.mark.parametrize("shaping", tiered(("greedy", "hot", "everything"), "hot".__eq__))
def test_a_question_is_one_copy_up_and_one_read(shaping: str, pair: tuple[Path, Path]) -> None:
    runners: list[Counting] = []

    def counting(path: Path, *, context_length: int, device: str, dtype: torch.dtype) -> Runner:
        runners.append(Counting(load_native(path, context_length=context_length, dtype=dtype).decoder, context_length))
        return runners[-1]

    compare(counting, *pair, SHAPINGS[shaping], runs=1)
    crossed = [one for runner in runners for one in runner.__dict__["crossed"]]
    assert {kind for kind, _, _ in crossed} >= {"propose", "verify"} and len(crossed) > 50
    # the process executor aside, verdicts come of the same call; between the two halves of one the other model may have
    # been asked
    behind = shaping == "everything"  # then the sampling parameters come while the forward runs, in a copy of their own
    assert {(copies, reads) for kind, copies, reads in crossed if kind == "propose"} <= {(1 + behind, 1), (behind, 1)}
    verified = [(copies, reads) for kind, copies, reads in crossed if kind == "verify"]
    # plain decoding starts its next step with the one before: two copies at first, none at the end; a prompt that was
    # put off is one more
    assert {reads for _, reads in verified} == {1} and {copies for copies, _ in verified} <= {0, 1, 2, 3}
    assert sum(copies for copies, _ in verified) <= (1.05 + behind) * len(verified)


@each_value
@pytest.mark.parametrize("prefix", [5, 40, 230, 250, 256, 300])
@pytest.mark.parametrize("kind", ["plain", "graphs"])
def test_a_node_behind_siblings_scores_as_in_plain_decoding(
    kind: str, prefix: int, both: tuple[NativeRunner, GpuRunner]
) -> None:
    runner, rng = both[kind == "graphs"], random.Random(prefix)
    text, line = some_tokens(prefix), some_tokens(30, seed=9)
    alone: list[torch.Tensor] = []
    runner.open(0, REQUESTS["greedy"])
    runner.extend(0, text)
    for token in line:
        alone.append(runner.score([Feed(0, (token,), (ROOT,))])[0][0].logits)
        runner.keep(0, (0,), 1)
    runner.rewind(0, prefix)
    feed, nodes = planted(rng, line)
    rows = runner.score([feed])[0]
    for node, expected in zip(nodes, alone, strict=True):
        torch.testing.assert_close(rows[node].logits, expected, rtol=0, atol=1e-11)
    runner.keep(0, nodes[:20], 20)  # moved to their own slots: what follows is the same again
    again = runner.score([Feed(0, tuple(line[20:]), tuple(range(ROOT, 9)))])[0]
    for row, expected in zip(again, alone[20:], strict=True):
        torch.testing.assert_close(row.logits, expected, rtol=0, atol=1e-11)


# --- what a device would show that a CPU hides ---


class Ring(Transfer):
    """Brings arrays up as to a GPU: into buffers that are used again, after BUFFERS copies."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.buffers = [np.full(1 << 20, 255, dtype=np.uint8) for _ in range(BUFFERS)]

    def up(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        self.copies += bool(arrays)
        buffer = self.buffers[self.copies % BUFFERS]
        buffer.fill(255)
        found, start = {}, 0
        for name, array in arrays.items():
            view = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            view[...] = array
            found[name], start = torch.from_numpy(view), -(-(start + array.nbytes) // 16) * 16
        return found


def ringed(decoder: Any) -> GpuRunner:
    runner = GpuRunner(decoder, 600)
    runner.transfer = runner.launcher.transfer = Ring()
    runner.limit(VOCABULARY)
    return runner


@pytest.mark.slow
@pytest.mark.parametrize("name", tiered(("shaped", "ratio"), "shaped".__eq__))
def test_answers_are_right_where_buffers_are_used_again(name: str, decoder: Any) -> None:
    """More rows than five steps take, the last ones with larger tables."""
    texts = [some_tokens(4, seed=seq) for seq in range(5)] + [some_tokens(500, seed=seq) for seq in range(5, 16)]
    feeds = [
        Feed(seq, tuple(some_tokens(120 if seq < 5 else 6, seed=seq)), tuple(range(ROOT, 119 if seq < 5 else 5)))
        for seq in range(16)
    ]
    asks = [Ask(seq, len(feed.tokens) - 1, 3) for seq, feed in enumerate(feeds)]
    answers = []
    for runner in (NativeRunner(decoder, 600), ringed(decoder)):
        for seq, text in enumerate(texts):
            runner.open(seq, REQUESTS[name])
            runner.extend(seq, text)
        answers.append(runner.propose(feeds, asks))
    assert [answer.tokens for answer in answers[0]] == [answer.tokens for answer in answers[1]]


class Interrupted(Transfer):
    """Is interrupted in a copy, once."""

    left = -1

    def up(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        self.count()
        return super().up(arrays)

    def into(self, there: torch.Tensor, array: np.ndarray) -> None:
        self.count()
        super().into(there, array)

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("logprobs", [None, 1])
def test_an_interrupt_loses_no_move(logprobs: int | None, decoder: Any) -> None:
    runner, plain = GpuRunner(decoder, 600), NativeRunner(decoder, 600)
    runner.transfer = runner.launcher.transfer = interrupted = Interrupted(torch.device("cpu"))
    text, verifier = some_tokens(40), Verifier(runner)
    verifier.open(0, Request(SamplingParams(temperature=0.0, logprobs=logprobs), 0, len(text)))
    runner.extend(0, text[:-1])
    runner.feed([Feed(0, (text[-1], 9, 7), (ROOT, 0, 0))])
    runner.keep(0, (0, 2), 2)  # the second sibling moves to the slot of the first
    order = Verify(Context(0, (*text, 7, 5)))
    interrupted.left = 1
    with pytest.raises(KeyboardInterrupt):
        verifier.score({0: order}, {})
    scored, _ = verifier.score({0: order}, {})
    verdict = verifier.judge(scored, {})[0]
    runner.check()
    plain.open(0, REQUESTS["greedy"])
    plain.extend(0, text)
    expected = [row.logits for row in plain.score([Feed(0, (7, 5, 3), (ROOT, 0, 1))])[0]]
    assert verdict.token == int(expected[1].argmax())
    after = runner.score([Feed(0, (3,), (ROOT,))])[0][0]
    torch.testing.assert_close(after.logits, expected[2], rtol=0, atol=1e-11)


def test_another_session_takes_no_signal_away(both: tuple[NativeRunner, GpuRunner]) -> None:
    request, text = replace(REQUESTS["foretold"], wants_forecast=True), some_tokens(20)
    found = []
    for runner in both:
        runner.probe(2, network)
        for seq in range(2):
            runner.open(seq, replace(request, wants_forecast=seq == 0))
            runner.extend(seq, text[:-1])
        runner.feed([Feed(1, (text[-1],), (ROOT,))])  # read before anybody asked
        trials = [Trial(seq, Verify(Context(0, tuple(text))), 0, (), wants_forecast=seq == 0) for seq in range(2)]
        found.append([judged.said is not None for judged in runner.verify([Feed(0, (text[-1],), (ROOT,))], trials)()])
    assert found == [[True, False], [True, False]]


@pytest.mark.parametrize("how", ["extend", "feed"])
def test_a_fork_leaves_what_it_shares_as_it_was(how: str, both: tuple[NativeRunner, GpuRunner]) -> None:
    for runner in both:
        text = some_tokens(150)  # longer than what is shared: the fork writes where these lie
        for seq in range(2):
            runner.open(seq, REQUESTS["greedy"])
        runner.extend(0, text)
        held = runner.sequences[1]
        held.slots.extend(text[:100])
        held.table.pages = runner.sequences[0].table.fork(100).pages
        if how == "extend":
            runner.extend(1, some_tokens(200, seed=5))
        else:
            runner.feed([Feed(1, tuple(some_tokens(100, seed=5)), tuple(range(ROOT, 99)))])
        runner.check()
        runner.open(2, REQUESTS["greedy"])
        runner.extend(2, text)
        rows = [runner.score([Feed(seq, (3, 4), (ROOT, 0))])[0][1].logits for seq in (0, 2)]
        torch.testing.assert_close(*rows, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ["plain", "graphs"])
def test_a_call_that_fails_anywhere_leaves_pages_and_slots_in_order(
    kind: str, decoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = (NativeRunner if kind == "plain" else GpuRunner)(decoder, 600)
    runner.open(0, REQUESTS["greedy"])
    runner.extend(0, some_tokens(250))
    expected = runner.score([Feed(0, tuple(some_tokens(20)), tuple(range(ROOT, 19)))])[0][-1].logits
    runner.keep(0, (), 0)
    for name in ("take", "reach", *(("flat",) if kind == "plain" else ())):
        owner = Pool if name == "take" else Table
        real = getattr(owner, name)

        def failing(self: Any, *given: Any, real: Any = real) -> Any:
            real(self, *given)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, failing)
            runner.feed([Feed(0, tuple(some_tokens(20)), tuple(range(ROOT, 19)))])
        runner.check()
        assert not runner.slots(0).tokens
    again = runner.score([Feed(0, tuple(some_tokens(20)), tuple(range(ROOT, 19)))])[0][-1].logits
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-11)


def test_more_rows_than_a_step_has_are_chosen_in_parts(both: tuple[NativeRunner, GpuRunner]) -> None:
    """Rows behind the first part name no row of it as their parent."""
    answers, count = both[1].answers, MOST_STEP_ROWS + 90
    parent = Choosing._fields.index("parent")
    logits, choice = torch.randn(count, 300), torch.zeros(len(Choosing._fields), count, dtype=torch.int32)
    choice[parent] = torch.arange(count)
    alone = []
    for at in (0, MOST_STEP_ROWS):
        some = choice[:, at : at + MOST_STEP_ROWS].clone()
        some[parent] -= at
        alone += answers.picked(logits[at : at + MOST_STEP_ROWS], some).tolist()
    assert answers.picked(logits, choice).tolist() == alone


def test_a_runner_tells_what_a_step_is_padded_to(decoder: Any) -> None:
    runner = GpuRunner(decoder, 600)
    assert isinstance(runner, PadsForwards) and not isinstance(NativeRunner(decoder, 600), PadsForwards)
    table = Table(Pool(4), [0, 1, 2])
    for rows in (1, 2, 4, 5, 16, 17, 33, 100):
        step = bucket_of([rows_of_chunk(table, [1] * rows, 0)])
        assert runner.padded(rows) == step.rows


def test_a_runner_that_is_dropped_is_gone_at_once(decoder: Any) -> None:
    """It holds much memory, which must not wait for the garbage collector."""
    runner = GpuRunner(decoder, 600)
    runner.open(0, REQUESTS["greedy"])
    runner.extend(0, some_tokens(20))
    runner.propose([Feed(0, (3, 4), (ROOT, 0))], [Ask(0, 1)])
    runner.verify([Feed(0, (5,), (1,))], [Trial(0, Verify(Context(0, (*some_tokens(20), 3, 4)), (5,)), 1, (2,))])()
    runner.keep(0, (), 0)
    step = runner.decode({0: [*some_tokens(20), 3]}, {0})
    assert step is not None and step.sampled()
    held = weakref.ref(runner)
    gc.disable()
    try:
        del runner, step
        assert held() is None
    finally:
        gc.enable()
