"""The vocabulary of a GGUF file: that of the target's own file, or one made from a tokenizer.json.

Owns the entries `tokenizer.…` and the names that llama.cpp has for pre-tokenizers. Invariant: there is an entry for
each row of the embedding, in the order of the ids; ids without a token are filled up.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from specbranch.errors import BadParameter, ModelError
from specbranch.gguf_header import GgufArray
from specbranch.models.files.gguf_file import GgufFile
from specbranch.text.tokenizer import Tokenizer

log = logging.getLogger("specbranch")

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # kinds of tokens, as GGUF numbers them
_WORDS = (  # the rule by which Llama 3 and Qwen 2 cut words; they differ in how many digits stay together
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {_WORDS.replace("DIGITS", "{1,3}"): "llama-bpe", _WORDS.replace("DIGITS", ""): "qwen2"}
UNNAMED = "default"


def copied_vocabulary(file: GgufFile) -> dict[str, Any]:
    """Return the entries of a target's own GGUF file."""
    found = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    return {key: value.read() if isinstance(value, GgufArray) else value for key, value in found.items()}


def made_vocabulary(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """Return the entries for a byte-level BPE tokenizer; others are refused."""
    made = json.loads(tokenizer.definition())
    if made["model"].get("type") != "BPE" or tokenizer.token_bytes(False) is None:
        raise BadParameter(
            f"The target's tokenizer is a {made['model'].get('type')} without byte-level tokens, and this writes "
            "byte-level BPE alone. Convert the target with llama.cpp's convert_hf_to_gguf.py, and name the file with "
            "--target: its vocabulary is copied."
        )
    entries = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre_tokenizer(made),
        **_tokens(tokenizer, made, rows),
        "tokenizer.ggml.merges": [" ".join(_pair(merge)) for merge in made["model"]["merges"]],
        **_special(tokenizer),
    }
    template = tokenizer.template
    return entries if template is None else {**entries, "tokenizer.chat_template": template.source}


def check_length(entries: Mapping[str, Any], rows: int, name: str) -> None:
    """Raise unless there is a token for each row of the embedding."""
    if (count := len(entries.get("tokenizer.ggml.tokens", ()))) != rows:
        raise ModelError(f"{name} names {count} tokens for an embedding of {rows} rows; expected one for each row.")


def _tokens(tokenizer: Tokenizer, made: Mapping[str, Any], rows: int) -> dict[str, Any]:
    words, added = tokenizer.vocabulary(), {token["id"]: token["special"] for token in made["added_tokens"]}
    kinds = {False: USER_DEFINED, True: CONTROL}
    return {
        "tokenizer.ggml.tokens": [words.get(row, f"[PAD{row}]") for row in range(rows)],
        "tokenizer.ggml.token_type": [
            UNUSED if row not in words else kinds[added[row]] if row in added else NORMAL for row in range(rows)
        ],
    }


def _special(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the ids of special tokens by role, and if a text begins with one."""
    roles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {
        role: tokenizer.added_id(tokenizer.special[name]) for role, name in roles.items() if name in tokenizer.special
    }
    begins = tokenizer.encode("a")[:1] == [ids.get("bos")]
    found = {f"tokenizer.ggml.{role}_token_id": token for role, token in ids.items() if token is not None}
    return {**found, "tokenizer.ggml.add_bos_token": begins}


def _pre_tokenizer(made: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the way in which words are cut; report that there is none."""
    steps = made.get("pre_tokenizer") or {}
    several = steps.get("pretokenizers", [steps])
    kinds = [step.get("type") for step in several]
    if kinds == ["ByteLevel"] and several[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and several[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and (name := PRE_TOKENIZERS.get(several[0]["pattern"].get("Regex", ""))):
        return name
    log.warning(
        "llama.cpp has no name here for the way in which the target's tokenizer cuts words, so it cuts a text for the "
        "draft alone in its default way. A draft beside its target is not affected: it gets tokens."
    )
    return UNNAMED


def _pair(merge: Any) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge
