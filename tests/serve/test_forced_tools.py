"""Tool calls that a grammar forces, by a random model: whatever it writes is a call with arguments of the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from running import Running, load_tiny, running
from scripted import reading, tool, tool_pair

from schema_check import matches
from specbranch.core.methods import METHODS
from specbranch.errors import MissingPackage
from specbranch.serve.call_grammar import GRAMMARS
from specbranch.text.tools.reasoning import ThinkMarkers

pytest.importorskip("llguidance")

CITY = {"type": "string", "maxLength": 6}
DAYS = {"type": "integer", "minimum": 0, "maximum": 9}
WEATHER = tool("weather", city=CITY, days=DAYS)
WEATHER["function"]["parameters"]["required"] = ["city", "days"]
TIME = tool("time", zone={"enum": ["UTC", "CET"]})
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in (WEATHER, TIME)}
TALK: list[Any] = [{"role": "user", "content": "How is the weather?"}]
NAMED = {"type": "function", "function": {"name": "time"}}
PATH = "/v1/chat/completions"
FORMS = ["hermes", *(pytest.param(name, marks=pytest.mark.slow) for name in GRAMMARS if name != "hermes")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, nothing_kept: None) -> Iterator[Running]:
    pair = tool_pair(tmp_path_factory.mktemp("tools"), positions=2048)
    with running(load_tiny(pair, 1600), model_name="tiny", reasoning_parser="none") as made:
        yield made


@pytest.fixture
def client(served: Running) -> openai.OpenAI:
    return served.openai()


def asked(**given: Any) -> dict[str, Any]:
    base = {"model": "tiny", "messages": TALK, "tools": [WEATHER, TIME], "temperature": 0.8, "seed": 3}
    return {**base, "max_tokens": 200, "parallel_tool_calls": False, **given}


def check(name: str, arguments: str) -> None:
    assert matches(json.loads(arguments), {**SCHEMAS[name], "additionalProperties": False}), arguments


def heard(client: openai.OpenAI, **given: Any) -> tuple[str, list[tuple[str, str]], str | None]:
    """A stream put together: content, calls and finish reason."""
    content, calls, reason = "", list[list[str]](), None
    for part in client.chat.completions.create(stream=True, **asked(**given)):
        delta, reason = part.choices[0].delta, part.choices[0].finish_reason
        content += delta.content or ""
        for call in delta.tool_calls or ():
            if call.id:
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
    return content, [(name, arguments) for name, arguments in calls], reason


@pytest.mark.parametrize("name", FORMS)
def test_a_required_call_has_arguments_of_its_schema(served: Running, client: openai.OpenAI, name: str) -> None:
    with reading(served, name):
        for seed in range(2):
            choice = client.chat.completions.create(**asked(tool_choice="required", seed=seed)).choices[0]
            (call,) = choice.message.tool_calls
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            check(call.function.name, call.function.arguments)
            content, calls, reason = heard(client, tool_choice="required", seed=seed)
            assert calls == [(call.function.name, call.function.arguments)]
            assert not content and reason == "tool_calls"


@pytest.mark.parametrize("name", FORMS)
def test_a_named_function_is_called_once(served: Running, client: openai.OpenAI, name: str) -> None:
    with reading(served, name):
        given = asked(tool_choice=NAMED, parallel_tool_calls=True)
        message = client.chat.completions.create(**given).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["time"]
    check("time", message.tool_calls[0].function.arguments)


@pytest.mark.slow
def test_several_calls_come_if_they_may(served: Running, client: openai.OpenAI) -> None:
    end = served.engine.tokenizer.eos_ids[0]
    given = asked(tool_choice="required", parallel_tool_calls=True, logit_bias={end: -100}, max_tokens=400)
    message = client.chat.completions.create(**given).choices[0].message
    *whole, _ = message.tool_calls
    assert whole, message
    for call in whole:
        check(call.function.name, call.function.arguments)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_makes_the_same_call(served: Running, method: str) -> None:
    body = asked(tool_choice="required")
    plain, other = (
        served.post(PATH, {**body, "speculative": wish}).json()["choices"][0]["message"]["tool_calls"][0]["function"]
        for wish in (False, {"method": method})
    )
    assert plain == other


def test_the_tool_loop_of_a_client_goes_round(client: openai.OpenAI) -> None:
    """Calls and results go back and forth; then the model has to say something."""
    talk = list(TALK)
    for _ in range(2):
        answer = client.chat.completions.create(**asked(messages=talk, tool_choice="required")).choices[0].message
        talk.append(answer)
        for call in answer.tool_calls:
            check(call.function.name, call.function.arguments)
            talk.append({"role": "tool", "tool_call_id": call.id, "content": "Rain."})
    last = client.chat.completions.create(**asked(messages=talk, tool_choice="none", max_tokens=8)).choices[0]
    assert last.message.tool_calls is None and last.finish_reason in ("length", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_the_parsing_helpers_of_the_client_understand_it(client: openai.OpenAI, stream: bool) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Time(pydantic.BaseModel):
        bright: bool

    made = openai.pydantic_function_tool(Time)
    given = {**asked(tools=[made], tool_choice="required"), "parallel_tool_calls": False}
    if stream:
        with client.chat.completions.stream(**given) as events:
            completion = events.get_final_completion()
    else:
        completion = client.chat.completions.parse(**given)
    (call,) = completion.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Time)


def strict(one: dict[str, Any]) -> dict[str, Any]:
    return {**one, "function": {**one["function"], "strict": True}}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_strict_function_is_called_with_its_arguments_or_not_at_all(
    served: Running, client: openai.OpenAI, name: str
) -> None:
    given = asked(tools=[strict(WEATHER), TIME], max_tokens=60)
    with reading(served, name):
        for seed in range(2):
            choice = client.chat.completions.create(**{**given, "seed": seed}).choices[0]
            calls = choice.message.tool_calls or []
            assert choice.message.content or calls
            if choice.finish_reason == "tool_calls":
                check(calls[0].function.name, calls[0].function.arguments)


def test_a_strict_call_in_text_is_one(served: Running, client: openai.OpenAI) -> None:
    """The marker, which is a token, is made likely."""
    marker = served.engine.tokenizer.added_id("[TOOL_CALLS]")
    with reading(served, "mistral"):
        given = asked(tools=[strict(WEATHER), TIME], logit_bias={marker: 8})
        choice = client.chat.completions.create(**given).choices[0]
    assert choice.finish_reason == "tool_calls"
    check(choice.message.tool_calls[0].function.name, choice.message.tool_calls[0].function.arguments)


def test_with_a_response_format_the_answer_is_a_call_or_the_format(served: Running, client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    tokenizer, kinds = served.engine.tokenizer, set[str]()
    for likely in ("{", "<"):
        bias = dict.fromkeys(tokenizer.encode(likely, add_special=False), 20)
        choice = client.chat.completions.create(**asked(response_format=form, logit_bias=bias)).choices[0]
        kinds.add(str(choice.finish_reason))
        if choice.finish_reason == "stop":
            assert matches(json.loads(choice.message.content or ""), schema)
        else:
            check(choice.message.tool_calls[0].function.name, choice.message.tool_calls[0].function.arguments)
    assert kinds == {"stop", "tool_calls"}


def test_a_call_comes_behind_reasoning(served: Running, client: openai.OpenAI) -> None:
    """Reasoning ends by a letter, which a random model writes soon."""
    with reading(served, "hermes", ThinkMarkers("[assistant]", "e")):  # the prompt ends with the first
        for seed in range(2):
            message = client.chat.completions.create(**asked(tool_choice="required", seed=seed)).choices[0].message
            assert message.content is None and len(message.tool_calls) == 1
            assert "e" not in (message.reasoning_content or "")  # type: ignore[attr-defined]
            check(message.tool_calls[0].function.name, message.tool_calls[0].function.arguments)


@pytest.mark.slow
def test_the_example_of_the_page_runs(served: Running, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "structured.md").read_text(encoding="utf-8")
    example = page.partition("## Tool calls")[2].partition("```python\n")[2].partition("```")[0]
    assert "127.0.0.1:8000" in example
    exec(example.replace("http://127.0.0.1:8000", served.url), {"__name__": "example"})
    assert capsys.readouterr().out.strip()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [tool("f", a={"type": "string", "pattern": "("})]}, "The parameters of the function 'f': json_schema"),
    ({"tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]}, "'f' are of type 'string'; expected"),
    ({"tools": [{"function": {"name": "f", "parameters": {"$ref": "#/x"}}}]}, "The parameters of the function 'f'"),
    ({"tool_choice": "auto", "regex": "a"}, "tools and regex are both given"),
    (
        {"tool_choice": "auto", "response_format": {"type": "json_schema", "json_schema": {"schema": -1}}},
        "json_schema is -1; expected a JSON schema",
    ),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_schemas_that_cannot_be_followed_are_refused_by_name(served: Running, given: dict[str, Any], said: str) -> None:
    status, error = served.error(PATH, asked(**{"tool_choice": "required", **given}))
    assert status == 400 and said in error["message"], error


HOSTILE: list[Any] = [5, [], "x", None, {"type": 5}, {"type": [[], "null"]}, {"anyOf": 3}, {"$ref": "#"}, {"enum": []}]


@pytest.mark.parametrize("name", FORMS)
def test_no_schema_breaks_the_server(served: Running, name: str) -> None:
    bodies = [asked(tools=[tool("f", a=schema)], tool_choice="required", max_tokens=4) for schema in HOSTILE]
    bodies += [asked(tools=[{"function": {"name": "f", "parameters": one}}], tool_choice="required") for one in WHOLE]
    with reading(served, name):
        answers = [served.post(PATH, {**body, "max_tokens": 4}) for body in bodies]
    assert all(answer.status_code in (200, 400) for answer in answers), [answer.text for answer in answers]


WHOLE: list[dict[str, Any]] = [
    {},
    {"type": []},
    {"properties": 5},
    {"properties": {"a": 5}, "required": 5},
    {"properties": {"": {}}, "required": [None]},
    {"properties": {"a": {"type": "string", "minLength": 9, "maxLength": 1}}},
]


def test_deep_schemas_are_answered_or_refused(served: Running) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        deep = {"anyOf": [deep]}
    body = asked(tools=[tool("f", a=deep)], tool_choice="required", max_tokens=4)
    assert served.post(PATH, body).status_code in (200, 400)


def test_without_the_library_a_sentence_says_so(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*given: Any) -> None:
        raise MissingPackage("There is no llguidance here.")

    monkeypatch.setattr(type(served.engine), "compile_grammar", missing)
    status, error = served.error(PATH, asked(tool_choice="required"))
    assert status == 501 or (status < 500 and "llguidance" in error["message"])
