"""Cases of tool calls and structured output over plain HTTP, for `check_clients.py`.

They ask what openai/gpt-oss' compatibility tests and llama.cpp's tests of tool calls and structured output ask, in
cases of our own. Owns bodies and checks. Invariant: what a case requires is a matter of structure, which a grammar or
the server guarantees. What takes a model's wisdom is only noted: `Noted` is no failure.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from client_cases import TOKENS, Noted, Server, expect

TEXT = {"type": "string", "maxLength": 24}


@dataclass
class Heard:
    """An answer, put together from its stream if it was one."""

    content: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    reason: str | None = None

    def message(self) -> dict[str, Any]:
        """Return it as a message of the conversation."""
        calls = [
            {"id": one["id"], "type": "function", "function": {"name": one["name"], "arguments": one["arguments"]}}
            for one in self.calls
        ]
        return {"role": "assistant", "content": self.content or None, "tool_calls": calls or None}


def function(name: str, required: list[str], **properties: Any) -> dict[str, Any]:
    """Return a function."""
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    described = {"name": name, "description": f"It is {name.replace('_', ' ')}.", "parameters": schema}
    return {"type": "function", "function": described}


FUNCTIONS = {  # one for each kind of argument
    one["function"]["name"]: one
    for one in (
        function("no_arguments", []),
        function("read_file", ["path"], path=TEXT),
        function("say_so", ["success"], success={"type": "boolean", "const": True}),
        function("add", ["a", "b"], a={"type": "integer"}, b={"type": "number"}),
        function("set_mode", ["mode"], mode={"type": "string", "enum": ["fast", "slow"]}, silent={"type": "boolean"}),
        function("tag_all", ["tags"], tags={"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3}),
        function(
            "place_order",
            ["item"],
            item={
                "type": "object",
                "properties": {"name": TEXT, "count": {"type": "integer", "minimum": 1, "maximum": 99}},
                "required": ["name", "count"],
                "additionalProperties": False,
            },
        ),
        function("run_python", ["code"], code={"type": "string", "maxLength": 80}),
    )
}
ASKED = {
    "no_arguments": "Call the function.",
    "read_file": "Read the file config/cache.yml.",
    "say_so": "Say that it was a success.",
    "add": "Add 3 and 4.5.",
    "set_mode": "Use the slow mode, silently.",
    "tag_all": "Tag this picture with sea and sun.",
    "place_order": "Order 3 pears.",
    "run_python": "Print hello with Python.",
}
RECORD = {
    "type": "object",
    "properties": {
        "title": TEXT,
        "year": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "kind": {"enum": ["novel", "play", "poem"]},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
        "price": {"type": ["number", "null"], "minimum": 0, "maximum": 100, "multipleOf": 0.5},
    },
    "required": ["title", "year", "kind", "words"],
    "additionalProperties": False,
}


def post(server: Server, path: str, body: dict[str, Any]) -> str:
    """Send a body; return what is answered, or raise with the error's sentence."""
    sent = json.dumps({"model": server.model, "temperature": 0, **body}).encode()
    asked = urllib.request.Request(server.base + path, sent, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=600) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        raise AssertionError(f"status {error.code}: {error.read().decode()[:300]}") from error


def chat(server: Server, stream: bool, talk: list[Any] | str, **given: Any) -> Heard:
    """Ask a chat; check the form of what comes."""
    messages = [{"role": "user", "content": talk}] if isinstance(talk, str) else talk
    said = post(server, "/chat/completions", {"messages": messages, "max_tokens": TOKENS, "stream": stream, **given})
    if stream:
        return _of_stream(said)
    choice = json.loads(said)["choices"][0]
    calls = choice["message"].get("tool_calls")
    expect(calls is None or calls, "an empty list of calls")
    found = [{"id": one["id"], **one["function"]} for one in calls or ()]
    return Heard(choice["message"]["content"] or "", found, choice["finish_reason"])


def _of_stream(said: str) -> Heard:
    """Put a stream together as a strict client does: a call's name comes whole, with its id, before its arguments."""
    *lines, last = [line for line in said.split("\n\n") if line]
    expect(last == "data: [DONE]", f"the stream ended with {last!r:.60}")
    heard = Heard()
    for event in (json.loads(line.removeprefix("data: ")) for line in lines):
        for choice in event["choices"]:
            expect(heard.reason is None, "a delta behind the finish reason")
            heard.reason = choice["finish_reason"]
            heard.content += choice["delta"].get("content") or ""
            for one in choice["delta"].get("tool_calls") or ():
                if one["index"] == len(heard.calls):
                    expect(one["id"] and one["type"] == "function", "a call begins without id or type")
                    heard.calls.append({"id": one["id"], "name": one["function"]["name"], "arguments": ""})
                expect(one["index"] == len(heard.calls) - 1, "arguments of an earlier call")
                heard.calls[-1]["arguments"] += one["function"].get("arguments") or ""
    return heard


def check_calls(calls: list[dict[str, str]]) -> None:
    """Raise unless each call is of a known function, with arguments of its schema."""
    from jsonschema import validate

    expect(len({one["id"] for one in calls}) == len(calls), "two calls with the same id")
    for one in calls:
        validate(json.loads(one["arguments"]), FUNCTIONS[one["name"]]["function"]["parameters"])


def forced(name: str) -> Callable[[Server, bool], None]:
    """Return the case of a chat that has to call a function, and goes on behind its result."""

    def case(server: Server, stream: bool) -> None:
        tools = [FUNCTIONS[name]]
        given: dict[str, Any] = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
        heard = chat(server, stream, ASKED[name], **given)
        expect([one["name"] for one in heard.calls] == [name], f"the calls are {heard.calls}")
        expect(heard.reason == "tool_calls" and not heard.content, f"{heard.reason!r} with {heard.content!r:.60}")
        check_calls(heard.calls)
        result = {"role": "tool", "tool_call_id": heard.calls[0]["id"], "content": '{"done": true}'}
        talk = [{"role": "user", "content": ASKED[name]}, heard.message(), result]
        after = chat(server, stream, talk, tools=tools, tool_choice="none")
        expect(after.content and not after.calls, "no words behind the result")

    return case


def responses(name: str) -> Callable[[Server, bool], None]:
    """Return the same case by /v1/responses, with the order of its events."""

    def case(server: Server, stream: bool) -> None:
        tools = [{"type": "function", **FUNCTIONS[name]["function"]}]
        body: dict[str, Any] = {"input": ASKED[name], "tools": tools, "max_output_tokens": TOKENS, "stream": stream}
        said = post(server, "/responses", {**body, "tool_choice": "required", "parallel_tool_calls": False})
        whole = _of_events(said) if stream else json.loads(said)
        calls = [item for item in whole["output"] if item["type"] == "function_call"]
        expect(whole["status"] == "completed" and len(calls) == 1, f"{whole['status']} with {len(calls)} calls")
        check_calls([{"id": one["call_id"], "name": one["name"], "arguments": one["arguments"]} for one in calls])
        result = {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "done"}
        again = [{"role": "user", "content": ASKED[name]}, *whole["output"], result]
        said = post(server, "/responses", {**body, "input": again, "tool_choice": "none"})
        after = _of_events(said) if stream else json.loads(said)
        expect(any(item["type"] == "message" for item in after["output"]), "no words behind the result")

    return case


def _of_events(said: str) -> dict[str, Any]:
    """Check the events of a response; return the response of the last one."""
    parts = [block.partition("data: ")[2] for block in said.split("\n\n") if block]
    events = [json.loads(part) for part in parts]
    expect([one["sequence_number"] for one in events] == list(range(len(events))), "the numbers have gaps")
    kinds = [one["type"] for one in events]
    expect(kinds[:2] == ["response.created", "response.in_progress"], f"it begins with {kinds[:2]}")
    for start in (one for one in events if one["type"] == "response.output_item.added"):
        done = [one for one in events if one["type"] == "response.output_item.done"]
        expect(any(one["output_index"] == start["output_index"] for one in done), "an item has no end")
    deltas = "".join(one["delta"] for one in events if one["type"] == "response.function_call_arguments.delta")
    ends = "".join(one["arguments"] for one in events if one["type"] == "response.function_call_arguments.done")
    expect(deltas == ends, "the arguments are not their deltas")
    found = events[-1]["response"]
    assert isinstance(found, dict)
    return found


def auto(server: Server, stream: bool) -> None:
    """A plain question for a function: a well-formed answer; a call is the model's own wisdom."""
    heard = chat(server, stream, ASKED["read_file"], tools=[FUNCTIONS["read_file"]])
    check_calls(heard.calls)
    expect(heard.reason == ("tool_calls" if heard.calls else heard.reason), f"calls, but {heard.reason!r}")
    if not heard.calls:
        raise Noted(f"the model did not call: {heard.content[:60]!r}")


def several(server: Server, stream: bool) -> None:
    """Several calls in one answer, each with an id of its own; how many is the model's own wisdom."""
    asked = "Read config/a.yml and config/b.yml, both at once."
    given: dict[str, Any] = {"tools": [FUNCTIONS["read_file"]], "tool_choice": "required", "max_tokens": 60}
    heard = chat(server, stream, asked, **given)
    whole = heard.calls[:-1] if heard.reason == "length" else heard.calls
    check_calls(whole)
    expect(whole, "no whole call")
    if len(whole) < 2:
        raise Noted("the model called once")


def named(server: Server, stream: bool) -> None:
    """One function of several is named."""
    choice = {"type": "function", "function": {"name": "add"}}
    heard = chat(server, stream, "Hello.", tools=list(FUNCTIONS.values()), tool_choice=choice)
    expect([one["name"] for one in heard.calls] == ["add"], f"the calls are {heard.calls}")
    check_calls(heard.calls)


def nothing_called(server: Server, stream: bool) -> None:
    """No tools, empty tools, and the choice "none": no call, and no key for calls."""
    several: tuple[dict[str, Any], ...] = ({}, {"tools": []}, {"tools": [FUNCTIONS["add"]], "tool_choice": "none"})
    for given in several:
        heard = chat(server, stream, "Say hello.", max_tokens=12, **given)
        expect(heard.content and not heard.calls and heard.reason in ("stop", "length"), f"{heard}")


def earlier_calls(server: Server, stream: bool) -> None:
    """A conversation that another server began: a call without words, its result by name, then words."""
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":3,"b":4.5}'}}
    talk = [
        {"role": "system", "content": "You add numbers by the function."},
        {"role": "user", "content": "Add 3 and 4.5."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "7.5", "tool_call_id": "call_1"},
    ]
    heard = chat(server, stream, talk, tools=[FUNCTIONS["add"]])
    expect(heard.content or heard.calls, "nothing was said")
    if heard.calls or "7.5" not in heard.content:
        raise Noted(f"the model did not say 7.5: {heard.content[:60]!r}")


def structured(server: Server, stream: bool) -> None:
    """An answer by `response_format`."""
    from jsonschema import validate

    heard = chat(server, stream, "Describe a book as JSON.", response_format=_format())
    validate(json.loads(heard.content), RECORD)


def structured_with_tools(server: Server, stream: bool) -> None:
    """Tools and a format in one request: calls, or JSON of the format."""
    from jsonschema import validate

    heard = chat(server, stream, ASKED["add"], tools=[FUNCTIONS["add"]], response_format=_format())
    check_calls(heard.calls[:-1] if heard.reason == "length" else heard.calls)
    if not heard.calls:
        validate(json.loads(heard.content), RECORD)


def structured_after_tools(server: Server, stream: bool) -> None:
    """A format at the end of a conversation with calls."""
    from jsonschema import validate

    call = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "book"}'}}
    talk = [
        {"role": "user", "content": "Read the file book."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Emma, a novel of 1815", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "It is a novel."},
        {"role": "user", "content": "Now as JSON."},
    ]
    validate(json.loads(chat(server, stream, talk, response_format=_format()).content), RECORD)


def grammars(server: Server, stream: bool) -> None:
    """The names of llama.cpp and vLLM for grammars."""
    digits = chat(server, stream, "A number?", grammar='root ::= "No. " [0-9]+ ("." [0-9])?', max_tokens=16).content
    expect(digits.startswith("No. "), f"{digits!r}")
    chosen = chat(server, stream, "Yes or no?", structured_outputs={"choice": ["yes", "no"]}).content
    expect(chosen in ("yes", "no"), f"{chosen!r}")


def refusals(server: Server, stream: bool) -> None:
    """Schemas and tools that make no sense are refused with status 400, and a sentence."""
    wrong: tuple[dict[str, Any], ...] = (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "unknown"}}}},
        {"response_format": {"type": "sound"}},
        {"tools": [{"type": "function", "function": {}}]},
        {"tool_choice": "required"},
    )
    for given in wrong:
        try:
            chat(server, stream, "Hello.", **given)
        except AssertionError as error:
            expect(str(error).startswith("status 400"), str(error))
        else:
            raise AssertionError(f"{given} was accepted")


def _format() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "record", "strict": True, "schema": RECORD}}


HTTP_CASES: dict[str, Callable[[Server, bool], None]] = {
    **{f"chat, required: {name}": forced(name) for name in FUNCTIONS},
    **{f"responses, required: {name}": responses(name) for name in FUNCTIONS},
    "chat, auto": auto,
    "chat, several calls": several,
    "chat, named function": named,
    "chat, nothing called": nothing_called,
    "chat, earlier calls": earlier_calls,
    "response_format": structured,
    "response_format with tools": structured_with_tools,
    "response_format after tools": structured_after_tools,
    "grammar and choice": grammars,
    "refusals": refusals,
}
