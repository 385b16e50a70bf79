"""Training of a draft towards its target's distribution: steps, evaluation and checkpoints.

Owns the files of a run (metrics.jsonl, checkpoint.safetensors, training.svg); its settings are in `train_settings.py`.
Invariant: a step depends only on the settings, the material and its number. So a killed and resumed run ends with the
weights of an uninterrupted one.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from specbranch.core.draft_evaluation import DraftEvaluation, JudgedPosition, evaluate
from specbranch.core.learning import SURE
from specbranch.errors import BadParameter
from specbranch.files import spoken
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.disk import RESUME, write_durably
from specbranch.models.files.weights import Weights
from specbranch.progress import Onlooker, silent
from specbranch.training.distill.checkpoint import Checkpoint, write_checkpoint
from specbranch.training.distill.courses import course_of, whole_weight
from specbranch.training.distill.features import FeatureStack
from specbranch.training.distill.material import PADDING, Batch, Material
from specbranch.training.distill.model import NO_SCORES, DeepRows, Stack, compare, divergence, judge
from specbranch.training.distill.picture import picture
from specbranch.training.distill.start import StartingDraft
from specbranch.training.distill.teacher import Teacher, moved
from specbranch.training.distill.train_settings import TrainSettings, learning_rate

log = logging.getLogger("specbranch")
T = TypeVar("T")

CHECKPOINT, METRICS, PICTURE = "checkpoint.safetensors", "metrics.jsonl", "training.svg"
CALIBRATION = 20  # steps after which a time budget becomes a number of steps
WARM = 5  # the first of them are slower and are not counted
HELD_OUT_TEXT = "held-out conversations of its training material"
AT_ONCE = 1 << 18  # tokens times depths of one forward: what is kept for the gradient grows with both
STEPS_SHARE = 0.95  # share of a time budget that steps may fill; the rest is measuring and saving


@dataclass(frozen=True, slots=True)
class Trained:
    """A finished training: the draft, its agreement with the target on held-out conversations, and the counts there."""

    student: Stack | FeatureStack
    steps: int
    tokens: int
    seconds: float
    figures: dict[str, Any]
    evaluation: DraftEvaluation


def frequent_tokens(material: Material, vocabulary: int, count: int) -> Tensor:
    """Return the `count` ids the target wrote most often, ascending."""
    if not 1 <= count < vocabulary:
        raise BadParameter(
            f"A head of {count} tokens was asked for; expected 1 to {vocabulary - 1}, or none for all {vocabulary}."
        )
    order = material.frequencies(vocabulary).argsort(descending=True, stable=True)
    return order[:count].sort().values


def train(
    arch: Architecture,
    weights: Weights,
    material: Material,
    held_out: Material,
    settings: TrainSettings,
    folder: Path,
    *,
    resume: bool = False,
    watch: Onlooker = silent,
    start: StartingDraft | None = None,
) -> Trained:
    """Train a draft; with `resume`, continue from the folder's checkpoint if it has one.

    `start`: a draft to train on, instead of layers of the target.
    """
    if not len(material) or not len(held_out):
        raise BadParameter(
            f"There are {len(material)} conversations to train on and {len(held_out)} to compare with; expected some "
            "of both."
        )
    with spoken(folder, RESUME):
        folder.mkdir(parents=True, exist_ok=True)
    run = _Training(arch, weights, material, held_out, settings, folder, watch, start)
    if resume and run.checkpoint.exists():
        run.restore()
    else:
        run.metrics.unlink(missing_ok=True)
    run.listen()
    run.go_on()
    figures = run.finish()
    return Trained(run.student, run.step, run.tokens, run.seconds, figures, run.evaluation())


class _Training:
    """A running training."""

    def __init__(
        self,
        arch: Architecture,
        weights: Weights,
        material: Material,
        held_out: Material,
        settings: TrainSettings,
        folder: Path,
        watch: Onlooker,
        start: StartingDraft | None = None,
    ) -> None:
        self.settings, self.material, self.held_out, self.watch = settings, material, held_out, watch
        self.checkpoint, self.metrics, self.picture = (folder / name for name in (CHECKPOINT, METRICS, PICTURE))
        ids = frequent_tokens(material, arch.vocabulary, settings.head_tokens) if settings.head_tokens else None
        ids = ids if start is None else start.head_ids
        self.device = weights.norm.device
        self.teacher = Teacher(Stack(arch, weights), settings.taps)
        self.remembering = self.teacher.has_room(material)
        self.course = course_of(arch, weights, settings, None if ids is None else ids.to(self.device))
        self.student = self.course.student
        if start is not None:
            assert isinstance(self.student, Stack), "only plain drafts learn on"
            start.give(self.student)
        self.optimiser = _optimiser(self.student, settings)
        self.identity = _identity(settings, material, weights)
        self.total = settings.steps
        self.step, self.tokens, self.seconds, self.epoch, self.index = 0, 0, 0.0, 0, 0
        # rows of one forward; several of them make a step where memory is short
        self.micro = min(settings.rows, max(AT_ONCE // (settings.length * settings.depths), 1))
        self._losses: list[Tensor] = []
        self._warm = 0, 0.0  # step and seconds from which on steps take their usual time
        self._saved_at = time.monotonic()
        self._listened = 0.0  # seconds that computing the target's states has taken

    def listen(self) -> None:
        """Compute the target's states over the material once, if they fit into memory."""
        rows, began = self.settings.rows, time.monotonic()  # not `micro`: a resumed run listens as the first did
        while self.remembering and self.step != self.total and not self._remembered(rows):
            rows //= 2
            self.remembering = rows > 0
            log.warning(
                "Out of memory: %s.",
                f"listening to {rows} rows at a time" if rows else "the target is asked at every step",
            )
        self._listened = time.monotonic() - began

    def _remembered(self, rows: int) -> bool:
        """True if memory sufficed for this many rows at a time."""
        try:
            self.teacher.remember(self.material, self.settings.length, rows, self.watch)
            return True
        except RuntimeError as error:
            if not _short_of_memory(error):
                raise
        self._let_go()  # out here, see `_fitting`
        return False

    def go_on(self) -> None:
        """Train up to the last step."""
        batches, clock = self._batches(), _Clock(self.device)
        while self.total is None or self.step < self.total:
            batch = next(batches)
            self._losses.append(self._learn(batch))
            self.step += 1
            self.tokens += int((batch.segments != PADDING).sum())
            if self._at_a_mark():
                self.seconds += clock.lap()
                self._budget()
                self._record()
                clock.restart()
            if time.monotonic() - self._saved_at > self.settings.checkpoint_seconds:
                self.seconds += clock.lap()
                self.save()
                clock.restart()

    def finish(self) -> dict[str, Any]:
        """Evaluate the draft a last time, and write all files of the run."""
        figures = self.evaluate()
        self._write(
            {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 2), "final": True, **figures}
        )
        self.save()
        write_durably(self.picture, picture(_records(self.metrics)).encode())
        return figures

    def _batches(self) -> Iterator[Batch]:
        """Deal the material repeatedly, from the current step on."""
        s = self.settings
        while True:
            for batch in self.material.batches(s.length, s.rows, s.seed, self.epoch, self.index, s.question_weight):
                self.index += 1
                yield batch
            self.epoch, self.index = self.epoch + 1, 0

    def _learn(self, batch: Batch) -> Tensor:
        """Take one step; return its loss."""
        loss = self._fitting(lambda: self._gradients(batch))
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.settings, self.step, self.total)
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), self.settings.clip)
        self.optimiser.step()
        return loss

    def _fitting(self, work: Callable[[], T]) -> T:
        """Run a function with `micro` rows at a time. If memory runs out, repeat it with half as many, which changes
        nothing else."""
        while True:
            try:
                return work()
            except RuntimeError as error:
                if not _short_of_memory(error):
                    raise
            # Out here, as what the failed attempt held is let go only when its error is.
            self._halve()

    def _gradients(self, batch: Batch) -> Tensor:
        self.optimiser.zero_grad(set_to_none=True)
        total = max(batch.weight.sum().item() * whole_weight(self.settings), 1e-9)
        losses = [self._part(part, total) for part in batch.parts(self.micro) if part.weight.any()]
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)

    def _part(self, part: Batch, total: float) -> Tensor:
        """Add the gradient of some rows."""
        here = moved(part, self.student)
        rows = self.course.rows(part, here, self.teacher(here), self.settings.fade)
        loss = divergence(rows, self.student.head) / total
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _halve(self) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        if self.micro == 1:
            raise BadParameter(
                f"One row of {self.settings.length} tokens does not fit into memory. Use shorter rows or fewer layers."
            )
        self.micro = (self.micro + 1) // 2
        log.warning("Out of memory: going on with %d rows at a time instead of %d.", self.micro, self.settings.rows)
        self._let_go()

    def _let_go(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def evaluate(self) -> dict[str, Any]:
        """Compare with the target on held-out answers, always the same ones."""
        return self._fitting(self._compared)

    def evaluation(self) -> DraftEvaluation:
        """Count the draft's candidates on the held-out answers of `evaluate`."""
        return evaluate(self._fitting(self._judged), HELD_OUT_TEXT)

    @torch.no_grad()
    def _compared(self) -> dict[str, Any]:
        scores = [NO_SCORES] * self.settings.depths
        for rows in self._held_out_rows():
            for depth in range(rows.depths):
                scores[depth] += compare(rows.depth(depth), self.student, self.teacher.stack.head)
        figures = {**scores[0].means(), "compared": scores[0].rows}
        by_depth = [round(one.means()["top1"], 4) for one in scores]
        return {**figures, "top1_by_depth": by_depth} if self.settings.taps else figures

    @torch.no_grad()
    def _judged(self) -> list[JudgedPosition]:
        head = self.teacher.stack.head
        judged = (judge(rows, self.student, head, SURE) for rows in self._held_out_rows())
        return [one for depths in judged for positions in depths for one in positions if one is not None]

    def _held_out_rows(self) -> Iterator[DeepRows]:
        s = self.settings
        for batch in islice(self.held_out.batches(s.length, s.rows, s.seed, 0), s.evaluate_batches):
            for part in batch.parts(self.micro):
                here = moved(part, self.student)
                yield self.course.rows(part, here, self.teacher.listen(here), fade=1.0)

    def _at_a_mark(self) -> bool:
        """True if this step reads the clock, which waits for the device."""
        s = self.settings
        calibrating = self.total is None and self.step in (WARM, CALIBRATION)
        return (
            calibrating
            or self.step == self.total
            or self.step % s.record_every == 0
            or self.step % s.evaluate_every == 0
        )

    def _budget(self) -> None:
        """Turn a time budget into steps once the time of a step is known; saved at once, so that a resumed run has
        the same."""
        if self.step == WARM:
            self._warm = self.step, self.seconds
        if self.total is not None or self.step < CALIBRATION or self.settings.seconds is None:
            return
        each = (self.seconds - self._warm[1]) / (self.step - self._warm[0])
        fitting = int(max(self.settings.seconds - self._listened, 0.0) * STEPS_SHARE / each)
        self.total = max(self.step, min(fitting, self.settings.most_steps or fitting))
        self.save()

    def _record(self) -> None:
        s = self.settings
        evaluated = self.step % s.evaluate_every == 0
        if not evaluated and self.step % s.record_every and self.step != self.total:
            return
        loss = torch.stack(self._losses).mean().item()
        self._losses.clear()
        if not math.isfinite(loss):
            raise BadParameter(
                f"The loss became {loss} at step {self.step}. Use a lower learning rate than {s.learning_rate}."
            )
        record = {"step": self.step, "tokens": self.tokens, "loss": loss, "seconds": round(self.seconds, 2)}
        record |= {
            "learning_rate": learning_rate(s, self.step - 1, self.total),
            "tokens_per_second": self.tokens / max(self.seconds, 1e-9),
        }
        self._write({**record, **(self.evaluate() if evaluated else {})})

    def _write(self, record: dict[str, Any]) -> None:
        with spoken(self.metrics, RESUME), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self._show(record)

    def _show(self, record: Mapping[str, Any]) -> None:
        loss = f"loss {record['loss']:.3f}" if "loss" in record else ""
        self.watch("Training", self.step, self.total, loss)
        if "top1" in record and not record.get("final"):
            agreement = f"top-1 {record['top1']:.3f}, top-3 {record['top3']:.3f}"
            self.watch.say(f"step {self.step:,}: {', '.join(filter(None, (loss, agreement)))}")

    def save(self) -> None:
        """Write everything that the next step needs."""
        where = {name: getattr(self, name) for name in _WHERE}
        write_checkpoint(self.checkpoint, self.student, self.optimiser, {"identity": self.identity, "where": where})
        self._saved_at = time.monotonic()

    def restore(self) -> None:
        """Return to the checkpoint and drop later measurements."""
        held = Checkpoint.read(self.checkpoint)
        _refuse_other_run(held.notes["identity"], self.identity, self.checkpoint)
        held.load(self.student, self.optimiser)
        has_room = self.remembering
        for name in _WHERE:
            setattr(self, name, held.notes["where"][name])
        self.remembering = self.remembering and has_room  # there may be less of it than there was
        kept = [record for record in _records(self.metrics) if record["step"] <= self.step and not record.get("final")]
        write_durably(self.metrics, "".join(json.dumps(record) + "\n" for record in kept).encode())


_WHERE = ("step", "tokens", "seconds", "epoch", "index", "micro", "total", "remembering")


class _Clock:
    """Seconds of training alone; reading it waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        """Start counting."""
        self._began = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last lap or start."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        before, self._began = self._began, time.perf_counter()
        return self._began - before


def _short_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)  # the latter on a CPU


def _identity(settings: TrainSettings, material: Material, weights: Weights) -> dict[str, Any]:
    """Return what a checkpoint belongs to; how often a run saves and evaluates does not change its weights."""
    aside = {"record_every", "evaluate_every", "evaluate_batches", "checkpoint_seconds"}
    values = {name: value for name, value in asdict(settings).items() if name not in aside}
    digest = sha256(material.tokens.numpy().data)
    digest.update(material.starts.numpy().data)
    table = weights.in_floats()[0]
    sample = table[:: max(table.shape[0] // 64, 1)].float().cpu().contiguous()
    return {
        **values,
        "layers": list(settings.layers),
        "taps": list(settings.taps),
        "material": digest.hexdigest(),
        "target": sha256(sample.numpy().data).hexdigest(),
    }


def _refuse_other_run(held: Mapping[str, Any], ours: Mapping[str, Any], path: Path) -> None:
    other = [name for name in ours if held.get(name) != ours[name]]
    if other:
        changed = ", ".join(f"{name} was {_short(held.get(name))}, now {_short(ours[name])}" for name in other)
        raise BadParameter(
            f"The checkpoint {path} is of another run: {changed}. Resume with the same settings, or start in another "
            "folder."
        )


def _short(value: Any) -> str:
    return f"{value[:12]}…" if isinstance(value, str) and len(value) > 12 else str(value)


def _optimiser(student: nn.Module, settings: TrainSettings) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in student.parameters() if parameter.dim() > 1]
    # norms and biases are not drawn to 0
    vectors = [parameter for parameter in student.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=matrices[0].device.type == "cuda"
    )


def _records(path: Path) -> list[dict[str, Any]]:
    """Read the metrics; a line cut short by a kill is no line."""
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            log.warning("A line of %s was cut short and is left out.", path)
    return found
