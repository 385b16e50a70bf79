"""What a user gets back: an `Output`, whole or `Chunk` by `Chunk`, and the unfinished `Answer` it is made from.

Owns the pairing of a session with its decoding and its text. It runs no rounds. Invariant: the texts of all chunks,
joined, are the output's text, whichever thread takes them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specbranch.config import SamplingParams
from specbranch.core.methods import MethodRounds
from specbranch.core.orders import TokenLogprobs
from specbranch.core.request import Request
from specbranch.core.session import FinishReason, Origin, Session
from specbranch.decoding import Decoding
from specbranch.text.detokenizer import Detokenizer
from specbranch.text.stop import StopStrings

if TYPE_CHECKING:
    from specbranch.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of an answer.

    Attributes:
        text: the text that it made final. It may be empty: a character can take several tokens.
        origin: where it came from: "target", "draft" or "branch".
        token: its id.
        logprobs: its log-probability and those of the most likely tokens, if requested.
    """

    text: str
    origin: Origin
    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """One finished answer: its text and tokens, how it was made, and its statistics.

    Attributes:
        text: the text, up to a stop string.
        token_ids: the tokens.
        finish_reason: why it ended: "stop", "length" or "error".
        method: the name of the method that decoded it.
        stats: the statistics: times, forwards, drafted and accepted tokens, rollback and more.
        prompt_token_ids: the prompt's tokens.
        params: how it was sampled.
        seed: the seed that was used. A request without one got it at random.
        rule: the acceptance rule, "match" or "ratio".
        pieces: the tokens with their texts and origins.
        logprobs: log-probabilities of each token. None: not requested.
        sample: its number among the n samples of the prompt, from 0.
        alternatives: the other samples if n is above 1.
        error: what ended the request before it was finished. None: nothing did.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    method: str
    stats: dict[str, Any]
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    rule: str
    pieces: tuple[Piece, ...] = field(default=(), repr=False)
    logprobs: tuple[TokenLogprobs, ...] | None = field(default=None, repr=False)
    sample: int = 0
    alternatives: tuple[Output, ...] = field(default=(), repr=False)
    error: Exception | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what `--json` prints and `verify` reads."""
        values: dict[str, Any] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "method": self.method,
            "stats": self.stats,
            "seed": self.seed,
            "sample": self.sample,
            "rule": self.rule,
            "prompt_token_ids": list(self.prompt_token_ids),
            "params": asdict(self.params),
            "origins": [piece.origin for piece in self.pieces],
        }
        if self.logprobs is not None:
            values["logprobs"] = [
                {"logprob": entry.logprob, "top": [list(pair) for pair in entry.top]} for entry in self.logprobs
            ]
        if self.error is not None:
            values["error"] = str(self.error)
        if self.alternatives:
            values["alternatives"] = [other.to_dict() for other in self.alternatives]
        return values


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round added to an answer; the last one carries the whole output.

    An answer that ends without a new token, by its deadline say, may still have text that was held back. The last chunk
    has it as `rest`. In the output it belongs to the last piece.

    Attributes:
        pieces: the new tokens.
        output: the whole answer, in the last chunk alone.
        rest: text of tokens that an earlier chunk had.
    """

    pieces: tuple[Piece, ...]
    output: Output | None = None
    rest: str = ""

    @property
    def text(self) -> str:
        """The new text."""
        return "".join([piece.text for piece in self.pieces]) + self.rest


class Answer:
    """An unfinished answer: a session with its decoding, and its text so far.

    One thread runs the session, and another may take the text: it names the number of tokens that it may read. Only
    stop strings need the text while the session runs. Then the session's thread decodes each token, and otherwise
    whoever takes the text.
    """

    def __init__(
        self,
        number: int,
        prompt: list[int],
        request: Request,
        limit: int,
        tokenizer: Tokenizer,
        decoding: Decoding,
        forced: tuple[int, ...] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`limit`: tokens of prompt and answer together. `forced`: tokens that the answer starts with, whatever the
        target would choose. `shown`: special tokens that are part of the text."""
        params = request.params
        self.decoding, self.forced = decoding, forced
        decoder = tokenizer.showing(shown) if shown else tokenizer
        self._reader = StopStrings(params.stop, Detokenizer(decoder), params.min_tokens)
        self._texts: list[str] = []  # of each decoded token
        self._pieces: list[Piece] = []  # those that were taken
        self._rest = ""  # text that was held back until the end
        self.session = Session(number, prompt, request, limit, self._watch if params.stop else None)

    def start(self) -> MethodRounds:
        """Start its rounds; the scheduler calls this when it admits the session."""
        return self.decoding.start(self.session, self.forced)

    @property
    def count(self) -> int:
        """The number of its tokens so far."""
        return len(self.session.tokens) - self.session.request.prompt_length

    def chunk(self) -> Chunk:
        """Return the text since the last call, with the output if the session is finished."""
        taken = len(self._pieces)
        if not self.session.finished:
            return Chunk(self.take(self.count))
        return self.last_chunk(taken, self.output())

    def last_chunk(self, taken: int, output: Output) -> Chunk:
        """Return the output, and what a caller lacks who has taken `taken` tokens."""
        pieces = output.pieces[taken:]
        return Chunk(pieces, output, "" if pieces else self._rest)

    def take(self, count: int) -> tuple[Piece, ...]:
        """Return the tokens behind those already taken, up to `count` in all."""
        self._decode(count)
        session, texts, start = self.session, self._texts, len(self._pieces)
        origins, tokens, first = session.origins, session.tokens, session.request.prompt_length
        if session.request.params.logprobs is None:
            fresh = [Piece(texts[at], origins[at], tokens[first + at]) for at in range(start, count)]
        else:
            scores = session.logprobs
            fresh = [Piece(texts[at], origins[at], tokens[first + at], scores[at]) for at in range(start, count)]
        self._pieces += fresh
        return tuple(fresh)

    def output(self) -> Output:
        """Return the finished answer. If it failed, it holds the text so far and the error."""
        session = self.session
        assert session.finished
        self._finish()
        request = session.request
        return Output(
            text=self._reader.text,
            token_ids=tuple(session.output),
            finish_reason=session.finished,
            method=self.decoding.name,
            stats=session.stats.summary(),
            prompt_token_ids=tuple(session.tokens[: request.prompt_length]),
            params=request.params,
            seed=request.seed,
            rule=request.rule,
            pieces=tuple(self._pieces),
            logprobs=tuple(session.logprobs) if request.params.logprobs is not None else None,
            sample=request.sample,
            error=session.error,
        )

    def _watch(self, token: int) -> bool:
        """Decode a token for its stop strings. Return True if one was completed."""
        self._texts.append(self._reader.read(token))
        return self._reader.stopped

    def _decode(self, count: int) -> None:
        """Decode tokens up to `count` in all, unless `_watch` has."""
        if len(self._texts) < count:
            first = self.session.request.prompt_length
            self._texts += map(self._reader.read, self.session.tokens[first + len(self._texts) : first + count])

    def _finish(self) -> None:
        """Decode the rest. Text that was held back for a stop string belongs to the last token."""
        count = self.count
        self._decode(count)
        rest = self._reader.finish()
        if rest and self._texts:
            self._rest = rest
            self._texts[-1] += rest
            if len(self._pieces) == count:
                self._pieces[-1] = replace(self._pieces[-1], text=self._texts[-1])
        self.take(count)


def gather(samples: list[Output]) -> Output:
    """Return the first of n samples, with the others as its alternatives."""
    return replace(samples[0], alternatives=tuple(samples[1:]))
