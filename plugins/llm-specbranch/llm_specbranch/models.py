"""The models that LLM is given: one for its synchronous side, one for asyncio, on the same loaded pair.

Owns a request from LLM's prompt to its last event. Invariant: an answer that is not read to its end is cancelled, and
every mistake that a user can put right reaches LLM as a `ModelError` with SpecBranch's sentence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import llm
from llm.parts import StreamEvent

from llm_specbranch.conversation import as_messages, as_tools
from llm_specbranch.engines import ENGINES
from llm_specbranch.options import ModelChoice, SpecBranchOptions, sampling_values
from llm_specbranch.reading import Formats, Reading

if TYPE_CHECKING:
    from specbranch import AsyncLLM, Output
    from specbranch.answer import Chunk
    from specbranch.submission import Submission


class _Shared:
    """What both models are: their options, and what they support."""

    model_id: str
    can_stream = True
    supports_schema = True
    supports_tools = True

    def __init__(self, model_id: str, defaults: SpecBranchOptions | None = None) -> None:
        """`defaults`: options of every request that does not set them."""
        self.model_id = model_id
        self.defaults = defaults or SpecBranchOptions()

    def choice(self, prompt: llm.Prompt) -> ModelChoice:
        """Return the models that a request wants."""
        return ModelChoice.of(options_of(prompt), self.defaults)

    def merged(self, prompt: llm.Prompt) -> SpecBranchOptions:
        """Return the options of a request, with the defaults of this model."""
        given = options_of(prompt).model_dump(exclude_none=True)
        return SpecBranchOptions(**{**self.defaults.model_dump(exclude_none=True), **given})


class SpecBranchModel(_Shared, llm.Model):
    """Answers in the thread of the caller."""

    Options = SpecBranchOptions  # type: ignore[assignment] # llm means it so

    def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,
        response: llm.Response,
        conversation: llm.Conversation | None,
    ) -> Iterator[StreamEvent]:
        """Yield what the answer brings, as it comes."""
        with sentences(), ENGINES.using(self.choice(prompt)) as engine:
            answer = Answering.start(engine, prompt, self.merged(prompt))
            try:
                for chunk in answer.submission:
                    yield from answer.read(chunk)
            finally:
                answer.submission.cancel()
            answer.report(response, engine.target)


class AsyncSpecBranchModel(_Shared, llm.AsyncModel):
    """Answers in an event loop. Many answers at once are decoded in one batch."""

    Options = SpecBranchOptions  # type: ignore[assignment] # llm means it so

    async def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,
        response: llm.AsyncResponse,
        conversation: llm.AsyncConversation | None,
    ) -> AsyncGenerator[StreamEvent, None]:
        """Yield what the answer brings, as it comes."""
        choice = self.choice(prompt)
        with sentences():
            await asyncio.to_thread(ENGINES.load, choice)  # it takes seconds
            with ENGINES.using(choice) as engine:
                answer = Answering.start(engine, prompt, self.merged(prompt))
                try:
                    async for chunk in answer.submission:
                        for event in answer.read(chunk):
                            yield event
                finally:
                    answer.submission.cancel()
                answer.report(response, engine.target)


@dataclass(slots=True)
class Answering:
    """A running request, and how its answer is read."""

    submission: Submission
    reading: Reading
    output: Output | None = None

    @classmethod
    def start(cls, engine: AsyncLLM, prompt: llm.Prompt, options: SpecBranchOptions) -> Answering:
        """Send a request to a loaded pair."""
        tools = [tool for tool in prompt.tools if isinstance(tool, llm.Tool)]
        schema = cast("dict[str, Any] | None", prompt.schema)  # llm has turned a class into its schema
        values = sampling_values(options, schema)
        if tools and schema:
            raise llm.ModelError("A schema and tools are both given, but an answer is one or the other. Drop one.")
        tokenizer, messages = engine.tokenizer, as_messages(prompt.messages)
        if not messages:
            raise llm.ModelError("There is no prompt. Give one, or a conversation.")
        formats, described = Formats.of(tokenizer, tools), as_tools(tools) or None
        text = tokenizer.chat_text(messages, tools=described)
        if schema:
            values["reasoning"] = formats.around_reasoning(text)
        request = {
            "method": options.method,
            "prediction": options.prediction,
            "shown_tokens": tokenizer.special_among(formats.markers()),
        }
        ids = tokenizer.chat(messages, tools=described)
        return cls(engine.submit(ids, values, request, streams=True), Reading(formats, text, tools))

    def read(self, chunk: Chunk) -> Iterator[StreamEvent]:
        """Yield what a chunk brings; raise the error that ended the answer, if one did."""
        yield from self.reading.feed(chunk.text)
        if chunk.output is not None:
            self.output = chunk.output
            yield from self.reading.finish()
            if chunk.output.error is not None:
                raise chunk.output.error

    def report(self, response: llm.Response | llm.AsyncResponse, target: str) -> None:
        """Tell LLM what it stores of an answer: tokens, calls of tools, statistics."""
        output = self.output
        assert output is not None, "the last chunk carries it"
        cached = output.stats["prompt_tokens_cached"]
        details = {"prompt_tokens_details": {"cached_tokens": cached}} if cached else None
        response.set_usage(input=len(output.prompt_token_ids), output=len(output.token_ids), details=details)
        response.set_resolved_model(target)
        for call in self.reading.tool_calls():
            response.add_tool_call(call)
        response.response_json = _stored(output)


def options_of(prompt: llm.Prompt) -> SpecBranchOptions:
    """Return the options of a request, as `llm` has built them from the model's class of options."""
    assert isinstance(prompt.options, SpecBranchOptions)
    return prompt.options


@contextmanager
def sentences() -> Iterator[None]:
    """Turn SpecBranch's errors into LLM's; the sentence stays."""
    from specbranch.errors import SpecBranchError

    try:
        yield
    except SpecBranchError as error:
        raise llm.ModelError(str(error)) from error


def _stored(output: Output) -> dict[str, Any]:
    return {
        "finish_reason": output.finish_reason,
        "method": output.method,
        "seed": output.seed,
        "stats": {name: value for name, value in output.stats.items() if isinstance(value, (int, float, str))},
    }
