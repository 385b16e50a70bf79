"""OpenAI's `prediction`: the answer stays the same, and usage says what became of its tokens."""

from __future__ import annotations

from typing import Any

import pytest
from running import Running

from specbranch import LLM, SamplingParams

TALK: list[Any] = [{"role": "user", "content": "Why is the sky blue?"}]
LOOKUP = {"speculative": {"method": "lookup"}, "temperature": 0, "max_tokens": 32}


def predicted(text: Any) -> dict[str, Any]:
    return {"type": "content", "content": text}


def test_the_official_client_hears_the_same_text_and_what_was_accepted(served: Running, reference: LLM) -> None:
    said = reference.chat(TALK, SamplingParams(max_tokens=32)).text
    client = served.openai()
    for expected in (said, [{"type": "text", "text": said[:30]}, {"type": "text", "text": said[30:]}]):
        body = {"speculative": LOOKUP["speculative"]}
        given: dict[str, Any] = {"prediction": predicted(expected), "extra_body": body}
        answer = client.chat.completions.create(model="tiny", messages=TALK, temperature=0, max_tokens=32, **given)
        assert answer.choices[0].message.content == said
        details = answer.usage.completion_tokens_details if answer.usage else None
        assert details is not None and details.rejected_prediction_tokens is not None
        assert details.accepted_prediction_tokens is not None
        assert 0 < details.accepted_prediction_tokens < 32


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_wrong_prediction_changes_nothing_and_is_counted_in_streams_too(
    served: Running, reference: LLM, temperature: float
) -> None:
    params = SamplingParams(max_tokens=32, temperature=temperature, seed=5)
    said = reference.chat(TALK, params).text
    body = {"messages": TALK, **LOOKUP, "temperature": temperature, "seed": 5, "n": 2}
    body |= {"prediction": predicted("Because of something else, my friend. " * 3)}
    answer = served.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"] == said
    details = answer["usage"]["completion_tokens_details"]
    assert set(details) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    assert details["rejected_prediction_tokens"] > 0
    streamed = served.post("/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert f'"completion_tokens_details":{{"accepted_prediction_tokens":{details["accepted_prediction_tokens"]},' in (
        streamed.text
    )
    del body["prediction"]
    assert "completion_tokens_details" not in served.post("/v1/chat/completions", body).json()["usage"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("text", 'prediction: expected an object such as {"type": "content"'),
        ({"content": "x"}, "prediction.type: Field required"),
        ({"type": "text", "content": "x"}, "prediction.type: Input should be 'content'"),
        ({"type": "content"}, "prediction.content: expected a text, or a list of parts"),
        ({"type": "content", "content": 5}, "prediction.content: expected a text, or a list of parts"),
        ({"type": "content", "content": "x", "more": 1}, "parameter of prediction"),
        (predicted([{"type": "image_url", "image_url": {}}]), "prediction has a part of type 'image_url'"),
        (predicted("word " * 4000), "your prediction has 20000 characters"),
        (predicted("word? " * 300), "your prediction resulted in"),
    ],
)
def test_what_is_no_prediction_is_refused_with_a_sentence(served: Running, given: Any, said: str) -> None:
    status, error = served.error("/v1/chat/completions", {"messages": TALK, "prediction": given})
    assert status == 400 and said in error["message"], error


def test_an_empty_prediction_is_none(served: Running) -> None:
    body = {"messages": TALK, **LOOKUP, "prediction": predicted("")}
    details = served.post("/v1/chat/completions", body).json()["usage"]["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
