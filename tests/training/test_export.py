"""Exports of a tiny draft, read back: each engine gives the draft's own greedy text, and assisted the target's."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

from eagle_rows import Eagle, drafted
from small_tokenizers import byte_fallback, byte_level, save
from specbranch import LLM, SamplingParams
from specbranch.core.draft_evaluation import ClassCounts, DraftEvaluation
from specbranch.core.request import Request
from specbranch.core.runner import Ask, Feed
from specbranch.core.slots import ROOT
from specbranch.core.trees import CLASSES
from specbranch.errors import BadParameter, ModelError, UnsupportedArchitecture
from specbranch.gguf_header import GgufArray, read_header
from specbranch.models.drafts.draft_folder import DraftInfo, fingerprint_of, read_draft
from specbranch.models.drafts.evaluation_file import write_evaluation
from specbranch.models.drafts.load import load_draft
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.locate import locate
from specbranch.models.files.weights import read_weights
from specbranch.models.loading import load_native, open_model
from specbranch.models.runners.native import NativeRunner
from specbranch.progress import silent
from specbranch.text.tokenizer import Tokenizer
from specbranch.training.distill.draft_saving import DraftWeights, Storage, layer_tensors, save_draft
from specbranch.training.distill.features import FeatureStack, starting_weights
from specbranch.training.export.gguf_vocabulary import made_vocabulary
from specbranch.training.export.gguf_writer import write_gguf
from specbranch.training.export.whole_draft import EMBEDDING_NAME, HEAD_NAME, NORM_NAME, WholeDraft
from specbranch.training.making.export import ExportJob, export_draft
from tiers import each_value
from tiny_models import CONFIGS, random_model, saved
from tiny_pair import VOCABULARY

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 24
KEPT = 60  # tokens of the reduced head
PROMPTS = ((3, 14, 15, 92, 65), (27, 18), (31, 41, 59, 26, 53, 58, 97))
FAMILIES = [kind for kind in CONFIGS if kind != "llama-yarn"]


def made_draft(target: str, folder: Path, reduced: bool = False, storage: Storage = "bfloat16") -> Path:
    """A draft of a target: its first layer and its norm, rounded as they are stored."""
    arch, source = open_model(locate(target))
    whole = read_weights(arch, source, torch.device("cpu"), torch.float32)
    ids = torch.randperm(arch.vocabulary, generator=torch.Generator().manual_seed(1))[:KEPT].sort().values
    info = DraftInfo("target", fingerprint_of(arch, source), (0,), KEPT if reduced else None, storage)
    weights = DraftWeights(whole.layers[:1], whole.norm, ids if reduced else None)
    save_draft(folder, arch, weights, info, licence="Apache-2.0", provenance={"seed": 3})
    return folder


def exported(draft: Path, form: Any, target: str, out: Path, **more: Any) -> dict[str, Any]:
    return export_draft(ExportJob(draft=str(draft), form=form, out=out, target=target, **more), str, silent)


def greedy(runner: NativeRunner, prompt: Sequence[int], length: int = LENGTH) -> list[int]:
    """A model's own text, token by token."""
    runner.open(0, Request(SamplingParams(), seed=0, prompt_length=len(prompt)))
    runner.extend(0, prompt[:-1])
    text, last = [], prompt[-1]
    for _ in range(length):
        (proposal,) = runner.propose([Feed(0, (last,), (ROOT,))], [Ask(0, 0)])
        runner.keep(0, [0], 1)
        last = proposal.tokens[0]
        text.append(last)
    runner.close(0)
    return text


def texts(runner: NativeRunner) -> list[list[int]]:
    return [greedy(runner, prompt) for prompt in PROMPTS]


def texts_of_draft(draft: Path, target: str) -> list[list[int]]:
    return texts(load_draft(draft, target, dtype=torch.float32, context_length=128))


def texts_of_model(folder: Path) -> list[list[int]]:
    return texts(load_native(folder, dtype="float32", context_length=128))


def texts_of_transformers(folder: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = None
    made = [model.generate(torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=False) for prompt in PROMPTS]
    return [ids[0, len(prompt) :].tolist() for ids, prompt in zip(made, PROMPTS, strict=True)]


def test_a_draft_stored_in_halves_is_exported_number_by_number_and_is_its_own_text(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    draft = made_draft(pair[0], tmp_path / "draft")
    made = exported(draft, "hf", pair[0], tmp_path / "hf")
    assert made["exact"] and made["dtype"] == "float32"  # the tiny target's embedding is in float32
    expected = texts_of_draft(draft, pair[0])
    assert texts_of_transformers(tmp_path / "hf") == texts_of_model(tmp_path / "hf") == expected
    assert len({tuple(text) for text in expected}) > 1 and max(len(set(text)) for text in expected) > 2
    rounded = exported(draft, "hf", pair[0], tmp_path / "rounded", dtype="bfloat16")
    assert not rounded["exact"] and rounded["bytes"] < made["bytes"]
    assert {one.dtype for one in stored_tensors(tmp_path / "rounded").values()} == {torch.bfloat16}


def test_a_reduced_head_is_read_back_from_its_offsets(pair: tuple[str, str], tmp_path: Path) -> None:
    draft = made_draft(pair[0], tmp_path / "draft", reduced=True, storage="int8")
    made = exported(draft, "speculators", pair[0], tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (
        made["head_tokens"] == config["draft_vocab_size"] == KEPT and config["speculators_model_type"] == "independent"
    )
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]
    tensors = stored_tensors(tmp_path / "out")
    ids = tensors["d2t"] + torch.arange(KEPT)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids) and tensors["lm_head.weight"].shape[0] == KEPT
    assert texts_of_model(tmp_path / "out") == texts_of_draft(draft, pair[0])
    other = {**tensors, "d2t": torch.full_like(ids, VOCABULARY - KEPT)}  # a control: other offsets, other text
    save_file(other, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    assert texts_of_model(tmp_path / "out") != texts_of_draft(draft, pair[0])


def test_an_exported_draft_drafts_for_its_target_as_the_draft_does(pair: tuple[str, str], tmp_path: Path) -> None:
    draft = made_draft(pair[0], tmp_path / "draft", reduced=True)
    exported(draft, "speculators", pair[0], tmp_path / "out")
    params, said = SamplingParams(max_tokens=40, ignore_eos=True), {}
    for name in (draft, tmp_path / "out"):
        with LLM(pair[0], draft=str(name), method="speculative", device="cpu", dtype="float64") as llm:
            output = llm.generate("A branch is a guess", params)
            said[name] = output.token_ids, output.stats["drafted"], output.stats["accepted"]
    assert said[draft] == said[tmp_path / "out"] and said[draft][1] > 0


def test_a_full_head_in_the_form_of_speculators_is_a_model_of_transformers(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    draft = made_draft(pair[0], tmp_path / "draft")
    made = exported(draft, "speculators", pair[0], tmp_path / "out")
    assert made["head_tokens"] is None and "d2t" not in stored_tensors(tmp_path / "out")
    assert texts_of_transformers(tmp_path / "out") == texts_of_draft(draft, pair[0])


@pytest.mark.slow
def test_assisted_generation_of_transformers_gives_the_target_text(pair: tuple[str, str], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    exported(made_draft(pair[0], tmp_path / "draft"), "hf", pair[0], tmp_path / "hf")
    target, draft = (AutoModelForCausalLM.from_pretrained(folder) for folder in (pair[0], tmp_path / "hf"))
    forwards: list[int] = []
    draft.register_forward_hook(lambda *_: forwards.append(1))
    for prompt in PROMPTS:
        asked: dict[str, Any] = {"max_new_tokens": LENGTH, "do_sample": False}
        plain = target.generate(torch.tensor([prompt]), **asked)
        assert torch.equal(target.generate(torch.tensor([prompt]), assistant_model=draft, **asked), plain)
    assert len(forwards) > LENGTH


@each_value
@pytest.mark.parametrize("form", ["hf", "gguf"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_is_exported_and_read_back(kind: str, form: Any, tmp_path: Path) -> None:
    target = tiny_target(kind, tmp_path / "target")
    draft = made_draft(target, tmp_path / "draft")
    exported(draft, form, target, tmp_path / "out")
    assert texts_of_model(tmp_path / "out") == texts_of_draft(draft, target)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_llamacpp_gives_the_draft_text_alone_and_the_target_text_with_it(kind: str, tmp_path: Path) -> None:
    target = tiny_target(kind, tmp_path / "target")
    draft = made_draft(target, tmp_path / "draft")
    exported(draft, "gguf", target, tmp_path / "draft-gguf")
    alone = llamacpp(tmp_path / "draft-gguf" / "draft-gguf.gguf")
    for (text, _), ids in zip(alone, texts_of_draft(draft, target), strict=True):
        assert len(text) >= LENGTH - 3 and spelled(target, ids).startswith(text)
    whole = gguf_of(target, tmp_path / "whole")
    assisted = llamacpp(whole, draft=tmp_path / "draft-gguf" / "draft-gguf.gguf")
    assert [text for text, _ in assisted] == [text for text, _ in llamacpp(whole)]
    assert sum(drafted for _, drafted in assisted) > 0


def test_the_vocabulary_of_a_gguf_target_is_copied(tmp_path: Path) -> None:
    whole = gguf_of(tiny_target("llama", tmp_path / "target"), tmp_path / "whole.gguf")
    exported(made_draft(str(whole), tmp_path / "draft"), "gguf", str(whole), tmp_path / "out")
    told, kept = (read_header(path).metadata for path in (whole, tmp_path / "out" / "out.gguf"))
    for key in (key for key in told if key.startswith("tokenizer.")):
        assert _plain(kept[key]) == _plain(told[key])
    assert texts_of_model(tmp_path / "out") == texts_of_draft(tmp_path / "draft", str(whole))


def test_the_card_has_agreement_licence_and_origin_and_no_path(pair: tuple[str, str], tmp_path: Path) -> None:
    draft = made_draft(pair[0], tmp_path / "draft")
    counts = ClassCounts((0,) * (CLASSES - 1) + (8,), (0,) * (CLASSES - 1) + (6,))
    write_evaluation(draft, DraftEvaluation(counts, text="answers to eight questions"))
    made = exported(draft, "hf", pair[0], tmp_path / "out")
    card, provenance = ((tmp_path / "out" / name).read_text() for name in ("README.md", "provenance.json"))
    assert "license: apache-2.0" in card and "On 8 positions of answers to eight questions" in card
    assert "| top-1 | 0.75 |" in card and "| seed | 3 |" in card and made["agreement"]["top1"] == 0.75
    assert json.loads(provenance)["export"]["draft_identity"] == made["draft_identity"]
    assert str(tmp_path) not in card + provenance


def test_what_cannot_be_exported_is_a_sentence_and_leaves_nothing(pair: tuple[str, str], tmp_path: Path) -> None:
    reduced = made_draft(pair[0], tmp_path / "reduced", reduced=True)
    for form in ("hf", "gguf"):
        with pytest.raises(BadParameter, match=r"head of 60 tokens, and --format \w+ wants a draft with a full head"):
            exported(reduced, form, pair[0], tmp_path / "out")
    with pytest.raises(BadParameter, match="is no folder of a draft made by `specbranch distill`"):
        exported(Path(pair[1]), "hf", pair[0], tmp_path / "out")
    with pytest.raises(BadParameter, match="is there already"):
        exported(reduced, "speculators", pair[0], reduced)
    with pytest.raises(BadParameter, match="--dtype is 'int8'; expected one of float32"):
        exported(reduced, "speculators", pair[0], tmp_path / "out", dtype="int8")
    with pytest.raises(ModelError, match="was made for target"):
        exported(reduced, "speculators", pair[1], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reduced"]


def test_an_export_that_fails_while_it_is_written_leaves_nothing(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = made_draft(pair[0], tmp_path / "draft")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("specbranch.training.export.hf_files.shutil.copyfile", full)
    with pytest.raises(BadParameter, match=r"The disk is full: .*out\. Name another folder with --out\."):
        exported(draft, "hf", pair[0], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft"]


def test_a_tokenizer_that_is_not_byte_level_is_refused_for_llamacpp(tmp_path: Path) -> None:
    folder = save(byte_fallback(), tmp_path / "tokenizer")
    with pytest.raises(BadParameter, match="writes byte-level BPE alone"):
        made_vocabulary(Tokenizer.from_folder(folder), 500)


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        ([pre_tokenizers.ByteLevel(add_prefix_space=False)], "gpt-2"),
        ([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)], "smollm"),
        ([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(use_regex=False)], "default"),
    ],
)
def test_the_way_words_are_cut_has_the_name_that_llamacpp_has_for_it(
    steps: list[Any], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = byte_level()
    made.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    found = made_vocabulary(Tokenizer.from_folder(save(made, tmp_path)), VOCABULARY + 2)
    assert found["tokenizer.ggml.pre"] == name and ("has no name here" in caplog.text) == (name == "default")
    assert found["tokenizer.ggml.tokens"][-2:] == [f"[PAD{VOCABULARY}]", f"[PAD{VOCABULARY + 1}]"]
    assert found["tokenizer.ggml.bos_token_id"] == 1 and found["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]


def test_a_draft_that_reads_hidden_states_is_refused() -> None:
    config = {**CONFIGS["llama"]().to_dict(), "speculators_model_type": "eagle3"}
    with pytest.raises(UnsupportedArchitecture, match="is a draft of kind 'eagle3', which reads its target's hidden"):
        Architecture.from_config(config)


def test_a_model_with_a_reduced_head_is_no_target_to_distill_from(pair: tuple[str, str], tmp_path: Path) -> None:
    exported(made_draft(pair[0], tmp_path / "draft", reduced=True), "speculators", pair[0], tmp_path / "out")
    arch, source = open_model(locate(str(tmp_path / "out")))
    with pytest.raises(ModelError, match="head scores 60 tokens; expected all"):
        read_weights(arch, source, torch.device("cpu"), torch.float32).in_floats()


def _plain(value: Any) -> Any:
    return value.read() if isinstance(value, GgufArray) else value


def tiny_target(kind: str, folder: Path) -> str:
    """A tiny model of a family with the byte-level tokenizer; biases and norms are random, too."""
    config = CONFIGS[kind]()
    config.vocab_size, config.bos_token_id, config.eos_token_id = VOCABULARY, 1, 2
    saved(random_model(config), folder)
    save(byte_level(), folder)
    return str(folder)


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def gguf_of(target: str, path: Path) -> Path:
    """A whole model as a GGUF file, by the writer of drafts."""
    arch, source = open_model(locate(target))
    read = read_weights(arch, source, torch.device("cpu"), torch.float32)
    embedding, head = read.in_floats()
    layers = {name: one for i, layer in enumerate(read.layers) for name, one in layer_tensors(arch, layer, i).items()}
    tensors = {
        EMBEDDING_NAME: embedding,
        **layers,
        NORM_NAME: read.norm,
        **({} if arch.tied else {HEAD_NAME: head.weight}),
    }
    vocabulary = made_vocabulary(Tokenizer.from_folder(target), arch.vocabulary)
    write_gguf(WholeDraft(Path(target), arch, tensors, None), vocabulary, "whole", path, silent)
    return path


def llamacpp(path: Path, draft: Path | None = None) -> list[tuple[bytes, int]]:
    """What llama.cpp writes after each prompt, and how many tokens it drafted for that.

    It joins tokens that are parts of a character, and leaves out an incomplete one at the end: so bytes are compared.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(path), 128, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_ram_mib, params.verbosity, params.warmup = 0, -1, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to halves
    if draft is not None:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        params.speculative.draft.mparams.path = str(draft)
    server = xllamacpp.Server(params)
    asked = {"n_predict": LENGTH, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False, "logprobs": 1}
    answers = [server.handle_completions({"prompt": list(prompt), **asked}) for prompt in PROMPTS]
    said = [answer["choices"][0]["logprobs"]["content"] for answer in answers]
    return [
        (bytes(byte for one in content for byte in one["bytes"]), answer["timings"].get("draft_n", 0))
        for content, answer in zip(said, answers, strict=True)
    ]


def spelled(target: str, ids: Sequence[int]) -> bytes:
    """The bytes of some tokens, without special ones."""
    letters = Tokenizer.from_folder(target).token_bytes()
    assert letters is not None
    return b"".join(letters[token][0] for token in ids)


def made_feature_draft(target: str, folder: Path, reduced: bool, storage: Storage) -> Path:
    """A feature draft of a target's last layers, moved so that all of its tensors count."""
    arch, source = open_model(locate(target))
    whole = read_weights(arch, source, torch.device("cpu"), torch.float32)
    ids = torch.randperm(arch.vocabulary, generator=torch.Generator().manual_seed(1))[:KEPT].sort().values
    layers = (arch.layers - 2, arch.layers - 1)
    stack = FeatureStack(arch, whole, starting_weights(arch, whole, layers, ids if reduced else None), trained=True)
    torch.manual_seed(2)
    for parameter in stack.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    info = DraftInfo("target", fingerprint_of(arch, source), layers, KEPT if reduced else None, storage)
    save_draft(folder, arch, stack.weights(), info, taps=(0, 1, 2), licence="Apache-2.0", provenance={"seed": 3})
    return folder


@each_value
@pytest.mark.parametrize(("kind", "bias"), [("llama", False), ("qwen2", True), ("qwen3", False)])
@pytest.mark.parametrize(("reduced", "storage"), [(True, "int8"), (False, "bfloat16")])
def test_a_feature_draft_in_the_layout_of_speculators_says_what_it_says_itself(
    kind: str, bias: bool, reduced: bool, storage: Storage, tmp_path: Path
) -> None:
    target = tiny_target(kind, tmp_path / "target")
    draft = made_feature_draft(target, tmp_path / "draft", reduced, storage)
    made = exported(draft, "speculators", target, tmp_path / "out")
    config, tensors = json.loads((tmp_path / "out" / "config.json").read_text()), stored_tensors(tmp_path / "out")
    assert config["speculators_model_type"] == "eagle3" and config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["norm_before_residual"] is config["norm_output"] is config["norm_before_fc"] is False
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"]) == ("qwen3" if kind == "qwen3" else "llama", 2)
    assert layer["attention_bias"] is bias and ("layers.0.self_attn.o_proj.bias" in tensors) is bias
    arch, source = open_model(locate(target))
    embedding = read_weights(arch, source, torch.device("cpu"), torch.float64).embedding
    assert isinstance(embedding, torch.Tensor)
    ids = tensors["d2t"] + torch.arange(KEPT) if reduced else torch.arange(arch.vocabulary)
    assert config["draft_vocab_size"] == len(ids) == len(tensors["lm_head.weight"]) == (made["head_tokens"] or len(ids))
    assert not reduced or torch.equal(tensors["t2d"].nonzero().flatten(), ids)
    head = read_weights(arch, source, torch.device("cpu"), torch.float64).head.in_floats(torch.float64).weight[ids]
    file = read_draft(draft)
    own = {name: file.tensor(name).double() for name in file.names if name.endswith(("weight", "bias"))}
    theirs = {name: tensor.double() for name, tensor in tensors.items()}
    said = [Eagle(arch, own, embedding, head), Eagle(arch, theirs, embedding, theirs["lm_head.weight"])]
    states = torch.randn(6, 3 * arch.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    one, other = (torch.stack(drafted(eagle, [5, 3, 9, 2, 7, 8], states, 2, 4)) for eagle in said)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert not torch.allclose(one, torch.stack(drafted(said[0], [5, 3, 9, 2, 7, 8], -states, 2, 4)), atol=1e-2)
    assert "after 0, 1, 2 layers" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_a_feature_draft_is_no_model_of_its_own(form: Any, tmp_path: Path) -> None:
    target = tiny_target("llama", tmp_path / "target")
    draft = made_feature_draft(target, tmp_path / "draft", reduced=False, storage="bfloat16")
    with pytest.raises(BadParameter, match=f"reads its target's hidden states, and --format {form} holds models"):
        exported(draft, form, target, tmp_path / "out")
    assert not (tmp_path / "out").exists()
