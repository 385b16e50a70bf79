"""The keys of the noise as a Triton function: `core.noise.keys`, bit for bit, for positions that only a device knows.

Owns BLAKE2b's compression (RFC 7693) of one message of three words. Invariant: the same keys as on the host. The module
needs Triton, so only other modules of kernels import it.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# What Triton compiles has no Python types but constexpr.

from struct import unpack

import triton
import triton.language as tl

_START = (
    0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
    0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179,
)  # fmt: skip
(_PERSON,) = unpack("<Q", b"sb-noise")
_MESSAGE = 24  # bytes: seed, sample, position
_DIGEST = 8  # bytes
I0, I1, I2, I3, I4, I5, I6, I7 = (tl.constexpr(word) for word in _START)
H0 = tl.constexpr(_START[0] ^ 0x01010000 ^ _DIGEST)
H6 = tl.constexpr(_START[6] ^ _PERSON)
COUNTED, LAST_BLOCK = tl.constexpr(_START[4] ^ _MESSAGE), tl.constexpr(_START[6] ^ (2**64 - 1))


@triton.jit
def _turned(word, BITS: tl.constexpr):
    return (word >> BITS) | (word << (64 - BITS))


@triton.jit
def _mixed(a, b, c, d, x, y):
    """BLAKE2b's function G."""
    a = a + b + x
    d = _turned(d ^ a, 32)
    c = c + d
    b = _turned(b ^ c, 24)
    a = a + b + y
    d = _turned(d ^ a, 16)
    c = c + d
    return a, _turned(b ^ c, 63), c, d


@triton.jit
def _round(v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
           m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15):  # fmt: skip
    """Mix columns, then diagonals, with the message words in the order of this round."""
    v0, v4, v8, v12 = _mixed(v0, v4, v8, v12, m0, m1)
    v1, v5, v9, v13 = _mixed(v1, v5, v9, v13, m2, m3)
    v2, v6, v10, v14 = _mixed(v2, v6, v10, v14, m4, m5)
    v3, v7, v11, v15 = _mixed(v3, v7, v11, v15, m6, m7)
    v0, v5, v10, v15 = _mixed(v0, v5, v10, v15, m8, m9)
    v1, v6, v11, v12 = _mixed(v1, v6, v11, v12, m10, m11)
    v2, v7, v8, v13 = _mixed(v2, v7, v8, v13, m12, m13)
    v3, v4, v9, v14 = _mixed(v3, v4, v9, v14, m14, m15)
    return v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15


@triton.jit
def noise_keys(seed_low, seed_high, sample, positions):
    """Return the two keys of positions, as int32; seed and sample are scalars.

    Words 3 to 15 of the message are 0. Rounds 10 and 11 repeat rounds 0 and 1.
    """
    zero = positions.to(tl.uint64) * 0
    a = zero + (seed_low.to(tl.uint32).to(tl.uint64) | (seed_high.to(tl.uint32).to(tl.uint64) << 32))
    b = zero + sample.to(tl.int64).to(tl.uint64)
    c = positions.to(tl.int64).to(tl.uint64)
    v0, v1, v2, v3, v4, v5, v6, v7 = zero + H0, zero + I1, zero + I2, zero + I3, zero + I4, zero + I5, zero + H6, zero + I7
    v8, v9, v10, v11 = zero + I0, zero + I1, zero + I2, zero + I3
    v12, v13, v14, v15 = zero + COUNTED, zero + I5, zero + LAST_BLOCK, zero + I7
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
        a, b, c, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)  # fmt: skip
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
        zero, zero, zero, zero, zero, zero, zero, zero, b, zero, a, c, zero, zero, zero, zero)  # fmt: skip
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
        zero, zero, zero, a, zero, c, zero, zero, zero, zero, zero, zero, zero, b, zero, zero)  # fmt: skip
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
        zero, zero, zero, b, zero, zero, zero, zero, c, zero, zero, zero, zero, a, zero, zero)  # fmt: skip
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
        zero, a, zero, zero, c, zero, zero, zero, zero, b, zero, zero, zero, zero, zero, zero)  # fmt: skip
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
        c, zero, zero, zero, a, zero, zero, zero, zero, zero, zero, zero, zero, zero, b, zero)  # fmt: skip
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
        zero, zero, b, zero, zero, zero, zero, zero, a, zero, zero, zero, zero, c, zero, zero)  # fmt: skip
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
        zero, zero, zero, zero, zero, b, zero, zero, zero, a, zero, zero, zero, zero, c, zero)  # fmt: skip
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
        zero, zero, zero, zero, zero, zero, a, zero, zero, c, zero, zero, b, zero, zero, zero)  # fmt: skip
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
        zero, c, zero, zero, zero, zero, b, zero, zero, zero, zero, zero, zero, zero, zero, a)  # fmt: skip
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
        a, b, c, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)  # fmt: skip
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = _round(
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
        zero, zero, zero, zero, zero, zero, zero, zero, b, zero, a, c, zero, zero, zero, zero)  # fmt: skip
    word = (zero + H0) ^ v0 ^ v8
    return (word & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True), (word >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
