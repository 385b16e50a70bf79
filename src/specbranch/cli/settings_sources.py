"""Options from elsewhere than the command line: from a settings file, and from environment variables.

Owns where a value comes from, and the checks of names and types. It does not own the options themselves, nor how a
file is read (`settings_file.py`). Invariant: the command line wins over the environment, and the environment over the
file; an unknown name is never ignored in silence.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import Any

import click

from specbranch.cli.options import parsed_settings
from specbranch.cli.sections import Sectioned
from specbranch.cli.settings_file import BASE_KEY, FileValue, read_file
from specbranch.config import TUNED_FOR, SpeculativeConfig
from specbranch.errors import BadParameter, nearest

JSON_SETTINGS = "speculative_config"  # the parameter with the speculative settings that are no options
SETTING_NAMES = (*(one.name for one in fields(SpeculativeConfig)), TUNED_FOR)
ONLY_HERE = ("new_key", "print_config", "help")  # these do something once, so only the command line has them
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_META = "specbranch.elsewhere"
_PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")


class Source(IntEnum):
    """Who gave a value. A greater one wins."""

    DEFAULT = 0
    FILE = 1
    ENVIRONMENT = 2
    COMMAND_LINE = 3


@dataclass(frozen=True, slots=True)
class Given:
    """A value, who gave it, and the name of the file or the variable."""

    value: Any
    source: Source
    origin: str


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What file and environment say: options by the names of their parameters, and speculative settings."""

    options: Mapping[str, Given]
    settings: Mapping[str, Given]

    def over(self, other: Elsewhere) -> Elsewhere:
        """Return both; this one wins."""
        return Elsewhere({**other.options, **self.options}, {**other.settings, **self.settings})


def sourced(prefix: str) -> Callable[[click.Context, click.Parameter, Path | None], Path | None]:
    """Return the callback of the eager option that names the settings file. `prefix`: of environment variables."""

    def read(context: click.Context, parameter: click.Parameter, file: Path | None) -> Path | None:
        variable = os.environ.get(prefix + BASE_KEY.upper(), "")
        named = Path(variable) if file is None and variable else file
        options = {_key(one): one for one in _options(context.command)}
        found = _of_environment(prefix, options)
        if named is not None:
            found = found.over(_of_file(named, options))
        context.meta[_META] = found
        context.default_map = {name: one.value for name, one in found.options.items()}
        return named

    return read


def settled(context: click.Context) -> dict[str, Any]:
    """Return the values of all options, with the speculative settings of all sources as one JSON text."""
    given, settings = dict(context.params), _settings(context)
    for name, one in settings.items():
        if name in given and _source(context, name) < one.source:
            given[name] = None  # JSON on the command line wins over a single option of the environment
    values = {name: one.value for name, one in settings.items()}
    return {**given, BASE_KEY: None, JSON_SETTINGS: json.dumps(values) if values else None}


def effective(context: click.Context, defaults: Mapping[str, Any]) -> str:
    """Return all settings in YAML, each with its source. `defaults`: of options that have None where none is given."""
    sections: dict[str, list[str]] = {}
    for parameter, value, origin in _effective(context, defaults):
        text = _PASSWORD.sub("***", json.dumps(value, ensure_ascii=False, default=str))
        line = f"{_key(parameter)}: {text}".ljust(40) + f"  # {origin}"
        sections.setdefault(parameter.section, []).append(line)
    head = f"# {context.command_path}: the effective settings, as --config reads them"
    return "\n".join([head, *(line for title, lines in sections.items() for line in ("", f"# {title}", *lines))])


def _effective(context: click.Context, defaults: Mapping[str, Any]) -> Iterator[tuple[Sectioned, Any, str]]:
    given, settings = settled(context), _settings(context)
    for parameter in _options(context.command):
        name = str(parameter.name)
        if name == JSON_SETTINGS:
            rest = {key: one for key, one in settings.items() if key not in given and key != TUNED_FOR}
            origins = dict.fromkeys(one.origin for one in rest.values())
            yield parameter, {key: one.value for key, one in rest.items()}, ", ".join(origins) or "default"
        elif given[name] is None and name in settings:
            yield parameter, settings[name].value, settings[name].origin
        else:
            value = defaults.get(name) if given[name] in (None, ()) else given[name]
            yield parameter, _shown(parameter, value), _origin(context, name)


def _settings(context: click.Context) -> dict[str, Given]:
    """Return the speculative settings of all sources together."""
    own = context.params[JSON_SETTINGS]
    here = {name: Given(one, Source.COMMAND_LINE, "command line") for name, one in parsed_settings(own).items()}
    return {**_elsewhere(context).settings, **here}


def _elsewhere(context: click.Context) -> Elsewhere:
    found: Elsewhere = context.meta[_META]
    return found


def _source(context: click.Context, name: str) -> Source:
    if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
        return Source.COMMAND_LINE
    found = _elsewhere(context).options.get(name)
    return Source.DEFAULT if found is None else found.source


def _origin(context: click.Context, name: str) -> str:
    source = _source(context, name)
    if source is Source.COMMAND_LINE:
        return "command line"
    return "default" if source is Source.DEFAULT else _elsewhere(context).options[name].origin


def _of_environment(prefix: str, named: Mapping[str, Sectioned]) -> Elsewhere:
    """Read the variables of all options; warn about one that is of none."""
    variables = {prefix + key.replace("-", "_").upper(): one for key, one in named.items()}
    options: dict[str, Given] = {}
    settings: dict[str, Given] = {}
    for variable in sorted(name for name in os.environ if name.startswith(prefix)):
        text = os.environ[variable].strip()
        if not text or variable == prefix + BASE_KEY.upper():
            continue
        parameter = variables.get(variable)
        if parameter is None:
            close = nearest(variable, variables)
            click.echo(f"{variable} is ignored: there is no such option of `specbranch serve`.{close}", err=True)
        elif parameter.name == JSON_SETTINGS:
            values = _checked(parsed_settings(text, variable), variable)
            settings = {name: Given(value, Source.ENVIRONMENT, variable) for name, value in values.items()}
        else:
            what = f"{variable} is {text!r:.80}{_of_kubernetes(text)}"
            value = _typed(parameter, _of_text(parameter, text), what)
            options[str(parameter.name)] = Given(value, Source.ENVIRONMENT, variable)
    return Elsewhere(options, settings)


def _of_file(file: Path, named: Mapping[str, Sectioned]) -> Elsewhere:
    """Read a settings file. Keys of speculative settings may stand beside the options, as `specbranch tune` writes
    them."""
    known = {key.replace("-", "_"): one for key, one in named.items()}
    values = read_file(file)
    inner = values.pop(JSON_SETTINGS, None)
    settings = _inner(inner) | {name: values.pop(name) for name in SETTING_NAMES if name in values}
    if unknown := next((name for name in values if name not in known), None):
        raise _unknown(unknown, values[unknown].file, (*known, *SETTING_NAMES, BASE_KEY))
    options = {}
    for name, one in values.items():
        value = _typed(known[name], one.value, f"{_key(known[name])} in {one.file} is {one}")
        options[str(known[name].name)] = Given(value, Source.FILE, str(one.file))
    checked = _checked({name: one.value for name, one in settings.items()}, str(file))
    return Elsewhere(
        options, {name: Given(value, Source.FILE, str(settings[name].file)) for name, value in checked.items()}
    )


def _inner(given: FileValue | None) -> dict[str, FileValue]:
    """Return the settings of the key speculative-config: a mapping, or JSON."""
    if given is None:
        return {}
    what = f"speculative-config in {given.file}"
    values = parsed_settings(given.value, what) if isinstance(given.value, str) else given.value
    if not isinstance(values, dict):
        raise BadParameter(f"{what} is {given}; expected names of settings with values.")
    return {str(name): FileValue(value, given.file) for name, value in values.items()}


def _unknown(name: str, file: Path, known: tuple[str, ...]) -> BadParameter:
    if name in ONLY_HERE:
        return BadParameter(f"{file} has {name!r}, which only the command line takes. Take it out of the file.")
    said = f"{file} has {name!r}, which is no option and no speculative setting.{nearest(name, known)}"
    return BadParameter(f"{said} The keys are the names of the options: see specbranch serve --help.")


def _checked(values: dict[str, Any], origin: str) -> dict[str, Any]:
    """Refuse a mistake in speculative settings here, where their origin is known."""
    if isinstance(values.get("without"), str):
        values["without"] = [part.strip() for part in values["without"].split(",") if part.strip()]
    try:
        SpeculativeConfig.from_dict(values)
    except BadParameter as error:
        raise BadParameter(f"{origin}: {error}") from None
    return values


def _of_text(parameter: Sectioned, text: str) -> Any:
    """Return what the text of a variable stands for. One that stands for nothing stays a text, which is refused."""
    if parameter.is_flag:
        word = text.lower()
        return word in TRUE if word in (*TRUE, *FALSE) else text
    if parameter.multiple:
        return [part for part in re.split(r"[,\s]+", text) if part]
    number = {click.INT: int, click.FLOAT: float}.get(parameter.type)
    try:
        return text if number is None else number(text)
    except ValueError:
        return text


def _typed(parameter: Sectioned, value: Any, what: str) -> Any:
    """Return a value as its option has it; refuse one of another type. `what`: the value, and where it stands."""
    if parameter.is_flag:
        if not isinstance(value, bool):
            raise BadParameter(f"{what}; expected true or false.")
        return value if parameter.flag_value is not False else (False if value else None)
    if parameter.multiple:
        several = [value] if isinstance(value, str) else value
        if not isinstance(several, list) or not all(isinstance(one, str) for one in several):
            raise BadParameter(f"{what}; expected a list of texts.")
        return tuple(several)
    expected, types = _expected(parameter)
    if not isinstance(value, types) or isinstance(value, bool):
        raise BadParameter(f"{what}; expected {expected}.")
    return parameter.type.convert(value, parameter, None)


def _expected(parameter: Sectioned) -> tuple[str, tuple[type, ...]]:
    if parameter.type is click.INT:
        return "a whole number", (int,)
    return ("a number", (int, float)) if parameter.type is click.FLOAT else ("a text, in quotes", (str,))


def _of_kubernetes(text: str) -> str:
    """Say where a value such as tcp://10.0.0.1:80 comes from, which nobody wrote."""
    if not text.startswith(("tcp://", "udp://")):
        return ""
    return " (as Kubernetes sets it for a service of that name; set enableServiceLinks: false)"


def _shown(parameter: Sectioned, value: Any) -> Any:
    """Return a value as a file has it. A flag that switches something off is true if that is off."""
    if parameter.is_flag and parameter.flag_value is False:
        return value is False
    return list(value) if isinstance(value, tuple) else value


def _options(command: click.Command) -> Iterator[Sectioned]:
    """Yield the options that files and variables may set."""
    for one in command.params:
        if isinstance(one, Sectioned) and one.name not in (*ONLY_HERE, BASE_KEY):
            yield one


def _key(parameter: click.Parameter) -> str:
    return max(parameter.opts, key=len).removeprefix("--")
