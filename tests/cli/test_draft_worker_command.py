"""`specbranch draft-worker` and `--draft tcp://…`: sentences for mistakes, the same texts, and a clean end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from in_process import Command

from small_tokenizers import byte_fallback, save
from specbranch import LLM, AsyncLLM, SamplingParams, engine_thread
from specbranch.assembly import ModelChoice, experience_key, make_served_draft
from specbranch.errors import ModelError
from specbranch.exec import process
from specbranch.exec.address import KEY_VARIABLE
from specbranch.exec.process import Process
from specbranch.models.runners.translating import TranslatingRunner
from tiny_pair import make_pair
from toy_worker import free_port, serving_draft

HANG = 60.0  # seconds: a guard against hangs
PROMPT = "def add(a, b):\n"


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--listen", "nonsense"), "--listen is 'nonsense'; expected HOST:PORT, such as 127.0.0.1:7351"),
        (("--listen", "0.0.0.0:0"), "is not this machine alone, so a link needs a secret. Set SPECBRANCH_LINK_KEY"),
        (("--tls-key", "key.pem"), "--tls-key is the private key of a certificate; give that, too"),
        (("--tls-cert", "none.pem"), "The certificate in none.pem cannot be used"),
        (("--on-ray", "1"), "On Ray, workers choose their addresses. Leave --listen"),
        (("--target", "smollm2-135m"), "A target alone was given; name the draft to serve"),
    ],
)
def test_a_mistake_ends_with_2_and_a_sentence(arguments: tuple[str, ...], said: str, command: Command) -> None:
    done = command("draft-worker", *(() if "--listen" in arguments else ("--listen", "127.0.0.1:0")), *arguments)
    assert done.code == 2 and said in done.err


def test_a_worker_gives_its_draft_the_window_that_was_asked_for(
    pair: tuple[str, str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows: list[int | None] = []

    def load(choice: ModelChoice, *_: object) -> None:
        windows.append(choice.draft_window)
        raise ModelError("It is not loaded here.")

    monkeypatch.setattr("specbranch.assembly.make_served_draft", load)
    for more in ((), ("--draft-window", "12")):
        done = command("draft-worker", "--listen", "127.0.0.1:0", "--target", pair[0], "--draft", pair[1], *more)
        assert done.code == 2 and "It is not loaded here." in done.err
    assert windows == [None, 12]


def test_a_port_that_is_taken_is_named_before_a_model_is_loaded(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = command("draft-worker", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert done.code == 2 and "where nobody can listen: Address already in use" in done.err


def test_a_worker_that_is_not_there_is_named_with_what_to_do(pair: tuple[str, str], command: Command) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    done = command("generate", "--target", pair[0], "--draft", address, "--device", "cpu", PROMPT)
    assert done.code == 2 and f"There is no draft from {address}" in done.err and "Start a worker" in done.err
    streams = command("generate", "--target", pair[0], "--draft", address, "--executor", "streams", PROMPT)
    assert streams.code == 2 and "Leave --executor out" in streams.err
    files = command("profile", "--target", pair[0], "--draft", address, "--out", "x.json")
    assert files.code == 2 and "this needs the draft's own files" in files.err
    looked = command("doctor", "--target", pair[0], "--draft", address, "--json")
    assert looked.code == 1 and "Start a worker" in json.loads(looked.out)["findings"][-1]["said"]


def test_an_engine_with_a_worker_writes_the_same_and_knows_the_draft(pair: tuple[str, str]) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    options = {"keep_experience": False}
    with LLM(pair[0], method="autoregressive", device="cpu", options=options) as plain:
        expected = plain.generate(PROMPT, params)
    choice = ModelChoice(pair[1], device="cpu", shorten=True)
    with serving_draft(make_served_draft(choice, pair[0])) as port:
        address = f"tcp://127.0.0.1:{port}"
        with LLM(pair[0], draft=address, method="pearl", device="cpu", options=options) as llm:
            answer = llm.generate(PROMPT, params)
            assert answer.token_ids == expected.token_ids and answer.stats["drafted"] > 0
            parts = llm.core.models.parts
            assert isinstance(parts.executor, Process) and parts.executor.served
            key = experience_key(ModelChoice(pair[0], device="cpu"), ModelChoice(address), "process", parts)
            assert key["draft"] == parts.executor.served.identity


def test_an_idle_engine_notices_that_its_worker_is_gone_and_back(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "TEND_SECONDS", 0.02)
    monkeypatch.setattr(process, "LONGEST_RESTART_WAIT", 0.05)
    served, port = make_served_draft(ModelChoice(pair[1], device="cpu", shorten=True), pair[0]), free_port()

    def is_idle_until(state: str) -> None:
        end = time.monotonic() + HANG
        while engine.draft_state != state:
            assert time.monotonic() < end, f"it stays {engine.draft_state}"
            time.sleep(0.01)

    with serving_draft(served, port):
        llm = LLM(pair[0], draft=f"tcp://127.0.0.1:{port}", device="cpu", options={"keep_experience": False})
        engine = AsyncLLM(llm)
        is_idle_until("ready")
    try:
        is_idle_until("lost")
        with serving_draft(served, port):
            is_idle_until("ready")
    finally:
        engine.shut_down()


def test_a_worker_with_another_vocabulary_is_refused_with_the_tokens_that_differ(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    other = make_pair(tmp_path)
    save(byte_fallback(), Path(other[1]))
    served = make_served_draft(ModelChoice(other[1], device="cpu", shorten=True), other[0])
    with (
        serving_draft(served) as port,
        pytest.raises(ModelError, match=r"different vocabularies: \d+ of \d+ shared token ids differ"),
    ):
        LLM(pair[0], draft=f"tcp://127.0.0.1:{port}", device="cpu", options={"keep_experience": False})


def test_a_worker_translates_for_no_target(pair: tuple[str, str]) -> None:
    """Not for the default one either, which a worker has if none is named."""
    served = make_served_draft(ModelChoice(pair[1], device="cpu", shorten=True), "smollm2-135m")
    assert not isinstance(served.drafter.runner, TranslatingRunner)


@contextmanager
def worker(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A worker as a user starts it, and its address."""
    command = [sys.executable, "-m", "specbranch", "draft-worker", "--listen", "127.0.0.1:0", *arguments]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    assert started.stdout
    line = started.stdout.readline()
    try:
        yield started, line.rsplit("--draft ", 1)[1].strip().rstrip(".")
    finally:
        started.kill()
        started.communicate()


@pytest.mark.slow
def test_a_worker_serves_commands_until_it_is_interrupted(pair: tuple[str, str], command: Command) -> None:
    asked = ("--target", pair[0], "--device", "cpu", "--max-tokens", "16", "--ignore-eos", "--json", PROMPT)
    with worker("--draft", pair[1], "--target", pair[0], "--draft-device", "cpu") as (started, address):
        linked = command("generate", "--draft", address, "--method", "pearl", *asked).answers()[0]
        plain = command("generate", "--method", "autoregressive", *asked).answers()[0]
        assert linked["token_ids"] == plain["token_ids"] and linked["stats"]["drafted"] > 0
        looked = command("doctor", "--target", pair[0], "--device", "cpu", "--draft", address, "--json")
        findings = [one for one in json.loads(looked.out)["findings"] if one["about"] == "Link"]
        assert looked.code == 0 and "serves" in findings[0]["said"] and "a round trip takes" in findings[1]["said"]
        started.send_signal(signal.SIGINT)
        _, said = started.communicate(timeout=30.0)
        assert started.returncode == 0 and "Stopped; targets go on without this draft." in said
        assert "has joined" in said and "Traceback" not in said
