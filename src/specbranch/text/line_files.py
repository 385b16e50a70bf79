"""Files with one item a line: prompts, or JSON such as saved answers.

Owns how they are read. Invariant: the error of a bad line names its number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specbranch.errors import BadParameter
from specbranch.text.tokenizer import check_text

EXPECTED_LINES = 'expected JSON lines: on each line a text, {"prompt": …} or {"turns": [ … ]}.'


def numbered_lines(text: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield each line that is not blank, with words that name it in an error."""
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON may hold U+2028 and the like as they are
        if line.strip():
            yield f"{name}, line {number}", line


def json_value(line: str, where: str, expected: str) -> Any:
    """Return the value of a line of JSON. A repeated key is refused, because readers differ in which one they take."""
    try:
        return json.loads(line, object_pairs_hook=_with_each_key_once)
    except (ValueError, RecursionError) as error:
        raise BadParameter(f"{where} is no JSON ({error}); {expected}") from None


def prompts_in(file: Path) -> list[str]:
    """Return the prompts of a file: one a line, as JSON if its name says so."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadParameter(f"The prompts in {file} cannot be read: {error}.") from error
    is_json = file.suffix in (".jsonl", ".json")
    prompts = []
    for where, line in numbered_lines(text, str(file)):
        prompts.append(_prompt(line, where) if is_json else line)
        check_text(prompts[-1], f"The prompt of {where}")
    if not prompts:
        raise BadParameter(f"{file} holds no prompt; expected one a line.")
    return prompts


def categories_in(file: Path) -> list[str]:
    """Return the "category" of each prompt of a file that `prompts_in` has read, or else the file's name."""
    lines = (line for _, line in numbered_lines(file.read_text(encoding="utf-8"), str(file)))
    if file.suffix not in (".jsonl", ".json"):
        return [file.stem for _ in lines]
    values = [json.loads(line) for line in lines]
    named = [value.get("category") if isinstance(value, dict) else None for value in values]
    return [name if isinstance(name, str) and name else file.stem for name in named]


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} comes twice")
    return found


def _prompt(line: str, where: str) -> str:
    found = json_value(line, where, EXPECTED_LINES)
    if isinstance(found, dict):
        turns = found.get("turns")
        first = turns[0] if isinstance(turns, list) and turns else None
        found = found.get("prompt", first)
    if not isinstance(found, str):
        raise BadParameter(f"{where} has no prompt; {EXPECTED_LINES}")
    return found
