"""Texts of a real pair for the regret lab: what its target answered, and what its draft proposed at each token.

Owns the second generator of texts, and its file (`scripts/write_regret_texts.py` writes one). Invariant: along a text
the draft's candidates and confidences are the recorded ones. Off it they are toys with the agreement of that stretch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specbranch.config import SpeculativeConfig
from specbranch.core.lookup import Ngrams
from specbranch.core.runner import Ask, Feed, Proposal
from specbranch.core.slots import ROOT
from specbranch.errors import BadParameter
from specbranch.files import write_whole
from specbranch.lab.regret.case import REQUEST_TOKENS, Case, Draws, Phase, make_case
from specbranch.lab.regret.toy_pair import CANDIDATES, Mark, Script, Scripts, make_scripts, mixed
from specbranch.lab.replay.decode import ReplayedModel
from specbranch.lab.replay.reader import Reader
from specbranch.lab.replay.record import Record

RECORDED_STRETCH = 32  # tokens over which agreement and lookup are averaged


@dataclass(frozen=True, slots=True)
class RecordedText:
    """A prompt, the target's answer, and the draft's proposal for each of its tokens."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    proposals: tuple[Proposal, ...]


def texts_of(records: Sequence[Record], draft: ReplayedModel) -> list[RecordedText]:
    """Return the texts of all records that are as long as a request of the lab."""
    return [_text(record, draft) for record in records if len(record.tokens) >= REQUEST_TOKENS]


def _text(record: Record, draft: ReplayedModel) -> RecordedText:
    prompt, answer = record.task.prompt, record.tokens[:REQUEST_TOKENS]
    proposals: list[Proposal] = []
    with closing(Reader(draft.runner, record)) as reader:
        runner = draft.worker(record, reader).runner
        runner.open(0, record.task.request)
        runner.extend(0, prompt[:-1])
        for token in (prompt[-1], *answer[:-1]):
            proposals += runner.propose([Feed(0, (token,), (ROOT,))], [Ask(0, 0, CANDIDATES)])
            runner.keep(0, (0,), 1)
        runner.close(0)
    return RecordedText(prompt, answer, tuple(proposals))


def save_texts(path: Path, texts: Sequence[RecordedText]) -> None:
    """Write texts as JSON."""
    write_whole(path, json.dumps({"texts": [_to_dict(text) for text in texts]}) + "\n")


def load_texts(path: Path) -> tuple[RecordedText, ...]:
    """Read texts, or say what is wrong with the file."""
    try:
        texts = tuple(_from_dict(text) for text in json.loads(path.read_text(encoding="utf-8"))["texts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadParameter(
            f"Texts {path} cannot be read ({error}). Write them with `python scripts/write_regret_texts.py`."
        ) from error
    if not texts:
        raise BadParameter(f"Texts {path} has no text of {REQUEST_TOKENS} tokens. Record longer answers.")
    return texts


def _to_dict(text: RecordedText) -> dict[str, Any]:
    proposals = [[one.tokens, round(one.confidence, 5), [round(x, 5) for x in one.odds]] for one in text.proposals]
    return {"prompt": text.prompt, "answer": text.answer, "proposals": proposals}


def _from_dict(values: dict[str, Any]) -> RecordedText:
    proposals = tuple(Proposal(tuple(tokens), sure, odds=tuple(odds)) for tokens, sure, odds in values["proposals"])
    text = RecordedText(tuple(values["prompt"]), tuple(values["answer"]), proposals)
    if not text.prompt or not len(text.answer) == len(text.proposals) == REQUEST_TOKENS:
        raise ValueError(f"a text has {len(text.answer)} tokens and {len(text.proposals)} proposals")
    return text


def scripts_of(seed: int, texts: Sequence[RecordedText] = ()) -> Scripts:
    """Return the scripts of a case: drawn ones, or recorded texts on the machine that the seed draws."""
    case = make_case(seed)
    return _recorded_scripts(case, texts) if texts else make_scripts(case)


def _recorded_scripts(case: Case, texts: Sequence[RecordedText]) -> Scripts:
    draws, marks, proposals = Draws(f"texts {case.seed}"), dict[int, Mark](), dict[int, Proposal]()
    chosen = [draws.one_of(tuple(texts)) for _ in case.phases]
    known = {text: _phases(text) for text in dict.fromkeys(chosen)}
    for text, phases in known.items():
        state = 0
        for token in text.prompt:
            state = mixed(state, token)
        for at, (token, proposal) in enumerate(zip(text.answer, text.proposals, strict=True)):
            marks[state], proposals[state] = Mark(state, phases[at // RECORDED_STRETCH].agreement, token), proposal
            state = mixed(state, token)
    scripts = tuple(Script(text.prompt, text.answer) for text in chosen)
    return Scripts(replace(case, phases=tuple(known[text] for text in chosen)), scripts, marks, proposals)


def _phases(text: RecordedText) -> tuple[Phase, ...]:
    """Measure how often the draft and prompt lookup are right, stretch by stretch."""
    agreed = [one.tokens[:1] == (token,) for one, token in zip(text.proposals, text.answer, strict=True)]
    looked = _looked_up(text)
    parts = [slice(at, at + RECORDED_STRETCH) for at in range(0, len(text.answer), RECORDED_STRETCH)]
    return tuple(Phase(len(agreed[part]), _share(agreed[part]), _share(looked[part])) for part in parts)


def _looked_up(text: RecordedText) -> list[bool]:
    tokens, usual, found = list(text.prompt), SpeculativeConfig(), list[bool]()
    ngrams = Ngrams(tokens, usual.ngram_max, usual.ngram_min)
    for token in text.answer:
        found.append(ngrams.propose(1) == (token,))
        tokens.append(token)
    return found


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values)
