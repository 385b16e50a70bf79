"""The grammars of tool calls: they force an answer into a format, with arguments that the functions' schemas describe.

Owns the grammar of each format, in Lark as llguidance reads it. Does not own the parsers (`text/tools/`), nor compiling
(`grammar/compiler.py`). Invariant: the format's parser reads every text of a grammar as exactly its calls. A schema
that a format cannot be held to is refused with the names of its function and argument.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbranch.config import schema_text
from specbranch.errors import BadParameter
from specbranch.grammar.compiler import WHITESPACE, check_size
from specbranch.grammar.lark_text import AddedId, escaped, marker, quoted, without
from specbranch.text.tools.hermes import FENCE, FENCE_END
from specbranch.text.tools.llama import TAG
from specbranch.text.tools.mistral import ARGS, TOOL_CALLS
from specbranch.text.tools.qwen3_coder import END as FUNCTION_END
from specbranch.text.tools.qwen3_coder import FUNCTION, PARAMETER, VALUE_END, kinds_of
from specbranch.text.tools.reading import CALL_END, CALL_START

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# keywords that say more of an object than its properties
OTHER_PROPERTIES = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "dependentSchemas"}
    | {"$ref", "allOf", "anyOf", "oneOf", "if", "not"}
)
SCHEMA_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id", "$defs"}
)
XML_OBJECT = SCHEMA_NOTES | {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "definitions",
}  # that XML can follow
XML_TEXT = SCHEMA_NOTES | {"type", "minLength", "maxLength"}

FENCE_BLANKS = r"[ \t\r\n]{0,24}"  # between two parts of a call in a fence
# what the parser takes for the beginning of a call in a fence, up to its name
_NAMED = r'\s*\{\s*("(type|id)"\s*:\s*"([^"\\]|\\.)*"\s*,\s*)?"name"\s*:\s*'


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called."""

    name: str
    schema: Mapping[str, Any] | None  # of its arguments; None: it has none
    strict: bool = False  # its arguments have to be what the schema says


class CallGrammar(ABC):
    """The grammar of one format, for the functions of one request."""

    separator = ""  # between two calls

    def __init__(self, functions: Sequence[Function], added_id: AddedId) -> None:
        self._functions, self._added_id = functions, added_id

    def forced(self, several: bool) -> str:
        """Return the grammar of an answer that is a call, or several."""
        return self._written(f"start: {self._calls(several)}")

    def in_text(self, several: bool) -> str:
        """Return the grammar of free text with calls."""
        again = "(begin body)* TEXT" if several else "TEXT | begin body"
        begin = self._marker(self._opening)
        if self._added_id(self._opening) is None:
            rule = f"begin[lazy]: /(?s:.*){escaped(self._opening)}/"
        else:
            rule = f"begin: TEXT {begin}"
        return self._written(f"start: {again}", rule, f"TEXT: {without(self._opening, *self._forbidden)}")

    def or_answer(self, several: bool, answer: str) -> str:
        """Return the grammar of calls, or of an answer by a rule of Lark."""
        return self._written(f"start: {self._calls(several)} | answer", f"answer: {answer}")

    @property
    @abstractmethod
    def _opening(self) -> str:
        """The marker before a call."""

    @property
    def _forbidden(self) -> tuple[str, ...]:
        """Further texts that the parser would read as the start of a call."""
        return ()

    @abstractmethod
    def _body(self, function: Function, arguments: str) -> str:
        """Return a call behind its opening marker. `arguments`: the name for rules of its arguments."""

    def _arguments(self, function: Function, name: str) -> list[str]:
        """Return the rules of a call's arguments."""
        return [f"{name}: {json_rule(object_schema(function))}"]

    def _calls(self, several: bool) -> str:
        one = f"{self._marker(self._opening)} body"
        between = quoted(self.separator) if self.separator else ""
        return f"{one} ({between} {one})*" if several else one

    def _written(self, *rules: str) -> str:
        names = [f"call_{at}" for at in range(len(self._functions))]
        lines = ["%llguidance {}", *rules, f"body: {' | '.join(names)}"]
        for name, function in zip(names, self._functions, strict=True):
            lines += [f"{name}: {self._body(function, f'{name}_args')}", *self._arguments(function, f"{name}_args")]
        return "\n".join(lines) + "\n"

    def _marker(self, text: str) -> str:
        return marker(text, self._added_id)


class HermesGrammar(CallGrammar):
    """A JSON object between markers, as the templates of Hermes and Qwen ask for it.

    In free text it may be in a fence, too, as Qwen2.5-Coder writes it; other JSON in a fence is text.
    """

    separator = "\n"
    _opening = CALL_START

    def in_text(self, several: bool) -> str:
        """Return the grammar of free text with calls, in their markers or in a fence.

        `opened` is what follows a fence's opening. Its texts do not begin as a call of a known function does.
        """
        again = "free" if several else ""
        names = "|".join(escaped(one.name) for one in self._functions)
        no_call = rf" & ~/{_NAMED}\"({names})\"(?s:.*)/"
        return self._written(
            "start: free",
            f"free: TEXT | begin body {again} | fence opened",
            f"opened: fenced {again} | TEXT_BEHIND | begin_behind body {again} | fence_behind opened",
            *self._texts("", ""),
            *self._texts("_behind", no_call),
            f"fenced: {' | '.join(f'FENCED_{at} call_{at}_args FENCE_END' for at in range(len(self._functions)))}",
            *(f"FENCED_{at}: {_fenced_head(one)}" for at, one in enumerate(self._functions)),
            rf"FENCE_END: /{FENCE_BLANKS}\}}{FENCE_BLANKS}{FENCE_END}/",
        )

    def _texts(self, where: str, unless: str) -> list[str]:
        """Return the rules of text to its end, and up to the opening of a call or of a fence."""
        begin, no_call = self._marker(CALL_START), f" & ~/(?s:.*){escaped(CALL_START)}(?s:.*)/{unless}"
        text = f"TEXT{where.upper()}"
        spelled = f"begin{where}[lazy]: /(?s:.*){escaped(CALL_START)}/ & ~/(?s:.*){FENCE}(?s:.*)/{unless}"
        return [
            f"{text}: {without(CALL_START, FENCE)}{unless}",
            spelled if self._added_id(CALL_START) is None else f"begin{where}: {text} {begin}",
            f"fence{where}[lazy]: /(?s:.*){FENCE}/{no_call}",
        ]

    def _body(self, function: Function, arguments: str) -> str:
        head, end = quoted(f"\n{_head(function, 'arguments')}"), quoted("}\n")
        return f"{head} {arguments} {end} {self._marker(CALL_END)}"


class LlamaGrammar(CallGrammar):
    """A JSON object from the answer's start."""

    separator = "; "
    _opening = TAG

    def in_text(self, several: bool) -> str:
        """Return the grammar of calls, or of text that begins with no brace: a brace would begin a call."""
        text = rf"/[^{{\s](?s:.*)/ & ~/(?s:.*){escaped(TAG)}(?s:.*)/"
        return self._written(f"start: {self._calls(several)} | TEXT", f"TEXT: {text}")

    def _calls(self, several: bool) -> str:
        return f"body ({quoted(self.separator)} body)*" if several else "body"

    def _body(self, function: Function, arguments: str) -> str:
        return f"{quoted(_head(function, 'parameters'))} {arguments} {quoted('}')}"


class MistralGrammar(CallGrammar):
    """A name and arguments behind a marker; for models without the marker of arguments, a list of objects."""

    _opening = TOOL_CALLS

    @property
    def _by_name(self) -> bool:
        return self._added_id(ARGS) is not None

    def _calls(self, several: bool) -> str:
        if self._by_name:
            return super()._calls(several)
        return f'{self._marker(TOOL_CALLS)} " "? "[" body {"(" + quoted(", ") + " body)*" if several else ""} "]"'

    def in_text(self, several: bool) -> str:
        """Return the grammar of free text; a list of calls ends the answer."""
        if self._by_name:
            return super().in_text(several)
        rules = [f"start: TEXT | TEXT {self._calls(several)}", f"TEXT: {without(TOOL_CALLS)}"]
        if self._added_id(TOOL_CALLS) is None:
            calls = self._calls(several).removeprefix(self._marker(TOOL_CALLS))
            rules = [f"start: TEXT | begin {calls}", f"begin[lazy]: /(?s:.*){escaped(TOOL_CALLS)}/", rules[1]]
        return self._written(*rules)

    def _body(self, function: Function, arguments: str) -> str:
        if self._by_name:
            return f"{quoted(function.name)} {self._marker(ARGS)} {arguments}"
        return f"{quoted(_head(function, 'arguments'))} {arguments} {quoted('}')}"


class Qwen3CoderGrammar(CallGrammar):
    """Parameters in XML: texts as they are, other values as JSON."""

    separator = "\n"
    _opening = CALL_START
    _forbidden = (FUNCTION,)

    def _body(self, function: Function, arguments: str) -> str:
        head, end = quoted(f"\n{FUNCTION}{function.name}>\n"), quoted(f"{FUNCTION_END}\n")
        return f"{head} {arguments} {end} {self._marker(CALL_END)}"

    def _arguments(self, function: Function, name: str) -> list[str]:
        schema = object_schema(function)
        wanted, required = self._properties(function, schema)
        parts = [f"{name}_{at}{'' if key in required else '?'}" for at, key in enumerate(wanted)]
        found = [f"{name}: {' '.join(parts) or quoted('')}"]
        for at, (key, described) in enumerate(wanted.items()):
            rule, head, end = f"{name}_{at}", quoted(f"{PARAMETER}{key}>\n"), quoted(f"\n{VALUE_END}\n")
            if kinds_of(described) and "string" not in kinds_of(described):
                value = json_rule({**described, **{word: schema[word] for word in _DEFINITIONS if word in schema}})
                found += [f"{rule}: {head} {rule}_value {end}", f"{rule}_value: {value}"]
            elif (choices := _choices(described)) is not None:
                found += [f"{rule}: {head} ({' | '.join(map(quoted, choices))}) {end}"]
            else:
                self._check_text(function, key, described)
                found += [f'{rule}: {head} {rule}_value "\\n"', f"{rule}_value[lazy]: {_xml_text(described)}"]
        return found

    def _properties(self, function: Function, schema: Mapping[str, Any]) -> tuple[dict[str, Any], Sequence[str]]:
        """Return the arguments by name, and the names of those that have to be there."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise BadParameter(f"The parameters of the function {function.name!r} are no JSON schema of an object.")
        names = [*properties, *(str(key) for key in required)]
        if odd := next((key for key in names if not key.strip() or set(key) & set("<>\n")), None):
            raise BadParameter(_cannot(function, f"the name of the argument {odd!r:.60}"))
        other = sorted(schema.keys() - XML_OBJECT)
        if function.strict and (other or schema.get("additionalProperties", False) is not False):
            raise BadParameter(_cannot(function, f"{other[0] if other else 'additionalProperties'!r:.60}"))
        return {**{key: {} for key in names}, **properties}, names[len(properties) :]

    def _check_text(self, function: Function, key: str, described: Any) -> None:
        other = sorted(described.keys() - XML_TEXT) if isinstance(described, Mapping) else []
        if function.strict and other:
            raise BadParameter(_cannot(function, f"{other[0]!r:.60} of the argument {key!r:.60}"))


GRAMMARS: dict[str, type[CallGrammar]] = {  # by the format's name
    "hermes": HermesGrammar,
    "llama3_json": LlamaGrammar,
    "mistral": MistralGrammar,
    "qwen3_coder": Qwen3CoderGrammar,
}
_DEFINITIONS = ("$defs", "definitions")


def object_schema(function: Function) -> Mapping[str, Any]:
    """Return the schema of a function's arguments, which are an object. Arguments that it does not name are left out.

    Raises BadParameter for a schema that describes no object.
    """
    schema = NO_ARGUMENTS if function.schema is None else function.schema
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise BadParameter(
            f"The parameters of the function {function.name!r} are of type {kind!r:.60}; expected object."
        )
    closed = {"additionalProperties": False} if "properties" in schema and not OTHER_PROPERTIES & schema.keys() else {}
    return {**schema, "type": "object", **closed}


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return a rule of JSON that a schema describes, with bounded whitespace."""
    text = schema_text({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})
    assert text is not None
    check_size("json_schema", text)
    return f"%json {text}"


def _head(function: Function, arguments: str) -> str:
    return f'{{"name": {quoted(function.name)}, "{arguments}": '


def _fenced_head(function: Function) -> str:
    """Return the terminal of a call's beginning in a fence, up to its arguments."""
    parts = ("", "{", '"name"', ":", quoted(function.name), ",", '"(arguments|parameters)"', ":", "")
    return f"/{FENCE_BLANKS.join(part if '|' in part else escaped(part) for part in parts)}/"


def _choices(described: Any) -> list[str] | None:
    """Return the texts that a value is one of; None if it is another kind of value."""
    if not isinstance(described, Mapping) or not {"enum", "const"} & described.keys():
        return None
    several = [described["const"]] if "const" in described else described["enum"]
    plain = isinstance(several, list) and several and all(isinstance(one, str) and "<" not in one for one in several)
    return several if plain else None


def _xml_text(described: Any) -> str:
    """Return the terminal of a text up to its end marker."""
    limits = described if isinstance(described, Mapping) else {}
    least, most = limits.get("minLength"), limits.get("maxLength")
    counts = [str(one) if isinstance(one, int) and one >= 0 else "" for one in (least, most)]
    text = f"(?s:.{{{counts[0] or 0},{counts[1]}}})" if any(counts) else "(?s:.*)"
    ends = "|".join(map(escaped, (PARAMETER, FUNCTION_END)))
    return f"/{text}\\n{escaped(VALUE_END)}/ & ~/(?s:.*)({ends})(?s:.*)/"


def _cannot(function: Function, what: str) -> str:
    otherwise = ", or leave out strict" if function.strict else ""
    return (
        f"Calls of the function {function.name!r} in the format qwen3_coder cannot be held to {what}. Leave that out "
        f"of its schema{otherwise}."
    )
