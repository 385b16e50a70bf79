"""Every parameter has the effect it has in the engine, whole and streamed; what is refused is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from running import PROMPT, Running, events, texts

from small_tokenizers import byte_level
from specbranch import LLM, SamplingParams
from specbranch.core.methods import METHODS
from specbranch.serve.errors import ApiError
from specbranch.serve.parameters import REFUSED, WITHOUT_EFFECT
from specbranch.serve.prompts import _rendered
from specbranch.serve.protocol import ChatRequest
from specbranch.text.tokenizer import Tokenizer
from tiers import tiered

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
TALK = [{"role": "user", "content": "Smile, and wave."}]
BASE: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 30}
HONOURED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"top_k": 4},
    {"top_k": -1},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.5},
    {"logit_bias": {"40": 20.0, "41": -100}},
    {"seed": -5},
    {"ignore_eos": True, "min_tokens": 30, "max_tokens": 60},
    {"stop": ["e", "a"]},
    {"stop": "i"},
    {"stop_token_ids": [40, 41, 42, 43, 44, 45, 50, 60, 70, 80]},
    {"n": 3},
]


@pytest.mark.parametrize("given", tiered(HONOURED, HONOURED[::3].__contains__), ids=lambda given: ",".join(given))
def test_a_parameter_does_what_it_does_in_the_engine(served: Running, reference: LLM, given: dict[str, Any]) -> None:
    asked = {**BASE, **given}
    own = {**asked, "logit_bias": {int(token): bias for token, bias in asked.get("logit_bias", {}).items()}}
    if own.get("top_k") == -1:
        own["top_k"] = None
    expected = reference.generate(PROMPT, SamplingParams(**own))
    outputs = [expected, *expected.alternatives]
    whole = served.post(COMPLETE, {"prompt": PROMPT, **asked}).json()["choices"]
    assert [one["text"] for one in whole] == [one.text for one in outputs]
    assert [one["finish_reason"] for one in whole] == [one.finish_reason for one in outputs]
    streamed = events(served.post(COMPLETE, {"prompt": PROMPT, "stream": True, **asked}))
    assert texts(streamed) == dict(enumerate(one.text for one in outputs))
    plain = reference.generate(PROMPT, SamplingParams(**BASE))
    assert (plain.text == expected.text) == (given in ({"top_k": -1}, {"n": 3})), "it would not be missed"


def test_several_prompts_of_either_kind_are_answered_in_their_order(served: Running, reference: LLM) -> None:
    ids = [reference.tokenizer.encode(text) for text in ("Smile", PROMPT)]
    params = SamplingParams(**BASE, n=2)
    outputs = [
        one for prompt in ids for first in reference.generate([prompt], params) for one in (first, *first.alternatives)
    ]
    for prompt in (["Smile", PROMPT], ids):
        answer = served.post(COMPLETE, {"prompt": prompt, "n": 2, **BASE}).json()
        assert [one["text"] for one in answer["choices"]] == [one.text for one in outputs]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


QUICK = ({"method": "pearl"}, {"method": "lookahead"}, {"method": "auto"})


@pytest.mark.parametrize(
    "how",
    [False, {"off": True}, True, {}, *tiered(({"method": name} for name in METHODS), QUICK.__contains__)],
    ids=str,
)
def test_a_request_says_how_it_is_decoded_and_its_text_is_the_same(
    served: Running, reference: LLM, how: bool | dict[str, Any]
) -> None:
    expected = reference.generate(PROMPT, SamplingParams(**BASE)).text
    answer = served.post(COMPLETE, {"prompt": PROMPT, "speculative": how, **BASE}).json()
    assert answer["choices"][0]["text"] == expected
    plain = how is False or (isinstance(how, dict) and how.get("off"))
    named = how.get("method") if isinstance(how, dict) else None
    used = answer["metrics"]["speculative_decoding"]["methods"]
    assert used == ["autoregressive" if plain else named or served.engine.method]


def test_the_speculations_figures_fit_together(served: Running) -> None:
    reply = events(
        served.post(
            COMPLETE,
            {"prompt": PROMPT, **BASE, "max_tokens": 60, "ignore_eos": True, "stream": True}
            | {"stream_options": {"include_usage": True}, "speculative": {"method": "pearl"}},
        )
    )
    assert all(event["usage"] is None for event in reply[:-1])
    figures = reply[-1]["metrics"]["speculative_decoding"]
    assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"] > 0
    assert figures["num_draft_tokens"] > figures["num_accepted_draft_tokens"] > 0
    assert len(figures["num_accepted_tokens_per_pos"]) == figures["num_spec_tokens"]
    assert figures["mean_acceptance_length"] == pytest.approx(
        1 + figures["num_accepted_draft_tokens"] / figures["num_spec_steps"]
    )
    assert reply[-1]["usage"]["completion_tokens"] == 60 and reply[-1]["choices"] == []


def test_usage_can_be_sent_with_every_event(served: Running) -> None:
    body = {"prompt": PROMPT, **BASE, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    counts = [event["usage"]["completion_tokens"] for event in events(served.post(COMPLETE, body))]
    assert counts == sorted(counts) and counts[-1] == 30


@pytest.mark.parametrize("as_ids", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_an_echo_tells_how_likely_the_prompt_is(served: Running, reference: LLM, as_ids: bool, stream: bool) -> None:
    ids = reference.tokenizer.encode(PROMPT)
    body = {"prompt": ids if as_ids else PROMPT, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    response = served.post(COMPLETE, {**body, "stream": stream})
    answer = reference.generate(PROMPT, SamplingParams(max_tokens=1, logprobs=1))
    found: dict[str, list[Any]] = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    text = ""
    for choice in [one for part in (events(response) if stream else [response.json()]) for one in part["choices"]]:
        text += choice["text"]
        for name, values in found.items():
            values += choice["logprobs"][name] if choice["logprobs"] else []
    assert text == PROMPT + answer.text
    scored = reference.score(ids, 1)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:-1] == [pytest.approx(one.logprob, abs=1e-9) for one in scored]
    assert answer.logprobs and found["token_logprobs"][-1] == pytest.approx(answer.logprobs[0].logprob, abs=1e-9)
    for at, one in enumerate(scored, 1):
        assert max(found["top_logprobs"][at].values()) == pytest.approx(max(one.top[0][1], one.logprob), abs=1e-9)
    assert found["text_offset"] == sorted(found["text_offset"]) and found["text_offset"][-1] == len(PROMPT)


def test_a_prompt_may_be_scored_without_an_answer(served: Running, reference: LLM) -> None:
    answer = served.post(COMPLETE, {"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 0}).json()
    choice = answer["choices"][0]
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"][1:] == [pytest.approx(one.logprob) for one in reference.score(PROMPT)]
    assert answer["usage"]["completion_tokens"] == 0
    status, error = served.error(COMPLETE, {"prompt": PROMPT, "max_tokens": 0})
    assert status == 400 and "nothing to answer" in error["message"]


def test_parts_and_a_developer_read_as_texts_and_the_system(served: Running, reference: LLM) -> None:
    said = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "Smile."}], "name": "Ann"},
    ]
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Smile."}]
    expected = reference.chat(plain, SamplingParams(**BASE)).text
    for body in (
        {"messages": said, **BASE},
        {"messages": plain, **BASE, "max_tokens": None, "max_completion_tokens": 30},
    ):
        assert served.post(CHAT, body).json()["choices"][0]["message"]["content"] == expected


def test_what_changes_no_text_is_accepted(served: Running, reference: LLM) -> None:
    body: dict[str, Any] = {"messages": TALK, **BASE, **{name: {"any": "thing"} for name in WITHOUT_EFFECT}}
    neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
    answer = served.post(CHAT, {**body, **neutral, "audio": None}).json()
    assert answer["choices"][0]["message"]["content"] == reference.chat(TALK, SamplingParams(**BASE)).text


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_what_clients_of_vllm_send_by_default_is_accepted(served: Running, reference: LLM, path: str) -> None:
    defaults = {
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "ignore_eos": False,
        "stop_token_ids": [],
        "bad_words": [],
        "allowed_token_ids": None,
        "prompt_logprobs": None,
        "truncate_prompt_tokens": None,
        "echo": False,
        "priority": 0,
        "best_of": 1,
        "return_token_ids": False,
        "return_tokens_as_token_ids": False,
        "structured_outputs": None,
    }
    chat = {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False}
    body: dict[str, Any] = {"messages": TALK, **chat} if path == CHAT else {"prompt": PROMPT, "suffix": ""}
    answer = served.post(path, {**body, **BASE, **defaults}).json()["choices"][0]
    if path == CHAT:
        assert answer["message"]["content"] == reference.chat(TALK, SamplingParams(**BASE)).text
    else:
        assert answer["text"] == reference.generate(PROMPT, SamplingParams(**BASE)).text


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_it_is_refused_by_name(served: Running, name: str) -> None:
    status, error = served.error(CHAT, {"messages": TALK, name: {"type": "json_object"}})
    assert status == 400 and error["param"] == name and error["message"].startswith(f"{name!r} is not supported: ")


def test_the_classes_of_parameters_do_not_overlap() -> None:
    assert not set(REFUSED) & set(ChatRequest.model_fields) and set(WITHOUT_EFFECT) <= set(ChatRequest.model_fields)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": TALK, "temprature": 1}, "Did you mean 'temperature'"),
    (CHAT, {"messages": TALK, "temperature": -1}, "temperature: Input should be greater"),
    (CHAT, {"messages": TALK, "temperature": "warm"}, "temperature: "),
    (CHAT, {"messages": TALK, "n": 0}, "n: "),
    (CHAT, {"messages": []}, "messages: expected a list of messages"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "messages[0] (user) has a part of type 'image_url': only text is read here",
    ),
    (CHAT, {"messages": [{"role": "tool", "content": "4"}]}, "chat template refuses these messages: Unknown role tool"),
    (CHAT, {"messages": [{"role": "assistant"}]}, "messages[0] (assistant) has no content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]},
        "messages[0].tool_calls[0] (user): expected a list",
    ),
    (CHAT, {"messages": TALK, "top_logprobs": 21}, "top_logprobs: "),
    (CHAT, {"messages": TALK, "logit_bias": {"421": 1}}, "token 421, but ids go from 0 to 420"),
    (CHAT, {"messages": TALK, "logit_bias": {"1": 101}}, "logit_bias: expected up to 1024 token ids with numbers"),
    (CHAT, {"messages": TALK, "seed": 2**64}, "seed: "),
    (CHAT, {"messages": TALK, "min_tokens": 9, "max_tokens": 3}, "min_tokens is 9; expected at most max_tokens"),
    (CHAT, {"messages": TALK, "speculative": {"method": "specbranhc"}}, "Did you mean 'specbranch'"),
    (CHAT, {"messages": TALK, "speculative": {"policy": "oracle"}}, "only a replay does"),
    (CHAT, {"messages": TALK, "speculative": {"gamma": 3}}, "Unknown parameter of speculative 'gamma'"),
    (CHAT, {"messages": TALK, "chat_template_kwargs": {"messages": 1}}, "'messages', which the server sets itself"),
    (CHAT, {"messages": TALK, "echo": True}, f"'echo' is a parameter of {COMPLETE}, not of {CHAT}. Leave it out"),
    (COMPLETE, {"prompt": "x", "messages": TALK}, f"'messages' is a parameter of {CHAT} and /tokenize, not of"),
    (COMPLETE, {"prompt": "x", "ecko": True}, "Unknown parameter 'ecko'. Did you mean 'echo'"),
    (CHAT, {"messages": TALK, "stream_options": {"content": 1}}, "Unknown parameter of stream_options 'content'."),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role: expected one of system, developer"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "got 'robot'"),
    (CHAT, {"messages": [*TALK, {"role": "system", "content": 5}]}, "messages[1].content (system): expected a text"),
    (CHAT, {"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type (user): "),
    (CHAT, {"messages": TALK, "stream_options": {"include_usage": "?"}}, "stream_options.include_usage: "),
    (COMPLETE, {"prompt": [True, False]}, "prompt: expected a text, token ids"),
    (COMPLETE, {"prompt": [[1, True]]}, "prompt: expected a text, token ids"),
    (COMPLETE, {"prompt": "x", "stop_token_ids": [True]}, "stop_token_ids[0]: expected up to 1024 token ids, got True"),
    (COMPLETE, {"prompt": "x", "stop_token_ids": [1] * 1025}, "stop_token_ids: expected up to 1024 token ids"),
    ("/detokenize", {"tokens": [1, True]}, "tokens[1]: expected a list of token ids, got True"),
    (COMPLETE, {"prompt": [5] * 480}, "This model's maximum context length is 480 tokens"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 480}]}, "However, your messages resulted in "),
    (CHAT, {"messages": TALK, "best_of": True}, "'best_of' is not supported"),
    (COMPLETE, {"prompt": ""}, "prompt is empty"),
    (COMPLETE, {"prompt": []}, "prompt: expected a text, token ids"),
    (COMPLETE, {"prompt": [1, "x"]}, "prompt: expected a text, token ids"),
    (COMPLETE, {"prompt": [421]}, "token 421, but ids go from 0 to 420"),
    (COMPLETE, {"prompt": "\ud800"}, "not valid UTF-8"),
    (COMPLETE, {"prompt": "x", "stop": ["x"] * 129}, "stop: expected a text or up to 128 texts, of up to 256"),
    (COMPLETE, {"prompt": "x", "stop": 3}, "stop: expected a text or up to 128 texts"),
    (COMPLETE, {"prompt": ["x"] * 100, "n": 100}, "10000 samples"),
    (COMPLETE, {}, "prompt: expected"),
    ("/tokenize", {}, "either a prompt or messages"),
    ("/detokenize", {"tokens": [5000]}, "tokens has 5000"),
]


@pytest.mark.parametrize(("path", "body", "sentence"), MISTAKES, ids=[sentence for _, _, sentence in MISTAKES])
def test_a_mistake_gets_a_sentence(served: Running, path: str, body: dict[str, Any], sentence: str) -> None:
    status, error = served.error(path, body)
    assert status == 400 and sentence in error["message"] and error["type"] == "invalid_request_error"


def test_a_client_reads_what_a_template_says_against_a_conversation_and_nothing_of_jinja(served: Running) -> None:
    for kwargs in ({"messages": 1}, {"self": 1}, {"tools": []}):
        status, error = served.error(CHAT, {"messages": TALK, "chat_template_kwargs": kwargs})
        assert (status, error["param"]) == (400, "chat_template_kwargs")
        assert f"has {next(iter(kwargs))!r}, which the server sets itself. Leave it out." in error["message"]
    picky = "{% if tone is string %}{{ raise_exception('No ' + tone) }}{% endif %}{{ tone.of.voice + 1 }}"
    tokenizer = Tokenizer(byte_level(), {}, (), picky)
    for given, said, param in (
        ({"tone": "irony"}, "chat template refuses these messages: No irony", "messages"),
        ({"tone": 5}, "cannot make a prompt with chat_template_kwargs tone. Send others.", "chat_template_kwargs"),
        ({}, "cannot make a prompt of these messages.", "messages"),
    ):
        with pytest.raises(ApiError) as refused:
            _rendered(tokenizer, TALK, given, "new message")
        assert said in str(refused.value) and refused.value.param == param and "object" not in str(refused.value)


def test_a_prompt_that_does_not_fit_is_refused_in_the_words_that_clients_look_for(served: Running) -> None:
    for path, body, param in (
        (COMPLETE, {"prompt": [5] * 500}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 99999}]}, "messages"),
    ):
        status, error = served.error(path, body)
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert "this model's maximum context length is" in error["message"].lower()  # litellm and LangChain do


def test_bodies_that_are_no_json_and_paths_that_are_not_there_get_a_sentence(served: Running) -> None:
    for sent, kind in (
        (b"{", "application/json"),
        (b'{"prompt": "x"}', "text/plain"),
        (b"[" * 99999, "application/json"),
    ):
        response = served.http.post(COMPLETE, content=sent, headers={"content-type": kind})
        assert response.status_code == 400 and response.json()["error"]["message"], response.text
    assert served.http.get("/nowhere").status_code == 404
    assert "No response is stored here" in served.http.get("/v1/responses/resp_1").json()["error"]["message"]
    assert "does not take GET" in served.http.get("/v1/responses").json()["error"]["message"]
    assert served.http.get(CHAT).json()["error"]["message"] == f"{CHAT} does not take GET; see /openapi.json."
    assert served.http.options(CHAT).status_code == 405  # nobody elsewhere is allowed to ask


def test_texts_become_tokens_and_tokens_texts(served: Running, reference: LLM) -> None:
    ids = reference.tokenizer.encode("Zwölf 🙂")
    reply = served.post("/tokenize", {"prompt": "Zwölf 🙂", "return_token_strs": True}).json()
    assert reply["tokens"] == ids and reply["count"] == len(ids) == len(reply["token_strs"])
    assert reply["max_model_len"] == 480
    assert served.post("/detokenize", {"tokens": ids}).json() == {"prompt": "Zwölf 🙂"}
    assert served.post("/tokenize", {"messages": TALK}).json()["tokens"] == reference.tokenizer.chat(TALK)
