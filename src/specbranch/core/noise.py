"""The random numbers that target and draft share: a counter-based hash of a token's position.

Owns the hash and the transforms of its bits. Invariant: noise is a function of (seed, sample, position, the target's
token id), and a uniform of (seed, sample, position, purpose, attempt); no variate is used for two decisions.

`mix` works alike on Python integers, numpy arrays and torch tensors of 64-bit integers: products are masked to 32 bits,
and a wrapped 64-bit product has the same low bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal

MASK = 0xFFFFFFFF
SCALE = 2.0**-32
_POSITION = struct.Struct("<q").pack

Purpose = Literal["draft", "accept", "residual", "own"]
Uniform = Callable[[int, Purpose, int], float]  # (depth below a context, purpose, attempt) -> [0, 1)


@lru_cache(maxsize=65536)
def keys(seed: int, sample: int, position: int) -> tuple[int, int]:
    """Return the two 32-bit keys under which the token ids of one position are hashed."""
    first, second = struct.unpack("<II", key_bytes(seed, sample, position))
    return first, second


def key_bytes(seed: int, sample: int, position: int) -> bytes:
    """Return both keys of a position as little-endian bytes."""
    hashed = _hash_of(seed, sample).copy()
    hashed.update(_POSITION(position))
    return hashed.digest()


@lru_cache(maxsize=4096)
def _hash_of(seed: int, sample: int) -> blake2b:
    """Return the hash of a sample before its position: to copy it is quicker than to begin anew."""
    return blake2b(struct.pack("<Qq", seed & (2**64 - 1), sample), digest_size=8, person=b"sb-noise")


def mix(ids: Any, key: tuple[int, int]) -> Any:
    """Hash token ids under a key to 32 uniform bits each: two keyed rounds of a full-avalanche permutation."""
    return _permute(_permute(ids ^ key[0]) ^ key[1])


def _permute(x: Any) -> Any:
    # The 32-bit finaliser with the lowest known bias of its form (Wellons' "lowbias32").
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def exponential(bits: int) -> float:
    """Turn 32 bits into a standard exponential: −log1p(−v), exact for small v, where rare tokens are decided."""
    return -math.log1p(-(bits + 0.5) * SCALE)


@lru_cache(maxsize=4096)
def gumbel_row(seed: int, sample: int, position: int, vocabulary: int) -> tuple[float, ...]:
    """Return the Gumbel noise −log E of every token at one position, in plain Python, for small vocabularies."""
    key = keys(seed, sample, position)
    return tuple(-math.log(exponential(mix(token, key))) for token in range(vocabulary))


def uniform(seed: int, sample: int, position: int, purpose: Purpose, attempt: int = 0) -> float:
    """Return the uniform variate in [0, 1) of one decision.

    `attempt` numbers the siblings tried at one position, or the orders that drafted it.
    """
    packed = struct.pack("<Qqqq", seed & (2**64 - 1), sample, position, attempt) + purpose.encode()
    bits: int = struct.unpack("<Q", blake2b(packed, digest_size=8, person=b"sb-uniform").digest())[0]
    return (bits >> 11) * 2.0**-53
