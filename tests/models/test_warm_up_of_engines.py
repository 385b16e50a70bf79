"""An engine warms its models up at load, and says how often something was captured in the middle of an answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recording_graphs import RecordingRunner
from specbranch import LLM
from specbranch.config import LoadOptions
from specbranch.core.warm_up import ForwardSizes
from specbranch.errors import BadParameter
from specbranch.lab.bench.table import late_note
from specbranch.lab.measure.loaded_pair import load_pair
from specbranch.lab.measure.step_times import plain_times, step_table, warmed_up
from tiers import tiered

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["One", "Two birds", "Three of them sat on a wall", "Four"]
PARAMS = {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture
def on_graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Load models as on a GPU, but for the kernels and graphs."""
    monkeypatch.setenv("SPECBRANCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "specbranch.models.loading.native_runner",
        lambda decoder, context, tail, pages=None, cache_dtype=None: RecordingRunner(decoder, context, tail, pages),
    )


def captured(llm: LLM) -> int:
    runners = llm.core.models.runners
    assert all(isinstance(runner, RecordingRunner) for runner in runners)
    return sum(len(runner.graphs.captured) for runner in runners)  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", tiered(("autoregressive", "speculative", "specbranch"), "specbranch".__eq__))
def test_after_a_full_warm_up_nothing_is_captured(method: str, on_graphs: None, pair: tuple[str, str]) -> None:
    with LLM(*pair, method=method, options={"max_batch": 4}) as llm:
        ready = captured(llm)
        outputs = llm.generate(PROMPTS, PARAMS)
        llm.generate(PROMPTS[0], {"max_tokens": 6, "temperature": 0.8, "top_p": 0.9, "logprobs": 1})
        llm.score(PROMPTS[2])
        assert (llm.late_captures, captured(llm)) == (0, ready)
        assert llm.scheduler.snapshot().late_captures == 0
        assert [output.stats["late_captures"] for output in outputs] == [0] * len(PROMPTS)


def test_a_lazy_warm_up_captures_in_the_middle_of_answers_and_counts_it(on_graphs: None, pair: tuple[str, str]) -> None:
    with LLM(*pair, method="autoregressive", warm_up="lazy") as llm:
        assert (llm.late_captures, captured(llm)) == (0, 0)
        outputs = llm.generate(PROMPTS, PARAMS)
        assert llm.late_captures == captured(llm) == llm.scheduler.snapshot().late_captures > 0
        assert max(output.stats["late_captures"] for output in outputs) > 0


@pytest.mark.parametrize("warm_up", ["full", "lazy"])
def test_what_is_compiled_while_models_are_loaded_is_not_late(
    warm_up: Any, on_graphs: None, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[RecordingRunner] = []

    def compiling(decoder: Any, context: int, tail: int, pages: int | None = None, _: Any = None) -> RecordingRunner:
        for runner in made:  # the draft's load compiles, and Triton's hook counts for the target
            runner.late_captures += 4
        made.append(RecordingRunner(decoder, context, tail, pages))
        return made[-1]

    monkeypatch.setattr("specbranch.models.loading.native_runner", compiling)
    with LLM(*pair, warm_up=warm_up, options={"max_batch": 2}) as llm:
        assert len(made) == 2
        assert llm.late_captures == llm.scheduler.snapshot().late_captures == 0


def test_both_models_begin_to_compile_before_one_is_captured(
    on_graphs: None, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specbranch.models.gpu.step import Graphs

    calls: list[tuple[str, int]] = []
    for name in ("compile", "capture"):
        real = getattr(Graphs, name)

        def noted(graphs: Graphs, *given: Any, name: str = name, real: Any = real) -> Any:
            calls.append((name, id(graphs)))
            return real(graphs, *given)

        monkeypatch.setattr(Graphs, name, noted)
    with LLM(*pair, options={"max_batch": 2}) as llm:
        target, draft = (id(runner.graphs) for runner in llm.core.models.runners)  # type: ignore[attr-defined]
    assert calls == [("compile", target), ("compile", draft), ("capture", target), ("capture", draft)]


def test_an_interrupted_load_compiles_no_more(
    on_graphs: None, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specbranch.models.gpu.step import Graphs

    cancelled: list[Graphs] = []

    def begin(graphs: Graphs, *given: Any) -> None:
        graphs._compilation = SimpleNamespace(cancel=lambda: cancelled.append(graphs))  # type: ignore[assignment]

    def interrupted(*given: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Graphs, "compile", begin)
    monkeypatch.setattr(Graphs, "capture", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LLM(*pair, options={"max_batch": 2})
    assert len(cancelled) == 2


def test_both_give_the_same_text(on_graphs: None, pair: tuple[str, str]) -> None:
    texts = []
    for warm_up in ("full", "lazy"):
        with LLM(*pair, warm_up=warm_up, options={"max_batch": 4}) as llm:  # type: ignore[arg-type]
            texts.append([output.token_ids for output in llm.generate(PROMPTS, PARAMS)])
    assert texts[0] == texts[1]


def test_another_method_is_warmed_up_when_it_is_chosen(on_graphs: None, pair: tuple[str, str]) -> None:
    with LLM(*pair, method="autoregressive", options={"max_batch": 2}) as llm:
        ready = captured(llm)
        lookahead = llm.using("lookahead")
        assert captured(llm) > ready
        lookahead.generate(PROMPTS[:2], PARAMS)
        assert llm.late_captures == 0


def test_closing_saves_the_kinds_that_were_met(on_graphs: None, pair: tuple[str, str], tmp_path: Path) -> None:
    with LLM(*pair, method="autoregressive", options={"max_batch": 2}) as llm:
        llm.generate(PROMPTS[:2], PARAMS)
        met = llm.target_runner.graphs.met  # type: ignore[attr-defined]
    assert len(list((tmp_path / "cache" / "kinds").glob("*.json"))) == 1
    with LLM(*pair, method="autoregressive", options={"max_batch": 2}) as llm:
        assert llm.target_runner.graphs.captured[0] in met  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", [{"warm_up": "quick"}, {"options": {"warm_up": "fully"}}])
def test_another_word_is_refused_with_the_two_there_are(given: dict[str, Any], pair: tuple[str, str]) -> None:
    with pytest.raises(BadParameter, match=r"warm-up.*full.*lazy"):
        LLM(*pair, **given)
    assert LoadOptions().warm_up == "full"


def test_on_a_cpu_a_warm_up_returns_at_once(pair: tuple[str, str]) -> None:
    with LLM(*pair, warm_up="full") as llm:
        llm.generate(PROMPTS[0], PARAMS)
        assert llm.late_captures == 0


def test_the_table_of_steps_has_both_models(on_graphs: None, pair: tuple[str, str]) -> None:
    from specbranch.assembly import ModelChoice

    loaded = load_pair(ModelChoice(pair[0]), ModelChoice(pair[1], shorten=True), "tiny")
    times = warmed_up(loaded)
    lines = step_table(times)
    assert sum(line.startswith("Steps of the") for line in lines) == 2
    assert any("1.000 ms   1 rows" in line for line in lines)
    assert plain_times(times)["target"][0]["seconds"] == 0.001


def test_models_without_graphs_have_no_table_of_steps(pair: tuple[str, str]) -> None:
    from specbranch.assembly import ModelChoice

    assert warmed_up(load_pair(ModelChoice(pair[0]), ModelChoice(pair[1], shorten=True), "tiny")) == {}
    assert step_table({}) == []


def test_a_bench_says_how_many_captures_its_times_contain() -> None:
    assert late_note(3).startswith("3 CUDA graphs or kernels")


def test_sizes_of_a_lone_session_do_not_grow_with_the_batch() -> None:
    from specbranch.config import SpeculativeConfig
    from specbranch.core.methods import METHODS
    from specbranch.exec.forward_sizes import target_sizes

    config = SpeculativeConfig(method="autoregressive")
    one, many = (target_sizes(METHODS["autoregressive"], config, sessions) for sessions in (1, 64))
    assert one == ForwardSizes("autoregressive", 1, 32, 32)
    assert (many.alone, many.together) == (32, 79)
