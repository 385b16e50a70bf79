"""Check clients of the OpenAI API against a running server, each case streamed and not.

The client "http" is plain HTTP, with the cases of `compatibility_cases.py`; the others are libraries.
A library that is not installed is left out, with a sentence. Answers are checked for structure: calls with arguments of
their schema, JSON of a class, words after a tool's result. So any model will do whose chat template takes tools. Exits
with 1 if a case fails. The last line is JSON: client, case, and what came of it. Start `specbranch serve` first.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import sys
import time
import traceback
import urllib.request

from client_cases import CLIENTS, Case, Noted, Server
from compatibility_cases import HTTP_CASES

ALL: dict[str, dict[str, Case]] = {"http": HTTP_CASES, **CLIENTS}
PACKAGES = {"agents": "openai-agents"}  # where the module has another name


def main() -> None:
    """Run the cases and print."""
    given = _options()
    server = Server(given.url.rstrip("/"), given.model or _served(given.url))
    found: dict[str, dict[str, str]] = {}
    for client in given.clients:
        package = PACKAGES.get(client, client)
        if importlib.util.find_spec(client) is None:
            print(f"{package} is not installed: its cases are left out. pip install {package}")
            continue
        print(package, "" if client == "http" else importlib.metadata.version(package))
        found[client] = {
            f"{name}, {'streamed' if stream else 'whole'}": _outcome(name, case, server, stream, given.debug)
            for name, case in ALL[client].items()
            for stream in (False, True)
            if given.only in name
        }
    print(json.dumps(found))
    sys.exit(not all(one.startswith("passed") for cases in found.values() for one in cases.values()))


def _outcome(name: str, case: Case, server: Server, stream: bool, debug: bool) -> str:
    """Run a case; return "passed", or what went wrong."""
    started = time.perf_counter()
    try:
        case(server, stream)
        said = "passed"
    except Noted as note:
        said = f"passed, but {note}"
    except Exception as error:  # whatever a client raises is what it made of the answer
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if debug:
            traceback.print_exc()
    way = "streamed" if stream else "whole"
    print(f"  {name:42} {way:9} {said} ({time.perf_counter() - started:.0f} s)", flush=True)
    return said


def _served(url: str) -> str:
    with urllib.request.urlopen(f"{url.rstrip('/')}/v1/models") as answer:
        return str(json.load(answer)["data"][0]["id"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the running server")
    parser.add_argument("--model", help="its model's name; default: the first one that it lists")
    parser.add_argument("--clients", nargs="+", default=list(ALL), choices=list(ALL))
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--debug", action="store_true", help="print the traceback of a case that fails")
    return parser.parse_args()


if __name__ == "__main__":
    main()
