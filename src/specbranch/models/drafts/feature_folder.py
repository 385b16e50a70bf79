"""Reading a draft that reads its target's features: our folders, and EAGLE-3 heads in the two public layouts.

Owns the settings of such a draft by each layout, the names of its tensors, and its check against the target. Does not
own what a plain draft's folder holds (`draft_folder.py`). Invariant: a `FeatureDraft` fits its target; a wrong pairing
is refused by the size or the tensor that differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from specbranch.errors import ModelError
from specbranch.file_values import FileValues, read_object
from specbranch.models.drafts.draft_folder import DraftFile
from specbranch.models.drafts.draft_name import FEATURES, KEY, FeatureLayout, feature_layout
from specbranch.models.drafts.load import open_for_target
from specbranch.models.families.operations import Join
from specbranch.models.files.architecture import DRAFT_VOCABULARY, SPECULATORS_TYPE, Architecture
from specbranch.models.files.locate import locate
from specbranch.models.files.tensor_file import TensorSource, open_folder
from specbranch.models.files.weights import D2T

TAP_IDS = "eagle_aux_hidden_state_layer_ids"
FC, FC_NORM, INPUT_NORM = "fc.weight", "fc_norm.{}.weight", "input_norm.weight"
OWN_EMBEDDING, OWN_HEAD, Q_BIAS = "embed_tokens.weight", "lm_head.weight", "layers.0.self_attn.q_proj.bias"
FIRST_LAYER = "midlayer."  # what the original layout calls its first layer
FEATURE_LAYERS_READ = 2  # most layers


@dataclass(frozen=True, slots=True)
class FeatureForm:
    """How a draft takes features, as its configuration says."""

    taps: tuple[int, ...]  # how many of the target's layers have run where a hidden state is taken
    normed_residual: bool = False  # `norm_before_residual`
    feeds_normed: bool = False  # `norm_output`: its own states are fed back behind the last norm
    norms_taps: bool = False  # `fc_norm`: each hidden state is normed
    norms_input: bool = False  # `norm_before_fc`: all of them are normed together


@dataclass(frozen=True, slots=True)
class FeatureTensors:
    """The tensors of such a draft, under the names that a decoder asks for, or under speculators'."""

    source: TensorSource

    @property
    def name(self) -> str:
        """The file's name."""
        return self.source.name

    def __contains__(self, tensor: str) -> bool:
        return self._stored(tensor) in self.source

    def read(self, tensor: str, into: Tensor, *, leading: bool = False) -> None:
        """Fill `into`; see TensorSource."""
        self.source.read(self._stored(tensor), into, leading=leading)

    def _stored(self, tensor: str) -> str:
        plain = tensor.removeprefix("model.")
        names = (plain, plain.replace("layers.0.", FIRST_LAYER, 1), f"model.{plain}")
        return next((name for name in names if name in self.source), plain)


@dataclass(frozen=True, slots=True)
class FeatureDraft:
    """A feature draft that fits its target; no weights are read yet."""

    name: str
    arch: Architecture
    form: FeatureForm
    tensors: FeatureTensors
    target: Architecture
    storage: str | None = None  # "int8" if our file stores its matrices so

    def head_ids(self) -> Tensor | None:
        """Return the token of each row of the head; None: the head is whole."""
        count, file = self.arch.head_tokens, self.tensors.source
        if isinstance(file, DraftFile) and (ids := file.head_ids) is not None:
            return self._checked(ids)
        if count is None and D2T not in file:
            return None
        above = torch.empty(count or self.arch.vocabulary, dtype=torch.int64)
        if isinstance(file, DraftFile):
            above = file.tensor(D2T).long()
        else:
            file.read(D2T, above)
        return self._checked(above + torch.arange(len(above)))

    def _checked(self, ids: Tensor) -> Tensor:
        """Refuse a table that names a token twice, or one that the target does not have."""
        wrong = ids[(ids < 0) | (ids >= self.target.vocabulary)]
        if len(wrong):
            raise ModelError(
                f"{self.name}: by its table {D2T!r} a row of the head stands for token {int(wrong[0])}; the target's "
                f"ids are 0 to {self.target.vocabulary - 1}. The draft belongs to another target, or is damaged."
            )
        values = ids.sort().values
        if len(twice := values[1:][values.diff() == 0]):
            raise ModelError(
                f"{self.name}: by its table {D2T!r} two rows of the head stand for token "
                f"{int(twice[0])}. The file is damaged: fetch it again, or make the draft again."
            )
        return ids


def open_feature_draft(folder: str | Path, target: str | Path, target_arch: Architecture) -> FeatureDraft:
    """Open a feature draft for a target; raises a ModelError if they do not fit. `target`: its name or path."""
    layout = feature_layout(folder)
    if layout is None:
        raise ModelError(f"{folder} is no draft that reads features: its config.json has no {FEATURES!r}.")
    found = _own(folder, target) if layout == "specbranch" else _public(Path(folder), layout, target_arch)
    _check(found)
    return found


def _own(folder: str | Path, target: str | Path) -> FeatureDraft:
    """Open a draft of `specbranch distill`; it belongs to the target with its fingerprint."""
    found = open_for_target(folder, target)
    config = found.draft.config
    block = config[FEATURES] if FEATURES in config else config[KEY][FEATURES]
    kept = FileValues({FEATURES: block}, f"The configuration of {found.name}").group(FEATURES)
    form = FeatureForm(
        _taps(kept, "taps"),
        kept.flag("norm_before_residual", False),
        kept.flag("norm_output", False),
        kept.flag("fc_norm", False),
        kept.flag("norm_before_fc", False),
    )
    tensors = FeatureTensors(found.draft)
    arch = _joined(found.arch, form, tensors)
    return FeatureDraft(found.name, arch, form, tensors, found.target, found.draft.info.storage)


def _public(folder: Path, layout: FeatureLayout, target: Architecture) -> FeatureDraft:
    """Open an EAGLE-3 head; its context is the target's, as such files often name a shorter one."""
    where = locate(str(folder)).path
    if not list(where.glob("*.safetensors")) and (stored := sorted(where.glob("*.bin"))):
        raise ModelError(
            f"{where} stores its weights as {stored[0].name}; expected safetensors. Convert the file, for example "
            "with `safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')`."
        )
    values = FileValues(read_object(where / "config.json"), f"The configuration of {where}")
    form = (_form_of_speculators if layout == "speculators" else _form_of_original)(values, target)
    tensors = FeatureTensors(open_folder(where))
    arch = Architecture.from_config(_layer_config(values, layout), str(where))
    arch = replace(arch, context_length=target.context_length)
    return FeatureDraft(str(where), _joined(arch, form, tensors), form, tensors, target)


def _layer_config(values: FileValues, layout: FeatureLayout) -> dict[str, object]:
    """Return the configuration of the draft's layers, as a model's of that family."""
    inner = values.group("transformer_layer_config").values if layout == "speculators" else values.values
    left = {key: value for key, value in inner.items() if key != SPECULATORS_TYPE}
    reduced = values.get(DRAFT_VOCABULARY)
    return {"model_type": "llama", **left, **({} if reduced is None else {DRAFT_VOCABULARY: reduced})}


def _form_of_speculators(values: FileValues, target: Architecture) -> FeatureForm:
    return FeatureForm(
        _taps(values, TAP_IDS) or _usual_taps(target),
        values.flag("norm_before_residual", False),
        values.flag("norm_output", False),
        values.flag("fc_norm", False),
        values.flag("norm_before_fc", False),
    )


def _form_of_original(values: FileValues, target: Architecture) -> FeatureForm:
    """Read the original layout; what is not its own stands in `eagle_config`, or beside it."""
    group = values.group("eagle_config")
    both = FileValues({**values.values, **group.values}, values.name)
    taps = _taps(both, TAP_IDS)
    if taps[:1] == (1,):  # such files name layers whose output is taken; all others say how many layers have run
        taps = tuple(tap + 1 for tap in taps)
    return FeatureForm(
        taps or _usual_taps(target),
        both.flag("norm_before_residual", False),
        both.flag("norm_output", False),
        both.flag("fc_norm", False),
        both.flag("norm_before_fc", False),
    )


def _taps(values: FileValues, key: str) -> tuple[int, ...]:
    found = values.items(key)
    if not all(isinstance(tap, int) and not isinstance(tap, bool) and tap >= 0 for tap in found):
        values.refuse(key, "a list of layers' numbers")
    return tuple(found)


def _usual_taps(target: Architecture) -> tuple[int, ...]:
    """Return the taps of EAGLE-3 where a file names none."""
    return 2, target.layers // 2, target.layers - 3


def _joined(arch: Architecture, form: FeatureForm, tensors: FeatureTensors) -> Architecture:
    """Return the architecture with a first layer that reads features; biases are there if the file has them."""
    return replace(arch, join=Join(form.normed_residual), qkv_bias=Q_BIAS in tensors)


def _check(found: FeatureDraft) -> None:
    """Refuse a draft that does not fit its target, and layers that cannot read features."""
    arch, target, taps = found.arch, found.target, found.form.taps
    if arch.forms(1)[0][0].join is None or not 1 <= arch.layers <= FEATURE_LAYERS_READ:
        raise ModelError(
            f"{found.name} has {arch.layers} layers of the family {arch.family}; feature drafts have 1 or "
            f"{FEATURE_LAYERS_READ} of Llama's or Qwen's form."
        )
    if arch.vocabulary != target.vocabulary:
        raise ModelError(
            f"{found.name} was made for {arch.vocabulary} tokens; its target {target.name} has {target.vocabulary}. "
            "Take the target that it was made for."
        )
    if arch.hidden != target.hidden and OWN_EMBEDDING not in found.tensors:
        raise ModelError(
            f"{found.name} has a hidden size of {arch.hidden} and no embedding of its own; its target {target.name} "
            f"has {target.hidden}. Take the target that it was made for."
        )
    if not taps or max(taps) > target.layers or min(taps) < 0:
        raise ModelError(
            f"{found.name} reads its target behind {_listed(taps)} layers; {target.name} has {target.layers}. Take the "
            "target that it was made for."
        )
    needed = [FC, *([INPUT_NORM] if found.form.norms_input else [])]
    needed += [FC_NORM.format(index) for index in range(len(taps))] if found.form.norms_taps else []
    for tensor in needed:
        if tensor not in found.tensors:
            raise ModelError(f"{found.tensors.name} has no tensor {tensor!r}, which its configuration needs.")


def _listed(taps: Sequence[int]) -> str:
    return ", ".join(map(str, taps)) if taps else "no"
