"""A model's own CUDA stream, and the contexts that launch kernels on it.

Owns when memory that a stream may still write to is freed, and who waits for whom between a model's stream and its
caller's. `OnStream` does what `torch.cuda.stream` does without creating objects, as a round enters its stream several
times. Does not own what is launched. Invariant: after the context each device has its former current stream.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from specbranch.models.gpu.stream_clock import DeviceMoment, StreamClock


class OnStream:
    """Launch kernels on a stream, and so on its device, within this context."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream, current = self._stream, torch._C._cuda_getDevice()
        # the stream that is set last makes its device the current one
        self._before = [torch._C._cuda_getCurrentStream(device) for device in {stream.device_index, current}]
        self._before.sort(key=lambda held: held[1] == current)
        torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *error: Any) -> None:
        for held in self._before:
            torch._C._cuda_setStream(*held)


def own_stream(owner: object, device: torch.device) -> torch.cuda.Stream:
    """Return a stream that is synchronised before its owner's memory is freed.

    A step that was started ahead may still write there.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    weakref.finalize(owner, stream.synchronize).atexit = False
    return stream


class DeviceStream:
    """The stream that a runner launches everything on, so two models overlap; on a CPU there is none."""

    def __init__(self, owner: object, device: torch.device) -> None:
        """`owner`: whoever holds the memory that the stream's work writes to."""
        self._device = device
        self.cuda = own_stream(owner, device) if device.type == "cuda" else None
        self.clock = None if self.cuda is None else StreamClock(self.cuda)

    def moment(self) -> DeviceMoment:
        """Note when the device reaches this point of its work; on a CPU that is now."""
        if self.clock is not None:
            return self.clock.note()
        moment = time.perf_counter()
        return lambda: moment

    def here(self) -> AbstractContextManager[Any]:
        """Launch kernels on this stream within this context."""
        return nullcontext() if self.cuda is None else OnStream(self.cuda)

    def callers(self) -> torch.cuda.Stream | None:
        """Return the caller's current stream; None on a CPU."""
        return None if self.cuda is None else torch.cuda.current_stream(self._device)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Do as `here`, ordered after earlier and before later work of the caller's stream.

        This is for tensors that pass between the two streams.
        """
        around = self.callers()
        if self.cuda is not None and around is not None:
            self.cuda.wait_stream(around)
        try:
            with self.here():
                yield
        finally:
            if self.cuda is not None and around is not None:
                around.wait_stream(self.cuda)
