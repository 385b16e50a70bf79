"""What is asked besides answers: models, tokens, and how the server is.

Owns the routes that no model works for.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from specbranch import __version__
from specbranch.serve.errors import ApiError
from specbranch.serve.prompts import conversation
from specbranch.serve.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from specbranch.serve.serving import Serving, serving_of

router = APIRouter()
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
async def tokenize(asked: TokenizeRequest, request: Request) -> TokenizeResponse:
    """Return the tokens of a text, or of a conversation."""
    serving = serving_of(request)
    serving.check_model(asked.model)
    ids = await asyncio.to_thread(_tokens, serving, asked)
    texts = [serving.spelling.text(token) for token in ids] if asked.return_token_strs else None
    length = serving.engine.context_length
    return TokenizeResponse(count=len(ids), max_model_len=length, tokens=ids, token_strs=texts)


@router.post("/detokenize", response_model=DetokenizeResponse)
async def detokenize(asked: DetokenizeRequest, request: Request) -> DetokenizeResponse:
    """Return the text of tokens."""
    serving = serving_of(request)
    serving.check_model(asked.model)
    size = serving.engine.vocabulary
    if asked.tokens and max(asked.tokens) >= size:
        raise ApiError(400, f"tokens has {max(asked.tokens)}, but ids go from 0 to {size - 1}.", param="tokens")
    return DetokenizeResponse(prompt=serving.engine.tokenizer.decode(asked.tokens, skip_special=False))


@router.get("/health", responses={503: {"description": "The engine has ended."}})
async def health(request: Request) -> Response:
    """Whether the engine lives; if not, the server has to be started again."""
    alive = serving_of(request).engine.is_alive
    return JSONResponse({"status": "ok" if alive else "failed"}, 200 if alive else 503)


@router.get("/ready", responses={503: {"description": "No requests are taken."}})
async def ready(request: Request) -> Response:
    """Whether requests are taken."""
    serving = serving_of(request)
    takes = serving.engine.is_alive and not serving.limits.closing
    return JSONResponse({"status": "ready" if takes else "closing"}, 200 if takes else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    """Which version this is."""
    return {"version": __version__}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> PlainTextResponse:
    """Tell Prometheus."""
    serving = serving_of(request)
    return PlainTextResponse(serving.metrics.text(serving.engine.stats(), serving.limits), media_type=PROMETHEUS)


def _card(serving: Serving) -> ModelCard:
    return ModelCard(id=serving.model, created=serving.since, max_model_len=serving.engine.context_length)


def _tokens(serving: Serving, asked: TokenizeRequest) -> list[int]:
    tokenizer = serving.engine.tokenizer
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "Expected either a prompt or messages.", param="prompt")
    if asked.messages is None:
        return tokenizer.encode(asked.prompt or "", asked.add_special_tokens)
    return tokenizer.chat(conversation(asked.messages), asked.add_generation_prompt)
