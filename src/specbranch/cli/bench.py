"""`specbranch bench`: methods held against one another on the same pair, prompts and hardware, and two such runs
against each other."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from specbranch.bench.entries import chosen_subject, for_pair, make_entry
from specbranch.bench.methods import OUTSIDE
from specbranch.bench.presets import DEFAULTS, PRESETS, TOLD
from specbranch.cli.options import TABLES
from specbranch.cli.sections import SectionedCommand, options_of
from specbranch.config import ExecutorName
from specbranch.errors import BadParameter
from specbranch.pairs import DEFAULT_PAIR
from specbranch.sim.shipped import shipped_profiles
from specbranch.suites.suite import ALL_SHIPPED, SUITES

if TYPE_CHECKING:
    from specbranch.bench.entries import BenchPair, Group
    from specbranch.bench.lab import Lab, Workload
    from specbranch.bench.methods import Setting
    from specbranch.bench.results import Results
    from specbranch.bench.run import Clock, PairRuns, StepsDone
    from specbranch.bench.subjects import Subject
    from specbranch.provenance import Provenance
    from specbranch.sim.profile import CostProfile
    from specbranch.suites.suite import Suite

OUT = Path("bench-results")
DRAWN = ("specbranch", "pearl")  # by --timeline
_what, _models, _how, _where = (options_of(title) for title in ("What to run", "Models", "How", "Where"))


@click.group()
def bench() -> None:
    """Compare decoding methods on the same pair, prompts and hardware."""


@bench.command(
    cls=SectionedCommand,
    tables={
        "Presets": TOLD,
        "Suites": list(SUITES.items()),
        **TABLES,
        "Methods from outside": list(OUTSIDE.items()),
        "Profiles (--clock)": [
            (name, "shipped; `specbranch profile` measures one of your own") for name in shipped_profiles()
        ],
    },
)
@_what("--preset", type=click.Choice(sorted(PRESETS)), help="A set of the options below; what is given besides wins.")
@_what("--pair", multiple=True, metavar="NAME", help=f"Pair to run; may be repeated [{DEFAULT_PAIR}].")
@_what("--target", metavar="MODEL", help="Target, instead of a pair.")
@_what("--draft", metavar="MODEL", help="Draft, beside --target.")
@_what(
    "--methods",
    metavar="A,B,…",
    help="Methods, see below, or METHOD:POLICY for another policy than its own, such as specbranch:confidence; "
    "plain decoding always runs "
    "too [all of this engine but tree and auto]. Variants: -PART leaves a part out (specbranch-trees), @SETTING=VALUE "
    "sets something else "
    "than was tuned (specbranch:paper@stop_below=0.2).",
)
@_what(
    "--suites",
    multiple=True,
    metavar="NAME",
    help=f"Suite, see below; may be repeated, or several with commas [{ALL_SHIPPED}].",
)
@_what(
    "--prompts",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A file of prompts in Spec-Bench's format; may be repeated.",
)
@_what("--limit", type=int, metavar="N", help="Only the first N prompts of each suite.")
@_what("--max-tokens", type=click.IntRange(min=2), metavar="N", help="Longest answer [128].")
@_what(
    "--context",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="N",
    help="Put text of ours before each prompt, so that prompt and answer have about N tokens; may be repeated "
    "[prompts as they are].",
)
@_what(
    "--temperature", "temperatures", type=float, multiple=True, metavar="T", help="Temperature; may be repeated [0]."
)
@_models(
    "--target-shape",
    metavar="SHAPE",
    help="Run the target in a larger model's shape, see `inflate`: 7b, hidden=64,layers=3, 7b,layers=40; own: as "
    "it is [own].",
)
@_models("--draft-shape", metavar="SHAPE", help="The same for the draft.")
@_models("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 … [a GPU if there is one]")
@_models("--draft-device", metavar="DEVICE", help="Device of the draft [the target's].")
@_models(
    "--draft-weights",
    metavar="TYPE",
    help="How the draft's matrices are stored: float32, bfloat16, int8 or int4 [int8 if its file is].",
)
@_models("--executor", metavar="NAME", help=f"{', '.join(get_args(ExecutorName))}: how draft and target run [serial].")
@_how(
    "--clock",
    multiple=True,
    metavar="PROFILE",
    help="Charge time by a profile (name or file) instead of measuring it; may be repeated.",
)
@_how(
    "--repeats",
    type=click.IntRange(min=1),
    metavar="N",
    help="Times each prompt is measured [1; a modelled clock needs no more].",
)
@_how(
    "--tune/--no-tune",
    default=None,
    help="Tune each method on the shipped prompts first, once per pair and clock [tune].",
)
@_how("--trials", type=click.IntRange(min=1), metavar="N", help="Settings tried of a method with several to set [40].")
@_how(
    "--tuning-prompts",
    type=click.IntRange(min=1),
    metavar="N",
    help="Prompts of each shipped suite to tune on, the last ones [4].",
)
@_how(
    "--outside-limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Prompts of each suite for methods from outside [all].",
)
@_how(
    "--timeline/--no-timeline", default=None, help="Draw one answer of specbranch and of pearl, by the wall clock [no]."
)
@_how(
    "--profile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="For the wall clock: the profile of this machine to tune by [measured first, and kept in DIR].",
)
@_how(
    "--config",
    "configs",
    multiple=True,
    metavar="JSON",
    help='Run this setting too: \'{"method": "pearl", "num_speculative_tokens": 8}\'.',
)
@_how(
    "--predictor",
    metavar="DIR",
    help="H-RAD for policy paper, as `specbranch train-predictor` writes it [the pair's own].",
)
@_how(
    "--experience",
    "keep_experience",
    is_flag=True,
    help="By the wall clock: let planned methods take up what was learned of the pair on this machine, and add to "
    "it [they begin anew].",
)
@_how("--force-profile", is_flag=True, help="Take a profile although it was measured with another pair.")
@_how("--seed", type=int, default=0, metavar="N", help="Every prompt gets a seed of its own, made from this one [0].")
@_where(
    "--data", type=click.Path(path_type=Path), metavar="DIR", help="Folder of the public suites [$SPECBRANCH_DATA]."
)
@_where("--records", type=click.Path(path_type=Path), metavar="DIR", help="Where records are kept [the cache folder].")
@_where(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the results; the same command goes on in it [bench-results].",
)
@click.option("--quiet", is_flag=True, help="No table, only the last line.")
def run(**given: Any) -> None:
    """Run methods on prompts and report tokens a second, speedup over plain decoding, and whether every text was the
    same.

    \b
    specbranch bench run --preset quick
    specbranch bench run --suites humaneval,gsm8k --limit 8 --repeats 3 --out here
    specbranch bench run --pair smollm2-weak --pair smollm2-strong --clock c10 --clock h200-1b-8b
    specbranch bench run --preset gpu-core --pair smollm2-weak --out gpu

    By the wall clock all methods take turns on each prompt. With --clock decisions are real and time is modelled: the
    target's text is recorded once, and methods are replayed from the record. Writes DIR/results.json, results.csv and
    report.html. Interrupted, the same command goes on: with --clock it comes to the very rows of a run in one go; by
    the wall clock specbranch, tree and auto begin to learn anew. Other commands may add pairs, methods and prompts to
    the same DIR. The last line on standard output is JSON.

    A pair in larger shapes (--target-shape, --draft-shape) is tuned as it is, by the costs of the larger one, on the
    same device.
    """
    from specbranch.bench.own_profile import forget
    from specbranch.bench.prompt_runs import RunStore

    wanted = _with_preset(given)
    out = wanted["out"] or OUT
    workloads, clocks, pairs = _workloads(wanted), _clocks(wanted["clock"]), _pairs(wanted)
    names = _methods(wanted, pairs, clocks)
    wanted["settings"] = _given_settings(wanted["configs"], pairs)
    subjects = [chosen_subject(pair, wanted, out) for pair in pairs]
    suites = _suites(wanted)  # which may be fetched, so what is wrong with the rest was told before
    entries = [
        make_entry(subject, for_pair(pair, wanted), suites) for subject, pair in zip(subjects, pairs, strict=True)
    ]
    with RunStore(out / "runs.jsonl", _plan(wanted, entries)) as store, _bars() as progress:
        identities: dict[str, Any] = {}
        try:
            for entry in entries:
                identities |= _run_pair(entry, wanted, names, workloads, clocks, store, progress)
                forget()
        except KeyboardInterrupt:
            click.echo(f"Interrupted; what was measured is in {out}. The same command goes on.", err=True)
            if store.measurements:
                _write(_results(store, identities, wanted, entries), out, quiet=True)
            raise
        results = _results(store, identities, wanted, entries)
    _write(results, out, wanted["quiet"])
    click.echo(results.last_line())


@bench.command("compare")
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def compare_results(before: Path, after: Path, as_json: bool) -> None:
    """Say what changed from one results.json to another, and whether beyond the noise."""
    from specbranch.bench.compare import compare
    from specbranch.bench.results import Results

    found = compare(Results.load(_file(before)), Results.load(_file(after)))
    click.echo(json.dumps(found.to_dict()) if as_json else "\n".join(found.lines()))


def _file(path: Path) -> Path:
    return path / "results.json" if path.is_dir() else path


def _with_preset(given: dict[str, Any]) -> dict[str, Any]:
    """Fill in what was not given: from the preset, then from the defaults."""
    filled = {**DEFAULTS, **PRESETS.get(given["preset"] or "", {})}
    found = {name: given[name] if given.get(name) not in (None, ()) else value for name, value in filled.items()}
    of_pair = {
        pair: {name: given[name] or value for name, value in values.items()}
        for pair, values in filled["of_pair"].items()
    }
    return {**given, **found, "of_pair": of_pair, "context_given": bool(given["context"])}


def _suites(wanted: dict[str, Any]) -> tuple[Suite, ...]:
    from specbranch.suites.suite import load_suites

    names = [name for given in wanted["suites"] for name in given.split(",") if name]
    if not names and not wanted["prompts"]:
        names = [ALL_SHIPPED]
    return load_suites(names, files=wanted["prompts"], data=wanted["data"], limit=wanted["limit"])


def _workloads(wanted: dict[str, Any]) -> tuple[Workload, ...]:
    from specbranch.bench.lab import Workload

    temperatures = wanted["temperatures"] or (0.0,)
    made = (
        Workload(temperature=t, max_tokens=wanted["max_tokens"], seed=wanted["seed"])
        for t in dict.fromkeys(temperatures)
    )
    return tuple(made)


def _clocks(names: Sequence[str]) -> tuple[Clock, ...]:
    from specbranch.bench.run import Clock
    from specbranch.sim.shipped import load_profile

    found = tuple(
        Clock(Path(name).stem if name.endswith(".json") else name, load_profile(name)) for name in dict.fromkeys(names)
    )
    twins = [clock.name for clock in found if sum(clock.name == other.name for other in found) > 1]
    if twins:
        raise BadParameter(
            f"Two clocks are named {twins[0]}, so that their rows could not be told apart. Rename one of the files."
        )
    return found or (Clock(),)


def _pairs(wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what to make each lab from, refusing names that do not exist before anything is loaded."""
    from specbranch.pairs import chosen_models, draft_folder, find_pair

    target, draft = wanted["target"], wanted["draft"]
    if target or draft:
        chosen_models(wanted["pair"][0] if wanted["pair"] else None, target, draft)
        return [{"target": target, "draft": draft}]
    names = list(dict.fromkeys(wanted["pair"] or (DEFAULT_PAIR,)))
    for name in names:
        draft_folder(find_pair(name).name)
    return [{"pair": name} for name in names]


def _methods(wanted: dict[str, Any], pairs: list[dict[str, Any]], clocks: Sequence[Clock]) -> tuple[str, ...]:
    from specbranch.bench.methods import chosen_methods
    from specbranch.bench.tuning import has_several_values
    from specbranch.extras import OPTUNA

    has_draft = all("pair" in pair or pair.get("draft") for pair in pairs)
    names = [name.strip() for name in wanted["methods"].split(",") if name.strip()]
    chosen = chosen_methods(names, has_draft)
    modelled = [clock.name for clock in clocks if clock.profile is not None]
    if not modelled and (knowing := [name for name in chosen if ":oracle" in name]):
        raise BadParameter(
            f"{knowing[0]} knows the target's text beforehand, which only a replay does. Give a --clock, or leave it "
            "out."
        )
    if wanted["tune"] and any(has_several_values(name) for name in chosen):
        OPTUNA.require("or give --no-tune")
    if modelled and (outside := [name for name in chosen if name in OUTSIDE]):
        raise BadParameter(
            f"{', '.join(outside)} run by the wall clock only, and --clock {modelled[0]} was given. Leave one of them "
            "out."
        )
    return chosen


def _plan(wanted: dict[str, Any], entries: Sequence[BenchPair]) -> dict[str, Any]:
    """What a folder of results is begun with; more pairs, methods, clocks, prompts or repeats may be added to it
    later."""
    suites = sorted((suite for entry in entries for suite in entry.suites), key=lambda suite: len(suite.prompts))
    prompts = {suite.name: [prompt.digest for prompt in suite.prompts] for suite in suites}
    plan = {"max_tokens": wanted["max_tokens"], "seed": wanted["seed"], "suites": prompts}
    return {**plan, "experience": True} if wanted["keep_experience"] else plan


def _run_pair(
    entry: BenchPair,
    wanted: dict[str, Any],
    names: tuple[str, ...],
    workloads: tuple[Workload, ...],
    clocks: tuple[Clock, ...],
    store: Any,
    progress: StepsDone,
) -> dict[str, Any]:
    """Run everything with one pair; returns what tells its models from others."""
    from specbranch.bench.lab import Lab
    from specbranch.bench.outside import check_target
    from specbranch.bench.run import PairRuns, check_replay, measure, record_all, replay
    from specbranch.cli.progress import pulled

    subject = entry.subject
    pulled(subject.source[0])
    if any(name in OUTSIDE for name in names):
        check_target(subject.target)
    _measure_machine(entry, names, wanted, clocks, progress)
    by_the_wall = clocks[0].profile is None
    apart = (
        {}
        if subject.is_plain or not by_the_wall
        else _tuned_apart(entry, names, wanted, clocks[0], workloads, progress)
    )
    progress(f"Loading {subject.title}", 0, 0)
    with Lab(
        target=subject.target,
        draft=subject.draft,
        folder=wanted["records"],
        predictor=wanted["predictor"],
        keep_experience=wanted["keep_experience"],
        title=subject.title,
        running=subject.running,
        context_length=entry.context_length,
    ) as lab:
        outside = _outside(lab, names)
        for clock, group in product(clocks, entry.groups):
            _refuse_other_pair(clock.profile, subject, wanted["force_profile"])
            settings = apart.get(group) or _settings(lab, subject, names, wanted, clock, workloads, group, progress)
            job = PairRuns(group.suites, workloads, settings, wanted["repeats"], entry.outside)
            record_all(lab, job, progress)
            if clock.profile is None:
                measure(lab, job, store, progress, outside)
                continue
            replay(lab, job, clock, store, progress)
            if clock is clocks[0]:
                agreement = check_replay(lab, job, clock)
                click.echo(
                    f"{lab.pair}: of {agreement.runs} replays repeated with both models {agreement.same_text} gave "
                    "the same text and "
                    f"{agreement.same_counts} of the {agreement.counted} that do not go by the clock drafted and "
                    "accepted exactly as much.",
                    err=True,
                )
        if wanted["timeline"] and by_the_wall:
            _draw(lab, job, wanted["out"] or OUT, progress)
        return {lab.pair: lab.identity}


def _draw(lab: Lab, job: PairRuns, out: Path, progress: StepsDone) -> None:
    """Draw one answer of each method that shows what both models do."""
    from specbranch.bench.picture import draw_timeline

    record = lab.records(job.suites[0].prompts[0], job.workloads[0])[0]
    for setting in job.settings:
        if setting.method in DRAWN:
            progress(f"Drawing {setting.method}", 0, 0)
            draw_timeline(lab, setting, record, out)


def _tuned_apart(
    entry: BenchPair,
    names: tuple[str, ...],
    wanted: dict[str, Any],
    clock: Clock,
    workloads: tuple[Workload, ...],
    progress: StepsDone,
) -> dict[Group, tuple[Setting, ...]]:
    """Tune a pair that is costly, or not all in this process, with its models as they are: they decide alike, and
    costs are the pair's."""
    from specbranch.bench.lab import Lab
    from specbranch.bench.own_profile import forget
    from specbranch.bench.subjects import Running

    subject = entry.subject
    if _tuning_clock(subject, names, wanted, clock) is None:
        return {}
    (target, draft), running = subject.source, Running(device=subject.running.device)
    more = {"folder": wanted["records"], "predictor": wanted["predictor"], "context_length": entry.context_length}
    with Lab(target=target, draft=draft, running=running, **more) as small:
        found = {
            group: _settings(small, subject, names, wanted, clock, workloads, group, progress) for group in entry.groups
        }
    del small
    forget()
    return found


def _refuse_other_pair(profile: CostProfile | None, subject: Subject, force: bool) -> None:
    from specbranch.assembly import identity

    if profile is not None and not force:
        profile.check_pair(identity(subject.target), None if subject.draft is None else identity(subject.draft))


def _settings(
    lab: Lab,
    subject: Subject,
    names: tuple[str, ...],
    wanted: dict[str, Any],
    clock: Clock,
    workloads: tuple[Workload, ...],
    group: Group,
    progress: StepsDone,
) -> tuple[Setting, ...]:
    """Return how each method is set: tuned for pair and clock, as usual, and as given by hand."""
    from specbranch.bench.methods import default_setting

    by = _tuning_clock(subject, names, wanted, clock)
    if by is None:
        return (*map(default_setting, names), *wanted["settings"])
    from specbranch.bench.tuning import TRIALS, tuned

    trials = wanted["trials"] or TRIALS
    found = (
        default_setting(name) if name in OUTSIDE else tuned(lab, name, by, workloads[0], progress, group.tuning, trials)
        for name in names
    )
    return (*found, *wanted["settings"])


def _given_settings(texts: Sequence[str], pairs: list[dict[str, Any]]) -> tuple[Setting, ...]:
    """Read the settings given by hand, before anything is loaded."""
    from specbranch.bench.methods import chosen_methods, given_setting

    found = []
    for text in texts:
        try:
            values = json.loads(text)
        except ValueError as error:
            raise BadParameter(
                f'--config is no JSON ({error}); expected an object such as \'{{"method": "pearl"}}\'.'
            ) from None
        if not isinstance(values, dict) or "method" not in values:
            raise BadParameter(
                f'--config is {text}; expected a JSON object with a method, such as \'{{"method": "pearl"}}\'.'
            )
        found.append(given_setting(values))
    chosen_methods([setting.method for setting in found], all("pair" in pair or pair.get("draft") for pair in pairs))
    return tuple(found)


def _tuning_clock(subject: Subject, names: tuple[str, ...], wanted: dict[str, Any], clock: Clock) -> Clock | None:
    """Return what methods are tuned by: the clock itself, or a profile of this machine; nothing if they are not to
    be, or cannot."""
    from specbranch.bench.run import Clock
    from specbranch.bench.tuning import can_be_tuned
    from specbranch.sim.shipped import load_profile

    if not wanted["tune"] or not any(can_be_tuned(name) for name in names):
        return None
    if clock.profile is not None:
        return clock
    if wanted["profile"] is not None:
        given = load_profile(str(wanted["profile"]))
        _refuse_other_pair(given, subject, wanted["force_profile"])
        return Clock(f"profile {wanted['profile'].stem}", given)
    return _machine(subject, wanted["out"] or OUT) if subject.draft is not None else None


def _machine(subject: Subject, out: Path) -> Clock:
    """What was measured of this machine for a folder."""
    from specbranch.assembly import identity
    from specbranch.bench.run import Clock
    from specbranch.sim.profile import CostProfile

    file = _machine_file(out, subject.title)
    made = CostProfile.load(file)
    if (made.target_identity, made.draft_identity) != (identity(subject.target), identity(str(subject.draft))):
        raise BadParameter(
            f"{file} was measured with other models. Delete it to have this machine measured again, or name another "
            "--out."
        )
    return Clock("this machine", made)


def _machine_file(out: Path, pair: str) -> Path:
    return out / f"profile-{pair}.json"


def _measure_machine(
    entry: BenchPair, names: tuple[str, ...], wanted: dict[str, Any], clocks: tuple[Clock, ...], progress: StepsDone
) -> None:
    """Measure this machine with a pair, briefly, if that is wanted to tune by and was not done for the folder before.

    Done before the pair is loaded to be run: both at once would take twice the memory.
    """
    from specbranch.bench.own_profile import machine_profile
    from specbranch.bench.tuning import can_be_tuned
    from specbranch.files import write_whole

    subject = entry.subject
    by_the_wall = any(clock.profile is None for clock in clocks)
    wants = wanted["tune"] and wanted["profile"] is None and any(can_be_tuned(name) for name in names)
    file = _machine_file(wanted["out"] or OUT, subject.title)
    if by_the_wall and wants and subject.draft is not None and not file.exists():
        made = machine_profile(
            subject.target, subject.draft, subject.title, subject.running, progress, far=bool(wanted["context"])
        )
        write_whole(file, json.dumps(made.to_dict(), indent=2, ensure_ascii=False) + "\n")


def _outside(lab: Lab, names: tuple[str, ...]) -> Any:
    if not any(name in OUTSIDE for name in names):
        return None
    from specbranch.bench.outside import Transformers

    return Transformers(lab)


def _results(store: Any, identities: dict[str, Any], wanted: dict[str, Any], entries: Sequence[BenchPair]) -> Results:
    """Put rows together, and what is known of all pairs whose rows these are: earlier commands may have run others."""
    from specbranch.bench.aggregate import rows_of
    from specbranch.bench.results import Results
    from specbranch.provenance import Provenance

    workload = {"max_tokens": wanted["max_tokens"], "seed": wanted["seed"], "chat_template": True}
    settings = {"repeats": wanted["repeats"], "tuned": wanted["tune"], "threads": _threads()}
    command = shlex.join(
        ["specbranch", *(Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])]
    )
    sources = {suite.name: Path(suite.source).name for entry in entries for suite in entry.suites}
    before = _earlier(wanted["out"] or OUT)
    commands = [*(before.command or "").split("\n"), command] if before is not None else [command]
    made = Provenance.here(
        pairs={**(before.pairs if before is not None else {}), **identities},
        workload=workload,
        settings=settings,
        suites={**(before.suites if before is not None else {}), **sources},
        command="\n".join(dict.fromkeys(one for one in commands if one)),
    )
    return Results(rows_of(store.measurements), made)


def _earlier(out: Path) -> Provenance | None:
    """What the results in a folder say of themselves, if there are any."""
    from specbranch.bench.results import Results

    try:
        return Results.load(out / "results.json").provenance
    except BadParameter:
        return None


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _write(results: Results, out: Path, quiet: bool) -> None:
    from specbranch.bench.picture import pictures
    from specbranch.bench.report import save_report
    from specbranch.bench.table import show

    results.save(out / "results.json")
    results.save_csv(out / "results.csv")
    save_report(results, out / "report.html", pictures(out))
    if not quiet:
        show(results)
        click.echo(f"\nWritten: {out / 'results.json'}, results.csv, report.html")


@contextmanager
def _bars() -> Iterator[StepsDone]:
    """Show what is being done, how far it is and how long it will take, on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    bars = Bars(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    tasks: dict[str, Any] = {}

    def progress(what: str, done: int, of: int) -> None:
        for other in [name for name in tasks if name != what]:
            bars.remove_task(tasks.pop(other))
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=of or None)
        bars.update(tasks[what], completed=done, total=of or None)

    with bars:
        yield progress
