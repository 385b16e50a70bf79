"""The key of a request: equal for all turns of a conversation, and different for another one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specbranch.cluster.beginnings import MESSAGE_CHARACTERS, PROMPT_CHARACTERS, PROMPT_IDS, beginning_key

SYSTEM = {"role": "system", "content": "You are brief. " * 100}
HELLO = {"role": "user", "content": "Hello"}


def key(**body: Any) -> str | None:
    return beginning_key(json.dumps(body).encode())


def test_later_turns_have_the_key_of_the_first() -> None:
    answer, more = {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Go on."}
    first = key(messages=[SYSTEM, HELLO])
    assert first == key(messages=[SYSTEM, HELLO, answer, more], stream=True)
    assert first != key(messages=[SYSTEM, more]) and first != key(messages=[HELLO])


def test_a_long_text_with_different_questions_behind_it_has_one_key() -> None:
    text = "word " * MESSAGE_CHARACTERS
    assert key(messages=[{"role": "user", "content": text + "Why?"}]) == key(
        messages=[{"role": "user", "content": [{"type": "text", "text": text + "How?"}]}]
    )


def test_responses_and_completions_have_keys() -> None:
    turn = [HELLO, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Go on."}]
    assert key(instructions="Be brief.", input=[HELLO]) == key(instructions="Be brief.", input=turn)
    assert key(input="Hello") == key(input=[HELLO])
    start = "x" * PROMPT_CHARACTERS
    assert key(prompt=start + "a") == key(prompt=[start + "b", "other"]) != key(prompt="y" + start)
    ids = list(range(PROMPT_IDS))
    assert key(prompt=[*ids, 1]) == key(prompt=[[*ids, 2], [3]]) != key(prompt=[5, *ids])


@pytest.mark.parametrize(
    "body",
    [b"", b"no json", b"\xff", b"[1]", b"{}", b'{"prompt": 5}', b'{"messages": [3]}', b'{"prompt": []}', b"[" * 9999],
)
def test_a_body_without_a_prompt_has_no_key(body: bytes) -> None:
    assert beginning_key(body) is None


def test_a_key_shows_nothing_of_the_text() -> None:
    found = key(prompt="secret")
    assert found is not None and len(found) == 32 and "secret" not in found
    assert key(prompt="\ud800") is not None  # half a character, as JSON may have it
