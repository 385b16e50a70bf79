"""A server exchanges its draft for whoever has an admin key, and for nobody else."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from running import PROMPT, Running, load_tiny, running

from specbranch import LLM
from specbranch.cli.main import run
from specbranch.serve.keys import new_key

ADMIN_DRAFT, COMPLETE = "/admin/draft", "/v1/completions"
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "seed": 3, "temperature": 0.8}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_without_admin_keys_nobody_changes_the_server(served: Running, pair: tuple[str, str]) -> None:
    status, error = served.error(ADMIN_DRAFT, {"draft": pair[1]})
    assert (status, error["code"]) == (403, "no_admin_keys") and "--admin-keys FILE" in error["message"]
    assert served.post("/admin/other", {}).status_code == 403


def test_only_an_admin_key_opens_and_mistakes_leave_the_draft(
    pair: tuple[str, str], tiny_draft: Path, tmp_path: Path
) -> None:
    clients, admins = tmp_path / "keys.txt", tmp_path / "admins.txt"
    client, admin = new_key(clients, "ann"), new_key(admins, "root")
    foreign = shutil.copytree(tiny_draft, tmp_path / "foreign")
    config = json.loads((foreign / "config.json").read_text())
    config["specbranch_draft"]["target_fingerprint"] = "0" * 64
    (foreign / "config.json").write_text(json.dumps(config))
    with running(load_tiny(pair), keys=clients, admin_keys=admins) as server:

        def exchange(draft: Any, key: str) -> tuple[int, Any]:
            answer = server.post(ADMIN_DRAFT, {"draft": draft}, **bearer(key))
            return answer.status_code, answer.json().get("error", {}).get("code")

        assert server.post(ADMIN_DRAFT, {"draft": pair[1]}).status_code == 401
        assert exchange(pair[1], client) == exchange(pair[1], admin + "x") == (401, "invalid_admin_key")
        assert server.post(COMPLETE, BODY, **bearer(admin)).status_code == 401  # it is for changes alone
        text = server.post(COMPLETE, BODY, **bearer(client)).json()["choices"][0]["text"]
        for draft in (str(tmp_path / "none"), str(foreign), "tcp://127.0.0.1:9", str(clients)):
            assert exchange(draft, admin) == (400, "draft_not_taken"), draft
        said = server.post(ADMIN_DRAFT, {"draft": str(foreign)}, **bearer(admin)).json()["error"]["message"]
        assert said.startswith("The draft stays as it was: ") and "was made for" in said
        assert exchange("", admin)[0] == exchange(7, admin)[0] == 400
        done = server.post(ADMIN_DRAFT, {"draft": str(tiny_draft)}, **bearer(admin))
        assert done.status_code == 200 and done.json()["draft"] == str(tiny_draft), done.text
        assert server.post(COMPLETE, BODY, **bearer(client)).json()["choices"][0]["text"] == text
        assert exchange(pair[1], admin)[0] == 200


@pytest.mark.slow
def test_streams_go_on_through_an_exchange_and_a_second_one_waits_for_its_turn(
    pair: tuple[str, str], reference: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admins = tmp_path / "admins.txt"
    key = bearer(new_key(admins, "root"))
    gate, begun, load = threading.Event(), threading.Event(), LLM.load_draft

    def slow(llm: LLM, draft: str) -> Any:
        begun.set()
        gate.wait(60)
        return load(llm, draft)

    monkeypatch.setattr(LLM, "load_draft", slow)
    with running(load_tiny(pair, method="tree"), admin_keys=admins) as server:
        texts: list[str] = []

        def ask() -> None:
            for _ in range(6):
                texts.append(server.post(COMPLETE, BODY).json()["choices"][0]["text"])

        statuses: list[int] = []

        def exchange() -> None:
            statuses.append(server.post(ADMIN_DRAFT, {"draft": pair[0]}, **key).status_code)

        threads = [threading.Thread(target=one) for one in (ask, ask, exchange)]
        for thread in threads:
            thread.start()
        assert begun.wait(60)
        second = server.post(ADMIN_DRAFT, {"draft": pair[0]}, **key)
        assert second.status_code == 409 and second.json()["error"]["code"] == "exchange_under_way"
        gate.set()
        for thread in threads:
            thread.join()
        assert statuses == [200] and len(texts) == 12 and len(set(texts)) == 1
        plain = server.post(COMPLETE, BODY | {"speculative": False}).json()["choices"][0]["text"]
        assert plain == texts[0]


def test_the_command_checks_admin_keys_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys.txt"
    new_key(keys, "ann")
    for arguments, words in (
        (["--admin-keys", str(tmp_path / "none")], "cannot be read"),
        (["--admin-keys", str(keys), "--keys", str(keys)], "every client could change the server"),
    ):
        assert run(["serve", *arguments]) == 2 and words in capsys.readouterr().err
