"""`specbranch train-predictor`: H-RAD for a pair, made from nothing but the pair."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbranch import __version__
from specbranch.cli.options import PAIR, TABLES, with_options
from specbranch.cli.sections import SectionedCommand, options_of
from specbranch.cli.writing import (
    TrainingBars,
    commit,
    hardware,
    load_target,
    material_files,
    material_in,
    or_usual,
    title_and_licence,
)
from specbranch.errors import BadParameter
from specbranch.pairs import chosen_models

if TYPE_CHECKING:
    from specbranch.assembly import ModelChoice
    from specbranch.core.runner import Runner
    from specbranch.distill.material import Material
    from specbranch.hrad.collect import Collector, WrittenText
    from specbranch.hrad.predictor import About, Predictor
    from specbranch.hrad.rounds import LabelledRounds
    from specbranch.hrad.train import DealtRounds, FitSettings, Fitted

ROWS = 512  # tokens read in one forward
SHOWN = 8  # draft length that the summary and the picture tell of
_models, _writing, _training = (options_of(title) for title in ("Pair", "Writing", "Training"))


@click.command("train-predictor", cls=SectionedCommand, tables={"Pairs": TABLES["Pairs"]})
@with_options(PAIR)
@_models("--target", metavar="MODEL", help="Target model, instead of a pair's.")
@_models("--draft", metavar="MODEL", help="Draft model, beside --target.")
@_models("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 … [a GPU if there is one]")
@_models("--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Folder of the predictor.")
@_writing("--seconds-writing", type=float, metavar="S", help="How long the target writes [30].")
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
    help="Use what an earlier run wrote (it is left in DIR/material.safetensors); nothing is written.",
)
@_writing("--writing-rows", type=int, metavar="N", help="Conversations written at once [512 on a GPU, else 16].")
@_writing("--writing-length", type=int, default=640, metavar="N", help="Most tokens of a conversation [640].")
@_training(
    "--texts",
    type=click.IntRange(min=8),
    default=2000,
    metavar="N",
    help="Most conversations to take rounds from [2000].",
)
@_training(
    "--longest",
    type=click.IntRange(1, 64),
    default=16,
    metavar="N",
    help="Draft length (γ) up to which it foretells [16].",
)
@_training(
    "--layers",
    type=click.IntRange(1, 64),
    default=4,
    metavar="K",
    help="Of how many layers it reads hidden states [4].",
)
@_training("--epochs", type=click.IntRange(min=1), default=20, metavar="N", help="Times the rounds are gone over [20].")
@_training("--batch", type=click.IntRange(min=1), default=256, metavar="N", help="Rounds of a step [256].")
@_training("--learning-rate", type=float, default=1e-3, metavar="X", help="Highest learning rate [0.001].")
@_training("--weight-decay", type=float, default=0.1, metavar="X", help="How strongly weights are pulled to 0 [0.1].")
@_training(
    "--forgets",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.2,
    metavar="X",
    help="Share of features left out in every step [0.2].",
)
@_training(
    "--across-tasks/--no-across-tasks",
    default=True,
    help="Also train without each kind of text, to see what that costs [yes].",
)
@click.option("--seed", type=int, default=0, metavar="N", help="Seed of writing, dealing and training [0].")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: accuracy, confusion, calibration, log_loss …")
def train_predictor(as_json: bool, **given: Any) -> None:
    """Train H-RAD for a pair: a small network that foretells from the target's hidden states how much of the next draft
    is taken.

    \b
    specbranch train-predictor --pair smollm2-default --out my-predictor
    specbranch train-predictor --target BIG --draft SMALL --out my-predictor
    specbranch generate --policy paper --predictor my-predictor "Once upon a time"

    No data set is needed: the target invents questions and answers them greedily, and rounds of speculative decoding
    are read off its answers; nothing is trimmed meanwhile. Of the texts 75 % are learned from, 10 % calibrate, 15 %
    judge. DIR/report.svg shows whether chances come true, DIR/predictor.json holds all figures. A predictor is good for
    the pair it was trained for, and refused by others.
    """
    job = PredictorJob.of(given)
    with TrainingBars() as bars:
        material = job.material(bars)
        rounds = job.rounds(material, bars)
        predictor = job.trained(rounds, bars)
    predictor.save(job.out)
    job.draw(predictor)
    click.echo(json.dumps(predictor.about.figures) if as_json else _summary(job.out, predictor))


@dataclass(frozen=True, slots=True)
class PredictorJob:
    """What was asked for."""

    target: str
    draft: str
    device: str
    out: Path
    given: Mapping[str, Any]
    settings: FitSettings

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> PredictorJob:
        """Refuse what cannot be done before anything is loaded."""
        from specbranch.assembly import chosen_device
        from specbranch.hrad.train import FitSettings

        target, draft = chosen_models(given["pair"], given["target"], given["draft"])
        if draft is None:
            raise BadParameter(
                "A predictor foretells what becomes of a draft, and none was given. Name one with --draft, or a --pair."
            )
        if given["material"] is not None and not material_files(given["material"]):
            raise BadParameter(f"There is no material at {given['material']}. Name a file that an earlier run left.")
        names = ("epochs", "batch", "learning_rate", "weight_decay", "forgets", "seed")
        return cls(
            target,
            draft,
            chosen_device(given["device"]),
            given["out"],
            given,
            FitSettings(*(given[name] for name in names)),
        )

    def material(self, bars: TrainingBars) -> Material:
        """What the target wrote, greedily."""
        from specbranch.assembly import ModelChoice, load_tokenizer
        from specbranch.cli.generate import read_prompts
        from specbranch.cli.progress import pulled
        from specbranch.distill.writer import write
        from specbranch.distill.writer_settings import WriterSettings
        from specbranch.models.files.locate import locate
        from specbranch.models.native import open_model

        given = self.given
        source = pulled(self.target)
        if given["material"] is not None:
            return self._checked(material_in(given["material"]))
        seconds, length = given["seconds_writing"], given["writing_length"]
        settings = WriterSettings(
            seconds=30.0 if seconds is None and given["tokens"] is None else seconds,
            tokens=given["tokens"],
            rows=or_usual(given["writing_rows"], 16 if self.device == "cpu" else 512),
            length=length,
            question_tokens=max(min(192, length // 3), 3),
            temperature=0.0,  # a label is only right where the target would say the same again
            prompts=tuple(read_prompts(None, given["data"])) if given["data"] else (),
            seed=given["seed"],
        )
        writer = load_target(*open_model(locate(source)), self.device)
        written = write(writer, load_tokenizer(ModelChoice(source)), settings, bars.slice(settings, "Writing"))
        written.save(self.out / "material.safetensors")
        return written

    def _checked(self, material: Material) -> Material:
        """Refuse what was drawn with a temperature, or by another target."""
        from specbranch.assembly import ModelChoice, fetched

        for part in material.about.get("parts", [material.about]):
            name, settings = part.get("target"), part.get("settings", {})
            if settings.get("temperature", 0.0) != 0.0:
                told = f"{self.given['material']} was written at temperature {settings['temperature']}, half of it"
                raise BadParameter(
                    f"{told}; labels need greedy texts. Take what an earlier train-predictor left, or let it write."
                )
            if name is not None and name != Path(fetched(ModelChoice(self.target))).name:
                raise BadParameter(
                    f"{self.given['material']} was written by {name}, not by {self.target}. Let this target write its "
                    "own."
                )
        return material

    def rounds(self, material: Material, bars: TrainingBars) -> LabelledRounds:
        """Read rounds off the answers."""
        from specbranch.assembly import load_runner
        from specbranch.hrad.rounds import LabelledRounds

        collector = self.collector(load_runner(self._choices()[0]))
        texts = [text for text in self.texts(material) if collector.fits(text)][: self.given["texts"]]
        if not texts:
            raise BadParameter(
                "The target wrote nothing that both models can read. Let it write longer, with --seconds-writing."
            )
        made = []
        for number, text in enumerate(texts):
            made.append(collector.rounds(text, number))
            bars.show("Reading", len(texts), number + 1, f"{sum(map(len, made)):,} rounds")
        return LabelledRounds.join(made)

    def collector(self, target: Runner) -> Collector:
        """Load the draft beside a target, to read with it."""
        from specbranch.assembly import common_vocabulary, load_tokenizer, make_drafter
        from specbranch.hrad.collect import Collector

        given, (choice, draft) = self.given, self._choices()
        drafter = make_drafter(draft, common_vocabulary(load_tokenizer(choice), draft), target)
        reading = {"layers": given["layers"], "longest": given["longest"], "rows": ROWS, "seed": given["seed"]}
        return Collector(target, drafter.runner, **reading)

    def trained(self, rounds: LabelledRounds, bars: TrainingBars) -> Predictor:
        """Train, calibrate and judge."""
        import torch

        from specbranch.hrad.predictor import Predictor
        from specbranch.hrad.train import dealt, fit

        parts = dealt(rounds.to(torch.device(self.device)), self.settings.seed)
        start = time.monotonic()
        fitted = fit(
            parts, self.settings, lambda done, of, nats: bars.show("Training", of, done, f"{nats:.3f} nats a round")
        )
        seconds = time.monotonic() - start
        bars.show("Judging", None, 0, "")
        width = rounds.features.shape[1] // (self.given["layers"] + 1)
        about = self._about(width, self._figures(fitted, parts), self._provenance(parts, seconds))
        return Predictor(about, fitted.network)

    def _figures(self, fitted: Fitted, parts: DealtRounds) -> dict[str, Any]:
        from specbranch.hrad import report

        network, settings = fitted.network, self.settings
        figures = report.figures(network, parts.judged, min(SHOWN, self.given["longest"]))
        figures |= {
            "epoch": fitted.epoch,
            "nats_calibrated": fitted.nats,
            "rivals": report.rivalry(network, parts, settings.seed),
        }
        if self.given["across_tasks"]:
            figures["across_tasks"] = report.across_tasks(parts, self._tasks(), settings, network)
        return figures

    def _about(self, width: int, figures: dict[str, Any], provenance: dict[str, Any]) -> About:
        from specbranch.assembly import identity
        from specbranch.hrad.predictor import About

        (target, _), (draft, _) = title_and_licence(self.target), title_and_licence(self.draft)
        named = (target, identity(self.target), draft, identity(self.draft))
        return About(*named, self.given["longest"], self.given["layers"], width, figures, provenance)

    def draw(self, predictor: Predictor) -> None:
        """Draw whether chances came true."""
        from specbranch.charts import ChartLine, line_chart
        from specbranch.distill.draft_folder import write_whole

        figures = predictor.about.figures
        lines = [ChartLine("as said", [(0.0, 0.0), (1.0, 1.0)], dashed=True, colour=7)]
        for name, points in figures["calibration"].items():
            lines.append(ChartLine(name, [(one["said"], one["true"]) for one in points], marks=True))
        title = (
            f"Do chances come true? Drafts of {figures['length']} tokens, {figures['rounds']} rounds that were "
            "not learned from"
        )
        write_whole(
            self.out / "report.svg",
            line_chart(title, lines, "chance told", "share that came true", y_from_zero=True).encode(),
        )

    def _choices(self) -> tuple[ModelChoice, ModelChoice]:
        from specbranch.assembly import ModelChoice, fitted_to_target

        target, draft = (
            ModelChoice(name, device=self.device, tail=ROWS, shorten=True) for name in (self.target, self.draft)
        )
        return target, fitted_to_target(draft, self.target)

    def texts(self, material: Material) -> list[WrittenText]:
        """Take what was written apart."""
        from specbranch.hrad.collect import WrittenText

        kinds = self._kinds(material)
        found = []
        for index in range(len(material)):
            tokens, answer = material.sequence(index), int(material.answers[index])
            found.append(WrittenText(tuple(tokens[:answer]), tuple(tokens[answer:]), kinds(tokens)))
        return found

    def _kinds(self, material: Material) -> Any:
        """Return what tells the number of a text's kind."""
        from specbranch.assembly import ModelChoice, fetched, load_tokenizer
        from specbranch.distill.openings import Script
        from specbranch.distill.writer_settings import WriterSettings
        from specbranch.models.files.locate import locate
        from specbranch.models.native import open_model

        choice = ModelChoice(fetched(ModelChoice(self.target)))
        length = int(material.about.get("settings", {}).get("length", self.given["writing_length"]))
        arch, _ = open_model(locate(choice.name))
        script = Script.of(
            load_tokenizer(choice),
            arch,
            WriterSettings(tokens=1, length=length, question_tokens=max(min(192, length // 3), 3)),
        )
        return lambda tokens: self._tasks().index(script.kind_of(tokens))

    @staticmethod
    def _tasks() -> tuple[str, ...]:
        from specbranch.distill.openings import GIVEN, KIND_NAMES

        return (*KIND_NAMES, GIVEN)

    def _provenance(self, parts: DealtRounds, seconds: float) -> dict[str, Any]:
        from dataclasses import asdict

        import torch

        return {
            **asdict(self.settings),
            "rounds_learned": len(parts.learned),
            "rounds_calibrated": len(parts.calibrated),
            "rounds_judged": len(parts.judged),
            "seconds": round(seconds, 1),
            "specbranch": __version__,
            "commit": commit(),
            "torch": torch.__version__,
            "hardware": hardware(torch.device(self.device)),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        }


def _summary(out: Path, predictor: Predictor) -> str:
    figures, learned = predictor.about.figures, predictor.about.provenance
    lines = [
        f"The predictor is in {out}. On {figures['rounds']:,} rounds that were not learned from, drafts of "
        f"{figures['length']} tokens:",
        f"  {figures['accuracy']:.1%} told rightly ("
        + ", ".join(f"{name} {share:.1%}" for name, share in figures["accuracy_by_class"].items())
        + f"); chances are off by {figures['calibration_error']:.1%} on average.",
        "  true \\ told   none    some     all",
        *(f"  {name:10} " + " ".join(f"{count:7,}" for count in row) for name, row in _confusion(figures)),
        "How well each way foretells how much is taken, in nats a round (less is better; in brackets the difference "
        "to H-RAD):",
        *(
            f"  {name:23} {one['nats']:.3f} ({one['low']:+.3f} … {one['high']:+.3f})"
            for name, one in figures["rivals"].items()
        ),
    ]
    for name, one in figures.get("across_tasks", {}).items():
        more = one["nats_unseen"] / one["nats"] - 1
        lines.append(
            f"  {name}: {one['nats']:.3f} nats, {one['nats_unseen']:.3f} had no such text been learned from "
            f"({more:+.1%})"
        )
    lines.append(f"{learned['rounds_learned']:,} rounds were learned from, in {learned['seconds']:.0f} s.")
    return "\n".join(lines)


def _confusion(figures: Mapping[str, Any]) -> list[tuple[str, list[int]]]:
    return list(zip(figures["accuracy_by_class"], figures["confusion"], strict=True))
