"""Texts that were served and kept, as token ids: the format of their files, for the server and for `distill`.

Owns the lines, the names of the files and their order. It does not own the writing (`serve/keeping.py`), or what is
learned (`training/distill/served_text.py`). Invariant: a line is whole or it is left out; whatever a killed process has
left behind, all whole lines are read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbranch.errors import BadParameter

log = logging.getLogger("specbranch")

KEPT_TEXT_FORMAT = "specbranch-kept-text-1"
KEPT_PATTERN = "served-*.jsonl"
MOST_KEPT_TOKENS = 2048  # of one text, prompt and answer together


@dataclass(frozen=True, slots=True)
class KeptHead:
    """The first line of a file: whose texts these are."""

    target: str
    vocabulary: str  # fingerprint of the tokenizer
    tokens: int  # ids go from 0 to this, excluded

    def line(self) -> bytes:
        """Return it as a line."""
        values = {"format": KEPT_TEXT_FORMAT, "target": self.target, "vocabulary": self.vocabulary}
        return (json.dumps({**values, "tokens": self.tokens}) + "\n").encode()


@dataclass(frozen=True, slots=True)
class KeptText:
    """A prompt and its answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def line(self) -> bytes:
        """Return it as a line."""
        values = {"prompt": self.prompt, "answer": self.answer}
        return (json.dumps(values, separators=(",", ":")) + "\n").encode()


def fitted(prompt: Sequence[int], answer: Sequence[int], most: int = MOST_KEPT_TOKENS) -> KeptText:
    """Cut a text to `most` tokens: a long answer loses its end beyond half of them, then the prompt its beginning."""
    said = tuple(answer[: max(most - len(prompt), most // 2)])
    room = most - len(said)
    return KeptText(tuple(prompt[-room:]), said)


def kept_files(folder: Path) -> list[Path]:
    """Return the files of a folder, the oldest first."""
    return sorted(folder.glob(KEPT_PATTERN), key=lambda file: (len(file.name), file.name))


def kept_name(number: int) -> str:
    """Return the name of a file by its number."""
    return KEPT_PATTERN.replace("*", f"{number:08d}")


def kept_number(file: Path) -> int:
    """Return the number in a file's name; 0 for a name of another form."""
    digits = file.stem.partition("-")[2]
    return int(digits) if digits.isdecimal() else 0


def read_kept(folder: Path) -> Iterator[tuple[KeptHead, KeptText]]:
    """Yield the texts of a folder, the oldest first, each with the first line of its file.

    Lines that a crash has cut are counted in one warning. A file that is rotated away meanwhile is left out.
    """
    if not folder.is_dir():
        raise BadParameter(f"There is no folder {folder}. Name the folder of `specbranch serve --keep-text`.")
    cut = 0
    for file in kept_files(folder):
        try:
            lines = file.read_bytes().splitlines()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise BadParameter(f"{file} cannot be read ({error.strerror}). Run this as the server's user.") from None
        head = _head(_object(lines[0]) if lines else None)
        texts = [None if head is None else _text(_object(line), head.tokens) for line in lines[1:]]
        cut += texts.count(None) + (head is None)
        for text in texts:
            if head is not None and text is not None:
                yield head, text
    if cut:
        log.warning("%d lines in %s are damaged, as a crash leaves them, and are left out.", cut, folder)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _head(values: dict[str, Any] | None) -> KeptHead | None:
    if values is None or values.get("format") != KEPT_TEXT_FORMAT:
        return None
    target, vocabulary, tokens = (values.get(name) for name in ("target", "vocabulary", "tokens"))
    if not (isinstance(target, str) and isinstance(vocabulary, str) and isinstance(tokens, int)):
        return None
    return KeptHead(target, vocabulary, tokens)


def _text(values: dict[str, Any] | None, size: int) -> KeptText | None:
    prompt, answer = (_ids(values.get(name), size) if values else None for name in ("prompt", "answer"))
    return KeptText(prompt, answer) if prompt and answer else None


def _ids(values: Any, size: int) -> tuple[int, ...] | None:
    right = isinstance(values, list) and all(type(one) is int and 0 <= one < size for one in values)
    return tuple(values) if right else None
