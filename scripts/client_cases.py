"""What each client library of the OpenAI API has to manage with a running server, for `check_clients.py`.

Owns one function for each case: it uses the library as its own documentation does, and raises if the answer is not what
it has to be. Answers are checked for structure, not for wisdom, so that a small model is enough. Invariant: a library
is imported only by its own cases.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

TOKENS = 120  # of an answer
QUESTION = "How will the weather be in Oslo, for the next 3 days?"
REPORT = "Rain, 7 degrees."
PERSON = "Make up a person."


class Noted(Exception):
    """What the model did not do of its own accord, though everything was well-formed."""


@dataclass(frozen=True)
class Server:
    """The running server."""

    url: str
    model: str

    @property
    def base(self) -> str:
        """The address that OpenAI's clients want."""
        return f"{self.url}/v1"


def weather(city: str, days: int) -> str:
    """Get the weather forecast for a city."""
    return REPORT


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 10},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": weather.__doc__, "parameters": WEATHER}
TOOL = {"type": "function", "function": FUNCTION}
HAIR = Literal["black", "brown", "red"]


def expect(is_so: object, said: str) -> None:
    """Raise if something is not so."""
    if not is_so:
        raise AssertionError(said)


def check_arguments(name: str, arguments: str | dict[str, Any]) -> None:
    """Raise if a call is not one of `weather`, with arguments of its schema."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    kinds = {key: type(value) for key, value in given.items()}
    expect(name == "weather" and kinds == {"city": str, "days": int}, f"a call of {name!r} with {arguments!r}")


def person_model() -> Any:
    """Return a class of the kind that clients turn into a schema."""
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        """A person."""

        name: str = Field(max_length=20)
        age: int = Field(ge=0, le=120)
        hair: HAIR

    Person.model_rebuild(_types_namespace={"HAIR": HAIR})
    return Person


def openai_loop(server: Server, stream: bool) -> None:
    """A call, its result, and the words about it."""
    from openai import OpenAI

    client, talk = OpenAI(base_url=server.base, api_key="none"), [{"role": "user", "content": QUESTION}]
    asked: Any = {"model": server.model, "messages": talk, "tools": [TOOL], "max_tokens": TOKENS, "temperature": 0}
    forced = {**asked, "tool_choice": "required", "parallel_tool_calls": False}
    if stream:
        with client.chat.completions.stream(**forced) as events:
            choice: Any = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**forced).choices[0]
    expect(choice.finish_reason == "tool_calls", f"the call ended by {choice.finish_reason!r}")
    (call,) = choice.message.tool_calls
    check_arguments(call.function.name, call.function.arguments)
    talk += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": REPORT}]
    if stream:
        parts = client.chat.completions.create(**asked, tool_choice="none", stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    else:
        text = client.chat.completions.create(**asked, tool_choice="none").choices[0].message.content
    expect(text, "no words after the result")


def openai_responses_loop(server: Server, stream: bool) -> None:
    """The same by /v1/responses."""
    from openai import OpenAI

    client, talk = OpenAI(base_url=server.base, api_key="none"), [{"role": "user", "content": QUESTION}]
    asked: Any = {"model": server.model, "input": talk, "max_output_tokens": TOKENS, "temperature": 0}
    asked |= {"tools": [{"type": "function", **FUNCTION, "strict": True}], "store": False}

    def answer(**given: Any) -> Any:
        if not stream:
            return client.responses.create(**asked, **given)
        with client.responses.stream(**asked, **given) as events:
            return events.get_final_response()

    said = answer(tool_choice="required", parallel_tool_calls=False)
    (call,) = (item for item in said.output if item.type == "function_call")
    check_arguments(call.name, call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": REPORT}
    talk += [*(item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in said.output), result]
    expect(answer(tool_choice="none").output_text, "no words after the result")


def openai_parsed(server: Server, stream: bool) -> None:
    """An answer as an object of a class."""
    from openai import OpenAI

    client, person = OpenAI(base_url=server.base, api_key="none"), person_model()
    asked: Any = {"model": server.model, "messages": [{"role": "user", "content": PERSON}], "max_tokens": TOKENS}
    if stream:
        with client.chat.completions.stream(**asked, response_format=person) as events:
            found: Any = events.get_final_completion().choices[0].message.parsed
    else:
        found = client.chat.completions.parse(**asked, response_format=person).choices[0].message.parsed
    expect(isinstance(found, person), f"{found!r}")


def langchain_model(server: Server, **given: Any) -> Any:
    """Return a chat model of LangChain."""
    from langchain_openai import ChatOpenAI

    asked = {"model": server.model, "base_url": server.base, "api_key": "none", "temperature": 0}
    return ChatOpenAI(**asked, max_completion_tokens=TOKENS, **given)


def langchain_bind_tools(server: Server, stream: bool, **given: Any) -> None:
    """A call by `bind_tools`, its result, and the words about it."""
    from langchain_core.messages import HumanMessage, ToolMessage

    model, talk = langchain_model(server, **given), [HumanMessage(QUESTION)]
    bound = model.bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False)

    def answer(asked: Any) -> Any:
        if not stream:
            return asked.invoke(talk)
        first, *others = asked.stream(talk)
        for part in others:
            first = first + part
        return first

    said = answer(bound)
    (call,) = said.tool_calls
    expect(not said.invalid_tool_calls, f"{said.invalid_tool_calls}")
    check_arguments(call["name"], call["args"])
    talk += [said, ToolMessage(REPORT, tool_call_id=call["id"])]
    expect(answer(model.bind_tools([TOOL], tool_choice="none")).text, "no words after the result")


def langchain_responses(server: Server, stream: bool) -> None:
    """The same by /v1/responses."""
    langchain_bind_tools(server, stream, use_responses_api=True)


def langchain_structured(method: str) -> Callable[[Server, bool], None]:
    """Return the case of one method of `with_structured_output`."""

    def case(server: Server, stream: bool) -> None:
        person = person_model()
        asked = langchain_model(server).with_structured_output(person, method=method)
        found = list(asked.stream(PERSON))[-1] if stream else asked.invoke(PERSON)
        expect(isinstance(found, person), f"{found!r}")

    return case


def langchain_json_mode(server: Server, stream: bool) -> None:
    """Any JSON object."""
    asked = langchain_model(server).with_structured_output(None, method="json_mode")
    question = "Write a JSON object with the key name and a short name, and nothing else."
    found = list(asked.stream(question))[-1] if stream else asked.invoke(question)
    expect(isinstance(found, dict), f"{found!r}")


def _litellm() -> Any:
    """Return the module, which otherwise fetches a list of prices when it is imported."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    litellm.suppress_debug_info = True
    return litellm


def litellm_loop(server: Server, stream: bool) -> None:
    """A call, its result, and the words about it."""
    litellm = _litellm()
    talk: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: Any = {"model": f"openai/{server.model}", "api_base": server.base, "api_key": "none", "tools": [TOOL]}
    asked |= {"max_tokens": TOKENS, "temperature": 0}

    def answer(**given: Any) -> Any:
        found = litellm.completion(**asked, messages=talk, stream=stream, **given)
        return (litellm.stream_chunk_builder(list(found), messages=talk) if stream else found).choices[0]

    choice = answer(tool_choice="required", parallel_tool_calls=False)
    expect(choice.finish_reason == "tool_calls", f"the call ended by {choice.finish_reason!r}")
    (call,) = choice.message.tool_calls
    check_arguments(call.function.name, call.function.arguments)
    talk += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": REPORT}]
    expect(answer(tool_choice="none").message.content, "no words after the result")


def litellm_schema(server: Server, stream: bool) -> None:
    """An answer that a class can read."""
    litellm = _litellm()
    person, talk = person_model(), [{"role": "user", "content": PERSON}]
    asked: Any = {"model": f"openai/{server.model}", "api_base": server.base, "api_key": "none"}
    found: Any = litellm.completion(**asked, messages=talk, max_tokens=TOKENS, response_format=person, stream=stream)
    whole = litellm.stream_chunk_builder(list(found), messages=talk) if stream else found
    person.model_validate_json(whole.choices[0].message.content)


def litellm_responses(server: Server, stream: bool) -> None:
    """A call by /v1/responses."""
    litellm = _litellm()
    asked: Any = {"model": f"openai/{server.model}", "api_base": server.base, "api_key": "none", "stream": stream}
    asked |= {"input": QUESTION, "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}
    found: Any = litellm.responses(**asked, parallel_tool_calls=False, max_output_tokens=TOKENS, temperature=0)
    whole = list(found)[-1].response if stream else found
    (call,) = (item for item in whole.output if item.type == "function_call")
    check_arguments(call.name, call.arguments)


def agents_run(kind: str) -> Callable[[Server, bool], None]:
    """Return the case of OpenAI's Agents SDK over chats or responses: it runs the whole loop itself."""

    def case(server: Server, stream: bool) -> None:
        import agents
        from openai import AsyncOpenAI

        agents.set_tracing_disabled(True)
        client = AsyncOpenAI(base_url=server.base, api_key="none")
        made = agents.OpenAIChatCompletionsModel if kind == "chat" else agents.OpenAIResponsesModel
        asked = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=TOKENS)
        tools: Any = [agents.function_tool(weather)]
        agent = agents.Agent("forecaster", tools=tools, model=made(server.model, client), model_settings=asked)

        async def run() -> Any:
            if not stream:
                return await agents.Runner.run(agent, QUESTION, max_turns=3)
            found = agents.Runner.run_streamed(agent, QUESTION, max_turns=3)
            async for _ in found.stream_events():
                pass
            return found

        found = asyncio.run(run())
        calls = [item.raw_item for item in found.new_items if item.type == "tool_call_item"]
        expect(calls, "the function was not called")
        for call in calls:
            check_arguments(call.name, call.arguments)
        expect(found.final_output, "no words after the result")

    return case


def llm_model(server: Server) -> Any:
    """Return the server as a model of `llm`, as an entry of `extra-openai-models.yaml` makes it."""
    from llm.default_plugins.openai_models import Chat

    flags = {"supports_tools": True, "supports_schema": True}
    made: Any = Chat
    model = made("specbranch-served", model_name=server.model, api_base=server.base, **flags)
    model.key = "none"
    return model


def llm_tools(server: Server, stream: bool) -> None:
    """The chain of `llm`: it leaves the choice to the model, so each answer is calls, words, or both."""
    talk = llm_model(server).conversation(tools=[weather], chain_limit=2)
    chain = talk.chain(QUESTION, stream=stream, options={"max_tokens": TOKENS, "temperature": 0})
    try:
        chain.text()
    except json.JSONDecodeError as error:  # `llm` reads the arguments of a call before it asks how the answer ended
        expect(not error.doc.endswith("}"), f"{error}: {error.doc}")
        raise Noted("a call was cut by max_tokens") from error
    except ValueError as error:  # the model calls again and again
        expect("Chain limit" in str(error), str(error))
    for answer in chain._responses:
        calls = answer.tool_calls()
        expect(calls or answer.text(), "neither words nor calls")
        for call in calls:  # nothing holds them to the schema
            expect(call.name == "weather" and isinstance(call.arguments, dict), f"{call}")


def llm_schema(server: Server, stream: bool) -> None:
    """An answer that a class can read."""
    person = person_model()
    said = llm_model(server).prompt(PERSON, schema=person, stream=stream, max_tokens=TOKENS)
    person.model_validate_json(said.text())


Case = Callable[[Server, bool], None]
CLIENTS: dict[str, dict[str, Case]] = {  # by the module that has to be there
    "openai": {
        "tool loop": openai_loop,
        "tool loop by responses": openai_responses_loop,
        "answer of a class": openai_parsed,
    },
    "agents": {"agent by chats": agents_run("chat"), "agent by responses": agents_run("responses")},
    "langchain_openai": {
        "bind_tools": langchain_bind_tools,
        "bind_tools by responses": langchain_responses,
        "with_structured_output, json_schema": langchain_structured("json_schema"),
        "with_structured_output, function_calling": langchain_structured("function_calling"),
        "with_structured_output, json_mode": langchain_json_mode,
    },
    "litellm": {
        "tool loop": litellm_loop,
        "answer of a class": litellm_schema,
        "call by responses": litellm_responses,
    },
    "llm": {"chain with tools": llm_tools, "schema": llm_schema},
}
