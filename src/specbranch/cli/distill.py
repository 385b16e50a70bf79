"""`specbranch distill`: a draft for a target, made from nothing but the target.

Owns the order of the work and the folder of a run: DIR/training holds what is needed to go on, DIR itself the finished
draft.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from specbranch import __version__
from specbranch.cli.sections import SectionedCommand, options_of
from specbranch.cli.writing import (
    TrainingBars,
    commit,
    hardware,
    joined,
    load_target,
    material_files,
    material_in,
    or_usual,
    title_and_licence,
)
from specbranch.errors import BadParameter, ModelError

if TYPE_CHECKING:
    from specbranch.distill.material import Material
    from specbranch.distill.train import Trained, TrainSettings
    from specbranch.distill.writer import WritingTarget
    from specbranch.distill.writer_settings import WriterSettings
    from specbranch.models.files.architecture import Architecture

log = logging.getLogger("specbranch")

SLICE_SECONDS, SLICE_TOKENS = (
    120.0,
    20_000_000,
)  # writing is kept in pieces of this size, so that a kill costs at most one
SLICES = 1000  # most of them: more would take the seeds of the next run's
SEEDS = 2**53  # so many of them leave room for the slices'
HELD_OUT, HELD_OUT_LEAST = (
    0.02,
    32,
)  # share of the conversations that is not trained on, and how many at least, up to a quarter
_model, _writing, _training = (options_of(title) for title in ("Target and draft", "Writing", "Training"))


@click.command(cls=SectionedCommand)
@_model(
    "--target", required=True, metavar="MODEL", help="Target model: a folder, a .gguf file, a Hub id, or a known name."
)
@_model(
    "--layers",
    type=int,
    required=True,
    metavar="N",
    help="Layers of the draft; it starts from as many of the target's, at equal distances.",
)
@_model(
    "--start",
    metavar="I,J,…",
    help="Start from these of the target's layers instead, numbered from 0; as many as --layers.",
)
@_model("--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Folder of the draft.")
@_model(
    "--head-tokens",
    type=int,
    metavar="K",
    help="Let the draft propose only the K tokens the target writes most often [all].",
)
@_model(
    "--storage",
    type=click.Choice(["bfloat16", "int8"]),
    default="bfloat16",
    help="How its weights are stored [bfloat16].",
)
@_model("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 … [a GPU if there is one]")
@_writing("--seconds-writing", type=float, metavar="S", help="How long the target writes [120].")
@_writing("--tokens", type=int, metavar="N", help="Stop writing after N tokens.")
@_writing(
    "--data",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Prompts for the target to answer too, as for generate --file.",
)
@_writing(
    "--material",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Train on what an earlier run wrote (a file, or a folder of them); nothing is written.",
)
@_writing(
    "--only-write",
    is_flag=True,
    help="Stop when the material is written; train on it later with --resume or --material.",
)
@_writing("--writing-rows", type=int, metavar="N", help="Conversations written at once [1024 on a GPU, else 16].")
@_writing("--writing-length", type=int, default=640, metavar="N", help="Most tokens of a conversation [640].")
@_training(
    "--seconds-training", type=float, metavar="S", help="How long the draft is trained, 20 steps at the least [300]."
)
@_training("--steps", type=int, metavar="N", help="Train for N steps instead.")
@_training("--learning-rate", type=float, default=6e-4, metavar="X", help="Highest learning rate [0.0006].")
@_training(
    "--rows", type=int, metavar="N", help="Rows of a step; halved at a time if memory is short [64 on a GPU, else 8]."
)
@_training(
    "--length", type=int, default=1024, metavar="N", help="Tokens of a row, packed with whole conversations [1024]."
)
@_training("--checkpoint-seconds", type=float, default=60.0, metavar="S", help="Time between two checkpoints [60].")
@click.option("--resume", is_flag=True, help="Go on with the run in DIR, wherever it was stopped.")
@click.option("--seed", type=int, default=0, metavar="N", help="Seed of writing and training [0].")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: top1, top3, divergence, steps, tokens …")
def distill(as_json: bool, **given: Any) -> None:
    """Make a draft for a target. No data set is needed: the target invents questions and answers them, and the draft
    learns from that.

    \b
    specbranch distill --target smollm2-135m --layers 4 --out my-draft
    specbranch distill --target BIG --layers 4 --head-tokens 8192 --out my-draft --resume

    The draft shares the target's embedding and output head; only its own layers are stored. Killed at any moment, the
    same command with --resume goes on. DIR/training holds the material, checkpoints, metrics.jsonl and a picture; it
    may be deleted afterwards.
    """
    from specbranch.distill.train import train

    run = _DistillRun.prepared(given)
    with TrainingBars() as bars:
        material = run.material(bars)
        if given["only_write"]:
            click.echo(_written(run.folder, material, as_json))
            return
        learned, held_out = material.split(_share_held_out(len(material)), run.training.seed)
        arch, weights, resume = run.target.arch, run.target.weights, given["resume"]
        done = train(
            arch,
            weights,
            learned,
            held_out,
            run.training,
            run.folder,
            resume=resume,
            report=bars.trained,
            heard=bars.heard,
        )
    record = run.save(done, material, given["storage"])
    click.echo(json.dumps(record) if as_json else _summary(record))


@dataclass(slots=True)
class _Claim:
    """The folder of a run, held by this process as long as the command runs, and whose run it is."""

    out: Path
    name: str
    fingerprint: str
    writing: WriterSettings
    given_material: Path | None
    held: dict[str, Any] = field(default_factory=dict)  # what the run that is gone on with noted

    @property
    def folder(self) -> Path:
        """Where the files of the run are."""
        return self.out / "training"

    def take(self, resume: bool) -> None:
        """Lock the folder, or refuse one that holds another run."""
        from filelock import FileLock, Timeout

        from specbranch.distill.draft_folder import spoken

        with spoken(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                click.get_current_context().with_resource(FileLock(self.folder / "run.lock", timeout=0))
            except Timeout:
                busy = f"Another distill is at work in {self.out}"
                raise BadParameter(f"{busy}. Wait for its end, or name another folder with --out.") from None
        if (note := self.folder / "run.json").exists():
            self.held = _read_note(note)
            self._check(resume)

    def note(self) -> None:
        """Leave word in the folder whose it is; what was noted of the writing stays where nothing is written now."""
        from specbranch.distill.draft_folder import write_whole

        writing = self._writing() if self.given_material is None else self.held.get("writing")
        told = {"target": self.name, "target_fingerprint": self.fingerprint, "writing": writing}
        write_whole(self.folder / "run.json", json.dumps(told, indent=2).encode())

    def _writing(self) -> dict[str, Any]:
        return {**asdict(self.writing), "prompts": sha256(json.dumps(self.writing.prompts).encode()).hexdigest()}

    def _check(self, resume: bool) -> None:
        if self.held.get("target_fingerprint") != self.fingerprint:
            whose = self.held.get("target")
            raise BadParameter(
                f"{self.out} holds a run for {whose}, not for this target. Name another folder with --out."
            )
        if not resume:
            raise BadParameter(
                f"{self.out} holds a run already. Go on with it by --resume, or name another folder with --out."
            )
        theirs, ours = self.held.get("writing"), self._writing()
        if theirs is None or self.given_material is not None:
            return
        if other := [name for name, value in ours.items() if theirs.get(name) != value]:
            told = ", ".join(f"{name} was {theirs.get(name)}, now {ours[name]}" for name in other)
            raise BadParameter(
                f"{self.out} was begun with other settings: {told}. Resume with the same, or name another folder."
            )


@dataclass(frozen=True, slots=True)
class _DistillRun:
    """Everything that was decided before the first token is written."""

    out: Path
    name: str
    licence: str | None
    fingerprint: str
    source: str
    target: WritingTarget
    writing: WriterSettings
    training: TrainSettings
    given_material: Path | None

    @classmethod
    def prepared(cls, given: Mapping[str, Any]) -> Self:
        """Refuse what cannot be done, then claim the folder and load the target."""
        from specbranch.assembly import ModelChoice, chosen_device
        from specbranch.cli.progress import pulled
        from specbranch.distill.draft_folder import fingerprint_of, refuse_other_draft
        from specbranch.models.files.inflation import is_inflation
        from specbranch.models.files.locate import locate
        from specbranch.models.native import open_model

        if given["only_write"] and given["material"] is not None:
            raise BadParameter(
                "--only-write and --material were given; expected one of them, as with --material nothing is written."
            )
        device, out = chosen_device(ModelChoice(given["target"], device=given["device"]).device), given["out"]
        source = pulled(given["target"])
        if is_inflation(source):
            raise BadParameter(
                f"{source} is inflated. Distill from its source: the draft runs beside both, and can be inflated, too."
            )
        arch, file = open_model(locate(source))
        writing, training = _writer_settings(given, device), _train_settings(given, arch, device)
        fingerprint = fingerprint_of(arch, file)
        if out.is_dir():
            refuse_other_draft(out, fingerprint)
        if given["material"] is not None and not material_files(given["material"]):
            raise BadParameter(
                f"There is no material at {given['material']}. Name a file that an earlier run left in DIR/training, "
                "or that folder."
            )
        name, licence = title_and_licence(given["target"])
        claim = _Claim(out, name, fingerprint, writing, given["material"])
        claim.take(given["resume"])
        target = load_target(arch, file, device)
        claim.note()  # only now: an attempt that failed up to here leaves nothing to go on with
        return cls(out, name, licence, fingerprint, source, target, writing, training, given["material"])

    @property
    def folder(self) -> Path:
        """Where the files of the run are."""
        return self.out / "training"

    def material(self, bars: TrainingBars) -> Material:
        """Return what the target wrote, having it written first where it is not there yet."""
        if self.given_material is not None:
            return self._checked(material_in(self.given_material))
        slices = _slices(self.writing)
        shown = [
            bars.slice(settings, f"Writing {number} of {len(slices)}") for number, settings in enumerate(slices, 1)
        ]
        parts = [self._part(number, *piece) for number, piece in enumerate(zip(slices, shown, strict=True))]
        return joined(parts)

    def _checked(self, found: Material) -> Material:
        """Refuse what cannot be trained on, and tell of another target than this one."""
        if not len(found):
            raise BadParameter(
                f"{self.given_material} holds no conversations; expected two or more. Name other material, or write "
                "longer."
            )
        if int(found.tokens.max()) >= self.target.arch.vocabulary:
            raise BadParameter(
                f"{self.given_material} holds tokens that {self.name} does not have; it was written by another target."
            )
        writers = {str(part["target"]) for part in found.about.get("parts", [found.about]) if "target" in part}
        if other := writers - {Path(self.target.arch.name).name}:
            names = ", ".join(sorted(other))
            log.warning(
                "%s was written by %s, not by %s: is that the same model?", self.given_material, names, self.name
            )
        return found

    def _part(self, number: int, settings: WriterSettings, progress: Any) -> Material:
        from specbranch.assembly import ModelChoice, load_tokenizer
        from specbranch.distill.material import Material
        from specbranch.distill.writer import write

        file = self.folder / f"material-{number}.safetensors"
        if file.exists():
            return Material.load(file)
        part = write(self.target, load_tokenizer(ModelChoice(self.source)), settings, progress)
        part.save(file)
        return part

    def save(self, done: Trained, material: Material, storage: Any) -> dict[str, Any]:
        """Write the draft; returns what there is to say of it."""
        from specbranch.distill.draft_folder import DraftInfo, DraftWeights, save_draft
        from specbranch.distill.model import TrainedLayer

        head_ids = done.student.head_ids
        layers = [block.weights() for block in done.student.blocks if isinstance(block, TrainedLayer)]
        info = DraftInfo(self.name, self.fingerprint, self.training.layers, self.training.head_tokens, storage)
        figures = {name: round(value, 4) for name, value in done.figures.items()}
        provenance = self._provenance(done, material)
        weights = DraftWeights(layers, done.student.norm, head_ids)
        save_draft(
            self.out, self.target.arch, weights, info, licence=self.licence, figures=figures, provenance=provenance
        )
        size = (self.out / "model.safetensors").stat().st_size
        return {
            "out": str(self.out),
            "layers": list(info.layers),
            "head_tokens": info.head_tokens,
            "bytes": size,
            **figures,
            **provenance,
        }

    def _provenance(self, done: Trained, material: Material) -> dict[str, Any]:
        import torch

        s = self.training
        return {
            "target": self.name,
            "seed": s.seed,
            "conversations": len(material),
            "tokens_written": material.tokens.numel(),
            "answer_tokens": material.answer_tokens,
            "steps": done.steps,
            "tokens": done.tokens,
            "seconds": round(done.seconds, 1),
            "learning_rate": s.learning_rate,
            "batch": [s.rows, s.length],
            "specbranch": __version__,
            "commit": commit(),
            "torch": torch.__version__,
            "hardware": hardware(self.target.weights.norm.device),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }


def _written(folder: Path, material: Material, as_json: bool) -> str:
    told = {
        "material": str(folder),
        "conversations": len(material),
        "tokens_written": material.tokens.numel(),
        "answer_tokens": material.answer_tokens,
    }
    if as_json:
        return json.dumps(told)
    return (
        f"{len(material):,} conversations, {told['tokens_written']:,} tokens, are in {folder}. Train on them with "
        f"--material {folder}."
    )


def _writer_settings(given: Mapping[str, Any], device: str) -> WriterSettings:
    from specbranch.cli.generate import read_prompts
    from specbranch.distill.writer_settings import WriterSettings

    seconds, tokens = given["seconds_writing"], given["tokens"]
    if abs(given["seed"]) > SEEDS:
        raise BadParameter(f"--seed is {given['seed']}; expected {-SEEDS} to {SEEDS}.")
    return WriterSettings(
        seconds=120.0 if seconds is None and tokens is None else seconds,
        tokens=tokens,
        rows=or_usual(given["writing_rows"], 16 if device == "cpu" else 1024),
        length=given["writing_length"],
        question_tokens=max(min(192, given["writing_length"] // 3), 3),
        prompts=tuple(read_prompts(None, given["data"])) if given["data"] else (),
        seed=given["seed"],
    )


def _train_settings(given: Mapping[str, Any], arch: Architecture, device: str) -> TrainSettings:
    from specbranch.distill.train import TrainSettings

    steps, seconds, head = given["steps"], given["seconds_training"], given["head_tokens"]
    if head is not None and not 1 <= head < arch.vocabulary:
        raise BadParameter(
            f"--head-tokens is {head}; expected 1 to {arch.vocabulary - 1}, or leave it out for all {arch.vocabulary}."
        )
    return TrainSettings(
        layers=_start_layers(given["start"], given["layers"], arch.layers),
        steps=steps,
        seconds=300.0 if steps is None and seconds is None else seconds,
        learning_rate=given["learning_rate"],
        rows=or_usual(given["rows"], 8 if device == "cpu" else 64),
        length=min(given["length"], arch.context_length),
        seed=given["seed"],
        head_tokens=head,
        checkpoint_seconds=given["checkpoint_seconds"],
    )


def _start_layers(given: str | None, count: int, held: int) -> tuple[int, ...]:
    from specbranch.distill.model import check_layers, spread_layers

    if given is None:
        return spread_layers(count, held)
    try:
        chosen = tuple(int(part) for part in given.split(","))
    except ValueError:
        raise BadParameter(
            f"--start is {given!r}; expected numbers of layers with commas between them, such as 0,1,28,29."
        ) from None
    if len(chosen) != count:
        raise BadParameter(f"--start names {len(chosen)} layers and --layers says {count}; expected the same number.")
    check_layers(chosen, held)
    return chosen


def _slices(settings: WriterSettings) -> list[WriterSettings]:
    """Cut the writing into pieces of equal size, each with a seed of its own."""
    wanted = max(-int(-(settings.seconds or 0) // SLICE_SECONDS), -int(-(settings.tokens or 0) // SLICE_TOKENS), 1)
    count = min(wanted, SLICES)
    seconds = None if settings.seconds is None else settings.seconds / count
    tokens = None if settings.tokens is None else -(-settings.tokens // count)
    return [
        replace(settings, seconds=seconds, tokens=tokens, seed=settings.seed * 1000 + number) for number in range(count)
    ]


def _share_held_out(conversations: int) -> float:
    return max(HELD_OUT, min(0.25, HELD_OUT_LEAST / max(conversations, 1)))


def _read_note(note: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(note.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{note} is damaged ({error}). Delete the folder {note.parent} to begin anew.") from None


def _summary(record: Mapping[str, Any]) -> str:
    outside = f", {record['outside']:.1%} of the target's probability outside the head" if record["head_tokens"] else ""
    return (
        f"The draft is in {record['out']}: {len(record['layers'])} layers, {record['bytes'] / 1e6:.1f} MB.\n"
        f"On {record['compared']:,.0f} held-out tokens of the target: top-1 agreement {record['top1']:.3f}, top-3 "
        f"{record['top3']:.3f}, "
        f"divergence {record['divergence']:.3f}{outside}.\n"
        f"{record['tokens_written']:,} tokens written, {record['tokens']:,} trained on in {record['steps']:,} steps "
        f"({record['seconds']:.0f} s)."
    )
