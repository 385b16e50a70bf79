"""The job of `specbranch train-predictor`: the target writes greedily, both models process the text, and a network is
trained.

Owns the order of the work. Invariant: the training text was written greedily by this target, because a label is correct
only if the target would write the same again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specbranch.assembly import (
    ModelChoice,
    common_vocabulary,
    fetched,
    fitted_to_target,
    identity,
    load_runner,
    load_tokenizer,
    make_drafter,
)
from specbranch.charts import ChartLine, line_chart
from specbranch.core.runner import Runner
from specbranch.errors import BadParameter
from specbranch.hrad.predictor import About, Predictor
from specbranch.models.files.disk import write_durably
from specbranch.models.files.locate import locate
from specbranch.models.files.store import title_and_licence
from specbranch.models.loading import open_model
from specbranch.progress import Onlooker
from specbranch.provenance import trained_with
from specbranch.training.distill.agreement import AnsweredPrompt
from specbranch.training.distill.material import GIVEN, Material, material_files, material_in
from specbranch.training.distill.openings import KIND_NAMES, Script
from specbranch.training.distill.writer import load_target, write
from specbranch.training.distill.writer_settings import WriterSettings, question_room
from specbranch.training.hrad import report
from specbranch.training.hrad.collect import Collector
from specbranch.training.hrad.rounds import LabelledRounds
from specbranch.training.hrad.train import DealtRounds, FitSettings, Fitted, dealt, fit
from specbranch.training.making.writing import SHORT_TEXTS, Fetch, WritingJob

PREDICTOR_SECONDS, WRITING_ROWS = 30.0, 512  # defaults of the writing
PREDICTOR_ROWS = 512  # tokens read in one forward
SHOWN_LENGTH = 8  # draft length of the figures and the chart
TASKS = (*KIND_NAMES, GIVEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorJob(WritingJob):
    """The request; None stands for the device's default."""

    draft: str
    texts: int = 2000
    longest: int = 16
    layers: int = 4
    across_tasks: bool = True
    fit: FitSettings = field(default_factory=FitSettings)

    def __post_init__(self) -> None:
        if self.material is not None and not material_files(self.material):
            raise BadParameter(f"There is no material at {self.material}. Name a file that an earlier run left.")

    @property
    def choices(self) -> tuple[ModelChoice, ModelChoice]:
        """Return the choices of target and draft."""
        target, draft = (
            ModelChoice(name, device=self.device_name, tail=PREDICTOR_ROWS, shorten=True)
            for name in (self.target, self.draft)
        )
        return target, fitted_to_target(draft, self.target)


def make_predictor(job: PredictorJob, fetch: Fetch, watch: Onlooker) -> Predictor:
    """Write, collect, train and save."""
    material = written(job, fetch, watch)
    predictor = trained(job, read_rounds(job, material, watch), watch)
    save(predictor, job.out)
    return predictor


def written(job: PredictorJob, fetch: Fetch, watch: Onlooker) -> Material:
    """Return the target's greedy text; refuse given material that was written otherwise."""
    device, source = job.device_name, fetch(job.target)
    if job.material is not None:
        return _checked(job, job.material, source)
    settings = replace(job.writing(PREDICTOR_SECONDS, WRITING_ROWS, job.fit.seed), temperature=0.0)
    target = load_target(*open_model(locate(source)), device)
    made = write(target, load_tokenizer(ModelChoice(source)), settings, watch)
    made.save(job.out / "material.safetensors")
    return made


def _checked(job: PredictorJob, path: Path, source: str) -> Material:
    material = material_in(path)
    for part in material.parts:
        name, temperature = part.get("target"), part.get("settings", {}).get("temperature", 0.0)
        if temperature != 0.0:
            raise BadParameter(
                f"{path} was written at temperature {temperature}, half of it; labels need greedy texts. Take what an "
                "earlier train-predictor left, or let it write."
            )
        if name is not None and name != Path(source).name:
            raise BadParameter(f"{path} was written by {name}, not by {job.target}. Let this target write its own.")
    return material


def read_rounds(job: PredictorJob, material: Material, watch: Onlooker) -> LabelledRounds:
    """Derive rounds from the answers."""
    collector = load_collector(job, load_runner(job.choices[0]))
    texts = [text for text in written_texts(job, material) if collector.fits(text)][: job.texts]
    if not texts:
        raise BadParameter(
            "The target wrote no text that fits both models. Let it write longer, with --seconds-writing."
        )
    made = []
    for number, text in enumerate(texts):
        made.append(collector.rounds(text, number))
        watch("Reading", number + 1, len(texts), f"{sum(map(len, made)):,} rounds")
    return LabelledRounds.join(made)


def load_collector(job: PredictorJob, target: Runner) -> Collector:
    """Load the draft next to a target, to collect rounds."""
    choice, draft = job.choices
    drafter = make_drafter(draft, common_vocabulary(load_tokenizer(choice), draft), target)
    return Collector(
        target, drafter.runner, layers=job.layers, longest=job.longest, rows=PREDICTOR_ROWS, seed=job.fit.seed
    )


def written_texts(job: PredictorJob, material: Material) -> list[AnsweredPrompt]:
    """Split the material into prompts and answers."""
    kind = _kinds(job, material)
    found = []
    for index in range(len(material)):
        tokens, answer = material.sequence(index), int(material.answers[index])
        found.append(AnsweredPrompt(tuple(tokens[:answer]), tuple(tokens[answer:]), kind(tokens)))
    return found


def _kinds(job: PredictorJob, material: Material) -> Callable[[Sequence[int]], int]:
    """Return a function that gives the number of a text's kind."""
    source = fetched(ModelChoice(job.target))
    length = int(material.about.get("settings", {}).get("length", job.writing_length or SHORT_TEXTS))
    arch, _ = open_model(locate(source))
    settings = WriterSettings(tokens=1, length=length, question_tokens=question_room(length))
    script = Script.of(load_tokenizer(ModelChoice(source)), arch, settings)
    return lambda tokens: TASKS.index(script.kind_of(tokens))


def trained(job: PredictorJob, rounds: LabelledRounds, watch: Onlooker) -> Predictor:
    """Train, calibrate and evaluate."""
    parts = dealt(rounds.to(torch.device(job.device_name)), job.fit.seed)
    start = time.monotonic()
    fitted = fit(parts, job.fit, watch)
    seconds = time.monotonic() - start
    watch("Judging", 0, None)
    width = rounds.features.shape[1] // (job.layers + 1)
    about = About(
        target=title_and_licence(job.target)[0],
        target_identity=identity(job.target),
        draft=title_and_licence(job.draft)[0],
        draft_identity=identity(job.draft),
        longest=job.longest,
        layers=job.layers,
        hidden=width,
        figures=_figures(job, fitted, parts),
        provenance=_provenance(job, parts, seconds),
    )
    return Predictor(about, fitted.network)


def _figures(job: PredictorJob, fitted: Fitted, parts: DealtRounds) -> dict[str, Any]:
    network = fitted.network
    figures = report.figures(network, parts.judged, min(SHOWN_LENGTH, job.longest))
    figures |= {"epoch": fitted.epoch, "nats_calibrated": fitted.nats}
    figures["rivals"] = report.rivalry(network, parts, job.fit.seed)
    if job.across_tasks:
        figures["across_tasks"] = report.across_tasks(parts, TASKS, job.fit, network)
    return figures


def _provenance(job: PredictorJob, parts: DealtRounds, seconds: float) -> dict[str, Any]:
    return {
        **asdict(job.fit),
        "rounds_learned": len(parts.learned),
        "rounds_calibrated": len(parts.calibrated),
        "rounds_judged": len(parts.judged),
        "seconds": round(seconds, 1),
        **trained_with(job.device_name),
    }


def save(predictor: Predictor, out: Path) -> None:
    """Write a predictor and the chart of its calibration."""
    predictor.save(out)
    figures = predictor.about.figures
    lines = [ChartLine("as said", [(0.0, 0.0), (1.0, 1.0)], dashed=True, colour=7)]
    for name, points in figures["calibration"].items():
        lines.append(ChartLine(name, [(one["said"], one["true"]) for one in points], marks=True))
    title = (
        f"Do chances come true? Drafts of {figures['length']} tokens, {figures['rounds']} rounds that were not learned "
        "from"
    )
    picture = line_chart(title, lines, "predicted probability", "observed frequency", y_from_zero=True)
    write_durably(out / "report.svg", picture.encode())
