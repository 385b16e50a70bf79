"""What a browser finds at `/`.

Owns the routes `/` and `/page/…`, which are open to everybody who reaches the server and carry a strict CSP
(`headers.py`). Whatever makes the models work belongs under `/v1/`, where keys and limits hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

if TYPE_CHECKING:
    from specbranch.async_engine import AsyncLLM
    from specbranch.serve.settings import ServerSettings

PLAIN = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>SpecBranch</title>
<h1>SpecBranch</h1>
<p>The server is running. Clients of the OpenAI API find it at <code>/v1</code>; what it does is told at
<a href="/metrics">/metrics</a>, what it understands at <a href="/openapi.json">/openapi.json</a>.</p>
</html>
"""


def mount(app: FastAPI, engine: AsyncLLM, settings: ServerSettings) -> None:
    """Add the page to the server."""

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(PLAIN)
