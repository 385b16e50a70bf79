"""Files with one thing a line: prompts, or JSON such as saved answers.

Owns how they are read. Invariant: what is wrong with a line is said with its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specbranch.errors import BadParameter
from specbranch.text.tokenizer import check_text

EXPECTED = 'expected JSON lines: on each line a text, {"prompt": …} or {"turns": [ … ]}.'


def numbered_lines(text: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield each line that is not blank, with the words that tell where it stands."""
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON may hold U+2028 and the like as they are
        if line.strip():
            yield f"{name}, line {number}", line


def json_value(line: str, where: str, expected: str) -> Any:
    """Return what a line of JSON holds."""
    try:
        return json.loads(line)
    except ValueError as error:
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


def _prompt(line: str, where: str) -> str:
    found = json_value(line, where, EXPECTED)
    if isinstance(found, dict):
        turns = found.get("turns")
        first = turns[0] if isinstance(turns, list) and turns else None
        found = found.get("prompt", first)
    if not isinstance(found, str):
        raise BadParameter(f"{where} has no prompt; {EXPECTED}")
    return found
