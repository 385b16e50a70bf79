"""llama.cpp on the target's own GGUF file: plain decoding, and its n-gram speculation.

Owns the servers of the package xllamacpp and the statistics of a turn. A server is loaded at its first answer, with
torch's number of threads and our target's context length; all else is llama.cpp's default. Invariant: llama.cpp itself
reports the times, without the call overhead: prefill, then all tokens after the first.

Its arithmetic differs from ours (half-precision KV cache, other blocks for rounded activations), and so may its texts.
They are never compared with ours.
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
    """Raise, before anything runs, if llama.cpp is not installed or cannot run a target."""
    otherwise = f"or leave {', '.join(LLAMACPP)} out of --methods"
    XLLAMACPP.require(otherwise)
    if not _path(target).lower().endswith(".gguf"):
        raise BadParameter(
            f"llama.cpp runs only GGUF files, and {target} is not one. Name one as --target, {otherwise}."
        )


def built_with() -> str:
    """Return the version of llama.cpp and the instruction sets it was built for."""
    import xllamacpp

    made = xllamacpp.BUILD_INFO
    features = xllamacpp.get_system_info().strip().strip("|").strip()
    return f"llama.cpp of xllamacpp {xllamacpp.__version__}, built by {made['compiler']}: {features}"


class LlamaCpp:
    """Answers the prompts of records with llama.cpp."""

    def __init__(self, recorded: RecordedPair) -> None:
        self._llm, self._file = recorded.llm, recorded.models[0]
        self._servers: dict[str, Any] = {}

    def answer(self, method: str, record: Record) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Answer a record's prompt; return the tokens of its text and the statistics of the turn."""
        if method not in self._servers:
            self._servers[method] = make_server(_path(self._file), self._llm.context_length, method)
        said = self._servers[method].handle_completions(_asked(record))
        if "timings" not in said:
            raise BadParameter(f"llama.cpp did not answer: {said.get('error', said)}. Leave {method} out of --methods.")
        text = said["choices"][0]["text"]
        return tuple(self._llm.tokenizer.encode(text)), turn_stats(said["timings"])


def turn_stats(timings: dict[str, Any]) -> dict[str, Any]:
    """Return the statistics of a turn. Each accepted draft token saves one forward."""
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
    """Return the request for a record's task; llama.cpp's other samplers are switched off."""
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
    """Load a file for one of the methods, with torch's number of threads."""
    import torch
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = path, context, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    params.cache_ram_mib = 0  # no prefix cache, as in our runs
    params.verbosity = -1
    if method == "llamacpp-ngram":
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    return xllamacpp.Server(params)


@cache
def _path(target: str) -> str:
    return fetched(ModelChoice(target))
