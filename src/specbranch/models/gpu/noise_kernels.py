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
# The order of the message's words in each round; words 3 to 15 are 0 here. Rounds 10 and 11 repeat rounds 0 and 1.
_ORDERS = (
    "0123456789abcdef", "ea489fd61c02b753", "b8c052fdae367194", "7931dcbe265a40f8", "905724afe1bc683d",
    "2c6a0b834d75fe19", "c51fed4a0763928b", "db7ec13950f4862a", "6fe9b308c2d714a5", "a2847615fb9e3cd0",
)  # fmt: skip
_ROUNDS = 12
_MESSAGE = 24  # bytes: seed, sample, position
_DIGEST = 8  # bytes
I0, I1, I2, I3, I4, I5, I6, I7 = (tl.constexpr(word) for word in _START)
H0 = tl.constexpr(_START[0] ^ 0x01010000 ^ _DIGEST)
H6 = tl.constexpr(_START[6] ^ _PERSON)
ROUNDS = tl.constexpr(_ROUNDS)
# where each of the three words is used in each round: four bits a round
AT_0, AT_1, AT_2 = (
    tl.constexpr(sum(_ORDERS[turn % 10].index(word) << 4 * turn for turn in range(_ROUNDS))) for word in "012"
)
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
def _word(a, b, c, at_a, at_b, at_c, AT: tl.constexpr):
    """Return the word of the message that is used at a place of a round."""
    return tl.where(at_a == AT, a, 0) | tl.where(at_b == AT, b, 0) | tl.where(at_c == AT, c, 0)


@triton.jit
def noise_keys(seed_low, seed_high, sample, positions):
    """Return the two keys of positions, as int32; seed and sample are scalars.

    The rounds are a loop, not unrolled: unrolled, this takes a compiler a minute.
    """
    zero = positions.to(tl.uint64) * 0
    a = zero + (seed_low.to(tl.uint32, bitcast=True).to(tl.uint64) | (seed_high.to(tl.uint64) << 32))
    b = zero + sample.to(tl.int64).to(tl.uint64)
    c = positions.to(tl.uint64)
    v0, v1, v2, v3 = zero + H0, zero + I1, zero + I2, zero + I3
    v4, v5, v6, v7 = zero + I4, zero + I5, zero + H6, zero + I7
    v8, v9, v10, v11 = zero + I0, zero + I1, zero + I2, zero + I3
    v12, v13, v14, v15 = zero + COUNTED, zero + I5, zero + LAST_BLOCK, zero + I7
    in_0, in_1, in_2 = zero + AT_0, zero + AT_1, zero + AT_2
    for _ in range(ROUNDS):
        x, y, z = in_0 & 15, in_1 & 15, in_2 & 15
        v0, v4, v8, v12 = _mixed(v0, v4, v8, v12, _word(a, b, c, x, y, z, 0), _word(a, b, c, x, y, z, 1))
        v1, v5, v9, v13 = _mixed(v1, v5, v9, v13, _word(a, b, c, x, y, z, 2), _word(a, b, c, x, y, z, 3))
        v2, v6, v10, v14 = _mixed(v2, v6, v10, v14, _word(a, b, c, x, y, z, 4), _word(a, b, c, x, y, z, 5))
        v3, v7, v11, v15 = _mixed(v3, v7, v11, v15, _word(a, b, c, x, y, z, 6), _word(a, b, c, x, y, z, 7))
        v0, v5, v10, v15 = _mixed(v0, v5, v10, v15, _word(a, b, c, x, y, z, 8), _word(a, b, c, x, y, z, 9))
        v1, v6, v11, v12 = _mixed(v1, v6, v11, v12, _word(a, b, c, x, y, z, 10), _word(a, b, c, x, y, z, 11))
        v2, v7, v8, v13 = _mixed(v2, v7, v8, v13, _word(a, b, c, x, y, z, 12), _word(a, b, c, x, y, z, 13))
        v3, v4, v9, v14 = _mixed(v3, v4, v9, v14, _word(a, b, c, x, y, z, 14), _word(a, b, c, x, y, z, 15))
        in_0, in_1, in_2 = in_0 >> 4, in_1 >> 4, in_2 >> 4
    word = (zero + H0) ^ v0 ^ v8
    first = (word & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    return first, (word >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
