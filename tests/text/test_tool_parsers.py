"""Parsers of tool calls and reasoning: any cutting of a text gives the same events, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbranch.text.tools.answer_parser import AnswerParser, CallParser
from specbranch.text.tools.events import CallArguments, CallBegun, CallEnded, Event, Said, Thought, joined
from specbranch.text.tools.formats import FORMATS, format_of, thinking_of
from specbranch.text.tools.reasoning import THINK, ReasoningParser

SCHEMAS: dict[str, Any] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "f": {"properties": {"flag": {"type": "boolean"}, "any": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
}


def parse(name: str | None, pieces: Sequence[str], thinks: bool = True, is_open: bool = False) -> list[Event]:
    """The joined events of a text."""
    calls = CallParser(FORMATS[name], SCHEMAS) if name else None
    parser = AnswerParser(ReasoningParser(THINK, is_open) if thinks else None, calls)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.finish()])


def call(index: int, name: str, arguments: str) -> list[Event]:
    return [CallBegun(index, name), CallArguments(index, arguments), CallEnded(index)]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CITY = '{"city": "Oslo"}'
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
# Texts of each format with their events. Among them the cases in which other servers went wrong, by their issues.
CASES: list[tuple[str, str | None, str, list[Event]]] = [
    ("plain text", "hermes", " Hello <b>you</b>\n", [Said(" Hello <b>you</b>\n")]),
    ("one call", "hermes", hermes("weather", CITY), call(0, "weather", CITY)),
    (
        "text, then two calls (vllm#41967: the first one's arguments dropped)",
        "hermes",
        f"I look.\n\n{hermes('weather', CITY)}\n{hermes('f', '{}')}\n",
        [Said("I look."), *call(0, "weather", CITY), *call(1, "f", "{}")],
    ),
    (
        "reasoning and call in one chunk (vllm#56113, #56077)",
        "hermes",
        f"<think>\nHm.\n</think>{hermes('weather', CITY)}",
        [Thought("Hm."), *call(0, "weather", CITY)],
    ),
    (
        "reasoning, text and call (rtp-llm#694)",
        "hermes",
        f"<think>a</think>\n\nb{hermes('f', '{}')}c",
        [Thought("a"), Said("b"), *call(0, "f", "{}"), Said("c")],
    ),
    (
        "end marker within a text of the arguments",
        "hermes",
        hermes("f", '{"a": "</tool_call><tool_call>{"}'),
        call(0, "f", '{"a": "</tool_call><tool_call>{"}'),
    ),
    (
        "end of reasoning within arguments",
        "hermes",
        hermes("f", '{"a": "</think>"}'),
        call(0, "f", '{"a": "</think>"}'),
    ),
    (
        "arguments before the name, as a text",
        "hermes",
        '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}</tool_call>',
        call(0, "f", '{"a": 1}'),
    ),
    ("no arguments", "hermes", '<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
    (
        "brace missing",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}</tool_call>x',
        [*call(0, "f", "{}"), Said("x")],
    ),
    ("brace too many", "hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>', call(0, "f", "{}")),
    (
        "arguments cut by the end marker",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>',
        call(0, "f", '{"a": 1'),
    ),
    (
        "two objects in one pair of markers",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}</tool_call>',
        [*call(0, "f", "{}"), *call(1, "g", "{}")],
    ),
    ("no object", "hermes", "a <tool_call> b", [Said("a <tool_call> b")]),
    ("no name", "hermes", '<tool_call>{"x": 1}</tool_call>', [Said('<tool_call>{"x": 1}</tool_call>')]),
    (
        "empty name",
        "hermes",
        '<tool_call>{"name": "", "arguments": {}}',
        [Said('<tool_call>{"name": "", "arguments": {}}')],
    ),
    (
        "malformed, then well-formed",
        "hermes",
        f"<tool_call>oops\n{hermes('f', '{}')}",
        [Said("<tool_call>oops"), *call(0, "f", "{}")],
    ),
    ("head cut by max_tokens", "hermes", 'a\n<tool_call>{"name": "f', [Said('a\n<tool_call>{"name": "f')]),
    (
        "arguments cut by max_tokens",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a',
        [CallBegun(0, "f"), CallArguments(0, '{"a')],
    ),
    ("marker cut by max_tokens", "hermes", "a <tool_", [Said("a <tool_")]),
    (
        "Qwen2.5-Coder, a fence",
        "hermes",
        'So:\n```json\n{\n  "name": "weather",\n "arguments": {"city": "Oslo"}\n}\n{"name": "f"}\n```\n',
        [Said("So:"), *call(0, "weather", CITY), *call(1, "f", "{}")],
    ),
    ("Qwen2.5-Coder, <tools>", "hermes", '<tools>{"name": "f", "arguments": {}}</tools>', call(0, "f", "{}")),
    ("Qwen2.5-Coder, no marker", "hermes", '{"name": "f", "arguments": {}}', call(0, "f", "{}")),
    ("a fence with other JSON", "hermes", '```json\n{"name": "Ann"}\n```', [Said('```json\n{"name": "Ann"}\n```')]),
    ("XML", "qwen3_coder", XML, call(0, "weather", CITY)),
    ("XML without the outer marker", "qwen3_coder", XML.split("\n", 1)[1], call(0, "weather", CITY)),
    (
        "XML, two functions in one pair of markers",
        "qwen3_coder",
        "<tool_call><function=f></function><function=g></function></tool_call>.",
        [*call(0, "f", "{}"), *call(1, "g", "{}"), Said(".")],
    ),
    (
        "XML by types",
        "qwen3_coder",
        "<function=weather><parameter=days>3</parameter><parameter=city>3</parameter></function>",
        call(0, "weather", '{"days": 3, "city": "3"}'),
    ),
    (
        "XML, literals of Python and null",
        "qwen3_coder",
        "<function=f><parameter=flag>True</parameter><parameter=any>null</parameter></function>",
        call(0, "f", '{"flag": true, "any": null}'),
    ),
    (
        "XML, lines, quotes and tags in a text",
        "qwen3_coder",
        '<function=weather>\n<parameter=city>\n\n"a"\n<b>\n\n</parameter>\n</function>',
        call(0, "weather", json.dumps({"city": '\n"a"\n<b>\n'})),
    ),
    (
        "XML, end of a parameter forgotten",
        "qwen3_coder",
        "<function=weather><parameter=days>1<parameter=city>a</function>",
        call(0, "weather", '{"days": 1, "city": "a"}'),
    ),
    ("XML, end of the function forgotten", "qwen3_coder", "<tool_call><function=f></tool_call>", call(0, "f", "{}")),
    ("XML, malformed", "qwen3_coder", "<function=f>text", [Said("<function=f>text")]),
    ("XML, no name", "qwen3_coder", "<tool_call><function=>", [Said("<tool_call><function=>")]),
    ("Llama, bare", "llama3_json", '{"name": "weather", "parameters": {"city": "Oslo"}}', call(0, "weather", CITY)),
    (
        "Llama, bare, type first",
        "llama3_json",
        '\n{"type": "function", "name": "f", "parameters": {}}',
        call(0, "f", "{}"),
    ),
    (
        "Llama, bare, unknown function",
        "llama3_json",
        '{"name": "Ann", "parameters": {}}',
        [Said('{"name": "Ann", "parameters": {}}')],
    ),
    ("Llama, JSON that is no call", "llama3_json", '{"a": [1, 2]} and', [Said('{"a": [1, 2]} and')]),
    (
        "Llama, JSON behind text",
        "llama3_json",
        'a {"name": "f", "parameters": {}}',
        [Said('a {"name": "f", "parameters": {}}')],
    ),
    (
        "Llama, several",
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        [*call(0, "f", "{}"), *call(1, "g", "{}")],
    ),
    ("Llama, code", "llama3_json", "<|python_tag|>print(1)", [Said("<|python_tag|>print(1)")]),
    (
        "Mistral, list",
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}, "id": "a"}, {"name": "f", "arguments": {}}]',
        [*call(0, "weather", CITY), *call(1, "f", "{}")],
    ),
    (
        "Mistral, names",
        "mistral",
        'x[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}',
        [Said("x"), *call(0, "weather", CITY), *call(1, "f", "{}")],
    ),
    ("Mistral, name without a marker", "mistral", "[TOOL_CALLS]f{}", call(0, "f", "{}")),
    ("Mistral, malformed list", "mistral", "[TOOL_CALLS][1, 2] b", [Said("[TOOL_CALLS][1, 2] b")]),
    ("Mistral, sentence", "mistral", "[TOOL_CALLS] is a marker.", [Said("[TOOL_CALLS] is a marker.")]),
    ("reasoning alone", None, "<think>\na\n\nb\n</think>\n\nc\n", [Thought("a\n\nb"), Said("c\n")]),
    ("reasoning twice", None, "<think>a</think>\n<think>b</think> c", [Thought("ab"), Said("c")]),
    ("empty reasoning", None, "<think>\n\n</think>\n\nc", [Said("c")]),
    ("reasoning cut by max_tokens", None, "<think>a </thi", [Thought("a </thi")]),
    ("marker behind text", None, "a <think>b</think>", [Said("a <think>b</think>")]),
]
NAMED = pytest.mark.parametrize(("form", "text", "events"), [one[1:] for one in CASES], ids=[one[0] for one in CASES])


@NAMED
def test_a_text_has_its_events_whole_and_letter_by_letter(form: str | None, text: str, events: list[Event]) -> None:
    assert parse(form, [text]) == events
    assert parse(form, list(text)) == events


@NAMED
def test_two_pieces_cut_anywhere_give_the_same_events(form: str | None, text: str, events: list[Event]) -> None:
    for cut in range(1, len(text)):
        assert parse(form, [text[:cut], text[cut:]]) == events, (text[:cut], text[cut:])


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=", "f>", "weather>", "</function>", "<parameter=", "city>", "days>"),
    *(
        "</parameter>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "```json",
        "```",
        "<tools>",
        "<|python_tag|>",
        "<think>",
        "</think>",
        "{",
        "}",
        "[",
        "]",
    ),
    *(
        '"name"',
        ": ",
        '"f"',
        '"weather"',
        ", ",
        '"arguments"',
        '"parameters"',
        ": {",
        '"a": "',
        '\\"',
        '"',
        ";",
        "\n",
        " ",
    ),
    *(
        '{"name": "f", "arguments": {',
        '{"name": "weather", "parameters": {"city": "',
        "a",
        "<",
        "</",
        "é",
        "🙂",
        "null",
        "1",
    ),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.sampled_from([None, *FORMATS]), st.booleans(), st.data())
def test_any_cutting_of_any_text_gives_the_same_events(text: str, form: str | None, is_open: bool, data: Any) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(form, [text], is_open=is_open)
    assert parse(form, pieces, is_open=is_open) == whole
    assert parse(form, list(text), is_open=is_open) == whole


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.sampled_from([*FORMATS]))
def test_a_text_without_a_call_comes_out_as_it_is(text: str, form: str) -> None:
    events = parse(form, [text], thinks=False)
    if not any(isinstance(event, CallBegun) for event in events):
        assert events == ([Said(text)] if text else [])
    begun = [event.index for event in events if isinstance(event, CallBegun)]
    assert begun == list(range(len(begun)))


WORDS = st.text('ab"\\{}[]<>/é🙂\n ', max_size=6)
VALUES = st.none() | st.booleans() | st.integers() | WORDS | st.lists(WORDS, max_size=2) | st.dictionaries(WORDS, WORDS)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.dictionaries(WORDS, VALUES, max_size=3), min_size=1, max_size=3),
    st.text("ab <{\n", max_size=6),
    st.data(),
)
def test_calls_that_are_written_are_read(several: list[dict[str, Any]], said: str, data: Any) -> None:
    written = [json.dumps(one, ensure_ascii=data.draw(st.booleans())) for one in several]
    texts = {
        "hermes": "".join(hermes("f", one) for one in written),
        "mistral": "".join(f"[TOOL_CALLS]f[ARGS]{one}" for one in written),
        "llama3_json": "<|python_tag|>" + "; ".join(f'{{"name": "f", "parameters": {one}}}' for one in written),
    }
    form = data.draw(st.sampled_from(sorted(texts)))
    events = parse(form, ["x" + said, texts[form]])
    assert [event.text for event in events if isinstance(event, CallArguments)] == written
    assert "".join(event.text for event in events if isinstance(event, Said)) == ("x" + said).rstrip()


@settings(max_examples=150, deadline=None)
@given(st.text().filter(lambda one: "<" not in one))
def test_a_text_of_qwen3_coder_is_read_as_it_is(value: str) -> None:
    events = parse("qwen3_coder", [f"<function=weather>\n<parameter=city>\n{value}\n</parameter>\n</function>"])
    assert isinstance(events[1], CallArguments) and json.loads(events[1].text) == {"city": value}


def test_arguments_are_passed_on_while_they_are_written() -> None:
    parser = AnswerParser(None, CallParser(FORMATS["hermes"], SCHEMAS))
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a": "b') == [
        CallBegun(0, "f"),
        CallArguments(0, '{"a": "b'),
    ]
    assert parser.feed("c") == [CallArguments(0, "c")]
    parser = AnswerParser(None, CallParser(FORMATS["qwen3_coder"], SCHEMAS))
    assert joined(parser.feed("<function=weather><parameter=city>Os")) == [
        CallBegun(0, "weather"),
        CallArguments(0, '{"city": "Os'),
    ]
    assert parser.feed("lo\n") == [CallArguments(0, "lo")]  # the line break may be the marker's


def test_reasoning_that_the_prompt_opened_needs_no_marker() -> None:
    assert THINK.are_open("<|im_start|>assistant\n<think>\n") and not THINK.are_open("<think>\n\n</think>\n\n")
    text = f"\na\n</think>\n\n{hermes('f', '{}')}"
    assert parse("hermes", [text], is_open=True) == [Thought("a"), *call(0, "f", "{}")]
    assert parse("hermes", list("a"), is_open=True) == [Thought("a")]


def test_long_texts_take_linear_time() -> None:
    text = '<tool_call>{"' * 3000
    assert parse("hermes", [text]) == [Said(text)]
    text = '<tool_call>{"name": "f", "arguments": {"a": "' + "b" * 20_000
    assert len(parse("hermes", list(text))) == 2


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}<function=x><parameter=y>", "qwen3_coder"),
        ("return a json object within <tool_call></tool_call>", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("plain", None),
    ],
)
def test_a_template_shows_its_format(template: str, name: str | None) -> None:
    form = format_of(template)
    assert (form.name if form else None) == name


def test_a_template_shows_if_the_model_thinks() -> None:
    assert thinking_of("{{ content.split('</think>')[-1] }}") is THINK and thinking_of("plain") is None


F, G = hermes("f", "{}"), hermes("g", '{"a": 1}')
# Chunks of several tokens that broke the parsers of other servers, with the numbers of their issues.
CHUNKS: list[tuple[str, list[str], list[Event]]] = [
    (
        "rtp-llm#694, 1: reasoning ends, text, call starts",
        ["<think>a", "</think> b<tool_call>", F.removeprefix("<tool_call>")],
        [Thought("a"), Said("b"), *call(0, "f", "{}")],
    ),
    (
        "rtp-llm#694, 2: a call starts within a chunk",
        ["a <tool", F.removeprefix("<tool")],
        [Said("a"), *call(0, "f", "{}")],
    ),
    ("rtp-llm#694, 3: arguments and end in a chunk", [F[:20], F[20:]], call(0, "f", "{}")),
    ("rtp-llm#694, 4: end and text in a chunk", [F[:-12], F[-12:] + "yes"], [*call(0, "f", "{}"), Said("yes")]),
    ("rtp-llm#694, 5: a whole call in a chunk", [F], call(0, "f", "{}")),
    (
        "rtp-llm#694, 6: several calls in a chunk",
        [".." + F + G],
        [Said(".."), *call(0, "f", "{}"), *call(1, "g", '{"a": 1}')],
    ),
    (
        "rtp-llm#694, 7: end and start in a chunk",
        [F[:-12], F[-12:] + "<tool_call>", G.removeprefix("<tool_call>")],
        [*call(0, "f", "{}"), *call(1, "g", '{"a": 1}')],
    ),
    (
        "vllm#56077, #56113: name and arguments lost behind the end of reasoning",
        ["<think>a", f"</think>{G[:30]}", G[30:]],
        [Thought("a"), *call(0, "g", '{"a": 1}')],
    ),
    ("vllm#42781: reasoning cut short", ["<think>a", " b</think>", "c"], [Thought("a b"), Said("c")]),
    (
        "vllm#53638: a stray marker before the call",
        ["<tool_call> I will", f" call. {G}"],
        [Said("<tool_call> I will call."), *call(0, "g", '{"a": 1}')],
    ),
]


@pytest.mark.parametrize(("pieces", "events"), [one[1:] for one in CHUNKS], ids=[one[0] for one in CHUNKS])
def test_chunks_that_broke_other_parsers_break_nothing_here(pieces: list[str], events: list[Event]) -> None:
    assert parse("hermes", pieces) == events


TWO_CALLS = {
    "hermes": F + G,
    "qwen3_coder": "<tool_call><function=f></function></tool_call>\n<tool_call><function=g>\n<parameter=a>\n1\n"
    "</parameter></function></tool_call>",
    "llama3_json": '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}]',
}


@pytest.mark.parametrize("form", FORMATS)
def test_two_calls_in_up_to_three_chunks_lose_nothing(form: str) -> None:  # sglang#31915, #35564; vllm#41967
    text = TWO_CALLS[form]
    second = '{"a": "1"}' if form == "qwen3_coder" else '{"a": 1}'  # no schema: a text
    for first in range(0, len(text), 3):
        for other in range(first, len(text), 7):
            events = parse(form, [text[:first], text[first:other], text[other:]])
            assert events == [*call(0, "f", "{}"), *call(1, "g", second)], (text[:first], text[first:other])
