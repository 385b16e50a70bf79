"""How single tokens are written beside their log-probabilities.

Owns the text and the bytes of one token. Invariant: the texts of the tokens of a whole answer, joined, are that answer
wherever no character is split between tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbranch.core.orders import TokenLogprobs
from specbranch.serve.protocol import CompletionLogprobs, TokenLogprob, TopLogprob
from specbranch.text.byte_letters import byte_letters
from specbranch.text.detokenizer import UNFINISHED

if TYPE_CHECKING:
    from specbranch.text.tokenizer import Tokenizer

MINUS_INFINITY = -9999.0  # stands for minus infinity, which JSON does not know


class Spelling:
    """Writes the tokens of one tokenizer; each is computed once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Return a token as it reads within a text; bytes that are no character become U+FFFD."""
        if token not in self._texts:
            # decoded behind itself, because a decoder drops the space before the first token
            once = self._tokenizer.decode([token], skip_special=False)
            self._texts[token] = self._tokenizer.decode([token, token], skip_special=False)[len(once) :]
        return self._texts[token]

    def bytes(self, token: int) -> list[int] | None:
        """Return a token's bytes; None if they are not known."""
        text = self.text(token)
        if UNFINISHED not in text:
            return list(text.encode())
        spelled = self._tokenizer.token(token)
        if token in self._tokenizer.byte_ids:
            return [int(spelled[3:5], 16)]
        known = byte_letters()
        return [known[letter] for letter in spelled] if all(letter in known for letter in spelled) else None

    def chat(self, token: int, scores: TokenLogprobs) -> TokenLogprob:
        """Return a token's log-probabilities in the form of chats."""
        top = [self._top(one, logprob) for one, logprob in scores.top]
        return TokenLogprob(**self._top(token, scores.logprob).model_dump(), top_logprobs=top)

    def completion(
        self, tokens: list[int], scores: list[TokenLogprobs | None], texts: list[str], start: int
    ) -> CompletionLogprobs:
        """Return tokens' log-probabilities in the form of completions. `texts` is what each made final, the first at
        `start`."""
        offsets = [start]
        for text in texts[:-1]:
            offsets.append(offsets[-1] + len(text))
        return CompletionLogprobs(
            tokens=[self.text(token) for token in tokens],
            token_logprobs=[None if one is None else _finite(one.logprob) for one in scores],
            top_logprobs=[self._tops(*pair) for pair in zip(tokens, scores, strict=True)],
            text_offset=offsets,
        )

    def _top(self, token: int, logprob: float) -> TopLogprob:
        return TopLogprob(token=self.text(token), logprob=_finite(logprob), bytes=self.bytes(token))

    def _tops(self, token: int, scores: TokenLogprobs | None) -> dict[str, float] | None:
        if scores is None:
            return None
        found: dict[str, float] = {}
        for one, logprob in (*scores.top, (token, scores.logprob)):
            found.setdefault(self.text(one), _finite(logprob))  # of tokens with the same text, the likeliest stays
        return found


def _finite(logprob: float) -> float:
    return max(logprob, MINUS_INFINITY)
