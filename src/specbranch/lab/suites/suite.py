"""Suites of prompts in Spec-Bench's JSONL format: shipped ones, public ones from a folder or the Hub, and any other
file.

Owns the step from a name to prompts. Invariant: a suite has at least one prompt. Every prompt has an id that is unique
in its suite, and at least one turn that is not blank. Public prompts never become part of the package. No default,
preset or tuning run uses the suites `exam-…`: they test planners on prompts that nobody has tuned on. `refuse_exam`
keeps them out of a search.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbranch.errors import BadParameter, nearest

DATA_VARIABLE = "SPECBRANCH_DATA"
PROMPTS_FOLDER = Path(__file__).parent / "prompts"

PUBLIC = {
    "humaneval": "Python functions to complete (HumanEval)",
    "gsm8k": "grade-school arithmetic in words (GSM8K)",
    "mt_bench": "conversations of two turns (MT-bench)",
    "cnn_dm": "news articles to summarise (CNN/DailyMail)",
}
SHIPPED = {
    "own-code": "functions and classes to complete, in several languages",
    "own-math": "arithmetic in words",
    "own-chat": "conversations of two turns",
    "own-summary": "short articles to summarise",
}
ALL_SHIPPED = "own"
# Written on 2026-11-18, before the planner was changed. Do not read or measure them while tuning. Records of
# exam-grounded and exam-edits also have the given "text", which their turn contains.
EXAM = {
    "exam-questions": "exam for planners: questions of many kinds",
    "exam-grounded": "exam for planners: questions about a given text",
    "exam-translation": "exam for planners: translations between English and eight languages",
    "exam-edits": "exam for planners: edits of a given text or code",
}
ALL_EXAM = "exam"
GROUPS = {ALL_SHIPPED: tuple(SHIPPED), ALL_EXAM: tuple(EXAM)}
SUITES = {
    **PUBLIC,
    **SHIPPED,
    ALL_SHIPPED: "all four suites own-…",
    **EXAM,
    ALL_EXAM: "all four suites exam-…; not for tuning",
}

_EXPECTED = 'expected on each line {"question_id": …, "category": "…", "turns": ["…", …]}'


@dataclass(frozen=True, slots=True)
class Prompt:
    """A user's turns; the answers in between are the model's."""

    id: str
    category: str
    turns: tuple[str, ...]

    @property
    def digest(self) -> str:
        """A digest of the words, independent of the id."""
        return _digest(self.turns)


@dataclass(frozen=True, slots=True)
class Suite:
    """Prompts under one name, and their source."""

    name: str
    prompts: tuple[Prompt, ...]
    source: str

    def first(self, limit: int | None) -> Suite:
        """Return the suite with its first prompts only; None keeps all."""
        return self if limit is None else replace(self, prompts=self.prompts[:limit])


def load_suites(
    names: Sequence[str] = (), *, files: Sequence[Path] = (), data: Path | None = None, limit: int | None = None
) -> tuple[Suite, ...]:
    """Read suites by name and from files, each once, in the given order; keep the first `limit` prompts of each."""
    if limit is not None and limit < 1:
        raise BadParameter(f"The limit is {limit}; expected at least 1 prompt a suite.")
    suites = [load_suite(name, data) for name in _expanded(names)] + [read_suite(file) for file in dict.fromkeys(files)]
    if not suites:
        raise BadParameter(f"No suite was named. Name some of: {', '.join(SUITES)}; or give a file of prompts.")
    _refuse_twins(suites)
    return tuple(suite.first(limit) for suite in suites)


def load_suite(name: str, data: Path | None = None) -> Suite:
    """Read one suite by name: shipped, or public from the folder `data`, from $SPECBRANCH_DATA or from the Hub."""
    if name in SHIPPED or name in EXAM:
        return replace(read_suite(PROMPTS_FOLDER / f"{name}.jsonl", name), source="shipped")
    if name in PUBLIC:
        return _public(name, data)
    if name in GROUPS:
        raise BadParameter(f"{name!r} stands for several suites: {', '.join(GROUPS[name])}. Name one of them here.")
    raise BadParameter(
        f"Unknown suite {name!r}.{nearest(name, SUITES)} Shipped: {', '.join((*SHIPPED, *EXAM, *GROUPS))}. "
        f"Public: {', '.join(PUBLIC)}, each NAME.jsonl in the folder given by --data or {DATA_VARIABLE}, or in its "
        "folder 'prompts', else from the Hub. A file of prompts is given with --prompts FILE."
    )


def refuse_exam(suites: Iterable[Suite]) -> None:
    """Refuse to tune on the exam, by its name or by its file: then it would test nothing."""
    if names := [suite.name for suite in suites if suite.name in EXAM]:
        raise BadParameter(
            f"{', '.join(names)}: the exam tests planners on prompts that nobody has tuned on, so nothing is tuned on "
            f"it. Tune on other suites, such as {ALL_SHIPPED!r}."
        )


def read_suite(file: Path, name: str | None = None) -> Suite:
    """Read a file in Spec-Bench's format; blank lines are skipped."""
    try:
        # Not splitlines: JSON may hold U+2028 and the like as they are.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadParameter(f"The prompts in {file} cannot be read ({error}); {_EXPECTED}.") from error
    prompts = [_prompt(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise BadParameter(f"{file} holds no prompt, so there is nothing to measure; {_EXPECTED}.")
    _refuse_repeated_ids(prompts, str(file))
    return Suite(name or file.stem, tuple(prompts), str(file))


def conversation(turns: Sequence[str]) -> list[dict[str, str]]:
    """Return a user's turns as chat messages, with empty answers in between."""
    both = [({"role": "user", "content": words}, {"role": "assistant", "content": ""}) for words in turns]
    return [message for turn in both for message in turn][:-1]


def prompt_set(prompts: Iterable[tuple[str, str]]) -> str:
    """Return a digest of a set of (id, digest), independent of its order."""
    return _digest(sorted(prompts))


def _digest(parts: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _expanded(names: Sequence[str]) -> list[str]:
    """Split names at commas, expand 'own' and 'exam' to their four suites, and drop repeated names."""
    single = (name for several in names for name in several.split(",") if name)
    return list(dict.fromkeys(one for name in single for one in GROUPS.get(name, (name,))))


def _refuse_twins(suites: list[Suite]) -> None:
    names = [suite.name for suite in suites]
    for name in names:
        if names.count(name) > 1:
            where = " and ".join(suite.source for suite in suites if suite.name == name)
            raise BadParameter(
                f"Two suites are called {name!r} ({where}), and rows would be mixed up. Rename one of the files."
            )


def _refuse_repeated_ids(prompts: list[Prompt], where: str) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise BadParameter(f"{where} has question_id {prompt.id!r} twice. Give each prompt an id of its own.")
        seen.add(prompt.id)


def _prompt(line: str, where: str) -> Prompt:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise BadParameter(f"{where} is no JSON ({error}); {_EXPECTED}.") from None
    if not isinstance(value, dict):
        raise BadParameter(f"{where} is {_kind(value)}; {_EXPECTED}.")
    missing = [key for key in ("question_id", "category", "turns") if key not in value]
    if missing:
        raise BadParameter(f"{where} lacks {' and '.join(map(repr, missing))}; {_EXPECTED}.")
    return _checked(value["question_id"], value["category"], value["turns"], where)


def _checked(id: Any, category: Any, turns: Any, where: str) -> Prompt:
    if isinstance(id, bool) or not isinstance(id, (str, int)):
        raise BadParameter(f"{where}: question_id is {_kind(id)}; expected a text or a whole number.")
    if not isinstance(category, str):
        raise BadParameter(f"{where}: category is {_kind(category)}; expected a text.")
    if not isinstance(turns, list) or not turns:
        raise BadParameter(f"{where}: turns is {_kind(turns)}; expected a list with at least one text.")
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, str) or not turn.strip():
            raise BadParameter(f"{where}: turn {number} is {_kind(turn)}; expected a text that is not blank.")
    return Prompt(str(id), category, tuple(turns))


def _kind(value: Any) -> str:
    """Describe a JSON value in words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return "a text" if value.strip() else "a blank text"
    if isinstance(value, (list, dict)):
        noun = "object" if isinstance(value, dict) else "list"
        return f"an empty {noun}" if not value else f"an {noun}" if noun == "object" else f"a {noun}"
    return f"the number {value}"


def _public(name: str, data: Path | None) -> Suite:
    """Look in the given folder only; without one, in $SPECBRANCH_DATA, then on the Hub."""
    variable = os.environ.get(DATA_VARIABLE)
    folder = data or (Path(variable).expanduser() if variable else None)
    if folder is not None and not folder.is_dir():
        raise BadParameter(
            f"The folder of public suites {folder} does not exist. Give another with --data DIR or {DATA_VARIABLE}=DIR."
        )
    tried = [folder / f"{name}.jsonl", folder / "prompts" / f"{name}.jsonl"] if folder else []
    for file in tried:
        if file.is_file():
            return read_suite(file, name)
    if data is not None:
        raise _absent(name, tried, "")
    return _from_hub(name, tried)


def _from_hub(name: str, tried: list[Path]) -> Suite:
    from specbranch.lab.suites.hub import HubUnusable, fetch

    try:
        records, source = fetch(name)
    except HubUnusable as error:
        raise _absent(name, tried, f" {error}") from None
    prompts = tuple(
        _checked(id, category, turns, f"{source}, record {at}") for at, (id, category, turns) in enumerate(records, 1)
    )
    if not prompts:
        raise BadParameter(
            f"{source} holds no prompt; give a folder that has {name}.jsonl with --data or {DATA_VARIABLE}."
        )
    return Suite(name, prompts, source)


def _absent(name: str, tried: list[Path], hub: str) -> BadParameter:
    looked = f"looked for {' and '.join(map(str, tried))}" if tried else "no folder of public suites was given"
    return BadParameter(
        f"The public suite {name!r} was not found: {looked}.{hub} Give the folder that has {name}.jsonl with --data "
        "DIR or "
        f"{DATA_VARIABLE}=DIR. The suites that ship always work: {', '.join(SHIPPED)}, or {ALL_SHIPPED!r} for all four."
    )
