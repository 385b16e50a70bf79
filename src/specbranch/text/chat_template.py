"""The chat template of a model: messages in, the one string the model was trained to read out.

Owns the template's environment, which behaves as that of transformers does (sandboxed, blocks trimmed,
`raise_exception`, `strftime_now`, JSON without escapes). Invariant: a template comes with a model and is not trusted;
it can neither change what it is given nor reach Python.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from specbranch.errors import BadParameter, ModelError

Message = Mapping[str, Any]
_CODE = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)  # what a template computes


class ChatTemplate:
    """A compiled template, with the names of the special tokens it may write."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self.source = source
        self._special = dict(special)
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # a template comes with a model, and its compiler raises all kinds
            raise ModelError(
                f"The model's chat template cannot be read: {error}. Repair chat_template.jinja, or remove it."
            ) from error

    @property
    def takes_tools(self) -> bool:
        """True if the template reads `tools`."""
        return any(re.search(r"\btools\b", code) for code in _CODE.findall(self.source))

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the conversation as text. `variables` are the template's own switches, such as `enable_thinking`."""
        given = {**self._special, **(variables or {})}
        plain = _plain([dict(message) for message in messages])
        try:
            return self._template.render(
                messages=plain,
                tools=_plain(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **given,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise BadParameter(f"The model's chat template refuses these messages: {error}") from error
        except Exception as error:  # whatever a template computes, as 1 // 0
            reason = f"{type(error).__name__}: {error}"
            raise BadParameter(
                f"The model's chat template fails on these messages ({reason}). Repair or remove it."
            ) from error


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}` blocks, which mark the model's own words for training and change nothing here."""

    tags = {"generation"}  # noqa: RUF012 - jinja reads it from the class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Replace the block by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes <, > and &, which models were not trained on
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _plain(value: Any) -> Any:
    """Copy to plain lists and dicts: templates test `is mapping`, and the caller's objects stay out of their reach."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
