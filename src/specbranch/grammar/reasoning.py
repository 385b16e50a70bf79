"""A grammar behind reasoning: free text between two markers, then what the grammar wants.

Owns this composition, in Lark as llguidance reads it. The grammar is on from the byte behind the closing marker, also
within a token. So a state still depends on the answer's tokens alone, wherever in a block the boundary lies. Invariant:
the markers are those that the parser of answers looks for (`text/tools/reasoning.py`), spelled or as one token.
"""

from __future__ import annotations

import json
from typing import Any

from specbranch.grammar.lark_text import AddedId, escaped, marker, without

BLANKS = r"[ \t\r\n]{1,8}"  # between reasoning and what follows it; without a bound, a model that is unsure goes on


def behind_reasoning(grammar: str, opening: str, closing: str, added_id: AddedId) -> str:
    """Return a grammar that begins behind reasoning; `opening` is "" if the prompt has opened it."""
    thoughts = f"thoughts: {marker(opening, added_id)} rest" if opening else ""
    start = "@answer | (thoughts BLANKS?)+ @answer" if opening else "rest BLANKS? @answer"
    whole = f"%llguidance {{}}\nstart: {start}\n{thoughts}\n{_rest(closing, added_id)}\nBLANKS: /{BLANKS}/\n"
    return json.dumps({"grammars": [{"name": "whole", "lark_grammar": whole}, *_named(grammar)]})


def _rest(closing: str, added_id: AddedId) -> str:
    """Return the rules of reasoning up to its end."""
    if added_id(closing) is None:
        return f"rest[lazy]: /(?s:.*){escaped(closing)}/"
    return f"rest: THOUGHT {marker(closing, added_id)}\nTHOUGHT: {without(closing)}"


def _named(grammar: str) -> list[dict[str, Any]]:
    """Return a grammar by the name of "answer", with those that it refers to."""
    several = json.loads(grammar)["grammars"] if grammar.startswith('{"grammars"') else [{"lark_grammar": grammar}]
    first, *others = several
    return [{**first, "name": "answer"}, *others]
