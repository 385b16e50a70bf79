"""LLM as a user has it: generate, stream, chat, on a tiny pair."""

from __future__ import annotations

import gc
import inspect
import random
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

from small_tokenizers import byte_fallback, save
from specbranch import LLM, LoadOptions, SamplingParams, SpeculativeConfig
from specbranch.answer import Output
from specbranch.clock.shipped import load_profile
from specbranch.config import ExecutorName, WeightsName
from specbranch.core.methods import METHODS
from specbranch.core.pages import PAGE
from specbranch.errors import BadParameter, CacheFull, ModelError, SpecBranchError, VocabularyMismatch
from specbranch.models.cpu.kernels import load_kernel
from specbranch.text.chat_template import Message
from tiers import each_value, tiered
from tiny_pair import make_gpt2, make_pair

PROMPT = "A branch is a guess about what the large model will say next."


@pytest.fixture(scope="module")
def llm(pair: tuple[str, str]) -> Iterator[LLM]:
    with LLM(*pair, "specbranch", dtype="float64", device="cpu", options={"context_length": 256}) as loaded:
        yield loaded


def plain(pair: tuple[str, str]) -> LLM:
    return LLM(pair[0], method="autoregressive", dtype="float64", device="cpu", options={"context_length": 256})


def test_the_state_of_a_draft_in_this_process_is_ready_and_of_no_draft_none(pair: tuple[str, str]) -> None:
    with LLM(*pair, device="cpu", options={"context_length": 64}) as llm:
        assert llm.draft_state == "ready"
    assert plain(pair).draft_state == "none"


@pytest.mark.slow
def test_the_usual_method_plans_by_itself(pair: tuple[str, str]) -> None:
    assert LLM(pair[0], device="cpu", options={"context_length": 64}).method == "auto"
    by_turns = LLM(*pair, device="cpu", options={"context_length": 64}, speculative=SpeculativeConfig(max_branches=4))
    assert (by_turns.method, by_turns.config) == ("specbranch", SpeculativeConfig(method="specbranch", max_branches=4))
    with LLM(*pair, device="cpu", options={"context_length": 64}, executor="process") as at_once:
        assert at_once.method == "specbranch"
    assert LLM(*pair, device="cpu", options={"context_length": 64, "clock": "h200-1b-8b"}).method == "specbranch"


def test_each_way_to_decode_has_an_experience_of_its_own(pair: tuple[str, str]) -> None:
    with LLM(*pair, device="cpu", options={"context_length": 256}) as llm:
        other = llm.using("tree")
        other.generate(PROMPT, SamplingParams(max_tokens=30))
        mine, theirs = (one.decoding.experience for one in (llm, other))
        assert theirs.arms.by_name and not mine.arms.by_name
        again = llm.using("tree")
        assert again.decoding.experience is theirs and theirs.costs is mine.costs


def test_a_method_that_was_asked_for_is_taken(pair: tuple[str, str]) -> None:
    assert LLM(*pair, "speculative", device="cpu", options={"context_length": 64}).method == "speculative"
    assert LLM(*pair, device="cpu", options={"context_length": 64}, speculative={"method": "pearl"}).method == "pearl"


@pytest.mark.slow
def test_another_method_on_the_same_models_gives_the_same_tokens(pair: tuple[str, str]) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30)
    with LLM(*pair, "specbranch", dtype="float64", device="cpu", options={"context_length": 256}) as llm:
        others = {name: llm.using(name) for name in METHODS}
        answers = {name: other.generate(PROMPT, params) for name, other in others.items()}
        assert len({answer.token_ids for answer in answers.values()}) == 1
        assert [answer.method for answer in answers.values()] == list(METHODS) and llm.method == "specbranch"
        assert answers["autoregressive"].stats["drafted"] == 0 < answers["speculative"].stats["drafted"]
        assert (
            llm.using(speculative={"method": "pearl", "num_speculative_tokens": 2}).config.num_speculative_tokens == 2
        )
    with pytest.raises(BadParameter, match="was closed"):
        others["lookup"].generate("Smile")
    with pytest.raises(BadParameter, match="needs a draft model"):
        plain(pair).using("pearl")


@pytest.mark.slow
def test_a_clock_changes_the_seconds_and_not_the_tokens(pair: tuple[str, str]) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True)
    with LLM(*pair, dtype="float64", device="cpu", options={"context_length": 256, "clock": "h200-1b-8b"}) as llm:
        timed = {name: llm.using(name).generate(PROMPT, params) for name in METHODS}
    assert {answer.token_ids for answer in timed.values()} == {plain(pair).generate(PROMPT, params).token_ids}
    costs = load_profile("h200-1b-8b")  # plain decoding launches ahead, from the step that ends the prompt on
    seconds = 29 * (costs.target_seconds(1) + costs.host)
    assert timed["autoregressive"].stats["decode_seconds"] == pytest.approx(seconds)
    assert (
        LLM(pair[0], device="cpu", options={"clock": "h200-1b-8b"}).generate(PROMPT, params).stats["decode_seconds"] > 0
    )


def test_a_clock_replaces_an_executor(pair: tuple[str, str]) -> None:
    with pytest.raises(BadParameter, match="executor 'process' has no place beside it"):
        LLM(*pair, executor="process", options={"clock": "h200-1b-8b"}, device="cpu")
    with pytest.raises(BadParameter, match="Did you mean 'h200-1b-8b'"):
        LLM(*pair, options={"clock": "h200-1b8b"}, device="cpu")


@pytest.mark.parametrize("method", tiered(METHODS, ("pearl", "tree", "auto", "lookahead").__contains__))
def test_every_method_gives_the_text_of_plain_decoding(method: str, pair: tuple[str, str]) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40, logprobs=2, stop=("ge",))
    expected = plain(pair).generate(PROMPT, params)
    with LLM(*pair, method=method, dtype="float64", device="cpu", options={"context_length": 256}) as llm:
        got = llm.generate(PROMPT, params)
    assert (got.text, got.token_ids, got.finish_reason) == (expected.text, expected.token_ids, expected.finish_reason)
    assert got.logprobs is not None and expected.logprobs is not None
    for ours, theirs in zip(got.logprobs, expected.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-9)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_process_executor_gives_the_text_of_plain_decoding(pair: tuple[str, str]) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40)
    with LLM(*pair, executor="process", dtype="float64", device="cpu", options={"context_length": 256}) as llm:
        assert llm.generate(PROMPT, params).token_ids == plain(pair).generate(PROMPT, params).token_ids


def test_stream_adds_up_to_the_answer(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, stop=("xyz",))
    chunks = list(llm.stream(PROMPT, params))
    output = chunks[-1].output
    assert output is not None
    assert "".join(chunk.text for chunk in chunks) == output.text == llm.generate(PROMPT, params).text
    assert [piece.origin for chunk in chunks for piece in chunk.pieces] == [piece.origin for piece in output.pieces]
    assert len(output.pieces) == len(output.token_ids) == 30


def test_closing_a_stream_early_frees_everything(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=100))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.scheduler.loop.live
    assert not llm.core.verifier._held
    assert not llm._parts.executor.draft._held  # type: ignore[attr-defined]


def test_interleaved_streams_and_calls_each_get_their_whole_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=30)
    expected = [llm.generate(prompt, params).text for prompt in (PROMPT, "Smile")]
    long, short = llm.stream(PROMPT, params), llm.stream("Smile", replace(params, max_tokens=5))
    chunks = [next(long), next(short)]
    assert llm.generate("Smile", params).text == expected[1]
    assert [output.text[:3] for output in (list(short)[-1].output,) if output] == [expected[1][:3]]
    chunks = [chunks[0], *long]
    assert "".join(chunk.text for chunk in chunks) == expected[0]
    assert chunks[-1].output is not None and chunks[-1].output.text == expected[0]


@pytest.mark.slow
def test_nothing_can_be_generated_after_close(pair: tuple[str, str]) -> None:
    with LLM(*pair, executor="process", device="cpu", options={"context_length": 64}) as llm:
        assert llm.draft_state == "ready"
    assert llm.draft_state == "lost"
    with pytest.raises(BadParameter, match="was closed"):
        llm.generate("Smile")
    assert llm._parts.executor.child_pid is None  # type: ignore[attr-defined]


@pytest.mark.slow
def test_an_interrupted_answer_leaves_the_draft_process_in_step(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40)
    drafting = {"policy": "confidence"}  # whether it pays or not
    with LLM(
        *pair, executor="process", speculative=drafting, dtype="float64", device="cpu", options={"context_length": 256}
    ) as llm:
        start = llm.core.verifier.start
        calls = iter(range(100))

        def interrupted(*given: Any) -> Any:
            if next(calls) == 4:
                raise KeyboardInterrupt
            return start(*given)

        monkeypatch.setattr(llm.core.verifier, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, params)
        monkeypatch.undo()
        answer = llm.generate(PROMPT, params)
        assert answer.token_ids == plain(pair).generate(PROMPT, params).token_ids
        assert answer.stats["rounds_without_draft"] == 0 and answer.stats["accepted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("runner", tiered(("native", "transformers"), "native".__eq__))
def test_a_text_that_outgrows_the_draft_goes_on_without_it(runner: Any, pair: tuple[str, str], tmp_path: Path) -> None:
    _, short = make_pair(tmp_path / "short", positions=48)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    with LLM(pair[0], method="autoregressive", device="cpu", dtype="float64", options={"context_length": 128}) as llm:
        expected = llm.generate(PROMPT, params).token_ids
    with LLM(
        pair[0],
        short,
        speculative={"policy": "confidence"},
        options={"runner": runner, "context_length": 128},
        device="cpu",
        dtype="float64",
    ) as llm:
        output = llm.generate(PROMPT, params)
    assert output.token_ids == expected
    assert output.stats["drafted"] > 0
    assert all(piece.origin == "target" for piece in output.pieces[-40:])


def test_a_text_with_tokens_the_draft_does_not_know_goes_on_without_it(pair: tuple[str, str], tmp_path: Path) -> None:
    _, small = make_pair(tmp_path / "small", vocabulary=300)
    with LLM(pair[0], small, device="cpu", options={"context_length": 128}) as llm:
        output = llm.generate([[5, 310, 7]], SamplingParams(max_tokens=10))[0]
    assert output.stats["drafted"] == 0 and len(output.token_ids) > 0


def test_many_prompts_in_a_batch_give_what_each_gives_alone(pair: tuple[str, str]) -> None:
    prompts = [PROMPT, "Smile", "def accept(draft):", "If the guess was right"]
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=25)
    with LLM(*pair, dtype="float64", device="cpu", options={"context_length": 128, "max_batch": 3}) as llm:
        together = llm.generate(prompts, params)
        assert [output.token_ids for output in together] == [
            llm.generate(prompt, params).token_ids for prompt in prompts
        ]


@pytest.mark.skipif(load_kernel() is None, reason="no compiled kernels on this machine")
@pytest.mark.parametrize("method", tiered(("autoregressive", "specbranch"), "specbranch".__eq__))
def test_a_prompt_among_many_gets_the_bits_it_gets_alone(
    method: str, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBRANCH_LINEAR", "llvm")
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 400) for _ in range(rng.randint(1, 40))] for _ in range(14)]
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=16, logprobs=2, ignore_eos=True)
    draft = None if method == "autoregressive" else pair[1]
    with LLM(pair[0], draft, method, device="cpu", options={"context_length": 128, "max_batch": 12}) as llm:
        together = llm.generate(prompts, params)
        alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert [output.logprobs for output in together] == [output.logprobs for output in alone]


def test_prompts_of_a_list_are_decoded_at_once(pair: tuple[str, str]) -> None:
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=20, ignore_eos=True)
    prompts = [PROMPT, "Smile", "x", "If", "def", "Smile"]
    with LLM(pair[0], method="autoregressive", dtype="float64", device="cpu", options={"context_length": 128}) as llm:
        together = llm.generate(prompts, params)
        assert llm.max_batch == 64 and llm.scheduler.snapshot().rounds < 2 * 20
        assert [one.token_ids for one in together] == [llm.generate(prompt, params).token_ids for prompt in prompts]


def test_outputs_come_in_order_as_soon_as_they_can(llm: LLM) -> None:
    prompts, params = ["Smile", [5, 6, 7]], SamplingParams(max_tokens=40, ignore_eos=True)
    outputs = llm.outputs(prompts, params)
    assert next(outputs).token_ids == llm.generate("Smile", params).token_ids
    outputs.close()  # type: ignore[attr-defined]
    assert not llm.scheduler.loop.live and not llm.core.verifier._held
    assert [one.token_ids for one in llm.outputs(prompts, params)] == [
        one.token_ids for one in llm.generate(prompts, params)
    ]
    with pytest.raises(BadParameter, match="prompt is empty"):
        llm.outputs(["Smile", []], params)


@pytest.mark.parametrize("method", ["autoregressive", "specbranch"])
def test_equal_prompts_in_a_pool_of_one_page_all_finish(pair: tuple[str, str], method: str) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    asked: dict[str, Any] = {"dtype": "float64", "device": "cpu"}
    options = {"context_length": 128, "cache_tokens": PAGE, "max_batch": 4}
    with LLM(*pair, method=method, options=options, **asked) as llm:
        outputs = llm.generate([PROMPT, PROMPT, PROMPT], params)
        assert all(kv_slots.free == kv_slots.total for kv_slots in llm.scheduler.snapshot().kv_slots)
    expected = plain(pair).generate(PROMPT, params)
    assert [one.token_ids for one in outputs] == [expected.token_ids] * 3


def test_n_samples_differ_and_repeat_with_the_seed(llm: LLM) -> None:
    params = SamplingParams(temperature=1.2, seed=5, n=3, max_tokens=20)
    first, again = llm.generate(PROMPT, params), llm.generate(PROMPT, params)
    texts = [first.token_ids, *(other.token_ids for other in first.alternatives)]
    assert len(set(texts)) == 3
    assert texts == [again.token_ids, *(other.token_ids for other in again.alternatives)]


def samples(output: Output) -> list[Output]:
    return [output, *output.alternatives]


@pytest.mark.skipif(load_kernel() is None, reason="no compiled kernels on this machine")
@pytest.mark.parametrize("executor", ["serial", pytest.param("process", marks=pytest.mark.slow)])
@pytest.mark.parametrize("max_batch", tiered((1, 4), (4).__eq__))
def test_n_samples_read_their_prompt_once(
    max_batch: int, executor: ExecutorName, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBRANCH_LINEAR", "llvm")
    params = SamplingParams(temperature=1.1, seed=5, n=4, max_tokens=20, ignore_eos=True)
    rng, found = random.Random(1), []
    prompts = [[rng.randrange(3, 400) for _ in range(length)] for length in (12, 300)]
    for kept in (True, False):
        with LLM(
            *pair,
            "speculative",
            device="cpu",
            executor=executor,
            options={"max_batch": max_batch, "prefix_cache": kept},
        ) as llm:
            found.append([samples(output) for output in llm.generate(prompts, params)])
    assert [[one.token_ids for one in four] for four in found[0]] == [
        [one.token_ids for one in four] for four in found[1]
    ]
    for kept, without in zip(*found, strict=True):
        whole = len(kept[0].prompt_token_ids) - 1  # the last token is a step
        for model in ("", "draft_"):
            read, cached = f"{model}prompt_tokens_read", f"{model}prompt_tokens_cached"
            assert all(one.stats[read] + one.stats[cached] == whole for one in kept)
            # those that are read in turns share in the reading; what lies in a page that is not full yet, two may read
            assert whole <= sum(one.stats[read] for one in kept) < whole + PAGE
            assert [(one.stats[read], one.stats[cached]) for one in without] == [(whole, 0)] * 4


@pytest.mark.parametrize("closed", [True, False])
def test_garbage_collections_skip_what_was_loaded_until_the_llm_is_gone(closed: bool, pair: tuple[str, str]) -> None:
    gc.unfreeze()
    llm = LLM(pair[0], device="cpu")
    assert gc.get_freeze_count() > 1000
    if closed:
        llm.close()
    else:
        del llm
    assert gc.get_freeze_count() == 0


def test_a_chat_goes_on_without_reading_it_all_again(pair: tuple[str, str]) -> None:
    said: list[Message] = [{"role": "user", "content": f"{PROMPT} " * 12}]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with LLM(*pair, "speculative", device="cpu", dtype="float64") as llm:
        first = llm.chat(said, params)
        said += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
        second = llm.chat(said, params)
        with LLM(*pair, device="cpu", dtype="float64", options={"prefix_cache": False}) as other:
            assert other.chat(said, params).token_ids == second.token_ids
    assert len(second.prompt_token_ids) > len(first.prompt_token_ids) > 256
    for model in ("", "draft_"):
        assert second.stats[f"{model}prompt_tokens_cached"] == 256
        assert second.stats[f"{model}prompt_tokens_read"] == len(second.prompt_token_ids) - 257


def test_chat_uses_the_template(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=4))
    assert "[user] Hello" in llm.tokenizer.decode(output.prompt_token_ids, skip_special=False)


def test_statistics_have_every_promised_metric(llm: LLM) -> None:
    stats = llm.generate(PROMPT, SamplingParams(max_tokens=40)).stats
    assert stats["tokens"] == 40
    assert stats["ttft_seconds"] > 0 and stats["tokens_per_second"] > 0
    assert stats["tokens_per_forward"] == pytest.approx(39 / stats["target_forwards"])
    assert set(stats["rollback"]) == {"rejected", "tree_siblings", "losing_branches", "dropped_by_length"}
    assert stats["branch_points"] >= stats["branch_hits"] >= 0
    assert {"acceptance_by_position", "branch_hit_rate", "draft_idle_seconds", "target_idle_seconds"} <= stats.keys()


def test_answer_ends_at_the_context_limit(pair: tuple[str, str]) -> None:
    llm = LLM(pair[0], method="lookup", device="cpu", options={"context_length": 48})
    output = llm.generate(PROMPT, SamplingParams(max_tokens=500, ignore_eos=True))
    assert output.finish_reason == "length"
    assert len(output.prompt_token_ids) + len(output.token_ids) == 48


def test_a_prompt_longer_than_the_context_is_refused(llm: LLM) -> None:
    with pytest.raises(BadParameter, match=r"prompt has \d+ tokens, but the context holds 256.*Shorten"):
        llm.generate(PROMPT * 40)


def test_an_empty_prompt_is_refused(llm: LLM) -> None:
    with pytest.raises(BadParameter, match="prompt is empty"):
        llm.generate([[]])


def test_a_stream_of_several_samples_is_refused_before_it_starts(llm: LLM) -> None:
    with pytest.raises(BadParameter, match="a stream carries one sample"):
        llm.stream(PROMPT, SamplingParams(n=2))


def test_another_architecture_runs_through_transformers_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_gpt2(tmp_path / "gpt2")
    llm = LLM(folder, method="lookup", device="cpu")
    assert llm.runner == "transformers" and "gpt2" in caplog.text
    assert llm.max_batch == 1  # several at once would only take memory
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    plain_answer = LLM(folder, method="autoregressive", device="cpu").generate(PROMPT, params)
    assert llm.generate(PROMPT, params).token_ids == plain_answer.token_ids
    with pytest.raises(ModelError, match="the native decoder runs"):
        LLM(folder, options={"runner": "native"}, device="cpu")


def test_small_weights_are_refused_where_only_transformers_runs_the_model(
    tmp_path: Path, pair: tuple[str, str]
) -> None:
    folder = make_gpt2(tmp_path / "gpt2")
    with pytest.raises(
        BadParameter, match=r"weights is 'int4', but the transformers runner stores.*Leave --weights out"
    ):
        LLM(folder, method="lookup", device="cpu", options={"weights": "int4"})
    llm = LLM(pair[0], method="lookup", device="cpu", options={"runner": "transformers", "weights": "bfloat16"})
    assert (llm.dtype, llm.weights) == ("bfloat16", "bfloat16")


@each_value
@pytest.mark.parametrize("method", ["speculative", "pearl", "specbranch", "tree"])
@pytest.mark.parametrize("weights", ["int8", "bfloat16"])
def test_every_method_gives_the_text_of_the_stored_weights(
    weights: WeightsName, method: str, pair: tuple[str, str]
) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)
    options = {"context_length": 256, "weights": weights, "draft_weights": "int8"}
    with LLM(*pair, method, device="cpu", options=options) as llm:
        output, plain = llm.generate(PROMPT, params), llm.using("autoregressive").generate(PROMPT, params)
    assert output.token_ids == plain.token_ids
    assert output.stats["accepted"] > 0 or METHODS[method].plans(llm.config)  # a planner may leave a dear draft
    assert (llm.weights, llm.dtype) == (weights, "float32")


def test_an_unknown_method_offers_the_nearest_name(pair: tuple[str, str]) -> None:
    with pytest.raises(BadParameter, match="Did you mean 'specbranch'"):
        LLM(*pair, method="specbranhc")


def test_a_method_that_drafts_without_a_draft_is_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(BadParameter, match="needs a draft model"):
        LLM(pair[0], method="pearl")


def test_an_unknown_speculative_setting_offers_the_nearest_name(pair: tuple[str, str]) -> None:
    with pytest.raises(BadParameter, match="Did you mean 'max_branches'"):
        LLM(*pair, speculative={"max_branch": 3})


def test_settings_may_be_a_config_or_a_mapping(pair: tuple[str, str]) -> None:
    config = SpeculativeConfig(method="pearl", num_speculative_tokens=3)
    assert (
        LLM(*pair, speculative=config, device="cpu").config
        == LLM(*pair, "pearl", speculative={"num_speculative_tokens": 3}, device="cpu").config
    )


MISUSES: dict[str, tuple[Any, str]] = {
    "a number for a prompt": (lambda llm: llm.generate(123), "expected a text"),
    "bare token ids": (lambda llm: llm.generate([1, 2, 3]), "a list of texts and lists of token ids"),
    "an unknown token id": (lambda llm: llm.generate([[1, 5000]]), "token ids from 0 to 420"),
    "no parameters": (lambda llm: llm.generate("x", 7), "expected SamplingParams or a mapping"),
    "a mistyped parameter": (lambda llm: llm.generate("x", {"temprature": 1}), "Did you mean 'temperature'"),
    "a number for a model": (lambda llm: LLM(5), "A model is named 5"),
    "no batch": (lambda llm: LLM("x", options={"max_batch": 0}), "max_batch is 0"),
    "an unknown executor": (lambda llm: LLM("x", executor="proces"), "Did you mean 'process'"),
    "streams without a GPU": (
        lambda llm: LLM(llm.target, executor="streams", device="cpu"),
        "this target is run on the CPU. Run",
    ),
    "a list of settings": (lambda llm: LLM("x", speculative=[1]), "expected a SpeculativeConfig"),
    "a context in words": (lambda llm: LLM("x", options={"context_length": "12"}), "context_length is '12'"),
    "an unknown argument": (lambda llm: LLM("x", context_lenght=64), "Did you mean 'context_length'"),
    "an unknown option": (lambda llm: LLM("x", options={"wieghts": "int8"}), "Did you mean 'weights'"),
    "a list of options": (lambda llm: LLM("x", options=[1]), "expected LoadOptions or a mapping"),
    "weights of no kind": (
        lambda llm: LLM("x", options={"draft_weights": "int3"}),
        "Unknown storage of weights 'int3'",
    ),
    "a word for yes": (lambda llm: LLM("x", options={"prefix_cache": "yes"}), "prefix_cache is 'yes'"),
    "another device": (lambda llm: LLM(llm.target, device="meta"), "Unknown device 'meta'"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_gets_a_sentence(misuse: str, llm: LLM) -> None:
    do, sentence = MISUSES[misuse]
    with pytest.raises(SpecBranchError, match=sentence):
        do(llm)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))


def test_a_vocabulary_that_cannot_be_translated_is_refused_by_name(pair: tuple[str, str], tmp_path: Path) -> None:
    _, draft = make_pair(tmp_path)
    made = byte_fallback()
    made.normalizer = normalizers.Lowercase()
    save(made, Path(draft))
    with pytest.raises(
        VocabularyMismatch, match=r"normalises text by Lowercase.*method 'lookup', which needs no draft"
    ):
        LLM(pair[0], draft, device="cpu")


def test_a_prompt_that_fails_does_not_take_the_others_with_it(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(pair[0], method="autoregressive", device="cpu", options={"context_length": 64, "max_batch": 3})
    extend = llm.core.verifier.runner.feed

    def full(work: Any) -> Any:
        if any(9 in item.tokens for item in work):
            raise AssertionError("only the work of one session may fail")
        return extend(work)

    aligned = llm.core.verifier.align

    def refuse(session: int, on: Any, pending: int = 0) -> Any:
        if 9 in on.tail:
            raise CacheFull("Need 1 cache slot, 0 free.")
        return aligned(session, on, pending)

    monkeypatch.setattr(llm.core.verifier.runner, "feed", full)
    monkeypatch.setattr(llm.core.verifier, "align", refuse)
    params = SamplingParams(max_tokens=5, logit_bias={9: -100.0}, ignore_eos=True)
    good, bad, other = llm.generate([[5, 6], [8, 9], [7]], params)
    assert (len(good.token_ids), len(other.token_ids)) == (5, 5)
    assert bad.finish_reason == "error" and isinstance(bad.error, CacheFull)
    assert "0 free" in bad.to_dict()["error"]
    with pytest.raises(CacheFull):
        list(llm.stream([8, 9], params))


def test_an_llm_has_at_most_ten_parameters() -> None:
    parameters = inspect.signature(LLM).parameters.values()
    assert len([one for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD]) <= 10


def test_an_option_as_a_keyword_still_works_and_says_what_to_write(pair: tuple[str, str]) -> None:
    said = (
        "LLM(context_length=…, max_batch=…) is the older spelling; write options={'context_length': …, 'max_batch': …}."
    )
    with pytest.warns(DeprecationWarning, match=re.escape(said)):
        llm = LLM(pair[0], method="lookup", device="cpu", options={"runner": "native"}, context_length=64, max_batch=3)
    assert (llm.context_length, llm.max_batch, llm.runner) == (64, 3, "native")


def test_options_may_be_a_value_of_their_own(pair: tuple[str, str]) -> None:
    with LLM(pair[0], method="lookup", device="cpu", options=LoadOptions(context_length=64)) as llm:
        assert llm.context_length == 64 and llm.max_batch == 64


def test_a_view_shares_the_engine_and_has_its_own_decoding(llm: LLM) -> None:
    view = llm.using("pearl")
    assert view.core is llm.core and view.tokenizer is llm.tokenizer
    assert (view.method, llm.method) == ("pearl", "specbranch")
    view.max_batch = 2
    assert llm.max_batch == 64 and view.using("tree").max_batch == 2


def test_a_modelled_view_has_a_queue_of_its_own_behind_the_other(llm: LLM) -> None:
    view = llm.modelled("c10")
    assert view.core.models is llm.core.models and view.method == llm.method
    assert view.core.scheduler is not llm.scheduler and view.core.scheduler.first is llm.scheduler
    assert view.decoding.experience is not llm.decoding.experience, "what is modelled is not learned"
    output = view.using("autoregressive").generate("Smile", SamplingParams(max_tokens=5, ignore_eos=True))
    assert output.stats["decode_seconds"] == pytest.approx(4 * 0.01, rel=0.01)


def test_an_llm_that_is_dropped_is_gone_at_once(pair: tuple[str, str]) -> None:
    """Its models are large: they must not wait for the garbage collector."""
    llm = LLM(pair[0], method="autoregressive", device="cpu", options={"context_length": 64})
    llm.generate(["Smile", "x"], SamplingParams(max_tokens=3))
    runner = weakref.ref(llm.target_runner)
    gc.disable()
    try:
        del llm
        assert runner() is None
    finally:
        gc.enable()
