"""Two prompts that show what speculation brings and what it does not: the demonstration and the page's race run both.

Owns the prompts, our own, and the sentence that explains each result. SmolLM2-135M-Instruct answers both sensibly. Also
the forms in which the page's chat can ask for an answer, as schemas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, what kind of answer it has, and why that matters."""

    name: str
    title: str
    prompt: str
    why: str


_PARAGRAPH = (
    "The harbour of Skallen lies behind two long walls of grey stone. The northern wall was builded in 1842 by "
    "fishermen who had lost there boats to the winter storms, and the southern one followed twenty years later. "
    "Between them there is room for forty boats. Today only six familys still fish; most of the boats belong to "
    "people who come in July and leave in August."
)
COPYING = Example(
    "copying",
    "an edit: the answer copies most of the prompt",
    f"Correct the mistakes in this paragraph:\n\n{_PARAGRAPH}",
    "Most of this answer stands in the prompt. SpecBranch looks the next words up there, and one forward of the "
    "target confirms several of them.",
)
FREE = Example(
    "free",
    "a free answer: nothing to copy from",
    "Explain what a hash table is, and why it is fast.",
    "Little of this answer can be foreseen. A draft pays here only where checking many tokens costs the target hardly "
    "more than one, as on a GPU.",
)
EXAMPLES = (COPYING, FREE)


@dataclass(frozen=True, slots=True)
class Form:
    """A form of answers: its title, and the schema that an answer follows."""

    title: str
    schema: Mapping[str, Any]


_SHORT = {"type": "string", "maxLength": 160}
ANSWER_FORMS = {
    "json": Form(
        "JSON: answer, reason, certainty",
        {
            "type": "object",
            "properties": {
                "short_answer": _SHORT,
                "reason": _SHORT,
                "certainty": {"enum": ["certain", "likely", "unknown"]},
            },
            "required": ["short_answer", "reason", "certainty"],
            "additionalProperties": False,
        },
    )
}
