"""Telling a draft made by `distill` from other models by its folder alone, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specbranch.lab.inflation.recipe import is_inflation, read_inflation

KEY = "specbranch_draft"  # of its config.json


def is_draft_folder(name: str) -> bool:
    """Whether a name is a folder that `specbranch distill` made, or such a draft inflated."""
    return read_inflation(name).kind == "draft" if is_inflation(name) else draft_config(name) is not None


def draft_config(folder: str | Path) -> dict[str, Any] | None:
    """Return the draft's part of a folder's config.json; nothing if the folder is no draft, or not whole:
    config.json is written last."""
    try:
        found = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))[KEY]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if isinstance(found, dict) else {}
