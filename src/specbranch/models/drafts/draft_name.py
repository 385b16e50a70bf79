"""The check that a folder is a draft, without torch.

Owns the key in config.json that marks a draft of `specbranch distill`. Invariant: nothing but JSON is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specbranch.models.files.sources import made_model

KEY = "specbranch_draft"  # in config.json


def is_draft_folder(name: str) -> bool:
    """Return True for a folder that `specbranch distill` made, or one with the recipe of a draft."""
    made = made_model(name)
    return draft_config(name) is not None if made is None else made.is_draft


def draft_config(folder: str | Path) -> dict[str, Any] | None:
    """Return the draft's part of a folder's config.json; None if the folder is no draft or not complete."""
    try:
        found = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))[KEY]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if isinstance(found, dict) else {}
