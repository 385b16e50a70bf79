"""Rounds with a draft that reads features: texts stay those of plain decoding, and rows read the right features.

No text can show a draft that reads wrong features, as the target corrects it. So every proposal of these rounds is
compared with that of a fresh pair, which has read the same text and nothing else.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from feature_drafts import Recipe, save_feature_draft
from specbranch import LLM, AsyncLLM, SamplingParams
from specbranch.core.runner import Ask, Feed, Proposal
from specbranch.core.slots import ROOT
from specbranch.models.drafts.feature_load import load_feature_draft
from specbranch.models.loading import load_native
from specbranch.models.runners.feature_runner import FeatureRunner
from tiny_models import GREEDY
from tiny_pair import SIZES, make_pair

pytestmark = pytest.mark.usefixtures("one_thread")
MODELLED = "h200-68m-7b"  # times by which the planner drafts
DRAFTING = ("speculative", "adaptive", "pearl", "specbranch", "tree", "auto")
CONTEXT = 400
STEM = [17, 101, 23, 300, 45, 9] * 30  # a beginning that prompts share: 180 tokens


@dataclass(frozen=True)
class Seen:
    """A proposal as it was made: the text, how much of it the target had computed, the draft's logits."""

    text: tuple[int, ...]
    computed: int
    logits: Tensor


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_pair(tmp_path_factory.mktemp("pair"), sizes={**SIZES, "num_hidden_layers": 4})[0]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    own = [[rng.randrange(3, 400) for _ in range(rng.randint(60, 74))] for _ in range(12)]
    return [[*STEM, *one] if at % 2 == 0 else one for at, one in enumerate(own)]  # some answers begin a second page


def params(temperature: float, tokens: int = 20) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_k=12, seed=5, max_tokens=tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(target: str, prompts: list[list[int]]) -> dict[float, list[list[int]]]:
    with LLM(target, method="autoregressive", device="cpu", dtype="float64", options=options()) as llm:
        return {heat: [one.token_ids for one in llm.generate(prompts, params(heat))] for heat in (0.0, 0.8)}


@pytest.fixture(scope="module")
def draft(target: str, plain: dict[float, list[list[int]]], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random draft that scores the commonest tokens of the texts alone, so that some are accepted."""
    counts = Counter(token for texts in plain.values() for text in texts for token in text)
    kept = tuple(sorted(token for token, _ in counts.most_common(24)))
    recipe = Recipe(kept=kept, taps=(1, 2, 3), layers=2)
    return save_feature_draft(tmp_path_factory.mktemp("draft") / "draft", recipe, target)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Seen]]:
    """What the feature draft proposed."""
    found: list[Seen] = []
    propose = FeatureRunner.propose

    def noted(self: FeatureRunner, work: Sequence[Feed], asks: Sequence[Ask]) -> list[Proposal]:
        made = propose(self, work, asks)
        for ask in (one for one in asks if one.seq >= 0):  # the warm-up's sequence has tokens of two texts
            text, computed = self.slots(ask.seq).sequence(ask.node), len(self.target.slots(ask.seq).prefix)
            found.append(Seen(tuple(text), computed, self.row(ask.seq, ask.node).logits.clone()))
        return made

    monkeypatch.setattr(FeatureRunner, "propose", noted)
    yield found


def options(**more: Any) -> dict[str, Any]:
    return {"context_length": CONTEXT, **more}


def wrong(target: str, draft: str, seen: Sequence[Seen], most: int = 60) -> list[int]:
    """The lengths of texts behind which a fresh pair has other logits; `most`: of so many proposals."""
    chosen = random.Random(1).sample(list(seen), min(most, len(seen)))
    found = []
    for number, one in enumerate(chosen):
        if number % 16 == 0:
            runner = load_native(target, context_length=CONTEXT, dtype=torch.float64)
            fresh = load_feature_draft(draft, target, target_runner=runner, context_length=CONTEXT, dtype=torch.float64)
        known = one.text[: one.computed]
        runner.open(number, GREEDY)
        runner.extend(number, known)
        fresh.open(number, GREEDY)
        rest = one.text[max(len(known) - 1, 0) :]
        fresh.extend(number, one.text[: len(one.text) - len(rest)])
        row = fresh.score([Feed(number, rest, tuple(range(ROOT, len(rest) - 1)))])[0][-1]
        finite = row.logits.isfinite()
        if not torch.allclose(row.logits[finite], one.logits[finite], rtol=1e-9, atol=1e-9):
            found.append(len(one.text) - one.computed)
        for model in (fresh, runner):
            model.close(number)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", DRAFTING)
def test_each_method_gives_plain_texts_and_reads_the_right_features(
    method: str, target: str, draft: str, prompts: list[list[int]], plain: Any, seen: list[Seen]
) -> None:
    accepted = 0
    clock = {"clock": MODELLED} if method in ("specbranch", "tree", "auto") else {}
    with LLM(target, draft, method=method, device="cpu", dtype="float64", options=options(**clock)) as llm:
        for heat, texts in plain.items():
            for prompt, text in list(zip(prompts, texts, strict=True))[:2]:
                output = llm.generate([prompt], params(heat))[0]
                assert output.token_ids == text
                accepted += output.stats["accepted"]
    assert not wrong(target, draft, seen, most=40)
    if method != "auto":
        assert accepted > 0 and len(seen) > 30
        assert {len(one.text) - one.computed for one in seen} > {1, 2}  # roots, and what is fed back


@pytest.mark.slow
def test_a_batch_with_preemption_and_shared_beginnings_reads_the_right_features(
    target: str, draft: str, prompts: list[list[int]], plain: Any, seen: list[Seen]
) -> None:
    async def together(heat: float) -> tuple[list[Any], Any]:
        pair = LLM(target, draft, device="cpu", dtype="float64", options=options(cache_tokens=1024))  # 4 pages
        async with AsyncLLM(pair) as engine:
            engine._llm.scheduler.ahead = 1
            waits = [
                engine.generate(one, params(heat), {"method": DRAFTING[at % len(DRAFTING)]})
                for at, one in enumerate(prompts)
            ]
            outputs = await asyncio.gather(*waits)
            return outputs, engine.stats()

    for heat, texts in plain.items():
        outputs, stats = asyncio.run(together(heat))
        assert [one.token_ids for one in outputs] == texts
        assert stats.preemptions > 0 and all(one.free == one.total for one in stats.kv_slots)
    assert len(seen) > 100 and not wrong(target, draft, seen)
