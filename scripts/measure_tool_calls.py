"""Measure how often a served model calls a function with valid arguments, on twenty simple prompts.

Each prompt is asked greedily with every function on offer, with `tool_choice` "required" and with "auto". An answer is
valid if `jsonschema` accepts the arguments of all its calls. It is right if its first call is of the prompt's function.
Exits with 1 if "required" gives fewer than 19 valid calls. The last line is JSON. Start `specbranch serve` first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx
from jsonschema import Draft202012Validator
from tool_call_prompts import CASES, FUNCTIONS, Case

MOST_TOKENS = 200
ENOUGH = 19  # valid calls of the twenty
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in FUNCTIONS}


@dataclass(frozen=True)
class Found:
    """What came of one prompt."""

    called: bool
    valid: bool
    right: bool
    said: str


def main() -> None:
    """Ask, count and print."""
    given = _options()
    counts: dict[str, Counter[str]] = {}
    with httpx.Client(base_url=given.url, timeout=600) as http:
        for choice in given.choices:
            counts[choice] = Counter()
            for case in CASES:
                found = _asked(http, case, choice, given.parallel, given.strict)
                counts[choice].update({name: int(getattr(found, name)) for name in ("called", "valid", "right")})
                mark = "right" if found.right else "valid" if found.valid else "called" if found.called else "none"
                print(f"{choice:9} {mark:6} {case.prompt[:48]:48} {' '.join(found.said.split())[:110]}", flush=True)
    for choice, counted in counts.items():
        print(f"{choice}: of {len(CASES)} " + ", ".join(f"{counted[name]} {name}" for name in counted))
    print(json.dumps({choice: dict(counted) for choice, counted in counts.items()}))
    sys.exit("required" in counts and counts["required"]["valid"] < ENOUGH)


def _asked(http: httpx.Client, case: Case, choice: str, parallel: bool, strict: bool) -> Found:
    talk = [{"role": "user", "content": case.prompt}]
    tools = [{**one, "function": {**one["function"], "strict": strict}} for one in FUNCTIONS]
    offered = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
    body = {"messages": talk, "temperature": 0, "max_tokens": MOST_TOKENS, **offered}
    answer = http.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        sys.exit(f"{http.base_url} answered {answer.status_code}: {answer.text[:300]}")
    message = answer.json()["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    said = "; ".join(f"{one['name']}{one['arguments']}" for one in calls) or repr(message["content"])
    valid = bool(calls) and all(map(_is_valid, calls))
    return Found(bool(calls), valid, valid and calls[0]["name"] == case.function, said)


def _is_valid(call: dict[str, Any]) -> bool:
    """Return True if a call's arguments are what its function describes."""
    try:
        arguments = json.loads(call["arguments"])
    except ValueError:
        return False
    return call["name"] in SCHEMAS and Draft202012Validator(SCHEMAS[call["name"]]).is_valid(arguments)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the running server")
    parser.add_argument("--choices", nargs="+", default=["required", "auto"], choices=["required", "auto"])
    parser.add_argument("--parallel", action="store_true", help="let an answer have several calls")
    parser.add_argument("--strict", action="store_true", help="hold the calls of auto to their schemas, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
