"""Many prompts decoded in one batch, each by a method of its own."""

from __future__ import annotations

from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.request import Request
from specbranch.core.session import Session
from specbranch.exec.serial import Serial
from tiny_models import some_tokens
from toybench import PROFILE, Timeless, run_out


def decode_together(executor: Serial, methods: list[str], temperature: float) -> list[Session]:
    """Decode as many prompts as there are methods in one batch; their texts cross the window."""
    loop, sessions = Loop(executor), []
    for number, method in enumerate(methods):
        prompt = some_tokens(30 + 3 * number, seed=number)
        params = SamplingParams(temperature=temperature, max_tokens=16)
        request = Request(params, seed=number, prompt_length=len(prompt), eos_ids=(7,))
        session = Session(number, prompt, request, 120)
        config = SpeculativeConfig(method=method, num_speculative_tokens=4, stop_below=0.2, ngram_min=1)
        loop.join(session, METHODS[method].start(session, config, Timeless(PROFILE)))
        sessions.append(session)
    run_out(loop)
    return sessions
