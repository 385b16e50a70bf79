"""One prompt prefilled in many ways: cut anywhere, alone, or beside other prompts and decoding sequences.

Owns models with random weights of many shapes, and the ways. Invariant: all ways feed the same tokens to each sequence,
so any two of them may be compared in every number that they return.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from specbranch.config import SamplingParams
from specbranch.core.orders import Context, Verify
from specbranch.core.pages import PAGE
from specbranch.core.request import Request
from specbranch.core.runner import Ask, Feed, Proposal, Trial
from specbranch.core.slots import ROOT, TAIL
from specbranch.models.families.rotary import Rope
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.matrix import Matrix
from specbranch.models.files.weights import LayerWeights, Weights
from specbranch.models.forward.decoder import Decoder
from specbranch.models.runners.native import NativeRunner

CONTEXT = 1000
PAGES = 48
VOCABULARY = 1001
LENGTH = 700  # tokens of the prompt
CHUNKS = (1, 17, 64, 256, LENGTH)
STEPS = 21  # decode steps of each decoding sequence, at most
OTHERS = {1: (611, 100), 2: (33, 5), 3: (300, 300)}  # by sequence: tokens of another prompt, and of its chunks
DECODING = {4: 1, 5: 40, 6: 255, 7: 256, 8: 600}  # by sequence: tokens before the first decode step
REQUEST = Request(SamplingParams(temperature=0.8), seed=3, prompt_length=0)

BASE = Architecture(
    name="random", family="llama", layers=2, hidden=512, heads=8, kv_heads=2, head_dim=64, intermediate=768,
    vocabulary=VOCABULARY, rms_eps=1e-5, rope=Rope(), qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False,
    tied=False, context_length=4096, eos_ids=(), bos_id=None,
)  # fmt: skip
WIDE = replace(BASE, head_dim=128, hidden=1024, intermediate=1536)
SHAPES = {  # query heads of each KV head: 1, 3, 4, 6; products with tiles of their own are those of real models
    "heads of 64, 1 each": replace(BASE, heads=4, kv_heads=4),
    "heads of 64, 3 each, of SmolLM2": replace(BASE, heads=9, kv_heads=3, hidden=576, intermediate=1536),
    "heads of 64, 4 each, biases": replace(BASE, qkv_bias=True, out_bias=True, mlp_bias=True),
    "heads of 64, 4 each, of 1B": replace(BASE, heads=32, kv_heads=8, hidden=2048, intermediate=8192),
    "heads of 64, 6 each, norms": replace(BASE, family="qwen3", qk_norm=True, heads=12, kv_heads=2),
    "heads of 128, 1 each, norms": replace(WIDE, family="qwen3", qk_norm=True, heads=4, kv_heads=4),
    "heads of 128, 3 each": replace(WIDE, heads=6, kv_heads=2),
    "heads of 128, 4 each, of 8B": replace(WIDE, heads=32, kv_heads=8, hidden=4096, intermediate=14336),
    "heads of 128, 6 each, of Qwen2.5-1.5B": replace(
        WIDE, family="qwen2", qkv_bias=True, heads=12, kv_heads=2, hidden=1536, intermediate=8960
    ),
}
SMALL_SHAPES = {
    "llama": replace(BASE, hidden=64, heads=3, kv_heads=1, head_dim=16, intermediate=96),
    "qwen3": replace(BASE, family="qwen3", qk_norm=True, hidden=64, heads=4, kv_heads=4, head_dim=16, intermediate=96),
    "biases": replace(
        BASE, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, qkv_bias=True, out_bias=True, mlp_bias=True
    ),
}


def random_decoder(arch: Architecture, device: str, dtype: torch.dtype, seed: int = 0) -> Decoder:
    """Make a decoder with random weights; norms and biases are random, too."""
    made = torch.Generator(device).manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=made, device=device)
        return (values * scale * shape[-1] ** -0.5).to(dtype)

    def vector(size: int, wanted: bool = True) -> torch.Tensor | None:
        return 1 + random(1, size, scale=3.0)[0] if wanted else None

    def matrix(outs: int, ins: int, bias: bool = False) -> Matrix:
        return Matrix(random(outs, ins), random(1, outs, scale=3.0)[0] if bias else None)

    def layer() -> LayerWeights:
        queries = arch.heads * arch.head_dim
        qkv = matrix(queries + 2 * arch.kv_heads * arch.head_dim, arch.hidden, arch.qkv_bias)
        norms = vector(arch.head_dim, arch.qk_norm), vector(arch.head_dim, arch.qk_norm)
        out = matrix(arch.hidden, queries, arch.out_bias)
        gate_up = matrix(2 * arch.intermediate, arch.hidden, arch.mlp_bias)
        down = matrix(arch.hidden, arch.intermediate, arch.mlp_bias)
        return LayerWeights(vector(arch.hidden), qkv, *norms, out, vector(arch.hidden), gate_up, down)

    layers = tuple(layer() for _ in range(arch.layers))
    embedding = random(arch.vocabulary, arch.hidden, scale=arch.hidden**0.5)
    head = matrix(arch.vocabulary, arch.hidden)
    return Decoder(arch, Weights(embedding, layers, vector(arch.hidden), head), CONTEXT + TAIL)


def tokens_of(seq: int, count: int) -> list[int]:
    """Return the text of a sequence: its own random tokens."""
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seq + 1)).tolist()


Place = tuple[int, int, str]  # sequence, step, and what was asked for
Row = torch.Tensor | Proposal | int  # logits, what is proposed behind them, or the token that a verdict chose
ASKED = ("logits", "proposal", "verdict")  # by turns


@dataclass(slots=True)
class Read:
    """All that a way of prefilling returned."""

    keys_and_values: dict[int, torch.Tensor] = field(default_factory=dict)  # by sequence, through its page table
    logits: torch.Tensor | None = None  # behind the prompt's last token
    rows: dict[Place, Row] = field(default_factory=dict)  # of decoding sequences


def flush(runner: NativeRunner) -> None:
    """Compute all prefill that was put off."""
    getattr(runner, "flush", lambda: None)()


def pieces(tokens: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Cut tokens in chunks."""
    return (tokens[at : at + size] for at in range(0, len(tokens), size))


def read_alone(runner: NativeRunner, chunk: int) -> Read:
    """Prefill the prompt in chunks, with nothing beside it; its last token is a decode step."""
    prompt, found = tokens_of(0, LENGTH), Read()
    runner.open(0, REQUEST)
    for piece in pieces(prompt[:-1], chunk):
        runner.extend(0, piece)
        flush(runner)
    found.logits = _logits(runner, [Feed(0, (prompt[-1],), (ROOT,))])[0]
    found.keys_and_values[0] = held(runner, 0)
    runner.close(0)
    return found


def read_others_alone(runner: NativeRunner) -> Read:
    """Prefill the other prompts and decode the decoding sequences, each with nothing beside it."""
    found = Read()
    for seq, (count, _) in OTHERS.items():
        runner.open(seq, REQUEST)
        runner.extend(seq, tokens_of(seq, count))
        flush(runner)
        found.keys_and_values[seq] = held(runner, seq)
        runner.close(seq)
    for seq in DECODING:
        _open_decoding(runner, seq)
        for step in range(STEPS):
            (found.rows[seq, step, "logits"],) = _logits(runner, [_feed(seq, step)])
            runner.keep(seq, (), 0)
            found.rows |= _decode(runner, [seq], step)
        found.keys_and_values[seq] = held(runner, seq)
        runner.close(seq)
    return found


def read_among_others(runner: NativeRunner, chunk: int) -> Read:
    """Prefill the prompt in chunks beside other prompts' chunks; decode rows of other sequences share the forwards."""
    prompt, found = tokens_of(0, LENGTH), Read()
    for seq in DECODING:
        _open_decoding(runner, seq)
    left = {seq: list(pieces(tokens_of(seq, count), size)) for seq, (count, size) in OTHERS.items()}
    for seq in (2, 0, 1, 3):
        runner.open(seq, REQUEST)
    parts = list(pieces(prompt[:-1], chunk))
    for step, piece in enumerate(parts):
        for seq in (2, 0, 1, 3):  # the prompt lies between others
            part = piece if seq == 0 else left[seq].pop(0) if left[seq] else ()
            runner.extend(seq, part)
        if step == len(parts) - 1:
            break  # the last chunk shares the forward of the last token
        if step < STEPS - 1:
            found.rows |= _decode(runner, list(DECODING), step)
        else:
            flush(runner)
    step = min(len(parts), STEPS) - 1
    work = [Feed(0, (prompt[-1],), (ROOT,)), *(_feed(seq, step) for seq in DECODING)]
    found.logits, *others = _logits(runner, work)
    found.rows |= {(seq, step, "logits"): row for seq, row in zip(DECODING, others, strict=True)}
    for seq, rest in left.items():
        runner.extend(seq, [token for part in rest for token in part])
    flush(runner)
    found.keys_and_values = {seq: held(runner, seq) for seq in (0, *OTHERS)}
    for seq in (0, *OTHERS, *DECODING):
        runner.close(seq)
    return found


def held(runner: NativeRunner, seq: int) -> torch.Tensor:
    """Return the KV cache of a sequence's prefix [tokens, layers, 2, kv_heads, head_dim]."""
    if runner.device.type == "cuda":
        torch.cuda.synchronize()  # it was written on the runner's own stream
    sequence = runner.sequences[seq]
    kv_slots = sequence.table.flat(np.arange(len(sequence.slots.prefix)))
    pages, slots = torch.from_numpy(kv_slots // PAGE), torch.from_numpy(kv_slots % PAGE)
    return runner.memory.data[pages, :, :, :, slots].cpu().clone()


def _open_decoding(runner: NativeRunner, seq: int) -> None:
    runner.open(seq, REQUEST)
    runner.extend(seq, tokens_of(seq, DECODING[seq]))
    flush(runner)


def _feed(seq: int, step: int) -> Feed:
    return Feed(seq, (tokens_of(100 + seq, STEPS)[step],), (ROOT,))


def _logits(runner: NativeRunner, work: Sequence[Feed]) -> list[torch.Tensor]:
    return [rows[0].logits.float().cpu().clone() for rows in runner.score(work)]


def _decode(runner: NativeRunner, seqs: Sequence[int], step: int) -> dict[Place, Row]:
    """Run one decode step of some sequences and commit its tokens. Steps take turns in what they ask for."""
    work, found, asked = [_feed(seq, step) for seq in seqs], list[Row](), ASKED[step % len(ASKED)]
    if asked == "logits":
        found += _logits(runner, work)
    elif asked == "proposal":
        found += runner.propose(work, [Ask(seq, 0, width=4) for seq in seqs])
    else:
        trials = [Trial(feed.seq, Verify(Context(0, feed.tokens)), 0, ()) for feed in work]
        found += [judged.token for judged in runner.verify(work, trials)()]
    for seq in seqs:
        runner.keep(seq, (0,), 1)
    return {(seq, step, asked): row for seq, row in zip(seqs, found, strict=True)}


def compare(found: Read, expected: Read, exact: bool, tolerance: float = 0.0) -> None:
    """Assert that two ways agree in all that both have: bit by bit, or within a tolerance."""
    for seq in found.keys_and_values.keys() & expected.keys_and_values.keys():
        _alike(found.keys_and_values[seq], expected.keys_and_values[seq], exact, tolerance, f"cache of {seq}")
    if found.logits is not None and expected.logits is not None:
        _alike(found.logits, expected.logits, exact, tolerance, "logits")
    for place in found.rows.keys() & expected.rows.keys():
        one, other = found.rows[place], expected.rows[place]
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            _alike(one, other, exact, tolerance, f"row {place}")
        else:
            assert one == other if exact else _chosen(one) == _chosen(other), f"row {place}"


def _chosen(row: Row) -> Row | int:
    return row.tokens[0] if isinstance(row, Proposal) else row


def _alike(one: torch.Tensor, other: torch.Tensor, exact: bool, tolerance: float, what: str) -> None:
    assert one.isfinite().all() and one.shape == other.shape, what
    if exact:
        assert torch.equal(one, other), f"{what}: {int((one != other).sum())} of {one.numel()} numbers differ"
    else:
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")
