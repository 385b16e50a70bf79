"""Translates between the vocabularies of a target and a draft: strings that both have one to one, the rest over text.

Owns which token of one stands for which of the other, and the sentence about it. Invariants: the draft's law over its
own tokens gives one over the target's: each draft token counts for the target's first token of its text. What the draft
reads of a text is that text, tokenised for it.
"""

from __future__ import annotations

from bisect import bisect_left
from codecs import utf_8_decode
from collections.abc import Sequence
from functools import cached_property

from specbranch.core.reading import Reading
from specbranch.errors import VocabularyMismatch
from specbranch.text.spelling import Spelling
from specbranch.text.tokenizer import Tokenizer

OPEN_TOKENS = 3  # draft tokens at the end of a text that more text may still change; a character has at most 4 bytes
FEW = 0.5  # share of common strings below which little is to be expected


class Translation:
    """The ids of a target in those of a draft, and back."""

    def __init__(self, target: Tokenizer, draft: Tokenizer, draft_size: int | None = None) -> None:
        """Raise VocabularyMismatch, naming the reason, if one of them cannot be translated.

        `draft_size`: how many ids the draft's model knows; None: all that its tokenizer has.
        """
        self._target, self._draft = Spelling(target), Spelling(draft, draft_size)
        self.vocabulary = target.vocabulary_size
        self._special = _special_tokens(self._target, self._draft)
        begin = tuple(token for token in draft.encode("") if token in self._draft.special.values())
        self.start = Reading(begin, len(begin), fresh=True)
        self._same = {
            token: found
            for token, value in self._target.strings.items()
            if value and (found := self._draft.ids.get(value)) is not None
        }
        if not self._same:
            raise VocabularyMismatch(
                "Draft and target have no token string in common. Use a draft of the target's own family, or method "
                "'lookup', which needs no draft."
            )

    @property
    def shared(self) -> int:
        """How many of the draft's strings the target has, too."""
        ours, theirs = self._target, self._draft
        return len(ours.ids.keys() & theirs.ids.keys()) + len(ours.special.keys() & theirs.special.keys())

    def sentence(self) -> str:
        """Say what the two have in common, and what to expect."""
        ours, theirs = (len(one.ids) + len(one.special) for one in (self._target, self._draft))
        shared = self.shared
        hope = "few accepted tokens" if shared < FEW * min(ours, theirs) else "fewer accepted tokens"
        return (
            f"The draft has another vocabulary: {shared:,} token strings are common, {shared / theirs:.0%} of the "
            f"draft's {theirs:,} and {shared / ours:.0%} of the target's {ours:,}. These are drafted one to one, the "
            f"others over text. Answers stay the same; expect {hope} than from a draft of the target's own family."
        )

    @cached_property
    def first_ids(self) -> Sequence[int]:
        """The target's first token for each draft id; −1: the target cannot say it."""
        found = [-1] * self._draft.tokenizer.vocabulary_size
        for draft_id, value in self._draft.strings.items():
            found[draft_id] = self._target.ids[value] if value in self._target.ids else self._first(value)
        for token, draft_id in reversed(self._special.items()):
            found[draft_id] = token
        return found

    def read(self, reading: Reading, token: int) -> Reading:
        """Return what the draft has read behind one more token of the target."""
        value = self._target.strings.get(token)
        if value is None:  # special tokens are never tokenised with the text around them
            return self._read_special(reading, token)
        if reading.fresh:
            value = self._first_text(value)
        text = reading.open + value
        new = self._draft.ids_of(text)
        ids = reading.ids[: reading.settled] + new
        settled = self._draft.text_of(new[: max(len(new) - OPEN_TOKENS, 0)])
        if self._draft.text_of(new) != text:  # the draft cannot spell it, unless a character is not complete yet
            return Reading(ids, reading.settled, text) if _is_unfinished(text) else Reading(ids, len(ids))
        return Reading(ids, max(len(ids) - OPEN_TOKENS, reading.settled), text[len(settled) :])

    def same(self, token: int) -> int | None:
        """Return the draft's id of the same string; None: it has none."""
        return self._same.get(token)

    def first_of(self, ids: Sequence[int]) -> tuple[int, bool] | None:
        """Return the target's first token of the text of draft ids, and True if it is all of that text."""
        if any(draft_id not in self._draft.strings for draft_id in ids[1:]):
            ids = ids[:1]  # a special token ends the text before it
        value = self._draft.text_of(tuple(ids))
        found = self._target.exactly(value)
        return (found[0], len(found) == 1) if found else None

    def longer(self, draft_id: int) -> Sequence[int]:
        """Return the draft ids whose strings begin with that of `draft_id` and go on."""
        value = self._draft.strings.get(draft_id)
        if not value:
            return ()
        strings, ids = self._sorted
        start = bisect_left(strings, value)
        # no UTF-8 and no broken part of it has the byte 0xFF
        end = bisect_left(strings, value + b"\xff", start)
        return [one for one, string in zip(ids[start:end], strings[start:end], strict=True) if len(string) > len(value)]

    def first_after(self, longer: int, draft_id: int) -> int | None:
        """Return the target's first token of what `longer` has beyond `draft_id`; None: the target cannot say it."""
        rest = self._draft.strings[longer][len(self._draft.strings[draft_id]) :]
        return None if (found := self._first(rest)) < 0 else found

    def _first(self, value: bytes) -> int:
        found = self._target.exactly(value)
        return found[0] if found else -1

    def _read_special(self, reading: Reading, token: int) -> Reading:
        """Read a special token: as the draft's of that name or role, else as its name."""
        known = self._special.get(token)
        if known in reading.ids and reading == self.start:
            return reading  # both begin a text with it
        text = self._target.tokenizer.token(token).encode()
        ids = reading.ids + (self._draft.ids_of(text) if known is None else (known,))
        return Reading(ids, len(ids), fresh=reading.fresh)

    def _first_text(self, value: bytes) -> bytes:
        """Return the first text; a space that only one of the two puts before every text is no part of it."""
        ours, theirs = self._target.leads_with_space, self._draft.leads_with_space
        return value if ours == theirs else b" " + value if theirs else value.removeprefix(b" ")

    @cached_property
    def _sorted(self) -> tuple[list[bytes], list[int]]:
        """The draft's strings in order, and their ids."""
        found = sorted((value, draft_id) for draft_id, value in self._draft.strings.items() if value)
        return [value for value, _ in found], [draft_id for _, draft_id in found]


def _is_unfinished(text: bytes) -> bool:
    """True if a text ends within a character."""
    return utf_8_decode(text, "replace", False)[1] < len(text)


def _special_tokens(target: Spelling, draft: Spelling) -> dict[int, int]:
    """Return the draft's special token for those of the target that it has, by name, else by role."""
    found = {token: draft.special[name] for name, token in target.special.items() if name in draft.special}
    ends = [end for end in draft.tokenizer.eos_ids if end in draft.special.values()]
    begins = [one.special.get(one.tokenizer.special.get("bos_token", "")) for one in (target, draft)]
    roles = [(token, end) for token in target.tokenizer.eos_ids for end in ends[:1]]
    for token, draft_id in (*roles, begins):
        if token is not None and draft_id is not None:
            found.setdefault(token, draft_id)
    return found
