"""Measure what HTTP costs an engine: clients that read streams, in a process of their own, against a server whose
rounds take a fixed time.

By default no model runs: a sleep stands for the GPU (`lab/toys/paced.py`), so the numbers are those of the server, the
engine's thread and the text alone. With `--shape 8b --device cuda` the model itself decodes, in that shape. The table
has the engine's own tokens a second (no HTTP), those of the clients, the µs of CPU for each token in the engine's
thread and in the event loop, and the time between two events in rounds. Loopback only. `--profile engine` or
`--profile loop` adds the functions that take longest there.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROUND = 5.5e-3  # seconds of a round of 64 sessions of an 8B model on one H200
WARM_UP = 1.5  # seconds before a measurement starts
SPREAD = 16  # lengths of answers, from 3/4 to 5/4 of the mean: clients do not all ask again at once
# Words, code and characters of two to four bytes: tokens that end within a character occur, too.
TEXT = (
    "A branch is a guess about what the large model will say next. The draft writes it down, the target reads it, and "
    "what they agree on stays. def measure(rounds: int) -> float:\n    return sum(range(rounds)) / rounds\n\n"
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Ça coûte 3,50 €. 日本語の文章もあります。🙂🎉 "
    "Numbers such as 3.14159 and lists: one, two, three; (a) first, (b) second.\n"
)


@dataclass
class Stream:
    """One client: a connection that asks again as soon as it is answered."""

    connection: socket.socket
    body: bytes
    answers: int = 0
    heard: float = 0.0  # the time of the latest bytes; 0: none of this answer yet
    rest: bytes = b""
    gaps: list[float] = field(default_factory=list)
    events: int = 0

    def ask(self) -> None:
        """Send the request."""
        self.heard, self.rest = 0.0, b""
        self.connection.sendall(self.body)

    def read(self, now: float) -> None:
        """Take new bytes, and ask again after the last."""
        new = self.connection.recv(1 << 16)
        if not new:
            raise RuntimeError("The server closed a connection.")
        if self.heard:
            self.gaps.append(now - self.heard)
        self.heard = now
        self.events += new.count(b"data: ")
        self.rest = self.rest[-32:] + new
        if b"data: [DONE]" in self.rest and self.rest.endswith(b"0\r\n\r\n"):
            self.answers += 1
            self.ask()


def main() -> None:
    """Start a server, ask it, and print the table or JSON."""
    given = _options()
    if given.serve:
        _serve(given)
        return
    server = _Server(given)
    try:
        own = server.command("own")
        found = _ask(server, given)
    finally:
        server.end()
    measured = _figures(own, found)
    print(json.dumps(measured) if given.json else _table(measured))
    if found.get("profile"):
        print(found["profile"], file=sys.stderr)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64, help="streams at a time")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of an answer, in the mean")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds that are measured, once warm")
    parser.add_argument("--round", type=float, default=ROUND, help="seconds of a round on the device")
    parser.add_argument("--host", type=float, default=0.0, help="seconds of a round in which the engine's thread works")
    parser.add_argument("--ahead", action="store_true", help="the device starts a round when the last one ends")
    parser.add_argument("--model", default="smollm2-135m", help="the model whose tokenizer is used")
    parser.add_argument("--shape", help="let the model decode, in this shape ('own': its own), instead of a sleep")
    parser.add_argument("--device", help="the device of --shape")
    parser.add_argument("--chat", action="store_true", help="use /v1/chat/completions")
    parser.add_argument("--logprobs", type=int, help="log-probabilities of that many tokens at each position")
    parser.add_argument("--stop", nargs="*", default=[], help="stop strings")
    parser.add_argument("--profile", choices=("engine", "loop"), help="profile that thread; slows it")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


class _Server:
    """The server's process, as the clients' process has it."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), "--serve", *sys.argv[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._heard()["port"])

    def command(self, what: str) -> dict[str, Any]:
        """Send a command and wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return self._heard()

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("The server's process has ended; see its error above.")
        found: dict[str, Any] = json.loads(line)
        return found


def _ask(server: _Server, given: argparse.Namespace) -> dict[str, Any]:
    """Run the clients; return what both sides measured between two marks."""
    streams = [_stream(server.port, at, given) for at in range(given.clients)]
    poll = selectors.DefaultSelector()
    for stream in streams:
        poll.register(stream.connection, selectors.EVENT_READ, stream)
        stream.ask()
    _read_for(poll, WARM_UP)
    for stream in streams:
        stream.gaps, stream.events = [], 0
    server.command("mark")
    _read_for(poll, given.seconds)
    found = server.command("measured")
    gaps = sorted(gap for stream in streams for gap in stream.gaps)
    found["events"] = sum(stream.events for stream in streams)
    found["gaps"] = {
        "median": statistics.median(gaps),
        "p99": gaps[int(0.99 * (len(gaps) - 1))],
        "longest": gaps[-1],
    }
    return found


def _stream(port: int, at: int, given: argparse.Namespace) -> Stream:
    asked: dict[str, Any] = {
        "max_tokens": max(round(given.tokens * (1 + (at % SPREAD / SPREAD - 0.5) / 2)), 1),
        "ignore_eos": True,
        "seed": at,
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop": [*given.stop],
    }
    if given.chat:
        asked |= {"messages": [{"role": "user", "content": "Tell me about branches."}]}
        asked |= {} if given.logprobs is None else {"logprobs": True, "top_logprobs": given.logprobs}
    else:
        asked |= {"prompt": "Tell me about branches."}
        asked |= {} if given.logprobs is None else {"logprobs": given.logprobs}
    body = json.dumps(asked).encode()
    path = "/v1/chat/completions" if given.chat else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", port), timeout=30.0)
    return Stream(connection, head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)


def _read_for(poll: selectors.BaseSelector, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        for key, _ in poll.select(timeout=end - now):
            key.data.read(time.perf_counter())


def _figures(own: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return the table's numbers."""
    tokens, seconds, round_seconds = found["tokens"], found["seconds"], own["seconds"] / own["rounds"]
    rate, own_rate = tokens / seconds, own["tokens"] / own["seconds"]
    return {
        "own_tokens_per_second": own_rate,
        "own_round_ms": round_seconds * 1e3,
        "tokens_per_second": rate,
        "of_own": rate / own_rate,
        "own_engine_us": own["engine"] / own["tokens"] * 1e6,
        "engine_us": found["engine"] / tokens * 1e6,
        "engine_step_us": found["step"] / tokens * 1e6,
        "engine_rest_us": (found["engine"] - found["step"] - found["executor"]) / tokens * 1e6,
        "loop_us": found["loop"] / tokens * 1e6,
        "process_us": found["process"] / tokens * 1e6,
        "events_per_token": found["events"] / tokens,
        **{f"gap_{name}_rounds": gap / round_seconds for name, gap in found["gaps"].items()},
    }


def _table(figures: dict[str, Any]) -> str:
    names = {
        "own_tokens_per_second": "engine alone, tokens/s",
        "own_round_ms": "engine alone, ms a round",
        "tokens_per_second": "through HTTP, tokens/s",
        "of_own": "through HTTP, of the engine alone",
        "own_engine_us": "engine's thread alone, µs a token",
        "engine_us": "engine's thread, µs a token",
        "engine_step_us": "  of it rounds",
        "engine_rest_us": "  of it all else",
        "loop_us": "event loop, µs a token",
        "process_us": "server's process, µs a token",
        "events_per_token": "events a token",
        "gap_median_rounds": "between two events, rounds: median",
        "gap_p99_rounds": "  p99",
        "gap_longest_rounds": "  longest",
    }
    return "\n".join(f"{said:36}{figures[name]:12.2f}" for name, said in names.items())


# The server's process.


@dataclass
class Clocks:
    """CPU seconds of the server's threads, and the engine's counts."""

    engine: float = 0.0  # the engine's thread
    step: float = 0.0  # of it in `Scheduler.step`, without the executor
    executor: float = 0.0  # of it in the executor: the stand-in for a model
    loop: float = 0.0  # the thread of the event loop
    process: float = 0.0
    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0


class _Meter:
    """Reads the clocks of a running server; a round is a step of its scheduler."""

    def __init__(self, engine: Any, llm: Any, executor: Any) -> None:
        self._engine, self._rounds = engine, 0
        self._thread, self._main = engine._thread._thread, threading.main_thread()
        self._stepped, self._ran = [0.0], [0.0]
        self._wrap(executor, "run", self._ran)
        step, spent, ran = llm.scheduler.step, self._stepped, self._ran

        def timed() -> Any:
            start, before = time.thread_time(), ran[0]
            try:
                return step()
            finally:
                self._rounds += 1
                spent[0] += time.thread_time() - start - (ran[0] - before)

        engine._thread._scheduler = _Replaced(llm.scheduler, timed)

    @staticmethod
    def _wrap(owner: Any, name: str, spent: list[float]) -> None:
        inner = getattr(owner, name)

        def timed(*given: Any) -> Any:
            start = time.thread_time()
            try:
                return inner(*given)
            finally:
                spent[0] += time.thread_time() - start

        setattr(owner, name, timed)

    def read(self) -> Clocks:
        """Return all clocks as they stand."""

        def of(thread: Any) -> float:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))

        return Clocks(
            of(self._thread),
            self._stepped[0],
            self._ran[0],
            of(self._main),
            time.process_time(),
            self._engine.stats().tokens,
            self._rounds,
            time.perf_counter(),
        )


class _Replaced:
    """A scheduler whose `step` is another function."""

    def __init__(self, scheduler: Any, step: Any) -> None:
        self.__dict__.update(_inner=scheduler, step=step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _between(start: Clocks, end: Clocks) -> dict[str, Any]:
    before = asdict(start)
    return {name: value - before[name] for name, value in asdict(end).items()}


def _serve(given: argparse.Namespace) -> None:
    """Serve until the process is ended; commands come by lines on standard input."""
    from specbranch import AsyncLLM
    from specbranch.serve.app import create_app
    from specbranch.serve.run import GracefulServer
    from specbranch.serve.settings import ServerSettings

    llm, executor = _paced(given) if given.shape is None else _real(given)
    engine = AsyncLLM(llm, max_batch=given.clients)
    meter = _Meter(engine, llm, executor)
    settings = ServerSettings(port=0, max_batch=given.clients, max_per_address=given.clients + 8)
    server = GracefulServer(create_app(engine, settings), settings)
    threading.Thread(target=_obey, args=(server, engine, meter, given), daemon=True).start()
    server.run()


def _paced(given: argparse.Namespace) -> tuple[Any, Any]:
    """Return an engine whose rounds are sleeps, and its executor."""
    from specbranch.assembly import ModelChoice, load_tokenizer
    from specbranch.lab.toys.paced import PacedExecutor, PacedLLM

    tokenizer = load_tokenizer(ModelChoice(given.model))
    executor = PacedExecutor(tokenizer.encode(TEXT, add_special=False), given.round, given.ahead, given.host)
    return PacedLLM(tokenizer, executor), executor


def _real(given: argparse.Namespace) -> tuple[Any, Any]:
    """Load the model in its shape; return its engine, which decodes plainly, and its executor."""
    from tempfile import mkdtemp

    from specbranch import LLM
    from specbranch.lab.bench.pair_setup import PairOrder, Running, make_subject

    order = PairOrder(target=given.model, target_shape=given.shape)
    subject = make_subject(order, Running(device=given.device), Path(mkdtemp()))
    llm = LLM(str(subject.target), method="autoregressive", device=given.device, options={"max_batch": given.clients})
    return llm, llm.core.loop.executor


def _obey(server: Any, engine: Any, meter: _Meter, given: argparse.Namespace) -> None:
    """Carry out the commands of the clients' process."""
    while not server.started:
        time.sleep(0.01)
    _say({"port": int(server.address.rpartition(":")[2])})
    start, profile = meter.read(), _Profile(given.profile, server, engine)
    for line in sys.stdin:
        if line.strip() == "own":
            _say(_own(engine, meter, given))
        elif line.strip() == "mark":
            profile.start()
            start = meter.read()
            _say({})
        else:
            end = meter.read()
            _say({**_between(start, end), "profile": profile.result()})


def _own(engine: Any, meter: _Meter, given: argparse.Namespace) -> dict[str, Any]:
    """Run the engine alone: as many requests, whose answers are taken whole."""
    from specbranch import SamplingParams

    rounds = int(given.seconds / max(given.round + given.host, 1e-4))
    params = [SamplingParams(max_tokens=rounds + 200, ignore_eos=True, seed=at) for at in range(given.clients)]
    asked = [engine.submit("Tell me about branches.", one) for one in params]
    while engine.stats().tokens < 100 * given.clients:
        time.sleep(0.01)
    start = meter.read()
    time.sleep(given.seconds)
    end = meter.read()
    for one in asked:
        one.cancel()
    while engine.stats().running:
        time.sleep(0.01)
    return _between(start, end)


class _Profile:
    """The profile of one thread, if it is wanted."""

    def __init__(self, which: str | None, server: Any, engine: Any) -> None:
        self._which, self._server, self._engine = which, server, engine
        self._profile = cProfile.Profile()

    def start(self) -> None:
        """Start to profile."""
        self._there(self._profile.enable)

    def result(self) -> str:
        """Stop, and return the functions that took longest by themselves."""
        if self._which is None:
            return ""
        self._there(self._profile.disable)
        said = io.StringIO()
        pstats.Stats(self._profile, stream=said).sort_stats("tottime").print_stats(45)
        return said.getvalue()

    def _there(self, task: Any) -> None:
        """Run a task in the profiled thread, and wait for it."""
        if self._which is None:
            return
        done = threading.Event()

        def run() -> None:
            task()
            done.set()

        if self._which == "engine":
            self._engine._thread.post(run)
        else:
            self._server.servers[0].get_loop().call_soon_threadsafe(run)
        done.wait(10.0)


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
