"""The application: routes and what lies around them, put together.

Owns the order of the layers; each is in a file of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.applications import Starlette

from specbranch import __version__
from specbranch.serve import admin, chat, completions, operations, page, responses
from specbranch.serve.errors import add_handlers
from specbranch.serve.headers import SafeHeaders
from specbranch.serve.keys import Gate
from specbranch.serve.limits import BodyLimit, Closing, Limits
from specbranch.serve.logs import RequestLog
from specbranch.serve.protocol import ErrorResponse
from specbranch.serve.serving import Serving
from specbranch.serve.spans import SpanWriter
from specbranch.serve.tracing import Traced, Tracing

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from specbranch.async_engine import AsyncLLM
    from specbranch.serve.settings import ServerSettings

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 403, 404, 408, 409, 413, 421, 429, 503)
}

# FastAPI's own would repeat our spans, and log exceptions with their messages, which may hold text of clients.
NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}


def create_app(engine: AsyncLLM, settings: ServerSettings, tracer_provider: TracerProvider | None = None) -> FastAPI:
    """Make a server over an engine, which it closes when it ends.

    `tracer_provider`: the OpenTelemetry provider of the program around it, instead of one of the settings.
    """
    serving = Serving.of(engine, settings)
    tracing = Tracing.of(settings) if tracer_provider is None else Tracing(tracer_provider)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close(drain=False)  # answers had their time already
        if serving.keeper is not None:
            await asyncio.to_thread(serving.keeper.close)
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    app = FastAPI(
        title="SpecBranch",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses=ERRORS,
        telemetry=NO_TELEMETRY,
    )
    app.state.serving = serving
    add_handlers(app)
    for part in (chat, completions, responses, operations, admin):
        app.include_router(part.router)
    page.mount(app)
    add_layers(app, settings, serving.limits)
    app.add_middleware(Traced, tracing=tracing, writer=SpanWriter(serving.model, settings.log_text))
    return app


def add_layers(app: Starlette, settings: ServerSettings, limits: Limits) -> None:
    """Put what every request passes around an application; the last one added is the outermost."""
    app.add_middleware(BodyLimit, most=settings.max_body)
    app.add_middleware(Closing, limits=limits)
    app.add_middleware(Gate, settings=settings)
    app.add_middleware(SafeHeaders)
    app.add_middleware(RequestLog)
