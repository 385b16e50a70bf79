"""Write texts of a real pair for `specbranch bench regret --texts FILE`: the target answers prompts of the shipped
suites, and the draft's candidates are noted at each token.

python scripts/write_regret_texts.py smollm2-default regret-texts.json --limit 8
"""

from __future__ import annotations

import argparse
from pathlib import Path

from specbranch.lab.bench.recorded_pair import RecordedPair, Workload
from specbranch.lab.regret.case import REQUEST_TOKENS
from specbranch.lab.regret.recorded_texts import save_texts, texts_of
from specbranch.lab.suites.suite import ALL_SHIPPED, load_suites


def main() -> None:
    """Record, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair")
    parser.add_argument("out", type=Path)
    parser.add_argument("--suites", default=ALL_SHIPPED, help="names with commas")
    parser.add_argument("--limit", type=int, default=8, help="prompts of each suite")
    given = parser.parse_args()
    suites = load_suites(given.suites.split(","), limit=given.limit)
    prompts = [(prompt, Workload(max_tokens=REQUEST_TOKENS)) for suite in suites for prompt in suite.prompts]
    with RecordedPair(pair=given.pair) as recorded:
        assert recorded.draft is not None, "a pair has a draft"
        records = recorded.record(prompts, lambda what, done, of: print(f"\r{what} {done}/{of}", end="", flush=True))
        texts = texts_of(records, recorded.draft)
    save_texts(given.out, texts)
    print(f"\n{given.out}: {len(texts)} of {len(records)} answers have {REQUEST_TOKENS} tokens")


if __name__ == "__main__":
    main()
