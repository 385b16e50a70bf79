"""What a browser finds at `/`: one page, its modules, its style and a recording.

Owns the routes `/` and `/page/…`, which serve files and nothing else. They are open to everybody who reaches the
server, and carry a strict CSP (`headers.py`). The page's requests to the models are in `live.py`, under `/v1/`, where
keys and limits hold.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from starlette.staticfiles import StaticFiles

from specbranch.serve import live

FILES = Path(__file__).parent / "page_files"


def mount(app: FastAPI) -> None:
    """Add the page to the server, and the routes of its requests."""

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(FILES / "index.html", headers={"cache-control": "no-cache"})

    app.mount("/page", StaticFiles(directory=FILES), name="page")
    app.include_router(live.routes(app.state.serving))
