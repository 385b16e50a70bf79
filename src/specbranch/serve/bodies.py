"""JSON bodies: read, parsed and checked; long ones in a thread, so that other requests do not wait.

Owns how a body becomes an object of `protocol.py`. Invariant: the number of a body's parts is bounded before they are
checked, because each unknown name and each wrong part costs time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from specbranch.serve.errors import ApiError
from specbranch.serve.events import GONE
from specbranch.serve.notes import note_of
from specbranch.serve.serving import serving_of

SHORT_BODY = 2**14  # bytes that are parsed at once, without a thread
MOST_NAMES = 2048  # of one object
MOST_OBJECTS = 2**16  # objects and lists of a body
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class CheckedRoute(APIRoute):
    """A route whose body is checked before FastAPI sees it. FastAPI takes a checked object as it is."""

    def get_route_handler(self) -> Handler:
        """Return what answers a request."""
        inner, field = super().get_route_handler(), self.body_field

        async def handler(request: Request) -> Response:
            if field is None or not _is_json(request):
                return await inner(request)
            checked = CheckedRequest(request.scope, request.receive)
            try:
                raw = await checked.body()
            except ClientDisconnect:
                return Response(status_code=GONE)
            note_of(request.scope).body_bytes = len(raw)
            work = partial(_checked, field, raw)
            checked.made = work() if len(raw) <= SHORT_BODY else await serving_of(request).parsing.do(len(raw), work)
            note_of(request.scope).rename(getattr(checked.made, "request_id", None))
            return await inner(checked)

        return handler


class CheckedRequest(Request):
    """A request whose body is an object already."""

    made: Any

    async def json(self) -> Any:
        """Return it."""
        return self.made


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _checked(field: Any, raw: bytes) -> Any:
    """Parse a body, and check it by the type that a route takes."""
    parsed = _parsed(raw)
    _check_size(parsed)
    made, errors = field.validate(parsed, {}, loc=("body",))
    if errors:
        raise RequestValidationError(errors, body=parsed)
    return made


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        raise ApiError(400, f"The body is no JSON: {error}.") from None
    except (ValueError, RecursionError):  # bytes that are no text, numbers or nesting without end
        raise ApiError(400, "The body is no JSON that can be read; expected an object, in UTF-8.") from None


def _check_size(parsed: Any) -> None:
    """Refuse a body of more parts than any request has."""
    left, seen = [parsed], 0
    while left:
        one = left.pop()
        seen += 1
        if isinstance(one, dict) and len(one) > MOST_NAMES:
            raise ApiError(400, f"The body has an object with {len(one)} names; expected at most {MOST_NAMES}.")
        inner = one.values() if isinstance(one, dict) else one
        left += [part for part in inner if isinstance(part, dict | list)] if isinstance(one, dict | list) else []
        if seen + len(left) > MOST_OBJECTS:
            raise ApiError(400, f"The body has more than {MOST_OBJECTS} objects and lists. Send less at a time.")
