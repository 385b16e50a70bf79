"""`specbranch serve --replicas 2` as a process: it answers as one process does, and outlives its replicas.

One test, because Ray takes long to start: its steps are functions.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from specbranch import LLM, SamplingParams
from specbranch.cli.main import run
from specbranch.cluster.run import _serve, gpus_of_each
from specbranch.cluster.settings import Scale, Share
from specbranch.errors import BadParameter, MissingPackage
from specbranch.serve.keys import new_key
from specbranch.serve.settings import ServerSettings

WAIT = 240.0  # seconds after which a test gives up
TINY = ("--device", "cpu", "--dtype", "float64", "--context-length", "480", "--model-name", "tiny", "--port", "0")
PROMPTS = ("A branch is a guess about what the large model will say next.", "Smile", "The draft writes, and the target")
ASKED = {"max_tokens": 24, "ignore_eos": True, "seed": 3, "temperature": 0.8}
LONG = {"prompt": "Smile", "max_tokens": 440, "ignore_eos": True, "temperature": 0}


@dataclass
class Replicated:
    """The server, its log, and a client with a key."""

    process: subprocess.Popen[str]
    http: httpx.Client
    log: list[dict[str, Any]] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.http.base_url.port or 0

    def replicas(self) -> set[int]:
        """The process ids of the replicas."""
        title = f"ray::ServeReplica:specbranch-{self.port}-".encode()
        return {int(one.name) for one in processes() if title in read(one / "cmdline")}

    def kill_the_busiest(self) -> None:
        """Kill the replica that computes."""
        before = {one: cpu(one) for one in self.replicas()}
        time.sleep(0.3)
        os.kill(max(before, key=lambda one: cpu(one) - before[one]), signal.SIGKILL)


def processes() -> Iterator[Path]:
    return Path("/proc").glob("[0-9]*")


def read(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""


def cpu(process: int) -> int:
    fields = read(Path(f"/proc/{process}/stat")).rpartition(b")")[2].split()
    return int(fields[11]) + int(fields[12]) if fields else 0


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.2)


@contextmanager
def replicated(pair: tuple[str, str], keys: Path, key: str) -> Iterator[Replicated]:
    command = [sys.executable, "-m", "specbranch", "serve", "--target", pair[0], "--draft", pair[1], *TINY]
    with subprocess.Popen(
        [*command, "--replicas", "2", "--keys", str(keys)], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            first: list[dict[str, Any]] = []
            for line in process.stderr:
                assert line.startswith("{"), line + process.stderr.read()  # every line of it is JSON
                first.append(json.loads(line))
                if "address" in first[-1]:
                    break
            headers = {"authorization": f"Bearer {key}"}
            with httpx.Client(base_url=first[-1]["address"], timeout=WAIT, headers=headers) as http:
                found = Replicated(process, http, first)
                reader = threading.Thread(target=lambda: found.log.extend(map(json.loads, process.stderr or ())))
                reader.start()
                yield found
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(WAIT)
    reader.join(WAIT)


@pytest.mark.slow
def test_replicas_answer_as_one_process_does_and_outlive_a_kill(pair: tuple[str, str], tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    key = new_key(keys, "alice")
    options = {"context_length": 480}
    with (
        LLM(*pair, dtype="float64", device="cpu", options=options, method="autoregressive") as llm,
        replicated(pair, keys, key) as served,
    ):
        answers_are_those_of_one_process(served, llm)
        keys_and_metrics_are_those_of_the_address(served)
        a_replica_takes_no_request_of_others(served)
        only_this_machine_reaches_ray(served)
        a_killed_replica_ends_its_stream_with_an_error_object(served)
        a_request_without_a_first_token_is_written_by_another(served, llm)
        marks = {mark for one in served.replicas() for mark in marks_of(Path(f"/proc/{one}"))}
        files = files_of(served)
        assert files
        a_signal_lets_a_stream_finish(served)
    assert served.process.returncode == -signal.SIGTERM
    assert not files_of(served)
    the_log_tells_of_requests_and_names_replicas(served)
    assert marks and not [one for one in processes() if marks_of(one) & marks]


def files_of(served: Replicated) -> list[Path]:
    """The folders of the Ray that the server started."""
    return list(Path("/tmp/ray").glob(f"session_*_{served.process.pid}"))


def marks_of(process: Path) -> set[bytes]:
    """The mark of the Ray that a process belongs to."""
    return {part for part in read(process / "environ").split(b"\0") if part.startswith(b"SPECBRANCH_RAY=")}


def answers_are_those_of_one_process(served: Replicated, llm: LLM) -> None:
    params = SamplingParams.from_dict(ASKED)
    for prompt in PROMPTS:
        expected = llm.generate(prompt, params).text
        whole = served.http.post("/v1/completions", json={"prompt": prompt, **ASKED})
        assert whole.json()["choices"][0]["text"] == expected
        assert streamed(served, {"prompt": prompt, **ASKED}) == (expected, None)


def streamed(served: Replicated, body: dict[str, Any], after_first: Callable[[], None] = lambda: None) -> Any:
    """Return the text of a stream, and the error in it."""
    text, error, is_done = "", None, False
    with served.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                error = event.get("error", error)
                text += "".join(choice["text"] for choice in event.get("choices", ()))
                after_first()
                after_first = lambda: None  # noqa: E731
            is_done = is_done or line == "data: [DONE]"
    assert is_done
    return text, error


def keys_and_metrics_are_those_of_the_address(served: Replicated) -> None:
    assert served.http.post("/v1/completions", json=ASKED, headers={"authorization": ""}).status_code == 401
    until(lambda: served.http.get("/ready").json()["replicas"] == 2)
    text = served.http.get("/metrics").text
    declared = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(declared) == len(set(declared))
    counts = dict(re.findall(r'^specbranch:generation_tokens_total\{replica="(\w+)".* (\d+)$', text, re.MULTILINE))
    assert len(counts) == 2 and sum(map(int, counts.values())) == 2 * len(PROMPTS) * ASKED["max_tokens"]
    assert 'specbranch:replicas{replica="front"} 2' in text


def only_this_machine_reaches_ray(served: Replicated) -> None:
    """All of its ports are on loopback, but one of each replica, which Ray lets nobody choose; that wants a key."""
    (mark,) = {mark for one in served.replicas() for mark in marks_of(Path(f"/proc/{one}"))}
    own = [one for one in processes() if mark in marks_of(one)]
    assert len(own) > 4 and sum(len(everywhere(one)) for one in own) <= 2


def everywhere(process: Path) -> set[int]:
    """The ports at which a process listens for other machines."""
    rows = [*rows_of("tcp"), *rows_of("tcp6")]
    kept = sockets_of(process)
    return {
        int(row[1].partition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and not row[1].partition(":")[0].endswith("0100007F") and row[9] in kept
    }


def rows_of(table: str) -> list[list[str]]:
    return [line.split() for line in read(Path(f"/proc/net/{table}")).decode().splitlines()[1:]]


def sockets_of(process: Path) -> set[str]:
    """The numbers of its sockets."""
    held = set()
    with suppress(OSError):
        for one in (process / "fd").iterdir():
            with suppress(OSError):
                held.add(str(one.readlink()).removeprefix("socket:[").rstrip("]"))
    return held


def a_replica_takes_no_request_of_others(served: Replicated) -> None:
    for port in {port for process in served.replicas() for port in listening(process)}:
        with suppress(httpx.HTTPError):  # Ray's own ports speak something else
            answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "replica"
            return
    raise AssertionError("no replica listens")


def listening(process: int) -> set[int]:
    """The loopback ports at which a process listens."""
    held = sockets_of(Path(f"/proc/{process}"))
    return {
        int(row[1].partition(":")[2], 16)
        for row in rows_of("tcp")
        if row[3] == "0A" and row[1].startswith("0100007F") and row[9] in held
    }


def a_killed_replica_ends_its_stream_with_an_error_object(served: Replicated) -> None:
    _, error = streamed(served, LONG, served.kill_the_busiest)
    assert error["code"] == "replica_lost" and error["type"] == "server_error"
    assert served.http.post("/v1/completions", json={"prompt": "Smile", **ASKED}).status_code == 200


def a_request_without_a_first_token_is_written_by_another(served: Replicated, llm: LLM) -> None:
    params = SamplingParams(max_tokens=440, ignore_eos=True)
    expected = llm.generate("Smile", params).text
    found: list[httpx.Response] = []
    asked = {**LONG, "n": 8}  # for longer than it takes to see which replica has it
    ask = threading.Thread(target=lambda: found.append(served.http.post("/v1/completions", json=asked)))
    ask.start()
    until(lambda: re.search(r"^specbranch:requests_open\{.* 1$", metrics(served), re.MULTILINE) is not None)
    served.kill_the_busiest()
    ask.join(WAIT)
    assert {choice["text"] for choice in found[0].json()["choices"]} == {expected}
    assert 'specbranch:requests_resent_total{replica="front"} 0' not in metrics(served)


def metrics(served: Replicated) -> str:
    return str(served.http.get("/metrics").text)


def a_signal_lets_a_stream_finish(served: Replicated) -> None:
    text, error = streamed(served, LONG, lambda: served.process.send_signal(signal.SIGTERM))
    assert text and error is None


def the_log_tells_of_requests_and_names_replicas(served: Replicated) -> None:
    lines = [line for line in served.log if line["message"] == "request" and line["status"] == 200]
    answered = [line for line in lines if line.get("path") == "/v1/completions" and "lost" not in line]
    assert answered and all(line["key"] == "alice" and line["replica"] for line in answered)
    assert all(line["completion_tokens"] > 0 for line in answered)
    assert not [line for line in served.log if line["level"] == "error"]
    assert [line for line in lines if line.get("lost")] and [line for line in lines if line.get("resent")]


@pytest.mark.slow  # it starts Ray
def test_a_model_that_cannot_be_loaded_is_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "specbranch", "serve", "--target", str(tmp_path), "--port", "0", "--replicas", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Error: ") and str(tmp_path) in done.stderr.splitlines()[-1]


def test_more_gpus_than_this_machine_has_are_a_sentence() -> None:
    scale = Scale(replicas=2, replica_gpus=1.0)
    with pytest.raises(BadParameter, match="2 replicas with 1 GPUs each need 2 GPUs, and Ray finds 1 on this machine"):
        gpus_of_each(scale, 1.0)
    assert gpus_of_each(scale, 2.0) == 1.0
    assert gpus_of_each(replace(scale, ray_address="auto"), 0.0) == 1.0  # a cluster may get more
    assert [gpus_of_each(Scale(replicas=2), there) for there in (0.0, 1.0, 8.0)] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    "command",
    [["serve", "--port", "0", "--replicas", "1", "--ray"], ["draft-worker", "--on-ray", "1", "--ray-address"]],
)
def test_a_ray_cluster_that_is_not_there_is_a_sentence_at_once(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    assert run([*command, nobody]) == 2
    assert f"No Ray cluster answers at '{nobody}' (Connection refused)" in capsys.readouterr().err


def test_options_of_replicas_need_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--port", "0", "--max-replicas", "3"]) == 2
    assert "max_replicas: this needs --replicas N" in capsys.readouterr().err


def test_a_ray_without_serve_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.delitem(sys.modules, "ray.serve", raising=False)
    with pytest.raises(MissingPackage, match=r"Replicas need Ray Serve .*pip install 'specbranch\[ray\]'"):
        _serve({}, ServerSettings(), Scale(), Share(1.0, 0.0), [])


def test_without_ray_a_sentence_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(["serve", "--port", "0", "--replicas", "2"]) == 2
    assert "pip install 'specbranch[ray]'" in capsys.readouterr().err
