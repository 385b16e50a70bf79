"""Stored blocks widened on a GPU: the host's bits, in little memory."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from specbranch.models.files.encodings import gguf_encoding
from specbranch.models.files.tensor_file import UNPACKED_NUMBERS
from test_weights import HALVES, random_blocks, same_bits, widened, written

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", HALVES)
def test_any_bytes_are_unpacked_on_a_gpu_as_the_gguf_package_does(kind: str) -> None:
    stored, packed = gguf.GGMLQuantizationType[kind], random_blocks(kind, 700)
    got = gguf_encoding(stored.value).decode(torch.from_numpy(packed.reshape(-1)).cuda())
    assert got.is_cuda and same_bits(got.cpu(), widened(packed, stored))


@pytest.mark.parametrize("kind", HALVES)
def test_a_tensor_of_several_parts_is_read_onto_a_gpu_in_little_memory(kind: str, tmp_path: Path) -> None:
    file = written(
        tmp_path / "weights",
        kind,
        random_blocks(kind, UNPACKED_NUMBERS * 5 // 2 // gguf_encoding(gguf.GGMLQuantizationType[kind]).block),
    )
    there, here = (
        torch.empty(file.entries["w"].shape, dtype=torch.bfloat16, device=device) for device in ("cuda", "cpu")
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    file.read("w", there)
    assert torch.cuda.max_memory_allocated() - before < 8 * UNPACKED_NUMBERS
    file.read("w", here)
    assert torch.equal(there.cpu(), here)
