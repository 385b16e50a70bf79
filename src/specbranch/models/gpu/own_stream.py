"""A model's own CUDA stream, and the context that launches kernels on it.

Owns when memory that a stream may still write to is freed. `OnStream` does what `torch.cuda.stream` does without
creating objects, as a round enters its stream several times. Invariant: after the context each device has its former
current stream.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch


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
