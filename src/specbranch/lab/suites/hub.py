"""The public suites on the Hugging Face Hub: the dataset and file of each, and how its records become prompts.

Owns the step from a suite's name to (id, category, turns). Downloads stay in the Hub's own cache. Invariant: every
failure is a `HubUnusable` whose message is a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HubPrompt = tuple[Any, Any, Any]  # id, category, turns; whoever receives them checks them


class HubUnusable(Exception):
    """A suite that could not be fetched from the Hub; the message says why."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a dataset, and how to read a prompt from it."""

    dataset: str
    file: str
    read: Callable[[int, dict[str, Any]], HubPrompt]


SOURCES = {
    "humaneval": HubFile(
        "openai/openai_humaneval",
        "openai_humaneval/test-00000-of-00001.parquet",
        lambda at, record: (record["task_id"], "code", [record["prompt"]]),
    ),
    "gsm8k": HubFile(
        "openai/gsm8k",
        "main/test-00000-of-00001.parquet",
        lambda at, record: (f"gsm8k/{at}", "math", [record["question"]]),
    ),
    "mt_bench": HubFile(
        "HuggingFaceH4/mt_bench_prompts",
        "raw/question.jsonl",
        lambda at, record: (
            f"mt_bench/{record.get('question_id', at)}",
            "chat",
            record.get("turns") or record["prompt"],
        ),
    ),
    "cnn_dm": HubFile(
        "abisee/cnn_dailymail",
        "3.0.0/test-00000-of-00001.parquet",
        lambda at, record: (f"cnn_dm/{at}", "summarization", [f"Summarize: {record['article']}"]),
    ),
}


def fetch(name: str) -> tuple[list[HubPrompt], str]:
    """Return a suite's records and their source."""
    source = SOURCES[name]
    path, where = _download(source), f"{source.dataset} on the Hub"
    records = _jsonl(path) if path.suffix == ".jsonl" else _parquet(path, where)
    try:
        return [source.read(at, record) for at, record in enumerate(records)], where
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        raise HubUnusable(f"{where} has another form than expected ({type(error).__name__}: {error}).") from error


def _download(source: HubFile) -> Path:
    from huggingface_hub import constants, hf_hub_download

    try:
        return Path(hf_hub_download(source.dataset, source.file, repo_type="dataset"))
    except (OSError, ValueError, RuntimeError) as error:  # the Hub's errors are subclasses of these
        offline = constants.HF_HUB_OFFLINE or type(error).__name__ == "OfflineModeIsEnabled"
        reason = "HF_HUB_OFFLINE forbids fetching" if offline else f"it could not be reached ({type(error).__name__})"
        raise HubUnusable(f"Nor did it come from the Hub ({source.dataset}): {reason}.") from error


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip())


def _parquet(path: Path, where: str) -> Iterator[dict[str, Any]]:
    """Yield the records of a parquet file; this needs pyarrow."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise HubUnusable(f"{where} is a parquet file, which needs pyarrow (pip install pyarrow).") from None
    return (record for batch in parquet.ParquetFile(path).iter_batches() for record in batch.to_pylist())
