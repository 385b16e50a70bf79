"""The runner over transformers models: every row against one plain forward of its path, on three architectures;
refusals at load."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from specbranch.assembly import ModelChoice, load_runner
from specbranch.core.runner import Feed
from specbranch.core.slots import ROOT
from specbranch.engine import LLM
from specbranch.errors import BadParameter, CacheFull, MissingPackage, ModelError
from specbranch.models.runners import transformers_runner
from specbranch.models.runners.transformers_runner import TransformersRunner, load_transformers
from specbranch.models.sampling.logit_rows import TensorRow
from tiny_models import GREEDY

VOCABULARY = 97
CONTEXT = 64
PROMPT = (11, 12, 13, 14, 15)


def _llama() -> PreTrainedModel:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, **sizes))


def _gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4))


def _neox() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, **sizes))


def _mistral(window: int | None) -> PreTrainedModel:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return MistralForCausalLM(
        MistralConfig(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, sliding_window=window, **sizes)
    )


def _mamba() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4))


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def _enlarge(model: PreTrainedModel) -> PreTrainedModel:
    """Make the tiny random weights matter: at their usual scale a row hardly depends on the tokens before its last."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model.eval()


@pytest.fixture(params=[_llama, _gpt2, _neox], ids=["llama", "gpt2", "gpt_neox"])
def runner(request: Any) -> TransformersRunner:
    torch.manual_seed(0)
    return TransformersRunner(_enlarge(request.param()), CONTEXT, tail=24)


def _plain(runner: TransformersRunner, tokens: Sequence[int]) -> Tensor:
    with torch.no_grad():
        return runner.model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]


def _check(runner: TransformersRunner, rows: dict[int, TensorRow], seq: int = 0) -> None:
    """Every row equals one plain forward over the prefix and the node's path, and over nothing else."""
    for node, row in rows.items():
        sequence = runner.slots(seq).sequence(node)
        torch.testing.assert_close(row.logits, _plain(runner, sequence), rtol=1e-4, atol=1e-4)
        altered = [(sequence[0] + 1) % VOCABULARY, *sequence[1:]]
        assert (row.logits - _plain(runner, altered)).abs().max() > 1e-2, "the row must depend on the first token"


def _feed(
    runner: TransformersRunner, tokens: Sequence[int], parents: Sequence[int], seq: int = 0
) -> dict[int, TensorRow]:
    start = len(runner.slots(seq).tokens)
    (rows,) = runner.score([Feed(seq, tuple(tokens), tuple(parents))])
    return dict(enumerate(rows, start))


def _opened(runner: TransformersRunner) -> TransformersRunner:
    runner.open(0, GREEDY)
    runner.extend(0, PROMPT)
    return runner


def test_rows_of_a_chain_equal_a_plain_forward(runner: TransformersRunner) -> None:
    runner.open(0, GREEDY)
    _check(runner, _feed(runner, (21, 22, 23), (ROOT, 0, 1)))
    _check(runner, _feed(runner, (24, 25), (2, 3)))


def test_rows_after_extend_equal_a_plain_forward(runner: TransformersRunner) -> None:
    _check(_opened(runner), _feed(runner, (21, 22), (ROOT, 0)))
    runner.keep(0, (0, 1), 2)
    runner.extend(0, (31, 32, 33))
    _check(runner, _feed(runner, (23,), (ROOT,)))


def test_a_prompt_prefilled_in_chunks_equals_one_prefilled_at_once(
    runner: TransformersRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "prefill_chunk", 2)
    _check(_opened(runner), _feed(runner, (21,), (ROOT,)))


@pytest.mark.parametrize("call", ["extend", "feed"])
def test_a_forward_that_is_interrupted_leaves_nothing_half_read(
    runner: TransformersRunner, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequence is forgotten, so that whoever tells it again has the right rows."""
    _opened(runner)
    layer = (
        runner.model.get_decoder().layers[-1]
        if hasattr(runner.model.get_decoder(), "layers")
        else runner.model.get_decoder().h[-1]
    )

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = layer.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner.extend(0, (31, 32)) if call == "extend" else _feed(runner, (21, 22), (ROOT, 0))
    handle.remove()
    assert len(runner.slots(0)) == 0
    runner.extend(0, PROMPT)
    _check(runner, _feed(runner, (21, 22), (ROOT, 0)))


def test_forks_see_their_own_ancestors_only(runner: TransformersRunner) -> None:
    rows = _feed(_opened(runner), (21, 22, 23), (ROOT, 0, 1))
    rows |= _feed(runner, (31, 32), (0, ROOT))
    rows |= _feed(runner, (41, 42, 43), (3, 4, 2))
    rows |= _feed(runner, (51, 52), (0, 8))
    _check(runner, rows)


def test_a_tree_given_breadth_first_equals_plain_forwards(runner: TransformersRunner) -> None:
    _check(_opened(runner), _feed(runner, (21, 22, 23, 24, 25, 26, 27), (ROOT, ROOT, 0, 0, 1, 2, 4)))


@pytest.mark.parametrize("commit", [0, 1, 3])
def test_rows_after_keeping_a_path_equal_a_plain_forward(runner: TransformersRunner, commit: int) -> None:
    _feed(_opened(runner), (21, 22, 23, 31, 32, 33), (ROOT, 0, 1, 0, 3, 4))
    runner.keep(0, (0, 3, 4), commit)
    left = 3 - commit
    assert runner.slots(0).prefix == [*PROMPT, 21, 31, 32][: len(PROMPT) + commit]
    rows = _feed(runner, (61, 62), (left - 1, left))
    rows |= _feed(runner, (71,), (ROOT,))
    _check(runner, rows)


def test_dropping_the_whole_tail_returns_to_the_prefix(runner: TransformersRunner) -> None:
    _feed(_opened(runner), (21, 22, 23), (ROOT, 0, 1))
    runner.keep(0, (), 0)
    _check(runner, _feed(runner, (24, 25), (ROOT, 0)))


def test_everything_can_be_rolled_back_from_an_empty_prefix(runner: TransformersRunner) -> None:
    runner.open(0, GREEDY)
    _feed(runner, (21, 22), (ROOT, 0))
    runner.keep(0, (), 0)
    rows = _feed(runner, (24, 25), (ROOT, 0))
    _check(runner, rows | _feed(runner, (26,), (ROOT,)))


def test_random_work_on_two_sequences_equals_plain_forwards(runner: TransformersRunner) -> None:
    dice = random.Random(5)
    for seq in (0, 1):
        runner.open(seq, GREEDY)
        runner.extend(seq, [dice.randrange(VOCABULARY) for _ in range(3)])
    for _ in range(5):
        work = [_random_feed(dice, runner, seq) for seq in (0, 1)]
        starts = [len(runner.slots(seq).tokens) for seq in (0, 1)]
        for seq, (start, rows) in enumerate(zip(starts, runner.score(work), strict=True)):
            _check(runner, dict(enumerate(rows, start)), seq)
            runner.slots(seq).check()
        _random_keep(dice, runner, dice.randrange(2))


def _random_feed(dice: random.Random, runner: TransformersRunner, seq: int) -> Feed:
    held, count = len(runner.slots(seq).tokens), dice.randint(1, 4)
    count = min(count, runner.slots(seq).room)
    parents = tuple(dice.randint(max(ROOT, held + i - 3), held + i - 1) for i in range(count))
    return Feed(seq, tuple(dice.randrange(VOCABULARY) for _ in range(count)), parents)


def _random_keep(dice: random.Random, runner: TransformersRunner, seq: int) -> None:
    path = runner.slots(seq).path(dice.randrange(len(runner.slots(seq).tokens)))
    runner.keep(seq, path, dice.randint(0, min(2, len(path))))


def test_a_fork_copies_the_cache_and_a_chain_does_not(runner: TransformersRunner) -> None:
    _feed(_opened(runner), (21, 22), (ROOT, 0))
    _feed(runner, (23,), (1,))
    held = runner._sequences[0]
    assert [line.path for line in held.cached_paths] == [[0, 1, 2]]
    _feed(runner, (31,), (0,))
    assert [line.path for line in held.cached_paths] == [[0, 1, 2], [0, 3]]
    runner.keep(0, (0, 3), 1)
    assert [(line.path, line.cache.get_seq_length()) for line in held.cached_paths] == [([0], len(PROMPT) + 2)]


def test_a_closed_sequence_frees_its_caches(runner: TransformersRunner) -> None:
    _opened(runner)
    runner.close(0)
    assert runner._sequences == {}


def test_the_context_cannot_be_exceeded_but_a_tree_may_reach_its_end(runner: TransformersRunner) -> None:
    runner.open(0, GREEDY)
    runner.extend(0, [i % VOCABULARY for i in range(CONTEXT - 2)])
    _check(runner, _feed(runner, (21, 22, 23, 24, 25), (ROOT, ROOT, ROOT, 0, 1)))
    with pytest.raises(CacheFull, match=f"{CONTEXT + 1} tokens"):
        _feed(runner, (26,), (3,))
    runner.keep(0, (), 0)
    with pytest.raises(CacheFull, match=f"{CONTEXT + 1} tokens"):
        runner.extend(0, (1, 2, 3))
    _check(runner, _feed(runner, (21, 22), (ROOT, 0)))


# --- loading ---


def _saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def test_a_local_folder_is_loaded_with_its_own_context(tmp_path: Path) -> None:
    model = _llama().eval()
    runner = load_transformers(_saved(model, tmp_path))
    assert (runner.vocabulary, runner.context_length, runner.model.dtype) == (VOCABULARY, CONTEXT, torch.float32)
    runner.open(0, GREEDY)
    rows = _feed(runner, (21, 22), (ROOT, 0))
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[21, 22]])).logits[0, -1]
    torch.testing.assert_close(rows[1].logits, expected, rtol=1e-4, atol=1e-5)


def test_the_dtype_asked_for_is_used(tmp_path: Path) -> None:
    assert (
        load_transformers(_saved(_llama(), tmp_path), dtype=torch.bfloat16, context_length=32).model.dtype
        == torch.bfloat16
    )


def test_a_recurrent_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"{tmp_path.name}.*'mamba'"):
        load_transformers(_saved(_mamba(), tmp_path), context_length=32)


def test_a_recurrent_model_of_unknown_name_is_refused_by_what_it_does() -> None:
    with pytest.raises(ModelError, match="strange-model"):
        TransformersRunner(_mamba().eval(), 32, name="strange-model")


def test_a_model_that_keeps_a_state_beside_its_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _llama().eval()
    inner, calls = model.forward, []

    def forward(*args: Any, logits_to_keep: int = 0, **kwargs: Any) -> Any:
        calls.append(1)
        out = inner(*args, **kwargs)
        out.logits = out.logits.roll(len(calls), dims=-1)
        return out

    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(ModelError, match=r"strange-model cannot take tokens back.*%"):
        TransformersRunner(model, 32, name="strange-model")


def test_an_active_sliding_window_is_refused_unless_the_context_fits_in_it(tmp_path: Path) -> None:
    folder = _saved(_mistral(16), tmp_path)
    with pytest.raises(ModelError, match=rf"{tmp_path.name}.*16"):
        load_transformers(folder, context_length=17)
    assert load_transformers(folder, context_length=16).context_length == 16
    assert load_transformers(folder).context_length == 16


def test_no_window_is_no_reason_to_refuse(tmp_path: Path) -> None:
    assert load_transformers(_saved(_mistral(None), tmp_path)).context_length == CONTEXT


@pytest.mark.parametrize("length", [CONTEXT + 1, 0, -3])
def test_an_impossible_context_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(BadParameter, match="context_length"):
        load_transformers(_saved(_llama(), tmp_path), context_length=length)


def test_what_cannot_be_loaded_is_named_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no file .*missing\.gguf"):
        load_transformers(tmp_path / "missing.gguf")
    with pytest.raises(ModelError, match=f"cannot load {tmp_path}"):
        load_transformers(tmp_path)
    _saved(_llama(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match=f"cannot load {tmp_path}"):
        load_transformers(tmp_path)


# --- over several GPUs: how it is requested, and when it is refused ---


@pytest.fixture
def several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(type(transformers_runner.SPREADING), "is_installed", True)


class Asked(Exception):
    """Carries what a loader was asked."""


def _ask(*asked: Any, **options: Any) -> Any:
    raise Asked(asked, options)


@pytest.mark.parametrize(("count", "found"), [(0, "no GPU"), (1, "one GPU")])
def test_a_target_is_spread_over_no_fewer_than_two_gpus(
    count: int, found: str, tmp_path: Path, several_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(BadParameter, match=f"torch sees {found} here"):
        load_transformers(tmp_path, spread=True)


def test_spreading_needs_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(transformers_runner.SPREADING), "is_installed", False)
    with pytest.raises(MissingPackage, match="Spreading a model over several GPUs needs accelerate"):
        load_transformers(tmp_path, spread=True)


def test_a_spread_target_is_loaded_by_accelerates_map_and_left_where_it_lies(
    tmp_path: Path, several_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _llama().save_pretrained(tmp_path)
    model, asked = _llama(), {}
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}

    def loaded(source: str, **options: Any) -> PreTrainedModel:
        asked.update(options)
        return model

    def moved(*_: Any) -> None:
        raise AssertionError("accelerate has put it where it belongs")

    monkeypatch.setattr(transformers_runner.AutoModelForCausalLM, "from_pretrained", loaded)
    monkeypatch.setattr(model, "to", moved)
    runner = load_transformers(tmp_path, spread=True)
    assert asked["device_map"] == "auto" and asked["dtype"] == torch.bfloat16
    assert runner.model is model
    model.hf_device_map["model.layers.1"] = "disk"
    with pytest.raises(ModelError, match="does not fit the 2 GPUs of this machine: part of it would lie on disk"):
        load_transformers(tmp_path, spread=True)


@pytest.mark.parametrize("runner", ["auto", "transformers"])
def test_a_device_map_leads_to_the_transformers_runner(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_runner, "load_transformers", _ask)
    for device_map in ("auto", None):
        choice = ModelChoice(str(tmp_path), "transformers" if device_map is None else runner, device_map=device_map)
        with pytest.raises(Asked) as seen:
            load_runner(choice)
        assert seen.value.args[1]["spread"] is (device_map == "auto")


def test_a_device_map_is_the_targets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbranch.engine.assemble", _ask)
    with pytest.raises(Asked) as seen:
        LLM("some/target", "some/draft", options={"device_map": "auto", "draft_device": "cuda:1"})
    target, draft = seen.value.args[0][:2]
    assert (target.device_map, draft.device_map, draft.device) == ("auto", None, "cuda:1")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device_map": "balanced"}, "Unknown device map 'balanced'"),
        ({"runner": "native"}, "needs the transformers runner"),
        ({"device": "cuda:1"}, "device 'cuda:1' was asked for"),
        ({"device": "cpu"}, "device 'cpu' was asked for"),
    ],
)
def test_a_device_map_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadParameter, match=said):
        ModelChoice("some/target", **{"device_map": "auto", **options})
