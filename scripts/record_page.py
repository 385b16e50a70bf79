"""Record the sentence that the server's page shows at once: the default pair, by plain decoding and SpecBranch.

python scripts/record_page.py

The recording has everything that was drafted. Models and decisions are real. Time is that of a cost profile, as the
page says: a laptop with two cores cannot run draft and target at once. Run it again after a change to the method or the
default draft.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specbranch import LLM, SamplingParams
from specbranch.answer import Output
from specbranch.clock.shipped import load_profile
from specbranch.engine import LLMView
from specbranch.lab.suites.suite import load_suite
from specbranch.provenance import source_commit
from specbranch.serve.frames import Film, Frame

FILE = Path(__file__).parents[1] / "src" / "specbranch" / "serve" / "page_files" / "recording.json"
QUESTION = "What is the Pythagorean theorem?"
CLOCK = "c10"
WARM_UP = 8  # answers to other questions before: a planner that knows its pair
LONGEST = 60  # tokens of a sentence
NODES = 64  # of a tree: more are not seen


@dataclass(frozen=True)
class Filmed:
    """An answer and its rounds."""

    output: Output
    frames: list[Frame]


def main() -> None:
    """Decode one sentence twice and write it down."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--question", default=QUESTION)
    asked.add_argument("--out", type=Path, default=FILE)
    given = asked.parse_args()
    with LLM(options={"clock": CLOCK, "keep_experience": False}) as llm:
        prompt = llm.tokenizer.chat([{"role": "user", "content": given.question}])
        fast = llm.using("specbranch")
        warm_up(fast)
        plain = filmed(llm.using("autoregressive"), prompt, LONGEST)
        length = first_sentence(piece.text for piece in plain.output.pieces)
        plain, ours = filmed(llm.using("autoregressive"), prompt, length), filmed(fast, prompt, length)
        values = recording(llm, given.question, plain, ours)
    given.out.write_text(json.dumps(values, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{values['text']!r}: {values['speedup']:.2f} × sooner, {given.out.stat().st_size} bytes in {given.out}")


def warm_up(llm: LLMView) -> None:
    """Let the planner learn the pair, on other questions."""
    for prompt in load_suite("own-chat").prompts[:WARM_UP]:
        llm.chat([{"role": "user", "content": prompt.turns[0]}], SamplingParams(max_tokens=96))


def filmed(llm: LLMView, prompt: list[int], tokens: int) -> Filmed:
    """Answer a prompt and keep its rounds."""
    film, frames, output = Film(), list[Frame](), None

    def see(*watched: Any) -> None:
        frames.extend(filter(None, [film.see(*watched)]))

    for chunk in llm.stream(prompt, SamplingParams(max_tokens=tokens), on_round=see):
        output = chunk.output
    assert output is not None
    return Filmed(output, frames)


def first_sentence(texts: Iterable[str]) -> int:
    """How many tokens there are up to the end of the first sentence."""
    said = list(texts)
    return next(at for at, text in enumerate(said, 1) if text.rstrip().endswith("."))


def recording(llm: LLM, question: str, plain: Filmed, ours: Filmed) -> dict[str, Any]:
    """What the page is given. Times are seconds since the prompt was read."""
    assert plain.output.text == ours.output.text and plain.output.token_ids == ours.output.token_ids
    profile = load_profile(CLOCK)
    plain_film, our_film = (_film_values(llm, one) for one in (plain, ours))
    return {
        "question": question,
        "text": plain.output.text,
        "target": llm.target,
        "draft": "smollm2-default",
        "clock": CLOCK,
        "modelled": True,
        "clock_is": f"{profile.hardware}: {profile.pair}",
        "recorded": datetime.now(UTC).date().isoformat(),
        "commit": source_commit(),
        "by": "scripts/record_page.py",
        "speedup": plain_film["seconds"] / our_film["seconds"],
        "plain": plain_film,
        "ours": our_film,
    }


def _film_values(llm: LLM, one: Filmed) -> dict[str, Any]:
    first = one.frames[0].end
    frames = [frame.trimmed(NODES).to_dict(lambda token: llm.tokenizer.decode([token])) for frame in one.frames]
    for frame in frames:
        for who in ("draft", "target"):
            frame[who] = frame[who] and [round(time - first, 6) for time in frame[who]]
    pieces = [[piece.text, piece.origin] for piece in one.output.pieces]
    return {"method": one.output.method, "seconds": one.frames[-1].end - first, "pieces": pieces, "frames": frames}


if __name__ == "__main__":
    main()
