"""The predicted speedup with a pair: the target's answers decoded again by each method.

Owns the settings to try, and the recommendation. Invariant: decisions are those of the real models; only time is
modelled, from measured costs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbranch.clock.profile import CostProfile
from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.methods import METHODS, PLAIN
from specbranch.core.stats import Stats
from specbranch.errors import ModelError
from specbranch.exec.serial import Serial
from specbranch.lab.doctor.finding import Finding, note, well
from specbranch.lab.measure.loaded_pair import LoadedPair
from specbranch.lab.measure.one_request import decode, greedy_session
from specbranch.lab.replay.decode import RecordDecoder, ReplayedModel
from specbranch.lab.replay.record import Record, Task
from specbranch.lab.replay.runners import ProposalStore
from specbranch.training.distill.agreement import AnsweredPrompt

TRIED_TOKENS = 40  # of each answer that is looked at
TRIED_LENGTHS = (2, 4, 8)  # of drafts that are tried
GAIN = 1.03  # below this, speculation is not worth having
TriedSetting = tuple[str, tuple[tuple[str, int], ...]]  # a method, and what is set of it


@dataclass(frozen=True, slots=True)
class Prediction:
    """A method with its best setting, on three prompts."""

    method: str
    setting: dict[str, Any]
    speedup: float
    tokens_per_forward: float | None


def answers(pair: LoadedPair) -> list[AnsweredPrompt]:
    """Let the target answer its prompts greedily, with the fastest method."""
    executor, found = Serial(pair.verifier, pair.drafter), []
    for prompt in pair.prompts():
        session = decode(executor, greedy_session(prompt, TRIED_TOKENS, pair.tokenizer.eos_ids), "adaptive")
        found.append(AnsweredPrompt(tuple(prompt), tuple(session.output)))
    return found


def predict(pair: LoadedPair, texts: Sequence[AnsweredPrompt], profile: CostProfile) -> list[Prediction]:
    """Decode the target's answers again with each method and the draft's real proposals; return the best setting of
    each."""
    eos = tuple(pair.tokenizer.eos_ids)
    records = [
        Record(Task(text.prompt, SamplingParams(max_tokens=TRIED_TOKENS), 0, eos), text.answer, ())
        for text in texts
        if len(text.answer) > 1
    ]
    if not records:
        raise ModelError(
            "The target ends each of three answers at once, so nothing can be predicted. Is it a chat model?"
        )
    played: dict[TriedSetting, list[Stats]] = {setting: [] for setting in _settings()}
    with tempfile.TemporaryDirectory() as folder, closing(ProposalStore(Path(folder) / "memory.sqlite")) as memory:
        draft = ReplayedModel("draft", memory, pair.drafter.runner)
        for record in records:
            with closing(RecordDecoder(record, draft)) as decoder:
                for (method, setting), stats in played.items():
                    config = SpeculativeConfig.from_dict({"method": method, **dict(setting)})
                    stats.append(decoder.decode(config, profile))
    return _best(played)


def recommendation(predictions: Sequence[Prediction]) -> tuple[Prediction, Finding]:
    """Return the sentence that names the method to use."""
    best = max(predictions, key=lambda one: one.speedup)
    if best.speedup < GAIN:
        plain = next((one for one in predictions if one.method == PLAIN), best)
        said = f"speculation does not pay: at best {best.speedup:.2f} times plain decoding, with {best.method}."
        return plain, note("Method", said, f"Use --method {PLAIN} here, or a cheaper or better draft.")
    length = best.setting.get("num_speculative_tokens")
    setting = f" --num-speculative-tokens {length}" if length else ""
    said = f"{best.method} is predicted to be {best.speedup:.2f} times as fast as plain decoding."
    return best, well("Method", said, f"Use --method {best.method}{setting}.")


def _settings() -> Iterator[TriedSetting]:
    """Return each method with each draft length. Methods whose target guesses are left out, because a replay would
    need real decoding."""
    for name, method in METHODS.items():
        if name == PLAIN or method.policy == "planner":
            yield name, ()
        elif not method.guesses:
            yield from ((name, (("num_speculative_tokens", length),)) for length in TRIED_LENGTHS)


def _best(played: Mapping[TriedSetting, Sequence[Stats]]) -> list[Prediction]:
    """Return each method with its best setting; of equal ones the first."""
    seconds = {setting: sum(one.decode_seconds for one in stats) for setting, stats in played.items()}
    found: dict[str, Prediction] = {}
    for (method, setting), stats in played.items():
        speedup = seconds[PLAIN, ()] / seconds[method, setting]
        tokens, forwards = sum(one.emitted - 1 for one in stats), sum(one.target_forwards for one in stats)
        if method not in found or speedup > found[method].speedup:
            found[method] = Prediction(method, dict(setting), speedup, tokens / max(forwards, 1))
    return list(found.values())
