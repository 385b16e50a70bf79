"""The job of `specbranch export`: a draft in the form of another engine, in a folder of its own.

Owns the order of the work. Invariants: what a form cannot hold is refused before any weights are read. The folder
appears whole or not at all, and no folder is replaced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from specbranch.assembly import ModelChoice, load_tokenizer, tokenizer_folder
from specbranch.errors import BadParameter
from specbranch.files import making_folder, spoken
from specbranch.models.drafts.draft_name import draft_config
from specbranch.models.drafts.evaluation_file import read_evaluation
from specbranch.models.drafts.load import DraftOfTarget, open_for_target
from specbranch.models.files.gguf_file import GgufFile
from specbranch.models.files.identity import model_identity
from specbranch.models.files.sources import made_model
from specbranch.pairs import draft_path
from specbranch.progress import Onlooker
from specbranch.provenance import build
from specbranch.training.export.card import ExportFormat, Origin, card, licence_in, read_provenance
from specbranch.training.export.feature_head import (
    check_for_speculators,
    feature_head,
    reads_features,
    taps_of,
    write_head,
)
from specbranch.training.export.gguf_vocabulary import check_length, copied_vocabulary, made_vocabulary
from specbranch.training.export.gguf_writer import check_for_llamacpp, write_gguf
from specbranch.training.export.hf_files import check_for_transformers, speculators_entries, write_model
from specbranch.training.export.whole_draft import WholeDraft, least_precision, whole_draft
from specbranch.training.making.draft_target import target_of
from specbranch.training.making.writing import Fetch

EXPORT_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """The request; None stands for what fits the draft."""

    draft: str  # a folder of `distill`, or a pair's name
    form: ExportFormat
    out: Path | None = None  # None: NAME-FORM in the working folder
    target: str | None = None  # None: the one that the draft names
    dtype: str | None = None  # None: the smallest that holds every number

    @property
    def folder(self) -> Path:
        """The folder to be written."""
        return Path(f"{Path(self.draft).name}-{self.form}") if self.out is None else self.out


def export_draft(job: ExportJob, fetch: Fetch, watch: Onlooker) -> dict[str, Any]:
    """Write the export; return what it is."""
    folder = _checked_folder(job)
    target = target_of(str(folder), job.target, fetch)
    found = open_for_target(folder, target)
    _check_form(job, found)
    origin = Origin(found.draft.info, licence_in(folder), read_evaluation(str(folder)), read_provenance(folder))
    whole = feature_head(found) if reads_features(found) else whole_draft(found, watch)
    precision = least_precision(whole) if job.dtype is None else getattr(torch, job.dtype)
    made = _made(job, whole, precision)
    with spoken(job.folder, "Name another folder with --out."), making_folder(job.folder) as into:
        _write(job, found, whole.stored_as(precision), target, into, watch)
        taps = taps_of(found) if reads_features(found) else ()
        (into / "README.md").write_text(card(origin, job.form, job.folder.name, made, taps), encoding="utf-8")
        history = {**origin.provenance, "export": made}
        (into / "provenance.json").write_text(json.dumps(history, indent=2, ensure_ascii=False) + "\n", "utf-8")
        size = sum(file.stat().st_size for file in into.iterdir())
    facts = {"target": origin.target, "licence": origin.licence, "agreement": origin.agreement(), "bytes": size}
    return {"out": str(job.folder), **made, **facts}


def _checked_folder(job: ExportJob) -> Path:
    """Return the draft's folder; refuse what is no draft, and an output folder that is there."""
    if job.folder.exists():
        raise BadParameter(f"{job.folder} is there already. Name another folder with --out, or delete that one.")
    if job.dtype not in (None, *EXPORT_DTYPES):
        raise BadParameter(f"--dtype is {job.dtype!r}; expected one of {', '.join(EXPORT_DTYPES)}.")
    source = draft_path(job.draft)
    if (made := made_model(source)) is not None:
        raise BadParameter(f"{job.draft} is {made.how} from {made.base}, for benchmarks. Export {made.base} itself.")
    if draft_config(source) is None:
        raise BadParameter(
            f"{job.draft} is no folder of a draft made by `specbranch distill`. Other models need no export: name "
            "them wherever a draft is named."
        )
    return Path(source)


def _check_form(job: ExportJob, found: DraftOfTarget) -> None:
    """Refuse a draft that the form cannot hold."""
    if reads_features(found):
        check_for_speculators(found, job.form)
        return
    if job.form != "speculators" and found.draft.info.head_tokens is not None:
        raise BadParameter(
            f"{job.draft} has a head of {found.draft.info.head_tokens:,} tokens, and --format {job.form} wants a draft "
            "with a full head. Make one with `specbranch distill --head full`, or use --format speculators, which has "
            "reduced heads."
        )
    (check_for_llamacpp if job.form == "gguf" else check_for_transformers)(found.arch)


def _made(job: ExportJob, whole: WholeDraft, precision: torch.dtype) -> dict[str, Any]:
    """Describe the export itself, for its card and its provenance."""
    return {
        "format": job.form,
        "dtype": str(precision).removeprefix("torch."),
        "exact": whole.fits(precision),
        "layers": whole.layers,
        "parameters": whole.parameters,
        "head_tokens": None if whole.head_ids is None else len(whole.head_ids),
        "draft": Path(draft_path(job.draft)).resolve().name,
        "draft_identity": model_identity(draft_path(job.draft)),
        "exported_by": {name: value for name, value in build().items() if name != "torch"},
        "date": datetime.now(UTC).date().isoformat(),
    }


def _write(job: ExportJob, found: DraftOfTarget, whole: WholeDraft, target: str, into: Path, watch: Onlooker) -> None:
    """Write the model's files."""
    watch("Writing", 0, None)
    if reads_features(found):
        write_head(whole, found, into)
        return
    choice = ModelChoice(target)
    if job.form == "gguf":
        vocabulary = _vocabulary(found, choice)
        write_gguf(whole, vocabulary, job.folder.name, into / f"{job.folder.name}.gguf", watch)
        return
    entries = speculators_entries(whole, found.draft.info.target, found.target.family)
    write_model(whole, tokenizer_folder(choice), into, entries if job.form == "speculators" else None)


def _vocabulary(found: DraftOfTarget, choice: ModelChoice) -> Mapping[str, Any]:
    """Return the entries of the target's vocabulary: its own file's, or those made from its tokenizer."""
    if isinstance(found.source, GgufFile):
        entries = copied_vocabulary(found.source)
    else:
        entries = made_vocabulary(load_tokenizer(choice), found.arch.vocabulary)
    check_length(entries, found.arch.vocabulary, found.target.name)
    return entries
