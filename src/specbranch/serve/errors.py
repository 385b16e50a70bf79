"""Errors of requests in the form of the OpenAI API: a status, and an object with a sentence in it.

Owns the form of every error that leaves the server, and the status of each error of the engine. Invariant: a client
never sees a traceback, nor a message that was not written for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Scope

from specbranch.errors import (
    BadParameter,
    CacheFull,
    DeadlinePassed,
    ExchangeUnderWay,
    MissingPackage,
    PoolFull,
    RequestCancelled,
    SpecBranchError,
    unknown,
)
from specbranch.serve.notes import RequestNote, note_of
from specbranch.serve.parameters import REFUSED
from specbranch.serve.protocol import BODIES, BODY_PARTS, PARAMETER_NAMES, RESPONSE_PARTS, SENTENCE
from specbranch.serve.settings import LONGEST_STOP, MOST_BIASES, MOST_STOP_IDS, MOST_STOPS

INVALID, SERVER = "invalid_request_error", "server_error"
TOO_LONG = "context_length_exceeded"
RESPONSES = "No response is stored here, so there is none to read, delete or continue. POST /v1/responses answers."

EXPECTED_FORMS = {  # of parameters that have several forms, and of what is in a message
    "input": 'a text, or a list of messages such as {"role": "user", "content": "Hello"}',
    "prediction": 'an object such as {"type": "content", "content": "The text that is expected"}',
    "prompt": "a text, token ids, or a list of either, none of them empty",
    "messages": 'a list of messages such as {"role": "user", "content": "Hello"}, whose content is text',
    "stop": f"a text or up to {MOST_STOPS} texts, of up to {LONGEST_STOP} characters",
    "speculative": 'true, false, or an object such as {"method": "pearl"}, with method, policy and off',
    "stop_token_ids": f"up to {MOST_STOP_IDS} token ids",
    "logit_bias": f"up to {MOST_BIASES} token ids with numbers from -100 to 100",
    "tokens": "a list of token ids",
    "json_schema": "a JSON schema",
    "guided_json": "a JSON schema",
    "choice": "a list of texts that are not empty",
    "guided_choice": "a list of texts that are not empty",
    "response_format": 'an object such as {"type": "json_object"}',
    "structured_outputs": 'an object such as {"json": {"type": "object"}}',
    "request_id": "up to 128 letters, digits, and any of . _ : = + / @ -",
    "role": "one of system, developer, user, assistant, tool",
    "tools": 'a list of tools such as {"type": "function", "function": {"name": "f", "parameters": {…}}}',
    "tool_choice": 'none, auto, required, or {"type": "function", "function": {"name": "f"}}',
    "tool_calls": 'a list of calls such as {"id": "1", "function": {"name": "f", "arguments": "{}"}}',
    "content": 'a text, or a list of parts such as {"type": "text", "text": "Hello"}',
}

# may be of several types: no single part of them is wrong
SEVERAL_FORMS = ("prompt", "stop", "logit_bias", "content", "tool_choice", "json_schema", "guided_json")


class ApiError(Exception):
    """A request that is not answered; the message says why and what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.code, self.param = status, kind, code, param
        self.headers = dict(headers or {})

    def body(self, request_id: str | None = None) -> dict[str, Any]:
        """Return the object that a client reads. Without a request there is no id."""
        detail = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": detail if request_id is None else {**detail, "request_id": request_id}}

    def noted(self, note: RequestNote) -> dict[str, Any]:
        """Return the object that a client reads, and note the error for the log: what it is, not what it says."""
        note.facts["error"] = self.code or self.kind
        return self.body(note.id)

    def response(self, scope: Scope) -> JSONResponse:
        """Return it as the answer to a request."""
        return JSONResponse(self.noted(note_of(scope)), self.status, self.headers)


def too_many(message: str, seconds: int, code: str) -> ApiError:
    """Build the error for a server without room; it says when to try again."""
    return ApiError(429, message, "rate_limit_error", code, headers={"retry-after": str(seconds)})


def shutting_down() -> ApiError:
    """Build the error of a server that is being stopped; it also closes the connection."""
    headers = {"retry-after": "5", "connection": "close"}
    return ApiError(
        503, "The server is being stopped. Send the request again.", SERVER, "shutting_down", headers=headers
    )


def too_long(holds: int, has: str, param: str) -> ApiError:
    """Build the error for a prompt that does not fit, in the words by which clients recognise it."""
    said = f"This model's maximum context length is {holds} tokens, one of which is for the answer."
    return ApiError(400, f"{said} However, your {param} {has}. Shorten it.", code=TOO_LONG, param=param)


def of_engine(error: BaseException) -> ApiError:
    """Return the API error for an error that ended a request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CacheFull):
        return ApiError(400, str(error), code=None if isinstance(error, PoolFull) else TOO_LONG)
    if isinstance(error, BadParameter):
        first = str(error).partition(" ")[0]
        return ApiError(400, str(error), param=first if first in PARAMETER_NAMES else None)
    if isinstance(error, MissingPackage):
        return ApiError(400, str(error), code="unsupported_parameter")
    if isinstance(error, DeadlinePassed):
        return ApiError(408, str(error), "timeout_error", "deadline_passed")
    if isinstance(error, ExchangeUnderWay):
        return ApiError(409, str(error), code="exchange_under_way", headers={"retry-after": "5"})
    if isinstance(error, RequestCancelled):
        return shutting_down()
    said = str(error) if isinstance(error, SpecBranchError) else "The server made a mistake; its log tells more."
    return ApiError(500, said, SERVER)


def add_handlers(app: Starlette) -> None:
    """Have the application send every error in this form."""

    async def known(request: Request, error: Exception) -> JSONResponse:
        return of_engine(error).response(request.scope)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _invalid(request.url.path, error).response(request.scope)

    async def by_status(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return _by_status(request, error).response(request.scope)

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(SpecBranchError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, by_status)


def _by_status(request: Request, error: HTTPException) -> ApiError:
    path, headers = request.url.path, error.headers
    if error.status_code == 404:
        said = RESPONSES if path.startswith("/v1/responses") else f"There is nothing at {path!r}; see /openapi.json."
        return ApiError(404, said, code="not_found", headers=headers)
    if error.status_code == 405:
        return ApiError(405, f"{path} does not take {request.method}; see /openapi.json.", headers=headers)
    return ApiError(error.status_code, str(error.detail), headers=headers)


def _invalid(path: str, error: RequestValidationError) -> ApiError:
    """Build the error for one mistake in a body, with its name. Unknown names come first."""
    found = max(error.errors(), key=lambda one: (one["type"] == "extra_forbidden", len(one["loc"])))
    location = [part for part in found["loc"] if part != "body"]
    if found["type"] == "json_invalid":
        return ApiError(400, f"The body is no JSON: {found['ctx']['error']}.")
    if not location:
        return ApiError(400, "The body is not what was expected: a JSON object, with content-type application/json.")
    if found["type"] == "extra_forbidden":
        return ApiError(400, _no_such(path, location), code="unsupported_parameter", param=str(location[-1]))
    return ApiError(400, f"{_where(location, error.body)}: {_wrong(location, found)}.", param=str(location[0]))


def _where(location: list[str | int], body: Any) -> str:
    """Name a parameter: messages[2].content (user)."""
    if location[0] in SEVERAL_FORMS:
        return str(location[0])
    steps = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location if _is_name(part)]
    whose = f" ({role})" if (role := _role(location, body)) and location[-1] != "role" else ""
    return "".join(steps).removeprefix(".") + whose


def _is_name(part: str | int) -> bool:
    return isinstance(part, int) or part in PARAMETER_NAMES  # else it names one of several types


def _role(location: list[str | int], body: Any) -> str | None:
    """Return who speaks in the message that a mistake is in."""
    try:
        role = body["messages"][location[1]]["role"] if location[0] == "messages" else None
    except (IndexError, KeyError, TypeError):
        return None
    return role if isinstance(role, str) and len(role) < 20 else None


def _wrong(location: list[str | int], found: Mapping[str, Any]) -> str:
    """Return what was expected, and what was got."""
    if found["type"] == SENTENCE:
        return str(found["msg"])
    name = next(part for part in reversed(location) if part in PARAMETER_NAMES)
    got = found.get("input")
    shown = f", got {got!r:.60}" if isinstance(got, (str, int, float)) and name not in SEVERAL_FORMS else ""
    return (f"expected {EXPECTED_FORMS[name]}" if name in EXPECTED_FORMS else _plain(found["msg"])) + shown


def _plain(message: str) -> str:
    return message.removeprefix("Value error, ")


def _no_such(path: str, location: list[str | int]) -> str:
    """Return the sentence for an unknown name, and where it is known."""
    name, holder = str(location[-1]), next((part for part in reversed(location[:-1]) if part in BODY_PARTS), None)
    if name in REFUSED:
        return f"{name!r} is not supported: {REFUSED[name]}. Leave it out."
    if holder is not None:
        parts = BODY_PARTS | RESPONSE_PARTS if path == "/v1/responses" else BODY_PARTS
        return str(unknown(f"parameter of {holder}", name, parts[str(holder)].model_fields))
    elsewhere = [other for other, body in BODIES.items() if name in body.model_fields]
    if path in BODIES and elsewhere:
        return f"{name!r} is a parameter of {' and '.join(elsewhere)}, not of {path}. Leave it out, or ask there."
    return str(unknown("parameter", name, BODIES[path].model_fields if path in BODIES else ()))
