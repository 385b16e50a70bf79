"""Headers that every answer carries, and the stricter ones of the page.

Owns the text of the CSP. Invariant: the page loads nothing from elsewhere, sends nothing elsewhere and is framed by
nobody. No other answer can be mistaken for a page.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def is_page(path: str) -> bool:
    """Return True if a path is the page, or one of its parts."""
    return path == "/" or path.startswith("/page/")


class SafeHeaders:
    """Adds the headers to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-content-type-options"] = "nosniff"
                headers["referrer-policy"] = "no-referrer"
                headers["content-security-policy"] = (
                    CSP if is_page(scope["path"]) else "default-src 'none'; frame-ancestors 'none'"
                )
            await send(message)

        await self._app(scope, receive, with_headers)
