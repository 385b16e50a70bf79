"""The log: one JSON object a line, one line a request. Repeated lines are counted, not written again.

Owns its format. Invariant: no line holds what a client wrote or was answered, unless the server was started with that
option. So an unforeseen error is logged with its type and traceback, but without its message.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specbranch.serve.errors import of_engine
from specbranch.serve.notes import note_of

log = logging.getLogger("specbranch.serve")
REPEAT_SECONDS = 60.0  # seconds in which equal lines are counted
SHOWN_REPEATS = 3  # of them are written one by one; then the 10th, the 100th, …
MOST_KINDS = 1000  # of lines that are counted
QUIET = ("/health", "/ready", "/metrics")  # polled every few seconds: logged only if they fail


class JsonLines(logging.Formatter):
    """Writes records as JSON."""

    def __init__(self, with_text: bool) -> None:
        super().__init__()
        self._with_text = with_text

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        return json.dumps(self.fields(record), ensure_ascii=True, default=str)

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return what a line holds."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if (repeated := getattr(record, "repeated", 0)) > SHOWN_REPEATS:
            fields["repeated"] = repeated
        if record.exc_info and record.exc_info[0] is not None:
            kind, error, where = record.exc_info
            fields["error"] = f"{kind.__name__}: {error}" if self._with_text else kind.__name__
            fields["where"] = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(where)]
        return fields


class Repeats(logging.Filter):
    """Passes a repeated line three times a minute, then as the 10th, the 100th and so on."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[tuple[str, int, str], tuple[float, int]] = {}  # since when, and how often

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if a line is to be written; the line of a request always is."""
        if hasattr(record, "facts"):
            return True
        if len(self._counts) >= MOST_KINDS:
            self._counts.clear()
        key = record.name, record.levelno, str(record.msg)
        since, count = self._counts.get(key, (record.created, 0))
        if record.created - since > REPEAT_SECONDS:
            since, count = record.created, 0
        self._counts[key] = since, count + 1
        record.repeated = count + 1
        return count < SHOWN_REPEATS or str(count + 1).strip("0") == "1"


def write_json(with_text: bool, level: int = logging.INFO) -> None:
    """Have this process log JSON lines, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(with_text))
    handler.addFilter(Repeats())
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.handlers, root.level = [handler], logging.WARNING
    for name in ("specbranch", "uvicorn.error"):
        logging.getLogger(name).setLevel(level)


class RequestLog:
    """Gives every request an id, logs how it ended, and answers for mistakes of the program."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and log how it ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note, started, status = note_of(scope), time.monotonic(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = note.id
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            log.error("A request failed by a mistake of the program.", exc_info=error, extra=_facts(note_id=note.id))
            if status == 0:
                await of_engine(error).response(scope)(scope, receive, noted)
        finally:
            self._tell(scope, status, time.monotonic() - started)

    def _tell(self, scope: Scope, status: int, seconds: float) -> None:
        if scope["path"] in QUIET and status < 400:
            return
        note = note_of(scope)
        fields = {"method": scope["method"], "path": scope["path"], "status": status, "seconds": round(seconds, 4)}
        key = {} if note.key is None else {"key": note.key}
        log.info("request", extra=_facts(note_id=note.id, **fields, **key, **note.facts))


def _facts(note_id: str, **fields: Any) -> dict[str, Any]:
    return {"facts": {"request_id": note_id, **fields}}
