"""Toys that take a known time for each forward, put together as a pair to be measured."""

from __future__ import annotations

from typing import Any

from specbranch.exec.drafter import Drafter
from specbranch.exec.verifier import Verifier
from specbranch.lab.measure.loaded_pair import LoadedPair
from specbranch.lab.measure.probes import Effort
from toybench import SlowRunner, drafter_recipe, law

BRIEF = Effort(
    repeats=2,
    least=1,
    seconds=2.0,
    rows=(1, 2, 4),
    widths=(1, 2, 4),
    widths_far=(1, 4),
    host_tokens=6,
    check_tokens=6,
    check_repeats=1,
)


class Words:
    """A tokenizer of six tokens."""

    eos_ids = ()

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [len(word) % 6 for word in messages[0]["content"].split()][:12]


def toys(
    target_seconds: float = 0.004, draft_seconds: float = 0.001, executor: Any = "serial", target: Any = None
) -> LoadedPair:
    """A pair; `target`: another runner than one that is just slow."""
    verifier = Verifier(target or SlowRunner(law(), target_seconds))
    drafter = Drafter(SlowRunner(law(0.2), draft_seconds))
    words: Any = Words()
    return LoadedPair("toys", words, verifier, drafter, drafter_recipe(0.2, seconds=draft_seconds), "t", "d", executor)
