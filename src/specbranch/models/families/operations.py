"""The operations of a layer, as values: a family lists them, and each forward pass runs that list.

Owns the vocabulary only. The plain decoder, the GPU steps and training run any list. The compiled CPU step runs lists
for which `is_plain` holds. Invariant: an operation names everything that decides its result,
except weights and sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

# gated activations: silu(gate)·up; gelu by tanh; gpt-oss: both sides bounded, and gate·sigmoid(1.702·gate)·(up + 1)
Activation = Literal["silu", "gelu_tanh", "bounded_swiglu"]
# "best_first": softmax over the chosen experts only; "all_first": over all of them, then the best are chosen
Routing = Literal["best_first", "all_first"]
ATTENTION_NORM, MLP_NORM = "attention_norm", "mlp_norm"
ATTENTION_AFTER_NORM, MLP_AFTER_NORM = "attention_after_norm", "mlp_after_norm"
# Positions that a draft window leaves visible: softmax puts the weight that no key deserves on the first ones
# (StreamingLLM, arXiv 2309.17453, keeps four).
FIRST_SEEN = 4


@dataclass(frozen=True, slots=True)
class Attention:
    """Self-attention of a layer."""

    window: int | None = None  # a row sees this many positions, its own included; None: all up to its own
    table: int = 0  # which of the model's rotary tables turns queries and keys
    scale: float | None = None  # factor of the scores; None: 1 / √head_dim
    softcap: float | None = None  # scores become softcap · tanh(score / softcap)
    sinks: bool = False  # each head has a further score that takes part in the softmax and has no value
    skips_first: bool = False  # rows behind the first position do not see it: there is no feature before it
    first: int = 0  # rows with a window see this many first positions, too

    @property
    def is_plain(self) -> bool:
        """True if scores are scaled by 1 / √head_dim, and every row sees all positions up to its own."""
        return replace(self, table=0) == PLAIN_ATTENTION


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate(x), up(x)))."""

    activation: Activation = "silu"


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of gated MLPs: a router chooses `active` of `count` for each row, and weights their outputs."""

    count: int
    active: int
    intermediate: int  # neurons of an expert
    activation: Activation = "silu"
    routing: Routing = "all_first"
    weights_sum_to_one: bool = True  # the chosen experts' weights are divided by their sum
    biased: bool = False  # the router and the experts' matrices have biases


Operation = Attention | GatedMlp | Experts


@dataclass(frozen=True, slots=True)
class Join:
    """The input of a draft's first layer that reads features (EAGLE-3): norm(embedding) beside hidden_norm(x).

    The stream x is the feature of the position before. `normed_residual`: the stream goes on as hidden_norm(x).
    """

    normed_residual: bool = False


@dataclass(frozen=True, slots=True)
class Residual:
    """x + after(operation(norm(x))); without `after`, x + operation(norm(x)). Norms are named as in `LayerWeights`."""

    norm: str
    operation: Operation
    after: str | None = None
    join: Join | None = None


LayerForm = tuple[Residual, Residual]  # attention, then MLP or experts


def layer_form(
    attention: Attention, mlp: GatedMlp | Experts, *, norms_after: bool = False, join: Join | None = None
) -> LayerForm:
    """Return the layer that runs attention, then the MLP, each on a normed input."""
    return (
        Residual(ATTENTION_NORM, attention, ATTENTION_AFTER_NORM if norms_after else None, join),
        Residual(MLP_NORM, mlp, MLP_AFTER_NORM if norms_after else None),
    )


PLAIN_ATTENTION = Attention()
PLAIN_LAYER = layer_form(PLAIN_ATTENTION, GatedMlp())


def is_plain(forms: Iterable[LayerForm]) -> bool:
    """True if all layers are those of Llama; biases and norms of queries and keys do not matter."""
    return all(form == PLAIN_LAYER for form in forms)


def within(form: LayerForm, positions: int) -> LayerForm:
    """Return the layer in a context of so many positions: a window that covers all of them is none."""
    attention = attention_of(form)
    if attention.window is None or attention.first + attention.window < positions:
        return form
    return replace(form[0], operation=replace(attention, window=None, first=0)), form[1]


def narrowed(form: LayerForm, window: int) -> LayerForm:
    """Return the layer with a draft window: a row sees the first few and the last `window` positions.

    A layer with a window of its own that is not longer keeps it.
    """
    attention = attention_of(form)
    if attention.window is not None and attention.window <= window:
        return form
    return replace(form[0], operation=replace(attention, window=window, first=FIRST_SEEN)), form[1]


def attention_of(form: LayerForm) -> Attention:
    """Return the attention of a layer."""
    operation = form[0].operation
    assert isinstance(operation, Attention)
    return operation


def experts_of(form: LayerForm) -> Experts | None:
    """Return the experts of a layer; None if it has an MLP."""
    operation = form[1].operation
    return operation if isinstance(operation, Experts) else None
