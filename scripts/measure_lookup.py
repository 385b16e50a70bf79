"""Measure `lookup` against plain decoding on benchmark prompts: paired runs on the default model, medians, every answer compared.

Reads Spec-Bench question files (one JSON object a line with `turns`) from the folder given, or from $SPECBRANCH_DATA. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from specbranch import LLM, SamplingParams


def main() -> None:
    """Measure each suite and print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--data", type=Path, default=os.environ.get("SPECBRANCH_DATA"), required="SPECBRANCH_DATA" not in os.environ)
    options.add_argument("--limit", type=int, default=6, help="prompts a suite")
    options.add_argument("--max-tokens", type=int, default=128)
    given = options.parse_args()
    rows = []
    print(f"{'suite':12} {'plain tok/s':>12} {'lookup tok/s':>13} {'ratio':>6} {'tokens/forward':>15} {'identical':>10}")
    with LLM(method="autoregressive", device="cpu") as plain, LLM(method="lookup", device="cpu") as lookup:
        plain.generate("Warm up."), lookup.generate("Warm up.")
        for file in sorted(given.data.rglob("*.jsonl")):
            row = suite(file, plain, lookup, given.limit, SamplingParams(max_tokens=given.max_tokens))
            rows.append(row)
            print("{suite:12} {plain:12.1f} {lookup:13.1f} {ratio:6.2f} {tokens_per_forward:15.2f} {identical:>10}".format(**row))
    print(json.dumps({"rows": rows}))


def suite(file: Path, plain: LLM, lookup: LLM, limit: int, params: SamplingParams) -> dict[str, Any]:
    """Answer the first prompts of a suite with both methods, by turns."""
    pairs = []
    for line in file.read_text().splitlines()[:limit]:
        messages = [{"role": "user", "content": json.loads(line)["turns"][0]}]
        pairs.append((plain.chat(messages, params), lookup.chat(messages, params)))
    speeds = [(a.stats["tokens_per_second"], b.stats["tokens_per_second"]) for a, b in pairs if a.stats["tokens_per_second"]]
    same = sum(a.token_ids == b.token_ids for a, b in pairs)
    return {
        "suite": file.stem,
        "plain": statistics.median(a for a, _ in speeds),
        "lookup": statistics.median(b for _, b in speeds),
        "ratio": statistics.median(b / a for a, b in speeds),
        "tokens_per_forward": statistics.median(b.stats["tokens_per_forward"] for _, b in pairs if b.stats["tokens_per_forward"]),
        "identical": f"{same}/{len(pairs)}",
    }


if __name__ == "__main__":
    main()
