"""Traces: a span of each request with the figures of its answer, sent to a collector that nobody waits for."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from running import PROMPT, Running, Visitor, load_tiny, running, until

from specbranch.answer import Chunk
from specbranch.cli.main import run
from specbranch.errors import DeadlinePassed
from specbranch.extras import OTEL
from specbranch.serve.settings import ServerSettings
from specbranch.serve.tracing import Collector, Tracing

COMPLETE = "/v1/completions"
BODY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "seed": 5, "stop": ["never said"]}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TALK = {"messages": [{"role": "user", "content": "Smile"}], "max_tokens": 4}
EVENTS = {**BODY, "stream": True}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


class Traces:
    """A server, and the spans that it has made."""

    def __init__(self, served: Running, exporter: InMemorySpanExporter) -> None:
        self.served, self._exporter = served, exporter

    def of(self, path: str, body: dict[str, Any], **headers: str) -> list[ReadableSpan]:
        """Send a request and return its spans, its own first."""
        sent = {"x-request-id": secrets.token_hex(), **headers}
        self.served.post(path, body, **sent)
        return self.named(sent["x-request-id"])

    def named(self, request: str) -> list[ReadableSpan]:
        """The spans of a request, which may end a moment behind its answer."""
        until(lambda: request in self.requests())
        own = self.requests()[request]
        spans = [span for span in self.all() if span.context.trace_id == own.context.trace_id]
        return sorted(spans, key=lambda span: span is not own)

    def requests(self) -> dict[str, ReadableSpan]:
        """The spans of whole requests, by the ids of these."""
        return {attributes(span)["gen_ai.request.id"]: span for span in self.all() if span.kind.name == "SERVER"}

    def all(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()


@contextmanager
def tracing(pair: tuple[str, str], **given: Any) -> Iterator[Traces]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with running(load_tiny(pair), tracer_provider=provider, model_name="tiny", **given) as served:
        yield Traces(served, exporter)


@pytest.fixture(scope="module")
def traces(pair: tuple[str, str], nothing_kept: None) -> Iterator[Traces]:
    with tracing(pair) as found:
        yield found


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def parent(span: ReadableSpan) -> str | None:
    return f"{span.parent.span_id:016x}" if span.parent else None


def test_a_span_has_what_the_answer_says(traces: Traces) -> None:
    answer = traces.served.post(COMPLETE, {**BODY, "seed": 6}).json()
    first, *_ = traces.of(COMPLETE, {**BODY, "seed": 6}, **{"x-request-id": "ann.1"})
    found, figures = attributes(first), answer["metrics"]["speculative_decoding"]
    assert (first.name, parent(first)) == ("text_completion tiny", None)
    assert found["gen_ai.operation.name"] == "text_completion" and found["gen_ai.request.model"] == "tiny"
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.seed"]) == (12, 6)
    assert found["gen_ai.response.id"] == "cmpl-ann.1" and found["gen_ai.request.id"] == "ann.1"
    assert found["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"] == 12
    assert found["gen_ai.response.finish_reasons"] == ("length",) and found["http.response.status_code"] == 200
    assert found["specbranch.methods"] == tuple(figures["methods"]) and not found["gen_ai.request.stream"]
    counts = [found[f"specbranch.{name}"] for name in ("draft_tokens", "accepted_tokens", "rollback_tokens")]
    assert found["specbranch.target_forwards"] > 0 and counts[1] <= counts[0] and counts[2] <= counts[0]
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert not any(value is None for value in found.values()) and first.status.is_unset


def test_the_phases_follow_one_another_within_the_request(traces: Traces) -> None:
    first, *phases = traces.of(COMPLETE, {**EVENTS, "n": 2})
    assert [span.name for span in phases] == ["queue", "prefill", "decode"] * 2
    assert all(parent(span) == f"{first.context.span_id:016x}" for span in phases)
    assert [attributes(span)["specbranch.choice"] for span in phases] == [0] * 3 + [1] * 3
    assert phases[0].end_time == phases[1].start_time and phases[1].end_time == phases[2].start_time
    assert first.start_time <= phases[0].start_time <= phases[2].end_time  # type: ignore[operator]
    decoded = attributes(phases[2])
    assert decoded["specbranch.tokens"] == 12 and decoded["specbranch.target_forwards"] > 0
    assert attributes(first)["gen_ai.request.stream"] and attributes(first)["gen_ai.usage.output_tokens"] == 24


def test_the_trace_of_the_client_goes_on(traces: Traces, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "specbranch")
    first, *_ = traces.of(COMPLETE, BODY, traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="a=b")
    assert f"{first.context.trace_id:032x}" == TRACE and parent(first) == PARENT
    assert first.context.trace_state.get("a") == "b"
    own = attributes(first)["gen_ai.request.id"]

    def lines() -> list[dict[str, Any]]:  # written a moment behind the answer
        facts = [getattr(record, "facts", {}) for record in list(caplog.records)]
        return [line for line in facts if line.get("request_id") == own]

    until(lambda: bool(lines()))
    assert [line["trace_id"] for line in lines()] == [TRACE]
    for state in ("=,=", "x" * 600, "a=b,a=c", "a", ",".join(f"k{at}=1" for at in range(33))):
        first, *_ = traces.of(COMPLETE, BODY, traceparent=f"00-{TRACE}-{PARENT}-01", tracestate=state)
        assert parent(first) == PARENT and not first.context.trace_state
    for wrong in ("", "00-0-0-01", "x" * 1000, f"00-{'0' * 32}-{PARENT}-01"):
        assert parent(traces.of(COMPLETE, BODY, traceparent=wrong)[0]) is None
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]
    unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00", "x-request-id": "unsampled"}
    assert traces.served.post(COMPLETE, BODY, **unsampled).status_code == 200
    assert len(traces.of(COMPLETE, BODY)) == 4 and "unsampled" not in traces.requests()


def test_only_requests_for_answers_have_spans(traces: Traces) -> None:
    traces.of(COMPLETE, BODY)
    before = len(traces.all())
    assert traces.served.post("/tokenize", {"prompt": "x"}).status_code == 200
    for path in ("/health", "/metrics", "/v1/models"):
        assert traces.served.http.get(path).status_code == 200
    assert len(traces.of(COMPLETE, BODY)) == len(traces.all()) - before
    assert traces.of("/v1/chat/completions", TALK)[0].name == "chat tiny"
    assert traces.of("/v1/responses", {"input": "Smile", "max_output_tokens": 4})[0].name == "chat tiny"


def test_a_refused_request_says_why_and_is_no_error_of_the_server(traces: Traces) -> None:
    for body, status in (({"prompt": ""}, 400), ({**BODY, "model": "no"}, 404), ({"promt": "x"}, 400)):
        first, *phases = traces.of(COMPLETE, body)
        assert attributes(first)["http.response.status_code"] == status and first.status.is_unset and not phases
    assert attributes(first)["error.type"] == "unsupported_parameter"


def test_mistakes_of_the_server_are_errors(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    from specbranch.serve.answer_events import AnswerEvents

    def late(self: AnswerEvents, index: int, chunk: Chunk) -> None:
        raise DeadlinePassed("It is late.")

    with monkeypatch.context() as patched:
        patched.setattr(AnswerEvents, "_add", late)
        first, *phases = traces.of(COMPLETE, EVENTS)
    assert attributes(first)["error.type"] == "deadline_passed" and not first.status.is_ok and not phases
    assert first.status.status_code.name == "ERROR" and attributes(first)["http.response.status_code"] == 200
    monkeypatch.setattr(traces.served.engine, "submit_each", lambda *given, **named: 1 // 0)
    first, *_ = traces.of(COMPLETE, BODY)
    assert attributes(first)["error.type"] == "server_error" and first.status.status_code.name == "ERROR"


def test_a_client_that_leaves_is_told_apart(traces: Traces) -> None:
    endless = {**EVENTS, "max_tokens": 400, "ignore_eos": True, "request_id": "left"}
    visitor = Visitor(traces.served.url, COMPLETE, endless)
    visitor.hear(b"data: ")
    visitor.leave()
    (first,) = traces.named("left")
    assert attributes(first)["error.type"] == "client_gone" and first.status.is_unset
    until(traces.served.is_idle)


def test_no_span_has_text_unless_text_is_logged(traces: Traces, pair: tuple[str, str]) -> None:
    said = traces.served.post(COMPLETE, BODY).json()["choices"][0]["text"]
    for body in (BODY, EVENTS, {**BODY, "stop": PROMPT}, {"prompt": PROMPT, "modle": PROMPT}):
        shown = "".join(span.to_json() for span in traces.of(COMPLETE, body))
        assert PROMPT not in shown and json.dumps(said) not in shown and "never said" not in shown
    with tracing(pair, log_text=True) as telling:
        found = attributes(telling.of(COMPLETE, BODY)[0])
    assert found["specbranch.prompts"] == (PROMPT,) and found["specbranch.answers"] == (said,)


def test_the_web_framework_adds_no_spans_of_its_own(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", provider)
    assert len(traces.of(COMPLETE, BODY)) == 4 and not exporter.get_finished_spans()


class Received(BaseHTTPRequestHandler):
    """A collector that keeps what it gets."""

    def do_POST(self) -> None:
        self.server.bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *given: Any) -> None:
        pass


@contextmanager
def collector(port: int = 0) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", port), Received) as server:
        server.bodies = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def spans_of(server: Any) -> list[tuple[str, str, dict[str, str]]]:
    """The names, traces and resources of the spans that a collector has got, in the protocol's own form."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    found = []
    for path, body in server.bodies:
        assert path == "/v1/traces"
        for one in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = {entry.key: entry.value.string_value for entry in one.resource.attributes}
            found += [(span.name, span.trace_id.hex(), resource) for scope in one.scope_spans for span in scope.spans]
    return found


@pytest.mark.parametrize("by", ["option", "variable"])
def test_a_collector_gets_the_spans_before_the_server_ends(
    pair: tuple[str, str], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collector() as there:
        url = f"http://127.0.0.1:{there.server_port}"
        given = {"otlp_traces_endpoint": f"{url}/v1/traces"} if by == "option" else {}
        if by == "variable":
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
            monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        with running(load_tiny(pair), model_name="tiny", **given) as served:
            served.post(COMPLETE, BODY, traceparent=f"00-{TRACE}-{PARENT}-01")
        names, found, resources = zip(*spans_of(there), strict=True)
    assert sorted(names) == ["decode", "prefill", "queue", "text_completion tiny"] and set(found) == {TRACE}
    assert all(one["service.name"] == ("specbranch" if by == "option" else "mine") for one in resources)


def test_a_collector_that_is_gone_costs_nothing_and_is_mentioned_once(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    with collector() as there:
        port = there.server_port

    def said(text: str) -> list[str]:
        return [record.getMessage() for record in caplog.records if text in record.getMessage()]

    url = f"http://ann:secret@127.0.0.1:{port}/v1/traces"
    with ExitStack() as later, running(load_tiny(pair), otlp_traces_endpoint=url) as served:
        expected = served.post(COMPLETE, BODY).json()["choices"]
        until(lambda: bool(said("Traces cannot be sent")))
        for _ in range(5):
            assert served.post(COMPLETE, BODY).json()["choices"] == expected
        there = later.enter_context(collector(port))
        until(lambda: bool(served.post(COMPLETE, BODY)) and bool(spans_of(there)))
        until(lambda: bool(said("Traces are sent")))
    assert len(said("Traces cannot be sent")) == 1
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert "secret" not in caplog.text


def test_without_the_extra_the_option_is_refused_and_the_variable_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, OTEL.module, None)
    assert run(["serve", "--otlp-traces-endpoint", "http://localhost:4318"]) == 2
    assert "Install it with: pip install 'specbranch[otel]'" in capsys.readouterr().err
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://ann:secret@localhost:4318")
    assert Tracing.of(ServerSettings()) is None
    assert "No traces are sent to http://localhost:4318/v1/traces, which the environment names" in caplog.text
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert Collector.of(ServerSettings(otlp_traces_endpoint="http://localhost:4318")) is None


def test_what_cannot_be_a_collector_gets_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["serve", "--otlp-traces-endpoint", "localhost:4317"]) == 2
    assert "expected an address such as http://localhost:4318/v1/traces" in capsys.readouterr().err
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert run(["serve", "--otlp-traces-endpoint", "http://localhost:4317"]) == 2
    assert "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc', but traces are sent by http/protobuf" in capsys.readouterr().err


def test_the_variables_of_opentelemetry_name_a_collector() -> None:
    def url(**given: str) -> str | None:
        found = Collector.of(ServerSettings(), {f"OTEL_{name}": value for name, value in given.items()})
        return found and found.url

    assert url() is None and url(EXPORTER_OTLP_ENDPOINT="http://a/", TRACES_EXPORTER="none") is None
    assert url(EXPORTER_OTLP_ENDPOINT="http://a/") == "http://a/v1/traces"
    for option in ("http://a", "http://a/", "http://a/v1/traces"):
        found = Collector.of(ServerSettings(otlp_traces_endpoint=option), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://b"})
        assert found == Collector("http://a/v1/traces", True)
    assert url(EXPORTER_OTLP_ENDPOINT="http://a", EXPORTER_OTLP_TRACES_ENDPOINT="http://b/x") == "http://b/x"
