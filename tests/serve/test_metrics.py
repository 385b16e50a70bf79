"""Metrics are named as vLLM names them, readable by Prometheus, and right; logs are JSON and hold no text."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from running import PROMPT, Running, load_tiny, running, until

from specbranch.serve.logs import JsonLines

COMPLETE = "/v1/completions"
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "seed": 1}
LINE = re.compile(r'([a-z0-9_:]+)\{((?:[a-z_]+="[^"]*",?)*)\} ([0-9.e+-]+|\+Inf)')
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def read(server: Running) -> dict[str, float]:
    """All values, by name and labels but those that all have."""
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[str, float] = {}
    for line in response.text.splitlines():
        if not line.startswith("#"):
            match = LINE.fullmatch(line)
            assert match, line
            labels = [label for label in match[2].split(",") if not label.startswith(("model_name=", "engine="))]
            found[match[1].removeprefix("specbranch:") + "".join(sorted(labels))] = float(match[3])
    return found


def test_answers_are_counted_under_vllms_names(pair: tuple[str, str]) -> None:
    with running(load_tiny(pair, method="pearl")) as server:
        assert read(server)["generation_tokens_total"] == 0
        figures = [
            server.post(COMPLETE, BODY).json()["metrics"]["speculative_decoding"],
            server.post(COMPLETE, {**BODY, "n": 2}).json()["metrics"]["speculative_decoding"],
        ]
        server.post(COMPLETE, {**BODY, "stream": True})
        server.post(COMPLETE, {**BODY, "max_tokens": 10**9, "n": 100, "prompt": ["x"] * 9})
        reply = read(server)
        figures += [figures[0]]  # the same text again, streamed
    assert reply['request_success_totalfinished_reason="length"'] == 4 and reply["generation_tokens_total"] == 160
    for name, figure in (("num_drafts", "num_spec_steps"), ("num_draft_tokens", "num_draft_tokens")):
        assert reply[f"spec_decode_{name}_total"] > 0 and figure in figures[0]
    accepted = sum(value for name, value in reply.items() if name.startswith("spec_decode_num_accepted_tokens_per_pos"))
    assert 0 < accepted <= reply["spec_decode_num_accepted_tokens_total"] < reply["spec_decode_num_draft_tokens_total"]
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_generation_tokens"):
        assert reply[f"{name}_count"] == reply[f'{name}_bucketle="+Inf"'] == 4
    assert reply["request_generation_tokens_sum"] == 160 and reply["inter_token_latency_seconds_count"] > 3
    assert reply["num_requests_running"] == reply["num_requests_waiting"] == reply["kv_cache_usage_perc"] == 0
    assert reply["rollback_tokens_total"] > 0 and reply['requests_refused_totalreason="size"'] == 1
    assert reply["branches_opened_total"] >= reply["branches_hit_total"] > 0 and reply["draft_restarts_total"] == 0


@pytest.mark.slow  # a worker imports torch
def test_ready_and_metrics_name_the_state_of_the_draft_and_the_server_stays_ready(pair: tuple[str, str]) -> None:
    with running(load_tiny(pair, executor="process")) as server:
        executor: Any = server.engine._llm.scheduler.loop.executor
        until(lambda: server.http.get("/ready").json() == {"status": "ready", "draft": "ready"})
        assert read(server)['draft_statestate="ready"'] == 1
        os.kill(executor.child_pid, signal.SIGKILL)
        until(lambda: server.http.get("/ready").json()["draft"] == "lost")
        assert server.http.get("/ready").status_code == 200
        found = read(server)
        assert found['draft_statestate="lost"'] == 1 and found['draft_statestate="ready"'] == 0
        assert found["draft_restarts_total"] == 0


def test_a_draft_in_this_process_is_ready_and_a_missing_one_is_none(served: Running, pair: tuple[str, str]) -> None:
    assert served.http.get("/ready").json() == {"status": "ready", "draft": "ready"}
    with running(load_tiny((pair[0], None))) as server:  # type: ignore[arg-type]
        assert server.http.get("/ready").json() == {"status": "ready", "draft": "none"}
        assert read(server)['draft_statestate="none"'] == 1


def test_every_metric_of_the_dashboard_exists(served: Running) -> None:
    there = {re.sub(r"_bucket.*", "_bucket", name) for name in read(served)}
    names = set(re.findall(r"specbranch:([a-z0-9_]+)", DASHBOARD.read_text(encoding="utf-8")))
    assert len(names) > 15
    assert not [name for name in names if not any(one.startswith(name) for one in there)]


def test_a_request_has_an_id_and_one_line_without_its_text(served: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "specbranch")
    answer = served.post(COMPLETE, {**BODY, "seed": 9}, **{"x-request-id": "ann.1"})
    assert answer.headers["x-request-id"] == "ann.1"
    made = served.post(COMPLETE, {"prompt": ""}, **{"x-request-id": "bad id"}).headers["x-request-id"]
    assert len(made) == 32
    served.http.get("/health")

    def logged() -> list[str]:  # a line may be written a moment behind its answer, also one of an earlier test
        found = [JsonLines(with_text=False).format(record) for record in list(caplog.records)]
        return [line for line in found if json.loads(line).get("request_id") in ("ann.1", made)]

    until(lambda: len(logged()) >= 2)
    lines = logged()
    first, second = (json.loads(line) for line in lines)
    assert first["request_id"] == "ann.1" and first["status"] == 200 and first["path"] == COMPLETE
    assert first["completion_tokens"] == 40 and first["finish_reasons"] == ["length"] and second["status"] == 400
    assert not any("guess" in line or answer.json()["choices"][0]["text"] in line for line in lines)


def test_text_is_logged_where_that_is_asked(pair: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "specbranch")
    with running(load_tiny(pair), log_text=True) as server:
        said = server.post(COMPLETE, BODY).json()["choices"][0]["text"]
    facts = next(record.facts for record in caplog.records if "prompts" in getattr(record, "facts", {}))
    assert facts["prompts"] == [PROMPT] and facts["answers"] == [said]


def test_an_internal_error_is_logged_with_its_traceback_and_without_its_message(
    pair: tuple[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any, **named: Any) -> None:
        raise ValueError(f"cannot cope with {given}")

    with running(load_tiny(pair)) as server:
        monkeypatch.setattr(server.engine, "submit_each", broken)
        response = server.post(COMPLETE, BODY)
        assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
        assert "cope" not in response.text
        assert server.server._limits.requests == 0
    line = next(JsonLines(with_text=False).format(record) for record in caplog.records if record.exc_info)
    reply = json.loads(line)
    assert reply["error"] == "ValueError" and "broken" in reply["where"][-1] and "cope" not in line
