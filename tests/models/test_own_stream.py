"""A GPU's runner launches everything on its own stream, here on the CPU with streams that only note who waits for
whom."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specbranch.config import SamplingParams
from specbranch.core.request import Request
from specbranch.core.runner import Ask, Feed
from specbranch.core.slots import ROOT
from specbranch.exec.drafter import Drafter
from specbranch.exec.streams import Streams
from specbranch.exec.verifier import Verifier
from specbranch.models.gpu import own_stream, stream_clock
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.gpu.stream_clock import StreamClock
from specbranch.models.loading import load_native
from test_streams_models import decode
from tiers import tiered
from tiny_models import saved, some_tokens, tiny

# What was read, made an array.
ON_THE_HOST = {"aten.detach.default", "aten.resolve_conj.default", "aten.resolve_neg.default", "aten.to.dtype_layout"}
ON_THE_HOST |= {"aten.randint.low_generator"}  # a test's prompt


class Stream:
    """Notes which streams it was made to wait for."""

    def __init__(self) -> None:
        self.waits: list[Stream] = []
        self.synchronized = 0

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other)

    def synchronize(self) -> None:
        self.synchronized += 1


class Streaming:
    """torch.cuda's current stream."""

    def __init__(self) -> None:
        self.callers = Stream()
        self.current = [self.callers]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()


class Launches(TorchDispatchMode):
    """Notes each operation that was launched on the caller's stream."""

    def __init__(self, streaming: Streaming) -> None:
        super().__init__()
        self.streaming, self.astray, self.seen = streaming, set[str](), 0

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), more: Any = None) -> Any:
        self.seen += 1
        if self.streaming.current[-1] is self.streaming.callers:
            self.astray |= {str(function)} - ON_THE_HOST
        return function(*given, **(more or {}))


@pytest.fixture
def streaming(monkeypatch: pytest.MonkeyPatch) -> Streaming:
    found = Streaming()
    monkeypatch.setattr(own_stream, "OnStream", found.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: found.current[-1])
    return found


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("model")
    return load_native(saved(tiny("llama"), folder), context_length=300, dtype="float64").decoder


def runner_on(decoder: Any, stream: Stream) -> Any:
    runner: Any = GpuRunner(decoder, 300)
    runner.stream.cuda = stream
    return runner


SHAPED = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 2}


@pytest.mark.slow
@pytest.mark.parametrize("params", tiered(({"temperature": 0.7}, SHAPED), SHAPED.__eq__), ids=["chosen", "shaped"])
def test_every_operation_of_a_round_goes_on_its_own_models_stream(
    params: dict[str, Any], decoder: Any, streaming: Streaming
) -> None:
    streams = Stream(), Stream()
    runners = [runner_on(decoder, stream) for stream in streams]
    executor = Streams(Verifier(runners[0]), Drafter(runners[1]))
    with Launches(streaming) as launches:
        for number, method in enumerate(
            ("autoregressive", "pearl", "specbranch", "specbranch:confidence", "tree", "lookahead")
        ):
            decode(executor, method, SamplingParams(**params, max_tokens=20), number)
            decode(executor, "pearl", SamplingParams(temperature=1.0, max_tokens=20), number, "ratio")
    assert launches.seen > 10000 and not launches.astray
    assert not any(stream.waits for stream in (*streams, streaming.callers)), (
        "one model waits for the other, or for the caller"
    )


def test_what_passes_between_a_runner_and_its_caller_makes_them_wait_for_each_other(
    decoder: Any, streaming: Streaming
) -> None:
    own = Stream()
    runner = runner_on(decoder, own)
    handed: dict[str, Callable[[], object]] = {
        "limit": lambda: runner.limit(100),
        "probe": lambda: runner.probe(2, lambda seen: seen[:, :3]),
        "score": lambda: runner.score([Feed(0, (1, 2), (ROOT, 0))]),
        "show": lambda: runner.show([Feed(0, (3,), (1,))], 2),
    }
    runner.open(0, Request(SamplingParams(), 0, 4))
    runner.extend(0, some_tokens(40))
    for name, do in handed.items():
        own.waits.clear()
        streaming.callers.waits.clear()
        do()
        assert own.waits == [streaming.callers] and streaming.callers.waits == [own], name
    own.waits.clear()
    runner.feed([Feed(0, (4,), (2,))])
    runner.propose([Feed(0, (5,), (3,))], [Ask(0, 4)])
    assert runner.margin(0, 4, 1, 2) == -runner.margin(0, 4, 2, 1)
    assert streaming.callers not in own.waits


def test_a_copied_page_is_copied_on_the_own_stream(decoder: Any, streaming: Streaming) -> None:
    runner = runner_on(decoder, Stream())
    for seq in range(2):
        runner.open(seq, Request(SamplingParams(), 0, 4))
    runner.extend(0, some_tokens(150))
    held = runner.sequences[1]
    held.slots.extend(some_tokens(150)[:100])
    held.table.pages = runner.sequences[0].table.fork(100).pages
    with Launches(streaming) as launches:
        runner.demand(1, 3)
    assert launches.seen and not launches.astray


class Owner:
    """Whatever has a stream."""


def test_what_a_stream_may_still_write_to_is_held_until_it_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, owner = Stream(), Owner()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    assert own_stream.own_stream(owner, torch.device("cpu")) is stream
    assert stream.synchronized == 0
    del owner
    gc.collect()
    assert stream.synchronized == 1


# --- the clock ---


class Device:
    """A stream that works for a while; events are reached when its time comes to them."""

    def __init__(self) -> None:
        self.host = self.time = 5.0  # the host's clock, and when the device will have done what it was given
        self.off = 1000.0  # what the device's clock says at the host's 0

    def query(self) -> bool:
        return self.time <= self.host

    def give(self, seconds: float) -> None:
        self.time = max(self.time, self.host) + seconds


class Event:
    """An event of the device above."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, device: Device) -> None:
        self.device, self.at = device, max(device.time, device.host)

    def query(self) -> bool:
        return self.at <= self.device.host

    def elapsed_time(self, other: Event) -> float:
        assert self.query() and other.query(), "asked for a time that has not come"
        return 1000 * (other.at - self.at)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(stream_clock.time, "perf_counter", lambda: made.host)
    return made


def test_a_moment_is_when_the_device_comes_to_it_not_when_it_was_noted(device: Device) -> None:
    clock: Any = StreamClock(device)  # type: ignore[arg-type]
    device.host = 9.0
    started = clock.note()
    device.give(2.0)
    ended = clock.note()
    device.host = 10.0
    assert ended() == 10.0, "asked too early it says: now"
    device.host = 20.0
    assert (started(), ended()) == (9.0, 11.0)


def test_the_clocks_are_tied_anew_while_the_stream_rests(device: Device) -> None:
    clock: Any = StreamClock(device)  # type: ignore[arg-type]
    ties = set()
    for turn in range(3):
        device.host += 1000.0 * turn
        clock.note()
        ties.add(clock._tie[1])
        device.give(1.0)
        clock.note()
        ties.add(clock._tie[1])  # at work: the tie stays
    assert len(ties) == 3
