"""One prompt answered once by one method (`PromptRun`), and the file that keeps such runs (`RunStore`).

Owns the JSON line of a run. Invariants: an appended run survives a kill. Opening the file drops an incomplete last
line; any other damage is an error that names the line. Only one process writes at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any, Self, TypeVar

from filelock import FileLock, Timeout

from specbranch.clock.shipped import WALL
from specbranch.errors import BadParameter
from specbranch.lab.bench.results import BASELINE, FORMER, setting_text

RUNS_FORMAT, RUNS_VERSION = "specbranch-bench-runs", 1

T = TypeVar("T")
RunKey = tuple[str, str, str, str, float, str, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRun:
    """A prompt run. `turns` holds `Stats.summary` of each turn; another engine gives at least tokens, ttft_seconds and
    decode_seconds."""

    pair: str
    suite: str
    method: str
    temperature: float
    prompt: str  # its id
    digest: str  # of its words: Prompt.digest
    repeat: int
    turns: tuple[Mapping[str, Any], ...]
    output: str  # output_digest of the tokens
    clock: str = WALL
    rule: str = "match"
    setting: Mapping[str, Any] = field(default_factory=dict)
    devices: int = 1  # how many the method takes
    models: str = ""  # a digest of target and draft
    charges: str = ""  # a digest of the clock's profile

    @property
    def key(self) -> RunKey:
        """The values that distinguish this run from every other."""
        setting = setting_text(self.setting)
        return (self.pair, self.suite, self.clock, self.method, self.temperature, setting, self.prompt, self.repeat)

    @property
    def is_baseline(self) -> bool:
        """True for plain decoding in this engine, the reference of all others."""
        return self.method == BASELINE

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from plain values."""
        names = {f.name for f in fields(cls)}
        values = {name: value for name, value in values.items() if name not in FORMER}
        if not values.keys() <= names:
            raise ValueError(f"unknown {', '.join(sorted(values.keys() - names))}")
        return cls(**{**values, "turns": tuple(values["turns"])})


def output_digest(turns: Iterable[Sequence[int]]) -> str:
    """Return a short digest of token ids, turn by turn; equal tokens give equal digests."""
    return hashlib.sha256(json.dumps([list(turn) for turn in turns]).encode()).hexdigest()[:16]


class RunStore:
    """The runs of one bench in a file of JSON lines, under a header with the plan."""

    def __init__(self, path: Path, plan: Mapping[str, Any]) -> None:
        """Open or create the file; refuse a file with another plan."""
        self.path = path
        self.plan = json.loads(json.dumps(plan))  # as it will be read back
        self.runs: list[PromptRun] = []
        self._lock = FileLock(path.with_name(f"{path.name}.lock"), timeout=0)
        try:
            self._file = self._open()
        except Timeout:
            raise BadParameter(
                f"Another bench is writing to {path.parent}. Wait for its end, or name another folder with --out."
            ) from None
        except OSError as error:
            raise BadParameter(
                f"The runs cannot be written to {path} ({error}). Name another folder with --out."
            ) from error
        if self._file.tell() == 0:
            self._write({"format": RUNS_FORMAT, "version": RUNS_VERSION, "plan": self.plan})

    @property
    def done(self) -> set[RunKey]:
        """The runs that need not be repeated."""
        return {one.key for one in self.runs}

    def refuse_another(self, like: PromptRun) -> None:
        """Raise if the store holds runs of the same pair with other models, or of the same clock with other charges."""
        for held in self.runs:
            if held.pair == like.pair and held.models != like.models:
                raise self._refused(f"of other models under the name {like.pair}")
            if held.clock == like.clock and held.charges != like.charges:
                raise self._refused(f"by another cost profile named {like.clock}", ", or rename it")

    def _refused(self, runs: str, otherwise: str = "") -> BadParameter:
        return BadParameter(f"{self.path.parent} holds runs {runs}. Name a new folder with --out{otherwise}.")

    def append(self, run: PromptRun) -> None:
        """Write a finished run at once."""
        self._write(asdict(run))
        self.runs.append(run)

    def close(self) -> None:
        """Close the file; every appended run is already in it."""
        self._file.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()  # a killed process loses nothing that was flushed

    def _open(self) -> IO[str]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        try:
            if self.path.exists():
                self._take_up()
            return self.path.open("a", encoding="utf-8")
        except BaseException:
            self._lock.release()
            raise

    def _take_up(self) -> None:
        whole = _without_torn_end(self.path)
        if not whole:
            return
        _check_header(_read(whole[0], 1, self.path, dict), self.plan, self.path)
        for number, line in enumerate(whole[1:], 2):
            self.runs.append(_read(line, number, self.path, PromptRun.from_dict))
        self._refuse_other_prompts()

    def _refuse_other_prompts(self) -> None:
        """Raise if the store holds runs of other prompts under the name of a requested suite."""
        held: dict[str, dict[str, None]] = {}  # the digests of each suite, in the order they were run
        for one in self.runs:
            held.setdefault(one.suite, {})[one.digest] = None
        for name, digests in held.items():
            if not _goes_on({name: list(digests)}, self.plan.get("suites", {})):
                raise self._refused(f"of other prompts under the name {name}")


def _without_torn_end(path: Path) -> list[bytes]:
    """Return the complete lines, and cut off what follows them."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return whole.split(b"\n")[:-1]


def _check_header(header: Mapping[str, Any], plan: Mapping[str, Any], path: Path) -> None:
    if header.get("format") != RUNS_FORMAT:
        raise BadParameter(f"{path} is not a file of bench runs. Give another folder with --out.")
    if header.get("version") != RUNS_VERSION:
        raise BadParameter(
            f"{path} has version {header.get('version')!r}; this specbranch resumes version {RUNS_VERSION}. "
            "Use a new --out."
        )
    before = header.get("plan", {})
    other = [name for name in sorted(before.keys() | plan.keys()) if not _goes_on(before.get(name), plan.get(name))]
    if other:
        changed = "; ".join(f"{name} was {_short(before.get(name))}, now {_short(plan.get(name))}" for name in other)
        raise BadParameter(
            f"{path} was started with other settings ({changed}). Use the same settings to resume, or a new --out to "
            "start again."
        )


def _goes_on(before: Any, now: Any) -> bool:
    """True if a plan continues an earlier one: equal values, and for suites other ones, or more or fewer of the same
    prompts."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return bool(before == now)
    return all(
        one == other for name in before.keys() & now.keys() for one, other in zip(before[name], now[name], strict=False)
    )


def _short(value: Any) -> str:
    """Return a setting in few words; for suites, their names and numbers of prompts."""
    if isinstance(value, dict):
        return ", ".join(f"{len(prompts)} of {name}" for name, prompts in value.items())
    return repr(value)


def _read(line: bytes, number: int, path: Path, kind: Callable[[dict[str, Any]], T]) -> T:
    """Parse one JSON line; an error names the line."""
    try:
        value = json.loads(line)
        if not isinstance(value, dict):
            raise ValueError("no object")
        return kind(value)
    except (KeyError, TypeError, ValueError) as error:
        raise BadParameter(
            f"{path}, line {number} is damaged ({error}). Remove that line, or start again in another folder."
        ) from None
