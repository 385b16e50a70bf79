"""The beginning of a request's prompt, as a short key: requests with equal keys share a prefix of their prompts.

Owns what the key is made from. It reads a body as far as the key needs, and checks nothing: the replica does.
Invariant: all turns of a conversation have the same key, and the key shows nothing of the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

MESSAGE_CHARACTERS = 512  # of each message: a longer one may share its beginning with others
PROMPT_CHARACTERS = 64  # of a text without messages: later turns are longer, so the key must not need more
PROMPT_IDS = 16  # tokens, about as long as these characters


def beginning_key(body: bytes) -> str | None:
    """Return the key of a request's body; None if it has no prompt that can be read."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return None
    parts = list(_parts(asked)) if isinstance(asked, dict) else []
    return blake2b("\0".join(parts).encode("utf-8", "replace"), digest_size=16).hexdigest() if parts else None


def _parts(asked: dict[str, Any]) -> Iterator[str]:
    """Yield what a prompt begins with: instructions, then messages up to the user's first, or a text."""
    if isinstance(instructions := asked.get("instructions"), str):
        yield instructions[:MESSAGE_CHARACTERS]
    said = asked.get("messages", asked.get("input"))
    if isinstance(said, list):
        yield from _messages(said)
    elif isinstance(said, str):
        yield from ("user", said[:MESSAGE_CHARACTERS])
    else:
        yield from _prompt(asked.get("prompt"))


def _messages(messages: list[Any]) -> Iterator[str]:
    """Yield roles and texts; behind the user's first message each conversation goes on for itself."""
    for message in messages:
        if not isinstance(message, dict):
            return
        role = message.get("role")
        yield from (str(role), _text(message.get("content"))[:MESSAGE_CHARACTERS])
        if role == "user":
            return


def _text(content: Any) -> str:
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _prompt(prompt: Any) -> Iterator[str]:
    """Yield the start of a text or of token ids; of several prompts that of the first."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        yield prompt[:PROMPT_CHARACTERS]
    elif isinstance(prompt, list) and prompt:
        yield repr(prompt[:PROMPT_IDS])
