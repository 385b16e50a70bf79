"""Notes of a request for the log: its id, the name of its key, and figures.

Owns the note that travels with a request's scope.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

_SANE = re.compile(r"[\w.:-]{1,64}")
_PLACE = "specbranch.note"


@dataclass(slots=True)
class RequestNote:
    """One request, as the log shows it."""

    id: str
    key: str | None = None
    body_bytes: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


def note_of(scope: Scope) -> RequestNote:
    """Return the note of a request, made when it is first asked for; an id that the client sent is kept."""
    if _PLACE not in scope:
        sent = Headers(scope=scope).get("x-request-id", "")
        scope[_PLACE] = RequestNote(sent if _SANE.fullmatch(sent) else secrets.token_hex(16))
    note: RequestNote = scope[_PLACE]
    return note
