"""Search the material drafts were trained on for benchmark prompts: `python scripts/check_material.py DIR/training
PROMPTS.jsonl …`

The exam for planners (the suites `exam-…`) is always looked for, too. A prompt counts as found if 13 successive words
of it are in a conversation, in any case and punctuation. Of a prompt with fewer words, all have to be there; prompts of
fewer than 6 words do not count. This is the usual measure of contamination. The script prints what was found, and exits
with 1 if anything was. With --planted it first hides one prompt in the material, in memory, and must find it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from specbranch.assembly import ModelChoice, load_tokenizer
from specbranch.cli.progress import pulled
from specbranch.lab.suites.suite import EXAM, PROMPTS_FOLDER
from specbranch.training.distill.material import material_in

STRETCH, SHORTEST = 13, 6  # words


def main() -> int:
    """Search, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("material", type=Path)
    parser.add_argument("prompts", type=Path, nargs="*")
    parser.add_argument("--target", default="smollm2-135m", help="whose tokenizer reads the material [smollm2-135m]")
    parser.add_argument(
        "--planted", action="store_true", help="hide the first prompt in the material first: it must be found"
    )
    given = parser.parse_args()
    looked_for = wanted(given.prompts)
    stretches = {stretch: name for name, one in looked_for.items() for stretch in cut(one)}
    texts = conversations(given.material, given.target)
    hidden = [" ".join(next(iter(looked_for.values())))] if given.planted else []
    found, searched = search(stretches, [*hidden, *texts])
    for name, text in sorted(found.items()):
        print(f"{name}: {text}")
    print(
        f"{searched:,} conversations searched for {len(stretches):,} stretches of {len(looked_for):,} prompts: "
        f"{len(found)} found"
    )
    return 1 if found else 0


def wanted(files: list[Path]) -> dict[str, tuple[str, ...]]:
    """Return the words of each prompt of some files, and of the exam for planners."""
    exam = [PROMPTS_FOLDER / f"{name}.jsonl" for name in EXAM]
    return {
        f"{file.name}:{number}": words(text) for file in (*files, *exam) for number, text in enumerate(prompts(file), 1)
    }


def prompts(file: Path) -> Iterator[str]:
    """Yield each turn of each prompt."""
    for line in filter(None, file.read_text(encoding="utf-8").split("\n")):
        yield from json.loads(line)["turns"]


def words(text: str) -> tuple[str, ...]:
    """Return the words, in lower case and without punctuation."""
    return tuple(re.findall(r"[^\W_]+", text.lower()))


def cut(text: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield every stretch of words that identifies a text."""
    if SHORTEST <= len(text) <= STRETCH:
        yield text
    yield from (text[at : at + STRETCH] for at in range(len(text) - STRETCH + 1) if len(text) > STRETCH)


def conversations(folder: Path, target: str) -> Iterator[str]:
    """Yield the text of each conversation."""
    tokenizer = load_tokenizer(ModelChoice(pulled(target)))
    material = material_in(folder)
    for index in range(len(material)):
        yield tokenizer.decode(material.sequence(index))


def search(stretches: dict[tuple[str, ...], str], texts: list[str] | Iterator[str]) -> tuple[dict[str, str], int]:
    """Return which prompts were found, each with the words it was known by, and how many texts were searched."""
    sizes, found, searched = sorted({len(stretch) for stretch in stretches}), dict[str, str](), 0
    for text in texts:
        here, searched = words(text), searched + 1
        for size in sizes:
            for at in range(len(here) - size + 1):
                if name := stretches.get(here[at : at + size]):
                    found[name] = " ".join(here[at : at + size])
    return found, searched


if __name__ == "__main__":
    sys.exit(main())
