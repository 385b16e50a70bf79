"""The checks of `specbranch doctor`: the installation first, then the pair; each finding is reported at once.

Owns the order of the checks. Invariant: a check that was skipped because of an earlier failure is not reported as ok.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from specbranch.assembly import ModelChoice
from specbranch.config import ExecutorName
from specbranch.errors import SpecBranchError
from specbranch.exec.address import is_link
from specbranch.lab.doctor.finding import Finding, note, problem
from specbranch.lab.doctor.gains import Prediction, answers, predict, recommendation
from specbranch.lab.doctor.installation import installation
from specbranch.lab.doctor.link import link
from specbranch.lab.doctor.pair import agreement, costs, kernels, models_at_hand, target_at_hand
from specbranch.lab.measure.loaded_pair import load_pair
from specbranch.lab.measure.probes import QUICK
from specbranch.lab.measure.profile_pair import measure
from specbranch.lab.measure.step_times import StepTimes, warmed_up
from specbranch.machine_load import LoadMeter, roughness
from specbranch.progress import StepsDone, silent
from specbranch.training.distill.agreement import compare

Tell = Callable[[Finding], None]


@dataclass(frozen=True, slots=True)
class Patient:
    """The pair and executor to check."""

    target: ModelChoice
    draft: ModelChoice
    pair: str
    executor: ExecutorName = "serial"


@dataclass(slots=True)
class DoctorReport:
    """All findings, and the predicted speedups if the checks got that far."""

    findings: list[Finding] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    best: Prediction | None = None
    steps: StepTimes = field(default_factory=dict)  # of a GPU, by model

    @property
    def is_well(self) -> bool:
        """True if there is no problem."""
        return all(finding.level != "problem" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"well": self.is_well, **asdict(self)}


def examine(patient: Patient, tell: Tell = lambda finding: None, progress: StepsDone = silent) -> DoctorReport:
    """Check the installation, then the pair."""
    report = DoctorReport()

    def take(findings: Iterable[Finding]) -> bool:
        """Show findings as they are made. Return True if none is a problem."""
        start = len(report.findings)
        for finding in findings:
            report.findings.append(finding)
            tell(finding)
        return all(finding.level != "problem" for finding in report.findings[start:])

    take(installation())
    if is_link(patient.draft.name):
        _reached(patient, take, progress)
        return report
    if not take(models_at_hand(patient.target, patient.draft)):
        take([note("Pair", "agreement, costs and gain were not looked at, because of the problem above.")])
        return report
    try:
        take(_pair(patient, report, progress))
    except SpecBranchError as error:
        take([problem("Pair", str(error))])
    return report


def _reached(patient: Patient, take: Callable[[Iterable[Finding]], bool], progress: StepsDone) -> None:
    """Check the target, then the draft worker on a network."""
    if not take([target_at_hand(patient.target.name)]):
        return
    try:
        take(link(patient.target, patient.draft, progress))
    except SpecBranchError as error:
        take([problem("Link", str(error))])


def _pair(patient: Patient, report: DoctorReport, progress: StepsDone) -> Iterator[Finding]:
    """Load the pair; check kernels, agreement, costs and speedup."""
    progress("Loading the pair", 0, 5)
    pair = load_pair(patient.target, patient.draft, patient.pair, patient.executor)
    yield kernels("target", pair.verifier.runner)
    yield kernels("draft", pair.drafter.runner)
    report.steps = warmed_up(pair)
    progress("The target answers", 1, 5)
    texts = answers(pair)
    progress("The draft reads along", 2, 5)
    yield agreement(compare(pair.drafter.runner, texts))
    progress("Timing both", 3, 5)
    meter = LoadMeter()
    profile = measure(pair, QUICK)
    yield costs(profile)
    if rough := roughness(meter.other_cores(), ()):
        yield note("Costs", rough, "What is predicted from them is rough, too; look again when they rest.")
    progress("Trying each method", 4, 5)
    report.predictions = predict(pair, texts, profile)
    report.best, finding = recommendation(report.predictions)
    progress("Done", 5, 5)
    yield finding
