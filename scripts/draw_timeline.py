"""Draw docs/timeline.svg: what draft and target do under serial speculative decoding, PEARL and SpecBranch, on the
virtual clock.

Real decisions of toy models, time charged by a cost profile; run it again after a change to the methods.
"""

from __future__ import annotations

from pathlib import Path

from specbranch.clock.profile import CostProfile
from specbranch.clock.virtual_clock import MeteredDrafter, VirtualClock
from specbranch.config import PolicyName, SamplingParams, SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.core.trace import Trace
from specbranch.exec.verifier import Verifier
from specbranch.lab.toys.toys import ToyLaw, ToyRunner
from specbranch.lab.traces.rounds import TracedRound, read_rounds
from specbranch.lab.traces.timeline_svg import draw_comparison

PROFILE = CostProfile(target=((1, 8.0), (16, 8.0)), draft=((1, 1.0), (4, 1.0), (12, 1.8)))
TITLES = {
    "autoregressive": "Plain decoding",
    "speculative": "Serial speculative decoding",
    "pearl": "PEARL",
    "specbranch": "SpecBranch",
}
TOKENS = 24


def record(method: str) -> list[TracedRound]:
    """Decode one request; returns what both models did, round by round."""
    draft = MeteredDrafter(ToyRunner(ToyLaw(drift=0.12)))
    loop = Loop(VirtualClock(Verifier(ToyRunner(ToyLaw())), draft, PROFILE), Trace())
    prompt = [4, 0, 1]
    session = Session(0, prompt, Request(SamplingParams(max_tokens=TOKENS), 0, len(prompt)), 500)
    # of SpecBranch the paper's two stages, which a reader can follow
    policy: PolicyName | None = "confidence" if method == "specbranch" else None
    config = SpeculativeConfig(method=method, policy=policy, num_speculative_tokens=6)
    loop.join(session, METHODS[method].start(session, config, Experience()))
    while loop.live:
        loop.step()
    assert loop.trace
    return read_rounds(loop.trace.events, len(session.output), session.origins)


def main() -> None:
    """Write the picture."""
    runs = {title: record(method) for method, title in TITLES.items()}
    picture = draw_comparison(runs, f"The same {TOKENS} tokens, four ways (time runs to the right)", "time units")
    Path("docs/timeline.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
