"""What a check of the doctor's found, as a sentence for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, and what to do about it."""

    level: Level
    about: str
    said: str
    advice: str = ""


def well(about: str, said: str, advice: str = "") -> Finding:
    """All is well with something."""
    return Finding("ok", about, said, advice)


def note(about: str, said: str, advice: str = "") -> Finding:
    """Something could be better."""
    return Finding("note", about, said, advice)


def problem(about: str, said: str, advice: str = "") -> Finding:
    """Something does not work."""
    return Finding("problem", about, said, advice)
