"""The target writes its own training material: it invents questions and answers them, in many rows at once over a static cache.

Owns the batch of rows and what each does next; the chat template and the model's arithmetic follow `text` and `models`. Invariants: every
token that was not given (an opening, the turn to the answer, a prompt of the user's) is the target's own choice after all that stands
before it in its row; a row that ends its conversation begins the next at once, so that shapes never change and no row waits for another;
one machine writes the same for the same seed and settings.
"""

from __future__ import annotations

import gc
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specbranch.distill.material import Material
from specbranch.errors import BadParameter, ModelError
from specbranch.models.architecture import Architecture
from specbranch.models.decoder import Decoder, Part, Step
from specbranch.models.weights import Weights
from specbranch.text.tokenizer import Tokenizer

log = logging.getLogger("specbranch")

SYSTEMS: tuple[str | None, ...] = (  # None: whatever the template itself puts there
    *(None,) * 8,  # most people leave it at that
    "You are a patient teacher. The user asks about a school subject, and you explain it step by step.",
    "You are an experienced programmer. The user wants a function or a short program, and you write it with a few words of comment.",
    "You solve word problems in arithmetic. Show each calculation on its own line, then state the result.",
    "You are a careful editor. The user hands you a text, and you rewrite, shorten or correct it.",
    "You are a writer of short stories, letters and poems in whatever tone the user likes.",
    "You give practical advice on work, health, travel and the household, in plain words.",
    "You know science and technology well and answer with precise facts.",
    "You play the part the user asks for and never leave it.",
    "You draw out of a text what was asked for, as a list or a table, and add nothing.",
    "You weigh the arguments on both sides of a question before you come to a conclusion.",
)
STARTERS = (  # words a question may begin with; mostly none, so that the target chooses
    *("",) * 24,
    "How",
    "What",
    "Why",
    "Can you",
    "Write a",
    "Write a Python function",
    "def",
    "Complete this code:",
    "Explain",
    "Describe",
    "Imagine",
    "Compare",
    "Summarize",
    "Give me",
    "A farmer",
    "Maria",
    "If a",
    "There are",
    "Solve",
    "Suppose",
    "Rewrite",
    "Translate",
    "The following",
    "Given a list",
)
LEAST_QUESTION = 3  # tokens, before an end is let through
LEAST_ANSWER = 16  # places that must be left behind a prompt of the user's
UNKNOWN = 1 << 30  # where an answer begins whose question is still being written


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSettings:
    """How much to write, and how."""

    seconds: float | None = None  # stop after this time, set-up not counted
    tokens: int | None = None  # or when this many were written, questions and all
    rows: int = 1024  # conversations written at once; halved while they do not fit
    length: int = 640  # most tokens of a conversation
    question_tokens: int = 192  # most tokens of an invented question; a longer one is closed there
    question_temperature: float = 1.0
    temperature: float = 0.8  # of the answers in every second row; those of the others are greedy
    min_p: float = 0.03  # least probability of a sampled token, as a share of the most likely one's
    prompts: tuple[str, ...] = ()  # of the user's: every second conversation answers one of these
    seed: int = 0
    steps: int = 64  # between two looks at what was written

    def __post_init__(self) -> None:
        if self.seconds is None and self.tokens is None:
            raise BadParameter("The writer was given neither seconds nor tokens to stop after; give one of them.")
        whole = {"rows": 1, "length": 16, "question_tokens": LEAST_QUESTION, "steps": 1}
        for name, least in whole.items():
            if getattr(self, name) < least:
                raise BadParameter(f"{name} is {getattr(self, name)}; expected {least} or more.")
        for name in ("seconds", "tokens", "temperature", "question_temperature"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise BadParameter(f"{name} is {value}; expected more than 0.")
        if not 0 < self.min_p <= 1:
            raise BadParameter(f"min_p is {self.min_p}; expected more than 0 and at most 1.")


@dataclass(frozen=True, slots=True)
class Target:
    """The model that writes."""

    arch: Architecture
    weights: Weights


@dataclass(frozen=True, slots=True)
class Written:
    """How far the writing has come."""

    tokens: int
    conversations: int  # finished ones
    seconds: float


Progress = Callable[[Written], None]


def quiet(written: Written) -> None:
    """Show nothing."""


@torch.no_grad()  # not inference_mode: what is returned goes into training
def write(target: Target, tokenizer: Tokenizer, settings: WriterSettings, progress: Progress = quiet) -> Material:
    """Let the target write until time or tokens are spent; with memory for fewer rows than asked for, fewer write."""
    settings = replace(settings, length=target.arch.choose_context(None, most=settings.length))
    script = Script.of(tokenizer, target.arch, settings)
    desk = _fitting_desk(target, script, settings)
    history = _History()
    start = time.monotonic()
    written = Written(0, 0, 0.0)
    while not _spent(settings, written):
        history.add(*desk.advance())
        written = Written(history.tokens, history.finished, time.monotonic() - start)
        progress(written)
    about = {"settings": {**asdict(settings), "prompts": len(settings.prompts), "rows": desk.rows}, "seconds": written.seconds}
    return history.material(desk.unfinished(), {**about, "target": Path(target.arch.name).name, "torch": torch.__version__})


def _spent(settings: WriterSettings, written: Written) -> bool:
    if settings.tokens is not None and written.tokens >= settings.tokens:
        return True
    return settings.seconds is not None and written.seconds >= settings.seconds


@dataclass(frozen=True, slots=True)
class Script:
    """What is given to the rows: how each kind of conversation opens, and what stands between question and answer."""

    openings: tuple[tuple[int, ...], ...]  # in the order they are used, over and over
    asked: tuple[bool, ...]  # whether the opening holds the whole question, up to where the answer begins
    bridge: tuple[int, ...]  # from the end of a question to the beginning of its answer
    question_ends: tuple[int, ...]
    answer_ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, arch: Architecture, settings: WriterSettings) -> Script:
        """Write the openings as the model's chat template wants them."""
        if not tokenizer.has_chat_template:
            log.warning("%s has no chat template: its conversations are written as plain text, 'user: … assistant: …'.", arch.name)
        ends = tuple(dict.fromkeys(token for token in (*tokenizer.eos_ids, *arch.eos_ids) if token < arch.vocabulary))
        if not ends:
            log.warning("%s names no token that ends a turn: every answer goes on to %d tokens.", arch.name, settings.length)
        frames, prompts = _frames(tokenizer, settings), _prompts(tokenizer, settings)
        bridge = frames[0].behind
        lines = _interleaved(_shuffled([frame.before for frame in frames], settings.seed), _shuffled(prompts, settings.seed))
        openings, asked = zip(*lines, strict=True)
        script = cls(openings, asked, bridge, _question_ends(tokenizer, ends, bridge[0]), ends)
        script.check(arch)
        return script

    def check(self, arch: Architecture) -> None:
        """Refuse ids that the model does not know."""
        highest = max(*self.bridge, *(max(opening) for opening in self.openings))
        if highest >= arch.vocabulary:
            raise ModelError(f"The tokenizer gives id {highest}, but {arch.name} knows {arch.vocabulary}. They do not belong together.")


@dataclass(frozen=True, slots=True)
class _Frame:
    """What stands around the words of a question."""

    before: tuple[int, ...]
    behind: tuple[int, ...]

    @property
    def needed(self) -> int:
        """The least length of a conversation in it."""
        return len(self.before) + LEAST_QUESTION + len(self.behind) + LEAST_ANSWER


def _frames(tokenizer: Tokenizer, settings: WriterSettings) -> list[_Frame]:
    """Return a frame for each system prompt and starter, as far as they leave room for an answer."""
    frame_of = cache(partial(_frame, tokenizer))  # many are asked for several times
    frames = [frame_of(system, starter) for system, starter in product(_accepted_systems(tokenizer), STARTERS)]
    fitting = [frame for frame in frames if frame.needed <= settings.length]
    if not fitting:
        least = min(frame.needed for frame in frames)
        raise BadParameter(f"length is {settings.length}; the openings of this model's conversations need at least {least}.")
    return fitting


def _accepted_systems(tokenizer: Tokenizer) -> tuple[str | None, ...]:
    """Return the system prompts, or none if the template refuses that role."""
    try:
        _frame(tokenizer, "You are kind.", "")
    except BadParameter:
        return (None,)
    return SYSTEMS


def _frame(tokenizer: Tokenizer, system: str | None, starter: str) -> _Frame:
    """Compare two questions that share nothing but the starter: what both begin and end with is the frame."""
    one, other = (_chat(tokenizer, system, f"{starter} {word}".lstrip()) for word in ("apple", "Zulu"))
    before = _common(one, other)
    behind = _common(one[before:][::-1], other[before:][::-1])
    if not before or not behind:
        raise ModelError("The model's chat template puts nothing around a question, so nothing tells the target to ask or to answer.")
    return _Frame(tuple(one[:before]), tuple(one[-behind:]))


def _chat(tokenizer: Tokenizer, system: str | None, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # plain text for want of a template: said once, by the script
        return tokenizer.chat([{"role": "system", "content": system}, *messages] if system else messages)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _prompts(tokenizer: Tokenizer, settings: WriterSettings) -> list[tuple[int, ...]]:
    prompts = [tuple(_chat(tokenizer, None, prompt)) for prompt in settings.prompts]
    fitting = [prompt for prompt in prompts if len(prompt) + LEAST_ANSWER <= settings.length]
    if left_out := len(prompts) - len(fitting):
        room = settings.length - LEAST_ANSWER
        log.warning("%d of %d prompts are longer than %d tokens and left out.", left_out, len(prompts), room)
    return fitting


def _shuffled(lines: Sequence[tuple[int, ...]], seed: int) -> list[tuple[int, ...]]:
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(seed))
    return [lines[at] for at in order.tolist()]


def _interleaved(openings: Sequence[tuple[int, ...]], prompts: Sequence[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Yield each line and whether it is a whole prompt, the two kinds in turns; the shorter list goes round until the longer is through."""
    if not prompts:
        yield from ((opening, False) for opening in openings)
        return
    for at in range(max(len(openings), len(prompts))):
        yield openings[at % len(openings)], False
        yield prompts[at % len(prompts)], True


def _question_ends(tokenizer: Tokenizer, ends: Sequence[int], first: int) -> tuple[int, ...]:
    """Return the ids that close a question: the template's own if it is a special token, else any end of a line."""
    if first in ends or tokenizer.is_silent(first):
        return tuple(dict.fromkeys((first, *ends)))
    lines = [token for token in tokenizer.vocabulary() if "\n" in tokenizer.decode([token])]
    return tuple(dict.fromkeys((*lines, *ends)))


class _History:
    """What the rows wrote, step by step, as it comes from the device."""

    def __init__(self) -> None:
        self._tokens: list[Tensor] = []
        self._ended: list[Tensor] = []
        self.tokens = self.finished = 0

    def add(self, tokens: Tensor, ended: Tensor) -> None:
        """Take the tokens [steps, rows] and, where a token ends a conversation, the place its answer began; else 0."""
        self._tokens.append(tokens)
        self._ended.append(ended)
        self.tokens += tokens.numel()
        self.finished += int((ended > 0).sum())

    def material(self, unfinished: Tensor, about: dict[str, object]) -> Material:
        """Lay out the conversations row by row; one that is unfinished counts as far as it goes, if its answer has begun."""
        tokens, ended = (torch.cat(pieces).T.contiguous() for pieces in (self._tokens, self._ended))
        ended[:, -1] = torch.where(ended[:, -1] > 0, ended[:, -1], unfinished)
        last = ended.view(-1).nonzero().view(-1)
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), last + 1))
        whole = Material(tokens.view(-1), starts, ended.view(-1)[last].long().clamp(max=starts.diff()), about)
        answered = whole.select((whole.answers < whole.lengths).nonzero().view(-1))
        return replace(answered, about={**about, "conversations": len(answered), "answer_tokens": answered.answer_tokens})


class Desk:
    """The rows and their state, all on the device: a step feeds one token a row and decides the next."""

    def __init__(self, target: Target, script: Script, settings: WriterSettings) -> None:
        self.settings, self.rows = settings, settings.rows
        self.device = target.weights.norm.device
        self.model = _Rows(target, self.rows, settings.length)
        self._generator = torch.Generator(self.device).manual_seed(settings.seed)
        self._script = _DeviceScript(script, target.arch.vocabulary, self.device)
        self._temperature = torch.tensor([0.0, settings.temperature], device=self.device).repeat(-(-self.rows // 2))[: self.rows]
        self._state = self._first_state()
        self._log = torch.zeros(2, settings.steps, self.rows, dtype=torch.int32, device=self.device)
        self._step = self._captured() if self.device.type == "cuda" else self._once

    def advance(self) -> tuple[Tensor, Tensor]:
        """Make the settings' number of steps; returns the tokens fed [steps, rows] and where which conversations ended (see _History)."""
        for _ in range(self.settings.steps):
            self._step()
        tokens, ended = self._log.cpu().clone()
        return tokens, ended

    def unfinished(self) -> Tensor:
        """Return where the answer of each row's open conversation begins, if it has one; UNKNOWN else [rows]."""
        # A row that has just restarted holds nothing yet; its last token ended the conversation before and is marked as such.
        return self._state.answer.to("cpu", torch.int32)

    def _first_state(self) -> _State:
        token, position, opening, answer = torch.zeros(4, self.rows, dtype=torch.int64, device=self.device)
        used, step = torch.zeros(2, 1, dtype=torch.int64, device=self.device)
        state = _State(token, position, opening, answer, used, step)
        self._restart(state)
        return state

    def _restart(self, state: _State) -> None:
        state.opening.copy_(torch.arange(self.rows, device=self.device) % self._script.count)
        state.token.copy_(self._script.openings[state.opening, 0])
        state.position.zero_()
        state.answer.copy_(self._script.answers[state.opening])
        state.used.fill_(self.rows)
        state.step.zero_()

    def _once(self) -> None:
        """Feed every row's token, note it, and put the next in its place."""
        state = self._state
        logits = self.model.scores(state.token, state.position)
        ended = self._script.ends_answer[state.token] & (state.position >= state.answer) | (state.position + 1 == self.settings.length)
        entry = torch.stack((state.token, torch.where(ended, state.answer, 0))).to(torch.int32)
        self._log.index_copy_(1, state.step, entry[:, None])
        self._go_on(state, self._choose(state, logits))
        self._begin_anew(state, ended)
        state.step.add_(1).remainder_(self.settings.steps)

    def _choose(self, state: _State, logits: Tensor) -> Tensor:
        """Draw a token a row by Gumbel's trick, which needs no sorting: argmax(logit − T·log E), E exponential; T = 0 is greedy."""
        answering = state.position + 1 >= state.answer
        temperature = torch.where(answering, self._temperature, self.settings.question_temperature)[:, None].to(logits.dtype)
        early = self._asked(state) < LEAST_QUESTION
        closing = self._script.closing
        logits[:, closing] = logits[:, closing].masked_fill(early[:, None], -torch.inf)
        least = logits.amax(-1, keepdim=True) + temperature * math.log(self.settings.min_p)
        below = logits < least
        noise = torch.empty_like(logits).exponential_(generator=self._generator).clamp_min_(1e-30).log_()
        return logits.addcmul_(noise, -temperature).masked_fill_(below, -torch.inf).argmax(-1)

    def _asked(self, state: _State) -> Tensor:
        """How many tokens of its own a row's question has, were one chosen now the next; UNKNOWN where no question is being written."""
        own = state.position + 1 - self._script.lengths[state.opening]
        return torch.where((own >= 0) & (state.answer == UNKNOWN), own, UNKNOWN)

    def _go_on(self, state: _State, chosen: Tensor) -> None:
        """Put each row's next token in place: of its opening, of the way to its answer, or the one chosen."""
        place, script, asked = state.position + 1, self._script, self._asked(state)
        closes = (asked < UNKNOWN) & ((asked >= self.settings.question_tokens) | script.closes_question[chosen])
        state.answer.copy_(torch.where(closes, place + script.bridge.numel(), state.answer))
        crossing = (place < state.answer) & (state.answer < UNKNOWN)
        token = torch.where(crossing, script.bridge_token(state.answer, place), chosen)
        opening = place < script.lengths[state.opening]
        state.token.copy_(torch.where(opening, script.opening_token(state.opening, place), token))
        state.position.copy_(place)

    def _begin_anew(self, state: _State, ended: Tensor) -> None:
        """Give every row that ended the next openings in line."""
        turn = state.used + ended.cumsum(0) - 1
        state.opening.copy_(torch.where(ended, turn % self._script.count, state.opening))
        state.token.copy_(torch.where(ended, self._script.openings[state.opening, 0], state.token))
        state.answer.copy_(torch.where(ended, self._script.answers[state.opening], state.answer))
        state.position.masked_fill_(ended, 0)
        state.used.add_(ended.sum())

    def _captured(self) -> Callable[[], None]:
        """Record one step as a CUDA graph, after some that let libraries set themselves up; then begin from the start."""
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
    """Where each row stands; the tensors are changed in place, as a captured step works on these and no others."""

    token: Tensor  # [rows] int64, the one to feed
    position: Tensor  # [rows] its place
    opening: Tensor  # [rows] which of the script's
    answer: Tensor  # [rows] where the answer begins, UNKNOWN before the question has ended
    used: Tensor  # [1] openings given out so far
    step: Tensor  # [1] line of the log


class _DeviceScript:
    """A script as tables on the device."""

    def __init__(self, script: Script, vocabulary: int, device: torch.device) -> None:
        longest = max(len(opening) for opening in script.openings)
        padded = [[*opening, *[0] * (longest - len(opening))] for opening in script.openings]
        self.count = len(script.openings)
        self.openings = torch.tensor(padded, device=device)  # [openings, longest]
        self.lengths = torch.tensor([len(opening) for opening in script.openings], device=device)
        self.answers = self.lengths.where(torch.tensor(script.asked, device=device), UNKNOWN)
        self.bridge = torch.tensor(script.bridge, device=device)
        self.closing = torch.tensor(script.question_ends, device=device)
        self.closes_question = torch.zeros(vocabulary, dtype=torch.bool, device=device).index_fill_(0, self.closing, True)
        ends = torch.tensor(script.answer_ends, dtype=torch.int64, device=device)
        self.ends_answer = torch.zeros(vocabulary, dtype=torch.bool, device=device).index_fill_(0, ends, True)

    def opening_token(self, opening: Tensor, place: Tensor) -> Tensor:
        """Return what an opening has at a place; anything behind its end."""
        return self.openings[opening, place.clamp(max=self.openings.shape[1] - 1)]

    def bridge_token(self, answer: Tensor, place: Tensor) -> Tensor:
        """Return what stands at a place shortly before the answer; anything elsewhere."""
        last = self.bridge.numel() - 1
        return self.bridge[(place - answer + last + 1).clamp(0, last)]


class _Rows(Decoder):
    """The target's decoder over one token a row, each row with a line of the cache for itself."""

    def __init__(self, target: Target, rows: int, length: int) -> None:
        super().__init__(target.arch, target.weights, length)
        self.device, self.dtype = self.norm.device, self.norm.dtype
        places = -(-length // 16) * 16  # masked kernels on GPUs want aligned rows
        shape = (2, target.arch.layers, rows, places, target.arch.kv_heads, target.arch.head_dim)
        self._cache = torch.zeros(shape, device=self.device, dtype=self.dtype)  # what a mask hides must not be NaN
        self._attend = self._fastest()
        self._seen = _Seen.of(torch.zeros(rows, dtype=torch.int64, device=self.device), self._cache)

    def scores(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Feed a token a row at its position; returns logits [rows, vocabulary] in float32 or better."""
        self._seen = _Seen.of(positions, self._cache)
        logits = self.logits(self.forward(Step(tokens, positions, ())))
        return logits.float() if logits.dtype.itemsize < 4 else logits

    def _attend_parts(self, index: int, queries: Tensor, keys: Tensor, values: Tensor, parts: Sequence[Part]) -> Tensor:
        """Store the rows' keys and values, then let each row attend to its own line; there are no parts here."""
        lines = self._cache[:, index]  # [2, rows, places, kv_heads, head_dim]
        for stored, new in zip(lines, (keys, values), strict=True):
            stored.flatten(0, 1).index_copy_(0, self._seen.places, new)
        return self._attend(queries, lines[0], lines[1], self._seen).flatten(1)

    def _fastest(self) -> Attend:
        """Return the kernel that reads no more of the cache than is filled, where there is one and it is right."""
        if self.device.type != "cuda" or self.dtype not in (torch.bfloat16, torch.float16):
            return attend_masked
        count, places = min(self._cache.shape[2], 64), self._cache.shape[3]
        lines = torch.randn_like(self._cache[:, 0, :count])
        queries = torch.randn(count, self.arch.heads, self.arch.head_dim, device=self.device, dtype=self.dtype)
        seen = _Seen.of(torch.arange(count, device=self.device) * 7 % places, lines[:, None])
        try:
            filled, masked = (attend(queries, lines[0], lines[1], seen) for attend in (attend_filled, attend_masked))
            close = torch.allclose(filled, masked, atol=0.03, rtol=0.03)
        except (RuntimeError, TypeError) as error:  # the operator is torch's own affair and may change
            log.info("Attention over filled places only is not to be had here: %s", error)
            close = False
        return attend_filled if close else attend_masked


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the rows of a step attend to: each its own line, up to the place it writes."""

    places: Tensor  # [rows] int64, in the lines laid end to end
    counts: Tensor  # [rows] int32, places filled in each line
    mask: Tensor  # [rows, 1, 1, span], 0 or -inf
    edges: Tensor  # [rows + 1] int32, where each line begins

    @classmethod
    def of(cls, positions: Tensor, cache: Tensor) -> _Seen:
        """Describe a step that writes at these positions of the cache [2, layers, rows, places, kv_heads, head_dim]."""
        rows, places = cache.shape[2:4]
        # Asking for the longest row would make a GPU wait; a CPU gains by it.
        span = places if cache.device.type == "cuda" else int(positions.max()) + 1
        lines = torch.arange(rows + 1, device=cache.device) * places
        hidden = torch.arange(span, device=cache.device) > positions[:, None]
        mask = torch.zeros(rows, span, device=cache.device, dtype=cache.dtype).masked_fill_(hidden, -torch.inf)
        return cls(lines[:-1] + positions, (positions + 1).to(torch.int32), mask[:, None, None], lines.to(torch.int32))


Attend = Callable[[Tensor, Tensor, Tensor, _Seen], Tensor]


def attend_masked(queries: Tensor, keys: Tensor, values: Tensor, seen: _Seen) -> Tensor:
    """Attend with queries [rows, heads, head_dim] to lines [rows, places, kv_heads, head_dim], whatever the device.

    Heads that share a key head are taken as several queries of it: masked kernels on GPUs know no groups.
    """
    rows, heads, head_dim = queries.shape
    kv_heads, span = keys.shape[2], seen.mask.shape[-1]
    grouped = queries.reshape(rows, kv_heads, -1, head_dim)
    keys, values = (lines[:, :span].transpose(1, 2) for lines in (keys, values))
    mask = seen.mask.expand(rows, kv_heads, heads // kv_heads, span)
    return scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(rows, heads, head_dim)


def attend_filled(queries: Tensor, keys: Tensor, values: Tensor, seen: _Seen) -> Tensor:
    """Do the same on a GPU with the flash kernel for sequences of different lengths, which stops where each line is filled."""
    rows, places = keys.shape[:2]
    queries_from = torch.arange(rows + 1, device=queries.device, dtype=torch.int32)
    found: Tensor = torch.ops.aten._flash_attention_forward(
        queries,
        keys.flatten(0, 1),
        values.flatten(0, 1),
        queries_from,
        seen.edges,
        1,
        places,
        0.0,
        False,
        False,
        seqused_k=seen.counts,
    )[0]
    return found.view(queries.shape)


def _fitting_desk(target: Target, script: Script, settings: WriterSettings) -> Desk:
    """Set up as many of the rows asked for as memory allows, halving."""
    rows = settings.rows
    while (desk := _desk_or_none(target, script, replace(settings, rows=rows))) is None:
        if rows == 1:
            raise ModelError(f"There is no memory for even one row of {settings.length} tokens of {target.arch.name}. Lower the length.")
        log.warning("%d rows of %d tokens do not fit in memory; trying %d.", rows, settings.length, rows // 2)
        rows //= 2
    return desk


def _desk_or_none(target: Target, script: Script, settings: WriterSettings) -> Desk | None:
    try:
        return Desk(target, script, settings)
    except torch.OutOfMemoryError:
        pass
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # what torch says on a CPU
            raise
    gc.collect()  # what was set up so far hangs on the error just caught
    torch.cuda.empty_cache()
    return None
