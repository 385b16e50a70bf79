"""The job of `specbranch distill`: the target writes, the draft trains on that text, and both steps can resume.

Owns the order of the work. DIR/training holds what a run needs to resume, DIR itself the finished draft. Invariants:
impossible requests are refused before the target is loaded. A refused run leaves nothing behind.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specbranch.assembly import ModelChoice, load_tokenizer
from specbranch.errors import BadParameter
from specbranch.models.drafts.draft_folder import DraftInfo, Storage, fingerprint_of
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.locate import locate
from specbranch.models.files.sources import made_model
from specbranch.models.files.store import title_and_licence
from specbranch.models.files.tensor_file import TensorSource
from specbranch.models.loading import open_model
from specbranch.progress import Onlooker
from specbranch.provenance import trained_with
from specbranch.training.distill.courses import DraftKind
from specbranch.training.distill.draft_saving import DraftWeights, refuse_other_draft, save_draft
from specbranch.training.distill.features import (
    FeatureStack,
    FeatureWeights,
    check_feature_target,
    check_taps,
    default_taps,
)
from specbranch.training.distill.material import Material, joined, material_files, material_in
from specbranch.training.distill.model import Stack, TrainedLayer, check_layers, check_trainable, spread_layers
from specbranch.training.distill.run_folder import RunFolder
from specbranch.training.distill.train import Trained, train
from specbranch.training.distill.train_settings import TrainSettings
from specbranch.training.distill.writer import WritingTarget, load_target, write
from specbranch.training.distill.writer_settings import WriterSettings
from specbranch.training.making.writing import Fetch, WritingJob

log = logging.getLogger("specbranch")

DRAFT_SECONDS, DRAFT_ROWS = 120.0, 1024  # defaults of the writing
LONG_TEXTS = 2048  # tokens of a conversation and of a training row on a GPU: long enough to learn to copy
STEP_TOKENS = 1 << 16  # of a training step on a GPU
UNROLLED_ROWS = 8  # rows in a row that a feature draft is trained for: beyond them it falls off
HeadSize = Literal["full", "reduced"]
SEEDS = 2**53  # beyond it, the seeds of the slices would have no room
HELD_OUT, HELD_OUT_LEAST = (
    0.02,
    32,
)  # share of the conversations that is held out of training; at least this number, up to …
HELD_OUT_MOST = 0.25  # … this share


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftJob(WritingJob):
    """The request; None stands for the device's default."""

    kind: DraftKind = "plain"
    layers: int | None = None  # None: one, of a feature draft
    start: tuple[int, ...] | None = (
        None  # of the target's layers; None: at equal distances, of a feature draft the last
    )
    taps: tuple[int, ...] | None = None  # of a feature draft; None: `default_taps`
    unroll: int | None = None  # of a feature draft: rows in a row that it is trained for; None: UNROLLED_ROWS
    head: HeadSize | None = None  # None: reduced if `head_tokens` is given
    head_tokens: int | None = None
    storage: Storage = "bfloat16"
    only_write: bool = False
    seconds_training: float | None = None
    steps: int | None = None
    learning_rate: float = 6e-4
    rows: int | None = None
    length: int | None = None
    checkpoint_seconds: float = 60.0
    resume: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.only_write and self.material is not None:
            raise BadParameter(
                "--only-write and --material were given; expected one of them, as with --material nothing is written."
            )
        if self.head is not None and (self.head == "reduced") != (self.head_tokens is not None):
            given = "no --head-tokens" if self.head_tokens is None else f"--head-tokens {self.head_tokens}"
            raise BadParameter(
                f"--head is {self.head} and there is {given}; expected --head-tokens K with --head reduced, "
                "and none with --head full."
            )
        if self.kind == "plain" and (self.taps is not None or self.unroll is not None):
            given = "--unroll" if self.taps is None else "--taps"
            raise BadParameter(f"{given} was given for a plain draft, which reads tokens alone; add --kind features.")
        if self.kind == "plain" and self.layers is None and not self.only_write:
            raise BadParameter("--layers is missing: how many layers shall the draft have? 4 is a good start.")
        if abs(self.seed) > SEEDS:
            raise BadParameter(f"--seed is {self.seed}; expected {-SEEDS} to {SEEDS}.")

    def training(self, arch: Architecture) -> TrainSettings:
        """Return how the draft is trained."""
        if self.head_tokens is not None and not 1 <= self.head_tokens < arch.vocabulary:
            raise BadParameter(
                f"--head-tokens is {self.head_tokens}; expected 1 to {arch.vocabulary - 1}, or leave it out for all "
                f"{arch.vocabulary}."
            )
        on_cpu = self.device_name == "cpu"
        usual_length = 1024 if on_cpu else LONG_TEXTS
        length = min(usual_length if self.length is None else self.length, arch.context_length)
        usual_rows = 8 if on_cpu else max(STEP_TOKENS // max(length, 1), 1)
        layers = self._start_layers(arch.layers)
        taps = self._taps(arch, layers, length) if self.kind == "features" else ()
        return TrainSettings(
            layers=layers,
            taps=taps,
            depths=(UNROLLED_ROWS if self.unroll is None else self.unroll) if taps else 1,
            steps=self.steps,
            seconds=300.0 if self.steps is None and self.seconds_training is None else self.seconds_training,
            learning_rate=self.learning_rate,
            rows=usual_rows if self.rows is None else self.rows,
            length=length,
            seed=self.seed,
            head_tokens=self.head_tokens,
            checkpoint_seconds=self.checkpoint_seconds,
        )

    def _start_layers(self, held: int) -> tuple[int, ...]:
        count = 1 if self.layers is None else self.layers
        if self.start is None:
            spread = spread_layers(count, held)
            return tuple(range(held - count, held)) if self.kind == "features" else spread
        if len(self.start) != count:
            raise BadParameter(
                f"--start names {len(self.start)} layers and --layers says {count}; expected the same number."
            )
        check_layers(self.start, held)
        return self.start

    def _taps(self, arch: Architecture, layers: Sequence[int], length: int) -> tuple[int, ...]:
        """Return after how many layers a feature draft reads the target's states."""
        check_feature_target(arch, layers, length)
        taps = default_taps(arch.layers, len(layers)) if self.taps is None else self.taps
        check_taps(taps, arch.layers)
        return taps


def make_draft(job: DraftJob, fetch: Fetch, watch: Onlooker) -> dict[str, Any]:
    """Write, train and save; return the figures of the draft, or of the text with `only_write`."""
    plan = _plan(job, fetch)
    with plan.folder.claimed(job.resume):
        target = load_target(plan.arch, plan.file, plan.device)
        plan.folder.note()  # only now: an attempt that failed up to here leaves nothing to go on with
        material = _written(plan, target, watch) if job.material is None else _given(plan, job.material)
        if job.only_write:
            return {"material": str(plan.folder.path), **material.counts()}
        done = _trained(plan, target, material, watch)
        return _saved(plan, done, material)


@dataclass(frozen=True, slots=True)
class _Plan:
    """All decisions before the first token is written."""

    job: DraftJob
    device: str
    source: str  # where the target is
    arch: Architecture
    file: TensorSource
    writing: WriterSettings
    training: TrainSettings
    folder: RunFolder
    licence: str | None


def _plan(job: DraftJob, fetch: Fetch) -> _Plan:
    """Check the request and return the plan."""
    device, source = job.device_name, fetch(job.target)
    if (made := made_model(source)) is not None:
        raise BadParameter(
            f"{source} is {made.how}. Distill from its source: the draft runs beside both, and can be {made.how}, too."
        )
    arch, file = open_model(locate(source))
    check_trainable(arch)
    writing, training = job.writing(DRAFT_SECONDS, DRAFT_ROWS, job.seed, LONG_TEXTS), job.training(arch)
    fingerprint = fingerprint_of(arch, file)
    if job.out.is_dir():
        refuse_other_draft(job.out, fingerprint)
    if job.material is not None and not material_files(job.material):
        raise BadParameter(
            f"There is no material at {job.material}. Name a file that an earlier run left in DIR/training, or that "
            "folder."
        )
    title, licence = title_and_licence(job.target)
    folder = RunFolder(job.out, title, fingerprint, writing if job.material is None else None)
    return _Plan(job, device, source, arch, file, writing, training, folder, licence)


def _written(plan: _Plan, target: WritingTarget, watch: Onlooker) -> Material:
    """Return the target's text; let it write what is missing."""
    slices = plan.writing.slices()
    parts = []
    for number, settings in enumerate(slices):
        if not (file := plan.folder.part(number)).exists():
            what = f"Writing {number + 1} of {len(slices)}"
            write(target, load_tokenizer(ModelChoice(plan.source)), settings, watch, what).save(file)
        parts.append(Material.load(file))
    return joined(parts)


def _given(plan: _Plan, path: Path) -> Material:
    """Return existing material; refuse what cannot be trained on, and report another target."""
    found, name = material_in(path), plan.folder.target
    if not len(found):
        raise BadParameter(
            f"{path} holds no conversations; expected two or more. Name other material, or write longer."
        )
    if int(found.tokens.max()) >= plan.arch.vocabulary:
        raise BadParameter(f"{path} holds tokens that {name} does not have; it was written by another target.")
    writers = {str(part["target"]) for part in found.parts if "target" in part}
    if other := writers - {Path(plan.arch.name).name}:
        log.warning("%s was written by %s, not by %s: is that the same model?", path, ", ".join(sorted(other)), name)
    return found


def _trained(plan: _Plan, target: WritingTarget, material: Material, watch: Onlooker) -> Trained:
    share = max(HELD_OUT, min(HELD_OUT_MOST, HELD_OUT_LEAST / max(len(material), 1)))
    parts = material.split(share, plan.training.seed)
    folder, resume = plan.folder.path, plan.job.resume
    return train(target.arch, target.weights, *parts, plan.training, folder, resume=resume, watch=watch)


def _saved(plan: _Plan, done: Trained, material: Material) -> dict[str, Any]:
    """Write the draft; return its figures."""
    out, training = plan.job.out, plan.training
    info = DraftInfo(
        plan.folder.target, plan.folder.fingerprint, training.layers, training.head_tokens, plan.job.storage
    )
    figures = {name: round(value, 4) if isinstance(value, float) else value for name, value in done.figures.items()}
    provenance = _provenance(plan, done, material)
    about: dict[str, Any] = {"figures": figures, "provenance": provenance, "evaluation": done.evaluation}
    save_draft(out, plan.arch, _own_weights(done.student), info, taps=training.taps, licence=plan.licence, **about)
    size = (out / "model.safetensors").stat().st_size
    made = {"out": str(out), "kind": plan.job.kind, "layers": list(info.layers), "head_tokens": info.head_tokens}
    return {**made, "taps": list(training.taps), "bytes": size, **figures, **provenance}


def _own_weights(student: Stack | FeatureStack) -> DraftWeights | FeatureWeights:
    """Return what is stored of a draft."""
    if isinstance(student, FeatureStack):
        return student.weights()
    layers = [block.weights() for block in student.blocks if isinstance(block, TrainedLayer)]
    return DraftWeights(layers, student.norm, student.head_ids)


def _provenance(plan: _Plan, done: Trained, material: Material) -> Mapping[str, Any]:
    unrolled = {"unrolled": plan.training.depths, "fade": plan.training.fade} if plan.training.taps else {}
    return {
        "target": plan.folder.target,
        **unrolled,
        "seed": plan.training.seed,
        **material.counts(),
        "steps": done.steps,
        "tokens": done.tokens,
        "seconds": round(done.seconds, 1),
        "learning_rate": plan.training.learning_rate,
        "batch": [plan.training.rows, plan.training.length],
        **trained_with(plan.device),
    }
