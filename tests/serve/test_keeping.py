"""Served text is kept only where that is asked for: as token ids, in private files of bounded size, without delaying
anybody."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from running import PROMPT, Running, Visitor, load_tiny, running, until

from specbranch.cli.main import run
from specbranch.errors import BadParameter
from specbranch.kept_text import KeptHead, KeptText, fitted, kept_files, read_kept
from specbranch.serve.keeping import Keeper, KeptFolder
from specbranch.serve.keys import new_key

HEAD = KeptHead("tiny", "f" * 64, 421)
CHAT, COMPLETE, RESPOND = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TALK = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "seed": 3}
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "seed": 3}


def kept_in(folder: Path) -> list[KeptText]:
    return [text for _, text in read_kept(folder)]


def text_of(number: int, length: int = 40) -> KeptText:
    return KeptText((number % 400, 1, 2), tuple(at % 400 for at in range(length)))


def metric(server: Running, name: str) -> float:
    lines = [line for line in server.http.get("/metrics").text.splitlines() if line.startswith(f"specbranch:{name}")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_answers_are_kept_whole_streamed_and_of_every_endpoint_unless_the_client_says_no(
    pair: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, keys = tmp_path / "kept", tmp_path / "keys.txt"
    key = new_key(keys, "secret-name")
    with caplog.at_level(logging.WARNING), running(load_tiny(pair), keep_text=folder, keys=keys) as server:
        assert "prompts and answers of all clients are written" in caplog.text and '"store": false' in caplog.text
        headers = {"authorization": f"Bearer {key}", "x-request-id": "secret-id"}

        def post(path: str, body: dict[str, Any]) -> Any:
            return server.post(path, body, **headers)

        said = post(COMPLETE, BODY).json()["choices"][0]["text"]
        post(COMPLETE, {**BODY, "stream": True})
        post(COMPLETE, {**BODY, "n": 2, "prompt": ["One", "Two"], "user": "secret-user"})
        post(CHAT, TALK | {"store": True})
        post(RESPOND, {"input": PROMPT, "max_output_tokens": 12})
        until(lambda: metric(server, "kept_texts_total") == 8)
        for path, body in ((CHAT, TALK), (COMPLETE, BODY), (COMPLETE, {**BODY, "stream": True})):
            post(path, body | {"store": False})
            post(path, body | {"store": "false"})  # of no known form: rather not
        post(RESPOND, {"input": PROMPT, "max_output_tokens": 12, "store": False})
        post(COMPLETE, {**BODY, "max_tokens": 0, "echo": True})  # nothing is answered
        tokenizer = server.engine.tokenizer
    kept = kept_in(folder)
    assert len(kept) == 8 and kept[0] == kept[1]
    assert list(kept[0].prompt) == tokenizer.encode(PROMPT) and tokenizer.decode(list(kept[0].answer)) == said
    written = b"".join(file.read_bytes() for file in folder.iterdir())
    assert b"secret" not in written and key.encode() not in written and PROMPT.encode() not in written


def test_nothing_is_kept_unless_it_is_asked_for(served: Running) -> None:
    served.post(COMPLETE, BODY)
    assert metric(served, "kept_texts_total") == 0


def test_an_answer_that_nobody_got_is_not_kept(pair: tuple[str, str], tmp_path: Path) -> None:
    with running(load_tiny(pair), keep_text=tmp_path / "kept") as server:
        visitor = Visitor(server.url, COMPLETE, {**BODY, "max_tokens": 400, "stream": True})
        visitor.hear(b"data: ")
        visitor.leave()
        until(server.is_idle)
        late = server.post(COMPLETE, {**BODY, "max_tokens": 440, "deadline": 0.001})
        assert late.status_code == 408
        assert server.post(COMPLETE, BODY).status_code == 200
    assert len(kept_in(tmp_path / "kept")) == 1


def test_folders_and_files_are_their_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keeper = Keeper(tmp_path / "deep" / "kept", 1 << 20, HEAD)
        keeper.keep([1, 2], [3])
        keeper.close()
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "deep" / "kept").iterdir()}
    assert modes == {0o600} and stat.S_IMODE((tmp_path / "deep" / "kept").stat().st_mode) == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "file").touch()
    for name, words in (("open", "Others on this machine can open .*755"), ("file", "is no folder")):
        with pytest.raises(BadParameter, match=words):
            Keeper(tmp_path / name, 1 << 20, HEAD)


def test_the_oldest_files_go_and_the_limit_holds(tmp_path: Path) -> None:
    limit = 1 << 16
    folder = KeptFolder(tmp_path / "kept", limit, HEAD)
    line = len(text_of(0).line())
    for number in range(3 * limit // line):
        folder.append(text_of(number))
        assert sum(file.stat().st_size for file in kept_files(tmp_path / "kept")) == folder.size <= limit
    folder.close()
    again = KeptFolder(tmp_path / "kept", limit, HEAD)  # what another server has left counts, and goes first
    oldest, size = kept_files(tmp_path / "kept")[0], again.size
    again.append(text_of(7))
    again.append(text_of(8, length=1900))
    assert not oldest.exists() and size > limit * 3 // 4 and again.size <= limit
    again.close()
    assert kept_in(tmp_path / "kept")[-1] == text_of(8, length=1900)


def test_texts_that_were_deleted_meanwhile_count_no_more(tmp_path: Path) -> None:
    folder = KeptFolder(tmp_path / "kept", 1 << 16, HEAD)
    for number in range(200):
        folder.append(text_of(number))
    for file in kept_files(tmp_path / "kept"):
        file.unlink()
    folder.append(text_of(7))
    folder.close()
    assert kept_in(tmp_path / "kept") == [text_of(7)] and folder.size == len(HEAD.line()) + len(text_of(7).line())


def test_a_text_has_a_cap_and_the_answer_goes_before_a_long_prompt() -> None:
    prompt, answer = list(range(3000)), list(range(3000, 6000))
    assert fitted(prompt, answer) == KeptText(tuple(prompt[-1024:]), tuple(answer[:1024]))
    assert fitted(prompt[:10], answer) == KeptText(tuple(prompt[:10]), tuple(answer[:2038]))
    assert fitted(prompt, answer[:5]) == KeptText(tuple(prompt[-2043:]), tuple(answer[:5]))


class Stuck(KeptFolder):
    """A folder on a disk that hangs until it is let go."""

    gate = threading.Event()

    def append(self, text: KeptText) -> None:
        self.gate.wait(60)
        super().append(text)


def test_a_full_queue_drops_texts_and_delays_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbranch.serve.keeping.KeptFolder", Stuck)
    keeper = Keeper(tmp_path / "kept", 1 << 20, HEAD, most_queued=4)
    started = time.monotonic()
    for number in range(50):
        keeper.keep((number, 1), (2, 3))
    kept = keeper.kept()
    assert time.monotonic() - started < 5.0 and kept.texts == 0
    assert 45 <= kept.dropped["queue"] <= 46  # four wait, and the thread may hold one
    Stuck.gate.set()
    keeper.close()
    assert keeper.kept().texts == len(kept_in(tmp_path / "kept")) == 50 - keeper.kept().dropped["queue"]


def test_a_disk_that_refuses_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = Keeper(tmp_path / "kept", 1 << 20, HEAD)
    keeper.keep((1,), (2,))
    until(lambda: keeper.kept().texts == 1)

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("specbranch.serve.keeping.os.write", full)
        for _ in range(3):
            keeper.keep((1,), (2,))
        until(lambda: keeper.kept().dropped["disk"] == 3)
    assert caplog.text.count("No space left") == 1
    keeper._refused_until = 0.0  # ten seconds later
    keeper.keep((5,), (6,))
    keeper.close()
    assert kept_in(tmp_path / "kept") == [KeptText((1,), (2,)), KeptText((5,), (6,))]


def test_whole_lines_are_read_whatever_a_crash_has_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = KeptFolder(tmp_path / "kept", 1 << 20, HEAD)
    folder.append(text_of(1))
    folder.append(text_of(2))
    folder.close()
    (file,) = kept_files(tmp_path / "kept")
    whole = file.read_bytes()
    first = len(HEAD.line()) + len(text_of(1).line())
    for cut in range(len(whole)):
        file.write_bytes(whole[:cut])
        there = [text_of(1)] * (cut >= first - 1) + [text_of(2)] * (cut == len(whole) - 1)
        assert kept_in(tmp_path / "kept") == there, cut
    file.write_bytes(whole + b"\0" * 100 + b'\n{"prompt":[1],"answer":[9999]}\n[]\n')
    assert kept_in(tmp_path / "kept") == [text_of(1), text_of(2)] and "are damaged" in caplog.text
    KeptFolder(tmp_path / "kept", 1 << 20, HEAD).append(text_of(3))  # never behind a half line
    assert kept_in(tmp_path / "kept")[-1] == text_of(3) and len(kept_files(tmp_path / "kept")) == 2


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    first = KeptFolder(tmp_path / "kept", 1 << 20, HEAD)
    with pytest.raises(BadParameter, match="Another server keeps its texts"):
        KeptFolder(tmp_path / "kept", 1 << 20, HEAD)
    first.close()
    KeptFolder(tmp_path / "kept", 1 << 20, HEAD).close()


def test_the_command_refuses_what_it_cannot_keep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    for arguments, words in (
        (["--keep-text", str(tmp_path / "open")], "chmod 700"),
        (["--keep-text", str(tmp_path / "x"), "--keep-text-limit", "10"], "at least 65536"),
    ):
        assert run(["serve", *arguments]) == 2 and words in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    assert run(["serve", "--keep-text", str(tmp_path / "x"), "--print-config"]) == 0
    assert json.dumps(str(tmp_path / "x")) in capsys.readouterr().out
