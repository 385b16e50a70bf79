"""The way between the host and a device: one copy up for all that a step needs, one blocking read for all that comes of
it.

Owns the pinned buffers, and the counting of what crosses. Invariants: a GPU's runner waits for its device nowhere else
while it decodes; a pinned buffer is not written again before its copy was made. What was brought up stands until
BUFFERS more copies were made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

ALIGNED_BYTES = 16  # bytes: where an array may begin
BUFFERS = 4  # that copies may be under way from at once
MOST_VIEWS = 1024  # that are remembered: to cut tensors takes longer than to copy them


class Reading:
    """Numbers on their way from a device: calling waits for them, `ready` tells whether there is anything to wait
    for."""

    def __init__(self, arrived: Callable[[], np.ndarray], ready: Callable[[], bool]) -> None:
        self._arrived, self.ready = arrived, ready

    def __call__(self) -> np.ndarray:
        """Wait, and return them."""
        return self._arrived()


class StreamMark:
    """A place in a stream's work that another stream may wait for; on a CPU there is nothing to wait for."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        """Have a stream wait for it; the host does not."""
        if self._event is not None and stream is not None:
            stream.wait_event(self._event)


class Transfer:
    """Copies between the host and one device; on a CPU nothing has to be copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None  # that copies are made on; nothing: the current one
        self.copies = self.reads = 0
        self._pinned: list[tuple[Tensor, torch.cuda.Event]] = []
        self._there: list[Tensor] = []
        self._next = 0
        # by buffer, address and length: part of a buffer, as an array and as a tensor, and where it is brought
        self._ways: dict[tuple[int, int, int], tuple[np.ndarray, Tensor, Tensor]] = {}

    def up(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Bring arrays to the device, all in one copy that nobody waits for."""
        self.copies += bool(arrays)
        if self.device.type == "cpu":
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        starts, end = _laid_out(arrays)
        held, there = self._buffer(end)
        whole = held.numpy()
        for array, start in zip(arrays.values(), starts, strict=True):
            whole[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        there[:end].copy_(held[:end], non_blocking=True)
        self._pinned[self._next][1].record(self._current)
        self._next = (self._next + 1) % BUFFERS
        return {name: _view(there, start, array) for (name, array), start in zip(arrays.items(), starts, strict=True)}

    def into(self, there: Tensor, array: np.ndarray) -> None:
        """Bring an array to the beginning of a tensor of the device, in one copy that nobody waits for."""
        self.copies += 1
        if self.device.type == "cpu":
            there[: len(array)] = torch.from_numpy(array)
            return
        held, _ = self._buffer(array.nbytes)
        key = self._next, there.data_ptr(), len(array)
        if key not in self._ways:
            if len(self._ways) >= MOST_VIEWS:
                self._ways.clear()
            part = held[: array.nbytes].view(there.dtype)
            self._ways[key] = as_numpy(part), part, there[: len(array)]
        numbers, part, to = self._ways[key]
        numbers[:] = array
        to.copy_(part, non_blocking=True)
        self._pinned[self._next][1].record(self._current)
        self._next = (self._next + 1) % BUFFERS

    def down(self, found: Tensor) -> np.ndarray:
        """Wait for the device, and read."""
        return self.later(found)()

    def later(self, found: Tensor, stream: torch.cuda.Stream | None = None) -> Reading:
        """Start to read, on another stream than usual if one is named, which is the current one; who calls what is
        returned waits for it. What is written to `found` later is not seen."""
        if self.device.type == "cpu":
            held = found.clone()
            return Reading(lambda: self._read(held), _here_already)
        held = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        held.copy_(found, non_blocking=True)
        done = self._passed(stream)
        return Reading(lambda: self._read(held, done), done.query)

    def mark(self, stream: torch.cuda.Stream | None) -> StreamMark:
        """StreamMark what a stream was given so far."""
        if stream is None:
            return StreamMark(None)
        event = _event()
        event.record(stream)
        return StreamMark(event)

    def passed(self) -> Callable[[], bool]:
        """Return what tells, without waiting, whether the device has done all that it was given so far."""
        return _here_already if self.device.type == "cpu" else self._passed().query

    @property
    def _current(self) -> torch.cuda.Stream:
        return self.stream or torch.cuda.current_stream(self.device)  # which takes long to be asked for

    def _passed(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        done = _event()
        done.record(stream or self._current)
        return done

    def _read(self, held: Tensor, done: torch.cuda.Event | None = None) -> np.ndarray:
        self.reads += 1
        if done is not None:
            done.synchronize()
        return as_numpy(held)

    def _buffer(self, size: int) -> tuple[Tensor, Tensor]:
        """Return a pinned buffer whose last copy was made, and its counterpart on the device, both of at least this
        size."""
        if not self._pinned or self._pinned[0][0].numel() < size:
            torch.cuda.synchronize(self.device)  # only as buffers grow
            size = max(1 << (size - 1).bit_length(), 1 << 16)
            there = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(BUFFERS)]
            pinned = [(torch.empty(size, dtype=torch.uint8, pin_memory=True), _event()) for _ in range(BUFFERS)]
            self._pinned, self._there = pinned, there  # both or neither: there may be no memory for one of them
            self._ways.clear()
        held, copied = self._pinned[self._next]
        copied.synchronize()
        return held, self._there[self._next]


def as_numpy(held: Tensor) -> np.ndarray:
    """Return a tensor of the host as an array of the same memory."""
    numbers: np.ndarray = held.numpy()
    return numbers


def _here_already() -> bool:
    return True


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _laid_out(arrays: Mapping[str, np.ndarray]) -> tuple[list[int], int]:
    """Return where each array begins in one buffer, and the end of the last."""
    starts, end = [], 0
    for array in arrays.values():
        starts.append(end)
        end = -(-(end + array.nbytes) // ALIGNED_BYTES) * ALIGNED_BYTES
    return starts, end


def _view(buffer: Tensor, start: int, array: np.ndarray) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
    return buffer[start : start + array.nbytes].view(dtype).view(array.shape)
