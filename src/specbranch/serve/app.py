"""The application: routes and what lies around them, put together.

Owns the order of the layers; each is in a file of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from specbranch import __version__
from specbranch.serve import page
from specbranch.serve.headers import SafeHeaders

if TYPE_CHECKING:
    from specbranch.async_engine import AsyncLLM
    from specbranch.serve.settings import ServerSettings


def create_app(engine: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """Make a server over an engine, which it closes when it ends."""
    app = FastAPI(title="SpecBranch", version=__version__, docs_url=None, redoc_url=None)
    app.add_middleware(SafeHeaders)
    page.mount(app, engine, settings)
    return app
