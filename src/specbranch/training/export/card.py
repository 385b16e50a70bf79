"""The card of an exported draft: what it is, how well it agrees with its target, how it is used, whence it comes.

Owns README.md and provenance.json of an export. Invariant: figures and licence are those in the draft's own folder;
what that does not say, the card does not say either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specbranch.core.draft_evaluation import DraftEvaluation
from specbranch.models.drafts.draft_folder import DraftInfo
from specbranch.training.distill.draft_saving import ON_THE_HUB, card_table, licence_sentence

ExportFormat = Literal["hf", "gguf", "speculators"]
EXPORT_FORMATS: tuple[ExportFormat, ...] = ("hf", "gguf", "speculators")
LICENCE = re.compile(r"\A---\n(?:.*\n)*?license: (\S+)$", re.MULTILINE)
LIBRARIES: dict[ExportFormat, str] = {"hf": "transformers", "gguf": "llama.cpp", "speculators": "speculators"}
USE: dict[ExportFormat, str] = {
    "hf": """It is a model of its own, for assisted generation in transformers:

```python
draft = AutoModelForCausalLM.from_pretrained("{folder}")
target.generate(**inputs, assistant_model=draft, do_sample=False)
```""",
    "gguf": """It is a model of its own, for speculative decoding in llama.cpp:

```
llama-server -m TARGET.gguf --model-draft {folder}/{name}.gguf
```""",
    "speculators": """It has the form `independent` of speculators: a plain model, with the verifier's name in
`speculators_config`. {head} SpecBranch reads this folder as a draft for any model with the same
vocabulary: `specbranch generate --target TARGET --draft {folder}`.""",
}
USE_OF_FEATURES = """It has the layout of speculators (eagle3): a row reads a token and the hidden states of the target
after {taps} layers. It holds no embedding. Engines that run EAGLE-3 heads load it beside its target;
SpecBranch does so with `specbranch generate --target TARGET --draft {folder}`."""
REDUCED = """Row i of `lm_head` is token i + d2t[i] of the target; `t2d` marks the tokens that have a
row. Engines that want a plain draft to score the whole vocabulary do not load such a head: vLLM and
transformers know reduced heads of feature drafts (EAGLE-3 and others) alone."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a draft's folder says of it."""

    info: DraftInfo
    licence: str | None  # as the card's header spells it
    evaluation: DraftEvaluation | None
    provenance: Mapping[str, Any]

    @property
    def target(self) -> str:
        """The target's name, that on the Hub if it is known."""
        return ON_THE_HUB.get(self.info.target, self.info.target)

    def agreement(self) -> dict[str, Any] | None:
        """Return how often the target chose the draft's candidates; None if nobody counted."""
        found = self.evaluation
        if found is None:
            return None
        shares = {"top1": found.hits / found.positions, "top4": found.covered / found.positions}
        return {name: round(share, 4) for name, share in shares.items()} | {
            "positions": found.positions,
            "text": found.text,
        }


def licence_in(folder: Path) -> str | None:
    """Return the licence in the header of a draft's card; None if it names none."""
    try:
        found = LICENCE.search((folder / "README.md").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found[1] if found and found[1] != "other" else None


def read_provenance(folder: Path) -> dict[str, Any]:
    """Return what a draft's folder says of how it was made; nothing if it does not."""
    try:
        found = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def card(origin: Origin, form: ExportFormat, name: str, made: Mapping[str, Any], taps: Sequence[int] = ()) -> str:
    """Return README.md; `made`: what is to be said of the export itself; `taps`: those of a feature draft."""
    info = origin.info
    head = "its head scores all tokens" if info.head_tokens is None else f"its head scores {info.head_tokens} tokens"
    use = USE[form].format(folder=name, name=name, head="" if info.head_tokens is None else REDUCED)
    if taps:
        use = USE_OF_FEATURES.format(folder=name, taps=", ".join(map(str, taps)))
    shared = "The head is" if taps else "Embedding and head are"
    history = {key: value for key, value in origin.provenance.items() if key not in ("figures", "evaluation")}
    return f"""---
license: {origin.licence or "other"}
base_model: {origin.target}
library_name: {LIBRARIES[form]}
tags:
- speculative-decoding
---

# {name}

A draft for speculative decoding of {info.target}, trained to give the target's own distribution on
text the target wrote: {len(info.layers)} layers, {head}. {shared} the target's.

{use}

Licence: {licence_sentence(origin.licence)}

## Agreement with the target
{_agreement(origin)}
## How it was made
{card_table(history)}
## The export
{card_table(made)}"""


def _agreement(origin: Origin) -> str:
    if (found := origin.agreement()) is None:
        return "\nNot measured; `specbranch draft-eval --save` measures it on the draft's own folder.\n"
    rows = {"top-1": found["top1"], "the target's token among the first four": found["top4"]}
    return f"\nOn {found['positions']:,} positions of {found['text'] or 'held-out text'}:\n" + card_table(rows)
