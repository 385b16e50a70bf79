"""What `verify` must not let pass: text behind a near-tie, and fields that do not fit the tokens.

Two rows of the tiny target's head are equal, so two tokens are tied wherever one of them is the target's choice.
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Command
from transformers import AutoModelForCausalLM, AutoTokenizer

from specbranch.cli.main import run
from specbranch.lab.recheck.compare import NEAR_LOGITS

PROMPT = "A branch is a guess"
AT = 2  # where the tie stands in the answer
MOST = 10
SHAPED = ("--frequency-penalty", "0.5", "--min-tokens", "8", "--logprobs", "2")
MADE = ("--device", "cpu", "--dtype", "float64", "--method", "autoregressive", "--max-tokens", str(MOST), "--json")
FORGED = "The earth is flat, and this text was never said by the model."

Answer = dict[str, Any]


@dataclass(frozen=True)
class Tied:
    """A target of which two tokens are tied, and what it says."""

    target: str
    said: int  # the target's choice at AT
    other: int  # its equal


@pytest.fixture(scope="module")
def tied(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Tied:
    folder = tmp_path_factory.mktemp("tied")
    model = AutoModelForCausalLM.from_pretrained(pair[0])
    tokenizer = AutoTokenizer.from_pretrained(pair[0])
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        for _ in range(AT + 1):  # the first tokens of the answer; the penalty changes none of them
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=-1)
        said, head = int(ids[0, -1]), model.lm_head.weight
        other = next(token for token in range(head.shape[0] - 1, 0, -1) if token not in ids)
        head[max(said, other)] = head[min(said, other)] = head[said].clone()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Tied(str(folder), said, other)


def made(tied: Tied, *options: str) -> Answer:
    out = io.StringIO()
    with redirect_stdout(out):
        assert run(["generate", PROMPT, "--target", tied.target, *MADE, *SHAPED, *options]) == 0
    return dict(json.loads(out.getvalue()))


@pytest.fixture(scope="module")
def plain(tied: Tied, nothing_kept: None) -> Answer:
    """What plain decoding gives."""
    return made(tied)


@pytest.fixture(scope="module")
def turned(tied: Tied, plain: Answer) -> Answer:
    """What another order of sums could have given: the tie goes the other way, and the text goes on from there."""
    first, second = plain["token_ids"][AT], ({tied.said, tied.other} - {plain["token_ids"][AT]}).pop()
    answer = made(tied, "--logit-bias", f"{second}:2e-5")
    assert answer["token_ids"][: AT + 1] == [*plain["token_ids"][:AT], second]
    assert answer["token_ids"][AT + 1 :] != plain["token_ids"][AT + 1 :], "the text hangs on the tie"
    assert {first, second}.isdisjoint(answer["token_ids"][AT + 1 :]), "there is one tie"
    return {**answer, "params": plain["params"]}


def verified(command: Command, *answers: Answer, options: tuple[str, ...] = ()) -> tuple[int, list[Answer]]:
    lines = "\n".join(json.dumps(answer) for answer in answers)
    done = command("verify", "-", "--device", "cpu", "--json", *options, stdin=lines)
    return done.code, [json.loads(line) for line in done.out.split("\n") if line]


def test_one_near_tie_passes_and_the_text_behind_it_is_that_of_the_saved_token(
    command: Command, plain: Answer, turned: Answer
) -> None:
    code, (first, second) = verified(command, plain, turned)
    assert code == 0 and first["verdict"] == "identical" and first["departures"] == []
    assert second["verdict"] == "near-tie" and second["position"] == AT and abs(second["margin"]) < NEAR_LOGITS
    assert len(second["departures"]) == 1 and second["mismatches"] == []


def test_a_text_forged_behind_a_near_tie_is_found(
    command: Command, pair: tuple[str, str], turned: Answer, plain: Answer
) -> None:
    ids = AutoTokenizer.from_pretrained(pair[0])(FORGED, add_special_tokens=False).input_ids
    tokens = [*turned["token_ids"][: AT + 1], *ids]
    params = {**turned["params"], "max_tokens": len(tokens)}
    flat = {**turned, "token_ids": tokens, "text": FORGED, "params": params, "finish_reason": "length"}
    swapped = {**turned, "token_ids": [*tokens[: AT + 1], *plain["token_ids"][AT + 1 :]]}
    short = {**turned, "token_ids": turned["token_ids"][: AT + 1]}
    bare = [{name: one[name] for name in ("prompt_token_ids", "token_ids", "params", "seed")} for one in (flat, short)]
    named = ("--target", turned["target"], "--dtype", "float64")
    for answers, options in (((flat, swapped, short), ()), (bare, named)):
        code, results = verified(command, *answers, options=options)
        assert code == 1 and len(results) == len(answers)
        for result in results:
            assert result["verdict"] == "different" and result["position"] > AT
            assert result["departures"][0]["position"] == AT


def test_a_second_near_tie_is_a_difference(command: Command, tied: Tied) -> None:
    """Both tokens are tied at every position, and nothing else is likely."""
    bias = ("--logit-bias", f"{tied.said}:50", "--logit-bias", f"{tied.other}:50", "--frequency-penalty", "0")
    (answer,) = command("generate", PROMPT, "--target", tied.target, *MADE, *bias).answers()
    first, *_ = answer["token_ids"]
    assert answer["token_ids"] == [first] * MOST
    (other,) = {tied.said, tied.other} - {first}
    turned = [{k: v for k, v in answer.items() if k != "text"} | {"token_ids": [first] * MOST} for _ in range(2)]
    turned[0]["token_ids"][3] = turned[1]["token_ids"][3] = turned[1]["token_ids"][7] = other
    code, (one, two) = verified(command, *turned)
    assert code == 1 and one["verdict"] == "near-tie" and two["verdict"] == "different"
    assert [departure["position"] for departure in two["departures"]] == [3, 7]
    assert all(departure["margin"] < NEAR_LOGITS for departure in two["departures"])


FORGERIES: dict[str, dict[str, Any]] = {
    "text": {"text": FORGED},
    "finish_reason": {"finish_reason": "stop"},
    "prompt": {"prompt": "Is the earth flat?"},
    "stats.tokens": {"stats": {"tokens": 3}},
    "seed": {"seed": 5, "params": {"seed": 4}},
    "sample": {"sample": 1},
}


@pytest.mark.parametrize("field", FORGERIES)
def test_a_forged_field_is_found_and_named(field: str, command: Command, plain: Answer, turned: Answer) -> None:
    for answer in (plain, turned):  # also where one near-tie passes
        change = FORGERIES[field]
        forged = {**answer, **change, "params": {**answer["params"], **change.get("params", {})}}
        code, (result,) = verified(command, forged)
        assert code == 1 and result["verdict"] == "different"
        assert [one["field"] for one in result["mismatches"]] == [field]


def test_forged_log_probabilities_are_found(command: Command, plain: Answer) -> None:
    def changed(at: int, **entry: Any) -> Answer:
        printed = [*plain["logprobs"]]
        return {**plain, "logprobs": [*printed[:at], {**printed[at], **entry}, *printed[at + 1 :]]}

    one, (first, second) = plain["logprobs"][4]["logprob"], plain["logprobs"][4]["top"]
    forged = [
        changed(4, logprob=one + 1e-3),
        changed(4, top=[first, [second[0], second[1] + 1e-3]]),
        changed(4, top=[[3 if first[0] != 3 else 4, first[1]], second]),
        changed(4, top=[first]),
        changed(4, top=[first, first]),
        changed(4, logprob=float("nan")),
    ]
    code, results = verified(command, plain, changed(4, logprob=one + 1e-6), *forged)
    assert code == 1
    assert [result["verdict"] for result in results] == ["identical"] * 2 + ["different"] * len(forged)
    assert {one["field"] for result in results[2:] for one in result["mismatches"]} == {"logprobs[4]"}
    code, (missing,) = verified(command, {**plain, "logprobs": plain["logprobs"][:-1]})
    assert code == 1 and missing["mismatches"][0]["field"] == "logprobs"


def test_a_claimed_context_does_not_cut_an_answer_short(command: Command, plain: Answer) -> None:
    prompt, tokens = plain["prompt_token_ids"], plain["token_ids"][:6]
    names = ("target", "dtype", "seed", "prompt_token_ids", "params")
    forged = {**{name: plain[name] for name in names}, "token_ids": tokens, "finish_reason": "length"}
    forged["context_length"] = len(prompt) + 6
    code, (result,) = verified(command, forged)
    assert code == 1 and result["verdict"] == "different" and result["position"] == 6
    assert result["claimed_context_length"] == len(prompt) + 6
    said = command("verify", "-", "--device", "cpu", stdin=json.dumps(forged)).out
    assert f"if that was the setting, give --context-length {len(prompt) + 6}" in said
    option = ("--context-length", str(len(prompt) + 6))
    assert verified(command, forged, options=option)[0] == 0, "the verifier may say that it was the setting"


def test_an_answer_longer_than_the_context_gets_a_sentence(command: Command, plain: Answer) -> None:
    done = command("verify", "-", "--device", "cpu", "--context-length", "12", stdin=json.dumps(plain))
    assert done.code == 2 and "the context holds 12" in done.err and "--context-length" in done.err


def test_what_cannot_be_checked_is_named(command: Command, plain: Answer) -> None:
    strange = {**plain, "reviewed_by": "nobody"}
    code, (result,) = verified(command, strange)
    assert code == 0 and set(result["not_checked"]) == {
        *("method", "stats (all but tokens)", "origins", "context_length", "build", "device", "reviewed_by")
    }
    assert result["claimed"] == ["target", "dtype", "weights", "runner"]
    said = command("verify", "-", "--device", "cpu", stdin=json.dumps(strange)).err
    assert "Not checked: " in said and "origins" in said and "reviewed_by" in said
    assert "Claimed by the file, and believed: target, dtype" in said
    given = command("verify", "-", "--device", "cpu", "--target", plain["target"], stdin=json.dumps(strange)).err
    assert "believed: dtype" in given


def test_where_tokens_differ_what_follows_from_them_is_named_as_not_checked(command: Command, plain: Answer) -> None:
    answer = {**plain, "token_ids": [*plain["token_ids"][:-1], plain["token_ids"][-1] ^ 1]}
    code, (result,) = verified(command, answer)
    assert code == 1 and {"text", "finish_reason", "logprobs"} <= set(result["not_checked"])
    assert "prompt" not in result["not_checked"]


def test_a_message_is_checked_with_its_template_and_a_dated_one_is_not(
    command: Command, tied: Tied, tmp_path: Path
) -> None:
    (answer,) = command("generate", "--chat", "Smile", "--target", tied.target, *MADE).answers()
    assert verified(command, answer)[0] == 0
    assert verified(command, {**answer, "prompt": "Frown"})[0] == 1
    dated = _with_template(tied, tmp_path, "{{ strftime_now('%d') }}{{ messages[0].content }}")
    (answer,) = command("generate", "--chat", "Smile", "--target", dated, *MADE).answers()
    code, (result,) = verified(command, answer)
    assert code == 0 and "prompt" not in result["not_checked"]
    code, (result,) = verified(command, {**answer, "prompt": "Frown"})
    assert code == 0 and "prompt" in result["not_checked"]


def _with_template(tied: Tied, folder: Path, template: str) -> str:
    AutoModelForCausalLM.from_pretrained(tied.target).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(tied.target)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)
