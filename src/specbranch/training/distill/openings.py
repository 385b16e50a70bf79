"""The openings of conversations that a target writes: system prompts, first words of questions, and the turn to the
answer.

Owns what is given to the target; all words here are ours. Invariant: an opening is the chat template's text before a
question, with at most a few first words. The target writes the rest of the question.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import torch

from specbranch.errors import BadParameter, ModelError
from specbranch.models.files.architecture import Architecture
from specbranch.text.tokenizer import Tokenizer
from specbranch.training.distill.writer_settings import LEAST_QUESTION, WriterSettings

log = logging.getLogger("specbranch")

SYSTEMS: tuple[str | None, ...] = (  # None: whatever the template itself puts there
    *(None,) * 16,  # most people leave it at that
    "You are a patient teacher. The user asks about a school subject, and you explain it step by step.",
    "You are an experienced programmer. The user wants a function or a short program, and you write it with a few "
    "words of comment.",
    "You solve word problems in arithmetic. Show each calculation on its own line, then state the result.",
    "You are a careful editor. The user hands you a text, and you rewrite, shorten or correct it.",
    "You are a writer of short stories, letters and poems in whatever tone the user likes.",
    "You give practical advice on work, health, travel and the household, in plain words.",
    "You know science and technology well and answer with precise facts.",
    "You play the part the user asks for and never leave it.",
    "You draw out of a text what was asked for, as a list or a table, and add nothing.",
    "You weigh the arguments on both sides of a question before you come to a conclusion.",
)
TALK = (  # first words of what people ask; mostly none, so that the target chooses
    *("",) * 12,
    *(
        "How",
        "What",
        "Why",
        "Can you",
        "Write a",
        "Write an email",
        "Explain",
        "Describe",
        "Imagine",
        "Compare",
        "Give me",
        "Pretend",
    ),
    *("Suggest", "Tell me", "Which", "Is it true that", "Translate", "Rewrite", "Plan", "Solve", "Draft a", "Think of"),
)
SUMS = (  # word problems in arithmetic
    *(
        "A farmer",
        "Maria",
        "If a",
        "There are",
        "Suppose",
        "A train",
        "Tom has",
        "Lena buys",
        "A bakery sells",
        "A shop",
        "Every day",
    ),
    *(
        "In a class of",
        "Omar earns $",
        "The price of",
        "A box holds",
        "Half of",
        "Two friends",
        "A tank",
        "At the market",
        "Nina reads",
    ),
    *(
        "Ben and his sister",
        "A ticket costs",
        "Each week",
        "A rope",
        "Paul is twice as old as",
        "A car drives",
        "Out of 60",
        "Grandma bakes",
    ),
    *("A team", "Sofia saves", "The school", "It takes", "Five workers", "A garden", "Mr. Cole", "On Monday"),
)
CODE = (  # programs, described in words or started
    *("def",) * 6,
    *(
        "import",
        "from typing import",
        "class",
        "Write a Python function",
        "Write a function that",
        "Complete this code:",
        "Fix this code:",
    ),
    *(
        "Given a list",
        "Given a string",
        "Implement",
        "Write a program",
        "What does this code do?",
        "Write a SQL query",
        "Refactor",
    ),
    *(
        "Complete the following Python function:\n\n```python\ndef",
        "Write a class",
        "Write a test for",
        "How do I",
        "```python\n",
    ),
)
TEXTS = (  # a text is handed over, longer than a question; these may be as long as leaves room for an answer
    *(
        "Summarize:",
        "Summarize the following article:",
        "Summarize this report:",
        "Shorten this text:",
        "Read this story:",
    ),
    *(
        "Here is an article:",
        "What are the main points of this text?",
        "Rewrite the following text:",
        "Extract the names from this article:",
    ),
    *("The following",),
)
OPENING_KINDS = (TALK, SUMS, CODE, TEXTS)
KIND_NAMES = ("talk", "sums", "code", "texts")
GIVEN = "given"  # the kind of a prompt of the user's
LEAST_TEXT = 160  # tokens of a text handed over
LEAST_ANSWER = 16  # tokens that must be left after a user's prompt


@dataclass(frozen=True, slots=True)
class Script:
    """The given tokens: the openings of each kind of conversation, and the tokens between question and answer."""

    openings: tuple[tuple[int, ...], ...]  # in the order they are used, over and over
    asked: tuple[bool, ...]  # whether the opening holds the whole question, up to where the answer begins
    limits: tuple[tuple[int, int], ...]  # least and most tokens of the question behind each opening
    bridge: tuple[int, ...]  # from the end of a question to the beginning of its answer
    question_ends: tuple[int, ...]
    answer_ends: tuple[int, ...]
    kinds: tuple[str, ...] = ()  # of each opening

    @classmethod
    def of(cls, tokenizer: Tokenizer, arch: Architecture, settings: WriterSettings) -> Script:
        """Build the openings in the model's chat template."""
        if not tokenizer.has_chat_template:
            log.warning(
                "%s has no chat template: its conversations are written as plain text, 'user: … assistant: …'.",
                arch.name,
            )
        ends = tuple(dict.fromkeys(token for token in (*tokenizer.eos_ids, *arch.eos_ids) if token < arch.vocabulary))
        if not ends:
            log.warning(
                "%s names no token that ends a turn: every answer goes on to %d tokens.", arch.name, settings.length
            )
        frames, prompts = _frames(tokenizer, settings), _prompts(tokenizer, settings)
        bridge = frames[0].behind
        lines = list(_interleaved(_shuffled(frames, settings.seed), _shuffled(prompts, settings.seed)))
        parts = ((line.before, not line.behind, (line.least, line.most), line.kind) for line in lines)
        openings, asked, limits, kinds = zip(*parts, strict=True)
        script = cls(
            openings, asked, limits, bridge, _question_ends(tokenizer, ends, bridge[0], arch.vocabulary), ends, kinds
        )
        script.check(arch)
        return script

    def kind_of(self, tokens: Sequence[int]) -> str:
        """Return the kind of a conversation of this script, by its longest matching opening."""
        kinds = dict(zip(self.openings, self.kinds, strict=True))
        lengths = sorted({len(opening) for opening in self.openings}, reverse=True)
        candidates = (kinds.get(tuple(tokens[:length])) for length in lengths)
        return next((kind for kind in candidates if kind), GIVEN)

    def check(self, arch: Architecture) -> None:
        """Raise if the model lacks one of the ids."""
        highest = max(*self.bridge, *(max(opening) for opening in self.openings))
        if highest >= arch.vocabulary:
            raise ModelError(
                f"The tokenizer gives id {highest}, but {arch.name} knows {arch.vocabulary}. They do not belong "
                "together."
            )


@dataclass(frozen=True, slots=True)
class _Frame:
    """The tokens around a question, and its maximum length; a given question is followed by nothing."""

    before: tuple[int, ...]
    behind: tuple[int, ...]
    least: int
    most: int
    kind: str = GIVEN

    @property
    def needed(self) -> int:
        """The minimum length of a conversation in this frame."""
        return len(self.before) + self.least + len(self.behind) + LEAST_ANSWER


def _frames(tokenizer: Tokenizer, settings: WriterSettings) -> list[_Frame]:
    """Return a frame for each system prompt and starter that leaves space for an answer."""
    around = cache(partial(_around, tokenizer))  # many are asked for several times
    short, long = (LEAST_QUESTION, settings.question_tokens), (LEAST_TEXT, settings.length * 3 // 5)
    frames = [
        _Frame(*around(system, starter), *(long if kind is TEXTS else short), name)
        for system, (kind, name) in product(_accepted_systems(tokenizer), zip(OPENING_KINDS, KIND_NAMES, strict=True))
        for starter in kind
    ]
    fitting = [frame for frame in frames if frame.needed <= settings.length and frame.least <= frame.most]
    if not fitting:
        least = min(frame.needed for frame in frames)
        raise BadParameter(
            f"length is {settings.length}; the openings of this model's conversations need at least {least}."
        )
    return fitting


def _accepted_systems(tokenizer: Tokenizer) -> tuple[str | None, ...]:
    """Return the system prompts, or none if the template refuses that role."""
    try:
        _around(tokenizer, "You are kind.", "")
    except BadParameter:
        return (None,)
    return SYSTEMS


def _around(tokenizer: Tokenizer, system: str | None, starter: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Compare two questions that share only the starter: their common start and end surround the question."""
    one, other = (_chat(tokenizer, system, f"{starter} {word}".lstrip()) for word in ("apple", "Zulu"))
    before = _common(one, other)
    behind = _common(one[before:][::-1], other[before:][::-1])
    if not before or not behind:
        raise ModelError(
            "The model's chat template puts nothing around a question, so the target cannot know when to answer."
        )
    return tuple(one[:before]), tuple(one[-behind:])


def _chat(tokenizer: Tokenizer, system: str | None, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # plain text for want of a template: said once, by the script
        return tokenizer.chat([{"role": "system", "content": system}, *messages] if system else messages)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _prompts(tokenizer: Tokenizer, settings: WriterSettings) -> list[_Frame]:
    prompts = [_Frame(tuple(_chat(tokenizer, None, prompt)), (), 0, 0) for prompt in settings.prompts]
    fitting = [prompt for prompt in prompts if prompt.needed <= settings.length]
    if left_out := len(prompts) - len(fitting):
        room = settings.length - LEAST_ANSWER
        log.warning("%d of %d prompts are longer than %d tokens and left out.", left_out, len(prompts), room)
    return fitting


def _shuffled(lines: Sequence[_Frame], seed: int) -> list[_Frame]:
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(seed))
    return [lines[at] for at in order.tolist()]


def _interleaved(frames: Sequence[_Frame], prompts: Sequence[_Frame]) -> Iterator[_Frame]:
    """Yield the two kinds in turn; the shorter list repeats until the longer one ends."""
    if not prompts:
        yield from frames
        return
    for at in range(max(len(frames), len(prompts))):
        yield frames[at % len(frames)]
        yield prompts[at % len(prompts)]


def _question_ends(tokenizer: Tokenizer, ends: Sequence[int], first: int, vocabulary: int) -> tuple[int, ...]:
    """Return the ids that close a question: the template's own special token, else any line end."""
    if first in ends or tokenizer.is_silent(first):
        return tuple(dict.fromkeys((first, *ends)))
    lines = [token for token in tokenizer.vocabulary() if token < vocabulary and "\n" in tokenizer.decode([token])]
    return tuple(dict.fromkeys((*lines, *ends)))
