"""Weights multiplied as they are stored: the layout, the kernels against their plain twin, and models that run on
them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from specbranch.core.runner import Feed, Runner
from specbranch.core.slots import ROOT
from specbranch.errors import BadParameter, ModelError
from specbranch.models.cpu.block_kernel_text import Dot, Target, source
from specbranch.models.cpu.block_kernels import (
    DOT_FEATURES,
    DOTPROD,
    I8MM,
    BlockCode,
    BlockLinear,
    BlockTwin,
    _compiled,
    _has,
    _rounding,
    multiplies,
    rounded_rows,
    tiles_at_a_time,
)
from specbranch.models.cpu.kernels import is_arm
from specbranch.models.cpu.rounding_text import ROUNDED
from specbranch.models.files import stored_rows
from specbranch.models.files.blocks import BLOCK, FORMS, ROW_FORM, BlockForm, BlockMatrix, BlockPart, Fields, in_blocks
from specbranch.models.files.encodings import gguf_encoding
from specbranch.models.files.matrix import Matrix
from specbranch.models.files.stored_rows import StoredRows
from specbranch.models.loading import load_native
from specbranch.models.runners.native import NativeRunner
from specbranch.models.runners.precision import resolve_precision
from test_identity_models import SHAPINGS, compare
from test_weights import HALVES, random_blocks, write_gguf
from tiers import each_value, tiered
from tiny_models import GREEDY, SHAPE, saved, some_tokens

pytestmark = pytest.mark.skipif(not multiplies(ROW_FORM), reason="no compiled kernels on this machine")
ALL: dict[str, BlockForm] = {**{name: form for name, (form, _) in FORMS.items()}, "rows": ROW_FORM}
FILES = ("llama Q4_1", "llama Q4_0", "qwen2 Q8_0", "qwen2 Q5_1", "narrow Q4_1")
WIDE = {**SHAPE, "hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 4}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def raw_rows(name: str, outs: int, ins: int) -> Tensor:
    """Random bytes with scales of ordinary sizes."""
    encoding = gguf_encoding(gguf.GGMLQuantizationType[name].value)
    held = torch.from_numpy(random_blocks(name, outs * ins // encoding.block))
    for offset in HALVES[name]:
        held[:, offset : offset + 2] = (numbers(len(held), seed=offset) * 0.02).half().view(torch.uint8).view(-1, 2)
    return held.view(outs, -1)


def part_of(name: str, outs: int, ins: int) -> BlockPart:
    if name == "rows":
        return in_blocks(Matrix(numbers(outs, ins)).stored_as("int8")).parts[0]
    form, fields = FORMS[name]
    part = BlockPart.empty(form, outs, ins)
    part.put(0, fields(raw_rows(name, outs, ins)))
    return part


# --- the layout ---


@pytest.mark.parametrize("outs", [8, 21])
@pytest.mark.parametrize("name", FORMS)
def test_weights_in_blocks_are_those_of_the_file(name: str, outs: int) -> None:
    raw = raw_rows(name, outs, 512)
    expected = gguf_encoding(gguf.GGMLQuantizationType[name].value).decode(raw.view(-1)).view(outs, 512)
    part = part_of(name, outs, 512)
    assert torch.equal(part.widened(), expected)
    ids = torch.tensor([outs - 1, 0, 5])
    assert torch.equal(BlockMatrix((part, part)).rows(ids + outs).weight, expected[ids])


@pytest.mark.parametrize("name", FORMS)
def test_rows_may_be_laid_out_a_few_at_a_time(name: str) -> None:
    form, fields = FORMS[name]
    whole, raw, parts = part_of(name, 21, 256), raw_rows(name, 21, 256), BlockPart.empty(form, 21, 256)
    for start in (0, 8, 16):
        parts.put(start, fields(raw[start : start + 8]))
    assert torch.equal(parts.tiles, whole.tiles)


def test_a_matrix_in_int8_keeps_its_whole_numbers() -> None:
    small = Matrix(numbers(19, 96), numbers(19, seed=1)).stored_as("int8")
    assert torch.equal(in_blocks(small).widened(torch.float32), small.widened(torch.float32))


# --- the product ---


def test_rows_are_rounded_as_the_twin_rounds_them() -> None:
    x = numbers(5, 256) * 10 ** numbers(5, 1, seed=1)
    x[2, 32:64], x[3, 7] = 0, 1e30
    rounded = torch.zeros(5, 256 // BLOCK, ROUNDED, dtype=torch.uint8)
    _rounding()(x.data_ptr(), rounded.data_ptr(), 5, 256 // BLOCK)
    whole, tails = rounded[..., :BLOCK].contiguous().view(torch.int8), rounded[..., BLOCK:].contiguous()
    scale, scaled_sum = tails.view(torch.float32)[..., 0], tails.view(torch.float32)[..., 1]
    assert torch.equal((whole * scale.unsqueeze(-1)).flatten(1), rounded_rows(x))
    assert torch.equal(tails.view(torch.int32)[..., 2], whole.sum(-1, dtype=torch.int32))
    assert torch.equal(tails.view(torch.int32)[..., 3], whole[..., :16].sum(-1, dtype=torch.int32))
    assert torch.equal(scaled_sum, whole.sum(-1) * scale)
    assert whole.abs().amax(-1).eq(127).sum() == 39 and (rounded_rows(x) - x).abs().max() <= 0.5001 * 1e30 / 127


@each_value
@pytest.mark.parametrize("rows", [1, 3, 4, 9, 70])
@pytest.mark.parametrize("name", ALL)
def test_the_product_is_that_of_what_was_rounded_written_out(name: str, rows: int, threads: int) -> None:
    parts = part_of(name, 40, 768), part_of(name, 13, 768)
    matrix, x = BlockMatrix(parts, numbers(53, seed=1)), numbers(rows, 768, seed=2)
    found = BlockLinear(matrix)(x)
    exact = F.linear(rounded_rows(x).double(), matrix.widened(torch.float64), matrix.bias.double())
    terms = rounded_rows(x).double().abs() @ matrix.widened(torch.float64).abs().T + 1
    assert ((found.double() - exact).abs() <= 2e-6 * terms).all()
    torch.testing.assert_close(found, BlockTwin(matrix)(x), rtol=1e-4, atol=1e-4 * exact.abs().max().item())


@each_value
@pytest.mark.parametrize("name", ALL)
def test_a_row_has_the_same_bits_alone_and_among_others(name: str, threads: int) -> None:
    layer, x = BlockLinear(BlockMatrix((part_of(name, 45, 512),))), numbers(70, 512)
    whole = layer(x)
    for size in (1, 2, 3, 4, 5, 17):
        assert torch.equal(torch.cat([layer(some) for some in torch.split(x, size)]), whole)
    assert torch.equal(layer(x.view(7, 10, 512)), whole.view(7, 10, 45))


def test_what_is_no_number_makes_its_own_row_none() -> None:
    layer, x = BlockLinear(BlockMatrix((part_of("Q4_1", 16, 256),))), numbers(3, 256)
    expected = layer(x)
    x[1, 40], bad = float("nan"), [1]
    found = layer(x)
    assert found[bad].isnan().all() and torch.equal(found[[0, 2]], expected[[0, 2]])
    x[1, 40] = float("inf")
    assert layer(x)[bad].isnan().all()


# What instructions of other processors do, so that the text written for them can run on this one.
EMULATED = """
define internal <8 x i32> @dpbusd(<8 x i32> %sum, <32 x i8> %a, <32 x i8> %b) {
  %wa = zext <32 x i8> %a to <32 x i32>
  %wb = sext <32 x i8> %b to <32 x i32>
  %p = mul <32 x i32> %wa, %wb
{fours}
  ret <8 x i32> %s4
}
define internal <16 x i16> @maddubs(<32 x i8> %a, <32 x i8> %b) {
  %wa = zext <32 x i8> %a to <32 x i32>
  %wb = sext <32 x i8> %b to <32 x i32>
  %p = mul <32 x i32> %wa, %wb
  %even = shufflevector <32 x i32> %p, <32 x i32> poison, <16 x i32> <{evens}>
  %odd = shufflevector <32 x i32> %p, <32 x i32> poison, <16 x i32> <{odds}>
  %sum = add <16 x i32> %even, %odd
  %low = call <16 x i32> @llvm.smax.v16i32(<16 x i32> %sum, <16 x i32> splat (i32 -32768))
  %cut = call <16 x i32> @llvm.smin.v16i32(<16 x i32> %low, <16 x i32> splat (i32 32767))
  %out = trunc <16 x i32> %cut to <16 x i16>
  ret <16 x i16> %out
}
declare <16 x i32> @llvm.smax.v16i32(<16 x i32>, <16 x i32>)
declare <16 x i32> @llvm.smin.v16i32(<16 x i32>, <16 x i32>)
define internal <8 x i32> @maddwd(<16 x i16> %a, <16 x i16> %b) {
  %wa = sext <16 x i16> %a to <16 x i32>
  %wb = sext <16 x i16> %b to <16 x i32>
  %p = mul <16 x i32> %wa, %wb
  %even = shufflevector <16 x i32> %p, <16 x i32> poison, <8 x i32> <{few_evens}>
  %odd = shufflevector <16 x i32> %p, <16 x i32> poison, <8 x i32> <{few_odds}>
  %sum = add <8 x i32> %even, %odd
  ret <8 x i32> %sum
}
define internal <4 x i32> @smmla(<4 x i32> %v0, <16 x i8> %a, <16 x i8> %b) {
  %wa = sext <16 x i8> %a to <16 x i32>
  %wb = sext <16 x i8> %b to <16 x i32>
{eights}
  ret <4 x i32> %v4
}
declare i32 @llvm.vector.reduce.add.v8i32(<8 x i32>)
define internal <4 x i32> @sdot(<4 x i32> %sum, <16 x i8> %a, <16 x i8> %b) {
  %wa = sext <16 x i8> %a to <16 x i32>
  %wb = sext <16 x i8> %b to <16 x i32>
  %p = mul <16 x i32> %wa, %wb
{few_fours}
  ret <4 x i32> %s4
}
define internal <32 x i8> @psign(<32 x i8> %a, <32 x i8> %b) {
  %below = icmp slt <32 x i8> %b, zeroinitializer
  %none = icmp eq <32 x i8> %b, zeroinitializer
  %minus = sub <32 x i8> zeroinitializer, %a
  %turned = select <32 x i1> %below, <32 x i8> %minus, <32 x i8> %a
  %out = select <32 x i1> %none, <32 x i8> zeroinitializer, <32 x i8> %turned
  ret <32 x i8> %out
}
"""


def lanes(start: int, step: int, many: int) -> str:
    return ", ".join(f"i32 {start + step * lane}" for lane in range(many))


def fours_of(sums: int) -> str:
    kind = f"<{4 * sums} x i32>"
    return "\n".join(
        f"  %q{step} = shufflevector {kind} %p, {kind} poison, <{sums} x i32> <{lanes(step, 4, sums)}>\n"
        f"  %s{step + 1} = add <{sums} x i32> %{'sum' if step == 0 else f's{step}'}, %q{step}"
        for step in range(4)
    )


def emulated(text: str) -> str:
    eights = "\n".join(
        f"  %a{one} = shufflevector <16 x i32> %wa, <16 x i32> poison, <8 x i32> <{lanes(8 * (one // 2), 1, 8)}>\n"
        f"  %b{one} = shufflevector <16 x i32> %wb, <16 x i32> poison, <8 x i32> <{lanes(8 * (one % 2), 1, 8)}>\n"
        f"  %p{one} = mul <8 x i32> %a{one}, %b{one}\n"
        f"  %r{one} = call i32 @llvm.vector.reduce.add.v8i32(<8 x i32> %p{one})\n"
        f"  %o{one} = extractelement <4 x i32> %v{one}, i32 {one}\n"
        f"  %n{one} = add i32 %o{one}, %r{one}\n"
        f"  %v{one + 1} = insertelement <4 x i32> %v{one}, i32 %n{one}, i32 {one}"
        for one in range(4)
    )
    named = {
        "llvm.x86.avx512.vpdpbusd.256": "dpbusd",
        "llvm.x86.avx2.pmadd.ub.sw": "maddubs",
        "llvm.x86.avx2.pmadd.wd": "maddwd",
        "llvm.x86.avx2.psign.b": "psign",
        "llvm.aarch64.neon.smmla.v4i32.v16i8": "smmla",
        "llvm.aarch64.neon.sdot.v4i32.v16i8": "sdot",
    }
    kept = [line for line in text.splitlines() if not ("declare" in line and ("x86" in line or "aarch64" in line))]
    held = EMULATED.replace("{fours}", fours_of(8)).replace("{few_fours}", fours_of(4)).replace("{eights}", eights)
    held = held.replace("{evens}", lanes(0, 2, 16)).replace("{odds}", lanes(1, 2, 16))
    whole = "\n".join([held.replace("{few_evens}", lanes(0, 2, 8)).replace("{few_odds}", lanes(1, 2, 8)), *kept])
    for name, ours in named.items():
        whole = whole.replace(f"@{name}", f"@{ours}")
    return whole


def product(code: BlockCode, part: BlockPart, x: Tensor) -> Tensor:
    blocks, y, bias = part.ins // BLOCK, torch.empty(len(x), part.outs), torch.zeros(part.tiles.shape[0] * 8)
    rounded = torch.zeros(len(x), blocks * ROUNDED, dtype=torch.uint8)
    _rounding()(x.data_ptr(), rounded.data_ptr(), len(x), blocks)
    scale = 0 if part.scale is None else part.scale.data_ptr()
    code(
        rounded.data_ptr(), part.tiles.data_ptr(), bias.data_ptr(), y.data_ptr(), len(x), blocks, part.outs,
        tiles_at_a_time(part), scale, 4 * part.outs,
    )  # fmt: skip
    return y


def rows_with_great_sums(rows: int) -> Tensor:
    x = numbers(rows, 512)
    x[0, ::2], x[-1] = -x[0, ::2].abs() * 9, torch.sign(x[-1])
    return x


@each_value
@pytest.mark.parametrize("dot", ["plain", "vnni", "avx2", "smmla", "sdot"])
@pytest.mark.parametrize("name", tiered(ALL, list(ALL)[::2].__contains__))
def test_the_text_for_other_processors_gives_the_same_bits(name: str, dot: Dot) -> None:
    part, x = part_of(name, 21, 512), rows_with_great_sums(7)  # tiles of four rows and of three
    expected = BlockLinear(BlockMatrix((part,)))(x)
    code = _compiled(emulated(source(part.form, Target(dot))), "work")
    assert torch.equal(product(code, part, x), expected)
    for rows in (1, 2):
        assert torch.equal(product(code, part, x[:rows]), expected[:rows])


def object_code(form: BlockForm) -> bytes:
    """The product by smmla, compiled for a processor that may be another than this one."""
    import llvmlite.binding as llvm

    machine = llvm.Target.from_default_triple().create_target_machine(features=DOT_FEATURES["smmla"], opt=2)
    code: bytes = machine.emit_object(llvm.parse_assembly(source(form, Target("smmla"))))
    assert "smmla" in machine.emit_assembly(llvm.parse_assembly(source(form, Target("smmla"))))
    return code


def job_of(name: str, part: BlockPart, x: Tensor, folder: Path) -> dict[str, Any]:
    """Leave what a product reads in a folder; returns what its code is called with."""
    blocks = part.ins // BLOCK
    rounded = torch.zeros(len(x), blocks * ROUNDED, dtype=torch.uint8)
    _rounding()(x.data_ptr(), rounded.data_ptr(), len(x), blocks)
    read = {"x": rounded, "w": part.tiles, "bias": torch.zeros(part.tiles.shape[0] * 8)}
    read |= {} if part.scale is None else {"scale": part.scale}
    for key, held in read.items():
        (folder / f"{name}.{key}").write_bytes(held.contiguous().view(torch.uint8).numpy().tobytes())
    sizes = len(x), blocks, part.outs, tiles_at_a_time(part)
    arguments = ["x", "w", "bias", "y", *sizes, 0 if part.scale is None else "scale", 4 * part.outs]
    return {"read": list(read), "arguments": arguments, "bytes": 4 * len(x) * part.outs}


def test_two_rows_at_once_by_smmla_have_the_bits_of_one(tmp_path: Path) -> None:
    """The instruction itself, where the processor or an emulator has it; expected is what sdot gives here, or single
    products."""
    if not is_arm():
        pytest.skip("smmla is an instruction of ARM processors")
    emulator = [] if _has(I8MM, "FEAT_I8MM") else [shutil.which("qemu-aarch64"), "-cpu", "max"]
    if emulator and emulator[0] is None:
        pytest.skip("this processor has no i8mm, and qemu-aarch64 is not installed")
    jobs, expected = {}, {}
    dot: Dot = "sdot" if _has(DOTPROD, "FEAT_DotProd") else "plain"
    for form in ALL:
        part, x = part_of(form, 21, 512), rows_with_great_sums(7)
        (tmp_path / f"{form}.o").write_bytes(object_code(part.form))
        whole = product(_compiled(source(part.form, Target(dot)), "work", DOT_FEATURES.get(dot, "")), part, x)
        for rows in (1, 2, 3, 7):
            name = f"{form}-{rows}"
            jobs[name] = {"code": f"{form}.o", **job_of(name, part, x[:rows], tmp_path)}
            expected[name] = whole[:rows]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    child = Path(__file__).with_name("run_machine_code.py")
    subprocess.run([*emulator, sys.executable, str(child), str(tmp_path)], check=True, timeout=600)
    for name, wanted in expected.items():
        found = torch.frombuffer(bytearray((tmp_path / f"{name}.y").read_bytes()), dtype=torch.float32)
        assert torch.equal(found.view_as(wanted), wanted), name


def test_the_greatest_sums_fit() -> None:
    for form in ALL.values():
        part = BlockPart.empty(form, 8, 256)
        filled = torch.full((8, 8, 4 * form.words), 0x80 if form.bits == 8 and not form.offsets else 0x7F)
        filled = torch.full_like(filled, 0x88) if form.bits == 4 and not form.offsets else filled
        halves = torch.ones(8, 8, form.halves).half() if form.halves else None
        factors = torch.ones(8, 1, 1 + form.offsets).half() if form.supers else None
        part.put(0, Fields(filled.to(torch.uint8), halves, factors))
        if part.scale is not None:
            part.scale[:] = 1
        matrix, x = BlockMatrix((part,)), torch.full((2, 256), 127.0)
        x[1] *= -1
        assert torch.equal(BlockLinear(matrix)(x), BlockTwin(matrix)(x))


# --- models ---


def model_of(kind: str) -> PreTrainedModel:
    torch.manual_seed(1)
    made = {
        "llama": lambda: LlamaConfig(**WIDE, tie_word_embeddings=True),
        "qwen2": lambda: Qwen2Config(**WIDE),
        # heads of which none fills a block
        "narrow": lambda: LlamaConfig(**{**WIDE, "num_attention_heads": 8, "num_key_value_heads": 8}),
    }
    return AutoModelForCausalLM.from_config(made[kind]())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stored")
    made = {}
    for name in FILES:
        kind, stored = name.split()
        made[name] = write_gguf(model_of(kind), folder / f"{kind}-{stored}.gguf", gguf.GGMLQuantizationType[stored])
    return made


def rows_of(runner: NativeRunner, *feeds: Feed) -> Tensor:
    for seq in {feed.seq for feed in feeds}:
        runner.open(seq, GREEDY)
        runner.extend(seq, some_tokens(40))
    found = torch.stack([row.logits for rows in runner.score(feeds) for row in rows])
    for seq in {feed.seq for feed in feeds}:
        runner.close(seq)
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_quantised_file_runs_as_stored_on_a_cpu_and_says_nearly_what_it_says_in_float32(
    name: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = Feed(0, (1, 2, 3), (ROOT, 0, 0))
    runner = load_native(files[name], context_length=200)
    assert runner.weights == "stored" and runner.compiled and isinstance(runner.decoder.embedding, StoredRows)
    wide = load_native(files[name], context_length=200, dtype="float32")
    assert wide.weights == "float32"
    found, expected = rows_of(runner, feed), rows_of(wide, feed)
    assert 0 < (found - expected).abs().max() < 0.1 * expected.abs().max()
    monkeypatch.setenv("SPECBRANCH_LINEAR", "torch")
    twin = load_native(files[name], context_length=200, weights="stored")
    assert isinstance(twin.decoder.head, BlockTwin) and not twin.compiled
    assert (rows_of(twin, feed) - found).abs().max() < 0.1 * expected.abs().max()
    tokens = torch.tensor([0, 7, 130])
    torch.testing.assert_close(runner.decoder.embedding[tokens], wide.decoder.embedding[tokens], rtol=0, atol=0)


def test_rows_that_are_kept_unpacked_are_those_of_the_file(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_rows, "ROWS_KEPT", 70)
    table = load_native(files["llama Q4_1"], context_length=200).decoder.embedding
    wide = load_native(files["llama Q4_1"], context_length=200, dtype="float32").decoder.embedding
    assert isinstance(table, StoredRows)
    rng = torch.Generator().manual_seed(1)
    for _ in range(60):
        count = int(torch.randint(1, 90, (), generator=rng))
        ids = torch.randint(0, table.shape[0], (count,), generator=rng)
        assert torch.equal(table[ids], wide[ids])
    assert 0 < len(table._row_of) <= 70


@pytest.mark.parametrize("name", ["llama Q4_1", "qwen2 Q8_0"])
def test_operations_round_their_rows_as_a_layer_by_itself_does(name: str, files: dict[str, Path]) -> None:
    runner = load_native(files[name], context_length=200)
    step, decoder = runner._fused, runner.decoder
    rows_of(runner, Feed(0, (1, 2, 3), (ROOT, 0, 0)))
    # What the last operations left in the buffers: the last norm's rows, and the logits that came of them.
    hidden, size = step.buffers["h"][:3], decoder.arch.hidden // BLOCK * ROUNDED
    expected = torch.zeros(3, size, dtype=torch.uint8)
    _rounding()(hidden.data_ptr(), expected.data_ptr(), 3, decoder.arch.hidden // BLOCK)
    found = step.buffers["rounded"].view(torch.uint8).flatten()[: 3 * size].view(3, size)
    assert torch.equal(found, expected) and expected.any()


def test_a_token_has_the_same_bits_alone_in_a_tree_and_in_a_batch(files: dict[str, Path], threads: int) -> None:
    runner = load_native(files["qwen2 Q8_0"], context_length=200, tail=64)
    alone = rows_of(runner, Feed(0, (9,), (ROOT,)))
    tree = rows_of(runner, Feed(0, (4, 9, 9, 8, 3), (ROOT, ROOT, 0, 1, 2)))
    batch_size = rows_of(runner, Feed(1, tuple(range(60)), tuple(range(ROOT, 59))), Feed(0, (9,), (ROOT,)))
    assert torch.equal(tree[1], alone[0]) and torch.equal(batch_size[-1], alone[0])


@each_value
@pytest.mark.parametrize("shaping", tiered(("greedy", "everything"), "greedy".__eq__))
@pytest.mark.parametrize("name", tiered(("llama Q4_1", "qwen2 Q8_0"), "llama Q4_1".__eq__))
def test_every_method_gives_what_plain_decoding_gives_with_stored_weights(
    name: str, shaping: str, files: dict[str, Path]
) -> None:
    torch.set_num_threads(1)
    other = files["llama Q4_0" if "llama" in name else "qwen2 Q5_1"]
    sessions = compare(stored, files[name], other, SHAPINGS[shaping], runs=1)
    assert sum(session.stats.accepted for session in sessions.values()) > 0
    assert sum(session.stats.rejected for session in sessions.values()) > 0


def stored(path: Path, *, context_length: int, device: str, dtype: torch.dtype) -> Runner:
    return load_native(path, context_length=context_length, device=device, weights="stored")


def test_what_lies_in_no_blocks_is_refused_and_only_said_of_what_was_asked_for(tmp_path: Path) -> None:
    folder = saved(model_of("llama"), tmp_path / "folder")
    plain = write_gguf(model_of("llama"), tmp_path / "plain.gguf")
    for path in (folder, plain):
        assert load_native(path, context_length=64).weights == "float32"
        with pytest.raises(BadParameter, match="no GGUF file with matrices in any of Q4_0"):
            load_native(path, context_length=64, weights="stored")


@pytest.mark.parametrize(("device", "dtype"), [("cuda", None), ("cpu", "bfloat16"), ("cpu", "float64")])
def test_stored_weights_go_with_a_cpu_and_float32_alone(device: str, dtype: str | None) -> None:
    assert resolve_precision(None, "stored", torch.device("cpu")) == (torch.float32, "stored")
    with pytest.raises(BadParameter, match="expected a CPU and float32"):
        resolve_precision(dtype, "stored", torch.device(device))


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut short": (lambda data: data[:-500], "is cut short"),
    "an unknown type": (lambda data: data.replace(TYPE, TYPE[:-4] + b"\x99\0\0\0"), "blk.0.ffn_down.weight.*153"),
    "fewer rows": (lambda data: data.replace(TYPE, TYPE.replace(b"\x80", b"\x78")), "blk.0.ffn_down.weight.*has shape"),
    "half a block": (lambda data: data.replace(TYPE, TYPE.replace(b"\xa0", b"\x90")), "no multiple of 32"),
}
# The name of a tensor, its two sizes, and the number of its type.
TYPE = b"blk.0.ffn_down.weight" + b"".join(
    size.to_bytes(width, "little") for size, width in ((2, 4), (160, 8), (128, 8), (3, 4))
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_by_name(damage: str, files: dict[str, Path], tmp_path: Path) -> None:
    change, reported = DAMAGES[damage]
    bad, data = tmp_path / "bad.gguf", files["llama Q4_1"].read_bytes()
    assert TYPE in data
    bad.write_bytes(change(data))
    with pytest.raises(ModelError, match=rf"bad\.gguf.*{reported}"):
        load_native(bad, context_length=64, weights="stored")


def test_a_file_that_shrinks_while_it_is_read_is_refused_by_name(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specbranch.models import loading

    bad = tmp_path / "bad.gguf"
    bad.write_bytes(files["llama Q4_1"].read_bytes())
    reading = loading.read_weights

    def shrunk(*args: object) -> object:
        bad.write_bytes(bad.read_bytes()[:-2000])
        return reading(*args)

    monkeypatch.setattr(loading, "read_weights", shrunk)
    with pytest.raises(ModelError, match=r"bad\.gguf: tensor .* could not be read"):
        load_native(bad, context_length=64, weights="stored")
