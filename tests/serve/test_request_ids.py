"""One id from the request to the header, the answer, its events, errors and the log."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from typing import Any

import pytest
from running import Running, events, until

from specbranch.answer import Chunk
from specbranch.errors import DeadlinePassed
from specbranch.serve.logs import JsonLines

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Smile"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "Smile", "max_tokens": 4},
    "/v1/responses": {"input": "Smile", "max_output_tokens": 4},
}
PREFIXES = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-", "/v1/responses": "resp_"}
TRACE = "Root=1-67891233-abcdef01234567891234567"


def logged(caplog: pytest.LogCaptureFixture, *ids: str) -> list[dict[str, Any]]:
    """The lines of these requests. A client may have its answer before the line of its request is written, so lines of
    an earlier test may come late, too."""
    until(lambda: len(_lines(caplog, ids)) >= len(ids))
    return _lines(caplog, ids)


def _lines(caplog: pytest.LogCaptureFixture, ids: Collection[str]) -> list[dict[str, Any]]:
    lines = [json.loads(JsonLines(with_text=False).format(record)) for record in list(caplog.records)]
    return [line for line in lines if line["message"] == "request" and line["request_id"] in ids]


@pytest.mark.parametrize("path", BODIES)
def test_an_id_goes_through_the_answer_and_the_log(
    served: Running, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "specbranch")
    number = str(list(BODIES).index(path))
    ids = (f"ann/{number}", TRACE + number, number * 128)
    for sent in ids:
        answer = served.post(path, BODIES[path], **{"x-request-id": sent})
        assert answer.headers["x-request-id"] == sent and answer.json()["id"] == PREFIXES[path] + sent
    assert [line["request_id"] for line in logged(caplog, *ids)] == list(ids)


def test_every_event_of_a_stream_has_the_id(served: Running) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        response = served.post(path, {**BODIES[path], "stream": True}, **{"x-request-id": "ann-1"})
        assert {event["id"] for event in events(response)} == {f"{PREFIXES[path]}ann-1"}
    response = served.post("/v1/responses", {**BODIES["/v1/responses"], "stream": True, "request_id": "ann-2"})
    said = [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line.startswith("data:")]
    assert response.headers["x-request-id"] == "ann-2"
    assert {event["response"]["id"] for event in said if "response" in event} == {"resp_ann-2"}
    assert {event["item_id"] for event in said if "item_id" in event} == {"msg_ann-2"}


@pytest.mark.parametrize("sent", ["", "a b", "é", "x" * 129, "a;b", "a\tb", 'a"b'])
def test_an_id_that_is_not_safe_is_replaced(served: Running, sent: str) -> None:
    headers = [(b"x-request-id", sent.encode()), (b"content-type", b"application/json")]
    answers = [served.http.post("/v1/completions", json={"prompt": ""}, headers=headers) for _ in range(2)]
    made = {answer.headers["x-request-id"] for answer in answers}
    assert len(made) == 2 and all(len(one) == 32 for one in made)


def test_a_body_may_name_the_id_but_the_header_wins(served: Running) -> None:
    body = {**BODIES["/v1/completions"], "request_id": "body.1"}
    assert served.post("/v1/completions", body).json()["id"] == "cmpl-body.1"
    answer = served.post("/v1/completions", body, **{"x-request-id": "head.1"})
    assert answer.json()["id"] == "cmpl-head.1" and answer.headers["x-request-id"] == "head.1"
    status, error = served.error("/v1/completions", {**body, "request_id": "a b"})
    assert status == 400 and error["param"] == "request_id" and "up to 128 letters, digits" in error["message"]


def test_errors_have_the_id_and_their_kind_is_logged(served: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "specbranch")

    ids: list[str] = []

    def status(path: str, body: str, **headers: str) -> int:
        ids.append(f"wrong.{len(ids)}")
        sent = {"content-type": "application/json", "x-request-id": ids[-1], **headers}
        answer = served.http.post(path, content=body, headers=sent)
        assert answer.json()["error"]["request_id"] == ids[-1] == answer.headers["x-request-id"]
        return answer.status_code

    complete = "/v1/completions"
    assert [status(complete, '{"prompt": ""}'), status("/none", "{}"), status(complete, "{")] == [400, 404, 400]
    assert status(complete, '{"prompt": "x", "model": "y"}') == 404
    assert status(complete, "{}", host="evil.example") == 421
    assert status(complete, " " * 5_000_000) == 413
    kinds = [line["error"] for line in logged(caplog, *ids)]
    assert kinds == ["invalid_request_error", "not_found", "invalid_request_error", "model_not_found", "wrong_host",
                     "invalid_request_error"]  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
def test_an_error_in_the_middle_of_a_stream_has_the_id_and_is_logged(
    served: Running, path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specbranch.serve.answer_events import AnswerEvents

    caplog.set_level(logging.INFO, "specbranch")

    def late(self: AnswerEvents, index: int, chunk: Chunk) -> None:
        raise DeadlinePassed("It is late.")

    monkeypatch.setattr(AnswerEvents, "_add", late)
    sent = f"late{path}"
    response = served.post(path, {**BODIES[path], "stream": True}, **{"x-request-id": sent})
    assert response.status_code == 200 and "It is late." in response.text and sent in response.text
    if path != "/v1/responses":
        assert f'"request_id": "{sent}"' in response.text
    (line,) = logged(caplog, sent)
    assert (line["request_id"], line["error"], line["status"]) == (sent, "deadline_passed", 200)
