"""SpecBranch: parallel speculative decoding with branches, lossless, with any pair of models.

`LLM` decodes, `AsyncLLM` for many callers at once; `SamplingParams` says how. Importing this package
imports no torch: that waits until a model is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbranch.config import LoadOptions, SamplingParams, SpeculativeConfig
from specbranch.errors import SpecBranchError

if TYPE_CHECKING:
    from specbranch.async_engine import AsyncLLM, RequestOptions
    from specbranch.engine import LLM, Output

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "LoadOptions",
    "Output",
    "RequestOptions",
    "SamplingParams",
    "SpecBranchError",
    "SpeculativeConfig",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name in ("LLM", "Output"):
        from specbranch import engine

        return getattr(engine, name)
    if name in ("AsyncLLM", "RequestOptions"):
        from specbranch import async_engine

        return getattr(async_engine, name)
    raise AttributeError(f"module 'specbranch' has no attribute {name!r}")
