"""/v1/responses with the official client: the chat's own text, whole and as typed events; nothing is stored."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from running import Running

from specbranch import LLM, SamplingParams

TALK: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]
ASKED: dict[str, Any] = {"temperature": 0.8, "max_output_tokens": 24}
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=24)
SEED = {"seed": 7}
OPENING = [
    *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
]
ENDING = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]


@pytest.fixture
def client(served: Running) -> openai.OpenAI:
    return served.openai()


def create(client: openai.OpenAI, **given: Any) -> Any:
    return client.responses.create(**{"model": "tiny", **ASKED, "extra_body": SEED, **given})


def test_a_response_has_the_text_of_the_chat(client: openai.OpenAI, reference: LLM) -> None:
    expected = reference.chat(TALK, PARAMS)
    found = create(client, input=TALK[1:], instructions="Be brief.", metadata={"a": "b"})
    assert found.output_text == expected.text and found.id.startswith("resp_") and found.object == "response"
    assert found.status == "incomplete" and found.incomplete_details.reason == "max_output_tokens"
    assert found.output[0].type == "message" and found.output[0].role == "assistant"
    assert found.output[0].id.startswith("msg_") and found.output[0].content[0].type == "output_text"
    usage = found.usage
    assert usage.input_tokens == len(expected.prompt_token_ids) and usage.output_tokens == 24
    assert usage.total_tokens == usage.input_tokens + 24 and usage.output_tokens_details.reasoning_tokens == 0
    assert usage.input_tokens_details.cached_tokens >= 0
    assert found.instructions == "Be brief." and found.metadata == {"a": "b"} and found.temperature == 0.8


def test_every_form_of_the_same_input_gives_the_same_text(client: openai.OpenAI, reference: LLM) -> None:
    expected = reference.chat([{"role": "user", "content": "Why is the sky blue?"}], PARAMS).text
    parts = [{"type": "input_text", "text": "Why is the "}, {"type": "input_text", "text": "sky blue?"}]
    for given in (
        "Why is the sky blue?",
        [{"role": "user", "content": "Why is the sky blue?"}],
        [{"type": "message", "role": "user", "content": parts}],
    ):
        assert create(client, input=given, store=False).output_text == expected


def test_the_output_of_a_response_is_an_input_of_the_next(client: openai.OpenAI, reference: LLM) -> None:
    first = create(client, input=TALK)
    more = {"role": "user", "content": "And at night?"}
    talk: Any = [*TALK, {"role": "assistant", "content": first.output_text}, more]
    second = create(client, input=[*TALK, *(one.model_dump() for one in first.output), more])
    assert second.output_text == reference.chat(talk, PARAMS).text


def test_a_stream_has_the_typed_events_in_their_order(client: openai.OpenAI, reference: LLM) -> None:
    expected = reference.chat(TALK, PARAMS)
    events = list(create(client, input=TALK, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == OPENING and kinds[-4:] == [*ENDING, "response.incomplete"]
    assert set(kinds[4:-4]) == {"response.output_text.delta"} and len(kinds) > 10
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[4:-4]) == expected.text == events[-4].text
    assert events[-3].part.text == expected.text and events[-2].item.content[0].text == expected.text
    items = {event.item_id for event in events[3:-2]} | {events[2].item.id, events[-2].item.id}
    assert len(items) == 1 and events[2].item.status == "in_progress" and events[2].item.content == []
    assert events[0].response.status == events[1].response.status == "in_progress" and not events[0].response.output
    last = events[-1].response
    assert last.output_text == expected.text and last.usage.output_tokens == 24 and last.id == events[0].response.id
    assert last.status == "incomplete"


def test_an_answer_that_stops_by_itself_is_completed(client: openai.OpenAI, reference: LLM) -> None:
    free = reference.chat(TALK, PARAMS).text
    body = {**SEED, "stop": [free[8:12]]}
    whole = create(client, input=TALK, extra_body=body)
    assert whole.status == "completed" and whole.incomplete_details is None
    assert whole.output_text == free[: free.find(free[8:12])] and whole.output[0].status == "completed"
    events = list(create(client, input=TALK, extra_body=body, stream=True))
    assert events[-1].type == "response.completed" and events[-1].response.output_text == whole.output_text


def test_the_streaming_helper_of_the_client_understands_it(client: openai.OpenAI, reference: LLM) -> None:
    free = reference.chat(TALK, PARAMS).text
    body = {**SEED, "stop": [free[8:12]]}  # the helper knows no incomplete responses
    with client.responses.stream(model="tiny", input=TALK, **ASKED, extra_body=body) as stream:
        heard = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == heard == free[: free.find(free[8:12])]


def test_events_are_named_and_all_fields_are_there(served: Running) -> None:
    body = {"input": "Hello", "max_output_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    lines = [line.split("\n") for line in served.post("/v1/responses", body).text.split("\n\n") if line]
    events = [json.loads(data.removeprefix("data: ")) for _, data in lines]
    assert [name for name, _ in lines] == [f"event: {event['type']}" for event in events]
    assert events[-1]["type"] == "response.incomplete" and "choices" not in json.dumps(events)
    whole = served.post("/v1/responses", {**body, "stream": False}).json()
    assert set(whole) == set(events[-1]["response"]) == set(events[0]["response"])
    assert whole["store"] is False and whole["tools"] == [] and whole["previous_response_id"] is None
    assert whole["metrics"]["speculative_decoding"]["methods"]


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "no response is stored here; send the whole"),
        ({"store": True}, "store", "'store' true is not supported: no response is stored here"),
        ({"background": True}, "background", "nothing is answered in the background"),
        ({"conversation": "conv_1"}, "conversation", "no conversation is stored here"),
        ({"truncation": "auto"}, "truncation", "an input is never cut"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text", 'expected {"type": "json_schema"'),
        ({"text": {"format": {"type": "xml"}}}, "text", "text.format is {'type': 'xml'}; expected"),
        ({"text": {"verbosity": "low"}}, "verbosity", "there is no such switch here"),
        ({"text": {"format": {"type": "json_object"}}, "response_format": {"type": "json_object"}}, "text", "Give one"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0]: expected a tool of type function, got 'web_search'"),
        ({"tools": [{"type": "mcp", "server_label": "a", "server_url": "b"}]}, "tools", "got 'mcp': only functions"),
        ({"tools": [{"name": "a", "params": {}}]}, "params", "Known: description, name, parameters, strict, type"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"messages": []}, "messages", "'messages' is a parameter of /v1/chat/completions"),
        ({"max_tokens": 5}, "max_tokens", "not of /v1/responses"),
        ({"inptu": 1}, "inptu", "inptu"),
        ({"input": []}, "input", "expected a text, or a list of messages"),
        ({"input": 5}, "input", "expected a text, or a list of messages"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "input[0].role: expected one of system, developer"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input", "input[0] has no output"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input", "input[0] has no name"),
        (
            {"input": [{"type": "computer_call", "call_id": "c"}]},
            "input",
            "function_call_output and reasoning",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "an item has to be sent itself"),
        ({"input": [{"content": "x"}]}, "input", "input[0] has no role"),
        ({"input": [{"role": "user"}]}, "input", "input[0] (user) has no content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            "input[0] (user) has a part of type 'input_image'",
        ),
        ({"input": "word " * 4000}, "input", "maximum context length"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"n": 2}, "n", "1"),
    ],
)
def test_what_is_not_answered_is_refused_by_name(served: Running, given: Any, param: str, said: str) -> None:
    status, error = served.error("/v1/responses", {"input": "Hello", **given})
    assert status == 400 and error["param"] == param and said in error["message"], error
    assert served.is_idle()


def test_the_text_follows_its_format(client: openai.OpenAI, served: Running) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "f", "schema": schema, "strict": True}}
    found = create(client, input=TALK, text=form, max_output_tokens=80)
    assert json.loads(found.output_text)["a"] in (1, 2) and found.status == "completed"
    assert found.text.format.type == "json_schema" and found.text.format.schema_ == schema
    body = {"messages": TALK, "temperature": 0.8, "seed": 7, "max_tokens": 80}
    given = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    chat = served.post("/v1/chat/completions", {**body, "response_format": given}).json()
    assert chat["choices"][0]["message"]["content"] == found.output_text
    bias = {served.engine.tokenizer.encode("}", add_special=False)[0]: 100}
    some = create(client, input=TALK, text={"format": {"type": "json_object"}}, extra_body={**SEED, "logit_bias": bias})
    assert isinstance(json.loads(some.output_text), dict)


def test_the_client_parses_a_model_of_its_own(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    pydantic = pytest.importorskip("pydantic")

    class Colour(pydantic.BaseModel):
        bright: bool

    parsed = client.responses.parse(model="tiny", input="Hello", text_format=Colour, max_output_tokens=100)
    assert isinstance(parsed.output_parsed, Colour)


def test_neutral_values_are_accepted(served: Running) -> None:
    body = {
        "input": "Hello",
        "max_output_tokens": 2,
        "background": False,
        "store": False,
        "tools": [],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "include": [],
        "previous_response_id": None,
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "user": "me",
    }
    assert served.post("/v1/responses", body).status_code == 200


def test_a_late_stream_ends_with_an_error_and_a_failed_response(served: Running, monkeypatch: Any) -> None:
    from specbranch.errors import DeadlinePassed
    from specbranch.serve.answering import Answering

    def late(*given: Any) -> None:
        raise DeadlinePassed("The request was not finished within 1 s.")

    monkeypatch.setattr(Answering, "finish", late)
    body = {"input": "Hello", "max_output_tokens": 40, "stream": True}
    lines = [line.split("\n") for line in served.post("/v1/responses", body).text.split("\n\n") if line]
    error, failed = (json.loads(data.removeprefix("data: ")) for _, data in lines[-2:])
    assert error["type"] == "error" and error["code"] == "deadline_passed" and "not finished" in error["message"]
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "deadline_passed"
