"""Records of a target's answers. Under the match rule an answer depends only on prompt, sampling and seed, so one
record serves all methods.

Owns the records and their folder. Invariant: a stored record is complete, and equals the real engine's answer token for
token.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbranch.config import SamplingParams
from specbranch.core.request import Request
from specbranch.files import write_whole
from specbranch.lab.recheck.repeat import repeat

if TYPE_CHECKING:
    from specbranch.engine import LLM

RECORD_FORMAT = 1
RECORDED_TOP = 8  # the most likely tokens that are kept at each position

STORED = "-stored"  # behind the identity of a target whose weights are as its file has them

TopRow = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Task:
    """A request to a target: everything that decides its answer under the match rule, except the model."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    eos_ids: tuple[int, ...]

    @property
    def request(self) -> Request:
        """The request for a worker."""
        return Request(self.params, self.seed, len(self.prompt), 0, "match", self.eos_ids)

    @property
    def sampling(self) -> str:
        """The sampling values that a row's choice depends on, besides the tokens before it; greedy sampling has no
        seed."""
        aside = {"seed", "n", "logprobs", "max_tokens", "stop", "stop_token_ids"}
        aside |= set() if self.params.reasoning else {"reasoning"}  # older records do not have it
        shaping = {name: value for name, value in asdict(self.params).items() if name not in aside}
        return json.dumps([shaping, None if self.request.greedy else self.seed], sort_keys=True)

    def key(self, model: str) -> str:
        """Return the name of the task for one model."""
        ending = [self.params.max_tokens, self.params.stop, self.params.stop_token_ids, self.eos_ids]
        return sha256(json.dumps([RECORD_FORMAT, model, self.prompt, self.sampling, ending]).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Record:
    """A task and the target's answer."""

    task: Task
    tokens: tuple[int, ...]
    rows: tuple[TopRow, ...]  # at each token, what the target thought most likely there, before shaping

    @property
    def text(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return (*self.task.prompt, *self.tokens)


class Records:
    """A folder of records of one target, known by its identity; or texts of another target that stand for its own."""

    def __init__(self, folder: Path, model: str, texts: Path | None = None) -> None:
        """`texts` is a folder of records of any target; if given, all records come from there."""
        self.folder, self.model = folder / model[:16], model
        self._others = sorted(one for one in texts.iterdir() if one.is_dir()) if texts is not None else None

    def find(self, task: Task) -> Record | None:
        """Return the record of a task, if there is one; an unreadable one counts as none."""
        if self._others is None:
            return _found(task, self._path(task))
        named = [(one, one.name + how) for one in self._others for how in ("", STORED)]
        paths = [folder / f"{task.key(model)}.json" for folder, model in named]
        return next((found for path in paths if (found := _found(task, path)) is not None), None)

    def make(self, task: Task, llm: LLM) -> Record:
        """Let the target answer with the LLM's lossless method, and store the record."""
        output = repeat(llm, task.prompt, replace(task.params, logprobs=RECORDED_TOP), task.seed)
        record = Record(task, tuple(output.token_ids), tuple(row.top for row in output.logprobs or ()))
        held = {"format": RECORD_FORMAT, "tokens": record.tokens, "rows": record.rows}
        write_whole(self._path(task), json.dumps(held))
        return record

    def _path(self, task: Task) -> Path:
        return self.folder / f"{task.key(self.model)}.json"


def _found(task: Task, path: Path) -> Record | None:
    try:
        return _read(task, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read(task: Task, held: dict[str, Any]) -> Record:
    if held["format"] != RECORD_FORMAT:
        raise ValueError(f"format {held['format']}")
    rows = tuple(tuple((int(token), float(log)) for token, log in row) for row in held["rows"])
    return Record(task, tuple(held["tokens"]), rows)
