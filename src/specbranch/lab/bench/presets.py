"""The presets of `specbranch bench run`, and its defaults.

Owns the choice of methods, prompts, clocks and shapes. How they are run is for `job` and `paired_runs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbranch.clock.shipped import shipped_profiles
from specbranch.core.methods import METHODS
from specbranch.core.policies import POLICIES
from specbranch.lab.suites.suite import ALL_SHIPPED, PUBLIC
from specbranch.pairs import PAIRS

PUBLIC_SUITES = tuple(PUBLIC)
# Methods that replay fast; lookahead needs the target to decode again.
QUICKLY = tuple(name for name, method in METHODS.items() if not method.guesses)
VARIANTS = ("specbranch:confidence", "specbranch:paper", "specbranch")
MODELLED = (*(name for name in QUICKLY if name != "specbranch"), *VARIANTS)
TWO_DEVICES = ("h200x2-1b-8b", "h200x2-68m-7b")  # overlap with a GPU for each model
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {
        "methods": "autoregressive,speculative,specbranch",
        "suites": (ALL_SHIPPED,),
        "limit": 2,
        "max_tokens": 64,
        "tune": False,
    },
    "wall": {
        "methods": "autoregressive,speculative,specbranch,auto,hf-generate",
        "suites": PUBLIC_SUITES,
        "limit": 4,
        "repeats": 2,
    },
    "modelled": {
        "methods": ",".join(MODELLED),
        "pair": tuple(PAIRS),
        "suites": PUBLIC_SUITES,
        "limit": 32,
        "clock": tuple(name for name in shipped_profiles() if name not in TWO_DEVICES),
    },
}
PLANNER_PARTS, PAPER_PARTS = POLICIES["planner"].parts, POLICIES["paper"].parts
THRESHOLDS, PAPER_WIDTHS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6), (1, 3, 6, 9, 12)  # ε and k_max of the paper's tables
ABLATION = (
    *("autoregressive", "speculative", "adaptive", "pearl", "lookup", "tree", "specbranch"),
    *(f"specbranch-{part}" for part in PLANNER_PARTS),
    *("specbranch:fixed", "specbranch:confidence", "specbranch:last", "specbranch:oracle", "specbranch:paper"),
    *(f"specbranch:paper-{part}" for part in PAPER_PARTS),
    *(f"specbranch:{policy}@stop_below={value}" for policy in ("paper", "confidence") for value in THRESHOLDS),
    *(f"specbranch:paper@max_branches={value}" for value in PAPER_WIDTHS),
)
PRESETS["ablation"] = {
    "methods": ",".join(ABLATION),
    "pair": ("smollm2-weak", "smollm2-default"),
    "suites": PUBLIC_SUITES,
    "limit": 8,
    "clock": ("c10",),
}

# On one GPU a method takes some 10 seconds for eight prompts a suite at 7B or 8B, and for two at 33B.
OF_PAIR: dict[str, dict[str, Any]] = {  # the shapes of each pair on a GPU
    "smollm2-weak": {"draft_shape": "68m", "target_shape": "7b"},
    "smollm2-default": {"draft_shape": "1b", "target_shape": "8b"},
    "smollm2-strong": {"draft_shape": "1.3b", "target_shape": "33b", "limit": 2, "outside_limit": 1},
}
GPU_SERIAL = ("autoregressive", "speculative", "adaptive")
GPU_BASELINES = (*GPU_SERIAL, "pearl", "tree", "lookup", "lookahead", "specbranch:confidence")
GPU_OURS = ("specbranch", "specbranch-overlap", "specbranch-trees", "specbranch-lookup", "auto")
GPU_BRIEF = ("autoregressive", "speculative", "pearl", "tree", "specbranch", "specbranch-overlap")
GPU_OUTSIDE = ("hf-generate", "hf-assisted")
GPU: dict[str, Any] = {
    "methods": ",".join((*GPU_BASELINES, *GPU_OURS)),
    "device": "cuda",
    "executor": "streams",
    "suites": PUBLIC_SUITES,
    "limit": 8,
    "context": (1024,),
    "tuning_prompts": 1,
    "trials": 8,
    "outside_limit": 2,
    "timeline": True,
}
SHAPED = {**GPU, "of_pair": OF_PAIR}
PRESETS |= {
    "gpu-core": {**SHAPED, "methods": ",".join((*GPU_BASELINES, *GPU_OURS, *GPU_OUTSIDE))},
    "gpu-temperature": {**SHAPED, "temperatures": (1.0,)},
    "gpu-context": {
        **SHAPED,
        "methods": ",".join(GPU_BRIEF),
        "context": (8192, 32768),
        "limit": 4,
        "of_pair": {**OF_PAIR, "smollm2-strong": {**OF_PAIR["smollm2-strong"], "limit": 1}},
    },
    "gpu-int8": {**SHAPED, "methods": ",".join((*GPU_BRIEF, "adaptive", "auto")), "draft_weights": "int8"},
    "gpu-cpu-draft": {
        **SHAPED,
        "of_pair": {pair: {**given, "draft_shape": "own"} for pair, given in OF_PAIR.items()},
        "methods": ",".join((*GPU_BRIEF, "auto")),
        "draft_device": "cpu",
        "executor": "process",
    },
    "gpu-real": {**GPU, "methods": ",".join((*GPU_BASELINES, "specbranch:paper", *GPU_OURS, *GPU_OUTSIDE))},
    "gpu-long": {**GPU, "methods": ",".join(GPU_BRIEF), "context": (32_768, 131_072), "limit": 2},
}
DEFAULTS: dict[str, Any] = {  # the other defaults are those of `BenchOrder`
    "methods": "autoregressive,speculative,adaptive,pearl,specbranch,lookup",
    "of_pair": {},  # values that differ from pair to pair
    "tune": True,
    "executor": "serial",
}
PRESET_HELP = [
    ("quick", "three methods, untuned, on two shipped prompts of each kind; a minute or two"),
    (
        "wall",
        "wall clock: plain decoding, tuned serial speculation, specbranch, auto and transformers on 4 prompts of each "
        "public suite",
    ),
    ("modelled", "all methods, pairs and shipped profiles on 32 prompts of each public suite, from records"),
    (
        "ablation",
        "specbranch and the paper's policy with each part switched off, and over ε and k_max, on 8 prompts of each "
        "suite",
    ),
    (
        "gpu-core",
        "wall clock of one GPU: the pair in the shapes 68m & 7b (smollm2-weak), 1b & 8b (smollm2-default) or "
        "1.3b & 33b (smollm2-strong); all methods and transformers on 8 prompts of each public suite (33b: 2), with "
        "filler text up to 1,024 tokens",
    ),
    ("gpu-temperature", "gpu-core at temperature 1, without transformers"),
    ("gpu-context", "fewer methods, in contexts of 8,192 tokens and, if the target supports it, 32,768"),
    ("gpu-int8", "fewer methods, with drafts in int8"),
    ("gpu-cpu-draft", "the draft in its own shape in a process on the CPU, in parallel with the target on the GPU"),
    ("gpu-real", "models in their own shapes: a --pair, or --target and --draft"),
    ("gpu-long", "the same with fewer methods, in contexts of 32,768 and, if the target supports it, 131,072 tokens"),
]


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in missing values from the preset, then from the defaults."""
    filled = {**DEFAULTS, **PRESETS.get(given["preset"] or "", {})}
    found = {name: given[name] if given.get(name) not in (None, ()) else value for name, value in filled.items()}
    of_pair = {
        pair: {name: given[name] or value for name, value in values.items()}
        for pair, values in filled["of_pair"].items()
    }
    return {**given, **found, "of_pair": of_pair}
