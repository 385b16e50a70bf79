"""The distance between an inflated model and its source: their logits after the same texts.

Owns the texts and the tolerance. Invariant: both models are loaded as a user would load them. Each processes the texts
both ways: as a prefill and by decode steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from specbranch.assembly import ModelChoice, load_runner, load_tokenizer
from specbranch.core.runner import Feed
from specbranch.training.distill.agreement import read

if TYPE_CHECKING:
    from torch import Tensor

    from specbranch.models.runners.torch_runner import TorchRunner

PROBE_TEXTS = (
    "The three laws of robotics were written down in 1942. The first of them says that a robot may not injure a human "
    "being or, through",
    "def average(numbers: list[float]) -> float:\n    if not numbers:\n        raise ValueError('no numbers')\n    "
    "return sum(numbers) /",
    "Sarah has 12 apples. She gives 3 of them to each of her two brothers, and buys 5 more on the way home. How many "
    "apples does she have",
)
TEXT_TOKENS = 128  # most tokens of a text
COMPARED_STEPS = 16  # tokens at the end of a text that are compared
LIKENESS_SLOTS = 1024  # KV slots: three short texts, one after the other
EXACT_DTYPE: Literal["float32"] = "float32"
# Of the largest logit. Half precision rounds other numbers in another shape, so what it does to the source itself
# counts as well.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}
ROUNDING_FACTOR = 3.0  # times as far as rounding takes the source from itself in float32


@dataclass(frozen=True, slots=True)
class Likeness:
    """The distance of two models' logits, relative to the largest."""

    dtype: str
    tokens: int  # compared
    difference: float
    tolerance: float
    rounding: float  # how far the source in this precision is from itself in float32
    same_choice: float  # share of tokens after which the likeliest is the same

    @property
    def agrees(self) -> bool:
        """True if they are the same model; false if a number is not finite."""
        return self.difference <= self.tolerance

    def record(self) -> dict[str, Any]:
        """Return its numbers by name."""
        return asdict(self)


def compare(source: ModelChoice, inflated: ModelChoice, tokenizer: ModelChoice) -> Likeness:
    """Compare two models, one loaded after the other; a third name gives their tokenizer."""
    encode = load_tokenizer(tokenizer).encode
    texts = [encode(text)[:TEXT_TOKENS] for text in PROBE_TEXTS]
    dtype, own = _logits(source, texts)
    exact = (
        own
        if dtype in ("float64", EXACT_DTYPE)
        else _logits(replace(source, dtype=EXACT_DTYPE, weights=EXACT_DTYPE), texts)[1]
    )
    found = _logits(inflated, texts)[1]
    rounding = _apart(own, exact)
    tolerance = max(TOLERANCES[dtype], ROUNDING_FACTOR * rounding)
    same = float((found.argmax(-1) == exact.argmax(-1)).double().mean())
    return Likeness(dtype, len(found), _apart(found, exact), tolerance, rounding, same)


def _logits(choice: ModelChoice, texts: Sequence[Sequence[int]]) -> tuple[str, Tensor]:
    """Return a model's precision, and its logits at the end of each text [tokens, columns], on the CPU."""
    import torch

    runner = load_runner(replace(choice, context_length=TEXT_TOKENS, shorten=True, cache_tokens=LIKENESS_SLOTS))
    dtype = str(getattr(runner, "dtype", None)).removeprefix("torch.")
    return dtype, torch.cat([_read(runner, text) for text in texts])


def _read(runner: TorchRunner, text: Sequence[int]) -> Tensor:
    from specbranch.models.sampling.logit_rows import scored

    def said(feed: Feed) -> Tensor:
        logits, columns = scored(runner.score([feed])[0])
        return logits[:, : runner.sampler.width(columns)].double().cpu()

    (found,) = read(runner, text[:-COMPARED_STEPS], text[-COMPARED_STEPS:], said)
    return found


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())
