"""The Triton kernel of lookup in the forest: the longest suffix that occurred before, and its continuation in the tree.

One program a session: a scan over its text, then a walk down its tree. Invariant: the trees are those of
`looking.look_plainly`. Needs Triton, so only `looking.py` imports it, when it uses the kernel.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# What Triton compiles has no Python types but constexpr.

import triton
import triton.language as tl

from specbranch.core.lookup import LONGEST_MATCH as _LONGEST_MATCH
from specbranch.core.planner import LOOKED as _LOOKED
from specbranch.core.trees import ABSENT as _ABSENT
from specbranch.core.trees import FIRST as _FIRST
from specbranch.core.trees import MATCHES as _MATCHES
from specbranch.core.trees import NOT_SCORED as _NOT_SCORED
from specbranch.core.trees import OTHER as _OTHER
from specbranch.models.gpu import forest_layout
from specbranch.models.gpu.forest_rows_kernels import (
    COUNT,
    DECODING,
    LENGTH,
    LOOKS,
    ROOT_SCORED,
    SCALARS,
    STATE,
    weigh_anew,
)
from specbranch.models.gpu.layout import power_of_two
from specbranch.models.gpu.tree_kernels import (
    CHANCE,
    DEPTH,
    EDGES,
    FIELDS,
    KNOWN,
    LOOK,
    NOWHERE,
    PARENT,
    RANK,
    REACH,
    READ,
    ROOT,
    ROW,
    SAID,
    SENT,
    SLOT,
    STANDINGS,
    TOKEN,
)

LONGEST_MATCH, LOOKED_TOKENS, TOKEN_LANES = (tl.constexpr(n) for n in (_LONGEST_MATCH, _LOOKED, power_of_two(_LOOKED)))
NOT_SCORED, FIRST_OF, OTHER_OF, ABSENT = (tl.constexpr(n) for n in (_NOT_SCORED, _FIRST, _OTHER, _ABSENT))
MATCH_1, MATCH_2, MATCH_3, MATCH_4, MATCH_5, MATCH_6 = (tl.constexpr(n) for n in _MATCHES)
EDGE_AT, FIRST_AT, OTHER_AT, LOOKED_AT, ODDS_AT = (tl.constexpr(n) for n in forest_layout.CHANCE_AT.values())
BITS, WITHIN = tl.constexpr(24), tl.constexpr(2**24 - 1)  # of a position, beside the length of a match


@triton.jit
def class_of(chances, said):
    """Return the class of the draft's probability, as `core.trees.class_of`."""
    found = tl.zeros_like(said).to(tl.int32)
    for edge in tl.static_range(EDGES):
        found += (said >= tl.load(chances + EDGE_AT + edge)).to(tl.int32)
    return found


@triton.jit
def _find(history, length, LONGEST: tl.constexpr, SHORTEST: tl.constexpr, BLOCK: tl.constexpr):
    """Return the end of the latest occurrence of the longest suffix, and how long that is; 0: there is none."""
    best = length * 0
    for begin in range(0, length, BLOCK):
        end = begin + tl.arange(0, BLOCK)
        alive = (end >= 1) & (end < length)
        matched = tl.zeros((BLOCK,), tl.int32)
        for back in tl.static_range(1, LONGEST + 1):
            last = tl.load(history + length - back, mask=length >= back, other=-1)
            alive = alive & (end >= back)
            alive = alive & (tl.load(history + end - back, mask=alive, other=-2) == last)
            matched += alive.to(tl.int32)
        score = tl.where(matched >= SHORTEST, (matched << BITS) | end, 0)
        best = tl.maximum(best, tl.max(score, 0))
    return best & WITHIN, best >> BITS


@triton.jit
def _matched(history, length, start, size):
    """Return how many tokens before `start` equal those at the end; the first `size` are known to."""
    i = tl.arange(0, 32)
    within = (i < LONGEST_MATCH) & (i < start)
    a = tl.load(history + start - 1 - i, mask=within, other=-1)
    b = tl.load(history + length - 1 - i, mask=within, other=-2)
    return tl.maximum(tl.min(tl.where(a == b, 32, i), 0), size)


@triton.jit
def _match_class(words):
    """Return the class of a match, as `core.trees.match_class`."""
    return (
        1 + (words >= MATCH_1).to(tl.int32) + (words >= MATCH_2).to(tl.int32) + (words >= MATCH_3).to(tl.int32)
        + (words >= MATCH_4).to(tl.int32) + (words >= MATCH_5).to(tl.int32) + (words >= MATCH_6).to(tl.int32)
    )  # fmt: skip


@triton.jit
def _summed(n, children, chance):
    """Return the sum of the chances of some nodes, added in their order."""
    total = tl.max(chance, 0) * 0.0
    at = tl.min(tl.where(children, n, NOWHERE), 0)
    while at < NOWHERE:
        total += tl.max(tl.where(n == at, chance, 0.0), 0)
        at = tl.min(tl.where(children & (n > at), n, NOWHERE), 0)
    return total


@triton.jit
def _graft(session, nodes, history, chances, length, start, words, SIZE: tl.constexpr):
    """Add the tokens from `start` on as a path from the root, as `core.trees.GrowingTree.graft`."""
    n = tl.arange(0, SIZE)
    count = tl.load(session + COUNT)
    there = n < count
    at = nodes + n * FIELDS
    parent = tl.load(at + PARENT, mask=there, other=-2.0).to(tl.int32)
    held = tl.load(at + TOKEN, mask=there, other=-1.0).to(tl.int32)
    chance = tl.load(at + CHANCE, mask=there, other=0.0)
    rank = tl.load(at + RANK, mask=there, other=0.0)
    said = tl.load(at + SAID, mask=there, other=0.0)
    computed = tl.load(at + READ, mask=there, other=0.0)
    i = tl.arange(0, TOKEN_LANES)
    # where the text ends sooner, it repeats
    following = tl.load(history + start + i % (length - start))
    scored = tl.load(session + ROOT_SCORED) > 0
    here = count * 0 + ROOT
    reach = tl.max(chance, 0) * 0.0 + 1.0
    is_new = here == NOWHERE
    step = count * 0
    while (step < LOOKED_TOKENS) & (count < SIZE):
        token = tl.max(tl.where(i == step, following, 0), 0)
        look = _match_class(words + step)
        known = tl.min(tl.where((parent == here) & (held == token), n, NOWHERE), 0)
        is_new = is_new | (known == NOWHERE)
        own_said = tl.max(tl.where(n == known, said, 0.0), 0)
        own_rank = tl.max(tl.where(n == known, rank, 0.0), 0)
        drafted = (is_new == 0) & (own_said > 0.0)
        standing = tl.where(drafted, tl.where(own_rank > 0.0, OTHER_OF, FIRST_OF), tl.where(scored, ABSENT, NOT_SCORED))
        kind = (look - 1) * STANDINGS + standing
        alone = tl.load(chances + tl.where(own_rank > 0.0, OTHER_AT, FIRST_AT) + class_of(chances, own_said))
        odds = alone / tl.maximum(1.0 - alone, 1e-6) * tl.load(chances + ODDS_AT + kind)
        now = tl.where(drafted, odds / (1.0 + odds), tl.load(chances + LOOKED_AT + kind))
        reach = now * reach
        target = tl.where(is_new, count, known)
        chance = tl.where(n == target, now, chance)
        parent = tl.where(n == target, here, parent)
        held = tl.where(n == target, token, held)
        put = nodes + target * FIELDS
        tl.store(put + CHANCE, now)
        tl.store(put + REACH, reach)
        tl.store(put + LOOK, look.to(tl.float64))
        tl.store(put + TOKEN, token.to(tl.float64), mask=is_new)
        tl.store(put + PARENT, here.to(tl.float64), mask=is_new)
        tl.store(put + DEPTH, (step + 1).to(tl.float64), mask=is_new)
        tl.store(put + RANK, reach * 0.0 + 1.0, mask=is_new)
        tl.store(put + SAID, reach * 0.0, mask=is_new)
        tl.store(put + READ, reach * 0.0, mask=is_new)
        tl.store(put + SENT, reach * 0.0, mask=is_new)
        tl.store(put + KNOWN, reach * 0.0, mask=is_new)
        tl.store(put + ROW, reach * 0.0, mask=is_new)
        tl.store(put + SLOT, reach * 0.0 - 1.0, mask=is_new)
        if here >= 0:
            tl.store(nodes + here * FIELDS + KNOWN, _summed(n, parent == here, chance))
        scored = (is_new == 0) & (tl.max(tl.where(n == known, computed, 0.0), 0) > 0.0)
        count += is_new.to(tl.int32)
        here = target
        step += 1
    tl.debug_barrier()
    tl.store(session + COUNT, count)
    weigh_anew(nodes, count, SIZE)


@triton.jit(do_not_specialize=["context"])
def look(sessions, history, trees, chances, context, SIZE: tl.constexpr, LONGEST: tl.constexpr, SHORTEST: tl.constexpr,
         BLOCK: tl.constexpr):  # fmt: skip
    """Look up what followed the last words of one session, and add it to its tree."""
    s = tl.program_id(0)
    session = sessions + s * SCALARS
    if (tl.load(session + STATE) == DECODING) & (tl.load(session + LOOKS) > 0):
        length = tl.load(session + LENGTH)
        text = history + s * context
        start, size = _find(text, length, LONGEST, SHORTEST, BLOCK)
        if size > 0:
            words = _matched(text, length, start, size)
            _graft(session, trees + s * SIZE * FIELDS, text, chances, length, start, words, SIZE)
