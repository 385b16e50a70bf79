"""OpenTelemetry: where traces are sent, and the span of each request that asks for an answer.

Owns the provider, the exporter and how long a span lasts. What a span holds is in `spans.py`. Invariant: a request
never waits for a collector. Spans are sent by a thread of their own, from a queue that drops what it cannot hold, and
a collector that is gone is mentioned once.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specbranch import __version__
from specbranch.errors import BadParameter
from specbranch.extras import OTEL
from specbranch.serve.notes import note_of
from specbranch.serve.settings import ServerSettings
from specbranch.serve.spans import OPERATIONS, SpanWriter

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.trace import Tracer, TracerProvider

log = logging.getLogger("specbranch.serve")
TRACES_PATH = "/v1/traces"
SERVICE = "specbranch"  # unless OTEL_SERVICE_NAME names another
LAST_SECONDS = 3.0  # in which the last spans are sent as the server ends
LOUD = ("opentelemetry.exporter.otlp", "opentelemetry.sdk._shared_internal")  # they log every attempt
OWN_PROTOCOL = "http/protobuf"


@dataclass(frozen=True, slots=True)
class Collector:
    """Where traces are sent, and if that was asked for here, or by the variables that all programs read."""

    url: str
    is_option: bool

    @classmethod
    def of(cls, settings: ServerSettings, environment: Mapping[str, str] = os.environ) -> Collector | None:
        """Return the collector of the settings or of OpenTelemetry's own variables."""
        if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return None
        if settings.otlp_traces_endpoint is not None:
            url = settings.otlp_traces_endpoint
            return cls(url if urlsplit(url).path.strip("/") else url.rstrip("/") + TRACES_PATH, True)
        if environment.get("OTEL_TRACES_EXPORTER", "otlp").lower() != "otlp":
            return None
        base = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
        url = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "") or (base and base.rstrip("/") + TRACES_PATH)
        return cls(url, False) if url else None

    @property
    def shown(self) -> str:
        """The address without a password."""
        return re.sub(r"(?<=://)[^/@]+@", "", self.url)

    def check(self) -> None:
        """Refuse what cannot be sent to it: the extra is missing, or another protocol was asked for."""
        OTEL.require()
        names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
        name = next((name for name in names if os.environ.get(name)), names[1])
        if (protocol := os.environ.get(name) or OWN_PROTOCOL) != OWN_PROTOCOL:
            said = f"{name} is {protocol!r}, but traces are sent by {OWN_PROTOCOL} here"
            raise BadParameter(f"{said}. Set it to that, and name the collector's port for it (4318).")


class Tracing:
    """The spans of one server."""

    def __init__(self, provider: TracerProvider, exporter: Any = None, owned: Any = None) -> None:
        """`owned`: the provider, if it ends with the server; then `exporter` is where its spans go."""
        self.tracer: Tracer = provider.get_tracer("specbranch", __version__)
        self._exporter, self._owned = exporter, owned

    @classmethod
    def of(cls, settings: ServerSettings) -> Tracing | None:
        """Return the tracing of the settings; None if traces are sent nowhere."""
        collector = _checked(settings)
        if collector is None:
            return None
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        for name in LOUD:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            provider, exporter = TracerProvider(resource=_resource(), shutdown_on_exit=False), _exporter(collector)
            provider.add_span_processor(BatchSpanProcessor(exporter))
        except ValueError as error:
            raise BadParameter(f"A variable of OpenTelemetry cannot be used: {error}.") from None
        return cls(provider, exporter, provider)

    def close(self) -> None:
        """Send the last spans, unless that takes too long."""
        if self._owned is None:
            return
        if not self._exporter.works:
            self._exporter.shutdown()  # nothing would arrive
        ending = threading.Thread(target=self._owned.shutdown, daemon=True)
        ending.start()
        ending.join(LAST_SECONDS)


class Traced:
    """Makes a span for every request that asks for an answer, refused ones too."""

    def __init__(self, app: ASGIApp, tracing: Tracing | None, writer: SpanWriter) -> None:
        self._app, self._tracing, self._writer = app, tracing, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and note how it ended."""
        asks = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in OPERATIONS
        if self._tracing is None or not asks:
            await self._app(scope, receive, send)
            return
        status, tracer, note = 0, self._tracing.tracer, note_of(scope)
        span = self._writer.begun(tracer, scope["path"], dict(Headers(scope=scope)))
        note.facts["trace_id"] = f"{span.get_span_context().trace_id:032x}"

        async def seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, seen)
        finally:
            if span.is_recording():
                self._writer.finish(tracer, span, note, status)
            span.end()


def _checked(settings: ServerSettings) -> Collector | None:
    """Return the collector of a server. What hinders it is an error if the server was told to use it; if only the
    environment of all programs names it, it is a warning."""
    collector = Collector.of(settings)
    if collector is None:
        return None
    try:
        collector.check()
    except Exception as error:
        if collector.is_option:
            raise
        log.warning("No traces are sent to %s, which the environment names: %s", collector.shown, error)
        return None
    return collector


def _resource() -> Any:
    """Return what the traces are of; OpenTelemetry's variables may name it."""
    from opentelemetry.sdk.resources import Resource

    is_named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    own = {} if is_named else {"service.name": SERVICE}
    return Resource.create({"service.version": __version__, **own})


def _exporter(collector: Collector) -> Any:
    """Return what sends spans. It logs the first batch that is not sent, and the first that is sent again."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class WatchedExporter(SpanExporter):
        def __init__(self) -> None:
            self._inner: Any = OTLPSpanExporter(endpoint=collector.url)
            self.works = True

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result: SpanExportResult = self._inner.export(spans)
            works = result is SpanExportResult.SUCCESS
            if self.works and not works:
                log.warning("Traces cannot be sent to %s and are dropped. Answers are not affected.", collector.shown)
            elif works and not self.works:
                log.info("Traces are sent to %s again.", collector.shown)
            self.works = works
            return result

        def shutdown(self) -> None:
            self._inner.shutdown()

    return WatchedExporter()
