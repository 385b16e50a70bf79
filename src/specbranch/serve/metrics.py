"""The metrics of a server: vLLM's names with our prefix where the idea is the same, and some of our own.

Owns which figure has which name. Invariant: every answer is counted once, when it ends. What the engine counts itself
is taken from its snapshot, not counted again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

from specbranch.answer import Output
from specbranch.core.loop import DraftState, KVSlots
from specbranch.core.scheduler import Snapshot
from specbranch.serve.connections import CUT_REASONS, Connections
from specbranch.serve.exposition import Histogram, Series, exposed
from specbranch.serve.keeping import Kept
from specbranch.serve.limits import REFUSALS, Limits

METRIC_PREFIX = "specbranch:"
SECONDS_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
SHORT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
TOKEN_BUCKETS = tuple(float(step * 10**power) for power in range(5) for step in (1, 2, 5))
SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)


def _counter(name: str, about: str) -> Series:
    return Series("counter", f"{METRIC_PREFIX}{name}_total", about)


def _gauge(name: str, about: str) -> Series:
    return Series("gauge", METRIC_PREFIX + name, about)


def _histogram(name: str, about: str, bounds: tuple[float, ...]) -> Histogram:
    return Histogram(METRIC_PREFIX + name, about, bounds)


class ServerMetrics:
    """All metrics of one server."""

    def __init__(self, model: str) -> None:
        self._labels = {"model_name": model, "engine": "0"}
        # as vLLM has them
        self._running = _gauge("num_requests_running", "Samples that are being decoded.")
        self._waiting = _gauge("num_requests_waiting", "Samples that wait.")
        self._cache = _gauge("kv_cache_usage_perc", "Part of the target's cache that is held; 1 is all.")
        self._preemptions = _counter("num_preemptions", "Times that a request was preempted for want of memory.")
        self._prompt = _counter("prompt_tokens", "Tokens of prompts that were admitted.")
        self._said = _counter("generation_tokens", "Tokens that were written.")
        self._queries = _counter("prefix_cache_queries", "Tokens of prompts that were looked for in the cache.")
        self._hits = _counter("prefix_cache_hits", "Tokens of prompts that were found there.")
        self._success = _counter("request_success", "Answers that were finished, by why.")
        self._drafts = _counter("spec_decode_num_drafts", "Forwards of the target that verified.")
        self._drafted = _counter("spec_decode_num_draft_tokens", "Tokens that were drafted.")
        self._accepted = _counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self._by_position = _counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by their position in the main path."
        )
        self._first = _histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS_BUCKETS)
        self._between = _histogram("inter_token_latency_seconds", "Between two events of a stream.", SHORT_BUCKETS)
        self._each = _histogram(
            "request_time_per_output_token_seconds", "Mean time of a token of an answer.", SHORT_BUCKETS
        )
        self._whole = _histogram("e2e_request_latency_seconds", "From arrival to the last token.", SECONDS_BUCKETS)
        self._queued = _histogram("request_queue_time_seconds", "Waiting to be admitted.", SECONDS_BUCKETS)
        self._prefill = _histogram("request_prefill_time_seconds", "Reading the prompt.", SECONDS_BUCKETS)
        self._decode = _histogram("request_decode_time_seconds", "From the first token to the last.", SECONDS_BUCKETS)
        self._prompt_size = _histogram("request_prompt_tokens", "Tokens of a prompt.", TOKEN_BUCKETS)
        self._answer_size = _histogram("request_generation_tokens", "Tokens of an answer.", TOKEN_BUCKETS)
        self._samples = _histogram("request_params_n", "Samples of a request.", SAMPLES)
        # ours
        self._rollback = _counter("rollback_tokens", "Drafted tokens that were thrown away.")
        self._opened = _counter("branches_opened", "Positions at which branches were prepared.")
        self._hit = _counter("branches_hit", "Branches that the target went on with.")
        self._kept = _counter("kept_texts", "Answers that were kept for the training of a draft.")
        self._kept_bytes = _gauge("kept_text_bytes", "Bytes of the folder of kept texts.")
        self._not_kept = _counter("kept_texts_dropped", "Answers that were to be kept and were not, by why.")
        self._draft_idle = _counter("draft_idle_seconds", "Time of decoding in which the draft did nothing.")
        self._target_idle = _counter("target_idle_seconds", "Time of decoding in which the target did nothing.")
        self._restarts = _counter("draft_restarts", "Times that a draft's process was made anew.")
        self._late = _counter("late_captures", "CUDA graphs captured and kernels compiled in the middle of an answer.")
        self._draft = _gauge("draft_state", "1 for the state that the draft is in, 0 for the others.")
        self._failed = _counter("request_failures", "Answers that ended with an error, past their deadline too.")
        self._cancelled = _counter("request_cancellations", "Answers whose client was gone, or the server stopped.")
        self._refused = _counter("requests_refused", "Requests that were not let in, by why.")
        self._open = _gauge("requests_open", "Requests that were let in and are not answered.")
        self._connections = _gauge("connections_open", "Connections that are open.")
        self._cut = _counter("connections_cut", "Connections that were refused or cut off, by why.")
        self._free = _gauge("kv_cache_slots_free", "KV slots of a model that no request holds.")
        self._places = _gauge("cache_places_free", "Deprecated: the older name of kv_cache_slots_free.")
        for reason in ("stop", "length"):
            self._success.add(0, finished_reason=reason)
        self._by_position.add(0, position="0")
        for reason in REFUSALS:
            self._refused.add(0, reason=reason)
        for reason in CUT_REASONS:
            self._cut.add(0, reason=reason)
        self._memory = Series("gauge", "process_resident_memory_bytes", "Memory of this process.")

    def chunk(self, seconds: float) -> None:
        """Count the seconds between two events of a stream."""
        self._between.observe(seconds)

    def asked(self, samples: int) -> None:
        """Count an admitted request."""
        self._samples.observe(samples)

    def finished(self, output: Output) -> None:
        """Count an answer that ended well."""
        stats = output.stats
        self._success.add(1, finished_reason=str(output.finish_reason))
        self._count_speculation(stats)
        self._queries.add(stats["prompt_tokens_read"] + stats["prompt_tokens_cached"])
        self._hits.add(stats["prompt_tokens_cached"])
        self._prompt_size.observe(len(output.prompt_token_ids))
        self._answer_size.observe(stats["tokens"])
        queued, prefill, decode = (stats[f"{name}_seconds"] for name in ("queued", "ttft", "decode"))
        self._queued.observe(queued)
        self._prefill.observe(prefill)
        self._decode.observe(decode)
        self._first.observe(queued + prefill)
        self._whole.observe(queued + prefill + decode)
        if stats["tokens"] > 1:
            self._each.observe(decode / (stats["tokens"] - 1))

    def count_kept(self, kept: Kept) -> None:
        """Take the counts of kept texts."""
        self._kept.set(kept.texts)
        self._kept_bytes.set(kept.bytes)
        for reason, count in kept.dropped.items():
            self._not_kept.set(count, reason=reason)

    def text(self, snapshot: Snapshot, draft: DraftState, limits: Limits, connections: Connections) -> str:
        """Write all of it, as Prometheus reads it."""
        self._running.set(snapshot.running)
        self._waiting.set(snapshot.waiting)
        self._preemptions.set(snapshot.preemptions)
        self._prompt.set(snapshot.prompt_tokens)
        self._said.set(snapshot.tokens)
        self._restarts.set(snapshot.draft_restarts)
        self._late.set(snapshot.late_captures)
        self._failed.set(snapshot.failed)
        self._cancelled.set(snapshot.cancelled)
        for state in get_args(DraftState):
            self._draft.set(state == draft, state=state)
        self._open.set(limits.requests)
        self._connections.set(len(connections))
        for reason, count in connections.cuts.items():
            self._cut.set(count, reason=reason)
        for kv_slots in snapshot.kv_slots:
            for gauge in (self._free, self._places):
                gauge.set(kv_slots.free, model=kv_slots.model)
            if kv_slots.model == "target":
                self._cache.set(_held(kv_slots))
        for reason, count in limits.refused.items():
            self._refused.set(count, reason=reason)
        if (resident := _resident()) is not None:
            self._memory.set(resident)
        return exposed([one for one in vars(self).values() if isinstance(one, Series | Histogram)], self._labels)

    def _count_speculation(self, stats: dict[str, Any]) -> None:
        self._drafts.add(stats["target_forwards"])
        self._drafted.add(stats["drafted"])
        self._accepted.add(stats["accepted"])
        for position, count in enumerate(stats["accepted_by_position"]):
            self._by_position.add(count, position=str(position))
        self._rollback.add(sum(stats["rollback"].values()))
        self._opened.add(stats["branch_points"])
        self._hit.add(stats["branch_hits"])
        self._draft_idle.add(stats["draft_idle_seconds"] or 0.0)
        self._target_idle.add(stats["target_idle_seconds"])


def _held(kv_slots: KVSlots) -> float:
    return 1 - kv_slots.free / kv_slots.total if kv_slots.total else 0.0


def _resident() -> int | None:
    """Return how much memory this process has, where Linux tells it."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
