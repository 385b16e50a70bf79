"""`specbranch serve` as a process: it tells where it is, serves, and ends as it should."""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from running import load_tiny

from specbranch.cli.main import run
from specbranch.errors import BadParameter
from specbranch.serve.run import bound, serve
from specbranch.serve.settings import ServerSettings

STREAM = {"prompt": "Smile", "max_tokens": 300, "ignore_eos": True, "stream": True}


@pytest.mark.slow
def test_a_server_that_is_stopped_finishes_its_answers(pair: tuple[str, str], tmp_path: Path) -> None:
    small = ["--device", "cpu", "--dtype", "float64", "--context-length", "400", "--port", "0", "--model-name", "tiny"]
    command = [sys.executable, "-m", "specbranch", "serve", "--target", pair[0], "--draft", pair[1], *small]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        log = (json.loads(line) for line in process.stderr)  # every line of it
        url = next(line["address"] for line in log if "address" in line)
        with httpx.stream("POST", f"{url}/v1/completions", json=STREAM, timeout=120) as response:
            heard = response.iter_lines()
            first = next(heard)
            process.send_signal(signal.SIGTERM)
            said = [first, *(one for one in heard if one)]
        rest = list(log)
        process.wait(120)
    assert said[-1] == "data: [DONE]" and '"finish_reason":"length"' in said[-2]
    request = next(line for line in rest if line["message"] == "request")
    assert request["completion_tokens"] == 300 and request["status"] == 200
    assert process.returncode == -signal.SIGTERM and rest[-1]["message"].startswith("Finished server process")


def test_a_port_that_is_taken_is_noticed_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import specbranch.cli.serve

    loaded: list[object] = []
    monkeypatch.setattr(specbranch.cli.serve, "load_llm", loaded.append)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["serve", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"Port {port} of 127.0.0.1 is taken: another server listens there. End that one" in said
    assert "Errno" not in said and not loaded


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("192.0.2.1", "host is '192.0.2.1', which is no address of this machine"),
        ("nowhere.invalid", "host is 'nowhere"),
    ],
)
def test_an_address_that_this_machine_does_not_have_gets_a_sentence(host: str, said: str) -> None:
    with pytest.raises(BadParameter, match=said):
        bound(ServerSettings(host=host, port=0))


def test_a_free_port_is_the_same_at_all_addresses_of_a_host() -> None:
    sockets = bound(ServerSettings(host="localhost", port=0))
    assert len({one.getsockname()[1] for one in sockets}) == 1
    for one in sockets:
        one.close()


def test_a_port_that_another_server_was_quicker_to_take_gets_a_sentence(pair: tuple[str, str]) -> None:
    settings = ServerSettings(port=0)
    sockets = bound(settings)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(sockets[0].getsockname())
        other.listen()
        handlers = logging.getLogger().handlers
        try:
            with pytest.raises(BadParameter, match="is taken: another server listens there"):
                serve(load_tiny(pair), settings, sockets)
        finally:
            logging.getLogger().handlers = handlers
            logging.captureWarnings(False)
