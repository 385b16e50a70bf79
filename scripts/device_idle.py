"""How much of its time a GPU idles while some work is done, by its own timeline.

Gaps of more than 5 µs between two kernels count; shorter ones lie between the kernels of one graph, and are returned
beside them. Looks at the middle of the work: prompts are behind, and no answer has ended.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

IN_GRAPH = 5.0  # µs: shorter gaps are those between the kernels of a graph


def idle_share(work: Callable[[], object]) -> tuple[float, float]:
    """Return the per cent of time between kernels, in long gaps and in short ones."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        work()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    spans = sorted((e.time_range.start, e.time_range.end) for e in profiled.events() if e.device_type == on_device)
    first, last = spans[0][0], max(end for _, end in spans)
    begin, stop = first + 0.4 * (last - first), first + 0.9 * (last - first)
    until, long, short = begin, 0.0, 0.0
    for start, end in spans:
        if start > until and begin <= start <= stop:
            gap = start - until
            long, short = (long + gap, short) if gap > IN_GRAPH else (long, short + gap)
        until = max(until, end)
    return 100.0 * long / (stop - begin), 100.0 * short / (stop - begin)
