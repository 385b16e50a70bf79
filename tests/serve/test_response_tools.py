"""Function calls and reasoning of /v1/responses, with the official client: items, typed events, and back as input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from scripted import Script, called, scripted

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
TIME: dict[str, Any] = {"type": "function", "name": "time", "parameters": {"type": "object"}, "strict": False}
OSLO = '{"city": "Oslo"}'
ANSWER = f"<think>\nHm.\n</think>\n\nI look.\n{called('weather', city='Oslo')}\n{called('time')}"


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory, nothing_kept: None) -> Iterator[Script]:
    with scripted(tmp_path_factory.mktemp("scripted"), context_length=1024) as made:
        yield made


@pytest.fixture
def client(script: Script) -> openai.OpenAI:
    script.prompts.clear()
    return script.served.openai()


def create(client: openai.OpenAI, **given: Any) -> Any:
    base = {"model": "scripted", "input": "How is the weather?", "tools": [WEATHER, TIME]}
    return client.responses.create(**{**base, **given})


def test_reasoning_text_and_calls_are_items(script: Script, client: openai.OpenAI) -> None:
    script.text = ANSWER
    found = create(client)
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call", "function_call"]
    thought, said, weather, time = found.output
    assert thought.content[0].text == "Hm." and thought.summary == [] and said.content[0].text == "I look."
    assert (weather.name, weather.arguments, time.name, time.arguments) == ("weather", OSLO, "time", "{}")
    assert weather.call_id.startswith("call_") and weather.call_id != time.call_id
    assert len({item.id for item in found.output}) == 4 and {item.status for item in found.output} == {"completed"}
    assert found.status == "completed" and found.output_text == "I look."
    assert 10 < found.usage.output_tokens_details.reasoning_tokens < found.usage.output_tokens
    assert found.tools[0].name == "weather" and found.tool_choice == "auto" and found.parallel_tool_calls
    chat = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
    assert f"[tools] {json.dumps([chat])[:-1]}" in script.prompts[-1]


def test_events_of_a_stream_make_the_same_items(script: Script, client: openai.OpenAI) -> None:
    script.text = ANSWER
    events = list(create(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    once = [kind for at, kind in enumerate(kinds) if not at or kinds[at - 1] != kind]  # deltas once
    part = ["output_item.added", "content_part.added"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert once == [
        *("created", "in_progress"),
        *(*part, "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *(*part, "output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        *(*call, *call, "completed"),
    ]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    last = events[-1].response.output
    assert [item.model_dump() for item in done] == [item.model_dump() for item in last]
    whole = create(client).output
    assert [_plain(item) for item in last] == [_plain(item) for item in whole]
    for at, item in enumerate(last):
        parts = [event for event in events if getattr(event, "item_id", None) == item.id]
        assert {event.output_index for event in parts} == {at}
        text = "".join(event.delta for event in parts if event.type.endswith(".delta"))
        assert text == (item.arguments if item.type == "function_call" else item.content[0].text)


def _plain(item: Any) -> dict[str, Any]:
    """An item without what differs from answer to answer."""
    return {name: value for name, value in item.model_dump().items() if name not in ("id", "call_id")}


def test_the_streaming_helper_of_the_client_understands_calls(script: Script, client: openai.OpenAI) -> None:
    script.text = ANSWER
    tools: Any = [WEATHER, TIME]
    with client.responses.stream(model="scripted", input="How is the weather?", tools=tools) as stream:
        deltas = [event.snapshot for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert OSLO in deltas and [item.type for item in final.output][2:] == ["function_call"] * 2


def test_the_tool_loop_of_a_client_goes_round(script: Script, client: openai.OpenAI) -> None:
    """The items of a response go back with the outputs of its calls; the prompt is the chat's."""
    script.text = ANSWER
    first = create(client)
    talk: list[Any] = [{"role": "user", "content": "How is the weather?"}, *(one.model_dump() for one in first.output)]
    calls = [item for item in first.output if item.type == "function_call"]
    talk += [{"type": "function_call_output", "call_id": call.call_id, "output": "Rain."} for call in calls]
    script.text = "It rains in Oslo."
    assert create(client, input=talk).output_text == script.text
    made = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    chat: list[Any] = [
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": made},
        *({"role": "tool", "tool_call_id": call.call_id, "content": "Rain."} for call in calls),
    ]
    tools: Any = [
        {"type": "function", "function": {k: one[k] for k in ("name", "parameters")}} for one in (WEATHER, TIME)
    ]
    client.chat.completions.create(model="scripted", messages=chat, tools=tools)
    assert script.prompts[-1] == script.prompts[-2] and "<think>Hm.</think>I look.<tool_call>" in script.prompts[-1]


def test_output_that_ends_within_reasoning_goes_back(script: Script, client: openai.OpenAI) -> None:
    script.text = ANSWER.replace("Hm.", "Hm. " * 40)
    first = create(client, max_output_tokens=40)
    assert first.status == "incomplete" and [item.type for item in first.output] == ["reasoning"]
    talk: list[Any] = [{"role": "user", "content": "How is the weather?"}, *(one.model_dump() for one in first.output)]
    script.text = "It rains."
    assert create(client, input=[*talk, {"role": "user", "content": "Go on."}]).output_text == script.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_is_incomplete(script: Script, client: openai.OpenAI, stream: bool) -> None:
    script.text = called("weather", city="Oslo" * 20)
    found = create(client, max_output_tokens=60, stream=stream)
    response = list(found)[-1].response if stream else found
    assert response.status == "incomplete" and response.output[0].status == "incomplete"
    assert response.output[0].arguments.startswith('{"city": "Oslo')


def test_an_empty_answer_is_an_empty_message(script: Script, client: openai.OpenAI) -> None:
    script.text = ""
    assert [item.content[0].text for item in create(client).output] == [""]
    events = list(create(client, stream=True))
    assert [event.type for event in events][-2:] == ["response.output_item.done", "response.completed"]


def test_one_call_is_sent_where_calls_are_not_parallel(script: Script, client: openai.OpenAI) -> None:
    script.text = f"{called('weather', city='Oslo')}\n{called('time')}"
    assert [item.type for item in create(client, parallel_tool_calls=False).output] == ["function_call"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_forced_calls_follow_the_grammar(script: Script, client: openai.OpenAI, choice: Any) -> None:
    pytest.importorskip("llguidance")
    script.text = called("weather", city="Oslo")
    found = create(client, tool_choice=choice, parallel_tool_calls=False)
    assert [(item.name, item.arguments) for item in found.output] == [("weather", OSLO)]
    assert found.tool_choice == choice if isinstance(choice, str) else found.tool_choice.name == "weather"
    script.text = called("weather", town="Oslo")  # the schema forbids what the script says
    with pytest.raises(openai.BadRequestError, match="not allowed by the grammar"):
        create(client, tool_choice=choice)


def test_tools_that_the_choice_does_not_have_are_refused(script: Script) -> None:
    body = {"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "wind"}}
    status, error = script.served.error("/v1/responses", body)
    assert status == 400 and error["param"] == "tool_choice" and "'wind', which is none of" in error["message"]
