"""A program of its own for test_blocks: runs machine code made for an ARM processor with i8mm, and keeps what came out.
It needs no more than llvmlite, and compiles nothing, so that an emulator is done with it in seconds."""

from __future__ import annotations

import ctypes
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm


@cache
def engine_of(code: Path) -> Any:
    """Load code from an object file."""
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code.read_bytes()))
    engine.finalize_object()
    return engine


def main(folder: Path) -> None:
    """Run every job of a folder: its code, what that reads, what it is called with, and how long the result is."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name, job in json.loads((folder / "jobs.json").read_text()).items():
        held = {key: ctypes.create_string_buffer((folder / f"{name}.{key}").read_bytes()) for key in job["read"]}
        held["y"] = ctypes.create_string_buffer(job["bytes"])
        given = [ctypes.addressof(held[one]) if isinstance(one, str) else one for one in job["arguments"]]
        numbers, work = (ctypes.c_int64 * (1 + len(given)))(0, *given), engine_of(folder / job["code"])
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work.get_function_address("work"))(ctypes.addressof(numbers))
        (folder / f"{name}.y").write_bytes(held["y"].raw)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
