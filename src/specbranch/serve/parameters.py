"""The parameters of a request: which are honoured, which change nothing, which are refused and why.

Owns the three classes. Types and ranges are in `protocol.py`. Invariant: no parameter that would change an answer is
ignored in silence. A value that requests the only behaviour there is (text, no images) is accepted.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

from specbranch.config import SamplingParams
from specbranch.errors import BadParameter, unknown
from specbranch.submission import RequestOptions

if TYPE_CHECKING:
    from specbranch.serve.protocol import GenerationRequest

# Accepted without effect: notes for whoever keeps the books, and hints that change no text.
WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "guided_decoding_backend",  # of older vLLM; there is one library here
)
BOUNDED_BLANKS = "blanks in JSON are bounded already"
# Refused by name, as the answer would be another one; why.
REFUSED = {
    "functions": "it was replaced by tools",
    "function_call": "it was replaced by tool_choice",
    "modalities": "only text is written",
    "audio": "only text is read and written",
    "reasoning_effort": "there is no such switch here; a template's own are set by chat_template_kwargs",
    "verbosity": "there is no such switch here",
    "web_search_options": "there is no search here",
    "previous_response_id": "no response is stored here; send the whole conversation as input",
    "conversation": "no conversation is stored here; send the whole of it as input",
    "background": "nothing is answered in the background; stream it, or wait for it",
    "reasoning": "there is no such switch here; a template's own are set by chat_template_kwargs",
    "include": "an answer holds nothing else",
    "max_tool_calls": "tools are called by the client, who counts them",
    "truncation": "an input is never cut",
    "best_of": "samples are not ranked here; ask for n of them with logprobs",
    "suffix": "text is only written at the end",
    "use_beam_search": "there is no beam search here",
    "length_penalty": "there is no beam search here",
    "priority": "requests are served in the order in which they come",
    "skip_special_tokens": "special tokens are never part of an answer",
    "include_stop_str_in_output": "a stop text is never part of an answer",
    "no_stop_trim": "a stop text is never part of an answer",
    "detokenize": "answers are texts",
    "bad_words": "words are not forbidden here; logit_bias forbids tokens",
    "allowed_token_ids": "tokens are not allowed one by one here; logit_bias prefers some",
    "prompt_logprobs": "a prompt is scored by /v1/completions with echo and logprobs",
    "truncate_prompt_tokens": "a prompt is never cut",
    "chat_template": "the model's own template is used",
    "documents": "templates get no documents",
    "mm_processor_kwargs": "only text is read",
    "logits_processors": "there are none here",
    "return_token_ids": "/tokenize tells token ids",
    "return_tokens_as_token_ids": "/tokenize tells token ids",
    "include_reasoning": "reasoning is always sent, as reasoning_content",
    "guided_whitespace_pattern": BOUNDED_BLANKS,
}
ANY_OBJECT = {"type": "object"}  # the schema of OpenAI's json_object
ALIASES = {  # parameters that say what the answer follows, and the names of these in `SamplingParams`
    "json_schema": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
# the same of vLLM's structured_outputs
OUTPUT_NAMES = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_schema",
}
# its options, each with why it is not honoured; "" where it changes nothing
OUTPUT_OPTIONS = {
    "disable_fallback": "",
    "disable_any_whitespace": BOUNDED_BLANKS,
    "whitespace_pattern": BOUNDED_BLANKS,
    "disable_additional_properties": "additionalProperties of the schema says it",
    "structural_tag": "tools and tool_choice hold an answer to calls",
}
# Values that request what the server does anyway; they are dropped.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "tool_calls": ([],),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "background": (False,),
    "verbosity": ("medium",),
    "reasoning": ({},),
    "include": ([],),
    "truncation": ("disabled",),
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "priority": (0,),
    "annotations": ([],),
    # what vLLM's and SGLang's clients send by default
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),  # there are no special tokens to put spaces between
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "detokenize": (True,),
    "bad_words": ([],),
    "continue_final_message": (False,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "logits_processors": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "include_reasoning": (True,),
    # honoured by some endpoints, and done anyway by the others
    "echo": (False,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),  # in chats: the template writes them
}


def without_neutral(values: Any, honoured: Container[str]) -> Any:
    """Drop values that are null, and neutral values of parameters that are not honoured here."""
    if not isinstance(values, Mapping):
        return values
    return {
        name: value
        for name, value in values.items()
        if value is not None and (name in honoured or not _is_neutral(value, NEUTRAL.get(name, ())))
    }


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in neutral)  # True is not 1


def sampling(
    asked: GenerationRequest,
    max_tokens: int,
    logprobs: int | None,
    constraint: Mapping[str, Any],
    reasoning: tuple[str, ...] = (),
) -> SamplingParams:
    """Return the sampling parameters for the engine. `constraint`: what the answer has to follow, behind `reasoning` in
    these markers."""
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or ()
    return SamplingParams(
        temperature=asked.temperature,
        top_k=asked.top_k if asked.top_k is not None and asked.top_k > 0 else None,
        top_p=asked.top_p,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias=asked.logit_bias or {},
        seed=asked.seed,
        n=asked.n,
        max_tokens=max_tokens,
        min_tokens=asked.min_tokens,
        stop=tuple(one for one in stop if one),
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        ignore_eos=asked.ignore_eos,
        logprobs=logprobs,
        reasoning=reasoning if constraint else (),
        **constraint,
    )


def constraint_of(asked: GenerationRequest) -> dict[str, Any]:
    """Return what the answer has to follow, by its name in `SamplingParams`, from the one parameter that says so.

    These are OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`, and the names of `SamplingParams`,
    two of which are llama.cpp's.
    """
    found = {
        "response_format": _of_format(asked.response_format) if asked.response_format is not None else {},
        "structured_outputs": _of_outputs(asked.structured_outputs) if asked.structured_outputs is not None else {},
    }
    for name, kind in ALIASES.items():
        if (value := getattr(asked, name)) is not None:
            found[name] = {kind: value}
    given = [name for name, value in found.items() if value]
    if len(given) > 1:
        raise BadParameter(f"{given[0]} and {given[1]} are both given; an answer follows one of them. Give one.")
    return found[given[0]] if given else {}


def _of_format(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read OpenAI's `response_format`; llama.cpp's clients put the schema beside the type."""
    kind, described = given.get("type"), given.get("json_schema")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": _schema(given["schema"]) if given.get("schema") is not None else ANY_OBJECT}
    schema = described.get("schema") if isinstance(described, Mapping) else given.get("schema")
    if kind != "json_schema" or schema is None:
        raise BadParameter(
            f"response_format is {given!r:.80}; expected "
            '{"type": "json_schema", "json_schema": {"name": …, "schema": …}}, {"type": "json_object"} or '
            '{"type": "text"}.'
        )
    return {"json_schema": _schema(schema)}


def _of_outputs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read vLLM's `structured_outputs`."""
    asked = {name: value for name, value in given.items() if value is not None and value is not False}
    for name in asked:
        if why := OUTPUT_OPTIONS.get(name):
            raise BadParameter(f"structured_outputs has {name!r}, which is not supported: {why}. Leave it out.")
    for name in given:
        if name not in OUTPUT_NAMES and name not in OUTPUT_OPTIONS:
            raise unknown("parameter of structured_outputs", name, OUTPUT_NAMES)
    found = {OUTPUT_NAMES[name]: value for name, value in asked.items() if name in OUTPUT_NAMES}
    if given.get("json_object"):
        found["json_schema"] = ANY_OBJECT
    return found


def _schema(given: Any) -> Any:
    """Return a schema; true, which describes any value, as {}."""
    return {} if given is True else given


def decoding_options(asked: GenerationRequest) -> RequestOptions:
    """Return the request options for the engine."""
    wish = asked.speculative
    if wish is None or wish is True:
        return RequestOptions()
    if wish is False or wish.off:
        return RequestOptions(speculative=False)
    chosen = {name: value for name, value in (("method", wish.method), ("policy", wish.policy)) if value is not None}
    return RequestOptions(speculative=chosen or None)
