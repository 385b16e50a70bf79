"""Token ids to text, a few at a time: returned text is final and never ends within a character.

Owns the window of tokens whose text is not final yet. Invariant: the returned texts, joined, are exactly the text of
the whole list decoded at once. Each token is decoded a bounded number of times, also if `pending` is read often.

A byte-level tokenizer's text is that of its tokens' bytes; only the bytes of an unfinished character are held back.
Other decoders treat the beginning of a list apart (they drop a leading space, say), so the window starts with
*context*: tokens given out already, whose text is not empty. The new text is what the window's text has beyond the
context's.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Protocol

from specbranch.text.byte_letters import TokenBytes

UNFINISHED = "\ufffd"  # what a decoder returns for bytes that are no character, or not yet one
_LONG = 32  # tokens held back before a cut between them is searched for
_SPAN = 4  # a character has at most four bytes, so one of four neighbouring cuts falls between characters
_LONGEST = _SPAN + 1  # bytes that make one character more: a decoder may drop a space at the beginning of a text


class TokenDecoder(Protocol):
    """The part of a tokenizer that this file calls."""

    @property
    def byte_ids(self) -> frozenset[int]:
        """The tokens that are decoded run by run."""
        ...

    def token_bytes(self, skip_special: bool = True) -> TokenBytes | None:
        """Return the bytes of each token, if the text of tokens is that of their bytes; None for other decoders."""
        ...

    def is_silent(self, token_id: int, skip_special: bool = True) -> bool:
        """Return True if decoding skips the token as if it were not there."""
        ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of some ids."""
        ...


class Detokenizer:
    """Decodes one list of tokens as it gets longer."""

    def __init__(self, tokenizer: TokenDecoder, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window: list[int] = []
        self._given = 0  # tokens at the window's start that are context
        self._context = ""  # their text
        self._run: _ByteRun | None = None  # the run of bytes at the window's end, once `pending` was read
        self._bytes = tokenizer.token_bytes(skip_special)  # of a byte-level tokenizer, which needs no window
        self._rest = b""  # its bytes of an unfinished character

    def feed(self, token_ids: Sequence[int]) -> str:
        """Append tokens; return the text that became final."""
        return "".join([self.feed_one(token) for token in token_ids])

    def feed_one(self, token: int) -> str:
        """Append one token; return the text that became final."""
        if self._bytes is None:
            return self._append(token)
        new, text = self._bytes[token]
        if text is not None and not self._rest:
            return text
        held = self._rest + new
        whole, used = utf_8_decode(held, "replace", False)
        self._rest = held[used:]
        return whole

    def finish(self) -> str:
        """Return the text still held back, with U+FFFD for bytes that never became a character."""
        if self._bytes is not None:
            rest, self._rest = utf_8_decode(self._rest, "replace", True)[0], b""
            return rest
        rest = self._text(self._window)[len(self._context) :]
        self._window, self._given, self._context, self._run = [], 0, "", None
        return rest

    def pending(self, start: int = 0) -> str:
        """Return the text held back, from a character on, as if nothing followed. An unfinished character is left
        out."""
        if self._given == len(self._window):
            return ""
        if self._window[-1] not in self._tokenizer.byte_ids:
            self._run = None
            return self._text(self._window)[len(self._context) :].rstrip(UNFINISHED)[start:]
        if self._run is None:
            self._run = _ByteRun(self._window, self._run_start(), len(self._context), self._text)
        return self._run.text(start).rstrip(UNFINISHED)

    def _append(self, token: int) -> str:
        if self._tokenizer.is_silent(token, self._skip_special):
            return ""  # it does not even end a run of bytes
        self._window.append(token)
        if token in self._tokenizer.byte_ids:
            return ""  # one bad byte later on would change the text of the whole run
        self._run = None
        text = self._text(self._window)
        if text.endswith(UNFINISHED):
            return self._relieve(text) if len(self._window) - self._given > _LONG else ""
        new = text[len(self._context) :]
        self._settle(text)
        return new

    def _settle(self, text: str) -> None:
        """Make the window's newest tokens its context. If they have no text, the older context stays, too."""
        fresh = self._text(self._window[self._given :])
        if fresh:
            self._window = self._window[self._given :]
        self._given, self._context = len(self._window), fresh or text

    def _relieve(self, text: str) -> str:
        """Return all but the end of a long window, if a cut between tokens provably changes nothing."""
        for cut in range(len(self._window) - _SPAN, len(self._window) - 2 * _SPAN, -1):
            before = self._text(self._window[:cut])
            for start in range(cut - 1, cut - 1 - _SPAN, -1):
                context = self._text(self._window[start:cut])
                if context and text == before + self._text(self._window[start:]).removeprefix(context):
                    new = before[len(self._context) :]
                    self._window, self._given, self._context = self._window[start:], cut - start, context
                    return new
        return ""

    def _run_start(self) -> int:
        """Return the start of the run of bytes at the window's end."""
        start = len(self._window)
        while start > self._given and self._window[start - 1] in self._tokenizer.byte_ids:
            start -= 1
        return start

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, self._skip_special)


class _ByteRun:
    """A run of byte tokens at the end of a window, decoded character by character as it gets longer.

    A decoder decodes a run as a whole: one bad byte makes every byte of it U+FFFD. So the run has a text only while it
    ends with a character, and never again after a bad byte.
    """

    def __init__(self, window: list[int], start: int, context: int, decode: Callable[[Sequence[int]], str]) -> None:
        """`start`: the first token of the run. `context`: characters of the text before it that were returned."""
        self._window, self._decode = window, decode
        self._before = decode(window[:start])[context:]  # held back before the run
        self._read = start  # the window up to here makes whole characters
        self._starts = [0, 0]  # of the last two of them: what a character is read behind
        self._characters = list(self._before)
        self._broken = False

    def text(self, start: int) -> str:
        """The text from a character on. While the run does not end with a character, its text is left out."""
        while not self._broken and self._read < len(self._window) and self._read_one():
            pass
        whole = not self._broken and self._read == len(self._window)
        return "".join(self._characters[start:]) if whole else self._before[start:]

    def _read_one(self) -> bool:
        """Decode one more character, if its bytes are there."""
        first = self._starts[0]
        before = self._decode(self._window[first : self._read])
        for count in range(1, min(_LONGEST, len(self._window) - self._read) + 1):
            text = self._decode(self._window[first : self._read + count])
            new = text[len(before) :]
            # Bytes that are no character become as many U+FFFD.
            if text.startswith(before) and len(new) == 1 and (new != UNFINISHED or count > 1):
                self._starts = [self._starts[1], self._read]
                self._read += count
                self._characters.append(new)
                return True
        self._broken = len(self._window) - self._read >= _LONGEST
        return False
