"""Grammars of tool calls: what each format's grammar allows, and that its parser reads the same calls."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken

from schema_check import matches
from small_tokenizers import byte_level, save
from specbranch import SamplingParams
from specbranch.core.grammar import State
from specbranch.errors import BadParameter
from specbranch.grammar.compiler import Grammars
from specbranch.serve.call_grammar import GRAMMARS, Function, object_schema
from specbranch.text.tokenizer import Tokenizer
from specbranch.text.tools.answer_parser import AnswerParser, CallParser
from specbranch.text.tools.events import CallArguments, CallBegun, CallEnded, Event, Said, joined
from specbranch.text.tools.formats import EXACT_FORMATS, FORMATS

pytest.importorskip("llguidance")

MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 20},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
}
FUNCTIONS = [Function("weather", WEATHER), Function("time", None)]


def xml(name: str, **arguments: str) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


OSLO = '{"city": "Oslo"}'
ONE: dict[str, str] = {  # a call of the weather
    "hermes": hermes("weather", OSLO),
    "llama3_json": f'{{"name": "weather", "parameters": {OSLO}}}',
    "mistral": f"[TOOL_CALLS]weather[ARGS]{OSLO}",
    "qwen3_coder": xml("weather", city="Oslo"),
}
TWO: dict[str, str] = {  # that and one of the time
    "hermes": f"{ONE['hermes']}\n{hermes('time', '{}')}",
    "llama3_json": f'{ONE["llama3_json"]}; {{"name": "time", "parameters": {{}}}}',
    "mistral": ONE["mistral"] + "[TOOL_CALLS]time[ARGS]{}",
    "qwen3_coder": f"{ONE['qwen3_coder']}\n{xml('time')}",
}
LIST = f'[TOOL_CALLS][{{"name": "weather", "arguments": {OSLO}}}'  # of Mistral, where there is no [ARGS]
TWO_IN_LIST = LIST + ', {"name": "time", "arguments": {}}'


@pytest.fixture(scope="module", params=["tokens", "texts"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With markers that are tokens, or are spelled."""
    made = byte_level()
    if request.param == "tokens":
        made.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    return Tokenizer.from_folder(save(made, tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def start(tokenizer: Tokenizer) -> Callable[[str], State]:
    grammars = Grammars(tokenizer)

    def made(grammar: str) -> State:
        found = grammars.constraint(SamplingParams(grammar=grammar), frozenset(tokenizer.eos_ids))
        assert found is not None
        return found.start()

    return made


def grammar(name: str, tokenizer: Tokenizer, functions: list[Function] = FUNCTIONS) -> Any:
    return GRAMMARS[name](functions, tokenizer.added_id)


def goes(state: State, tokenizer: Tokenizer, text: str) -> State | None:
    return state.walk(tokenizer.encode(text, add_special=False))


def ends(state: State, tokenizer: Tokenizer, text: str) -> bool:
    """Whether an answer may end behind a text."""
    behind = goes(state, tokenizer, text)
    return behind is not None and (behind.allowed is None or tokenizer.eos_ids[0] in behind.allowed)


def texts(name: str, tokenizer: Tokenizer) -> tuple[str, str]:
    """One call, and two."""
    if name == "mistral" and tokenizer.added_id("[ARGS]") is None:
        return f"{LIST}]", f"{TWO_IN_LIST}]"
    return ONE[name], TWO[name]


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_forced_answer_is_calls(name: str, tokenizer: Tokenizer, start: Callable[[str], State]) -> None:
    one, two = texts(name, tokenizer)
    made = grammar(name, tokenizer)
    several, single = start(made.forced(True)), start(made.forced(False))
    assert ends(several, tokenizer, one) and ends(several, tokenizer, two)
    assert ends(single, tokenizer, one) and goes(single, tokenizer, two) is None
    for state in (several, single):
        assert goes(state, tokenizer, "Well") is None and not ends(state, tokenizer, "")
        for wrong in (one.replace("weather", "wind"), one.replace("city", "town"), one.replace("Oslo", "Reykjavik")):
            assert goes(state, tokenizer, wrong) is None, wrong


@pytest.mark.parametrize("name", GRAMMARS)
def test_calls_in_text_follow_the_schema_and_text_is_free(
    name: str, tokenizer: Tokenizer, start: Callable[[str], State]
) -> None:
    one, two = texts(name, tokenizer)
    made = grammar(name, tokenizer)
    several, single = start(made.in_text(True)), start(made.in_text(False))
    before = "" if name == "llama3_json" else "I look. "  # Llama's calls begin the answer
    for state in (several, single):
        assert ends(state, tokenizer, "Well, <tool {]} it rains.") and ends(state, tokenizer, before + one)
        assert goes(state, tokenizer, before + one.replace("city", "town")) is None
    assert ends(several, tokenizer, before + two) and goes(single, tokenizer, before + two) is None
    if name in ("hermes", "qwen3_coder"):
        assert ends(several, tokenizer, f"{one}\nand{one} so")


def fence(name: str, arguments: str, key: str = "arguments") -> str:
    return f'```json\n{{\n  "name": "{name}",\n  "{key}": {arguments}\n}}\n```'


def read(text: str) -> list[Event]:
    """The events of an answer that follows a grammar of Hermes' calls, whole and letter by letter."""
    several: list[list[Event]] = []
    for pieces in ([text], list(text)):
        parser = CallParser(EXACT_FORMATS["hermes"], {one.name: object_schema(one) for one in FUNCTIONS})
        several.append(joined([*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()]))
    assert several[0] == several[1]
    return several[0]


def test_a_call_in_a_fence_follows_the_schema_and_other_json_is_text(
    tokenizer: Tokenizer, start: Callable[[str], State]
) -> None:
    """Qwen2.5-Coder writes its calls so, whatever its template says."""
    made = grammar("hermes", tokenizer)
    several, single = start(made.in_text(True)), start(made.in_text(False))
    one, other = fence("weather", OSLO), fence("time", "{}", "parameters")
    for state in (several, single):
        assert ends(state, tokenizer, one) and ends(state, tokenizer, f"So:\n{other}")
        for wrong in (one.replace("city", "town"), one.replace('"Oslo"', "7"), one.replace("arguments", "x")):
            assert goes(state, tokenizer, wrong) is None, wrong
        for said in ('```json\n{"a": 1}\n```.', '```json\n{"name": "wind", "arguments": {}}```', "```json"):
            assert ends(state, tokenizer, f"So {said}") and read(f"So {said}") == [Said(f"So {said}")]
            assert ends(state, tokenizer, f"{said}\n{one}") and ends(state, tokenizer, f"{said}{ONE['hermes']}")
    assert ends(several, tokenizer, f"{one}\n{ONE['hermes']}\n{other} so")
    assert goes(single, tokenizer, one + other) is None
    found = read(f"I look.\n{one}{ONE['hermes']}{other}")
    assert [event.name for event in found if isinstance(event, CallBegun)] == ["weather", "weather", "time"]
    assert [event.text for event in found if isinstance(event, Said)] == ["I look."]


@pytest.mark.parametrize(
    "said",
    [
        '```json\n{"arguments": {"city": 1}, "name": "weather"}\n```',
        '```json\n{"name": "weathe\\u0072", "arguments": {"city": 1}}\n```',
        '```json\n{"x": 1} {"name": "weather", "arguments": {"city": 1}}\n```',
        '<tools>{"name": "weather", "arguments": {"city": 1}}</tools>',
        '{"name": "weather", "arguments": {"city": 1}}',
    ],
)
def test_what_only_a_lenient_parser_takes_for_a_call_is_text(
    said: str, tokenizer: Tokenizer, start: Callable[[str], State]
) -> None:
    """Nothing holds such arguments to their schema."""
    assert ends(start(grammar("hermes", tokenizer).in_text(True)), tokenizer, said)
    assert read(said) == [Said(said)]


@pytest.mark.parametrize(
    "before", ['```json\n{"name": "', '```json {"name": "weather", "parameters": {', '```json{"a": 1}```json{"name":']
)
def test_what_a_grammar_allows_in_a_fence_is_read_as_calls_of_the_schema(
    before: str, tokenizer: Tokenizer, start: Callable[[str], State]
) -> None:
    schemas, chance = {one.name: object_schema(one) for one in FUNCTIONS}, random.Random(2)
    for _ in range(4):
        state = goes(start(grammar("hermes", tokenizer).in_text(False)), tokenizer, before)
        assert state is not None
        found = read(before + walked(state, tokenizer, chance))
        names = [event.name for event in found if isinstance(event, CallBegun)]
        for called, given in zip(names, [one.text for one in found if isinstance(one, CallArguments)], strict=True):
            assert matches(json.loads(given), schemas[called])


@pytest.mark.parametrize("name", GRAMMARS)
def test_with_a_schema_the_answer_is_calls_or_what_it_describes(
    name: str, tokenizer: Tokenizer, start: Callable[[str], State]
) -> None:
    one, two = texts(name, tokenizer)
    state = start(grammar(name, tokenizer).or_answer(True, '%json {"type": "array", "items": {"type": "integer"}}'))
    assert ends(state, tokenizer, one) and ends(state, tokenizer, two) and ends(state, tokenizer, "[1, 2]")
    assert goes(state, tokenizer, "Well") is None


@pytest.mark.parametrize("kind", ["forced", "in_text"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_parser_reads_the_calls_that_a_grammar_allows(
    name: str, kind: str, tokenizer: Tokenizer, start: Callable[[str], State]
) -> None:
    """Random answers, which the mask alone holds to the format."""
    schemas = {one.name: object_schema(one) for one in FUNCTIONS}
    state, chance = start(getattr(grammar(name, tokenizer), kind)(True)), random.Random(name)
    for _ in range(6 if kind == "forced" else 2):
        text = walked(state, tokenizer, chance)
        parser = AnswerParser(None, CallParser(EXACT_FORMATS.get(name, FORMATS[name]), schemas))
        events = joined([*parser.feed(text), *parser.finish()])
        begun = [event.name for event in events if isinstance(event, CallBegun)]
        arguments = [event.text for event in events if isinstance(event, CallArguments)]
        assert len(begun) == len(arguments) == sum(isinstance(event, CallEnded) for event in events), text
        assert kind == "in_text" or (begun and not any(isinstance(event, Said) for event in events)), text
        for called, given in zip(begun, arguments, strict=True):
            assert matches(json.loads(given), schemas[called]), text


def walked(state: State, tokenizer: Tokenizer, chance: random.Random) -> str:
    """Return a random answer. It goes on with what looks like a call, and ends as soon as it may after 20 tokens."""
    tokens: list[int] = []
    while not state.is_over and len(tokens) < 600:
        allowed = list(state.allowed or ())
        end = tokenizer.eos_ids[0]
        if end in allowed and len(tokens) > 20:
            break
        found = [one for one in allowed if one != end]
        calls = [one for one in found if tokenizer.added_id(tokenizer.token(one)) is not None]
        token = chance.choice(calls or found)
        tokens.append(token)
        state = state.advance(token) or pytest.fail("a token of the mask is forbidden")
    return tokenizer.showing(tokenizer.special_among(MARKERS)).decode(tokens)


def test_parameters_of_xml_follow_their_types(tokenizer: Tokenizer, start: Callable[[str], State]) -> None:
    state = start(grammar("qwen3_coder", tokenizer).forced(True))
    for good in ({"city": "a<b\n"}, {"city": ""}, {"city": "Oslo", "days": "7", "unit": "F"}):
        assert ends(state, tokenizer, xml("weather", **good)), good
    for bad in ({"city": "Oslo", "days": "x"}, {"city": "Oslo", "unit": "K"}, {"days": "7"}, {"city": "x</function>"}):
        assert goes(state, tokenizer, xml("weather", **bad)) is None, bad


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x+"}}}, "'pattern' of the argument 'a'"),
        ({"properties": {"a": {"type": "string", "enum": ["<b>"]}}}, "'enum' of the argument 'a'"),
        ({"properties": {}, "additionalProperties": True}, "'additionalProperties'"),
        ({"properties": {}, "minProperties": 1}, "'minProperties'"),
        ({"properties": {"a>": {}}}, "the name of the argument 'a>'"),
    ],
)
def test_what_xml_cannot_be_held_to_is_refused_by_name(schema: dict[str, Any], said: str) -> None:
    strict = Function("f", schema, strict=True)
    with pytest.raises(BadParameter, match="Calls of the function 'f' in the format qwen3_coder") as error:
        GRAMMARS["qwen3_coder"]([strict], lambda text: None).forced(True)
    assert said in str(error.value) and "or leave out strict" in str(error.value)
    if "name" not in said:  # without strict it is a text
        GRAMMARS["qwen3_coder"]([Function("f", schema)], lambda text: None).forced(True)


@pytest.mark.parametrize("schema", [{"type": "string"}, {"properties": 1}, {"required": 1}, {"required": [1], "x": 0}])
@pytest.mark.parametrize("name", GRAMMARS)
def test_schemas_of_any_kind_are_a_grammar_or_a_sentence(
    name: str, schema: dict[str, Any], tokenizer: Tokenizer, start: Callable[[str], State]
) -> None:
    try:
        start(grammar(name, tokenizer, [Function("f", schema)]).forced(True))
    except BadParameter as error:
        assert str(error).endswith(".")
