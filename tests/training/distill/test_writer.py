"""The target writing its own material: what it writes is its own, in the form its template wants, and the same every
time."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
import torch

from small_tokenizers import byte_level, save
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.errors import BadParameter, ModelError
from specbranch.models.files.locate import Located
from specbranch.models.files.weights import read_weights
from specbranch.models.forward.decoder import Decoder
from specbranch.models.loading import open_model
from specbranch.models.runners.native import NativeRunner
from specbranch.progress import Nobody
from specbranch.text.tokenizer import Tokenizer
from specbranch.training.distill import openings, writer
from specbranch.training.distill.given_data import data_questions
from specbranch.training.distill.material import Material
from specbranch.training.distill.opening_words import DATA_SHARE, TALKS
from specbranch.training.distill.openings import LEAST_TEXT, Script
from specbranch.training.distill.texts import Texts
from specbranch.training.distill.writer import Desk, WritingTarget, write
from specbranch.training.distill.writer_settings import LEAST_QUESTION, WriterSettings
from tiny_models import CONFIGS, GREEDY, saved, some_tokens, tiny

torch.set_num_threads(1)
DOUBLE = torch.float64
ENDS = tuple(range(0, 420, 14))  # enough that a random model ends its turns now and then


def settings(**given: object) -> WriterSettings:
    usual = {"tokens": 900, "rows": 8, "length": 120, "question_tokens": 12, "steps": 32, "min_p": 0.01}
    return WriterSettings(**{**usual, **given})  # type: ignore[arg-type]


def load(
    folder: str | Path, device: str = "cpu", dtype: torch.dtype = DOUBLE, ends: tuple[int, ...] = ENDS
) -> WritingTarget:
    arch, source = open_model(Located("folder", Path(folder)))
    return WritingTarget(replace(arch, eos_ids=ends), read_weights(arch, source, torch.device(device), dtype))


@pytest.fixture(scope="module")
def target(pair: tuple[str, str]) -> WritingTarget:
    return load(pair[0])


@pytest.fixture(scope="module")
def tokenizer(pair: tuple[str, str]) -> Tokenizer:
    return Tokenizer.from_folder(pair[0])


def lines(desk: Desk, rounds: int) -> list[list[tuple[list[int], int]]]:
    """The finished conversations of each row with the start of the answer, put together step by step."""
    found: list[list[tuple[list[int], int]]] = [[] for _ in range(desk.rows)]
    open_ones: list[list[int]] = [[] for _ in range(desk.rows)]
    for _ in range(rounds):
        for tokens, ended, _ in zip(*(part.tolist() for part in desk.advance()), strict=True):
            for row, (token, end) in enumerate(zip(tokens, ended, strict=True)):
                open_ones[row].append(token)
                if end > 0:
                    found[row].append((open_ones[row], end))
                    open_ones[row] = []
    return found


@torch.no_grad()
def desk_of(target: WritingTarget, tokenizer: Tokenizer, wanted: WriterSettings) -> Desk:
    return Desk(target, Script.of(tokenizer, target.arch, wanted), wanted)


def logits_of(target: WritingTarget, tokens: list[int], first: int = 0) -> torch.Tensor:
    """What the native runner gives after each token from `first` on."""
    runner = NativeRunner(Decoder(target.arch, target.weights, 256), 192)
    runner.open(0, GREEDY)
    runner.extend(0, tokens[:first])
    rest = tuple(tokens[first:])
    rows = runner.score([Feed(0, rest, tuple(range(ROOT, len(rest) - 1)))])[0]
    return rows[0].block


@pytest.mark.slow
@torch.no_grad()
def test_even_rows_answer_as_the_native_runner_does_greedily(target: WritingTarget, tokenizer: Tokenizer) -> None:
    conversations = [line for row in lines(desk_of(target, tokenizer, settings()), 8)[::2] for line in row]
    assert len(conversations) > 5
    for tokens, answer in conversations:
        chosen = logits_of(target, tokens)[answer - 1 : -1].argmax(-1)
        assert chosen.tolist() == tokens[answer:]


@pytest.mark.slow
@torch.no_grad()
def test_odd_rows_stray_from_the_greedy_answer_but_never_below_min_p(
    target: WritingTarget, tokenizer: Tokenizer
) -> None:
    strayed = 0
    for tokens, answer in [
        line for row in lines(desk_of(target, tokenizer, settings(min_p=0.2)), 8)[1::2] for line in row
    ]:
        law = (logits_of(target, tokens)[answer - 1 : -1] / 0.8).softmax(-1)
        own = law.gather(1, torch.tensor(tokens[answer:])[:, None])
        strayed += int((own < law.amax(-1, keepdim=True)).sum())
        assert bool((own >= 0.2 * law.amax(-1, keepdim=True) * (1 - 1e-9)).all())
    assert strayed > 10


def drawn(target: WritingTarget, tokenizer: Tokenizer, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each token came first in thousands of questions with one opening, and the logits there."""
    wanted = settings(rows=4000, question_temperature=temperature, min_p=0.02)
    script = Script.of(tokenizer, target.arch, wanted)
    opening = min(script.openings, key=len)
    script = replace(script, openings=(opening,), asked=(False,))
    tokens = Desk(target, script, replace(wanted, steps=len(opening) + 1)).advance().tokens
    logits = logits_of(target, list(opening))[-1].clone()
    logits[list(script.question_ends)] = -torch.inf
    return torch.bincount(tokens[-1].long(), minlength=logits.numel()) / 4000, logits


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampled_tokens_follow_the_targets_law_cut_at_min_p(
    target: WritingTarget, tokenizer: Tokenizer, temperature: float
) -> None:
    share, logits = drawn(target, tokenizer, temperature)

    def off(temperature: float, min_p: float) -> float:
        """Total variation between draws and a law, as a multiple of what chance gives on average."""
        law = (logits / temperature).softmax(-1)
        law = torch.where(law >= min_p * law.max(), law, 0.0)
        law /= law.sum()
        chance = (law * (1 - law) * 2 / (torch.pi * 4000)).sqrt().sum() / 2
        return float((share - law).abs().sum() / 2 / chance)

    assert off(temperature, 0.02) < 1.3
    assert off(temperature * 1.25, 0.02) > 1.6 and off(temperature, 0.2) > 1.6, "another law would show"


@pytest.mark.slow
@torch.no_grad()
def test_material_is_what_the_rows_fed_conversation_by_conversation(
    target: WritingTarget, tokenizer: Tokenizer
) -> None:
    wanted = settings(tokens=8 * 32 * 5)
    material = write(target, tokenizer, wanted)
    finished = [line for row in lines(desk_of(target, tokenizer, wanted), 5) for line in row if line[1] < len(line[0])]
    written = [(material.sequence(at), int(material.answers[at])) for at in range(len(material))]
    assert [line for line in written if line in finished] == finished
    assert finished and len(written) <= len(finished) + 8  # at most the open one of each row besides
    assert material.about["conversations"] == len(material)


def test_every_conversation_is_opening_question_turn_and_answer(target: WritingTarget, tokenizer: Tokenizer) -> None:
    wanted = settings(tokens=2000)
    script = Script.of(tokenizer, target.arch, wanted)
    material = write(target, tokenizer, wanted)
    questions, ends = [], set(script.answer_ends)
    for at in range(len(material)):
        tokens, answer = material.sequence(at), int(material.answers[at])
        opening = max((line for line in script.openings if tokens[: len(line)] == list(line)), key=len)
        assert tokens[answer - len(script.bridge) : answer] == list(script.bridge)
        questions.append(tokens[len(opening) : answer - len(script.bridge)])
        assert material.later is not None
        later = material.later[material.starts[at] : material.starts[at + 1]].tolist()
        own = [token for token, given in list(zip(tokens, later, strict=True))[answer:-1] if not given]
        assert len(ends & set(own)) <= any(later)  # an answer that a later question follows has ended, too
        assert len(tokens) <= wanted.length
    assert all(LEAST_QUESTION <= len(question) <= 12 for question in questions)
    assert {len(question) for question in questions} > {12}, "some end by themselves, some at the limit"
    assert all(not set(script.question_ends) & set(question) for question in questions)


def test_openings_and_the_turn_to_the_answer_are_the_templates(target: WritingTarget, tokenizer: Tokenizer) -> None:
    script = Script.of(tokenizer, target.arch, settings(length=256))
    texts = {tokenizer.decode(opening, skip_special=False) for opening in script.openings}
    assert any(text.endswith("[user]") and "[system]" not in text for text in texts)
    assert any("[system] You are a" in text and text.endswith("[user] Write a Python function") for text in texts)
    assert tokenizer.decode(script.bridge, skip_special=False).strip().replace("\n", "") == "</s>[assistant]"


@pytest.mark.slow
def test_prompts_of_the_user_are_forced_whole_and_in_turn(target: WritingTarget, tokenizer: Tokenizer) -> None:
    prompts = ("Name three rivers.", "What is 7 times 8?")
    material = write(target, tokenizer, settings(tokens=4000, prompts=prompts))
    heads = [tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    sequences = [(material.sequence(at), int(material.answers[at])) for at in range(len(material))]
    counts = [sum(tokens[:answer] == head for tokens, answer in sequences) for head in heads]
    assert min(counts) > 2 and abs(counts[0] - counts[1]) <= 3
    assert 0.3 < sum(counts) / len(material) < 0.7


def test_prompts_that_leave_no_room_are_left_out_and_reported(
    target: WritingTarget, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script.of(tokenizer, target.arch, settings(prompts=("river " * 200, "Short.")))
    assert "1 of 2 prompts are longer" in caplog.text
    assert {opening for opening, asked in zip(script.openings, script.asked, strict=True) if asked} == {
        tuple(tokenizer.chat([{"role": "user", "content": "Short."}]))
    }


def same(one: Material, other: Material) -> bool:
    return torch.equal(one.tokens, other.tokens) and torch.equal(one.answers, other.answers)


@pytest.mark.slow
def test_a_seed_writes_the_same_again_and_another_does_not(target: WritingTarget, tokenizer: Tokenizer) -> None:
    first, again, other = (write(target, tokenizer, settings(seed=seed)) for seed in (4, 4, 5))
    assert same(first, again)
    assert not same(first, other)


@pytest.mark.slow
def test_what_is_written_can_be_trained_on(target: WritingTarget, tokenizer: Tokenizer) -> None:
    material = write(target, tokenizer, settings())
    assert not any(part.is_inference() for part in (material.tokens, material.starts, material.answers)), (
        "autograd refuses such tensors"
    )
    assert float(next(iter(material.batches(128, 2, 0, 0))).weight.sum()) > 0


@torch.no_grad()
def test_rows_that_end_take_the_next_openings_in_order(target: WritingTarget, tokenizer: Tokenizer) -> None:
    wanted = settings(length=16)
    script = Script.of(tokenizer, target.arch, settings())
    script = replace(script, openings=tuple((first, 3, 5) for first in range(20, 27)), asked=(True,) * 7)
    desk, begins, openings_seen = Desk(target, script, wanted), [True] * 8, []
    for tokens, ended, _ in zip(*(part.tolist() for part in desk.advance()), strict=True):
        openings_seen += [token for token, new in zip(tokens, begins, strict=True) if new]
        begins = [end > 0 for end in ended]
    assert len(openings_seen) > 16
    assert openings_seen == [20 + at % 7 for at in range(len(openings_seen))]


@pytest.mark.slow
@torch.no_grad()
def test_a_later_question_follows_an_answer_that_ended_and_is_answered(pair: tuple[str, str]) -> None:
    """A frequent token is taken for the end of an answer; every row has two later questions."""
    wanted, openings = settings(length=120, steps=240), tuple((first, 3, 5) for first in range(20, 28))
    base = Script(openings, (True,) * 8, ((3, 12),) * 8, (9, 9), (), (), ("turns",) * 8)
    free = load(pair[0], ends=())
    end = int(torch.bincount(Desk(free, base, wanted).advance().tokens.flatten().long()).argmax())
    turns = ((11, 12, 13, 14), (15, end, 16))  # an end within a question is no end
    script = replace(base, answer_ends=(end,), turn_end=end, turns=turns, later=((1, 0),) * 7 + ((),))
    desk = Desk(free, script, wanted)
    history = writer._History(script)
    history.add(desk.advance())
    material, asked = history.material(desk.unfinished(), {}), 0
    assert material.later is not None and material.by_kind() == {"turns": len(material)}
    for at in range(len(material)):
        tokens, answer = material.sequence(at), int(material.answers[at])
        later = material.later[material.starts[at] : material.starts[at + 1]].tolist()
        runs = [list(run) for given, run in groupby(range(len(tokens)), later.__getitem__) if given]
        assert [tuple(tokens[place] for place in run) for run in runs] == [turns[1], turns[0]][: len(runs)]
        assert all(tokens[run[0] - 1] == end and run[-1] + 48 < wanted.length for run in runs)
        assert not runs or tokens[0] != 27  # its opening has no later questions
        asked += len(runs)
        if 2 * len(runs) and at == 0:  # row 0 is greedy: all else is the target's choice after what stands before it
            chosen = logits_of(free, tokens)[answer - 1 : -1].argmax(-1).tolist()
            own = [place for place in range(answer, len(tokens)) if not later[place]]
            assert [tokens[place] for place in own] == [chosen[place - answer] for place in own]
    assert asked > 4
    weight = next(material.batches(120, len(material), 0, 0, question_weight=0.25)).weight
    assert int((weight == 1).sum()) == material.answer_tokens - sum(
        int(material.lengths[at] == material.answers[at]) for at in range(len(material))
    )


def test_every_kind_has_its_share_and_texts_are_long_enough_to_copy_from(
    target: WritingTarget, tokenizer: Tokenizer
) -> None:
    script = Script.of(tokenizer, target.arch, settings(length=2048, question_tokens=192))
    count = {kind: script.kinds.count(kind) / len(script.kinds) for kind in openings.KIND_NAMES if kind != "texts"}
    shares = {kind.name: kind.share for kind in TALKS} | {"data": DATA_SHARE}
    assert count.keys() == shares.keys() and sum(shares.values()) == pytest.approx(1)
    assert all(abs(count[kind] - share) < 0.02 for kind, share in shares.items()), count
    most = {kind: limits[1] for kind, limits in zip(script.kinds, script.limits, strict=True)}
    assert most["about"] == most["summaries"] == most["editing"] == 1228 and most["talk"] == 192
    turns = {kind: len(later) for kind, later in zip(script.kinds, script.later, strict=True)}
    assert turns["turns"] >= 2 and 0 in {len(later) for later in script.later}
    said = [tokenizer.decode(turn, skip_special=False) for turn in script.turns]
    assert script.turn_end in script.answer_ends
    assert all(one.strip().startswith("[user] ") and one.rstrip().endswith("[assistant]") for one in said)
    assert any("Translate the first paragraph into German." in one for one in said)


def test_made_up_data_is_the_same_for_a_seed_and_asks_about_what_is_there() -> None:
    questions = data_questions(60, 3)
    assert questions == data_questions(60, 3) != data_questions(60, 4) and len(set(questions)) == 60
    assert any("| --- |" in one for one in questions) and any('"item": ' in one for one in questions)
    assert all("{" not in one.replace("{\n", "") or '"' in one for one in questions), "no field is left open"
    assert max(len(one.split()) for one in questions) > 60


def test_too_little_written_for_any_answer_is_no_material(target: WritingTarget, tokenizer: Tokenizer) -> None:
    assert len(write(target, tokenizer, settings(tokens=8, steps=1))) == 0


class Watcher(Nobody):
    """Keeps what is reported: how far the writing is, and the numbers of each note."""

    def __init__(self) -> None:
        self.done: list[float] = []
        self.totals: set[float | None] = set()
        self.notes: list[list[str]] = []

    def __call__(self, what: str, done: float, of: float | None, note: str = "") -> None:
        self.done.append(done)
        self.totals.add(of)
        self.notes.append(re.findall(r"\d+", note.replace(",", "")))


@pytest.mark.slow
def test_writing_stops_at_the_tokens_asked_for_and_reports_on_the_way(
    target: WritingTarget, tokenizer: Tokenizer
) -> None:
    watcher = Watcher()
    write(target, tokenizer, settings(tokens=1000), watcher)
    assert watcher.done == [256, 512, 768, 1024] and watcher.totals == {1000}
    finished = [int(conversations) for _, conversations, _ in watcher.notes]
    assert finished == sorted(finished) and all(int(speed) > 0 for _, _, speed in watcher.notes)


@pytest.mark.slow
def test_writing_stops_when_the_time_is_over(target: WritingTarget, tokenizer: Tokenizer) -> None:
    watcher = Watcher()
    write(target, tokenizer, settings(tokens=None, seconds=0.3, steps=4), watcher)
    assert watcher.done[-1] >= 0.3 and all(0 < seconds < 0.3 for seconds in watcher.done[:-1])


@pytest.mark.slow
def test_rows_that_do_not_fit_are_halved_and_reported(
    target: WritingTarget, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = writer.Texts

    def small(decoder: Decoder, rows: int, length: int) -> object:
        if rows > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(decoder, rows, length)

    monkeypatch.setattr(writer, "Texts", small)
    material = write(target, tokenizer, settings(rows=16))
    assert material.about["settings"]["rows"] == 4
    assert "16 rows of 120 tokens do not fit in memory; trying 8." in caplog.text


@pytest.mark.slow
def test_memory_for_no_row_at_all_is_said(
    target: WritingTarget, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*given: object) -> object:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")

    monkeypatch.setattr(writer, "Texts", none)
    with pytest.raises(ModelError, match="no memory for even one row"):
        write(target, tokenizer, settings(rows=2))


def test_a_text_that_is_handed_over_is_longer_than_a_question(target: WritingTarget, tokenizer: Tokenizer) -> None:
    script = Script.of(tokenizer, target.arch, settings(length=512, question_tokens=40))
    handed = [
        limits
        for opening, limits in zip(script.openings, script.limits, strict=True)
        if "Summarize:" in tokenizer.decode(opening)
    ]
    asked = [
        limits
        for opening, limits in zip(script.openings, script.limits, strict=True)
        if "A farmer" in tokenizer.decode(opening)
    ]
    assert set(handed) == {(LEAST_TEXT, 307)} and set(asked) == {(LEAST_QUESTION, 40)}


def test_without_a_chat_template_the_text_is_plain_and_that_is_said_once(
    target: WritingTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Tokenizer.from_folder(save(byte_level(), tmp_path, chat_template=None))
    script = Script.of(plain, target.arch, settings(length=256))
    texts = [plain.decode(opening) for opening in script.openings]
    assert "user:" in texts and any(text.startswith("system: You ") and "\nuser:" in text for text in texts)
    assert plain.decode(script.bridge) == "\nassistant:"
    newline = plain.encode("\n", add_special=False)[0]
    assert newline in script.question_ends and newline not in script.answer_ends
    assert caplog.text.count("no chat template") == 1


@pytest.mark.slow
def test_without_an_end_token_answers_fill_their_length(
    target: WritingTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endless = Tokenizer.from_folder(
        save(byte_level(), tmp_path, eos_token=None, chat_template="[{{ messages[-1].content }}]\n")
    )
    material = write(WritingTarget(replace(target.arch, eos_ids=()), target.weights), endless, settings(length=64))
    assert "names no token that ends a turn" in caplog.text
    assert int(material.lengths.max()) == 64 and int((material.lengths == 64).sum()) >= len(material) - 8


@pytest.mark.slow
@torch.no_grad()
def test_a_question_that_nothing_closes_goes_on_to_its_limit(target: WritingTarget, tokenizer: Tokenizer) -> None:
    script = replace(Script.of(tokenizer, target.arch, settings()), question_ends=())
    assert lines(Desk(target, script, settings()), 8)


def test_ends_of_lines_that_the_model_does_not_know_close_no_question(tmp_path: Path) -> None:
    plain = Tokenizer.from_folder(save(byte_level(), tmp_path, chat_template=None))
    first = plain.encode("a", add_special=False)[0]
    highest = max(token for token in plain.vocabulary() if "\n" in plain.decode([token]))
    assert highest in openings._question_ends(plain, (), first, highest + 1)
    assert highest not in openings._question_ends(plain, (), first, highest)


def test_a_template_without_a_system_role_is_used_without(target: WritingTarget, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}[assistant]"
    )
    strict = Tokenizer.from_folder(save(byte_level(), tmp_path, chat_template=template))
    script = Script.of(strict, target.arch, settings())
    assert all(strict.decode(opening).startswith("[user]") for opening in script.openings)


def test_room_for_no_answer_is_refused(target: WritingTarget, tokenizer: Tokenizer) -> None:
    with pytest.raises(BadParameter, match="length is 16; the openings"):
        write(target, tokenizer, settings(length=16))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"tokens": None}, "neither seconds nor tokens"),
        ({"rows": 0}, "rows is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"min_p": 1.5}, "min_p is 1.5"),
    ],
)
def test_impossible_settings_are_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadParameter, match=sentence):
        settings(**given)


@torch.no_grad()
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_a_restarted_row_scores_as_a_new_sequence_in_every_family(kind: str, tmp_path: Path) -> None:
    target = load(saved(tiny(kind), tmp_path), ends=())
    rows = Texts(Decoder(target.arch, target.weights, 24), 2, 24)
    long, short = some_tokens(20), some_tokens(8, seed=2)
    expected = {"long": logits_of(target, long), "short": logits_of(target, short)}
    for at, token in enumerate(long):
        position = at if at < 12 else at - 12  # the second row begins anew after twelve tokens
        found = rows.scores(torch.tensor([token, (long[:12] + short)[at]]), torch.tensor([at, position]))
        torch.testing.assert_close(found[0], expected["long"][at], rtol=0, atol=1e-9)
        torch.testing.assert_close(found[1], expected["long" if at < 12 else "short"][position], rtol=0, atol=1e-9)


@pytest.mark.gpu
@torch.no_grad()
def test_a_captured_step_writes_what_an_eager_one_does(
    pair: tuple[str, str], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ("Name three rivers.", "What is 7 times 8?")
    target, wanted = load(pair[0], "cuda", torch.float32), settings(rows=32, tokens=32 * 32 * 8, prompts=prompts)
    captured, again = (write(target, tokenizer, wanted) for _ in range(2))
    assert same(captured, again)
    monkeypatch.setattr(Desk, "_captured", lambda desk: desk._once)
    heads = [tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    # Greedy answers to given prompts depend on no noise, which a captured step may number otherwise.
    eager = [
        line for row in lines(desk_of(target, tokenizer, wanted), 8)[::2] for line in row if line[0][: line[1]] in heads
    ]
    written = [(captured.sequence(at), int(captured.answers[at])) for at in range(len(captured))]
    assert eager and all(line in written for line in eager)


def test_long_writing_is_kept_in_parts_of_equal_size() -> None:
    parts = WriterSettings(seconds=300.0, seed=2).slices()
    assert [part.seconds for part in parts] == [100.0] * 3
    assert [part.seed for part in parts] == [2000, 2001, 2002]
    assert [len(WriterSettings(tokens=tokens).slices()) for tokens in (1000, 50_000_000)] == [1, 3]
    assert len(WriterSettings(seconds=1e12).slices()) == 1000  # the seed after the last is the next run's first
