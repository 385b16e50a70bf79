"""The application: routes and what lies around them, put together.

Owns the order of the layers; each is in a file of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from specbranch import __version__
from specbranch.serve import chat, completions, operations, page, responses
from specbranch.serve.errors import add_handlers
from specbranch.serve.headers import SafeHeaders
from specbranch.serve.keys import Gate
from specbranch.serve.limits import BodyLimit, Closing
from specbranch.serve.logs import RequestLog
from specbranch.serve.protocol import ErrorResponse
from specbranch.serve.serving import Serving

if TYPE_CHECKING:
    from specbranch.async_engine import AsyncLLM
    from specbranch.serve.settings import ServerSettings

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 404, 408, 413, 421, 429, 503)
}


def create_app(engine: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """Make a server over an engine, which it closes when it ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close(drain=False)  # answers had their time already

    app = FastAPI(
        title="SpecBranch",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        responses=ERRORS,
    )
    serving = app.state.serving = Serving.of(engine, settings)
    add_handlers(app)
    for part in (chat, completions, responses, operations):
        app.include_router(part.router)
    page.mount(app)
    # the last one added is the outermost
    app.add_middleware(BodyLimit, most=settings.max_body)
    app.add_middleware(Closing, limits=serving.limits)
    app.add_middleware(Gate, settings=settings)
    app.add_middleware(SafeHeaders)
    app.add_middleware(RequestLog)
    return app
