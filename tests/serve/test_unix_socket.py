"""A server at a unix socket: clients reach it, its file is its owner's, and no file of others is removed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import OpenAI
from running import Running, client_of, load_tiny, running, until

from specbranch.cli.main import run
from specbranch.errors import BadParameter
from specbranch.serve.settings import ServerSettings
from specbranch.serve.unix_socket import LONGEST_PATH, UnixSocket

ASKED = {"prompt": "Smile", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: the system takes no long ones."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def at_socket(pair: tuple[str, str]) -> Iterator[Running]:
    with tempfile.TemporaryDirectory() as name, running(load_tiny(pair), uds=Path(name) / "s", model_name="t") as found:
        yield found
        path = Path(name) / "s"
        assert path.is_socket()
    assert not path.exists()


def test_clients_reach_it_and_get_the_answers_of_a_port(at_socket: Running, served: Running) -> None:
    answer = at_socket.post("/v1/completions", ASKED).json()
    assert answer["choices"] == served.post("/v1/completions", ASKED).json()["choices"]
    client = OpenAI(base_url="http://socket/v1", api_key="none", http_client=client_of(at_socket.url), max_retries=0)
    stream = client.chat.completions.create(
        model="t", messages=[{"role": "user", "content": "Hi"}], stream=True, max_tokens=3
    )
    assert [event.choices[0].finish_reason for event in stream][-1] == "length"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_reaches_it(at_socket: Running) -> None:
    command = ["curl", "-s", "--unix-socket", at_socket.url.removeprefix("unix:"), "http://localhost/health"]
    assert subprocess.run(command, capture_output=True, timeout=60, check=True).stdout == b'{"status":"ok"}'


def test_a_host_name_does_not_matter_unless_some_are_allowed(
    at_socket: Running, pair: tuple[str, str], folder: Path
) -> None:
    for host in ("model.example", "", "anything:80"):
        assert at_socket.http.get("/version", headers={"host": host}).status_code == 200
    with running(load_tiny(pair), uds=folder / "s", allowed_hosts=("model.example",)) as server:
        assert server.http.get("/version", headers={"host": "model.example"}).status_code == 200
        assert server.http.get("/version", headers={"host": "other.example"}).status_code == 421


def test_its_clients_share_no_limit_of_one_address(pair: tuple[str, str], folder: Path) -> None:
    limits = {"max_per_address": 1, "max_connections": 3}
    with running(load_tiny(pair), uds=folder / "s", **limits) as server, ThreadPoolExecutor() as pool:
        with server.held():
            answers = [pool.submit(server.post, "/v1/completions", ASKED) for _ in range(3)]
            until(lambda: server.server._limits.requests == 3)
            with socket.socket(socket.AF_UNIX) as one:
                one.connect(str(folder / "s"))
                assert one.recv(2**16).startswith(b"HTTP/1.1 503")
        assert [answer.result().status_code for answer in answers] == [200] * 3


@pytest.mark.parametrize("mode", ["600", "660"])
def test_only_its_owner_opens_it_unless_a_mode_is_given(folder: Path, mode: str) -> None:
    settings = ServerSettings(uds=folder / "s") if mode == "600" else ServerSettings(uds=folder / "s", uds_mode=mode)
    before = os.umask(0o022)
    os.umask(before)
    unix = UnixSocket.of(settings)
    assert unix is not None and settings.is_local
    with unix.bind():
        assert oct(stat.S_IMODE((folder / "s").stat().st_mode)) == f"0o{mode}"
    assert os.umask(before) == before


def test_a_socket_is_replaced_only_if_nobody_listens(folder: Path) -> None:
    first, second = UnixSocket(folder / "s", 0o600), UnixSocket(folder / "s", 0o600)
    first.bind().close()  # as a server leaves it that was killed
    assert (folder / "s").is_socket()
    with second.bind():
        for refused in (first.check, first.bind):
            with pytest.raises(BadParameter, match=r"where another server listens\. End that one"):
                refused()
        first.remove()  # it is not its own any more
        assert (folder / "s").is_socket()
    second.remove()
    assert not (folder / "s").exists()


def test_other_files_and_impossible_paths_get_a_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "file").write_text("kept")
    (folder / "link").symlink_to(folder / "file")
    for name in ("file", "link"):
        assert run(["serve", "--uds", str(folder / name)]) == 2
        assert "which is a file and no socket. Choose another path." in capsys.readouterr().err
    assert (folder / "file").read_text() == "kept"
    assert run(["serve", "--uds", str(folder / "none" / "s")]) == 2
    assert "is no folder that this user can write to" in capsys.readouterr().err
    assert run(["serve", "--uds", str(folder / ("s" * LONGEST_PATH))]) == 2
    assert f"longer than {LONGEST_PATH} bytes" in capsys.readouterr().err
    assert run(["serve", "--uds", str(folder / "s"), "--uds-mode", "rw"]) == 2
    assert "expected three octal digits" in capsys.readouterr().err


@pytest.mark.slow
def test_the_process_removes_its_socket_when_it_is_stopped(pair: tuple[str, str], folder: Path) -> None:
    small = ["--device", "cpu", "--dtype", "float64", "--context-length", "400", "--uds", str(folder / "s")]
    command = [sys.executable, "-m", "specbranch", "serve", "--target", pair[0], "--draft", pair[1], *small]
    for end in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):  # what the first leaves behind, the second replaces
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert any(f'"address": "unix:{folder / "s"}"' in line for line in process.stderr)
            assert client_of(f"unix:{folder / 's'}").get("/health").status_code == 200
            process.send_signal(end)
            process.stderr.read()
            process.wait(120)
        assert (folder / "s").exists() == (end is signal.SIGKILL)
