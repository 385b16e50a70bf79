"""The formats of tool calls and reasoning by name, and which one a chat template is written for.

Owns both tables. The names are vLLM's.
"""

from __future__ import annotations

from specbranch.text.tools.hermes import EXACT_HERMES, HERMES
from specbranch.text.tools.llama import LLAMA
from specbranch.text.tools.mistral import MISTRAL
from specbranch.text.tools.qwen3_coder import QWEN3_CODER
from specbranch.text.tools.reading import ToolFormat
from specbranch.text.tools.reasoning import BRACKETS, THINK, ThinkMarkers

FORMATS: dict[str, ToolFormat] = {form.name: form for form in (HERMES, QWEN3_CODER, LLAMA, MISTRAL)}
FORMAT_ALIASES = {"qwen": "hermes", "qwen25": "hermes", "qwen3_xml": "qwen3_coder", "llama3": "llama3_json"}
# An answer that follows a grammar of calls has the right markers, or a fence: nothing else in it is a call.
EXACT_FORMATS = {HERMES.name: EXACT_HERMES}
# What a template writes for earlier calls, or tells the model to write. The first that fits is taken.
_SIGNS: tuple[tuple[str, ToolFormat], ...] = (
    ("<function=", QWEN3_CODER),
    ("<tool_call>", HERMES),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA),
    ('{"name": function name, "parameters":', LLAMA),
)
# vLLM has a name for each model; they differ in markers alone.
REASONING = {"think": THINK, "qwen3": THINK, "deepseek_r1": THINK, "mistral": BRACKETS}
NO_REASONING = "none"  # reasoning stays part of the text


def format_of(template: str) -> ToolFormat | None:
    """Return the format that a chat template's text shows; None if it shows none."""
    calls_by_parameters = "<parameter=" in template
    return next(
        (form for sign, form in _SIGNS if sign in template and (form is not QWEN3_CODER or calls_by_parameters)), None
    )


def thinking_of(template: str) -> ThinkMarkers | None:
    """Return the markers of reasoning that a chat template's text shows; None if it shows none."""
    return next(
        (markers for markers in REASONING.values() if markers.closing in template or markers.opening in template), None
    )
