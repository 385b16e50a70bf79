"""The streams executor over the native runners, here on the CPU: verdicts come late, and every method gives what
plain decoding gives."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from counting_runner import CountingRunner
from specbranch.config import Rule, SamplingParams, SpeculativeConfig
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.exec.drafter import Drafter
from specbranch.exec.serial import Serial
from specbranch.exec.streams import Streams
from specbranch.exec.verifier import Verifier
from specbranch.models.forward.transfer import Reading, Transfer
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from test_identity_models import SHAPINGS
from tiers import each_value, tiered
from tiny_models import saved, some_tokens, tiny
from toybench import PROFILE, Timeless, run_out

pytestmark = pytest.mark.usefixtures("one_thread")


class Late(Transfer):
    """Reads that are there once they were asked for a few times, as from a device that works by itself."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.asked = 0
        self._random = random.Random(3)

    def later(self, found: torch.Tensor, stream: Any = None) -> Reading:
        left, reading = self.asked + self._random.randrange(5), super().later(found, stream)

        def ready() -> bool:
            self.asked += 1
            return self.asked > left

        return Reading(reading, ready)


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A target's, and that of a draft which agrees with it now and then."""
    folder: Path = tmp_path_factory.mktemp("pair")
    model = tiny("llama")
    saved(model, folder / "target")
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * parameter.data.std() * 0.12)
    saved(model, folder / "draft")
    found = [load_native(folder / name, context_length=300, dtype="float64").decoder for name in ("target", "draft")]
    return found[0], found[1]


def executor(
    decoders: tuple[Any, Any], kind: type[Serial] = Streams, draft: type[NativeRunner] = CountingRunner
) -> tuple[Serial, Late]:
    target, late = CountingRunner(decoders[0], 300), Late()
    target.transfer = target.launcher.transfer = late
    target.limit(target.vocabulary)
    return kind(Verifier(target), Drafter(draft(decoders[1], 300))), late


def start(loop: Loop, method: str, params: SamplingParams, number: int, rule: Rule = "match") -> Session:
    prompt = some_tokens(5 + 20 * (number % 2), seed=number)
    session = Session(number, prompt, Request(params, number, len(prompt), rule=rule, eos_ids=(7,)), 250)
    name, _, policy = method.partition(":")
    config = SpeculativeConfig(
        method=name, policy=policy or None, num_speculative_tokens=4, stop_below=0.2, ngram_min=1, rule=rule
    )  # type: ignore[arg-type]
    loop.join(session, METHODS[name].start(session, config, Timeless(PROFILE)))
    return session


def decode(works: Serial, method: str, params: SamplingParams, number: int, rule: Rule = "match") -> Session:
    loop = Loop(works)
    session = start(loop, method, params, number, rule)
    run_out(loop)
    session.stats.check()
    return session


@each_value
@pytest.mark.parametrize(
    "draft",
    tiered((GpuRunner, NativeRunner), lambda draft: draft is GpuRunner),
    ids=["beside on a device", "beside on the host"],
)
@pytest.mark.parametrize("shaping", tiered(("cool", "everything"), "cool".__eq__))
def test_every_method_gives_autoregressive_tokens(
    shaping: str, draft: type[NativeRunner], decoders: tuple[Any, Any]
) -> None:
    (works, late), plain = executor(decoders, draft=draft), executor(decoders, Serial)[0]
    taken = 0
    for number in (1,):
        params = SamplingParams(**SHAPINGS[shaping], max_tokens=16)  # type: ignore[arg-type]
        expected = decode(plain, "autoregressive", params, number).tokens
        for method in (*METHODS, "specbranch:confidence"):
            session = decode(works, method, params, number)
            assert session.tokens == expected, method
            taken += session.stats.accepted
    assert taken > 0 and late.asked > 50, "verdicts were hardly asked for"


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    tiered(
        ("speculative", "pearl", "specbranch:confidence", "autoregressive", "lookahead"),
        "pearl".__eq__,
    ),
)
def test_under_ratio_it_says_what_serial_says(method: str, decoders: tuple[Any, Any]) -> None:
    both, params = (
        [executor(decoders, kind)[0] for kind in (Streams, Serial)],
        SamplingParams(temperature=1.0, max_tokens=30),
    )
    for number in range(2):
        ours, expected = (decode(works, method, params, number, "ratio") for works in both)
        assert ours.tokens == expected.tokens


@pytest.mark.slow
def test_requests_of_both_rules_are_served_together(decoders: tuple[Any, Any]) -> None:
    """What is judged by the match rule comes with the forward, the rest waits for its heads, and for rows that are
    still there."""
    params, rules = SamplingParams(temperature=1.0, max_tokens=30), ("match", "ratio", "match", "ratio")
    together = []
    for kind in (Streams, Serial):
        loop = Loop(executor(decoders, kind)[0])
        sessions = [start(loop, "pearl", params, number, rule) for number, rule in enumerate(rules)]  # type: ignore[arg-type]
        run_out(loop)
        together.append([session.tokens for session in sessions])
    assert together[0] == together[1]


@each_value
@pytest.mark.parametrize("kind", [Serial, Streams])
@pytest.mark.parametrize("draft", [GpuRunner, NativeRunner])
@pytest.mark.parametrize("how", ["no number", "no memory"])
@pytest.mark.parametrize("rule", ["match", "ratio"])
@pytest.mark.parametrize("method", ["pearl", "specbranch", "specbranch:confidence"])
def test_a_draft_that_fails_leaves_the_text_to_the_target(
    method: str,
    how: str,
    rule: Rule,
    draft: type[NativeRunner],
    kind: type[Serial],
    decoders: tuple[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to the failure the text is that with a working draft, behind it plain decoding's. Trees draw nothing
    beforehand, so theirs is plain decoding's throughout, under either rule."""
    works, params = executor(decoders, kind, draft)[0], SamplingParams(temperature=0.9, max_tokens=24, ignore_eos=True)
    expected = decode(works, "autoregressive", params, 1, rule).tokens
    in_order = decode(works, method, params, 1, rule).tokens
    session, before, behind = lose_draft(works, method, params, rule, how, monkeypatch)
    assert session.stats.rounds_without_draft > 3 and session.finished == "length"
    assert session.tokens[:before] == in_order[:before] and before > session.request.prompt_length
    assert session.tokens == plainly_behind(works, session, behind)
    assert session.tokens == expected or (rule == "ratio" and method != "specbranch")


def lose_draft(
    works: Serial, method: str, params: SamplingParams, rule: Rule, how: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Session, int, int]:
    """Decode with a draft that fails after three rounds; returns how many tokens there were before and after that
    round, too."""
    loop = Loop(works)
    session = start(loop, method, params, 1, rule)
    for _ in range(3):
        loop.step()
    assert works.draft
    runner: Any = works.draft.runner
    with monkeypatch.context() as patch:
        spoil(patch, runner, how)
        while not works._without:
            assert loop.live, "the draft was never at work"
            before = len(session.tokens)
            loop.step()
        behind = len(session.tokens)
        loop.step()
    run_out(loop)
    session.stats.check()
    runner.check()
    return session, before, behind


def plainly_behind(works: Serial, session: Session, length: int) -> list[int]:
    """Decode plainly behind the first tokens of a session, to its end: variates go by position."""
    request, loop = replace(session.request, prompt_length=length), Loop(works)
    other = Session(2, session.tokens[:length], request, session.limit)
    loop.join(other, METHODS["autoregressive"].start(other, SpeculativeConfig(rule=request.rule), Timeless(PROFILE)))
    run_out(loop)
    return other.tokens


def spoil(patch: pytest.MonkeyPatch, runner: NativeRunner, how: str) -> None:
    """Have a model's forwards fail, or give logits of which some are no numbers."""
    head = runner.decoder.head

    def spoilt(hidden: torch.Tensor) -> torch.Tensor:
        if how == "no memory":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        logits = head(hidden)
        logits[:, 3] = float("nan")
        return logits

    patch.setattr(runner, "_fused", None)
    patch.setattr(runner.decoder, "head", spoilt)
