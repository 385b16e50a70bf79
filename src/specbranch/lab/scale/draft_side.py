"""The worker's side of one target's link on virtual time: its messages, and the drafter that carries out its orders.

Owns the answers. Which orders share a forward is `draft_device.py`'s; how to draft is `exec/drafter.py`'s. Invariant:
the answers are those of a real worker (`exec/draft_service.py`); only times are modelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean

from specbranch.core.orders import Draft, Drafted, DraftOrder, Effort
from specbranch.core.runner import Done, Feed, Runner
from specbranch.exec.drafter import Announce, Drafter
from specbranch.exec.messages import (
    Enough,
    Leave,
    Open,
    Ready,
    RoundDrafted,
    StaleHolding,
    TargetDone,
    WireMessage,
    Work,
)
from specbranch.exec.wire import from_bytes, to_bytes
from specbranch.exec.worker import never
from specbranch.lab.scale.channel import Mailbox
from specbranch.lab.scale.draft_device import DraftDevice
from specbranch.lab.scale.simulation import Simulation


class DeviceDrafter(Drafter):
    """A Drafter whose forwards run on a shared device."""

    lets_grow = False  # the target may be done after any draft step
    _hears = False

    def __init__(self, runner: Runner, device: DraftDevice) -> None:
        super().__init__(runner)
        self._device = device

    def draft(
        self, orders: Mapping[int, DraftOrder], done: Done = never, announce: Announce | None = None
    ) -> dict[int, Drafted]:
        """Carry out the orders; the host receives each step of a chain."""
        self._hears = any(isinstance(order, Draft) for order in orders.values())
        return super().draft(orders, done, announce)

    def _count(self, work: Sequence[Feed]) -> None:
        super()._count(work)
        if work:
            held = [self.slots(item.seq) for item in work]
            context = fmean(len(slots.prefix) + len(slots.tokens) for slots in held)
            self._device.forward(sum(len(item.tokens) for item in work), context, self._hears)

    def _extend(self, session: int, tokens: Sequence[int]) -> None:
        self._device.forward(len(tokens), len(self.slots(session).prefix))
        super()._extend(session, tokens)


class DraftSide:
    """Serves one target: a servant of the simulation runs it."""

    def __init__(
        self, simulation: Simulation, device: DraftDevice, runner: Runner, came: Mailbox, out: Mailbox
    ) -> None:
        self._simulation, self._device = simulation, device
        self._drafter = DeviceDrafter(runner, device)
        self._came, self._out = came, out
        self._kept: deque[WireMessage] = deque()  # came while a round was drafted

    def run(self) -> None:
        """Answer messages until the simulation ends."""
        self._send(Ready())
        while True:
            match self._next():
                case Open(session, request):
                    self._drafter.free(session)
                    self._drafter.open(session, request)
                case Leave(session):
                    self._drafter.free(session)
                case Work() as work:
                    self._draft(work)
                case _:
                    pass  # about a round that is over

    def _draft(self, work: Work) -> None:
        drafter, orders = self._drafter, work.orders
        if stale := tuple(session for session, order in orders.items() if drafter.stale(session, order.on)):
            self._send(StaleHolding(work.ticket, stale))
            return
        at_work = object()
        self._device.begin(at_work)
        start, fed = self._simulation.now(), drafter.rows_fed
        self._simulation.sleep(self._device.setup)
        drafter.enough = lambda: self._heard(Enough(work.ticket))
        made = drafter.draft(orders, lambda: self._heard(TargetDone(work.ticket), Enough(work.ticket)))
        counts = drafter.prefill_counts()
        prompts = {session: counts[session] for session in orders if session in counts}
        self._device.end(at_work)
        effort = Effort(self._simulation.now() - start, drafter.rows_fed - fed, prompts)
        self._send(RoundDrafted(work.ticket, made, effort))

    def _heard(self, *wanted: WireMessage) -> bool:
        """True if one of these messages has come by now; others are kept for later."""
        while (data := self._came.first()) is not None:
            self._came.drop()
            self._kept.append(from_bytes(data))
        return any(message in self._kept for message in wanted)

    def _next(self) -> WireMessage:
        if not self._kept:
            self._came.wait()
            self._heard()
        return self._kept.popleft()

    def _send(self, message: WireMessage) -> None:
        self._out.post(to_bytes(message))
