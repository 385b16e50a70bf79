"""`specbranch analyze scale`: replicas, batches, and drafts on other machines, simulated and measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbranch.cli.results_folder import written_to
from specbranch.cli.sections import SectionedCommand, options_of
from specbranch.core.methods import METHODS
from specbranch.lab.scale.draft_device import SHARINGS

if TYPE_CHECKING:
    from specbranch.lab.scale.study import ScaleOrder, ScaleStudy

PROFILE = "h200-1b-8b"
USUAL_TRIP = 0.0005  # seconds: of the replicas that share draft workers, the tried one nearest to it
DRAFTING = [name for name, method in METHODS.items() if method.needs_draft]
COUNT = click.IntRange(min=1)

_fleet, _grid, _how = (options_of(title) for title in ("Pair and load", "What is varied (each may be repeated)", "How"))


@click.command("scale", cls=SectionedCommand, short_help="Replicas, batches, and drafts on other machines.")
@_fleet(
    "--profile",
    "profiles",
    multiple=True,
    metavar="NAME",
    help="Cost profile of the pair: a shipped one, or a FILE.json of `specbranch profile`; may be repeated "
    f"[{PROFILE}].",
)
@_fleet("--method", type=click.Choice(DRAFTING), default="specbranch", help="Decoding method [specbranch].")
@_fleet(
    "--agreement",
    type=click.FloatRange(0.01, 0.99),
    default=0.7,
    metavar="SHARE",
    help="How often the draft's first candidate is the target's token [0.7].",
)
@_fleet(
    "--sharing",
    type=click.Choice(SHARINGS),
    default=SHARINGS[0],
    help="How a draft worker serves several targets: all orders join in each step, or one order after the other "
    f"[{SHARINGS[0]}].",
)
@_fleet(
    "--rate",
    type=click.FloatRange(min=0.0, min_open=True),
    metavar="X",
    help="Requests a second that arrive for each replica, where replicas share draft workers [as many clients as a "
    "batch has places; each sends its next request when one is answered].",
)
@_grid(
    "--round-trip",
    "trips",
    type=click.FloatRange(0.001, 500.0),
    multiple=True,
    metavar="MS",
    help="Round trip of an order and its answer [0.1 to 50].",
)
@_grid("--batch", "batches", type=COUNT, multiple=True, metavar="N", help="Requests at once in a replica [1, 4, 16].")
@_grid("--replicas", type=COUNT, multiple=True, metavar="N", help="Replicas of the target [1, 2, 4, 8].")
@_grid("--workers", type=COUNT, multiple=True, metavar="N", help="Draft workers that they share [1, 2].")
@_grid(
    "--speed",
    "speeds",
    type=click.FloatRange(min=0.01),
    multiple=True,
    metavar="X",
    help="Speed of a draft step, by the profile's [0.25, 0.5, 1, 2, 4].",
)
@_how("--requests", type=COUNT, default=4, metavar="N", help="Measured requests of a replica, at least [4].")
@_how("--jobs", type=COUNT, metavar="N", help="Number of processes [cores].")
@_how(
    "--measure",
    is_flag=True,
    help="Also run toys of timed forwards on this machine, with a real draft worker behind a relay that delays; put "
    "them beside the simulation.",
)
@_how("--repeats", type=COUNT, default=1, metavar="N", help="Turns of each measured point; medians count [1].")
@_how(
    "--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Folder for charts and scale.json."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object: sentences, stops_paying, overlap, fleets, measured."
)
def scale(measure: bool, repeats: int, jobs: int | None, out: Path | None, as_json: bool, **given: Any) -> None:
    """Show tokens a second and latency by replicas, batch, round trip and draft speed: where a remote draft stops
    paying, and what overlap brings.

    \b
    specbranch analyze scale --out analysis
    specbranch analyze scale --profile mine.json --agreement 0.6 --batch 1
    specbranch analyze scale --measure --repeats 3 --out analysis
    specbranch analyze scale --replicas 4 --workers 1 --rate 2

    Rounds are real, time is virtual. Toy models with a known agreement decode by the real method, planner, scheduler
    and executor; the messages to the draft worker are the real ones. Charged are: forwards and draft steps by their
    rows and the host's part of a round, as in the profile; the way of each message; and the wait for a draft worker
    that serves other targets. A text that is not the target's own is an error.

    The profile's times for draft and target at work on one device at the same time do not apply: a remote draft has
    its own. A local draft is one at no distance, as in the profile. Prompt lookup is off. A profile takes some minutes
    on two cores; name fewer values, such as --batch 1, for a quick look. docs/analysis.md says what is modelled.
    """
    from specbranch.cli.progress import counted
    from specbranch.lab.scale.measured import measure_fleets
    from specbranch.lab.scale.report import charts, record, text
    from specbranch.lab.scale.study import measured_fleets, run_study
    from specbranch.machine_load import usable_cores

    order = _order(given)
    with counted() as progress:
        study: ScaleStudy = run_study(order, jobs or usable_cores(), progress)
        if measure:
            points = measure_fleets(measured_fleets(order.usual), repeats, progress)
            study = replace(study, measured=tuple(points))
    if out is not None:
        written_to(out, charts(study), "scale.json", record(study))
    click.echo(json.dumps(record(study)) if as_json else text(study))


def _order(given: dict[str, Any]) -> ScaleOrder:
    from specbranch.clock.shipped import load_profile
    from specbranch.lab.scale.fleet import Fleet
    from specbranch.lab.scale.study import TRIPS, ScaleOrder

    profiles = {Path(name).stem if name.endswith(".json") else name: load_profile(name) for name in _profiles(given)}
    trips = tuple(sorted({trip / 1e3 for trip in given["trips"]})) or TRIPS
    usual = Fleet(
        next(iter(profiles.values())),
        round_trip=min(trips, key=lambda trip: abs(trip - USUAL_TRIP)),
        **{name: given[name] for name in ("method", "agreement", "sharing", "rate", "requests")},
    )
    varied = {name: tuple(sorted(set(given[name]))) for name in ("batches", "speeds", "replicas", "workers")}
    return ScaleOrder(profiles, usual, trips, **{name: values for name, values in varied.items() if values})


def _profiles(given: dict[str, Any]) -> tuple[str, ...]:
    return given["profiles"] or (PROFILE,)
