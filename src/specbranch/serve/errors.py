"""What is wrong with a request, as the OpenAI API tells it: a status, and an object with a sentence in it.

Owns the shape of every error that leaves the server, and which status an error of the engine has. Invariant: a client
never sees a traceback, nor a message that was not written for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request

from specbranch.errors import BadParameter, CacheFull, DeadlinePassed, RequestCancelled, SpecBranchError, unknown
from specbranch.serve.parameters import REFUSED
from specbranch.serve.protocol import NAMES, NESTED_NAMES
from specbranch.serve.settings import LONGEST_STOP, MOST_BIASES, MOST_STOPS

INVALID = "invalid_request_error"
RESPONSES = (
    "The Responses API is not served here. Use /v1/chat/completions; clients have a switch for it, such as LangChain's "
    "use_responses_api=False."
)

EXPECTED = {  # of parameters that have several forms
    "prompt": "a text, token ids, or a list of either, none of them empty",
    "messages": 'a list of messages such as {"role": "user", "content": "Hello"}, whose content is text',
    "stop": f"a text or up to {MOST_STOPS} texts, of up to {LONGEST_STOP} characters",
    "speculative": 'true, false, or an object such as {"method": "pearl"}, with method, policy and off',
    "logit_bias": f"up to {MOST_BIASES} token ids with numbers from -100 to 100",
}


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

    def body(self) -> dict[str, Any]:
        """Return the object that a client reads."""
        told = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": told}

    def response(self) -> JSONResponse:
        """Return the answer that tells it."""
        return JSONResponse(self.body(), self.status, self.headers)


def too_many(message: str, seconds: int, code: str) -> ApiError:
    """Say that there is no room now, and when to come again."""
    return ApiError(429, message, "rate_limit_error", code, headers={"retry-after": str(seconds)})


def of_engine(error: BaseException) -> ApiError:
    """Return what a client is told of an error that ended its request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (BadParameter, CacheFull)):
        return ApiError(400, str(error))
    if isinstance(error, DeadlinePassed):
        return ApiError(408, str(error), "timeout_error", "deadline_passed")
    if isinstance(error, RequestCancelled):
        said = "The server is being stopped. Send the request again."
        return ApiError(503, said, "server_error", "shutting_down", headers={"retry-after": "5"})
    said = str(error) if isinstance(error, SpecBranchError) else "The server made a mistake; its log tells more."
    return ApiError(500, said, "server_error")


def add_handlers(app: FastAPI) -> None:
    """Have every error told in this shape."""

    async def told(request: Request, error: Exception) -> JSONResponse:
        return of_engine(error).response()

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _invalid(error).response()

    async def by_status(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return _by_status(request, error).response()

    app.add_exception_handler(ApiError, told)
    app.add_exception_handler(SpecBranchError, told)
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


def _invalid(error: RequestValidationError) -> ApiError:
    """Tell one thing that is wrong, with its name; a name that does not exist before all else."""
    found = next((one for one in error.errors() if one["type"] == "extra_forbidden"), error.errors()[0])
    place = [str(part) for part in found["loc"] if part != "body"]
    if found["type"] == "json_invalid":
        return ApiError(400, f"The body is no JSON: {found['ctx']['error']}.")
    if not place:
        return ApiError(400, "The body is not what was expected: a JSON object, with content-type application/json.")
    if found["type"] == "extra_forbidden":
        return ApiError(400, _no_such(place), code="unsupported_parameter", param=place[-1])
    said = f"expected {EXPECTED[place[0]]}" if place[0] in EXPECTED else found["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{place[0]}: {said}.", param=place[0])


def _no_such(place: list[str]) -> str:
    name = place[-1]
    if name in REFUSED:
        return f"{name!r} is not supported: {REFUSED[name]}. Leave it out."
    return str(unknown("parameter", name, NESTED_NAMES if len(place) > 1 else NAMES))
