"""The openings of conversations that a target writes, in its chat template: the text before a question, the turn to the
answer, and later questions.

Owns what is given to the target, token by token; the words are in `opening_words.py` and `given_data.py`. Invariants:
an opening has at most a few first words of a question, and the target writes the rest; those about made-up data and
the user's are whole. A later question follows an answer that the target ended.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from random import Random

import torch

from specbranch.errors import BadParameter, ModelError
from specbranch.models.files.architecture import Architecture
from specbranch.text.chat_template import Message
from specbranch.text.tokenizer import Tokenizer
from specbranch.training.distill.given_data import data_questions
from specbranch.training.distill.material import GIVEN, TEXT_KINDS
from specbranch.training.distill.opening_words import DATA_SHARE, DATA_TURNS, ON_DATA, SYSTEMS, TALKS
from specbranch.training.distill.writer_settings import LEAST_QUESTION, WriterSettings

log = logging.getLogger("specbranch")

Pair = tuple[str | None, str]  # a system prompt, and first words of a question
KIND_NAMES = tuple(kind for kind in TEXT_KINDS if kind != GIVEN)
FRAMES = 1200  # openings of a script, the user's prompts aside; another seed draws others
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
    # later questions, each from the end of an answer to the beginning of its own; and for each opening their numbers
    turns: tuple[tuple[int, ...], ...] = ()
    later: tuple[tuple[int, ...], ...] = ()
    turn_end: int | None = None  # the token that ends an answer where a later question may follow

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
        closing = _question_ends(tokenizer, ends, bridge[0], arch.vocabulary)
        turns = _Turns.of(tokenizer, lines, ends)
        later = tuple(turns.numbers(line) for line in lines)
        script = cls(openings, asked, limits, bridge, closing, ends, kinds, turns.tokens, later, turns.end)
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
        highest = max(*self.bridge, *(max(tokens) for tokens in (*self.openings, *self.turns)))
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
    later: tuple[str, ...] = ()  # questions of the same conversation

    @property
    def needed(self) -> int:
        """The minimum length of a conversation in this frame."""
        return len(self.before) + self.least + len(self.behind) + LEAST_ANSWER


def _frames(tokenizer: Tokenizer, settings: WriterSettings) -> list[_Frame]:
    """Return frames that leave space for an answer: of each kind its share, as far as that fits at all."""
    random, systems = Random(settings.seed), _accepted_systems(tokenizer)
    around = cache(partial(_around, tokenizer))  # some are asked for several times
    found, least = list[_Frame](), list[int]()
    for kind in TALKS:
        limits = (LEAST_TEXT, settings.length * 3 // 5) if kind.long else (LEAST_QUESTION, settings.question_tokens)
        count = round(kind.share * FRAMES)
        drawn = _drawn_evenly(random, list(product(systems, dict.fromkeys(kind.starters))), count)
        frames = [_Frame(*around(*pair), *limits, kind.name) for pair in drawn if limits[0] <= limits[1]]
        fitting = [frame for frame in frames if frame.needed <= settings.length]
        least += [frame.needed for frame in frames]
        found += [replace(frame, later=_drawn(random, kind.later, kind.turns)) for frame in fitting]
    if not found:
        raise BadParameter(
            f"length is {settings.length}; the openings of this model's conversations need at least {min(least)}."
        )
    return found + _data_frames(tokenizer, settings, random)


def _drawn_evenly(random: Random, pairs: Sequence[Pair], count: int) -> list[Pair]:
    """Draw each as often as another, or once more."""
    whole, rest = divmod(count, len(pairs))
    return [*pairs] * whole + random.sample(pairs, rest)


def _drawn(random: Random, questions: Sequence[str], turns: Sequence[int]) -> tuple[str, ...]:
    return tuple(random.sample(questions, random.choice(turns)))


def _data_frames(tokenizer: Tokenizer, settings: WriterSettings, random: Random) -> list[_Frame]:
    """Return whole questions about tables and records that were made up."""
    texts = data_questions(round(DATA_SHARE * FRAMES), settings.seed)
    frames = [_Frame(tuple(_chat(tokenizer, None, text)), (), 0, 0, "data") for text in texts]
    fitting = [frame for frame in frames if frame.needed <= settings.length]
    return [replace(frame, later=_drawn(random, ON_DATA, DATA_TURNS)) for frame in fitting]


@dataclass(frozen=True, slots=True)
class _Turns:
    """Later questions in the chat template, behind the token that ends the answer before."""

    end: int | None  # None: the template has no such token, so nothing follows an answer
    tokens: tuple[tuple[int, ...], ...]
    places: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, frames: Sequence[_Frame], ends: Sequence[int]) -> _Turns:
        """Build them for all frames."""
        questions = list(dict.fromkeys(question for frame in frames for question in frame.later))
        found = [_turn(tokenizer, question) for question in questions]
        first = {tokens[0] for tokens in found if tokens}
        if len(first) != 1 or not first <= set(ends):
            return cls(None, (), {})
        return cls(first.pop(), tuple(tokens[1:] for tokens in found), {one: at for at, one in enumerate(questions)})

    def numbers(self, frame: _Frame) -> tuple[int, ...]:
        """Return the numbers of a frame's later questions."""
        return tuple(self.places[question] for question in frame.later if question in self.places)


def _turn(tokenizer: Tokenizer, question: str) -> tuple[int, ...]:
    """Return the tokens from the end of an answer to the beginning of the next: what two chats share whose answers
    differ."""
    asked, then = {"role": "user", "content": "Hi"}, {"role": "user", "content": question}
    chats = [[asked, {"role": "assistant", "content": word}, then] for word in ("apple", "Zulu")]
    one, other = (_rendered(tokenizer, chat) for chat in chats)
    return tuple(one[len(one) - _common(one[::-1], other[::-1]) :])


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
    return _rendered(tokenizer, [{"role": "system", "content": system}, *messages] if system else messages)


def _rendered(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # plain text for want of a template: said once, by the script
        return tokenizer.chat(messages)


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
