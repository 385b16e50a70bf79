"""What a bench runs where nothing is said: the presets of `specbranch bench run`, and its defaults.

Owns the choice of methods, prompts and clocks, nothing of how they are run.
"""

from __future__ import annotations

from typing import Any

from specbranch.bench.suites import ALL_SHIPPED
from specbranch.config import PARTS
from specbranch.core.methods import METHODS
from specbranch.pairs import PAIRS
from specbranch.sim.shipped import shipped_profiles

QUICKLY = tuple(name for name, method in METHODS.items() if not method.guesses)  # replayed; lookahead has the target decode anew
MODELLED = (*(name for name in QUICKLY if name != "specbranch"), "specbranch:confidence", "specbranch:paper", "specbranch")
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"methods": "autoregressive,speculative,specbranch", "suites": (ALL_SHIPPED,), "limit": 2, "max_tokens": 64, "tune": False},
    "wall": {
        "methods": "autoregressive,speculative,specbranch,auto,hf-generate",
        "suites": ("humaneval", "gsm8k", "mt_bench", "cnn_dm"),
        "limit": 4,
        "repeats": 2,
    },
    "modelled": {
        "methods": ",".join(MODELLED),
        "pair": tuple(PAIRS),
        "suites": ("humaneval", "gsm8k", "mt_bench", "cnn_dm"),
        "limit": 32,
        "clock": shipped_profiles(),
    },
}
PLANNER_PARTS, PAPER_PARTS = PARTS["planner"], PARTS["paper"]
THRESHOLDS, WIDTHS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6), (1, 3, 6, 9, 12)  # ε and k_max of the paper's tables
ABLATION = (
    *("autoregressive", "speculative", "adaptive", "pearl", "lookup", "tree", "specbranch"),
    *(f"specbranch-{part}" for part in PLANNER_PARTS),
    *("specbranch:fixed", "specbranch:confidence", "specbranch:last", "specbranch:oracle", "specbranch:paper"),
    *(f"specbranch:paper-{part}" for part in PAPER_PARTS),
    *(f"specbranch:{policy}@stop_below={value}" for policy in ("paper", "confidence") for value in THRESHOLDS),
    *(f"specbranch:paper@max_branches={value}" for value in WIDTHS),
)
PRESETS["ablation"] = {
    "methods": ",".join(ABLATION),
    "pair": ("smollm2-weak", "smollm2-default"),
    "suites": ("humaneval", "gsm8k", "mt_bench", "cnn_dm"),
    "limit": 8,
    "clock": ("c10",),
}
DEFAULTS: dict[str, Any] = {
    "methods": "autoregressive,speculative,adaptive,pearl,specbranch,lookup",
    "pair": (),
    "suites": (),
    "limit": None,
    "max_tokens": 128,
    "repeats": 1,
    "clock": (),
    "tune": True,
}
