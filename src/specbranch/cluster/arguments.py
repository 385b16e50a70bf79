"""Arguments of a Serve config file: those of `LLM`, of the server and of the replicas, in one mapping.

Owns who takes which name. Invariant: an unknown name is refused before anything is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specbranch.cluster.replica import EngineArguments
from specbranch.cluster.settings import Scale
from specbranch.config import LoadOptions
from specbranch.errors import BadParameter, unknown
from specbranch.serve.settings import ServerSettings

ENGINE_NAMES = ("pair", "target", "draft", "device", "dtype", "executor", "speculative")


def parsed(arguments: dict[str, Any]) -> tuple[EngineArguments, ServerSettings, Scale]:
    """Sort arguments by who takes them; refuse unknown ones."""
    kinds: dict[str, dict[str, Any]] = {"engine": {}, "options": {}, "server": {}, "scale": {}}
    for name, value in arguments.items():
        for kind in _takers(name):
            kinds[kind][name] = value
    engine = EngineArguments({**kinds["engine"], "options": LoadOptions.from_dict(kinds["options"])})
    server = _server(kinds["server"])
    if not arguments.get("without_keys") and server.keys is None:
        said = "Ray's proxy may be reached by others, and there are no keys. Name a file (keys: FILE), made with"
        raise BadParameter(f"{said} `specbranch serve --keys FILE --new-key NAME`; or say without_keys: true.")
    return engine, server, Scale(**kinds["scale"])


def _server(values: dict[str, Any]) -> ServerSettings:
    """Return the settings of the server; a file has texts and lists for paths and tuples."""
    keys, hosts = values.get("keys"), values.get("allowed_hosts", ())
    typed = {"keys": None if keys is None else Path(keys), "allowed_hosts": tuple(hosts)}
    return ServerSettings(**{"host": "0.0.0.0", **values, **typed})


def _takers(name: str) -> list[str]:
    """Return who takes an argument; several may, as of max_batch."""
    if name == "without_keys":
        return []
    known = {
        "engine": ENGINE_NAMES,
        "options": LoadOptions.__dataclass_fields__,
        "server": ServerSettings.__dataclass_fields__,
        "scale": Scale.__dataclass_fields__,
    }
    found = [kind for kind, names in known.items() if name in names]
    if not found:
        raise unknown("argument", name, [one for names in known.values() for one in names])
    return found
