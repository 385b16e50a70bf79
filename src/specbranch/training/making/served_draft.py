"""The job of `specbranch distill --from-served`: a draft learns on from texts that a server kept.

Owns the order of the work. The new draft goes into a folder of its own: DIR/training holds what a killed run needs, DIR
itself the finished draft. Invariants: the draft that learns on is only read. Held-out texts, served and original ones,
are never trained on, and the agreement before and after is measured on them alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specbranch.assembly import ModelChoice, load_tokenizer
from specbranch.errors import BadParameter
from specbranch.models.drafts.draft_name import draft_config, feature_layout
from specbranch.models.drafts.load import DraftOfTarget, open_for_target
from specbranch.models.files.disk import write_durably
from specbranch.models.files.identity import model_identity
from specbranch.models.files.sources import made_model
from specbranch.models.files.store import title_and_licence
from specbranch.pairs import draft_path
from specbranch.progress import Onlooker
from specbranch.provenance import trained_with
from specbranch.text.tokenizer import Tokenizer
from specbranch.training.distill.draft_saving import DraftWeights, save_draft
from specbranch.training.distill.kinds import KIND_CHAIN, KindAgreement, agreement_by_kind, kinds_of
from specbranch.training.distill.material import Material, joined, material_files, material_in
from specbranch.training.distill.model import Stack, TrainedLayer
from specbranch.training.distill.run_folder import RunFolder
from specbranch.training.distill.served_text import REPLAY_SHARE, ServedText, mixed, served_text, steps_of
from specbranch.training.distill.start import StartingDraft
from specbranch.training.distill.train import Trained, train
from specbranch.training.distill.train_settings import TrainSettings
from specbranch.training.distill.writer import WritingTarget, load_target, write
from specbranch.training.making.draft import HELD_OUT, HELD_OUT_LEAST, HELD_OUT_MOST, LONG_TEXTS
from specbranch.training.making.draft_target import target_of
from specbranch.training.making.writing import Fetch, WritingJob

log = logging.getLogger("specbranch")

LEARNING_SECONDS = 120.0
SHORT_ROWS = 1024  # tokens of a training row on a CPU
LEARNING_RATE = 2e-4  # a third of the peak from which a draft starts: what it knows is to stay
REPLAY_SECONDS, REPLAY_ROWS = 60.0, 256  # defaults of writing, where there is no original material
MOST_MIXED = {"cpu": 40_000, "cuda": 4_000_000}  # tokens of served texts, and of original ones
MOST_PASSES = 100  # over the served texts, where a time is given and not a number of steps
MOST_COMPARED = 48  # held-out conversations of one kind
SERVED_KIND = "served"
MOST_LOST = 0.05  # tokens a forward that another kind may lose without a warning
ORIGINAL_FILE, MIXED_FILE, NOTE_FILE = "material-0.safetensors", "mixed.safetensors", "served.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedJob(WritingJob):
    """The request; None stands for the device's default. `target` may be empty: then the draft's folder names it."""

    draft: str
    served: Path
    seconds_training: float | None = None
    steps: int | None = None
    learning_rate: float = LEARNING_RATE
    rows: int | None = None
    length: int | None = None
    checkpoint_seconds: float = 60.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Texts:
    """What is trained on, and what is compared on, with the kind of each."""

    training: Material
    held_out: Material
    kinds: Sequence[str]
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Plan:
    """All decisions before the target is loaded."""

    job: ServedJob
    draft: Path
    identity: str
    found: DraftOfTarget
    source: str
    tokenizer: Tokenizer
    served: ServedText
    settings: TrainSettings
    folder: RunFolder

    @property
    def split_seed(self) -> int:
        """The seed by which the draft's first training held out conversations, so that these stay held out."""
        try:
            seed = json.loads((self.draft / "provenance.json").read_text(encoding="utf-8"))["seed"]
        except (OSError, ValueError, KeyError, TypeError):
            return 0
        return seed if isinstance(seed, int) else 0


def learn_from_served(job: ServedJob, fetch: Fetch, watch: Onlooker) -> dict[str, Any]:
    """Train a draft on with served texts; return its figures, with the agreement by kind before and after."""
    plan = _plan(job, fetch)
    with plan.folder.claimed(resume=True):
        plan.folder.path.chmod(0o700)  # what users wrote is in there
        _check_note(plan)
        target = load_target(plan.found.target, plan.found.source, job.device_name)
        plan.folder.note()
        write_durably(plan.folder.path / NOTE_FILE, json.dumps({"draft": plan.identity}).encode())
        texts = _texts(plan, target, watch)
        start, teacher = StartingDraft.of(plan.found, torch.device(job.device_name)), Stack(target.arch, target.weights)
        before = _agreement(plan, teacher, start.student(plan.found, target.weights), texts)
        parts = texts.training, texts.held_out
        done = train(
            target.arch,
            target.weights,
            *parts,
            _limited(plan.settings, texts.training),
            plan.folder.path,
            resume=True,
            watch=watch,
            start=start,
        )
        assert isinstance(done.student, Stack), "the draft that learned on is a plain one"
        return _saved(plan, done, done.student, texts, before, _agreement(plan, teacher, done.student, texts))


def _plan(job: ServedJob, fetch: Fetch) -> _Plan:
    """Check the request and return the plan."""
    draft = _draft_folder(job)
    if feature_layout(draft) is not None:
        raise BadParameter(
            f"{draft} reads its target's features; expected a plain draft: only these learn on from served texts. "
            "Train a new one, with --data FILE for prompts of yours."
        )
    source = target_of(str(draft), job.target or None, fetch)
    found = open_for_target(draft, source)
    if job.material is not None and not material_files(job.material):
        raise BadParameter(f"There is no material at {job.material}. Name a file or a folder of an earlier run.")
    info, context = found.draft.info, found.target.context_length
    settings = TrainSettings(
        layers=info.layers,
        steps=job.steps,
        seconds=LEARNING_SECONDS if job.steps is None and job.seconds_training is None else job.seconds_training,
        learning_rate=job.learning_rate,
        rows=job.rows or (4 if job.device_name == "cpu" else 16),
        length=min(job.length or (SHORT_ROWS if job.device_name == "cpu" else LONG_TEXTS), context),
        seed=job.seed,
        head_tokens=info.head_tokens,
        checkpoint_seconds=job.checkpoint_seconds,
    )
    tokenizer = load_tokenizer(ModelChoice(source))
    served = served_text(job.served, tokenizer.fingerprint, settings.length)
    folder = RunFolder(job.out, info.target, info.target_fingerprint, None)
    return _Plan(job, draft, model_identity(str(draft)), found, source, tokenizer, served, settings, folder)


def _draft_folder(job: ServedJob) -> Path:
    """Return the folder of the draft that learns on; refuse what is none, and an --out that holds a draft."""
    draft, out = Path(draft_path(job.draft)).expanduser(), job.out
    if (made := made_model(draft)) is not None:
        raise BadParameter(f"{draft} is {made.how}. Let its source learn; the draft can be {made.how} again.")
    if draft_config(draft) is None:
        raise BadParameter(
            f"{draft} holds no finished draft of `specbranch distill`; expected one that is to learn on. A run that "
            "was killed is finished first, by its own command with --resume."
        )
    if out.resolve() == draft.resolve() or (out / "config.json").exists():
        raise BadParameter(
            f"{out} holds a model already, which stays as it is. Name a new folder with --out; the draft that learned "
            "on is written there."
        )
    return draft


def _limited(settings: TrainSettings, mix: Material) -> TrainSettings:
    """Return settings by which few texts are not learned by heart, however fast the device is."""
    most = steps_of(mix, MOST_PASSES, settings.rows, settings.length)
    return replace(settings, most_steps=None if settings.seconds is None else most)


def _check_note(plan: _Plan) -> None:
    """Refuse a folder in which another draft has begun to learn."""
    note = plan.folder.path / NOTE_FILE
    if note.exists() and json.loads(note.read_text(encoding="utf-8")).get("draft") != plan.identity:
        raise BadParameter(f"In {plan.job.out} another draft has begun to learn. Name another folder with --out.")


def _texts(plan: _Plan, target: WritingTarget, watch: Onlooker) -> _Texts:
    """Put together what is trained on; a run that was killed goes on with what it had."""
    original = _original(plan, target, watch)
    share = max(HELD_OUT, min(HELD_OUT_MOST, HELD_OUT_LEAST / max(len(original), 1)))
    rest, apart = original.split(share, plan.split_seed)
    file = plan.folder.path / MIXED_FILE
    if not file.exists():
        most = MOST_MIXED[plan.job.device_name.partition(":")[0]]
        mixed(plan.served.training, rest, most, plan.job.seed).save(file)
    apart, kinds = _some_of_each(apart, kinds_of(apart, plan.tokenizer, target.arch))
    served = plan.served.held_out
    served, names = _some_of_each(served, [SERVED_KIND] * len(served))
    counts = {
        "served_texts": len(plan.served.training) + len(plan.served.held_out),
        "served_held_out": len(plan.served.held_out),
        "original_conversations": len(original),
    }
    return _Texts(Material.load(file), joined([served, apart]), [*names, *kinds], counts)


def _original(plan: _Plan, target: WritingTarget, watch: Onlooker) -> Material:
    """Return original material: what is named, what the draft's own run has left, or what the target writes now."""
    file = plan.folder.path / ORIGINAL_FILE
    if file.exists():
        return Material.load(file)
    if files := material_files(plan.job.material or plan.draft / "training"):
        found = material_in(plan.job.material or files[0].parent)
        if int(found.tokens.max()) >= target.arch.vocabulary:
            raise BadParameter(f"{files[0].parent} holds tokens that the target lacks; another target wrote them.")
    else:
        settings = plan.job.writing(REPLAY_SECONDS, REPLAY_ROWS, plan.job.seed)
        found = write(target, plan.tokenizer, settings, watch, "Writing other text")
    found.save(file)
    return found


def _some_of_each(texts: Material, kinds: Sequence[str]) -> tuple[Material, list[str]]:
    """Return at most MOST_COMPARED conversations of each kind."""
    seen = dict.fromkeys(kinds, 0)
    chosen = list[int]()
    for index, kind in enumerate(kinds):
        seen[kind] += 1
        if seen[kind] <= MOST_COMPARED:
            chosen.append(index)
    return texts.select(torch.tensor(chosen)), [kinds[index] for index in chosen]


def _agreement(plan: _Plan, teacher: Stack, student: Stack, texts: _Texts) -> list[KindAgreement]:
    settings = plan.settings
    return agreement_by_kind(teacher, student, texts.held_out, texts.kinds, settings.length, settings.rows)


def _saved(
    plan: _Plan, done: Trained, student: Stack, texts: _Texts, before: list[KindAgreement], after: list[KindAgreement]
) -> dict[str, Any]:
    """Write the draft; return its figures."""
    out, info = plan.job.out, plan.found.draft.info
    layers = [block.weights() for block in student.blocks if isinstance(block, TrainedLayer)]
    weights = DraftWeights(layers, student.norm, student.head_ids)
    figures = {name: round(value, 4) for name, value in done.figures.items()}
    agreement = [_compared(*pair) for pair in zip(before, after, strict=True)]
    provenance = {
        "target": info.target,
        "learned_on_from": plan.identity,
        "seed": plan.split_seed,
        **texts.counts,
        "replay_share": REPLAY_SHARE,
        "steps": done.steps,
        "tokens": done.tokens,
        "seconds": round(done.seconds, 1),
        "learning_rate": plan.settings.learning_rate,
        "batch": [plan.settings.rows, plan.settings.length],
        **trained_with(plan.job.device_name),
    }
    about: dict[str, Any] = {"figures": figures, "provenance": provenance, "evaluation": done.evaluation}
    save_draft(out, plan.found.target, weights, info, licence=title_and_licence(info.target)[1], **about)
    _warn_of_losses(agreement)
    return {
        "out": str(out),
        "draft": str(plan.draft),
        "agreement": agreement,
        "chain": KIND_CHAIN,
        **figures,
        **provenance,
    }


def _compared(before: KindAgreement, after: KindAgreement) -> dict[str, Any]:
    names = ("top1", "top3", "tokens_per_forward")
    one, other = ({name: round(asdict(found)[name], 4) for name in names} for found in (before, after))
    return {"kind": before.kind, "tokens": before.tokens, "before": one, "after": other}


def _warn_of_losses(agreement: Sequence[dict[str, Any]]) -> None:
    for found in agreement:
        lost = found["before"]["tokens_per_forward"] - found["after"]["tokens_per_forward"]
        if found["kind"] != SERVED_KIND and lost > MOST_LOST:
            log.warning(
                "The draft brings %.2f tokens a forward less on %s than before. A lower --learning-rate, or more "
                "original text (--material, --seconds-writing), keeps more of what it knew.",
                lost,
                found["kind"],
            )
