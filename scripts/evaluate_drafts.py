"""Compare drafts with their target over whole prompt files: `python scripts/evaluate_drafts.py --texts texts.jsonl
PROMPTS.jsonl …`

The target answers each prompt once, greedily, with at most 128 tokens; only first turns are answered. --texts keeps its
answers, so a stopped run can continue, and every draft is compared with the same ones. The script prints a table of
top-1 and top-3 agreement by file, and their mean over all prompts. With --note the figures go into each draft's
provenance.json and README.md.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specbranch import LLM, SamplingParams
from specbranch.assembly import ModelChoice, common_vocabulary, fitted_to_target, make_drafter
from specbranch.cli.progress import tracked
from specbranch.pairs import PAIRS, draft_folder
from specbranch.training.distill.agreement import Agreement, AnsweredPrompt, compare

TARGET, TOKENS = "smollm2-135m", 128


def main() -> None:
    """Record missing answers, compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="+", help="files as for generate --file")
    parser.add_argument("--texts", type=Path, required=True, help="where the target's answers are kept")
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS), help="pairs to compare [all]")
    parser.add_argument("--note", action="store_true", help="write the figures into the drafts' folders")
    given = parser.parse_args()
    suites = {
        file.stem: [json.loads(line)["turns"][0] for line in file.read_text(encoding="utf-8").splitlines()]
        for file in given.prompts
    }
    with LLM(TARGET, pair_draft(given.pairs[0])) as target:
        texts = recorded(target, suites, given.texts)
        found = {pair: agreements(target, pair, texts) for pair in given.pairs}
    for pair, by_suite in found.items():
        print(f"{pair:16} " + "  ".join(f"{suite} {one.top1:.3f} ({one.top3:.3f})" for suite, one in by_suite.items()))
        print(
            f"{'':16} over all prompts {over_prompts(by_suite, texts, 'top1'):.3f} "
            f"({over_prompts(by_suite, texts, 'top3'):.3f})"
        )
        if given.note:
            note(draft_folder(pair), by_suite, texts)


def pair_draft(pair: str) -> str:
    """Return the draft that helps the target to answer; it changes nothing but the time that takes."""
    return str(draft_folder(pair))


def recorded(target: LLM, suites: Mapping[str, list[str]], file: Path) -> dict[str, list[AnsweredPrompt]]:
    """Return the target's answers by suite, making those that are missing; suites take turns, so that a part is a
    fair sample."""
    held = {line["id"]: line for line in map(json.loads, file.read_text().splitlines())} if file.exists() else {}
    order = sorted((at / len(prompts), suite, at) for suite, prompts in suites.items() for at in range(len(prompts)))
    missing = [(suite, at) for _, suite, at in order if f"{suite}/{at}" not in held]
    with file.open("a", encoding="utf-8") as kept:
        for suite, at in tracked(missing, "The target answers"):
            ids = target.tokenizer.chat([{"role": "user", "content": suites[suite][at]}])
            answer = target.generate([ids], SamplingParams(max_tokens=TOKENS))[0]
            if answer.error is not None:
                raise answer.error
            held[f"{suite}/{at}"] = {"prompt": list(ids), "answer": list(answer.token_ids)}
            kept.write(json.dumps({"id": f"{suite}/{at}", **held[f"{suite}/{at}"]}) + "\n")
            kept.flush()
    return {suite: list(_texts(held, suite, len(prompts))) for suite, prompts in suites.items()}


def _texts(held: Mapping[str, Any], suite: str, count: int) -> Iterator[AnsweredPrompt]:
    for at in range(count):
        line = held[f"{suite}/{at}"]
        yield AnsweredPrompt(tuple(line["prompt"]), tuple(line["answer"]))


def agreements(target: LLM, pair: str, texts: Mapping[str, list[AnsweredPrompt]]) -> dict[str, Agreement]:
    """Compare a pair's draft with the answers of each suite."""
    choice = fitted_to_target(ModelChoice(str(draft_folder(pair)), shorten=True), TARGET)
    drafter = make_drafter(choice, common_vocabulary(target.tokenizer, choice), target.target_runner)
    return {suite: compare(drafter.runner, tracked(lines, f"{pair}: {suite}")) for suite, lines in texts.items()}


def over_prompts(found: Mapping[str, Agreement], texts: Mapping[str, list[AnsweredPrompt]], figure: str) -> float:
    """Return the mean over all prompts, each suite by the number of its prompts."""
    whole = sum(len(lines) for lines in texts.values())
    mean: float = sum(getattr(found[suite], figure) * len(lines) for suite, lines in texts.items()) / whole
    return mean


def note(folder: Path, found: Mapping[str, Agreement], texts: Mapping[str, list[AnsweredPrompt]]) -> None:
    """Write the figures into a draft's provenance and card."""
    figures = {
        suite: {"prompts": len(texts[suite]), "top1": round(one.top1, 4), "top3": round(one.top3, 4)}
        for suite, one in found.items()
    }
    figures["all prompts"] = {name: round(over_prompts(found, texts, name), 4) for name in ("top1", "top3")}
    provenance = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    card = json.dumps({**provenance, "evaluation": figures}, indent=2, ensure_ascii=False)
    (folder / "provenance.json").write_text(card + "\n", encoding="utf-8")
    card = (folder / "README.md").read_text(encoding="utf-8")
    card = re.sub(r"## Evaluation\n.*?(?=\n## )", "", card, flags=re.DOTALL)
    rows = "".join(
        f"| {suite} | {one.get('prompts', '')} | {one['top1']:.3f} | {one['top3']:.3f} |\n"
        for suite, one in figures.items()
    )
    section = (
        f"## Evaluation\n\nOn the target's own greedy answers (at most {TOKENS} tokens) to prompts it was not trained "
        f"on; see scripts/evaluate_drafts.py.\n\n| prompts | count | top-1 | top-3 |\n|---|---|---|---|\n{rows}\n"
    )
    (folder / "README.md").write_text(
        card.replace("## How it was made", section + "## How it was made"), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
