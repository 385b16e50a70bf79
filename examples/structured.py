"""Structured output: JSON of a schema, a choice, a pattern. Needs the extra `grammar`.

python examples/structured.py
"""

import json

from specbranch import LLM, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "languages": {"type": "array", "items": {"enum": ["English", "French", "Italian"]}, "maxItems": 3},
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}


def asked(llm: LLM, question: str, **constraint: object) -> str:
    return llm.chat([{"role": "user", "content": question}], SamplingParams(max_tokens=200, **constraint)).text


with LLM(warm_up="lazy") as llm:
    print(json.loads(asked(llm, "Describe Ada Lovelace, who spoke English and French.", json_schema=PERSON)))
    print(asked(llm, "Is Paris the capital of France?", choice=("yes", "no")))
    print(asked(llm, "When did the French Revolution begin?", regex=r"\d{1,2} (June|July) 1\d{3}"))
