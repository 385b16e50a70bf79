"""What a user gets back: an `Output`, whole or `Chunk` by `Chunk`, and the unfinished `Answer` it is made from.

Owns the pairing of a session with its decoding and its text. It runs no rounds. Invariant: the texts of all chunks,
joined, are the output's text.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from itertools import repeat
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
    """One token of an answer: the text it made final, where it came from, and its log-probability if requested."""

    text: str
    origin: Origin
    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """One finished answer: its text and tokens, how it was made, and its statistics."""

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
    alternatives: tuple[Output, ...] = field(default=(), repr=False)  # the other samples if n > 1
    error: Exception | None = None  # what ended the request before it was finished

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
    """What one round added to an answer; the last one carries the whole output."""

    pieces: tuple[Piece, ...]
    output: Output | None = None

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(piece.text for piece in self.pieces)


class Answer:
    """An unfinished answer: a session with its decoding, and its text so far."""

    def __init__(
        self,
        number: int,
        prompt: list[int],
        request: Request,
        limit: int,
        tokenizer: Tokenizer,
        decoding: Decoding,
        forced: tuple[int, ...] = (),
    ) -> None:
        """`limit`: tokens of prompt and answer together. `forced`: tokens that the answer starts with, whatever the
        target would choose."""
        params = request.params
        self.decoding, self.forced = decoding, forced
        self._reader = StopStrings(params.stop, Detokenizer(tokenizer), params.min_tokens)
        self._texts: list[str] = []
        self._undecoded: list[int] = []  # tokens that are not in `_texts` yet
        self._shown = 0
        self.session = Session(number, prompt, request, limit, self._watch)

    def start(self) -> MethodRounds:
        """Start its rounds; the scheduler calls this when it admits the session."""
        return self.decoding.start(self.session, self.forced)

    def chunk(self) -> Chunk:
        """Return the text since the last call, with the output if the session is finished."""
        output = self.output() if self.session.finished else None
        fresh = self._pieces(self._shown)
        self._shown += len(fresh)
        return Chunk(tuple(fresh), output)

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
            pieces=tuple(self._pieces()),
            logprobs=tuple(session.logprobs) if request.params.logprobs is not None else None,
            sample=request.sample,
            error=session.error,
        )

    def _watch(self, token: int) -> bool:
        self._undecoded.append(token)
        return self._read() if self.session.request.params.stop else False

    def _read(self) -> bool:
        """Decode all new tokens to text. Return True if a stop string was completed."""
        tokens, self._undecoded = self._undecoded, []
        for token in tokens:
            self._reader.append(token)
            self._texts.append(self._reader.take())
        return self._reader.stopped

    def _finish(self) -> None:
        """Decode the rest. Text that was held back for a stop string belongs to the last token."""
        self._read()
        if self._texts:
            self._texts[-1] += self._reader.finish()

    def _pieces(self, start: int = 0) -> list[Piece]:
        self._read()
        session, request = self.session, self.session.request
        scores = session.logprobs[start:] if request.params.logprobs is not None else repeat(None)
        tokens = session.tokens[request.prompt_length + start :]
        parts = zip(self._texts[start:], session.origins[start:], tokens, strict=True)
        return [Piece(*part, logprobs) for part, logprobs in zip(parts, scores, strict=False)]


def gather(samples: list[Output]) -> Output:
    """Return the first of n samples, with the others as its alternatives."""
    return replace(samples[0], alternatives=tuple(samples[1:]))
