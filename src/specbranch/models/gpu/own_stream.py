"""A stream of a model's own, and having kernels launched on it.

Owns when what a stream may still write to is given back. `OnStream` does what `torch.cuda.stream` does, without the
objects that this makes: a round enters its stream several times. Invariant: once it is left, each device has the stream
it had.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch


class OnStream:
    """Have kernels launched on a stream, and so on its device, whichever is the current one."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream, current = self._stream, torch._C._cuda_getDevice()
        # what is set last leaves its device the current one
        self._before = [torch._C._cuda_getCurrentStream(device) for device in {stream.device_index, current}]
        self._before.sort(key=lambda held: held[1] == current)
        torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *error: Any) -> None:
        for held in self._before:
            torch._C._cuda_setStream(*held)


def own_stream(owner: object, device: torch.device) -> torch.cuda.Stream:
    """A stream that is waited for before what its owner holds is given back: a step that nobody asked for may still
    write there."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    weakref.finalize(owner, stream.synchronize).atexit = False
    return stream
