"""Parts of grammars in Lark, as llguidance reads it.

Owns how markers and texts are written there. Invariant: a marker that is one token of the vocabulary is matched as that
token: the library does not match such a token against text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

AddedId = Callable[[str], int | None]  # the added token that a text is; None if it is none


def quoted(text: str) -> str:
    """Return a text as a terminal."""
    return json.dumps(text, ensure_ascii=False)


def marker(text: str, added_id: AddedId) -> str:
    """Return a marker as Lark has it: the token that it is, or its text."""
    found = added_id(text)
    return quoted(text) if found is None else f"<[{found}]>"


def without(*markers: str) -> str:
    """Return the terminal of any text that has none of some markers."""
    several = "|".join(map(escaped, markers))
    return f"/(?s:.*)/ & ~/(?s:.*)({several})(?s:.*)/"


def escaped(text: str) -> str:
    """Return a text as part of a regular expression of Lark."""
    return re.escape(text).replace("/", r"\/")
