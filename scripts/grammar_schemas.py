"""Two hundred JSON schemas with a prompt each: twenty-five subjects in eight shapes, as users send them.

Every string has a largest length and every array a largest number of items, so that an answer can fit a limit. Nothing
is random: the same number names the same schema on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]


@dataclass(frozen=True)
class SchemaCase:
    """A schema, and what the model is asked for."""

    name: str
    prompt: str
    schema: Schema


def text(longest: int) -> Schema:
    """Return the schema of a short text."""
    return {"type": "string", "maxLength": longest}


def whole(least: int, most: int) -> Schema:
    """Return the schema of an integer."""
    return {"type": "integer", "minimum": least, "maximum": most}


def one_of(*values: Any) -> Schema:
    """Return the schema of a choice."""
    return {"enum": list(values)}


def like(pattern: str) -> Schema:
    """Return the schema of a text that follows a regular expression."""
    return {"type": "string", "pattern": pattern}


YES = {"type": "boolean"}
DAY = {"type": "string", "format": "date"}
PRICE = {"type": "number", "minimum": 0, "maximum": 9999, "multipleOf": 0.5}
# four fields a subject: two of text or number, a choice, and one of another kind
SUBJECTS: dict[str, dict[str, Schema]] = {
    "book": {"title": text(40), "year": whole(1450, 2026), "language": one_of("en", "de", "fr"), "in_print": YES},
    "recipe": {
        "dish": text(30),
        "minutes": whole(1, 600),
        "course": one_of("main", "dessert"),
        "vegan": YES,
    },
    "city": {"city": text(30), "inhabitants": whole(0, 40_000_000), "coast": YES, "founded": whole(-3000, 2026)},
    "employee": {"name": text(30), "badge": like("^[A-Z]{2}-[0-9]{4}$"), "role": one_of("admin", "user"), "since": DAY},
    "flight": {"number": like("^[A-Z]{2}[0-9]{3}$"), "gate": like("^[A-D][0-9]{2}$"), "delayed": YES, "day": DAY},
    "song": {"song": text(40), "artist": text(30), "seconds": whole(10, 1200), "genre": one_of("rock", "jazz")},
    "invoice": {"customer": text(30), "total": PRICE, "currency": one_of("EUR", "USD", "CHF"), "paid": YES},
    "sensor": {
        "sensor": like("^s[0-9]{3}$"),
        "celsius": whole(-60, 90),
        "state": one_of("ok", "lost"),
        "day": DAY,
    },
    "animal": {"species": text(30), "legs": whole(0, 8), "diet": one_of("plants", "meat", "both"), "lays_eggs": YES},
    "film": {"film": text(40), "minutes": whole(1, 400), "rating": whole(0, 10), "colour": YES},
    "patient": {"patient": text(30), "age": whole(0, 120), "blood": one_of("A", "B", "AB", "0"), "smoker": YES},
    "match": {"home": text(20), "away": text(20), "goals": whole(0, 20), "day": DAY},
    "plant": {"plant": text(30), "height_cm": whole(1, 9000), "light": one_of("sun", "shade"), "edible": YES},
    "ticket": {"subject": text(50), "priority": one_of("low", "high"), "open": YES, "opened": DAY},
    "planet": {"planet": text(20), "moons": whole(0, 200), "kind": one_of("rock", "gas", "ice"), "ring": YES},
    "car": {"model": text(30), "plate": like("^[A-Z]{3}[0-9]{3}$"), "doors": one_of(2, 3, 4, 5), "electric": YES},
    "course": {"course": text(40), "credits": whole(1, 12), "term": one_of("spring", "autumn"), "starts": DAY},
    "hotel": {"hotel": text(30), "stars": whole(1, 5), "price": PRICE, "breakfast": YES},
    "server": {
        "host": like("^[a-z]{3,8}[0-9]$"),
        "cores": one_of(2, 4, 8, 16),
        "os": one_of("bsd", "hurd"),
        "up": YES,
    },
    "painting": {"painting": text(40), "painter": text(30), "year": whole(1200, 2026), "oil": YES},
    "parcel": {"parcel": like("^[0-9]{6}$"), "grams": whole(1, 30_000), "state": one_of("sent", "there"), "day": DAY},
    "river": {"river": text(30), "kilometres": whole(1, 7000), "mouth": text(30), "navigable": YES},
    "poll": {"question": text(60), "votes": whole(0, 100_000), "winner": one_of("yes", "no", None), "closed": DAY},
    "game": {"game": text(30), "players": whole(1, 12), "kind": one_of("board", "card", "video"), "solo": YES},
    "medicine": {"medicine": text(30), "milligrams": whole(1, 2000), "form": one_of("pill", "syrup"), "approved": DAY},
}


def record(properties: dict[str, Schema], required: list[str] | None = None) -> Schema:
    """Return the schema of an object with these properties and no other."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _nested(subject: str, fields: dict[str, Schema]) -> Schema:
    source = record({"author": text(20), "page": whole(1, 999)})
    return record({subject: record(fields), "source": source, "checked": YES})


def _list(subject: str, fields: dict[str, Schema]) -> Schema:
    return record({"items": {"type": "array", "items": record(fields), "minItems": 1, "maxItems": 3}})


def _optional(subject: str, fields: dict[str, Schema]) -> Schema:
    return record({**fields, "remark": text(40)}, list(fields)[:2])


def _either(subject: str, fields: dict[str, Schema]) -> Schema:
    found = record({"kind": {"const": subject}, **fields})
    return {"anyOf": [found, record({"kind": {"const": "unknown"}, "reason": text(40)})]}


def _referenced(subject: str, fields: dict[str, Schema]) -> Schema:
    both = record({"first": {"$ref": f"#/$defs/{subject}"}, "second": {"$ref": f"#/$defs/{subject}"}})
    return {"$defs": {subject: record(fields)}, **both}


def _long_keys(subject: str, fields: dict[str, Schema]) -> Schema:
    return record({f"the_{name}_of_the_{subject}_as_far_as_it_is_known": one for name, one in fields.items()})


def _mixed(subject: str, fields: dict[str, Schema]) -> Schema:
    pair = {"type": "array", "prefixItems": [text(12), whole(0, 99)], "items": False, "minItems": 2}
    tags = {"type": "array", "items": one_of("new", "old", "rare", "common"), "maxItems": 4}
    return record({**fields, "tags": tags, "score": pair, "note": {"type": ["string", "null"], "maxLength": 30}})


SHAPES: dict[str, Callable[[str, dict[str, Schema]], Schema]] = {
    "flat": lambda subject, fields: record(fields),
    "nested": _nested,
    "list": _list,
    "optional": _optional,
    "either": _either,
    "referenced": _referenced,
    "long keys": _long_keys,
    "mixed": _mixed,
}


def schema_cases() -> Iterator[SchemaCase]:
    """Return all cases; those of one shape come one after the other in every eighth place."""
    for subject, fields in SUBJECTS.items():
        for shape, make in SHAPES.items():
            asked = f"Describe a {subject} of your choice as JSON. Keep every text short."
            yield SchemaCase(f"{subject}, {shape}", asked, make(subject, fields))
