"""Who may use the server: keys, and the host names under which it may be addressed.

Owns the file of keys: a name and the SHA-256 of a key on each line. A key is 256 random bits, so a fast hash does not
reveal it. Invariant: a key is shown once, when it is made, and stored nowhere. Comparing takes the same time for every
presented key.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from specbranch.errors import BadParameter
from specbranch.exec.address import is_loopback
from specbranch.serve.errors import ApiError
from specbranch.serve.headers import is_page
from specbranch.serve.notes import note_of
from specbranch.serve.settings import ServerSettings

log = logging.getLogger("specbranch.serve")
OPEN_PATHS = ("/health", "/ready", "/version", "/metrics", "/openapi.json")  # and the page
ADMIN = "/admin/"  # paths of what changes the server
BEARER = {"www-authenticate": "Bearer"}
KEY_PREFIX = "sb-"
_NAME = re.compile(r"[\w.@-]{1,64}")
_LINE = re.compile(r"([\w.@-]{1,64}) sha256:([0-9a-f]{64})")


class KeyFile:
    """The keys of a file. A changed file is read again, so a key can be revoked while the server runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._hashes: list[tuple[str, str]] = []
        self._refresh()

    def owner(self, key: str) -> str | None:
        """Return the name of a key; None if there is no such key, or the file cannot be read any more."""
        try:
            self._refresh()
        except BadParameter as error:
            self._hashes, self._seen = [], None
            log.error("Nobody is let in: %s", error)
        presented, found = _hash(key), None
        for name, stored in self._hashes:  # all of them, even after a match, so the time is the same
            if compare_digest(presented, stored):
                found = name
        return found

    def _refresh(self) -> None:
        try:
            state = self._path.stat()
            seen = state.st_mtime_ns, state.st_size
            if seen != self._seen:
                self._hashes, self._seen = _parsed(self._path.read_text(encoding="utf-8"), self._path), seen
        except OSError as error:
            raise BadParameter(
                f"The keys in {self._path} cannot be read ({error.strerror}). Make one: specbranch serve --keys "
                f"{self._path} --new-key NAME"
            ) from None


def new_key(path: Path, name: str) -> str:
    """Make a key and return it; add its hash to the file, which only the file's owner may read."""
    if not _NAME.fullmatch(name):
        raise BadParameter(f"The key is to be called {name!r}; expected letters, digits, and any of . _ @ -, up to 64.")
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if any(name == known for known, _ in _parsed(text, path)):
            raise BadParameter(f"{path} has a key {name!r} already. Take its line out first, or use another name.")
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as file:
            file.write("\n" if text and not text.endswith("\n") else "")
            file.write(f"{name} sha256:{_hash(key)}\n")
    except OSError as error:
        raise BadParameter(f"The key cannot be written to {path}: {error.strerror}.") from None
    return key


class Gate:
    """Refuses requests without a key if there are keys, and requests to another host name.

    What changes the server needs a key of its own, whoever asks, also where answers need none.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app, self._settings = app, settings
        self._keys = None if settings.keys is None else KeyFile(settings.keys)
        self._admins = None if settings.admin_keys is None else KeyFile(settings.admin_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            await refusal.response(scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers, path = Headers(scope=scope), scope["path"]
        if not self._is_ours(headers.get("host", "")):
            # DNS rebinding: a foreign page could point its own host name here and read the answers
            said = "This server is not asked for under that name. Whoever runs it can allow it: --allow-host NAME."
            return ApiError(421, said, code="wrong_host")
        keys = self._admins if (is_admin := path.startswith(ADMIN)) else self._keys
        if is_admin and keys is None:
            said = "This server was started without --admin-keys FILE, so nobody may change it. See docs/serving.md."
            return ApiError(403, said, "permission_error", "no_admin_keys")
        if keys is None or path in OPEN_PATHS or is_page(path):
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        owner = keys.owner(key.strip()) if scheme.lower() == "bearer" else None
        note_of(scope).key = owner
        if owner is not None:
            return None
        if is_admin:
            said = "No valid admin key was sent; expected 'Authorization: Bearer KEY' with a key of --admin-keys."
            return ApiError(401, said, "authentication_error", "invalid_admin_key", headers=BEARER)
        said = "No valid API key was sent; expected the header 'Authorization: Bearer KEY'."
        return ApiError(401, said, "authentication_error", "invalid_api_key", headers=BEARER)

    def _is_ours(self, host: str) -> bool:
        name = re.sub(r":\d*$", "", host).lower()
        if name in self._settings.allowed_hosts or is_loopback(name):
            return True
        if self._settings.allowed_hosts:
            return False
        return self._settings.uds is not None or not self._settings.is_local  # no page reaches a unix socket


def _hash(key: str) -> str:
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _parsed(text: str, path: Path) -> list[tuple[str, str]]:
    """Return names and hashes of a file's text."""
    found: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if not (match := _LINE.fullmatch(line.strip())):
            raise BadParameter(f"Line {number} of {path} is no key; expected a name and sha256:…, as --new-key writes.")
        found.append((match[1], match[2]))
    return found
