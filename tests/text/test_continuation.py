"""A conversation that goes on within its last message: the text of transformers, or a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from specbranch.errors import BadParameter
from specbranch.text.chat_template import ChatTemplate
from specbranch.text.continuation import open_text

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "plain": CHATML,
    "trimmed": CHATML.replace("message.content", "message.content | trim"),
    "with the reasoning": CHATML.replace(
        "{{ message.content }}",
        "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content.strip('\\n') }}\n</think>\n\n"
        "{% endif %}{{ message.content }}",
    ),
}
# it moves what stands before </think>, as Qwen3 does
MOVES = CHATML.replace("message.content", "message.content.split('</think>')[-1].lstrip('\\n')")
ENDS = ("Two plus two is", "It is ", " Hm.\n", "a", "", " ", "小模型 🙂", "<|im_end|>", "Two plus two")


def talk(**last: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Two plus two is? CONTINUES-HERE-"},
        {"role": "assistant", "content": "Two plus two is"},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", **last},
    ]


def ours(template: str, messages: list[dict[str, Any]]) -> str:
    compiled = ChatTemplate(template, {})
    return open_text(messages, lambda said: compiled.render(said, False))


def theirs(template: str, messages: list[dict[str, Any]], field: Any = True) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    ((text,), _) = render_jinja_template([messages], chat_template=template, continue_final_message=field)
    return str(text)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("end", ENDS)
def test_the_text_is_that_of_transformers_and_ends_with_the_message(name: str, end: str) -> None:
    text = ours(TEMPLATES[name], talk(content=end))
    assert text == theirs(TEMPLATES[name], talk(content=end)) and text.rstrip().endswith(end.strip())


def test_a_message_of_reasoning_alone_goes_on_within_that() -> None:
    messages = talk(content="", reasoning_content="It asks for")
    text = ours(TEMPLATES["with the reasoning"], messages)
    assert text == theirs(TEMPLATES["with the reasoning"], messages, "reasoning_content")
    assert text.endswith("<|im_start|>assistant\n<think>\nIt asks for")
    both = ours(TEMPLATES["with the reasoning"], talk(content="It is", reasoning_content="It asks."))
    assert both.endswith("<think>\nIt asks.\n</think>\n\nIt is")


@pytest.mark.parametrize(
    ("template", "last", "said"),
    [
        (MOVES, {"content": "<think>\nHm.\n</think>\n\nIt is"}, "template changes the content of the last message"),
        (TEMPLATES["plain"], {"content": "", "reasoning_content": "Hm"}, "changes the reasoning_content of the last"),
        (CHATML.replace("message.content", "message.content | upper"), {"content": "It is"}, "template changes the"),
        (CHATML, {"content": "It is", "tool_calls": [{}]}, "has tool_calls, behind which it ends"),
        (CHATML, {"content": [{"type": "text", "text": "It is"}]}, "expected a text"),
        (CHATML, {"role": "user", "content": "It is"}, "is of the role 'user'; expected one of assistant"),
    ],
)
def test_what_cannot_be_continued_gets_a_sentence(template: str, last: dict[str, Any], said: str) -> None:
    with pytest.raises(BadParameter, match=said):
        ours(template, [*talk(content="x")[:-1], {"role": "assistant", **last}])
