"""The letters in which byte-level vocabularies spell bytes.

Owns that table alone, as GPT-2 has it.
"""

from __future__ import annotations

from functools import cache


@cache
def byte_letters() -> dict[str, int]:
    """Return the byte of each letter: printable Latin-1 for itself, the others from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}
