"""Downloads one file of a Python package from the index that this environment's pip uses; names no host itself.

Owns the question to pip where a file lies, and a download that can be resumed. Does not check the bytes: the caller
does. Invariant: bytes only go to the given `.part` file, which keeps what has arrived if the download breaks off.

The question goes to pip's internal finder. The documented way, a dry run with a report, is the fallback: it cannot be
resumed and leaves out credentials. Before pip 23.3, or on an index without separate metadata, it downloads the wheel.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import unquote, urlsplit, urlunsplit

from specbranch.errors import DownloadError

DOWNLOAD_BYTES = 1 << 18
TRIES = 4  # failed connections in a row, without a single byte
TIMEOUT = 60.0  # seconds without an answer
RETRY_WAIT = 1.0  # seconds before the next try, times the failed ones in a row
_NETWORK = (urllib.error.URLError, ConnectionError, TimeoutError, ssl.SSLError)
_log = logging.getLogger("specbranch")

_FINDER = """
import json, sys
from pip._internal.commands import create_command
from pip._vendor.packaging.specifiers import SpecifierSet
name, version = sys.argv[1:]
command = create_command("download")
options, _ = command.parse_args(["--no-deps", "--only-binary=:all:", "--quiet", "--retries=1", f"{name}=={version}"])
with command.main_context():
    finder = command._build_package_finder(options=options, session=command.get_default_session(options))
    best = finder.find_best_candidate(name, SpecifierSet(f"=={version}")).best_candidate
print(json.dumps({"url": best.link.url if best else None, "cert": options.cert, "client_cert": options.client_cert,
                  "proxy": options.proxy or None, "trusted_hosts": list(options.trusted_hosts)}))
"""


class Progress(Protocol):
    """A callback that shows how far a long step is: `total` and `done` in bytes, `note` in words."""

    def __call__(self, total: int, done: int, note: str) -> None:
        """Show the progress."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """The URL of a file, and how pip would connect to it."""

    url: str
    cert: str | None = None
    client_cert: str | None = None
    proxy: str | None = None
    trusted: bool = False  # pip's setting: do not check this host's certificate


class Refused(Exception):
    """The server wants something that only pip has: a login from a keyring, or a system certificate."""


def locate(package: str, version: str) -> Source:
    """Ask pip where the package's wheel lies; downloads the index page only."""
    done = _run("-c", _FINDER, package, version)
    found = _last_json(done.stdout) if done.returncode == 0 else _by_report(package, version)
    if not found.get("url"):
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise DownloadError(
            f"pip finds no {package}=={version} "
            f"({said[-1] if said else 'no connection, or the index does not have it'})."
        )
    return _source(found)


def _source(found: Mapping[str, Any]) -> Source:
    parts = urlsplit(found["url"])
    trusted = {parts.hostname, f"{parts.hostname}:{parts.port}"} & set(found.get("trusted_hosts", ()))
    url = urlunsplit((*parts[:4], ""))  # without the fragment, a digest that is not used
    return Source(url, found.get("cert"), found.get("client_cert"), found.get("proxy"), bool(trusted))


def _by_report(package: str, version: str) -> Mapping[str, Any]:
    options = ("--dry-run", "--no-deps", "--ignore-installed", "--only-binary=:all:", "--quiet", "--report", "-")
    done = _run("-m", "pip", "install", *options, f"{package}=={version}")
    if "No module named pip" in done.stderr:
        raise DownloadError(
            f"This Python ({sys.executable}) has no pip, which is asked where the file lies. Install pip into it."
        )
    installs = _last_json(done.stdout).get("install") or [{}] if done.returncode == 0 else [{}]
    return {"url": installs[0].get("download_info", {}).get("url")}


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)


def _last_json(output: str) -> dict[str, Any]:
    """Parse the JSON object at the end of the output; skips what pip prints before it."""
    start = 0 if output.startswith("{") else output.rfind("\n{") + 1
    try:
        found = json.loads(output[start:])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def download(source: Source, part: Path, size: int, progress: Progress) -> None:
    """Download the file into `part`, and continue from what it holds; reconnects if the connection breaks.

    Raises Refused if pip has to do it, and DownloadError if the connection stays broken; `part` keeps what arrived.
    """
    fruitless = 0
    while fruitless < TRIES:
        before = _length(part)
        try:
            return _fetch(source, part, size, progress)
        except (OSError, http.client.HTTPException) as error:
            _raise_if_hopeless(error)
            fruitless = 0 if _length(part) > before else fruitless + 1
            reason = str(error)
        time.sleep(RETRY_WAIT * fruitless)
    raise DownloadError(
        f"The download broke off after {_length(part) / 1e6:.1f} of {size / 1e6:.1f} MB ({reason}). "
        "What arrived is kept: run the same command again to go on from there."
    )


def _raise_if_hopeless(error: Exception) -> None:
    """Raise errors that another try cannot fix."""
    if isinstance(error, urllib.error.HTTPError):
        if error.code in (401, 403, 407):
            raise Refused(f"HTTP {error.code}") from error
        if error.code < 500 and error.code != 429:
            raise DownloadError(
                f"The server answers {error.code} {error.reason} for the file that the index names."
            ) from error
    elif isinstance(getattr(error, "reason", error), ssl.SSLCertVerificationError):
        raise Refused(str(error)) from error
    elif isinstance(error, OSError) and not isinstance(error, _NETWORK):
        raise error  # of the disk


def _fetch(source: Source, part: Path, size: int, progress: Progress) -> None:
    have = _length(part)
    if have >= size:
        have = 0  # complete but wrong: otherwise nobody would download it again
    with _open(source, have) as answer:
        have = have if getattr(answer, "status", None) == http.client.PARTIAL_CONTENT else 0
        note = f"resuming at {have / 1e6:.1f} MB" if have else "downloading"
        _log.info("%s: %s", part.name.removesuffix(".part"), note)
        with part.open("ab" if have else "wb") as out:
            done = _copy(answer, out, have, size, progress, note)
    if done < size:
        raise http.client.IncompleteRead(b"", size - done)


def _copy(answer: IO[bytes], out: IO[bytes], done: int, size: int, progress: Progress, note: str) -> int:
    progress(size, done, note)
    while chunk := answer.read(DOWNLOAD_BYTES):
        out.write(chunk)
        done += len(chunk)
        progress(size, done, note)
    return done


def _open(source: Source, offset: int) -> Any:
    parts = urlsplit(source.url)
    request = urllib.request.Request(urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], *parts[2:])))
    request.add_header("Accept-Encoding", "identity")
    if parts.username:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        request.add_unredirected_header("Authorization", f"Basic {b64encode(login.encode()).decode()}")
    if offset:
        request.add_header("Range", f"bytes={offset}-")
    proxies = {"http": source.proxy, "https": source.proxy} if source.proxy else None
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler(proxies), urllib.request.HTTPSHandler(context=_context(source))
    )
    return opener.open(request, timeout=TIMEOUT)


def _context(source: Source) -> ssl.SSLContext:
    """Return the TLS context that pip would use: its own setting, then that of requests, then the system's."""
    given = source.cert or next(
        (os.environ[name] for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE") if os.environ.get(name)), None
    )
    if given and not Path(given).exists():
        raise DownloadError(f"The certificate file {given} that pip is told to use does not exist.")
    folder = given is not None and Path(given).is_dir()
    context = ssl.create_default_context(cafile=None if folder else given, capath=given if folder else None)
    if source.client_cert:
        context.load_cert_chain(source.client_cert)
    if source.trusted:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def download_by_pip(package: str, version: str, part: Path) -> None:
    """Let pip download the wheel itself, with all its logins and certificates; this cannot be resumed."""
    with tempfile.TemporaryDirectory(dir=part.parent) as folder:
        done = _run(
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            folder,
            f"{package}=={version}",
        )
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise DownloadError(f"pip cannot download {package}=={version} ({reason}).")
        wheels[0].replace(part)
