"""The official client against a running server with the default pair: what it hears is what the engine says alone."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from running import Running

from specbranch import LLM, SamplingParams

pytestmark = pytest.mark.default_model
MODEL = "smollm2-135m"
TALK: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]
ASKED: dict[str, Any] = {"temperature": 0.8, "seed": 7, "max_tokens": 24}
PARAMS = SamplingParams(**ASKED)


@pytest.fixture
def client(served_default: Running) -> openai.OpenAI:
    return served_default.openai()


def test_a_chat_is_what_the_engine_says_whole_and_streamed(client: openai.OpenAI, default_reference: LLM) -> None:
    expected = default_reference.chat(TALK, PARAMS)
    whole = client.chat.completions.create(model=MODEL, messages=TALK, **ASKED)
    assert whole.choices[0].message.content == expected.text and whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == len(expected.token_ids)
    assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
    parts = list(client.chat.completions.create(model=MODEL, messages=TALK, stream=True, **ASKED))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected.text
    assert parts[0].choices[0].delta.role == "assistant" and parts[-1].choices[0].finish_reason == "length"
    assert len({part.id for part in parts}) == 1 and len(parts) > 4


@pytest.mark.slow
def test_samples_are_numbered_and_streamed_side_by_side(client: openai.OpenAI, default_reference: LLM) -> None:
    expected = default_reference.generate("Once upon a time", SamplingParams(**{**ASKED, "n": 3}))
    texts = [expected.text, *(one.text for one in expected.alternatives)]
    whole = client.completions.create(model=MODEL, prompt="Once upon a time", n=3, **ASKED)
    assert [choice.text for choice in whole.choices] == texts and len(set(texts)) == 3
    heard = ["", "", ""]
    options: Any = {"include_usage": True}
    parts = list(
        client.completions.create(
            model=MODEL, prompt="Once upon a time", n=3, stream=True, stream_options=options, **ASKED
        )
    )
    for part in parts[:-1]:
        assert part.usage is None
        heard[part.choices[0].index] += part.choices[0].text
    assert heard == texts and parts[-1].choices == [] and parts[-1].usage is not None
    assert whole.usage and parts[-1].usage.completion_tokens == whole.usage.completion_tokens == 72


def test_any_number_of_stops_ends_an_answer_before_the_first(client: openai.OpenAI, default_reference: LLM) -> None:
    free = default_reference.chat(TALK, PARAMS).text
    stops = [free[30:34], "≠", "☃", "never said", "nor this", free[20:24]]
    cut = free[: min(free.find(stop) for stop in stops if stop in free)]
    whole = client.chat.completions.create(model=MODEL, messages=TALK, stop=stops, **ASKED)
    assert whole.choices[0].message.content == cut and whole.choices[0].finish_reason == "stop"
    parts = client.chat.completions.create(model=MODEL, messages=TALK, stop=stops, stream=True, **ASKED)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == cut


@pytest.mark.slow
def test_logprobs_are_the_engines_and_spell_the_text(client: openai.OpenAI, default_reference: LLM) -> None:
    expected = default_reference.chat(TALK, SamplingParams(**ASKED, logprobs=3))
    assert expected.logprobs is not None
    answer = client.chat.completions.create(model=MODEL, messages=TALK, logprobs=True, top_logprobs=3, **ASKED)
    reply = answer.choices[0].logprobs
    assert reply is not None and reply.content is not None
    assert [one.logprob for one in reply.content] == [pytest.approx(one.logprob, abs=1e-4) for one in expected.logprobs]
    assert all(len(one.top_logprobs) == 3 for one in reply.content)
    assert bytes(byte for one in reply.content for byte in one.bytes or []).decode() == expected.text
    parts = client.chat.completions.create(
        model=MODEL, messages=TALK, logprobs=True, top_logprobs=3, stream=True, **ASKED
    )
    heard = [part.choices[0].logprobs for part in parts]
    assert [one for part in heard if part for one in part.content or []] == reply.content


def test_errors_are_of_the_clients_kinds_and_say_what_to_do(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'") as missing:
        client.chat.completions.create(model="gpt", messages=TALK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="chat template takes no tools") as refused:
        client.chat.completions.create(model=MODEL, messages=TALK, tools=tools)
    assert refused.value.param == "tools" and refused.value.request_id
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens") as long:
        client.completions.create(model=MODEL, prompt=[5] * 600)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="No response is stored here"):
        client.responses.retrieve("resp_1")


def test_models_are_listed_and_described(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "specbranch"
    with pytest.raises(openai.NotFoundError, match="no model 'other/one'"):
        client.models.retrieve("other/one")


def test_the_cached_part_of_a_prompt_is_reported(client: openai.OpenAI) -> None:
    talk: Any = [{"role": "user", "content": "Tell me a long story about a branch. " * 8}]
    first, second = (client.chat.completions.create(model=MODEL, messages=talk, max_tokens=2).usage for _ in range(2))
    assert first and second and first.prompt_tokens_details and second.prompt_tokens_details
    assert first.prompt_tokens == second.prompt_tokens
    assert (second.prompt_tokens_details.cached_tokens or 0) > (first.prompt_tokens_details.cached_tokens or 0)
