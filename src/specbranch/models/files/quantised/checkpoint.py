"""A quantised checkpoint as a source of tensors: its matrices as they are stored, or their weights in floats.

Owns the table of formats, and which tensors of a file are quantised: the file decides, not the lists of exceptions in
its configuration. Invariants: `read` gives the weights that `matrix` stands for; a matrix that is stored in floats is
read as from any other file.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from specbranch.errors import ModelError
from specbranch.file_values import FileValues, read_object
from specbranch.models.files.matrix import FP8, Matrix
from specbranch.models.files.quantised import awq, compressed_tensors, fp8, gptq
from specbranch.models.files.quantised.layout import stacked
from specbranch.models.files.quantised.settings import Method, Quantisation, read_quantisation
from specbranch.models.files.quantised.tensors import Tensors, entry_of
from specbranch.models.files.tensor_file import ShardedFile, TensorFile, open_folder

log = logging.getLogger("specbranch")

READERS: dict[Method, ModuleType] = {
    "compressed-tensors": compressed_tensors,
    "awq": awq,
    "gptq": gptq,
    "fp8": fp8,
}
DOT_WEIGHT = ".weight"
CPU = torch.device("cpu")


class QuantisedCheckpoint:
    """The tensors of a checkpoint, by name."""

    def __init__(self, file: TensorFile | ShardedFile, quantisation: Quantisation) -> None:
        self.file, self.quantisation = file, quantisation
        self._mixed = False  # True once it was logged that a matrix is stored in several ways

    @property
    def name(self) -> str:
        """The file's name."""
        return self.file.name

    def __contains__(self, tensor: str) -> bool:
        return tensor in self.file or (tensor.endswith(DOT_WEIGHT) and self._quantised(tensor.removesuffix(DOT_WEIGHT)))

    def read(self, tensor: str, into: Tensor, *, leading: bool = False) -> None:
        """Fill `into` with a tensor, in floats; see TensorSource."""
        module = tensor.removesuffix(DOT_WEIGHT)
        if not tensor.endswith(DOT_WEIGHT) or not self._quantised(module):
            self.file.read(tensor, into, leading=leading)
        elif into.dim() != 2:
            raise ModelError(f"{self.name}: {module} is quantised; expected a tensor of shape {list(into.shape)}.")
        else:
            outs, ins = into.shape
            into.copy_(self._one(module, outs, ins, into.device, leading).widened(into.dtype))

    def matrix(
        self, modules: dict[str, int], ins: int, device: torch.device, *, leading: bool = False
    ) -> Matrix | None:
        """Read matrices as they are stored, one below the other, each with so many outputs.

        None if any of them is in floats, or if they are stored too differently for one matrix.
        """
        kinds = [self._quantised(module) for module in modules]
        if not any(kinds):
            return None
        whole = None
        if all(kinds):
            parts = [self._one(module, outs, ins, device, leading) for module, outs in modules.items()]
            whole = stacked(parts)
        if whole is None and not self._mixed:
            self._mixed = True
            log.warning(
                "%s: %s are stored in different ways, and are multiplied together. Such matrices become floats.",
                self.name,
                ", ".join(modules),
            )
        return whole

    def weight_bytes(self) -> int:
        """Return the bytes of all tensors in the file."""
        files = [self.file] if isinstance(self.file, TensorFile) else list(self.file.shards.values())
        return sum(entry.end - entry.offset for file in files for entry in file.entries.values())

    def _quantised(self, module: str) -> bool:
        if any(f"{module}.{part}" in self.file for part in ("qweight", "weight_packed")):
            return True
        entry = entry_of(self.file, module + DOT_WEIGHT)
        return entry is not None and entry.encoding.dtype in (torch.int8, FP8)

    def _one(self, module: str, outs: int, ins: int, device: torch.device, leading: bool) -> Matrix:
        """Read a matrix; `leading`: the file may have more outputs, of which the first are taken."""
        form, tensors = READERS[self.quantisation.method], Tensors(self.file, module, device)
        held = form.outputs(tensors)
        if held != outs and not (leading and held > outs):
            raise ModelError(
                f"{self.name}: {module} has {held} outputs; its configuration says {outs}. The file belongs to another "
                "model."
            )
        scheme = self.quantisation.scheme_of(module)
        found: Matrix = form.read(tensors, held, ins, scheme, self.quantisation)
        return found if held == outs else found.rows(torch.arange(outs, device=device))


def open_checkpoint(folder: Path) -> TensorFile | ShardedFile | QuantisedCheckpoint:
    """Open the safetensors of a model folder, quantised or not."""
    config = folder / "config.json"
    values = FileValues(read_object(config), f"The configuration of {folder}")
    quantisation, file = read_quantisation(values), open_folder(folder)
    if quantisation is None:
        return file
    for what in quantisation.left_out:
        log.info("%s asks for %s; they stay in the precision that it is computed in.", folder, what)
    return QuantisedCheckpoint(file, quantisation)
