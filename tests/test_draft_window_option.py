"""The option `draft_window`: what it leaves as it is, and the drafts that cannot have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from feature_drafts import Recipe, save_feature_draft
from specbranch import LLM, LoadOptions, SamplingParams
from specbranch.assembly import ModelChoice, chosen_target, experience_key
from specbranch.errors import BadParameter
from specbranch.lab.bench.order import checked_running
from specbranch.lab.bench.recorded_pair import RecordedPair
from specbranch.models.runners.native import NativeRunner
from tiers import tiered
from tiny_pair import SIZES, make_gpt2, make_pair

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = ["A branch is a guess that somebody checks later on", "The river", "One, two, three, four, five, six, seven"]
PARAMS = SamplingParams(max_tokens=40, seed=3, temperature=0.7, ignore_eos=True)
WINDOW = 12
CASES = [
    f"{method} {executor}"
    for method in ("speculative", "adaptive", "pearl", "tree", "specbranch", "auto")
    for executor in ("serial", "process")
]


def texts(llm: LLM) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("case", tiered(CASES, "tree serial".__eq__))
def test_texts_are_those_of_plain_decoding_alone_and_in_a_batch(case: str, pair: tuple[str, str]) -> None:
    method, executor = case.split()
    plain = texts(LLM(pair[0], method="autoregressive", device="cpu"))
    options = {"draft_window": WINDOW, "context_length": 256}
    with LLM(*pair, method=method, executor=executor, device="cpu", options=options) as llm:
        assert texts(llm) == plain
        assert [llm.generate(prompt, PARAMS).token_ids for prompt in PROMPTS] == plain


def test_a_pair_of_which_the_draft_has_the_shorter_context_drafts_all_the_way(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path / "pair")[0], make_pair(tmp_path / "short", positions=64)[1]
    for window, length in ((None, 64), (WINDOW, 512), (64, 64), (4096, 64)):
        with LLM(target, draft, device="cpu", options={"draft_window": window}) as llm:
            assert llm.drafter is not None and isinstance(llm.drafter.runner, NativeRunner)
            assert llm.drafter.runner.context_length == length


@pytest.mark.parametrize("window", [0, -3, 2.5, True, "8"])
def test_a_window_of_no_positions_gets_a_sentence(window: object) -> None:
    for make in (LoadOptions, lambda **given: ModelChoice("x", **given)):
        with pytest.raises(BadParameter, match=f"draft_window is {window!r}; expected a whole number ≥ 1"):
            make(draft_window=window)


def test_drafts_that_cannot_have_a_window_are_refused_by_name(pair: tuple[str, str], tmp_path: Path) -> None:
    target = make_pair(tmp_path / "pair", sizes={**SIZES, "num_hidden_layers": 4})[0]
    features = save_feature_draft(tmp_path / "features", Recipe(), target)
    other = make_gpt2(tmp_path / "gpt2")
    for ours, draft, said in (
        (target, features, "reads its target's hidden states"),
        (pair[0], other, "runs by the transformers runner"),
        (pair[0], "tcp://127.0.0.1:9", "has loaded its draft: give the option to `specbranch draft-worker`"),
    ):
        with pytest.raises(BadParameter, match=f"^draft_window is 12, but .*{said}.*Leave --draft-window out"):
            LLM(ours, draft, device="cpu", options={"draft_window": WINDOW})


def test_a_window_without_a_draft_gets_a_sentence(pair: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with LLM(pair[0], method="lookup", device="cpu", options={"draft_window": WINDOW}):
        pass
    assert "draft_window is 12, but no draft is loaded" in caplog.text


def test_another_draft_in_exchange_gets_the_same_window(tmp_path: Path) -> None:
    (target, draft), other = make_pair(tmp_path / "pair"), make_pair(tmp_path / "short", positions=64)[1]
    with LLM(target, draft, device="cpu", options={"draft_window": WINDOW}) as llm:
        llm.exchange_draft(other)
        assert llm.drafter is not None and isinstance(llm.drafter.runner, NativeRunner)
        assert llm.drafter.runner.architecture.draft_window == WINDOW
        assert llm.drafter.runner.context_length == 512
        assert texts(llm) == texts(LLM(target, method="autoregressive", device="cpu"))


def test_a_bench_names_the_window_and_gives_it_to_the_draft(pair: tuple[str, str], tmp_path: Path) -> None:
    running = checked_running("serial", "cpu", None, None, None, WINDOW, None, by_the_wall=True)
    assert running.not_default() == {"device": "cpu", "draft_window": WINDOW} and running.suffix == "+12-window"
    with RecordedPair(target=pair[0], draft=pair[1], running=running, folder=tmp_path) as recorded:
        assert recorded.identity["draft_window"] == WINDOW
        assert recorded.llm.drafter is not None and isinstance(recorded.llm.drafter.runner, NativeRunner)
        assert recorded.llm.drafter.runner.architecture.draft_window == WINDOW
    with pytest.raises(BadParameter, match="draft_window is 0"):
        checked_running("serial", "cpu", None, None, None, 0, None, by_the_wall=True)


def test_what_is_learned_under_a_window_is_kept_apart(pair: tuple[str, str]) -> None:
    with LLM(*pair, device="cpu") as llm:
        parts = llm._parts
    target = chosen_target(pair[0], "cpu", None, LoadOptions())
    keys = [
        experience_key(target, ModelChoice(pair[1], device="cpu", draft_window=window), "serial", parts)
        for window in (None, 8, 16)
    ]
    assert "draft_window" not in keys[0] and keys[1] != keys[2]
