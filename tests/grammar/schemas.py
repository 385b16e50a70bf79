"""Twenty schemas whose answers can fit a small limit: every string and array is bounded."""

from __future__ import annotations

from typing import Any


def record(**properties: Any) -> dict[str, Any]:
    """An object with these properties, all of them required, and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SHORT = {"type": "string", "maxLength": 8}
COLOUR = {"enum": ["red", "green", "transparent"]}
SCHEMAS: dict[str, dict[str, Any]] = {
    "boolean": {"type": "boolean"},
    "null or boolean": {"type": ["null", "boolean"]},
    "integer": {"type": "integer", "minimum": -20, "maximum": 300},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "string": SHORT,
    "string with a least length": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "enum": COLOUR,
    "enum of kinds": {"enum": ["one", 2, True, None]},
    "const": {"const": "exactly this"},
    "array": {"type": "array", "items": COLOUR, "minItems": 1, "maxItems": 3},
    "empty array": {"type": "array", "items": {"type": "null"}, "maxItems": 0},
    "record": record(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "nested": record(
        at=record(lat={"type": "integer", "minimum": 0, "maximum": 9}, name=COLOUR), ok={"type": "boolean"}
    ),
    "long keys": record(a_rather_long_name_of_a_key=COLOUR, another_long_name_of_a_key={"type": "boolean"}),
    "optional": {
        "type": "object",
        "properties": {"a": COLOUR, "b": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "any of": {"anyOf": [record(kind={"const": "dog"}, legs={"const": 4}), record(kind={"const": "fish"})]},
    "reference": {
        "$defs": {"colour": COLOUR},
        **record(first={"$ref": "#/$defs/colour"}, second={"$ref": "#/$defs/colour"}),
    },
    "records in an array": {"type": "array", "items": record(on={"type": "boolean"}), "minItems": 2, "maxItems": 2},
    "words of other languages": record(größe={"enum": ["klein", "groß", "很大"]}, emoji={"const": "🙂"}),
}
