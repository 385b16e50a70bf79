"""The results of `specbranch analyze scale`: tables for a terminal, charts, and a record for JSON.

Owns presentation; conclusions are `answers.py`'s. Invariant: nothing is computed here but ratios of results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from specbranch.charts import ChartLine, line_chart
from specbranch.lab.scale.answers import limits, milliseconds, overlap_gains, sentences
from specbranch.lab.scale.fleet import Fleet, FleetResult
from specbranch.lab.scale.measured import MeasuredPoint
from specbranch.lab.scale.study import ScaleStudy
from specbranch.lab.study.study import markdown

MS = 1e3
TRIP_LABEL = "round trip, ms"
HALF_OF_ALL, NEARLY_ALL = 0.5, 0.95  # percentiles of latency
MEASURED_NAMES = {True: "specbranch", False: "without overlap"}


def text(study: ScaleStudy) -> str:
    """Return sentences and tables for a terminal."""
    parts = ["\n".join(sentences(study))]
    parts += [f"{title}\n\n{markdown(rows)}" for title, rows in _tables(study) if len(rows) > 1]
    return "\n\n".join(parts)


def _tables(study: ScaleStudy) -> list[tuple[str, list[list[str]]]]:
    return [
        ("What overlap brings: tokens a second without a draft, without and with overlap", _overlap_rows(study)),
        ("Gain over no draft by draft speed, batch 1", _speed_rows(study)),
        (f"Replicas that share draft workers, batch {study.order.shared_batch}", _replica_rows(study)),
        ("Measured on this machine, and simulated with what was measured", measured_rows(study.measured)),
    ]


def _overlap_rows(study: ScaleStudy) -> list[list[str]]:
    rows = [["costs", "batch", "round trip", "no draft", "without overlap", "with overlap", "overlap brings"]]
    for one in overlap_gains(study):
        speeds = (f"{speed:.0f}" for speed in (one.none, one.serial, one.overlapped))
        rows.append([one.profile, str(one.batch), milliseconds(one.round_trip), *speeds, f"{one.gain:+.0%}"])
    return rows


def _speed_rows(study: ScaleStudy) -> list[list[str]]:
    order = study.order
    rows = [["costs", "round trip", *(f"speed × {speed:g}" for speed in order.speeds)]]
    for name in order.profiles:
        for trip in order.asked_trips:
            gains = study.gains(order.by_speed(name, trip), order.without_draft(name, 1))
            rows.append([name, milliseconds(trip), *(f"{gain:.2f}" for gain in gains)])
    return rows


def _replica_rows(study: ScaleStudy) -> list[list[str]]:
    rows = [["costs", "draft workers", "replicas", "tokens/s", "latency p50", "p95", "workers busy"]]
    for name in study.order.profiles:
        for workers in (0, *study.order.workers):
            for fleet in study.order.by_replicas(name, workers):
                rows.append([name, str(workers), str(fleet.replicas), *_figures(study.results[fleet])])
    return rows


def _figures(result: FleetResult) -> list[str]:
    latencies = [f"{result.latency(share):.2f} s" for share in (HALF_OF_ALL, NEARLY_ALL)]
    return [f"{result.tokens_per_second:.0f}", *latencies, f"{result.drafting:.0%}"]


def measured_rows(points: Sequence[MeasuredPoint]) -> list[list[str]]:
    """Return the table of measured points."""
    rows = [["what", "relay", "round trip", "measured, tokens/s", "lowest – highest", "simulated", "off"]]
    for one in points:
        low, high = one.spread
        measured = f"{one.tokens_per_second:.1f}", f"{low:.1f} – {high:.1f}"
        simulated = f"{one.simulated:.1f}", f"{one.off:+.1%}"
        asked = milliseconds(one.fleet.round_trip) if one.fleet.draft == "remote" else "–"
        rows.append([_name(one.fleet), asked, milliseconds(one.round_trip), *measured, *simulated])
    return rows


def charts(study: ScaleStudy) -> dict[str, str]:
    """Return the charts by file name, without the suffix."""
    made: dict[str, str] = {}
    for name in study.order.profiles:
        made[f"scale-round-trip-{name}"] = _trip_chart(study, name)
        made[f"scale-speed-{name}"] = _speed_chart(study, name)
        made[f"scale-replicas-{name}"] = _replica_chart(study, name)
        made[f"scale-latency-{name}"] = _latency_chart(study, name)
    if study.measured:
        made["scale-measured"] = _measured_chart(study.measured)
    return made


def _trip_chart(study: ScaleStudy, name: str) -> str:
    order, lines = study.order, list[ChartLine]()
    trips = [MS * trip for trip in order.trips]
    for hue, batch in enumerate(order.batches):
        none = order.without_draft(name, batch)
        for overlap in (True, False):
            gains = study.gains(order.by_trip(name, batch, overlap), none)
            title = f"batch {batch}" + ("" if overlap else ", without overlap")
            lines.append(
                ChartLine(title, list(zip(trips, gains, strict=True)), dashed=not overlap, marks=overlap, colour=hue)
            )
        local = study.gains([order.with_local_draft(name, batch)], none)[0]
        label = "local draft" if not hue else ""
        lines.append(ChartLine(label, [(trips[0], local)], drawn=False, colour=hue))
    lines.append(ChartLine("no draft", [(trips[0], 1.0), (trips[-1], 1.0)], colour=7))
    title = f"A remote draft, by distance: {name}"
    return line_chart(title, lines, TRIP_LABEL, "tokens a second, by those without a draft", x_ratio=True)


def _speed_chart(study: ScaleStudy, name: str) -> str:
    order, none = study.order, study.order.without_draft(name, 1)
    lines = [
        ChartLine(
            milliseconds(trip),
            list(zip(order.speeds, study.gains(order.by_speed(name, trip), none), strict=True)),
            marks=True,
        )
        for trip in order.asked_trips
    ]
    title = f"A remote draft, by its speed and round trip: {name}, batch 1"
    return line_chart(title, lines, "speed of a draft step, by the profile's", "gain over no draft", x_ratio=True)


def _replica_chart(study: ScaleStudy, name: str) -> str:
    title = f"Replicas that share draft workers: {name}, batch {study.order.shared_batch}"
    lines = [
        ChartLine(_workers(workers), [(one.fleet.replicas, one.tokens_per_second) for one in results], marks=True)
        for workers, results in _by_workers(study, name)
    ]
    return line_chart(title, lines, "replicas", "tokens a second of all", y_from_zero=True)


def _latency_chart(study: ScaleStudy, name: str) -> str:
    lines = []
    for hue, (workers, results) in enumerate(_by_workers(study, name)):
        for share in (HALF_OF_ALL, NEARLY_ALL):
            points = [(float(one.fleet.replicas), one.latency(share)) for one in results]
            title = f"{_workers(workers)}, p{100 * share:.0f}"
            lines.append(ChartLine(title, points, dashed=share == NEARLY_ALL, marks=True, colour=hue))
    title = f"Latency of a request of 128 tokens: {name}, batch {study.order.shared_batch}"
    return line_chart(title, lines, "replicas", "seconds", y_from_zero=True)


def _by_workers(study: ScaleStudy, name: str) -> list[tuple[int, list[FleetResult]]]:
    order = study.order
    counts = (0, *order.workers)
    return [(count, [study.results[fleet] for fleet in order.by_replicas(name, count)]) for count in counts]


def _workers(count: int) -> str:
    return f"{count} draft worker{'s' if count > 1 else ''}" if count else "no draft"


def _measured_chart(points: Sequence[MeasuredPoint]) -> str:
    lines = list[ChartLine]()
    single = [one for one in points if one.fleet.replicas == 1 and one.fleet.batch == 1]
    plain = [one for one in single if one.fleet.draft == "none"]
    names = list(dict.fromkeys(_name(one.fleet) for one in single if one.fleet.draft == "remote"))
    for hue, name in enumerate(names):
        mine = sorted((one for one in single if _name(one.fleet) == name), key=lambda one: one.round_trip)
        simulated = [(MS * one.round_trip, one.simulated) for one in mine]
        lines.append(ChartLine(f"{name}, simulated", simulated, colour=hue))
        lines.append(
            ChartLine(
                "measured" if not hue else "",
                [(MS * one.round_trip, one.tokens_per_second) for one in mine],
                drawn=False,
                colour=hue,
            )
        )
    ends = [MS * one.round_trip for one in single if one.fleet.draft == "remote"]
    for one in plain:
        lines.append(ChartLine("no draft", [(x, one.tokens_per_second) for x in (min(ends), max(ends))], colour=7))
    title = "Simulated and measured: toys on this machine"
    return line_chart(title, lines, "measured round trip, ms", "tokens a second", y_from_zero=True, x_ratio=True)


def _name(fleet: Fleet) -> str:
    if fleet.draft == "none":
        return "no draft"
    named = fleet.method if fleet.method != "specbranch" else MEASURED_NAMES[fleet.overlap]
    return named if fleet.replicas == 1 else f"{named}, {fleet.replicas} targets share a worker"


def record(study: ScaleStudy) -> dict[str, Any]:
    """Return all results for JSON."""
    names = {profile: name for name, profile in study.order.profiles.items()}
    return {
        "sentences": sentences(study),
        "stops_paying": [_finite(asdict(one)) for one in limits(study)],
        "overlap": [{**asdict(one), "gain": one.gain} for one in overlap_gains(study)],
        "fleets": [_recorded(one, names[one.fleet.profile]) for one in study.results.values()],
        "measured": [_recorded_point(one) for one in study.measured],
    }


def _recorded(result: FleetResult, profile: str) -> dict[str, Any]:
    figures = {
        "latency_p50": result.latency(HALF_OF_ALL),
        "latency_p95": result.latency(NEARLY_ALL),
        "drafting": result.drafting,
    }
    return {**_settings(result.fleet, profile), "tokens_per_second": result.tokens_per_second, **figures}


def _recorded_point(point: MeasuredPoint) -> dict[str, Any]:
    return {
        **_settings(point.fleet, "toys"),
        "measured_round_trip": point.round_trip,
        "tokens_per_second": point.tokens_per_second,
        "spread": point.spread,
        "simulated": point.simulated,
        "off": point.off,
        "measured_profiles": [turn.simulated.fleet.profile.to_dict() for turn in point.turns],
    }


def _settings(fleet: Fleet, profile: str) -> dict[str, Any]:
    return {**asdict(fleet), "profile": profile}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values, infinite ones as None."""
    return {key: None if value == math.inf else value for key, value in values.items()}
