"""A draft with another vocabulary: answers are those of plain decoding, and its proposals come from its own text."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from small_tokenizers import SENTENCES
from specbranch import LLM, SamplingParams
from specbranch.assembly import ModelChoice, common_vocabulary, fitted_to_target, load_tokenizer, make_drafter
from specbranch.core.methods import METHODS
from specbranch.core.orders import Sparse
from specbranch.core.request import Request
from specbranch.core.runner import Ask, Feed
from specbranch.core.slots import ROOT
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.runners.native import NativeRunner
from specbranch.models.runners.translating import TranslatingRunner
from specbranch.text.spelling import Spelling
from two_vocabularies import make_model

PAIRS = [("bytes", "spaces"), ("spaces", "bytes"), ("bytes", "more bytes"), ("more bytes", "bytes")]
PROMPTS = ["A branch is a guess about", "If the guess was right,", "Zwölf Box", "Smile 🙂 re"]
QUICK = (("bytes", "spaces", "speculative"), ("spaces", "bytes", "pearl"), ("more bytes", "bytes", "specbranch"))
GREEDY = Request(SamplingParams(temperature=0.0), 0, 3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: make_model(folder, kind) for kind in ("bytes", "more bytes", "spaces")}


def engine(folders: dict[str, str], target: str, draft: str, **options: Any) -> LLM:
    given = {"context_length": 256, "max_batch": 4, **options}
    return LLM(folders[target], folders[draft], device="cpu", dtype="float32", options=given)


def drafter(folders: dict[str, str], target: str, draft: str) -> TranslatingRunner:
    choice = fitted_to_target(
        ModelChoice(folders[draft], device="cpu", dtype="float32", context_length=256), folders[target]
    )
    made = make_drafter(choice, common_vocabulary(load_tokenizer(ModelChoice(folders[target])), choice)).runner
    assert isinstance(made, TranslatingRunner)
    return made


def texts(outputs: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(output.token_ids) for output in outputs]


class Engines(dict[tuple[str, str], LLM]):
    """An engine for each pair, made when it is needed."""

    def __init__(self, folders: dict[str, str]) -> None:
        super().__init__()
        self._folders = folders

    def __missing__(self, pair: tuple[str, str]) -> LLM:
        self[pair] = engine(self._folders, *pair)
        return self[pair]


@pytest.fixture(scope="module")
def engines(folders: dict[str, str]) -> Engines:
    return Engines(folders)


CASES = [(*pair, method) for pair in PAIRS for method in METHODS]


@pytest.mark.parametrize(
    "target, draft, method", [one if one in QUICK else pytest.param(*one, marks=pytest.mark.slow) for one in CASES]
)
def test_every_method_gives_the_text_of_plain_decoding(engines: Engines, target: str, draft: str, method: str) -> None:
    llm = engines[target, draft]
    plain, other = llm.using(method="autoregressive"), llm.using(method=method)
    for temperature in (0.0, 0.8, 1.3):
        params = SamplingParams(temperature=temperature, max_tokens=8, seed=7)
        expected = texts(plain.generate(PROMPTS, params))
        assert texts(other.generate(PROMPTS, params)) == expected  # in batches
        assert texts([other.generate(PROMPTS[0], params)]) == expected[:1]


@pytest.mark.parametrize("target, draft", PAIRS)
def test_taught_models_agree_over_their_vocabularies(engines: Engines, target: str, draft: str) -> None:
    llm = engines[target, draft].using(method="speculative")
    outputs = llm.generate(PROMPTS[:2], SamplingParams(temperature=0.0, max_tokens=12))
    accepted, drafted = (sum(output.stats[name] for output in outputs) for name in ("accepted", "drafted"))
    assert accepted > 0.3 * drafted > 0
    assert "nothing has" in outputs[1].text


@pytest.mark.parametrize(
    "target, draft", [("bytes", "spaces"), pytest.param("more bytes", "bytes", marks=pytest.mark.slow)]
)
def test_the_ratio_rule_keeps_to_a_law_over_the_targets_ids(engines: Engines, target: str, draft: str) -> None:
    llm = engines[target, draft].using(speculative={"method": "speculative", "rule": "ratio"})
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, max_tokens=24, seed=3))
    assert sum(output.stats["accepted"] for output in outputs) > 0


TREES = [(*pair, method) for pair in PAIRS for method in ("tree", "specbranch")]


@pytest.mark.parametrize(
    "target, draft, method", [TREES[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in TREES[1:])]
)
def test_trees_that_pay_are_drafted_and_change_nothing(engines: Engines, target: str, draft: str, method: str) -> None:
    plain, modelled = engines[target, draft].using(method="autoregressive"), engines[target, draft].modelled("c10")
    for temperature in (0.0, 0.8, 1.3):
        params = SamplingParams(temperature=temperature, max_tokens=8, seed=7)
        outputs = modelled.using(method=method).generate(PROMPTS, params)
        assert texts(outputs) == texts(plain.generate(PROMPTS, params))
        assert temperature or sum(output.stats["accepted"] for output in outputs) > 5


def test_one_line_says_what_the_vocabularies_have_in_common(
    folders: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "specbranch"):
        engine(folders, "bytes", "spaces")
        engine(folders, "bytes", "bytes")
    said = [record.getMessage() for record in caplog.records if "vocabulary" in record.getMessage()]
    assert len(said) == 1 and "token strings are common" in said[0]


def read_text(runner: TranslatingRunner, seq: int) -> bytes:
    """Return what the draft has read of a sequence up to its prefix, committed or not."""
    own = runner.own.slots(seq)
    strings = Spelling(runner._translation._draft.tokenizer)  # type: ignore[attr-defined]
    return strings.text_of((*own.prefix, *runner._open[seq].root.ids)).lstrip()


@pytest.mark.parametrize("target, draft", PAIRS)
def test_the_draft_holds_the_text_whatever_is_kept_or_rolled_back(
    folders: dict[str, str], target: str, draft: str
) -> None:
    runner, tokenizer = drafter(folders, target, draft), load_tokenizer(ModelChoice(folders[target]))
    spelled = Spelling(tokenizer)
    tokens = tokenizer.encode(SENTENCES[1] + SENTENCES[2], add_special=False)
    runner.open(1, GREEDY)
    runner.extend(1, tokens[:9])
    runner.extend(1, tokens[9:12])
    at = 12
    for size, kept in ((4, 4), (5, 2), (3, 1), (6, 6), (2, 0)):
        runner.keep(1, [], 0)
        runner.demand(1, size)
        chain = tuple(tokens[at : at + size])
        other = (chain[0], tokens[0])  # a second branch, whose text is another
        asks = [Ask(1, node) for node in range(size + 2)]
        feed = Feed(1, chain + other, (*range(ROOT, size - 1), ROOT, size))
        assert all(proposal.tokens for proposal in runner.propose([feed], asks))
        assert all(runner.knows(1, node) for node in range(size + 2))
        runner.keep(1, [*range(kept), *([kept] if kept < size else [])], kept)
        at += kept
        assert runner.slots(1).prefix == tokens[:at]
        assert read_text(runner, 1) == spelled.text_of(tuple(tokens[:at])).lstrip()
        runner.slots(1).check()
        runner.own.slots(1).check()
    for length in (at - 3, 10, 4, 0):
        runner.rewind(1, length)
        assert read_text(runner, 1) == spelled.text_of(tuple(tokens[:length])).lstrip()
    runner.close(1)


@pytest.mark.parametrize("target, draft", PAIRS)
def test_an_answer_does_not_depend_on_how_its_text_came(folders: dict[str, str], target: str, draft: str) -> None:
    runner, tokenizer = drafter(folders, target, draft), load_tokenizer(ModelChoice(folders[target]))
    tokens = tokenizer.encode(SENTENCES[0], add_special=False)[:20]

    def asked(seq: int, prefilled: int) -> tuple[int, ...]:
        runner.open(seq, GREEDY)
        runner.extend(seq, tokens[:prefilled])
        for token in tokens[prefilled:-1]:
            runner.feed([Feed(seq, (token,), (ROOT,))])
            runner.keep(seq, [0], 1)
        (proposal,) = runner.propose([Feed(seq, (tokens[-1],), (ROOT,))], [Ask(seq, 0, 3)])
        return proposal.tokens

    assert asked(1, 19) == asked(2, 3) == asked(3, 11)


@pytest.mark.parametrize("target, draft", PAIRS[:2])
def test_a_device_that_samples_by_itself_gives_the_same_proposals(
    folders: dict[str, str], target: str, draft: str
) -> None:
    plain, tokenizer = drafter(folders, target, draft), load_tokenizer(ModelChoice(folders[target]))
    assert isinstance(plain.own, NativeRunner)
    device = TranslatingRunner(GpuRunner(plain.own.decoder, 256), plain._translation)
    tokens = tuple(tokenizer.encode(SENTENCES[0])[:16])

    def asked(runner: TranslatingRunner, temperature: float) -> list[tuple[int, ...]]:
        runner.open(1, Request(SamplingParams(temperature=temperature), 3, 8))
        runner.extend(1, tokens[:8])
        feed = Feed(1, tokens[8:], tuple(range(ROOT, len(tokens) - 9)))
        found = runner.propose([feed], [Ask(1, node, 2) for node in range(len(tokens) - 8)])
        runner.keep(1, [0, 1], 2)
        found += runner.propose([Feed(1, (tokens[10],), (ROOT,))], [Ask(1, 0, 2)])
        runner.close(1)
        return [proposal.tokens for proposal in found]

    for temperature in (0.0, 0.8):
        assert asked(device, temperature) == asked(plain, temperature)


def test_prompts_share_pages_over_the_vocabularies(folders: dict[str, str]) -> None:
    runner, tokenizer = drafter(folders, "bytes", "spaces"), load_tokenizer(ModelChoice(folders["bytes"]))
    tokens = tokenizer.encode(SENTENCES[0] * 3, add_special=False)
    for seq in (1, 2):
        runner.open(seq, GREEDY)
        held = runner.recall(seq, tokens)
        assert read_text(runner, seq) == Spelling(tokenizer).text_of(tuple(tokens[:held]))
        assert runner.slots(seq).prefix == tokens[:held] and (held > 32) == (seq == 2)
        runner.extend(seq, tokens[held:])
        runner.flush()


def test_noise_is_that_of_the_targets_ids(folders: dict[str, str]) -> None:
    """With a flat law, the choice is the noise's alone: that of the target's own token ids."""
    runner = drafter(folders, "bytes", "spaces")
    request = Request(SamplingParams(temperature=50.0), 11, 1)
    runner.open(1, request)
    chosen = [
        runner.propose([Feed(1, (token,), (ROOT,))], [Ask(1, node)])[0] for node, token in enumerate((40, 50, 60))
    ]
    from specbranch.models.sampling.noise_rows import shared_noise

    row = shared_noise().row((11, 0, 1), runner.vocabulary)
    possible = sorted({first for first in runner._translation.first_ids if first >= 0})
    best = possible[int(row[torch.tensor(possible)].argmax())]
    assert chosen[0].tokens[0] == chosen[1].tokens[0] == chosen[2].tokens[0] == best


def test_a_proposals_law_sums_to_one(folders: dict[str, str]) -> None:
    runner, tokenizer = drafter(folders, "more bytes", "bytes"), load_tokenizer(ModelChoice(folders["more bytes"]))
    runner.open(1, Request(SamplingParams(temperature=1.0), 5, 1, rule="ratio"))
    tokens = tokenizer.encode(SENTENCES[0], add_special=False)
    for node, token in enumerate(tokens[:8]):
        (proposal,) = runner.propose([Feed(1, (token,), (node - 1,))], [Ask(1, node)])
        assert isinstance(proposal.q, Sparse) and abs(sum(proposal.q.probs) - 1.0) < 1e-6
        assert proposal.tokens[0] in proposal.q.ids and max(proposal.q.ids) < runner.vocabulary


def test_a_full_tail_leaves_nodes_unanswered(folders: dict[str, str]) -> None:
    runner, tokenizer = drafter(folders, "more bytes", "spaces"), load_tokenizer(ModelChoice(folders["more bytes"]))
    tokens = tuple(tokenizer.encode(SENTENCES[3] * 4, add_special=False))[:20]
    runner.open(1, GREEDY)
    proposals = runner.propose(
        [Feed(1, tokens, tuple(range(ROOT, len(tokens) - 1)))], [Ask(1, node) for node in range(len(tokens))]
    )
    assert proposals[0].tokens and not proposals[-1].tokens  # three bytes a character do not fit
    runner.keep(1, range(len(tokens)), len(tokens))
    runner.demand(1, 1)
    assert runner.propose([Feed(1, tokens[:1], (ROOT,))], [Ask(1, 0)])[0].tokens


def test_a_text_that_exceeds_the_drafts_context_gets_no_proposal(folders: dict[str, str]) -> None:
    """The draft may need several tokens for one of the target's."""
    runner, tokenizer = drafter(folders, "more bytes", "spaces"), load_tokenizer(ModelChoice(folders["more bytes"]))
    tokens = tuple(tokenizer.encode(SENTENCES[3] * 8, add_special=False))[:36]
    runner.open(1, GREEDY)
    for at in range(0, len(tokens), 4):
        runner.extend(1, tokens[at : at + 4])
        runner.flush()
        found = runner.propose([Feed(1, tokens[:1], (ROOT,))], [Ask(1, 0)])[0]
        runner.keep(1, (), 0)
        assert found.tokens or len(runner.own.slots(1).prefix) > runner.own.context_length - 16
    assert not found.tokens


@pytest.mark.slow
@pytest.mark.parametrize("target, draft", PAIRS[:2])
def test_a_draft_in_another_process_speaks_the_targets_ids(folders: dict[str, str], target: str, draft: str) -> None:
    given = {"context_length": 256, "max_batch": 4}
    params = SamplingParams(temperature=0.8, max_tokens=16, seed=7)
    with LLM(folders[target], folders[draft], device="cpu", executor="process", options=given) as llm:
        expected = texts(llm.using(method="autoregressive").generate(PROMPTS, params))
        outputs = llm.using(method="pearl").generate(PROMPTS, params)
        assert texts(outputs) == expected and sum(output.stats["accepted"] for output in outputs) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("target, draft", PAIRS)
def test_on_a_gpu_the_text_is_that_of_plain_decoding(folders: dict[str, str], target: str, draft: str) -> None:
    given = {"context_length": 256, "max_batch": 4}
    llm = LLM(folders[target], folders[draft], device="cuda", dtype="float32", options=given)
    for temperature in (0.0, 0.8, 1.3):
        params = SamplingParams(temperature=temperature, max_tokens=12, seed=7)
        expected = texts(llm.using(method="autoregressive").generate(PROMPTS, params))
        for method in ("speculative", "tree", "specbranch"):
            assert texts(llm.using(method=method).generate(PROMPTS, params)) == expected
