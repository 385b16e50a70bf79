"""continue_final_message: the last message goes on, and the answer is what follows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from running import Running, events, texts
from scripted import Script, called, scripted, tool

from specbranch import LLM, SamplingParams

CHAT, COMPLETE, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
BASE: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 20}
GOES_ON = {"continue_final_message": True, "add_generation_prompt": False}
ASKED = {"role": "user", "content": "Smile, and wave."}
BEGUN = {"role": "assistant", "content": "A smile is "}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory, nothing_kept: None) -> Iterator[Script]:
    with scripted(tmp_path_factory.mktemp("scripted")) as made:
        yield made


def completed(server: Running, messages: list[dict[str, Any]], **given: Any) -> str:
    """The completion of the prompt that a conversation becomes."""
    prompt = server.post(TOKENIZE, {"messages": messages, **GOES_ON, **given}).json()["tokens"]
    return str(server.post(COMPLETE, {"prompt": prompt, **BASE}).json()["choices"][0]["text"])


def continued(server: Running, last: dict[str, Any], **given: Any) -> dict[str, Any]:
    answer = server.post(CHAT, {"messages": [ASKED, last], **GOES_ON, "max_tokens": 60, **given})
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def test_the_text_is_the_completion_of_the_rendered_prompt(served: Running, reference: LLM) -> None:
    talk = [ASKED, BEGUN]
    whole = served.post(CHAT, {"messages": talk, **BASE, **GOES_ON}).json()["choices"][0]["message"]["content"]
    streamed = events(served.post(CHAT, {"messages": talk, **BASE, "continue_final_message": True, "stream": True}))
    outputs = reference.chat(talk, SamplingParams(**BASE), continue_final_message=True)
    chunks = reference.stream_chat(talk, SamplingParams(**BASE), continue_final_message=True)
    assert whole == texts(streamed)[0] == completed(served, talk) == outputs.text == "".join(c.text for c in chunks)
    assert whole != served.post(CHAT, {"messages": talk, **BASE}).json()["choices"][0]["message"]["content"]
    parts = {"role": "assistant", "content": [{"type": "text", "text": text} for text in ("A smile ", "is ")]}
    assert (
        served.post(CHAT, {"messages": [ASKED, parts], **BASE, **GOES_ON}).json()["choices"][0]["message"]["content"]
        == whole
    )


@pytest.mark.default_model
@pytest.mark.slow
def test_the_default_model_goes_on_with_a_message(served_default: Running, default_reference: LLM) -> None:
    talk = [{"role": "user", "content": "Count to ten."}, {"role": "assistant", "content": "1, 2, 3, 4,"}]
    whole = served_default.post(CHAT, {"messages": talk, **BASE, **GOES_ON}).json()["choices"][0]["message"]["content"]
    assert whole == completed(served_default, talk) == completed(served_default, talk, add_generation_prompt=None)
    assert whole == default_reference.chat(talk, SamplingParams(**BASE), continue_final_message=True).text


def test_a_prompt_without_an_opening_may_be_asked_for(served: Running) -> None:
    sent = {"messages": [ASKED], "add_generation_prompt": False}
    prompt = served.post(TOKENIZE, sent).json()["tokens"]
    text = served.post(COMPLETE, {"prompt": prompt, **BASE}).json()["choices"][0]["text"]
    assert served.post(CHAT, {**sent, **BASE}).json()["choices"][0]["message"]["content"] == text


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"messages": [ASKED, BEGUN], "add_generation_prompt": True}, "are both true"),
    ({"messages": [ASKED]}, "is of the role 'user'; expected one of assistant"),
    ({"messages": [ASKED, {"role": "assistant", "content": "", "reasoning": "Hm"}]}, "template changes the reasoning"),
]


@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
@pytest.mark.parametrize(("body", "said"), MISTAKES)
def test_what_cannot_be_continued_gets_a_sentence(served: Running, path: str, body: dict[str, Any], said: str) -> None:
    status, error = served.error(path, {"continue_final_message": True, **body})
    assert status == 400 and said in error["message"], error


def test_other_endpoints_name_those_that_continue(served: Running) -> None:
    for path, body in ((COMPLETE, {"prompt": "x"}), ("/v1/responses", {"input": "x"})):
        status, error = served.error(path, {**body, "continue_final_message": True})
        assert status == 400 and "is a parameter of /v1/chat/completions and /tokenize, not of" in error["message"]
        assert served.post(path, {**body, "continue_final_message": False, "temperature": 0}).status_code == 200


def test_calls_are_found_in_the_new_text(script: Script) -> None:
    tools = [tool("weather", city={"type": "string"})]
    script.text = f"see.{called('weather', city='Oslo')}"
    message = continued(script.served, {"role": "assistant", "content": "Let me"}, tools=tools)
    assert message["content"] == "see." and message["tool_calls"][0]["function"]["name"] == "weather"
    assert script.prompts[-1].endswith("[assistant] Let me")
    half = called("weather", city="Oslo")[:30]
    body = {"messages": [ASKED, {"role": "assistant", "content": half}], **GOES_ON, "tools": tools}
    status, error = script.served.error(CHAT, body)
    assert status == 400 and "ends within a tool call" in error["message"]
    calls = [{"id": "1", "function": {"name": "weather", "arguments": "{}"}}]
    body["messages"] = [ASKED, {"role": "assistant", "content": "See", "tool_calls": calls}]
    assert "has tool_calls" in script.served.error(CHAT, body)[1]["message"]


@pytest.mark.parametrize(
    ("last", "said", "reasoning", "content"),
    [
        ({"content": "", "reasoning_content": "It is"}, " Oslo.</think>Rain.", "Oslo.", "Rain."),
        ({"content": "<think>It is"}, " Oslo.</think>Rain.", "Oslo.", "Rain."),
        ({"content": "<think>Oslo.</think>It"}, " rains.", None, " rains."),
        ({"content": "It", "reasoning": "Oslo."}, " rains.", None, " rains."),
        ({"content": ""}, "<think>Oslo.</think>Rain.", "Oslo.", "Rain."),
    ],
)
def test_reasoning_goes_on_where_the_message_ended_within_it(
    script: Script, last: dict[str, Any], said: str, reasoning: str | None, content: str
) -> None:
    script.text = said
    message = continued(script.served, {"role": "assistant", **last})
    assert (message.get("reasoning"), message["content"]) == (reasoning, content)


def test_a_schema_holds_the_new_text(script: Script) -> None:
    script.text = ' Oslo.</think>"rain"'
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["rain"]}}}}
    message = continued(script.served, {"role": "assistant", "content": "<think>It is"}, **form)
    assert (message["reasoning"], message["content"]) == ("Oslo.", '"rain"')
