"""A GPU's runner under a grammar, here on the CPU: plain decoding gets its masks late, other fast paths stay away."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.core.grammar import Constraint, Guide, allowed_by
from specbranch.core.loop import Loop, RoundLimits
from specbranch.core.methods import METHODS
from specbranch.core.orders import Context, Orders, Reports
from specbranch.core.request import Request, Spot
from specbranch.core.runner import NO_MASKS, Done, Feed, Growing, Hear, Lanes, PlainStep, VerifyWork
from specbranch.core.session import Session
from specbranch.core.trees import Tree
from specbranch.errors import BadParameter
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.streams import Streams
from specbranch.exec.verifier import Verifier
from specbranch.models.gpu import asking
from specbranch.models.gpu.decode_rows import DecodeRows
from specbranch.models.gpu.plain_decode import Texts
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.gpu.shaped_decode import Scored, ShapedSampler
from specbranch.models.gpu.step import GpuStep
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from tiers import each_value, tiered
from tiny_models import SHAPE, saved, some_tokens, tiny
from toy_grammar import ToyGrammar, ToyParser
from toybench import PROFILE, Timeless, run_out

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, CONTEXT, END = int(SHAPE["vocab_size"]), 300, 1


class Slow(GpuRunner):
    """Notes what its fast paths did for sequences with an even number, which have a grammar."""

    fast: list[str]
    joined: list[int]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.fast, self.joined = [], []
        self.decoded: set[int] = set()  # sequences in steps of plain decoding, with and without a grammar
        self.beside = 0  # verify orders in a step of plain decoding

    def saw(self, what: str, seqs: Collection[int]) -> None:
        self.fast += [what for seq in seqs if seq % 2 == 0]

    def grow(self, growing: Growing, done: Done) -> Tree | None:
        grown = super().grow(growing, done)
        self.saw("grow", [growing.seq] if grown is not None else [])
        return grown

    def run_ahead(self, lanes: Lanes, hear: Hear) -> int:
        steps = super().run_ahead(lanes, hear)
        self.saw("run ahead", [lanes.feed.seq] if steps else [])
        return steps

    def read_ahead(self, feed: Feed) -> bool:
        found = super().read_ahead(feed)
        self.saw("read ahead", [feed.seq] if found else [])
        return found

    def decode(
        self,
        texts: Texts,
        going_on: Collection[int],
        verify: VerifyWork | None = None,
        masks: Mapping[int, Guide] = NO_MASKS,
    ) -> PlainStep | None:
        self.decoded |= set(texts)
        self.beside += len(verify.trials) if verify is not None else 0
        return super().decode(texts, going_on, verify, masks)

    def join(self, seq: int, token: int) -> None:
        self.saw("join", [seq])
        self.joined.append(seq)
        super().join(seq, token)


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder: Path = tmp_path_factory.mktemp("pair")
    model = tiny("llama")
    saved(model, folder / "target")
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * parameter.data.std() * 0.12)
    saved(model, folder / "draft")
    found = [
        load_native(folder / name, context_length=CONTEXT, dtype="float64").decoder for name in ("target", "draft")
    ]
    return found[0], found[1]


def session_of(number: int, params: SamplingParams, ends: float = 0.1) -> Session:
    """A session; those with an even number follow a grammar; `ends`: how often it may end."""
    prompt = some_tokens(5 + 20 * (number % 3), seed=number)
    request = Request(params, number, len(prompt), eos_ids=(END,))
    if number % 2 == 0:
        parser = partial(ToyParser, ToyGrammar(number, VOCABULARY, force=0.3, end=ends))
        request = Request(
            params, number, len(prompt), eos_ids=(END,), constraint=Constraint(parser, request.ending_ids)
        )
    return Session(number, prompt, request, 250)


def run(works: Serial, method: str, sessions: list[Session], budget: int | None = None) -> list[Session]:
    limits = (
        None if budget is None else RoundLimits(prefill_chunk=works.target.runner.prefill_chunk, prompt_tokens=budget)
    )
    loop = Loop(works) if limits is None else Loop(works, limits=limits)
    for session in sessions:
        experience = Timeless(PROFILE) if works.draft else Experience(has_draft=False)
        config = SpeculativeConfig(method=method, num_speculative_tokens=4, ngram_min=1)
        loop.join(session, METHODS[method].start(session, config, experience))
    run_out(loop)
    for session in sessions:
        if session.error:
            raise session.error
        session.stats.check()
    return sessions


def reference(decoders: tuple[Any, Any], number: int, params: SamplingParams) -> Session:
    works = Serial(Verifier(NativeRunner(decoders[0], CONTEXT)))
    return run(works, "autoregressive", [session_of(number, params)])[0]


@each_value
@pytest.mark.parametrize("kind", [Serial, Streams])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_answer_of_plain_decoding(
    method: str, temperature: float, kind: type[Serial], decoders: tuple[Any, Any]
) -> None:
    target, draft = Slow(decoders[0], CONTEXT), Slow(decoders[1], CONTEXT)
    works = kind(Verifier(target), Drafter(draft))
    for number in (2, 4):
        params = SamplingParams(temperature=temperature, max_tokens=24, logprobs=1 if number == 4 else None)
        found, expected = run(works, method, [session_of(number, params)])[0], reference(decoders, number, params)
        assert (found.tokens, found.finished) == (expected.tokens, expected.finished)
        for mine, theirs in zip(found.logprobs, expected.logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-6)
    assert target.fast == draft.fast == []
    assert (target.decoded == {2, 4}) is (method == "autoregressive"), "plain decoding goes on under a grammar"


@pytest.mark.parametrize("method", tiered(["autoregressive", "specbranch", "lookup"], "specbranch".__eq__))
def test_a_batch_with_and_without_grammars_gives_what_each_gives_alone(
    method: str, decoders: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify orders with masks go beside the plain steps of others, which are sampled in the graph."""
    monkeypatch.setattr(GpuStep, "takes_chunks", True)
    params = SamplingParams(temperature=0.8, max_tokens=20)
    target = Slow(decoders[0], CONTEXT)
    works = Streams(Verifier(target))
    sessions = run(works, method, [session_of(number, params) for number in (1, 2, 3, 4, 5, 7, 9, 11)], budget=64)
    for session in sessions:
        expected = reference(decoders, session.number, params)
        assert (session.tokens, session.finished) == (expected.tokens, expected.finished), session.number
    assert target.fast == []
    if method == "autoregressive":
        assert target.decoded >= {2, 4}
    assert target.beside > 5 or method != "specbranch", "verify orders with masks go beside the plain steps of others"


def test_a_prompt_with_a_grammar_does_not_join_the_step_that_others_launch_ahead(
    decoders: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuStep, "takes_chunks", True)
    params = SamplingParams(temperature=0.8, max_tokens=40)
    target = Slow(decoders[0], CONTEXT)
    limits = RoundLimits(prefill_chunk=target.prefill_chunk, prompt_tokens=48)
    loop, late = Loop(Streams(Verifier(target)), limits=limits), [session_of(number, params) for number in (7, 8)]
    config = SpeculativeConfig(method="autoregressive")

    def join(session: Session) -> None:
        loop.join(session, METHODS["autoregressive"].start(session, config, Experience(has_draft=False)))

    join(session_of(1, params))
    for session in late:
        for _ in range(5):
            loop.step()
        join(session)
    run_out(loop)
    assert target.joined == [7], "the prompt without a grammar joins"
    for session in late:
        expected = reference(decoders, session.number, params)
        assert (session.tokens, session.finished) == (expected.tokens, expected.finished), session.number


def test_every_gate_refuses_a_request_with_a_grammar(decoders: tuple[Any, Any]) -> None:
    """Also where only its parameters say so, as in a child process, which has no parser."""
    runner = GpuRunner(decoders[0], CONTEXT)
    worker = Verifier(runner)
    for number, params in enumerate((SamplingParams(), SamplingParams(regex="a+"), SamplingParams(choice=["a"]))):
        request = Request(params, 1, 3)
        worker.open(number, request)
        runner.extend(number, (1, 2))
        free = not params.is_constrained
        assert runner.decodes(number, 3) and worker.decodes(number, 3), "the host brings the masks"
        assert asking.is_chosen_in_graph(Spot(request, 3, list)) is free
        receiver = worker.receiver(number, Context(2, (3,)), lambda: None)  # type: ignore[arg-type,return-value]
        assert (receiver is not None) is free


def test_watchers_of_plain_rounds_see_what_a_grammar_allows(decoders: tuple[Any, Any]) -> None:
    target, params = Slow(decoders[0], CONTEXT), SamplingParams(temperature=0.8, max_tokens=24)
    session, allowed = session_of(2, params), list[bool]()

    def note(orders: Orders, reports: Reports, added: int) -> None:
        assert orders.verify is not None and reports.verdict is not None
        given = allowed_by(orders.verify.allowed[0]) if orders.verify.allowed is not None else None
        allowed.append(given is not None and reports.verdict.token in given)

    session.on_round = note
    run(Serial(Verifier(target)), "autoregressive", [session])
    assert allowed and all(allowed) and target.decoded == {2}


def test_a_grammar_without_a_way_on_fails_its_request_alone(decoders: tuple[Any, Any]) -> None:
    """The toy's parser dies after five tokens; its neighbour decodes on."""

    class Dying(ToyParser):
        taken = 0

        def consume(self, token: int) -> None:
            self.taken += 1
            super().consume(token)

        def rollback(self, count: int) -> None:
            self.taken -= count
            super().rollback(count)

        def mask(self) -> bytes:
            return bytes(len(super().mask())) if self.taken >= 5 else super().mask()

        def accepts(self) -> bool:
            return False

    params = SamplingParams(max_tokens=20)
    prompt = some_tokens(8, seed=3)
    parser = partial(Dying, ToyGrammar(2, VOCABULARY, force=0.0, end=0.0))
    request = Request(params, 2, len(prompt), eos_ids=(END,), constraint=Constraint(parser, frozenset((END,))))
    dying, other = Session(2, prompt, request, 250), session_of(1, params)
    loop = Loop(Serial(Verifier(GpuRunner(decoders[0], CONTEXT))))
    for session in (dying, other):
        config = SpeculativeConfig(method="autoregressive")
        loop.join(session, METHODS["autoregressive"].start(session, config, Experience(has_draft=False)))
    run_out(loop)
    assert isinstance(dying.error, BadParameter) and len(dying.output) == 5
    assert other.tokens == reference(decoders, 1, params).tokens


class Watched:
    """Notes for each mask whether a device was computing: it was launched, and not waited for since."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *runners: GpuRunner) -> None:
        self.running, self.meanwhile = set[int](), list[bool]()
        for number, runner in enumerate(runners):
            self._watch(number, runner, monkeypatch)
        mask = ToyParser.mask

        def noted(parser: ToyParser) -> bytes:
            self.meanwhile.append(bool(self.running))
            return mask(parser)

        monkeypatch.setattr(ToyParser, "mask", noted)

    def _watch(self, number: int, runner: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        run, read = runner.graphs.run_brought, runner.transfer._read

        def launched(*given: Any, **named: Any) -> Any:
            self.running.add(number)
            return run(*given, **named)

        def waited(*given: Any) -> Any:
            self.running.discard(number)
            return read(*given)

        monkeypatch.setattr(runner.graphs, "run_brought", launched)
        monkeypatch.setattr(runner.transfer, "_read", waited)


@pytest.mark.parametrize("kind", [Serial, Streams])
@pytest.mark.parametrize("method", ["specbranch", "tree", "speculative", "pearl", "lookup", "lookahead"])
def test_masks_are_made_while_a_device_computes(
    method: str, kind: type[Serial], decoders: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all nodes of a verify, and those that the draft proposes by."""
    target, draft = GpuRunner(decoders[0], CONTEXT), GpuRunner(decoders[1], CONTEXT)
    watched = Watched(monkeypatch, target, draft)
    params = SamplingParams(temperature=0.8, max_tokens=30)
    session = session_of(2, params, ends=0.0)
    run(kind(Verifier(target), Drafter(draft)), method, [session])
    assert len(watched.meanwhile) > 10 and all(watched.meanwhile), watched.meanwhile.count(False)


def test_one_grammar_in_a_batch_leaves_the_other_rows_in_the_graph(
    decoders: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows are sampled behind the graph where their own parameters want it, and for no other row's sake."""
    taken, behind = ShapedSampler.taken, list[tuple[int, int]]()

    def noted(self: ShapedSampler, rows: DecodeRows, *given: Any) -> Scored:
        scored = taken(self, rows, *given)
        behind.append((len(rows), len(scored.logits)))
        return scored

    monkeypatch.setattr(GpuStep, "takes_chunks", True)
    monkeypatch.setattr(ShapedSampler, "taken", noted)
    params = SamplingParams(temperature=0.8, max_tokens=30)
    penalised = SamplingParams(temperature=0.8, max_tokens=30, repetition_penalty=1.3, logprobs=2, min_tokens=9)
    sessions = [session_of(number, penalised if number == 5 else params) for number in (1, 2, 3, 5, 7)]
    run(Streams(Verifier(GpuRunner(decoders[0], CONTEXT))), "autoregressive", sessions, budget=64)
    for session in sessions:
        expected = reference(decoders, session.number, session.request.params)
        assert (session.tokens, session.finished) == (expected.tokens, expected.finished), session.number
        for mine, theirs in zip(session.logprobs, expected.logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-6)
    assert (5, 2) in behind and len(behind) > 10 and max(count for _, count in behind) == 2
    assert "failed" not in caplog.text, "a round was ordered session by session after all"


@pytest.mark.parametrize("kind", [Serial, Streams])
@pytest.mark.parametrize("method", ["autoregressive", "specbranch", "speculative", "lookup"])
def test_a_parser_that_fails_ends_its_request_alone(method: str, kind: type[Serial], decoders: tuple[Any, Any]) -> None:
    class Broken(ToyParser):
        def mask(self) -> bytes:
            if len(self.tokens) >= 5:
                raise RuntimeError("the parser broke")
            return super().mask()

    params, works = SamplingParams(max_tokens=20), kind(*workers(decoders))
    prompt = some_tokens(8, seed=3)
    parser = partial(Broken, ToyGrammar(2, VOCABULARY, force=0.0, end=0.0, over=0.0))
    request = Request(params, 2, len(prompt), eos_ids=(END,), constraint=Constraint(parser, frozenset((END,))))
    broken, other = Session(2, prompt, request, 250), session_of(1, params)
    with pytest.raises(RuntimeError, match="the parser broke"):
        run(works, method, [broken, other])
    assert 0 < len(broken.output) <= 5, "a draft may have asked for the mask that breaks it before the target does"
    assert broken.output == reference_of(decoders, broken)
    assert other.tokens == reference(decoders, 1, params).tokens and other.error is None


def workers(decoders: tuple[Any, Any]) -> tuple[Verifier, Drafter]:
    return Verifier(GpuRunner(decoders[0], CONTEXT)), Drafter(GpuRunner(decoders[1], CONTEXT))


def reference_of(decoders: tuple[Any, Any], broken: Session) -> list[int]:
    """The answer of a request whose parser breaks, as far as a sound one gives the same."""
    parser = partial(ToyParser, ToyGrammar(2, VOCABULARY, force=0.0, end=0.0, over=0.0))
    request = replace(broken.request, constraint=Constraint(parser, frozenset((END,))))
    sound = Session(2, broken.tokens[: request.prompt_length], request, 250)
    run(Serial(Verifier(NativeRunner(decoders[0], CONTEXT))), "autoregressive", [sound])
    return sound.output[: len(broken.output)]
