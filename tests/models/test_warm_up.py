"""A warm-up captures every kind of step that a method meets, and nothing is captured in the middle of an answer."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recording_graphs import RecordingRunner, recording
from specbranch.config import SamplingParams, SpeculativeConfig
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.pages import Pool
from specbranch.core.request import Request
from specbranch.core.rounds import given
from specbranch.core.runner import TimesForwards
from specbranch.core.session import Session
from specbranch.core.warm_up import ForwardSizes, WarmsUp, not_late
from specbranch.exec.drafter import Drafter
from specbranch.exec.forward_sizes import draft_sizes, target_sizes
from specbranch.exec.serial import Serial
from specbranch.exec.verifier import Verifier
from specbranch.models.cache.kv_memory import Table
from specbranch.models.forward.step_rows import Rows
from specbranch.models.gpu.kinds_file import KindsFile
from specbranch.models.gpu.layout import MOST_TOTAL_ROWS, SMALLEST_BUCKET, Bucket, bucket_of, chunk_step_rows
from specbranch.models.gpu.step import StepKind, serves
from specbranch.models.gpu.warm_up import OUTSIDE_GRAPHS, StepLimits, kinds_of, needed, run_request
from specbranch.models.loading import load_native
from tiny_models import saved, some_tokens, tiny
from toybench import PROFILE, SHARED, Timeless, run_out

pytestmark = pytest.mark.usefixtures("one_thread")

ALL_SIZES = (1, 2, 3, 5, 8, 16, 33, 64)
SHAPINGS = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.4},
    {"temperature": 0.0, "logprobs": 2},
)
QUICK = {("specbranch", 3), ("speculative", 4)}
Pair = tuple[RecordingRunner, RecordingRunner]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBRANCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    model = tiny("llama")
    saved(model, folder / "target")
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * parameter.data.std() * 0.12)
    return folder / "target", saved(model, folder / "draft")


@pytest.fixture
def pair(folders: tuple[Path, Path]) -> Pair:
    target, draft = (recording(load_native(path, context_length=256).decoder, 256) for path in folders)
    return target, draft


def config_of(method: str) -> SpeculativeConfig:
    return SpeculativeConfig(method=method, num_speculative_tokens=4, stop_below=0.2)


def warmed(pair: Pair, method: str, sessions: int) -> Serial:
    """Warm both models up, as an engine does."""
    target, draft = pair
    config = config_of(method)
    target.warm_up(target_sizes(METHODS[method], config, sessions))
    if METHODS[method].uses_draft:
        draft.warm_up(draft_sizes(METHODS[method], config, sessions))
        target.warm_up_receiver(draft)
    return Serial(Verifier(target), Drafter(draft))


def decode(executor: Serial, method: str, sessions: int, rule: str = "match", tokens: int = 10) -> list[Session]:
    """Decode several requests at once: they begin one after the other, and end after different numbers of tokens."""
    loop, made, profile = Loop(executor), list[Session](), PROFILE if sessions == 1 else SHARED
    for number in range(sessions):
        prompt = some_tokens(3 + number % 29, seed=number % 7)
        params = SamplingParams(**SHAPINGS[number % len(SHAPINGS)], max_tokens=tokens - number % 5, ignore_eos=True)
        request = Request(params, seed=number, prompt_length=len(prompt), rule=rule)  # type: ignore[arg-type]
        session = Session(number, prompt, request, 200)
        loop.join(session, METHODS[method].start(session, config_of(method), Timeless(profile)))
        made.append(session)
        if number % 11 == 0:
            loop.step()
    run_out(loop)
    assert all(session.finished == "length" for session in made)
    return made


def bucket(rows: int, groups: int) -> Bucket:
    return SMALLEST_BUCKET._replace(rows=rows, groups=groups)


def run_padding(runner: RecordingRunner, kind: StepKind) -> None:
    with runner.graphs._on_padding(kind):
        runner.graphs.run_brought(*kind)


def late(pair: Pair) -> int:
    return sum(runner.late_captures for runner in pair)


def each_method_and_size() -> Iterator[object]:
    for method in METHODS:
        for sessions in ALL_SIZES if method in ("autoregressive", "specbranch") else (1, 4, 16):
            quick = (method, sessions) in QUICK
            yield pytest.param(method, sessions, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize("method, sessions", list(each_method_and_size()))
def test_nothing_is_captured_after_the_warm_up(method: str, sessions: int, pair: Pair) -> None:
    executor = warmed(pair, method, sessions)
    captured = [len(runner.graphs.captured) for runner in pair]
    decode(executor, method, sessions)
    decode(executor, method, 1, tokens=30)
    assert late(pair) == 0
    assert [len(runner.graphs.captured) for runner in pair] == captured
    assert pair[0].graphs.met


@pytest.mark.parametrize("method", ["speculative", "specbranch"])
def test_nothing_is_captured_by_the_ratio_rule(method: str, pair: Pair) -> None:
    executor = warmed(pair, method, 4)
    decode(executor, method, 4, rule="ratio")
    assert late(pair) == 0


class NoForecast:
    def signal(self, said: tuple[float, ...] | None, position: int) -> None:
        return None


@pytest.mark.slow
def test_nothing_is_captured_when_steps_return_hidden_states(pair: Pair) -> None:
    target, draft = pair
    config = SpeculativeConfig(method="specbranch", policy="paper", num_speculative_tokens=4)
    method = METHODS["specbranch"]
    target.probe(2, lambda states: states[:, :3])
    target.warm_up(target_sizes(method, config, 3, hidden=True))
    draft.warm_up(draft_sizes(method, config, 3))
    loop = Loop(Serial(Verifier(target, NoForecast()), Drafter(draft)))
    for number in range(3):
        prompt = some_tokens(9, seed=number)
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        request = Request(params, number, len(prompt), wants_forecast=number < 2)
        session = Session(number, prompt, request, 200)
        loop.join(session, method.start(session, config, Timeless(SHARED)))
    run_out(loop)
    assert late(pair) == 0
    assert {kind[1] for kind in target.graphs.captured} == {2}  # they serve steps without hidden states, too


def test_nothing_is_captured_when_a_text_is_scored(pair: Pair) -> None:
    executor, prompt, text = warmed(pair, "autoregressive", 1), some_tokens(1), some_tokens(70, seed=3)
    request = Request(SamplingParams(max_tokens=70, ignore_eos=True, logprobs=0), 0, 1)
    session = Session(0, prompt, request, 200)
    loop = Loop(executor)
    loop.join(session, given(session, text, lambda: iter(())))  # type: ignore[arg-type, return-value]
    run_out(loop)
    assert late(pair) == 0
    assert max(kind[0].rows for kind in pair[0].graphs.met) == 32


@pytest.mark.slow
def test_nothing_is_captured_when_requests_are_preempted_and_resumed(pair: Pair) -> None:
    executor = warmed(pair, "autoregressive", 4)
    loop, made = Loop(executor), list[Session]()
    for number in range(4):
        prompt = some_tokens(5, seed=number)
        request = Request(SamplingParams(max_tokens=60, ignore_eos=True), number, len(prompt))
        made.append(Session(number, prompt, request, 200))
        loop.join(made[-1], METHODS["autoregressive"].start(made[-1], config_of("autoregressive"), Timeless(PROFILE)))
    for tokens in (12, 45):
        while len(made[0].tokens) < tokens:
            loop.step()
        loop.preempt(made[0])
        loop.step()
        loop.resume(made[0])
    run_out(loop)
    assert late(pair) == 0


@pytest.mark.parametrize("method", ["autoregressive", "tree"])
def test_a_kind_that_is_left_out_is_counted_as_late(method: str, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from specbranch.models.gpu import warm_up

    complete = warm_up.kinds_of

    def with_a_hole(*given: object) -> list[StepKind]:
        return [kind for kind in complete(*given) if kind[0][:2] != (4, 4)]  # type: ignore[arg-type]

    monkeypatch.setattr(warm_up, "kinds_of", with_a_hole)
    decode(warmed(pair, method, 3), method, 3)
    assert late(pair) > 0


def test_without_a_warm_up_every_kind_is_late(pair: Pair) -> None:
    decode(Serial(Verifier(pair[0]), Drafter(pair[1])), "autoregressive", 3)
    assert late(pair) == len(pair[0].graphs.captured) > 0


def test_captures_can_be_left_out_of_the_count(pair: Pair) -> None:
    with not_late(pair):
        decode(Serial(Verifier(pair[0]), Drafter(pair[1])), "autoregressive", 3)
    assert late(pair) == 0 < len(pair[0].graphs.captured)


def test_graphs_of_a_warm_up_are_never_dropped(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbranch.models.gpu.step.MOST_GRAPHS", 1)
    target = pair[0]
    executor = warmed(pair, "autoregressive", 4)
    captured = list(target.graphs.captured)
    others = [(bucket(rows, rows), 0, 0, False) for rows in (128, 256, 512)]  # larger than the warm-up's
    for kind in others:
        run_padding(target, kind)
    decode(executor, "autoregressive", 4)
    assert target.graphs.captured == [*captured, *others]
    assert len(target.graphs._graphs) == 1


def test_a_warm_up_that_does_not_fit_captures_fewer_kinds_and_says_so(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("recording_graphs.RecordingGraphs.full_after", 3)
    executor = warmed(pair, "autoregressive", 4)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1 and "does not hold all CUDA graphs" in said[0]
    assert len(pair[0].step_times()) == 2  # the last one was given up, so that some memory is left
    monkeypatch.setattr("recording_graphs.RecordingGraphs.full_after", None)
    texts = [session.tokens for session in decode(executor, "autoregressive", 4)]
    assert late(pair) > 0
    assert [session.tokens for session in decode(executor, "autoregressive", 4)] == texts


def test_the_log_says_where_the_time_of_a_warm_up_goes(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="specbranch"):
        warmed(pair, "autoregressive", 4)
    (said,) = [record.getMessage() for record in caplog.records if "graphs are ready" in record.getMessage()]
    assert all(f"{what} 0.0 s" in said for what in ("compiled", "run", "captured"))


def test_an_interrupted_warm_up_leaves_the_model_as_it_was(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    target = pair[0]
    real, count = target.graphs._captured, 0

    def interrupted(kind: StepKind) -> object:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return real(kind)

    with monkeypatch.context() as patch:
        patch.setattr(target.graphs, "_captured", interrupted)
        with pytest.raises(KeyboardInterrupt):
            warmed(pair, "autoregressive", 4)
    executor = warmed(pair, "autoregressive", 4)
    decode(executor, "autoregressive", 4)
    assert late(pair) == 0
    target.check()


def test_a_graph_with_more_results_serves_a_kind_with_fewer() -> None:
    four = bucket(4, 1)
    assert serves((four, 2, 8, False), (four, 2, 1, False))
    assert serves((four, 2, 8, False), (four, 0, 0, False))
    assert not serves((four, 0, 8, False), (four, 2, 1, False))
    assert not serves((four, 0, 1, False), (four, 0, 8, False))
    assert not serves((four, 0, 8, True), (four, 0, 8, False))
    assert not serves((bucket(16, 1), 0, 8, False), (four, 0, 8, False))
    kinds: list[StepKind] = [(four, 0, 1, False), (four, 0, 8, False), (four, 0, 8, True)]
    assert needed(kinds) == kinds[1:]


@pytest.mark.parametrize("sessions, candidates", [(1, False), (16, False), (64, False), (64, True)])
def test_steps_with_rows_of_prompts_are_among_the_kinds(sessions: int, candidates: bool) -> None:
    sizes = ForwardSizes("specbranch", sessions, 32, min(32 * sessions, 512), candidates)
    limits = StepLimits(SMALLEST_BUCKET, 512, chunks=True)
    kinds, rng = set(kinds_of(sizes, limits)), random.Random(sessions)
    most = 0 if candidates else 1 if sessions == 1 else sizes.together  # sampled rows beside those of prompts
    for _ in range(300):
        rows = rng.randint(0, most)
        several = rng.randint(1, max(min(sessions, rows), 1))
        counts = (rows - several + 1, *(1,) * (several - 1))
        work = [Rows(Table(Pool(0)), (0,) * count, 0, 0, ()) for count in counts if count]
        chunk = rng.choice((1, 2, 17, 42, 300, rng.randint(1, 1500), MOST_TOTAL_ROWS - chunk_step_rows(rows)))
        assert (bucket_of(work, SMALLEST_BUCKET, chunk), 0, 1, False) in kinds
    without = kinds_of(sizes, StepLimits(SMALLEST_BUCKET, 512, chunks=False))
    assert {kind for kind in kinds if not kind[0].chunk} == set(without)


def test_a_forward_takes_the_time_of_the_next_larger_kind(pair: Pair) -> None:
    target, draft = pair
    assert isinstance(target, TimesForwards) and isinstance(target, WarmsUp)
    assert target.forward_seconds(1) is None
    warmed(pair, "autoregressive", 64)
    assert [target.forward_seconds(rows) for rows in (1, 2, 5, 64)] == [0.001, 0.004, 0.016, 0.064]
    assert target.forward_seconds(130) == pytest.approx(0.128 + 0.004)
    # beside prompt tokens 2 decode rows are padded to 16, and 17 to 64
    assert [target.forward_seconds(rows, 40) for rows in (2, 17)] == [0.064, pytest.approx(0.064 + 0.064)]
    assert [time.rows for time in target.step_times()] == sorted(time.rows for time in target.step_times())
    assert draft.step_times() == []


def test_kinds_that_an_earlier_process_met_are_captured_first(folders: tuple[Path, Path]) -> None:
    sizes = ForwardSizes("autoregressive", 1, 1, 1)
    first, second = (recording(load_native(folders[0], context_length=256).decoder, 256) for _ in range(2))
    first.warm_up(sizes)
    odd = bucket(64, 16), 0, 1, False
    run_padding(first, odd)
    first.save_kinds()
    second.warm_up(sizes)
    assert first.late_captures == 1
    assert second.graphs.captured[0] == odd
    assert set(first.graphs.captured) == set(second.graphs.captured)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": 1}', '{"key": {}, "kinds": [[1]]}', "kinds"])
def test_a_damaged_file_of_kinds_is_ignored_with_a_warning(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, kind = KindsFile({"device": "one"}, tmp_path), (bucket(4, 1), 0, 1, False)
    file.add([kind])
    assert file.read() == [kind]
    whole = json.loads(file.path.read_text())
    bad = json.dumps({**whole, "kinds": [[*bucket(4, 1), 0, 1, False], [*bucket(4, -1), 0, 1, False]]})
    file.path.write_text(bad if content == "kinds" else content)
    assert file.read() == []
    assert "ignored" in caplog.text
    file.add([kind])  # replaces it
    assert file.read() == [kind]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    KindsFile({}, tmp_path / "file").add([(bucket(4, 1), 0, 1, False)])
    assert "cannot be saved" in caplog.text


@pytest.mark.parametrize("request_", OUTSIDE_GRAPHS, ids=["shaped", "ratio", "masked"])
def test_what_no_graph_contains_runs_once_and_leaves_nothing(request_: Request, pair: Pair) -> None:
    for runner in pair:
        runner.prefix_cache = False
        free = runner.kv_slots_free
        run_request(runner, request_)
        runner.check()
        assert runner.kv_slots_free == free


def test_on_a_cpu_there_is_nothing_to_warm_up(folders: tuple[Path, Path]) -> None:
    from specbranch.models.gpu.runner import GpuRunner

    runner = GpuRunner(load_native(folders[0], context_length=256).decoder, 256)
    runner.warm_up(ForwardSizes("autoregressive", 64, 64, 64))
    assert (runner.late_captures, runner.step_times(), runner.forward_seconds(1)) == (0, [], None)
