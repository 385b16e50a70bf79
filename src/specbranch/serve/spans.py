"""What a span holds: OpenTelemetry's names for generative AI, vLLM's for latencies, and ours for speculation.

Owns the names of spans and attributes. Invariant: nothing that a client wrote or was answered is among them, unless
the server was started with --log-text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbranch.answer import Output
from specbranch.serve.notes import RequestNote
from specbranch.serve.usage import answer_metrics, usage

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

    from specbranch.serve.answering import Answering

# by path: how OpenTelemetry calls what is done
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/responses": "chat"}
PARAMETERS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
PHASES = {"queue": "queued_seconds", "prefill": "ttft_seconds", "decode": "decode_seconds"}  # spans, and their length
MOST_TRACED = 8  # answers of a request that have spans of their own
GIGA = 10**9
LONGEST_TRACE_HEADER, MOST_TRACE_MEMBERS = 512, 32  # characters, and entries of tracestate
_TRACE_MEMBER = re.compile(r"[a-z][a-z0-9_*/-]{0,255}=[!-+\--<>-~]{1,256}")  # the usual forms of the W3C


@dataclass(frozen=True, slots=True)
class SpanWriter:
    """Writes the spans of a server's requests."""

    model: str
    with_text: bool

    def begun(self, tracer: Tracer, path: str, headers: Mapping[str, str]) -> Span:
        """Start a request's span, in the client's trace if it named one."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        attributes = {
            "gen_ai.operation.name": OPERATIONS[path],
            "gen_ai.provider.name": "specbranch",
            "gen_ai.request.model": self.model,
            "http.request.method": "POST",
            "http.route": path,
        }
        context = TraceContextTextMapPropagator().extract(trace_headers(headers))
        name = f"{OPERATIONS[path]} {self.model}"
        return tracer.start_span(name, context, kind=SpanKind.SERVER, attributes=attributes)

    def finish(self, tracer: Tracer, span: Span, note: RequestNote, status: int) -> None:
        """Write what is known at the end of a request, and the spans of its phases."""
        from opentelemetry.trace import set_span_in_context

        span.set_attributes({"http.response.status_code": status, "gen_ai.request.id": note.id})
        answering = note.answering
        if answering is not None:
            span.set_attributes(attributes_of(answering))
            if self.with_text:
                span.set_attributes({f"specbranch.{name}": note.facts.get(name, []) for name in ("prompts", "answers")})
            for phase, started, ended, attributes in phases_of(answering):
                inner = tracer.start_span(phase, set_span_in_context(span), attributes=attributes, start_time=started)
                inner.end(ended)
        _write_error(span, note, status)


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that name a trace, if they are well-formed. OpenTelemetry would log others, word by word."""
    parent, state = headers.get("traceparent", ""), headers.get("tracestate", "")
    if len(parent) > LONGEST_TRACE_HEADER:
        return {}
    members = [one.strip(" \t") for one in state.split(",")]
    keys = {one.partition("=")[0] for one in members}
    is_sane = len(state) <= LONGEST_TRACE_HEADER and len(keys) == len(members) <= MOST_TRACE_MEMBERS
    if is_sane and all(_TRACE_MEMBER.fullmatch(one) for one in members):
        return {"traceparent": parent, "tracestate": state}
    return {"traceparent": parent}


def attributes_of(answering: Answering) -> dict[str, Any]:
    """Return the attributes of a request that was admitted."""
    params = answering.prepared.params
    outputs = [answering.outputs[index] for index in sorted(answering.outputs)]
    asked = {name: getattr(params, name) for name in PARAMETERS}
    counted = usage(answering.prepared.prompts, answering.outputs, params.n)
    found: dict[str, Any] = {
        **{f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None},
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.stream": answering.prepared.stream is not None,
        "gen_ai.response.id": answering.answer_id,
        "gen_ai.response.model": answering.serving.model,
        "gen_ai.response.finish_reasons": [str(one.finish_reason) for one in outputs],
        "gen_ai.usage.input_tokens": counted.prompt_tokens,
        "gen_ai.usage.output_tokens": max(counted.completion_tokens, answering.said),
    }
    if counted.prompt_tokens_details is not None:
        found["gen_ai.usage.cache_read.input_tokens"] = counted.prompt_tokens_details.cached_tokens
    return {**found, **_of_outputs(outputs, answering)} if outputs else found


def _of_outputs(outputs: list[Output], answering: Answering) -> dict[str, Any]:
    """Return latencies of the slowest answer, as the client saw it, and what speculation did for all."""
    slowest = max(outputs, key=lambda one: sum(one.stats[name] for name in PHASES.values())).stats
    queued, prefill, decode = (slowest[name] for name in PHASES.values())
    first = min(one.stats["queued_seconds"] + one.stats["ttft_seconds"] for one in outputs)
    figures = answer_metrics(answering.outputs).speculative_decoding
    found = {
        "gen_ai.response.time_to_first_chunk": first,
        "gen_ai.latency.time_to_first_token": first,
        "gen_ai.latency.time_in_queue": queued,
        "gen_ai.latency.time_in_model_prefill": prefill,
        "gen_ai.latency.time_in_model_decode": decode,
        "gen_ai.latency.e2e": queued + prefill + decode,
        "specbranch.methods": figures.methods,
        "specbranch.target_forwards": figures.num_spec_steps,
        "specbranch.draft_tokens": figures.num_draft_tokens,
        "specbranch.accepted_tokens": figures.num_accepted_draft_tokens,
        "specbranch.rollback_tokens": figures.num_rollback_tokens,
        "specbranch.branches": figures.num_branches,
        "specbranch.branch_hits": figures.num_branch_hits,
    }
    length = figures.mean_acceptance_length
    return found if length is None else {**found, "specbranch.mean_acceptance_length": length}


def phases_of(answering: Answering) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """Yield the phases of each answer: the name, start and end in nanoseconds, and attributes."""
    for index in sorted(answering.outputs)[:MOST_TRACED]:
        output, started = answering.outputs[index], answering.submitted
        for phase, name in PHASES.items():
            ended = started + round(output.stats[name] * GIGA)
            yield phase, started, ended, {"specbranch.choice": index, **_of_phase(phase, output)}
            started = ended


def _of_phase(phase: str, output: Output) -> dict[str, Any]:
    stats = output.stats
    if phase == "prefill":
        read, cached = stats["prompt_tokens_read"], stats["prompt_tokens_cached"]
        return {"specbranch.prompt_tokens": read, "specbranch.cached_tokens": cached}
    if phase == "decode":
        rolled_back = sum(stats["rollback"].values())
        counts = {"tokens": stats["tokens"], "target_forwards": stats["target_forwards"]}
        drafted = {"draft_tokens": stats["drafted"], "accepted_tokens": stats["accepted"]}
        found = {**counts, **drafted, "rollback_tokens": rolled_back, "method": output.method}
        return {f"specbranch.{name}": value for name, value in found.items()}
    return {}


def _write_error(span: Span, note: RequestNote, status: int) -> None:
    """Write what went wrong. A mistake of the client is no error of the server."""
    from opentelemetry.trace import StatusCode

    answering = note.answering
    error = note.facts.get("error")
    if error is None and answering is not None and len(answering.outputs) < len(answering.submissions):
        error = "client_gone"
    if error is not None:
        span.set_attribute("error.type", error)
    if status >= 500 or (status < 400 and error not in (None, "client_gone")):
        span.set_status(StatusCode.ERROR)
