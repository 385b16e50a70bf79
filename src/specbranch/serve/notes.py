"""Notes of a request for the log and its trace: its id, the name of its key, and figures.

Owns the note that travels with a request's scope, and which ids clients may choose. Invariant: an id is safe in a
header and in a line of the log; a client's that is not is replaced by one of ours.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Scope

if TYPE_CHECKING:
    from specbranch.serve.answering import Answering

REQUEST_ID = r"[A-Za-z0-9._:=+/@-]{1,128}"
_PLACE = "specbranch.note"


@dataclass(slots=True)
class RequestNote:
    """One request, as the log shows it."""

    id: str
    is_sent: bool = False  # the client has chosen the id, in the header
    key: str | None = None
    body_bytes: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    answering: Answering | None = None  # once it was admitted

    def rename(self, sent: str | None) -> None:
        """Take the id that a body has, if the header has none."""
        if sent is not None and not self.is_sent:
            self.id = sent


def note_of(scope: Scope) -> RequestNote:
    """Return the note of a request, made when it is first asked for; an id that the client sent is kept."""
    if _PLACE not in scope:
        sent = Headers(scope=scope).get("x-request-id", "")
        is_safe = re.fullmatch(REQUEST_ID, sent) is not None
        scope[_PLACE] = RequestNote(sent if is_safe else secrets.token_hex(16), is_safe)
    note: RequestNote = scope[_PLACE]
    return note
