"""Measure what a draft worker brings over a network, with toy models whose forwards take a set time.

"way": tokens a second by method and by the way in one direction, behind the tests' relay. "targets": tokens a second of
several targets at once, in turns (a whole order after the other) and in a batch (one forward for all). Medians of
rounds that alternate between what is compared. Each target, the relay and the worker are processes of their own, so a
machine with few cores slows all of them down. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the toys and the relay

from specbranch.config import SpeculativeConfig  # noqa: E402
from specbranch.core.costs import MeasuredCosts  # noqa: E402
from specbranch.core.experience import Experience  # noqa: E402
from specbranch.core.loop import Loop  # noqa: E402
from specbranch.core.methods import METHODS  # noqa: E402
from specbranch.core.runner import Feed  # noqa: E402
from specbranch.exec import draft_server  # noqa: E402
from specbranch.exec.address import LinkAddress  # noqa: E402
from specbranch.exec.dialling import Dial  # noqa: E402
from specbranch.exec.door import bound  # noqa: E402
from specbranch.exec.draft_batch import DraftBatch, Ended  # noqa: E402
from specbranch.exec.drafter import Drafter  # noqa: E402
from specbranch.exec.process import Process  # noqa: E402
from specbranch.lab.measure.one_request import greedy_session  # noqa: E402
from specbranch.lab.scale.relay import Relay, Weather  # noqa: E402
from specbranch.lab.toys.toys import Logits  # noqa: E402
from toy_worker import DRIFT, SERVED, TOKENS, vocabulary  # noqa: E402
from toybench import SlowRunner, law, make_verifier  # noqa: E402

COMPARED: dict[str, tuple[str, tuple[str, ...]]] = {
    "plain": ("autoregressive", ()),
    "speculative": ("speculative", ()),
    "specbranch without overlap": ("specbranch", ("overlap",)),
    "specbranch": ("specbranch", ()),
}
ORDERS = ("turns", "batch")


class RowRunner(SlowRunner):
    """A draft whose forward takes a while, and a while for each row."""

    row_seconds = 0.0

    def _score(self, work: Sequence[Feed]) -> list[list[Logits]]:
        time.sleep(self.row_seconds * sum(len(feed.tokens) for feed in work))
        return super()._score(work)


class Turns(DraftBatch):
    """Drafts one order whole, then the next."""

    def step(self) -> list[Ended]:
        """Finish the first round."""
        waiting, self._rounds = self._rounds[1:], self._rounds[:1]
        ended: list[Ended] = []
        while self._rounds:
            ended += super().step()
        self._rounds = waiting
        return ended


def main() -> None:
    """Measure, print a table and the JSON line."""
    given = _options()
    if given.what == "serve":
        return _serve(given)
    if given.what == "target":
        return _decode_for(given)
    speeds = _way(given) if given.what == "way" else _targets(given)
    _print_table(speeds)
    setting = {name: getattr(given, name) for name in ("target_ms", "draft_ms", "row_ms", "rounds", "tokens")}
    print(json.dumps({"what": given.what, **setting, "speeds": speeds}))
    return None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("way", "targets", "serve", "target"))
    parser.add_argument("--ways", nargs="+", type=float, default=[0.1, 0.5, 2.0, 5.0, 10.0], help="ms each way")
    parser.add_argument("--targets", nargs="+", type=int, default=[1, 2, 4], help="targets at once")
    parser.add_argument("--target-ms", type=float, default=20.0, help="milliseconds of a target forward")
    parser.add_argument("--draft-ms", type=float, default=2.0, help="milliseconds of a draft forward")
    parser.add_argument("--row-ms", type=float, default=0.0, help="and of each of its rows")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to take the median of")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--port", type=int, default=0, help="of the worker (for serve and target)")
    parser.add_argument("--order", choices=ORDERS, default="batch", help="how the worker serves several targets")
    return parser.parse_args()


def _serve(given: argparse.Namespace) -> None:
    """Serve a toy draft until the input ends."""
    if given.order == "turns":
        draft_server.DraftBatch = Turns  # type: ignore[misc]
    runner = RowRunner(law(DRIFT), given.draft_ms / 1e3)
    runner.row_seconds = given.row_ms / 1e3
    listener = bound(LinkAddress("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    draft_server.DraftServer(Drafter(runner), SERVED, TOKENS, listener).run()


class Target:
    """A toy target with a draft at a port; it learns what a draft costs as the engine does."""

    def __init__(self, port: int, seconds: float, tokens: int) -> None:
        self.executor = Process(make_verifier(seconds=seconds), Dial(LinkAddress("127.0.0.1", port), vocabulary()))
        self.tokens, self.costs = tokens, MeasuredCosts(overlap=True)
        self.experience = Experience(self.costs)

    def speed(self, name: str, seed: int) -> float:
        """Decode one answer; returns its tokens a second."""
        method, without = COMPARED[name]
        session = greedy_session([seed % 6, seed // 6 % 6, 1], self.tokens, ())
        loop = Loop(self.executor, costs=self.costs)
        config = SpeculativeConfig(method=method, without=without)  # type: ignore[arg-type]
        loop.join(session, METHODS[method].start(session, config, self.experience))
        start = time.perf_counter()
        while loop.live:
            loop.step()
        return self.tokens / (time.perf_counter() - start)


def _way(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    with _worker(given, "batch") as port:
        for way in given.ways:
            with (
                Relay(port, Weather(way / 1e3)) as relay,
                closing((target := Target(relay.port, given.target_ms / 1e3, given.tokens)).executor),
            ):
                speeds: dict[str, list[float]] = {name: [] for name in COMPARED}
                for turn in range(given.rounds + 1):
                    for name in COMPARED:
                        speeds[name].append(target.speed(name, turn))
                found[f"{way:g} ms"] = {name: median(values[1:]) for name, values in speeds.items()}
    return found


def _targets(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        ports = {order: stack.enter_context(_worker(given, order)) for order in ORDERS}
        for _ in range(given.rounds):
            for count in given.targets:
                for order, port in ports.items():
                    row = found.setdefault(f"{count} target(s)", {name: [] for name in ORDERS})
                    row[order].append(_together(given, count, port))
    return {row: {name: median(values) for name, values in columns.items()} for row, columns in found.items()}


def _together(given: argparse.Namespace, count: int, port: int) -> float:
    """Let several targets decode at once; returns their tokens a second together."""
    command = [sys.executable, __file__, "target", "--port", str(port), "--target-ms", str(given.target_ms)]
    command += ["--tokens", str(given.tokens)]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    for one in started:
        assert one.stdout and one.stdout.readline() == "ready\n"
    for one in started:
        assert one.stdin
        one.stdin.write("go\n")
        one.stdin.flush()
    return sum(float(one.communicate()[0]) for one in started)


def _decode_for(given: argparse.Namespace) -> None:
    """Be one of several targets: warm up, wait for the word, decode three answers, print tokens a second."""
    target = Target(given.port, given.target_ms / 1e3, given.tokens)
    with closing(target.executor):
        for seed in range(2):
            target.speed("specbranch", seed)
        print("ready", flush=True)
        sys.stdin.readline()
        speeds = [target.speed("specbranch", seed) for seed in range(3, 6)]
        print(len(speeds) / sum(1.0 / speed for speed in speeds), flush=True)


@contextmanager
def _worker(given: argparse.Namespace, order: str) -> Iterator[int]:
    command = [sys.executable, __file__, "serve", "--order", order]
    command += ["--draft-ms", str(given.draft_ms), "--row-ms", str(given.row_ms)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield int(process.stdout.readline())
    finally:
        process.terminate()
        process.communicate()


def _print_table(speeds: dict[str, dict[str, float]]) -> None:
    columns = list(next(iter(speeds.values())))
    print("| |", " | ".join(columns), "|")
    print("|---" * (len(columns) + 1) + "|")
    for row, values in speeds.items():
        print(f"| {row} |", " | ".join(f"{values[column]:.0f}" for column in columns), "|")


if __name__ == "__main__":
    main()
