"""The `quantization_config` of a checkpoint, as a value; no tensor is read for it.

Owns its parsing, and the refusal of what is not read: unknown methods, formats, numbers of bits. Activations and the KV
cache stay in the precision that the model computes in, whatever the file says of them: that is more exact, and
`Quantisation.left_out` says so. Invariant: a file's tensors and a `Scheme` together define every weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, NoReturn, TypeVar, get_args

from specbranch.errors import UnsupportedArchitecture
from specbranch.file_values import FileValues

Method = Literal["compressed-tensors", "awq", "gptq", "fp8"]
QUANT_METHODS: tuple[Method, ...] = get_args(Method)
EXPERT_METHODS = ("mxfp4",)  # of experts alone, read by `expert_weights.py`
Scales = Literal["tensor", "channel", "group", "block"]  # what shares a scale
SCALES: tuple[Scales, ...] = get_args(Scales)
OTHERWISE = "Load it with runner='transformers', or take it in another format."
QUANTISATION_KEY = "quantization_config"
MOST_GROUP = 1 << 26
ANY_MODULE = "Linear"  # the class that a target names if it means all matrices
T = TypeVar("T", bound=str)
COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How some matrices of a file are stored."""

    bits: int
    floats: bool = False  # True: e4m3, else integers
    scales: Scales
    group: int | None = None  # inputs that share a scale; None: all of an output's
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale
    symmetric: bool = True
    targets: tuple[str, ...] = (ANY_MODULE,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """How a checkpoint is quantised."""

    method: Method
    schemes: tuple[Scheme, ...]
    name: str  # of the file, in sentences
    zeros_less_one: bool = False  # GPTQ's first format stores a zero less 1
    left_out: tuple[str, ...] = ()  # what the file says of activations and the KV cache, which is not done

    def scheme_of(self, module: str) -> Scheme:
        """Return the scheme of a matrix: by its name, else by a pattern, else the one of all matrices."""
        if len(self.schemes) == 1:
            return self.schemes[0]
        for fits in (_is_named, _is_matched, _is_any):
            for scheme in self.schemes:
                if any(fits(target, module) for target in scheme.targets):
                    return scheme
        raise UnsupportedArchitecture(
            f"{self.name}: {module} is quantised, but no target of {QUANTISATION_KEY} names it. {OTHERWISE}"
        )


def read_quantisation(values: FileValues) -> Quantisation | None:
    """Read how a checkpoint is quantised; None if it is not, or only in experts, which have a reader of their own."""
    group = values.group(QUANTISATION_KEY)
    method = group.text("quant_method", "")
    if not method or method in EXPERT_METHODS:
        return None
    if method not in QUANT_METHODS:
        _refuse(group, f"is stored in {method!r} quantisation; read are {', '.join(QUANT_METHODS)}")
    return _READERS[method](group)


def _compressed(group: FileValues) -> Quantisation:
    _expect(group, "format", group.text("format", "pack-quantized"), COMPRESSED)
    if (sparse := group.group("sparsity_config").text("format", "dense")) != "dense":
        _refuse(group, f"is sparse, in the format {sparse!r}, which is not read")
    if group.get("transform_config"):
        _refuse(group, "has a transform_config: its matrices are rotated, and inputs must be rotated with them")
    groups = group.group("config_groups")
    parts = [groups.group(name) for name in groups.values]
    schemes = tuple(_scheme(part) for part in parts if part.get("weights") is not None)
    if not schemes:
        groups.refuse("weights", "an object that says how weights are stored")
    left = {f"activations in {_called(part, 'input_activations')}" for part in parts if part.get("input_activations")}
    if group.get("kv_cache_scheme"):
        left.add(f"keys and values in {_called(group, 'kv_cache_scheme')}")
    return Quantisation(method="compressed-tensors", schemes=schemes, name=group.name, left_out=tuple(sorted(left)))


def _scheme(part: FileValues) -> Scheme:
    _expect(part, "format", part.text("format", COMPRESSED[0]), COMPRESSED)
    weights = part.group("weights")
    bits, kind = weights.count("num_bits"), weights.text("type", "int")
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        _refuse(part, f"has weights of {bits} bits of type {kind!r}; read are int of 4 and 8 bits, and float of 8")
    size = _group_size(weights, "group_size") if weights.get("group_size") is not None else None
    usual = "tensor" if weights.get("group_size") is None else "group" if size else "channel"
    scales = _expect(weights, "strategy", weights.text("strategy", usual), SCALES)
    if scales == "group" and size is None:
        weights.refuse("group_size", "a whole number ≥ 1")
    return Scheme(
        bits=bits,
        floats=kind == "float",
        scales=scales,
        group=size if scales == "group" else None,
        block=_block(weights, "block_structure") if scales == "block" else None,
        symmetric=weights.flag("symmetric", True),
        targets=_targets(part),
    )


def _targets(part: FileValues) -> tuple[str, ...]:
    targets = part.items("targets") or [ANY_MODULE]
    if not all(isinstance(target, str) for target in targets):
        part.refuse("targets", "a list of names")
    for target in targets:
        if target.startswith("re:") and _pattern(target) is None:
            part.refuse("targets", "names, or patterns behind 're:'")
    return tuple(targets)


def _awq(group: FileValues) -> Quantisation:
    bits = group.count("bits", group.count("w_bit", 4))
    if bits != 4:
        _refuse(group, f"has AWQ weights of {bits} bits; read are 4")
    _expect(group, "version", group.text("version", "gemm").lower(), ("gemm",))
    _expect(group, "backend", group.text("backend", "autoawq"), ("autoawq", "auto", "gptqmodel"))
    key = "group_size" if group.get("group_size") is not None else "q_group_size"
    size = _group_size(group, key, 128)
    scheme = Scheme(bits=4, scales="group", group=size, symmetric=False)
    return Quantisation(method="awq", schemes=(scheme,), name=group.name)


def _gptq(group: FileValues) -> Quantisation:
    bits = group.count("bits")
    if bits not in (4, 8):
        _refuse(group, f"has GPTQ weights of {bits} bits; read are 4 and 8")
    layout = _expect(group, "checkpoint_format", group.text("checkpoint_format", "gptq"), ("gptq", "gptq_v2"))
    if group.flag("is_marlin_format", False):
        _refuse(group, "has GPTQ weights in Marlin's order; read are 'gptq' and 'gptq_v2'")
    for pattern in group.group("dynamic").values:
        if not pattern.startswith("-:"):
            _refuse(group, f"has other GPTQ settings for {pattern!r:.60}; expected the same for all matrices")
    size, symmetric = _group_size(group, "group_size", 128), group.flag("sym", True)
    scheme = Scheme(bits=bits, scales="group", group=size, symmetric=symmetric)
    return Quantisation(method="gptq", schemes=(scheme,), name=group.name, zeros_less_one=layout == "gptq")


def _fp8(group: FileValues) -> Quantisation:
    _expect(group, "fmt", group.text("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"))
    scheme = _expect(group, "activation_scheme", group.text("activation_scheme", "dynamic"), ("dynamic", "static"))
    block = None if group.get("weight_block_size") is None else _block(group, "weight_block_size")
    stored = Scheme(bits=8, floats=True, scales="tensor" if block is None else "block", block=block)
    return Quantisation(
        method="fp8", schemes=(stored,), name=group.name, left_out=(f"activations in fp8 ({scheme} scales)",)
    )


_READERS = {"compressed-tensors": _compressed, "awq": _awq, "gptq": _gptq, "fp8": _fp8}


def _group_size(values: FileValues, key: str, default: int | None = None) -> int | None:
    """Return how many inputs share a scale; None, which files write as -1, if all of an output's do."""
    size = values.count(key, default, least=-1, most=MOST_GROUP)
    if size == 0:
        values.refuse(key, "-1 or a whole number ≥ 1")
    return None if size == -1 else size


def _block(values: FileValues, key: str) -> tuple[int, int]:
    """Return the outputs and inputs of a block."""
    given = values.get(key)
    if isinstance(given, str) and re.fullmatch(r"\d{1,8}x\d{1,8}", given):
        given = [int(size) for size in given.split("x")]
    sizes = FileValues({key: given}, values.name, values.prefix).counts(key, 2)
    if not min(sizes) or max(sizes) > MOST_GROUP:
        values.refuse(key, "two whole numbers ≥ 1")
    return sizes[0], sizes[1]


def _called(values: FileValues, key: str) -> str:
    """Return what the file says of numbers that stay in the precision of the computation."""
    scheme = values.get(key)
    bits = scheme.get("num_bits") if isinstance(scheme, Mapping) else None
    return f"{bits} bits" if isinstance(bits, int) and 0 < bits < 64 else "fewer bits"


def _expect(values: FileValues, key: str, got: str, known: tuple[T, ...]) -> T:
    """Return a text that is one of the known ones, or refuse it."""
    found = next((one for one in known if one == got), None)
    if found is None:
        _refuse(values, f"has {values.prefix}{key} {got!r:.60}; read are {', '.join(known)}")
    return found


def _refuse(values: FileValues, what: str) -> NoReturn:
    raise UnsupportedArchitecture(f"{values.name} {what}. {OTHERWISE}")


@cache
def _pattern(target: str) -> re.Pattern[str] | None:
    try:
        return re.compile(target.removeprefix("re:"))
    except (re.error, RecursionError, OverflowError):
        return None


def _is_named(target: str, module: str) -> bool:
    return target == module


def _is_matched(target: str, module: str) -> bool:
    pattern = _pattern(target) if target.startswith("re:") else None
    return pattern is not None and pattern.match(module) is not None


def _is_any(target: str, module: str) -> bool:
    return target == ANY_MODULE
