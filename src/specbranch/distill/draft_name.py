"""Telling a draft made by `distill` from other models by its folder alone, without torch."""

from __future__ import annotations

import json
from pathlib import Path

KEY = "specbranch_draft"  # of its config.json


def is_draft_folder(name: str) -> bool:
    """Whether a name is a folder that `specbranch distill` made."""
    try:
        return KEY in json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False
