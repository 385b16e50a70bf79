"""What was learned of a pair is kept from process to process, and only what is sound is believed."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
from filelock import FileLock

from specbranch import LLM, SamplingParams
from specbranch.config import SpeculativeConfig
from specbranch.core.cost_curves import Recent
from specbranch.core.costs import MeasuredCosts
from specbranch.core.draft_evaluation import ClassCounts, DraftEvaluation
from specbranch.core.experience import EVALUATED_CLASS, MOST_SHIFT, Insight
from specbranch.core.trees import CLASSES
from specbranch.experiences import MOST_NEWS, ExperienceFile, Experiences, LearnedNews, experience_folder

HERE = {"target": "a", "threads": 2}
CONFIG = SpeculativeConfig(method="specbranch")
PRIOR = DraftEvaluation(ClassCounts((500,) * CLASSES, (50,) * CLASSES), text="a text of 8,500 tokens")
OTHER_LOADING = {"runner": "transformers", "weights": "int8", "draft_weights": "int8"}


@pytest.fixture(autouse=True)
def learned_here(nothing_learned_before: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBRANCH_EXPERIENCE", str(tmp_path / "experience"))


def learned(file: ExperienceFile, *, first: int = 3, seconds: float = 0.02) -> Experiences:
    """Experiences that have learned a little."""
    made = Experiences(MeasuredCosts(), True, file)
    assert made.learned is not None
    made.learned.target.set(4, seconds)
    made.learned.step.set(1, 0.004)
    made.learned.setup = 0.003
    made.learned.hosts["plain", 1] = recent = Recent()
    recent.add(0.001)
    made.learned.slow_downs["draft"].add(0.0005)
    for _ in range(first):
        made.of(CONFIG).insight.learn("first", 2, True)
    made.of(CONFIG).insight.learn("shift", 1, 0.5)
    return made


def test_the_next_process_knows_what_the_last_one_learned(tmp_path: Path) -> None:
    file = ExperienceFile(tmp_path, HERE)
    learned(file).write(last=True)
    later = Experiences(MeasuredCosts(), True, file)
    costs = later.learned
    assert costs is not None and costs.knows_target and costs.target_seconds(4) == 0.02
    assert (costs.draft_seconds(1), costs.draft_setup, costs.host, costs.draft_slow_down) == (0.004, 0.003, 0.001, 5e-4)
    usual, insight = Insight(), later.of(CONFIG).insight
    assert insight.first.seen[2] == usual.first.seen[2] + 3 and insight.shifts[1] != usual.shifts[1]
    other = later.of(SpeculativeConfig(method="tree")).insight
    assert other.first.seen == usual.first.seen, "another way to decode has its own"


def target_points(file: ExperienceFile) -> object:
    costs = file.read().costs
    return costs and costs["target"]


def test_what_was_taken_up_is_not_added_again(tmp_path: Path) -> None:
    file = ExperienceFile(tmp_path, HERE)
    for _ in range(3):
        learned(file).write(last=True)
    found = file.read().insights[next(iter(file.read().insights))]
    assert found.first.seen[2] == Insight().first.seen[2] + 9
    Experiences(MeasuredCosts(), True, file).write(last=True)
    assert file.read().insights[next(iter(file.read().insights))].first.seen == found.first.seen


def with_prior(file: ExperienceFile | None, prior: DraftEvaluation | None = PRIOR) -> Experiences:
    return Experiences(MeasuredCosts(), True, file, prior)


def test_a_new_configuration_starts_from_the_drafts_evaluation() -> None:
    usual, insight = Insight(), with_prior(None).of(CONFIG).insight
    assert insight.chances().first[8] == pytest.approx(0.12, abs=0.01) and usual.chances().first[8] == 0.6
    assert insight.chances().other == usual.chances().other, "it met none of these"


def test_the_second_start_has_both_the_evaluation_and_what_was_learned(tmp_path: Path) -> None:
    file = ExperienceFile(tmp_path, HERE)
    first = with_prior(file)
    insight = first.of(CONFIG).insight
    for _ in range(7):
        insight.learn("first", 8, True)
    assert first.learned is not None
    first.learned.target.set(4, 0.02)
    first.write(last=True)
    later = with_prior(file).of(CONFIG).insight
    for name in ("first", "other", "cover", "hits", "looked"):
        kept, learned = getattr(later, name), getattr(insight, name)
        assert (kept.seen, kept.met) == (learned.seen, learned.met) and kept.true == pytest.approx(learned.true)
    assert later.first.seen[8] == EVALUATED_CLASS + 7, "the evaluation counts once, and so does each verdict"
    assert later.first.right == insight.first.right and sum(later.first.right) > 7


def test_what_the_file_holds_wins_over_an_evaluation(tmp_path: Path) -> None:
    file = ExperienceFile(tmp_path, HERE)
    learned(file, first=30).write(last=True)
    insight = with_prior(file).of(CONFIG).insight
    assert insight.first.seen[2] == Insight().first.seen[2] + 30
    assert insight.chances().first[8] == Insight().chances().first[8]
    other = with_prior(file).of(SpeculativeConfig(method="tree")).insight
    assert other.first.seen[2] == EVALUATED_CLASS, "what the file does not know starts from the evaluation"


def test_news_of_a_process_without_the_evaluation_join_what_the_first_one_wrote(tmp_path: Path) -> None:
    file = ExperienceFile(tmp_path, HERE)
    one, other = with_prior(file), with_prior(file, None)
    for made in (one, other):
        assert made.learned is not None
        made.learned.target.set(4, 0.02)
        made.of(CONFIG).insight.learn("first", 8, True)
        made.write(last=True)
    assert with_prior(file).of(CONFIG).insight.first.seen[8] == EVALUATED_CLASS + 2


def test_an_llm_starts_from_the_evaluation_in_its_drafts_folder(
    pair: tuple[str, str], tiny_draft: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft = shutil.copytree(tiny_draft, tmp_path / "draft", ignore=shutil.ignore_patterns("training"))
    usual = Insight().chances()
    options = {"keep_experience": False}
    with LLM(pair[0], str(draft), device="cpu", options=options) as llm:
        found = llm.decoding.experience.insight
        assert found.chances().first != usual.first
        assert llm.modelled("c10").decoding.experience.insight.chances() == found.chances()
    (draft / "evaluation.json").write_text('{"format": 1}')
    with caplog.at_level(logging.WARNING), LLM(pair[0], str(draft), device="cpu", options=options) as llm:
        assert llm.decoding.experience.insight.chances() == usual
    assert "evaluation.json is of another version" in caplog.text and "starts with built-in figures" in caplog.text


def _learn_for_a_while(folder: str, times: int) -> None:
    file = ExperienceFile(Path(folder), HERE)
    for _ in range(times):
        learned(file, first=1).write(last=True)


def test_processes_at_work_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_learn_for_a_while, args=(str(tmp_path), 40)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0]
    known = ExperienceFile(tmp_path, HERE).read()
    assert next(iter(known.insights.values())).first.seen[2] == Insight().first.seen[2] + 80
    assert not list(tmp_path.glob("*.new"))


COVER, HOST, SLOW_DOWN = '"cover": [[20.0], [16.0], [0.0], [0.0]]', '["plain", 1, [0.001]]', '"draft": [0.0005]'
Damage = Callable[[str], str]


def changed(sound: str, damaged: str) -> Damage:
    return lambda text: text.replace(sound, damaged, 1)


DAMAGE: dict[str, Damage] = {
    "cut short": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no object": lambda text: "[1, 2]",
    "nested without end": lambda text: "[" * 100_000,
    "another pair": changed('"target": "a"', '"target": "b"'),
    "another format": changed('"format": 7', '"format": 99'),
    "the format before": changed('"format": 7', '"format": 6'),
    "a time that is no number": changed("0.02", '"soon"'),
    "a time that is true": changed("0.02", "true"),
    "no time at all": changed("0.02", "0.0"),
    "a time below zero": changed("0.02", "-0.02"),
    "a time far too large": changed("0.02", "1" + "0" * 400),
    "a time not finite": changed("0.02", "NaN"),
    "an endless time": changed("0.02", "1e300"),
    "an infinite time": changed("0.02", "Infinity"),
    "a step that takes no time": changed("0.004", "0"),
    "no points of the draft": changed('"step"', '"steps"'),
    "rows below zero": changed('"4": 0.02', '"-5": 0.02'),
    "no rows": changed('"4": 0.02', '"0": 0.02'),
    "rows that are no number": changed('"4": 0.02', '"four": 0.02'),
    "half a row": changed('"4": 0.02', '"4.5": 0.02'),
    "rows without end": changed('"4": 0.02', '"4000000000": 0.02'),
    "a setup below zero": changed('"setup": 0.003', '"setup": -0.003'),
    "a setup of days": changed('"setup": 0.003', '"setup": 1e6'),
    "no setup": changed('"setup": 0.003', '"setup": null'),
    "an unknown kind of run": changed(HOST, '["plainly", 1, [0.001]]'),
    "a kind that is no word": changed(HOST, "[[], 1, [0.001]]"),
    "a gap of days below zero": changed(HOST, '["plain", 1, [-1e6]]'),
    "a gap of days": changed(HOST, '["plain", 1, [1e6]]'),
    "a gap that is no number": changed(HOST, '["plain", 1, ["0.001"]]'),
    "gaps of no sessions": changed(HOST, '["plain", 0, [0.001]]'),
    "gaps of sessions without end": changed(HOST, '["plain", 99, [0.001]]'),
    "gaps of half a session": changed(HOST, '["plain", 1.5, [0.001]]'),
    "a slow-down not finite": changed(SLOW_DOWN, '"draft": [NaN]'),
    "a slow-down of days": changed(SLOW_DOWN, '"draft": [-1e6]'),
    "no slow-down": changed(SLOW_DOWN, '"drafts": [0.0005]'),
    "a share above 1": changed(COVER, '"cover": [[20.0], [26.0], [0.0], [0.0]]'),
    "a tally without end": changed(COVER, '"cover": [[1e308], [1e308], [0.0], [0.0]]'),
    "a tally beyond its memory": changed(COVER, '"cover": [[205], [16.0], [0.0], [0.0]]'),
    "a tally below zero": changed(COVER, '"cover": [[20.0], [-1], [0.0], [0.0]]'),
    "a tally of nothing": changed(COVER, '"cover": [[0.0], [0.0], [0.0], [0.0]]'),
    "too few": changed(COVER, '"cover": [[], [], [], []]'),
    "no frequencies": changed(COVER, '"cover": [[20.0], [16.0]]'),
    "a frequency below zero": changed(COVER, '"cover": [[20.0], [16.0], [-1.0], [-1.0]]'),
    "frequencies without end": changed(COVER, '"cover": [[20.0], [16.0], [1e9], [0.0]]'),
    "more right than met": changed(COVER, '"cover": [[20.0], [16.0], [1.0], [2.0]]'),
    "no hits": changed('"hits"', '"misses"'),
    "shifts without end": changed('"shifts": [0.0', '"shifts": [1e308'),
    "shifts that are no numbers": changed('"shifts": [0.0', '"shifts": [true'),
    "too many shifts": changed('"shifts": [0.0', '"shifts": [0.0, 0.0'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_foreign_file_is_ignored_with_a_sentence(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = ExperienceFile(tmp_path, HERE)
    learned(file).write(last=True)
    damaged = DAMAGE[damage](sound := file.path.read_text())
    assert damaged != sound
    file.path.write_text(damaged)
    with caplog.at_level(logging.WARNING):
        known = file.read()
    assert not known.insights and known.costs is None
    assert f"{file.path} is ignored" in caplog.text and "learned anew" in caplog.text
    learned(file).write(last=True)
    assert target_points(file) == {"4": 0.02}, "it is written anew"


def test_a_folder_that_cannot_be_written_is_said_once_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    made = learned(ExperienceFile(tmp_path / "file" / "below", HERE))
    with caplog.at_level(logging.WARNING):
        made.write(last=True)
        made.of(CONFIG).insight.learn("first", 2, True)
        made.write(last=True)
    assert caplog.text.count("What was learned is not kept") == 1


def finishes(what: Callable[[], object]) -> bool:
    """Whether something ends; a hang is a failure."""
    thread = Thread(target=what, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


def test_nobody_waits_for_a_lock_while_decoding_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbranch.experiences.WRITE_WAIT", 60.0)
    monkeypatch.setattr("specbranch.experiences.WRITE_PAUSE", 0.0)
    file = ExperienceFile(tmp_path, HERE)
    made = learned(file)
    with FileLock(file.path.with_suffix(".lock")):
        assert finishes(made.write), "it waits for the lock"
        made.of(CONFIG).insight.learn("first", 2, True)
        assert finishes(made.write)
        assert not file.path.exists()
    made.write(last=True)
    assert next(iter(file.read().insights.values())).first.seen[2] == Insight().first.seen[2] + 4


def test_what_was_learned_is_in_the_file_before_anything_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a process that is killed loses its last seconds only."""
    monkeypatch.setattr("specbranch.experiences.WRITE_PAUSE", 0.0)
    file = ExperienceFile(tmp_path, HERE)
    made = learned(file)
    made.write()
    deadline = time.monotonic() + 20
    while not file.path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert target_points(file) == {"4": 0.02}


def test_closing_waits_for_a_lock_for_a_while_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbranch.experiences.WRITE_WAIT", 0.05)
    file = ExperienceFile(tmp_path, HERE)
    made = learned(file)
    with FileLock(file.path.with_suffix(".lock")):
        assert finishes(lambda: made.write(last=True))
    assert not file.path.exists()
    made.write(last=True)
    assert next(iter(file.read().insights.values())).first.seen[2] == Insight().first.seen[2] + 3


def test_an_llm_answers_while_the_lock_is_held(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbranch.experiences.WRITE_WAIT", 60.0)
    monkeypatch.setattr("specbranch.experiences.WRITE_PAUSE", 0.0)
    with LLM(*pair, method="specbranch", device="cpu") as llm:
        writer = llm.core.experiences._writer
        assert writer is not None
        lock = writer._file.path.with_suffix(".lock")
        lock.parent.mkdir(parents=True)
        with FileLock(lock):
            assert finishes(lambda: llm.generate("one two three", SamplingParams(max_tokens=4)))
    assert len(kept(tmp_path / "experience")) == 1


def test_news_that_wait_for_a_lock_are_bounded() -> None:
    many = LearnedNews({"setup": 0.1}, {"a": [("first", 0, 1.0)] * MOST_NEWS})
    both = many.then(LearnedNews({"setup": 0.2}, {"a": [("first", 1, 0.0)], "b": [("first", 1, 1.0)]}))
    assert len(both.insights["a"]) == MOST_NEWS and len(both.insights["b"]) == 1
    assert both.costs == {"setup": 0.2} and both.insights["a"][-1] == ("first", 1, 0.0), "the latest count"
    assert both.then(LearnedNews()).costs == {"setup": 0.2}


def test_what_cannot_be_is_not_written(tmp_path: Path) -> None:
    """A process that was stopped for hours in a round must not make its file unreadable."""
    file = ExperienceFile(tmp_path, HERE)
    made = learned(file)
    made.write(last=True)
    assert made.learned is not None
    made.learned.target.set(4, 1e9)
    for _ in range(2000):
        made.of(CONFIG).insight.learn("shift", 1, 1.0)
    made.write(last=True)
    assert target_points(file) == {"4": 0.02}
    (insight,) = file.read().insights.values()
    assert insight.shifts[1] == MOST_SHIFT
    assert all(math.isfinite(math.exp(shift)) for shift in insight.shifts)


def test_the_folder_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECBRANCH_EXPERIENCE", "off")
    assert experience_folder() is None
    monkeypatch.delenv("SPECBRANCH_EXPERIENCE")
    monkeypatch.setenv("SPECBRANCH_CACHE", str(tmp_path))
    assert experience_folder() == tmp_path / "experience"


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def test_an_llm_keeps_what_it_learns_and_another_takes_it_up(pair: tuple[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "experience"
    with LLM(*pair, method="specbranch", device="cpu") as llm:
        assert llm.core.experiences.learned is not None and llm.core.experiences.learned.knows_target, (
            "it was timed at load"
        )
        first = llm.generate("one two three", SamplingParams(max_tokens=24))
        llm.decoding.experience.insight.learn("first", 2, True)  # in case that the draft was never worth asking
    assert len(kept(folder)) == 1
    values = json.loads(kept(folder)[0].read_text())
    assert values["circumstances"]["draft"] and values["costs"]["target"] and values["insights"]
    with LLM(*pair, method="specbranch", device="cpu") as llm:
        assert llm.decoding.experience.insight.first.seen[2] > Insight().first.seen[2]
        assert llm.core.experiences.learned is not None and llm.core.experiences.learned.knows_draft
        assert llm.generate("one two three", SamplingParams(max_tokens=24)).token_ids == first.token_ids


@pytest.mark.slow
def test_other_circumstances_have_a_file_of_their_own(pair: tuple[str, str], tmp_path: Path) -> None:
    loading = [{"options": {name: value}} for name, value in OTHER_LOADING.items()]
    for settings in ({}, {"dtype": "float64"}, {"draft": None, "method": "auto"}, *loading):
        models = {"target": pair[0], "draft": pair[1], "method": "specbranch", "device": "cpu"} | settings
        with LLM(**models) as llm:  # type: ignore[arg-type]
            llm.generate("one two three", SamplingParams(max_tokens=8))
    assert len(kept(tmp_path / "experience")) == 6


@pytest.mark.parametrize("settings", [{"keep_experience": False}, {"clock": "c10"}])
def test_nothing_is_kept_where_it_is_not_wanted_or_time_is_modelled(
    pair: tuple[str, str], tmp_path: Path, settings: dict[str, object]
) -> None:
    with LLM(*pair, method="specbranch", device="cpu", options=settings) as llm:
        llm.generate("one two three", SamplingParams(max_tokens=24))
    assert not (tmp_path / "experience").exists()
