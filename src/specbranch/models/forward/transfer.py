"""Copies between host and device: one copy up with all inputs of a step, one blocking read of all its results.

What is chosen behind a step brings its sampling parameters in a second copy, which is made while the step runs.

Owns the pinned buffers and the counts of copies and reads. Invariants: while it decodes, a GPU runner waits for its
device only here. A pinned buffer is not written again before its copy has finished. An array that was copied up stays
valid until BUFFERS more copies were made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

ALIGNED_BYTES = 16  # an array begins at a multiple of this
BUFFERS = 4  # copies that may be in flight at once, each from its own pinned buffer
MOST_VIEWS = 1024  # views of buffers that are cached: to slice tensors takes longer than to copy them


class Reading:
    """A read from a device in flight: a call waits for the numbers, `ready` returns True once they have arrived."""

    def __init__(self, arrived: Callable[[], np.ndarray], ready: Callable[[], bool]) -> None:
        self._arrived, self.ready = arrived, ready

    def __call__(self) -> np.ndarray:
        """Wait for the numbers and return them."""
        return self._arrived()


class StreamMark:
    """A point in a stream's work that another stream can wait for; on a CPU there is nothing to wait for."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        """Make a stream wait for this point; the host does not wait."""
        if self._event is not None and stream is not None:
            stream.wait_event(self._event)


class Transfer:
    """Copies between the host and one device; on a CPU nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None  # the stream of the copies; None: the current one
        self.copies = self.reads = 0
        self._pinned: list[tuple[Tensor, torch.cuda.Event]] = []
        self._there: list[Tensor] = []
        self._next = 0
        # by buffer, device address and length: part of a pinned buffer as array and as tensor, and its destination
        self._ways: dict[tuple[int, int, int], tuple[np.ndarray, Tensor, Tensor]] = {}

    def up(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Copy arrays to the device, all in one asynchronous copy; returns their tensors by the same names."""
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
        """Copy an array to the beginning of a device tensor, asynchronously."""
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
        """Wait for the device, and return a tensor's numbers."""
        return self.later(found)()

    def later(self, found: Tensor, stream: torch.cuda.Stream | None = None) -> Reading:
        """Start to read a tensor; a call of the returned `Reading` waits for it.

        `stream`: must be the current stream; None: the stream of this Transfer. Later writes to `found` do not show.
        """
        if self.device.type == "cpu":
            held = found.clone()
            return Reading(lambda: self._read(held), _here_already)
        held = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        held.copy_(found, non_blocking=True)
        done = self._passed(stream)
        return Reading(lambda: self._read(held, done), done.query)

    def mark(self, stream: torch.cuda.Stream | None) -> StreamMark:
        """Mark the end of the work that a stream has been given so far."""
        if stream is None:
            return StreamMark(None)
        event = _event()
        event.record(stream)
        return StreamMark(event)

    def passed(self) -> Callable[[], bool]:
        """Return a check that does not wait: True once the device has done all work given to it so far."""
        return _here_already if self.device.type == "cpu" else self._passed().query

    @property
    def _current(self) -> torch.cuda.Stream:
        return self.stream or torch.cuda.current_stream(self.device)  # slow to look up

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
        """Return a pinned buffer of at least this size whose last copy has finished, and its device counterpart."""
        if not self._pinned or self._pinned[0][0].numel() < size:
            torch.cuda.synchronize(self.device)  # only when buffers get larger
            size = max(1 << (size - 1).bit_length(), 1 << 16)
            there = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(BUFFERS)]
            pinned = [(torch.empty(size, dtype=torch.uint8, pin_memory=True), _event()) for _ in range(BUFFERS)]
            self._pinned, self._there = pinned, there  # assign both or neither: either allocation may fail
            self._ways.clear()
        held, copied = self._pinned[self._next]
        copied.synchronize()
        return held, self._there[self._next]


def as_numpy(held: Tensor) -> np.ndarray:
    """View a host tensor as an array of the same memory."""
    numbers: np.ndarray = held.numpy()
    return numbers


def _here_already() -> bool:
    return True


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _laid_out(arrays: Mapping[str, np.ndarray]) -> tuple[list[int], int]:
    """Return the offset of each array in one buffer, and the end of the last."""
    starts, end = [], 0
    for array in arrays.values():
        starts.append(end)
        end = -(-(end + array.nbytes) // ALIGNED_BYTES) * ALIGNED_BYTES
    return starts, end


def _view(buffer: Tensor, start: int, array: np.ndarray) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
    return buffer[start : start + array.nbytes].view(dtype).view(array.shape)
