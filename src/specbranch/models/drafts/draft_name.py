"""The check that a folder is a draft that runs with its target only, without torch.

Owns the key in config.json that marks a draft of `specbranch distill`, and the marks of drafts that read their target's
features, by us and by others. Invariant: nothing but JSON is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from specbranch.models.files.sources import made_model

KEY = "specbranch_draft"  # in config.json
FEATURES = "features"  # in config.json, within `KEY` or beside it: the draft reads its target's features
KIND, EAGLE3 = "speculators_model_type", "eagle3"  # what speculators' layout says of such a draft
# ours; that of speculators; the original one, also written by SpecForge and others
FeatureLayout = Literal["specbranch", "speculators", "eagle3"]


def is_draft_folder(name: str) -> bool:
    """Return True for a folder that `specbranch distill` made, one with the recipe of a draft, or an EAGLE-3 head."""
    made = made_model(name)
    if made is not None:
        return made.is_draft
    return draft_config(name) is not None or feature_layout(name) is not None


def feature_layout(folder: str | Path) -> FeatureLayout | None:
    """Return the layout of a draft that reads its target's features; None for any other folder."""
    config = _config(folder)
    if FEATURES in config or (isinstance(own := config.get(KEY), dict) and FEATURES in own):
        return "specbranch" if KEY in config else None
    if config.get(KIND) == EAGLE3:
        return "speculators"
    classes = config.get("architectures")
    named = [str(name).lower() for name in classes] if isinstance(classes, list) else []
    return "eagle3" if any(EAGLE3 in name for name in named) else None


def draft_config(folder: str | Path) -> dict[str, Any] | None:
    """Return the draft's part of a folder's config.json; None if the folder is no draft or not complete."""
    config = _config(folder)
    if KEY not in config:
        return None
    return found if isinstance(found := config[KEY], dict) else {}


def _config(folder: str | Path) -> dict[str, Any]:
    """Return a folder's config.json; nothing if there is none, or it is damaged."""
    try:
        found = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
