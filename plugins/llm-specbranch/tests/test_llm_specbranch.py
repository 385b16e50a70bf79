"""The plugin in process, on a tiny pair: texts are SpecBranch's own, whichever way LLM asks for them."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llm
import pydantic
import pytest

import llm_specbranch
from llm_specbranch import AsyncSpecBranchModel, SpecBranchModel
from llm_specbranch.engines import ENGINES
from llm_specbranch.named_pairs import FILE
from llm_specbranch.options import ModelChoice, SpecBranchOptions
from llm_specbranch.reading import Formats, Reading
from specbranch import LLM
from specbranch.engine_core import EngineCore

TALK = [{"role": "user", "content": "A branch is a guess"}]
TOOL_TEMPLATE = """{% if tools %}[tools]{{ tools | tojson }}{% endif %}\
{% for message in messages %}[{{ message.role }}]{{ message.content }}\
{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>\
{% endfor %}{% endfor %}[assistant]"""
THINKING_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}[assistant]{# <think></think> #}"


@pytest.fixture
def alone(tiny_options: SpecBranchOptions) -> Iterator[LLM]:
    """The same pair without LLM."""
    given = tiny_options.model_dump(include={"target", "draft", "device"})
    with LLM(**given, options={"context_length": tiny_options.context_length}) as engine:
        yield engine


def with_template(options: SpecBranchOptions, folder: Path, template: str) -> SpecBranchOptions:
    """The same models, with another chat template."""
    for name in ("target", "draft"):
        (made := folder / name).mkdir()
        for file in Path(getattr(options, name)).iterdir():
            (made / file.name).symlink_to(file)
        (made / "chat_template.jinja").unlink(missing_ok=True)
        (made / "chat_template.jinja").write_text(template)
    return options.model_copy(update={"target": str(folder / "target"), "draft": str(folder / "draft")})


def saying(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the pair say a text: the engine's whole way, with tokens that are given instead of chosen."""
    make = EngineCore.make_answer

    def made(core: EngineCore, prompt: list[int], params: Any, *rest: Any, **options: Any) -> Any:
        tokens = (*core.tokenizer.encode(text, add_special=False), core.tokenizer.eos_ids[0])
        return make(core, prompt, params, *rest, **{**options, "forced": tokens})

    monkeypatch.setattr(EngineCore, "make_answer", made)


def test_an_answer_and_its_usage_are_those_of_the_engine_alone(model: SpecBranchModel, alone: LLM) -> None:
    response, expected = model.prompt(TALK[0]["content"]), alone.chat(TALK, {"max_tokens": 24})
    assert response.text() == expected.text and expected.token_ids
    usage = response.usage()
    assert (usage.input, usage.output) == (len(expected.prompt_token_ids), len(expected.token_ids))
    stored = response.json()
    assert stored is not None and stored["method"] == "specbranch" and stored["stats"]["target_forwards"] > 0
    json.dumps(stored)
    assert response.resolved_model == model.defaults.target


def test_a_stream_comes_in_chunks_that_join_to_the_text(model: SpecBranchModel) -> None:
    chunks = list(model.prompt("A branch is a guess"))
    assert len(chunks) > 1 and "".join(chunks) == model.prompt("A branch is a guess").text()


def test_a_conversation_has_all_earlier_turns_and_the_system_prompt(model: SpecBranchModel, alone: LLM) -> None:
    talk = model.conversation()
    first = talk.prompt("A branch", system="Be brief").text()
    second = talk.prompt("And then?").text()
    said = [("system", "Be brief"), ("user", "A branch"), ("assistant", first), ("user", "And then?")]
    whole = [{"role": role, "content": content} for role, content in said]
    assert second == alone.chat(whole, {"max_tokens": 24}).text
    assert second != alone.chat(whole[-1:], {"max_tokens": 24}).text


def test_a_schema_gives_json_that_follows_it(model: SpecBranchModel) -> None:
    class Dog(pydantic.BaseModel, extra="forbid"):
        good: bool
        age: int = pydantic.Field(ge=0, le=20)

    answer = model.prompt("A dog", schema=Dog, max_tokens=200).text()
    Dog.model_validate_json(answer)


def test_a_schema_begins_behind_reasoning(tiny_options: SpecBranchOptions, tmp_path: Path) -> None:
    with ENGINES.using(
        ModelChoice.of(with_template(tiny_options, tmp_path, THINKING_TEMPLATE), tiny_options)
    ) as engine:
        formats = Formats.of(engine.tokenizer, ())
    assert formats.around_reasoning("[assistant]") == ("<think>", "</think>")
    assert formats.around_reasoning("[assistant]<think>\n") == ("", "</think>")
    assert formats.around_reasoning("[assistant]<think></think>\n") == ()


def test_a_seed_repeats_an_answer_with_every_method(model: SpecBranchModel) -> None:
    def text(seed: int, method: str) -> str:
        return model.prompt("A guess", temperature=1.0, seed=seed, method=method).text()

    assert text(1, "autoregressive") == text(1, "specbranch") == text(1, "tree") != text(2, "specbranch")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": -1}, "temperature is -1.0; expected a number ≥ 0"),
        ({"method": "spec"}, "Unknown method 'spec'"),
        ({"target": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"pair": "smollm3"}, "Unknown pair 'smollm3'. Did you mean"),
        ({"pair": "smollm2-weak", "draft": "x"}, "a pair is both"),
        ({"regex": "("}, "regex"),
    ],
)
def test_a_mistake_gets_the_sentence_of_specbranch(model: SpecBranchModel, options: dict[str, Any], said: str) -> None:
    with pytest.raises(llm.ModelError, match=re.escape(said)):
        model.prompt("Hello", **options).text()


def test_an_option_that_does_not_exist_is_refused(model: SpecBranchModel) -> None:
    with pytest.raises(pydantic.ValidationError, match="temprature"):
        model.prompt("Hello", temprature=1)


def test_many_answers_of_an_event_loop_are_those_of_the_synchronous_model(
    model: SpecBranchModel, tiny_options: SpecBranchOptions
) -> None:
    prompts = ["A branch", "A guess", "Smile", "Wave"]

    async def ask() -> list[str]:
        together = AsyncSpecBranchModel("specbranch/tiny", tiny_options)
        return [*await asyncio.gather(*(together.prompt(prompt).text() for prompt in prompts))]

    assert asyncio.run(ask()) == [model.prompt(prompt).text() for prompt in prompts]


def test_a_pair_is_loaded_once_and_closed_after_its_last_answer(tiny_options: SpecBranchOptions) -> None:
    choice = ModelChoice.of(tiny_options, SpecBranchOptions())
    other = ModelChoice.of(tiny_options.model_copy(update={"context_length": 300}), SpecBranchOptions())
    with ENGINES.using(choice) as first:
        with ENGINES.using(choice) as again, ENGINES.using(other) as second:
            assert again is first and second is not first and first.is_alive
        assert first.is_alive
    assert not first.is_alive and second.is_alive
    ENGINES.close()
    assert not second.is_alive


def test_an_answer_that_is_not_read_on_is_cancelled(model: SpecBranchModel) -> None:
    events = model.prompt("A branch", max_tokens=300)._iter_events()
    next(events)
    events.close()
    with ENGINES.using(ModelChoice.of(model.defaults, model.defaults)) as engine:
        until = time.monotonic() + 20
        while not engine.stats().cancelled and time.monotonic() < until:
            time.sleep(0.01)
        assert engine.stats().cancelled == 1 and not engine.stats().running


def test_tools_are_called_and_their_results_are_read(
    tiny_options: SpecBranchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def weather(city: str, days: int) -> str:
        asked.append((city, days))
        return "Rain"

    model = SpecBranchModel("specbranch/tools", with_template(tiny_options, tmp_path, TOOL_TEMPLATE))
    call = json.dumps({"name": "weather", "arguments": {"city": "Oslo", "days": 3}})
    saying(f"Let me see.\n<tool_call>\n{call}\n</tool_call>", monkeypatch)
    chain = model.conversation(tools=[weather]).chain("How is the weather?", options={"max_tokens": 120})
    first, second = (response for response, _ in zip(chain.responses(), range(2), strict=False))
    assert first.text() == "Let me see." and asked[0] == ("Oslo", 3)
    read = second.prompt.messages[-1].parts[0]
    assert (second.prompt.messages[-1].role, read.output, read.name) == ("tool", "Rain", "weather")
    assert read.tool_call_id == first.tool_calls()[0].tool_call_id


def test_a_call_that_was_cut_or_is_no_object_is_not_made() -> None:
    from specbranch.text.tools.formats import FORMATS

    tool = llm.Tool("weather", None, {"type": "object", "properties": {}})
    for text in ('<tool_call>{"name": "weather", "arguments": {"city": "Os', '<tool_call>{"name": "weath'):
        reading = Reading(Formats(None, FORMATS["hermes"]), "", [tool])
        events = [*reading.feed(text), *reading.finish()]
        assert events and not reading.tool_calls()


def test_tools_that_the_model_would_not_read_are_refused(tiny_options: SpecBranchOptions, tmp_path: Path) -> None:
    def weather() -> str:
        return "Rain"

    model = SpecBranchModel("specbranch/tiny", with_template(tiny_options, tmp_path, THINKING_TEMPLATE))
    with pytest.raises(llm.ModelError, match="chat template takes no tools"):
        model.prompt("How is the weather?", tools=[weather]).text()


def registered() -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    llm_specbranch.register_models(lambda model, other: found.update({model.model_id: (model, other)}))
    return found


def test_named_pairs_are_models_of_their_own(folder: Path, tiny_options: SpecBranchOptions) -> None:
    (folder / FILE).write_text(json.dumps({"tiny": tiny_options.model_dump(exclude_none=True)}))
    found = registered()
    assert list(found) == ["specbranch", "specbranch/tiny"]
    model, other = found["specbranch/tiny"]
    assert isinstance(other, AsyncSpecBranchModel) and model.prompt("A guess").text()


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "is left out"), ("[]", "no JSON object of objects"), ('{"big": {"tagret": "x"}}', "tagret: Extra inputs")],
)
def test_a_damaged_file_of_pairs_leaves_the_default(
    folder: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / FILE).write_text(text)
    assert list(registered()) == ["specbranch"] and said in capsys.readouterr().err
