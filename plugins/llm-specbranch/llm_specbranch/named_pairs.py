"""Pairs that the user has named, each a model of its own: `specbranch-pairs.json` in LLM's folder.

{"big": {"target": "Qwen/Qwen2.5-7B-Instruct", "draft": "Qwen/Qwen2.5-0.5B-Instruct"}} makes `llm -m specbranch/big`.

Owns the file's form. Invariant: a damaged file costs its own models alone. `llm` goes on and says what is wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import llm
from pydantic import ValidationError

from llm_specbranch.options import SpecBranchOptions

FILE = "specbranch-pairs.json"


def named_pairs() -> dict[str, SpecBranchOptions]:
    """Return the options of each named pair."""
    path: Path = llm.user_dir() / FILE  # type: ignore[no-untyped-call]
    if not path.is_file():
        return {}
    try:
        return {name: SpecBranchOptions(**options) for name, options in _read(path).items()}
    except (OSError, ValueError) as error:
        print(f"{path} is left out: {_reason(error)}. Expected {{NAME: {{OPTION: VALUE}}}}.", file=sys.stderr)
        return {}


def _read(path: Path) -> dict[str, dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not all(isinstance(options, dict) for options in found.values()):
        raise ValueError("it is no JSON object of objects")
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
    return str(error)
