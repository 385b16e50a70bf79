"""A draft worker on a network changes no text, whatever the network or the worker does."""

from __future__ import annotations

import math
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

import pytest

from specbranch.assembly import ServedDraft
from specbranch.core.draft_evaluation import NOT_EVALUATED
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.orders import Context, Draft, Drafted, DraftOrder, Effort, Orders, Plan
from specbranch.core.session import Session
from specbranch.core.trees import EDGES
from specbranch.errors import BadParameter, ModelError
from specbranch.exec import process
from specbranch.exec.address import KEY_VARIABLE, LinkAddress, is_link, link_key
from specbranch.exec.draft_server import WorkerFailed
from specbranch.exec.draft_steps import ALONE, Drafting, Ends
from specbranch.exec.drafter import Announce, Drafter
from specbranch.exec.greeting import Refused, admit, prove
from specbranch.exec.link import HEADER, LinkLost, StreamLink
from specbranch.exec.messages import Evaluated, Ready, RoundDrafted, TellEvaluation, Work
from specbranch.exec.process import Process
from specbranch.exec.wire import from_bytes, to_bytes
from specbranch.lab.scale.relay import Relay, Weather
from tiers import tiered
from toy_worker import (
    DRIFT,
    SECRET,
    SERVED,
    TOKENS,
    WorkerProcess,
    free_port,
    reach,
    serving,
    serving_draft,
    vocabulary,
)
from toybench import (
    MOST_ROUNDS,
    SHARED,
    VOCABULARY,
    Case,
    Ending,
    SlowRunner,
    Timeless,
    answer,
    config_of,
    law,
    make_drafter,
    next_number,
    plainly,
    wandering,
)

HANG = 60.0  # seconds: a guard against hangs, far longer than anything here takes
LONG = Ending("long", max_tokens=160)
WAITING = 0.02  # seconds of a target forward while the worker is away, so that it comes back within the request


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost worker is dialled again soon, and the secret of this machine's user is none of ours."""
    monkeypatch.setattr(process, "LONGEST_RESTART_WAIT", 0.05)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def join(loop: Loop, method: str, seed: int, ending: Ending = LONG) -> tuple[Session, Case]:
    case = Case((seed % 6, 1), 0.7, seed, ending, "match")
    session = case.session(next_number())
    config = config_of("pearl" if method == "wandering" else method, "match")
    started = wandering(session) if method == "wandering" else None
    loop.join(session, started or METHODS[config.method].start(session, config, Timeless(SHARED)))
    return session, case


def finish(loop: Loop, each_round: Callable[[], None] = lambda: None) -> None:
    end = time.monotonic() + HANG
    for _ in range(MOST_ROUNDS):
        if not loop.live:
            return
        each_round()
        loop.step()
        assert time.monotonic() < end, "the request does not end"
    raise AssertionError("the request does not end")


def decode(executor: Process, method: str = "pearl", seed: int = 1, ending: Ending = LONG) -> Session:
    """Decode a request; its text is that of plain decoding."""
    loop = Loop(executor)
    session, case = join(loop, method, seed, ending)
    finish(loop)
    assert answer(session) == plainly(case, law())
    session.stats.check()
    return session


def decode_until_drafted(executor: Process, seed: int = 50) -> None:
    """Decode requests until one of them has drafted tokens again."""
    end = time.monotonic() + HANG
    while "draft" not in decode(executor, seed=seed, ending=replace(LONG, max_tokens=24)).origins:
        assert time.monotonic() < end, "drafting does not resume"
        time.sleep(0.02)


WEATHERS = {
    "a wire": Weather(),
    "0.5 ms": Weather(0.0005),
    "5 ms": Weather(0.005),
    "held": Weather(0.0005, held=0.01),
    "cut": Weather(cut_every=40),
    "single bytes": Weather(single_bytes=True),
}


@pytest.mark.parametrize("method", tiered(["pearl", "wandering", "confidence"], "wandering".__eq__))
@pytest.mark.parametrize("weather", tiered(WEATHERS, ("a wire", "cut").__contains__))
def test_texts_are_the_same_in_any_weather(weather: str, method: str) -> None:
    length = replace(LONG, max_tokens=40 if weather in ("single bytes", "5 ms") else 120)
    with serving() as port, Relay(port, replace(WEATHERS[weather], cut_every=0)) as relay:
        with closing(reach(relay.port)) as executor:
            relay.weather = WEATHERS[weather]  # without a first greeting there is no executor
            sessions = [decode(executor, method, seed, length) for seed in range(3)]
            seeds = iter(range(3, 30))  # on a busy machine the target may be done before the link is there again
            while not any("draft" in session.origins for session in sessions):
                sessions.append(decode(executor, method, next(seeds), length))
            if WEATHERS[weather].delay and not WEATHERS[weather].held:
                assert executor.round_trip >= 2 * WEATHERS[weather].delay
        assert bool(relay.cuts) == bool(WEATHERS[weather].cut_every)


@pytest.mark.slow
def test_several_requests_at_once_over_a_bad_network() -> None:
    weather = Weather(0.0005, held=0.01, hold=0.2, cut_every=150)
    calm = replace(weather, cut_every=0)
    with serving() as port, Relay(port, calm) as relay, closing(reach(relay.port)) as executor:
        relay.weather = weather
        loop = Loop(executor)
        runs = [join(loop, ("pearl", "wandering", "confidence")[seed % 3], seed) for seed in range(6)]
        finish(loop)
        assert [answer(session) for session, _ in runs] == [plainly(case, law()) for _, case in runs]


def test_one_worker_serves_several_targets_and_keeps_nothing_of_those_that_left() -> None:
    drafter = make_drafter(DRIFT)
    with serving(drafter=drafter) as port:
        with closing(reach(port)) as one, closing(reach(port)) as other:
            loops = [Loop(one), Loop(other), Loop(one)]
            runs = [join(loop, "pearl", seed) for seed, loop in enumerate(loops)]
            while any(loop.live for loop in loops):
                for loop in loops:
                    if loop.live:
                        loop.step()
            assert [answer(session) for session, _ in runs] == [plainly(case, law()) for _, case in runs]
            assert all("draft" in session.origins for session, _ in runs)
            one.open(7, runs[0][1].session().request)
        wait_until(lambda: not drafter._held)


class Failing(Drafter):
    """A draft that fails as a device does, so many times."""

    def __init__(self, times: int) -> None:
        super().__init__(SlowRunner(law(DRIFT)))
        self.left = times

    def drafting(
        self, orders: Mapping[int, DraftOrder], ends: Ends = ALONE, announce: Announce | None = None
    ) -> Drafting[dict[int, Drafted]]:
        self.left -= 1
        if self.left >= 0:
            raise RuntimeError("out of memory")
        return super().drafting(orders, ends, announce)


def test_a_draft_that_fails_once_costs_one_connection_and_one_that_goes_on_failing_ends_the_worker() -> None:
    with serving(drafter=Failing(2)) as port, closing(reach(port)) as executor:
        decode_until_drafted(executor)
        assert executor.restarts >= 1
    with (
        pytest.raises(WorkerFailed, match="out of memory"),
        serving(drafter=Failing(9)) as port,
        closing(reach(port)) as executor,
    ):
        short = replace(LONG, max_tokens=24)
        wait_until(lambda: decode(executor, seed=2, ending=short) and executor._failures > 3)


def wait_until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG
    while not happened():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.005)


def test_a_worker_that_is_stopped_and_started_again_drafts_again() -> None:
    port = free_port()
    with serving(port):
        executor = reach(port)
        decode_until_drafted(executor)
    with closing(executor):
        assert "draft" not in decode(executor, seed=3, ending=replace(LONG, max_tokens=24)).origins[8:]
        with serving(port):
            decode_until_drafted(executor)
            assert executor.restarts == 1


def test_a_worker_is_reached_again_also_while_nobody_wants_drafts() -> None:
    port = free_port()
    with serving(port):
        executor = reach(port)
    with closing(executor), serving(port):
        short = replace(LONG, max_tokens=24)
        wait_until(lambda: decode(executor, "autoregressive", 3, short) and executor.draft_state == "ready")
        assert executor.restarts == 1


def test_a_worker_with_another_vocabulary_is_not_used_in_place_of_the_first(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="specbranch")
    port, short = free_port(), replace(LONG, max_tokens=24)
    with serving(port):
        executor = reach(port)
    other = ServedDraft(make_drafter(DRIFT), replace(SERVED, fingerprint="another"), TOKENS)
    with closing(executor), serving_draft(other, port):
        wait_until(lambda: decode(executor, seed=4, ending=short) and "another vocabulary" in caplog.text)
        assert executor.restarts == 0


@pytest.mark.slow
def test_a_worker_killed_in_mid_request_is_used_again_when_it_is_back() -> None:
    port = free_port()
    with closing_worker(port) as first:
        executor = reach(port)
        loop = Loop(executor)
        session, case = join(loop, "pearl", 5, replace(LONG, max_tokens=300))
        while len(session.output) < 40:
            loop.step()
        first.process.kill()
        while session.stats.rounds_without_draft == 0:
            loop.step()
    with closing(executor), WorkerProcess(port):
        runner = executor.target.runner
        assert isinstance(runner, SlowRunner)

        def slowly() -> None:
            runner.seconds = 0.0 if executor.restarts else WAITING

        finish(loop, slowly)
        assert answer(session) == plainly(case, law())
        assert session.stats.draft_restarts == 1 and "draft" in session.origins[-60:]


@contextmanager
def closing_worker(port: int) -> Iterator[WorkerProcess]:
    with WorkerProcess(port) as worker:
        yield worker


@pytest.mark.slow
def test_while_a_worker_is_stopped_in_the_middle_of_a_message_the_target_goes_on() -> None:
    with WorkerProcess(halts_at=8) as worker, closing(reach(worker.port)) as executor:
        loop = Loop(executor)
        session, case = join(loop, "pearl", 5)
        longest, last = 0.0, time.monotonic()

        def note() -> None:
            nonlocal longest, last
            longest, last = max(longest, time.monotonic() - last), time.monotonic()

        finish(loop, note)
        assert answer(session) == plainly(case, law())
        assert executor.draft_state == "busy" and session.stats.rounds_without_draft > 50
        assert longest < 10.0  # two graces and a step; far more than that on any machine
        os.kill(worker.process.pid, signal.SIGCONT)
        decode_until_drafted(executor)
        assert executor.restarts == 0  # the late answer was dropped, and nobody was dialled again


class Pretender:
    """A worker that greets as it should, and then answers orders as it likes."""

    def __init__(self, answers: Callable[[StreamLink, Work], None]) -> None:
        self._answers, self._listener = answers, socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Pretender:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                stream, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._talk, args=(stream,), daemon=True).start()

    def _talk(self, stream: socket.socket) -> None:
        with suppress(Refused, LinkLost, OSError):
            admit(stream, b"")
            link = StreamLink(stream)
            link.post(to_bytes(SERVED))
            link.pump()
            while True:
                while (data := link.peek()) is None:
                    link.pump(None)
                link.drop()
                message = from_bytes(data)
                if type(message).__name__ == "Join":
                    link.post(to_bytes(Ready()))
                elif isinstance(message, TellEvaluation):
                    link.post(to_bytes(Evaluated(NOT_EVALUATED, EDGES)))
                elif isinstance(message, Work):
                    self._answers(link, message)
                while link.unsent:
                    link.pump(None)
        stream.close()


def nonsense(link: StreamLink, work: Work) -> None:
    link.post(b"\x80\x04K\x01.")


def too_much(link: StreamLink, work: Work) -> None:
    link._outgoing += struct.pack(">Q", 2**40) + b"["


def never(link: StreamLink, work: Work) -> None:
    pass


def too_late(link: StreamLink, work: Work) -> None:
    time.sleep(0.5)
    link.post(to_bytes(RoundDrafted(work.ticket, {}, Effort(0.5))))


ROUNDING = 1e-9  # seconds: times on a clock are sums of others


def ages(link: StreamLink, work: Work) -> None:
    """Claim to have worked for years, or for no time at all."""
    link.post(to_bytes(RoundDrafted(work.ticket, {}, Effort(1e9 if work.ticket % 2 else 0.0))))


@pytest.mark.parametrize("how", [nonsense, too_much, never, too_late, ages], ids=lambda how: how.__name__)
def test_a_worker_that_answers_badly_costs_time_only(how: Callable[[StreamLink, Work], None]) -> None:
    with Pretender(how) as worker, closing(reach(worker.port)) as executor:
        executor._limits = replace(executor._limits, unmeasured=0.1)
        session = decode(executor, "pearl", 2, replace(LONG, max_tokens=30))
        assert "draft" not in session.origins
        assert (executor._failures > 0) == (how in (nonsense, too_much))


def test_times_of_a_worker_are_placed_on_our_clock() -> None:
    with Pretender(ages) as worker, closing(reach(worker.port)) as executor:
        request = Case((1, 2), 0.7, 1, LONG).session().request
        executor.open(0, request)
        for _ in range(4):
            before = executor.now()
            report = executor.run({0: Orders(Draft(Context(0, (1, 2)), Plan(2)))})[0]
            assert report.drafting is not None
            assert before <= report.drafting.start <= report.drafting.end <= executor.now() + ROUNDING
            assert 0.0 <= report.drafting.link <= report.drafting.seconds + ROUNDING
        assert math.isfinite(executor.round_trip)


def test_without_a_worker_an_error_says_what_to_do() -> None:
    port = free_port()
    with pytest.raises(ModelError, match=rf"no draft from tcp://127.0.0.1:{port}: .*Start a worker on that machine"):
        reach(port)


def test_another_vocabulary_is_refused_and_a_compatible_one_is_not() -> None:
    with serving() as port, closing(reach(port, target=vocabulary("other-fingerprint"))) as executor:
        decode_until_drafted(executor)
    other = replace(vocabulary("other-fingerprint"), compare=_refuse)
    with serving() as port, pytest.raises(ModelError, match="Draft and target have different vocabularies"):
        reach(port, target=other)
    with serving() as port, pytest.raises(ModelError, match="drafts 6 token ids, of which the target has the first 4"):
        reach(port, target=vocabulary(size=VOCABULARY - 2))


def _refuse(size: int, tokens: object) -> int:
    raise ModelError("Draft and target have different vocabularies.")


def test_the_secret_has_to_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(key=SECRET) as port:
        with pytest.raises(ModelError, match=r"the worker wants a secret\. Set SPECBRANCH_LINK_KEY"):
            reach(port)
        monkeypatch.setenv(KEY_VARIABLE, "another secret of some length")
        with pytest.raises(ModelError, match="the worker has another secret"):
            reach(port)
        monkeypatch.setenv(KEY_VARIABLE, SECRET.decode())
        with closing(reach(port)) as executor:
            decode_until_drafted(executor)
    with serving() as port, pytest.raises(ModelError, match="has another secret"):
        reach(port)  # nor does a target with a secret trust a worker without one


def test_other_addresses_than_this_machine_need_a_secret_of_some_length() -> None:
    here, there = LinkAddress("127.0.0.1", 1), LinkAddress("10.0.0.1", 1)
    assert link_key(here, {}) == b""
    assert link_key(there, {KEY_VARIABLE: SECRET.decode()}) == SECRET
    with pytest.raises(BadParameter, match=r"tcp://10.0.0.1:1 is not this machine alone, so a link needs a secret"):
        link_key(there, {})
    with pytest.raises(BadParameter, match="has 5 characters; expected at least 16"):
        link_key(here, {KEY_VARIABLE: "short"})


@pytest.mark.parametrize(
    "text", ["tcp://", "tcp://host", "tcp://host:port", "http://host:1", "tcp://h:1/x", "tcp://h:99999"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(BadParameter, match=r"expected tcp://HOST:PORT"):
        LinkAddress.parse(text)


def test_addresses_are_told_from_models() -> None:
    assert [is_link(name) for name in ("tcp://a:1", "tls://a:1", "smollm2-default", "tcp", "./tcp", None)] == [
        *(True, True),
        *(False, False, False, False),
    ]
    assert str(LinkAddress.parse("tls://[::1]:7")) == "tls://[::1]:7"
    assert LinkAddress.parse("tcp://[::1]:7").is_local and LinkAddress.parse("tcp://localhost:7").is_local


def test_a_recorded_greeting_is_worth_nothing() -> None:
    ours, theirs = socket.socketpair()
    recorded: list[bytes] = []

    class Recorder:
        """Notes what is sent."""

        def __getattr__(self, name: str) -> object:
            return getattr(theirs, name)

        def sendall(self, data: bytes) -> None:
            recorded.append(data)
            theirs.sendall(data)

    greeting = threading.Thread(target=admit, args=(ours, SECRET))
    greeting.start()
    prove(Recorder(), SECRET)  # type: ignore[arg-type]
    greeting.join()
    for one in (ours, theirs):
        one.close()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"".join(recorded))
        with pytest.raises(Refused, match="its secret is not ours"):
            admit(ours, SECRET)
        answer_ = theirs.recv(1000)
    assert answer_.endswith(HEADER.pack(0))  # nothing is proved to whoever replays
