"""SpecBranch: parallel speculative decoding with branches, lossless, with any pair of models.

`LLM` decodes, `AsyncLLM` for many callers at once; `SamplingParams` says how. Importing this package
imports no torch: that waits until a model is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.errors import SpecBranchError

if TYPE_CHECKING:
    from specbranch.async_engine import AsyncLLM
    from specbranch.engine import LLM, Output

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "Output", "SamplingParams", "SpecBranchError", "SpeculativeConfig", "__version__"]


def __getattr__(name: str) -> object:
    if name in ("LLM", "Output"):
        from specbranch import engine

        return getattr(engine, name)
    if name == "AsyncLLM":
        from specbranch import async_engine

        return async_engine.AsyncLLM
    raise AttributeError(f"module 'specbranch' has no attribute {name!r}")
