"""Tools and reasoning in the server, with the official client: calls, streamed deltas, messages of tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from running import events
from scripted import Script, called, scripted, tool

from small_tokenizers import byte_level
from specbranch.errors import BadParameter
from specbranch.serve.settings import ServerSettings
from specbranch.serve.tools import AnswerFormats, ToolUse
from specbranch.text.tokenizer import Tokenizer
from specbranch.text.tools.reasoning import BRACKETS, THINK

WEATHER = tool("weather", city={"type": "string"})
TIME = tool("time")
TALK: list[Any] = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory, nothing_kept: None) -> Iterator[Script]:
    with scripted(tmp_path_factory.mktemp("scripted")) as made:
        yield made


@pytest.fixture
def client(script: Script) -> openai.OpenAI:
    script.prompts.clear()
    return script.served.openai()


def ask(client: openai.OpenAI, **given: Any) -> Any:
    return client.chat.completions.create(**{"model": "scripted", "messages": TALK, "tools": [WEATHER, TIME], **given})


def streamed(client: openai.OpenAI, **given: Any) -> tuple[dict[str, Any], str]:
    """A stream put together as clients do, and its finish reason."""
    parts = list(ask(client, stream=True, **given))
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for delta in (part.choices[0].delta for part in parts):
        message["content"] += delta.content or ""
        message["reasoning"] += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or ():
            if call.id is not None:  # the first of a call has all but the arguments
                assert call.index == len(message["tool_calls"]) and call.type == "function" and call.function.name
                message["tool_calls"].append({"id": call.id, "name": call.function.name, "arguments": ""})
            message["tool_calls"][call.index]["arguments"] += call.function.arguments
    return message, parts[-1].choices[0].finish_reason


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def test_a_call_comes_whole_and_streamed(script: Script, client: openai.OpenAI) -> None:
    script.text = f"I look.\n\n{called('weather', city='Oslo')}\n{called('time')}"
    choice = ask(client).choices[0]
    expected = [("weather", '{"city": "Oslo"}'), ("time", "{}")]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    assert calls_of(choice.message) == expected
    assert all(call.id.startswith("call_") for call in choice.message.tool_calls)
    message, reason = streamed(client)
    assert reason == "tool_calls" and message["content"] == "I look."
    assert [(call["name"], call["arguments"]) for call in message["tool_calls"]] == expected
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert f"[tools] {json.dumps([WEATHER, TIME])}" in script.prompts[-1]


def test_an_answer_with_only_a_call_has_no_content(script: Script, client: openai.OpenAI) -> None:
    script.text = called("time")
    body = {"messages": TALK, "tools": [TIME]}
    message = script.served.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert message["content"] is None and "reasoning" not in message
    assert set(message["tool_calls"][0]) == {"id", "type", "function"}


def test_deltas_of_a_stream_are_those_of_openai(script: Script) -> None:
    script.text = called("weather", city="Oslo")
    body = {"messages": TALK, "tools": [WEATHER], "stream": True}
    deltas = [event["choices"][0]["delta"] for event in events(script.served.post("/v1/chat/completions", body))]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    first, *later = [delta["tool_calls"][0] for delta in deltas[1:-1]]
    assert set(first) == {"index", "id", "type", "function"}
    assert first["function"] == {"name": "weather", "arguments": ""}
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in later)


def test_reasoning_is_apart_from_the_text(script: Script, client: openai.OpenAI) -> None:
    script.text = f"<think>\nHm, Oslo.\n</think>\n\nWell.{called('weather', city='Oslo')}"
    message = ask(client).choices[0].message
    assert message.reasoning_content == message.reasoning == "Hm, Oslo." and message.content == "Well."
    heard, reason = streamed(client)
    assert heard["reasoning"] == "Hm, Oslo." and heard["content"] == "Well." and reason == "tool_calls"


def test_tokens_of_reasoning_are_counted(script: Script, client: openai.OpenAI) -> None:
    thought, said = "<think>Hm, Oslo.</think>", "Well, it rains."
    script.text = thought + said
    usage = ask(client, n=2).usage
    count = len(script.tokenizer.encode(thought, add_special=False))
    assert usage.completion_tokens_details.reasoning_tokens == 2 * count
    parts = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert parts[-1].usage.completion_tokens_details.reasoning_tokens == count
    script.text = said
    assert ask(client).usage.completion_tokens_details.reasoning_tokens == 0


def test_reasoning_that_the_template_opened_is_apart_too(script: Script, client: openai.OpenAI) -> None:
    script.text = "Hm.\n</think>\n\nWell."
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    message = ask(client, tools=[], extra_body=thinking).choices[0].message
    assert (message.reasoning, message.content) == ("Hm.", "Well.") and script.prompts[-1].endswith("<think>\n")
    assert ask(client, tools=[]).choices[0].message.content == script.text  # nothing was opened


def test_a_malformed_call_is_text(script: Script, client: openai.OpenAI) -> None:
    script.text = 'So: <tool_call>{"nam": "weather"}</tool_call>'
    choice = ask(client).choices[0]
    assert choice.message.content == script.text and choice.finish_reason == "stop" and not choice.message.tool_calls
    assert streamed(client)[0]["content"] == script.text


def test_a_call_that_is_cut_ends_by_length(script: Script, client: openai.OpenAI) -> None:
    script.text = called("weather", city="Oslo" * 20)
    choice = ask(client, max_tokens=60).choices[0]
    message, reason = streamed(client, max_tokens=60)
    assert choice.finish_reason == reason == "length"
    assert calls_of(choice.message) == [(call["name"], call["arguments"]) for call in message["tool_calls"]]
    assert choice.message.tool_calls[0].function.arguments.startswith('{"city": "Oslo')


def test_without_parallel_calls_only_the_first_is_sent(script: Script, client: openai.OpenAI) -> None:
    script.text = f"{called('weather', city='Oslo')}\n{called('time')}"
    assert calls_of(ask(client, parallel_tool_calls=False).choices[0].message) == [("weather", '{"city": "Oslo"}')]
    assert len(streamed(client, parallel_tool_calls=False)[0]["tool_calls"]) == 1


def test_with_the_choice_none_the_model_hears_of_no_tools(script: Script, client: openai.OpenAI) -> None:
    script.text = called("time")
    choice = ask(client, tool_choice="none").choices[0]
    assert choice.message.content == script.text and choice.finish_reason == "stop"
    assert "[tools]" not in script.prompts[-1]


def test_the_tool_loop_of_a_client_goes_round(script: Script, client: openai.OpenAI) -> None:
    script.text = f"<think>Hm.</think>{called('weather', city='Oslo')}"
    answer = ask(client).choices[0].message
    talk = [*TALK, answer.model_dump(exclude_none=True)]
    talk += [{"role": "tool", "tool_call_id": call.id, "content": "Rain."} for call in answer.tool_calls]
    script.text = "It rains in Oslo."
    assert ask(client, messages=talk).choices[0].message.content == script.text
    said = '[assistant] <think>Hm.</think><tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    assert f"{said}\n[tool] Rain. ({answer.tool_calls[0].id})\n[assistant]" in script.prompts[-1]


def test_arguments_that_are_no_json_go_back_as_they_are(script: Script, client: openai.OpenAI) -> None:
    script.text = "Sorry."
    call = {"id": "1", "type": "function", "function": {"name": "time", "arguments": "{oops"}}
    talk = [*TALK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert ask(client, messages=talk).choices[0].message.content == "Sorry."
    assert '"arguments": "{oops"' in script.prompts[-1]


def test_what_a_client_noted_of_an_answer_may_come_back(script: Script) -> None:
    """litellm adds such notes to the message of an answer, and sends them with the next request."""
    script.text = "Sorry."
    notes = {"provider_specific_fields": {"refusal": None}}
    call = {"id": "1", "type": "function", "function": {"name": "time", "arguments": "{}", **notes}, **notes}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "function_call": None, **notes}
    talk = [*TALK, message, {"role": "tool", "tool_call_id": "1", "content": "Noon."}]
    said = script.served.post("/v1/chat/completions", {"messages": talk, "tools": [WEATHER, TIME]})
    assert said.json()["choices"][0]["message"]["content"] == "Sorry."
    assert "provider_specific_fields" not in script.prompts[-1]


FORMS = {
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}',
    "llama3_json": '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("name", FORMS)
def test_formats_with_special_tokens_are_read_too(script: Script, client: openai.OpenAI, name: str) -> None:
    script.text = FORMS[name]
    with script.format(name):
        message = ask(client).choices[0].message
        heard, reason = streamed(client, stop=["never said"])
    assert calls_of(message) == [("weather", '{"city": "Oslo"}')] and message.content is None
    assert reason == "tool_calls" and heard["tool_calls"][0]["arguments"] == '{"city": "Oslo"}' and not heard["content"]
    assert len(message.tool_calls[0].id) == (9 if name == "mistral" else 29)


def test_special_tokens_are_no_text_where_no_parser_needs_them(script: Script, client: openai.OpenAI) -> None:
    script.text = "a[TOOL_CALLS]b"
    with script.format("mistral"):
        assert ask(client, tools=[]).choices[0].message.content == "ab"
        assert ask(client).choices[0].message.content == script.text


def test_log_probabilities_are_there_for_every_token(script: Script, client: openai.OpenAI) -> None:
    script.text = f"<think>Hm.</think>Well.{called('time')}"
    whole = ask(client, logprobs=True)
    parts = list(ask(client, logprobs=True, stream=True))
    heard = [one for part in parts if part.choices[0].logprobs for one in part.choices[0].logprobs.content]
    assert [one.token for one in heard] == [one.token for one in whole.choices[0].logprobs.content]
    assert len(heard) == whole.usage.completion_tokens


def test_several_samples_have_calls_of_their_own(script: Script, client: openai.OpenAI) -> None:
    script.text = called("time")
    choices = ask(client, n=2).choices
    assert [calls_of(choice.message) for choice in choices] == [[("time", "{}")]] * 2
    assert choices[0].message.tool_calls[0].id != choices[1].message.tool_calls[0].id


NAMED = {"type": "function", "function": {"name": "time"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": {**NAMED, "function": {"name": "x"}}}, "tool_choice is 'x', which is none of the tools: weather"),
    ({"tool_choice": "required", "tools": []}, "there are no tools"),
    ({"tool_choice": "some"}, "expected none, auto, required"),
    ({"tools": [TIME, TIME]}, "tools has two functions 'time'"),
    ({"tools": [TIME, {"type": "web_search"}]}, "tools[1]: expected a tool of type function, got 'web_search'"),
    ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "got 'custom': only functions are called here"),
    ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"function": {"name": "a", "x": 1}}]}, "Unknown parameter of function 'x'"),
    ({"tools": "weather"}, "expected a list of tools"),
    ({"functions": [TIME]}, "'functions' is not supported: it was replaced by tools"),
    ({"messages": [{"role": "function", "content": "x"}]}, "replaced by 'tool'"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [NAMED]}]}, "only an assistant calls tools"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [1]}]},
        "messages[0].tool_calls[0] (assistant): expected a list",
    ),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0] (assistant) has no content"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_tools_that_would_not_be_honoured_are_refused(script: Script, given: dict[str, Any], said: str) -> None:
    body = {"messages": TALK, "tools": [WEATHER, TIME], **given}
    status, error = script.served.error("/v1/chat/completions", body)
    assert status == 400 and said in error["message"], error


def test_the_tokens_of_tools_are_counted(script: Script, client: openai.OpenAI) -> None:
    script.text = "Hello."
    used = ask(client).usage.prompt_tokens
    counted = script.served.post("/tokenize", {"messages": TALK, "tools": [WEATHER, TIME]}).json()["count"]
    assert counted == used > script.served.post("/tokenize", {"messages": TALK}).json()["count"]


def test_formats_are_those_of_the_template_or_those_that_are_named() -> None:
    shows = Tokenizer(byte_level(), {}, (), "{{ tools }}<tool_call></think>")
    silent = Tokenizer(byte_level(), {}, (), "{{ messages }}")

    def found(tokenizer: Tokenizer, **given: Any) -> tuple[Any, ...]:
        formats = AnswerFormats.of(tokenizer, ServerSettings(**given))
        return formats.takes_tools, formats.calls and formats.calls.name, formats.thinking

    assert found(shows) == (True, "hermes", THINK) and found(silent) == (False, None, None)
    assert found(shows, tool_call_parser="qwen3_xml") == (True, "qwen3_coder", THINK)
    assert found(shows, reasoning_parser="none") == (True, "hermes", None)
    assert found(silent, reasoning_parser="mistral")[2] is BRACKETS
    assert found(Tokenizer(byte_level(), {})) == (False, None, None)


def test_a_grammar_begins_behind_reasoning_unless_the_prompt_has_closed_it() -> None:
    use = ToolUse(AnswerFormats(True, None, THINK), (), True, {"regex": "a"}, forces_calls=False)
    assert use.reasoning("[assistant]") == ("<think>", "</think>")
    assert use.reasoning("[assistant]<think>\n") == ("", "</think>")
    assert use.reasoning("[assistant]<think>\n\n</think>\n\n") == ()  # Qwen3 with enable_thinking false
    assert use.reasoning("<think>x</think> Well?[assistant]") == ("<think>", "</think>")
    assert ToolUse(AnswerFormats(True, None, None), (), True, {}, forces_calls=False).reasoning("<think>") == ()


@pytest.mark.parametrize("opened", [False, True])
def test_a_response_format_begins_behind_reasoning(script: Script, client: openai.OpenAI, opened: bool) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"enum": ["rain", "sun"]}}}
    given = {"tools": [], "response_format": form, "extra_body": {"chat_template_kwargs": {"enable_thinking": opened}}}
    start = "" if opened else "<think>"
    script.text = f'{start}Hm, {{{{.</think>\n\n"rain"'
    choice = ask(client, **given).choices[0]
    assert choice.message.content == '"rain"' and choice.message.reasoning_content == "Hm, {{."
    script.text = f'{start}Hm.</think>\n\n""rain"'
    with pytest.raises(openai.BadRequestError, match="not allowed by the grammar"):
        ask(client, **given)


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(BadParameter, match=r"Unknown .* parser 'mistrall'. Did you mean 'mistral'.*Known: "):
        ServerSettings(**{name: "mistrall"})


def nested(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        made = {"anyOf": [made]}
    return made


HOSTILE: list[Any] = [
    5,
    [],
    "x",
    None,
    {"type": 5},
    {"type": {"a": 1}},
    {"type": [[], "null"]},
    {"anyOf": 3},
    nested(10),
]


@pytest.mark.parametrize("schema", HOSTILE, ids=lambda one: repr(one)[:30])
def test_no_schema_breaks_the_server(script: Script, client: openai.OpenAI, schema: Any) -> None:
    script.text = FORMS["qwen3_coder"]
    odd = tool("weather", city=schema)
    with script.format("qwen3_coder"):
        calls = calls_of(ask(client, tools=[odd]).choices[0].message)
    assert [name for name, _ in calls] == ["weather"] and "Oslo" in json.loads(calls[0][1])["city"]


def test_deep_schemas_and_arguments_are_answered_or_refused(script: Script) -> None:
    script.text = "Hello."
    deep = '{"a":' * 3000 + "1" + "}" * 3000
    call = {"function": {"name": "time", "arguments": deep}}
    bodies = [
        {"messages": TALK, "tools": [tool("f", a=nested(400))]},
        {"messages": [*TALK, {"role": "assistant", "tool_calls": [call]}], "tools": [TIME]},
    ]
    assert all(script.served.post("/v1/chat/completions", body).status_code in (200, 400) for body in bodies)
