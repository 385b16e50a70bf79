"""llama.cpp on the target's own GGUF file: plain decoding, and its speculation by n-grams.

Owns the servers of the package xllamacpp and what is told of a turn. They are loaded when first asked for, with as many
threads as torch has and the context of our target; every other choice is llama.cpp's own. Invariant: what is timed is
told by llama.cpp itself, without the way to it: reading the prompt, then all tokens behind the first.

Its arithmetic is its own (half-precision cache, activations rounded in other blocks), so its texts are, too: they are
told, and never held against ours.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from specbranch.assembly import ModelChoice, fetched
from specbranch.errors import BadParameter
from specbranch.extras import XLLAMACPP
from specbranch.lab.bench.methods import LLAMACPP
from specbranch.lab.replay.record import Record

if TYPE_CHECKING:
    from specbranch.lab.bench.recorded_pair import RecordedPair


def check_file(target: str) -> None:
    """Raise, before anything is run, if llama.cpp is not installed or cannot run a target."""
    otherwise = f"or leave {', '.join(LLAMACPP)} out of --methods"
    XLLAMACPP.require(otherwise)
    if not _path(target).lower().endswith(".gguf"):
        raise BadParameter(f"llama.cpp runs GGUF files only, and {target} is none. Name one as --target, {otherwise}.")


def built_with() -> str:
    """Which llama.cpp this is, and which instructions it was built to use."""
    import xllamacpp

    made = xllamacpp.BUILD_INFO
    features = xllamacpp.get_system_info().strip().strip("|").strip()
    return f"llama.cpp of xllamacpp {xllamacpp.__version__}, built by {made['compiler']}: {features}"


class LlamaCpp:
    """Answers the prompts of records as llama.cpp would."""

    def __init__(self, recorded: RecordedPair) -> None:
        self._llm, self._file = recorded.llm, recorded.models[0]
        self._servers: dict[str, Any] = {}

    def answer(self, method: str, record: Record) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Answer a record's prompt; returns the tokens of its text and what is told of the turn."""
        if method not in self._servers:
            self._servers[method] = make_server(_path(self._file), self._llm.context_length, method)
        said = self._servers[method].handle_completions(_asked(record))
        if "timings" not in said:
            raise BadParameter(f"llama.cpp did not answer: {said.get('error', said)}. Leave {method} out of --methods.")
        text = said["choices"][0]["text"]
        return tuple(self._llm.tokenizer.encode(text)), told(said["timings"])


def told(timings: dict[str, Any]) -> dict[str, Any]:
    """What the bench reads of a turn. A drafted token that was accepted is a forward less."""
    tokens, decode = int(timings["predicted_n"]), timings["predicted_ms"] / 1000
    forwards = tokens - 1 - int(timings.get("draft_n_accepted", 0))
    return {
        "tokens": tokens,
        "ttft_seconds": timings["prompt_ms"] / 1000,
        "decode_seconds": decode,
        "tokens_per_second": (tokens - 1) / decode if decode > 0 else None,
        "target_forwards": forwards,
        "tokens_per_forward": (tokens - 1) / forwards if forwards > 0 else None,
    }


def _asked(record: Record) -> dict[str, Any]:
    """What a record's task asks for; samplers that llama.cpp would add by itself are switched off."""
    task, params = record.task, record.task.params
    drawing = {"temperature": params.temperature, "top_k": params.top_k or 0, "top_p": params.top_p, "min_p": 0.0}
    return {
        "prompt": list(task.prompt),
        "n_predict": params.max_tokens,
        "seed": task.seed & 0xFFFFFFFF,
        "ignore_eos": params.ignore_eos,
        "cache_prompt": False,
        **drawing,
    }


def make_server(path: str, context: int, method: str) -> Any:
    """Load a file as one of the methods wants it, with as many threads as torch has."""
    import torch
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = path, context, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    params.cache_ram_mib = 0  # nothing of a prompt is kept, as nothing is by us
    params.verbosity = -1
    if method == "llamacpp-ngram":
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    return xllamacpp.Server(params)


@cache
def _path(target: str) -> str:
    return fetched(ModelChoice(target))
