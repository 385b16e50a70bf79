"""Messages between two processes as bytes and back, by the type hints of their classes.

Owns the format: JSON. A dataclass is the list of its fields, a mapping a list of pairs, a sequence of named tuples the
list of their columns. If a hint names several classes, the value comes with the name of its class. A float is written
as Python writes it, a sequence of floats as the base64 of its bytes; so each comes back the same, infinities and NaN
too. Fields with `compare=False` are not sent. Invariant: received bytes become a known message with every field as its
hint says, or are refused; nothing else is ever made of them.
"""

from __future__ import annotations

import json
from array import array
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from specbranch.errors import BadParameter, SpecBranchError
from specbranch.exec.messages import WireMessage

_WRITER = json.JSONEncoder(separators=(",", ":"))


class BadMessage(SpecBranchError):
    """Bytes that are no message of ours, or a message that cannot be written."""


def to_bytes(message: WireMessage) -> bytes:
    """Write a message."""
    try:
        return _WRITER.encode(_coder(WireMessage).write(message)).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise BadMessage(f"This {type(message).__name__} cannot be sent: {error}.") from error


def from_bytes(data: bytes) -> WireMessage:
    """Read a message, or raise BadMessage."""
    try:
        message: WireMessage = _coder(WireMessage).read(json.loads(data))
    except (ValueError, RecursionError, MemoryError, BadParameter) as error:
        raise BadMessage(f"{data[:60]!r} is no message of ours: {error}") from error
    return message


class Coder(NamedTuple):
    """How values of one type become JSON values, and are read from them."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _as_it_is(value: Any) -> Any:
    return value


@cache
def _coder(hint: Any) -> Coder:
    origin, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return Coder(_as_it_is, _as_it_is)
    if hint in (bool, int, str):
        return _plain(hint)
    if hint is float:
        return _plain(float, int)  # a temperature given as the int 1 is sent as 1
    if origin is Literal:
        return _one_of(inside)
    if origin in (Union, UnionType):
        return _union(inside)
    if origin is tuple:
        return _row(inside[0]) if inside[1:] == (...,) else _record(inside, tuple)
    if origin in (dict, Mapping):
        return _pairs(_coder(inside[0]), _coder(inside[1]))
    if is_dataclass(hint) and isinstance(hint, type):
        return _dataclass(hint)
    raise TypeError(f"{hint!r} has no form on the line")


def _refused(value: object, expected: str) -> BadParameter:
    return BadParameter(f"it holds {repr(value)[:60]} where {expected} was expected.")


def _plain(*kinds: type) -> Coder:
    def read(value: Any) -> Any:
        if type(value) not in kinds:  # isinstance would let a bool pass for an int
            raise _refused(value, kinds[0].__name__)
        return value

    return Coder(_as_it_is, read)


def _one_of(choices: tuple[Any, ...]) -> Coder:
    def read(value: Any) -> Any:
        if value not in choices:
            raise _refused(value, f"one of {choices}")
        return value

    return Coder(_as_it_is, read)


def _items(value: Any, count: int | None = None) -> list[Any]:
    if type(value) is not list or count not in (None, len(value)):
        raise _refused(value, "a list" if count is None else f"a list of {count}")
    return value


def _row(hint: Any) -> Coder:
    """Code a sequence of one kind; common kinds in one go, because a tree has hundreds of values."""
    if hint is float:
        return Coder(_packed, _unpacked)
    if hint in (bool, int, str):
        return _plain_row(hint)
    if isinstance(hint, type) and issubclass(hint, tuple):
        return _columns(hint)
    one = _coder(hint)
    return Coder(
        lambda values: [one.write(value) for value in values],
        lambda value: tuple([one.read(item) for item in _items(value)]),
    )


def _packed(values: Sequence[float]) -> str:
    return b2a_base64(array("d", values).tobytes(), newline=False).decode("ascii")


def _unpacked(value: Any) -> tuple[float, ...]:
    if type(value) is not str:
        raise _refused(value, "packed floats")
    floats = array("d")
    floats.frombytes(a2b_base64(value, strict_mode=True))
    return tuple(floats)


def _plain_row(kind: type) -> Coder:
    def read(value: Any) -> tuple[Any, ...]:
        if not {kind}.issuperset(map(type, _items(value))):
            raise _refused(value, f"a list of {kind.__name__}")
        return tuple(value)

    return Coder(_as_it_is, read)


def _columns(kind: Any) -> Coder:
    """Code a sequence of named tuples of one class, by columns."""
    coders = [_row(hint) for hint in get_type_hints(kind).values()]

    def write(values: Sequence[Any]) -> list[Any]:
        columns = zip(*values, strict=True) if values else [()] * len(coders)
        return [coder.write(column) for coder, column in zip(coders, columns, strict=True)]

    def read(value: Any) -> tuple[Any, ...]:
        columns = [coder.read(column) for coder, column in zip(coders, _items(value, len(coders)), strict=True)]
        return tuple(map(kind._make, zip(*columns, strict=True)))

    return Coder(write, read)


def _record(
    hints: Sequence[Any], make: Callable[[list[Any]], Any], get: Callable[[Any], Sequence[Any]] = tuple
) -> Coder:
    """Code one value of each kind, in order; `get` takes them from a value that is no tuple."""
    coders = [_coder(hint) for hint in hints]

    def write(value: Any) -> list[Any]:
        return [coder.write(item) for coder, item in zip(coders, get(value), strict=True)]

    def read(value: Any) -> Any:
        return make([coder.read(item) for coder, item in zip(coders, _items(value, len(coders)), strict=True)])

    return Coder(write, read)


def _dataclass(kind: type) -> Coder:
    hints, names = get_type_hints(kind), [field.name for field in fields(kind) if field.compare]
    return _record(
        [hints[name] for name in names],
        make=lambda values: kind(**dict(zip(names, values, strict=True))),
        get=lambda value: [getattr(value, name) for name in names],
    )


def _pairs(key: Coder, one: Coder) -> Coder:
    def write(values: Mapping[Any, Any]) -> list[Any]:
        return [(key.write(k), one.write(value)) for k, value in values.items()]

    def read(value: Any) -> dict[Any, Any]:
        return {key.read(k): one.read(item) for k, item in (_items(pair, 2) for pair in _items(value))}

    return Coder(write, read)


def _union(hints: Sequence[Any]) -> Coder:
    kinds = [hint for hint in hints if hint is not NoneType]
    coder = _coder(kinds[0]) if len(kinds) == 1 else _named(kinds)
    return coder if len(kinds) == len(hints) else _or_nothing(coder)


def _or_nothing(coder: Coder) -> Coder:
    def write(value: Any) -> Any:
        return None if value is None else coder.write(value)

    return Coder(write, lambda value: None if value is None else coder.read(value))


def _named(hints: Sequence[Any]) -> Coder:
    """Code a value of one of several classes, with the class's name."""
    coders = {get_origin(hint) or hint: _coder(hint) for hint in hints}
    by_name = {kind.__name__: coder for kind, coder in coders.items()}

    def write(value: Any) -> tuple[str, Any]:
        if type(value) not in coders:
            raise TypeError(f"{type(value).__name__} is none of {', '.join(by_name)}")
        return type(value).__name__, coders[type(value)].write(value)

    def read(value: Any) -> Any:
        name, inside = _items(value, 2)
        if not isinstance(name, str) or name not in by_name:
            raise _refused(name, f"one of {', '.join(by_name)}")
        return by_name[name].read(inside)

    return Coder(write, read)
