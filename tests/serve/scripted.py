"""A tiny model that says what a test wants: the engine's whole way, with tokens that were given instead of chosen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from running import Running, load_tiny, running
from tokenizers import AddedToken, Tokenizer

from specbranch.engine_core import EngineCore
from specbranch.serve.tools import AnswerFormats
from specbranch.text.tools.formats import FORMATS
from specbranch.text.tools.reasoning import THINK, ThinkMarkers
from tiny_pair import make_pair

MARKERS = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]  # special tokens, as in their models
TEMPLATE = """{% if tools %}[tools] {{ tools | tojson }}
{% endif %}{% for message in messages %}[{{ message.role }}] \
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}\
{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\
{% if message.tool_call_id %} ({{ message.tool_call_id }}){% endif %}

{% endfor %}{% if add_generation_prompt %}[assistant]{% if enable_thinking %}<think>
{% endif %}{% endif %}"""


class Script:
    """What the model says next, and what it was asked."""

    def __init__(self, served: Running) -> None:
        self.served = served
        self.text = ""
        self.prompts: list[str] = []
        self.tokenizer = served.engine.tokenizer

    def tokens(self) -> tuple[int, ...]:
        return (*self.tokenizer.encode(self.text, add_special=False), self.tokenizer.eos_ids[0])

    @contextmanager
    def format(self, name: str) -> Iterator[None]:
        """Have the server read another format of calls."""
        with reading(self.served, name, THINK):
            yield


@contextmanager
def reading(served: Running, name: str, thinking: ThinkMarkers | None = None) -> Iterator[None]:
    """A server reads another format of calls, and of reasoning."""
    serving: Any = served.server.config.app.state.serving  # type: ignore[union-attr]
    before = serving.formats
    object.__setattr__(serving, "formats", AnswerFormats(True, FORMATS[name], thinking))
    try:
        yield
    finally:
        object.__setattr__(serving, "formats", before)


def tool_pair(folder: Path, positions: int = 512) -> tuple[str, str]:
    """A tiny pair whose template takes tools."""
    pair = make_pair(folder, vocabulary=421 + len(MARKERS), positions=positions)
    for one in map(Path, pair):
        tokenizer = Tokenizer.from_file(str(one / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
        tokenizer.save(str(one / "tokenizer.json"))
        (one / "chat_template.jinja").write_text(TEMPLATE)
    return pair


@contextmanager
def scripted(folder: Path, context_length: int = 480, **given: Any) -> Iterator[Script]:
    """A server over a tiny pair, whose answers are a script's."""
    patch, pair = pytest.MonkeyPatch(), tool_pair(folder, positions=max(512, context_length))
    with running(load_tiny(pair, context_length), model_name="scripted", **given) as served:
        script, make = Script(served), EngineCore.make_answer

        def made(core: EngineCore, prompt: list[int], params: Any, *rest: Any, **options: Any) -> Any:
            script.prompts.append(core.tokenizer.decode(prompt, skip_special=False))
            forced = script.tokens()[: params.max_tokens]
            return make(core, prompt, params, *rest, **{**options, "forced": forced})

        patch.setattr(EngineCore, "make_answer", made)
        try:
            yield script
        finally:
            patch.undo()


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": f"It is {name}.", "parameters": schema}}


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
