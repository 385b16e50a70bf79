"""Measure replicas behind one address on Ray against plain servers behind a proxy, and what clients see when replicas
are killed.

Clients hold conversations of two turns, greedily, as streams. By default it runs pairs: N plain `specbranch serve`
processes behind a relay of bytes that gives each client one of them, then `specbranch serve --replicas N`, each started
anew, with the same clients. It prints tokens a second, where the CPU time went, and how many second turns found their
prompt in the prefix cache. With `--kills` it kills a replica every 45 s for five minutes and compares every finished
answer with that of one plain process. Loopback only; Linux. On a machine that others use, tokens per
second of CPU time says more than tokens per second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbranch.core.pages import PAGE

TOPICS = (
    "rivers in spring", "a clock that runs backwards", "bread", "the first snow", "sorting numbers", "an old bridge",
    "how bees find home", "a lost key", "tides", "a chess game", "learning to swim", "maps of islands", "copper",
    "a quiet library", "the number seven", "rain on a tin roof", "how kites fly", "a train at night", "salt", "echoes",
    "a garden wall", "why leaves fall", "paper boats", "the colour blue", "whales", "a broken radio", "dust",
    "lanterns", "two brothers", "the north wind", "a market in the morning", "shadows", "glass", "stairs",
    "an unfinished letter", "a blind cat", "honey", "the taste of plums", "ice on a lake", "a very long road",
)  # fmt: skip
SECOND = "Say that again in other words, and add one thing you left out."
HUNG = 300.0  # seconds without an end of an answer
READ = 2**16
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Seen:
    """What the clients saw."""

    tokens: int = 0
    finished: int = 0
    second: int = 0  # turns
    cached: int = 0  # of them: those whose prompt's first page was in the prefix cache
    ends: Counter[str] = field(default_factory=Counter)  # of answers that were not finished, by why
    different: int = 0


@dataclass(frozen=True)
class Answer:
    """One answer that ended."""

    text: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    error: str | None = None


def main() -> None:
    """Run what was asked for, and print one line of JSON for each run and one for the result."""
    given = _options()
    if given.kills:
        asyncio.run(_with_kills(given))
    else:
        asyncio.run(_pairs(given))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--talks", type=int, default=3, help="conversations of each client in a measured run [3]")
    parser.add_argument("--notes", type=int, default=75, help="topics in a first prompt; 75 fill a KV page [75]")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--kills", action="store_true")
    parser.add_argument("--kill-every", type=float, default=45.0)
    parser.add_argument("--kill-seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("rest", nargs="*", help="options of `specbranch serve`, behind --")
    return parser.parse_args()


async def _pairs(given: argparse.Namespace) -> None:
    """Measure both in turns; the order of each pair is that of the last one reversed."""
    rates: dict[str, list[float]] = {"plain": [], "ray": []}
    costs: dict[str, list[float]] = {"plain": [], "ray": []}
    for number in range(given.pairs):
        for arm in ("plain", "ray") if number % 2 == 0 else ("ray", "plain"):
            run = await _measured(arm, given)
            rates[arm].append(run["tokens_per_second"])
            costs[arm].append(run["tokens_per_cpu_second"])
            print(json.dumps(run), flush=True)
    print(json.dumps({"tokens_per_second": _compared(rates), "tokens_per_cpu_second": _compared(costs)}))


def _compared(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians, and the ratios of each pair."""
    ratios = [round(ray / plain, 3) for plain, ray in zip(rates["plain"], rates["ray"], strict=True)]
    return {arm: statistics.median(found) for arm, found in rates.items()} | {
        "ratios": ratios,
        "ratio": statistics.median(ratios),
    }


async def _measured(arm: str, given: argparse.Namespace) -> dict[str, Any]:
    """Run one arm: its tokens a second, its CPU time by role, its hits in the prefix cache."""
    with _address(arm, given) as (host, port):
        talk = _Talk(given, (host, port), {})
        await talk.times(1, clients=4)  # does not count
        talk.seen = Seen()
        before, start = _cpu(), time.monotonic()
        await talk.times(given.talks, given.clients)
        took, after = time.monotonic() - start, _cpu()
    seen = talk.seen
    used = {role: round(after[role] - before[role], 2) for role in sorted(after)}
    total = sum(used.values())
    serving = total - used.get("clients", 0.0)
    return {
        "arm": arm,
        "seconds": round(took, 1),
        "tokens_per_second": round(seen.tokens / took, 1),
        "tokens_per_cpu_second": round(seen.tokens / serving, 2),
        "answers": seen.finished,
        "ends": dict(seen.ends),
        "second_turns": seen.second,
        "second_turns_cached": round(seen.cached / max(seen.second, 1), 4),
        "cpu_seconds": used,
        "cpu_share": {role: round(seconds / total, 4) for role, seconds in used.items()},
        "cores_busy": round(total / took, 2),
    }


async def _with_kills(given: argparse.Namespace) -> None:
    """Ask one plain process for all answers, then kill replicas while the same is asked."""
    with _address("single", given) as address:
        expected = await _Talk(given, address, {}).all_answers()
    print(json.dumps({"expected": len(expected)}), flush=True)
    with _address("ray", given) as address:
        talk = _Talk(given, address, expected)
        killed = asyncio.create_task(_kill(given, address[1]))
        await talk.during(given.kill_seconds)
        killed.cancel()
    seen = talk.seen
    ended = seen.finished + sum(seen.ends.values())
    result = {
        "finished": seen.finished,
        "different": seen.different,
        "ends": dict(seen.ends),
        "share_of_errors": round(sum(seen.ends.values()) / max(ended, 1), 4),
        "hung": seen.ends["hung"],
        "second_turns_cached": round(seen.cached / max(seen.second, 1), 4),
        "tokens_per_second": round(seen.tokens / given.kill_seconds, 1),
    }
    print(json.dumps(result))


async def _kill(given: argparse.Namespace, port: int) -> None:
    """Kill one replica now and then."""
    choice = random.Random(given.seed)
    while True:
        await asyncio.sleep(given.kill_every)
        if found := sorted(_replicas(port)):
            os.kill(one := choice.choice(found), signal.SIGKILL)
            print(json.dumps({"killed": one, "of": len(found)}), flush=True)


class _Talk:
    """Clients that hold conversations."""

    def __init__(self, given: argparse.Namespace, address: tuple[str, int], expected: dict[str, str]) -> None:
        self._given, self._address, self._expected = given, address, expected
        self._next = 0
        self.seen = Seen()

    async def times(self, count: int, clients: int) -> None:
        """Have some clients hold so many conversations each."""

        async def one(client: int) -> None:
            for _ in range(count):
                await self._hold(client, float("inf"))

        await asyncio.gather(*(one(client) for client in range(clients)))

    async def during(self, seconds: float) -> None:
        """Talk with all clients so long; answers that are not finished then count as far as they came."""
        end = time.monotonic() + seconds
        clients = [asyncio.create_task(self._client(client, end)) for client in range(self._given.clients)]
        await asyncio.gather(*clients)

    async def all_answers(self) -> dict[str, str]:
        """Return the answer to every request that conversations have, by its messages."""
        found: dict[str, str] = {}

        async def one(client: int, topic: str) -> None:
            async for messages, answer in self._conversation(topic, client):
                assert answer.error is None, answer
                found[json.dumps(messages)] = answer.text

        for start in range(0, len(TOPICS), self._given.clients):
            await asyncio.gather(*(one(*each) for each in enumerate(TOPICS[start : start + self._given.clients])))
        return found

    async def _client(self, client: int, end: float) -> None:
        while time.monotonic() < end:
            await self._hold(client, end)

    async def _hold(self, client: int, end: float) -> None:
        """Hold one conversation."""
        topic = TOPICS[self._next % len(TOPICS)]
        if not self._expected:  # each conversation is a new one, so its first turn is in no cache
            topic = f"{topic}, number {self._next}"
        self._next += 1
        turn = 0
        async for messages, answer in self._conversation(topic, client, end):
            turn += 1
            self._count(messages, answer, turn)

    def _count(self, messages: list[dict[str, str]], answer: Answer, turn: int) -> None:
        seen = self.seen
        seen.tokens += answer.tokens
        if answer.error == "late":
            return
        if answer.error is not None:
            seen.ends[answer.error] += 1
            return
        seen.finished += 1
        if turn == 2:
            seen.second += 1
            seen.cached += answer.cached_tokens >= PAGE
        if self._expected and self._expected.get(json.dumps(messages)) != answer.text:
            seen.different += 1

    async def _conversation(
        self, topic: str, client: int, end: float = float("inf")
    ) -> AsyncIterator[tuple[list[dict[str, str]], Answer]]:
        """Yield the two turns; an error ends the conversation."""
        messages = [
            {"role": "user", "content": f"{_notes(topic, self._given.notes)}Write a few sentences about {topic}."}
        ]
        first = await self._ask(messages, end, client)
        yield messages, first
        if first.error is None:
            said = {"role": "assistant", "content": first.text}
            messages = [*messages, said, {"role": "user", "content": SECOND}]
            yield messages, await self._ask(messages, end, client)

    async def _ask(self, messages: list[dict[str, str]], end: float, client: int) -> Answer:
        body = {"messages": messages, "max_tokens": self._given.max_tokens, "temperature": 0, "stream": True}
        sent = json.dumps({**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}).encode()
        heard = bytearray()
        left = min(HUNG, max(end - time.monotonic(), 0.0))
        try:
            async with asyncio.timeout(left), _connected(self._address, client) as (reader, writer):
                head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(sent)}\r\n"
                writer.write(head.encode() + b"content-type: application/json\r\nconnection: close\r\n\r\n" + sent)
                while new := await reader.read(READ):
                    heard += new
        except TimeoutError:
            return _answer(bytes(heard), "hung" if left == HUNG else "late")
        except OSError as error:
            return _answer(bytes(heard), type(error).__name__)
        return _answer(bytes(heard), None)


def _notes(topic: str, count: int) -> str:
    """Return a text that only conversations about this topic begin with."""
    choice = random.Random(topic)
    return "Notes: " + "; ".join(choice.choice(TOPICS) for _ in range(count)) + ".\n" if count else ""


def _answer(heard: bytes, error: str | None) -> Answer:
    """Read a stream, as far as it came."""
    lines = [line[6:] for line in _unchunked(heard).split(b"\n\n") if line.startswith(b"data: {")]
    events = []
    for line in lines:
        with suppress(ValueError):
            events.append(json.loads(line))
    status = heard[9:12].decode()
    if error is None and status != "200":
        error = f"status {status}"
    if error is None and (failed := next((event["error"] for event in events if "error" in event), None)):
        error = f"error object: {failed['code']}"
    if error is None and b"data: [DONE]" not in heard:
        error = "cut off"
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event.get("choices", ()))
    usage: dict[str, Any] = next((event["usage"] for event in reversed(events) if event.get("usage")), {})
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(text, usage.get("prompt_tokens", 0), cached, usage.get("completion_tokens", 0), error)


def _unchunked(heard: bytes) -> bytes:
    """Return the body of an answer in chunks, as far as it came."""
    _, _, rest = heard.partition(b"\r\n\r\n")
    body = bytearray()
    while b"\r\n" in rest:
        size, _, rest = rest.partition(b"\r\n")
        with suppress(ValueError):
            length = int(size, 16)
            body += rest[:length]
            rest = rest[length + 2 :]
    return bytes(body)


@asynccontextmanager
async def _connected(
    address: tuple[str, int], client: int
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*address, local_addr=(f"127.0.0.{2 + client}", 0))
    try:
        yield reader, writer
    finally:
        writer.close()


@contextmanager
def _address(arm: str, given: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Start the servers of an arm, and yield the one address of them."""
    if arm == "ray":
        with _server(["--replicas", str(given.replicas), *given.rest]) as port:
            _await_replicas(port, given.replicas)
            yield "127.0.0.1", port
        return
    threads = str(max((os.cpu_count() or 1) // given.replicas, 1))
    if arm == "single":
        with _server(given.rest, OMP_NUM_THREADS=threads) as port:
            yield "127.0.0.1", port
        return
    with _several(given.replicas, given.rest, threads) as ports, _proxy(ports) as port:
        yield "127.0.0.1", port


@contextmanager
def _several(count: int, rest: list[str], threads: str) -> Iterator[list[int]]:
    if count == 0:
        yield []
        return
    with _server(rest, OMP_NUM_THREADS=threads) as port, _several(count - 1, rest, threads) as others:
        yield [port, *others]


@contextmanager
def _server(options: list[str], **environment: str) -> Iterator[int]:
    """Start `specbranch serve` and yield its port."""
    command = [sys.executable, "-m", "specbranch", "serve", "--port", "0", *options]
    # Each in a session of its own, as Ray's workers are: Linux divides the CPU by sessions (autogroups) first.
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}, start_new_session=True
    ) as process:
        assert process.stderr is not None
        drain = None
        try:
            said = ""
            for line in process.stderr:
                said += line
                if '"address"' in line:
                    break
            else:
                raise RuntimeError(f"The server did not start:\n{said}")
            drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)  # ends with the server
            _ROLES[process.pid] = "front" if "--replicas" in options else "servers"
            yield int(json.loads(line)["address"].rpartition(":")[2])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)
            if drain is not None:
                drain.wait(10)


_ROLES: dict[int, str] = {os.getpid(): "clients"}


def _await_replicas(port: int, count: int) -> None:
    end = time.monotonic() + 120
    while len(list(_replicas(port))) < count:
        if time.monotonic() > end:
            raise RuntimeError(f"There are not {count} replicas after two minutes.")
        time.sleep(0.5)


def _processes() -> Iterator[tuple[int, bytes]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield int(folder.name), (folder / "cmdline").read_bytes()


def _replicas(port: int) -> Iterator[int]:
    """Yield the process ids of the replicas of the server at a port."""
    return (process for process, line in _processes() if f"ray::ServeReplica:specbranch-{port}-".encode() in line)


def _cpu() -> dict[str, float]:
    """Return the CPU seconds so far of clients, proxy, servers, front, replicas and Ray's own processes."""
    found: dict[str, float] = {}
    children = _descendants(os.getpid())
    for process, line in _processes():
        if process != os.getpid() and process not in children:
            continue
        role = _ROLES.get(process, "replicas" if b"ray::ServeReplica" in line else "ray" if b"ray" in line else "rest")
        with suppress(OSError):
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            found[role] = found.get(role, 0.0) + (int(fields[11]) + int(fields[12])) / TICKS
    return found


def _descendants(process: int) -> set[int]:
    parents: dict[int, int] = {}
    for one, _ in _processes():
        with suppress(OSError):
            parents[one] = int(Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[1])
    found, size = {process}, 0
    while len(found) > size:
        size = len(found)
        found |= {one for one, parent in parents.items() if parent in found}
    return found - {process}


PROXY = """
import asyncio, socket, sys
ports = [int(port) for port in sys.argv[1].split(",")]
async def copy(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    writer.close()
async def serve(reader, writer):
    client = int(writer.get_extra_info("peername")[0].rpartition(".")[2])
    up_reader, up_writer = await asyncio.open_connection("127.0.0.1", ports[client % len(ports)])
    await asyncio.gather(copy(reader, up_writer), copy(up_reader, writer))
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


@contextmanager
def _proxy(ports: list[int]) -> Iterator[int]:
    """Start a relay of bytes, in a process of its own. A client keeps its server, as its address tells."""
    command = [sys.executable, "-c", PROXY, ",".join(map(str, ports))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        _ROLES[process.pid] = "proxy"
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
