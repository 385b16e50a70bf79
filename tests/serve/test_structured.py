"""Answers of the server that follow a schema or a grammar, under every name that clients have for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from running import PROMPT, Running, load_tiny, running

from schema_check import matches
from schemas import SCHEMAS, record
from specbranch import SamplingParams
from specbranch.errors import MissingPackage

pytest.importorskip("llguidance")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TALK = [{"role": "user", "content": PROMPT}]
PERSON = SCHEMAS["record"]
BASE: dict[str, Any] = {"temperature": 0.8, "seed": 4, "max_tokens": 200}
SCHEMA_NAMES: dict[str, dict[str, Any]] = {
    "OpenAI": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": PERSON}}
    },
    "llama.cpp's response_format": {"response_format": {"type": "json_object", "schema": PERSON}},
    "llama.cpp": {"json_schema": PERSON},
    "SGLang": {"json_schema": json.dumps(PERSON)},
    "vLLM": {"structured_outputs": {"json": PERSON}},
    "vLLM, all fields": {
        "structured_outputs": {
            "json": PERSON,
            "regex": None,
            "json_object": None,
            "whitespace_pattern": None,
            "structural_tag": None,
            "disable_fallback": True,
            "disable_any_whitespace": False,
            "disable_additional_properties": False,
        }
    },
    "older vLLM": {"guided_json": PERSON},
    "older vLLM, a backend": {"guided_json": PERSON, "guided_decoding_backend": "xgrammar"},
    "older vLLM, a text": {"guided_json": json.dumps(PERSON)},
}


@pytest.fixture(scope="module")
def served(pair: tuple[str, str]) -> Iterator[Running]:
    with running(load_tiny(pair)) as server:
        yield server


def said(served: Running, path: str, body: dict[str, Any]) -> str:
    given = {"messages": TALK} if path == CHAT else {"prompt": PROMPT}
    answer = served.post(path, {**given, **BASE, **body})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["message"]["content"] if path == CHAT else choice["text"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_schema_has_the_same_answer_under_every_name(served: Running, path: str) -> None:
    answers = {name: said(served, path, body) for name, body in SCHEMA_NAMES.items()}
    assert len(set(answers.values())) == 1
    assert matches(json.loads(answers["OpenAI"]), PERSON)


def test_a_json_object_is_one(served: Running) -> None:
    bias = {"logit_bias": {served.engine.tokenizer.encode("}", add_special=False)[0]: 100}}
    for body in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        assert isinstance(json.loads(said(served, CHAT, {**body, **bias})), dict)


@pytest.mark.parametrize(
    "names", [("regex", "guided_regex"), ("choice", "guided_choice"), ("grammar", "guided_grammar")]
)
def test_other_grammars_have_the_same_answer_under_every_name(served: Running, names: tuple[str, str]) -> None:
    value = {"regex": "[a-d]{3,9}!", "choice": ["red", "green"], "grammar": 'root ::= "<" [a-z]+ ">"'}[names[0]]
    bodies = [*({name: value} for name in names), {"structured_outputs": {names[0]: value}}]
    answers = {said(served, COMPLETIONS, body) for body in bodies}
    assert len(answers) == 1
    assert re.fullmatch("[a-d]{3,9}!|red|green|<[a-z]+>?", answers.pop())


def test_a_stream_carries_the_same_text(served: Running) -> None:
    body = {"messages": TALK, **BASE, **SCHEMA_NAMES["OpenAI"]}
    whole = served.post(CHAT, body).json()["choices"][0]["message"]["content"]
    client = served.openai()
    chunks = client.chat.completions.create(model="target", stream=True, **body)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole


def test_the_openai_client_parses_a_model_of_its_own(served: Running) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Colour(pydantic.BaseModel):
        bright: bool
        known: bool

    parsed = served.openai().chat.completions.parse(
        model="target", messages=TALK, response_format=Colour, max_tokens=200
    )
    assert isinstance(parsed.choices[0].message.parsed, Colour)


def test_text_is_what_it_was(served: Running) -> None:
    assert said(served, CHAT, {"response_format": {"type": "text"}}) == said(served, CHAT, {})


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}}, "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}}, "cannot be followed"),
    ({"response_format": "json"}, "response_format"),
    (
        {"structured_outputs": {"structural_tag": "x"}},
        "structured_outputs has 'structural_tag', which is not supported",
    ),
    ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, "blanks in JSON are bounded"),
    ({"structured_outputs": {"yaml": {}}}, "structured_outputs 'yaml'"),
    ({"guided_json": {}, "guided_whitespace_pattern": " "}, "blanks in JSON are bounded"),
    ({"guided_json": "{"}, "json_schema"),
    ({"guided_regex": "(["}, "regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [""]}, "guided_choice"),
    ({"choice": "red"}, "choice"),
    ({"grammar": "root ::= (("}, "grammar"),
    ({"regex": "a", "choice": ["b"]}, "both given"),
    ({"response_format": {"type": "json_object"}, "guided_json": {}}, "both given"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "both given"),
    ({"json_schema": {"enum": ["x" * 300_000]}}, "characters"),
    ({"regex": "a\ud800"}, "regex"),
    ({"json_schema": {"const": "\ud800"}}, "json_schema"),
    ({"choice": ["\udfff"]}, "choice"),
    ({"json_schema": {"type": "string", "maxLength": 10**40}}, "json_schema"),
    ({"response_format": {"type": "json_object", "schema": False}}, "json_schema"),
    ({"structured_outputs": {"choice": 3}}, "choice"),
    ({"structured_outputs": {"json": True}}, "json_schema"),
    ({"structured_outputs": {"regex": ["a"]}}, "regex"),
]


@pytest.mark.parametrize(("body", "expected"), MISTAKES)
def test_mistakes_are_refused_with_a_sentence(served: Running, body: dict[str, Any], expected: str) -> None:
    status, error = served.error(CHAT, {"messages": TALK, **body})
    assert status == 400 and expected in error["message"] and error["type"] == "invalid_request_error"


def test_a_server_without_the_package_says_what_is_missing(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(params: SamplingParams) -> None:
        raise MissingPackage("It needs llguidance, which is not installed.")

    monkeypatch.setattr(served.engine, "compile_grammar", missing)
    status, error = served.error(CHAT, {"messages": TALK, "regex": "a"})
    assert status == 400 and "llguidance" in error["message"]


def test_many_schemas_at_once_are_all_followed(served: Running) -> None:
    from concurrent.futures import ThreadPoolExecutor

    schemas = [record(**{f"key_{n}": {"type": "boolean"}}) for n in range(8)]
    bodies = [{"response_format": {"type": "json_schema", "json_schema": {"schema": one}}} for one in schemas]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: said(served, CHAT, body), bodies))
    assert all(matches(json.loads(answer), one) for answer, one in zip(answers, schemas, strict=True))
