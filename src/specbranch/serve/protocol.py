"""What goes over the wire: the bodies of requests and answers, as the OpenAI API has them.

Owns names, types and ranges; the OpenAPI document is made of them. What a parameter means is in `parameters.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from specbranch.config import PolicyName
from specbranch.core.methods import METHODS
from specbranch.serve.notes import REQUEST_ID
from specbranch.serve.parameters import without_neutral
from specbranch.serve.settings import (
    LONGEST_STOP,
    MOST_BIASES,
    MOST_LOGPROBS,
    MOST_NAME,
    MOST_SAMPLES,
    MOST_STOP_IDS,
    MOST_STOPS,
    MOST_TOOLS,
)

LARGEST_INTEGER = 2**63 - 1
# Lists end at their first mistake: to name two million of them takes a minute.
BiasedId = Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]  # a name in JSON, so a text
TokenId = Annotated[BiasedId, Field(strict=True)]  # no boolean
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
StopText = Annotated[str, Field(max_length=LONGEST_STOP)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, fail_fast=True)]
Reason = Literal["stop", "length", "tool_calls"]
SENTENCE = "sentence"  # the type of a mistake whose message says what was expected


def few_biases(given: Any) -> Any:
    """Refuse too many of them, before each is looked at."""
    if isinstance(given, dict) and len(given) > MOST_BIASES:
        raise ValueError(f"there are {len(given)}")
    return given


class Body(BaseModel):
    """A part of a request: what it does not know is refused, what is null was not given."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, values: Any) -> Any:
        return without_neutral(values, cls.model_fields)


class StreamOptions(Body):
    """What a stream tells besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # there is none


class SpeculativeChoice(Body):
    """How this request is decoded; its text is the same whatever is chosen."""

    method: str | None = Field(None, description=f"One of {', '.join(METHODS)}.")
    policy: str | None = Field(None, description=f"One of {', '.join(get_args(PolicyName))}.")
    off: bool = False


class ContentPart(Body):
    """A part of a message; only text is read."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    annotations: Any = None
    logprobs: Any = None  # of an earlier output that is sent back
    cache_control: Any = None


class PredictedContent(Body):
    """The text that a caller expects; it makes the answer no other one."""

    type: Literal["content"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)]


class GenerationRequest(Body):
    """What chats and completions share."""

    model: str | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=LARGEST_INTEGER)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[BiasedId, Bias] | None, BeforeValidator(few_biases)] = None
    seed: int | None = Field(None, ge=-LARGEST_INTEGER - 1, le=LARGEST_INTEGER)
    n: int = Field(1, ge=1, le=MOST_SAMPLES)
    min_tokens: int = Field(0, ge=0, le=LARGEST_INTEGER)
    stop: StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_STOP_IDS, fail_fast=True)] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculative: bool | SpeculativeChoice | None = None
    response_format: dict[str, Any] | None = Field(None, description="Of type text, json_object or json_schema.")
    json_schema: dict[str, Any] | str | None = Field(None, description="The answer is JSON that it describes.")
    regex: str | None = Field(None, min_length=1, description="The answer matches it as a whole.")
    choice: Choices | None = Field(None, description="The answer is one of these.")
    grammar: str | None = Field(
        None, min_length=1, description="The answer follows it, in Lark's or llama.cpp's syntax."
    )
    structured_outputs: dict[str, Any] | None = Field(None, description="As vLLM has it: json, regex, choice, grammar.")
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = Field(None, min_length=1)
    guided_choice: Choices | None = None
    guided_grammar: str | None = Field(None, min_length=1)
    request_id: str | None = Field(None, pattern=f"^{REQUEST_ID}$", description="Instead of the header X-Request-Id.")
    deadline: float | None = Field(None, gt=0, le=86400, description="Seconds in which it has to be answered.")
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    guided_decoding_backend: Any = None
    prediction: PredictedContent | None = Field(None, description="The text that the answer is expected to have.")


class CalledFunction(Body):
    """What an earlier answer has called."""

    name: str
    arguments: str | dict[str, Any] = Field("{}", description="JSON, as a text.")
    provider_specific_fields: Any = None  # as below


class EarlierCall(Body):
    """A tool call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # clients that repeat what a stream said
    provider_specific_fields: Any = None  # what a client noted of the answer when it came, and sends back


def only_functions(given: Any) -> Any:
    """Refuse another kind of tool by its name, before its fields are looked at."""
    kind = given.get("type", "function") if isinstance(given, dict) else "function"
    if kind != "function" and isinstance(kind, str):
        said = f"expected a tool of type function, got {kind[:60]!r}: only functions are called here, by the client"
        raise PydanticCustomError(SENTENCE, "{said}", {"said": said})
    return given


FUNCTIONS = BeforeValidator(only_functions)


class FunctionTool(Body):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=MOST_NAME, pattern=r"^[\w.\-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="The JSON schema of its arguments.")
    strict: bool = False


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"] = "function"
    function: FunctionTool
    cache_control: Any = None


class ChosenFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that the model has to call."""

    type: Literal["function"] = "function"
    function: ChosenFunction


class ChatMessage(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[EarlierCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    provider_specific_fields: Any = None  # litellm's notes on the answer


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
NewMessage = Annotated[bool | None, Field(description="The answer is a new message; true if nothing is continued.")]
Continued = Annotated[bool, Field(description="The answer continues the last message, which is of the role assistant.")]


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_tokens: int | None = Field(None, ge=1, le=LARGEST_INTEGER)
    max_completion_tokens: int | None = Field(None, ge=1, le=LARGEST_INTEGER)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    add_generation_prompt: NewMessage = None
    continue_final_message: Continued = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Annotated[Tool, FUNCTIONS]], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    )
    max_tokens: int = Field(16, ge=0, le=LARGEST_INTEGER)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False
    add_special_tokens: bool = True


class ResponseItem(Body):
    """One item of the input of /v1/responses: a message, a function call, its output, or reasoning. Other types are
    known, to be refused by name."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    id: Any = None
    status: Any = None
    phase: Any = None
    name: str | None = None
    namespace: Any = None
    arguments: str | None = Field(None, description="Of a function call: JSON, as a text.")
    call_id: str | None = None
    output: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    summary: Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    encrypted_content: Any = None


class ResponseTool(FunctionTool):
    """A function that the model may call, as /v1/responses has it."""

    type: Literal["function"] = "function"


class NamedFunction(Body):
    """The function that the model has to call, as /v1/responses has it."""

    type: Literal["function"] = "function"
    name: str


class TextOptions(Body):
    """What the text of a response follows."""

    format: dict[str, Any] | None = Field(None, description="Of type text, json_object or json_schema.")


class ResponsesRequest(GenerationRequest):
    """The body of /v1/responses."""

    input: str | Annotated[list[ResponseItem], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=LARGEST_INTEGER)
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Annotated[ResponseTool, FUNCTIONS]], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = (
        None
    )
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    n: Literal[1] = 1
    store: bool = False


class TokenizeRequest(Body):
    """The body of /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[Annotated[Tool, FUNCTIONS]], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: NewMessage = None
    continue_final_message: Continued = False
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class DraftRequest(Body):
    """The body of /admin/draft."""

    draft: str = Field(min_length=1, max_length=4096, description="A folder or a file on the server, or a pair's name.")


class DraftResponse(BaseModel):
    """The draft that works now, and how long loading it took."""

    draft: str
    seconds: float


class CachedTokens(BaseModel):
    """What of a prompt was not read again."""

    cached_tokens: int


class CompletionDetails(BaseModel):
    """What became of a prediction's tokens, and how many tokens are reasoning."""

    accepted_prediction_tokens: int | None = Field(None, description="Verified tokens of it that are in the answer.")
    rejected_prediction_tokens: int | None = Field(None, description="Verified tokens of it that are not.")
    reasoning_tokens: int | None = Field(None, description="Tokens of reasoning, its markers included.")


class Usage(BaseModel):
    """What a request cost."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: CompletionDetails | None = None


class SpeculativeMetrics(BaseModel):
    """What speculation did; the first seven as vLLM names them."""

    num_spec_steps: int = Field(description="Forwards of the target after the first token.")
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    acceptance_histogram: list[int] = Field(description="Steps by how many tokens of the main path were accepted.")
    num_spec_tokens: int = Field(description="The longest path of which something was accepted.")
    num_accepted_tokens_per_pos: list[int]
    num_rollback_tokens: int
    num_branches: int
    num_branch_hits: int
    methods: list[str]


class AnswerMetrics(BaseModel):
    """How an answer came about."""

    speculative_decoding: SpeculativeMetrics


class TopLogprob(BaseModel):
    """A token that might have been said."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token that was said, and what else might have been."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """How likely the tokens of a message were."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """How likely the tokens of a text were."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CallText(BaseModel):
    """A called function, or new text of its arguments."""

    name: str | None = None
    arguments: str


class ToolCall(BaseModel):
    """A tool call; in a stream what is new of it, with the number of the call."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CallText


class AssistantMessage(BaseModel):
    """What the model said, or what is new of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same; vLLM's name now
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One sample of an answer; in a stream what is new of it, as `delta`."""

    index: int
    message: AssistantMessage | None = None
    delta: AssistantMessage | None = None
    logprobs: ChatLogprobs | None = None
    finish_reason: Reason | None = None


class CompletionChoice(BaseModel):
    """One sample of a text; in a stream what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Reason | None = None


class OutputText(BaseModel):
    """The text of a message of /v1/responses."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(BaseModel):
    """A message of the model, as an item of /v1/responses."""

    id: str
    type: Literal["message"] = "message"
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningText(BaseModel):
    """The text of reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(BaseModel):
    """Reasoning of the model, as an item of /v1/responses."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[Any]
    content: list[ReasoningText]


class FunctionCallItem(BaseModel):
    """A call of the model, as an item of /v1/responses."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(BaseModel):
    """What of the input was not read again; nothing is written to a cache for a price."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """What of the output was no answer, and what became of a prediction's tokens."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class ResponseUsage(BaseModel):
    """What a request of /v1/responses cost."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Why an answer ended before its end."""

    reason: Literal["max_output_tokens"]


class ResponseFailure(BaseModel):
    """What ended an answer."""

    code: str
    message: str


class ResponseObject(BaseModel):
    """The answer of /v1/responses, or its state in an event."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: dict[str, Any] = Field(default_factory=lambda: {"effort": None, "summary": None})
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any] = Field(default_factory=lambda: {"format": {"type": "text"}})
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[Any] = Field(default_factory=list)
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    metrics: AnswerMetrics | None = None


class Envelope(BaseModel):
    """What every answer, and every event of a stream, says of itself."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None
    metrics: AnswerMetrics | None = None


class ChatResponse(Envelope):
    """The answer to a conversation, or an event of its stream."""

    choices: list[ChatChoice]


class CompletionResponse(Envelope):
    """The answer to a prompt, or an event of its stream."""

    choices: list[CompletionChoice]


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "specbranch"
    max_model_len: int


class ModelList(BaseModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(BaseModel):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """The text of tokens."""

    prompt: str


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None
    request_id: str


class ErrorResponse(BaseModel):
    """An answer that is none."""

    error: ErrorDetail


BODIES: dict[str, type[Body]] = {  # by endpoint
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/admin/draft": DraftRequest,
}
BODY_PARTS: dict[str, type[Body]] = {  # by the parameter that holds them
    "messages": ChatMessage,
    "input": ResponseItem,
    "content": ContentPart,
    "stream_options": StreamOptions,
    "speculative": SpeculativeChoice,
    "tools": Tool,
    "tool_choice": NamedTool,
    "tool_calls": EarlierCall,
    "function": FunctionTool,
    "prediction": PredictedContent,
    "text": TextOptions,
}
RESPONSE_PARTS: dict[str, type[Body]] = {"tools": ResponseTool, "tool_choice": NamedFunction}  # of /v1/responses
PARAMETER_NAMES = frozenset(name for body in (*BODIES.values(), *BODY_PARTS.values()) for name in body.model_fields)
