"""The target of a finished draft, for jobs that are given the draft alone.

Owns the way from a draft's folder to its target's files. Invariant: a target that is not known by name is asked for.
"""

from __future__ import annotations

from specbranch.errors import BadParameter
from specbranch.models.drafts.draft_name import draft_config
from specbranch.models.files.store import KNOWN
from specbranch.training.making.writing import Fetch


def target_of(draft: str, given: str | None, fetch: Fetch) -> str:
    """Return the path of a draft's target: the given one, or the one that its folder names if it is known here."""
    named = given or (draft_config(draft) or {}).get("target")
    if given is None and named not in KNOWN:
        raise BadParameter(f"{draft} is a draft for {named}, which is no known name. Say where that is with --target.")
    return fetch(str(named))
