"""Texts of real pairs in the regret lab: taken from records, kept in a file, and followed token by token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from specbranch.config import SamplingParams
from specbranch.core.runner import Proposal
from specbranch.errors import BadParameter
from specbranch.lab.regret.case import REQUEST_TOKENS, make_case
from specbranch.lab.regret.recorded_texts import RecordedText, load_texts, save_texts, scripts_of, texts_of
from specbranch.lab.regret.runs import ARMS, contender, judged, run
from specbranch.lab.replay.decode import ReplayedModel
from specbranch.lab.replay.record import Record, Task
from specbranch.lab.replay.runners import ProposalStore
from specbranch.lab.toys.ranked import ranked_pair
from specbranch.lab.toys.toys import ToyRunner

PROMPT = (1, 2, 3)
ALONE = next(seed for seed in range(50) if make_case(seed).at_once == 1 and not make_case(seed).overlap)


@pytest.fixture
def text(tmp_path: Path) -> Iterator[RecordedText]:
    """A text of a toy pair that agrees at three of four tokens."""
    target, draft = ranked_pair((0.75, 0.1))
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + REQUEST_TOKENS:
        row = target.logits_of(tokens)
        tokens.append(row.index(max(row)))
    task = Task(PROMPT, SamplingParams(max_tokens=REQUEST_TOKENS), 0, ())
    record = Record(task, tuple(tokens[len(PROMPT) :]), ())
    with closing(ProposalStore(tmp_path / "memory.sqlite")) as memory:
        short = replace(record, tokens=record.tokens[:50])
        (found,) = texts_of([record, short], ReplayedModel("toy", memory, ToyRunner(draft)))
        yield found


def test_the_draft_proposes_what_it_proposed_along_the_record(text: RecordedText) -> None:
    right = [one.tokens[0] == token for one, token in zip(text.proposals, text.answer, strict=True)]
    assert len(right) == REQUEST_TOKENS and sum(right) / len(right) == pytest.approx(0.75, abs=0.1)
    assert scripts_of(ALONE, [text]).case.agreement == pytest.approx(sum(right) / len(right))


def test_methods_emit_the_recorded_text_and_a_chain_is_accepted_as_often_as_the_draft_agreed(
    text: RecordedText,
) -> None:
    scripts = scripts_of(ALONE, [text])
    small = replace(scripts, case=replace(scripts.case, phases=scripts.case.phases[:2]), requests=scripts.requests[:2])
    for one in (contender("lookup", ARMS["lookup"]), contender("tree", ARMS["tree"]), *judged(("specbranch",))):
        run(small, one)
    drafted = run(small, contender("speculative-2", ARMS["speculative-2"]))
    alpha = small.case.agreement
    forwards = sum(batch.forwards for batch in drafted.batches)
    assert 2 * REQUEST_TOKENS / forwards == pytest.approx(1 + alpha + alpha**2, rel=0.1)


def test_texts_survive_their_file(text: RecordedText, tmp_path: Path) -> None:
    save_texts(tmp_path / "texts.json", [text])
    (again,) = load_texts(tmp_path / "texts.json")
    assert (again.prompt, again.answer) == (text.prompt, text.answer)
    assert [one.tokens for one in again.proposals] == [one.tokens for one in text.proposals]
    assert [one.confidence for one in again.proposals] == pytest.approx(
        [one.confidence for one in text.proposals], abs=1e-4
    )


@pytest.mark.parametrize("written", ["", "{}", '{"texts": []}', '{"texts": [{"prompt": [1], "answer": [2]}]}'])
def test_a_file_that_holds_no_texts_is_refused_by_name(written: str, tmp_path: Path) -> None:
    (tmp_path / "texts.json").write_text(written)
    with pytest.raises(BadParameter, match=r"texts\.json"):
        load_texts(tmp_path / "texts.json")


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    save_texts(tmp_path / "texts.json", [RecordedText((1,), (2,), (Proposal((2,), 0.5, odds=(1.0,)),))])
    with pytest.raises(BadParameter, match="1 tokens"):
        load_texts(tmp_path / "texts.json")
