"""An engine without models for tests of what lies around one: it repeats sentences with characters of many bytes."""

from __future__ import annotations

from typing import Any

from small_tokenizers import SENTENCES, TEMPLATE, byte_fallback, byte_level
from specbranch.lab.toys.paced import PacedExecutor, PacedLLM
from specbranch.text.tokenizer import Tokenizer

KINDS = {"byte level": byte_level, "byte fallback": byte_fallback}


def paced(seconds: float = 0.0, kind: str = "byte level", **given: Any) -> PacedLLM:
    """Return one whose rounds take `seconds`."""
    tokenizer = Tokenizer(KINDS[kind](), {}, (2,), TEMPLATE)
    text = [token for sentence in SENTENCES for token in tokenizer.encode(sentence + " ", add_special=False)]
    return PacedLLM(tokenizer, PacedExecutor(text, seconds), **given)
