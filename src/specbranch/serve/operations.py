"""Routes besides answers: models, tokens, and the state of the server.

Owns the routes for which no model computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from specbranch import __version__
from specbranch.serve.bodies import CheckedRoute
from specbranch.serve.errors import ApiError
from specbranch.serve.notes import note_of
from specbranch.serve.prompts import chat_prompt, encoded, ending_of
from specbranch.serve.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from specbranch.serve.serving import Serving, serving_of
from specbranch.serve.tools import check_formats, described

router = APIRouter(route_class=CheckedRoute)
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/v1/models", response_model=ModelList)
async def models(request: Request) -> ModelList:
    """List what is served."""
    return ModelList(data=[_card(serving_of(request))])


@router.get("/v1/models/{model:path}", response_model=ModelCard)
async def model(model: str, request: Request) -> ModelCard:
    """Tell of one model."""
    serving_of(request).check_model(model)
    return _card(serving_of(request))


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(asked: TokenizeRequest, request: Request) -> Response:
    """Return the tokens of a text, or of a conversation."""
    return await _counted(request, asked.model, partial(_tokens, serving_of(request), asked))


@router.post("/detokenize", response_model=DetokenizeResponse)
async def detokenize(asked: DetokenizeRequest, request: Request) -> Response:
    """Return the text of tokens."""
    return await _counted(request, asked.model, partial(_text, serving_of(request), asked))


@router.get("/health", responses={503: {"description": "The engine has ended."}})
async def health(request: Request) -> Response:
    """Report if the engine is alive. If it is not, the server has to be started again."""
    alive = serving_of(request).engine.is_alive
    return JSONResponse({"status": "ok" if alive else "failed"}, 200 if alive else 503)


@router.get("/ready", responses={503: {"description": "No requests are taken."}})
async def ready(request: Request) -> Response:
    """Report if requests are accepted, and the state of the draft. Without a draft, answers only come later."""
    serving = serving_of(request)
    takes = serving.engine.is_alive and not serving.limits.closing
    state = {"status": "ready" if takes else "closing", "draft": serving.engine.draft_state}
    return JSONResponse(state, 200 if takes else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    """Which version this is."""
    return {"version": __version__}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> PlainTextResponse:
    """Tell Prometheus."""
    serving = serving_of(request)
    engine, counts = serving.engine, (serving.limits, serving.connections)
    if serving.keeper is not None:
        serving.metrics.count_kept(serving.keeper.kept())
    return PlainTextResponse(serving.metrics.text(engine.stats(), engine.draft_state, *counts), media_type=PROMETHEUS)


def _card(serving: Serving) -> ModelCard:
    return ModelCard(id=serving.model, created=serving.since, max_model_len=serving.engine.context_length)


async def _counted(request: Request, model: str | None, work: Callable[[], BaseModel]) -> Response:
    """Do work on a text and count it as a request meanwhile. The thread of the work also writes the answer."""
    serving, note = serving_of(request), note_of(request.scope)
    serving.check_model(model)
    admitted = serving.limits.admit(note.key, 1)
    try:
        written = await serving.tokenizing.do(note.body_bytes, lambda: work().model_dump_json())
    finally:
        admitted.leave()
    return Response(written, media_type="application/json")


def _tokens(serving: Serving, asked: TokenizeRequest) -> TokenizeResponse:
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "Expected either a prompt or messages.", param="prompt")
    if asked.messages is None:
        ids = encoded(serving, asked.prompt or "", asked.add_special_tokens, "prompt")
    else:
        if asked.tools:
            check_formats(serving.formats, "tools")
        ids = chat_prompt(serving, asked.messages, ending=ending_of(asked), tools=described(asked.tools)).ids
    texts = [serving.spelling.text(token) for token in ids] if asked.return_token_strs else None
    length = serving.engine.context_length
    return TokenizeResponse.model_construct(count=len(ids), max_model_len=length, tokens=ids, token_strs=texts)


def _text(serving: Serving, asked: DetokenizeRequest) -> DetokenizeResponse:
    size = serving.engine.vocabulary
    if asked.tokens and (largest := max(asked.tokens)) >= size:
        raise ApiError(400, f"tokens has {largest}, but ids go from 0 to {size - 1}.", param="tokens")
    return DetokenizeResponse(prompt=serving.engine.tokenizer.decode(asked.tokens, skip_special=False))
