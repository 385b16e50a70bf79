"""Pairs known by name: a target, and a draft that was distilled for it.

Owns the table of pairs and where their drafts are. A pair's draft has the pair's name, so it can be named alone, too.
It loads no model. Invariant: a returned folder holds a whole draft of the pair's own target.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbranch.errors import BadParameter, ModelError, unknown
from specbranch.models.drafts.draft_name import draft_config

DRAFTS_VARIABLE = "SPECBRANCH_DRAFTS"
IN_PACKAGE = Path(__file__).parent / "drafts"
PREDICTORS = Path(__file__).parent / "predictors"  # H-RAD of each pair, by its name
IN_CHECKOUT = Path(__file__).parents[2] / "drafts"
_SMOLLM2 = "3fd491c8066dd9dc1a2bf6796701526c82817d95c0ecabacdef3013c2b8bbbaa"


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and the draft that has the pair's name."""

    name: str
    target: str
    about: str
    # of the target's embedding, as a draft's config.json has it; None: checked when the draft is loaded
    target_fingerprint: str | None = None


PAIRS: dict[str, Pair] = {
    pair.name: pair
    for pair in (
        Pair(
            "smollm2-weak",
            "smollm2-135m",
            "SmolLM2-135M-Instruct and a poorly aligned draft, for experiments",
            _SMOLLM2,
        ),
        Pair("smollm2-default", "smollm2-135m", "SmolLM2-135M-Instruct and the draft inside the package", _SMOLLM2),
        Pair(
            "smollm2-strong",
            "smollm2-135m",
            "SmolLM2-135M-Instruct and a well aligned, dear draft, for experiments",
            _SMOLLM2,
        ),
    )
}
DEFAULT_PAIR = "smollm2-default"


class MissingDraft(ModelError):
    """A pair whose draft is not on this machine."""


@dataclass(frozen=True, slots=True)
class Card:
    """What a draft's folder says of itself; None for a figure that it does not have."""

    path: Path
    layers: int
    megabytes: float
    top1: float | None
    top3: float | None


def find_pair(name: str) -> Pair:
    """Return the pair of that name; an unknown name is refused with the known ones."""
    if name not in PAIRS:
        raise unknown("pair", str(name), PAIRS)
    return PAIRS[name]


def chosen_models(pair: str | None, target: str | None, draft: str | None) -> tuple[str, str | None]:
    """Return the names of target and draft: those of `pair`, those named, or the default pair's if none is named."""
    if pair is not None and (target, draft) != (None, None):
        given = " and ".join(
            f"{what} {name!r}" for what, name in (("target", target), ("draft", draft)) if name is not None
        )
        raise BadParameter(
            f"Pair {pair!r} was given together with {given}, but a pair is both. Give either the pair, or target and "
            "draft."
        )
    if (target, draft) != (None, None):
        return PAIRS[DEFAULT_PAIR].target if target is None else target, draft
    found = find_pair(DEFAULT_PAIR if pair is None else pair)
    return found.target, found.name


def draft_path(name: str) -> str:
    """Return the path of a draft: of a pair's draft its folder, else `name` as it is."""
    return str(draft_folder(name)) if name in PAIRS else name


def draft_folder(name: str) -> Path:
    """Return the folder of a pair's draft. If there is none, the error says where to get one."""
    pair = find_pair(name)
    for folder in (root / name for root in roots()):
        config = draft_config(folder)
        if config is not None:
            _check_target(pair, folder, config)
            return folder
    raise MissingDraft(
        f"The draft of pair {name!r} is not here; looked in {', '.join(map(str, roots()))}. The package carries that "
        f"of {DEFAULT_PAIR!r} alone: the others are in drafts/ of a checkout of the repository, or are made by its "
        f"scripts/train_drafts.py. Set {DRAFTS_VARIABLE} to a folder that has {name!r} in it."
    )


def predictor_folder(draft: str | None) -> Path | None:
    """Return the folder of the predictor that was trained for a pair, by the name of its draft; None if there is
    none."""
    folder = PREDICTORS / draft if draft in PAIRS else None
    return folder if folder is not None and folder.is_dir() else None


def roots() -> tuple[Path, ...]:
    """Return the folders to search for drafts: $SPECBRANCH_DRAFTS, the package, and the checkout if it runs from
    one."""
    given = os.environ.get(DRAFTS_VARIABLE)
    named = (Path(given).expanduser(),) if given else ()
    checkout = (IN_CHECKOUT,) if (IN_CHECKOUT.parent / "pyproject.toml").is_file() else ()
    return (*named, IN_PACKAGE, *checkout)


def card(name: str) -> Card | None:
    """Return what the folder of a pair's draft says, None if it is not here. Another target's draft is refused."""
    try:
        folder = draft_folder(name)
    except MissingDraft:
        return None
    figures = _figures(folder)
    layers = (draft_config(folder) or {}).get("layers")
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    count = len(layers) if isinstance(layers, list) else 0
    return Card(folder, count, size / 1e6, _number(figures.get("top1")), _number(figures.get("top3")))


def _check_target(pair: Pair, folder: Path, config: Mapping[str, Any]) -> None:
    made_for = config.get("target_fingerprint")
    if pair.target_fingerprint is not None and made_for != pair.target_fingerprint:
        raise ModelError(
            f"Pair {pair.name!r} runs on {pair.target}, but the draft in {folder} was made for {config.get('target')} "
            f"(fingerprint {str(made_for)[:12]}…, not {pair.target_fingerprint[:12]}…). Put the pair's own draft "
            "there, or give target and draft by themselves."
        )


def _figures(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        provenance = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
        figures = provenance.get("figures") if isinstance(provenance, dict) else None
        return figures if isinstance(figures, dict) else {}
    return {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
