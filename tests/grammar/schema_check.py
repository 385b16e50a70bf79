"""A check of JSON values against the schemas of these tests, written by hand: independent of the library that made
the masks."""

from __future__ import annotations

import re
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def matches(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None) -> bool:
    """True if a value is what the schema describes."""
    root = root or schema
    if "$ref" in schema:
        return matches(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "const" in schema and not (value == schema["const"] and type(value) is type(schema["const"])):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "anyOf" in schema and not any(matches(value, one, root) for one in schema["anyOf"]):
        return False
    if "type" in schema and not _has_type(value, schema["type"]):
        return False
    if isinstance(value, str):
        return _string(value, schema)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return schema.get("minimum", value) <= value <= schema.get("maximum", value)
    if isinstance(value, list):
        within = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return within and all(matches(one, schema.get("items", {}), root) for one in value)
    return not isinstance(value, dict) or _object(value, schema, root)


def _has_type(value: Any, name: str | list[str]) -> bool:
    names = [name] if isinstance(name, str) else name
    is_bool = isinstance(value, bool)
    return any(isinstance(value, TYPES[one]) and (is_bool == (one == "boolean")) for one in names)


def _string(value: str, schema: dict[str, Any]) -> bool:
    within = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    return within and ("pattern" not in schema or re.search(schema["pattern"], value) is not None)


def _object(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any]) -> bool:
    known, other = schema.get("properties", {}), schema.get("additionalProperties", {})
    if any(name not in value for name in schema.get("required", ())):
        return False
    for name, one in value.items():
        if name in known:
            if not matches(one, known[name], root):
                return False
        elif other is False or (isinstance(other, dict) and not matches(one, other, root)):
            return False
    return True
