"""The target writes its own training text: it invents questions and answers them, in many rows at once over a static KV
cache.

Owns the batch of rows and the next token of each; `text` and `models` own the chat template and the model. Invariants:
every token that was not given (an opening, the turn to the answer, a user's prompt) is the target's own choice after
its row. A row that ends its conversation starts the next at once, so shapes never change and no row waits. One machine
writes the same for the same seed and settings.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specbranch.errors import BadParameter, ModelError
from specbranch.models.files.architecture import Architecture
from specbranch.models.files.tensor_file import TensorSource
from specbranch.models.files.weights import Weights, read_weights
from specbranch.models.forward.decoder import Decoder
from specbranch.progress import Onlooker, silent
from specbranch.text.tokenizer import Tokenizer
from specbranch.training.distill.material import TEXT_KINDS, Material
from specbranch.training.distill.openings import Script
from specbranch.training.distill.texts import Texts
from specbranch.training.distill.writer_settings import WriterSettings

log = logging.getLogger("specbranch")

LATER = -1  # mark of a token of a later question
ROOM_AFTER_TURN = 48  # tokens that must be left for the answer to a later question
UNKNOWN_START = 1 << 30  # where an answer begins whose question is still being written


@dataclass(frozen=True, slots=True)
class WritingTarget:
    """The model that writes."""

    arch: Architecture
    weights: Weights


def load_target(arch: Architecture, file: TensorSource, device: str) -> WritingTarget:
    """Load a target for writing."""
    if arch.head_rows_charged is not None:
        raise BadParameter(f"{arch.name} is inflated: its source says the same for less. Name the source here.")
    where = torch.device(device)
    dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
    return WritingTarget(arch, read_weights(arch, file, where, dtype))


@dataclass(frozen=True, slots=True)
class Written:
    """The progress of the writing."""

    tokens: int
    conversations: int  # finished ones
    seconds: float

    def show(self, watch: Onlooker, what: str, settings: WriterSettings) -> None:
        """Report the progress."""
        done, of = (self.tokens, settings.tokens) if settings.tokens else (self.seconds, settings.seconds)
        speed = self.tokens / max(self.seconds, 1e-9)
        note = f"{self.tokens:,} tokens, {self.conversations:,} conversations, {speed:,.0f} tokens/s"
        watch(what, done, of, note)


@torch.no_grad()  # not inference_mode: what is returned goes into training
def write(
    target: WritingTarget,
    tokenizer: Tokenizer,
    settings: WriterSettings,
    watch: Onlooker = silent,
    what: str = "Writing",
) -> Material:
    """Let the target write until time or tokens are used up; with too little memory, fewer rows write."""
    settings = replace(settings, length=target.arch.choose_context(None, most=settings.length))
    script = Script.of(tokenizer, target.arch, settings)
    desk = _fitting_desk(target, script, settings)
    history = _History(script)
    start = time.monotonic()
    written = Written(0, 0, 0.0)
    while not _spent(settings, written):
        history.add(desk.advance())
        written = Written(history.tokens, history.finished, time.monotonic() - start)
        written.show(watch, what, settings)
    about = {
        "settings": {**asdict(settings), "prompts": len(settings.prompts), "rows": desk.rows},
        "seconds": written.seconds,
    }
    return history.material(
        desk.unfinished(), {**about, "target": Path(target.arch.name).name, "torch": torch.__version__}
    )


def _spent(settings: WriterSettings, written: Written) -> bool:
    if settings.tokens is not None and written.tokens >= settings.tokens:
        return True
    return settings.seconds is not None and written.seconds >= settings.seconds


class Advance(NamedTuple):
    """Some steps of all rows, each [steps, rows]."""

    tokens: Tensor
    # the position at which the answer started, where a token ends a conversation; LATER in a later question; else 0
    ended: Tensor
    openings: Tensor  # the number of the row's opening


class _History:
    """The tokens of all rows, step by step, as they come from the device."""

    def __init__(self, script: Script) -> None:
        self._kinds = torch.tensor([TEXT_KINDS.index(kind) for kind in script.kinds])
        self._steps: list[Advance] = []
        self.tokens = self.finished = 0

    def add(self, step: Advance) -> None:
        """Add some steps."""
        self._steps.append(step)
        self.tokens += step.tokens.numel()
        self.finished += int((step.ended > 0).sum())

    def material(self, unfinished: Tensor, about: dict[str, object]) -> Material:
        """Return the conversations row by row; an unfinished one counts if its answer has started."""
        tokens, ended, openings = (torch.cat(parts).T.contiguous() for parts in zip(*self._steps, strict=True))
        later = ended == LATER
        ended[:, -1] = torch.where(ended[:, -1] > 0, ended[:, -1], unfinished)
        last = (ended.view(-1) > 0).nonzero().view(-1)
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), last + 1))
        answers = ended.view(-1)[last].long().clamp(max=starts.diff())
        kinds = self._kinds[openings.view(-1)[last].long()]
        whole = Material(tokens.view(-1), starts, answers, about, later.view(-1), kinds)
        answered = whole.select((whole.answers < whole.lengths).nonzero().view(-1))
        counts = {"conversations": len(answered), "answer_tokens": answered.answer_tokens, "kinds": answered.by_kind()}
        return replace(answered, about={**about, **counts})


class Desk:
    """The rows and their state, all on the device: a step feeds one token per row and chooses the next."""

    def __init__(self, target: WritingTarget, script: Script, settings: WriterSettings) -> None:
        self.settings, self.rows = settings, settings.rows
        self.device = target.weights.norm.device
        self.model = Texts(Decoder(target.arch, target.weights, settings.length), self.rows, settings.length)
        self._generator = torch.Generator(self.device).manual_seed(settings.seed)
        self._script = _DeviceScript(script, target.arch.vocabulary, self.device)
        self._temperature = torch.tensor([0.0, settings.temperature], device=self.device).repeat(-(-self.rows // 2))[
            : self.rows
        ]
        self._state = self._first_state()
        self._log = torch.zeros(len(Advance._fields), settings.steps, self.rows, dtype=torch.int32, device=self.device)
        self._step = self._captured() if self.device.type == "cuda" else self._once

    def advance(self) -> Advance:
        """Take the settings' number of steps."""
        for _ in range(self.settings.steps):
            self._step()
        return Advance(*self._log.cpu().clone())

    def unfinished(self) -> Tensor:
        """Return the start of the answer in each row's open conversation, else UNKNOWN_START [rows]."""
        # A row that has just restarted holds nothing yet; its last token ended the conversation before and is marked as
        # such.
        return self._state.answer.to("cpu", torch.int32)

    def _first_state(self) -> _State:
        token, position, opening, answer, speaks, asked, turn = torch.zeros(
            7, self.rows, dtype=torch.int64, device=self.device
        )
        used, step = torch.zeros(2, 1, dtype=torch.int64, device=self.device)
        state = _State(token, position, opening, answer, speaks, asked, turn, used, step)
        self._restart(state)
        return state

    def _restart(self, state: _State) -> None:
        state.opening.copy_(torch.arange(self.rows, device=self.device) % self._script.count)
        state.token.copy_(self._script.openings[state.opening, 0])
        state.position.zero_()
        state.answer.copy_(self._script.answers[state.opening])
        state.speaks.copy_(state.answer)
        state.asked.zero_()
        state.turn.zero_()
        state.used.fill_(self.rows)
        state.step.zero_()

    def _once(self) -> None:
        """Feed every row's token, record it, and set the next one."""
        state = self._state
        logits = self.model.scores(state.token, state.position)
        closed = self._script.ends_answer[state.token] & (state.position >= state.speaks)
        asks = self._asks_again(state, closed)
        ended = closed & ~asks | (state.position + 1 == self.settings.length)
        given = (state.position >= state.answer) & (state.position < state.speaks)
        marks = torch.where(ended, state.answer, torch.where(given, LATER, 0))
        entry = torch.stack((state.token, marks, state.opening)).to(torch.int32)
        self._log.index_copy_(1, state.step, entry[:, None])
        self._ask(state, asks)
        self._go_on(state, self._choose(state, logits))
        self._begin_anew(state, ended)
        state.step.add_(1).remainder_(self.settings.steps)

    def _asks_again(self, state: _State, closed: Tensor) -> Tensor:
        """True where a later question follows an answer that has just closed; it needs room for its own answer."""
        upcoming = self._script.upcoming(state)
        needed = state.position + 1 + self._script.turn_lengths[upcoming.clamp(min=0)] + ROOM_AFTER_TURN
        return closed & (upcoming >= 0) & (state.token == self._script.turn_end) & (needed <= self.settings.length)

    def _ask(self, state: _State, asks: Tensor) -> None:
        """Begin a later question where `asks`."""
        turn = torch.where(asks, self._script.upcoming(state), state.turn)
        begin = state.position + 1 + self._script.turn_lengths[turn]
        state.turn.copy_(turn)
        state.speaks.copy_(torch.where(asks, begin, state.speaks))
        state.asked.add_(asks)

    def _choose(self, state: _State, logits: Tensor) -> Tensor:
        """Sample a token per row with the Gumbel trick, without sorting: argmax(logit − T·log E), E exponential; T =
        0 is greedy."""
        answering = state.position + 1 >= state.answer
        temperature = torch.where(answering, self._temperature, self.settings.question_temperature)[:, None].to(
            logits.dtype
        )
        early = self._asked(state) < self._script.least[state.opening]
        closing = self._script.closing
        logits[:, closing] = logits[:, closing].masked_fill(early[:, None], -torch.inf)
        least = logits.amax(-1, keepdim=True) + temperature * math.log(self.settings.min_p)
        below = logits < least
        noise = torch.empty_like(logits).exponential_(generator=self._generator).clamp_min_(1e-30).log_()
        return logits.addcmul_(noise, -temperature).masked_fill_(below, -torch.inf).argmax(-1)

    def _asked(self, state: _State) -> Tensor:
        """Return the length of each row's question if a token were added now; UNKNOWN_START where no question is being
        written."""
        own = state.position + 1 - self._script.lengths[state.opening]
        return torch.where((own >= 0) & (state.answer == UNKNOWN_START), own, UNKNOWN_START)

    def _go_on(self, state: _State, chosen: Tensor) -> None:
        """Set each row's next token: from its opening, from the turn to its answer, or the chosen one."""
        position, script, asked = state.position + 1, self._script, self._asked(state)
        closes = (asked < UNKNOWN_START) & ((asked >= script.most[state.opening]) | script.closes_question[chosen])
        state.answer.copy_(torch.where(closes, position + script.bridge.numel(), state.answer))
        state.speaks.copy_(torch.where(closes, state.answer, state.speaks))
        crossing = (position < state.answer) & (state.answer < UNKNOWN_START)
        token = torch.where(crossing, script.bridge_token(state.answer, position), chosen)
        later = (position >= state.answer) & (position < state.speaks)
        token = torch.where(later, script.turn_token(state, position), token)
        opening = position < script.lengths[state.opening]
        state.token.copy_(torch.where(opening, script.opening_token(state.opening, position), token))
        state.position.copy_(position)

    def _begin_anew(self, state: _State, ended: Tensor) -> None:
        """Give every finished row the next opening."""
        turn = state.used + ended.cumsum(0) - 1
        state.opening.copy_(torch.where(ended, turn % self._script.count, state.opening))
        state.token.copy_(torch.where(ended, self._script.openings[state.opening, 0], state.token))
        state.answer.copy_(torch.where(ended, self._script.answers[state.opening], state.answer))
        state.speaks.copy_(torch.where(ended, state.answer, state.speaks))
        state.asked.masked_fill_(ended, 0)
        state.position.masked_fill_(ended, 0)
        state.used.add_(ended.sum())

    def _captured(self) -> Callable[[], None]:
        """Capture one step as a CUDA graph, after some warm-up steps; then start again."""
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(3):
                self._once()
        torch.cuda.current_stream(self.device).wait_stream(side)
        self._generator.manual_seed(self.settings.seed)
        self._restart(self._state)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        with torch.cuda.device(self.device), torch.cuda.graph(graph):
            self._once()
        return graph.replay


@dataclass(frozen=True, slots=True)
class _State:
    """The state of each row; the tensors are changed in place, because a captured step uses exactly these."""

    token: Tensor  # [rows] int64, the one to feed
    position: Tensor  # [rows] the index of its token
    opening: Tensor  # [rows] which of the script's
    answer: Tensor  # [rows] where the answer begins, UNKNOWN_START before the question has ended
    speaks: Tensor  # [rows] where the answer to the latest question begins
    asked: Tensor  # [rows] how many later questions were asked
    turn: Tensor  # [rows] which of the script's the latest of them is
    used: Tensor  # [1] openings given out so far
    step: Tensor  # [1] row of the log


class _DeviceScript:
    """A script as tables on the device."""

    def __init__(self, script: Script, vocabulary: int, device: torch.device) -> None:
        longest = max(len(opening) for opening in script.openings)
        padded = [[*opening, *[0] * (longest - len(opening))] for opening in script.openings]
        self.count = len(script.openings)
        self.openings = torch.tensor(padded, device=device)  # [openings, longest]
        self.lengths = torch.tensor([len(opening) for opening in script.openings], device=device)
        self.answers = self.lengths.where(torch.tensor(script.asked, device=device), UNKNOWN_START)
        # tokens of a question, each [openings]
        self.least, self.most = torch.tensor(script.limits, device=device).unbind(1)
        self.bridge = torch.tensor(script.bridge, device=device)
        self.closing = torch.tensor(script.question_ends, dtype=torch.int64, device=device)
        self.closes_question = torch.zeros(vocabulary, dtype=torch.bool, device=device).index_fill_(
            0, self.closing, True
        )
        self._tabulate_turns(script, device)
        ends = torch.tensor(script.answer_ends, dtype=torch.int64, device=device)
        self.ends_answer = torch.zeros(vocabulary, dtype=torch.bool, device=device).index_fill_(0, ends, True)

    def _tabulate_turns(self, script: Script, device: torch.device) -> None:
        turns = script.turns or ((0,),)  # a question that nobody asks, so that no table is empty
        longest = max(map(len, turns))
        self.turns = torch.tensor([[*turn, *[0] * (longest - len(turn))] for turn in turns], device=device)
        self.turn_lengths = torch.tensor([len(turn) for turn in turns], device=device)
        self.turn_end = -1 if script.turn_end is None else script.turn_end
        later = script.later or ((),) * len(script.openings)
        most = max(map(len, later)) + 1  # a place for the end of the list
        self.later = torch.tensor([[*turns, *[-1] * (most - len(turns))] for turns in later], device=device)

    def upcoming(self, state: _State) -> Tensor:
        """Return the number of each row's next later question, -1 behind the last one."""
        return self.later[state.opening, state.asked]

    def turn_token(self, state: _State, position: Tensor) -> Tensor:
        """Return the token at a position of each row's latest later question; undefined elsewhere."""
        at = position - state.speaks + self.turn_lengths[state.turn]
        return self.turns[state.turn, at.clamp(0, self.turns.shape[1] - 1)]

    def opening_token(self, opening: Tensor, position: Tensor) -> Tensor:
        """Return an opening's token at a position; undefined after its end."""
        return self.openings[opening, position.clamp(max=self.openings.shape[1] - 1)]

    def bridge_token(self, answer: Tensor, position: Tensor) -> Tensor:
        """Return the token at a position of the turn to the answer; undefined elsewhere."""
        last = self.bridge.numel() - 1
        return self.bridge[(position - answer + last + 1).clamp(0, last)]


def _fitting_desk(target: WritingTarget, script: Script, settings: WriterSettings) -> Desk:
    """Set up as many of the requested rows as memory allows, halving."""
    rows = settings.rows
    while (desk := _desk_or_none(target, script, replace(settings, rows=rows))) is None:
        if rows == 1:
            raise ModelError(
                f"There is no memory for even one row of {settings.length} tokens of {target.arch.name}. Lower the "
                "length."
            )
        log.warning("%d rows of %d tokens do not fit in memory; trying %d.", rows, settings.length, rows // 2)
        rows //= 2
    return desk


def _desk_or_none(target: WritingTarget, script: Script, settings: WriterSettings) -> Desk | None:
    try:
        return Desk(target, script, settings)
    except torch.OutOfMemoryError:
        pass
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # what torch says on a CPU
            raise
    gc.collect()  # the caught error still references what was set up
    torch.cuda.empty_cache()
    return None
