"""Is all well with this installation and this pair, and what is to be gained? Checks whose findings are sentences for
people.

Owns the checks and their wording. Invariants: a check never raises for what it looks for, it reports; whatever was not
checked, because something before it failed, is not called well.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specbranch.assembly import ModelChoice, common_vocabulary, fitted_to_target, load_tokenizer
from specbranch.config import ExecutorName, SpeculativeConfig
from specbranch.core.methods import METHODS
from specbranch.errors import ModelError, SpecBranchError
from specbranch.exec.serial import Serial
from specbranch.extras import EXTRAS, Extra
from specbranch.measure.pair import QUICK, StepsDone, decode, measure, silent
from specbranch.measure.workers import Workers, load_workers
from specbranch.pairs import PAIRS, draft_folder

if TYPE_CHECKING:
    from specbranch.distill.agreement import Agreement
    from specbranch.replay.decode import RecordDecoder
    from specbranch.sim.profile import CostProfile

Level = Literal["ok", "note", "problem"]
TOKENS = 40  # of each answer that is looked at
LENGTHS = (2, 4, 8)  # of drafts that are tried
GAIN = 1.03  # below this, speculation is not worth having
PYTHON, TORCH, TRANSFORMERS = (3, 11), (2, 11), (5, 17)
GIB = 2**30
ROOM = 0.5 * GIB  # that a cache folder should have
FEATURES = {  # what the kernels and BLAS make use of, by LLVM's names
    "x86_64": ("avx2", "fma", "avx512f", "avx512bf16", "amx-bf16"),
    "aarch64": ("neon", "dotprod", "fullfp16", "bf16", "i8mm", "sve"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, and what to do about it."""

    level: Level
    about: str
    said: str
    advice: str = ""

    def to_dict(self) -> dict[str, str]:
        """Return plain values."""
        return {"level": self.level, "about": self.about, "said": self.said, "advice": self.advice}


@dataclass(frozen=True, slots=True)
class Prediction:
    """A method at its best setting, on three prompts: modelled from measured costs, with the real models' decisions."""

    method: str
    setting: dict[str, Any]
    speedup: float
    tokens_per_forward: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "method": self.method,
            "setting": self.setting,
            "speedup": self.speedup,
            "tokens_per_forward": self.tokens_per_forward,
        }


@dataclass(frozen=True, slots=True)
class Patient:
    """What is looked at."""

    target: ModelChoice
    draft: ModelChoice
    pair: str
    executor: ExecutorName = "serial"


@dataclass(slots=True)
class DoctorReport:
    """All findings, and what speculation is predicted to gain, if it came to that."""

    findings: list[Finding]
    predictions: list[Prediction]
    best: Prediction | None = None

    @property
    def is_well(self) -> bool:
        """Whether there is no problem."""
        return all(finding.level != "problem" for finding in self.findings)


Tell = Callable[[Finding], None]


def examine(patient: Patient, tell: Tell = lambda finding: None, progress: StepsDone = silent) -> DoctorReport:
    """Check the installation, then the pair; each finding is told as soon as it is made."""
    report = DoctorReport([], [])

    def note(findings: Iterator[Finding]) -> bool:
        start = len(report.findings)
        for finding in findings:
            report.findings.append(finding)
            tell(finding)
        return all(finding.level != "problem" for finding in report.findings[start:])

    note(installation())
    if not note(models_at_hand(patient)):
        note(
            iter(
                [Finding("note", "Pair", "agreement, costs and gain were not looked at, because of the problem above.")]
            )
        )
        return report
    try:
        note(_pair(patient, report, progress))
    except SpecBranchError as error:
        note(iter([Finding("problem", "Pair", str(error))]))
    return report


def installation() -> Iterator[Finding]:
    """Check what does not depend on a pair."""
    yield python_version()
    yield from libraries()
    yield processor()
    yield graphics()
    yield memory()
    yield cache()


def python_version() -> Finding:
    """Check the interpreter."""
    return _at_least("Python", platform.python_version(), PYTHON)


def libraries() -> Iterator[Finding]:
    """Check torch, transformers and the compiler of the CPU kernels; tell of the extras, which may be missing."""
    yield _at_least("torch", _version("torch"), TORCH)
    yield _at_least("transformers", _version("transformers"), TRANSFORMERS)
    if _version("llvmlite") is None:
        yield Finding(
            "note", "llvmlite", "is not installed, so that the CPU kernels are not compiled.", "pip install llvmlite"
        )
    for extra in EXTRAS:
        yield _optional(extra)


def processor() -> Finding:
    """Tell what the CPU is and how much of it is used."""
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    said = f"{platform.machine()}, {usable} usable cores, {threads} threads{_features()}"
    if threads < usable:
        return Finding(
            "note", "CPU", f"{said}.", f"torch uses {threads} of {usable} cores: unset OMP_NUM_THREADS to use them all."
        )
    if threads > usable:
        return Finding(
            "note", "CPU", f"{said}.", f"More threads than cores hinder one another: set OMP_NUM_THREADS={usable}."
        )
    busy = _load()
    if busy is not None and busy > usable * 0.7:
        return Finding(
            "note",
            "CPU",
            f"{said}; other work keeps them busy (load {busy:.1f}).",
            "What is timed below will be too slow; look again when they rest.",
        )
    return Finding("ok", "CPU", f"{said}.")


def graphics() -> Finding:
    """Tell which GPU there is."""
    import torch

    if not torch.cuda.is_available():
        return Finding("ok", "GPU", "none that torch can use; everything runs on the CPU.")
    free, total = torch.cuda.mem_get_info()
    return Finding("ok", "GPU", f"{torch.cuda.get_device_name()}, {free / GIB:.1f} of {total / GIB:.1f} GiB free.")


def memory() -> Finding:
    """Check how much memory is free."""
    free = _free_memory()
    if free is None:
        return Finding("note", "Memory", "how much is free cannot be found out on this system.")
    if free < 1 * GIB:
        advice = "Close other programs: the default pair needs about 0.8 GiB, larger models more."
        return Finding(
            "problem" if free < 0.4 * GIB else "note", "Memory", f"only {free / GIB:.1f} GiB are free.", advice
        )
    return Finding("ok", "Memory", f"{free / GIB:.1f} GiB are free.")


def cache() -> Finding:
    """Check that the cache folder can be written and has room."""
    from specbranch.models.files.store import CACHE_VARIABLE, cache_folder

    folder = cache_folder()
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    advice = f"Set {CACHE_VARIABLE} to a folder with room that you may write to."
    if not os.access(there, os.W_OK):
        return Finding("problem", "Cache folder", f"{folder} cannot be written.", advice)
    free = shutil.disk_usage(there).free
    if free < ROOM:
        return Finding("problem", "Cache folder", f"{folder} has {free / GIB:.1f} GiB of room left.", advice)
    return Finding("ok", "Cache folder", f"{folder}, {free / GIB:.1f} GiB of room.")


def models_at_hand(patient: Patient) -> Iterator[Finding]:
    """Check that both models are here and whole, without fetching anything, and that they speak the same tokens."""
    target = _target(patient.target)
    draft = _draft(patient)
    yield target
    yield draft
    if "problem" not in (target.level, draft.level):
        yield _vocabulary(patient)


def agreement(found: Agreement) -> Finding:
    """Say how well a draft agrees."""
    said = (
        f"the draft's first choice is the target's token in {found.top1:.0%} of {found.tokens} places, "
        f"among its first three in {found.top3:.0%}."
    )
    if found.top1 < 0.3:
        return Finding(
            "problem",
            "Agreement",
            said,
            "This draft is hardly better than none: take another one, or train one with `specbranch distill`.",
        )
    if found.top1 < 0.5:
        return Finding("note", "Agreement", said, "That is little: only short drafts pay.")
    return Finding("ok", "Agreement", said)


def costs(profile: CostProfile) -> Finding:
    """Say how dear the draft is."""
    target, draft = profile.target_seconds(1), profile.draft_seconds(1)
    ratio, more = target / draft, profile.target_seconds(4) / target
    said = (
        f"c = {ratio:.1f}: a target forward takes {target * 1e3:.1f} ms, a draft step {draft * 1e3:.1f} ms; verifying "
        "4 tokens costs "
        f"{more:.2f} times as much as one."
    )
    if ratio < 2:
        return Finding(
            "note", "Costs", said, "The draft is dear: take a smaller one, or method lookup, which needs none."
        )
    return Finding("ok", "Costs", said)


def recommendation(predictions: Sequence[Prediction]) -> tuple[Prediction, Finding]:
    """Name the method to use."""
    best = max(predictions, key=lambda one: one.speedup)
    if best.speedup < GAIN:
        plain = next((one for one in predictions if one.method == "autoregressive"), best)
        advice = "Use --method autoregressive here, or a cheaper or better draft."
        return plain, Finding(
            "note",
            "Method",
            f"speculation does not pay: at best {best.speedup:.2f} times plain decoding, with {best.method}.",
            advice,
        )
    setting = "".join(
        f" --num-speculative-tokens {best.setting[key]}" for key in ("num_speculative_tokens",) if key in best.setting
    )
    said = f"{best.method} is predicted to be {best.speedup:.2f} times as fast as plain decoding."
    return best, Finding("ok", "Method", said, f"Use --method {best.method}{setting}.")


def _pair(patient: Patient, report: DoctorReport, progress: StepsDone) -> Iterator[Finding]:
    """Load the pair; look at kernels, agreement, costs, gain."""
    from specbranch.distill.agreement import AnsweredPrompt, compare

    progress("Loading the pair", 0, 5)
    workers = load_workers(patient.target, patient.draft, patient.pair, patient.executor)
    yield from _kernels(workers)
    progress("The target answers", 1, 5)
    texts = [AnsweredPrompt(tuple(prompt), _answer(workers, prompt)) for prompt in workers.prompts()]
    progress("The draft reads along", 2, 5)
    yield agreement(compare(workers.drafter.runner, texts))
    progress("Timing both", 3, 5)
    profile = measure(workers, QUICK)
    yield costs(profile)
    progress("Trying each method", 4, 5)
    report.predictions = predict(workers, texts, profile)
    report.best, finding = recommendation(report.predictions)
    progress("Done", 5, 5)
    yield finding


def predict(workers: Workers, texts: Sequence[Any], profile: CostProfile) -> list[Prediction]:
    """Decode the target's answers again by each method, with the draft's real proposals and modelled time; best
    setting of each."""
    from specbranch.config import SamplingParams
    from specbranch.replay.decode import RecordDecoder, ReplayedModel
    from specbranch.replay.record import Record, Task
    from specbranch.replay.runners import ProposalStore

    eos = tuple(workers.tokenizer.eos_ids)
    records = [
        Record(Task(text.prompt, SamplingParams(max_tokens=TOKENS), 0, eos), text.answer, ())
        for text in texts
        if len(text.answer) > 1
    ]
    if not records:
        raise ModelError(
            "The target ends each of three answers at once, so nothing can be predicted. Is it a chat model?"
        )
    tried = dict.fromkeys(_settings(), TriedMethod())
    with tempfile.TemporaryDirectory() as folder:
        memory = ProposalStore(Path(folder) / "memory.sqlite")
        draft = ReplayedModel("draft", memory, workers.drafter.runner)
        try:
            for record in records:
                tried = _played(RecordDecoder(record, draft), tried, profile)
        finally:
            memory.close()
    return _best(tried)


@dataclass(frozen=True, slots=True)
class TriedMethod:
    """What a method took for some requests."""

    seconds: float = 0.0
    tokens: int = 0
    forwards: int = 0


def _settings() -> Iterator[tuple[str, int | None]]:
    """Each method with each length of draft, where it has one to set.

    One that has the target guess is left out: it would have to decode for real, which takes long.
    """
    for method in (name for name in METHODS if not METHODS[name].guesses):
        lengths = (None,) if method == "autoregressive" or METHODS[method].policy == "planner" else LENGTHS
        yield from ((method, length) for length in lengths)


def _played(
    player: RecordDecoder, tried: Mapping[tuple[str, int | None], TriedMethod], profile: CostProfile
) -> dict[tuple[str, int | None], TriedMethod]:
    """Play one record by every setting, and add up."""
    found = {}
    try:
        for (method, length), so_far in tried.items():
            config = SpeculativeConfig.from_dict(
                {"method": method, **({"num_speculative_tokens": length} if length else {})}
            )
            stats = player.decode(config, profile)
            seconds, tokens = so_far.seconds + stats.decode_seconds, so_far.tokens + stats.emitted - 1
            found[method, length] = TriedMethod(seconds, tokens, so_far.forwards + stats.target_forwards)
    finally:
        player.close()
    return found


def _best(tried: Mapping[tuple[str, int | None], TriedMethod]) -> list[Prediction]:
    """Return each method at its best."""
    plain = tried["autoregressive", None].seconds
    found: dict[str, Prediction] = {}
    for (method, length), one in tried.items():
        setting = {"num_speculative_tokens": length} if length else {}
        made = Prediction(method, setting, plain / one.seconds, one.tokens / max(one.forwards, 1))
        if method not in found or made.speedup > found[method].speedup:
            found[method] = made
    return list(found.values())


def _answer(workers: Workers, prompt: Sequence[int]) -> tuple[int, ...]:
    """Let the target answer greedily, by whatever is quickest."""
    executor, config = Serial(workers.verifier, workers.drafter), SpeculativeConfig(method="adaptive")
    return tuple(decode(executor, prompt, config, TOKENS, workers.tokenizer.eos_ids).output)


def _kernels(workers: Workers) -> Iterator[Finding]:
    for name, runner in (("target", workers.verifier.runner), ("draft", workers.drafter.runner)):
        yield _kernel(name, runner)


def _kernel(name: str, runner: Any) -> Finding:
    about = f"Kernels of the {name}"
    if not hasattr(runner, "decoder"):
        return Finding(
            "note",
            about,
            "it runs on transformers, which is slower.",
            "The native decoder does not know its architecture, or --runner asked for this.",
        )
    dtype = str(runner.dtype).removeprefix("torch.")
    stored = "" if runner.weights == dtype else f", with weights in {runner.weights}"
    if runner.device.type != "cpu":
        return Finding("ok", about, f"it runs on {runner.device}, in {dtype}{stored}.")
    if getattr(runner, "_fused", None) is not None:
        return Finding("ok", about, f"the compiled step agrees with the plain one on this machine and is used{stored}.")
    if dtype != "float32":
        return Finding("note", about, f"there is no compiled step for {dtype}.", "Leave --dtype out for float32.")
    if runner.weights == "int4":
        return Finding(
            "note",
            about,
            "there is no compiled step for int4.",
            "Choose int8 with --weights, of a draft with --draft-weights.",
        )
    advice = "Install llvmlite if it is missing; if it is there, this processor or these shapes have no kernel."
    return Finding("note", about, "the compiled step is not used here, so that small forwards are slower.", advice)


def _target(choice: ModelChoice) -> Finding:
    """Check that a target is here and whole."""
    from specbranch.models.files import store
    from specbranch.models.files.locate import locate

    if choice.name in store.KNOWN and not Path(choice.name).exists():
        path = store.installed(choice.name)
        if path is None:
            return Finding(
                "problem",
                "Target",
                f"{choice.name} is not here, or damaged.",
                f"Fetch it: specbranch models pull {choice.name}",
            )
        return Finding("ok", "Target", f"{choice.name} is here and whole: its sha256 is the pinned one.")
    if not Path(choice.name).expanduser().exists():
        return Finding("note", "Target", f"{choice.name} is not a file here; it is looked for on the Hub.")
    try:
        locate(choice.name)
    except SpecBranchError as error:
        return Finding("problem", "Target", str(error))
    return Finding("ok", "Target", f"{choice.name} is here.")


def _draft(patient: Patient) -> Finding:
    """Check that a draft is here, whole, and this target's."""
    from specbranch.distill.draft_name import draft_config
    from specbranch.models.files.locate import locate

    name = patient.draft.name
    try:
        folder = Path(draft_folder(name)) if name in PAIRS else Path(locate(name).path)
    except SpecBranchError as error:
        return Finding("problem", "Draft", str(error))
    if draft_config(folder) is None:
        return Finding("ok", "Draft", f"{name} is here.")
    if not (folder / "model.safetensors").is_file():
        return Finding(
            "problem",
            "Draft",
            f"{folder} has no model.safetensors.",
            "Train it again with `specbranch distill`, or take another draft.",
        )
    return Finding("ok", "Draft", f"{name} is here, with all of its files.")


def _vocabulary(patient: Patient) -> Finding:
    try:
        tokenizer = load_tokenizer(patient.target)
        shared = common_vocabulary(tokenizer, fitted_to_target(patient.draft, patient.target.name))
    except SpecBranchError as error:
        return Finding("problem", "Vocabulary", str(error))
    if shared < tokenizer.vocabulary_size:
        return Finding(
            "note",
            "Vocabulary",
            f"draft and target share the first {shared} of {tokenizer.vocabulary_size} tokens; the others are never "
            "drafted.",
        )
    return Finding("ok", "Vocabulary", f"draft and target share all {shared} tokens.")


def _at_least(name: str, version: str | None, least: tuple[int, int]) -> Finding:
    wanted = f"{name} {least[0]}.{least[1]} or newer is needed."
    if version is None:
        return Finding("problem", name, "is not installed.", wanted)
    parts = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    return (
        Finding("ok", name, f"{version}.")
        if parts >= least
        else Finding("problem", name, f"{version} is too old.", wanted)
    )


def _optional(extra: Extra) -> Finding:
    """Tell of a package that few need: it is no problem if it is missing."""
    version = _version(extra.package)
    if version is not None:
        return Finding("ok", extra.package, f"{version}.")
    use = f"{extra.purpose[0].lower()}{extra.purpose[1:]}"
    return Finding("ok", extra.package, f"is not installed; only {use} needs it.", f"To have it: {extra.command}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _features() -> str:
    from specbranch.models.cpu.machine_code import CannotCompile, host_features

    try:
        found = host_features()
    except CannotCompile:
        return ""
    there = [name for name in FEATURES.get(platform.machine(), ()) if found.get(name)]
    return f", {' '.join(there)}" if there else ""


def _load() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _free_memory() -> float | None:
    """Bytes a new program could have, as Linux estimates it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
