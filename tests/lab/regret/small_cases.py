"""Small cases of the regret lab, quick enough for a test."""

from __future__ import annotations

from dataclasses import replace

from specbranch.lab.regret.case import REQUEST_TOKENS, Case, Phase, make_case


def calm(requests: int = 2, *, agreement: float = 0.8, lookup: float = 0.1, at_once: int = 1) -> Case:
    """A machine without spikes, slow stretches or overlap, whose text never changes."""
    phases = ((Phase(REQUEST_TOKENS, agreement, lookup),),) * requests
    costs = {"target": 0.01, "draft_share": 0.1, "row_share": 0.01, "host": 0.0005, "draft_setup": 0.0}
    return replace(make_case(1), phases=phases, at_once=at_once, overlap=False, spike=0.0, slow=(), **costs)
