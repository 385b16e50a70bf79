"""llm-specbranch: answers from SpecBranch for LLM's command line and Python library.

Owns which models `llm` is told of. Invariant: importing this package loads no model and no torch, because `llm` imports
its plugins at every start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llm

from llm_specbranch.models import AsyncSpecBranchModel, SpecBranchModel
from llm_specbranch.named_pairs import named_pairs

__all__ = ["AsyncSpecBranchModel", "SpecBranchModel", "register_models"]


@llm.hookimpl
def register_models(register: Callable[..., Any]) -> None:
    """Register the model `specbranch`, and one for each pair that the user has named."""
    register(SpecBranchModel("specbranch"), AsyncSpecBranchModel("specbranch"))
    for name, options in named_pairs().items():
        model_id = f"specbranch/{name}"
        register(SpecBranchModel(model_id, options), AsyncSpecBranchModel(model_id, options))
