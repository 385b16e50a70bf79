"""Quantised checkpoints: each format stands for the weights that its definition gives, and texts are those of them."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, Qwen3MoeConfig

from quantised_files import FORMS, awq, compressed, packed_ints, plain_ints, quantise
from specbranch import LLM, SamplingParams
from specbranch.config import LoadOptions, WeightsName
from specbranch.core.runner import Runner
from specbranch.errors import ModelError, SpecBranchError
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.locate import locate
from specbranch.models.files.matrix import Matrix
from specbranch.models.files.quantised.checkpoint import QuantisedCheckpoint, open_checkpoint
from specbranch.models.files.quantised.tensors import numbers_in
from specbranch.models.files.weights import read_weights
from specbranch.models.gpu.runner import GpuRunner
from specbranch.models.loading import load_native, open_model
from specbranch.models.runners.native import NativeRunner
from test_decoder import scores
from test_identity_models import SHAPINGS, compare
from tiers import each_value, tiered
from tiny_models import SHAPE, random_model, saved, some_tokens
from tiny_pair import SIZES, make_pair

CPU = torch.device("cpu")
WIDE = {**SHAPE, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4}
MODELS = {
    "llama": lambda: LlamaConfig(**WIDE),
    "qwen2": lambda: Qwen2Config(**WIDE, tie_word_embeddings=True),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **WIDE, head_dim=32, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: saved(random_model(make()), tmp_path_factory.mktemp(kind)) for kind, make in MODELS.items()}


@pytest.fixture(scope="module")
def made(plain: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """A quantised model in one form, and what it stands for in floats; each is written once."""
    written: dict[tuple[str, str], tuple[Path, Path]] = {}

    def make(form: str, model: str = "llama") -> tuple[Path, Path]:
        if (form, model) not in written:
            folder = tmp_path_factory.mktemp(form)
            if FORMS[form]().head:
                config = MODELS[model]()
                config.vocab_size = 136  # whole words
                source = saved(random_model(config), folder / "plain")
            else:
                source = plain[model]
            written[form, model] = quantise(source, FORMS[form](), folder / "small", folder / "wide"), folder / "wide"
        return written[form, model]

    return make


def matrix_of(folder: Path, *modules: str) -> Matrix:
    """Some matrices of the first layer, one below the other, as they are stored."""
    source = open_checkpoint(folder)
    assert isinstance(source, QuantisedCheckpoint)
    arch = Architecture.from_config(json.loads((folder / "config.json").read_text()))
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    sizes = {"q": q, "k": kv, "v": kv, "gate": arch.intermediate, "up": arch.intermediate, "down": arch.hidden}
    where = {"q": "self_attn", "k": "self_attn", "v": "self_attn"}
    named = {f"model.layers.0.{where.get(one, 'mlp')}.{one}_proj": sizes[one] for one in modules}
    found = source.matrix(named, arch.intermediate if modules == ("down",) else arch.hidden, CPU)
    assert found is not None
    return found


def wide_of(folder: Path, *modules: str) -> Tensor:
    tensors = load_file(folder / "model.safetensors")
    ends = [f"layers.0.self_attn.{one}_proj.weight" for one in modules]
    ends += [f"layers.0.mlp.{one}_proj.weight" for one in modules]
    return torch.cat([tensors[f"model.{end}"] for end in ends if f"model.{end}" in tensors])


# --- the weights of each format ---


@pytest.mark.parametrize("form", [form for form in FORMS if form != "gptq-head"])
def test_a_matrix_stands_for_the_weights_that_the_formats_definition_gives(
    form: str, made: Callable[..., tuple[Path, Path]]
) -> None:
    small, wide = made(form)
    for modules in (("q", "k", "v"), ("gate", "up"), ("down",)):
        matrix = matrix_of(small, *modules)
        assert matrix.weight.dtype.itemsize == 1 and matrix.scale is not None and matrix.scale.dtype is torch.float32
        assert torch.equal(matrix.widened(torch.float32), wide_of(wide, *modules))
        in_half = matrix.widened(torch.bfloat16).float()
        torch.testing.assert_close(in_half, wide_of(wide, *modules), rtol=2**-8, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_reading_a_tensor_gives_its_weights_in_floats(form: str, made: Callable[..., tuple[Path, Path]]) -> None:
    small, wide = made(form)
    source = open_checkpoint(small)
    for name, expected in load_file(wide / "model.safetensors").items():
        into = torch.empty(expected.shape)
        assert name in source
        source.read(name, into)
        assert torch.equal(into, expected), name


@pytest.mark.parametrize(
    ("form", "kind", "zeros", "moved"),
    [
        ("awq", "int4-64", True, False),
        ("awq-channel", "int4", True, False),
        ("gptq", "int4-64", False, False),
        ("gptq-act", "int4-64", True, True),
        ("gptq-v2", "int4-64", True, False),
        ("gptq-int8", "int8-32", False, True),
        ("packed", "int4-32", False, False),
        ("packed-channel", "int4", False, False),
        ("packed-int8", "int8-32", True, False),
        ("int8", "int8", False, False),
        ("int8-zeros", "int8", True, False),
        ("fp8-block", "fp8", False, False),  # a row of blocks is one block: an output has one scale
        ("fp8-block-small", "fp8-block", False, False),
        ("fp8-tensor", "fp8", False, False),
        ("float-channel", "fp8", False, False),
    ],
)
def test_a_matrix_stays_in_the_bits_of_its_file(
    form: str, kind: str, zeros: bool, moved: bool, made: Callable[..., tuple[Path, Path]]
) -> None:
    matrix = matrix_of(made(form)[0], "q", "k", "v")
    assert (matrix.stored, matrix.zero is not None, matrix.order is not None) == (kind, zeros, moved)


def test_a_matrix_of_parts_in_floats_and_in_int4_becomes_floats_with_a_message(
    made: Callable[..., tuple[Path, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    small, wide = made("gptq-head")
    with caplog.at_level(logging.WARNING, "specbranch"):
        arch, source = open_model(locate(str(small)))
        weights = read_weights(arch, source, CPU, torch.float32, "stored")
    layer = weights.layers[0]
    assert (layer.qkv.stored, layer.out.stored, layer.gate_up.stored) == ("float32", "int4-64", "int4-64")
    assert layer.down.stored == "float32" and weights.head.stored == "int4-64"
    assert torch.equal(layer.qkv.widened(torch.float32), wide_of(wide, "q", "k", "v"))
    assert [record.getMessage().partition(": ")[2][:40] for record in caplog.records] == [
        "model.layers.0.self_attn.q_proj, model.l"
    ]


def test_groups_of_several_sizes_are_stacked_in_the_smallest(plain: dict[str, Path], tmp_path: Path) -> None:
    config = compressed({"num_bits": 4, "group_size": 64, "strategy": "group"}, "pack-quantized")
    fine = {"targets": ["re:.*k_proj", "re:.*up_proj"], "weights": {"num_bits": 4, "group_size": 32}}
    config["config_groups"]["group_1"] = fine

    count = iter(range(1000))

    def write(weight: Tensor, generator: torch.Generator) -> Any:
        # the order of names within a layer: down, gate, up, k, o, q, v
        size = 32 if next(count) % 7 in (2, 3) else 64
        return packed_ints(group=size).write(weight, generator)

    form = replace(packed_ints(), config=config, write=write)
    small = quantise(plain["llama"], form, tmp_path / "small", tmp_path / "wide")
    for modules in (("q", "k", "v"), ("gate", "up")):
        matrix = matrix_of(small, *modules)
        assert matrix.stored == "int4-32"
        assert torch.equal(matrix.widened(torch.float32), wide_of(tmp_path / "wide", *modules))


def test_several_files_with_an_index_are_read_alike(made: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    small, wide = made("awq")
    tensors = load_file(small / "model.safetensors")
    names = sorted(tensors)
    for number in range(2):
        save_file({name: tensors[name] for name in names[number::2]}, tmp_path / f"{number}.safetensors")
    index = {"weight_map": {name: f"{at % 2}.safetensors" for at, name in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text((small / "config.json").read_text())
    assert torch.equal(matrix_of(tmp_path, "gate", "up").widened(torch.float32), wide_of(wide, "gate", "up"))


# --- beside the package that defines compressed-tensors ---


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(24, 96), (9, 61)])
def test_the_packing_is_that_of_the_compressed_tensors_package(bits: int, shape: tuple[int, int]) -> None:
    package = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    middle = 1 << (bits - 1)
    numbers = torch.randint(-middle, middle, shape, generator=torch.Generator().manual_seed(1)).to(torch.int8)
    packed = package.pack_to_int32(numbers, bits)
    assert torch.equal(numbers_in(packed, bits)[:, : shape[1]].int() - middle, numbers.int())
    across = package.pack_to_int32(numbers, bits, packed_dim=0)
    assert torch.equal(numbers_in(across.t(), bits)[:, : shape[0]].t().int() - middle, numbers.int())


@pytest.mark.parametrize("form", ["packed", "packed-channel", "packed-zeros", "packed-int8", "int8", "int8-zeros"])
def test_the_compressed_tensors_package_gives_the_same_weights(
    form: str, made: Callable[..., tuple[Path, Path]]
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    small, _ = made(form)
    config = FORMS[form]().config
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    )
    module = "model.layers.0.mlp.down_proj"
    tensors = load_file(small / "model.safetensors")
    parts = {name.removeprefix(f"{module}."): one for name, one in tensors.items() if name.startswith(f"{module}.")}
    parts["weight_scale"] = parts["weight_scale"].float()
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    theirs = compressor.decompress(parts, scheme)["weight"]
    assert torch.equal(matrix_of(small, "down").widened(torch.float32), theirs.float())


# --- models at work ---


@each_value
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "form", tiered(tuple(FORMS), lambda form: form in ("awq", "gptq-act", "packed", "int8", "fp8-block"))
)
def test_a_model_scores_as_one_with_its_weights_in_floats(
    form: str, model: str, made: Callable[..., tuple[Path, Path]]
) -> None:
    small, wide = made(form, model)
    stored = load_native(small, context_length=200, dtype=torch.float64)
    floats = load_native(wide, context_length=200, dtype=torch.float64)
    assert stored.weights not in ("float64", "float32")
    tokens = some_tokens(40)
    # a product with a scale of 24 bits has no rounding in float64
    torch.testing.assert_close(scores(stored, tokens), scores(floats, tokens), rtol=1e-5, atol=1e-4)
    on_gpu = GpuRunner(stored.decoder, 200)
    torch.testing.assert_close(scores(on_gpu, tokens), scores(stored, tokens), rtol=1e-6, atol=1e-6)
    as_floats = load_native(small, context_length=200, weights="float32")
    assert as_floats.weights == "float32"
    torch.testing.assert_close(
        scores(as_floats, tokens), scores(load_native(wide, context_length=200), tokens), rtol=1e-5, atol=1e-4
    )


PROMPTS = [[3, 14, 15, 92, 65, 35], [27, 18, 28], [100, 7, 7, 12, 9], [1]]
PAIR = {**SIZES, "hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A target with a tokenizer, in floats, and its draft."""
    target, draft = make_pair(tmp_path_factory.mktemp("pair"), sizes=PAIR)
    return Path(target), draft


def texts(target: Path, draft: str | None, method: str, prompts: list[list[int]]) -> list[Any]:
    options = LoadOptions(context_length=120, keep_experience=False)
    with LLM(str(target), draft, method=method, device="cpu", options=options) as llm:
        return [one.token_ids for one in llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))]


@each_value
@pytest.mark.parametrize("method", ["autoregressive", "speculative", "specbranch"])
@pytest.mark.parametrize(
    "form",
    tiered(
        ("awq-32", "gptq-old", "gptq-act-32", "packed", "packed-channel", "int8", "fp8-block", "float-channel"),
        ("awq-32", "gptq-act-32", "fp8-block").__contains__,
    ),
)
def test_texts_equal_those_of_the_weights_in_floats_alone_and_in_a_batch(
    form: str, method: str, drafted: tuple[Path, str], tmp_path: Path
) -> None:
    target, draft = drafted
    small, wide = quantise(target, FORMS[form](), tmp_path / "small", tmp_path / "wide"), tmp_path / "wide"
    for folder in (small, wide):
        for file in target.iterdir():
            if not (folder / file.name).exists():
                shutil.copy(file, folder)
    plainly = texts(wide, None, "autoregressive", PROMPTS)
    other = None if method == "autoregressive" else draft
    assert texts(small, other, method, PROMPTS) == plainly
    assert texts(small, other, method, PROMPTS[:1]) == plainly[:1]


@pytest.mark.slow
@each_value
@pytest.mark.parametrize("make", [NativeRunner, GpuRunner])
@pytest.mark.parametrize("form", ["awq", "gptq-act", "packed-zeros", "int8-zeros", "fp8-block"])
def test_every_method_gives_what_plain_decoding_gives(
    form: str, make: type[NativeRunner], made: Callable[..., tuple[Path, Path]]
) -> None:
    def load(path: Path, *, context_length: int, device: str, dtype: torch.dtype) -> Runner:
        plain = load_native(path, context_length=context_length, device=device, dtype=dtype)
        return plain if make is NativeRunner else make(plain.decoder, context_length)

    compare(load, *made(form), SHAPINGS["greedy"], runs=1)


# --- files that are not what they should be ---


def configured(**config: Any) -> Architecture:
    given = {**LlamaConfig(**WIDE).to_dict(), "quantization_config": config}
    return Architecture.from_config(given, "here")


INTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes"}, r"'bitsandbytes' quantisation; read are compressed-tensors, awq, gptq, fp8"),
        ({"quant_method": "mxfp4"}, "'mxfp4' quantisation"),
        ({"quant_method": "fbgemm_fp8"}, "'fbgemm_fp8' quantisation"),
        ({"quant_method": ["awq"]}, "quant_method; expected a string"),
        ({"quant_method": "awq", "bits": 8}, "AWQ weights of 8 bits; read are 4"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'; read are gemm"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "backend 'llm-awq'"),
        ({"quant_method": "awq", "group_size": 0}, "group_size; expected -1 or"),
        ({"quant_method": "awq", "group_size": "many"}, "group_size; expected a whole number"),
        ({"quant_method": "gptq"}, "no quantization_config.bits"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ weights of 3 bits; read are 4 and 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'; read are gptq, gptq_v2"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "Marlin's order"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*mlp": {"bits": 8}}}, "other GPTQ settings"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'; read are e4m3"),
        ({"quant_method": "fp8", "activation_scheme": "often"}, "activation_scheme 'often'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "a list of 2 whole numbers"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "two whole numbers ≥ 1"),
        (compressed(INTS, "nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized'; read are pack-quantized"),
        (compressed({**INTS, "num_bits": 3}, "pack-quantized"), "3 bits of type 'int'"),
        (compressed({**INTS, "type": "float"}, "pack-quantized"), "4 bits of type 'float'"),
        (compressed({**INTS, "strategy": "tensor_group"}, "pack-quantized"), "strategy 'tensor_group'"),
        (compressed({**INTS, "group_size": -1}, "pack-quantized"), "group_size; expected a whole number ≥ 1"),
        (compressed({**INTS, "group_size": -7}, "pack-quantized"), "group_size; expected a whole number"),
        (compressed(INTS, "pack-quantized", targets=[5]), "targets; expected a list of names"),
        (compressed(INTS, "pack-quantized", targets=["re:("]), "targets; expected names, or patterns"),
        ({**compressed(INTS, "pack-quantized"), "config_groups": {}}, "config_groups.weights; expected"),
        ({**compressed(INTS, "pack-quantized"), "sparsity_config": {"format": "sparse-24-bitmask"}}, "is sparse"),
        ({**compressed(INTS, "pack-quantized"), "transform_config": {"config_groups": {}}}, "matrices are rotated"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_read_is_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecBranchError, match=f"(here|of here).*{said}"):
        configured(**config)


def changed(folder: Path, into: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Copy a model with other tensors."""
    into.mkdir()
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, into / "model.safetensors")
    shutil.copy(folder / "config.json", into)
    return into


Q = "model.layers.0.self_attn.q_proj"


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def with_tensor(name: str, of: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: of(tensors[name])})


@pytest.mark.parametrize(
    ("form", "change", "said"),
    [
        ("awq", without(f"{Q}.scales"), "no tensor '.*q_proj.scales', which .* needs as it is quantised"),
        ("awq", without(f"{Q}.qzeros"), "no tensor '.*q_proj.qzeros'"),
        (
            "awq",
            with_tensor(f"{Q}.qweight", lambda one: one[:-1]),
            r"qweight' has shape \[127, 16\]; expected \[128,",
        ),
        ("awq", with_tensor(f"{Q}.qzeros", lambda one: one[:1]), r"qzeros' has shape \[1, 16\]; expected \[2, 16\]"),
        ("awq", with_tensor(f"{Q}.scales", lambda one: one.int()), "scales' is stored as int32; expected float32 or"),
        ("awq", with_tensor(f"{Q}.scales", lambda one: one * torch.inf), "scales that are not finite"),
        ("awq", with_tensor(f"{Q}.scales", lambda one: one[:, :64]), "q_proj has 64 outputs; .* says 128"),
        ("gptq-act", with_tensor(f"{Q}.g_idx", torch.zeros_like), "does not give each of 2 groups 64 inputs"),
        ("gptq-act", with_tensor(f"{Q}.g_idx", torch.neg), "does not give each of 2 groups"),
        ("gptq", with_tensor(f"{Q}.qweight", torch.Tensor.float), "qweight' is stored as float32; expected int32"),
        ("packed", without(f"{Q}.weight_scale"), "no tensor '.*weight_scale'"),
        ("packed", without(f"{Q}.weight_shape"), "no tensor '.*weight_shape'"),
        ("packed", with_tensor(f"{Q}.weight_shape", lambda one: one + 1), r"weight_shape' says \[129, 129\]; expected"),
        ("packed", with_tensor(f"{Q}.weight_scale", lambda one: one[:, :1]), "weight_scale' has shape"),
        ("packed-zeros", without(f"{Q}.weight_zero_point"), "no tensor '.*weight_zero_point'"),
        ("int8", without(f"{Q}.weight_scale"), "no tensor '.*weight_scale'"),
        ("fp8-block", without(f"{Q}.weight_scale_inv"), "no tensor '.*weight_scale_inv'"),
        (
            "fp8-block",
            with_tensor(f"{Q}.weight_scale_inv", lambda one: one.repeat(2, 1)),
            "weight_scale_inv' has shape",
        ),
        ("fp8-tensor", without(f"{Q}.weight_scale"), "no tensor '.*weight_scale_inv'"),
    ],
)
def test_a_file_that_lacks_something_is_refused_by_name(
    form: str,
    change: Callable[[dict[str, Tensor]], object],
    said: str,
    made: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    with pytest.raises(ModelError, match=said):
        load_native(changed(made(form)[0], tmp_path / "changed", change), context_length=64)


def test_groups_that_do_not_divide_the_inputs_are_refused(plain: dict[str, Path], tmp_path: Path) -> None:
    form = awq(64)
    small = quantise(plain["llama"], replace(form, config={**form.config, "group_size": 48}), tmp_path / "small")
    with pytest.raises(ModelError, match=r"groups of 48 inputs, which do not divide 128"):
        load_native(small, context_length=64)
    small = quantise(plain["llama"], packed_ints(group=16), tmp_path / "fine")
    with pytest.raises(ModelError, match=r"int4 in groups of 16 inputs; expected a multiple of 32"):
        load_native(small, context_length=64)


@pytest.mark.parametrize("form", ["awq", "packed", "fp8-block"])
def test_a_file_cut_short_is_refused(form: str, made: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    for file in made(form)[0].iterdir():
        shutil.copy(file, tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ModelError, match="is cut short"):
        load_native(tmp_path, context_length=64)


def test_activations_and_keys_stay_in_the_precision_of_the_computation_with_a_message(
    plain: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    form = plain_ints(input_activations=activations)
    keys = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    form = replace(form, config={**form.config, "kv_cache_scheme": keys})
    small = quantise(plain["llama"], form, tmp_path / "small", tmp_path / "wide")
    with caplog.at_level(logging.INFO, "specbranch"):
        loaded = load_native(small, context_length=64, dtype=torch.float64)
    said = [record.getMessage() for record in caplog.records if "asks for" in record.getMessage()]
    assert len(said) == 2 and "activations in 8 bits" in said[0] and "keys and values in 8 bits" in said[1]
    wide = load_native(tmp_path / "wide", context_length=64, dtype=torch.float64)
    torch.testing.assert_close(scores(loaded, some_tokens(20)), scores(wide, some_tokens(20)), rtol=1e-6, atol=1e-6)


def test_weights_of_another_kind_are_made_of_what_the_file_stands_for(made: Callable[..., tuple[Path, Path]]) -> None:
    small, wide = made("awq")
    arch, source = open_model(locate(str(small)))
    other_arch, other = open_model(locate(str(wide)))
    kinds: tuple[WeightsName, ...] = ("int8", "fp8", "int4-32")
    for kind in kinds:
        ours = read_weights(arch, source, CPU, torch.float32, kind)
        theirs = read_weights(other_arch, other, CPU, torch.float32, kind)
        for one, expected in zip(ours.matrices, theirs.matrices, strict=True):
            assert torch.equal(one.widened(torch.float32), expected.widened(torch.float32))
    kept = read_weights(arch, source, CPU, torch.float32, "int4-64")
    assert kept.layers[0].qkv.zero is not None  # the file's own numbers, as they are of this kind
